"""Graded judgements: equal to trec_eval, and to a sorted ranking where scores tie; intervals: equal to drawing in a loop."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from xcompat.cli import app
from xcompat.core.errors import XcompatError
from xcompat.data import read_qrels
from xcompat.evaluation import (
    Difference,
    PairedDifference,
    bootstrap_interval,
    graded,
    graded_metrics,
    graded_per_query,
    paired_bootstrap,
    queries_needed,
)
from xcompat.evaluation import intervals as module
from xcompat.evaluation.cases import find_deciding_difference
from xcompat.evaluation.verification import share_per_query
from xcompat.report import load_report
from xcompat.training.evaluate_command import evaluate_embeddings

KS = (1, 3, 10)


def drawn(seed: int, queries: int = 40, items: int = 60, dim: int = 8) -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    draw = np.random.default_rng(seed)
    names = [f"q{row}" for row in range(queries)], [f"d{row}" for row in range(items)]
    return draw.standard_normal((queries, dim)), draw.standard_normal((items, dim)), *names


def judgements(seed: int, query_ids: list[str], gallery_ids: list[str], lowest: int = 0) -> dict[str, dict[str, int]]:
    draw = np.random.default_rng(seed)
    qrels = {}
    for query in query_ids:
        items = draw.choice(gallery_ids, size=int(draw.integers(1, 9)), replace=False)
        qrels[query] = {item: int(draw.integers(lowest, 4)) for item in items}
    return qrels


@pytest.mark.parametrize("lowest", [0, 1, -1])
def test_metrics_are_those_of_trec_eval(lowest: int) -> None:
    queries, gallery, query_ids, gallery_ids = drawn(0)
    qrels = judgements(1, query_ids, [*gallery_ids, "gone"], lowest)
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, gallery)]
    scores = unit[0] @ unit[1].T
    run = {query: dict(zip(gallery_ids, map(float, row), strict=True)) for query, row in zip(query_ids, scores, strict=True)}
    wanted = {f"{name}.{','.join(map(str, KS))}" for name in ("ndcg_cut", "recall")} | {"map", "recip_rank"}
    per_query = pytrec_eval.RelevanceEvaluator(qrels, wanted).evaluate(run)
    found = graded_metrics(queries, gallery, query_ids, gallery_ids, qrels, KS)
    means = {name: np.mean([values[name] for values in per_query.values()]) for name in per_query["q0"]}
    for k in KS:
        cut = [values["recip_rank"] if values["recip_rank"] >= 1 / k else 0.0 for values in per_query.values()]
        assert found[f"ndcg@{k}"] == pytest.approx(means[f"ndcg_cut_{k}"], abs=1e-9)
        assert found[f"recall@{k}"] == pytest.approx(means[f"recall_{k}"], abs=1e-9)
        assert found[f"mrr@{k}"] == pytest.approx(np.mean(cut), abs=1e-9)
    assert found["map"] == pytest.approx(means["map"], abs=1e-9)


def naive(scores_G: np.ndarray, gains: dict[int, int], missing: list[int], k: int) -> dict[str, float]:
    """Sort the ranking, the lower gain first where scores tie."""
    order = sorted(range(len(scores_G)), key=lambda item: (-scores_G[item], max(gains.get(item, 0), 0)))
    relevant = sorted((gain for gain in [*gains.values(), *missing] if gain > 0), reverse=True)
    if not relevant:
        return dict.fromkeys((f"ndcg@{k}", f"mrr@{k}", f"recall@{k}", "map"), 0.0)
    hits = [(rank, gains[item]) for rank, item in enumerate(order, 1) if gains.get(item, 0) > 0]
    best = sum(gain / math.log2(1 + rank) for rank, gain in enumerate(relevant[:k], 1))
    first = hits[0][0] if hits else math.inf
    return {
        f"ndcg@{k}": sum(gain / math.log2(1 + rank) for rank, gain in hits if rank <= k) / best,
        f"mrr@{k}": 1 / first if first <= k else 0.0,
        f"recall@{k}": sum(rank <= k for rank, _ in hits) / len(relevant),
        "map": sum(place / rank for place, (rank, _) in enumerate(hits, 1)) / len(relevant),
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ties_are_against_you_as_in_a_sorted_ranking(data: st.DataObject) -> None:
    directions = np.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])  # so that most scores tie
    places = st.integers(0, 2)
    gallery = directions[data.draw(st.lists(places, min_size=1, max_size=7))]
    queries = directions[data.draw(st.lists(places, min_size=1, max_size=4))]
    gains = st.dictionaries(st.integers(0, len(gallery) - 1), st.integers(-1, 3), max_size=len(gallery))
    judged = {query: data.draw(gains) for query in range(len(queries))}
    missing = {query: data.draw(st.lists(st.integers(1, 3), max_size=2)) for query in judged}
    qrels = {query: gains | {100 + place: gain for place, gain in enumerate(missing[query])} for query, gains in judged.items()}
    k = data.draw(st.integers(1, 8))
    asked = queries, gallery, range(len(queries)), range(len(gallery)), qrels, (k,)
    if not any(qrels.values()):
        with pytest.raises(XcompatError, match="no query has a judgement"):
            graded_metrics(*asked)
        return
    found = graded_per_query(*asked)
    expected = [naive(gallery @ queries[row], judged[row], missing[row], k) for row in found.rows_J.tolist()]
    assert found.rows_J.tolist() == [query for query, gains in qrels.items() if gains]
    for metric, values in found.values.items():
        assert values.tolist() == pytest.approx([each[metric] for each in expected], abs=1e-12)


def test_what_cannot_be_used_is_named() -> None:
    queries, gallery, query_ids, gallery_ids = drawn(4, queries=4, items=5)
    qrels = {"q0": {"d1": 1, "gone": 2}, "q1": {"d2": 0}, "q2": {}, "stranger": {"d1": 1}}
    found = graded_per_query(queries, gallery, query_ids, gallery_ids, qrels)
    assert found.rows_J.tolist() == [0, 1]
    assert found.unusable == graded.UnusableIds(["q2", "q3"], ["q1"], ["stranger"], ["gone"])
    assert found.values["recall@10"].tolist() == [0.5, 0.0], "what is not in the gallery cannot be found, and counts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_ids": ["q0", "q0", "q2"]}, "two rows have the id 'q0'"),
        ({"gallery_ids": ["d0", "d1", "d2", "d2"]}, "two rows have the id 'd2'"),
        ({"query_ids": ["q0"]}, "3 rows but 1 ids"),
        ({"qrels": {"stranger": {"d0": 1}}}, "no query has a judgement"),
        ({"ks": (0,)}, "cut-offs of at least 1"),
        ({"qrels": {"q0": {"d0": 1, "d1": float("nan")}}}, "the gain of 'd1' for the query 'q0' is nan"),
        ({"qrels": {"q0": {"d0": float("inf")}}}, "the gain of 'd0' for the query 'q0' is inf"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    queries, gallery, query_ids, gallery_ids = drawn(5, queries=3, items=4)
    given = {"query_ids": query_ids, "gallery_ids": gallery_ids, "qrels": {"q0": {"d0": 1}}, "ks": (10,)} | change
    with pytest.raises(XcompatError, match=message):
        graded_metrics(queries, gallery, **given)


def judged_folder(folder: Path, queries: np.ndarray, texts: np.ndarray | None = None) -> Path:
    folder.mkdir()
    for kind, rows in (("query", queries), ("text", texts)):
        if rows is not None:
            np.save(folder / f"{kind}_embeds.npy", rows.astype(np.float32))
            (folder / f"{kind}_ids.txt").write_text("".join(f"{kind[0]}{row}\n" for row in range(len(rows))))
    return folder


def test_evaluate_judges_folders_by_their_judgements(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    texts = draw.standard_normal((40, 16))
    old = judged_folder(tmp_path / "old", texts[:12] + 3 * draw.standard_normal((12, 16)), texts)
    new = judged_folder(tmp_path / "new", texts[:12] + 0.1 * draw.standard_normal((12, 16)))
    qrels = {f"q{row}": {f"t{row}": 2, f"t{row + 12}": 1} for row in range(10)} | {"q10": {"gone": 1}, "q99": {"t0": 1}}
    lines = [f"{query} 0 {item} {gain}" for query, items in qrels.items() for item, gain in items.items()]
    (tmp_path / "qrels.txt").write_text("\n".join(lines) + "\n")
    asked = ["evaluate", "--old", old, "--new", new, "--qrels", tmp_path / "qrels.txt", "--output", tmp_path / "out"]
    shown = CliRunner().invoke(app, list(map(str, asked)), catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    report = load_report(tmp_path / "out")
    cases = {case.label: case for case in report.cases}
    assert set(cases) == {"old/old", "new/old"}
    stored = np.load(old / "text_embeds.npy")
    ids = [[f"{kind}{row}" for row in range(count)] for kind, count in (("q", 12), ("t", 40))]
    for label, folder in (("old/old", old), ("new/old", new)):
        found = graded_metrics(np.load(folder / "query_embeds.npy"), stored, *ids, qrels)
        assert {name: cases[label].metrics[name] for name in found} == pytest.approx(found)
        assert cases[label].n_queries == 11, "q11 has no judgement, and q99 is not there"
    assert report.criterion.backward_compatible
    said = " ".join(shown.output.split())
    for note in ("excluded: 1, e.g. 'q99'", "not found: 1, e.g. 'gone'", "1 queries have no judgement", "nDCG@10"):
        assert note in said
    page = tmp_path / "out" / "report" / "report.html"
    assert "nDCG@k" in page.read_text() and "A relevant passage at every depth" in page.read_text()
    plots = {plot.name for plot in (page.parent / "plots").iterdir()}
    assert plots == {"cases-text-to-text.png", "success-text-to-text.png", "tsne-0.png"}


def test_judgements_are_read_as_trec_beir_and_mteb_write_them(tmp_path: Path) -> None:
    trec, beir, mteb = tmp_path / "qrels.txt", tmp_path / "test.tsv", tmp_path / "test.jsonl"
    trec.write_text("1 0 a b\n1 0 d1 2\n\n2 0 d2 -1\n")
    beir.write_text("query-id\tcorpus-id\tscore\n1\td1\t2\n2\td2\t-1\n")
    mteb.write_text('{"query-id": "1", "corpus-id": "d1", "score": 2}\n{"query-id": 2, "corpus-id": "d2", "score": -1}\n')
    assert read_qrels(trec) == read_qrels(beir) == read_qrels(mteb) == {"1": {"d1": 2.0}, "2": {"d2": -1.0}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q d 1\nq d\n", "line 2 is not a judgement"),
        ("q d nan\nq d inf\n", "line 2 is not a judgement"),
        ("q d 1\nq d 2\n", "line 2 contradicts an earlier gain of 'd' for 'q'"),
        ('{"query-id": "q", "score": 1}\n', "line 1 is not a judgement"),
        ('{"query-id": "q", "corpus-id"\n', "line 1 is not a judgement"),
        ("query item gain\n", "contains no judgements"),
    ],
)
def test_what_is_no_judgement_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "qrels.tsv").write_text(text)
    with pytest.raises(XcompatError, match=message):
        read_qrels(tmp_path / "qrels.tsv")
    with pytest.raises(XcompatError, match="does not exist"):
        read_qrels(tmp_path / "gone.tsv")


def test_passages_may_be_missing_of_mapped_queries_alone(tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    bare = judged_folder(tmp_path / "bare", draw.standard_normal((3, 4)))
    (tmp_path / "qrels.txt").write_text("q0 0 t0 1\n")
    with pytest.raises(XcompatError, match="lacks text_embeds.npy"):
        evaluate_embeddings(bare, bare, None, None, tmp_path / "out", tmp_path / "qrels.txt")


def naive_interval(values: np.ndarray, clusters: list, n_resamples: int, level: float, seed: int) -> tuple[float, float]:
    generator = np.random.default_rng(seed)
    names = list(dict.fromkeys(clusters))
    means = []
    for _ in range(n_resamples):
        drawn = []
        for index in generator.integers(len(names), size=len(names)):
            drawn += [value for value, cluster in zip(values, clusters, strict=True) if cluster == names[index]]
        means.append(np.mean(drawn))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@given(st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abcde")), min_size=1, max_size=25), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_equals_the_naive_loop(items: list, seed: int) -> None:
    values = np.array([value for value, _ in items])
    clusters = [cluster for _, cluster in items]
    for chosen in (clusters, None):
        expected = naive_interval(values, chosen or list(range(len(values))), 40, 0.9, seed)
        assert bootstrap_interval(values, 40, 0.9, seed, chosen) == pytest.approx(expected, abs=1e-9)
    numbers = np.array([ord(cluster) for cluster in clusters])
    assert bootstrap_interval(values, 40, 0.9, seed, numbers) == bootstrap_interval(values, 40, 0.9, seed, clusters)


def test_memory_blocks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=50)
    whole = bootstrap_interval(values, 100)
    monkeypatch.setattr(module, "_BLOCK_NUMBERS", 333)
    assert bootstrap_interval(values, 100) == whole


def test_paired_difference_sees_what_single_intervals_miss() -> None:
    generator = np.random.default_rng(3)
    old = generator.random(400) < 0.4
    new = old | (generator.random(400) < 0.05)
    difference = paired_bootstrap(new, old)
    assert difference.mean == pytest.approx(new.mean() - old.mean())
    assert difference.excludes_zero
    assert bootstrap_interval(new)[0] < bootstrap_interval(old)[1]
    mirrored = paired_bootstrap(old, new)
    assert (mirrored.mean, mirrored.low, mirrored.high) == pytest.approx((-difference.mean, -difference.high, -difference.low))
    assert not paired_bootstrap(old, old).excludes_zero
    assert not PairedDifference(0.1, -0.1, 0.2).excludes_zero


@given(st.lists(st.tuples(st.integers(-1, 1), st.sampled_from("abcdef")), min_size=2, max_size=40), st.floats(0.5, 0.99))
@settings(max_examples=50, deadline=None)
def test_the_queries_needed_are_the_fewest_with_that_power(items: list, power: float) -> None:
    """The power of a test on n queries, by its definition, with the variance summed in a loop."""
    values, clusters = np.array([float(value) for value, _ in items]), [cluster for _, cluster in items]
    names, mean = sorted(set(clusters)), sum(values) / len(values)
    needed = queries_needed(values, 0.95, power, clusters)
    if mean == 0 or len(names) == 1:
        assert needed is None
        return
    assert needed is not None
    squares = 0.0
    for name in names:
        squares += sum(value - mean for value, cluster in zip(values, clusters, strict=True) if cluster == name) ** 2
    variance = squares * len(names) / (len(names) - 1) / len(values)  # of one query's share in the mean

    def power_of(n: int) -> float:
        return NormalDist().cdf(abs(mean) / (variance / n) ** 0.5 - NormalDist().inv_cdf(0.975)) if variance > 0 else 1.0

    assert power_of(needed) >= power - 1e-9
    assert needed == 1 or power_of(needed - 1) <= power + 1e-9


def test_differences_that_cancel_but_for_rounding_are_none() -> None:
    """Equal shares of pairs by other queries: their linearised numbers have means that rounding tells apart."""
    pairs = np.array([1, 3, 3, 2])
    (mine, share), (other, same) = (share_per_query(np.array(each), pairs) for each in ([1, 1, 0, 1], [0, 1, 2, 0]))
    assert share == same and (mine - other).mean() != 0, "rounding is what this is about"
    tie = paired_bootstrap(mine, other)
    assert (tie.mean, tie.queries_needed) == (0, None)
    assert tie.low < 0 < tie.high
    assert paired_bootstrap(np.full(9, 1e-18), np.zeros(9)) == PairedDifference(0, 0, 0)
    assert queries_needed(np.array([0.1, 0.2, -0.3] * 50)) is None
    assert queries_needed(np.array([0.1, 0.2, -0.3] * 50) * 1e6) is None, "rounding grows with the numbers"
    assert queries_needed(np.array([0.1, 0.2, -0.3] * 50) + 1e-6) is not None
    assert not find_deciding_difference(
        [Difference("image-to-image", "tar@far=1e-2", tie.mean, (tie.low, tie.high), tie.queries_needed)]
    )


def test_values_without_an_interval_are_refused() -> None:
    with pytest.raises(XcompatError, match="empty"):
        bootstrap_interval(np.array([]))
    with pytest.raises(XcompatError, match="level"):
        bootstrap_interval(np.ones(3), level=95)
    with pytest.raises(XcompatError, match="3 rows but 2 ids"):
        bootstrap_interval(np.ones(3), clusters_Q=["a", "b"])
    with pytest.raises(XcompatError, match="same queries"):
        paired_bootstrap(np.ones(3), np.ones(4))
    with pytest.raises(XcompatError, match="a number per query"):
        bootstrap_interval(np.ones((3, 2)))
