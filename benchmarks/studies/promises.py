"""Compare what a choice of maps promises on held-out items with what the map gains on a test set.

A sample of half of the classes stands for a user's items. The test set holds other items of these classes, and items of the other
classes. A cell is a metric of a protocol. The promise *holds* if the test's gain lies in the 95 % interval that ``xcompat map``
expects on as many other queries. It *agrees* if the difference is within the 95 % interval of a difference of both gains.

    python benchmarks/studies/promises.py --old old.npy --new new.npy --labels labels.npy
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.core.progress import console
from xcompat.evaluation import paired_bootstrap, ranking_per_query
from xcompat.mapping.candidates import LINES, Candidate, CandidateParts
from xcompat.mapping.folds import IN_WHOLE
from xcompat.mapping.held_out import HeldOutClasses
from xcompat.mapping.paired import PairedEmbeddings

METRICS = ("cmc@1", "cmc@5", "map")


def split(labels_N: NDArray[np.int64], share: float, seed: int) -> dict[str, NDArray[np.int64]]:
    """Return rows of the sample, of a test of its classes, and of a test of the other classes."""
    draw = np.random.default_rng(seed)
    classes = draw.permutation(int(labels_N.max()) + 1)
    rows = {"sample": list[np.ndarray](), "known": list[np.ndarray](), "new": list[np.ndarray]()}
    for number, label in enumerate(classes.tolist()):
        of_class = draw.permutation(np.flatnonzero(labels_N == label))
        cut = round(share * len(of_class))
        if number % 2:
            rows["new"].append(of_class[: len(of_class) - cut])
        else:
            rows["sample"].append(of_class[:cut])
            rows["known"].append(of_class[cut:])
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def protocols(rows: dict[str, NDArray[np.int64]]) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the name, the queries and the gallery of each protocol of the test."""
    both = np.concatenate([rows["known"], rows["new"]])
    yield "known classes", rows["known"], rows["known"]
    yield "half of them new", both, both
    yield "new classes", rows["new"], rows["new"]
    yield IN_WHOLE, rows["new"], np.concatenate([both, rows["sample"]])


def values(
    asked_Qd: np.ndarray, searched_Gd: np.ndarray, labels_N: np.ndarray, rows_Q: np.ndarray, rows_G: np.ndarray
) -> dict[str, NDArray[np.float64]]:
    """Return metric -> value of each query; every query has a match."""
    ranked = ranking_per_query(asked_Qd, searched_Gd, labels_N[rows_Q], labels_N[rows_G], rows_Q, rows_G)
    assert (ranked.positives_Q > 0).all()
    found = {"cmc@1": ranked.first_hit_ranks_Q < 1, "cmc@5": ranked.first_hit_ranks_Q < 5, "map": ranked.average_precision_Q}
    return {metric: np.asarray(each, float) for metric, each in found.items()}


def main() -> None:
    """Print the share of promises that hold, and by how much they are too high, by protocol and metric."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("old", "new", "labels"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.5, help="Share of a class's items that is in the sample.")
    parser.add_argument("--classes", type=int, help="Use only so many classes.")
    parser.add_argument("--lines", nargs="+", default=["whitened", "rotation", "ridge"])
    given = parser.parse_args()
    old_Nd, new_ND = (normalise_rows(np.load(path)) for path in (given.old, given.new))
    labels_N = np.unique(np.load(given.labels), return_inverse=True)[1].astype(np.int64)
    holds, agrees, excess = defaultdict(list), defaultdict(list), defaultdict(list)
    for seed in range(given.seeds):
        kept = np.flatnonzero(np.isin(labels_N, np.random.default_rng(seed).permutation(labels_N.max() + 1)[: given.classes]))
        old, new, labels = old_Nd[kept], new_ND[kept], np.unique(labels_N[kept], return_inverse=True)[1]
        rows = split(labels, given.share, seed)
        sample = rows["sample"]
        pairs = PairedEmbeddings(new[sample], old[sample], np.unique(labels[sample], return_inverse=True)[1])
        held, known = HeldOutClasses(pairs, "unknown", LINES, seed), CandidateParts(pairs)
        for line in given.lines:
            trial = held.try_candidate(Candidate(line))
            for name, rows_Q, rows_G in protocols(rows):
                mapped_Qd = known.queries(Candidate(line), new[rows_Q], (line, name)).numpy()
                after, before = (values(asked, old[rows_G], labels, rows_Q, rows_G) for asked in (mapped_Qd, old[rows_Q]))
                for metric in METRICS:
                    promise = trial.gains[name][metric]
                    gain = paired_bootstrap(after[metric], before[metric], seed=seed, clusters_Q=labels[rows_Q])
                    difference, widths = promise.mean - gain.mean, (promise.high - promise.low, gain.high - gain.low)
                    low, high = promise.expected
                    holds[name, metric].append(low <= gain.mean <= high)
                    agrees[name, metric].append(abs(difference) <= np.hypot(*widths) / 2)
                    excess[name, metric].append(100 * difference)
    for name, metric in holds:
        cells, points = holds[name, metric], excess[name, metric]
        counts = f"holds in {np.mean(cells):4.0%} of {len(cells)}, agrees in {np.mean(agrees[name, metric]):4.0%}"
        console.print(f"{name:36} {metric:6} {counts}, too high by {np.mean(points):+.2f} points", soft_wrap=True)
    shares = (np.mean([each for cells in every.values() for each in cells]) for every in (holds, agrees))
    console.print("all: holds in {:.1%}, agrees in {:.1%}".format(*shares))


if __name__ == "__main__":
    main()
