"""Queries that remember, from single embeddings or from codes: against loops, on every view, saved, damaged and refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refuses
from safetensors.torch import load_file, save_file
from schedule import mostly_nightly_rows
from store_places import unit_vectors as unit
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import Fingerprint, ProcrustesModel, XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.export import to_onnx
from xcompat.methods import METHODS
from xcompat.models import describe_old, memory_contents, query_memory
from xcompat.models.indexed_memory import IndexedMemory
from xcompat.models.memory_contents import ClassMemoryContents, ClassStatistics, PairMemoryContents
from xcompat.models.query_memory import LearnedTransform, QueryMemory

NEW, OLD = 12, 8


def clustered(classes: int, each: int, dim: int, seed: int, spread: float = 0.5, noise: int = 0) -> tuple[np.ndarray, np.ndarray]:
    centres, labels = unit(classes, dim, seed), np.repeat(np.arange(classes), each)
    noisy = centres[labels] + spread * unit(len(labels), dim, noise or seed + 1)
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


def test_the_gate_opens_for_remembered_classes_alone() -> None:
    both, labels = clustered(12, 30, NEW, 5, spread=0.8)
    old, _ = clustered(12, 30, OLD, 6)
    known = labels < 6
    memory = remembering(both[known], old[known], labels[known])
    fresh, _ = clustered(12, 30, NEW, 5, spread=0.8, noise=77)  # other samples of the same classes
    opened = memory.familiarity(memory.key_cosines(torch.from_numpy(fresh)))
    assert opened[: known.sum()].mean() > 0.7 > 0.3 > opened[known.sum() :].mean()
    new, labels = clustered(40, 2, NEW, 9, spread=3.0)  # each of two samples is compared with the other one, not with itself
    old, _ = clustered(40, 2, OLD, 10)
    memory = remembering(new, old, labels)
    gates = memory.familiarity(memory.key_cosines(torch.from_numpy(unit(200, NEW, 11))))
    assert gates.std() < 0.15, "classes that mean nothing open no gate"


WEARING = ("procrustes", "ridge", "residual_mlp", "drift_adapter", "query_map", "projection", "lce")


def wearing(method: str, **options: Any) -> Any:
    older = Fingerprint.from_string("older")
    old = describe_old(Fingerprint.from_string("old"), OLD, compatible_with=[older])
    options |= {"shape": "residual"} if method == "query_map" else {}
    torch.manual_seed(0)
    model = METHODS[method](METHODS[method].config_class(old=old, embedding_dim=NEW, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("method", WEARING)
def test_any_view_wears_it_and_what_is_stored_does_not(method: str, tmp_path: Path) -> None:
    model, embeds = wearing(method), torch.from_numpy(unit(5, NEW, 1))
    own, before = model.to_space(embeds).detach(), model.lineage
    memory = filled(sharpness=25.0, share=0.5)
    model.remember(memory)
    worn = model.to_space(embeds).detach()
    torch.testing.assert_close(worn, memory(embeds, own), rtol=0, atol=0)
    assert not torch.allclose(worn, own, atol=1e-2)
    torch.testing.assert_close(model.to_gallery_space(embeds).detach(), own, rtol=0, atol=0)
    torch.testing.assert_close(model.to_space(embeds, model.compatible_with[1]).detach(), own, rtol=0, atol=0)
    assert model.lineage.stores == before.stores and model.fingerprint() != before.model and model.view_layers is None
    model.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again.to_space(embeds).detach(), worn, rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.config.memory == {"entries": 6, "sharpness": 25.0, "share": 0.5}
    half = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    torch.testing.assert_close(half.to_space(embeds).detach(), worn, rtol=0, atol=0.1)
    assert again.remember(None).lineage == before and torch.equal(again.to_space(embeds), own)


def test_blocks_change_neither_queries_nor_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, shapes = filled(), []
    new, own = torch.from_numpy(unit(7, NEW, 7)), torch.from_numpy(unit(7, OLD, 8))
    whole, resemblance = memory(new, own), memory.key_cosines
    monkeypatch.setattr(query_memory, "_HELD", 13)
    monkeypatch.setattr(memory, "key_cosines", lambda block: shapes.append(len(block)) or resemblance(block))
    torch.testing.assert_close(memory(new, own), whole)
    assert shapes == [2, 2, 2, 1], "of six entries"
    old, labels = clustered(4, 9, OLD, 3)
    whole = ClassStatistics.compute(old, labels, 5)  # of the fifth class there is none
    assert whole.counts_C.tolist() == [9, 9, 9, 9, 0] and not whole.means_Cd[4].any()
    monkeypatch.setattr(memory_contents, "ROWS", 7)
    holes = np.insert(old, 5, np.nan, axis=0)
    parts = ClassStatistics.compute(holes, np.insert(labels, 5, 2), 5)
    for name in ("counts_C", "means_Cd", "mean_d", "within_dd"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


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


INDEXED = {"entries": 3, "sharpness": 20.0, "share": 0.5, "codec": "SQ8", "first": 8, "lists": 1, "nearest": 2, "probes": 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"entries": 3, "sharpness": 20.0}, "memory.share is None"),
        ({"entries": -1, "sharpness": 20.0, "share": 0.5}, "memory.entries is -1"),
        ({"entries": 2.5, "sharpness": 20.0, "share": 0.5}, "memory.entries is 2.5"),
        ({"entries": 3, "sharpness": float("nan"), "share": 0.5}, "memory.sharpness is nan"),
        ({"entries": 3, "sharpnes": 20.0, "share": 0.5}, "did you mean 'sharpness'"),
        ([3], "memory is"),
        (INDEXED | {"codec": "Flat"}, "memory.codec is 'Flat'; use SQ8, SQ4"),
        (INDEXED | {"codec": "PQ64,RFlat"}, "memory.codec is"),
        (INDEXED | {"codec": 8}, "memory.codec is 8"),
        (INDEXED | {"codec": "PQ5"}, "codec PQ5 does not fit embeddings of 8 dimensions"),
        (INDEXED | {"lists": 0}, "memory.lists is 0"),
        (INDEXED | {"nearest": 2.5}, "memory.nearest is 2.5"),
        (INDEXED | {"probes": None}, "memory.probes is None"),
        (INDEXED | {"entries": 0}, "memory.entries is 0; set a number of at least 1"),
        (INDEXED | {"list": 3}, "did you mean 'lists'"),
    ],
)
def test_settings_that_are_none_are_refused(settings: Any, said: str) -> None:
    refuses(said, wearing, "procrustes", memory=settings)


def test_a_memory_that_does_not_fit_is_refused(image_folder_of: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="has no old space for a memory"):
        METHODS["independent"](METHODS["independent"].config_class(embedding_dim=NEW, memory=filled().settings))
    with pytest.raises(XcompatError, match="from 12 to 8 dimensions does not fit ProcrustesModel, which maps 8 to 12"):
        wearing("procrustes", direction="old_to_new").remember(filled())
    with pytest.raises(XcompatError, match="from 8 to 12 dimensions does not fit RidgeModel, which maps 12 to 8"):
        wearing("ridge").remember(QueryMemory(OLD, NEW, 3))
    new, labels = clustered(1, 6, NEW, 0)
    statistics = ClassStatistics.compute(new, labels, 1)
    refuses("two classes", ClassMemoryContents.compute, statistics, statistics, new, labels)
    refuses("none is readable", ClassStatistics.compute, np.full((3, NEW), np.nan, np.float32), np.zeros(3, np.int64), 1)
    single = ClassStatistics.compute(np.eye(4, dtype=np.float32), np.arange(4), 4)
    refuses("different embeddings within classes", LearnedTransform.solve, single.mean_d, single.within_dd, 0.25, 0.3)
    refuses("needs at least 256 entries, not 100", holding, "PQ8", KEYS[:100])
    old = describe_old(Fingerprint.from_string("old"), dim=VALUE_DIM)
    model = METHODS["ridge"].from_encoder(image_folder_of["timm_wrapper"], old=old)
    model.remember(holding(keys=unit(50, model.config.embedding_dim, 0)))
    refuses("cannot be exported: make the map with --memory-codec", to_onnx, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scaled_procrustes_is_the_nearest_multiple_of_a_rotation() -> None:
    new, turn = unit(60, OLD, 1), np.linalg.qr(unit(OLD, OLD, 2))[0].astype(np.float32)
    old = F.normalize(torch.from_numpy(0.5 * new @ turn + 0.8 * unit(1, OLD, 4)), dim=1)
    described = describe_old(Fingerprint.from_string("old"), OLD)
    config = ProcrustesModel.config_class(old=described, embedding_dim=OLD, centre=True, scale=True)
    model = ProcrustesModel(config).fit([(torch.from_numpy(new), old)])
    centred_new, centred_old = new - new.mean(0), (old - old.mean(0)).numpy()

    def loss(scale: float) -> float:
        rotation = model.weight.detach().numpy() / np.linalg.norm(model.weight.detach().numpy(), 2)
        return float(((scale * centred_new @ rotation - centred_old) ** 2).sum())

    scale = float(np.linalg.norm(model.weight.detach().numpy(), 2))
    assert loss(scale) <= min(loss(scale * 1.01), loss(scale * 0.99)) and 0.2 < scale < 0.8


ENTRIES, KEY_DIM, VALUE_DIM = 400, 144, 16  # of the new dimensions 128 are compared first


def near(rows: np.ndarray, seed: int) -> torch.Tensor:
    return F.normalize(torch.from_numpy(rows + 0.7 * unit(*rows.shape, seed)), dim=1)


KEYS, VALUES = unit(ENTRIES, KEY_DIM, 0), unit(ENTRIES, VALUE_DIM, 1)
QUERIES = near(KEYS[:9], 2)


def holding(codec: str = "SQ8", keys: np.ndarray = KEYS, **settings: Any) -> IndexedMemory:
    """A memory whose key transform is not the identity, with a gate that is neither open nor shut."""
    key_transform = LearnedTransform(keys.shape[1])
    key_transform.mean_d.copy_(torch.from_numpy(0.1 * unit(1, keys.shape[1], 3)[0]))
    kept = [key_transform(torch.from_numpy(keys)), torch.from_numpy(VALUES[: len(keys)])]
    memory = IndexedMemory.from_entries(len(keys), *(lambda rows, of=of: of[rows] for of in kept), key_transform, codec)
    memory.metric = LearnedTransform(VALUE_DIM)
    memory.gate, memory.sharpness, memory.share = torch.tensor([2.0, -1.0]), 20.0, 0.7
    memory.probes, memory.nearest = memory.lists, len(keys)
    for name, value in settings.items():
        setattr(memory, name, value)
    return memory


def looped(query: torch.Tensor, nearest: int, sharpness: float = 20.0) -> np.ndarray:
    def in_transform(row: np.ndarray) -> np.ndarray:
        centred = row / np.linalg.norm(row) - 0.1 * unit(1, KEY_DIM, 3)[0]
        return centred / np.linalg.norm(centred)

    cosines = np.array([in_transform(query.numpy()) @ in_transform(key) for key in KEYS])
    kept = np.argsort(-cosines)[:nearest]
    weights = np.exp(sharpness * cosines[kept])
    recalled = sum(weight * VALUES[entry] for weight, entry in zip(weights / weights.sum(), kept, strict=True))
    return recalled / (1 + np.exp(-(2 * cosines.max() - 1)))


@pytest.mark.parametrize(
    ("codec", "apart"),
    mostly_nightly_rows([("SQfp16", 2e-3), ("SQ8", 0.01), ("SQ4", 0.12), ("PQ8", 0.5)], lambda codec, _: codec in ("SQ8", "PQ8")),
)
def test_over_all_entries_it_is_what_a_loop_gives_but_for_the_codec(codec: str, apart: float) -> None:
    memory = holding(codec)
    assert memory.lists > 1 and memory.rest_codes_KB.shape[1] > 0
    found = memory.recall(QUERIES).numpy()
    np.testing.assert_allclose(found, [looped(query, ENTRIES) for query in QUERIES], atol=apart)
    assert memory(QUERIES, torch.from_numpy(VALUES[:9])).norm(dim=1).numpy() == pytest.approx(np.ones(9), abs=1e-5)


def test_over_the_nearest_it_is_what_a_loop_over_these_gives() -> None:
    memory = holding("SQfp16", nearest=5)
    assert memory.key_cosines(QUERIES).shape == (9, 5)
    expected = torch.from_numpy(np.stack([looped(query, 5) for query in QUERIES]))
    assert F.cosine_similarity(memory.recall(QUERIES), expected).min() > 0.95, "the nearest by 128 of 144 dimensions"


def indexed_model(memory: QueryMemory | None, settings: dict[str, Any] | None = None) -> ProcrustesModel:
    old = describe_old(Fingerprint.from_string("old"), VALUE_DIM)
    model = ProcrustesModel(ProcrustesModel.config_class(old=old, embedding_dim=KEY_DIM, memory=settings)).eval()
    return model.remember(memory)


def test_a_model_is_saved_and_read_with_every_bit_of_it(tmp_path: Path) -> None:
    model = indexed_model(holding(nearest=30, probes=2))
    worn = model.to_space(QUERIES)
    model.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    assert isinstance(again.memory, IndexedMemory) and again.memory.settings == model.memory.settings == model.config.memory
    before, after = model.memory.state_dict(), again.memory.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert before["first_codes_KB"].dtype == torch.uint8
    torch.testing.assert_close(again.to_space(QUERIES), worn, rtol=0, atol=0)
    assert again.lineage == model.lineage
    for other in (copy.deepcopy(again), again.to("cpu"), again.for_inference()):
        torch.testing.assert_close(other.to_space(QUERIES), worn, rtol=0, atol=0)
    half = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert half.memory.first_codes_KB.dtype == torch.uint8
    torch.testing.assert_close(half.to_space(QUERIES), worn, rtol=0, atol=0.1)
    torch.testing.assert_close(again.half().to_space(QUERIES), worn, rtol=0, atol=0.02)


DAMAGE = {
    "a list too long": lambda tensors: tensors["sizes_L"].__setitem__(0, tensors["sizes_L"][0] + 1),
    "a list of less than nothing": lambda tensors: tensors["sizes_L"].copy_(_shifted(tensors["sizes_L"], -ENTRIES)),
    "sizes that overflow": lambda tensors: tensors["sizes_L"].copy_(_shifted(tensors["sizes_L"], 2**62)),
    "sizes of another kind": lambda tensors: tensors.update(sizes_L=tensors["sizes_L"].float()),
    "codes of another kind": lambda tensors: tensors.update(first_codes_KB=tensors["first_codes_KB"].float()),
    "codes that are missing": lambda tensors: tensors.update(first_codes_KB=tensors["first_codes_KB"][:-1]),
    "values that are short": lambda tensors: tensors.update(value_codes_KB=tensors["value_codes_KB"][:, :-1]),
    "a centroid that is missing": lambda tensors: tensors.update(centroids_LH=tensors["centroids_LH"][:-1]),
    "a codec of less": lambda tensors: tensors.update(first_codec_F=tensors["first_codec_F"][:-1]),
}


def _shifted(sizes: torch.Tensor, by: int) -> torch.Tensor:
    shifted = sizes.clone()
    shifted[0] += by
    shifted[1] -= by
    return shifted


@pytest.mark.parametrize("what", [name for name in DAMAGE if "kind" not in name])  # transformers makes it the right one
def test_damaged_codes_are_refused_before_faiss_sees_them(what: str, tmp_path: Path) -> None:
    indexed_model(holding()).save_pretrained(tmp_path / "model")
    weights, inside = tmp_path / "model" / "model.safetensors", "memory."
    tensors = {name.removeprefix(inside): tensor for name, tensor in load_file(weights).items() if name.startswith(inside)}
    DAMAGE[what](tensors)
    damaged = {f"{inside}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(load_file(weights) | damaged, weights, {"format": "pt"})
    (tmp_path / "model" / CHECKSUMS).unlink()
    refuses(r"is damaged: lists and codes|cannot load", AutoModel.from_pretrained, tmp_path / "model")


@pytest.mark.parametrize("what", [name for name in DAMAGE if "kind" in name or "list" in name or "overflow" in name])
def test_damage_in_memory_is_refused_too(what: str) -> None:
    memory = holding()
    tensors = dict(memory.named_buffers())
    DAMAGE[what](tensors)
    for name, tensor in tensors.items():
        memory.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = tensor
    refuses("is damaged: lists and codes", memory.recall, QUERIES)


def captioned(groups: int = 60) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    numbers = np.arange(groups), draw.permutation(np.concatenate([np.arange(groups), draw.integers(groups, size=groups)]))
    return tuple(unit(len(of), KEY_DIM, 5) for of in numbers), tuple(unit(len(of), VALUE_DIM, 6) for of in numbers), numbers


def test_pairs_are_read_row_by_row_as_a_loop_reads_them() -> None:
    new, old, groups = captioned()
    memory = PairMemoryContents.compute(new, old, groups).build_memory(LearnedTransform(VALUE_DIM), 20.0, 0.5)
    assert type(memory) is QueryMemory and memory.entries == len(groups[0]) + len(groups[1])
    np.testing.assert_allclose(memory.keys_KD, np.concatenate([new[1], new[0]]), atol=1e-6)
    place = 0
    for asking, other in ((1, 0), (0, 1)):
        for group in groups[asking]:
            centred = old[other][groups[other] == group].mean(0) - old[other].mean(0)
            np.testing.assert_allclose(memory.values_Kd[place], centred / np.linalg.norm(centred), atol=1e-5)
            place += 1


def test_many_entries_are_kept_as_codes_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    known, transform = PairMemoryContents.compute(*captioned()), LearnedTransform(VALUE_DIM)
    monkeypatch.setattr(memory_contents, "MOST", 180 * KEY_DIM - 1)
    by_number = known.build_memory(transform, 20.0, 0.5)
    assert isinstance(by_number, IndexedMemory) and by_number.codec == "SQ8" and by_number.entries == 180
    as_they_are = known.build_memory(transform, 20.0, 0.5, "float32")
    assert type(as_they_are) is QueryMemory and type(known.build_memory(transform, 20.0, 0.5, "SQ4")) is IndexedMemory
    monkeypatch.setattr(memory_contents, "MOST", 180 * KEY_DIM)
    assert type(known.build_memory(transform, 20.0, 0.5)) is QueryMemory
    by_number.nearest, by_number.probes = 180, by_number.lists
    queries = near(captioned()[0][0][:20], 4)
    torch.testing.assert_close(by_number.recall(queries), as_they_are.recall(queries), atol=0.02, rtol=0)
