"""Pictures of 8 by 8 pixels, each unlike every other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 8


def draw(file: Path) -> None:
    """Write a picture whose pixels depend on its path below the data set alone."""
    seed = sum(map(ord, file.name + file.parent.name))
    pixels = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, "JPEG")


def write(file: Path, lines: list[str]) -> None:
    """Write a text file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
