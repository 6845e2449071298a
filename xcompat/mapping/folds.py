"""Folds of a training set; held-out items and classes simulate queries about unseen ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import NoValidationDataError
from xcompat.evaluation.cases import ALL, KNOWN, NEW, NEW_IN_WHOLE

Searched = Literal["known", "open", "unknown"]
"""Classes that users will search: all in the training set (known), some of them (open), or unknown."""
Direction = Literal["new_to_old", "old_to_new"]
"""Direction of a map: of queries, or of stored embeddings."""

IN_WHOLE = "new classes in the whole gallery"
"""Items of new classes search themselves and items of as many known classes, learned ones included."""
PROTOCOLS: dict[Searched, tuple[str, ...]] = {
    "known": ("known classes",),
    "open": ("known classes", "half of them new", IN_WHOLE),
    "unknown": ("known classes", "half of them new", "new classes", IN_WHOLE),
}
POPULATIONS = {"known classes": KNOWN, "half of them new": ALL, "new classes": NEW, IN_WHOLE: NEW_IN_WHOLE}
"""Protocol -> population of its queries in ``report.json``."""
FOLDS = 5
"""Most folds. Each holds out its own part of the classes. With more folds, each learns from more, as the saved map does."""
HELD_OUT = 0.3
"""Share of a known class's items that is held out."""
LEARNED = 40_000
"""Most items that a fold learns from; more take longer and change little. All folds are in memory together."""
QUERIES = 1000
"""Most held-out items of known classes, and of new classes. Each is searched."""
NEIGHBOURS = 10
"""Nearest items of the new model that a query should find, for agreement."""
ASKED = 2000
"""Most queries per protocol, over all folds. More make choices slower, and intervals over classes hardly narrower."""
CLASSES = 16
"""Fewest new classes of a fold, if available: every map separates a few classes."""
FEWEST = 4
"""Fewest items of a class to hold some out: two to find each other, two to learn from."""
FEWEST_GROUPS = 10
"""Fewest captioned images for a validation split."""


@dataclass(frozen=True)
class Fold:
    """Split of a training set.

    Args:
        fit_F: rows to learn from.
        queries: protocol -> held-out query rows.
        galleries: protocol -> searched rows; a query never finds itself.
    """

    fit_F: NDArray[np.int64]
    queries: dict[str, NDArray[np.int64]]
    galleries: dict[str, NDArray[np.int64]]


def folds(labels_N: NDArray[np.int64], searched: Searched = "unknown", seed: int = 0) -> Iterator[Fold]:
    """Split a training set several times; every class is new in one fold.

    Args:
        labels_N: classes of the items.
        searched: classes that users will search; ``known`` holds out items but no classes.
        seed: random seed for the split.

    Yields:
        2 to :data:`FOLDS` folds.

    Raises:
        NoValidationDataError: too few items for a validation split.
    """
    from xcompat.models.old_knowledge import samples_of_classes

    draw = np.random.default_rng(seed)
    rows_C = [draw.permutation(rows) for rows in samples_of_classes(labels_N, int(labels_N.max()) + 1) if len(rows) > 1]
    draw.shuffle(rows_C)
    rows_C.sort(key=lambda rows: len(rows) < FEWEST)  # stable: each part gets its share of the classes that can be held out
    large, needed = sum(len(rows) >= FEWEST for rows in rows_C), 2 if searched == "known" else 4
    if large < needed:
        few = f"{needed} classes of {FEWEST} items each are needed, found {large}"
        raise NoValidationDataError(f"too few items for a validation split: {few}")
    n_folds = min(FOLDS, max(2, len(rows_C) // CLASSES))
    parts = [range(number, len(rows_C), n_folds) for number in range(n_folds)] if searched != "known" else [range(0)] * 2
    for number, part in enumerate(parts):
        fold = _hold_out(rows_C, part, number, searched, draw)
        asked = {name: draw.permutation(rows_Q)[: ASKED // len(parts)] for name, rows_Q in fold.queries.items()}
        yield replace(fold, queries={name: np.sort(rows_Q) for name, rows_Q in asked.items()})


def _hold_out(rows_C: list[NDArray[np.int64]], part: range, number: int, searched: Searched, draw: np.random.Generator) -> Fold:
    """Hold out items of the known classes, and all items of a part of the classes."""
    new, known = ([rows for each, rows in enumerate(rows_C) if (each in part) == is_new] for is_new in (True, False))
    split = [_split(rows, number) for rows in known]
    fit_F = np.sort(draw.permutation(np.concatenate([fit for fit, _ in split]))[:LEARNED])
    held = [rows for _, rows in split if len(rows)]
    queries = {"known classes": _enough(held)}
    galleries = dict(queries)
    if searched != "known":
        typical = max(2, int(np.median([len(rows) for rows in held])))
        new_U, cut_U = _enough(new), _enough([rows[:typical] for rows in new])
        queries |= {
            "half of them new": np.concatenate([_enough(held[: len(new)]), cut_U]),
            "new classes": new_U,
            IN_WHOLE: new_U,
        }
        galleries = queries | {IN_WHOLE: np.concatenate([new_U, _enough(known[: len(new)])])}
    return Fold(fit_F, *({name: np.sort(rows[name]) for name in PROTOCOLS[searched]} for rows in (queries, galleries)))


def caption_folds(n_groups: int, seed: int = 0) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Split captioned images twice; held-out groups share no image or caption with the training groups.

    Args:
        n_groups: number of image and caption groups.
        seed: random seed for the split.

    Yields:
        Training groups, and held-out groups that search each other, twice.

    Raises:
        NoValidationDataError: too few groups for a validation split.
    """
    if n_groups < FEWEST_GROUPS:
        few = f"{FEWEST_GROUPS} captioned images are needed, found {n_groups}"
        raise NoValidationDataError(f"too few items for a validation split: {few}")
    order_K = np.random.default_rng(seed).permutation(n_groups)
    held = min(QUERIES, round(HELD_OUT * n_groups))
    for number in range(2):
        rows_K = np.roll(order_K, -number * held)
        yield np.sort(rows_K[held:][:LEARNED]), np.sort(rows_K[:held])


def _split(rows: NDArray[np.int64], number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a class's training rows and held-out rows; each fold holds out different rows."""
    held = max(2, round(HELD_OUT * len(rows))) if len(rows) >= FEWEST else 0
    rows = np.roll(rows, number * held)
    return rows[held:], rows[:held]


def _enough(groups: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return groups with :data:`QUERIES` rows in total, cut if they would be fewer than :data:`CLASSES`."""
    most = max(QUERIES // CLASSES, math.ceil(QUERIES / len(groups)))
    groups = [group[:most] for group in groups]
    ends = np.cumsum([len(group) for group in groups])
    return np.concatenate(groups[: int(np.searchsorted(ends, QUERIES)) + 1])
