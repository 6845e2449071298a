"""Maps that were chosen to search half-way with old queries: the choice, and every place that searches with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_fallback import TEXTS, gallery_of
from test_map import made
from transformers import AutoModel, pipeline
from typer.testing import CliRunner

import xcompat.stores
from xcompat import XcompatError
from xcompat.cli import app
from xcompat.core.progress import notice_once
from xcompat.evaluation import cmc
from xcompat.heads import slerp
from xcompat.integrations.texts import TextEmbedder
from xcompat.mapping import Candidate, choose
from xcompat.mapping.agreement import choose_by_agreement
from xcompat.mapping.candidates import CandidateParts, fit
from xcompat.mapping.folds import folds
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.fallback import OldQueries
from xcompat.retrieval.ranking_comparison import find
from xcompat.training.evaluate_command import evaluate_embeddings

QUERY, SHARE = "a red dog", 0.4


@pytest.fixture(scope="module")
def old(old_folder: str) -> Embedder:
    return load_embedder(old_folder)


@pytest.fixture(scope="module")
def map_folder(folder_of: dict[str, str], old: Embedder, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A map that searches with 40 % of the old query."""
    new = load_embedder(folder_of["clip"])
    known = {"old": old.describe_old(), "encoder": new.describe_encoder(), "embedding_dim": new.dim}
    model = METHODS["whitened"](METHODS["whitened"].config_class(**known, old_share=SHARE))
    model.fit([(new.embed(new.processor.texts(TEXTS)), old.embed(old.processor.texts(TEXTS)))])
    folder = tmp_path_factory.mktemp("half-way") / "model"
    model.export(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(map_folder: str) -> CompatModel:
    return AutoModel.from_pretrained(map_folder).for_inference()


@pytest.fixture
def gallery(old: Embedder, tmp_path: Path) -> Gallery:
    return gallery_of(old, tmp_path)


@pytest.fixture(scope="module")
def expected(model: CompatModel, old: Embedder) -> list[tuple[str, float]]:
    """Items and scores of the query that is 40 % of the way from the mapped one to the old one."""
    with torch.inference_mode():
        mapped = model.to_space(model.embed_texts(**model.processor.texts([QUERY])))
        mixed = slerp(mapped, old.embed(old.processor.texts([QUERY])), SHARE)
        best = (mixed @ old.embed(old.processor.texts(TEXTS)).T)[0].sort(descending=True)
    return [(TEXTS[row], score) for row, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def require_equal(found: list, expected: list[tuple[str, float]]) -> None:
    assert [hit.id for hit in found] == [name for name, _ in expected]
    assert [hit.score for hit in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_a_search_with_old_queries_mixes_both(
    gallery: Gallery, model: CompatModel, old: Embedder, expected: list[tuple[str, float]]
) -> None:
    own, old_1d = model.embed_texts(**model.processor.texts([QUERY])), old.embed(old.processor.texts([QUERY]))
    (found,) = gallery.search(own, model, len(TEXTS), old_queries=OldQueries(old, old_1d, SHARE))
    require_equal(found, expected)


def test_the_page_shows_the_old_model_that_the_map_names(gallery: Gallery, map_folder: str, old: Embedder) -> None:
    pytest.importorskip("starlette")
    from xcompat.serve.site import NEW, OLD
    from xcompat.serve.site_loading import load_site

    site = load_site(str(gallery.path), map_folder, None, [], allow_changes=False)
    assert [(side.label, side.embedder.dim) for side in site.sides] == [(OLD, old.dim), (NEW, load_embedder(map_folder).dim)]


def test_a_search_without_old_queries_says_so(
    gallery: Gallery, model: CompatModel, old: Embedder, caplog: pytest.LogCaptureFixture
) -> None:
    notice_once.cache_clear()
    own = model.embed_texts(**model.processor.texts([QUERY]))
    (found,) = gallery.search(own, model, 1)
    alone = (model.to_space(own) @ old.embed(old.processor.texts(TEXTS)).T).max()
    assert found[0].score == pytest.approx(float(alone), abs=1e-5)
    assert "together with queries of the old model, which are missing here" in caplog.text


def test_a_pipeline_asks_the_old_model_too(gallery: Gallery, map_folder: str, expected: list[tuple[str, float]]) -> None:
    search = pipeline("compatible-retrieval", model=map_folder, gallery=gallery)
    require_equal(search(QUERY, top_k=len(TEXTS)), expected)
    require_equal(search([QUERY, "a dog"], top_k=len(TEXTS))[0], expected)


def test_a_pipeline_takes_texts_beside_vectors(
    gallery: Gallery, map_folder: str, model: CompatModel, expected: list[tuple[str, float]]
) -> None:
    search = pipeline("compatible-retrieval", model=map_folder, gallery=gallery)
    own_1D = model.embed_texts(**model.processor.texts([QUERY]))
    by_text, by_vector = search([QUERY, own_1D[0].detach().numpy()], top_k=len(TEXTS), batch_size=2)
    require_equal(by_text, expected)
    (alone,) = gallery.search(own_1D, model, len(TEXTS))
    require_equal(by_vector, [(hit.id, hit.score) for hit in alone])


def test_a_named_old_model_takes_the_place_of_the_recorded_one(
    gallery: Gallery, map_folder: str, old_folder: str, tmp_path: Path, expected: list[tuple[str, float]]
) -> None:
    """A map from the Hub may name a folder of the machine that made it."""
    moved = AutoModel.from_pretrained(map_folder)
    moved.config.old["name"] = str(tmp_path / "gone")
    moved.export(tmp_path / "moved")
    with pytest.raises(XcompatError, match="gone"):
        pipeline("compatible-retrieval", model=str(tmp_path / "moved"), gallery=gallery)
    search = pipeline("compatible-retrieval", model=str(tmp_path / "moved"), gallery=gallery, fallback={"model": old_folder})
    require_equal(search(QUERY, top_k=len(TEXTS)), expected)


def test_the_page_asks_the_old_model_too(gallery: Gallery, map_folder: str, expected: list[tuple[str, float]]) -> None:
    require_equal(find(gallery, load_embedder(map_folder), QUERY, len(TEXTS), None), expected)


def test_a_store_asks_the_old_model_too(
    gallery: Gallery, model: CompatModel, old: Embedder, expected: list[tuple[str, float]]
) -> None:
    store = xcompat.stores.open(f"file://{gallery.path}")
    own, old_1d = model.embed_texts(**model.processor.texts([QUERY])), old.embed(old.processor.texts([QUERY]))
    require_equal(store.find(own, model, len(TEXTS), old_queries=OldQueries(old, old_1d, SHARE))[0], expected)


def test_integrations_ask_the_old_model_too(map_folder: str, old: Embedder, expected: list[tuple[str, float]]) -> None:
    query = torch.tensor(TextEmbedder(map_folder, old.fingerprint).query(QUERY))
    scores = old.embed(old.processor.texts([name for name, _ in expected])) @ query
    assert scores.tolist() == pytest.approx([score for _, score in expected], abs=1e-5)


def test_the_command_line_asks_the_old_model_too(gallery: Gallery, map_folder: str, expected: list[tuple[str, float]]) -> None:
    command = ["gallery", "search", str(gallery.path), QUERY, "--model", map_folder, "--top-k", str(len(TEXTS)), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    hits = [SimpleNamespace(**hit) for hit in json.loads(done.stdout.splitlines()[-1])["hits"]]
    require_equal(hits, expected)


def test_an_export_says_that_it_holds_the_map_alone(
    map_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {"file": "none.onnx", "inputs": {}, "outputs": {}}  # test_export_onnx.py exports towers, which takes seconds
    monkeypatch.setattr("xcompat.export.onnx_towers._write", lambda *_: written)
    notice_once.cache_clear()
    done = CliRunner().invoke(app, ["export", "onnx", map_folder, "--out", str(tmp_path / "out")])
    assert done.exception is None and "queries of the old model, which are missing here" in caplog.text


@pytest.mark.nightly
def test_mixtures_are_tried_where_no_map_is_surely_at_or_above_old_queries() -> None:
    pairs = made(new_noise=3.0, old_noise=1.0)
    alone, both = choose(pairs), choose(pairs, with_old_model=True)
    assert not alone.is_safe and alone.mixed is not None and not alone.chosen.candidate.old_share
    assert both.chosen.candidate.old_share and both.chosen.worst > alone.chosen.worst and both.mixed is None
    assert fit(both.chosen.candidate, CandidateParts(pairs)).config.old_share == both.chosen.candidate.old_share
    clear = choose(made(), with_old_model=True)
    assert clear.is_safe and not clear.chosen.candidate.old_share, "a map alone is cheaper"


def test_without_labels_a_loadable_old_model_joins() -> None:
    pairs = replace(made(), labels_N=None)
    assert choose_by_agreement(pairs).chosen.candidate == Candidate("whitened")
    assert choose_by_agreement(pairs, with_old_model=True).chosen.candidate == Candidate("whitened", old_share=0.5)


def test_mixed_gains_are_those_of_mixed_queries() -> None:
    pairs = made(new_noise=3.0, old_noise=1.0)
    trial = choose(pairs, "known", with_old_model=True).chosen
    assert trial.candidate.old_share
    gains, weights = [], []
    assert pairs.labels_N is not None
    for fold in folds(pairs.labels_N, "known"):
        rows = fold.queries["known classes"]
        labels, old_Qd = pairs.labels_N[rows], pairs.old_Nd[rows]
        bare = replace(trial.candidate, old_share=0.0)
        new_Qd = CandidateParts(pairs.take(fold.fit_F)).queries(bare, pairs.new_ND[rows], "rows")
        mixed_Qd = slerp(new_Qd, torch.from_numpy(np.array(old_Qd)), trial.candidate.old_share).numpy()
        found, before = (cmc(each, old_Qd, labels, labels, rows, rows)[1] for each in (mixed_Qd, old_Qd))
        gains.append(found - before)
        weights.append(len(rows))
    assert trial.gains["known classes"]["cmc@1"].mean == pytest.approx(np.average(gains, weights=weights))


def test_an_evaluation_judges_what_is_searched_with(map_folder: str, model: CompatModel, old: Embedder, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    sides = {
        name: draw.normal(size=(30, dim)).astype(np.float32)
        for name, dim in (("old", old.dim), ("new", model.config.embedding_dim))
    }
    labels_N = np.arange(30) % 5
    for name, embeds_ND in sides.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "image_embeds.npy", embeds_ND)
        (tmp_path / name / "image_ids.txt").write_text("".join(f"{row}\n" for row in range(30)))
        (tmp_path / name / "labels.txt").write_text("".join(f"{label}\n" for label in labels_N))
    folders = tmp_path / "old", tmp_path / "new", None, None, tmp_path / "judged"
    report = evaluate_embeddings(*folders, by_map=Path(map_folder).parent)
    found = {case.label: case.metrics["cmc@1"] for case in report.cases}
    with torch.inference_mode():
        alone_Nd = model.to_space(torch.from_numpy(sides["new"]))
        mixed_Nd = slerp(alone_Nd, torch.nn.functional.normalize(torch.from_numpy(sides["old"]), dim=1), SHARE)
        stored_Nd = model.to_space_without_memory(torch.from_numpy(sides["new"]))
    for label, asked, searched in (
        ("new/old", mixed_Nd.numpy(), sides["old"]),
        ("new alone/old", alone_Nd.numpy(), sides["old"]),
        ("new/backfilled", alone_Nd.numpy(), stored_Nd.numpy()),
    ):
        assert found[label] == cmc(asked, searched, labels_N, labels_N, range(30), range(30), ks=(1,))[1], label
