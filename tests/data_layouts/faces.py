"""Market-1501, IJB-C and MS1M as they lie on disk, of a few generated images each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 16


def make_market1501(folder: Path) -> Path:
    """Write people seen by two cameras: four to train on, three others to search for, junk (-1) and nobody (0000)."""
    for person in range(1, 5):
        for camera in (1, 2):
            for frame in (1, 2):
                _write(folder / "bounding_box_train" / f"{person:04}_c{camera}s1_{frame:06}_01.jpg", person)
    for person in range(11, 14):
        for camera in (1, 2):
            _write(folder / "query" / f"{person:04}_c{camera}s1_000001_00.jpg", person)
            for frame in (2, 3):
                _write(folder / "bounding_box_test" / f"{person:04}_c{camera}s1_{frame:06}_01.jpg", person)
    _write(folder / "bounding_box_test" / "-1_c1s1_000007_01.jpg", 40)
    for frame in (8, 9):
        _write(folder / "bounding_box_test" / f"0000_c2s1_{frame:06}_01.jpg", 41 + frame)
    return folder


def make_ms1m(folder: Path) -> Path:
    for person in range(6):
        for number in range(6):
            _write(folder / f"{person:06}" / f"{number}.jpg", person)
    return folder


def make_ijbc(folder: Path) -> Path:
    """Write six subjects with a template for the gallery and two to search with: two images, and a video of two frames."""
    names, media, pairs, gallery, probes = [], [], [], [], []
    for subject in range(6):
        for which in range(3):
            template, medium = 3 * subject + which, 100 * (3 * subject + which)
            (gallery if which == 0 else probes).append((template, subject))
            for number in range(4):
                name = f"{len(names) + 1}.jpg"
                _write(folder / "aligned" / name, subject)
                names.append(name)
                media.append(f"{name} {template} {medium + min(number, 2)}")  # the last two are frames of one video
    for template, subject in gallery:
        pairs += [f"{template} {other} {int(subject == theirs)}" for other, theirs in probes]
    meta = folder / "meta"
    meta.mkdir()
    (meta / "ijbc_face_tid_mid.txt").write_text("\n".join(media) + "\n")
    (meta / "ijbc_template_pair_label.txt").write_text("\n".join(pairs) + "\n")
    for name, rows in {"gallery_G1": gallery[:3], "gallery_G2": gallery[3:], "probe_mixed": probes}.items():
        lines = ["TEMPLATE_ID,SUBJECT_ID", *(f"{template},{subject}" for template, subject in rows)]
        (meta / f"ijbc_1N_{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def _write(file: Path, subject: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(sum(file.name.encode()) + 1000 * subject)
    colour = np.random.default_rng(subject).integers(40, 200, 3)
    pixels = colour + generator.integers(-30, 30, (SIDE, SIDE, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
