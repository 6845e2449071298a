"""Memory of all items without labels: what it adds to the chosen map, and whether agreement predicts it.

    python benchmarks/studies/item_memory.py --seeds 5

Needs ../shared/data/text, ../shared/data/tiny-imagenet and ../shared/models. Prints Markdown: for each upgrade and share of the
gallery that the pairs cover, nDCG@10 or mAP of the map that ``xcompat map`` chooses without labels, and what a memory of the
pairs adds (95 % interval over queries); and how often ``xcompat map`` takes this memory.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from lines import PHOTO_UPGRADES, QUERIES, Floats, Search, Values, console, load_photos, load_text_searches
from numpy.typing import NDArray

from xcompat.core.arrays import normalise_rows
from xcompat.evaluation import PairedDifference, paired_bootstrap, ranking_per_query
from xcompat.heads import slerp
from xcompat.mapping import PairedEmbeddings
from xcompat.mapping.agreement import choose_by_agreement
from xcompat.mapping.candidates import Candidate, CandidateParts
from xcompat.mapping.item_memory import LEAST_COVERAGE, with_item_memory
from xcompat.report.wording import gain_with_interval

COVERAGES = (1.0, 0.75, 0.5, 0.25)


@torch.inference_mode()
def search(parts: CandidateParts, candidate: Candidate, found: Search) -> Values:
    """Return the values of each query, mapped by a candidate."""
    mapped_Qd = parts.queries(candidate, np.asarray(found.asked.new_ND), str(candidate))
    if candidate.old_share:
        old_Qd = torch.from_numpy(normalise_rows(np.asarray(found.asked.old_Nd, np.float32)))
        mapped_Qd = slerp(mapped_Qd, old_Qd, candidate.old_share)
    return found.score(mapped_Qd.numpy(), np.asarray(found.stored.old_Nd))


def load_photo_searches(seed: int) -> Iterator[tuple[str, Search]]:
    """Yield the name of each upgrade on photos, and its gallery and queries."""
    embedded, labels_N = load_photos(sorted({name for upgrade in PHOTO_UPGRADES for name in upgrade}))
    rows_Q, rows_G = np.split(np.random.default_rng(seed).permutation(len(labels_N)), [QUERIES])

    def score(queries_Qd: Floats, gallery_Gd: Floats) -> Values:
        return {"mAP": ranking_per_query(queries_Qd, gallery_Gd, labels_N[rows_Q], labels_N[rows_G]).average_precision_Q}

    for old, new in PHOTO_UPGRADES:
        stored, asked = (PairedEmbeddings(embedded[new][rows], embedded[old][rows]) for rows in (rows_G, rows_Q))
        yield f"photos, {old} → {new}".replace("mobilenet_", ""), Search(stored, asked, score, rows_Q)


def measure(found: Search, coverage: float, seed: int, with_old_model: bool) -> tuple[NDArray, NDArray, PairedDifference | None]:
    """Return values without and with the memory, and what the memory adds to the agreement."""
    stored = found.stored
    known = np.flatnonzero((stored.new_ND != 0).any(1) & (stored.old_Nd != 0).any(1))
    rows = np.sort(np.random.default_rng(seed).permutation(known)[: round(coverage * len(known))])
    pairs = replace(stored.take(rows), n_stored=len(known))
    choice = choose_by_agreement(pairs, seed, with_old_model=with_old_model, remember_items=True)
    parts, candidate = CandidateParts(pairs), choice.chosen.candidate
    alone, both = (next(iter(search(parts, each, found).values())) for each in (candidate, with_item_memory(candidate)))
    assert choice.item_memory is not None
    return alone, both, choice.item_memory.gain


def print_rows(searches: dict[str, list[Search]], with_old_model: bool) -> None:
    """Print a row per upgrade and a column per coverage, over all draws."""
    shares = " | ".join(f"{100 * coverage:.0f} % known" for coverage in COVERAGES)
    title = "Half-way queries" if with_old_model else "Maps alone"
    console.print(f"\n| {title} | {shares} | memory chosen |\n|---|{'---:|' * (len(COVERAGES) + 1)}")
    for name, draws in searches.items():
        cells, tried = [], []
        for coverage in COVERAGES:
            seeds = range(1 if coverage == 1 and draws[0] is draws[-1] else len(draws))  # all texts are the same in every draw
            measured = [measure(draws[seed], coverage, seed, with_old_model) for seed in seeds]
            alone, both = (np.concatenate([each[part] for each in measured]) for part in (0, 1))
            gain = paired_bootstrap(both, alone, clusters_Q=np.concatenate([draws[seed].clusters_Q for seed in seeds]).tolist())
            cells.append(f"{100 * alone.mean():.1f}: {gain_with_interval(gain.mean, gain.low, gain.high)}")
            tried += [agreement.low > 0 for _, _, agreement in measured if agreement is not None]
        console.print(f"| {name} | {' | '.join(cells)} | {sum(tried)} of {len(tried)} |")


def main() -> None:
    """Measure every upgrade, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    options, started = parser.parse_args(), time.monotonic()
    searches = {name: [search] * options.seeds for name, search in load_text_searches()}
    for seed in range(options.seeds):
        for name, each in load_photo_searches(seed):
            searches.setdefault(name, []).append(each)
    for with_old_model in (False, True):
        print_rows(searches, with_old_model)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy"))
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\n{options.seeds} seeds, memory tried from {100 * LEAST_COVERAGE:.0f} % on, {minutes:.0f} minutes, "
        f"{torch.get_num_threads()} threads of {platform.machine()}; Python {platform.python_version()}, {versions}"
    )


if __name__ == "__main__":
    main()
