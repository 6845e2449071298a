"""Content of a report in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xcompat.evaluation.cases import (
    FLIP_METRIC,
    IDENTIFICATION,
    IMAGE_TO_IMAGE,
    TEXT_TO_TEXT,
    VERIFICATION,
    Case,
    Criterion,
    Evaluation,
    RankKey,
    Threshold,
    ValueKey,
    is_zero_shot,
)

if TYPE_CHECKING:
    from PIL import Image

    from xcompat.evaluation import EvaluatedModels


class Hit(NamedTuple):
    """Item found by a search.

    Args:
        image: the item's image, if any.
        caption: the item's text.
        is_hit: whether it matches the query.
        gain: judged relevance of the item, if hits are graded.
    """

    image: Image.Image | None
    caption: str
    is_hit: bool
    gain: float | None = None

    @property
    def mark(self) -> str:
        """Mark of a matching hit: a tick, and the gain if graded."""
        return "" if not self.is_hit else "✓" if self.gain is None else f"✓ gain {self.gain:g}"


class ExampleRow(NamedTuple):
    """Results of a query kind, best first.

    Args:
        label: e.g. ``old query`` or ``new query``.
        hits: first items of the old gallery.
    """

    label: str
    hits: list[Hit]


@dataclass(frozen=True)
class Example:
    """Example search.

    Args:
        query_text: the query.
        rows: results of each kind of query.
    """

    query_text: str
    rows: list[ExampleRow]


class LossPoint(NamedTuple):
    """Training loss as logged by the Trainer.

    Args:
        step: steps done.
        epoch: passes over the training data.
        loss: mean over the steps since the last point.
        learning_rate: learning rate of the step; None if not logged.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float | None = None


class Cost(NamedTuple):
    """A stage's training cost.

    Args:
        trained_parameters: trained parameters.
        parameters: all parameters of the model.
        samples: samples seen, with repetitions.
        tokens: tokens seen, without padding; 0 without texts.
        peak_memory: bytes allocated by PyTorch on a CUDA device, otherwise bytes of the first process.
        device: e.g. ``NVIDIA H100`` or ``cpu``.
        devices: number of devices.
        device_hours: training hours times devices.
        memory_is_own: whether ``peak_memory`` covers this stage only, not earlier stages in the process.
    """

    trained_parameters: int
    parameters: int
    samples: int
    tokens: int
    peak_memory: int
    device: str
    devices: int
    device_hours: float
    memory_is_own: bool

    @property
    def own_memory(self) -> int | None:
        """Peak memory of this stage; None if it includes earlier stages."""
        return self.peak_memory if self.memory_is_own else None


@dataclass(frozen=True)
class ReportContent:
    """Input of a report.

    Args:
        evaluation: the measured results.
        contestants: the models passed to :func:`xcompat.evaluation.evaluate`.
        method: e.g. ``xbt``.
        seconds: stage -> seconds.
        run: versions, machine, command: any JSON.
        examples: example searches in the old gallery.
        tsne_pairs: image-text pairs, or images, per model in the t-SNE maps; 0 for no maps.
        seed: random seed for the sampled pairs and t-SNE.
        training: stage -> training losses.
        costs: stage -> training cost.
        verdict: whether the validation split showed a selected map to be at or above old queries; None if no map was selected.
    """

    evaluation: Evaluation
    contestants: EvaluatedModels
    method: str
    seconds: dict[str, float] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    tsne_pairs: int = 500
    seed: int = 0
    training: dict[str, list[LossPoint]] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    verdict: bool | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Model in a report.

    Args:
        name: display name.
        fingerprint: 64 hexadecimal digits.
        dim: embedding dimension.
    """

    name: str
    fingerprint: str
    dim: int


class Series(NamedTuple):
    """Cloud of points in a map.

    Args:
        label: e.g. ``old images``.
        points_N2: float32 ``(N, 2)``; row i of all series in a panel belongs to the same pair or image.
    """

    label: str
    points_N2: np.ndarray


class Panel(NamedTuple):
    """t-SNE map of an embedding space.

    Args:
        title: the space.
        series: clouds of points.
    """

    title: str
    series: list[Series]


@dataclass(frozen=True)
class Report:
    """Report as stored on disk: ``report.json`` and the data of its plots.

    Args:
        old: the old model.
        new: the new model.
        method: e.g. ``xbt``.
        cases: results of each pair of query model and gallery model.
        criterion: the verdict.
        seconds: stage -> seconds.
        run: versions, machine, command, and ``notes`` on the evaluation.
        ranks: (query, gallery, direction) -> int32 ``(Q,)``, -1 for excluded queries.
        panels: t-SNE maps.
        examples: example searches.
        average_precision: (query, gallery, direction, metric) -> float32 ``(Q,)``, NaN for excluded queries; for labelled images.
        clusters: direction -> int32 ``(Q,)``, equal for queries about the same item; no entry if queries are independent.
        confidence: direction -> float32 ``(Q,)`` confidence of new queries, NaN for excluded queries.
        training: stage -> training losses; empty for solved stages.
        costs: stage -> training cost; empty if no stage was trained.
        verdict: as in :class:`ReportContent`.
        thresholds: an old threshold carried over to new queries; empty if none was given.
    """

    old: ModelInfo
    new: ModelInfo
    method: str
    cases: list[Case]
    criterion: Criterion
    seconds: dict[str, float]
    run: dict[str, Any]
    ranks: dict[RankKey, np.ndarray] = field(default_factory=dict, repr=False)
    panels: list[Panel] = field(default_factory=list, repr=False)
    examples: list[Example] = field(default_factory=list, repr=False)
    average_precision: dict[ValueKey, np.ndarray] = field(default_factory=dict, repr=False)
    clusters: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    confidence: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    training: dict[str, list[LossPoint]] = field(default_factory=dict, repr=False)
    costs: dict[str, Cost] = field(default_factory=dict, repr=False)
    verdict: bool | None = None
    thresholds: list[Threshold] = field(default_factory=list)

    @property
    def directions(self) -> list[str]:
        """Measured directions, in order of appearance."""
        return list(dict.fromkeys(case.direction for case in self.cases))

    @property
    def is_labelled(self) -> bool:
        """Whether all directions search images by class."""
        return set(self.directions) <= {IMAGE_TO_IMAGE, VERIFICATION, IDENTIFICATION}

    @property
    def is_judged(self) -> bool:
        """Whether queries search passages with relevance judgements."""
        return self.directions == [TEXT_TO_TEXT]

    @property
    def notes(self) -> list[str]:
        """Notes on the evaluation."""
        return list(self.run.get("notes", []))

    def tables(self) -> list[tuple[str, list[str], list[Case]]]:
        """Return (direction, metric names, cases) for each direction, query population and classification."""
        groups: dict[tuple[str, str, str | None], list[Case]] = {}
        for case in self.cases:
            of_texts = next(filter(is_zero_shot, case.metrics), None)
            groups.setdefault((case.direction, case.population, of_texts), []).append(case)
        return [
            (direction, list(dict.fromkeys(name for case in cases for name in case.metrics)), cases)
            for (direction, *_), cases in groups.items()
        ]


def retrieval_metrics(metrics: Iterable[str]) -> list[str]:
    """Return the search metrics for which higher is better, without flips and zero-shot classification.

    Example:
        >>> retrieval_metrics(["cmc@1", "map@R", "negative_flip_rate@1"])
        ['cmc@1', 'map@R']
    """
    return [name for name in metrics if name != FLIP_METRIC and not is_zero_shot(name)]
