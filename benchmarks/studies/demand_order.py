"""A backfill in the order of recorded demand, beside random order, under Zipf-distributed traffic.

    python benchmarks/studies/demand_order.py --seeds 5

Needs ../shared/data/text. Half of the judged queries of a text set make the traffic: some are asked often, most seldom (Zipf,
exponent 1). Each item counts how often it is among the 20 candidates of half-way queries. Items are re-embedded in that order, or
in random order, and a search re-ranks those candidates that have a new embedding. Quality is nDCG@10: of the queries of the
traffic, each as often as it was asked, and of the other half, which nobody asked before. Prints Markdown: quality by re-embedded
share, the area under that curve with its 95 % interval over queries, and the share of items that holds 95 % of the candidates.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
from typing import NamedTuple

import lines
import numpy as np
import torch
from lines import HALF, Floats, Search, console
from numpy.typing import NDArray

from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation import paired_bootstrap
from xcompat.heads import slerp
from xcompat.mapping.candidates import LINES
from xcompat.models import describe_old
from xcompat.report.wording import gain_with_interval
from xcompat.score_scale import CANDIDATES, combine_scores

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TRAFFIC = 20_000
"""Queries that are asked before the backfill begins."""
COVERED = 0.95
ORDERS = ("demand", "random")
METRIC = "nDCG@10"


class Curves(NamedTuple):
    """Quality of queries by order and re-embedded share.

    Args:
        values: order -> (S, Q).
        weights_Q: how often each query is asked.
        covered: share of the items that holds most of the candidates of the traffic.
    """

    values: dict[str, NDArray[np.float64]]
    weights_Q: NDArray[np.float64]
    covered: float


@torch.inference_mode()
def scores_of(search: Search) -> tuple[Floats, Floats]:
    """Return the scores of half-way queries in the old index, and of new queries in a new one: (Q, N) each."""
    stored = search.stored
    known = np.flatnonzero((stored.new_ND != 0).any(1) & (stored.old_Nd != 0).any(1))
    pairs = stored.take(known)
    new_QD, old_Qd = (torch.from_numpy(np.array(side, np.float32)) for side in (search.asked.new_ND, search.asked.old_Nd))
    model = LINES["whitened"](pairs, describe_old(Fingerprint.from_string("old"), pairs.dims[1]))
    half_way_Qd = slerp(model.to_space(new_QD), old_Qd, HALF).numpy()
    return half_way_Qd @ np.asarray(stored.old_Nd).T, new_QD.numpy() @ np.asarray(stored.new_ND).T


def with_some(old_QN: Floats, new_QN: Floats, is_new_N: NDArray[np.bool_]) -> Floats:
    """Return scores whose order is that of a search that re-ranks candidates with a new embedding; others are moved alike."""
    again_QN = old_QN.copy()
    best_Qk = np.argsort(-old_QN, axis=1, kind="stable")[:, :CANDIDATES]
    old_Qk, new_Qk = (np.take_along_axis(each, best_Qk, axis=1) for each in (old_QN, new_QN))
    read_Qk, combined_Qk = is_new_N[best_Qk], combine_scores(old_Qk, new_Qk)
    count_Q1 = np.maximum(1, read_Qk.sum(axis=1, keepdims=True))
    shift_Q1 = np.where(read_Qk, combined_Qk - old_Qk, 0).sum(axis=1, keepdims=True) / count_Q1
    np.put_along_axis(again_QN, best_Qk, np.where(read_Qk, combined_Qk, old_Qk + shift_Q1) + 4, axis=1)  # before all others
    return again_QN


def measure(search: Search, seed: int) -> tuple[Curves, Curves]:
    """Measure queries that made the demand, and queries that nobody asked before."""
    random = np.random.default_rng(seed)
    old_QN, new_QN = scores_of(search)
    asked_Q, fresh_Q = np.array_split(random.permutation(len(old_QN)), 2)
    weights = 1 / np.arange(1, len(asked_Q) + 1)
    traffic_Q = random.multinomial(TRAFFIC, weights / weights.sum())
    best_Qk = np.argsort(-old_QN[asked_Q], axis=1, kind="stable")[:, :CANDIDATES]
    demand_N = np.bincount(best_Qk.ravel(), np.repeat(traffic_Q, CANDIDATES), old_QN.shape[1])
    order_N = random.permutation(len(demand_N))
    orders = {"demand": order_N[np.argsort(-demand_N[order_N], kind="stable")], "random": random.permutation(len(demand_N))}
    counted_N = np.sort(demand_N)[::-1].cumsum()
    covered = float((np.searchsorted(counted_N, COVERED * counted_N[-1]) + 1) / len(demand_N))
    one_per_item = np.eye(len(demand_N), dtype=np.float32)
    found: dict[str, list[NDArray[np.float64]]] = {order: [] for order in ORDERS}
    for order in ORDERS:
        for share in SHARES:
            is_new_N = np.isin(np.arange(len(demand_N)), orders[order][: round(share * len(demand_N))])
            found[order].append(search.score(with_some(old_QN, new_QN, is_new_N), one_per_item)[METRIC])
    values = {order: np.array(each) for order, each in found.items()}
    known = Curves({order: each[:, asked_Q] for order, each in values.items()}, traffic_Q.astype(float), covered)
    return known, Curves({order: each[:, fresh_Q] for order, each in values.items()}, np.ones(len(fresh_Q)), covered)


def area(values_SQ: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the area under each query's curve over the share that is re-embedded."""
    return np.trapezoid(values_SQ, SHARES, axis=0)


def show(title: str, found: dict[str, list[Curves]]) -> None:
    """Print the curves of each upgrade, and their areas."""
    console.print(f"\n| {title}, order | {' | '.join(f'{100 * share:g} %' for share in SHARES)} | area |\n|---|{'---:|' * 9}")
    for name, curves in found.items():
        for order in ORDERS:
            means_S = np.mean([np.average(each.values[order], axis=1, weights=each.weights_Q) for each in curves], axis=0)
            total = float(np.trapezoid(means_S, SHARES))
            console.print(f"| {name}, {order} | {' | '.join(f'{100 * mean:.1f}' for mean in means_S)} | {100 * total:.1f} |")
    held = f"items that hold {100 * COVERED:.0f} % of the candidates"
    console.print(f"\n| {title} | area, demand - random | {held} |\n|---|---:|---:|")
    for name, curves in found.items():
        shares = [each.weights_Q / each.weights_Q.mean() for each in curves]  # a query counts as often as it is asked
        areas = {
            order: np.concatenate([area(each.values[order]) * share_Q for each, share_Q in zip(curves, shares, strict=True)])
            for order in ORDERS
        }
        gain = paired_bootstrap(areas["demand"], areas["random"])
        covered = np.mean([each.covered for each in curves])
        console.print(f"| {name} | {gain_with_interval(gain.mean, gain.low, gain.high)} | {100 * covered:.1f} % |")


def main() -> None:
    """Measure every upgrade, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    seeds, started = parser.parse_args().seeds, time.monotonic()
    known, fresh = dict[str, list[Curves]](), dict[str, list[Curves]]()
    for name, search in lines.load_text_searches():
        for seed in range(seeds):
            of_known, of_fresh = measure(search, seed)
            known.setdefault(name, []).append(of_known)
            fresh.setdefault(name, []).append(of_fresh)
    show("queries of the traffic", known)
    show("queries that nobody asked before", fresh)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))
    minutes = (time.monotonic() - started) / 60
    console.print(f"\n{seeds} seeds, {minutes:.0f} minutes; Python {platform.python_version()}, {versions}")


if __name__ == "__main__":
    main()
