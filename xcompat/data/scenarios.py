"""Split of classes and samples into old and new training sets (MixBCT §4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from xcompat.core.errors import XcompatError
from xcompat.data.classes import load_classes, nearest_class
from xcompat.data.labelled import LabelledImages

Scenario = Literal["extended-data", "extended-class", "open-data", "open-class"]


class Subset(BaseModel):
    """Part of the labelled images for a model.

    Args:
        scenario: how old and new data differ, see :func:`old_and_new_rows`.
        fraction: the old model's share of the classes, or of each class's samples.
        side: the old or the new model's part.
        classes: class names, or a file for `xcompat.data.load_classes`; alternative to a scenario.
        limit_per_class: first samples of each class to keep. With ``extended-data``, use a smaller limit for the old model, or
            both may keep the same samples.

    Example:
        >>> Subset(scenario="open-class", fraction=0.3, side="old", limit_per_class=50).side
        'old'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)  # YAML reads class 7 as a number

    scenario: Scenario | None = None
    fraction: float | None = Field(None, gt=0, lt=1)
    side: Literal["old", "new"] | None = None
    classes: list[str] | str | None = None
    limit_per_class: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        parts = (self.scenario, self.fraction, self.side)
        if any(part is not None for part in parts) and None in parts:
            raise ValueError("scenario, fraction and side belong together; give all three")
        if self.scenario is not None and self.classes is not None:
            raise ValueError("a scenario chooses the classes itself; give scenario or classes")
        return self


def old_and_new_rows(
    labels_N: NDArray[np.int64], n_classes: int, scenario: Scenario, fraction: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split samples between the old and the new model (MixBCT §4.2, Table 1).

    - ``*-class``: the old model gets the first ``fraction`` of the classes, rounded down as in the paper, at least 1.
    - ``*-data``: the old model gets the first ``fraction`` of each class's samples, rounded up.
    - ``extended-*``: the new model gets everything.
    - ``open-*``: the new model gets only the rest, which is never empty.

    Args:
        labels_N: class index of each sample.
        n_classes: number of classes, including empty ones.
        scenario: the split rule.
        fraction: between 0 and 1, exclusive.

    Returns:
        Ascending row numbers of the old and of the new samples.

    Raises:
        XcompatError: a side is empty, or a class has a single sample in ``open-data``.

    Example:
        >>> labels = np.array([0, 1, 2, 0, 1, 2])
        >>> old_and_new_rows(labels, 3, "open-class", 0.4)
        (array([0, 3]), array([1, 2, 4, 5]))
        >>> old_and_new_rows(labels, 3, "open-data", 0.5)
        (array([0, 1, 2]), array([3, 4, 5]))
    """
    if not 0 < fraction < 1:
        raise XcompatError(f"fraction={fraction:g} must be between 0 and 1, exclusive; the paper uses 0.3")
    labels_N, share = np.asarray(labels_N), Fraction(str(fraction))  # exact: 0.7 * 10 is more than 7 in floating point
    if scenario.endswith("-class"):
        first_N = labels_N < max(1, int(share * n_classes))
    else:
        counts_C = np.bincount(labels_N, minlength=n_classes)
        if scenario == "open-data" and (counts_C == 1).any():
            lonely = int(np.flatnonzero(counts_C == 1)[0])
            raise XcompatError(
                f"open-data gives each model samples of every class, but class {lonely} (from 0) has only 1 sample"
            )
        quotas_C = np.array([math.ceil(share * count) for count in counts_C.tolist()])
        if scenario == "open-data":
            quotas_C = np.minimum(quotas_C, np.maximum(counts_C - 1, 0))
        first_N = _ranks_within_class(labels_N) < quotas_C[labels_N]
    rows_old = np.flatnonzero(first_N)
    rows_new = np.arange(len(labels_N)) if scenario.startswith("extended-") else np.flatnonzero(~first_N)
    for side, rows in (("old", rows_old), ("new", rows_new)):
        if not rows.size:
            raise XcompatError(f"{scenario} with fraction {fraction:g} leaves no sample to the {side} model; change the fraction")
    return rows_old, rows_new


def _ranks_within_class(labels_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each sample, the number of earlier samples of its class."""
    order_N = np.argsort(labels_N, kind="stable")
    _, starts, counts = np.unique(labels_N[order_N], return_index=True, return_counts=True)
    ranks_N = np.empty(len(labels_N), dtype=np.int64)
    ranks_N[order_N] = np.arange(len(labels_N)) - np.repeat(starts, counts)
    return ranks_N


def select_subset(labelled: LabelledImages, subset: Subset) -> LabelledImages:
    """Keep the images of a subset, in order and with the same labels.

    :meth:`LabelledImages.present_classes` lists the remaining classes, :meth:`LabelledImages.reindex_labels` renumbers them.

    Raises:
        XcompatError: a listed class is unknown or has no image, or no image remains.
    """
    return replace(labelled, dataset=labelled.dataset.select(_rows(labelled, subset)))


def compute_shared_fraction(labelled: LabelledImages, new: Subset, old: Subset) -> float:
    """Return the share of the new model's images in the old model's training data.

    Args:
        labelled: all images.
        new: the new model's part.
        old: the old model's part.
    """
    return float(np.isin(_rows(labelled, new), _rows(labelled, old)).mean())


def _rows(labelled: LabelledImages, subset: Subset) -> NDArray[np.int64]:
    labels_N = labelled.labels()
    if subset.scenario is not None:
        assert subset.fraction is not None
        sides = old_and_new_rows(labels_N, len(labelled.classes), subset.scenario, subset.fraction)
        rows = sides[0 if subset.side == "old" else 1]
    elif subset.classes is not None:
        listed = load_classes(subset.classes) if isinstance(subset.classes, str) else subset.classes
        rows = np.flatnonzero(np.isin(labels_N, _class_indices(listed, labelled, labels_N)))
    else:
        rows = np.arange(len(labels_N))
    if subset.limit_per_class is not None:
        rows = rows[_ranks_within_class(labels_N[rows]) < subset.limit_per_class]
    return rows


def _class_indices(names: Sequence[str], labelled: LabelledImages, labels_N: NDArray[np.int64]) -> list[int]:
    place = {name: index for index, name in enumerate(labelled.classes)}
    if not names:
        raise XcompatError("the list of classes is empty; add class names")
    for name in names:
        if name not in place:
            raise XcompatError(f"class {name!r} is not among the {len(place)} classes of the data; {nearest_class(name, place)}")
    indices = [place[name] for name in names]
    without = np.setdiff1d(indices, labels_N)
    if without.size:
        raise XcompatError(f"class {labelled.classes[without[0]]!r} has no image; remove it from the list of classes")
    return indices
