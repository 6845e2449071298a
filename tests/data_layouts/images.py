"""Small images, each unlike every other, and images with captions: COCO, nocaps and Flickr30k as they are distributed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, IMAGES = 8, 8


def draw(file: Path) -> None:
    """Write an image whose pixels depend on its path below the data set alone."""
    seed = sum(map(ord, file.name + file.parent.name))
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, "JPEG")


def write(file: Path, lines: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_classes(folder: Path, counts: dict[str, int]) -> None:
    """Write images of three classes, which a small model can tell apart: so many of each class for each part."""
    generator = np.random.default_rng(0)
    for side, count in counts.items():
        for number in range(3):
            (folder / side / f"class {number}").mkdir(parents=True)
            for image in range(count):
                pixels = generator.integers(0, 60, (16, 16, 3)) + np.array([number * 90, 180 - number * 90, 60])
                Image.fromarray(pixels.astype(np.uint8)).save(folder / side / f"class {number}" / f"{side}-{image}.png")


def _coco_json(names: list[str], captions: int) -> str:
    """Return what COCO's API reads; annotations are not in the order of the images."""
    images = [{"id": 7 * row + 3, "file_name": name, "height": 8, "width": 8} for row, name in enumerate(names)]
    annotations = [
        {"id": 100 * turn + row, "image_id": image["id"], "caption": f"thing {row} {turn}\n"}
        for turn in range(captions)
        for row, image in enumerate(images)
    ]
    return json.dumps({"info": {"year": 2014}, "licenses": [], "images": images, "annotations": annotations})


def make_coco(folder: Path) -> None:
    """Make COCO's validation part of 2014: ``annotations`` beside ``val2014``, five captions of an image."""
    names = [f"COCO_val2014_{row:012d}.jpg" for row in range(IMAGES)]
    for name in names:
        draw(folder / "val2014" / name)
    (folder / "annotations").mkdir()
    (folder / "annotations" / "captions_val2014.json").write_text(_coco_json(names, 5), encoding="utf-8")


def make_nocaps(folder: Path) -> None:
    """Make nocaps' validation part: its captions beside the folder of its images, ten captions of an image."""
    names = [f"{row:016x}.jpg" for row in range(IMAGES)]
    for name in names:
        draw(folder / "val" / name)
    (folder / "nocaps_val_4500_captions.json").write_text(_coco_json(names, 10), encoding="utf-8")


def make_flickr30k(folder: Path) -> None:
    """Make Flickr30k: its token file beside the folder of its images, five captions of an image."""
    names = [f"{1000 + row}.jpg" for row in range(IMAGES)]
    for name in names:
        draw(folder / "flickr30k-images" / name)
    lines = [f"{name}#{number}\tthing {row} {number} ." for row, name in enumerate(names) for number in range(5)]
    write(folder / "results_20130124.token", lines)
