"""Embedding of a folder of images into a folder of embeddings."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np

from xcompat.core.distributed import barrier, device, is_main_process, process_state
from xcompat.core.files import write_array
from xcompat.core.ownership import owned_path, require_replaceable
from xcompat.core.progress import console, literal, silence_libraries
from xcompat.data.sources import files_digest
from xcompat.embeddings.embed import cache_name, embed_images
from xcompat.models.embedder import load_embedder
from xcompat.retrieval.originals import UNREADABLE, Images, load_images

MADE_BY = "embed"
BLOCK = 65_536
"""Rows to convert at a time."""


def embed_image_folder(source: Path, model: str, out: Path) -> None:
    """Write ``image_embeds.npy`` (float16) and ``image_ids.txt`` of a folder of images. An interrupted run continues.

    Args:
        source: a folder as in :func:`~xcompat.data.load_pairs`. Ids are paths relative to it.
        model: run folder, checkpoint or model name.
        out: output folder. Only a folder of this command is replaced.

    Raises:
        XcompatError: the folder has no images, too many are unreadable, or the output folder has other content.
    """
    process_state()
    silence_libraries()
    require_replaceable(out, MADE_BY, None, [source])
    images = Images(load_images(source))
    embedder = load_embedder(model, device())
    images.require(embedder)
    digest = hashlib.sha256("\0".join([files_digest(str(source)) or "", *images.ids]).encode()).hexdigest()
    caches = out.with_name(f"{out.name}.cache")
    cache = caches / cache_name("images", embedder, digest)
    cached = embed_images(embedder, images.dataset, cache, digest, max_bad_share=UNREADABLE)
    if is_main_process():
        blocks = range(0, len(images.ids), BLOCK)
        embeds_ND = np.concatenate([cached[start : start + BLOCK].astype(np.float16) for start in blocks])  # as in the cache
        rows_n = np.flatnonzero(np.isfinite(embeds_ND[:, 0]))  # an unreadable image has a row of NaN
        ids = [images.ids[row] for row in rows_n.tolist()]
        with owned_path(out, MADE_BY, None, [source], {"model": str(embedder.fingerprint)}) as temporary:
            temporary.mkdir()
            write_array(temporary / "image_embeds.npy", embeds_ND[rows_n])
            (temporary / "image_ids.txt").write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")
        shutil.rmtree(caches)
        skipped = f", {len(images.ids) - len(ids):,} cannot be read" if len(ids) < len(images.ids) else ""
        console.print(f"[green]✓[/] {literal(out)}: {len(ids):,} embeddings of {embedder.dim} dimensions{skipped}")
    barrier()
