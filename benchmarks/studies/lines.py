"""Linear maps learned from stored items alone: what their queries find, and whether evidence without labels can order them.

    python benchmarks/studies/lines.py --seeds 5

Needs ../shared/data/text, ../shared/data/tiny-imagenet and ../shared/models. Prints Markdown: nDCG@10 on texts with judgements,
CMC@1 and mAP on photos with the gain over old queries and its 95 % interval; ``stronger`` measures photos with EfficientNets,
``variants`` whitened maps of low rank and per cluster, and ``fine-tuned`` a model that ``xcompat train
benchmarks/studies/fine_tuned.yaml`` trained further.
Each map is measured alone and half-way to the old query. A second table of each set compares these results with the agreement
that ``xcompat map`` measures without labels. Its row of the nearest neighbour has the change of this neighbour's mean reciprocal
rank in points, and the number of seeds in which it surely does not fall.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import texts_tasks
import torch
from numpy.typing import NDArray
from photo_models import CHECKSUMS, prepare_photo_model
from rich.console import Console
from scipy.stats import spearmanr

from xcompat.core.arrays import normalise_rows
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import LabelledSource, load_labelled
from xcompat.evaluation import PairedDifference, graded_per_query, paired_bootstrap, ranking_per_query
from xcompat.heads import slerp
from xcompat.mapping import PairedEmbeddings
from xcompat.mapping.agreement import HeldOutItems
from xcompat.mapping.candidates import LINES, WHITENED, Candidate, Described, Paired, Solver
from xcompat.methods import WhitenedModel
from xcompat.methods.whitened import DAMPING, DAMPING_OF_FEW, damped_power
from xcompat.models import CompatModel, describe_old
from xcompat.models.embedder import load_embedder
from xcompat.report.wording import gain_with_interval
from xcompat.training.caches import cached_images

SHARED, OUT = Path("../shared"), Path("runs/lines")
TEXT_UPGRADES = (("wordllama", "all-minilm-l6"), ("paraphrase-minilm-l3", "all-minilm-l6"), ("wordllama", "paraphrase-minilm-l3"))
PHOTO_UPGRADES = (
    ("mobilenet_v1_0.25_128", "mobilenet_v1_0.5_160"),
    ("mobilenet_v1_0.25_128", "mobilenet_v2_1.0_224"),
    ("mobilenet_v1_0.5_160", "mobilenet_v2_1.0_224"),
)
STRONGER_UPGRADES = (
    ("mobilenet_v1_0.5_160", "efficientnet_lite0"),
    ("mobilenet_v2_1.0_224", "efficientnet_lite2"),
    ("efficientnet_lite0", "efficientnet_lite2"),
)
FINE_TUNED = "runs/fine_tuned/model"
FINE_TUNED_UPGRADES = (("mobilenet_v1_0.25_128", FINE_TUNED),)
FEW_TEXTS, PHOTOS, QUERIES, PHOTO_PAIRS = 500, 4000, 1000, (3000, 300)
HALF = 0.5
OLD, NEW, HALF_WAY = "old/old", "new/new", ", half-way"
INFORMATION, DRIFT = "mutual information", "mean drift"
Floats = NDArray[np.float32]
Values = dict[str, NDArray[np.float64]]
"""Metric -> value of each query."""

console = Console(soft_wrap=True, markup=False, highlight=False)


def solve_information(pairs: Paired, old: Described) -> CompatModel:
    """Solve for C_x^(-1/2) U S / (1 - S²) Vᵀ C_y^(-1/2), with U S Vᵀ = C_x^(-1/2) C_xy C_y^(-1/2).

    It is the cross term of log p(y | x) / p(y) of jointly Gaussian embeddings without means. Its damping is the whitened map's.
    """
    moments = pairs.moments
    damping = DAMPING_OF_FEW if moments.count < 2 * max(moments.new_old_Dd.shape) else DAMPING
    source_DD, target_dd = (
        damped_power(each / moments.count, -0.5, damping) for each in (moments.new_new_DD, moments.old_old_dd)
    )
    left_Dr, s_r, right_rd = torch.linalg.svd(source_DD @ (moments.new_old_Dd / moments.count) @ target_dd, full_matrices=False)
    weight_Dd = source_DD @ (left_Dr * (s_r / (1 - s_r**2))) @ right_rd @ target_dd
    model = WhitenedModel(WhitenedModel.config_class(old=old, embedding_dim=pairs.dims[0]))
    return model.set_map(weight_Dd, torch.zeros_like(moments.old_d)).eval()


def solve_drift(pairs: Paired, old: Described) -> CompatModel:
    """Subtract the mean drift of the items' embeddings: x - mean(x - y) (Query Drift Compensation, arXiv 2506.00037).

    The paper learns it from training queries. It needs equal dimensions, and models whose spaces have the same axes.
    """
    new_D, old_d = pairs.moments.means()
    model = WhitenedModel(WhitenedModel.config_class(old=old, embedding_dim=pairs.dims[0]))
    return model.set_map(torch.eye(len(new_D), dtype=new_D.dtype), old_d - new_D).eval()


def solve_low_rank(pairs: Paired, old: Described, rank: int) -> CompatModel:
    """Keep the largest singular values of the whitened map."""
    model = LINES[WHITENED](pairs, old)
    left_Dr, s_r, right_rd = torch.linalg.svd(model.weight.double(), full_matrices=False)
    return model.set_map((left_Dr[:, :rank] * s_r[:rank]) @ right_rd[:rank], model.bias)


def solve_clusters(pairs: Paired, old: Described, clusters: int) -> CompatModel:
    """Solve a whitened map per cluster of the new embeddings, as Local Drift-Adapters do."""
    model = WhitenedModel(WhitenedModel.config_class(old=old, embedding_dim=pairs.dims[0], clusters=clusters))
    return model.fit(pairs.batches()).eval()


Maps = Mapping[str, Solver]
VARIANTS: Maps = {
    WHITENED: LINES[WHITENED],
    **{f"{WHITENED}, rank {rank}": partial(solve_low_rank, rank=rank) for rank in (128, 64)},
    **{f"{WHITENED}, {count} clusters": partial(solve_clusters, clusters=count) for count in (4, 16)},
}
SOLVERS: Maps = {**LINES, INFORMATION: solve_information, DRIFT: solve_drift}


class Search(NamedTuple):
    """A gallery and queries, embedded by both models.

    Args:
        stored: the gallery.
        asked: the queries.
        score: measures queries (Q, d) in a gallery (G, d).
        clusters_Q: query photo or text; equal ones are resampled together.
    """

    stored: PairedEmbeddings
    asked: PairedEmbeddings
    score: Callable[[Floats, Floats], Values]
    clusters_Q: NDArray[np.int64]

    @torch.inference_mode()
    def measure(self, pairs: PairedEmbeddings, maps: Maps) -> dict[str, Values]:
        """Measure old queries, new queries in a new index, and each map of some pairs alone and half-way to the old query."""
        new_QD, old_Qd = (torch.from_numpy(np.array(side, np.float32)) for side in (self.asked.new_ND, self.asked.old_Nd))
        gallery_Gd = np.asarray(self.stored.old_Nd)
        rows = {
            OLD: self.score(old_Qd.numpy(), gallery_Gd),
            NEW: self.score(new_QD.numpy(), np.asarray(self.stored.new_ND)),
        }
        for name, solve in maps.items():
            if name == DRIFT and pairs.dims[0] != pairs.dims[1]:
                continue
            mapped_Qd = solve(pairs, describe_old(Fingerprint.from_string("old"), pairs.dims[1])).to_space(new_QD)
            rows[name] = self.score(mapped_Qd.numpy(), gallery_Gd)
            rows[name + HALF_WAY] = self.score(slerp(mapped_Qd, old_Qd, HALF).numpy(), gallery_Gd)
        return rows


class Column:
    """Results of one upgrade over several draws.

    Args:
        name: of the upgrade.
        maps: the maps to measure.
    """

    def __init__(self, name: str, maps: Maps = SOLVERS) -> None:
        self.name, self.maps = name, maps
        self.values: dict[tuple[str, str], list[NDArray[np.float64]]] = defaultdict(list)
        self.agreement: dict[str, list[float]] = defaultdict(list)
        self.first_neighbours: list[PairedDifference] = []
        self.clusters: list[NDArray[np.int64]] = []

    def add(self, rows: dict[str, Values], clusters_Q: NDArray[np.int64]) -> None:
        """Add the results of one draw's queries."""
        for row, values in rows.items():
            for metric, values_Q in values.items():
                self.values[row, metric].append(values_Q)
        self.clusters.append(clusters_Q)

    def measure(self, search: Search, pairs: PairedEmbeddings, seed: int) -> None:
        """Measure one draw: results of the queries, and agreement among the pairs themselves."""
        self.add(search.measure(pairs, self.maps), search.clusters_Q)
        if self.maps is not SOLVERS:
            return
        held = HeldOutItems(pairs, LINES, seed)
        for row, share in measure_agreement(held).items():
            self.agreement[row].append(share)
        self.first_neighbours.append(held.compare_first_neighbours(Candidate(WHITENED)))

    def mean(self, row: str, metric: str) -> float:
        """Return the mean over queries and draws, times 100."""
        return 100 * float(np.concatenate(self.values[row, metric]).mean())

    def gain(self, row: str, metric: str) -> str:
        """Return the mean of a row, and its gain over old queries with a 95 % interval."""
        if (row, metric) not in self.values:
            return ""
        mean = f"{self.mean(row, metric):.1f}"
        return mean if row == OLD else f"{mean}: {gain_with_interval(*self.compare(row, metric))}"

    def compare(self, row: str, metric: str, base: str = OLD) -> tuple[float, float, float]:
        """Return the gain of a row over old queries, or another row, and the ends of its 95 % interval."""
        own_Q, old_Q = (np.concatenate(self.values[name, metric]) for name in (row, base))
        gain = paired_bootstrap(own_Q, old_Q, clusters_Q=np.concatenate(self.clusters).tolist())
        return gain.mean, gain.low, gain.high

    def order(self, rows: Sequence[str], metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return agreement and true results of some rows."""
        agreement = np.array([100 * np.mean(self.agreement[row]) for row in rows])
        return agreement, np.array([self.mean(row, metric) for row in rows])


def measure_agreement(held: HeldOutItems) -> dict[str, float]:
    """Measure the share of the new model's 10 nearest neighbours that each query finds among held-out items."""
    floor = float(np.mean([values.mean() for found in held.floor.values() for values in found.values()]))
    shares = {OLD: floor}
    for line in LINES:
        for row, old_share in ((line, 0.0), (line + HALF_WAY, HALF)):
            shares[row] = floor + held.try_candidate(Candidate(line, old_share=old_share)).mean
    return shares


def load_text_sides(name: str, old: str, new: str) -> PairedEmbeddings:
    """Return embeddings of one set of texts by both models."""
    new_ND, old_Nd = (np.load(SHARED / f"data/text/embeddings/{model}/{name}.npy") for model in (new, old))
    return PairedEmbeddings(normalise_rows(new_ND), normalise_rows(old_Nd))


def load_text_searches() -> Iterator[tuple[str, Search]]:
    """Yield the name of each upgrade on texts, and its documents and queries."""
    for task in (texts_tasks.scifact(), texts_tasks.cranfield()):
        names = [f"{task.name.lower()}_{kind}" for kind in ("docs", "queries")]
        ids = [(SHARED / f"data/text/embeddings/{name}_ids.txt").read_text(encoding="utf-8").split() for name in names]

        def score(queries_Qd: Floats, gallery_Gd: Floats, ids: list[list[str]] = ids, task: texts_tasks.Task = task) -> Values:
            return {"nDCG@10": graded_per_query(queries_Qd, gallery_Gd, ids[1], ids[0], task.qrels).values["ndcg@10"]}

        for old, new in TEXT_UPGRADES:
            stored, asked = (load_text_sides(name, old, new) for name in names)
            yield f"{task.name}, `{old}` → `{new}`", Search(stored, asked, score, np.arange(len(asked)))


def run_texts(seeds: int, maps: Maps = SOLVERS) -> None:
    """Measure and print the upgrades on texts: learned from all documents, and from a few."""
    columns: dict[int, list[Column]] = {0: [], FEW_TEXTS: []}
    for name, search in load_text_searches():
        stored = search.stored
        known = np.flatnonzero((stored.new_ND != 0).any(1) & (stored.old_Nd != 0).any(1))
        for count, of_count in columns.items():
            of_count.append(column := Column(name, maps))
            for seed in range(seeds if count else 1):
                rows = np.random.default_rng(seed).permutation(known)[:count] if count else known
                column.measure(search, stored.take(np.sort(rows)), seed)
        console.print(f"measured: {name}")
    for count, of_count in columns.items():
        show(f"Texts, {f'{count} documents to learn from' if count else 'all documents to learn from'}", of_count, "nDCG@10")


def load_photos(
    names: Sequence[str], place: str = "data/tiny-imagenet/train-0002.tar.gz"
) -> tuple[dict[str, Floats], NDArray[np.str_]]:
    """Return normalised embeddings of photos by some models, and the photos' classes."""
    images = load_labelled(LabelledSource(path=str(SHARED / place), limit=PHOTOS))
    embedded = {}
    for name in names:
        own = name if name == FINE_TUNED else SHARED / "models" / name
        folder = prepare_photo_model(name) if name in CHECKSUMS else own
        vectors = cached_images(load_embedder(str(folder)), images.dataset, OUT / "cache")
        embedded[name] = normalise_rows(np.array(vectors[:], np.float32))
    return embedded, np.array(images.class_names())


def run_photos(seeds: int, upgrades: Sequence[tuple[str, str]], maps: Maps = SOLVERS) -> None:
    """Measure and print upgrades on photos, with seeds of gallery, queries and pairs."""
    embedded, labels_N = load_photos(sorted({name for upgrade in upgrades for name in upgrade}))
    names = [f"{old} → {new}".replace("mobilenet_", "") for old, new in upgrades]
    columns = {count: [Column(name, maps) for name in names] for count in PHOTO_PAIRS}
    for seed in range(seeds):
        rows_Q, rows_G = np.split(np.random.default_rng(seed).permutation(len(labels_N)), [QUERIES])

        def score(queries_Qd: Floats, gallery_Gd: Floats, rows_Q: NDArray = rows_Q, rows_G: NDArray = rows_G) -> Values:
            found = ranking_per_query(queries_Qd, gallery_Gd, labels_N[rows_Q], labels_N[rows_G])
            return {"CMC@1": (found.first_hit_ranks_Q == 0).astype(float), "mAP": found.average_precision_Q}

        for place, (old, new) in enumerate(upgrades):
            stored, asked = (PairedEmbeddings(embedded[new][rows], embedded[old][rows]) for rows in (rows_G, rows_Q))
            for count in PHOTO_PAIRS:
                drawn = np.random.default_rng((seed, count)).permutation(len(rows_G))[:count]
                columns[count][place].measure(Search(stored, asked, score, rows_Q), stored.take(np.sort(drawn)), seed)
        console.print(f"measured: photos, {seed + 1} of {seeds} seeds")
    for count, of_count in columns.items():
        show(f"Photos, {count:,} pairs to learn from", of_count, "mAP", "CMC@1")


def show(title: str, columns: Sequence[Column], *metrics: str) -> None:
    """Print results and gains of every row, then agreement beside the first metric."""
    names = " | ".join(f"{column.name}: {metric}" for column in columns for metric in metrics)
    console.print(f"\n| {title} | {names} | mean gain, {metrics[0]} |\n|---|{'---:|' * (len(columns) * len(metrics) + 1)}")
    for row in (OLD, *(name + way for name in columns[0].maps for way in ("", HALF_WAY)), NEW):
        cells = " | ".join(column.gain(row, metric) for column in columns for metric in metrics)
        known = [column for column in columns if (row, metrics[0]) in column.values]
        gains = [column.mean(row, metrics[0]) - column.mean(OLD, metrics[0]) for column in known]
        console.print(f"| {row} | {cells} | {f'{np.mean(gains):+.1f}' if gains else ''} |")
    if columns[0].maps is SOLVERS:
        show_agreement(title, columns, metrics[0])
    else:
        show_gains(title, columns, metrics[0])


def show_gains(title: str, columns: Sequence[Column], metric: str) -> None:
    """Print what each variant of the whitened map adds to it, alone and half-way."""
    console.print(
        f"\n| {title}: gain over {WHITENED} | {' | '.join(column.name for column in columns)} |\n|---|{'---:|' * len(columns)}"
    )
    for row, base in ((name + way, WHITENED + way) for name in VARIANTS for way in ("", HALF_WAY) if name != WHITENED):
        cells = " | ".join(gain_with_interval(*column.compare(row, metric, base)) for column in columns)
        console.print(f"| {row} | {cells} |")


def show_agreement(title: str, columns: Sequence[Column], metric: str) -> None:
    """Print the agreement of each row beside its result, their rank correlation, and the loss of who takes the largest."""
    names = " | ".join(column.name for column in columns)
    console.print(f"\n| {title}: agreement, {metric} | {names} |\n|---|{'---:|' * len(columns)}")
    half_way = [line + HALF_WAY for line in LINES]
    for row in (OLD, *LINES, *half_way):
        cells = (tuple(float(side[0]) for side in column.order([row], metric)) for column in columns)
        console.print(f"| {row} | {' | '.join(f'{agreement:.1f}, {found:.1f}' for agreement, found in cells)} |")
    firsts = (column.first_neighbours for column in columns)
    cells = (f"{100 * np.mean([each.mean for each in found]):+.1f}, {sum(each.low >= 0 for each in found)}" for found in firsts)
    console.print(f"| nearest neighbour, {WHITENED} | {' | '.join(cells)} |")
    for name, rows in (("maps alone", [*LINES]), ("half-way", half_way), ("all rows", [OLD, *LINES, *half_way])):
        orders = [column.order(rows, metric) for column in columns]
        ranks = " | ".join(f"{spearmanr(*order).statistic:+.2f}" for order in orders)
        lost = " | ".join(f"{found.max() - found[agreement.argmax()]:.1f}" for agreement, found in orders)
        console.print(f"| rank correlation, {name} | {ranks} |\n| {metric} lost by agreement, {name} | {lost} |")


def run_variants(seeds: int) -> None:
    """Measure variants of the whitened map on texts and photos."""
    run_texts(seeds, VARIANTS)
    run_photos(seeds, PHOTO_UPGRADES, VARIANTS)


def main() -> None:
    """Measure every upgrade, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    parser.add_argument("--only", choices=("texts", "photos", "stronger", "variants", "fine-tuned"), help="Measure only one set.")
    options, started = parser.parse_args(), time.monotonic()
    runs = {"texts": run_texts, "photos": partial(run_photos, upgrades=PHOTO_UPGRADES)}
    runs |= {"stronger": partial(run_photos, upgrades=STRONGER_UPGRADES)}
    runs |= {"variants": run_variants, "fine-tuned": partial(run_photos, upgrades=FINE_TUNED_UPGRADES)}
    for name, run in runs.items():
        if options.only == name or (options.only is None and name not in ("variants", "fine-tuned")):
            run(options.seeds)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "scipy"))
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"\n{options.seeds} seeds, {minutes:.0f} minutes, {torch.get_num_threads()} threads of {platform.machine()}; "
        f"Python {platform.python_version()}, {versions}"
    )


if __name__ == "__main__":
    main()
