"""Images with classes: CIFAR's binary batches, ImageNet's folders and its kin, Places' lists, VGGFace2's folders and lists."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from data_layouts.images import draw, write

SYNSETS = ("n01440764", "n01443537", "n01484850", "n01491361")
CATEGORIES = ("/a/airfield", "/a/apartment_building/outdoor", "/b/bar", "/b/building/outdoor")
"""Two of them end in one folder's name."""


def records(labels_NL: np.ndarray) -> bytes:
    """Return CIFAR's records: the labels of each image, then its red, green and blue planes, here all of one value."""
    pixels_NB = np.repeat(np.arange(len(labels_NL), dtype=np.uint8)[:, None], 3 * 32 * 32, axis=1)
    return np.hstack([labels_NL.astype(np.uint8), pixels_NB]).tobytes()


def make_cifar100(folder: Path) -> None:
    """Make ``cifar-100-binary``: an image of each fine class to train on, in reverse, and two to test on."""
    fine_N = np.arange(100)
    write(folder / "fine_label_names.txt", [f"fine {number}" for number in fine_N])
    write(folder / "coarse_label_names.txt", [f"coarse {number}" for number in range(20)])
    for part, labels_N in (("train", fine_N[::-1]), ("test", np.tile(fine_N, 2))):
        (folder / f"{part}.bin").write_bytes(records(np.stack([labels_N // 5, labels_N], axis=1)))


def make_cifar10(folder: Path) -> None:
    write(folder / "batches.meta.txt", [*(f"class {number}" for number in range(10)), "", ""])
    for batch in range(5):
        (folder / f"data_batch_{batch + 1}.bin").write_bytes(records(np.array([[2 * batch], [2 * batch + 1]])))
    (folder / "test_batch.bin").write_bytes(records(np.arange(10)[:, None]))


def make_imagenet(folder: Path) -> None:
    """Make ImageNet: ``train`` and ``val`` in class folders, ``flat/val`` with its list, captions, and BT²'s order of classes."""
    listed = []
    for label, synset in enumerate(SYNSETS):
        for number in range(3):
            draw(folder / "train" / synset / f"{synset}_{number}.JPEG")
            name = f"ILSVRC2012_val_{3 * label + number + 1:08d}.JPEG"
            draw(folder / "val" / synset / name)
            draw(folder / "flat" / "val" / name)
            listed.append(f"{name} {label}")
    write(folder / "flat" / "val.txt", listed)
    write(folder / "bt2_classes.txt", [SYNSETS[row] for row in (2, 0, 3, 1)])
    write(folder / "class_names.txt", ["tench", "goldfish", "great white shark", "tiger shark"])
    for part in ("train", "val"):
        files = sorted((folder / part).rglob("*.JPEG"))
        rows = [{"id": file.relative_to(folder / part).as_posix(), "caption": f"an image of {file.stem}"} for file in files]
        write(folder / f"captions_{part}.jsonl", [json.dumps(row) for row in rows])


def make_imagenet_r(folder: Path) -> None:
    for synset in SYNSETS[:2]:
        for number, (what, kind) in enumerate((("art", "0"), ("cartoon", "1"))):
            draw(folder / synset / f"{what}_{kind}{number}.jpg")
    write(folder / "README.txt", ["n01440764 tench", "n01443537 goldfish"])
    write(folder / "class_names.txt", ["tench", "goldfish"])


def make_imagenet_sketch(folder: Path) -> None:
    for synset in SYNSETS:
        for number in range(2):
            draw(folder / "sketch" / synset / f"sketch_{number}.JPEG")
    write(folder / "class_names.txt", ["tench", "goldfish", "great white shark", "tiger shark"])


def make_places365(folder: Path) -> None:
    """Make Places-365's small images: lists with a slash before each training path, categories with their labels."""
    write(folder / "categories_places365.txt", [f"{name} {label}" for label, name in enumerate(CATEGORIES)])
    train, val = [], []
    for label, category in enumerate(CATEGORIES):
        for number in range(3):
            path = f"{category}/{number + 1:08d}.jpg"
            draw(folder / "data_256" / path.lstrip("/"))
            train.append(f"{path} {label}")
            name = f"Places365_val_{3 * label + number + 1:08d}.jpg"
            draw(folder / "val_256" / name)
            val.append(f"{name} {label}")
    write(folder / "places365_train_standard.txt", train)
    write(folder / "places365_val.txt", val)


def make_vggface2(folder: Path) -> None:
    """Make VGGFace2: a folder for each identity, those of the test part unlike those of the training part, and the lists."""
    for part, first in (("train", 2), ("test", 1)):
        listed = []
        for identity in range(first, 40, 10):
            for number in range(3):
                path = f"n{identity:06d}/{number + 1:04d}_01.jpg"
                draw(folder / part / path)
                listed.append(path)
        write(folder / f"{part}_list.txt", listed)
