"""Models of recipes that are known only by stored embeddings: folders, faiss indexes and galleries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.core.errors import XcompatError
from xcompat.stores.places import is_gallery, is_index, read_gallery, read_index
from xcompat.vectors import formats

if TYPE_CHECKING:
    import torch

    from xcompat.encoders import EncoderSource
    from xcompat.models.frozen import FrozenModel
    from xcompat.models.stored import StoredModel


def is_stored(name: str) -> bool:
    """Return whether a name is a folder of embeddings or prototypes, a faiss index or a gallery, not a model."""
    return formats.is_stored(name) or is_index(Path(name)) or is_gallery(Path(name))


def require_stored(name: str) -> bool:
    """Return :func:`is_stored`, judged by the names of files.

    Raises:
        XcompatError: embeddings have no ids.
    """
    path = Path(name)
    return is_index(path) or is_gallery(path) or formats.check_stored(path)


def load_stored(name: str) -> StoredModel:
    """Load stored embeddings. The ids of an index are in it, or in a file beside it.

    Raises:
        XcompatError: they are unusable, or an index has no ids.
    """
    from xcompat.models.stored import StoredModel
    from xcompat.retrieval import Gallery
    from xcompat.retrieval.index_gallery import find_ids

    path = Path(name)
    if is_index(path):
        vectors = read_index(path, find_ids(path))
        if vectors.ids is None:
            raise XcompatError(f"{path} has no ids; write the id of each vector to {path.with_suffix('.ids.txt').name} beside it")
        return StoredModel(path, vectors)
    if is_gallery(path):
        with Gallery.open(path) as gallery:
            return StoredModel(path, read_gallery(path), gallery.manifest.versions[0].fingerprint)
    return StoredModel(path)


def load_frozen(source: EncoderSource | str, device: torch.device | str = "cpu") -> FrozenModel:
    """Load a frozen model: a model that embeds, or stored embeddings.

    Args:
        source: as in :func:`~xcompat.models.embedder.load_embedder`, or the place of the embeddings.
        device: the model's device.
    """
    from xcompat.models.embedder import load_embedder

    name = source if isinstance(source, str) else source.name
    return load_stored(name) if is_stored(name) else load_embedder(source, device)
