"""Embedding of images or texts, which are not in a table of an engine, into a folder of embeddings."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from xcompat.core.distributed import barrier, device, is_main_process, process_state
from xcompat.core.files import write_blocks
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.core.progress import console, literal, silence_libraries
from xcompat.data.schema import TEXT
from xcompat.data.sources import files_digest
from xcompat.embeddings.embed import cache_name, embed_images, embed_texts
from xcompat.models.embedder import load_embedder
from xcompat.retrieval.originals import UNREADABLE, Images, load_originals

MADE_BY = "embed"
BLOCK = 65_536
"""Rows to convert at a time."""


def embed_originals(source: str, model: str, out: Path, column: str | None = None, id_column: str | None = None) -> None:
    """Write ``image_embeds.npy`` or ``text_embeds.npy`` (float16) and the ids beside it. An interrupted run continues.

    Args:
        source: images or texts as in :func:`~xcompat.retrieval.originals.load_originals`.
        model: run folder, checkpoint or model name.
        out: output folder. Only a folder of this command is replaced.
        column: column with texts, or None.
        id_column: column with the ids of texts, or None.

    Raises:
        XcompatError: there are no images or texts, too many are unreadable, or the output folder has other content.
    """
    process_state()
    silence_libraries()
    inputs = [place for place in [Path(source)] if place.exists()]
    require_replaceable(out, MADE_BY, None, inputs)
    chosen: dict[str, Any] = {"text_column": column, "id_column": id_column}
    items = load_originals(source, **{name: value for name, value in chosen.items() if value is not None})
    embedder = load_embedder(model, device())
    items.require(embedder)
    digest = hashlib.sha256("\0".join([files_digest(source) or "", *items.ids]).encode()).hexdigest()
    caches = out.with_name(f"{out.name}.cache")
    cache = caches / cache_name(items.kind, embedder, digest)
    if isinstance(items, Images):
        cached = embed_images(embedder, items.dataset, cache, digest, max_bad_share=UNREADABLE)
    else:
        cached = embed_texts(embedder, items.dataset[TEXT], cache, digest)
    if is_main_process():
        starts = range(0, len(items.ids), BLOCK)
        read_n = np.concatenate([np.isfinite(cached[start : start + BLOCK][:, 0]) for start in starts])  # NaN if unreadable
        ids = [name for name, is_read in zip(items.ids, read_n.tolist(), strict=True) if is_read]
        blocks = (cached[start : start + BLOCK][read_n[start : start + BLOCK]] for start in starts)
        kind = items.kind.removesuffix("s")
        with owned_path(out, MADE_BY, None, inputs, {"model": str(embedder.fingerprint)}) as temporary:
            temporary.mkdir()
            write_blocks(temporary / f"{kind}_embeds.npy", blocks, (len(ids), embedder.dim), "<f2")  # as in the cache
            (temporary / f"{kind}_ids.txt").write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")
        shutil.rmtree(caches)
        skipped = f", {len(items.ids) - len(ids):,} cannot be read" if len(ids) < len(items.ids) else ""
        console.print(
            f"[green]✓[/] {literal(out)}: {len(ids):,} embeddings of {embedder.dim} dimensions{skipped}", soft_wrap=True
        )
    barrier()
