"""A report says what was measured, survives the disk, needs nothing beside its page, and never runs what it is told."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from xcompat import Fingerprint, XcompatError
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EvaluatedModels, EvaluationOptions, ZeroShot, evaluate
from xcompat.evaluation.cases import Criterion, Difference
from xcompat.report import load_report, print_report, print_ways, render_html, render_markdown, render_report, write_report
from xcompat.report.content import Cost, Example, ExampleRow, Hit, LossPoint, ModelInfo, Report, ReportContent
from xcompat.report.plots import draw_plots
from xcompat.report.report import build_report
from xcompat.report.storage import save_report
from xcompat.report.wording import failed_lines, percent, verdicts

N_ITEMS = 40


def embedded(name: str, dim: int, noise: float, basis_seed: int) -> EmbeddedPairs:
    generator = np.random.default_rng(dim + int(noise * 10))
    truth = np.random.default_rng(0).normal(size=(N_ITEMS, 8)) @ np.random.default_rng(basis_seed).normal(size=(8, dim))
    images, texts = (truth + noise * generator.normal(size=truth.shape) for _ in range(2))
    shot = ZeroShot(images[:6], texts[:6], np.arange(6))
    return EmbeddedPairs(name, Fingerprint.from_string(name), images, texts, np.arange(N_ITEMS), np.arange(N_ITEMS), shot)


def make_content(view_noise: float = 0.3) -> ReportContent:
    old, view = embedded("old<b>", 8, 3.0, 1), embedded("new", 8, view_noise, 1)
    new, independent = embedded("new", 12, 0.2, 2), embedded("plain", 12, 0.2, 3)
    contestants = EvaluatedModels(old, view, new, independent, extra={"phi": embedded("phi", 8, 2.0, 1)})
    evaluation = evaluate(contestants, EvaluationOptions(n_resamples=30))
    blot = Image.new("RGBA", (300, 200), (200, 30, 30, 255))
    hits = [Hit(blot, "a [red] blot", True), Hit(None, "<script>alert(1)</script>", False), Hit(None, "told", True, 2.0)]
    row = ExampleRow("old query", hits)
    examples = [Example("find [me] & <you>", [row, ExampleRow("new query", [Hit(Image.new("L", (8, 8), 7), "grey", False)])])]
    seconds = {"train": 12.5, "evaluate": 1.25}
    run = {"command": "xcompat quickstart"}
    return ReportContent(evaluation, contestants, "xbt", seconds, run, examples, tsne_pairs=12)


@pytest.fixture(scope="module")
def content() -> ReportContent:
    return make_content()


@pytest.fixture(scope="module")
def folder(content: ReportContent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = write_report(tmp_path_factory.mktemp("run") / "report", content)
    return page.parent


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_json_has_the_schema_and_nothing_more(folder: Path, content: ReportContent) -> None:
    document = json.loads((folder / "report.json").read_text())
    about = {"schema", "old", "new", "method", "cases", "criterion"}
    assert set(document) == about | {"seconds", "training", "costs", "run", "backfill_losses"}
    assert document["schema"] == 1
    assert document["old"] == {"name": "old<b>", "fingerprint": content.contestants.old.fingerprint.digest, "dim": 8}
    assert document["new"]["dim"] == 12
    judged = {"backward_compatible", "new_model_not_hurt", "failed", "differences", "outcome", "queries_needed"}
    assert set(document["criterion"]) == judged
    assert set(document["criterion"]["differences"][0]) == {"direction", "metric", "mean", "ci95", "queries_needed", "outcome"}
    keys = {"query", "gallery", "direction", "population", "n_queries", "n_gallery", "metrics", "ci95"}
    for case, measured in zip(document["cases"], content.evaluation.cases, strict=True):
        assert set(case) == keys
        assert case["metrics"] == measured.metrics
        assert case["ci95"] == {name: list(bounds) for name, bounds in measured.ci95.items()}
    assert document["run"]["command"] == "xcompat quickstart"
    assert document["run"]["notes"] == content.evaluation.notes


def test_everything_comes_back_from_disk(folder: Path, content: ReportContent) -> None:
    report = load_report(folder)
    assert report.cases == content.evaluation.cases
    assert report.criterion == content.evaluation.criterion
    assert report.seconds == content.seconds
    assert report.ranks.keys() == content.evaluation.ranks.keys()
    assert all((report.ranks[key] == ranks).all() for key, ranks in content.evaluation.ranks.items())
    assert [panel.title for panel in report.panels] == ["Old space", "Independent model, own space"]
    assert [points.shape for _, points in report.panels[0].series] == [(12, 2)] * 4
    found, given = report.examples[0], content.examples[0]
    assert found.query_text == given.query_text
    for (label, hits), (given_label, given_hits) in zip(found.rows, given.rows, strict=True):
        assert label == given_label
        assert [(hit[1:], hit.image is None) for hit in hits] == [(hit[1:], hit.image is None) for hit in given_hits]
    blot = found.rows[0].hits[0].image
    assert blot.size == (160, 107)
    assert blot.getpixel((3, 3)) == (200, 30, 30)


def test_page_is_self_contained_and_says_every_number(folder: Path, content: ReportContent) -> None:
    page = (folder / "report.html").read_text()
    sources = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(sources) == 6 + 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?://|<script|@import|url\(", page.replace("&lt;script", ""))
    for case in content.evaluation.cases:
        for value in case.metrics.values():
            assert percent(value) in page
    assert "find [me] &amp; &lt;you&gt;" in page
    assert "old&lt;b&gt;" in page
    page = render_html(replace(load_report(folder), old=ModelInfo("/long/path/mobilenet_v1", "0" * 64, 8)), {})
    assert '<span title="/long/path/mobilenet_v1">mobilenet_v1</span> → ' in page


def test_rendering_again_keeps_files_and_needs_no_data_file(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run" / "report")
    for name in ("notes.txt", "plots/thesis.pdf", "plots/recall-mine.png"):
        (tmp_path / "run" / "report" / name).write_text("mine")
    before = files_of(tmp_path)
    (tmp_path / "run" / "report" / "report.html").unlink()
    (tmp_path / "run" / "report" / "plots" / "loss-7.png").write_bytes(b"")
    render_report(tmp_path / "run")
    assert files_of(tmp_path) == before
    (tmp_path / "report.json").write_bytes((folder / "report.json").read_bytes())
    page = render_report(tmp_path).read_text()
    assert "Retrieval quality" in page and "Recall at every depth" not in page
    plots = {path.name for path in (tmp_path / "report" / "plots").iterdir()}
    assert plots == {"cases-image-to-text.png", "cases-text-to-image.png"}


def printed(report: Report) -> str:
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, width=80))
    return buffer.getvalue()


def test_terminal_shows_table_examples_and_verdict(folder: Path) -> None:
    report = load_report(folder)
    text = printed(report)
    rows = [line.strip() for line in text.splitlines()]
    assert all(any(row.startswith(case.label) for row in rows) for case in report.cases)
    assert f"{report.cases[0].metrics['recall@10'] * 100:.1f}" in text
    assert "find [me] & <you>" in text and "✓ a [red] blot" in text
    values = [
        value
        for case in report.cases
        for value in (*case.metrics.values(), *(end for ci95 in case.ci95.values() for end in ci95))
    ]
    assert values and all(re.search(rf"(?<![\d.]){100 * value:.1f}(?!\d)", text) for value in values)
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("mapped", [True, False])
def test_terminal_shows_what_each_way_gives(folder: Path, mapped: bool) -> None:
    report, buffer = load_report(folder), io.StringIO()
    print_ways(report, Console(file=buffer, width=100), mapped)
    lines, new = buffer.getvalue().splitlines(), "mapped vectors" if mapped else "new queries, unchanged vectors"
    ways = {"old/old": "old queries, unchanged vectors", "new/old": new, "new/new": "new queries, re-embedded vectors"}
    for label, way in ways.items():
        metrics = [metric for case in report.cases if case.label == label for metric in case.metrics.items()]
        figures = [f"{value * 100:.1f}" for name, value in metrics if "@10" in name]
        found = " ".join(line for line in lines if way in line)
        assert figures and all(figure in found for figure in figures)
    assert not any("independent" in line for line in lines)


def test_verdict_follows_the_criterion() -> None:
    content = make_content()
    roles = ("old", "new_view", "new", "independent")
    retrieval_only = EvaluatedModels(**{role: replace(getattr(content.contestants, role), zero_shot=None) for role in roles})
    options = EvaluationOptions(ks=(1, 5), n_resamples=30)
    good = evaluate(retrieval_only, options)
    bad = evaluate(replace(retrieval_only, new_view=retrieval_only.old), options)
    unknown = evaluate(replace(retrieval_only, independent=None), options)
    shell = Report(old=None, new=None, method="", cases=[], criterion=good.criterion, seconds={}, run={})  # type: ignore[arg-type]
    assert verdicts(shell)[0].answer == "yes"
    sure = sum(each.ci95[0] > 0 for each in good.criterion.differences)
    assert f"95 % intervals of the 4 gains: {sure} lie above zero" in verdicts(shell)[1].detail
    lost = replace(shell, cases=bad.cases, criterion=bad.criterion)
    failed, luck = verdicts(lost)  # new and independent are the same here
    assert (failed.answer, failed.detail) == ("no", "4 of 4 metrics did not improve over old queries.")
    assert luck.answer == "undecided" and "is unknown, as a metric does not differ" in luck.detail
    values = {(case.label, case.direction, metric): value for case in bad.cases for metric, value in case.metrics.items()}
    percents = f"{100 * values['old/old', 'text-to-image', 'recall@5']:.1f} %"
    assert f"text to image R@5: new/old {percents} <= old/old {percents}" in failed_lines(lost)
    assert verdicts(replace(shell, criterion=unknown.criterion))[2].answer == "not measured"


@pytest.mark.parametrize(
    ("gains", "answer", "hint"),
    [
        ([(0.02, 0.01, 0.03, 90), (0.01, 0.002, 0.02, 90)], "better", ""),
        ([(0.02, 0.01, 0.03, 90), (-0.02, -0.03, -0.01, 90)], "worse", ""),
        (
            [(0.02, -0.01, 0.03, 812), (0.01, -0.02, 0.02, 1289)],
            "undecided",
            "About 1,300 queries would show all gains: image to image y (+1.0 points) needs the most.",
        ),
        (
            [(-0.02, -0.05, 0.03, 812), (-0.01, -0.02, 0.02, 1289)],
            "undecided",
            "About 810 queries would show a loss: image to image x (-2.0 points) needs the fewest.",
        ),
        ([(0.02, -0.01, 0.03, 812), (0.0, -0.02, 0.02, None)], "undecided", "is unknown"),
    ],
)
def test_what_is_luck_is_said_and_how_many_queries_would_tell(gains: list, answer: str, hint: str) -> None:
    found = [Difference("image-to-image", name, mean, ends, n) for name, (mean, *ends, n) in zip("xy", gains, strict=True)]
    criterion = Criterion(True, None, [], found)
    shell = Report(old=None, new=None, method="", cases=[], criterion=criterion, seconds={}, run={})  # type: ignore[arg-type]
    luck = verdicts(shell)[1]
    assert luck.answer == answer and hint in luck.detail


def test_small_bare_and_mapped_reports_render(tmp_path: Path, content: ReportContent) -> None:
    contestants = EvaluatedModels(content.contestants.old, content.contestants.new_view)
    evaluation = evaluate(contestants, EvaluationOptions(ks=(1,), n_resamples=10))
    bare = ReportContent(evaluation, contestants, "ridge", tsne_pairs=4)
    page = write_report(tmp_path, bare).read_text()
    assert "not measured" in page and "Where the embeddings lie" not in page and "Example searches" not in page
    assert "nan" not in printed(load_report(tmp_path))
    page = write_report(tmp_path / "mapped", labelled_content(upgraded=True)).read_text()
    assert "mapped towards the new model" in page
    assert [panel.title for panel in load_report(tmp_path / "mapped").panels] == ["Independent model, own space"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\x80\x04pickle", r"report_data\.safetensors cannot be read"),
        (None, "does not exist"),
        ("{", "not valid JSON"),
        ('{"schema": 2}', "has schema 2 but this version reads schema 1"),
        ('{"schema": 1, "old": {"nom": "x"}}', "not a complete report"),
    ],
)
def test_unusable_files_are_one_clear_line(folder: Path, tmp_path: Path, text: str | bytes | None, message: str) -> None:
    if isinstance(text, bytes):
        (tmp_path / "report.json").write_bytes((folder / "report.json").read_bytes())
        (tmp_path / "report_data.safetensors").write_bytes(text)
    elif text is not None:
        (tmp_path / "report.json").write_text(text)
    assert str(tmp_path) in refuses(message, load_report, tmp_path)


def test_a_report_cut_off_in_between_is_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    first, second = (replace(make_content(noise), tsne_pairs=0) for noise in (1.0, 0.3))
    write_report(tmp_path, first)
    mine = [tmp_path / name for name in ("report/notes.txt", "report/more/notes.txt", "notes.txt")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = files_of(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    stages = [f"xcompat.report.{name}" for name in ("storage._save_data", "storage.write_json", "report.render_html")]
    for stage in (*stages, "shutil.copy2"):
        with monkeypatch.context() as patch:
            patch.setattr(stage, fail)
            with pytest.raises(OSError, match="No space"):
                write_report(tmp_path, second)
            if stage.endswith("render_html"):
                with pytest.raises(OSError, match="No space"):
                    render_report(tmp_path)
        assert files_of(tmp_path) == before
    write_report(tmp_path, second)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert load_report(tmp_path).cases == second.evaluation.cases != first.evaluation.cases


@pytest.mark.parametrize(
    ("theirs", "earlier"),
    [("report/chapter.tex", False), ("report", False), ("report/report.json", False), ("report/plots/chapter.tex", True)],
)
def test_folders_of_others_are_kept(theirs: str, earlier: bool, folder: Path, content: ReportContent, tmp_path: Path) -> None:
    """Also beside a report of an earlier version, which lay in the run's folder itself."""
    (tmp_path / theirs).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / theirs).write_text('{"title": "mine"}')
    if earlier:
        for name in ("report.json", "report_data.safetensors"):
            shutil.copy2(folder / name, tmp_path / name)
    before = files_of(tmp_path)
    with pytest.raises(XcompatError, match="report exists but is not a report; move it"):
        render_report(tmp_path) if earlier else write_report(tmp_path, content)
    assert files_of(tmp_path) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**30) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


def edited(document: object, data: st.DataObject) -> object:
    document = json.loads(json.dumps(document))
    *parents, last = data.draw(st.sampled_from(places(document)[1:]))
    place = document
    for key in parents:
        place = place[key]
    if data.draw(st.integers(0, 3)):
        place[last] = data.draw(JSON)
    else:
        del place[last]
    return document


def read_or_refused(file: Path, named: str) -> Report | None:
    try:
        return load_report(file)
    except XcompatError as error:
        refusal = str(error)
    assert str(file.with_name(named)) in refusal and "\n" not in refusal
    return None


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edited")


@given(st.data())
@settings(max_examples=150)
def test_a_report_edited_by_hand_is_read_or_refused_in_one_line(folder: Path, by_hand: Path, data: st.DataObject) -> None:
    file = by_hand / "report.json"
    file.write_text(json.dumps(edited(json.loads((folder / "report.json").read_text()), data)))
    if report := read_or_refused(file, "report.json"):
        printed(report)
        render_html(report, {})
        render_markdown(report)
        assert all(re.fullmatch(r"[\w-]+", direction) for direction in report.directions), "files are named after them"


@given(st.data())
@settings(max_examples=60)
def test_a_data_file_edited_by_hand_is_read_or_refused_in_one_line(folder: Path, by_hand: Path, data: st.DataObject) -> None:
    (by_hand / "data").mkdir(exist_ok=True)
    (by_hand / "data" / "report.json").write_bytes((folder / "report.json").read_bytes())
    with safe_open(folder / "report_data.safetensors", framework="numpy") as file:
        layout = json.loads(file.metadata()["layout"])
    tensors = load_file(folder / "report_data.safetensors")
    kept = data.draw(st.sampled_from(sorted(tensors)))
    tensors |= {kept: data.draw(st.sampled_from([tensors[kept], tensors[kept][None], tensors[kept][:0]]))}
    save_file(tensors, by_hand / "data" / "report_data.safetensors", {"layout": json.dumps(edited(layout, data))})
    if report := read_or_refused(by_hand / "data" / "report.json", "report_data.safetensors"):
        printed(report)
        render_html(report, {})


def labelled(name: str, dim: int, noise: float, basis_seed: int) -> EmbeddedImages:
    labels = np.append(np.arange(N_ITEMS - 1) % 8, 99)  # the last query is alone in its class
    truth = np.random.default_rng(0).normal(size=(100, 8))[labels] @ np.random.default_rng(basis_seed).normal(size=(8, dim))
    embeds = truth + noise * np.random.default_rng(dim).normal(size=truth.shape)
    ids = np.arange(N_ITEMS)
    return EmbeddedImages(name, Fingerprint.from_string(name), embeds, embeds, ids, ids, labels, labels)


def labelled_content(upgraded: bool = False) -> ReportContent:
    old, view = labelled("old", 8, 3.0, 1), labelled("new", 8, 1.0, 1)
    new, independent = labelled("new", 12, 1.0, 2), labelled("plain", 12, 1.0, 3)
    if upgraded:
        mapped = labelled("old, mapped", 12, 2.0, 2)
        contestants = EvaluatedModels(old, new, new, independent, upgraded=mapped)
        return ReportContent(evaluate(contestants, EvaluationOptions(n_resamples=30)), contestants, "fct", tsne_pairs=12)
    contestants = EvaluatedModels(old, view, new, independent, {"ridge": view})
    evaluation = evaluate(contestants, EvaluationOptions(n_resamples=30))
    row = ExampleRow("old query", [Hit(Image.new("L", (8, 8), 7), "class 3", True)])
    return ReportContent(evaluation, contestants, "bct", examples=[Example("class 3", [row])], tsne_pairs=12)


@pytest.fixture(scope="module")
def labelled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("labelled"), labelled_content()).parent


def test_a_labelled_report_keeps_and_shows_every_number(labelled_folder: Path) -> None:
    content, report = labelled_content(), load_report(labelled_folder)
    assert report.average_precision.keys() == content.evaluation.average_precision.keys()
    for (query, gallery, _, metric), values_Q in report.average_precision.items():
        np.testing.assert_array_equal(values_Q, content.evaluation.average_precision[query, gallery, "image-to-image", metric])
        assert values_Q.dtype == np.float32 and np.isnan(values_Q).tolist() == [False] * (N_ITEMS - 1) + [True]
        (case,) = [case for case in report.cases if case.label == f"{query}/{gallery}"]
        assert np.nanmean(values_Q.astype(np.float64)) == pytest.approx(case.metrics[metric], abs=1e-6)
    assert {metric for *_, metric in report.average_precision} == {"map", "map@R"}
    page, text = (labelled_folder / "report.html").read_text(), printed(report)
    assert all(percent(value) in page for case in report.cases for value in case.metrics.values())
    assert all(f"<th>{name}</th>" in page for name in ("CMC@1", "CMC@5", "mAP", "mAP@R", "NFR@1"))
    assert "CMC at every depth" in page and "The same image" in page and "1 queries have no image of their class" in page
    assert "R@k" not in page and "Recall at every depth" not in page and "triangle" not in page
    assert "mAP" in text and "CMC@5: new/old - old/old" in text


def test_clusters_come_back_and_older_files_have_none(tmp_path: Path, content: ReportContent, undrawn: None) -> None:
    about = {"text-to-image": np.repeat(np.arange(N_ITEMS // 2), 2)}
    report = replace(load_report(write_report(tmp_path, content).parent), clusters=about)
    save_report(tmp_path / "report", report)
    assert load_report(tmp_path).clusters["text-to-image"].tolist() == about["text-to-image"].tolist()
    older = tmp_path / "report" / "report_data.safetensors"  # as written before queries had precisions and clusters
    layout = json.dumps({"ranks": [list(key) for key in report.ranks], "panels": [], "examples": []})
    save_file({name: tensor for name, tensor in load_file(older).items() if name.startswith("ranks")}, older, {"layout": layout})
    found = load_report(tmp_path)
    assert found.ranks.keys() == report.ranks.keys()
    assert found.average_precision == {} == found.clusters


@pytest.mark.parametrize(
    ("kind", "message"), [("a bomb", "12000 x 12000 is more than the"), ("a program", "PostScript"), ("cut short", "unreadable")]
)
def test_thumbnails_have_the_limits_of_other_images(kind: str, message: str, tmp_path: Path) -> None:
    save_report(tmp_path / "report", build_report(replace(make_content(), tsne_pairs=0)))
    file, image = tmp_path / "report" / "report_data.safetensors", io.BytesIO()
    with safe_open(file, framework="numpy") as stored:
        layout, tensors = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    name = next(name for name in tensors if name.startswith("image."))
    if kind == "cut short":
        image.write(tensors[name][: tensors[name].size // 2].tobytes())
    else:
        size = (12_000, 12_000) if kind == "a bomb" else (8, 8)
        Image.new("1" if kind == "a bomb" else "L", size).save(image, format="PNG" if kind == "a bomb" else "EPS")
    save_file(tensors | {name: np.frombuffer(image.getvalue(), dtype=np.uint8)}, file, layout)
    refuses(rf"report_data.safetensors cannot be read \(.*{message}", load_report, tmp_path)


def test_bars_and_curves_are_the_metrics(folder: Path, labelled_folder: Path) -> None:
    for drawn, curves in {folder: "recall-image-to-text", labelled_folder: "cmc-image-to-image"}.items():
        assert {path.stem for path in (drawn / "plots").iterdir()} >= {curves, "tsne-0", "tsne-1"}
    report = load_report(labelled_folder)
    figures = draw_plots(report)
    (bars,) = figures["cases-image-to-image.png"].axes
    assert [label.get_text() for label in bars.get_xticklabels()] == ["CMC@1", "CMC@5", "mAP", "mAP@R"]
    heights = sorted(bar.get_height() / 100 for bar in bars.patches)
    shown = [value for case in report.cases for name, value in case.metrics.items() if not name.startswith("negative")]
    assert heights == pytest.approx(sorted(shown))
    (curves,) = figures["cmc-image-to-image.png"].axes
    lines = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in curves.lines}
    for case in report.cases:
        for k in (1, 5):
            assert lines[case.label][k] == pytest.approx(case.metrics[f"cmc@{k}"] * 100)


def test_ranges_of_classes_are_in_label_order_and_average_to_the_metric() -> None:
    order = [f"class {number}" for number in range(30)]
    labels = [order[7 * row % 30] for row in range(120)]  # four images of a class, in another order

    def model(name: str, noise_C: np.ndarray) -> EmbeddedImages:
        places = [order.index(label) for label in labels]
        truth = np.random.default_rng(0).normal(size=(30, 8))[places]
        embeds = truth + noise_C[places, None] * np.random.default_rng(1).normal(size=truth.shape)
        images = (embeds, embeds, range(120), range(120), labels, labels)
        return EmbeddedImages(name, Fingerprint.from_string(name), *images, class_order=order)

    old, new = (model(name, np.where(np.arange(30) < 15, 0.1, noise)) for name, noise in (("old", 9.0), ("new", 0.1)))
    contestants = EvaluatedModels(old, new, new)
    report = build_report(ReportContent(evaluate(contestants, EvaluationOptions(n_resamples=30)), contestants, "bct"))
    (axes,) = draw_plots(report)["classes-image-to-image.png"].axes
    assert [label.get_text() for label in axes.get_xticklabels()][::9] == ["1–3", "28–30"]
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert lines["old/old"][:5].min() == 100 and lines["old/old"][5:].max() < 60
    for case in report.cases:
        assert lines[case.label].mean() == pytest.approx(100 * case.metrics["cmc@1"])


def test_losses_and_costs_are_kept_and_shown(tmp_path: Path) -> None:
    losses = [LossPoint(step, step / 100, 2 / step, 1e-3) for step in (10, 20, 30)]
    cost = Cost(1_234, 5_678_901, 640, 12_345, 3_000_000_000, "NVIDIA <H100>", 2, 0.123456, memory_is_own=True)
    on_cpu = cost._replace(device="cpu", peak_memory=2_000_000_000)
    costs = {"it": cost, "shared": on_cpu._replace(memory_is_own=False), "own": on_cpu}
    content = replace(labelled_content(), tsne_pairs=0, seconds=dict.fromkeys([*costs, "unknown"], 9.0), costs=costs)
    report = load_report(write_report(tmp_path, replace(content, training={"a $trained$ <stage>": losses})).parent)
    assert report.training == {"a $trained$ <stage>": losses} and report.costs == costs
    (axes,) = draw_plots(report)["loss-0.png"].axes
    assert axes.lines[0].get_xydata().tolist() == [[each.step, each.loss] for each in losses]
    assert axes.get_title("left") == "a $trained$ <stage>"
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Training loss" in page and "loss-0.png" in page
    assert "Training loss" not in render_html(replace(report, training={}), {})
    assert [each.own_memory for each in costs.values()] == [3_000_000_000, None, 2_000_000_000]
    for said in ("1,234 of 5,678,901", "12,345", "3.0 GB</td>", "0.123 on 2 × NVIDIA &lt;H100&gt;", "<td>unknown</td><td></td>"):
        assert said in page, said
    assert page.count("2.0 GB of the whole process</td>") == 1 and page.count("2.0 GB</td>") == 1
