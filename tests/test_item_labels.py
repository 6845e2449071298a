"""Classes of items for ``xcompat map --labels``: text files, tables, and labelled images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_photos
from test_index_gallery import write_index

from xcompat import XcompatError, fit_map
from xcompat.mapping.from_texts import pairs_of_texts
from xcompat.mapping.item_labels import read_item_labels
from xcompat.mapping.paired import PairedEmbeddings, load_paired
from xcompat.mapping.request import TextInput
from xcompat.stores.places import Reading

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
    np.save(tmp_path / "new.npy", np.eye(COUNT, dtype=np.float32))
    (tmp_path / "new").mkdir()
    np.save(tmp_path / "new" / "image_embeds.npy", np.eye(COUNT, dtype=np.float32))
    (tmp_path / "new" / "image_ids.txt").write_text("".join(f"{name}\n" for name in NAMES))
    joined = load_paired(index, tmp_path / "new", reading=reading)
    assert isinstance(joined, PairedEmbeddings) and joined.labels_N is not None
    assert joined.labels_N.tolist() == KNOWN[::-1], "pairs are in the order of the index"


def test_items_without_a_class_are_not_used(index: Path, folder_of: dict[str, str], tmp_path: Path) -> None:
    file = written(tmp_path, "csv")
    file.write_text(
        "".join(line for line in file.read_text().splitlines(keepends=True) if "03.png" not in line).replace("cup", "")
    )
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\n", "classes.txt has 2 classes, but .*old.faiss has 12 items"),
        ("id,label\n00.png,hat\n00.png,cup\n", "has two classes of '00.png': 'hat' and 'cup'; keep one of them"),
        ("id,label\nx,hat\n", r"has no class for any item of .*photos \('x', '00.png'\); use the same ids"),
        ("id,kind\nx,hat\n", "has no column named label or class"),
    ],
)
def test_unfit_classes_are_refused_before_a_model_is_loaded(
    index: Path, tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcompat.mapping.from_texts.load_embedder", lambda *_: pytest.fail("a model is loaded"))
    file = tmp_path / ("classes.csv" if "," in text else "classes.txt")
    file.write_text(text)
    reading, images = Reading(tmp_path / "ids.txt", labels=file), TextInput(tmp_path / "photos", are_images=True)
    with pytest.raises(XcompatError, match=message):
        pairs_of_texts(index, Path("new"), images, tmp_path / "cache", reading=reading)


def test_map_takes_classes_of_an_index(
    index: Path, folder_of: dict[str, str], tmp_path: Path, run_xcompat: Callable[..., tuple[int, str, str]]
) -> None:
    named = ("map", "--old", index, "--ids", tmp_path / "ids.txt", "--new", folder_of["clip"], "--images", tmp_path / "photos")
    asked = (*named, "--out", tmp_path / "map", "--allow-worse")
    code, _, err = run_xcompat(*asked, "--labels", tmp_path / "nowhere.csv")
    assert code == 2 and "nowhere.csv does not exist" in err
    code, _, err = run_xcompat(*asked, "--searched-classes", "known")
    assert code == 2 and "--searched-classes known needs classes; add them with --labels" in err
    assert not (tmp_path / "map.cache").exists(), "it is refused before images are embedded"
    code, _, err = run_xcompat(*asked, "--labels", written(tmp_path, "csv"), "--searched-classes", "known")
    assert code == 0 and '"classes": 3' in (tmp_path / "map" / "report.json").read_text(), err
    (tmp_path / "classes.csv").write_text((tmp_path / "classes.csv").read_text().replace("cup", "mug"))
    code, _, err = run_xcompat(*asked, "--labels", tmp_path / "classes.csv", "--searched-classes", "known")
    assert code == 2 and "a map made with a different --labels" in err


def test_fit_map_takes_a_path_of_classes(index: Path, tmp_path: Path) -> None:
    new = write_index(tmp_path / "new.faiss", np.eye(COUNT, dtype=np.float32))
    fitted = fit_map(index, new, labels=written(tmp_path, "lines"))
    assert fitted.choice is None, "12 items are too few to choose"
    assert read_item_labels(tmp_path / "classes.txt").classes == CLASSES[::-1]
