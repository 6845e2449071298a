"""Score scales to make two models comparable in a gallery, and their weighted sum for re-ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from xcompat.core.errors import XcompatError

CANDIDATES = 20
"""Hits that a re-ranking scores again. In our studies they give nine tenths of the gain of re-embedding the whole gallery."""
OLD_WEIGHT = 1 / 3
"""Weight of a candidate's old score. On texts it adds up to 3 points of nDCG@10."""


def combine_scores(old: Any, new: Any, old_weight: float = OLD_WEIGHT) -> Any:  # noqa: ANN401 - arrays or tensors
    """Return ``(1 - w) · new + w · old``, the scores to order candidates by, for arrays or tensors.

    Example:
        >>> import numpy as np
        >>> combine_scores(np.array([0.9]), np.array([0.3]), 0.5)
        array([0.6])
    """
    return (1 - old_weight) * new + old_weight * old


class ScoreScale(NamedTuple):
    """s ↦ slope·s + offset, from scores against new embeddings to scores against a gallery's earlier embeddings.

    Args:
        slope: above 0.
        offset: in units of a score.

    Example:
        >>> ScoreScale(2.0, 0.5).compose(ScoreScale(3.0, 1.0))
        ScoreScale(slope=6.0, offset=2.5)
    """

    slope: float = 1.0
    offset: float = 0.0

    def compose(self, first: ScoreScale) -> ScoreScale:
        """Return a scale that applies another scale first."""
        return ScoreScale(self.slope * first.slope, self.slope * first.offset + self.offset)


class CarriedThreshold(NamedTuple):
    """New threshold that matches an old threshold on old queries.

    Args:
        score: the new threshold.
        low: lower end of its 95 % interval over queries.
        high: upper end.
        keeps: the quantity that stays equal: the share of true ``matches``, or the number of ``hits``.
    """

    score: float
    low: float
    high: float
    keeps: str


class Thresholds(NamedTuple):
    """Old thresholds with their replacements, as stored in ``config.thresholds``.

    Args:
        keeps: the quantity that stays equal: the share of true ``matches``, or the number of ``hits``.
        old: cosines, ascending.
        new: the new thresholds.
        low: lower ends of their 95 % intervals.
        high: upper ends.
    """

    keeps: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def read(cls, settings: Mapping[str, object]) -> Thresholds:
        """Read the thresholds of a configuration.

        Args:
            settings: the fields of this class.

        Raises:
            XcompatError: a list is missing, or they are not equally long lists of finite numbers with ``old`` ascending.
        """
        columns: list[Any] = [settings.get(name) for name in cls._fields[1:]] if set(settings) == set(cls._fields) else []
        sound = [
            isinstance(each, Sequence)
            and len(each) > 1
            and all(isinstance(one, int | float) and math.isfinite(one) for one in each)
            for each in columns
        ]
        if not columns or not all(sound) or len({len(each) for each in columns}) > 1 or sorted(set(columns[0])) != [*columns[0]]:
            raise XcompatError("config.thresholds is damaged: expected equally long lists of finite numbers, with old ascending")
        return cls(str(settings["keeps"]), *(tuple(map(float, each)) for each in columns))

    def interpolate(self, old: float) -> CarriedThreshold | None:
        """Return the replacement of an old threshold, interpolated, or None outside of the known range.

        Example:
            >>> Thresholds("hits", (0.5, 0.6), (0.3, 0.5), (0.2, 0.4), (0.4, 0.6)).interpolate(0.55)
            CarriedThreshold(score=0.4, low=0.3, high=0.5, keeps='hits')
        """
        import numpy as np

        if not self.old[0] <= old <= self.old[-1]:
            return None
        score, low, high = (round(float(np.interp(old, self.old, each)), 6) for each in (self.new, self.low, self.high))
        return CarriedThreshold(score, low, high, self.keeps)


class ScoreScales(NamedTuple):
    """Score scales of a model, as stored in ``config.score_scales``.

    A query map adds its own embeddings to the old model's gallery. A gallery map puts mapped old embeddings beside the new
    model's.

    Args:
        new: for queries of the model itself.
        old: for queries of its old model.
    """

    new: ScoreScale
    old: ScoreScale

    @classmethod
    def read(cls, settings: Mapping[str, object]) -> ScoreScales:
        """Read the scales of a configuration.

        Args:
            settings: ``new`` and ``old``, each ``[slope, offset]``.

        Raises:
            XcompatError: a number is missing or not finite, or a slope is not above 0.
        """
        numbers = [settings.get(name) for name in cls._fields] if set(settings) == set(cls._fields) else []
        if not numbers or not all(_is_scale(each) for each in numbers):
            raise XcompatError(
                f"score_scales is {dict(settings)!r}; expected new: [slope, offset] and old: [slope, offset] with slopes above 0"
            )
        return cls(*(ScoreScale(float(each[0]), float(each[1])) for each in numbers))  # type: ignore[index]  # checked above

    @property
    def settings(self) -> dict[str, list[float]]:
        """Scales for a configuration."""
        return {"new": list(self.new), "old": list(self.old)}


def _is_scale(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return (
        all(isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value)
        and value[0] > 0
    )


def carry_threshold(described: Mapping[str, object] | None, old: float, name: str) -> CarriedThreshold:
    """Return the replacement of an old threshold, or raise if ``config.thresholds`` has no measurement for it."""
    known = Thresholds.read(described) if described is not None else None
    if known is not None and (found := known.interpolate(old)) is not None:
        return found
    reach = "no thresholds" if known is None else f"thresholds from {known.old[0]:g} to {known.old[-1]:g}"
    measure = f"measure it on a test set with `xcompat evaluate --threshold {old:g}`"
    raise XcompatError(f"threshold {old:g} is unknown: {name} has {reach}; {measure}")
