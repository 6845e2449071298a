"""Score scales: fitted on paired items, kept with models and galleries, and what a partly re-embedded gallery finds with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from schedule import mostly_nightly
from transformers import AutoModel

from xcompat import Fingerprint
from xcompat.core.errors import XcompatError
from xcompat.heads import slerp
from xcompat.mapping import Candidate, PairedEmbeddings, fit
from xcompat.mapping.candidates import CandidateParts
from xcompat.mapping.paired import SwappedEmbeddings
from xcompat.mapping.score_scales import scale_scores
from xcompat.methods import METHODS, ProcrustesConfig, ProcrustesModel
from xcompat.models import CompatModel, describe_old
from xcompat.models.score_scale import _match_tails, mean_tail
from xcompat.retrieval import Gallery
from xcompat.retrieval.fallback import OldQueries
from xcompat.retrieval.manifest import VersionRecord
from xcompat.retrieval.versions import gallery_scales
from xcompat.score_scale import Thresholds

OLD = Fingerprint.from_string("old")
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
            gallery = Gallery.create(folder, OLD, dim=OLD_DIM, metric=metric)
            gallery.add(self.old_Nd[self.stored], names)
            gallery.commit()
            return gallery
        index = faiss.IndexFlat(OLD_DIM, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
        index.add(length * self.old_Nd[self.stored])
        faiss.write_index(index, str(folder.with_suffix(".faiss")))
        return Gallery.from_faiss(folder, folder.with_suffix(".faiss"), names, OLD)

    def re_embed(self, gallery: Gallery, model: CompatModel, count: int) -> set[str]:
        """Re-embed some items of a gallery, and return their ids."""
        rows = np.random.default_rng(1).permutation(self.stored)[:count]
        names = [str(row) for row in rows.tolist()]
        gallery.add(self.new_ND[rows], names, version=model, replace=True)
        gallery.commit()
        return set(names)

    def first_hits(self, gallery: Gallery, model: CompatModel) -> tuple[float, list[str]]:
        """Return the share of queries whose first hit is of their class, and the right first hits."""
        share = model.config.old_share
        old_queries = OldQueries(OLD, self.old_Nd[self.asked], share) if share else None
        first = [hits[0].id for hits in gallery.search(self.new_ND[self.asked], model, top_k=1, old_queries=old_queries)]
        right = [
            name for name, row in zip(first, self.asked.tolist(), strict=True) if self.labels_N[int(name)] == self.labels_N[row]
        ]
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


def test_old_queries_search_a_mixed_gallery_on_one_scale(world: World, tmp_path: Path) -> None:
    model, gallery = world.model(CANDIDATES[1]), world.gallery(tmp_path / "g")
    new = world.re_embed(gallery, model, 250)
    hits = [hits[0] for hits in gallery.search(world.old_Nd[world.asked], OLD, top_k=1)]
    assert 0.3 < np.mean([hit.id in new for hit in hits]) < 0.7
    assert all(hit.standing is None for hit in hits)


def test_a_scale_undoes_a_shift_and_a_stretch() -> None:
    scores_QN = torch.from_numpy(np.random.default_rng(0).normal(0.3, 0.1, (40, 400)))
    scale = _match_tails(mean_tail(2 * scores_QN + 0.5), mean_tail(scores_QN))
    assert scale is not None and scale == pytest.approx((0.5, -0.25))


def test_a_tail_is_read_as_in_a_naive_reference() -> None:
    scores_QN = np.random.default_rng(1).normal(size=(3, 100))
    starts, excesses = [], []
    for scores_N in scores_QN:
        best = sorted(scores_N, reverse=True)
        starts.append(best[5])
        excesses.append(sum(best[:5]) / 5 - best[5])
    np.testing.assert_allclose(mean_tail(torch.from_numpy(scores_QN)), [np.mean(starts), np.mean(excesses)])


def test_scales_are_saved_with_a_model_and_change_no_fingerprint(world: World, tmp_path: Path) -> None:
    model = world.model(CANDIDATES[0])
    assert model.score_scales is not None
    model.save_pretrained(tmp_path)
    read = type(model).from_pretrained(tmp_path)
    assert read.score_scales == model.score_scales and read.fingerprint() == model.fingerprint()
    model.config.score_scales = None
    assert read.fingerprint() == model.fingerprint() and "score_scales" not in model.config.to_dict()


@pytest.mark.parametrize(
    "scales",
    [
        {"new": [1, 0]},
        {"new": [0, 1], "old": [1, 0]},
        {"new": ["1", 0], "old": [1, 0]},
        {"new": [float("nan"), 0], "old": [1, 0]},
    ],
)
def test_scales_that_are_none_are_refused(scales: dict[str, Any]) -> None:
    with pytest.raises(XcompatError, match="expected new: "):
        ProcrustesConfig(old=describe_old(OLD, 8), embedding_dim=16, score_scales=scales)


def test_too_few_pairs_leave_a_model_without_scales(world: World) -> None:
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM)).fit_moments(
        world.pairs().moments
    )
    scale_scores(model, world.pairs().take(np.arange(20)))
    assert model.score_scales is None


def test_scales_of_a_chain_of_updates_are_joined() -> None:
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


def test_a_map_of_galleries_calibrates_mapped_against_new_items(world: World, tmp_path: Path) -> None:
    method = METHODS["ridge"]
    config = method.config_class(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM, direction="old_to_new")
    model = method(config).fit(world.pairs().batches()).eval()
    scale_scores(model, SwappedEmbeddings(world.old_Nd[world.learned], world.new_ND[world.learned]))
    gallery = world.gallery(tmp_path / "g")
    gallery.upgrade(model)
    untouched, _ = world.first_hits(gallery, model)
    for count in (5, 64, 250):
        new = world.re_embed(gallery, model, count)
        found, right = world.first_hits(gallery, model)
        assert found >= untouched - 0.05
        assert sum(name in new for name in right) / len(right) == pytest.approx(count / 500, abs=0.2)


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
        assert abs((new_QN[is_match_QN] >= old).mean() - before) > abs(after - before), (
            "the old number is no threshold for new scores"
        )


def test_thresholds_without_labels_keep_the_number_of_hits(world: World) -> None:
    pairs = PairedEmbeddings(world.new_ND[world.learned], world.old_Nd[world.learned])
    model = fit(Candidate("ridge"), CandidateParts(pairs, describe_old(OLD, OLD_DIM)))
    old_QN = world.old_Nd[world.asked] @ world.old_Nd[world.stored].T
    with torch.inference_mode():
        new_QN = model.to_space(torch.from_numpy(world.new_ND[world.asked])).numpy() @ world.old_Nd[world.stored].T
    old = float(np.quantile(old_QN, 0.95))
    found = model.threshold(old=old)
    assert found.keeps == "hits" and (new_QN >= found.score).mean() == pytest.approx(0.05, abs=0.01)


def test_a_threshold_that_is_not_known_is_refused(world: World) -> None:
    model = world.model(Candidate("ridge"))
    with pytest.raises(
        XcompatError, match=r"0.99 is unknown: .* has thresholds from .*; measure it .* evaluate --threshold 0.99"
    ):
        model.threshold(old=0.99)
    model.config.thresholds = None
    with pytest.raises(XcompatError, match="has no thresholds"):
        model.threshold(old=0.5)
    good = Thresholds("hits", (0.1, 0.2), (0.1, 0.2), (0.1, 0.2), (0.1, 0.2))._asdict()
    for wrong in ({"old": [0.2, 0.1]}, {"new": [0.1]}, {"low": [0.1, float("nan")]}, {"high": "ab"}, {"more": 1}):
        with pytest.raises(XcompatError, match="config.thresholds is damaged"):
            type(model.config)(**{**model.config.to_dict(), "thresholds": good | wrong})
