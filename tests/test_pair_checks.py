"""Checks of pairs: wrong pairs are dropped, copies are held out once, and chance is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xcompat.mapping import PairedEmbeddings, fit_map
from xcompat.mapping.agreement import choose_by_labels_or_agreement
from xcompat.mapping.candidates import LINES, WHITENED, Candidate
from xcompat.mapping.choice_report import as_json, describe_choice
from xcompat.mapping.cleaning import drop_wrong_pairs
from xcompat.mapping.held_out import HeldOutClasses
from xcompat.mapping.pair_checks import find_right_pairs, first_of_copies

ITEMS, NEW, OLD = 600, 24, 16
TEXTS = Path(__file__).parents[2] / "shared" / "data" / "text" / "embeddings"


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def made(seed: int = 0, noise: float = 0.4, items: int = ITEMS) -> tuple[np.ndarray, np.ndarray]:
    """Embed the same items by two models, one of which sees them through noise."""
    draw = np.random.default_rng(seed)
    meant = draw.standard_normal((items, OLD))
    turn = np.linalg.qr(draw.standard_normal((NEW, NEW)))[0][:OLD]
    return unit(meant @ turn), unit(meant + noise * draw.standard_normal(meant.shape))


def mixed_up(old: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Give the first items the old embeddings of each other; return them and which they are."""
    count = round(share * len(old))
    return np.concatenate([np.roll(old[:count], 1, axis=0), old[count:]]), np.arange(len(old)) < count


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_wrong_pairs_are_found(share: float) -> None:
    new, old = made()
    wrong_old, is_wrong = mixed_up(old, share)
    kept = find_right_pairs(new, wrong_old)
    assert kept is not None
    assert (~kept[is_wrong]).mean() > 0.95 and kept[~is_wrong].mean() > 0.97


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_right_pairs_are_never_dropped(noise: float, seed: int) -> None:
    assert find_right_pairs(*made(seed, noise)) is None


@pytest.mark.skipif(not TEXTS.exists(), reason="the embeddings of real text models are not here")
@pytest.mark.parametrize("old", ["wordllama", "paraphrase-minilm-l3"])
def test_real_pairs_are_never_dropped(old: str) -> None:
    for name in ("scifact_docs", "generic"):
        sides = [np.load(TEXTS / model / f"{name}.npy")[:2000] for model in ("all-minilm-l6", old)]
        assert find_right_pairs(*sides) is None, name
    mixed, is_wrong = mixed_up(sides[1], 0.1)
    kept = find_right_pairs(sides[0], mixed)
    assert kept is not None and (~kept[is_wrong]).mean() > 0.8 and kept[~is_wrong].mean() > 0.98


def test_dropped_pairs_are_counted_and_the_map_is_better() -> None:
    new, old = made()
    wrong_old, is_wrong = mixed_up(old, 0.3)
    right = drop_wrong_pairs(PairedEmbeddings(new, wrong_old))
    assert right.rows_R is not None and right.dropped == len(old) - len(right.pairs) == len(old) - len(right.rows_R)
    assert f"Dropped {right.dropped} of 600 pairs" in right.pairs.notes[-1]
    fitted = fit_map(wrong_old, new)
    assert fitted.dropped == right.dropped
    cosines = (fitted.to_space(new) * old).sum(1)[is_wrong]
    assert cosines.mean() > 0.8, "items whose pair was wrong are mapped to their own place"


def test_copies_are_the_pairs_equal_on_both_sides() -> None:
    new, old = made(items=50)
    new, old = np.concatenate([new, new[:5], new[5:8]]), np.concatenate([old, old[:5], old[10:13]])
    first = first_of_copies(new.astype(np.float16), old)
    assert first is not None
    np.testing.assert_array_equal(first, [*range(50), 55, 56, 57])
    assert first_of_copies(new[:50], old[:50]) is None


def test_copies_are_held_out_once_and_said() -> None:
    new, old = made(items=200)
    labels = np.arange(200) % 10
    pairs = PairedEmbeddings(*(np.concatenate([side, side]) for side in (new, old)), np.concatenate([labels, labels]))
    choice = choose_by_labels_or_agreement(pairs, "unknown", 0, {WHITENED: LINES[WHITENED]})
    alone = choose_by_labels_or_agreement(PairedEmbeddings(new, old, labels), "unknown", 0, {WHITENED: LINES[WHITENED]})
    assert choice.copies == 200 and as_json(choice)["copies"] == 200 and choice.floor == alone.floor
    assert any("200 items are exact copies of others" in line for line in describe_choice(choice))


@pytest.mark.parametrize("seed", range(9))
def test_labels_at_random_are_no_better_than_chance(seed: int) -> None:
    new, old = made(seed, items=480)
    labels = np.random.default_rng(100 + seed).permutation(np.arange(480) % 12)
    held = HeldOutClasses(PairedEmbeddings(new, old, labels), "unknown", LINES, seed)
    assert held.is_by_chance(Candidate(WHITENED))


def test_chance_and_gains_are_not_said_together() -> None:
    new, old = made(items=480)
    choice = choose_by_labels_or_agreement(
        PairedEmbeddings(new, old, np.arange(480) % 12), "unknown", 0, {WHITENED: LINES[WHITENED]}
    )
    lines = describe_choice(replace(choice, by_chance=True))
    assert lines[0].startswith("! No better than chance")
    assert not any(line.startswith("New queries are surely at or above") for line in lines)
