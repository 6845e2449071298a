"""What faiss gains from GPUs beside the CPU: building an index of a gallery, and searching it.

    python benchmarks/gpu/faiss_index.py [--items 2000000] [--dim 512] [--queries 4096] [--index IVF4096,Flat] [--rounds 5]

It needs faiss-gpu (docs/galleries.md says how to install it). The same process hides the GPUs from faiss for the other side. What
both find is compared first. Not run on a GPU yet: none was at hand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple
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


class Side(NamedTuple):
    """What faiss reaches on the CPU or on GPUs.

    Args:
        name: of the side.
        building: seconds to build the index.
        searching: seconds of a search of all queries.
        found: (Q, k) rows found.
    """

    name: str
    building: float
    searching: float
    found: np.ndarray


def compare_sides(items: int, dim: int, queries: int, index: str, rounds: int) -> Iterator[Side]:
    """Build and search on the CPU, and on GPUs if faiss sees any."""
    generator = np.random.default_rng(0)
    embeds_ND, queries_QD = (generator.standard_normal((rows, dim), dtype=np.float32) for rows in (items, queries))
    faiss.normalize_L2(embeds_ND), faiss.normalize_L2(queries_QD)
    gpus = faiss.get_num_gpus()
    for name in ("CPU", f"{gpus} GPUs") if gpus else ("CPU",):
        with ExitStack() as hidden:
            if name == "CPU":
                hidden.enter_context(patch.object(faiss, "get_num_gpus", int))
            started = time.perf_counter()
            made = built(index, embeds_ND)
            building = time.perf_counter() - started
            found = made.search(queries_QD, TOP_K)[1]  # the first search copies the index
            searching = timed(lambda made=made: made.search(queries_QD, TOP_K), rounds)
        yield Side(name, building, searching, found)


def agreement(sides: list[Side]) -> float:
    """Return the share of the first side's results that the last one finds too."""
    pairs = zip(sides[0].found, sides[-1].found, strict=True)
    return float(np.mean([np.isin(*pair).mean() for pair in pairs]))


def main(items: int = 2_000_000, dim: int = 512, queries: int = 4096, index: str = "IVF4096,Flat", rounds: int = 5) -> None:
    """Build and search on both sides, and print the table."""
    table, sides = Table("", "build, s", "search, s", "queries/s"), list(compare_sides(items, dim, queries, index, rounds))
    for side in sides:
        table.add_row(side.name, f"{side.building:.2f}", f"{side.searching:.3f}", f"{queries / side.searching:,.0f}")
    console = Console()
    console.print(table)
    console.print(f"{index} of {items:,} x {dim}, {queries:,} queries, faiss {faiss.__version__}")
    if len(sides) > 1:
        console.print(f"{agreement(sides):.1%} of what the CPU finds is what the GPUs find")
    else:
        console.print("faiss sees no GPU: nothing to compare")


if __name__ == "__main__":
    typer.run(main)
