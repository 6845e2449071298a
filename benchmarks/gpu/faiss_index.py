"""What faiss gains from GPUs beside the CPU: building an index of a gallery, and searching it.

    python benchmarks/gpu/faiss_index.py [--items 2000000] [--dim 512] [--queries 4096] [--index IVF4096,Flat] [--rounds 5]

It needs faiss-gpu (docs/galleries.md says how to install it). The same process hides the GPUs from faiss for the other side. What
both find is compared first. Not run on a GPU yet: none was at hand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import faiss
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from xcompat.retrieval.faiss_building import build_faiss
from xcompat.retrieval.faiss_index import FaissIndex

TOP_K, BLOCK, NPROBE = 10, 100_000, 64


def built(factory: str, embeds_ND: np.ndarray) -> FaissIndex:
    """Build an index as a gallery does, and let it visit as many lists on either side."""
    blocks = (embeds_ND[start : start + BLOCK] for start in range(0, len(embeds_ND), BLOCK))
    index, _ = build_faiss(factory, embeds_ND.shape[1], "ip", blocks, len(embeds_ND))
    if faiss.try_extract_index_ivf(index.index) is not None:
        index.set_parameters(f"nprobe={NPROBE}")
    return index


def timed(run: Callable[[], object], rounds: int) -> float:
    """Return the median seconds of several runs."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(items: int = 2_000_000, dim: int = 512, queries: int = 4096, index: str = "IVF4096,Flat", rounds: int = 5) -> None:
    """Build and search on both sides, and print the table."""
    generator = np.random.default_rng(0)
    embeds_ND, queries_QD = (generator.standard_normal((rows, dim), dtype=np.float32) for rows in (items, queries))
    faiss.normalize_L2(embeds_ND), faiss.normalize_L2(queries_QD)
    gpus, table, found = faiss.get_num_gpus(), Table("", "build, s", "search, s", "queries/s"), []
    for side in ("CPU", f"{gpus} GPUs") if gpus else ("CPU",):
        with ExitStack() as hidden:
            if side == "CPU":
                hidden.enter_context(patch.object(faiss, "get_num_gpus", int))
            started = time.perf_counter()
            made = built(index, embeds_ND)
            building = time.perf_counter() - started
            found.append(made.search(queries_QD, TOP_K)[1])  # the first search copies the index
            searching = timed(lambda made=made: made.search(queries_QD, TOP_K), rounds)
        table.add_row(side, f"{building:.2f}", f"{searching:.3f}", f"{queries / searching:,.0f}")
    console = Console()
    console.print(table)
    console.print(f"{index} of {items:,} x {dim}, {queries:,} queries, faiss {faiss.__version__}")
    if gpus:
        same = np.mean([np.isin(*pair).mean() for pair in zip(*found, strict=True)])
        console.print(f"{same:.1%} of what the GPUs find is what the CPU finds")
    else:
        console.print("faiss sees no GPU: nothing to compare")


if __name__ == "__main__":
    typer.run(main)
