"""Machine-readable parts of model cards: search tags and gains over old queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

SEARCHES, EMBEDS = "searches", "embeds"
TAGGED = 32
"""Digits of a fingerprint in a tag, so that tags have at most 64 characters. Full fingerprints on the card reveal forgeries."""
_PLACES = 6  # decimals of a value in a card
_Share = Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Gain:
    """Gain of new queries over old queries in the same old gallery, by a metric.

    Args:
        where: the direction of the search, or the validation split.
        metric: e.g. ``recall@1``.
        old: the metric of old queries.
        new: the metric of new queries.
        mean: the difference.
        ci95: its 95 % interval.
    """

    where: str
    metric: str
    old: float
    new: float
    mean: float
    ci95: tuple[float, float]


class _Arguments(BaseModel):
    case: Literal["old/old", "new/old", "gain"]
    ci95: tuple[_Share, _Share] | None = None


class _Result(BaseModel):
    where: str
    metric: str
    value: _Share
    arguments: _Arguments


_RESULTS = TypeAdapter(list[_Result])


def tag(role: str, digest: str) -> str:
    """Return the tag of a model that ``searches`` another's galleries, or ``embeds`` as another does.

    Example:
        >>> tag(SEARCHES, "0123456789abcdef" * 4)
        'searches:0123456789abcdef0123456789abcdef'
    """
    return f"{role}:{digest[:TAGGED]}"


def results_of(gains: Iterable[Gain], task: str, data: str, data_name: str) -> list[EvalResult]:
    """Return gains in the Hub's format for ``model-index``.

    Args:
        gains: the gains.
        task: the Hub's name of the model's task.
        data: Hub name of the evaluation data set, or ``unknown``.
        data_name: its display name.
    """
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type=task,
            task_name=each.where,
            dataset_type=data,
            dataset_name=data_name,
            dataset_config=each.where,
            metric_type=each.metric,
            metric_name=f"{each.metric} {case}",
            metric_value=round(value, _PLACES),
            metric_args={"case": case} | ({"ci95": [round(end, _PLACES) for end in each.ci95]} if case == "gain" else {}),
        )
        for each in gains
        for case, value in (("old/old", each.old), ("new/old", each.new), ("gain", each.mean))
    ]


def gains_in(results: Iterable[EvalResult]) -> list[Gain]:
    """Parse results of :func:`results_of`. Results of other tools are skipped.

    Args:
        results: results on an untrusted card.

    Raises:
        ValueError: a gain is incomplete or impossible.
    """
    ours = [each for each in results if isinstance(each.metric_args, dict) and "case" in each.metric_args]
    read = _RESULTS.validate_python([_plain(each) for each in ours])
    values: dict[tuple[str, str], dict[str, _Result]] = {}
    for each in read:
        values.setdefault((each.where, each.metric), {})[each.arguments.case] = each
    gains = []
    for (where, metric), found in values.items():
        if len(found) < 3 or (ci95 := found["gain"].arguments.ci95) is None:
            raise ValueError(f"the gain of {metric} is incomplete")
        gains.append(Gain(where, metric, found["old/old"].value, found["new/old"].value, found["gain"].value, ci95))
    return gains


def _plain(result: EvalResult) -> Mapping[str, object]:
    return {
        "where": result.task_name,
        "metric": result.metric_type,
        "value": result.metric_value,
        "arguments": result.metric_args,
    }
