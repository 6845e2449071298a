"""Scores of two models: scales that make them comparable in one gallery, and their weighted sum in a re-ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xcompat.core.errors import XcompatError

CANDIDATES = 20
"""Hits of a query that a re-ranking scores again: on our studies they bring nine tenths of what embedding the whole gallery again
would."""
OLD_WEIGHT = 1 / 3
"""Weight of a candidate's old score. Two models know more than one: on texts it adds up to 3 points of nDCG@10 over none."""


def combine_scores(old: Any, new: Any, old_weight: float = OLD_WEIGHT) -> Any:  # noqa: ANN401 - arrays or tensors
    """Return ``(1 - w) · new + w · old``, the scores by which candidates are ordered, arrays or tensors.

    Example:
        >>> import numpy as np
        >>> combine_scores(np.array([0.9]), np.array([0.3]), 0.5)
        array([0.6])
    """
    return (1 - old_weight) * new + old_weight * old


class ScoreScale(NamedTuple):
    """s ↦ slope·s + offset: from scores against what a model adds to a gallery to scores against what was there.

    Args:
        slope: above 0.
        offset: in units of a score.

    Example:
        >>> ScoreScale(2.0, 0.5).after(ScoreScale(3.0, 1.0))
        ScoreScale(slope=6.0, offset=2.5)
    """

    slope: float = 1.0
    offset: float = 0.0

    def after(self, first: ScoreScale) -> ScoreScale:
        """Return the scale that applies another one first."""
        return ScoreScale(self.slope * first.slope, self.slope * first.offset + self.offset)


class CarriedThreshold(NamedTuple):
    """The score at which new queries cut off as old ones do at an old threshold.

    Args:
        score: the new threshold.
        low: lower end of its 95 % interval over queries.
        high: upper end.
        keeps: what stays as it was: the share of true ``matches``, or the number of ``hits``.
    """

    score: float
    low: float
    high: float
    keeps: str


class Thresholds(NamedTuple):
    """Old thresholds with the scores that replace them, as ``config.thresholds`` keeps them.

    Args:
        keeps: what stays as it was: the share of true ``matches``, or the number of ``hits``.
        old: cosines, ascending.
        new: the scores that replace them.
        low: lower ends of the 95 % intervals of these scores.
        high: upper ends.
    """

    keeps: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Thresholds:
        """Read the thresholds of a configuration.

        Args:
            settings: the fields of this class.

        Raises:
            XcompatError: one is missing, or no list of as many finite numbers as ``old``, which ascend.
        """
        columns: list[Any] = [settings.get(name) for name in cls._fields[1:]] if set(settings) == set(cls._fields) else []
        sound = [
            isinstance(each, Sequence)
            and len(each) > 1
            and all(isinstance(one, int | float) and math.isfinite(one) for one in each)
            for each in columns
        ]
        if not columns or not all(sound) or len({len(each) for each in columns}) > 1 or sorted(set(columns[0])) != [*columns[0]]:
            raise XcompatError("config.thresholds is damaged: it takes lists of as many finite numbers, the old ones ascending")
        return cls(str(settings["keeps"]), *(tuple(map(float, each)) for each in columns))

    def at(self, old: float) -> CarriedThreshold | None:
        """Return what replaces an old threshold, interpolated; None if it lies outside of what is known.

        Example:
            >>> Thresholds("hits", (0.5, 0.6), (0.3, 0.5), (0.2, 0.4), (0.4, 0.6)).at(0.55)
            CarriedThreshold(score=0.4, low=0.3, high=0.5, keeps='hits')
        """
        import numpy as np

        if not self.old[0] <= old <= self.old[-1]:
            return None
        score, low, high = (round(float(np.interp(old, self.old, each)), 6) for each in (self.new, self.low, self.high))
        return CarriedThreshold(score, low, high, self.keeps)


class ScoreScales(NamedTuple):
    """The scales of a model, as ``config.score_scales`` keeps them.

    A model of queries adds its own embeddings to a gallery of the old model; a map of galleries puts mapped old embeddings beside
    those of the new model.

    Args:
        new: for queries of the model itself.
        old: for queries of its old model.
    """

    new: ScoreScale
    old: ScoreScale

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> ScoreScales:
        """Read the scales of a configuration.

        Args:
            settings: ``new`` and ``old``, each ``[slope, offset]``.

        Raises:
            XcompatError: a number is missing, not finite, or a slope is not above 0.
        """
        numbers = [settings.get(name) for name in cls._fields] if set(settings) == set(cls._fields) else []
        if not numbers or not all(_is_scale(each) for each in numbers):
            raise XcompatError(
                f"score_scales is {dict(settings)!r}; expected new: [slope, offset] and old: [slope, offset] with slopes above 0"
            )
        return cls(*(ScoreScale(float(each[0]), float(each[1])) for each in numbers))  # type: ignore[index]  # checked above

    @property
    def settings(self) -> dict[str, list[float]]:
        """Return the scales for a configuration."""
        return {"new": list(self.new), "old": list(self.old)}


def _is_scale(value: object) -> bool:
    """Return whether a value of a configuration is a slope above 0 and an offset."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return (
        all(isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value)
        and value[0] > 0
    )
