"""Verdicts on checkpoints and folders are those of runs and maps; `xcompat plan` counts costs; texts are judged by judgements."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import UNTRAINED, Run, recipe_of, refuses, without_drawings, write_embeds
from data_layouts.images import write_classes
from PIL import Image

from xcompat import Fingerprint, ProcrustesConfig, ProcrustesModel, XcompatError, fit_map
from xcompat.core.distributed import device
from xcompat.core.progress import console
from xcompat.data import load_labelled, load_texts, open_image, read_qrels
from xcompat.encoders.processor import Processor
from xcompat.evaluation import EmbeddedImages, EvaluatedModels, EvaluationOptions, evaluate, graded_metrics
from xcompat.mapping.candidates import LINES
from xcompat.models import describe_old
from xcompat.models.closed_form import readable_pairs
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.report import Report, ReportContent, load_report
from xcompat.report.planning import Traffic, describe_plan, plan_ways
from xcompat.report.report import build_report
from xcompat.report.storage import save_report
from xcompat.report.wording import verdicts
from xcompat.training.embedding_folders import choose_evidence
from xcompat.training.evaluate_command import evaluate_embeddings
from xcompat.training.evaluation_sets import load_test_set
from xcompat.training.judged_texts import SHOWN, JudgedTestSet, load_judged_texts
from xcompat.training.push import run_facts
from xcompat.training.recipe import Recipe, parse_recipe
from xcompat.training.record import CHOICE
from xcompat.training.run import embed_recipe, run_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
OWN = {"old/old", "new/old", "new/new"}
WITH_INDEPENDENT = OWN | {"independent/old", "independent/independent"}
Judge = Callable[..., Any]
SIDES = {"train": 6, "test": 3, "more": 4}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("photos")
    write_classes(base, SIDES)
    return {side: str(base / side) for side in SIDES}


def raw_recipe(folder: Path, photos: dict[str, str], **training: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {"output_dir": str(folder / "run"), "cache_dir": str(folder / "cache")}
    raw["data"] = {"images": {"path": photos["train"]}, "queries": {"path": photos["test"]}}
    raw["training"] = training | {"per_device_train_batch_size": 8, "save_strategy": "no"}
    return raw | {"evaluation": {"resamples": 100, "examples": 0, "tsne_pairs": 0}}


@pytest.fixture(scope="module")
def trained(photos: dict[str, str], old_folder: str, folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a stage for every way in which a checkpoint comes to its models."""
    folder = tmp_path_factory.mktemp("verdict")
    images = {"method": "independent", "evaluation": None}
    stages = [
        {**images, "name": "old", "options": {"dim": 8}},
        {**images, "name": "fresh", "options": {"dim": 7}},
        {**images, "name": "views", "options": {"dim": 5}},
        {"name": "bct", "method": "bct", "old": "stage:old"},
        {"name": "map", "method": "query_map", "old": "stage:old", "new": "stage:fresh"},
        {"name": "fct", "method": "fct", "old": "stage:old", "new": "stage:fresh", "side_info": "stage:views"},
        {"name": "texts", "method": "procrustes", "old": old_folder, "new": folder_of["clip"]},
    ]
    raw = raw_recipe(folder, photos, max_steps=4, learning_rate=1e-3)
    raw |= {"new": UNTRAINED, "stages": stages}
    with without_drawings():
        run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    return folder / "run"


@pytest.fixture
def judge(tmp_path: Path, run_xcompat: Run) -> Judge:
    """Return a function that evaluates a checkpoint from the command line: its report, or the one line of a refusal."""

    def judged(checkpoint: Path, *arguments: object) -> Any:
        transformers.utils.logging.enable_progress_bar()  # as in a new process
        code, _, err = run_xcompat("evaluate", checkpoint, "--output", tmp_path / "judged", *arguments)
        assert "Loading weights" not in err, "a bar of a library"
        lines = [line for line in err.splitlines() if line.startswith("xcompat: ")]
        assert code == 2 * len(lines) <= 2
        return lines[0] if lines else load_report(tmp_path / "judged")

    return judged


@pytest.mark.parametrize(
    ("stage", "overrides", "labels"),
    [
        ("bct", [], OWN),
        ("map", [], WITH_INDEPENDENT | {"new/backfilled"}),
        ("fct", [], WITH_INDEPENDENT | {"mapped/mapped"}),
        ("texts", ["label_column=folder"], WITH_INDEPENDENT | {"new/backfilled"}),
    ],
)
def test_a_checkpoint_is_judged_as_in_its_run(
    stage: str, overrides: list[str], labels: set[str], trained: Path, photos: dict[str, str], judge: Judge
) -> None:
    found = judge(trained / stage / "model", *overrides, "--data", photos["test"])
    wanted = load_report(trained if stage == "texts" else trained / stage)  # the last stage's report stands at the top
    assert {case.label for case in found.cases} == {case.label for case in wanted.cases} == labels
    assert [case.metrics for case in found.cases] == [case.metrics for case in wanted.cases]
    assert (found.old.fingerprint, found.new.fingerprint) == (wanted.old.fingerprint, wanted.new.fingerprint)
    assert found.method == wanted.method and found.notes == wanted.notes


def test_old_models_that_are_gone_or_names(trained: Path, photos: dict[str, str], tmp_path: Path, judge: Judge) -> None:
    labelled = [load_labelled(photos[side]) for side in ("train", "test")]
    images = [open_image(record["image"]) for side in labelled for record in side.dataset]
    old = load_embedder(str(trained / "old" / "model"))
    ids = [name for side in labelled for name in side.dataset["id"]]
    left = write_embeds(tmp_path / "left", ids, image=old.embed({"pixel_values": old.processor.images(images)}))
    raw = raw_recipe(tmp_path, photos, max_steps=2) | {"old": str(left), "new": str(trained / "fresh")}
    run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    assert load_checkpoint(str(tmp_path / "run" / "model")).config.input == "penultimate", "a guess, of what may be tried"
    found = judge(tmp_path / "run" / "model", "--data", photos["test"])
    assert [case.metrics for case in found.cases] == [case.metrics for case in load_report(tmp_path / "run").cases]
    assert "has no embedding of 12 of 12 images" in judge(tmp_path / "run" / "model", "--data", photos["more"])
    described = describe_old(Fingerprint.from_string("old"), dim=8)
    ProcrustesModel(ProcrustesConfig(old=described, embedding_dim=16)).export(tmp_path / "map")
    for more in ((), ("--old", photos["test"])):
        said = judge(tmp_path / "map", "--data", photos["test"], *more)
        assert "'old', which is only a name" in said and "evaluate embeddings of both models (--old, --new)" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set --data to test images with captions or classes"),
        (["label_colum=folder", "--data", "test"], "--data: unknown key 'label_colum'; did you mean 'label_column'"),
        (["label_column=nowhere", "--data", "test"], "nowhere"),
        (["gallery=no/such/photos", "--data", "test"], "no/such/photos does not exist"),
        (["gallery={}", "--data", "test"], "gallery: path"),
        (["--data", "test", "--old", "views"], "cannot be compared"),
        (["--data", "pairs"], "label_column"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    arguments: list[str], message: str, trained: Path, photos: dict[str, str], pairs_folder: str, judge: Judge
) -> None:
    places = photos | {"pairs": pairs_folder, "views": str(trained / "views" / "model")}
    assert message in judge(trained / "bct" / "model", *(places.get(word, word) for word in arguments))


def test_other_images_and_captions(trained: Path, pairs_folder: str, photos: dict[str, str], judge: Judge) -> None:
    found = judge(trained / "texts" / "model", "--data", pairs_folder)
    assert {case.direction for case in found.cases} == {"image-to-text", "text-to-image"}
    assert "caption" in judge(trained / "texts" / "model", "--data", photos["test"])
    found = judge(trained / "bct" / "model", f"gallery={photos['more']}", "--data", photos["test"])
    assert {(case.n_queries, case.n_gallery) for case in found.cases} == {(9, 12)}


COUNT, OLD_DIM, NEW_DIM = 60, 8, 12


def embedded_images(name: str, dim: int, noise: float) -> EmbeddedImages:
    draw = np.random.default_rng(0)
    labels_N = np.arange(COUNT) % 6
    embeds_ND = np.pad(draw.normal(size=(6, 8)), ((0, 0), (0, dim - 8)))[labels_N] + noise * draw.normal(size=(COUNT, dim))
    ids = [str(row) for row in range(COUNT)]
    return EmbeddedImages(name, Fingerprint.from_string(name), embeds_ND, embeds_ND, ids, ids, labels_N, labels_N)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("planned")
    old, view = embedded_images("old", OLD_DIM, 1.2), embedded_images("view", OLD_DIM, 0.8)
    own = embedded_images("new", NEW_DIM, 0.4)
    contestants = EvaluatedModels(old, view, own, extra={"slerp": embedded_images("mixed", OLD_DIM, 0.7)})
    evaluation = evaluate(contestants, EvaluationOptions(n_resamples=50, rerank=5))
    content = ReportContent(evaluation, contestants, "map", run={"reranked_hits": 5}, tsne_pairs=0)
    save_report(folder / "report", build_report(content))
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


def test_a_plan_says_the_gain_and_what_is_missing(
    report: Report, run_xcompat: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    save_report(tmp_path / "report", report)
    asked = ("plan", tmp_path, "--items", 5_000_000, "--queries-per-day", 20_000)
    image = tmp_path / "plan.png"
    said = run_xcompat.output(*asked, "--embeds-per-second", 100, "--price", 0.1, "--plot", image)
    assert "5,000,000 items, 20,000 queries a day" in said and "re-rank 5" in said and "13.9" in said
    assert Image.open(image).size[0] > 500
    monkeypatch.setattr(console, "_width", 80)
    narrow = run_xcompat.output(*asked, "--embeds-per-second", 100, "--price", 0.1)
    ways = plan_ways(report, Traffic(5_000_000, 20_000, embeds_per_second=100, price_per_1000=0.1), "cmc@1").ways
    for way in ways:
        cells = [f"{way.per_query:,}", f"{way.in_all:,}", f"{way.milliseconds:,.1f}", f"{way.hours:,.1f}", f"{way.price:,.2f}"]
        assert all(f" {cell} " in narrow for cell in [*cells, f"{100 * (way.quality or 0):.1f}"])
    assert narrow.splitlines() and max(map(len, narrow.splitlines())) <= 80
    assert f"{image} exists" in run_xcompat.refusal(*asked, "--plot", image)
    assert "does not measure recall@7; it has cmc@1" in run_xcompat.refusal(*asked, "--metric", "recall@7")


ITEMS, DIM = 120, 8
IDS = [f"item {row}" for row in range(ITEMS)]
Sides = Callable[..., tuple[Path, Path]]


@pytest.fixture
def sides(tmp_path: Path) -> Sides:
    """Return a function that writes folders of an old and a new model, the old one with more noise, into the same space."""

    def write(queries: list[str] | None = None, kind: str = "text", labels: str = "") -> tuple[Path, Path]:
        draw = np.random.default_rng(0)
        things = draw.standard_normal((12, DIM))[np.arange(ITEMS) % 12] + 0.3 * draw.standard_normal((ITEMS, DIM))
        for name, noise in (("old", 0.8), ("new", 0.05)):
            for each, ids in ((kind, IDS), ("query", queries)):
                if ids is not None:
                    rows = things + noise * draw.standard_normal(things.shape)
                    write_embeds(tmp_path / name, ids, **{each: rows[: len(ids)]})
        if labels:
            (tmp_path / labels / "labels.txt").write_text("".join(f"class {row % 12}\n" for row in range(ITEMS)))
        return tmp_path / "old", tmp_path / "new"

    return write


def test_ids_of_queries_name_their_answers(sides: Sides, tmp_path: Path) -> None:
    old, new = sides(queries=IDS[:50] + IDS[:10])
    report = evaluate_embeddings(old, new, None, None, tmp_path / "out")
    cases = {case.label: case for case in report.cases}
    assert cases["new/old"].n_queries == 60 and cases["new/old"].direction == "text-to-text"
    queries, texts = (np.load(old / f"{kind}_embeds.npy") for kind in ("query", "text"))
    queries, texts = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, texts))
    scores_QG, answers_Q = queries @ texts.T, [*range(50), *range(10)]
    ranks_Q = (scores_QG >= scores_QG[range(60), answers_Q][:, None]).sum(1)
    assert cases["old/old"].metrics["mrr@10"] == pytest.approx(np.where(ranks_Q <= 10, 1 / ranks_Q, 0).mean())
    assert report.notes[0] == "Evidence: ids of queries, each the id of the text that answers it."


@pytest.mark.parametrize(("kind", "labels"), [("text", "old"), ("text", "new"), ("image", "new")])
def test_classes_may_be_in_either_folder(sides: Sides, tmp_path: Path, kind: str, labels: str) -> None:
    old, new = sides(kind=kind, labels=labels)
    report = evaluate_embeddings(old, new, None, None, tmp_path / "out")
    assert report.notes[0] == f"Evidence: classes in {tmp_path / labels / 'labels.txt'}."
    (metric, direction) = ("mrr@10", "text-to-text") if kind == "text" else ("cmc@1", "image-to-image")
    cases = {case.label: case for case in report.cases}
    assert cases["new/old"].direction == direction and cases["new/old"].metrics[metric] > cases["old/old"].metrics[metric]


@pytest.mark.parametrize("kind", ["text", "image"])
def test_without_evidence_the_agreement_with_the_new_model_is_measured(sides: Sides, tmp_path: Path, kind: str) -> None:
    old, new = sides(kind=kind, queries=[f"query {row}" for row in range(50)] if kind == "text" else None)
    report = evaluate_embeddings(old, new, new, None, tmp_path / "out")
    cases = {case.label: case for case in report.cases}
    assert cases["new/new"].metrics["recall@10"] == 1.0 and cases["old/old"].metrics["recall@10"] < 0.9
    assert (cases["old/old"].n_queries, cases["old/old"].n_gallery) == (36, 84)
    assert {case.direction for case in report.cases} == {f"{kind}-to-{kind}"}
    assert "Relevant are the 10 items that it finds nearest" in report.notes[0]
    assert ("The queries are not used, because none has the id of a text" in report.notes[0]) == (kind == "text")
    assert [verdict.answer for verdict in verdicts(load_report(tmp_path / "out"))] == ["not measured"]


@pytest.mark.parametrize(("first", "known"), [(0, "about 100 %"), (30, "about 50 %"), (60, None)])
def test_items_that_trained_the_map_draw_a_warning(sides: Sides, tmp_path: Path, first: int, known: str | None) -> None:
    old, new = sides(kind="image", labels="new")
    rows = [np.load(side / "image_embeds.npy") for side in (old, new)]
    fit_map(*(side[:60] for side in rows)).save(tmp_path / "map")
    for side, embeds in zip((old, new), rows, strict=True):
        write_embeds(side, IDS[first : first + 60], image=3 * embeds[first : first + 60])
    (new / "labels.txt").write_text("".join(f"class {row % 12}\n" for row in range(60)))
    report = evaluate_embeddings(old, new, None, None, tmp_path / "out", by_map=tmp_path / "map")
    warned = [note for note in report.notes if note.startswith("! These items trained the map")]
    assert ([known in note for note in warned] == [True]) if known is not None else not warned
    assert json.loads((tmp_path / "out/report/report.json").read_text())["run"]["notes"] == report.notes


def test_a_damaged_record_of_training_items_is_refused() -> None:
    made = {"old": describe_old(Fingerprint.from_string("old"), 4), "embedding_dim": 8}
    refuses(
        "training_items are not hashes of 8 hexadecimal digits; fit the map again", ProcrustesConfig, **made, training_items="zz"
    )


def test_refusals_come_before_reading(sides: Sides, tmp_path: Path, run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcompat.training.evaluate_command.load_checkpoint", lambda *_: pytest.fail("a model is loaded"))
    old, new = sides(kind="image")
    refuses("without classes or texts.*own embeddings .--new-own", choose_evidence, {"old": old, "new_view": new})
    asked = ("evaluate", "--old", old, "--new", new, "--out", tmp_path / "out")
    error = run_xcompat.refusal(*asked, "--new-own", new, "--require-compatible")
    assert "--require-compatible needs classes, captions or judgements" in error
    error = run_xcompat.refusal("evaluate", "--old", tmp_path / "odl", "--new", new, "--out", tmp_path / "out")
    assert "odl does not exist; choose embeddings, e.g. a file or a folder" in error
    (old / "labels.txt").write_text("a\n")
    assert "labels.txt has 1 lines for 120 images; the counts must be equal" in run_xcompat.refusal(*asked)
    assert not (tmp_path / "out").exists()


ANIMALS = ("dog", "cat", "bird", "fish")
PASSAGES = [f"{row} {animal} <b>sleeps</b>\n all day" for row, animal in enumerate(ANIMALS * 5)]
QUERIES = [f"{row} who is a {animal}" for row, animal in enumerate(ANIMALS * 3)]
LEARNED = [f"{row} old {animal}" for row, animal in enumerate(ANIMALS * 10)]
PROMPT = "?"  # short, as a stand-in reads 16 tokens
GAINS = (2, 1, 0)


def write_rows(file: Path, rows: Sequence[tuple[str, str]]) -> dict[str, str]:
    file.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in rows), encoding="utf-8")
    return {"path": str(file)}


@pytest.fixture
def judged(tmp_path: Path) -> dict[str, Any]:
    """Write passages and queries; q0 has no judgement, q1 nothing relevant, q2 no text; what q3 asks for is gone."""
    queries = [(f"q{row}", " " if row == 2 else text) for row, text in enumerate(QUERIES)]
    lines = [f"q{row}\tp{(row + 4 * each) % 20}\t{gain}" for row in range(2, 12) for each, gain in enumerate(GAINS)]
    (tmp_path / "qrels.tsv").write_text("\n".join(["query\tpassage\tgain", "q1\tp1\t0", "q3\tgone\t1", *lines]) + "\n")
    passages = write_rows(tmp_path / "passages.jsonl", [(f"p{row}", text) for row, text in enumerate(PASSAGES)])
    written = write_rows(tmp_path / "queries.jsonl", queries)
    return {"queries": written, "passages": passages, "qrels": str(tmp_path / "qrels.tsv")}


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, judged: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "learned.txt").write_text("\n".join(LEARNED) + "\n")
    raw: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), "method": "ridge"}
    raw["data"] = {"texts": [{"path": str(tmp_path / "learned.txt")}], "judged_texts": judged}
    raw["training"] = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
    raw["evaluation"] = {"resamples": 100, "examples": 2, "tsne_pairs": 0}
    return raw | {"old": old_folder, "new": folder_of["clip"]}


def judged_on(recipe: Recipe) -> JudgedTestSet:
    test = load_test_set(recipe.stages[-1].data)
    assert isinstance(test, JudgedTestSet)
    return test


def cases_of(report: Report) -> dict[str, dict[str, float]]:
    return {case.label: case.metrics for case in report.cases}


def ask_for_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model a prompt that it puts before queries."""

    def for_queries(self: Processor) -> Processor:
        asking = copy.copy(self)
        asking.tokenize = lambda texts: self.tokenize([PROMPT + text for text in texts])  # type: ignore[method-assign]
        return asking

    monkeypatch.setattr(Processor, "for_queries", for_queries)


def np_tensor(embeds: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(embeds, dtype=np.float32))


def embedded(folder: str, texts: list[str]) -> np.ndarray:
    embedder = load_embedder(folder)
    return embedder.embed(embedder.processor.texts(texts)).numpy()


def test_the_whole_course(raw: dict[str, Any], tmp_path: Path) -> None:
    judged = {"compare_with": ["lines"], "old_on_new": True, "slerp": 0.5}
    raw["stages"] = [{"name": "lines"}, {"name": "trained", "method": "residual_mlp", "evaluation": judged}]
    recipe = recipe_of(raw)
    run_recipe(recipe)
    report = load_report(tmp_path / "run")
    assert list(cases_of(report)) == [
        "old/old", "independent/old", "lines/old", "slerp/old", "new/old", "new/backfilled", "old/new", "new/new",
        "independent/independent",
    ]  # fmt: skip
    test, model = judged_on(recipe), load_checkpoint(str(tmp_path / "run" / "trained" / "model"))
    old, new = (test.embed(load_embedder(raw[role], device()), recipe.cache_dir) for role in ("old", "new"))
    mapped_Qd, backfilled_Gd = (model.to_space(np_tensor(rows)).numpy() for rows in (new.query_embeds_QD, new.passages()))
    for label, queries, gallery in (
        ("old/old", old.query_embeds_QD, old.passages()),
        ("new/old", mapped_Qd, old.passages()),
        ("old/new", old.query_embeds_QD, backfilled_Gd),
        ("new/new", new.query_embeds_QD, new.passages()),
    ):
        wanted = graded_metrics(queries, gallery, old.query_ids, old.text_ids, test.qrels)
        assert {name: cases_of(report)[label][name] for name in wanted} == pytest.approx(wanted), label
    assert {case.n_queries for case in report.cases} == {10} and {case.n_gallery for case in report.cases} == {20}
    assert report.notes[:4] == [
        "Judged queries without relevant passages, counted as 0: 1, e.g. 'q1'.",
        "Judged queries missing from the queries, excluded: 1, e.g. 'q2'.",
        "Relevant passages missing from the gallery, counted as not found: 1, e.g. 'gone'.",
        "1 queries have no judgement and are excluded.",
    ]
    facts = run_facts(tmp_path / "run" / "trained" / "model", Fingerprint.from_string("any"))
    assert facts.data == {"texts": ["learned.txt"], "judged_texts": ["queries.jsonl", "passages.jsonl"]}


def test_prompts_are_for_queries(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_queries(monkeypatch)
    recipe = recipe_of(raw)
    run_recipe(recipe)
    test = judged_on(recipe)
    new = test.embed(load_embedder(raw["new"], device()), recipe.cache_dir)
    prompted, plain = ([f"{prompt}{text}" for text in test.queries["text"]] for prompt in (PROMPT, ""))
    np.testing.assert_allclose(new.query_embeds_QD, embedded(raw["new"], prompted), atol=1e-3)
    assert not np.allclose(new.query_embeds_QD, embedded(raw["new"], plain), atol=1e-2)
    np.testing.assert_allclose(new.passages(), embedded(raw["new"], list(test.passages["text"])), atol=1e-3)

    model = load_checkpoint(str(tmp_path / "run" / "model"))
    pairs = readable_pairs(embedded(raw["new"], [PROMPT + text for text in LEARNED]), embedded(raw["old"], LEARNED))
    wanted = type(model)(model.config).fit(pairs)
    probes = np_tensor(new.query_embeds_QD)
    np.testing.assert_allclose(model.to_space(probes), wanted.to_space(probes), atol=2e-2)


def test_gallery_maps_use_no_prompt(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped gallery holds passages, so no text that it learns from gets the prompt of queries."""
    ask_for_queries(monkeypatch)
    asked = []
    recipe = recipe_of(raw, options={"direction": "old_to_new"})
    monkeypatch.setattr(Processor, "for_queries", lambda self: asked.append(self) or self)
    embed_recipe(recipe_of(raw, options={"direction": "old_to_new"}, evaluation=None))
    assert not asked
    run_recipe(recipe)
    report = load_report(tmp_path / "run")
    assert "new/old" in cases_of(report) and "mapped towards the new model" in " ".join(report.notes)


def test_queries_that_are_judged_on_are_not_learned_from(
    raw: dict[str, Any], judged: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    learned = [f"sentence {row}" for row in range(30)]
    corpus.write_text("\n".join([QUERIES[5].upper(), " ".join(PASSAGES[3].split()), *learned]) + "\n")
    raw["data"]["texts"] = [{"path": str(corpus)}]
    run_recipe(recipe_of(raw))
    assert "31 distinct texts of 32 (0 duplicates and 1 held-out captions left out)" in " ".join(capsys.readouterr().out.split())
    kept = load_texts(str(corpus), exclude=load_judged_texts(recipe_of(raw).stages[0].data.judged_texts).texts())
    assert kept["text"][:] == [" ".join(PASSAGES[3].split()), *learned]


def test_a_changed_gain_is_judged_anew_and_nothing_is_trained(raw: dict[str, Any], tmp_path: Path) -> None:
    run_recipe(recipe_of(raw))
    model, qrels = tmp_path / "run" / "done.json", Path(raw["data"]["judged_texts"]["qrels"])
    before = cases_of(load_report(tmp_path / "run")), model.stat().st_mtime_ns
    qrels.write_text(qrels.read_text().replace("q4\tp4\t2", "q4\tp4\t0"))
    run_recipe(recipe_of(raw))
    after = cases_of(load_report(tmp_path / "run")), model.stat().st_mtime_ns
    assert after[0] != before[0] and after[1] == before[1]


def test_example_searches_show_texts_and_gains(raw: dict[str, Any], tmp_path: Path) -> None:
    write_rows(tmp_path / "passages.jsonl", [(f"p{row}", f"{text}\n" + "and so on " * 99) for row, text in enumerate(PASSAGES)])
    run_recipe(recipe_of(raw, evaluation={**raw["evaluation"], "examples": 12}))
    report = load_report(tmp_path / "run")
    qrels, snippets = read_qrels(raw["data"]["judged_texts"]["qrels"]), [" ".join(text.split()) for text in PASSAGES]
    assert {example.query_text for example in report.examples} == set(QUERIES[3:]), "those that something answers"
    for example in report.examples:
        assert [label for label, _ in example.rows] == ["old query", "new query"]
        gains = qrels[f"q{QUERIES.index(example.query_text)}"]
        for hit in (hit for _, hits in example.rows for hit in hits):
            (row,) = (row for row, snippet in enumerate(snippets) if hit.caption.startswith(snippet))
            gain = gains.get(f"p{row}", 0)
            assert len(hit.caption) <= SHOWN and hit.caption.endswith("…") and "\n" not in hit.caption, "cut to one line"
            assert hit.image is None and hit.is_hit == (gain > 0) and hit.gain == (gain or None)
    marks = {hit.mark for example in report.examples for _, hits in example.rows for hit in hits}
    assert marks == {"", "✓ gain 1", "✓ gain 2"}
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert '<ol class="hits texts">' in page and "<b>✓ gain 2</b>" in page
    assert "&lt;b&gt;sleeps&lt;/b&gt; all day" in page and "<b>sleeps</b>" not in page


def test_what_does_not_fit_is_refused(raw: dict[str, Any]) -> None:
    penultimate = {"options": {"input": "penultimate"}, "method": "query_map"}
    for data, changes, message in (
        ({"test": {"path": "some/pairs"}}, {}, "a single test set; remove judged_texts or test"),
        ({"queries": {"path": "some/images"}}, {}, "a single test set; remove judged_texts or queries"),
        ({"judged_texts": {"passagen": {"path": "x"}}}, {}, "passagen.*passages"),
        ({}, penultimate, "data.judged_texts has texts"),
    ):
        with pytest.raises(XcompatError, match=message):
            run_recipe(recipe_of(raw, **changes, data=raw["data"] | data))


def test_a_map_of_texts_is_chosen_by_their_sentences(raw: dict[str, Any], tmp_path: Path) -> None:
    texts = [f"{row} {animal} sleeps here. nobody wakes {animal} {row}." for row, animal in enumerate(ANIMALS * 50)]
    (tmp_path / "learned.txt").write_text("\n".join(texts) + "\n")
    del raw["method"]
    run_recipe(recipe_of(raw, evaluation=None))
    said = json.loads((tmp_path / "run" / CHOICE).read_text())
    assert said["sentences"].keys() == LINES.keys() and said["of_agreement"] and not said["is_other_kind"]
    best = max(said["sentences"], key=said["sentences"].get)
    assert said["chosen"] == f"{best} + old query, weight 0.5", "the old model can embed queries too"
