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
from xcompat.embeddings.embed import EmbeddingCache, cache_name, embed_images, embed_texts
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.models.stored import StoredModel

if TYPE_CHECKING:
    import datasets

NO_CAPTIONS = "contains image embeddings by id and cannot embed captions"
"""Error for a stored model that would have to embed captions."""
NO_TEXTS = "contains image embeddings by id and cannot embed texts"
"""Error for a stored model that would have to embed queries and passages."""


def cached_texts(embedder: Embedder, texts: datasets.Dataset, cache_dir: Path, shard_rows: int = 65536) -> EmbeddingCache:
    """Embed a text corpus, or open its cache.

    Args:
        embedder: the frozen model.
        texts: from :func:`xcompat.data.load_texts`.
        cache_dir: cache folder.
        shard_rows: texts per shard.

    Returns:
        A row per text.
    """
    digest = texts._fingerprint
    return embed_texts(embedder, texts[TEXT], cache_dir / cache_name("texts", embedder, digest), digest, shard_rows=shard_rows)


def cached_captions(embedder: Embedder, captions: list[str], cache_dir: Path) -> EmbeddingCache:
    """Embed captions, a row each."""
    digest = hashlib.sha256("\0".join(captions).encode()).hexdigest()
    return embed_texts(embedder, captions, cache_dir / cache_name("captions", embedder, digest), digest)


def cached_images(
    embedder: FrozenModel,
    pairs: datasets.Dataset,
    cache_dir: Path,
    max_bad_share: float = 0.01,
    views: Sequence[View] = (),
) -> EmbeddingCache:
    """Embed every image, or its first caption if the model reads captions.

    Unreadable images become rows of NaN; too many (``max_bad_share``) raise. ``views`` are embedded instead of plain images, each
    view of all images in its own cache.
    """
    if views:
        return StackedCaches([_open_cache(embedder, pairs, cache_dir, max_bad_share, view) for view in views])
    return _open_cache(embedder, pairs, cache_dir, max_bad_share, None)


def _open_cache(
    embedder: FrozenModel, pairs: datasets.Dataset, cache_dir: Path, max_bad_share: float, view: View | None
) -> EmbeddingCache:
    if embedder.reads == "captions":
        model = embedder.require_model(NO_CAPTIONS)
        return cached_captions(model, _first_captions(pairs, model), cache_dir)
    digest = images_digest(pairs) if view is None else view.digest(images_digest(pairs))
    if isinstance(embedder, StoredModel):  # stored embeddings can be other than those of the model, e.g. compressed
        digest = hashlib.sha256(f"{digest} {embedder.digest}".encode()).hexdigest()
    folder = cache_dir / cache_name("images", embedder, digest)
    return embed_images(embedder, pairs, folder, digest, max_bad_share=max_bad_share, view=view)


def _first_captions(pairs: datasets.Dataset, embedder: Embedder) -> list[str]:
    captions = [captions_of(value) for value in pairs[CAPTION]]
    missing = [row for row, texts in enumerate(captions) if not texts]
    if missing:
        raise XcompatError(
            f"{embedder.name} reads captions, but {len(missing)} of {len(captions)} images have none, e.g. "
            f"{pairs[missing[0]][ID]!r}; add captions, or remove these images"
        )
    return [texts[0] for texts in captions]


def images_digest(pairs: datasets.Dataset) -> str:
    """Return a digest of a data set's images, which changes with their files.

    Args:
        pairs: from :func:`xcompat.data.load_pairs`.

    Returns:
        SHA-256 of the data set's fingerprint, external files (size, time) and orientation rules, 64 hexadecimal digits.
    """
    import pyarrow.compute as pc

    images = pairs.data.column(IMAGE)
    outside = pc.filter(pc.struct_field(images, "path"), pc.is_null(pc.struct_field(images, "bytes")))
    stamps = file_stamps(path for path in outside.to_pylist() if path and Path(path).exists())
    return hashlib.sha256(json.dumps([pairs._fingerprint, stamps, ORIENTATION]).encode()).hexdigest()
