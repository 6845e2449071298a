"""A plan: what each way to a new model finds by a report, and what it takes of an index and its traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from xcompat import Fingerprint
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, EvaluationOptions, evaluate
from xcompat.report import Report, ReportContent, load_report
from xcompat.report.planning import Traffic, describe_plan, plan_ways
from xcompat.report.report import build_report
from xcompat.report.storage import save_report

Run = Callable[..., tuple[int, str, str]]
COUNT, OLD_DIM, NEW_DIM = 60, 8, 12


def images(name: str, dim: int, noise: float) -> EmbeddedImages:
    draw = np.random.default_rng(0)
    labels_N = np.arange(COUNT) % 6
    embeds_ND = np.pad(draw.normal(size=(6, 8)), ((0, 0), (0, dim - 8)))[labels_N] + noise * draw.normal(size=(COUNT, dim))
    ids = [str(row) for row in range(COUNT)]
    return EmbeddedImages(name, Fingerprint.from_string(name), embeds_ND, embeds_ND, ids, ids, labels_N, labels_N)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("planned")
    old, view, own = images("old", OLD_DIM, 1.2), images("view", OLD_DIM, 0.8), images("new", NEW_DIM, 0.4)
    contestants = EvaluatedModels(old, view, own, extra={"slerp": images("mixed", OLD_DIM, 0.7)})
    evaluation = evaluate(contestants, EvaluationOptions(n_resamples=50, rerank=5))
    save_report(
        folder / "report", build_report(ReportContent(evaluation, contestants, "map", run={"reranked_hits": 5}, tsne_pairs=0))
    )
    return load_report(folder)


def test_costs_are_those_of_a_calculation_by_hand(report: Report) -> None:
    plan = plan_ways(report, Traffic(1000, 10, embeds_per_second=2.0, price_per_1000=3.0, days=7))
    found = {way.name: way for way in plan.ways}
    cases = {case.label: case for case in report.cases}
    assert {name: way.quality for name, way in found.items()} == {
        "stay": cases["old/old"].metrics["cmc@1"],
        "new queries": cases["new/old"].metrics["cmc@1"],
        "half-way queries": cases["slerp/old"].metrics["cmc@1"],
        "re-rank 5": cases["new+rerank/old"].metrics["cmc@1"],
        "backfill": cases["new/new"].metrics["cmc@1"],
    }
    assert [way.in_all for way in plan.ways] == [70, 70, 140, 70 + 350, 1000 + 70]
    assert [way.milliseconds for way in plan.ways] == [500, 500, 1000, 3000, 500]
    assert [way.hours for way in plan.ways] == pytest.approx([0, 0, 0, 0, 1000 / 2 / 3600])
    assert [way.price for way in plan.ways] == pytest.approx([0.21, 0.21, 0.42, 1.26, 3.21])
    many = {way.name: way for way in plan_ways(report, Traffic(1000, 10**6)).ways}["re-rank 5"]
    assert many.in_all == 30 * 10**6 + 1000 and many.milliseconds is None, "no item is embedded twice"
    index = 1000 * OLD_DIM * 4
    assert [way.stored_bytes for way in plan.ways] == [index, index, index, index + 350 * (NEW_DIM * 4 + 48), 1000 * NEW_DIM * 4]


def test_the_share_of_the_gain_and_what_is_missing_are_said(report: Report) -> None:
    plan = plan_ways(report, Traffic(1000, 10), "map")
    said = " ".join(describe_plan(plan))
    stay, new, *_, backfill = (way.quality for way in plan.ways)
    assert None not in (stay, new, backfill) and f"new queries: {100 * (new - stay) / (backfill - stay):.0f} %" in said
    assert "at most 50 items a day" in said and "after 20.0 days or more" in said and "Not measured" not in said
    bare = Report(**{**vars(report), "cases": [case for case in report.cases if case.label in ("old/old", "new/old")]})
    assert (
        "half-way queries (set evaluation.slerp: 0.5 in the recipe), re-rank 5 (add --rerank 20 to `xcompat evaluate`), backfill "
        "(add --new-own FOLDER to `xcompat evaluate`)" in describe_plan(plan_ways(bare, Traffic(10, 0)))[-1]
    )


def test_the_command_line(run_xcompat: Run, report: Report, tmp_path: Path) -> None:
    save_report(tmp_path / "report", report)
    asked = ("plan", tmp_path, "--items", 5_000_000, "--queries-per-day", 20_000)
    image = tmp_path / "plan.png"
    code, said, _ = run_xcompat(*asked, "--embeds-per-second", 100, "--price", 0.1, "--plot", image)
    assert code == 0 and "5,000,000 items, 20,000 queries a day" in said and "re-rank 5" in said and "13.9" in said
    assert Image.open(image).size[0] > 500
    code, _, said = run_xcompat(*asked, "--plot", image)
    assert code == 2 and f"{image} exists" in said
    code, _, said = run_xcompat(*asked, "--metric", "recall@7")
    assert code == 2 and "does not measure recall@7; it has cmc@1" in said
