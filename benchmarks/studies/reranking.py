"""Re-ranked searches: the old index gives k candidates, and the new model scores them by their originals.

    python benchmarks/studies/reranking.py --seeds 5

Needs ../shared/data/text, ../shared/data/tiny-imagenet and ../shared/models. Prints Markdown: nDCG@10 on texts with judgements,
CMC@1, CMC@5 and mAP on photos, each with its gain over old queries and a 95 % interval, and the share of the gain of a new index.
Candidates come from the whitened map, half-way queries, or old queries alone. Exits with code 1 if 20 candidates of half-way or
old queries end surely below old queries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import lines
import numpy as np
import torch
from lines import HALF, NEW, OLD, PHOTO_UPGRADES, QUERIES, Column, Floats, Search, Values, console
from numpy.typing import NDArray

from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation import ranking_per_query
from xcompat.heads import slerp
from xcompat.mapping import PairedEmbeddings
from xcompat.mapping.candidates import LINES
from xcompat.models import describe_old
from xcompat.report.wording import gain_with_interval
from xcompat.retrieval.reranking import OLD_WEIGHT, combine_scores

DEPTHS = (5, 10, 20, 50, 100)
PAIRS = 1000
MAP, HALF_WAY = "map", "half-way"


class Way(NamedTuple):
    """A way to search.

    Args:
        candidates: whose queries find the candidates.
        depth: how many of them are scored again; 0 for none.
        old_weight: weight of their old scores.
    """

    candidates: str
    depth: int = 0
    old_weight: float = OLD_WEIGHT

    def __str__(self) -> str:
        if not self.depth:
            return self.candidates
        alone = "" if self.old_weight else ", new score alone"
        return f"{self.candidates} + {self.depth}{alone}"


WAYS = (
    Way(OLD),
    Way(MAP),
    Way(HALF_WAY),
    *(Way(HALF_WAY, depth) for depth in DEPTHS),
    Way(HALF_WAY, 20, 0.0),
    Way(MAP, 20),
    Way(OLD, 20),
    Way(NEW),
)
JUDGED = tuple(way for way in WAYS if str(way) != OLD and way.old_weight)
"""Ways whose gains are printed with intervals."""


@torch.inference_mode()
def measure_ways(search: Search, pairs: PairedEmbeddings) -> dict[str, Values]:
    """Measure each way to search; the map is learned from some pairs."""
    new_QD, old_Qd = (torch.from_numpy(np.array(side, np.float32)) for side in (search.asked.new_ND, search.asked.old_Nd))
    model = LINES["whitened"](pairs, describe_old(Fingerprint.from_string("old"), pairs.dims[1]))
    mapped_Qd = model.to_space(new_QD)
    queries = {OLD: old_Qd, MAP: mapped_Qd, HALF_WAY: slerp(mapped_Qd, old_Qd, HALF)}
    scores = {name: query_Qd.numpy() @ np.asarray(search.stored.old_Nd).T for name, query_Qd in queries.items()}
    scores[NEW] = new_QD.numpy() @ np.asarray(search.stored.new_ND).T
    one_per_item = np.eye(len(search.stored), dtype=np.float32)  # as a gallery, it turns queries into their own scores
    return {str(way): search.score(ranked_again(scores[way.candidates], scores[NEW], way), one_per_item) for way in WAYS}


def ranked_again(score_QN: Floats, new_QN: Floats, way: Way) -> Floats:
    """Return scores (Q, N) whose order is that of a re-ranked search."""
    if not way.depth:
        return score_QN
    best_Qk = np.argsort(-score_QN, axis=1, kind="stable")[:, : way.depth]
    old_Qk, new_Qk = (np.take_along_axis(each, best_Qk, axis=1) for each in (score_QN, new_QN))
    again_QN = score_QN.copy()
    np.put_along_axis(again_QN, best_Qk, combine_scores(old_Qk, new_Qk, way.old_weight) + 4, axis=1)  # before all others
    return again_QN


def load_photo_searches(seeds: int) -> Iterator[tuple[str, Search, PairedEmbeddings]]:
    """Yield protocols on photos: pairs at random from the gallery, and pairs of half of its classes, asked by the other half."""
    embedded, labels_N = lines.load_photos(sorted({name for upgrade in PHOTO_UPGRADES for name in upgrade}))
    classes = np.unique(labels_N)
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        rows_Q, rows_G = np.split(random.permutation(len(labels_N)), [QUERIES])
        half = random.permutation(classes)[: len(classes) // 2]
        protocols = {
            f"{PAIRS:,} random pairs": (rows_Q, np.sort(random.permutation(len(rows_G))[:PAIRS])),
            "unseen classes": (
                rows_Q[~np.isin(labels_N[rows_Q], half)],
                np.flatnonzero(np.isin(labels_N[rows_G], half)),
            ),
        }
        for old, new in PHOTO_UPGRADES:
            for name, (asked_Q, pairs_P) in protocols.items():

                def score(queries: Floats, gallery: Floats, asked_Q: NDArray = asked_Q, rows_G: NDArray = rows_G) -> Values:
                    found = ranking_per_query(queries, gallery, labels_N[asked_Q], labels_N[rows_G])
                    ranks_Q = found.first_hit_ranks_Q
                    firsts = {f"CMC@{k}": ((ranks_Q >= 0) & (ranks_Q < k)).astype(float) for k in (1, 5)}
                    return firsts | {"mAP": found.average_precision_Q}

                stored, asked = (PairedEmbeddings(embedded[new][rows], embedded[old][rows]) for rows in (rows_G, asked_Q))
                title = f"{old} → {new}, {name}".replace("mobilenet_", "")
                yield title, Search(stored, asked, score, asked_Q), stored.take(pairs_P)


def run_photos(seeds: int) -> list[Column]:
    """Measure the protocols on photos."""
    columns: dict[str, Column] = {}
    for name, search, pairs in load_photo_searches(seeds):
        columns.setdefault(name, Column(name)).add(measure_ways(search, pairs), search.clusters_Q)
    return [*columns.values()]


def run_texts(seeds: int) -> list[Column]:
    """Measure the upgrades on texts, with maps learned from all documents, and from 500 of them."""
    columns = []
    for name, search in lines.load_text_searches():
        stored = search.stored
        known = np.flatnonzero((stored.new_ND != 0).any(1) & (stored.old_Nd != 0).any(1))
        every, few = Column(f"{name}, all pairs"), Column(f"{name}, {lines.FEW_TEXTS} pairs")
        every.add(measure_ways(search, stored.take(known)), search.clusters_Q)
        for seed in range(seeds):
            rows = np.sort(np.random.default_rng(seed).permutation(known)[: lines.FEW_TEXTS])
            few.add(measure_ways(search, stored.take(rows)), search.clusters_Q)
        columns += [every, few]
    return columns


def show(title: str, columns: list[Column], metrics: tuple[str, ...]) -> bool:
    """Print means and gains per metric; return whether 20 candidates of half-way or old queries are nowhere surely below."""
    sure = True
    for metric in metrics:
        console.print(f"\n| {title}: {metric} | {' | '.join(map(str, WAYS))} |\n|---|{'---:|' * len(WAYS)}")
        for column in columns:
            console.print(f"| {column.name} | {' | '.join(f'{column.mean(str(way), metric):.1f}' for way in WAYS)} |")
        full = np.mean([column.mean(NEW, metric) - column.mean(OLD, metric) for column in columns])
        gains = [np.mean([column.mean(str(way), metric) - column.mean(OLD, metric) for column in columns]) for way in WAYS]
        shares = (f"{100 * gain / full:.0f}" if full > 0 else "" for gain in gains)
        console.print(f"| mean share of new/new's gain, % | {' | '.join(shares)} |")
        console.print(f"\n| {title}: gain at {metric} | {' | '.join(map(str, JUDGED))} |\n|---|{'---:|' * len(JUDGED)}")
        for column in columns:
            found = [column.compare(str(way), metric) for way in JUDGED]
            by_way = dict(zip(JUDGED, found, strict=True))
            sure &= all(by_way[Way(candidates, 20)][2] >= 0 for candidates in (HALF_WAY, OLD))
            console.print(f"| {column.name} | {' | '.join(gain_with_interval(*gain) for gain in found)} |")
    return sure


def print_conditions(seeds: int, started: float) -> None:
    """Print the number of seeds, the time since the start, and versions."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\n{seeds} seeds, {minutes:.0f} minutes, {torch.get_num_threads()} threads of {platform.machine()}; "
        f"Python {platform.python_version()}, {versions}"
    )


def main() -> None:
    """Measure every protocol, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    options, started = parser.parse_args(), time.monotonic()
    sure = show("Texts", run_texts(options.seeds), ("nDCG@10",))
    sure &= show("Photos", run_photos(options.seeds), ("CMC@1", "CMC@5", "mAP"))
    print_conditions(options.seeds, started)
    sys.exit(not sure)


if __name__ == "__main__":
    main()
