"""Small images, each unlike every other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 8


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
