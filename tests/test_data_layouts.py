"""Data sets are read as they are distributed, and what lies otherwise is said in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from data_layouts import make_all
from data_layouts.labelled import CATEGORIES, SYNSETS, records

from xcompat.core.errors import XcompatError
from xcompat.data import LabelledSource, PairSource, Subset, load_classes, load_labelled, load_pairs, open_image, select_subset
from xcompat.data.content_type import contains_images


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_all(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def labelled(path: Path | str, **fields: Any) -> Any:
    return load_labelled(LabelledSource(path=str(path), **fields))


def test_the_first_classes_of_cifar_100_are_those_of_the_lowest_label(made: Path) -> None:
    train = labelled(made / "cifar-100-binary" / "train.bin")
    assert train.classes == [f"fine {number}" for number in range(100)]
    assert train.labels().tolist() == list(range(99, -1, -1))
    assert train.dataset["id"][:2] == ["train.bin/0", "train.bin/1"], "no id of the test part"
    half = select_subset(train, Subset(scenario="extended-class", fraction=0.5, side="old"))
    assert sorted(half.labels().tolist()) == list(range(50))
    pixels_HWC = np.asarray(open_image(train.dataset[7]["image"]))
    assert pixels_HWC.shape == (32, 32, 3) and (pixels_HWC == 7).all()


def test_planes_become_colours(tmp_path: Path) -> None:
    pixels_CHW = np.random.default_rng(0).integers(0, 255, (3, 32, 32), dtype=np.uint8)
    (tmp_path / "test.bin").write_bytes(bytes([3, 19]) + pixels_CHW.tobytes())
    (row,) = load_pairs(PairSource(path=str(tmp_path), captions=False))
    assert np.array_equal(np.asarray(open_image(row["image"])), pixels_CHW.transpose(1, 2, 0)), "a lossless image"


def test_superclasses_and_cifar_10(made: Path, tmp_path: Path) -> None:
    coarse = labelled(made / "cifar-100-binary" / "test.bin", label_column="coarse")
    assert coarse.classes == [f"coarse {number}" for number in range(20)]
    assert coarse.labels().tolist() == [number // 5 for number in range(100)] * 2
    ten = labelled(made / "cifar-10-batches-bin" / "data_batch_*.bin")
    assert ten.classes == [f"class {number}" for number in range(10)] and ten.labels().tolist() == list(range(10))
    shutil.copy(made / "cifar-10-batches-bin" / "test_batch.bin", tmp_path)
    assert labelled(tmp_path / "test_batch.bin").classes == [str(number) for number in range(10)], "no names beside it"


def test_what_is_no_part_of_cifar_is_said(made: Path, tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match=r"contains test\.bin, train\.bin; give the paths to read, e.g."):
        labelled(made / "cifar-100-binary")
    with pytest.raises(XcompatError, match="CIFAR-100 has no column 'fin'; did you mean 'fine'"):
        labelled(made / "cifar-100-binary" / "test.bin", label_column="fin")
    file = tmp_path / "train.bin"
    whole = records(np.array([[0, 0], [0, 1]]))
    file.write_bytes(whole[:-5])
    with pytest.raises(XcompatError, match=r"train\.bin is not a multiple of 3,074 bytes \(CIFAR-100\) or 3,073"):
        labelled(file)
    file.write_bytes(records(np.array([[0, 0], [0, 100]])))
    with pytest.raises(XcompatError, match="record 1 has the fine label 100, but CIFAR-100 has 100 classes"):
        labelled(file)
    file.write_bytes(whole)
    (tmp_path / "fine_label_names.txt").write_text("apple\nfish\n")
    with pytest.raises(XcompatError, match=r"fine_label_names\.txt names 2 classes, but fine labels of CIFAR-100 have 100"):
        labelled(file)
    with pytest.raises(XcompatError, match="CIFAR has no captions"):
        load_pairs(str(file))


@pytest.mark.parametrize("path", ["", "train"])
def test_the_python_version_of_cifar_is_not_opened(tmp_path: Path, path: str) -> None:
    for name in ("meta", "train", "test"):
        (tmp_path / name).write_bytes(b"\x80\x02no pickle is read")
    with pytest.raises(XcompatError, match=r"Python version of CIFAR: pickles .*cifar-100-binary\.tar\.gz"):
        labelled(tmp_path / path)


def test_imagenet_in_folders_and_as_a_list(made: Path) -> None:
    train = labelled(made / "imagenet" / "train")
    assert train.classes == list(SYNSETS) and len(train) == 12
    folders, listed = labelled(made / "imagenet" / "val"), labelled(made / "imagenet" / "flat" / "val.txt")
    assert folders.labels().tolist() == listed.labels().tolist() == np.repeat(np.arange(4), 3).tolist()
    assert listed.classes == ["0", "1", "2", "3"]
    named = labelled(made / "imagenet" / "flat" / "val.txt", classes=train.classes)
    assert named.class_names() == folders.class_names()


def test_places_has_a_slash_before_its_paths_and_labels_behind_its_names(made: Path) -> None:
    folder = made / "places365"
    assert load_classes(folder / "categories_places365.txt") == list(CATEGORIES)
    train = labelled(folder / "places365_train_standard.txt", classes=str(folder / "categories_places365.txt"))
    assert train.labels().tolist() == np.repeat(np.arange(4), 3).tolist(), "not the folders, of which two have one name"
    assert train.dataset[0]["id"] == "a/airfield/00000001.jpg"
    assert train.dataset[0]["image"]["path"] == str((folder / "data_256/a/airfield/00000001.jpg").resolve())
    assert len(labelled(folder / "places365_val.txt").classes) == 4
    assert contains_images(str(folder / "places365_val.txt")), "a gallery takes a list too"


def test_faces_in_folders_and_as_lists_without_classes(made: Path) -> None:
    for part in ("train", "test"):
        folders, listed = labelled(made / "vggface2" / part), labelled(made / "vggface2" / f"{part}_list.txt")
        assert folders.class_names() == listed.class_names() and folders.classes == listed.classes
        assert folders.dataset["id"][:] == listed.dataset["id"][:]
    assert select_subset(listed, Subset(limit_per_class=2)).labels().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_numbers_behind_names_are_labels_only_if_all_are(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    for text, names in (
        ("b 1\na 0\n", ["a", "b"]),
        ("route 0\nroute 1\n", ["route 0", "route 1"]),
        ("area 51\nmars\n", ["area 51", "mars"]),
        ("a 1\nb 2\n", ["a 1", "b 2"]),
    ):
        file.write_text(text)
        assert load_classes(file) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat/1.jpg 0\ncat/2.jpg 0\n", r"list\.txt lists 2 images, and 2 of them do not exist, first .cat/1"),
        ("a.jpg 0\nwhat is this\n", r"list\.txt line 2 is not an image path with a class \('what is this'\)"),
        ("a.jpg 0\na.jpg 1\n", "two samples have the id 'a.jpg'"),
        ("a.jpg\n", "a.jpg has no class; write the class after the path"),
        ("a.jpg 4\n", "has label index 4, but the 2 classes go from 0 to 1"),
        ("a.jpg 0\n", "class 'dog' has no image; remove it from the class list"),
    ],
)
def test_a_list_that_does_not_fit_is_said(tmp_path: Path, made: Path, text: str, message: str) -> None:
    (tmp_path / "a.jpg").write_bytes((made / "coco/val2014/COCO_val2014_000000000000.jpg").read_bytes())
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(XcompatError, match=message):
        labelled(tmp_path / "list.txt", classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("path", "each", "first"),
    [
        ("coco/annotations/captions_val2014.json", 5, "thing 0 0"),
        ("nocaps/nocaps_val_4500_captions.json", 10, "thing 0 0"),
        ("flickr30k/results_20130124.token", 5, "thing 0 0 ."),
    ],
)
def test_captions_as_they_are_distributed(made: Path, path: str, each: int, first: str) -> None:
    loaded = load_pairs(str(made / path))
    assert isinstance(loaded, datasets.Dataset) and len(loaded) == 8
    assert [len(captions) for captions in loaded["caption"][:]] == [each] * 8 and loaded[0]["caption"][0] == first
    assert open_image(loaded[0]["image"]).size == (8, 8)
    assert len(set(loaded["id"][:])) == 8


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"images": []}, "'annotations' is missing"),
        ([1, 2], "not a COCO captions file with images and annotations"),
        ({"images": [], "annotations": [{"image_id": 4, "caption": "a"}]}, "4 is missing among the images or their keys"),
        ({"images": [{"id": 4, "file_name": "a.jpg"}], "annotations": []}, "contains no captions"),
        ({"images": [{"id": 4, "file_name": "a.jpg"}], "annotations": [{"image_id": 4, "caption": "a"}]}, "first 'a.jpg'"),
    ],
)
def test_json_that_holds_no_captions_is_said(tmp_path: Path, held: object, message: str) -> None:
    (tmp_path / "captions.json").write_text(json.dumps(held))
    with pytest.raises(XcompatError, match=message):
        load_pairs(str(tmp_path / "captions.json"))
