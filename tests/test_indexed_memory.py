"""Memories kept as codes: against loops over entries, saved and read back bit by bit, damaged, and chosen by their size."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from schedule import mostly_nightly_rows
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import Fingerprint, XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.export import to_onnx
from xcompat.methods import METHODS, ProcrustesModel
from xcompat.models import CompatModel, describe_old, memory_contents
from xcompat.models.indexed_memory import IndexedMemory
from xcompat.models.memory_contents import PairMemoryContents
from xcompat.models.query_memory import LearnedTransform, QueryMemory

ENTRIES, NEW, OLD = 400, 144, 16  # of the new dimensions 128 are compared first


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def near(rows: np.ndarray, seed: int) -> torch.Tensor:
    return F.normalize(torch.from_numpy(rows + 0.7 * unit(*rows.shape, seed)), dim=1)


KEYS, VALUES = unit(ENTRIES, NEW, 0), unit(ENTRIES, OLD, 1)
QUERIES = near(KEYS[:9], 2)


def holding(codec: str = "SQ8", keys: np.ndarray = KEYS, **settings: Any) -> IndexedMemory:
    """A memory whose key transform is not the identity, with a gate that is neither open nor shut."""
    key_transform = LearnedTransform(keys.shape[1])
    key_transform.mean_d.copy_(torch.from_numpy(0.1 * unit(1, keys.shape[1], 3)[0]))
    kept = [key_transform(torch.from_numpy(keys)), torch.from_numpy(VALUES[: len(keys)])]
    memory = IndexedMemory.from_entries(len(keys), *(lambda rows, of=of: of[rows] for of in kept), key_transform, codec)
    memory.metric = LearnedTransform(OLD)
    memory.gate, memory.sharpness, memory.share = torch.tensor([2.0, -1.0]), 20.0, 0.7
    memory.probes, memory.nearest = memory.lists, len(keys)
    for name, value in settings.items():
        setattr(memory, name, value)
    return memory


def looped(query: torch.Tensor, nearest: int, sharpness: float = 20.0) -> np.ndarray:
    """What one query recalls, entry by entry, in floats."""

    def in_transform(row: np.ndarray) -> np.ndarray:
        centred = row / np.linalg.norm(row) - 0.1 * unit(1, NEW, 3)[0]
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


def wearing(memory: QueryMemory | None, settings: dict[str, Any] | None = None) -> ProcrustesModel:
    old = describe_old(Fingerprint.from_string("old"), OLD)
    model = ProcrustesModel(ProcrustesModel.config_class(old=old, embedding_dim=NEW, memory=settings)).eval()
    return model.remember(memory)


def test_a_model_is_saved_and_read_with_every_bit_of_it(tmp_path: Path) -> None:
    model = wearing(holding(nearest=30, probes=2))
    worn = model.to_space(QUERIES)
    model.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    assert isinstance(again.memory, IndexedMemory) and again.memory.settings == model.memory.settings == model.config.memory
    before, after = model.memory.state_dict(), again.memory.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert before["first_codes_KB"].dtype == torch.uint8
    torch.testing.assert_close(again.to_space(QUERIES), worn, rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.stored_fingerprint() == model.stored_fingerprint()
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
    wearing(holding()).save_pretrained(tmp_path / "model")
    weights, inside = tmp_path / "model" / "model.safetensors", "memory."
    tensors = {name.removeprefix(inside): tensor for name, tensor in load_file(weights).items() if name.startswith(inside)}
    DAMAGE[what](tensors)
    damaged = {f"{inside}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(load_file(weights) | damaged, weights, {"format": "pt"})
    (tmp_path / "model" / CHECKSUMS).unlink()
    with pytest.raises(XcompatError, match=r"is damaged: lists and codes|cannot load"):
        AutoModel.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("what", [name for name in DAMAGE if "kind" in name or "list" in name or "overflow" in name])
def test_damage_in_memory_is_refused_too(what: str) -> None:
    memory = holding()
    tensors = dict(memory.named_buffers())
    DAMAGE[what](tensors)
    for name, tensor in tensors.items():
        memory.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = tensor
    with pytest.raises(XcompatError, match="is damaged: lists and codes"):
        memory.recall(QUERIES)


SETTINGS = {"entries": 3, "sharpness": 20.0, "share": 0.5, "codec": "SQ8", "first": 8, "lists": 1, "nearest": 2, "probes": 1}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"codec": "Flat"}, "memory.codec is 'Flat'; use SQ8, SQ4"),
        ({"codec": "PQ64,RFlat"}, "memory.codec is"),
        ({"codec": 8}, "memory.codec is 8"),
        ({"codec": "PQ5"}, "codec PQ5 does not fit embeddings of 8 dimensions"),
        ({"lists": 0}, "memory.lists is 0"),
        ({"nearest": 2.5}, "memory.nearest is 2.5"),
        ({"probes": None}, "memory.probes is None"),
        ({"entries": 0}, "memory.entries is 0; set a number of at least 1"),
        ({"list": 3}, "did you mean 'lists'"),
    ],
)
def test_settings_that_are_none_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(XcompatError, match=said):
        wearing(None, SETTINGS | changed)


def test_a_codec_that_cannot_learn_says_so() -> None:
    with pytest.raises(XcompatError, match="needs at least 256 entries, not 100"):
        holding("PQ8", KEYS[:100])


def captioned(groups: int = 60) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    numbers = np.arange(groups), draw.permutation(np.concatenate([np.arange(groups), draw.integers(groups, size=groups)]))
    return tuple(unit(len(of), NEW, 5) for of in numbers), tuple(unit(len(of), OLD, 6) for of in numbers), numbers


def test_pairs_are_read_row_by_row_as_a_loop_reads_them() -> None:
    new, old, groups = captioned()
    memory = PairMemoryContents.compute(new, old, groups).build_memory(LearnedTransform(OLD), 20.0, 0.5)
    assert type(memory) is QueryMemory and memory.entries == len(groups[0]) + len(groups[1])
    np.testing.assert_allclose(memory.keys_KD, np.concatenate([new[1], new[0]]), atol=1e-6)
    place = 0
    for asking, other in ((1, 0), (0, 1)):
        for group in groups[asking]:
            centred = old[other][groups[other] == group].mean(0) - old[other].mean(0)
            np.testing.assert_allclose(memory.values_Kd[place], centred / np.linalg.norm(centred), atol=1e-5)
            place += 1


def test_many_entries_are_kept_as_codes_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    known, transform = PairMemoryContents.compute(*captioned()), LearnedTransform(OLD)
    monkeypatch.setattr(memory_contents, "MOST", 180 * NEW - 1)
    by_number = known.build_memory(transform, 20.0, 0.5)
    assert isinstance(by_number, IndexedMemory) and by_number.codec == "SQ8" and by_number.entries == 180
    as_they_are = known.build_memory(transform, 20.0, 0.5, "float32")
    assert type(as_they_are) is QueryMemory and type(known.build_memory(transform, 20.0, 0.5, "SQ4")) is IndexedMemory
    monkeypatch.setattr(memory_contents, "MOST", 180 * NEW)
    assert type(known.build_memory(transform, 20.0, 0.5)) is QueryMemory
    by_number.nearest, by_number.probes = 180, by_number.lists
    queries = near(captioned()[0][0][:20], 4)
    torch.testing.assert_close(by_number.recall(queries), as_they_are.recall(queries), atol=0.02, rtol=0)


@pytest.fixture
def model(image_folder_of: dict[str, str]) -> CompatModel:
    old = describe_old(Fingerprint.from_string("old"), dim=8)
    return METHODS["ridge"].from_encoder(image_folder_of["timm_wrapper"], old=old)


def test_what_no_graph_holds_is_refused_in_one_line(model: CompatModel, tmp_path: Path) -> None:
    dims = model.config.embedding_dim, 8
    kept = [torch.from_numpy(unit(50, dim, 0)) for dim in dims]
    model.remember(
        IndexedMemory.from_entries(50, *(lambda rows, of=of: of[rows] for of in kept), LearnedTransform(dims[0]), "SQ8")
    )
    with pytest.raises(XcompatError, match="cannot be exported: make the map with --memory-codec"):
        to_onnx(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
