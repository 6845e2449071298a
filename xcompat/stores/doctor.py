"""Find out whether a model made the vectors of a store: embed what a sample of its rows hold again and compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets as hf
import numpy as np
import pyarrow as pa

from xcompat.core.errors import XcompatError
from xcompat.data.images import UnusableSampleError
from xcompat.data.schema import ID, IMAGE, TEXT
from xcompat.models.embedder import Embedder
from xcompat.retrieval.doctor import SAMPLE, Finding, Stored, judged
from xcompat.retrieval.originals import Originals, Pictures, Texts
from xcompat.stores.base import UNKNOWN, Rows, Store
from xcompat.stores.embedding import contained
from xcompat.stores.gallery import GalleryStore
from xcompat.stores.padding import is_padded


@dataclass(frozen=True)
class Held:
    """Where rows hold what their vectors were made of.

    Args:
        content: the field with their text, or their picture: bytes, or the path of a file.
        pictures: the folder that paths of pictures begin at; None where the field holds texts.
    """

    content: str
    pictures: Path | None = None

    def originals(self, rows: Rows) -> tuple[Originals, list[int]]:
        """Return what rows hold, and which of them hold anything."""
        kept, values = list[int](), list[Any]()
        for row, value in enumerate(rows.contents or []):
            try:
                values.append(contained(value, self.pictures))
                kept.append(row)
            except UnusableSampleError:
                continue
        held = {ID: [rows.ids[row] for row in kept], TEXT if self.pictures is None else IMAGE: values}
        dataset = hf.Dataset(pa.table(held))
        return Texts(dataset) if self.pictures is None else Pictures(dataset), kept


def examine_store(store: Store, embedder: Embedder, held: Held | None, sample: int = SAMPLE) -> Finding:
    """Embed a sample of a store's rows again, and find out which vectors of the searched space the model made.

    Args:
        store: the store.
        embedder: the model; where nobody has said which one made the space, it is taken for the one that is to be.
        held: what is embedded; None to compare dimensions alone.
        sample: number of rows.

    Returns:
        The finding; ``looked_at`` is 0 where nothing could be compared, and the note says why.

    Raises:
        XcompatError: the store is a gallery, or the model embeds no such contents.
    """
    if isinstance(store, GalleryStore):
        raise XcompatError(f"{store.uri} is a gallery: name its folder, {store.gallery.path}, and what it was built from")
    own = store.spaces()[store.space]
    found = Finding(own.fingerprint or UNKNOWN, store.count(store.space), claimed=own.fingerprint in (None, embedder.fingerprint))
    if own.dim not in (None, embedder.dim) and not is_padded(store, embedder.dim):
        return replace(found, note=f"of {own.dim} dimensions, and {embedder.name} makes {embedder.dim}")
    if held is None or not found.items:
        return replace(found, note="no field was named that holds what they were made of" if found.items else "there are none")
    rows, _ = store.sample(sample, store.space, held.content)
    originals, kept = held.originals(rows)
    originals.require(embedder)
    if not kept:
        return replace(found, note=f"no row that was read holds {originals.kind} in {held.content}")
    return judged(found, Stored(originals, np.arange(len(kept)), rows.vectors_ND[kept, : embedder.dim]), embedder)
