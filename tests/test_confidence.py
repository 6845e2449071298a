"""How sure a query is, and score scales: measures against loops, calibrated on held-out items, kept with models and galleries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from conftest import Run, refuses, store, unit
from hypothesis import given
from hypothesis import strategies as st
from schedule import mostly_nightly
from sklearn.metrics import roc_auc_score
from test_map import made, write
from transformers import AutoModel

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import ranking_per_query
from xcompat.evaluation.selective import area_under_roc, calibration_error, risk_coverage
from xcompat.heads import slerp
from xcompat.mapping import Candidate, PairedEmbeddings, choose, fit
from xcompat.mapping.candidates import CandidateParts
from xcompat.mapping.choice_report import as_json, describe_choice
from xcompat.mapping.confidence import FEWEST, Evidence, calibrate
from xcompat.mapping.folds import folds
from xcompat.mapping.paired import SwappedEmbeddings
from xcompat.mapping.score_scales import scale_scores
from xcompat.methods import METHODS, ProcrustesConfig, ProcrustesModel
from xcompat.models import CompatModel, describe_old
from xcompat.models.indexed_memory import build_memory
from xcompat.models.query_memory import QueryMemory
from xcompat.models.score_scale import _match_tails, mean_tail
from xcompat.retrieval import Gallery
from xcompat.retrieval.fallback import OldQueries
from xcompat.retrieval.manifest import VersionRecord
from xcompat.retrieval.versions import gallery_scales
from xcompat.score_scale import Thresholds

OLD = Fingerprint.from_string("old")


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40))
def test_an_area_is_what_a_loop_over_pairs_gives(drawn: list[tuple[int, bool]]) -> None:
    scores, better = np.array([score for score, _ in drawn]), np.array([flag for _, flag in drawn])
    if better.all() or not better.any():
        refuses("all queries are of one kind", area_under_roc, scores, better)
        return
    wins = [(high > low) + 0.5 * (high == low) for high in scores[better] for low in scores[~better]]
    area = area_under_roc(scores, better)
    assert area.value == pytest.approx(np.mean(wins)) == pytest.approx(roc_auc_score(better, scores))
    assert 0 <= area.low <= area.value <= area.high <= 1
    twice = area_under_roc(np.repeat(scores, 2), np.repeat(better, 2), np.repeat(np.arange(len(scores)), 2))
    assert twice == pytest.approx(area), "what is said twice of one thing makes nobody surer"


def test_intervals_errors_and_risks_are_what_loops_give() -> None:
    """Of 300 draws of a score whose area is known, about 95 % hold it."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(300):
        better = draw.random(200) < 0.3
        area = area_under_roc(draw.standard_normal(200) + better, better)  # P(N(1, 2) > 0) = 0.760
        held += area.low < 0.7602 < area.high
    assert 0.91 < held / 300 < 0.99
    draw = np.random.default_rng(1)
    sure, hurt = draw.random(57), draw.random(57) < 0.4
    order = sorted(range(57), key=lambda row: sure[row])
    groups = np.array_split(order, 10)
    error = sum(len(group) / 57 * abs(np.mean(sure[group]) - np.mean(~hurt[group])) for group in groups)
    assert calibration_error(sure, ~hurt) == pytest.approx(error)
    risks = [np.mean([hurt[row] for row in order[::-1][:count]]) for count in range(1, 58)]
    np.testing.assert_allclose(risk_coverage(sure, hurt), risks)


def drawn_evidence(rows: int, slope: float, offset: float) -> Evidence:
    draw = np.random.default_rng(0)
    leaning = draw.random(rows)
    hurt = draw.random(rows) > 1 / (1 + np.exp(-(slope * leaning + offset)))
    return Evidence(leaning, hurt, np.arange(rows) % 2, np.arange(rows))


def test_confidence_is_found_where_it_was_planted() -> None:
    found, why = calibrate(drawn_evidence(20_000, 3.0, -1.0))
    assert found is not None and not why
    assert (found.slope, found.offset) == (pytest.approx(3.0, abs=0.2), pytest.approx(-1.0, abs=0.1))
    assert found.error < 0.02 and found.area.low > 0.65 and list(found.risk) == [1.0, 0.9, 0.75, 0.5, 0.25]
    assert found.risk[1.0] == pytest.approx(found.hurt) and found.risk[0.25] < found.risk[0.75] < found.hurt
    evidence = drawn_evidence(4000, 6.0, -3.0)
    turned = replace(evidence, hurt_Q=evidence.hurt_Q ^ (evidence.folds_Q == 1))
    found, why = calibrate(turned)
    assert found is None and "no better than chance" in why
    evidence = drawn_evidence(400, 3.0, -1.0)
    few = np.zeros(400, bool)
    few[: 2 * FEWEST] = True
    assert calibrate(replace(evidence, hurt_Q=few, recalled_norm_Q=1.0 - few))[0] is not None
    few[0] = False
    found, why = calibrate(replace(evidence, hurt_Q=few))
    assert found is None and f"only {FEWEST - 1} queries that were hurt" in why
    choice = choose(made().of_old())  # which no memory makes better
    assert choice.confidence is None and not choice.remembers and "confidence" not in " ".join(describe_choice(choice))
    assert as_json(choice)["confidence"] == {"none": "the map has no memory"}


def test_who_was_hurt_is_what_the_folds_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice calibrates on the queries of all folds and protocols: beside loops over them, with a memory of each fold."""
    pairs, seen = made(new_noise=0.8, old_noise=1.4), []
    monkeypatch.setattr("xcompat.mapping.selection.calibrate", lambda evidence: seen.append(evidence) or calibrate(evidence))
    choice = choose(pairs, "open")
    (evidence,) = seen
    assert pairs.labels_N is not None
    leaning, hurt = list[float](), list[bool]()
    for fold in folds(pairs.labels_N, "open"):
        memory = CandidateParts(pairs.take(fold.fit_F)).memory(choice.chosen.candidate)
        assert memory is not None
        line = CandidateParts(pairs.take(fold.fit_F)).line(choice.chosen.candidate.line)
        for protocol, rows in fold.queries.items():
            searched = fold.galleries[protocol]
            new, labels = torch.from_numpy(pairs.new_ND[rows]), pairs.labels_N[rows]
            with torch.inference_mode():
                asked = memory(new, line.to_space_without_memory(new)).numpy()
                leaning += memory.recall(new).norm(dim=1).tolist()
            mine, theirs = (
                ranking_per_query(q, pairs.old_Nd[searched], labels, pairs.labels_N[searched], rows, searched)
                for q in (asked, pairs.old_Nd[rows])
            )
            hurt += (mine.average_precision_Q < theirs.average_precision_Q).tolist()
    np.testing.assert_allclose(evidence.recalled_norm_Q, leaning, atol=1e-5)
    assert evidence.hurt_Q.tolist() == hurt and set(evidence.folds_Q) == {0, 1}
    assert len(set(evidence.about_Q)) < len(hurt), "an item is asked in several protocols"
    assert choice.confidence is not None and as_json(choice)["confidence"]["hurt"] == pytest.approx(np.mean(hurt))
    half = choice.confidence.risk[0.5]
    (said,) = (line for line in describe_choice(choice) if "confidence" in line)
    assert f"{100 * np.mean(hurt):.0f} % of all queries found less, and {100 * half:.0f} % of the half" in said
    assert "With `gallery search --fallback OLD_MODEL`, the old model answers queries of low confidence" in said
    useless = replace(choice, confidence=replace(choice.confidence, risk={0.5: choice.confidence.hurt}))
    (said,) = (line for line in describe_choice(useless) if "confidence" in line)
    assert said.startswith("Do not choose by confidence which queries the old model answers") and "AUROC" not in said


def test_a_map_says_how_sure_its_queries_are(tmp_path: Path, run_xcompat: Run) -> None:
    pairs = made(new_noise=0.8, old_noise=1.4)
    assert pairs.labels_N is not None
    old = write(tmp_path / "old", pairs.old_Nd, labels=[f"class {label:02}" for label in pairs.labels_N])
    command = ["map", "--old", str(old), "--new", str(write(tmp_path / "new", pairs.new_ND)), "--out", str(tmp_path / "out")]
    out = run_xcompat.output(*command, "--searched-classes", "open", "--allow-worse")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    model, said = AutoModel.from_pretrained(tmp_path / "out" / "model"), report["confidence"]
    assert model.config.memory["confident"] and "probability that" in " ".join(out.split())
    embeds = torch.from_numpy(np.array(pairs.new_ND))
    expected = torch.sigmoid(said["slope"] * model.memory.recall(embeds).norm(dim=1) + said["offset"])
    torch.testing.assert_close(model.confidence(embeds), expected)
    assert 0.5 < said["auroc"]["ci95"][0] < said["auroc"]["value"]


def remembering(new_dim: int, old_dim: int) -> QueryMemory:
    memory = QueryMemory(new_dim, old_dim, entries=4, sharpness=9.0)
    memory.keys_KD, memory.values_Kd = unit(4, new_dim, 3), unit(4, old_dim, 4)
    memory.gate = torch.tensor([8.0, -1.0])
    return memory.calibrate(10.0, -4.0)


def test_it_stays_with_a_model_and_goes_with_its_entries(tmp_path: Path) -> None:
    ridge = METHODS["ridge"]
    model = ridge(ridge.config_class(old=describe_old(OLD, 8), embedding_dim=12)).eval()
    embeds = unit(5, 12, 6)
    assert model.confidence(embeds) is None and not model.is_confident
    plain = remembering(12, 8)
    plain.calibration = None
    before = model.remember(plain).fingerprint()
    assert model.confidence(embeds) is None and "confident" not in model.config.memory
    assert "memory.calibration" not in model.state_dict(), "what was written before has the same names"
    view = model.to_space(embeds).detach()
    model.remember(remembering(12, 8))
    assert model.fingerprint() != before and model.is_confident
    torch.testing.assert_close(model.to_space(embeds).detach(), view, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again.confidence(embeds), model.confidence(embeds), rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.config.memory["confident"] is True
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.testing.assert_close(half.confidence(embeds), model.confidence(embeds), rtol=0, atol=0.2)
    alone = model.remember(model.memory.without_entries())
    assert alone.confidence(embeds) is None and "confident" not in alone.config.memory
    with pytest.raises(XcompatError, match="memory.confident is .*; set true or false"):
        build_memory({"entries": 2, "sharpness": 3.0, "share": 0.5, "confident": "yes"}, 4, 3)


CLASSES, EACH, OLD_DIM, NEW_DIM = 30, 40, 24, 48
CANDIDATES = [
    Candidate("scaled rotation"),
    Candidate("ridge"),
    Candidate("ridge", power=0.35),
    Candidate("scaled rotation", power=0.5, share=0.3),
    Candidate("ridge", share=0.8),
    Candidate("whitened"),
    Candidate("whitened", old_share=0.5),
]


class World:
    """Items of classes as two models see them: a weak old one, a better new one with another mean and spread."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        centres, self.labels_N = draw.standard_normal((CLASSES, 16)), np.repeat(np.arange(CLASSES), EACH)
        things = centres[self.labels_N] + 0.5 * draw.standard_normal((CLASSES * EACH, 16))
        to_old, to_new = draw.standard_normal((16, OLD_DIM)), draw.standard_normal((16, NEW_DIM))
        old = things @ to_old + 2.5 * draw.standard_normal((len(things), OLD_DIM)) + 6.0
        new = things @ to_new + 1.5 * draw.standard_normal((len(things), NEW_DIM)) + 2.0
        self.old_Nd, self.new_ND = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (old, new))
        self.old_Nd, self.new_ND = self.old_Nd.astype(np.float32), self.new_ND.astype(np.float32)
        order = draw.permutation(len(things))
        self.learned, self.stored, self.asked = np.split(order, [500, 1000])

    def pairs(self) -> PairedEmbeddings:
        return PairedEmbeddings(self.new_ND[self.learned], self.old_Nd[self.learned], self.labels_N[self.learned])

    def model(self, candidate: Candidate) -> CompatModel:
        return fit(candidate, CandidateParts(self.pairs(), describe_old(OLD, OLD_DIM)))

    def gallery(self, folder: Path, metric: Any = "cosine", length: float = 1.0) -> Gallery:
        """Return a gallery of old embeddings; those of another length are an adopted index."""
        names = [str(row) for row in self.stored.tolist()]
        if length == 1:
            return store(Gallery.create(folder, OLD, dim=OLD_DIM, metric=metric), self.old_Nd[self.stored], names)
        index = faiss.IndexFlat(OLD_DIM, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
        index.add(length * self.old_Nd[self.stored])
        faiss.write_index(index, str(folder.with_suffix(".faiss")))
        return Gallery.from_faiss(folder, folder.with_suffix(".faiss"), names, OLD)

    def re_embed(self, gallery: Gallery, model: CompatModel, count: int) -> set[str]:
        rows = np.random.default_rng(1).permutation(self.stored)[:count]
        names = [str(row) for row in rows.tolist()]
        store(gallery, self.new_ND[rows], names, version=model, replace=True)
        return set(names)

    def first_hits(self, gallery: Gallery, model: CompatModel) -> tuple[float, list[str]]:
        """Return the share of queries whose first hit is of their class, and the right first hits."""
        share = model.config.old_share
        old_queries = OldQueries(OLD, self.old_Nd[self.asked], share) if share else None
        first = [hits[0].id for hits in gallery.search(self.new_ND[self.asked], model, top_k=1, old_queries=old_queries)]
        pairs = zip(first, self.asked.tolist(), strict=True)
        right = [name for name, row in pairs if self.labels_N[int(name)] == self.labels_N[row]]
        return len(right) / len(first), right


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("candidate", mostly_nightly(CANDIDATES, (CANDIDATES[3], CANDIDATES[6]).__contains__), ids=str)
def test_re_embedding_never_falls_below_the_untouched_gallery(candidate: Candidate, world: World, tmp_path: Path) -> None:
    model, gallery = world.model(candidate), world.gallery(tmp_path / "g")
    untouched, _ = world.first_hits(gallery, model)
    luck = 2 * np.sqrt(2 * untouched * (1 - untouched) / len(world.asked))  # two standard errors of a difference
    for count in (1, 5, 20, 64, 125, 250, 375, 500):
        new = world.re_embed(gallery, model, count)
        found, right = world.first_hits(gallery, model)
        assert found >= untouched - luck, count
        if count >= 64:
            share = sum(name in new for name in right) / len(right)
            assert share == pytest.approx(count / 500, abs=0.2), count


@pytest.mark.parametrize(("metric", "length"), [("ip", 5.0), ("l2", 5.0), ("l2", 1.0)])
def test_metric_and_length_do_not_change_the_ranking(metric: str, length: float, world: World, tmp_path: Path) -> None:
    model, queries = world.model(CANDIDATES[3]), world.new_ND[world.asked[:50]]
    galleries = [world.gallery(tmp_path / "g"), world.gallery(tmp_path / "other", metric, length)]
    for gallery in galleries:
        world.re_embed(gallery, model, 200)
    one, other = (gallery.search(queries, model, top_k=10) for gallery in galleries)
    assert np.mean([a.id == b.id for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]) > 0.99
    for hits in other:
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True) and hits[0].standing is None


def test_old_queries_and_mapped_galleries_share_a_scale(world: World, tmp_path: Path) -> None:
    model, gallery = world.model(CANDIDATES[1]), world.gallery(tmp_path / "g")
    new = world.re_embed(gallery, model, 250)
    hits = [hits[0] for hits in gallery.search(world.old_Nd[world.asked], OLD, top_k=1)]
    assert 0.3 < np.mean([hit.id in new for hit in hits]) < 0.7
    assert all(hit.standing is None for hit in hits)
    method = METHODS["ridge"]
    config = method.config_class(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM, direction="old_to_new")
    model = method(config).fit(world.pairs().batches()).eval()
    scale_scores(model, SwappedEmbeddings(world.old_Nd[world.learned], world.new_ND[world.learned]))
    gallery = world.gallery(tmp_path / "mapped")
    gallery.upgrade(model)
    untouched, _ = world.first_hits(gallery, model)
    for count in (5, 64, 250):
        new = world.re_embed(gallery, model, count)
        found, right = world.first_hits(gallery, model)
        assert found >= untouched - 0.05
        assert sum(name in new for name in right) / len(right) == pytest.approx(count / 500, abs=0.2)


def test_tails_are_those_of_a_loop_and_scales_undo_shifts() -> None:
    scores_QN = torch.from_numpy(np.random.default_rng(0).normal(0.3, 0.1, (40, 400)))
    scale = _match_tails(mean_tail(2 * scores_QN + 0.5), mean_tail(scores_QN))
    assert scale is not None and scale == pytest.approx((0.5, -0.25))
    scores_QN = np.random.default_rng(1).normal(size=(3, 100))
    starts, excesses = [], []
    for scores_N in scores_QN:
        best = sorted(scores_N, reverse=True)
        starts.append(best[5])
        excesses.append(sum(best[:5]) / 5 - best[5])
    np.testing.assert_allclose(mean_tail(torch.from_numpy(scores_QN)), [np.mean(starts), np.mean(excesses)])


def test_scales_are_saved_and_joined(world: World, tmp_path: Path) -> None:
    model = world.model(CANDIDATES[0])
    assert model.score_scales is not None
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path)
    assert read.score_scales == model.score_scales and read.fingerprint() == model.fingerprint()
    model.config.score_scales = None
    assert read.fingerprint() == model.fingerprint() and "score_scales" not in model.config.to_dict()
    wrong = [{"new": [1, 0]}, *({"new": new, "old": [1, 0]} for new in ([0, 1], ["1", 0], [float("nan"), 0]))]
    for scales in wrong:
        refuses("expected new: ", ProcrustesConfig, old=describe_old(OLD, 8), embedding_dim=16, score_scales=scales)
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM))
    scale_scores(model.fit_moments(world.pairs().moments), world.pairs().take(np.arange(20)))
    assert model.score_scales is None
    versions = [
        VersionRecord(digest="a", name="a", dim=3),
        VersionRecord(digest="b", name="b", dim=3, shares=("a",), scaled_to="a", score_scale=(2.0, 0.1)),
        VersionRecord(digest="c", name="c", dim=3, shares=("b", "a"), scaled_to="b", score_scale=(3.0, 0.2)),
    ]
    scales = gallery_scales(Fingerprint("a", "a"), versions, "cosine")
    assert scales is not None
    np.testing.assert_allclose(scales, [(1, 0), (2, 0.1), (6, 0.5)])
    unknown = versions[1].model_copy(update={"score_scale": None})
    assert gallery_scales(Fingerprint("a", "a"), [versions[0], unknown], "cosine") is None


@pytest.mark.parametrize("candidate", [Candidate("ridge"), Candidate("whitened", old_share=0.5)], ids=str)
def test_a_map_knows_which_threshold_replaces_an_old_one(world: World, candidate: Candidate, tmp_path: Path) -> None:
    world.model(candidate).save_pretrained(tmp_path / "map")
    model = AutoModel.from_pretrained(tmp_path / "map")
    old_QN = world.old_Nd[world.asked] @ world.old_Nd[world.stored].T
    with torch.inference_mode():
        asked_Qd = model.to_space(torch.from_numpy(world.new_ND[world.asked]))
        if candidate.old_share:
            asked_Qd = slerp(asked_Qd, torch.from_numpy(world.old_Nd[world.asked]), candidate.old_share)
    new_QN = asked_Qd.numpy() @ world.old_Nd[world.stored].T
    is_match_QN = world.labels_N[world.asked][:, None] == world.labels_N[world.stored]
    for old in np.quantile(old_QN[is_match_QN], [0.2, 0.5, 0.8]).tolist():
        found = model.threshold(old=old)
        before, after = (old_QN[is_match_QN] >= old).mean(), (new_QN[is_match_QN] >= found.score).mean()
        assert found.keeps == "matches" and found.low <= found.score <= found.high
        assert after == pytest.approx(before, abs=0.06)
        assert abs((new_QN[is_match_QN] >= old).mean() - before) > abs(after - before), "the old number is none for new scores"


def test_thresholds_keep_the_number_of_hits_and_have_a_range(world: World) -> None:
    pairs = PairedEmbeddings(world.new_ND[world.learned], world.old_Nd[world.learned])
    model = fit(Candidate("ridge"), CandidateParts(pairs, describe_old(OLD, OLD_DIM)))
    old_QN = world.old_Nd[world.asked] @ world.old_Nd[world.stored].T
    with torch.inference_mode():
        new_QN = model.to_space(torch.from_numpy(world.new_ND[world.asked])).numpy() @ world.old_Nd[world.stored].T
    old = float(np.quantile(old_QN, 0.95))
    found = model.threshold(old=old)
    assert found.keeps == "hits" and (new_QN >= found.score).mean() == pytest.approx(0.05, abs=0.01)
    model = world.model(Candidate("ridge"))
    refuses(r"0.99 is unknown: .* has thresholds from .*; measure .* --threshold 0.99", model.threshold, old=0.99)
    model.config.thresholds = None
    refuses("has no thresholds", model.threshold, old=0.5)
    good = Thresholds("hits", (0.1, 0.2), (0.1, 0.2), (0.1, 0.2), (0.1, 0.2))._asdict()
    for wrong in ({"old": [0.2, 0.1]}, {"new": [0.1]}, {"low": [0.1, float("nan")]}, {"high": "ab"}, {"more": 1}):
        with pytest.raises(XcompatError, match="config.thresholds is damaged"):
            type(model.config)(**{**model.config.to_dict(), "thresholds": good | wrong})
