"""Embedding caches, keyed by the model's fingerprint and the data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xcompat.core.errors import XcompatError
from xcompat.core.orientation import ORIENTATION
from xcompat.data import View
from xcompat.data.cache import file_stamps
from xcompat.data.schema import CAPTION, ID, IMAGE, TEXT, captions_of
from xcompat.embeddings.cache import StackedCaches
from xcompat.embeddings.embed import EmbeddingCache, embed_images, embed_texts
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel

if TYPE_CHECKING:
    import datasets

NO_CAPTIONS = "holds embeddings of images by their ids, and none of captions"
"""Error for a stored model that would have to embed captions."""
NO_TEXTS = "holds embeddings of images by their ids, and none of texts"
"""Error for a stored model that would have to embed queries and passages."""


def cached_texts(embedder: Embedder, texts: datasets.Dataset, cache_dir: Path, shard_rows: int = 65536) -> EmbeddingCache:
    """Embed a text corpus, or open what was embedded before.

    Args:
        embedder: the frozen model.
        texts: as :func:`xcompat.data.load_texts` returns it.
        cache_dir: folder of all caches.
        shard_rows: texts per shard, the unit of resuming.

    Returns:
        One row per text.
    """
    digest = texts._fingerprint
    return embed_texts(embedder, texts[TEXT], _folder(cache_dir, "texts", embedder, digest), digest, shard_rows=shard_rows)


def cached_captions(embedder: Embedder, captions: list[str], cache_dir: Path) -> EmbeddingCache:
    """Embed a list of captions, one row each."""
    digest = hashlib.sha256("\0".join(captions).encode()).hexdigest()
    return embed_texts(embedder, captions, _folder(cache_dir, "captions", embedder, digest), digest)


def cached_images(
    embedder: FrozenModel,
    pairs: datasets.Dataset,
    cache_dir: Path,
    max_bad_share: float = 0.01,
    views: Sequence[View] = (),
) -> EmbeddingCache:
    """Embed every image of the pairs, or its first caption if the model reads captions.

    An unreadable image is a row of NaN; a share of them above ``max_bad_share`` stops the run. With ``views`` these are embedded
    in place of the plain images, each into a cache of its own: first one view of all images, then the next.
    """
    if views:
        return StackedCaches([_cached(embedder, pairs, cache_dir, max_bad_share, view) for view in views])
    return _cached(embedder, pairs, cache_dir, max_bad_share, None)


def _cached(
    embedder: FrozenModel, pairs: datasets.Dataset, cache_dir: Path, max_bad_share: float, view: View | None
) -> EmbeddingCache:
    if embedder.reads == "captions":
        model = embedder.require_model(NO_CAPTIONS)
        return cached_captions(model, _first_captions(pairs, model), cache_dir)
    digest = images_digest(pairs) if view is None else view.digest(images_digest(pairs))
    folder = _folder(cache_dir, "images", embedder, digest)
    return embed_images(embedder, pairs, folder, digest, max_bad_share=max_bad_share, view=view)


def _first_captions(pairs: datasets.Dataset, embedder: Embedder) -> list[str]:
    captions = [captions_of(value) for value in pairs[CAPTION]]
    missing = [row for row, texts in enumerate(captions) if not texts]
    if missing:
        raise XcompatError(
            f"{embedder.name} reads captions, and {len(missing)} of {len(captions)} images have none, such as "
            f"{pairs[missing[0]][ID]!r}; add them, or leave these images out"
        )
    return [texts[0] for texts in captions]


def images_digest(pairs: datasets.Dataset) -> str:
    """Identify the images of a data set, so that a repaired or replaced file gives another digest.

    Args:
        pairs: as :func:`xcompat.data.load_pairs` returns it.

    Returns:
        SHA-256 of the data set's fingerprint, of the size and time of every file outside the data set, and of the way in which
        pictures are turned upright: 64 hexadecimal digits.
    """
    import pyarrow.compute as pc

    images = pairs.data.column(IMAGE)
    outside = pc.filter(pc.struct_field(images, "path"), pc.is_null(pc.struct_field(images, "bytes")))
    stamps = file_stamps(path for path in outside.to_pylist() if path and Path(path).exists())
    return hashlib.sha256(json.dumps([pairs._fingerprint, stamps, ORIENTATION]).encode()).hexdigest()


def _folder(cache_dir: Path, kind: str, embedder: FrozenModel, digest: str) -> Path:
    return cache_dir / f"{kind}-{embedder.fingerprint.digest[:16]}-{digest[:16]}"
