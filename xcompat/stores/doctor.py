"""Check of a store's vectors against a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import datasets as hf
import numpy as np
import pyarrow as pa

from xcompat.core.errors import XcompatError
from xcompat.data.images import UnusableSampleError
from xcompat.data.schema import ID, IMAGE, TEXT
from xcompat.models.embedder import Embedder
from xcompat.retrieval.doctor import SAMPLE, Finding, StoredSample, judge_embeddings
from xcompat.retrieval.originals import Images, Originals, Texts
from xcompat.stores.base import UNKNOWN, Rows, Store
from xcompat.stores.embedding import parse_content
from xcompat.stores.gallery import GalleryStore
from xcompat.stores.padding import is_padded


@dataclass(frozen=True)
class SourceField:
    """Source data for the vectors.

    Args:
        content: field with a text, image bytes or an image path.
        images: base folder for image paths, or None for texts.
    """

    content: str
    images: Path | None = None

    def originals(self, rows: Rows) -> tuple[Originals, list[int]]:
        """Return the rows' contents, and the numbers of rows with contents."""
        kept, values = list[int](), list[object]()
        for row, value in enumerate(rows.contents or []):
            try:
                values.append(parse_content(value, self.images))
                kept.append(row)
            except UnusableSampleError:
                continue
        held = {ID: [rows.ids[row] for row in kept], TEXT if self.images is None else IMAGE: values}
        dataset = hf.Dataset(pa.table(held))
        return Texts(dataset) if self.images is None else Images(dataset), kept


def examine_store(store: Store, embedder: Embedder, held: SourceField | None, sample: int = SAMPLE) -> Finding:
    """Re-embed a sample from a store, and find the model's vectors.

    Args:
        store: the store.
        embedder: the model. If the store records none, it is the expected model.
        held: source data, or None to compare only dimensions.
        sample: number of rows.

    Returns:
        The finding. If nothing could be compared, ``looked_at`` is 0 and the note has the reason.

    Raises:
        XcompatError: the store is a gallery, or the model does not support the contents.
    """
    if isinstance(store, GalleryStore):
        raise XcompatError(f"{store.uri} is a gallery; use its folder {store.gallery.path} and its source data")
    own = store.spaces()[store.space]
    found = Finding(own.fingerprint or UNKNOWN, store.count(store.space), claimed=own.fingerprint in (None, embedder.fingerprint))
    if own.dim not in (None, embedder.dim) and not is_padded(store, embedder.dim):
        return replace(found, note=f"{own.dim} dimensions, but {embedder.name} has {embedder.dim}")
    if held is None or not found.items:
        return replace(
            found, note="no field with the source texts or images was given" if found.items else "there are no vectors"
        )
    rows, _ = store.sample(sample, store.space, held.content)
    originals, kept = held.originals(rows)
    originals.require(embedder)
    if not kept:
        return replace(found, note=f"no sampled row has {originals.kind} in {held.content}")
    stored = StoredSample(originals.ids, np.arange(len(kept)), rows.vectors_ND[kept, : embedder.dim])
    return judge_embeddings(found, stored, originals, embedder)
