"""Complete example on random vectors: an old index, a map, and new queries that search the index."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.core.files import write_array
from xcompat.core.progress import Table, console, literal, silence_libraries, stage
from xcompat.evaluation.intervals import bootstrap_interval
from xcompat.evaluation.metrics import first_hit_ranks
from xcompat.mapping.fitting import FittedMap, fit_map

ITEMS, FACTS = 1000, 24
MODELS = {"old": (16, 0.7), "new": (48, 0.5)}
"""Model -> dimension of its embeddings, and noise: the new model is more accurate."""
ROWS = {
    "old/old": "old queries in the old index",
    "new/old": "mapped new queries in the old index",
    "new/new": "new queries in a re-embedded index",
}
Sides = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Model -> embeddings of images and of texts."""


def run_demo(out: Path) -> None:
    """Write random embeddings of two models, fit a map, and search an index of new items.

    Args:
        out: output folder, which must not exist.

    Raises:
        XcompatError: the folder exists.
    """
    if out.exists():
        raise XcompatError(f"{out} exists; choose another folder with --out, or delete it")
    silence_libraries()
    write_pairs(out / "train", 0, ITEMS)
    test = write_pairs(out / "test", ITEMS, 2 * ITEMS)
    index = faiss.IndexFlatIP(MODELS["old"][0])
    index.add(test["old"][0])
    faiss.write_index(index, str(out / "index.faiss"))
    with stage("fit a map"):
        fitted = fit_map(out / "train" / "old", out / "train" / "new", old_model="demo-old")
        fitted.save(out / "map")
    console.print(render_table(fitted, test))
    console.print(literal(repr(fitted)), soft_wrap=True)
    arguments = f"--ids {out}/test/old/text_ids.txt --queries {out}/test/new/text_embeds.npy --model {out}/map"
    console.print("Search the index, or see all candidates:")
    console.print(literal(f"xcompat gallery search {out}/index.faiss {arguments} --json"), soft_wrap=True)
    console.print(literal(f"xcompat map --old {out}/train/old --new {out}/train/new --old-model demo-old"), soft_wrap=True)


def render_table(fitted: FittedMap, test: Sides) -> Table:
    """Return R@1 of texts that search images of the test items, with 95 % bootstrap intervals."""
    (old_images, old_texts), (new_images, new_texts) = test["old"], test["new"]
    searches = ((old_texts, old_images), (fitted.to_space(new_texts), old_images), (new_texts, new_images))
    title = f"R@1 in percent, text to image, {ITEMS:,} new items, 95 % intervals"
    table = Table("query/gallery", "R@1", "", title=title, title_justify="left", box=SIMPLE_HEAD)
    for (name, meaning), (queries_QD, gallery_GD) in zip(ROWS.items(), searches, strict=True):
        hits_Q = (first_hit_ranks(queries_QD, gallery_GD, range(ITEMS), range(ITEMS)) == 0).astype(float)
        low, high = bootstrap_interval(hits_Q)
        table.add_row(name, f"{100 * hits_Q.mean():.1f} ({100 * low:.1f} to {100 * high:.1f})", meaning)
    return table


def write_pairs(folder: Path, first: int, end: int) -> Sides:
    """Write the embeddings of some images and their texts by both models, and return them."""
    draw, embeds = np.random.default_rng(0), {}
    things_NF = draw.standard_normal((2 * ITEMS, FACTS))
    for name, (dim, noise) in MODELS.items():
        (folder / name).mkdir(parents=True)
        space_FD = draw.standard_normal((FACTS, dim))
        both = [normalise_rows((things_NF + noise * draw.standard_normal(things_NF.shape)) @ space_FD) for _ in range(2)]
        for kind, rows_ND in zip(("image", "text"), both, strict=True):
            write_array(folder / name / f"{kind}_embeds.npy", rows_ND[first:end])
            ids = "".join(f"thing-{row}\n" for row in range(first, end))
            (folder / name / f"{kind}_ids.txt").write_text(ids, encoding="utf-8")
        embeds[name] = both[0][first:end], both[1][first:end]
    return embeds
