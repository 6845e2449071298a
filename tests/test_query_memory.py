"""Queries that remember: against loops over single embeddings, on every view that can wear them, and what stays as it was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import Fingerprint, XcompatError
from xcompat.methods import METHODS, ProcrustesModel
from xcompat.models import describe_old, memory_contents, query_memory
from xcompat.models.memory_contents import ClassMemoryContents, ClassStatistics
from xcompat.models.query_memory import LearnedTransform, QueryMemory

NEW, OLD = 12, 8


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def clustered(
    classes: int, each: int, dim: int, seed: int, spread: float = 0.5, noise: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    centres, labels = unit(classes, dim, seed), np.repeat(np.arange(classes), each)
    noisy = centres[labels] + spread * unit(len(labels), dim, seed + 1 if noise is None else noise)
    return noisy / np.linalg.norm(noisy, axis=1, keepdims=True), labels


def filled(entries: int = 6, seed: int = 0, **settings: Any) -> QueryMemory:
    new, labels = clustered(entries, 5, NEW, seed)
    old, _ = clustered(entries, 5, OLD, seed + 10)
    return remembering(new, old, labels, **settings)


def remembering(new: np.ndarray, old: np.ndarray, labels: np.ndarray, sharpness: float = 30.0, share: float = 0.5) -> QueryMemory:
    of_new, of_old = (ClassStatistics.compute(side, labels, labels.max() + 1) for side in (new, old))
    transform = LearnedTransform.solve(of_old.mean_d, of_old.within_dd, 0.25, 0.3)
    return ClassMemoryContents.compute(of_new, of_old, new, labels).build_memory(transform, sharpness, share)


def normalised(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


def test_it_is_what_a_loop_over_queries_and_entries_gives() -> None:
    memory = filled(sharpness=20.0, share=0.7)
    state = {name: tensor.double().numpy() for name, tensor in memory.state_dict().items()}

    def in_transform(row: np.ndarray, of: str) -> np.ndarray:
        return normalised((normalised(row) - state[f"{of}.mean_d"]) @ state[f"{of}.matrix_dd"])

    new, own = unit(4, NEW, 7), unit(4, OLD, 8)
    for x, q, found in zip(new, own, memory(torch.from_numpy(new), torch.from_numpy(own)), strict=True):
        key = in_transform(x, "key_metric")
        cosines = [float(key @ entry) for entry in state["keys_KD"]]
        weights = np.exp(20.0 * (np.array(cosines) - max(cosines)))
        recalled = sum(weight * value for weight, value in zip(weights / weights.sum(), state["values_Kd"], strict=True))
        gate = 1 / (1 + np.exp(-(state["gate"][0] * max(cosines) + state["gate"][1])))
        expected = normalised(in_transform(q, "metric") + 0.7 * gate * recalled)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
        assert memory.familiarity(memory.key_cosines(torch.from_numpy(x[None]))).item() == pytest.approx(gate, abs=1e-5)


def test_a_metric_whitens_what_lies_within_classes() -> None:
    old, labels = clustered(5, 400, OLD, 0)
    within = old - np.stack([old[labels == label].mean(0) for label in range(5)])[labels]
    statistics = ClassStatistics.compute(old, labels, 5)
    covariance = within.T @ within / len(old)
    np.testing.assert_allclose(statistics.within_dd.numpy(), covariance, atol=1e-6)
    whitened = within @ LearnedTransform.solve(statistics.mean_d, statistics.within_dd, 0.5, 1e-9).matrix_dd.numpy()
    found = np.cov(whitened.T, bias=True)
    np.testing.assert_allclose(found, np.eye(OLD) * found[0, 0], atol=1e-3 * found[0, 0])
    only_centred = LearnedTransform.solve(statistics.mean_d, statistics.within_dd, 0.0, 0.3)
    np.testing.assert_allclose(only_centred.matrix_dd.numpy(), np.eye(OLD), atol=1e-6)


def test_statistics_do_not_depend_on_blocks_or_on_unreadable_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    old, labels = clustered(4, 9, OLD, 3)
    whole = ClassStatistics.compute(old, labels, 5)  # of the fifth class there is none
    assert whole.counts_C.tolist() == [9, 9, 9, 9, 0] and not whole.means_Cd[4].any()
    monkeypatch.setattr(memory_contents, "ROWS", 7)
    holes = np.insert(old, 5, np.nan, axis=0)
    parts = ClassStatistics.compute(holes, np.insert(labels, 5, 2), 5)
    for name in ("counts_C", "means_Cd", "mean_d", "within_dd"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_the_gate_tells_classes_that_are_remembered_from_others() -> None:
    both, labels = clustered(12, 30, NEW, 5, spread=0.8)
    old, _ = clustered(12, 30, OLD, 6)
    known = labels < 6
    memory = remembering(both[known], old[known], labels[known])
    fresh, _ = clustered(12, 30, NEW, 5, spread=0.8, noise=77)  # other samples of the same classes
    opened = memory.familiarity(memory.key_cosines(torch.from_numpy(fresh)))
    assert opened[: known.sum()].mean() > 0.7 > 0.3 > opened[known.sum() :].mean()


def test_a_sample_does_not_recognise_itself() -> None:
    """With two samples a class, each is compared with the other one; with itself in the mean all would look known."""
    new, labels = clustered(40, 2, NEW, 9, spread=3.0)
    old, _ = clustered(40, 2, OLD, 10)
    memory = remembering(new, old, labels)
    gates = memory.familiarity(memory.key_cosines(torch.from_numpy(unit(200, NEW, 11))))
    assert gates.std() < 0.15, "classes that mean nothing open no gate"


WEARING = {
    "procrustes": {},
    "ridge": {},
    "residual_mlp": {},
    "drift_adapter": {},
    "query_map": {"shape": "residual"},
    "projection": {},
    "lce": {},
}


def wearing(method: str, **options: Any) -> Any:
    older = Fingerprint.from_string("older")
    old = describe_old(Fingerprint.from_string("old"), OLD, compatible_with=[older])
    torch.manual_seed(0)
    model = METHODS[method](METHODS[method].config_class(old=old, embedding_dim=NEW, **WEARING.get(method, {}), **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("method", WEARING)
def test_any_view_wears_it_and_what_is_stored_does_not(method: str, tmp_path: Path) -> None:
    model, embeds = wearing(method), torch.from_numpy(unit(5, NEW, 1))
    own, before, stored_as = model.to_space(embeds).detach(), model.fingerprint(), model.stored_fingerprint()
    memory = filled(sharpness=25.0, share=0.5)
    model.remember(memory)
    worn = model.to_space(embeds).detach()
    torch.testing.assert_close(worn, memory(embeds, own), rtol=0, atol=0)
    assert not torch.allclose(worn, own, atol=1e-2)
    torch.testing.assert_close(model.to_gallery_space(embeds).detach(), own, rtol=0, atol=0)
    torch.testing.assert_close(model.to_space(embeds, model.compatible_with[1]).detach(), own, rtol=0, atol=0)
    assert model.stored_fingerprint() == stored_as and model.fingerprint() != before and model.view_layers is None
    model.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again.to_space(embeds).detach(), worn, rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.config.memory == {"entries": 6, "sharpness": 25.0, "share": 0.5}
    half = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    torch.testing.assert_close(half.to_space(embeds).detach(), worn, rtol=0, atol=0.1)
    assert again.remember(None).fingerprint() == before and torch.equal(again.to_space(embeds), own)


def test_few_cosines_are_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, shapes = filled(), []
    new, own = torch.from_numpy(unit(7, NEW, 7)), torch.from_numpy(unit(7, OLD, 8))
    whole, resemblance = memory(new, own), memory.key_cosines
    monkeypatch.setattr(query_memory, "_HELD", 13)
    monkeypatch.setattr(memory, "key_cosines", lambda block: shapes.append(len(block)) or resemblance(block))
    torch.testing.assert_close(memory(new, own), whole)
    assert shapes == [2, 2, 2, 1], "of six entries"


@pytest.mark.parametrize("remembers", ["nothing", "transform", "classes"])
def test_the_page_that_does_without_the_package_gives_the_same_queries(remembers: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "queries_in_numpy.md").read_text()
    given: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], given)  # noqa: S102 - what the page shows is what is tried
    memory = filled()
    model = wearing("procrustes").remember({"nothing": None, "transform": memory.without_entries(), "classes": memory}[remembers])
    model.export(tmp_path / "model")
    embeds = torch.from_numpy(unit(9, NEW, 3).astype(np.float32))
    found = given["queries"](embeds.numpy(), tmp_path / "model")
    np.testing.assert_allclose(found, model.to_space(embeds).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"entries": 3, "sharpness": 20.0}, "memory.share is None"),
        ({"entries": -1, "sharpness": 20.0, "share": 0.5}, "memory.entries is -1"),
        ({"entries": 2.5, "sharpness": 20.0, "share": 0.5}, "memory.entries is 2.5"),
        ({"entries": 3, "sharpness": float("nan"), "share": 0.5}, "memory.sharpness is nan"),
        ({"entries": 3, "sharpness": float("inf"), "share": 0.5}, "memory.sharpness is inf"),
        ({"entries": 3, "sharpnes": 20.0, "share": 0.5}, "did you mean 'sharpness'"),
        ([3], "memory is"),
    ],
)
def test_settings_that_are_none_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(XcompatError, match=said):
        wearing("procrustes", memory=settings)


def test_a_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(XcompatError, match="has no old space for a memory"):
        METHODS["independent"](METHODS["independent"].config_class(embedding_dim=NEW, memory=filled().settings))
    with pytest.raises(XcompatError, match="from 12 to 8 dimensions does not fit ProcrustesModel, which maps 8 to 12"):
        wearing("procrustes", direction="old_to_new").remember(filled())
    with pytest.raises(XcompatError, match="from 8 to 12 dimensions does not fit RidgeModel, which maps 12 to 8"):
        wearing("ridge").remember(QueryMemory(OLD, NEW, 3))


def test_one_class_or_none_cannot_be_remembered() -> None:
    new, labels = clustered(1, 6, NEW, 0)
    statistics = ClassStatistics.compute(new, labels, 1)
    with pytest.raises(XcompatError, match="two classes"):
        ClassMemoryContents.compute(statistics, statistics, new, labels)
    with pytest.raises(XcompatError, match="none is readable"):
        ClassStatistics.compute(np.full((3, NEW), np.nan, np.float32), np.zeros(3, np.int64), 1)
    single = ClassStatistics.compute(np.eye(4, dtype=np.float32), np.arange(4), 4)
    with pytest.raises(XcompatError, match="different embeddings within classes"):
        LearnedTransform.solve(single.mean_d, single.within_dd, 0.25, 0.3)


def test_scaled_procrustes_is_the_nearest_multiple_of_a_rotation() -> None:
    new, turn = unit(60, OLD, 1), np.linalg.qr(unit(OLD, OLD, 2))[0].astype(np.float32)
    old = F.normalize(torch.from_numpy(0.5 * new @ turn + 0.8 * unit(1, OLD, 4)), dim=1)
    model = ProcrustesModel(
        ProcrustesModel.config_class(
            old=describe_old(Fingerprint.from_string("old"), OLD), embedding_dim=OLD, centre=True, scale=True
        )
    ).fit([(torch.from_numpy(new), old)])
    centred_new, centred_old = new - new.mean(0), (old - old.mean(0)).numpy()

    def loss(scale: float) -> float:
        rotation = model.weight.detach().numpy() / np.linalg.norm(model.weight.detach().numpy(), 2)
        return float(((scale * centred_new @ rotation - centred_old) ** 2).sum())

    scale = float(np.linalg.norm(model.weight.detach().numpy(), 2))
    assert loss(scale) <= min(loss(scale * 1.01), loss(scale * 0.99)) and 0.2 < scale < 0.8
