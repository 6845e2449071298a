"""The whole job on random vectors in seconds: an old index, a map, and new queries that search the index."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.core.files import write_array
from xcompat.core.progress import console, literal
from xcompat.mapping.commands import map_embeddings
from xcompat.mapping.request import MapRequest
from xcompat.models.embedder import load_checkpoint

ITEMS, FACTS = 1000, 24
MODELS = {"old": (16, 0.7), "new": (48, 0.2)}
"""Model -> dimension of its embeddings, and noise: the new model sees more."""


def run_demo(out: Path) -> float:
    """Write random embeddings of two models, fit a map, and search an index of the old one with texts of the new one.

    Args:
        out: output folder, which must not exist.

    Returns:
        Share of texts that find their image first.

    Raises:
        XcompatError: the folder exists.
    """
    if out.exists():
        raise XcompatError(f"{out} exists; choose another folder with --out, or delete it")
    embeds = write_models(out)
    index, ids = out / "index.faiss", out / "old" / "image_ids.txt"
    stored = faiss.IndexFlatIP(MODELS["old"][0])
    stored.add(embeds["old"][0])
    faiss.write_index(stored, str(index))
    if not map_embeddings(MapRequest(out / "old", out / "new", out / "map", old_model="old-model-of-the-demo")):
        raise AssertionError("the demo's data no longer give a safe map")
    with torch.inference_mode():
        queries_QD = load_checkpoint(str(out / "map")).to_space(torch.from_numpy(embeds["new"][1])).numpy()
    share = float(np.mean(stored.search(queries_QD, 1)[1][:, 0] == np.arange(ITEMS)))
    console.print(f"[green]✓[/] {share:.0%} of {ITEMS:,} texts of the new model find their image first in the old index. Try it:")
    queries = out / "new" / "text_embeds.npy"
    command = f"xcompat gallery search {index} --ids {ids} --queries {queries} --model {out / 'map'} --json"
    console.print(literal(command), soft_wrap=True)
    return share


def write_models(out: Path) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Write the embeddings of images and texts by both models, and return them by model."""
    draw, embeds = np.random.default_rng(0), {}
    things_NF = draw.standard_normal((ITEMS, FACTS))
    for name, (dim, noise) in MODELS.items():
        folder, space_FD = out / name, draw.standard_normal((FACTS, dim))
        folder.mkdir(parents=True)
        seen = [normalise_rows((things_NF + noise * draw.standard_normal(things_NF.shape)) @ space_FD) for _ in range(2)]
        for kind, rows_ND in zip(("image", "text"), seen, strict=True):
            write_array(folder / f"{kind}_embeds.npy", rows_ND)
            (folder / f"{kind}_ids.txt").write_text("".join(f"thing-{row}\n" for row in range(ITEMS)), encoding="utf-8")
        embeds[name] = seen[0], seen[1]
    return embeds
