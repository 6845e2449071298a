"""Maps of images without classes and without the old model: would agreement be enough to accept them?

    python benchmarks/studies/image_evidence.py

Needs ../shared/data and ../shared/models. Every pair of photo models is an upgrade, or a downgrade if the new model finds less.
The chosen map learns from random pairs of the gallery, and its queries search the old gallery. A map passes if there are twice as
many pairs as dimensions, its queries surely agree more with the new model than old queries do, and rank its nearest item surely
no later. Prints Markdown: how many maps pass, and how many of these surely find more or less than old queries (CMC@1 and mAP,
95 % intervals over classes).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import torch
from lines import QUERIES, Floats, load_photos
from numpy.typing import NDArray
from rich.console import Console

from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation import PairedDifference, paired_bootstrap, ranking_per_query
from xcompat.mapping import PairedEmbeddings
from xcompat.mapping.agreement import choose_by_agreement
from xcompat.mapping.candidates import CandidateParts, fit
from xcompat.models import describe_old

SETS = {
    "photos": "data/tiny-imagenet/train-0002.tar.gz",
    "product photos": "data/fashion/train-0000.tar.gz",
    "characters": "data/omniglot/omniglot-0000.tar",
}
MODELS = (
    "mobilenet_v1_0.25_128",
    "mobilenet_v1_0.5_160",
    "mobilenet_v1_0.75_192",
    "mobilenet_v1_1.0_224",
    "mobilenet_v2_1.0_224",
)
PAIRS = 3000

console = Console(soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class Outcome:
    """Result of one map.

    Args:
        is_better: whether the new model finds more than the old model, each in its own gallery, by both metrics.
        passes: whether agreement is surely higher, with enough pairs.
        gains: gain of mapped queries over old queries by each metric.
    """

    is_better: bool
    passes: bool
    gains: tuple[PairedDifference, ...]


def score(queries_QD: Floats, gallery_GD: Floats, labels_Q: NDArray[np.str_], labels_G: NDArray[np.str_]) -> list[Floats]:
    """Return CMC@1 and average precision of each query whose class is in the gallery."""
    found = ranking_per_query(queries_QD, gallery_GD, labels_Q, labels_G)
    has_any_Q = found.positives_Q > 0
    return [(found.first_hit_ranks_Q[has_any_Q] == 0).astype(float), found.average_precision_Q[has_any_Q]]


def measure(embedded: dict[str, Floats], labels_N: NDArray[np.str_], old: str, new: str, seed: int) -> Outcome:
    """Return the outcome of one upgrade."""
    rows_Q, rows_G = np.split(np.random.default_rng(seed).permutation(len(labels_N)), [QUERIES])
    labels = labels_N[rows_Q], labels_N[rows_G]
    old_metrics, new_metrics = (score(embedded[name][rows_Q], embedded[name][rows_G], *labels) for name in (old, new))
    is_better = all(own_Q.mean() > old_Q.mean() for own_Q, old_Q in zip(new_metrics, old_metrics, strict=True))
    drawn = np.sort(np.random.default_rng((seed, PAIRS)).permutation(rows_G)[:PAIRS])
    pairs = PairedEmbeddings(embedded[new][drawn], embedded[old][drawn])
    choice = choose_by_agreement(pairs, seed)
    assert choice.first_neighbours is not None
    passes = choice.chosen.is_surely_better and choice.first_neighbours.low >= 0 and not choice.of_few_pairs
    described = describe_old(Fingerprint.from_string(old), pairs.dims[1])
    mapped_Qd = fit(choice.candidate, CandidateParts(pairs, described)).to_space(torch.from_numpy(embedded[new][rows_Q]))
    own_metrics = score(mapped_Qd.numpy(), embedded[old][rows_G], *labels)
    classes_Q = labels[0][np.isin(labels[0], labels[1])].tolist()
    gains = (paired_bootstrap(own_Q, old_Q, clusters_Q=classes_Q) for own_Q, old_Q in zip(own_metrics, old_metrics, strict=True))
    return Outcome(is_better, passes, tuple(gains))


def show(name: str, outcomes: Sequence[Outcome]) -> None:
    """Print rows for better and worse new models, and for maps that pass or not."""
    for is_better, passes in product((True, False), repeat=2):
        some = [each for each in outcomes if (each.is_better, each.passes) == (is_better, passes)]
        more = sum(all(gain.low > 0 for gain in each.gains) for each in some)
        less = sum(any(gain.high < 0 for gain in each.gains) for each in some)
        least = " | ".join(f"{100 * min(each.gains[place].mean for each in some):+.1f}" if some else "" for place in (0, 1))
        about = f"{'better' if is_better else 'worse'} | {'yes' if passes else 'no'}"
        console.print(f"| {name} | {about} | {len(some)} | {more} | {less} | {least} |")


def main() -> None:
    """Measure every pair of models on each set, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="Number of seeds.")
    options, started, tables = parser.parse_args(), time.monotonic(), {}
    for name, place in SETS.items():
        embedded, labels_N = load_photos(MODELS, place)
        tables[name] = []
        for old, new in permutations(embedded, 2):
            for seed in range(options.seeds):
                tables[name].append(measure(embedded, labels_N, old, new, seed))
        console.print(f"measured: {name}")
    console.print(
        "\n| images | new model | passes | maps | surely find more | surely find less | least gain, CMC@1 | mAP |\n"
        "|---|---|---|---:|---:|---:|---:|---:|"
    )
    for name, outcomes in tables.items():
        show(name, outcomes)
    console.print(f"\n{options.seeds} seeds, {(time.monotonic() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
