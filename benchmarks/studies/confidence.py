"""Whether a query knows that it finds less than the old model's would, and what it is worth to ask the old model then.

    python benchmarks/studies/confidence.py
    python benchmarks/studies/confidence.py --quickstart runs/quickstart

Needs ../shared/data/tiny-imagenet and ../shared/models, or a finished quickstart. A map is chosen as `xcompat map` does,
and what makes a query sure is fitted, on the training set alone; test queries are asked with it. Prints Markdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

from xcompat.data import LabelledSource, Subset, load_labelled, select_subset
from xcompat.evaluation import first_hit_ranks, paired_bootstrap, ranking_per_query
from xcompat.evaluation.selective import area_under_roc, calibration_error, risk_coverage
from xcompat.heads import slerp
from xcompat.mapping import Choice, PairedEmbeddings, choose, fit
from xcompat.mapping.candidates import CandidateParts
from xcompat.mapping.folds import folds
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.report.wording import gain_with_interval
from xcompat.training.caches import cached_images
from xcompat.training.evaluation_sets import load_pair_test_set
from xcompat.training.recipe import load_recipe
from xcompat.training.stage import Stage

SHARED, OUT = Path("../shared"), Path("runs/confidence")
OLD, NEW = (str(SHARED / "models" / name) for name in ("mobilenet_v1_0.25_128", "mobilenet_v1_0.5_160"))
TRAIN, TEST = (str(SHARED / "data/tiny-imagenet" / name) for name in ("train-*.tar.gz", "val-0000.tar.gz"))
SHARES, BELOW, COVERAGES = (0.1, 0.25, 0.5), (0.5, 0.6, 0.7, 0.8), (1.0, 0.9, 0.75, 0.5, 0.25)
MIXED = 0.5
console = Console(soft_wrap=True, markup=False, highlight=False)


@dataclass
class Searches:
    """The results of one kind of queries in the old gallery.

    Args:
        quality_Q: average precision, or of captions the reciprocal rank.
        right_Q: whether the first hit is right.
    """

    quality_Q: NDArray[np.float64]
    right_Q: NDArray[np.bool_]

    def where(self, old_Q: NDArray[np.bool_], other: Searches) -> Searches:
        """Return the results with some queries replaced by the other kind's."""
        return Searches(*(np.where(old_Q, theirs, mine) for mine, theirs in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return both fields."""
        return self.quality_Q, self.right_Q


@dataclass
class Asked:
    """Test queries of one protocol.

    Args:
        name: of the protocol.
        confidence_Q: as the model gives it.
        signs: name -> (Q,) what may tell who is hurt.
        new: new queries.
        old: old queries.
        mixed: both, half-way on the arc between them.
        about_Q: what each is about.
    """

    name: str
    confidence_Q: NDArray[np.float32]
    signs: dict[str, NDArray[np.float64]]
    new: Searches
    old: Searches
    mixed: Searches
    about_Q: list[Any] | None = None

    @property
    def hurt(self) -> NDArray[np.bool_]:
        """Whether each new query finds less than the old one."""
        return self.new.quality_Q < self.old.quality_Q


@torch.inference_mode()
def signs_of(model: CompatModel, new_QD: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    """Return the signs of confidence that a memory computes anyway."""
    assert model.memory is not None
    memory, x_QD = model.memory, torch.from_numpy(np.array(new_QD, np.float32))
    nearest_Q2, recalled_Qd = memory.key_cosines(x_QD).topk(2, dim=1).values, memory.recall(x_QD)
    agreement_Q = (memory.metric(model.to_space_without_memory(x_QD)) * F.normalize(recalled_Qd, dim=1)).sum(1)
    found = {
        "length of recalled vector": recalled_Qd.norm(dim=1),
        "largest cosine to a key": nearest_Q2[:, 0],
        "margin of nearest keys": nearest_Q2[:, 0] - nearest_Q2[:, 1],
        "cosine to recalled vector": agreement_Q,
    }
    return {name: values_Q.double().numpy() for name, values_Q in found.items()}


def margin_of_search(queries_Qd: NDArray[np.float32], stored_Nd: NDArray[np.float32], itself: bool) -> NDArray[np.float64]:
    """Return the margin of the first hit over the second."""
    scores_QN = np.array(queries_Qd @ stored_Nd.T, np.float64)
    if itself:
        np.fill_diagonal(scores_QN, -np.inf)
    best_Q2 = np.sort(np.partition(scores_QN, -2, axis=1)[:, -2:], axis=1)
    return best_Q2[:, 1] - best_Q2[:, 0]


@torch.inference_mode()
def asked_of(model: CompatModel, name: str, new_QD: Any, old_Qd: Any, search: Any, stored_Nd: Any, itself: bool) -> Asked:  # noqa: ANN401
    """Search with the test queries of the new model, of the old one, and of a mix of both."""
    x_QD, old_Qd = torch.from_numpy(np.array(new_QD, np.float32)), np.array(old_Qd, np.float32)
    view_Qd, confidence_Q = model.to_space(x_QD), model.confidence(x_QD)
    assert confidence_Q is not None, f"{name}: no query says how sure it is"
    signs = signs_of(model, new_QD) | {"margin of first hits": margin_of_search(view_Qd.numpy(), np.asarray(stored_Nd), itself)}
    searched = (search(each) for each in (view_Qd.numpy(), old_Qd, slerp(view_Qd, torch.from_numpy(old_Qd), MIXED).numpy()))
    return Asked(name, confidence_Q.numpy(), signs, *searched)


def tiny() -> Iterator[Asked]:
    """Frozen encoders on photos: all, half and none of the searched classes known."""
    train = select_subset(load_labelled(LabelledSource(path=TRAIN)), Subset(limit_per_class=50))
    test = select_subset(load_labelled(LabelledSource(path=TEST)), Subset(limit_per_class=25))
    assert train.classes == test.classes
    models = [load_embedder(name) for name in (NEW, OLD)]
    (new_ND, old_Nd), (new_TD, old_Td) = (
        [cached_images(each, images.dataset, OUT / "cache")[:] for each in models] for images in (train, test)
    )
    labels_N, labels_T = train.labels(), test.labels()
    known_classes = np.sort(np.random.default_rng(0).permutation(len(train.classes))[: len(train.classes) // 2])
    every_T, new_T = np.arange(len(labels_T)), np.flatnonzero(~np.isin(labels_T, known_classes))
    for classes, protocols in (
        (np.arange(len(train.classes)), {"photos, all known": every_T}),
        (known_classes, {"photos, half known": every_T, "photos, none known": new_T}),
    ):
        rows = np.flatnonzero(np.isin(labels_N, classes))
        pairs = PairedEmbeddings(new_ND[rows], old_Nd[rows], np.unique(labels_N[rows], return_inverse=True)[1])
        choice = choose(pairs)
        model = fit(choice.chosen.candidate, CandidateParts(pairs), choice.confidence)
        three = three_together(pairs, choice)
        for name, rows_T in protocols.items():
            stored_Td, labels = old_Td[rows_T], labels_T[rows_T]

            def search(queries_Td: Any, stored_Td: Any = stored_Td, labels: Any = labels) -> Searches:  # noqa: ANN401
                places = np.arange(len(labels))
                ranked = ranking_per_query(queries_Td, stored_Td, labels, labels, places, places)
                return Searches(ranked.average_precision_Q, ranked.first_hit_ranks_Q == 0)

            asked = asked_of(model, name, new_TD[rows_T], stored_Td, search, stored_Td, itself=True)
            signs_T3 = np.stack(list(asked.signs.values())[1:4], axis=1)
            asked.signs["rows 2 to 4"] = three.decision_function(signs_T3)
            yield asked


def three_together(pairs: PairedEmbeddings, choice: Choice) -> Any:  # noqa: ANN401 - of scikit-learn
    """Fit largest cosine, margin and agreement on the folds, as the calibration is."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    assert pairs.labels_N is not None
    signs, hurt = [], []
    for fold in folds(pairs.labels_N):
        model = fit(choice.chosen.candidate, CandidateParts(pairs.take(fold.fit_F)))
        for rows in fold.searched.values():
            new_QD, old_Qd, labels_Q = torch.from_numpy(pairs.new_ND[rows]), pairs.old_Nd[rows], pairs.labels_N[rows]
            with torch.inference_mode():
                queries = (model.to_space(new_QD).numpy(), old_Qd)
            found = [ranking_per_query(each, old_Qd, labels_Q, labels_Q, rows, rows).average_precision_Q for each in queries]
            signs.append(np.stack(list(signs_of(model, pairs.new_ND[rows]).values())[1:], axis=1))
            hurt.append(found[0] < found[1])
    return make_pipeline(StandardScaler(), LogisticRegression(C=1e4)).fit(np.concatenate(signs), ~np.concatenate(hurt))


def quickstart(folder: Path) -> Iterator[Asked]:
    """Load the trained XBT of a quickstart, with a memory of captioned images."""
    recipe = load_recipe(folder / "recipe.yaml", [])
    settings = recipe.stages[-1]
    models = Stage(recipe, settings)
    model = models.load_trained(settings.name).eval()
    embedder = Embedder.from_model(model, "own")
    assert settings.data.test is not None
    test = load_pair_test_set(settings.data.test)
    new, old = (test.embed(each, recipe.cache_dir) for each in (embedder, models.frozen("old")))
    texts, images = (("text_embeds_MD", "text_ids"), ("image_embeds_ND", "image_ids"))
    for name, asking, searched in (("quickstart, text→image", texts, images), ("quickstart, image→text", images, texts)):
        stored_Nd, ids, wanted = getattr(old, searched[0]), getattr(old, searched[1]), getattr(old, asking[1])

        def search(queries_Qd: Any, stored_Nd: Any = stored_Nd, wanted: Any = wanted, ids: Any = ids) -> Searches:  # noqa: ANN401
            ranks_Q = first_hit_ranks(queries_Qd, stored_Nd, wanted, ids)
            return Searches(1 / (1.0 + ranks_Q), ranks_Q == 0)

        asked = asked_of(model, name, getattr(new, asking[0]), getattr(old, asking[0]), search, stored_Nd, itself=False)
        asked.about_Q = list(wanted)
        yield asked


def show(every: list[Asked]) -> None:
    """Print how well confidence and other signs predict hurt queries, and the gain of falling back."""
    names = " | ".join(asked.name for asked in every)
    console.print("\n| queries | | hurt | confidence, mean | AUROC | off by | hurt of the surest 90 / 75 / 50 / 25 % |")
    console.print("|---|---:|---:|---:|---:|---:|---:|")
    for asked in every:
        area = area_under_roc(asked.confidence_Q, ~asked.hurt, asked.about_Q)
        risk_Q = risk_coverage(asked.confidence_Q, asked.hurt)
        risks = " / ".join(f"{100 * risk_Q[round(share * len(risk_Q)) - 1]:.1f}" for share in COVERAGES[1:])
        error = calibration_error(asked.confidence_Q, ~asked.hurt)
        said = f"{area.value:.3f} ({area.low:.3f} to {area.high:.3f}) | {100 * error:.1f}"
        share = f"{100 * asked.hurt.mean():.1f} | {100 * asked.confidence_Q.mean():.1f}"
        console.print(f"| {asked.name} | {len(asked.hurt):,} | {share} | {said} | {risks} |")
    console.print(f"\nAUROC of what may tell\n\n| | {names} |\n|---|{'---:|' * len(every)}")
    for sign in dict.fromkeys(sign for asked in every for sign in asked.signs):
        cells = [f"{area_under_roc(asked.signs[sign], ~asked.hurt).value:.3f}" if sign in asked.signs else "" for asked in every]
        console.print(f"| {sign} | {' | '.join(cells)} |")
    for asked in every:
        show_fallback(asked)
    show_gains(every)


def show_fallback(asked: Asked) -> None:
    """Print the gain of falling back, beside as many queries drawn at random, whose mean gain is known exactly."""
    console.print(f"\n{asked.name}: first hit right / quality / negative flips / hurt, by who is asked\n")
    console.print(
        "| | fall back | to the old query | as many at random | to the mix | as many at random |\n|---|---:|---:|---:|---:|---:|"
    )

    def values(found: Searches) -> NDArray[np.float64]:
        return 100 * per_query(asked, found).mean(axis=1)

    def cell(numbers: NDArray[np.float64]) -> str:
        return " / ".join(f"{number:.1f}" for number in numbers)

    console.print(f"| new query alone | 0.0 | {cell(values(asked.new))} | | | |")
    least = [(f"the least sure {share:.0%}", float(np.quantile(asked.confidence_Q, share))) for share in SHARES]
    for name, below in [*((f"confidence below {below}", below) for below in BELOW), *least]:
        unsure_Q = asked.confidence_Q < below
        cells = []
        for other in (asked.old, asked.mixed):
            drawn = values(asked.new) + unsure_Q.mean() * (values(other) - values(asked.new))
            cells += [cell(values(asked.new.where(unsure_Q, other))), cell(drawn)]
        console.print(f"| {name} | {100 * unsure_Q.mean():.1f} | {' | '.join(cells)} |")
    console.print(f"| every query | 100.0 | {cell(values(asked.old))} | | {cell(values(asked.mixed))} | |")


def show_gains(every: list[Asked]) -> None:
    """Print the change by falling back, with intervals: against new queries alone, and against as many at random."""
    heads = " | ".join(name for other in ("old", "mix") for name in (f"{other}: beside new alone", "beside random"))
    console.print(f"\nWhat falling back changes, in points\n\n| queries | fall back | of | {heads} |\n|---|---|---|{'---:|' * 4}")
    for asked in every:
        for share in SHARES[1:]:
            unsure_Q = asked.confidence_Q < np.quantile(asked.confidence_Q, share)
            alone, *others = (per_query(asked, each) for each in (asked.new, asked.old, asked.mixed))
            for measure, name in enumerate(("first hit right", "quality", "negative flips", "hurt")):
                cells = []
                for other in others:
                    fallen_Q = np.where(unsure_Q, other[measure], alone[measure])
                    random_Q = alone[measure] + unsure_Q.mean() * (other[measure] - alone[measure])
                    for against_Q in (alone[measure], random_Q):
                        gain = paired_bootstrap(fallen_Q, against_Q, clusters_Q=asked.about_Q)
                        cells.append(gain_with_interval(gain.mean, gain.low, gain.high))
                console.print(f"| {asked.name} | {share:.0%} | {name} | {' | '.join(cells)} |")


def per_query(asked: Asked, found: Searches) -> NDArray[np.float64]:
    """Return ``(4, Q)`` whether the first hit is right, quality, negative flip and hurt of every query."""
    flips_Q, hurt_Q = asked.old.right_Q & ~found.right_Q, found.quality_Q < asked.old.quality_Q
    return np.stack([found.right_Q, found.quality_Q, flips_Q, hurt_Q]).astype(np.float64)


def main(folder: Annotated[Path | None, typer.Option("--quickstart", help="A finished quickstart.")] = None) -> None:
    """Measure and print."""
    show(list(quickstart(folder) if folder is not None else tiny()))


if __name__ == "__main__":
    typer.run(main)
