"""Scenarios against naive loops: who sees which class and which sample."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from xcompat.core.errors import XcompatError
from xcompat.data import LabelledImages, Subset, old_and_new_rows, select_subset
from xcompat.data.scenarios import Scenario, compute_shared_fraction

SCENARIOS: list[Scenario] = ["extended-data", "extended-class", "open-data", "open-class"]
percents = st.integers(1, 99)


def naive(labels: list[int], n_classes: int, scenario: str, percent: int) -> tuple[list[int], list[int]]:
    """Walk through the samples one by one, counting in whole numbers."""
    old, seen = [], dict.fromkeys(range(n_classes), 0)
    n_old = max(1, n_classes * percent // 100)
    for row, label in enumerate(labels):
        total = labels.count(label)
        quota = (total * percent + 99) // 100
        if scenario == "open-data":
            quota = min(quota, total - 1)
        if label < n_old if scenario.endswith("class") else seen[label] < quota:
            old.append(row)
        seen[label] += 1
    return old, [row for row in range(len(labels)) if scenario.startswith("extended") or row not in old]


@given(
    counts=st.lists(st.integers(2, 12), min_size=2, max_size=12),
    percent=percents,
    scenario=st.sampled_from(SCENARIOS),
    seed=st.integers(0, 99),
)
def test_scenarios_match_a_loop(counts: list[int], percent: int, scenario: Scenario, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    old, new = old_and_new_rows(labels, len(counts), scenario, percent / 100)
    assert (old.tolist(), new.tolist()) == naive(labels.tolist(), len(counts), scenario, percent)
    everything = set(range(len(labels)))
    assert set(old.tolist()) | set(new.tolist()) == everything
    assert old.size and new.size
    if scenario.startswith("extended"):
        assert set(new.tolist()) == everything
    else:
        assert not set(old.tolist()) & set(new.tolist())
    classes_old, classes_new = set(labels[old].tolist()), set(labels[new].tolist())
    if scenario == "open-class":
        assert max(classes_old) < min(classes_new)
    if scenario.endswith("data"):
        assert classes_old == classes_new == set(range(len(counts)))
        assert np.bincount(labels[old]).tolist() == [
            min(-int(-Fraction(percent, 100) * n // 1), n - (scenario == "open-data")) for n in counts
        ]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_that_leave_nothing(scenario: Scenario) -> None:
    for fraction in (0.0, 1.0, -1.0):
        with pytest.raises(XcompatError, match="must be between 0 and 1"):
            old_and_new_rows(np.array([0, 0]), 1, scenario, fraction)
    if scenario == "open-data":
        with pytest.raises(XcompatError, match="class 1 .* has only 1 sample"):
            old_and_new_rows(np.array([0, 0, 1]), 2, scenario, 0.5)
    if scenario == "open-class":
        with pytest.raises(XcompatError, match="no sample to the new model"):
            old_and_new_rows(np.array([0, 0]), 1, scenario, 0.5)
    if scenario.endswith("class"):
        with pytest.raises(XcompatError, match="no sample to the old model"):
            old_and_new_rows(np.array([2, 3]), 4, scenario, 0.5)


@pytest.fixture(scope="module")
def labelled() -> LabelledImages:
    labels = [0, 1, 2, 3, 4, 3, 2, 1, 0, 0, 0, 2]
    columns = {
        "image": [{"bytes": b"", "path": f"{n}.png"} for n in range(12)],
        "id": [str(n) for n in range(12)],
        "label": labels,
    }
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "id": datasets.Value("string"), "label": datasets.Value("int64")}
    )
    return LabelledImages(datasets.Dataset.from_dict(columns, features), ["a", "b", "c", "d", "e"])


def rows_of(images: LabelledImages) -> list[int]:
    return [int(name) for name in images.dataset["id"]]


def test_subsets_keep_the_class_order_unless_reindexed(labelled: LabelledImages, tmp_path: Path) -> None:
    new = select_subset(labelled, Subset(scenario="open-class", fraction=0.4, side="new"))
    assert new.classes == labelled.classes
    assert new.present_classes() == ["c", "d", "e"]
    assert new.labels().tolist() == [2, 3, 4, 3, 2, 2]
    alone = new.reindex_labels()
    assert alone.classes == ["c", "d", "e"]
    assert alone.labels().tolist() == [0, 1, 2, 1, 0, 0]
    assert rows_of(alone) == rows_of(new) == [2, 3, 4, 5, 6, 11]
    assert alone.class_names() == new.class_names()
    listed = select_subset(labelled, Subset(classes=["d", "a"]))
    assert listed.present_classes() == ["a", "d"]  # in class order, whatever the order of the list
    (tmp_path / "few.txt").write_text("d\na\n")
    assert rows_of(select_subset(labelled, Subset(classes=str(tmp_path / "few.txt")))) == rows_of(listed) == [0, 3, 5, 8, 9, 10]
    assert rows_of(select_subset(labelled, Subset(limit_per_class=1))) == [0, 1, 2, 3, 4]
    assert rows_of(select_subset(labelled, Subset(classes=["a", "c"], limit_per_class=2))) == [0, 2, 6, 8]
    numbered = LabelledImages(labelled.dataset, ["7", "8", "9", "10", "11"])
    assert select_subset(numbered, Subset(classes=[8, 10])).present_classes() == ["8", "10"]  # YAML reads numbers


@pytest.mark.parametrize(
    ("scenario", "old_limit", "new_limit", "share"),
    [
        ("extended-data", 1, 1, 1),
        ("extended-data", 1, 2, 5 / 9),  # of the nine first two of five classes
        ("extended-data", None, None, 7 / 12),
        ("open-class", 1, 1, 0),
    ],
)
def test_what_the_old_model_knows_of_the_new_ones_images(
    labelled: LabelledImages, scenario: Scenario, old_limit: int | None, new_limit: int | None, share: float
) -> None:
    sides = {
        side: Subset(scenario=scenario, fraction=0.5, side=side, limit_per_class=limit)
        for side, limit in (("old", old_limit), ("new", new_limit))
    }
    assert compute_shared_fraction(labelled, sides["new"], sides["old"]) == pytest.approx(share)


def test_bad_class_lists(labelled: LabelledImages) -> None:
    many = LabelledImages(labelled.dataset, [*labelled.classes, *(f"class {n}" for n in range(50))])
    for images, classes, message in (
        (labelled, ["a", "f"], "class 'f' is not among the 5 classes of the data; known: a, b, c, d, e"),
        (many, ["class3"], "class 'class3' is not among the 55 .*did you mean 'class 3'"),
        (many, ["xyz"], "known are 55, first 'a'"),
        (many, ["a", "class 7"], "class 'class 7' has no image"),
        (many, [], "list of classes is empty"),
    ):
        with pytest.raises(XcompatError, match=message):
            select_subset(images, Subset(classes=classes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scenario": "open-class"}, "give all three"),
        ({"fraction": 0.3}, "give all three"),
        ({"scenario": "open-class", "fraction": 0.3, "side": "old", "classes": ["a"]}, "scenario or classes"),
        ({"scenario": "open-class", "fraction": 1.0, "side": "old"}, "less than 1"),
        ({"scenario": "open-classes", "fraction": 0.3, "side": "old"}, "open-class"),
        ({"limit": 3}, "not permitted"),
        ({"limit_per_class": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_subsets(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Subset.model_validate(fields)
