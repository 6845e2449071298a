"""Whether embeddings made ahead of need raise the hit rate of the re-ranking cache, under Zipf-distributed traffic.

    python benchmarks/studies/prefetch.py --seeds 5

Needs ../shared/data/text. Queries of a text set arrive one by one (Zipf, exponent 1). Each embeds those of its 20 half-way
candidates that the cache lacks. After it, a prefetch embeds five more items: neighbours of its first hits, its next hits, or
random items. Prints Markdown: the share of candidates found in the cache, its gain over no prefetch with a 95 % interval over
queries, the embeddings in all, and the share of prefetched items that a later search needs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import demand_order
import lines
import numpy as np
from lines import Floats, console
from numpy.typing import NDArray

from xcompat.evaluation import paired_bootstrap
from xcompat.report.wording import gain_with_interval
from xcompat.score_scale import CANDIDATES

TRAFFIC = (100, 500)
"""Numbers of searches."""
AHEAD, FIRST_HITS = 5, 3
"""Items to prefetch after each search, and hits whose neighbours they are."""
NONE, NEIGHBOURS, NEXT, RANDOM = "none", "neighbours", "next hits", "random items"

Ranked = NDArray[np.int64]
Choose = Callable[[Ranked, NDArray[np.bool_]], Ranked]


class Cache(NamedTuple):
    """What a traffic left.

    Args:
        hits_T: share of each search's candidates found in the cache.
        made: embeddings in all.
        used: share of prefetched items that a later search needed.
    """

    hits_T: NDArray[np.float64]
    made: int
    used: float


def simulate(ranked_QN: Ranked, asked_T: Ranked, choose: Choose | None) -> Cache:
    """Run a traffic through an empty cache.

    Args:
        ranked_QN: each query's items, best first.
        asked_T: the query of each search.
        choose: maps a search's items and the mask of embedded items to items in the order of prefetching.
    """
    is_made_N, is_ahead_N, is_used_N = np.zeros((3, ranked_QN.shape[1]), bool)
    hits_T = np.empty(len(asked_T))
    for number, query in enumerate(asked_T):
        candidates_k = ranked_QN[query, :CANDIDATES]
        hits_T[number] = is_made_N[candidates_k].mean()
        is_used_N[candidates_k] = True
        is_made_N[candidates_k] = True
        if choose is not None:
            items = choose(ranked_QN[query], is_made_N)
            new = items[~is_made_N[items]][:AHEAD]
            is_made_N[new] = is_ahead_N[new] = True
    return Cache(hits_T, int(is_made_N.sum()), float(is_used_N[is_ahead_N].mean()) if is_ahead_N.any() else float("nan"))


def prefetches(old_Nd: Floats, seed: int) -> dict[str, Choose | None]:
    """Return each way to choose items."""
    random = np.random.default_rng(seed)
    near_N: dict[int, Ranked] = {}

    def find_near(item: int) -> Ranked:
        if item not in near_N:
            near_N[item] = np.argsort(-(old_Nd @ old_Nd[item]), kind="stable")[: 5 * AHEAD]
        return near_N[item]

    def neighbours(ranked_N: Ranked, _: NDArray[np.bool_]) -> Ranked:
        return np.stack([find_near(int(item)) for item in ranked_N[:FIRST_HITS]], axis=1).ravel()  # the nearest of each first

    return {
        NONE: None,
        NEIGHBOURS: lambda ranked_N, made_N: unique_in_order(neighbours(ranked_N, made_N)),
        NEXT: lambda ranked_N, _: ranked_N[CANDIDATES : 6 * AHEAD],
        RANDOM: lambda _, made_N: random.permutation(np.flatnonzero(~made_N)),
    }


def unique_in_order(items: Ranked) -> Ranked:
    """Return each item once, in the order of first occurrence."""
    return items[np.sort(np.unique(items, return_index=True)[1])]


def main() -> None:
    """Measure every upgrade, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    seeds, started = parser.parse_args().seeds, time.monotonic()
    console.print("| upgrade | searches | prefetch | hit rate, % | gain, points | embeddings | prefetched and used |")
    console.print("|---|---:|---|---:|---:|---:|---:|")
    for name, search in lines.load_text_searches():
        old_QN, _ = demand_order.scores_of(search)
        ranked_QN, old_Nd = np.argsort(-old_QN, axis=1, kind="stable"), np.asarray(search.stored.old_Nd)
        weights = 1 / np.arange(1, len(ranked_QN) + 1)
        for count in TRAFFIC:
            found: dict[str, list[Cache]] = {}
            clusters = []
            for seed in range(seeds):
                random = np.random.default_rng(seed)
                order_Q = random.permutation(len(ranked_QN))
                asked_T = order_Q[random.choice(len(order_Q), count, p=weights / weights.sum())]
                clusters.append(asked_T)
                for way, choose in prefetches(old_Nd, seed).items():
                    found.setdefault(way, []).append(simulate(ranked_QN, asked_T, choose))
            show(name, count, found, np.concatenate(clusters))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))
    minutes = (time.monotonic() - started) / 60
    console.print(f"\n{seeds} seeds, {minutes:.1f} minutes; Python {platform.python_version()}, {versions}")


def show(name: str, count: int, found: dict[str, list[Cache]], clusters_T: NDArray[np.int64]) -> None:
    """Print an upgrade's rows for a length of traffic."""
    hits = {way: np.concatenate([each.hits_T for each in caches]) for way, caches in found.items()}
    for way, caches in found.items():
        gain = paired_bootstrap(hits[way], hits[NONE], clusters_Q=clusters_T.tolist())
        made, used = np.mean([each.made for each in caches]), np.mean([each.used for each in caches])
        console.print(
            f"| {name} | {count:,} | {way} | {100 * hits[way].mean():.1f} | "
            f"{gain_with_interval(gain.mean, gain.low, gain.high) if way != NONE else ''} | {made:,.0f} | "
            f"{f'{100 * used:.0f} %' if way != NONE else ''} |"
        )


if __name__ == "__main__":
    main()
