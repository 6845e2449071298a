"""Two processes fill a gallery as one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from numpy.typing import NDArray
from PIL import Image

from xcompat import FctModel, XbtModel
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery

IMAGES, BUDGET = 203, 70  # four batches of 64, the last of them short
TEXTS = 1300  # of which two passages each make six parts of 512, the last of them short
BAD = 70  # in the second process's first batch

# What the command line runs, all in one process, whose start takes longer than what it does.
COMMANDS = f"""
import sys
from pathlib import Path
from xcompat.cli import gallery

photos, more, texts, old, new, mapping, out = sys.argv[1:]
out, of_texts, passages = Path(out), Path(out + "-texts"), {{"words": 5, "overlap": 1}}
gallery.build(Path(photos), old, out)
gallery.build(Path(photos), old, out)
gallery.add(out, Path(more), new)
gallery.upgrade(out, new, backfill=Path(photos), budget={BUDGET})
gallery.search(str(out), "a dog", new)
gallery.upgrade(out, mapping)
gallery.build(Path(texts), old, of_texts, **passages)
gallery.upgrade(of_texts, new, backfill=Path(texts), budget={BUDGET}, **passages)
"""


def write_images(folder: Path, numbers: range) -> Path:
    """Write noise, one of it damaged."""
    folder.mkdir()
    for number in numbers:
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
        if number == BAD:
            (folder / f"{number:04d}.png").write_bytes(b"no image")
    return folder


def contents(gallery: Gallery) -> list[tuple[str, list[str], NDArray[np.float32]]]:
    """Return the version, the ids and the embeddings of each segment, in their order."""
    found = []
    for segment in gallery.segments:
        parts = [items for _, items in segment.blocks(1000)]
        ids = [name for items in parts for name in items.ids]
        found.append((segment.record.version, ids, np.concatenate([items.embeds[0] for items in parts])))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, folder_of: dict[str, str], old_folder: str) -> list[str]:
    """Return an old model, one whose queries search what it stored, and one that maps that."""
    folder, old = tmp_path_factory.mktemp("models"), load_embedder(old_folder).describe_old()
    torch.manual_seed(0)
    XbtModel.from_encoder(folder_of["clip"], old=old).export(folder / "xbt")
    FctModel.from_encoder(folder_of["clip"], old=old).export(folder / "fct")
    return [old_folder, str(folder / "xbt"), str(folder / "fct")]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, models: list[str]) -> dict[int, tuple[Gallery, str]]:
    """Run the commands on one process and on two: galleries, and what was printed."""
    folder = tmp_path_factory.mktemp("processes")
    photos, more = write_images(folder / "photos", range(IMAGES)), write_images(folder / "more", range(300, 305))
    (folder / "texts.txt").write_text(
        "".join(f"{'so very ' * (row % 3)}bear number {row} sleeps in winter\n" for row in range(TEXTS))
    )
    (folder / "commands.py").write_text(COMMANDS)
    made = {}
    for processes in (1, 2):
        out = folder / f"gallery-{processes}"
        arguments = (folder / "commands.py", photos, more, folder / "texts.txt", *models, out)
        ran = warm.run(*arguments, folder=folder, ranks=processes, COLUMNS="400")
        assert ran.returncode == 0, ran.stderr
        made[processes] = Gallery.open(out), ran.stdout.replace(out.name, "gallery")
    return made


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_galleries_are_the_same_item_by_item(kind: str, outcome: dict[int, tuple[Gallery, str]]) -> None:
    beside = "-texts" if kind == "texts" else ""
    one, two = (contents(Gallery.open(f"{outcome[processes][0].path}{beside}")) for processes in (1, 2))
    assert [(version, ids) for version, ids, _ in two] == [(version, ids) for version, ids, _ in one]
    for (_, _, mine), (_, _, theirs) in zip(two, one, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_no_item_is_lost_or_doubled_before_and_after_it_is_mapped(outcome: dict[int, tuple[Gallery, str]]) -> None:
    names = sorted(f"{number:04d}.png" for number in (*range(IMAGES), *range(300, 305)) if number != BAD)
    for mapped, _ in outcome.values():
        embedded = Gallery.open(mapped.path, mapped.generation - 1)
        assert sorted(embedded.counts().values()) == sorted([BUDGET + 5, IMAGES - 1 - BUDGET])
        assert len(mapped.versions) == 1 and mapped.damage() == []
        for gallery in (embedded, mapped):
            assert sorted(name for _, ids, _ in contents(gallery) for name in ids) == names


def test_the_first_process_says_what_one_would(outcome: dict[int, tuple[Gallery, str]]) -> None:
    one, two = (outcome[processes][1] for processes in (1, 2))
    assert f"{IMAGES - 1} images added" in one and "1 cannot be read" in one and f"{BUDGET} re-embedded" in one
    said = [[line for line in text.splitlines() if "✓" in line or ".png" in line] for text in (one, two)]
    assert said[0] == said[1]
