"""``xcompat map``: embeddings brought together, what is held out, what is chosen, and the model that is left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refuses, write_embeds
from hypothesis import given
from hypothesis import strategies as st
from schedule import mostly_nightly
from transformers import AutoModel
from typer.testing import CliRunner, Result

from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.core.progress import console
from xcompat.evaluation import PairedDifference, cmc
from xcompat.mapping import Candidate, CaptionedEmbeddings, PairedEmbeddings, choose, commands, load_paired
from xcompat.mapping import folds as folds_of
from xcompat.mapping.agreement import HeldOutItems, choose_by_agreement, choose_by_labels_or_agreement
from xcompat.mapping.candidates import LINES, CandidateParts, fit
from xcompat.mapping.choice_report import as_json, describe_choice, print_choice
from xcompat.mapping.folds import FEWEST, IN_WHOLE, PROTOCOLS, QUERIES, Searched, folds
from xcompat.mapping.held_out import HeldOutClasses, Trial
from xcompat.mapping.item_memory import with_item_memory
from xcompat.mapping.request import MapRequest
from xcompat.mapping.selection import Choice, merge_choices, select_conservative
from xcompat.models.embedder import load_embedder
from xcompat.report.wording import gain_with_interval

CLASSES, EACH, NEW, OLD = 24, 30, 24, 16
CHOSEN: dict[tuple[object, ...], Choice] = {}


def normalised(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def made(seed: int = 0, new_noise: float = 0.2, old_noise: float = 1.2) -> PairedEmbeddings:
    """Two models that see the same classes, the new one more clearly."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), EACH)
    meant = draw.standard_normal((CLASSES, OLD))[labels]
    turn = np.linalg.qr(draw.standard_normal((NEW, NEW)))[0][:OLD]
    shared = draw.standard_normal(meant.shape) * 0.3
    new = (meant + shared + new_noise * draw.standard_normal(meant.shape)) @ turn
    old = meant + shared + old_noise * draw.standard_normal(meant.shape)
    return PairedEmbeddings(normalised(new), normalised(old), labels)


def write(folder: Path, embeds: np.ndarray, ids: list[str] | None = None, labels: list[str] | None = None) -> Path:
    return write_embeds(folder, ids or [f"item {row}" for row in range(len(embeds))], labels, image=embeds)


def write_arrays(folder: Path, **sides: np.ndarray) -> list[Path]:
    for name, embeds in sides.items():
        np.save(folder / f"{name}.npy", embeds)
    return [folder / f"{name}.npy" for name in sides]


def run_map(old: Path, new: Path, out: Path, *more: object) -> tuple[Result, str]:
    done = CliRunner().invoke(app, ["map", "--old", str(old), "--new", str(new), "--out", str(out), *map(str, more)])
    error = str(done.exception) if isinstance(done.exception, XcompatError) else ""
    return done, " ".join(f"{done.output} {error}".split())


@cache
def choice_of_made(searched: Searched = "unknown") -> Choice:
    """Choose a map of :func:`made`: it takes seconds."""
    return choose(made(), searched)


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    pairs = made()
    assert pairs.labels_N is not None
    labels = [f"class {label}" for label in pairs.labels_N]
    return write(tmp_path / "old", pairs.old_Nd, labels=labels), write(tmp_path / "new", pairs.new_ND)


@pytest.fixture
def chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose once for the same embeddings and settings: it takes seconds, and the commands around it are what is tested."""
    choose_anew = commands.choose_by_labels_or_agreement

    def choose_or_recall(pairs: PairedEmbeddings, *settings: Any) -> Choice:
        key = np.asarray(pairs.old_Nd).tobytes(), np.asarray(pairs.new_ND).tobytes(), repr(pairs.labels_N), repr(settings)
        if key not in CHOSEN:
            CHOSEN[key] = choose_anew(pairs, *settings)
        return CHOSEN[key]

    monkeypatch.setattr(commands, "choose_by_labels_or_agreement", choose_or_recall)


def test_both_sides_come_into_one_order(tmp_path: Path) -> None:
    pairs = made()
    ids = [f"item {row}" for row in range(len(pairs))]
    order = np.random.default_rng(1).permutation(len(pairs))[:-3]
    old = write(tmp_path / "old", pairs.old_Nd, ids)
    new = write(tmp_path / "new", pairs.new_ND[order], [ids[row] for row in order], [str(pairs.labels_N[row]) for row in order])
    found = load_paired(old, new)
    kept = np.sort(order)
    np.testing.assert_array_equal(found.old_Nd, pairs.old_Nd[kept])
    np.testing.assert_array_equal(found.new_ND, pairs.new_ND[kept])
    assert found.labels_N is not None and found.n_classes == CLASSES
    same = found.labels_N[:, None] == found.labels_N
    np.testing.assert_array_equal(same, pairs.labels_N[kept][:, None] == pairs.labels_N[kept])
    first = ids[np.setdiff1d(np.arange(len(ids)), order)[0]]
    given = "720 old and 717 new ones were given"
    assert found.notes == (f"Both sides have 717 items; {given}, and {first!r} is the first that they do not share.",)
    pairs = made()
    np.save(tmp_path / "old.npy", pairs.old_Nd.astype(np.float16))
    np.save(tmp_path / "new.npy", pairs.new_ND)
    found = load_paired(tmp_path / "old.npy", tmp_path / "new.npy")
    assert len(found) == len(pairs) and found.labels_N is None
    np.save(tmp_path / "new.npy", pairs.new_ND[1:])
    refuses("720 rows, but .* 719", load_paired, tmp_path / "old.npy", tmp_path / "new.npy")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "integers": (lambda new: np.save(new / "image_embeds.npy", np.ones((720, 4), np.int64)), "embeddings are floats"),
    "empty": (lambda new: np.save(new / "image_embeds.npy", np.ones((0, 4), np.float32)), "of shape"),
    "too few ids": (lambda new: (new / "image_ids.txt").write_text("a\nb\n"), "has 2 lines, but image_embeds.npy has 720 rows"),
    "other ids": (lambda new: (new / "image_ids.txt").write_text("\n".join(map(str, range(720)))), "share no id"),
    "an id twice": (lambda new: (new / "image_ids.txt").write_text("\n".join(["a"] * 720)), "contains the id 'a' more than once"),
    "no ids": (lambda new: (new / "image_ids.txt").unlink(), "lacks image_ids.txt; it needs .* or give both .npy"),
    "no class": (lambda new: (new / "labels.txt").write_text("x\n\n \n" * 240), "480 of 720 lines are blank, first line 2; give"),
    "other classes": (lambda new: (new / "labels.txt").write_text("x\n" * 720), "has the class 'class 0' in .*, but 'x' in"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_embeddings_are_one_line(what: str, sides: tuple[Path, Path]) -> None:
    damage, said = BAD[what]
    damage(sides[1])
    refuses(said, load_paired, *sides)


@given(st.lists(st.integers(1, 14), min_size=8, max_size=20), st.sampled_from(list(PROTOCOLS)), st.integers(0, 5))
def test_nothing_that_is_searched_was_learned_from(counts: list[int], searched: Any, seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    try:
        found = list(folds(labels, searched, seed))
    except XcompatError:
        assert sum(count >= FEWEST for count in counts) < (2 if searched == "known" else 4), "enough classes of enough items"
        return
    assert sum(count >= FEWEST for count in counts) >= (2 if searched == "known" else 4)
    new_classes = []
    for fold in found:
        assert tuple(fold.queries) == tuple(fold.galleries) == PROTOCOLS[searched]
        learned = set(labels[fold.fit_F])
        for protocol, rows in fold.queries.items():
            assert not set(rows) & set(fold.fit_F) and len(set(rows)) == len(rows)
            if protocol == IN_WHOLE:
                beside = set(fold.galleries[protocol]) - set(rows)
                assert set(rows) <= set(fold.galleries[protocol]) and len(set(labels[list(beside)])) <= len(set(labels[rows]))
                assert set(labels[list(beside)]) <= learned and beside & set(fold.fit_F), "learned items are searched too"
            else:
                assert np.array_equal(fold.galleries[protocol], rows)
            classes = set(labels[rows])
            assert all((labels[rows] == label).sum() >= 2 for label in classes), "each query has a match"
            if protocol == "known classes":
                assert classes <= learned
            if protocol == "new classes":
                assert not classes & learned
                new_classes.append(classes)
    classes_of_all = [label for classes in new_classes for label in classes]
    assert len(set(classes_of_all)) == len(classes_of_all), "no class is new twice"
    assert searched != "unknown" or set(classes_of_all) == {label for label, count in enumerate(counts) if count > 1}


@pytest.mark.parametrize(("classes", "each", "searching"), [(10, 4000, 10), (1000, 700, 17), (100, 500, 17), (4, 9000, 4)])
def test_many_items_of_a_class_leave_room_for_other_classes(classes: int, each: int, searching: int) -> None:
    labels = np.repeat(np.arange(classes), each)
    n_folds = min(folds_of.FOLDS, max(2, classes // folds_of.CLASSES))
    for searched in ("known", "unknown"):
        for fold in folds(labels, searched):  # type: ignore[arg-type]
            for protocol in ("known classes", "new classes"):
                if protocol in fold.queries:
                    new = protocol == "new classes"
                    there = min(searching, classes // n_folds if new else classes - classes // n_folds * (searched != "known"))
                    asked, counts = fold.queries[protocol], np.bincount(labels[fold.galleries[protocol]])
                    assert np.count_nonzero(counts) == there == len(set(labels[asked]))
                    assert QUERIES <= counts.sum() < QUERIES + counts.max()
                    n_asked = folds_of.ASKED // (n_folds if searched != "known" else 2)
                    assert len(asked) == min(n_asked, counts.sum()) and set(asked) <= set(fold.galleries[protocol])
    (fold, _) = folds(np.repeat(np.arange(100), 200), "known")  # small classes are held out whole: 60 of each
    assert set(np.bincount(fold.galleries["known classes"] // 200)) == {0, 60}


def test_gains_are_those_of_the_metrics_on_each_fold() -> None:
    pairs = made()
    assert pairs.labels_N is not None
    choice = choice_of_made()
    trial = next(trial for trial in choice.trials if trial.candidate == Candidate("scaled rotation"))
    gains, floor = [], []
    for fold in folds(pairs.labels_N, "unknown"):
        rows = fold.queries["new classes"]
        labels = pairs.labels_N[rows]
        known, asked = CandidateParts(pairs.take(fold.fit_F)), pairs.new_ND[rows]
        queries = known.queries(Candidate("scaled rotation"), lambda asked=asked: [asked], "rows")
        old = cmc(pairs.old_Nd[rows], pairs.old_Nd[rows], labels, labels, rows, rows)[1]
        gains += [cmc(queries, pairs.old_Nd[rows], labels, labels, rows, rows)[1] - old] * len(rows)
        floor += [old] * len(rows)
    assert trial.gains["new classes"]["cmc@1"].mean == pytest.approx(np.mean(gains))
    assert choice.floor["new classes"]["cmc@1"] == pytest.approx(np.mean(floor))
    assert choice.n_queries["new classes"] == len(gains)


def test_the_worst_gain_decides_and_then_the_mean() -> None:
    choice = choice_of_made()
    tenths = [round(1000 * trial.worst) for trial in choice.trials]
    assert round(1000 * choice.chosen.worst) == max(tenths) and choice.chosen.worst > 0
    best = [trial.mean for trial, worst in zip(choice.trials, tenths, strict=True) if worst == max(tenths)]
    assert choice.chosen.mean == max(best)
    known = choice_of_made("known")
    assert set(known.floor) == {"known classes"} and known.chosen.mean >= choice.chosen.gains["known classes"]["cmc@1"].low
    torch.set_num_threads(3)
    try:
        assert choose(made(), "unknown").trials == choice.trials, "the same seed measures the same, with folds on several cores"
    finally:
        torch.set_num_threads(1)


def test_old_queries_on_shared_folds_equal_a_split_of_their_own() -> None:
    candidate = Candidate("rotation", 0.25, share=0.5)
    held, own = HeldOutClasses(made(), "unknown", LINES, 0), HeldOutClasses(made().of_old(), "unknown", LINES, 0)
    held.try_candidate(candidate)
    assert held.with_old_queries().try_candidate(candidate) == own.try_candidate(candidate)


def tried(share: float, worst: float, mean: float, line: str = "procrustes", half: float = 0.0196) -> Trial:
    def gain(of: float) -> PairedDifference:
        return PairedDifference(of, of - half, of + half)

    return Trial(Candidate(line, 0.25, share=share), {"new classes": {"cmc@1": gain(worst), "map": gain(2 * mean - worst)}})


def test_what_is_not_surely_above_old_queries_leans_little_on_memory() -> None:
    bold, mild, none = tried(0.8, 0.020, 0.09), tried(0.3, 0.011, 0.05), tried(0.0, 0.010, 0.03)
    assert select_conservative([bold, mild, none]) is bold, "surely above zero"
    unsure = replace(tried(0.8, 0.020, 0.09), gains={"known classes": tried(0.8, 0.030, 0.09, half=0.04).gains["new classes"]})
    assert select_conservative([unsure, none]) is unsure and not unsure.is_surely_better, "one interval below zero is enough"
    assert select_conservative([unsure, bold]) is bold, "what is surely above zero in everything comes first"
    bold = tried(0.8, 0.019, 0.09)
    assert select_conservative([bold, mild, none]) is mild, "within a standard error of .01, and gains more than none"
    nothing = tried(0.0, 0.011, 0.06)
    assert select_conservative([bold, mild, nothing]) is nothing, "what gains as much without a memory needs none"


def test_of_inputs_that_find_as_much_the_one_before_the_trained_layer_is_taken() -> None:
    def choice(trial: Trial) -> Choice:
        return Choice([trial], trial, None, {}, {})

    embedding = choice(tried(0.3, 0.030, 0.05))
    for worst, taken in ((0.021, "of features"), (0.019, "procrustes")):
        both = merge_choices([embedding, choice(tried(0.3, worst, 0.04, "of features"))])
        assert both.chosen.candidate.line == taken and len(both.trials) == 2


def test_ridge_is_left_out_where_folds_learn_from_fewer_items_than_dimensions() -> None:
    """Its error peaks where both are equal: of 130 items folds learn from 39, and did not show what 130 do."""
    draw = np.random.default_rng(2)
    labels = np.repeat(np.arange(26), 5)
    pairs = PairedEmbeddings(*(normalised(draw.standard_normal((130, dim))) for dim in (128, 48)), labels)
    choice = choose(pairs)
    assert choice.too_few_for_ridge == 39 and {trial.candidate.line for trial in choice.trials} == set(LINES) - {"ridge"}
    assert as_json(choice)["too_few_for_ridge"] == 39
    assert choose(pairs, lines={"ridge": LINES["ridge"]}).too_few_for_ridge is None, "there is no other"
    many = choice_of_made()
    assert many.too_few_for_ridge is None and {trial.candidate.line for trial in many.trials} == set(LINES)


@pytest.mark.usefixtures("chosen_once")
def test_what_is_written_is_what_was_tried(sides: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done, said = run_map(*sides, out)
    assert done.exit_code == 0 and f"the old model is named 'old' after {sides[0]}" in said, said
    assert f"report: {out / 'report.json'}" in said
    report = json.loads((out / "report.json").read_text())
    assert report["verdict"] and report["classes"] == CLASSES and report["items"] == CLASSES * EACH
    settings = {key: report["model"][key] for key in ("line", "power", "damping", "sharpness", "share")}
    model, pairs = AutoModel.from_pretrained(out / "model"), load_paired(*sides)
    expected = CandidateParts(pairs).queries(Candidate(**settings), lambda: [pairs.new_ND], "all")
    torch.testing.assert_close(model.to_space(torch.from_numpy(np.array(pairs.new_ND))), expected)
    assert model.compatible_with == [Fingerprint.from_string("old")]
    chosen = max(report["trials"], key=lambda trial: (round(1000 * trial["worst"]), trial["mean"]))
    assert chosen["name"] == report["model"]["name"] and report["without_new_model"]["mean"] < chosen["mean"]
    assert run_map(*sides, out)[0].exit_code == 0, "the same command replaces what it made"
    (out / "notes.txt").write_text("mine")
    assert "notes.txt was not made by" in run_map(*sides, out)[1]
    assert (out / "notes.txt").read_text() == "mine"
    assert run_map(*sides, out, "--overwrite")[0].exit_code == 0 and not (out / "notes.txt").exists()


@pytest.mark.usefixtures("chosen_once")
def test_a_map_of_other_inputs_is_left_alone(sides: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run(*more: str, old: Path = sides[0]) -> BaseException | None:
        return run_map(old, sides[1], out, *more)[0].exception

    assert run() is None
    moved = shutil.copytree(sides[0], tmp_path / "elsewhere" / "old")
    assert run(old=moved) is None, "the same files at another place"
    for more, named in ((["--seed", "1"], "--seed"), (["--old-model", "clip-b32"], "--old-model")):
        assert f"made with a different {named}; choose another folder" in str(run(*more))
    np.save(moved / "image_embeds.npy", made(seed=1).old_Nd)
    assert "made with a different --old; choose another folder" in str(run(old=moved))
    (moved / "labels.txt").unlink()
    written = (out / "report.json").read_bytes()
    assert "made with a different --old, --seed;" in str(run("--seed", "1", old=moved))
    assert (out / "report.json").read_bytes() == written
    assert run("--seed", "1", "--overwrite") is None and json.loads((out / "report.json").read_text())["seed"] == 1


def captioned(folder: Path, images: np.ndarray, texts: np.ndarray, ids: list[str], text_ids: list[str]) -> Path:
    return write_embeds(write(folder, images, ids), text_ids, text=texts)


def test_captions_are_what_a_query_should_find(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    meant, turn = draw.standard_normal((80, OLD)), np.linalg.qr(draw.standard_normal((NEW, NEW)))[0][:OLD]

    def seen(noise: float, each: int) -> np.ndarray:
        return np.repeat(meant, each, axis=0) + noise * draw.standard_normal((80 * each, OLD))

    ids = [f"item {row}" for row in range(80)]
    text_ids = [name for name in ids for _ in range(2)]
    old = captioned(tmp_path / "old", normalised(seen(1.5, 1)), normalised(seen(1.5, 2)), ids, text_ids)
    images, texts = normalised(seen(0.1, 1) @ turn), normalised(seen(0.1, 2) @ turn)
    kept = np.delete(np.arange(160), [7, 20, 21])  # one caption of item 3, both of item 10
    new = captioned(tmp_path / "new", images[::-1], texts[kept], ids[::-1], [text_ids[row] for row in kept])
    found = load_paired(old, new)
    assert isinstance(found, CaptionedEmbeddings) and len(found.images) == 78 and len(found.texts) == 156
    there = np.delete(np.arange(80), [3, 10])
    np.testing.assert_array_equal(found.images.new_ND[:], images[there])
    np.testing.assert_array_equal(found.texts.new_ND[:], texts[np.repeat(2 * there, 2) + np.tile([0, 1], 78)])
    done, said = run_map(old, new, tmp_path / "out")
    assert done.exit_code == 0, said
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report["floor"]) == {"text-to-image", "image-to-text"} and report["verdict"]
    model = AutoModel.from_pretrained(tmp_path / "out" / "model")
    torch.testing.assert_close(
        model.to_space(torch.from_numpy(images)),
        CandidateParts(found).queries(
            Candidate(**{key: report["model"][key] for key in Candidate("x").__dict__}), lambda: [images], "all"
        ),
    )


def test_options_that_need_classes_are_refused_without_them(tmp_path: Path) -> None:
    pairs = made()
    bare = write_arrays(tmp_path, old=pairs.old_Nd, new=pairs.new_ND)
    ids = [str(row) for row in range(len(pairs))]
    both = [captioned(tmp_path / file.stem, np.load(file), np.load(file), ids, ids) for file in bare]
    for files, option, value, said in [
        (bare, "--memory-codec", "SQ8", "--memory-codec needs a memory; add classes or captions"),
        (bare, "--searched-classes", "known", "--searched-classes known needs classes; add them with --labels"),
        (both, "--searched-classes", "open", "--searched-classes open needs classes; add them with --labels"),
    ]:
        assert said in run_map(*files, tmp_path / "out", option, value)[1]
    (both[0] / "labels.txt").write_text("\n".join(map(str, pairs.labels_N)) + "\n")
    refuses("have classes .* and captions", load_paired, *both)


def test_stored_items_are_remembered_where_that_is_asked_for(tmp_path: Path) -> None:
    """A query leans towards the old embeddings of items by the softmax of its cosines to their new ones."""
    pairs = made()
    bare = write_arrays(tmp_path, old=pairs.old_Nd, new=pairs.new_ND)
    done, said = run_map(*bare, tmp_path / "out", "--remember-items", "--allow-worse")
    assert done.exit_code == 0 and "the map uses the memory." in said, said
    model = AutoModel.from_pretrained(tmp_path / "out" / "model")
    assert model.memory.entries == len(pairs) and not model.is_confident
    queries = normalised(np.random.default_rng(5).standard_normal((7, NEW)))
    values = pairs.old_Nd - pairs.old_Nd.mean(0)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    own = model.to_space_without_memory(torch.from_numpy(queries)).detach().numpy()
    for query, line, found in zip(queries, own, model.to_space(torch.from_numpy(queries)).detach().numpy(), strict=True):
        weights = np.exp(60 * (pairs.new_ND @ query))
        expected = line + 0.5 * (weights[:, None] * values).sum(0) / weights.sum()
        np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5)
    labels = [f"class {label}" for label in pairs.labels_N]
    labelled = [write(tmp_path / f"{file.stem}_items", np.load(file), labels=labels) for file in bare]
    refused = run_map(*labelled, tmp_path / "two", "--remember-items")[1]
    assert "--remember-items does not work with classes or captions" in refused


def test_item_memory_needs_gain_and_half_of_the_gallery(tmp_path: Path) -> None:
    """A memory is taken if it surely finds more of the new model's neighbours, and not tried below half of the gallery."""
    pairs = replace(made(), labels_N=None)
    exact = PairedEmbeddings(pairs.new_ND, pairs.new_ND)  # the map alone finds every neighbour
    for part, is_chosen in ((pairs, True), (exact, False), (replace(pairs, n_stored=2 * len(pairs) + 1), False)):
        choice = choose_by_agreement(part, remember_items=True)
        assert choice.item_memory is not None and choice.item_memory.is_chosen == is_chosen
        assert (choice.candidate == with_item_memory(choice.chosen.candidate)) == is_chosen
        assert choice.is_safe == choose_by_agreement(part).is_safe, "the memory does not change the verdict"
    assert choice.item_memory.gain is None and "not tried: they are 50 % of the gallery" in describe_choice(choice)[-1]
    assert as_json(choice)["item_memory"]["chosen"] is False and choose_by_agreement(pairs).item_memory is None
    old, new, gallery = write_arrays(tmp_path, old=pairs.old_Nd, new=pairs.new_ND, gallery=np.tile(pairs.old_Nd, (3, 1)))
    said = run_map(old, new, tmp_path / "out", "--gallery", gallery, "--remember-items", "--allow-worse")[1]
    assert "they are 33 % of the gallery" in said, said
    others = write_arrays(tmp_path, others=replace(made(seed=3), labels_N=None).old_Nd)[0]
    said = run_map(old, new, tmp_path / "out", "--gallery", others, "--remember-items", "--allow-worse", "--overwrite")[1]
    assert "not tried: they are 0 % of the gallery" in said, "as many items, but other ones"
    assert AutoModel.from_pretrained(tmp_path / "out" / "model").memory is None
    pairs = replace(made(), labels_N=None)
    held = HeldOutItems(pairs, {"rotation": LINES["rotation"]}, 0, coverage=0.8)
    for learned, searched in zip(held.learned_rows, held.searched_rows, strict=True):
        assert sorted(searched) == list(range(len(pairs))) and len(learned) == round(0.8 * len(pairs))
        assert set(searched[: held.n_queries]).isdisjoint(learned)


def test_one_kind_of_items_alone_is_read_of_both(tmp_path: Path) -> None:
    pairs, ids = made(), [f"item {row}" for row in range(CLASSES * EACH)]
    old, new = write(tmp_path / "old", pairs.old_Nd), captioned(tmp_path / "new", pairs.new_ND, pairs.new_ND, ids, ids)
    found = load_paired(old, new)
    assert isinstance(found, PairedEmbeddings) and f"{new}: only the images are used" in found.notes[0]
    for name in ("image_embeds.npy", "image_ids.txt"):
        (new / name).unlink()
    refuses("give embeddings of the same items by both models", load_paired, old, new)
    for name in ("embeds.npy", "ids.txt"):
        (old / f"image_{name}").rename(old / f"text_{name}")
    np.testing.assert_array_equal(load_paired(old, new).together().old_Nd, pairs.old_Nd)
    refuses("has rows without ids", load_paired, old / "text_embeds.npy", new)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (None, "is a guess"),
        ([1] * 720, "too few items for a validation split"),
        ([50], "are needed, found"),
        ([2, 2, *[1] * 46], "are needed, found"),
    ],
    ids=["no class", "many", "one class", "almost"],
)
def test_where_nothing_can_be_held_out_a_map_is_a_guess(counts: list[int] | None, said: str, tmp_path: Path) -> None:
    """Without classes 40 items are needed; with classes, some of them of several items."""
    draw = np.random.default_rng(0)
    labels = None if counts is None else [str(label) for label, count in enumerate(counts) for _ in range(count)]
    old, new = (normalised(draw.standard_normal((39 if labels is None else len(labels), dim))) for dim in (OLD, NEW))
    sides = write(tmp_path / "old", old, labels=labels), write(tmp_path / "new", new)
    done, output = run_map(*sides, tmp_path / "out")
    assert done.exit_code == 1 and said in output and "is a guess" in output and not (tmp_path / "out").exists()
    assert run_map(*sides, tmp_path / "out", "--allow-worse")[0].exit_code == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["model"]["name"] == "whitened" and not report["verdict"] and "trials" not in report
    model = AutoModel.from_pretrained(tmp_path / "out" / "model")
    assert model.to_space(torch.from_numpy(new)).isfinite().all() and model.memory is None


@pytest.mark.parametrize("alike", mostly_nightly([("old",), ("new",), ("old", "new")], ("old", "new").__eq__))
def test_what_cannot_be_solved_is_left_out_and_said(alike: tuple[str, ...], tmp_path: Path) -> None:
    """Photos that are each there four times, by one of the models or both: nothing tells what differs within a class."""
    draw, labels = np.random.default_rng(0), np.repeat(np.arange(24), 4)
    sides = []
    for name, dim in {"old": OLD, "new": NEW}.items():
        means = draw.standard_normal((24, dim))[labels]
        embeds = normalised(means if name in alike else means + 0.5 * draw.standard_normal(means.shape))
        sides.append(write(tmp_path / name, embeds, labels=[str(label) for label in labels]))
    done, output = run_map(*sides, tmp_path / "out", "--allow-worse")
    assert done.exit_code == 0, done.exception
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    said = {
        "old": "No learned transform is tried: old embeddings do not differ within their classes.",
        "new": "No memory is tried: new embeddings do not differ within their classes.",
    }
    assert report["left_out"] == [said[name] for name in ("old", "new") if name in alike]
    assert all(line in output for line in report["left_out"])
    assert any(trial["power"] is not None for trial in report["trials"]) == ("old" not in alike)
    assert any(trial["share"] for trial in report["trials"]) == ("new" not in alike)


@torch.no_grad()
def test_a_named_new_model_is_asked_texts_and_judged(folder_of: dict[str, str], tmp_path: Path) -> None:
    new = load_embedder(folder_of["clip"])
    texts = [f"{colour} {thing}" for colour in ("red", "green", "blue", "old") for thing in ("shoe", "dog", "tree", "cup", "car")]
    embeds = new.embed(new.processor.texts(texts)).numpy()
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((embeds.shape[1], 8)))[0]
    old = write(tmp_path / "old", normalised(embeds @ turn), texts, [text.split()[1] for text in texts])
    new_side = write(tmp_path / "new", embeds, texts)
    named = ("--new-model", folder_of["clip"], "--old-model", "clip-b32")
    done, said = run_map(old, new_side, tmp_path / "out", "--allow-worse", *named)
    assert done.exit_code == 0, said
    _, said = run_map(new_side, old, tmp_path / "swapped", *named[:2])
    assert said.endswith("but the given embeddings have 8; --old and --new look swapped") and not (tmp_path / "swapped").exists()
    model = AutoModel.from_pretrained(tmp_path / "out" / "model")
    assert model.compatible_with == [Fingerprint.from_string("clip-b32")]
    own = model.embed_texts(**model.processor.texts(texts[:4]))
    np.testing.assert_allclose(own.numpy(), embeds[:4], atol=1e-6)
    assert model.to_space(own).shape == (4, 8)


def write_questions(folder: Path, passages: np.ndarray, questions: np.ndarray, answers: list[str]) -> Path:
    write_embeds(folder, [f"item {row}" for row in range(len(passages))], text=passages)
    return write_embeds(folder, answers, query=questions)


def test_questions_that_find_passages_decide(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    passages = normalised(draw.standard_normal((200, 16)))
    ids = [f"item {row}" for row in range(200)]
    turn = np.linalg.qr(draw.standard_normal((16, 16)))[0]
    sides = {}
    for side, noise, space in (("old", 1.0, np.eye(16)), ("new", 0.1, turn)):
        questions = normalised(passages + noise * draw.standard_normal((200, 16)) / 4)
        sides[side] = write_questions(tmp_path / side, passages @ space, questions @ space, ids)
    pairs = load_paired(sides["old"], sides["new"])
    assert isinstance(pairs, CaptionedEmbeddings) and pairs.are_questions
    found = choose(pairs)
    assert list(found.floor) == ["question to passage", "passage to question"]
    assert {protocol for protocol, _, _ in found.chosen.cells()} == {"question to passage"}
    assert as_json(found)["shown_only"] == ["passage to question"]
    assert set(as_json(found)["trials"][0]["gains"]) == set(found.floor), "both are shown"
    with_captions = choose(replace(pairs, are_questions=False))
    assert list(with_captions.floor) == ["text-to-image", "image-to-text"]
    assert {protocol for protocol, _, _ in with_captions.chosen.cells()} == set(with_captions.floor)
    for side in ("old", "new"):
        write_questions(tmp_path / "others" / side, np.eye(8), np.eye(8), [f"q{row}" for row in range(8)])
    pairs = load_paired(tmp_path / "others" / "old", tmp_path / "others" / "new")
    assert isinstance(pairs, PairedEmbeddings) and "queries are not used" in pairs.notes[-1], "ids of their own"


def test_a_map_of_galleries_is_chosen_in_the_mapped_gallery() -> None:
    pairs = made()
    for labels_N in (pairs.labels_N, None):
        turned = replace(pairs, labels_N=labels_N).swapped()
        choice = choose_by_labels_or_agreement(turned, "known", 0, LINES)
        assert choice.of_galleries and choice.reranked is None and choice.mixed is None
        model = fit(choice.candidate, CandidateParts(turned))
        assert model.maps_galleries and (model.config.old["dim"], model.config.embedding_dim) == (OLD, NEW)
        mapped, labels = model.upgrade(torch.from_numpy(pairs.old_Nd)).numpy(), pairs.labels_N
        rows = np.arange(len(pairs))
        found = cmc(pairs.new_ND, mapped, labels, labels, rows, rows)[1]
        floor = cmc(pairs.old_Nd, pairs.old_Nd, labels, labels, rows, rows)[1]
        assert found > floor, "the new model's queries find more in the mapped gallery than old queries in the old one"
    rows = np.arange(300)
    captioned = CaptionedEmbeddings.join_complete(*(replace(made(1).take(rows), labels_N=rows) for _ in range(2))).swapped()
    choice = choose(captioned, seed=0)
    assert choice.of_galleries and not choice.candidate.share and choice.candidate.power is None
    assert fit(choice.candidate, CandidateParts(captioned)).maps_galleries


def test_a_map_without_training_embeddings_is_chosen_among_its_kind(sides: tuple[Path, Path], tmp_path: Path) -> None:
    whole = choice_of_made("known")
    transform, none = (choose(made(), "known", memory=memory) for memory in ("transform", "none"))
    assert any(trial.candidate.share for trial in whole.trials) and any(trial.candidate.power for trial in whole.trials)
    assert not any(trial.candidate.share for trial in transform.trials)
    assert any(trial.candidate.power for trial in transform.trials), "a learned transform holds no embeddings"
    assert all(trial.candidate.kind == trial.candidate.line for trial in none.trials)
    asked = MapRequest(*sides, tmp_path / "out", memory="none", remember_items=True)
    refuses("--remember-items does not work with --memory none; remove one of them", asked.require)


def test_all_results_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    choice = choose(made(new_noise=1))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console, "_width", 80)
    print_choice(choice)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and shown.count("candidate ") == len(PROTOCOLS["unknown"])
    kinds = [trial.candidate.kind for trial in choice.trials_to_show()]
    assert choice.chosen in choice.trials_to_show() and len(kinds) == len(set(kinds))
    trials = [*choice.trials_to_show(), *filter(None, (choice.mixed, choice.without_new_model))]
    gains = [gain for trial in trials for _, _, gain in trial.cells()]
    assert gains and all(gain_with_interval(gain.mean, gain.low, gain.high) in shown for gain in gains)


def test_a_refusal_is_said_once_in_the_last_line(tmp_path: Path) -> None:
    pairs = made(new_noise=4)
    old = write(tmp_path / "old", pairs.old_Nd, labels=[str(label) for label in pairs.labels_N])
    done = run_map(old, write(tmp_path / "new", pairs.new_ND), tmp_path / "out")[0]
    before, last = done.output.rstrip().rsplit("\n", 1)
    assert done.exit_code == 1 and last.startswith("No map was written: no candidate is surely at or above old queries.")
    assert "Add items or the old model (--old-model), or write the best candidate with --allow-worse" in last
    assert "surely" not in before and re.search(r"may find less than old queries: \d+ of 12 intervals reach", before)
