"""A comparison says what the reports say, seed by seed and query by query, and refuses reports of different protocols."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from conftest import raw_recipe, refuses
from rich.console import Console
from typer.testing import CliRunner

from xcompat import cli
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EvaluatedModels, EvaluationOptions, evaluate, paired_bootstrap
from xcompat.evaluation.cases import OLD_WITH_MEMORY, WITHOUT_MEMORY
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.report import Report, ReportContent, load_report
from xcompat.report.comparison import Comparison, EvaluatedMethod, ItemCost, Spread, compare, write_comparison
from xcompat.report.comparison.plots import draw_comparison, draw_item_costs
from xcompat.report.comparison.tables import print_comparison, summary, tables
from xcompat.report.content import Cost
from xcompat.report.report import build_report
from xcompat.report.storage import save_report
from xcompat.training.compare import compare_recipe, describe_few_steps, outside_parameters
from xcompat.training.item_cost import measure_item_cost
from xcompat.training.plain_map import plain_map_recipe
from xcompat.training.preflight import load_to_compare
from xcompat.training.recipe import examine_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[1]
N_ITEMS, N_CLASSES = 61, 12
RESAMPLES = 100
Methods = list[EvaluatedMethod]
SEEDS = (0, 1, 2)
NOISE = {"good": 0.2, "fair": 2.0, "bad": 8.0}
MAP = ("image-to-image", "map")


def labelled(name: str, dim: int, noise: float, seed: int, basis: int = 1) -> EmbeddedImages:
    generator = np.random.default_rng([seed, dim, int(noise * 10)])
    classes = np.random.default_rng(0).normal(size=(N_CLASSES, 6)) @ np.random.default_rng(basis).normal(size=(6, dim))
    labels = np.append(np.arange(N_ITEMS - 1) % N_CLASSES, N_CLASSES)  # the last query is alone in its class
    truth = np.vstack([classes, np.ones(dim)])[labels]
    embeds = truth + noise * generator.normal(size=truth.shape)
    ids = np.arange(N_ITEMS)
    return EmbeddedImages(name, Fingerprint.from_string(f"{name} {seed}"), embeds, embeds, ids, ids, labels, labels)


def paired(name: str, dim: int, noise: float, seed: int, basis: int = 1) -> EmbeddedPairs:
    generator = np.random.default_rng([seed, dim, int(noise * 10)])
    truth = np.random.default_rng(0).normal(size=(N_ITEMS, 6)) @ np.random.default_rng(basis).normal(size=(6, dim))
    text_ids = np.repeat(np.arange(N_ITEMS), 2)  # two captions of every image
    images, texts = (rows + noise * generator.normal(size=rows.shape) for rows in (truth, truth[text_ids]))
    return EmbeddedPairs(name, Fingerprint.from_string(f"{name} {seed}"), images, texts, np.arange(N_ITEMS), text_ids)


def judged(make: type, noise: float, seed: int, ks: Sequence[int] = (1, 5)) -> ReportContent:
    build = labelled if make is EmbeddedImages else paired
    old, view = build("old", 8, 2.5, seed), build("new", 8, noise, seed)
    new, plain = build("new", 12, noise, seed, 2), build("plain", 12, 0.9, seed, 3)
    contestants = EvaluatedModels(old, view, new, plain)
    evaluation = evaluate(contestants, EvaluationOptions(ks, n_resamples=RESAMPLES))
    if make is EmbeddedPairs:
        captions = np.repeat(np.arange(N_ITEMS), 2)
        evaluation = replace(evaluation, clusters={"text-to-image": captions, "image-to-text": np.arange(N_ITEMS)})
    return ReportContent(evaluation, contestants, "bct", tsne_pairs=0)


def make_contenders(folder: Path, make: type, seeds: Sequence[int] = SEEDS) -> Methods:
    for name, noise in NOISE.items():
        for seed in seeds:
            save_report(folder / f"seed-{seed}" / name, build_report(judged(make, noise, seed)))
    reports = {name: {seed: load_report(folder / f"seed-{seed}" / name) for seed in seeds} for name in NOISE}
    seconds = [2.0, 4.0, 6.0][: len(seeds)]
    return [EvaluatedMethod(name, "bct", reports[name], 10 * place, name == "fair", seconds) for place, name in enumerate(NOISE)]


@pytest.fixture(scope="module")
def contenders(tmp_path_factory: pytest.TempPathFactory) -> Methods:
    return make_contenders(tmp_path_factory.mktemp("labelled"), EmbeddedImages)


@pytest.fixture(scope="module")
def pair_contenders(tmp_path_factory: pytest.TempPathFactory) -> Methods:
    return make_contenders(tmp_path_factory.mktemp("pairs"), EmbeddedPairs)


@pytest.fixture(scope="module")
def comparison(contenders: Methods) -> Comparison:
    return compare("study", contenders, RESAMPLES)


def metric_of(report: Report, label: str, key: tuple[str, str]) -> float:
    (case,) = [case for case in report.cases if case.label == label and case.direction == key[0]]
    return case.metrics[key[1]]


def test_means_and_deviations_are_those_of_the_reports(comparison: Comparison, contenders: Methods) -> None:
    assert [row.name for row in comparison.rows] == ["old", "independent", *NOISE]
    sides = [(comparison.old.old_gallery, contenders[0], "old/old")]
    sides += [(comparison.independent.old_gallery, contenders[0], "independent/old")]
    sides += [(comparison.independent.own_gallery, contenders[0], "independent/independent")]
    for row, contender in zip(comparison.methods, contenders, strict=True):
        sides += [(row.old_gallery, contender, "new/old"), (row.own_gallery, contender, "new/new")]
    for found, contender, label in sides:
        assert {"cmc@1", "cmc@5", "map", "map@R"} <= {metric for _, metric in found}
        for key, spread in found.items():
            values = [metric_of(report, label, key) for report in contender.reports.values()]
            mean = sum(values) / len(values)
            deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
            assert spread == pytest.approx(Spread(mean, deviation), abs=1e-12)
    assert comparison.old.own_gallery == {}
    assert comparison.sizes == {"image-to-image": (N_ITEMS - 1, N_ITEMS)}


def test_verdicts_and_costs(comparison: Comparison, contenders: Methods) -> None:
    for row, contender in zip(comparison.methods, contenders, strict=True):
        criteria = [report.criterion for report in contender.reports.values()]
        assert row.compatible == sum(each.backward_compatible for each in criteria)
        assert row.not_hurt == sum(bool(each.new_model_not_hurt) for each in criteria)
        assert (row.extra_dims, row.seconds) == (4, 4.0)
    assert comparison.methods[0].compatible > 0 == comparison.methods[2].compatible
    assert [row.parameters for row in comparison.methods] == [0, 10, 20]
    assert comparison.best == "good"
    costs = {row.name: row.cells[1] for row in tables(comparison)[-1].rows}
    outcomes = {row.name: {each.outcome for each in row.differences} for row in comparison.methods}
    for name, found in outcomes.items():
        said = "worse" if "worse" in found else "better" if found == {"better"} else "undecided"
        assert re.fullmatch(rf"{said}( \([\d,]+ queries\))?" if said == "undecided" else said, costs[name])
    assert len(set().union(*outcomes.values())) > 1


def test_known_peak_memory_has_a_column(comparison: Comparison, contenders: Methods, tmp_path: Path) -> None:
    assert not any("memory" in column for column in tables(comparison)[-1].columns), "no report says it"
    peaks = {"good": [1_000, 3_000_000_000, 2_000], "fair": [5_000, 5_000, 4_000], "bad": [7, 7, 7]}
    told = []
    for each in contenders:
        costs = [Cost(1, 1, 1, 0, peak, "cpu", 1, 1.0, memory_is_own=True) for peak in peaks[each.name]]
        if each.name == "bad":  # with one seed it is that of earlier stages too
            costs[1] = costs[1]._replace(memory_is_own=False)
        reports = {
            seed: replace(report, costs={each.name: cost, "other": cost._replace(peak_memory=10**12)})
            for (seed, report), cost in zip(each.reports.items(), costs, strict=True)
        }
        told.append(replace(each, reports=reports))
    found = compare("study", told, RESAMPLES)
    assert [row.peak_memory for row in found.methods] == [3_000_000_000, 5_000, None], "the most of any seed"
    table = tables(found)[-1]
    assert table.columns[-1] == "peak\nmemory" and "Peak memory" in table.explanation
    assert [row.cells[-1] for row in table.rows] == ["3.0 GB", "5.0 kB", "–"]
    write_comparison(tmp_path, found)
    rows = json.loads((tmp_path / "comparison" / "compare.json").read_text())["rows"]
    assert [row.get("peak_memory") for row in rows] == [None, None, 3_000_000_000, 5_000, None]


def reported(folder: Path, contestants: EvaluatedModels, **options: Any) -> Report:
    evaluation = evaluate(contestants, EvaluationOptions(**options, n_resamples=RESAMPLES))
    save_report(folder, build_report(ReportContent(evaluation, contestants, "bct", tsne_pairs=0)))
    return load_report(folder)


REMEMBERED = {WITHOUT_MEMORY: ("new", 1.5), OLD_WITH_MEMORY: ("old", 2.0)}


def remembering(extra: dict[str, tuple[str, float]]) -> EvaluatedModels:
    found = {label: labelled(name, 8, noise, 1) for label, (name, noise) in extra.items()}
    return EvaluatedModels(labelled("old", 8, 2.5, 0), labelled("new", 8, 0.2, 0), extra=found)


def study_of(reports: dict[int, Report]) -> Comparison:
    return compare("study", [EvaluatedMethod("bct", "bct", reports, 0, False, [1.0] * len(reports))], RESAMPLES)


def test_measured_cases_and_memory_have_columns(comparison: Comparison, tmp_path: Path) -> None:
    contestants = EvaluatedModels(labelled("old", 8, 2.5, 0), labelled("new", 8, 0.2, 0), labelled("new", 8, 0.1, 0))
    report = reported(tmp_path / "report", contestants, old_on_new=True, rerank=5)
    measured = study_of({0: report})
    write_comparison(tmp_path, measured)
    cases = (("old/new", "from_old", "old queries"), ("new+rerank/old", "reranked", "re-ranked"))
    for label, field, column in cases:
        assert getattr(measured.methods[0], field)[MAP].mean == metric_of(report, label, MAP)
        assert f"mAP\n{column}" in tables(measured)[0].columns
        assert not any(column in name for name in tables(comparison)[0].columns)
        assert json.loads((tmp_path / "comparison" / "compare.json").read_text())["rows"][-1][field]
    report = reported(tmp_path / "report", remembering(REMEMBERED))
    measured = study_of({0: report})
    row = measured.methods[0]
    without, with_memory, new_old = (metric_of(report, f"{query}/old", MAP) for query in (*REMEMBERED, "new"))
    assert without != with_memory != new_old
    assert (row.without_memory[MAP].mean, row.old_with_memory[MAP].mean) == (without, with_memory)
    assert row.beside_old_with_memory[MAP].mean == pytest.approx(new_old - with_memory, abs=1e-7)  # stored in single precision
    shown = next(table for table in tables(measured) if "memory" in table.title)
    assert f"{100 * with_memory:.1f}" in shown.rows[0].cells
    assert not any("memory" in table.title for table in tables(comparison))
    write_comparison(tmp_path, measured)
    written = json.loads((tmp_path / "comparison" / "compare.json").read_text())["rows"][-1]
    assert written["beside_old_with_memory"][MAP[0]][MAP[1]]["low"] == row.beside_old_with_memory[MAP].low


def test_a_seed_in_which_nothing_is_remembered_stands_for_itself(tmp_path: Path) -> None:
    for order in ((0, 1), (1, 0)):
        reports = {}
        for seed, extra in zip(order, (REMEMBERED, {}), strict=True):
            reports[seed] = reported(tmp_path / str(order[0]) / str(seed), remembering(extra))
        measured, labels = reports[order[0]], [*(f"{query}/old" for query in REMEMBERED), "new/old", "old/old"]
        without, with_memory, new_old, old_old = (metric_of(measured, label, MAP) for label in labels)
        study = study_of(dict(sorted(reports.items())))
        row = study.methods[0]
        assert row.without_memory[MAP].mean == pytest.approx((without + new_old) / 2)
        assert row.old_with_memory[MAP].mean == pytest.approx((with_memory + old_old) / 2)
        assert row.beside_old_with_memory[MAP].mean == pytest.approx(new_old - (with_memory + old_old) / 2, abs=1e-7)
        assert [note for note in study.notes if note.startswith("In 1 of 2 seeds, queries of bct")]


def test_gains_are_of_values_averaged_over_seeds(comparison: Comparison, contenders: Methods, pair_contenders: Methods) -> None:
    values = {}
    for contender in contenders:
        for query in ("old", "new"):
            per_seed = [report.average_precision[query, "old", *MAP] for report in contender.reports.values()]
            values[contender.name, query] = np.array([np.mean(of_query) for of_query in zip(*per_seed, strict=True)])[:-1]
    classes = np.arange(N_ITEMS - 1) % N_CLASSES
    for row in comparison.methods:
        mine = values[row.name, "new"]
        expected = paired_bootstrap(mine, values["good", "old"], RESAMPLES, clusters_Q=classes)
        assert vars(row.gains[MAP]) == pytest.approx(vars(expected), abs=1e-6)
        if row.name == "good":
            assert row.behind_best == {}
        else:
            expected = paired_bootstrap(mine, values["good", "new"], RESAMPLES, clusters_Q=classes)
            assert vars(row.behind_best[MAP]) == pytest.approx(vars(expected), abs=1e-6)
            assert row.behind_best[MAP].mean < 0
    assert comparison.methods[0].gains[MAP].low > 0 > comparison.methods[2].gains[MAP].high
    for each in (comparison, compare("study", pair_contenders, RESAMPLES)):
        for row in each.methods:
            assert row.gains.keys() == each.old.old_gallery.keys(), "values of each query are known for every metric"
            for key, gain in row.gains.items():
                assert gain.mean == pytest.approx(row.old_gallery[key].mean - each.old.old_gallery[key].mean, abs=1e-6)


def test_a_tie_of_stored_values_is_no_loss(contenders: Methods) -> None:
    """Reports hold float32: numbers that cancel in float64 leave some 1e-9 of them."""
    with_tie = []
    for each in contenders:
        reports = {}
        for seed, report in each.reports.items():
            values = dict(report.average_precision)
            values["old", "old", *MAP] = np.append(np.resize(np.float32([0.6, 0.4, 0.2]), N_ITEMS - 1), np.float32(np.nan))
            values["new", "old", *MAP] = np.append(np.resize(np.float32([0.5, 0.2, 0.5]), N_ITEMS - 1), np.float32(np.nan))
            reports[seed] = replace(report, average_precision=values)
        with_tie.append(replace(each, reports=reports))
    stored = [with_tie[0].reports[0].average_precision[query, "old", *MAP].astype(np.float64) for query in ("new", "old")]
    assert np.nanmean(stored[0] - stored[1]) != 0
    gain = compare("study", with_tie, RESAMPLES).methods[0].gains[MAP]
    assert (gain.mean, gain.queries_needed) == (0, None)
    assert gain.low < 0 < gain.high


def test_captions_of_one_image_are_drawn_together(pair_contenders: Methods) -> None:
    alone = [replace(each, reports={s: replace(r, clusters={}) for s, r in each.reports.items()}) for each in pair_contenders]
    together, apart = compare("study", pair_contenders, RESAMPLES), compare("study", alone, RESAMPLES)
    key, same = ("text-to-image", "recall@1"), ("image-to-text", "recall@1")
    assert together.methods[1].gains[same] == apart.methods[1].gains[same], "every image asks once"
    assert together.methods[1].gains[key].mean == apart.methods[1].gains[key].mean
    assert together.methods[1].gains[key] != apart.methods[1].gains[key]
    assert list(together.sizes) == ["image-to-text", "text-to-image"]


def test_reports_without_values_or_a_ceiling(contenders: Methods) -> None:
    without = {seed: replace(report, ranks={}, average_precision={}) for seed, report in contenders[1].reports.items()}
    bare = replace(contenders[1], reports=without)
    ranks_only = replace(contenders[2], reports={s: replace(r, average_precision={}) for s, r in contenders[2].reports.items()})
    found = compare("study", [contenders[0], bare, ranks_only], RESAMPLES)
    assert [list(row.gains) == [] for row in found.methods] == [False, True, False]
    assert {metric for _, metric in found.methods[2].gains} == {"cmc@1", "cmc@5"}
    assert any("No differences for fair" in note for note in found.notes)
    assert found.methods[1].old_gallery == compare("study", contenders, RESAMPLES).methods[1].old_gallery

    def alone(report: Report) -> Report:
        cases = [case for case in report.cases if "independent" not in case.label]
        return replace(report, cases=cases, criterion=replace(report.criterion, new_model_not_hurt=None))

    plain = [replace(each, reports={s: alone(r) for s, r in each.reports.items()}) for each in contenders]
    found = compare("study", plain, RESAMPLES)
    assert found.independent is None
    assert [row.not_hurt for row in found.methods] == [None] * 3
    assert "not measured" in tables(found)[-1].rows[0].cells
    assert len(draw_comparison(found)) == 2
    partly = compare("study", [plain[0], *contenders[1:]], RESAMPLES)
    assert partly.independent == compare("study", contenders, RESAMPLES).independent


def changed(contender: EvaluatedMethod, seed: int, **changes: object) -> EvaluatedMethod:
    return replace(contender, reports={**contender.reports, seed: replace(contender.reports[seed], **changes)})


def test_different_protocols_are_refused(contenders: Methods) -> None:
    first, second, third = contenders
    report = second.reports[1]
    other_old = Fingerprint.from_string("another")
    shorter = [replace(case, metrics={"cmc@1": 0.5}) for case in report.cases]
    smaller = [replace(case, n_gallery=5) for case in report.cases]
    easier = [replace(case, metrics=dict.fromkeys(case.metrics, 1.0)) for case in report.cases if case.label == "old/old"]
    rest = [case for case in report.cases if case.label != "old/old"]
    left_out = {key: np.roll(ranks_Q, 1) for key, ranks_Q in report.ranks.items()}
    cases = {
        "no report for seed 2": replace(second, reports={seed: second.reports[seed] for seed in (0, 1)}),
        "new/new image-to-image CMC@5 is missing in one": changed(second, 1, cases=shorter),
        "new/new image-to-image CMC@1 is missing in one, or differs in size": changed(second, 1, cases=smaller),
        "old/old image-to-image .* is .* and 1.0000": changed(second, 1, cases=easier + rest),
        "they excluded different queries": changed(second, 1, ranks=left_out),
        "their old models are old and old": changed(second, 1, old=replace(report.old, fingerprint=other_old.digest)),
    }
    for message, wrong in cases.items():
        assert "fair" in refuses(message, compare, "study", [first, wrong, third], RESAMPLES)
    refuses("nothing to compare", compare, "study", [], RESAMPLES)
    refuses("no report for any seed", compare, "study", [replace(first, reports={})], RESAMPLES)


@pytest.fixture(scope="module", params=["contenders", "pair_contenders"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    found = compare("a | <study>", request.getfixturevalue(request.param), RESAMPLES)
    folder = tmp_path_factory.mktemp("written")
    page = write_comparison(folder, found)
    assert page == folder / "comparison" / "compare.html"
    return found, page.parent


def test_csv_has_a_row_per_model_and_json_the_same_numbers(written: tuple[Comparison, Path]) -> None:
    found, folder = written
    table = pd.read_csv(folder / "compare.csv").set_index("name")
    document = json.loads((folder / "compare.json").read_text())
    assert list(table.index) == [row["name"] for row in document["rows"]] == [row.name for row in found.rows]
    assert document["seeds"] == list(SEEDS) and document["best"] == "good"
    for row, told in zip(found.rows, document["rows"], strict=True):
        for side in ("old_gallery", "own_gallery"):
            for (direction, metric), spread in getattr(row, side).items():
                assert table.loc[row.name, f"{side}/{direction}/{metric}/mean"] == pytest.approx(spread.mean)
                assert told[side][direction][metric] == {"mean": spread.mean, "std": spread.std}
    for row in found.methods:
        for (direction, metric), difference in row.gains.items():
            assert table.loc[row.name, f"gain/{direction}/{metric}/low"] == pytest.approx(difference.low)
        assert (folder / "compare.csv").read_text().count(f"\n{row.name},bct,") == 1
        assert table.loc[row.name, "parameters_per"] == ("gallery item" if row.name == "fair" else "query")
    assert table.loc["good"].filter(like="behind_best").isna().all() and table.loc["old"].filter(like="own_gallery").isna().all()


def test_markdown_page_and_terminal_say_every_number(written: tuple[Comparison, Path]) -> None:
    found, folder = written
    buffer = io.StringIO()
    print_comparison(found, Console(file=buffer, width=80))
    terminal = buffer.getvalue()
    assert max(len(line) for line in terminal.splitlines()) <= 80
    markdown, page = (folder / "compare.md").read_text(), (folder / "compare.html").read_text()
    for table in tables(found):
        assert table.title in terminal and f"## {table.title}\n" in markdown and f"<h2>{table.title}</h2>" in page
        for row in table.rows:
            name = f"**{row.name}**" if row.is_best else row.name
            assert f"| {name} | {' | '.join(row.cells)} |\n" in markdown
            for cell in row.cells:
                mean, _, deviation = cell.partition(" ± ")
                assert f"<td>{mean}{f'<small>± {deviation}</small>' if deviation else ''}</td>" in page
                assert all(part.strip("(") in terminal for part in cell.split())
    assert summary(found) in page and summary(found) in markdown
    blocks = re.findall(r"(?:^\|.*\|\n)+", markdown, re.MULTILINE)
    assert len(blocks) == len(tables(found))
    assert all(len({line.count("|") for line in block.splitlines()}) == 1 for block in blocks)
    assert "a | &lt;study&gt;" in page


def test_page_is_self_contained(written: tuple[Comparison, Path]) -> None:
    found, folder = written
    page = (folder / "compare.html").read_text()
    sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(sources) == len(draw_comparison(found)) == 2 * len(found.sizes) - (len(found.sizes) - 1) * 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|<script|@import|url\(", page)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_comparison(folder.parent, found)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_comparison_replaces_its_own_at_once(comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = write_comparison(tmp_path, comparison)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    written, write_text = [], Path.write_text

    def fail_between(path: Path, text: str, **options: str) -> int:
        if len(written) == 2:
            raise OSError(28, "No space left on device", str(path))
        written.append(path)
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", fail_between)
    with pytest.raises(OSError, match="No space left"):
        write_comparison(tmp_path, replace(comparison, name="another"))
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert len(written) == 2
    assert write_comparison(tmp_path, comparison) == page and [path.name for path in tmp_path.iterdir()] == ["comparison"]
    (page.parent / "notes.txt").write_text("a user's")
    refuses(r"notes.txt was not made by `xcompat compare`; move it", write_comparison, tmp_path, comparison)
    assert (page.parent / "notes.txt").read_text() == "a user's"


def test_plots_mark_every_model_between_floor_and_ceiling(comparison: Comparison) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    crowd = [replace(comparison.methods[0], name=f"method number {place}") for place in range(6)]
    figures = draw_comparison(replace(comparison, methods=[*comparison.methods, *crowd]))
    assert list(figures) == ["image-to-image cmc@1", "image-to-image map"]
    for figure in figures.values():
        (axes,) = figure.axes
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        boxes = {text.get_text(): Text.get_window_extent(text, renderer) for text in axes.texts}
        assert set(boxes) == {"independent", *NOISE, *(row.name for row in crowd)}
        names = list(boxes)
        for place, name in enumerate(names):
            assert axes.get_window_extent(renderer).padded(1).fully_containsx(boxes[name].x0), name
            assert not [other for other in names[place + 1 :] if boxes[name].overlaps(boxes[other])], name
    (axes,) = figures["image-to-image map"].axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["old/old, the baseline"].get_ydata()[0] == pytest.approx(comparison.old.old_gallery[MAP].mean * 100)
    ceiling = comparison.independent.own_gallery[MAP].mean * 100
    assert lines["independent/independent, the ceiling"].get_xdata()[0] == pytest.approx(ceiling)
    points = {tuple(np.ravel(line.get_xydata())) for line in axes.lines if len(line.get_xydata()) == 1}
    for row in comparison.rows[1:]:
        assert (row.own_gallery[MAP].mean * 100, row.old_gallery[MAP].mean * 100) in points


def test_costs_per_item_of_maps_of_galleries_are_drawn(contenders: Methods, tmp_path: Path) -> None:
    plain = [replace(each, item_cost=ItemCost(0, 32, 4_000_000, 3072)) for each in contenders]
    assert draw_item_costs(compare("study", contenders, RESAMPLES)) == {} == draw_item_costs(compare("study", plain, RESAMPLES))
    found = compare("study", [*plain[:2], replace(plain[2], item_cost=ItemCost(5000, 64))], RESAMPLES)
    key, ceiling = found.first_metric, found.independent.own_gallery[found.first_metric].mean
    figures = draw_item_costs(found)
    for unit, costs in {"MACs": (0, 0, 5000, 0, 4_000_000), "bytes": (32, 32, 64, 32, 3072)}.items():
        (axes,) = figures[unit].axes
        points = {tuple(np.ravel(line.get_xydata())) for line in axes.lines}
        means = [*(row.old_gallery[key].mean for row in found.methods), found.old.old_gallery[key].mean, ceiling]
        assert points == {(cost, 100 * mean) for cost, mean in zip(costs, means, strict=True)}
    page = write_comparison(tmp_path, found).read_text()
    assert "Cost per gallery item" in page and "<td>5,000</td><td>64</td>" in page
    rows = json.loads((tmp_path / "comparison" / "compare.json").read_text())["rows"]
    assert rows[-1]["item_cost"] == {"map_macs": 5000, "stored_bytes": 64, "embed_macs": None, "image_bytes": None}


def test_costs_per_item_are_counted(folder_of: dict[str, str]) -> None:
    old, side = (describe_old(Fingerprint.from_string(name), dim) for name, dim in (("old", 128), ("side", 64)))
    fct = METHODS["fct"](METHODS["fct"].config_class(old=old, side_info=side, embedding_dim=128)).eval()
    layers = [module for module in fct.modules() if isinstance(module, torch.nn.Linear)]
    macs = sum(layer.in_features * layer.out_features for layer in layers)
    assert measure_item_cost(fct) == ItemCost(macs, 4 * (128 + 64))
    old = describe_old(Fingerprint.from_string("old"), 8)
    direct = METHODS["bct"].from_encoder(folder_of["clip"], old=old, classes=["a", "b"])
    cost, (height, width) = measure_item_cost(direct), direct.processor.image_size
    assert cost.map_macs == 0 and cost.stored_bytes == 32 and cost.image_bytes == 3 * height * width
    assert cost.embed_macs is not None and cost.embed_macs > 10_000
    free = METHODS["direct"].from_encoder(folder_of["clip"], old=old)
    head = sum(each.numel() for name, each in free.named_parameters() if not name.startswith("encoder."))
    assert outside_parameters(free) == head, "what embeddings go through, and nothing of the encoder"


def test_what_lies_where_a_comparison_goes_is_seen_before_the_study_is_run(tmp_path: Path, pairs_folder: str) -> None:
    (tmp_path / "run" / "comparison").mkdir(parents=True)
    (tmp_path / "run" / "comparison" / "notes.txt").write_text("a user's")
    raw = raw_recipe(tmp_path, "./nowhere", "./nowhere", pairs_folder, embeddings_of="images") | {"method": "ridge"}
    refuses("notes.txt was not made by `xcompat compare`", compare_recipe, parse_recipe(raw, "study", "study.yaml"))


@pytest.mark.usefixtures("undrawn")
def test_a_study_runs_once_per_seed_and_goes_on_where_it_stopped(
    tmp_path: Path, folder_of: dict[str, str], old_folder: str, pairs_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], pairs_folder, embeddings_of="images")
    raw |= {"seeds": [3, 5], "stages": [{"method": "ridge"}, {"method": "procrustes"}]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(raw))
    done = CliRunner().invoke(cli.app, ["compare", str(tmp_path / "tiny.yaml")])
    assert done.exit_code == 0 and "verdicts and costs" in done.output.lower(), done.output
    page = tmp_path / "run" / "comparison" / "compare.html"
    document = json.loads(page.with_suffix(".json").read_text())
    assert [row["name"] for row in document["rows"]] == ["old", "independent", "ridge", "procrustes", "plain map", "half-way"]
    for row in document["rows"][2:4]:
        assert row["parameters"] == 16 * 8 + 8 and row["extra_dims"] == 8 and row["seconds"] > 0
        spread = row["old_gallery"]["text-to-image"]["recall@5"]
        for seed in (3, 5):  # the last stage's report stands at the top of its run
            folder = tmp_path / "run" / f"seed-{seed}" / ("" if row["name"] == "procrustes" else row["name"])
            report = load_report(folder)
            assert report.method == row["name"]
            assert metric_of(report, "new/old", ("text-to-image", "recall@5")) == pytest.approx(spread["mean"])
        assert spread["std"] == pytest.approx(0), "a closed form does not depend on the seed"
    weights = tmp_path / "run" / "seed-5" / "ridge" / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns, page.read_bytes()
    assert compare_recipe(parse_recipe(raw, "tiny", "tiny.yaml")) == page
    assert (weights.stat().st_mtime_ns, page.read_bytes()) == before
    assert "is done, reused" in capsys.readouterr().out


@pytest.mark.usefixtures("undrawn")
def test_trained_methods_stand_beside_a_plain_map(
    tmp_path: Path, folder_of: dict[str, str], old_folder: str, pairs_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its new queries and its half-way queries are rows, and too few steps are a note."""
    raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], pairs_folder, embeddings_of="images") | {"method": "query_map"}
    raw["training"] = {"max_steps": 2, "warmup_steps": 5, "per_device_train_batch_size": 4, "save_strategy": "no"}
    recipe = parse_recipe(raw, "tiny", "tiny.yaml")
    page = compare_recipe(recipe)
    rows = json.loads(page.with_suffix(".json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["old", "independent", "query_map", "plain map", "half-way"]
    report = load_report(tmp_path / "run" / "seed-0" / "plain_map")
    for row, label in zip(rows[3:], ("new/old", "slerp/old"), strict=True):
        mean = row["old_gallery"]["text-to-image"]["recall@1"]["mean"]
        assert metric_of(report, label, ("text-to-image", "recall@1")) == pytest.approx(mean)
    assert "few training steps (query_map 2 steps, warm-up not over)" in " ".join(capsys.readouterr().out.split())
    assert plain_map_recipe(parse_recipe(raw | {"plain_map": False}, "tiny", "tiny.yaml")) is None
    for method, is_added in (("ridge", True), ("whitened", False)):
        solved = parse_recipe(raw | {"method": method, "training": {}}, "tiny", "tiny.yaml")
        assert (plain_map_recipe(solved) is not None) == is_added, method


@pytest.mark.parametrize(
    ("log", "warmup", "said"),
    [
        ([{"step": 100, "epoch": 0.5, "loss": 1.0}, {"step": 120, "epoch": 0.6, "train_runtime": 3.0}], 20, "0.6 passes over"),
        ([{"step": 120, "epoch": 2.0, "loss": 1.0}], 120, "120 steps, warm-up not over"),
        ([{"step": 120, "epoch": 2.0, "loss": 1.0}], 0.1, ""),
        ([{"step": 120, "epoch": 0.995, "loss": 1.0}], 20, ""),
        (None, 20, ""),
    ],
)
def test_few_steps_are_less_than_a_pass_or_the_warm_up(log: Any, warmup: float, said: str, tmp_path: Path) -> None:
    training = {"max_steps": 120, "warmup_steps": warmup}
    raw = {"output_dir": str(tmp_path), "old": "a", "new": "b", "method": "query_map", "training": training}
    recipe = parse_recipe(raw, "tiny", "tiny.yaml", is_quick=True)
    if log is not None:
        (tmp_path / "log_history.json").write_text(json.dumps(log))
    assert said in (line := describe_few_steps(recipe, recipe.stages)) and bool(line) == bool(said)


def test_all_recipes_of_a_folder_are_compared_with_one_more_stage(tmp_path: Path) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    refuses("bench contains no recipe; choose a folder of YAML files", load_to_compare, folder, [])
    (tmp_path / "texts.txt").write_text("a dog\na cat\n")
    text = f"data: {{texts: [{{path: {tmp_path}/texts.txt}}]}}\nold: ./old\nnew: ./new\nstages: [{{name: line, method: ridge}}]\n"
    for name in ("b", "a"):
        (folder / f"{name}.yaml").write_text(text.replace("./", f"{tmp_path}/"))
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("method: procrustes\noptions: {centre: true}\n")
    first, second = load_to_compare(folder, ["seeds=[0, 1]"], tmp_path / "mine.yaml")
    assert (first.name, second.name) == ("a", "b") and first.seeds == [0, 1]
    assert [(stage.name, stage.method) for stage in first.stages] == [("line", "ridge"), ("mine", "procrustes")]
    assert first.stages[1].old == first.stages[0].old and first.stages[1].options == {"centre": True}
    refuses(r"two recipes write to .*x; give each its own output_dir", load_to_compare, folder, [f"output_dir={tmp_path}/x"])
    (folder / "a.yaml").write_text("method: ridge\n")
    way = r"write its method \(and options\) as a stage, e.g. stages: \[{method: ridge}\]"
    refuses(
        f"cannot add a stage: .* has no list of stages; {way}$", load_to_compare, folder / "a.yaml", [], tmp_path / "mine.yaml"
    )


def test_a_class_of_an_extra_stage_is_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("stages: [{method: ridge}]\n")
    Path("mine/line.yaml").write_text("method: line.py:LineModel\n")
    missing = r"^mine/line.yaml: method: mine/line.py does not exist; did you mean 'mine/line.yaml'\?$"
    assert any(re.match(missing, line) for line in examine_recipe("recipe.yaml", is_quick=True, more=Path("mine/line.yaml"))[1])
    for place in ("line.py", "mine/line.py"):  # the file beside the stage wins
        Path(place).touch()
        recipe, problems = examine_recipe("recipe.yaml", is_quick=True, more=Path("mine/line.yaml"))
        assert recipe is not None and recipe.stages[1].method == f"{place}:LineModel"
        assert not any("line.py" in line for line in problems)


def test_the_leaderboard_is_what_the_comparisons_say(
    contenders: Methods, pair_contenders: Methods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import leaderboard

    runs, kept = tmp_path / "runs", tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(leaderboard, "KEPT", kept)

    def keep(protocol: str, methods: Methods) -> None:
        save_report(runs / protocol / "seed-0" / contenders[0].name / "report", methods[0].reports[0])
        write_comparison(runs / protocol, compare(protocol, methods, RESAMPLES))

    keep("classes", contenders)
    keep("pairs", pair_contenders)
    monkeypatch.setattr(leaderboard, "TABLES", {"one": ("classes", "pairs"), "two": ("elsewhere",)})
    found = leaderboard.studies(runs)
    head, _, *rows = leaderboard.table(found)
    assert head.count("queries") == 3 and "| pairs, text-to-image, " in head, "one direction of images, two of pairs"
    assert [row.split("(")[0] for row in rows] == ["| good ", "| fair ", "| bad "] and " of 6 |" in rows[0]
    good = next(row for row in found["classes"]["rows"] if row["name"] == "good")["gain"]["image-to-image"]["cmc@1"]
    assert f"CMC@1 {100 * good['mean']:+.1f} (" in rows[0]
    page, (one, two) = tmp_path / "page.md", (leaderboard.BEGIN.format(name) for name in ("one", "two"))
    page.write_text(f"before\n{one}old\n{leaderboard.END}between\n{two}kept\n{leaderboard.END}after\n")
    monkeypatch.setattr(leaderboard, "PAGE", page)
    leaderboard.main(runs, write=True)
    end = leaderboard.END.strip()
    table = "\n".join([head, _, *rows])
    assert page.read_text() == f"before\n{one}{table}\n{end}\nbetween\n{two}kept\n{end}\nafter\n", "not run: as it was"
    assert "The table of two stays: elsewhere is neither run nor kept." in capsys.readouterr().err

    # elsewhere, where one protocol alone is run again, the other one is read from what is kept
    written = page.read_text()
    shutil.rmtree(runs / "pairs")
    leaderboard.main(runs, write=True)
    assert page.read_text() == written
    shutil.rmtree(runs)
    leaderboard.main(runs)
    assert table in capsys.readouterr().out
    fewer = [replace(each, reports={0: each.reports[0]}) for each in contenders[1:]]
    keep("classes", fewer)
    lost = f"seed 1, seed 2, {contenders[0].name}"
    with pytest.raises(SystemExit, match=f"classes: {lost} would be lost; run them too, use --add .*classes.json"):
        leaderboard.main(runs, write=True)
    with pytest.raises(SystemExit, match=r"classes: cannot add rows with other seeds than in .*classes\.json"):
        leaderboard.main(runs, write=True, add=True)
    assert page.read_text() == written

    # one method alone, run again with all seeds: its row is replaced, and the others stay
    again = replace(contenders[1], reports=contenders[2].reports)
    keep("classes", [again])
    leaderboard.main(runs, write=True, add=True)
    before, after = found["classes"]["rows"], {row["name"]: row for row in leaderboard.kept()["classes"]["rows"]}
    assert len(after) == len(before) and after[contenders[0].name] == before[0]
    assert after[again.name]["gain"] == after[contenders[2].name]["gain"] != before[1]["gain"]
