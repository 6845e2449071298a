"""Queries that are not sure, and maps that search half-way with old queries: every place that asks the old model too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from conftest import Run, invoke, refuses, store, write_embeds
from pydantic import ValidationError
from test_confidence import remembering
from test_index_gallery import write_index
from test_map import made
from transformers import AutoModel, pipeline

import xcompat
from xcompat import FingerprintMismatchError, XbtModel, XcompatError
from xcompat.core.progress import notice_once
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, cmc
from xcompat.evaluation.selective import area_under_roc, risk_coverage
from xcompat.heads import slerp
from xcompat.mapping import Candidate, choose
from xcompat.mapping.agreement import choose_by_agreement
from xcompat.mapping.candidates import CandidateParts, fit
from xcompat.mapping.choice_report import as_json
from xcompat.mapping.folds import folds
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.report import ReportContent, load_report, write_report
from xcompat.report.plots import draw_plots
from xcompat.report.wording import interval
from xcompat.retrieval import Gallery
from xcompat.retrieval.fallback import Fallback, OldQueries
from xcompat.retrieval.ranking_comparison import find
from xcompat.retrieval.text_embedder import TextEmbedder
from xcompat.training.evaluate_command import evaluate_embeddings
from xcompat.training.model_evaluation import evaluate_cases
from xcompat.training.sections import EvaluationSettings

TEXTS = ["a dog", "two cats", "a red shoe", "a blue shoe", "no tree", "some cups"]


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


@pytest.fixture
def gallery(old: Embedder, tmp_path: Path) -> Gallery:
    return store(Gallery.create(tmp_path / "gallery", old), old.embed(old.processor.texts(TEXTS)), TEXTS)


def test_hits_say_how_sure_queries_are(gallery: Gallery, model: CompatModel, old: Embedder, asked: Any, tmp_path: Path) -> None:
    embeds, confidence = asked
    for hits, sure in zip(gallery.search(embeds, model, top_k=3), confidence, strict=True):
        assert [hit.confidence for hit in hits] == [pytest.approx(float(sure), abs=1e-6)] * 3
    assert gallery.search(old.embed(old.processor.texts(["a dog"])), old)[0][0].confidence is None
    gallery.add(embeds[:2], ["new dog", "new cats"], version=model)  # a mixed gallery, its old part as before
    gallery.commit()
    hits = gallery.search(embeds, model, top_k=8)[0]
    assert [hit.confidence for hit in hits] == [pytest.approx(float(confidence[0]), abs=1e-6)] * 8
    own = store(Gallery.create(tmp_path / "own", model), embeds, TEXTS, version=model)
    assert own.search(embeds, model)[0][0].confidence is None, "in a gallery of its own nobody is unsure"
    assert Gallery.create(tmp_path / "empty", model).search(embeds, model) == [[]] * len(TEXTS)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_unsure_queries_ask_the_old_model(share: float, gallery: Gallery, model: CompatModel, old: Embedder, asked: Any) -> None:
    embeds, confidence = asked
    unsure = np.flatnonzero(confidence < 0.5)
    old_Qd = np.full((len(TEXTS), old.dim), np.nan, np.float32)
    old_Qd[unsure] = old.embed(old.processor.texts([TEXTS[row] for row in unsure])).numpy()
    found = gallery.search(embeds, model, top_k=3, old_queries=OldQueries(old, old_Qd, share))
    alone = gallery.search(embeds, model, top_k=3)
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


def test_long_vectors_are_asked_by_long_queries(old: Embedder, model: CompatModel, asked: Any, tmp_path: Path) -> None:
    stored = 7 * old.embed(old.processor.texts(TEXTS)).numpy()
    index = write_index(tmp_path / "old.faiss", stored, metric=faiss.METRIC_L2)
    gallery = Gallery.from_faiss(tmp_path / "g", index, TEXTS, old)
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


def test_a_fallback_that_is_none_is_one_line(old: Embedder) -> None:
    for options, said in (
        ({"below": 0.5}, "set model to the model that embedded"),
        ({"model": "old", "bellow": 0.5}, "did you mean 'below'"),
        ({"model": "old", "below": 0}, "below is 0; set a number above 0"),
        ({"model": "old", "below": "0.5"}, "below is '0.5'"),
        ({"model": "old", "share": 1.5}, "share is 1.5"),
        ({"model": "old", "share": True}, "share is True"),
    ):
        options = {**options, **({"model": old} if "model" in options else {})}
        refuses(said, Fallback.from_options, options, "cpu")
    with pytest.raises(ValidationError, match="evaluation.fallback reports its results as 'fallback'; rename the stage"):
        EvaluationSettings(fallback=0.5, compare_with=["fallback"])


def test_fallback_must_fit(model_folder: str, folder_of: dict[str, str], old: Embedder, gallery: Gallery, tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatchError, match="did not make the .* embeddings here, it makes .*; use the model that"):
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
    with pytest.raises(FingerprintMismatchError, match=f"it makes {elsewhere.lineage.stores.fingerprint}; use"):
        gallery.search(rows, model, old_queries=OldQueries(elsewhere, np.ones((1, elsewhere.config.embedding_dim))))
    with pytest.raises(XcompatError, match="old queries have shape .*, new ones "):
        gallery.search(rows, model, old_queries=OldQueries(old, np.ones((2, old.dim))))


def test_the_command_line_says_how_sure_it_is(
    model_folder: str, old_folder: str, folder_of: dict[str, str], asked: Any, gallery: Gallery, tmp_path: Path, run: Run
) -> None:
    search = ("search", gallery.path, "--model", model_folder)
    least = int(np.argmin(asked[1]))
    text, sure = TEXTS[least], f"confidence {asked[1][least]:.2f}"
    out = run.output(*search, text)
    assert out.count("confidence") == 1 and sure in out and "instead" not in out
    out = run.output(*search, text, "--fallback", old_folder)
    first = next(line for line in out.splitlines() if "1.000" in line)
    assert text in first and sure in out and "was used instead" in out
    assert "used instead" not in run.output(*search, text, "--fallback", old_folder, "--fallback-below", "0.000001")
    (tmp_path / "asked.txt").write_text("\n".join(TEXTS) + "\n")
    out = run.output(*search, "--queries", tmp_path / "asked.txt", "--json", "--fallback", old_folder)
    assert [json.loads(line)["fallback"] is not None for line in out.splitlines()] == (asked[1] < 0.5).tolist()
    assert "did not make the" in run.refusal(*search, text, "--fallback", folder_of["clip"])
    assert "set it with --fallback" in run.refusal(*search, text, "--fallback-below", "0.5")


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
    chance = "image-to-image: confidence is no better than chance; do not choose by it which queries the old model answers."
    wrong = replace(contestants, confidence=images("confidence", 1 - sure))
    assert chance not in evaluation.notes and chance in evaluate_cases(wrong, settings, 0)[0].notes
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


QUERY, SHARE = "a red dog", 0.4


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
def mixing(map_folder: str) -> CompatModel:
    return AutoModel.from_pretrained(map_folder).for_inference()


@pytest.fixture(scope="module")
def expected(mixing: CompatModel, old: Embedder) -> list[tuple[str, float]]:
    """Items and scores of the query that is 40 % of the way from the mapped one to the old one."""
    with torch.inference_mode():
        mapped = mixing.to_space(mixing.embed_texts(**mixing.processor.texts([QUERY])))
        mixed = slerp(mapped, old.embed(old.processor.texts([QUERY])), SHARE)
        best = (mixed @ old.embed(old.processor.texts(TEXTS)).T)[0].sort(descending=True)
    return [(TEXTS[row], score) for row, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def require_equal(found: list, expected: list[tuple[str, float]]) -> None:
    assert [hit.id for hit in found] == [name for name, _ in expected]
    assert [hit.score for hit in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_texts_bring_old_queries_and_vectors_warn(
    gallery: Gallery, map_folder: str, mixing: CompatModel, expected: list[tuple[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    notice_once.cache_clear()
    search = pipeline("compatible-retrieval", model=map_folder, gallery=gallery)
    own_1D = mixing.embed_texts(**mixing.processor.texts([QUERY]))
    by_text, by_vector = search([QUERY, own_1D[0].detach().numpy()], top_k=len(TEXTS), batch_size=2)
    require_equal(by_text, expected)
    (alone,) = gallery.search(own_1D, mixing, len(TEXTS))
    require_equal(by_vector, [(hit.id, hit.score) for hit in alone])
    mapped = gallery.search(mixing.to_space(own_1D).detach(), gallery.versions[0], len(TEXTS))[0]
    require_equal(alone, [(hit.id, hit.score) for hit in mapped])
    assert "together with queries of the old model, which are missing here" in caplog.text


def test_a_named_old_model_takes_the_place_of_the_recorded_one(
    gallery: Gallery, map_folder: str, old_folder: str, tmp_path: Path, expected: list[tuple[str, float]]
) -> None:
    """A map from the Hub may name a folder of the machine that made it."""
    moved = AutoModel.from_pretrained(map_folder)
    moved.config.old["name"] = str(tmp_path / "gone")
    moved.export(tmp_path / "moved")
    refuses("gone", pipeline, "compatible-retrieval", model=str(tmp_path / "moved"), gallery=gallery)
    search = pipeline("compatible-retrieval", model=str(tmp_path / "moved"), gallery=gallery, fallback={"model": old_folder})
    require_equal(search(QUERY, top_k=len(TEXTS)), expected)


def test_all_ways_ask_the_old_model(gallery: Gallery, map_folder: str, old: Embedder, expected: list[tuple[str, float]]) -> None:
    require_equal(find(gallery, load_embedder(map_folder), QUERY, len(TEXTS), None), expected)
    out = invoke("gallery", "search", gallery.path, QUERY, "--model", map_folder, "--top-k", len(TEXTS), "--json")
    require_equal([SimpleNamespace(**hit) for hit in json.loads(out.splitlines()[-1])["hits"]], expected)
    query = torch.tensor(TextEmbedder(map_folder, old.fingerprint).query(QUERY))
    scores = old.embed(old.processor.texts([name for name, _ in expected])) @ query
    assert scores.tolist() == pytest.approx([score for _, score in expected], abs=1e-5)


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
    both = choose_by_agreement(pairs, with_old_model=True)
    assert both.chosen.candidate == Candidate("whitened", old_share=0.5)
    lone = next(trial for trial in both.trials if trial.candidate == Candidate("whitened")).least
    said = f"{100 * lone.mean:+.1f} points ({interval((lone.low, lone.high))}) at neighbours@10, held-out items"
    assert as_json(both)["alone"] == {"full": said, "transform": said, "none": said}, "exports search without old queries"


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
        asked = pairs.new_ND[rows]
        new_Qd = CandidateParts(pairs.take(fold.fit_F)).queries(bare, lambda asked=asked: [asked], "rows")
        mixed_Qd = slerp(new_Qd, torch.from_numpy(np.array(old_Qd)), trial.candidate.old_share).numpy()
        found, before = (cmc(each, old_Qd, labels, labels, rows, rows)[1] for each in (mixed_Qd, old_Qd))
        gains.append(found - before)
        weights.append(len(rows))
    assert trial.gains["known classes"]["cmc@1"].mean == pytest.approx(np.average(gains, weights=weights))


def test_an_evaluation_judges_what_is_searched_with(map_folder: str, mixing: CompatModel, old: Embedder, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    dims = {"old": old.dim, "new": mixing.config.embedding_dim}
    sides = {name: draw.normal(size=(30, dim)).astype(np.float32) for name, dim in dims.items()}
    labels_N = np.arange(30) % 5
    folders = [write_embeds(tmp_path / name, map(str, range(30)), labels_N, image=rows) for name, rows in sides.items()]
    report = evaluate_embeddings(*folders, None, None, tmp_path / "judged", by_map=Path(map_folder).parent)
    found = {case.label: case.metrics["cmc@1"] for case in report.cases}
    with torch.inference_mode():
        alone_Nd = mixing.to_space(torch.from_numpy(sides["new"]))
        mixed_Nd = slerp(alone_Nd, torch.nn.functional.normalize(torch.from_numpy(sides["old"]), dim=1), SHARE)
        stored_Nd = mixing.to_space_without_memory(torch.from_numpy(sides["new"]))
    for label, asked, searched in (
        ("new/old", mixed_Nd.numpy(), sides["old"]),
        ("new alone/old", alone_Nd.numpy(), sides["old"]),
        ("new/backfilled", alone_Nd.numpy(), stored_Nd.numpy()),
    ):
        assert found[label] == cmc(asked, searched, labels_N, labels_N, range(30), range(30), ks=(1,))[1], label
