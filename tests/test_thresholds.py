"""Thresholds that are carried over from old queries to new ones, beside naive counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts, EvaluatedModels, EvaluationOptions, evaluate
from xcompat.evaluation.cases import Threshold
from xcompat.report import ReportContent, load_report
from xcompat.report.report import build_report
from xcompat.report.storage import save_report

Q, G, D, CLASSES, AT = 60, 200, 8, 10, 0.5


def images(name: str, noise: float, stretch: float = 0.0) -> EmbeddedImages:
    """Return images whose similarities are pulled towards 1 by ``stretch``, as those of another model may be."""
    draw = np.random.default_rng(3)
    centres_CD = draw.normal(size=(CLASSES, D))
    sides = []
    for count in (Q, G):
        labels_N = np.arange(count) % CLASSES
        embeds_ND = centres_CD[labels_N] + noise * draw.normal(size=(count, D))
        embeds_ND /= np.linalg.norm(embeds_ND, axis=1, keepdims=True)
        sides.append((np.hstack([embeds_ND, np.full((count, 1), stretch)]), labels_N))
    ids = [f"q{row}" for row in range(Q)], [f"g{row}" for row in range(G)]
    (queries_QD, labels_Q), (gallery_GD, labels_G) = sides
    return EmbeddedImages(name, Fingerprint.from_string(name), queries_QD, gallery_GD, *ids, labels_Q, labels_G)


def cosines(asking: EmbeddedImages, searched: EmbeddedImages) -> np.ndarray:
    queries_QD, gallery_GD = np.asarray(asking.query_embeds_QD), np.asarray(searched.gallery_embeds_GD)
    lengths = np.linalg.norm(queries_QD, axis=1)[:, None] * np.linalg.norm(gallery_GD, axis=1)
    return np.asarray(queries_QD @ gallery_GD.T / lengths)


def found_by(contestants: EvaluatedModels, **options: float) -> dict[tuple[str, str], Threshold]:
    result = evaluate(contestants, EvaluationOptions(n_resamples=200, threshold=AT, **options))
    return {(each.query, each.keeps): each for each in result.thresholds}


def test_thresholds_keep_matches_or_hits_as_naive_counts_do() -> None:
    old, new = images("old", 0.6), images("new", 0.6, stretch=0.7)
    found = found_by(EvaluatedModels(old, new))
    # both galleries hold the same items; new queries score higher against the old gallery
    old_QG, new_QG = cosines(old, old), cosines(new, old)
    is_match_QG = np.arange(Q)[:, None] % CLASSES == np.arange(G) % CLASSES
    before = found["old", "matches"]
    assert before.matches == pytest.approx((old_QG[is_match_QG] >= AT).mean())
    assert before.hits == pytest.approx((old_QG >= AT).sum(axis=1).mean())
    for keeps, chosen_QG in (("matches", is_match_QG), ("hits", np.ones_like(is_match_QG))):
        each = found["new", keeps]
        wanted = int((old_QG[chosen_QG] >= AT).sum())
        naive = np.sort(new_QG[chosen_QG])[::-1][wanted - 1]
        assert each.score == pytest.approx(naive, abs=0.003)
        assert each.ci95 is not None and each.ci95[0] <= each.score <= each.ci95[1]
        assert each.matches == pytest.approx((new_QG[is_match_QG] >= each.score).mean(), abs=0.01)
        assert each.hits == pytest.approx((new_QG >= each.score).sum(axis=1).mean(), abs=0.3)


def test_reranked_queries_cut_off_by_their_own_scores() -> None:
    old, new = images("old", 0.5), images("new", 0.2)
    found = found_by(EvaluatedModels(old, old, new), rerank=G)
    again_QG = 2 / 3 * cosines(new, new) + 1 / 3 * cosines(old, old)
    is_match_QG = np.arange(Q)[:, None] % CLASSES == np.arange(G) % CLASSES
    wanted = int((cosines(old, old)[is_match_QG] >= AT).sum())
    naive = np.sort(again_QG[is_match_QG])[::-1][wanted - 1]
    assert found["new+rerank", "matches"].score == pytest.approx(naive, abs=0.003)
    few = found_by(EvaluatedModels(old, old, new), rerank=2)["new+rerank", "matches"]
    assert few.score is None and few.hits == pytest.approx(2), "two candidates hold fewer matches"


def test_matches_of_captions_and_judgements() -> None:
    old, new = images("old", 0.6), images("new", 0.6, stretch=0.7)
    qrels = {f"q{q}": {f"g{g}": 1.0 for g in range(G) if g % CLASSES == q % CLASSES} for q in range(Q)}
    sides = [
        EmbeddedTexts(
            each.name, each.fingerprint, each.query_embeds_QD, each.gallery_embeds_GD, each.query_ids, each.gallery_ids, qrels
        )
        for each in (old, new)
    ]
    of_texts, of_images = found_by(EvaluatedModels(*sides)), found_by(EvaluatedModels(old, new))
    assert {key: each.score for key, each in of_texts.items()} == pytest.approx(
        {key: each.score for key, each in of_images.items()}
    )
    pairs = [
        EmbeddedPairs(
            each.name, each.fingerprint, each.query_embeds_QD, each.gallery_embeds_GD, each.query_labels, each.gallery_labels
        )
        for each in (old, new)
    ]
    result = evaluate(EvaluatedModels(*pairs), EvaluationOptions(ks=(1,), n_resamples=200, threshold=AT))
    of_pairs = {(each.query, each.keeps): each.score for each in result.thresholds if each.direction == "image-to-text"}
    assert of_pairs == pytest.approx({key: each.score for key, each in of_images.items()})


def test_a_report_keeps_thresholds(tmp_path: Path) -> None:
    contestants = EvaluatedModels(images("old", 0.6), images("new", 0.6, stretch=0.7))
    result = evaluate(contestants, EvaluationOptions(n_resamples=50, threshold=AT))
    save_report(tmp_path / "report", build_report(ReportContent(result, contestants, "map", tsne_pairs=0)))
    assert load_report(tmp_path / "report").thresholds == result.thresholds


def test_what_is_no_cosine_is_refused() -> None:
    old = images("old", 0.6)
    with pytest.raises(XcompatError, match="between -1 and 1"):
        evaluate(EvaluatedModels(old, old), EvaluationOptions(threshold=1.5))
    with pytest.raises(XcompatError, match="L2 distance"):
        evaluate(EvaluatedModels(*[replace(old, metric="l2")] * 2), EvaluationOptions(threshold=0.5))
