"""Queries that are not sure: what searches, pipelines, commands and reports say of them, and the old model asked instead."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import store
from pydantic import ValidationError
from test_confidence import remembering
from test_map import made
from transformers import AutoModel, pipeline

import xcompat
from xcompat import FingerprintMismatchError, XbtModel, XcompatError, cli
from xcompat.evaluation import EmbeddedImages, EvaluatedModels
from xcompat.evaluation.selective import area_under_roc, risk_coverage
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.report import ReportContent, load_report, write_report
from xcompat.report.plots import draw_plots
from xcompat.retrieval import Gallery
from xcompat.retrieval.fallback import Fallback, OldQueries
from xcompat.training.model_evaluation import evaluate_cases
from xcompat.training.sections import EvaluationSettings

TEXTS = ["a dog", "two cats", "a red shoe", "a blue shoe", "no tree", "some cups"]


@pytest.fixture(scope="module")
def old(old_folder: str) -> Embedder:
    return load_embedder(old_folder)


@pytest.fixture(scope="module")
def model_folder(folder_of: dict[str, str], old: Embedder, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compatible model that is sure of half of the texts."""
    model = xcompat.XbtModel.from_encoder(folder_of["clip"], old=old.describe_old())
    memory = remembering(model.config.embedding_dim, old.dim)
    with torch.no_grad():
        lean = memory.recall(model.embed_texts(**model.processor.texts(TEXTS))).norm(dim=1)
    slope = 4 / float(lean.std())
    model.remember(memory.calibrate(slope, -slope * float(lean.median() + lean.sort().values[len(TEXTS) // 2]) / 2))
    folder = tmp_path_factory.mktemp("confident") / "xbt"
    model.export(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(model_folder: str) -> CompatModel:
    return AutoModel.from_pretrained(model_folder).for_inference()


@pytest.fixture(scope="module")
def asked(model: CompatModel) -> tuple[torch.Tensor, np.ndarray]:
    """Return what the model makes of the texts, and how sure it is of each."""
    with torch.inference_mode():
        embeds = model.embed_texts(**model.processor.texts(TEXTS))
        confidence = model.confidence(embeds)
    assert confidence is not None
    assert ((confidence < 0.5).sum(), (confidence > 0.5).sum()) == (3, 3)
    return embeds, confidence.numpy()


def gallery_of(old: Embedder, folder: Path, milvus: str | None = None) -> Gallery:
    return store(Gallery.create(folder / "gallery", old, milvus=milvus), old.embed(old.processor.texts(TEXTS)), TEXTS)


@pytest.fixture
def gallery(old: Embedder, tmp_path: Path) -> Gallery:
    return gallery_of(old, tmp_path)


@pytest.fixture(params=["faiss", "milvus"])
def either(request: pytest.FixtureRequest, old: Embedder, tmp_path: Path) -> Gallery:
    return gallery_of(old, tmp_path, str(tmp_path / "vectors.db") if request.param == "milvus" else None)


def test_every_hit_says_how_sure_its_query_is(either: Gallery, model: CompatModel, old: Embedder, asked: Any) -> None:
    embeds, confidence = asked
    for hits, sure in zip(either.search(embeds, model, top_k=3), confidence, strict=True):
        assert [hit.confidence for hit in hits] == [pytest.approx(float(sure), abs=1e-6)] * 3
    assert either.search(old.embed(old.processor.texts(["a dog"])), old)[0][0].confidence is None
    either.add(embeds[:2], ["new dog", "new cats"], version=model)  # a mixed gallery, its old part as before
    either.commit()
    hits = either.search(embeds, model, top_k=8)[0]
    assert [hit.confidence for hit in hits] == [pytest.approx(float(confidence[0]), abs=1e-6)] * 8


def test_in_a_gallery_of_its_own_nothing_is_remembered_and_nobody_is_unsure(
    model: CompatModel, asked: Any, tmp_path: Path
) -> None:
    own = store(Gallery.create(tmp_path / "own", model), asked[0], TEXTS, version=model)
    assert own.search(asked[0], model)[0][0].confidence is None
    assert Gallery.create(tmp_path / "empty", model).search(asked[0], model) == [[]] * len(TEXTS)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_old_queries_are_asked_where_the_new_one_is_not_sure(
    share: float, either: Gallery, model: CompatModel, old: Embedder, asked: Any
) -> None:
    embeds, confidence = asked
    unsure = np.flatnonzero(confidence < 0.5)
    old_Qd = np.full((len(TEXTS), old.dim), np.nan, np.float32)
    old_Qd[unsure] = old.embed(old.processor.texts([TEXTS[row] for row in unsure])).numpy()
    found = either.search(embeds, model, top_k=3, old_queries=OldQueries(old, old_Qd, share))
    alone = either.search(embeds, model, top_k=3)
    stored = old.embed(old.processor.texts(TEXTS))
    for row in range(len(TEXTS)):
        if row not in unsure:
            assert found[row] == alone[row]
            continue
        query = torch.from_numpy(old_Qd[row])
        if share < 1:
            query = xcompat.heads.slerp(model.to_space(embeds[row : row + 1]).detach(), query[None], share)[0]
        best = (stored @ query).sort(descending=True)
        assert [hit.id for hit in found[row]] == [TEXTS[place] for place in best.indices[:3]]
        assert [hit.score for hit in found[row]] == pytest.approx(best.values[:3].tolist(), abs=1e-5)
        assert found[row][0].confidence == pytest.approx(float(confidence[row]), abs=1e-6)


def test_a_gallery_of_long_vectors_is_asked_by_long_queries(
    old: Embedder, model: CompatModel, asked: Any, tmp_path: Path
) -> None:
    import faiss

    stored = 7 * old.embed(old.processor.texts(TEXTS)).numpy()
    index = faiss.IndexFlatL2(old.dim)
    index.add(stored)
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "old.faiss", TEXTS, old)
    hits = gallery.search(asked[0], model, top_k=1, old_queries=OldQueries(old, stored / 7))
    assert [(found[0].id, found[0].score) for found in hits] == [(text, pytest.approx(0.0, abs=1e-3)) for text in TEXTS]


def test_a_pipeline_falls_back_and_embeds_no_more_than_it_must(
    model_folder: str, old: Embedder, asked: Any, gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    confidence, embedded, embed = asked[1], list[int](), old.embed
    monkeypatch.setattr(old, "embed", lambda batch: embedded.append(len(next(iter(batch.values())))) or embed(batch))
    plain = pipeline("compatible-retrieval", model=model_folder, gallery=gallery, top_k=2)
    find = pipeline("compatible-retrieval", model=model_folder, gallery=gallery, top_k=2, fallback={"model": old, "below": 0.5})
    found = find(TEXTS, batch_size=4)
    assert sum(embedded) == 3 and not np.isnan(confidence).any()
    for text, hits, sure in zip(TEXTS, found, confidence, strict=True):
        expected = gallery.search(embed(old.processor.texts([text])), old, top_k=2)[0] if sure < 0.5 else None
        ids = [hit.id for hit in expected] if expected is not None else [hit["id"] for hit in plain(text)]
        assert [hit["id"] for hit in hits] == ids == [hit.id for hit in find(text)]
        assert hits[0].confidence == hits[0]["confidence"] == pytest.approx(float(sure), abs=1e-6)
    assert json.loads(json.dumps(found)) == found and found[0][0]["metadata"] is None
    with pytest.raises(AttributeError, match="no 'caption'"):
        found[0][0].caption  # noqa: B018 - it raises


def test_an_old_query_in_the_place_of_every_new_one(model_folder: str, old_folder: str, old: Embedder, gallery: Gallery) -> None:
    """The old model may be named."""
    find = pipeline("compatible-retrieval", model=model_folder, gallery=gallery, fallback={"model": old_folder, "below": 1.0})
    for text in TEXTS:
        assert find(text, top_k=1)[0].id == text, "the old model finds its own embedding"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"below": 0.5}, "set model to the model that embedded"),
        ({"model": "old", "bellow": 0.5}, "did you mean 'below'"),
        ({"model": "old", "below": 0}, "below is 0; set a number above 0"),
        ({"model": "old", "below": "0.5"}, "below is '0.5'"),
        ({"model": "old", "share": 1.5}, "share is 1.5"),
        ({"model": "old", "share": True}, "share is True"),
    ],
)
def test_a_fallback_that_is_none_is_one_line(options: dict[str, Any], said: str, old: Embedder) -> None:
    options = {**options, **({"model": old} if "model" in options else {})}
    with pytest.raises(XcompatError, match=said):
        Fallback.from_options(options, "cpu")


def test_a_fallback_that_does_not_fit_is_refused(
    model_folder: str, folder_of: dict[str, str], old: Embedder, gallery: Gallery, tmp_path: Path
) -> None:
    with pytest.raises(
        FingerprintMismatchError, match="did not make the .* embeddings here, it makes .*; use the model that made them"
    ):
        pipeline("compatible-retrieval", model=model_folder, gallery=gallery, fallback={"model": folder_of["clip"]})
    plain = AutoModel.from_pretrained(model_folder).remember(None)
    plain.export(tmp_path / "plain")
    with pytest.raises(XcompatError, match="queries of .* have no confidence; remove the fallback"):
        pipeline("compatible-retrieval", model=str(tmp_path / "plain"), gallery=gallery, fallback={"model": old})
    model = AutoModel.from_pretrained(model_folder)
    other = load_embedder(folder_of["clip"])
    rows = np.zeros((1, model.config.embedding_dim), np.float32) + 1
    with pytest.raises(FingerprintMismatchError, match="did not make the"):
        gallery.search(rows, model, old_queries=OldQueries(other, np.ones((1, other.dim))))
    elsewhere = XbtModel.from_encoder(folder_of["clip"], old=other.describe_old())
    with pytest.raises(FingerprintMismatchError, match=f"it makes {elsewhere.stored_fingerprint()}; use"):
        gallery.search(rows, model, old_queries=OldQueries(elsewhere, np.ones((1, elsewhere.config.embedding_dim))))
    with pytest.raises(XcompatError, match="old queries have shape .*, new ones "):
        gallery.search(rows, model, old_queries=OldQueries(old, np.ones((2, old.dim))))


def test_the_command_line_says_how_sure_it_is(
    model_folder: str,
    old_folder: str,
    folder_of: dict[str, str],
    asked: Any,
    gallery: Gallery,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["xcompat", "gallery", "search", str(gallery.path), *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    least = int(np.argmin(asked[1]))
    text, sure = TEXTS[least], f"confidence {asked[1][least]:.2f}"
    code, out, _ = run(text, "--model", model_folder)
    assert code == 0 and out.count("confidence") == 1 and sure in out and "instead" not in out
    code, out, _ = run(text, "--model", model_folder, "--fallback", old_folder)
    first = next(line for line in out.splitlines() if "1.000" in line)
    assert code == 0 and text in first and f"{sure}" in out and "was used instead" in out
    code, out, _ = run(text, "--model", model_folder, "--fallback", old_folder, "--fallback-below", "0.000001")
    assert code == 0 and "used instead" not in out
    (tmp_path / "asked.txt").write_text("\n".join(TEXTS) + "\n")
    code, out, _ = run("--queries", str(tmp_path / "asked.txt"), "--json", "--model", model_folder, "--fallback", old_folder)
    fell_back = [json.loads(line)["fallback"] is not None for line in out.splitlines()]
    assert code == 0 and fell_back == (asked[1] < 0.5).tolist()
    code, _, err = run(text, "--model", model_folder, "--fallback", folder_of["clip"])
    assert code == 2 and "did not make the" in err
    code, _, err = run(text, "--model", model_folder, "--fallback-below", "0.5")
    assert code == 2 and "set it with --fallback" in err


def test_a_report_shows_what_falling_back_gives(tmp_path: Path) -> None:
    pairs, draw = made(new_noise=0.6, old_noise=1.0), np.random.default_rng(0)
    assert pairs.labels_N is not None
    labels, ids = pairs.labels_N.tolist(), [str(row) for row in range(len(pairs))]

    def images(name: str, embeds: np.ndarray) -> EmbeddedImages:
        return EmbeddedImages(name, xcompat.Fingerprint.from_string(name), embeds, embeds, ids, ids, labels, labels)

    odd_N1 = np.arange(len(pairs))[:, None] % 2 == 1
    new = np.where(odd_N1, pairs.old_Nd, np.roll(pairs.old_Nd, 1, axis=0))  # the others ask for what lies beside them
    sure = np.where(odd_N1, 0.9, 0.2) + 0.01 * draw.random(odd_N1.shape)
    contestants = EvaluatedModels(images("old", pairs.old_Nd), images("new", new), confidence=images("confidence", sure))
    settings = EvaluationSettings(fallback=0.5, resamples=100)
    evaluation, kept = evaluate_cases(contestants, settings, 0)
    cases = {case.label: case.metrics for case in evaluation.cases}
    assert cases["fallback/old"] == {**cases["old/old"], "negative_flip_rate@1": 0.0}, "the sure ones are old queries themselves"
    assert cases["new/old"]["negative_flip_rate@1"] > 0
    share = next(note for note in evaluation.notes if "fall back" in note)
    flips = cases["new/old"]["negative_flip_rate@1"]
    assert "50.0% of the queries have a confidence below" in share and "and fall back; negative flips" in share
    assert f"negative flips {flips:.1%} without the fallback, 0.0% with it" in share
    told = next(note for note in evaluation.notes if "AUROC" in note)
    precisions = [evaluation.average_precision[query, "old", "image-to-image", "map"] for query in ("new", "old")]
    hurt = precisions[0] < precisions[1]
    assert f"{hurt.mean():.1%} of the new queries find less" in told
    assert f"AUROC of {area_under_roc(sure[:, 0], ~hurt).value:.2f}" in told
    content = ReportContent(evaluation, kept, "x", tsne_pairs=0)
    assert "Confidence of new queries" in write_report(tmp_path, content).read_text()
    assert (tmp_path / "report" / "plots" / "confidence-image-to-image.png").exists()
    report = load_report(tmp_path)
    np.testing.assert_array_equal(report.confidence["image-to-image"], sure[:, 0].astype(np.float32))
    (axes,) = draw_plots(report)["confidence-image-to-image.png"].axes
    shown = axes.lines[0].get_xydata()
    np.testing.assert_allclose(shown[-1], [100, 100 * hurt.mean()], rtol=1e-5)
    np.testing.assert_allclose(shown[:, 1], 100 * risk_coverage(sure[:, 0].astype(np.float32), hurt)[-len(shown) :])
    mixed, _ = evaluate_cases(contestants, settings.model_copy(update={"slerp": 0.5}), 0)
    halfway = xcompat.heads.slerp(torch.from_numpy(new), torch.from_numpy(pairs.old_Nd), 0.5).numpy()
    expected, _ = evaluate_cases(replace(contestants, new_view=images("new", np.where(odd_N1, new, halfway))), settings, 0)
    (found,) = (case.metrics for case in mixed.cases if case.label == "fallback/old")
    (wanted,) = (case.metrics for case in expected.cases if case.label == "new/old")
    assert found == wanted != cases["fallback/old"]
    without, _ = evaluate_cases(replace(contestants, confidence=None), EvaluationSettings(resamples=100), 0)
    assert not without.confidence and not any("AUROC" in note for note in without.notes)


TAKEN = "evaluation.fallback reports its results as 'fallback'; rename the stage"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fallback": 0}, "greater than 0"),
        ({"fallback": 1.5}, "less than or equal to 1"),
        ({"fallback": 0.5, "compare_with": ["fallback"]}, TAKEN),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EvaluationSettings(**changes)
