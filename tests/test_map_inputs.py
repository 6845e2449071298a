"""What maps are fitted to: unusable rows, pairs of another domain, classes of items, and embeddings in memory (fit_map)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Run, invoke, refuses, store, write_embeds, write_photos
from hypothesis import given
from hypothesis import strategies as st
from store_places import unit_vectors
from test_index_gallery import write_index
from test_map import made, write
from transformers import AutoModel

import xcompat
from xcompat import Fingerprint, XcompatError
from xcompat.heads import slerp
from xcompat.mapping import PairedEmbeddings, choose, fit_map
from xcompat.mapping.candidates import CandidateParts, fit
from xcompat.mapping.domain import FAR, describe_shift, measure_shift, read_gallery_vectors
from xcompat.mapping.fitting import FittedMap
from xcompat.mapping.from_texts import pairs_of_texts
from xcompat.mapping.item_labels import read_item_labels
from xcompat.mapping.paired import load_paired
from xcompat.mapping.request import TextInput
from xcompat.mapping.reranking import COUNTS, OLD_WEIGHTS, TOLERATED
from xcompat.mapping.sides import read_sides
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.stores.places import Reading
from xcompat.training.evaluate_command import evaluate_embeddings

pytestmark = pytest.mark.usefixtures("undrawn")
ITEMS, BAD = 60, 7
IDS = [f"item {row}" for row in range(ITEMS)]


def draw(seed: int = 0) -> np.ndarray:
    return unit_vectors(ITEMS, 8, seed)


def write_npy(here: Path, rows: list) -> Path:
    return write_embeds(here / "npy", IDS, image=[np.full(8, np.nan, np.float32) if row is None else row for row in rows])


def write_parquet(here: Path, rows: list) -> Path:
    column = pa.array([None if row is None else row.tolist() for row in rows], pa.list_(pa.float32()))
    pq.write_table(pa.table({"id": IDS, "embedding": column}), here / "a.parquet")
    return here / "a.parquet"


def write_json(here: Path, rows: list) -> Path:
    lines = ({"id": name} | ({} if row is None else {"embedding": row.tolist()}) for name, row in zip(IDS, rows, strict=True))
    (here / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return here / "a.jsonl"


WRITERS: dict[str, Callable[[Path, list], Path]] = {"npy": write_npy, "parquet": write_parquet, "jsonl": write_json}
KINDS = {"missing": None, "zeros": np.zeros(8, np.float32)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, BAD, ITEMS - 1])
@pytest.mark.parametrize("form", WRITERS)
def test_a_bad_row_is_named_alike_in_every_format(form: str, place: int, kind: str, tmp_path: Path) -> None:
    rows = list(draw())
    rows[place] = KINDS[kind]
    (side,) = read_sides(WRITERS[form](tmp_path, rows)).values()
    said = "has no embedding" if kind == "missing" else "holds only zeros"
    assert len(side.notes) == 1 and f"row {place} ('item {place}') {said}" in side.notes[0]
    assert np.flatnonzero(~side.usable_N).tolist() == [place]
    np.testing.assert_array_equal(side.embeds_ND[side.usable_N], np.delete(draw(), place, 0))


@pytest.mark.parametrize("form", WRITERS)
def test_pairs_leave_out_what_either_side_lacks(form: str, tmp_path: Path) -> None:
    sides = []
    for name, lacks in (("old", [3, 5]), ("new", [5, 9])):
        (tmp_path / name).mkdir()
        rows = [None if row in lacks else each for row, each in enumerate(draw())]
        sides.append(WRITERS[form](tmp_path / name, rows))
    pairs = load_paired(*sides)
    assert isinstance(pairs, PairedEmbeddings)
    np.testing.assert_array_equal(pairs.new_ND[:], np.delete(draw(), [3, 5, 9], 0))
    np.testing.assert_array_equal(pairs.old_Nd[:], np.delete(draw(), [3, 5, 9], 0))
    assert [note.split(" rows")[0] for note in pairs.notes] == ["2 of 60", "2 of 60"]


def test_rows_without_ids_stay_in_step(tmp_path: Path) -> None:
    old, new = draw(0), draw(1)
    old[4], new[8] = np.nan, 0
    np.save(tmp_path / "old.npy", old)
    np.save(tmp_path / "new.npy", new)
    pairs = load_paired(tmp_path / "old.npy", tmp_path / "new.npy")
    assert isinstance(pairs, PairedEmbeddings)
    np.testing.assert_array_equal(pairs.old_Nd[:], np.delete(old, [4, 8], 0))
    np.testing.assert_array_equal(pairs.new_ND[:], np.delete(new, [4, 8], 0))


def test_rows_of_any_length_are_used_and_too_many_bad_ones_refused(tmp_path: Path) -> None:
    rows = draw()
    rows[BAD] *= np.float32(1e-22)
    rows[BAD + 1] *= np.float32(1e30)
    (side,) = read_sides(write_npy(tmp_path, list(rows))).values()
    np.testing.assert_allclose(side.embeds_ND, draw(), atol=1e-6)
    assert side.usable_N.all() and "2 of 60 rows" in side.notes[0] and "row 7 ('item 7'): 1e-22" in side.notes[0]
    path = write_parquet(tmp_path, [None if row < 30 else each for row, each in enumerate(draw())])
    refuses(r"30 of 60 rows .* row 0 \('item 0'\) has no embedding; .* --max-bad-share", read_sides, path)
    (side,) = read_sides(path, 0.5).values()
    assert side.usable_N.sum() == 30


def run_map(here: Path, *options: str) -> str:
    files = ["--old", str(here / "old.npy"), "--new", str(here / "new.npy"), "--old-model", "b32", "--out", str(here / "map")]
    return invoke("map", *files, "--allow-worse", *options)


def test_map_says_what_it_left_out_and_keeps_it_in_the_report(tmp_path: Path) -> None:
    old = draw()
    old[:12] = 0
    np.save(tmp_path / "old.npy", old)
    np.save(tmp_path / "new.npy", draw(1))
    refuses("--max-bad-share", run_map, tmp_path)
    run_map(tmp_path, "--max-bad-share", "0.2")
    report = json.loads((tmp_path / "map" / "report.json").read_text())
    assert report["items"] == 48 and any("12 of 60 rows" in line for line in report["said"])


def test_no_model_is_judged_on_what_one_of_them_lacks(tmp_path: Path) -> None:
    labels = [f"class {row % 6}" for row in range(ITEMS)]
    old, new = draw(0), draw(1)
    new[BAD] = np.nan
    whole = np.delete(np.arange(ITEMS), [BAD, 11])
    left = [row for row in range(ITEMS) if row != 11]
    place = write(tmp_path / "old", old, IDS, labels)
    other = write(tmp_path / "new", new[left][::-1], [IDS[row] for row in left][::-1])  # another order, one row less
    found = evaluate_embeddings(place, other, None, None, tmp_path / "report")
    kept = [[each[row] for row in whole] for each in (IDS, labels)]
    place, other = write(tmp_path / "old-kept", old[whole], *kept), write(tmp_path / "new-kept", new[whole], kept[0])
    assert found.cases == evaluate_embeddings(place, other, None, None, tmp_path / "report-kept").cases


EMBEDDINGS = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "embeddings"


def draw_vectors(seed: int, count: int, offset: float = 0.0, dim: int = 16) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim)) + 0.5
    rows[:, : dim // 2] += offset
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.skipif(not EMBEDDINGS.is_dir(), reason="needs ../shared/data/text/embeddings")
@pytest.mark.parametrize("model", ["wordllama", "paraphrase-minilm-l3", "all-minilm-l6"])
def test_texts_of_another_domain_are_told_from_samples(model: str) -> None:
    gallery, cranfield, generic = (
        np.load(EMBEDDINGS / model / f"{name}.npy").astype(np.float32) for name in ("scifact_docs", "cranfield_docs", "generic")
    )
    cranfield = cranfield[cranfield.any(1)]
    rows = np.random.default_rng(0).permutation(len(gallery))
    assert all(abs(measure_shift(gallery[rows[:count]], gallery)) < 0.01 for count in (50, 500, 2000))
    assert all(measure_shift(pairs, gallery) > 2 * FAR for pairs in (generic, cranfield))


@given(st.integers(0, 1000), st.integers(30, 300))
def test_random_samples_draw_no_warning(seed: int, count: int) -> None:
    gallery = draw_vectors(seed, 1000)
    sample = gallery[np.random.default_rng(seed).permutation(1000)[:count]]
    assert describe_shift(sample, gallery, "g") == ()


def test_shift_is_the_distance_of_the_means_over_the_variance() -> None:
    pairs, gallery = draw_vectors(0, 300, offset=2.0), draw_vectors(1, 200)
    distance = sum((pairs[:, column].mean() - gallery[:, column].mean()) ** 2 for column in range(16))
    variance = sum(gallery[:, column].var() for column in range(16))
    assert measure_shift(pairs, gallery) == pytest.approx(distance / variance - 1 / 300 - 1 / 200, rel=1e-4)


def test_pairs_of_another_domain_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gallery = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("old"), dim=16)
    store(gallery, draw_vectors(5, 400, offset=3.0), [f"g{row}" for row in range(400)])
    vectors, total = read_gallery_vectors(tmp_path / "gallery")
    assert vectors.shape == (400, 16) and total == 400
    np.save(tmp_path / "old.npy", draw_vectors(1, 300))
    np.save(tmp_path / "new.npy", draw_vectors(1, 300))
    command = ["map", "--old", tmp_path / "old.npy", "--new", tmp_path / "new.npy", "--out", tmp_path / "map", "--allow-worse"]
    printed = [invoke(*command, "--overwrite", "--gallery", tmp_path / name) for name in ("gallery", "old.npy")]
    assert "! The pairs are unlike the vectors of" in printed[0] and "unlike" not in printed[1]
    said = json.loads((tmp_path / "map" / "report.json").read_text())["said"]
    assert not any("unlike" in line for line in said), "the last run compared the pairs with themselves"
    caplog.clear()
    pairs = draw_vectors(1, 300)
    fit_map(pairs, pairs, gallery=pairs[:200])
    assert not caplog.messages
    fit_map(pairs, pairs, gallery=draw_vectors(2, 200, offset=3.0))
    assert any("pairs are unlike the vectors of the gallery" in line for line in caplog.messages)
    refuses("8 dimensions, and the old embeddings have 16", fit_map, pairs, pairs, gallery=draw_vectors(2, 200, dim=8))
    vectors = np.concatenate([pairs, draw_vectors(2, 900, offset=3.0)])
    for side, count in (("old", 1200), ("new", 300)):
        write_embeds(tmp_path / side, [f"t{row}" for row in range(count)], text=vectors[:count])
    assert any("unlike the vectors of" in note for note in load_paired(tmp_path / "old", tmp_path / "new").notes)


COUNT = 12
NAMES = [f"{number:02}.png" for number in range(COUNT)]
CLASSES = [("shoe", "hat", "cup")[number % 3] for number in range(COUNT)]
KNOWN = [("cup", "hat", "shoe").index(label) for label in CLASSES]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Return an index of 12 photos, with their file names in ids.txt, backwards."""
    write_photos(tmp_path / "photos", COUNT)
    vectors = np.random.default_rng(0).standard_normal((COUNT, 6)).astype(np.float32)
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in NAMES[::-1]))
    return write_index(tmp_path / "old.faiss", vectors)


def written(folder: Path, kind: str) -> Path:
    """Write the classes of the photos."""
    shuffled = np.random.default_rng(1).permutation(COUNT).tolist()
    columns = {"file_name": [NAMES[row] for row in shuffled], "category": [CLASSES[row] for row in shuffled], "price": shuffled}
    if kind == "lines":
        (folder / "classes.txt").write_text("".join(f"{label}\n" for label in CLASSES[::-1]))  # the index is backwards
        return folder / "classes.txt"
    if kind == "list":
        (folder / "list.txt").write_text("".join(f"{name} {label}\n" for name, label in zip(NAMES, CLASSES, strict=True)))
        return folder / "list.txt"
    if kind == "folders":
        for name, label in zip(NAMES, CLASSES, strict=True):
            (folder / "sorted" / label).mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "photos" / name, folder / "sorted" / label / name)
        return folder / "sorted"
    if kind == "parquet":
        pq.write_table(pa.table(columns), folder / "classes.parquet")
        return folder / "classes.parquet"
    rows = zip(*(columns[name] for name in ("file_name", "category")), strict=True)
    (folder / "classes.csv").write_text("file_name,category\n" + "".join(f"{name},{label}\n" for name, label in rows))
    return folder / "classes.csv"


@pytest.mark.parametrize("kind", ["lines", "list", "folders", "parquet", "csv"])
def test_classes_of_an_index_come_from_any_source(index: Path, folder_of: dict[str, str], tmp_path: Path, kind: str) -> None:
    reading = Reading(tmp_path / "ids.txt", labels=written(tmp_path, kind))
    images = TextInput(tmp_path / "photos", are_images=True)
    pairs = pairs_of_texts(index, Path(folder_of["clip"]), images, tmp_path / "cache", reading=reading).pairs
    assert isinstance(pairs, PairedEmbeddings) and pairs.labels_N is not None
    assert pairs.labels_N.tolist() == KNOWN, "pairs are in the order of the photos"
    joined = load_paired(index, write_embeds(tmp_path / "new", NAMES, image=np.eye(COUNT, dtype=np.float32)), reading=reading)
    assert isinstance(joined, PairedEmbeddings) and joined.labels_N is not None
    assert joined.labels_N.tolist() == KNOWN[::-1], "pairs are in the order of the index"


def test_items_without_a_class_are_not_used(index: Path, folder_of: dict[str, str], tmp_path: Path) -> None:
    file = written(tmp_path, "csv")
    file.write_text(file.read_text().replace("03.png,hat\n", "").replace("03.png,shoe\n", "").replace("cup", ""))
    reading, images = Reading(tmp_path / "ids.txt", labels=file), TextInput(tmp_path / "photos", are_images=True)
    pairs = pairs_of_texts(index, Path(folder_of["clip"]), images, tmp_path / "cache", reading=reading, sample=5).pairs
    assert isinstance(pairs, PairedEmbeddings) and pairs.labels_N is not None and len(pairs) == 5 and pairs.n_stored == COUNT
    assert set(pairs.labels_N.tolist()) == {0, 1}, "the sample is drawn from items with a class"
    assert any("7 of 12 items have a class in" in note and "only these are used" in note for note in pairs.notes)


def test_models_on_both_sides_take_classes_of_the_images(folder_of: dict[str, str], tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", COUNT)
    images, file = TextInput(tmp_path / "photos", are_images=True), written(tmp_path, "csv")
    models = Path(folder_of["siglip"]), Path(folder_of["clip"])
    pairs = pairs_of_texts(*models, images, tmp_path / "cache", reading=Reading(labels=file)).pairs
    assert isinstance(pairs, PairedEmbeddings) and pairs.labels_N is not None and pairs.labels_N.tolist() == KNOWN


def test_unfit_classes_are_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcompat.mapping.from_texts.load_embedder", lambda *_: pytest.fail("a model is loaded"))
    images = TextInput(tmp_path / "photos", are_images=True)
    for text, message in (
        ("a\nb\n", "classes.txt has 2 classes, but .*old.faiss has 12 items"),
        ("id,label\n00.png,hat\n00.png,cup\n", "has two classes of '00.png': 'hat' and 'cup'; keep one of them"),
        ("id,label\nx,hat\n", r"has no class for any item of .*photos \('x', '00.png'\); use the same ids"),
        ("id,kind\nx,hat\n", r"has no column label or class \(it has id, kind\); write label in the first line"),
        ("photo,label\n00.png,hat\n", r"has no column id \(it has photo, label\); write id in the first line"),
    ):
        file = tmp_path / ("classes.csv" if "," in text else "classes.txt")
        file.write_text(text)
        with pytest.raises(XcompatError, match=message):
            pairs_of_texts(index, Path("new"), images, tmp_path / "cache", reading=Reading(tmp_path / "ids.txt", labels=file))


def test_either_map_takes_classes_of_an_index(index: Path, folder_of: dict[str, str], tmp_path: Path, run_xcompat: Run) -> None:
    named = ("map", "--old", index, "--ids", tmp_path / "ids.txt", "--new", folder_of["clip"], "--images", tmp_path / "photos")
    asked = (*named, "--out", tmp_path / "map", "--allow-worse")
    assert "nowhere.csv does not exist" in run_xcompat.refusal(*asked, "--labels", tmp_path / "nowhere.csv")
    known = (*asked, "--searched-classes", "known")
    assert "--searched-classes known needs classes; add them with --labels" in run_xcompat.refusal(*known)
    assert not (tmp_path / "map.cache").exists(), "it is refused before images are embedded"
    classes = written(tmp_path, "csv")
    run_xcompat.output(*known, "--labels", classes)
    assert '"classes": 3' in (tmp_path / "map" / "report.json").read_text()
    classes.write_text(classes.read_text().replace("cup", "mug"))
    assert "a map made with a different --labels" in run_xcompat.refusal(*known, "--labels", classes)
    new = write_index(tmp_path / "new.faiss", np.eye(COUNT, dtype=np.float32))
    fitted = fit_map(index, new, labels=written(tmp_path, "lines"))
    assert fitted.choice is None, "12 items are too few to choose"
    assert read_item_labels(tmp_path / "classes.txt").classes == CLASSES[::-1]


@pytest.fixture(scope="module")
def pairs() -> PairedEmbeddings:
    return made()


@pytest.fixture(scope="module")
def labelled(pairs: PairedEmbeddings) -> FittedMap:
    return fit_map(pairs.old_Nd, pairs.new_ND, pairs.labels_N)


@pytest.fixture(scope="module")
def plain(pairs: PairedEmbeddings) -> FittedMap:
    return fit_map(pairs.old_Nd, pairs.new_ND)


def test_it_chooses_what_the_command_chooses(pairs: PairedEmbeddings, labelled: FittedMap, tmp_path: Path) -> None:
    found, choice = labelled, choose(pairs)
    assert found.choice is not None and found.choice.chosen == choice.chosen and found.is_safe == choice.is_safe
    expected = fit(choice.chosen.candidate, CandidateParts(pairs)).to_space(torch.from_numpy(pairs.new_ND[:5]))
    np.testing.assert_allclose(found.to_space(3 * pairs.new_ND[:5]), expected, atol=1e-6)
    assert found.report["verdict"] == found.is_safe and str(choice.chosen.candidate) in repr(found)
    found.save(tmp_path / "model")
    saved = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(saved.to_space(torch.from_numpy(pairs.new_ND[:5])), expected)


def test_weight_and_number_of_hits_for_re_ranking_are_kept(labelled: FittedMap, plain: FittedMap, tmp_path: Path) -> None:
    choice = labelled.choice
    assert choice is not None and choice.reranked is not None and choice.reranked.old_weight in OLD_WEIGHTS
    reranked = choice.reranked
    assert reranked.trial.mean > choice.chosen.mean, "the new model knows more than its map"
    enough = [k for k in COUNTS if reranked.losses[k].high >= -TOLERATED]
    assert reranked.candidates == enough[0] and max(loss.mean for loss in reranked.losses.values()) == 0
    labelled.save(tmp_path / "model")
    saved = AutoModel.from_pretrained(tmp_path / "model").config
    assert (saved.rerank_old_weight, saved.rerank_candidates) == (reranked.old_weight, reranked.candidates)
    written = labelled.report["reranked"]
    assert (written["old_weight"], written["candidates"]) == (reranked.old_weight, reranked.candidates)
    assert written["losses"].keys() == {str(k) for k in COUNTS}
    assert plain.model.config.rerank_old_weight is None, "without labels nothing says which weight is better"
    assert plain.model.config.rerank_candidates is None


def test_any_classes_are_taken_and_unusable_rows_left_out(pairs: PairedEmbeddings, labelled: FittedMap, plain: FittedMap) -> None:
    labels = [f"class {label:02}" for label in pairs.labels_N]
    assert repr(fit_map(torch.from_numpy(pairs.old_Nd), torch.from_numpy(pairs.new_ND), labels)) == repr(labelled)
    new_ND, old_Nd = (np.insert(side, [0, 5], rows, axis=0) for side, rows in ((pairs.new_ND, np.nan), (pairs.old_Nd, 0)))
    assert repr(fit_map(old_Nd, new_ND)) == repr(plain)


def test_an_index_a_gallery_files_and_lists_are_taken(pairs: PairedEmbeddings, plain: FittedMap, tmp_path: Path) -> None:
    expected = plain.to_space(pairs.new_ND[:3])
    index = faiss.read_index(str(write_index(tmp_path / "old.faiss", pairs.old_Nd, "IDMap2,Flat", ids=np.arange(len(pairs)) + 7)))
    np.save(tmp_path / "old.npy", pairs.old_Nd)
    empty = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("clip"), dim=pairs.dims[1])
    gallery = store(empty, pairs.old_Nd, [str(row) for row in range(len(pairs))])
    whole, folder = pairs.new_ND, str(write(tmp_path / "new", pairs.new_ND))
    for old, new in ((index, folder), (tmp_path / "old.npy", whole.tolist()), (gallery, whole), (str(gallery.path), whole)):
        found = xcompat.fit_map(old=old, new=new)
        np.testing.assert_allclose(found.to_space(pairs.new_ND[:3]), expected, atol=1e-4)
    assert found.model.compatible_with == [Fingerprint.from_string("clip")], "the gallery names its model"
    assert "fit_map" in dir(xcompat)


def test_a_notebook_shows_all_trials(pairs: PairedEmbeddings, labelled: FittedMap) -> None:
    shown = labelled._repr_html_()
    assert labelled.choice is not None
    assert shown.count("<tr>") == shown.count("</tr>") > len(labelled.choice.trials_to_show())
    chosen = labelled.choice.chosen.candidate.kind.replace("learned ", "")
    assert f"{chosen} (chosen)" in unescape(shown) and unescape(shown).endswith(f"{labelled!r}</p>")
    report, few = labelled.report, fit_map(pairs.old_Nd[:30], pairs.new_ND[:30])
    assert report._repr_html_().count("<tr>") == shown.count("<tr>") and "old queries" in repr(report)
    assert max(map(len, repr(report).splitlines())) <= 100 and json.loads(json.dumps(report))["verdict"] == labelled.is_safe
    assert "<table>" not in few._repr_html_() and "too few items" in repr(few.report)


def test_texts_become_queries_of_the_old_gallery(folder_of: dict[str, str], old_folder: str) -> None:
    new, old = load_embedder(folder_of["clip"]), load_embedder(old_folder)
    texts = [f"{colour} {thing}" for colour in ("red", "green", "blue", "old") for thing in ("shoe", "dog", "tree", "cup", "car")]
    sides = [model.embed(model.processor.texts(texts * 3)) for model in (old, new)]
    found = fit_map(*sides, old_model=old_folder, new_model=folder_of["clip"])
    share = found.model.config.old_share
    assert share == 0.5, "without labels, and with the old model at hand"
    mapped = torch.from_numpy(found.to_space(sides[1][:2]))
    expected = slerp(mapped, sides[0][:2], share)
    np.testing.assert_allclose(found.encode_query(texts[:2]), expected, atol=1e-5)
    np.testing.assert_allclose(found.encode_query(texts[0]), expected[0], atol=1e-5)


def test_bad_inputs_are_one_line(pairs: PairedEmbeddings, plain: FittedMap) -> None:
    old, new = pairs.old_Nd, pairs.new_ND
    for sides, said in (
        ((old[1:], new), "found 719 old, 720 new"),
        ((old, new, [1]), "found 720 old, 720 new, 1 labels"),
        ((0 * old, new), "in every row, the old or the new embedding is zero or not finite"),
        (("old.npy", new), "old.npy does not exist"),
        ((faiss.IndexFlatIP(4), new), "IndexFlatIP holds no vectors"),
    ):
        refuses(said, fit_map, *sides)
    refuses("fitted on embeddings only", plain.encode_query, "a dog")


def test_few_items_are_a_guess(pairs: PairedEmbeddings, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = pairs.take(np.arange(30))
    found = fit_map(few.old_Nd, few.new_ND)
    assert not found.is_safe and found.report == {} and "a guess" in repr(found)
    found.save(tmp_path / "model")
    assert "the saved map is not surely at or above old queries" in caplog.text
