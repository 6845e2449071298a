"""CMC and mAP over the full ranking against sorting it, and against the bare product of the similarities.

    python benchmarks/speed/ranking.py [--items 10000] [--classes 100] [--dim 128] [--rounds 5]

Every item is a query and searches all others. Peers: `pip install pytorch-metric-learning`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from measuring import ROUNDS, Row, main, medians, not_installed, timed
from torch import Tensor

from xcompat.evaluation import RankedQueries, ranking_per_query

CHUNK = 1024
CHECKED = 2000


def labelled(items: int, classes: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw unit vectors around overlapping class centres, (N, D), and their classes, (N,)."""
    generator = torch.Generator().manual_seed(0)
    labels_N = torch.arange(items) % classes
    centres_CD = torch.randn(classes, dim, generator=generator)
    embeds_ND = centres_CD[labels_N] + 2 * torch.randn(items, dim, generator=generator)
    return torch.nn.functional.normalize(embeds_ND), labels_N


def ours(embeds_ND: Tensor, labels_N: Tensor) -> RankedQueries:
    """Rank by counting."""
    return ranking_per_query(embeds_ND, embeds_ND, labels_N, labels_N, range(len(labels_N)), range(len(labels_N)))


def argsort(embeds_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rank by sorting, a block of queries at a time: first hits and average precisions, (N,) each."""
    first, precision = [], []
    places_G = torch.arange(1, len(labels_N))
    for start in range(0, len(labels_N), CHUNK):
        rows = torch.arange(start, min(start + CHUNK, len(labels_N)))
        scores_BN = embeds_ND[rows] @ embeds_ND.T
        scores_BN[torch.arange(len(rows)), rows] = -torch.inf
        hits_BG = labels_N[scores_BN.argsort(dim=1, descending=True)[:, :-1]] == labels_N[rows, None]
        found_BG = hits_BG.cumsum(1)
        precision.append((hits_BG * found_BG / places_G).sum(1) / found_BG[:, -1])
        first.append(hits_BG.to(torch.uint8).argmax(1))
    return torch.cat(first), torch.cat(precision)


def calculator(embeds_ND: Tensor, labels_N: Tensor) -> dict[str, Any] | None:
    """Rank with pytorch-metric-learning, as far down as the ranking goes; None where it is not installed."""
    try:
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    except ImportError:
        return None
    metrics = ("precision_at_1", "mean_average_precision", "mean_average_precision_at_r")
    found = AccuracyCalculator(include=metrics, k=len(labels_N) - 1, device=torch.device("cpu"))
    return found.get_accuracy(embeds_ND, labels_N)


def product(embeds_ND: Tensor, room_BN: Tensor) -> None:
    """Compute only the similarities, into allocated memory."""
    for block_BD in embeds_ND.split(CHUNK):
        torch.matmul(block_BD, embeds_ND.T, out=room_BN[: len(block_BD)])


def measure(items: int = 10_000, classes: int = 100, dim: int = 128, rounds: int = ROUNDS) -> list[Row]:
    """Measure full-ranking CMC and mAP on a CPU."""
    embeds_ND, labels_N = labelled(items, classes, dim)
    room_BN, wide_ND = torch.empty(CHUNK, items), embeds_ND.double()
    wide_room_BN = room_BN.double()
    few = embeds_ND[:CHECKED], labels_N[:CHECKED]
    mine, (first_N, precision_N) = ours(*few), argsort(*few)
    # float32 scores that all but tie may change places
    np.testing.assert_allclose(precision_N, mine.average_precision_Q, atol=1e-3)
    assert np.mean(first_N.numpy() == mine.first_hit_ranks_Q) > 0.999
    theirs = calculator(*few)
    if theirs is not None:
        np.testing.assert_allclose(theirs["mean_average_precision"], mine.average_precision_Q.mean(), atol=1e-5)
        np.testing.assert_allclose(theirs["mean_average_precision_at_r"], mine.average_precision_at_r_Q.mean(), atol=1e-5)
        np.testing.assert_allclose(theirs["precision_at_1"], (mine.first_hit_ranks_Q == 0).mean(), atol=1e-3)
    sides = {
        "ours": lambda: ours(embeds_ND, labels_N),
        "argsort": lambda: argsort(embeds_ND, labels_N),
        "product": lambda: product(embeds_ND, room_BN),
        "float64 product": lambda: product(wide_ND, wide_room_BN),
    }
    if theirs is not None:
        sides["calculator"] = lambda: calculator(embeds_ND, labels_N)
    took = medians(sides, rounds)
    what, peer = f"CMC and mAP of the full ranking, {items:,} x {items:,} x {dim}", "pytorch-metric-learning's AccuracyCalculator"
    wide = f"{took['ours'] / took['float64 product']:.1f} times that of float64, which exact scores take"
    return [
        timed(what, peer, ">= 15", took["ours"], took["calculator"])
        if theirs is not None
        else not_installed(what, peer, ">= 15", "pytorch-metric-learning"),
        timed(what, "torch.argsort in blocks", ">= 4", took["ours"], took["argsort"]),
        timed(what, "the bare product of the similarities", "<= 6", took["ours"], took["product"], wide),
    ]


if __name__ == "__main__":
    main(measure)
