"""What 10^8 to 10^10 stored vectors take, by each way of changing the model: computed from rates that were measured.

    python benchmarks/scaling.py [--dim 512] [--machines 1] [--gpu-texts 0] [--machine-hour 0.1] [--gpu-hour 2]

Nothing is run here. Hours are of machines that have a part of the vectors each; rates of maps are taken to fall as dimensions
grow, those of encoders not to depend on them. Prices are assumptions: of a machine of two cores, of one GPU, and of a gigabyte
on a disk for a month. docs/scaling.md holds the table, and says what measured each rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import typer
from rich.console import Console

COUNTS = {"10^8": 10**8, "10^9": 10**9, "10^10": 10**10}
HEADER = ("vectors", "way", "hours", "written", "on disks until the end", "computing", "disks, a month")
NUMBERS = 4
"""Bytes of a stored number."""


class Way(NamedTuple):
    """One way of changing the model.

    Args:
        name: what is done.
        rate: vectors a second of one machine of two cores; None where nothing is done to them, 0 where it was not measured.
        dim: of the vectors whose rate that is; None where the dimension does not matter.
        written: bytes for each byte of the new vectors, with all that is stored around them.
        held: as many bytes of old and new vectors at once.
        gpu: whether one GPU does it.
    """

    name: str
    rate: float | None
    dim: int | None = None
    written: float = 1.0
    held: float = 2.0
    gpu: bool = False

    def per_second(self, dim: int) -> float:
        """Return the rate at a dimension."""
        return (self.rate or 0) * (self.dim / dim if self.dim else 1)


def ways(gpu_texts: float) -> list[Way]:
    """Return all ways, from that which writes nothing to that which computes everything anew."""
    return [
        Way("queries alone", None, written=0.0, held=1.0),
        Way("a gallery in files, mapped", 42_000, 128),
        Way("PostgreSQL, mapped, no index", 1_000_000 / 51, 512, 1.4, 2.8),
        Way("PostgreSQL, mapped under HNSW", 843, 512, 2.7, 5.5),
        Way("captions re-embedded", 768 / 3.76),
        Way("captions re-embedded on a GPU", gpu_texts, gpu=True),
        Way("images re-embedded", 64 / 3.02),
    ]


def rows(dim: int, machines: int, gpu_texts: float, prices: tuple[float, float, float]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each count and way; prices are of a machine's hour, a GPU's hour, and a month of a gigabyte."""
    machine, gpu, disk = prices
    for count, vectors in COUNTS.items():
        gigabytes = vectors * dim * NUMBERS / 1e9
        for way in ways(gpu_texts):
            stored = f"{way.written * gigabytes:,.0f} GB", f"{way.held * gigabytes:,.0f} GB"
            month = f"{way.held * gigabytes * disk:,.0f}"
            if way.rate is None:
                yield count, way.name, "0", *stored, "0", month
            elif not way.rate:
                yield count, way.name, "not run: no GPU available", *stored, "", month
            else:
                hours = vectors / way.per_second(dim) / 3600
                cost = f"{hours * (gpu if way.gpu else machine):,.1f}"
                yield count, way.name, f"{hours / machines:,.1f}", *stored, cost, month


def main(
    dim: int = 512,
    machines: int = 1,
    gpu_texts: float = 0,
    machine_hour: float = 0.1,
    gpu_hour: float = 2.0,
    disk_month: float = 0.08,
) -> None:
    """Print the table."""
    print_ = Console(width=250, highlight=False, markup=False).print
    print_(f"| {' | '.join(HEADER)} |\n|---|---|{'---:|' * (len(HEADER) - 2)}")
    for cells in rows(dim, machines, gpu_texts, (machine_hour, gpu_hour, disk_month)):
        print_(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
