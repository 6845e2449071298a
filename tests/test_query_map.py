"""The query map: its loss against a double loop, where it starts, and what it does without labels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.losses import bank_contrast_loss
from xcompat.models import QueryMapConfig, QueryMapModel, describe_old
from xcompat.models.closed_form import Moments, solve_procrustes
from xcompat.models.old_knowledge import OldKnowledge

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def unit(rows: int, dim: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)


def make(**options: object) -> QueryMapModel:
    old = describe_old(Fingerprint.from_string("old"), dim=4)
    model = QueryMapModel(QueryMapConfig(old=old, embedding_dim=6, **options))
    model.prepare(OldKnowledge(3, LABELS.numpy(), unit(6, 4, 1).numpy()), unit(6, 6, 2).numpy())
    return model


def naive_loss(mapped: torch.Tensor, own: torch.Tensor, bank: torch.Tensor, scale: float, labels: list[int] | None) -> float:
    total = 0.0
    for row in range(len(mapped)):
        others = [other for other in range(len(bank)) if other != row]
        scores = {other: scale * float(mapped[row] @ bank[other]) for other in others}
        positives = [other for other in others if labels is not None and labels[other] == labels[row]]
        if not positives:
            scores[row] = scale * float(mapped[row] @ own[row])
            positives = [row]
        norm = math.log(sum(math.exp(score) for score in scores.values()))
        total -= sum(scores[positive] - norm for positive in positives) / len(positives)
    return total / len(mapped)


@pytest.mark.parametrize("labelled", [True, False])
def test_bank_contrast_is_the_double_loop(labelled: bool) -> None:
    mapped, bank = unit(6, 4, 3).double(), unit(6, 4, 1).double()
    rows = torch.arange(6)
    labels = LABELS if labelled else None
    loss = bank_contrast_loss(mapped, bank, bank, 7.0, labels, labels, rows, rows)
    assert float(loss) == pytest.approx(naive_loss(mapped, bank, bank, 7.0, LABELS.tolist() if labelled else None), rel=1e-5)


def test_a_row_that_could_not_be_read_is_neither_positive_nor_negative() -> None:
    mapped, bank = unit(2, 4, 3), unit(6, 4, 1)
    kept = torch.tensor([0, 1, 3, 4, 5])
    broken = bank.clone()
    broken[2] = torch.nan
    given = (mapped, bank[:2], broken, 7.0, LABELS[:2], LABELS, torch.arange(2), torch.arange(6))
    without = (mapped, bank[:2], bank[kept], 7.0, LABELS[:2], LABELS[kept], torch.arange(2), kept)
    torch.testing.assert_close(bank_contrast_loss(*given), bank_contrast_loss(*without))


@pytest.mark.parametrize("shape", ["linear", "residual"])
def test_it_starts_at_centred_procrustes(shape: str) -> None:
    model = make(shape=shape, pull=0.0)
    weight, bias = solve_procrustes(Moments.of([(unit(6, 6, 2), unit(6, 4, 1))]), centre=True)
    inputs = unit(5, 6, 9)
    start = F.normalize(inputs @ weight.float() + bias.float(), dim=-1)
    torch.testing.assert_close(model.view(inputs), start, atol=1e-6, rtol=1e-5)
    pulled = make(shape=shape)
    batch = {"new_embeds": unit(6, 6, 2), "old_embeds": unit(6, 4, 1), "labels": LABELS, "index": torch.arange(6)}
    torch.testing.assert_close(pulled(**batch).loss, model(**batch).loss, atol=1e-6, rtol=1e-6)  # not yet moved


def test_its_bank_is_drawn_when_it_is_too_large_and_exact_when_it_is_not() -> None:
    batch = {"new_embeds": unit(6, 6, 2), "old_embeds": unit(6, 4, 1), "labels": LABELS, "index": torch.arange(6)}
    exact = make(bank_size=6)(**batch).loss
    assert torch.equal(exact, make(bank_size=100)(**batch).loss)
    model = make(bank_size=3)
    torch.manual_seed(0)
    first = model(**batch).loss
    torch.manual_seed(0)
    assert torch.equal(model(**batch).loss, first) and not torch.equal(first, exact)


def test_without_labels_prototypes_are_refused_and_the_bank_is_not() -> None:
    batch = {"new_embeds": unit(6, 6, 2), "old_embeds": unit(6, 4, 1), "index": torch.arange(6)}
    assert make()(**batch).loss.isfinite()
    with pytest.raises(XcompatError, match="loss prototypes needs classes"):
        make(loss="prototypes")(**batch)


def test_what_is_saved_is_the_map_alone() -> None:
    assert set(make().state_dict()) == {"linear.weight", "linear.bias"}


def test_it_refuses_prototypes_alone() -> None:
    model = make()
    with pytest.raises(XcompatError, match="query_map needs an old embedding of every training image"):
        model.prepare(OldKnowledge(2, np.zeros(0, np.int64), given_prototypes_Cd=np.eye(2, 4, dtype=np.float32)), np.eye(2, 6))
