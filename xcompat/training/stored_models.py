"""Models of recipes that are known only by stored embeddings: files, folders, faiss indexes, galleries and databases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.encoders import MODEL_FILES
from xcompat.mapping.sides import kinds_in
from xcompat.stores.places import (
    Place,
    Reading,
    StoreAddress,
    find_ids_beside,
    find_stored_model,
    is_gallery,
    is_index,
    lacks_ids,
    parse_place,
    read_named,
)
from xcompat.vectors import Columns, formats

if TYPE_CHECKING:
    import torch

    from xcompat.encoders import EncoderSource
    from xcompat.models.frozen import FrozenModel
    from xcompat.models.stored import StoredModel


def is_stored(name: str) -> bool:
    """Return whether a name is a place with embeddings, or a folder with prototypes, not a model."""
    return formats.is_stored(name) or _is_place(parse_place(name))


def _is_place(place: Place) -> bool:
    """Return whether a place holds embeddings and is not a folder with ``image_embeds``."""
    if isinstance(place, StoreAddress) or is_index(place) or is_gallery(place):
        return True
    if place.is_file():
        return place.name.endswith(formats.SUFFIXES)
    return formats.is_table(place) and not kinds_in(place) and not any((place / file).is_file() for file in MODEL_FILES)


def require_stored(name: str) -> bool:
    """Return :func:`is_stored`, judged by the names of files.

    Raises:
        XcompatError: embeddings have no ids, or an address has no known kind of store.
    """
    place = parse_place(name)
    if isinstance(place, StoreAddress):
        from xcompat.stores import require_kind

        require_kind(name)
    elif place.name.endswith(formats.ARRAY) and place.is_file() and find_ids_beside(place) is None:
        raise lacks_ids(place)
    return _is_place(place) or (isinstance(place, Path) and formats.check_stored(place))


def load_stored(source: EncoderSource | str) -> StoredModel:
    """Load stored embeddings. The ids of an index or an array are in it, or in a file beside it.

    Args:
        source: their place, or their place and columns.

    Raises:
        XcompatError: they are unusable, or have no ids.
    """
    from xcompat.models.stored import StoredModel

    name, columns = source if isinstance(source, str) else source.name, Columns()
    if not isinstance(source, str):
        columns = Columns(source.id_column, source.vector_name)
    place = parse_place(name)
    if isinstance(place, Path) and not _is_place(place):
        return StoredModel(place)
    known = find_stored_model(place)
    named = Path(place.stem) if isinstance(place, StoreAddress) else place
    return StoredModel(named, read_named(place, Reading(columns=columns)), known[0] if known is not None else None)


def load_frozen(source: EncoderSource | str, device: torch.device | str = "cpu") -> FrozenModel:
    """Load a frozen model: a model that embeds, or stored embeddings.

    Args:
        source: as in :func:`~xcompat.models.embedder.load_embedder`, or the place of the embeddings.
        device: the model's device.
    """
    from xcompat.models.embedder import load_embedder

    name = source if isinstance(source, str) else source.name
    return load_stored(source) if is_stored(name) else load_embedder(source, device)
