"""The content of a report in memory: given by the caller, or read from its folder."""

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

    from xcompat.evaluation import Contestants


class Hit(NamedTuple):
    """One item that a search found.

    Args:
        image: its picture, if it has one.
        caption: its text.
        is_hit: whether it matches the query.
        gain: how relevant it is judged to be, if hits are graded.
    """

    image: Image.Image | None
    caption: str
    is_hit: bool
    gain: float | None = None

    @property
    def mark(self) -> str:
        """What is written before a hit that matches: a tick, and the gain if it has one."""
        return "" if not self.is_hit else "✓" if self.gain is None else f"✓ gain {self.gain:g}"


class ExampleRow(NamedTuple):
    """The results of one kind of query, the best first.

    Args:
        label: such as ``old query`` or ``new query``.
        hits: the first items of the old gallery.
    """

    label: str
    hits: list[Hit]


@dataclass(frozen=True)
class Example:
    """One example search.

    Args:
        query_text: the query.
        rows: the results of each kind of query.
    """

    query_text: str
    rows: list[ExampleRow]


class LossPoint(NamedTuple):
    """What the Trainer logged of a training.

    Args:
        step: how many steps were done.
        epoch: how often the training data were seen.
        loss: the mean over the steps since the point before.
        learning_rate: that of the step; None if it was not logged.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float | None = None


class Cost(NamedTuple):
    """What the training of one stage took.

    Args:
        trained_parameters: how many numbers were trained.
        parameters: how many the model has.
        samples: how many were seen, repeated ones counted each time.
        tokens: how many were seen, without padding; 0 without texts.
        peak_memory: bytes; on a CUDA device what PyTorch allocated there, else those of the first process.
        device: such as ``NVIDIA H100``, or ``cpu``.
        devices: how many.
        device_hours: hours of training times devices.
        memory_is_own: whether that is the most since the stage began, and not since the process did, in which earlier stages ran;
            None if an earlier version wrote it.
    """

    trained_parameters: int
    parameters: int
    samples: int
    tokens: int
    peak_memory: int
    device: str
    devices: int
    device_hours: float
    memory_is_own: bool | None = None

    @property
    def own_memory(self) -> int | None:
        """Return the peak of memory of the stage; None if that of earlier stages is in it."""
        own = self.memory_is_own if self.memory_is_own is not None else self.device not in ("cpu", "mps")
        return self.peak_memory if own else None


@dataclass(frozen=True)
class ReportContent:
    """The input of a report.

    Args:
        evaluation: the measured results.
        contestants: the models that were passed to :func:`xcompat.evaluation.evaluate`.
        method: such as ``xbt``.
        seconds: stage -> seconds.
        run: versions, machine, command: any JSON.
        examples: example searches in the old gallery.
        tsne_pairs: image-text pairs, or images, per model in the t-SNE maps; 0 leaves the maps out.
        seed: seed of the choice of pairs and of t-SNE.
        training: stage -> the losses of its training.
        costs: stage -> what its training took.
        verdict: whether a chosen map was surely at or above old queries on held-out items; None if no map was chosen.
    """

    evaluation: Evaluation
    contestants: Contestants
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
    """A model in a report.

    Args:
        name: the name that people know it by.
        fingerprint: 64 hexadecimal digits.
        dim: dimensions of its embeddings.
    """

    name: str
    fingerprint: str
    dim: int


class Series(NamedTuple):
    """One cloud of points in a map.

    Args:
        label: such as ``old images``.
        points_N2: float32 ``(N, 2)``; row i of every series of a panel belongs to the same pair, or is the same image.
    """

    label: str
    points_N2: np.ndarray


class Panel(NamedTuple):
    """One t-SNE map: embeddings of one space.

    Args:
        title: the space.
        series: the clouds of points.
    """

    title: str
    series: list[Series]


@dataclass(frozen=True)
class Report:
    """A report as stored on disk: ``report.json`` and the data of its plots.

    Args:
        old: the old model.
        new: the new model.
        method: such as ``xbt``.
        cases: the results of each pair of query model and gallery model.
        criterion: the verdict.
        seconds: stage -> seconds.
        run: versions, machine, command, and ``notes`` on the evaluation.
        ranks: (query, gallery, direction) -> int32 ``(Q,)``, -1 for queries left out.
        panels: t-SNE maps.
        examples: example searches.
        average_precision: (query, gallery, direction, metric) -> float32 ``(Q,)``, NaN for queries left out; for labelled images.
        clusters: direction -> int32 ``(Q,)``, equal for queries about the same item; in other directions queries are independent.
        confidence: direction -> float32 ``(Q,)``, confidence of new queries, NaN for queries left out.
        training: stage -> the losses of its training; empty if the stages were solved, or an earlier version trained them.
        costs: stage -> what its training took, likewise.
        verdict: whether a chosen map was surely at or above old queries on held-out items; None if no map was chosen.
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
        """The measured directions, in order of appearance."""
        return list(dict.fromkeys(case.direction for case in self.cases))

    @property
    def is_labelled(self) -> bool:
        """Whether images search images of their class, rather than captions searching images."""
        return set(self.directions) <= {IMAGE_TO_IMAGE, VERIFICATION, IDENTIFICATION}

    @property
    def is_judged(self) -> bool:
        """Whether passages were searched that are judged relevant to queries, not by captions."""
        return self.directions == [TEXT_TO_TEXT]

    @property
    def notes(self) -> list[str]:
        """What a reader must know about the evaluation."""
        return list(self.run.get("notes", []))

    def tables(self) -> list[tuple[str, list[str], list[Case]]]:
        """Return (direction, metric names, cases) per table: of each direction, population of queries, and classification."""
        groups: dict[tuple[str, str, str | None], list[Case]] = {}
        for case in self.cases:
            of_texts = next(filter(is_zero_shot, case.metrics), None)
            groups.setdefault((case.direction, case.population, of_texts), []).append(case)
        return [
            (direction, list(dict.fromkeys(name for case in cases for name in case.metrics)), cases)
            for (direction, *_), cases in groups.items()
        ]


def retrieval_metrics(metrics: Iterable[str]) -> list[str]:
    """Return the names of search metrics for which higher is better: without flips and zero-shot classification.

    Example:
        >>> retrieval_metrics(["cmc@1", "map@R", "negative_flip_rate@1"])
        ['cmc@1', 'map@R']
    """
    return [name for name in metrics if name != FLIP_METRIC and not is_zero_shot(name)]
