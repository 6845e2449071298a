"""`xcompat map` of stored vectors against what cannot be saved: reading them, and their products.

    python benchmarks/speed/map_vectors.py [--items 1000000] [--dim 768]

Old and new embeddings without labels, from `.npy` of float16 and of float32 to a written model, by the command, imports and all.
Beside it the bare sums in memory: XᵀX and XᵀY in float64, by blocks, twice 2·N·D² operations, of 65,536 rows and times as many.
Memory is the command's peak (VmHWM), pages of mapped files among it. A query is one embedding that the line maps.
With labels, the command tries all candidates on folds of the classes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from measuring import KEPT, Row, main, medians, run_command, timed

from xcompat.models.embedder import load_checkpoint

BLOCK, SAMPLE, QUERIES = 8192, 65_536, 1000
LABELLED, CLASSES, LATENT, OLD_DIM = 10_000, 1000, 128, 512


def write(file: Path, items: int, dim: int, dtype: str, seed: int) -> Path:
    """Write unit vectors block by block."""
    rows = np.lib.format.open_memmap(file, "w+", dtype, (items, dim))
    draw = np.random.default_rng(seed)
    for start in range(0, items, BLOCK):
        block = draw.standard_normal((min(BLOCK, items - start), dim), np.float32)
        rows[start : start + BLOCK] = block / np.linalg.norm(block, axis=1, keepdims=True)
    rows.flush()
    return file


def write_labelled(folder: Path, dim: int) -> list[object]:
    """Write pairs of classes that the new model sees more clearly, and return the options that name them."""
    draw = np.random.default_rng(0)
    labels_N = draw.integers(0, CLASSES, LABELLED)
    seen_NL = draw.standard_normal((CLASSES, LATENT))[labels_N] + 0.9 * draw.standard_normal((LABELLED, LATENT))
    for side, width, blur in (("old", OLD_DIM, 0.7), ("new", dim, 0.0)):
        view_NL = seen_NL + blur * draw.standard_normal(seen_NL.shape)
        rows_ND = np.tanh(view_NL @ draw.standard_normal((LATENT, width)) / LATENT**0.5)
        rows_ND += 0.3 * draw.standard_normal(rows_ND.shape)
        np.save(folder / f"{side}_labelled.npy", (rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)).astype(np.float32))
    labels = folder / "labels.txt"
    labels.write_text("".join(f"{label}\n" for label in labels_N), encoding="utf-8")
    return ["--old", folder / "old_labelled.npy", "--new", folder / "new_labelled.npy", "--labels", labels]


def sums(old: Path, new: Path) -> float:
    """Return the seconds that the bare sums of the first rows take."""
    sides = [torch.from_numpy(np.load(side, mmap_mode="r")[:SAMPLE].astype(np.float64)) for side in (new, old)]
    totals = [torch.zeros(sides[0].shape[1], side.shape[1], dtype=torch.float64) for side in sides]

    def add() -> None:
        for blocks in zip(*(side.split(BLOCK) for side in sides), strict=True):
            for total, block in zip(totals, blocks, strict=True):
                total.addmm_(blocks[0].T, block)

    add()
    return medians({"sums": add})["sums"] / len(sides[0])


def query(model_folder: Path, dim: int) -> Row:
    """Map queries one by one."""
    model = load_checkpoint(str(model_folder))
    asked = torch.nn.functional.normalize(torch.randn(QUERIES, 1, dim), dim=-1)

    def ours() -> None:
        with torch.inference_mode():
            for each in asked:
                model.to_space(each)

    def bare() -> None:
        with torch.inference_mode():
            for each in asked:
                each @ model.weight + model.bias

    ours(), bare()
    took = medians({"ours": ours, "bare": bare})
    return timed(f"a query of {dim} dimensions mapped, times {QUERIES:,}", "the bare product", "", took["ours"], took["bare"])


def measure(items: int = 1_000_000, dim: int = 768) -> list[Row]:
    """Measure the command on both precisions, a query, and the command with labels."""
    rows = []
    KEPT.mkdir(parents=True, exist_ok=True)  # on a disk, not in a temporary folder of memory
    with tempfile.TemporaryDirectory(dir=KEPT) as name:
        folder = Path(name)
        for dtype in ("float16", "float32"):
            old, new = (write(folder / f"{side}.npy", items, dim, dtype, seed) for seed, side in enumerate(("old", "new")))
            bare = sums(old, new) * items
            took, busy, peak = run_command(["map", "--old", old, "--new", new, "--out", folder / dtype, "--allow-worse"], folder)
            what = f"xcompat map, {items:,} x {dim} of {dtype}"
            rows.append(timed(what, "the sums of products alone", "", took, bare, f"{busy:.0f} s of processor time"))
            rows.append(Row(what, "60 s", took / 60, "<= 1", f"{took:.1f} s"))
            rows.append(Row(f"memory of {what}", "2 GiB", peak / 2, "<= 1", f"{peak:.2f} GiB at its peak"))
        rows.append(query(folder / dtype / "model", dim))
        given = write_labelled(folder, dim)
        took, busy, _ = run_command(["map", *given, "--out", folder / "labelled", "--allow-worse"], folder)
        what = f"xcompat map, {LABELLED:,} x {dim} with {CLASSES:,} classes"
        rows.append(Row(what, "30 s", took / 30, "<= 1", f"{took:.1f} s; {busy:.0f} s of processor time"))
    return rows


if __name__ == "__main__":
    main(measure)
