"""A linear map inside a faiss index: plain faiss finds what the model's view finds in the index as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
import pytest
import torch
from conftest import Run, refuses, store, unit
from schedule import mostly_nightly

from xcompat import Fingerprint, XcompatError
from xcompat.core.files import read_json
from xcompat.export import commands, to_faiss
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.query_memory import LearnedTransform, QueryMemory
from xcompat.retrieval import Gallery

NEW_DIM, OLD_DIM, ROWS = 16, 8, 1000
LINEAR = ("procrustes", "ridge", "query_map")
PLAIN_FAISS = """
import sys, faiss, numpy as np
assert "xcompat" not in sys.modules
scores, rows = faiss.read_index(sys.argv[1]).search(np.load(sys.argv[2]), 10)
np.savez(sys.argv[3], scores=scores, rows=rows)
"""


def build(method: str, **options: Any) -> CompatModel:
    """Return a map whose scale and bias are far from those of a rotation."""
    old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model_class = METHODS[method]
    model = model_class(model_class.config_class(old=old, embedding_dim=NEW_DIM, **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.eval()


def write_old_index(path: Path, factory: str, metric: int = faiss.METRIC_INNER_PRODUCT) -> faiss.Index:
    vectors = unit(ROWS, OLD_DIM, seed=1).numpy()
    index = faiss.index_factory(OLD_DIM, factory, metric)
    index.train(vectors)
    if factory.startswith("IDMap"):
        index.add_with_ids(vectors, np.arange(ROWS) * 3 + 7)
    else:
        index.add(vectors)
    faiss.write_index(index, str(path))
    return index


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
@pytest.mark.parametrize("factory", ["Flat", "HNSW16", "IVF8,Flat", "IDMap,Flat", "OPQ4_8,IVF4,Flat"])
@pytest.mark.parametrize("method", mostly_nightly(LINEAR, "query_map".__eq__))
def test_ranks_and_scores_are_those_of_the_view(method: str, factory: str, metric: int, tmp_path: Path) -> None:
    model = build(method)
    plain = write_old_index(tmp_path / "old.faiss", factory, metric)
    to_faiss(model, tmp_path / "old.faiss", tmp_path / "new.faiss")
    queries = unit(20, NEW_DIM, seed=2)
    with torch.no_grad():
        expected_scores, expected_rows = plain.search(model.to_space(queries).numpy(), 10)
    upgraded = faiss.read_index(str(tmp_path / "new.faiss"))
    scores, rows = upgraded.search(queries.numpy(), 10)
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
    assert (upgraded.d, upgraded.ntotal, upgraded.metric_type) == (NEW_DIM, ROWS, metric)


def with_memory(model: CompatModel, entries: int) -> CompatModel:
    """Return the model with queries that wear a metric which moves and bends them, and remember noise."""
    memory = QueryMemory(NEW_DIM, OLD_DIM, entries)
    covariance = torch.diag(torch.arange(1.0, OLD_DIM + 1))
    memory.metric = LearnedTransform.solve(0.2 * unit(1, OLD_DIM, seed=5)[0], covariance, power=0.5, damping=0.1)
    memory.keys_KD, memory.values_Kd = unit(entries, NEW_DIM, seed=6), unit(entries, OLD_DIM, seed=7)
    return model.remember(memory)


@pytest.mark.parametrize("dim", [OLD_DIM, OLD_DIM // 2])
def test_a_gallery_of_an_older_version_is_asked_without_the_metric(dim: int, tmp_path: Path) -> None:
    """The metric was learned for the old model's gallery; an earlier one of fewer dimensions has the first of its own."""
    older = Fingerprint.from_string("older")
    model = with_memory(build("ridge"), 0)
    assert model.config.old is not None
    model.config.old["compatible_with"] = [{"name": older.name, "fingerprint": older.digest, "dim": dim}]
    index = faiss.IndexFlatIP(dim)
    index.add(unit(ROWS, dim, seed=1).numpy())
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    gallery = Gallery.from_faiss(tmp_path / "gallery", tmp_path / "old.faiss", [str(row) for row in range(ROWS)], older)
    to_faiss(model, gallery.path, tmp_path / "new.faiss")
    queries = unit(20, NEW_DIM, seed=2).numpy()
    _, rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries, 10)
    assert rows.tolist() == [[int(hit.id) for hit in hits] for hits in gallery.search(queries, model, 10)]
    assert "older" in read_json(tmp_path / "new.faiss.xcompat.json")["about"]["vectors"]


def test_nothing_that_is_read_is_replaced(tmp_path: Path) -> None:
    build("ridge").save_pretrained(tmp_path / "model")
    model = METHODS["ridge"].from_pretrained(tmp_path / "model")
    write_old_index(tmp_path / "old.faiss", "Flat")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    own = tmp_path / "model" / "model.safetensors"
    refuses("model.safetensors was not made by `xcompat export", to_faiss, model, tmp_path / "old.faiss", own, overwrite=True)
    assert own.read_bytes() == before
    for _ in range(2):  # its own file is replaced there too
        to_faiss(model, tmp_path / "old.faiss", tmp_path / "model" / "new.faiss")


@pytest.mark.parametrize("kept", ["transform", "none"])
def test_the_command_exports_a_map_without_what_it_remembers(kept: Literal["transform", "none"], tmp_path: Path) -> None:
    plain, queries = write_old_index(tmp_path / "old.faiss", "Flat"), unit(20, NEW_DIM, seed=2)
    model = with_memory(build("ridge"), entries=3)
    model.save_pretrained(tmp_path / "model")
    commands.to_faiss(tmp_path / "old.faiss", str(tmp_path / "model"), tmp_path / "new.faiss", False, kept)
    expected = model.remember(model.memory.without_entries() if kept == "transform" else None)
    rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries.numpy(), 10)[1]
    np.testing.assert_array_equal(rows, plain.search(expected.to_space(queries).detach().numpy(), 10)[1])


@pytest.mark.parametrize("compacted", [False, True])
def test_queries_are_brought_to_the_length_of_vectors_that_were_never_normalised(compacted: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    adopted = faiss.IndexFlatL2(OLD_DIM)
    adopted.add(unit(ROWS, OLD_DIM, seed=1).numpy() * generator.uniform(6, 14, (ROWS, 1)).astype(np.float32))
    faiss.write_index(adopted, str(tmp_path / "old.faiss"))
    names = [str(row) for row in range(ROWS)]
    gallery = Gallery.from_faiss(tmp_path / "gallery", tmp_path / "old.faiss", names, Fingerprint.from_string("old"))
    if compacted:
        gallery.remove(["7"])
        gallery.commit()
        gallery.compact()
    model, queries = with_memory(build("ridge"), entries=0), unit(20, NEW_DIM, seed=2).numpy()
    to_faiss(model, gallery.path, tmp_path / "new.faiss")
    rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries, 10)[1]
    kept = np.delete(np.arange(ROWS), 7) if compacted else np.arange(ROWS)
    assert kept[rows].tolist() == [[int(hit.id) for hit in hits] for hits in gallery.search(queries, model, 10)]


def test_indexes_that_do_not_fit_are_refused(tmp_path: Path, folder_of: dict[str, str]) -> None:
    gallery, model = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("old"), OLD_DIM), build("ridge")
    store(gallery, unit(ROWS, OLD_DIM, seed=1), list(map(str, range(ROWS))))
    gallery.add(unit(3, NEW_DIM, seed=2), ["x", "y", "z"], version=model)
    gallery.commit("backfill")
    refuses("also holds 3 items of .*, e.g. after a backfill.*rollback", to_faiss, model, gallery.path, tmp_path / "new.faiss")
    write_old_index(tmp_path / "old.faiss", "Flat")
    names = [str(row) for row in range(ROWS)]
    Gallery.from_faiss(tmp_path / "adopted", tmp_path / "old.faiss", names, Fingerprint.from_string("old"))
    other = faiss.IndexFlatIP(OLD_DIM)
    other.add(unit(ROWS, OLD_DIM, seed=5).numpy())
    faiss.write_index(other, str(tmp_path / "old.faiss"))
    refuses("its bytes have changed since adoption", to_faiss, build("ridge"), tmp_path / "adopted", tmp_path / "new.faiss")
    assert not (tmp_path / "new.faiss").exists()
    faiss.write_index(faiss.IndexFlatIP(OLD_DIM + 1), str(tmp_path / "other.faiss"))
    with pytest.raises(XcompatError, match="vectors of 9 dimensions, but the map returns the 8"):
        to_faiss(build("ridge"), tmp_path / "other.faiss", tmp_path / "new.faiss")
    refuses("nowhere.* does not exist", to_faiss, build("ridge"), tmp_path / "nowhere.faiss", tmp_path / "new.faiss")
    (tmp_path / "damaged.faiss").write_bytes(b"no index")
    refuses("is not a readable faiss index", to_faiss, build("ridge"), tmp_path / "damaged.faiss", tmp_path / "new.faiss")
    write_old_index(tmp_path / "old.faiss", "Flat")
    with pytest.raises(XcompatError, match="trained without an old model"):
        to_faiss(METHODS["independent"].from_encoder(folder_of["clip"]), tmp_path / "old.faiss", tmp_path / "new.faiss")


def test_a_gallery_of_the_model_itself_is_searched_like_the_old_one(tmp_path: Path) -> None:
    model = with_memory(build("ridge"), entries=0)
    gallery = Gallery.create(tmp_path / "gallery", model)
    store(gallery, unit(ROWS, NEW_DIM, seed=2), list(map(str, range(ROWS))), version=model)
    assert to_faiss(model, gallery.path, tmp_path / "new.faiss") == model.stored_fingerprint()
    queries = unit(5, NEW_DIM, seed=3)
    rows = faiss.read_index(str(tmp_path / "new.faiss")).search(queries.numpy(), 5)[1]
    assert [[hit.id for hit in hits] for hits in gallery.search(queries, model, 5)] == [list(map(str, row)) for row in rows]


def test_command_line_and_a_service_that_knows_faiss_alone(tmp_path: Path, run_xcompat: Run) -> None:
    model = build("procrustes")
    model.export(tmp_path / "run" / "model")
    plain = write_old_index(tmp_path / "old.faiss", "HNSW16")
    before = (tmp_path / "old.faiss").read_bytes()
    command = ("export", "faiss", tmp_path / "old.faiss", "--model", tmp_path / "run", "--out", tmp_path / "new.faiss")
    assert "takes 16-dimensional queries; its vectors are those of old@" in run_xcompat.output(*command)
    assert (tmp_path / "old.faiss").read_bytes() == before
    queries = unit(20, NEW_DIM, seed=2)
    np.save(tmp_path / "queries.npy", queries.numpy())
    files = [str(tmp_path / name) for name in ("new.faiss", "queries.npy", "found.npz")]
    subprocess.run([sys.executable, "-c", PLAIN_FAISS, *files], check=True)
    found = np.load(tmp_path / "found.npz")
    np.testing.assert_array_equal(found["rows"], plain.search(model.to_space(queries).numpy(), 10)[1])


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("query_map", {"shape": "residual"}, "does not map queries by one linear layer, and a faiss index supports no other"),
        ("query_map", {"shape": "projection"}, "does not map queries by one linear layer"),
        ("residual_mlp", {}, "does not map queries by one linear layer"),
        ("drift_adapter", {}, "does not map queries by one linear layer"),
        ("rbt", {}, "does not map queries by one linear layer"),
        ("ridge", {"direction": "old_to_new"}, "Model maps galleries, not queries"),
        ("fct", {}, "Model maps galleries, not queries"),
        ("ridge", {}, r"remove the entries with --memory transform, or in Python with model\.remember"),
    ],
)
def test_models_that_no_index_holds_are_refused(method: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_old_index(tmp_path / "old.faiss", "Flat")
    model = build(method, **options) if "remember" not in said else with_memory(build(method), entries=3)
    refuses(said, to_faiss, model, tmp_path / "old.faiss", tmp_path / "new.faiss")
    assert not (tmp_path / "new.faiss").exists()
