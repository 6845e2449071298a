"""Every command as it is typed, on data so small that it takes a moment, each from the folder that it is typed in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import faiss
import numpy as np
import yaml
from matplotlib.figure import Figure
from PIL import Image
from safetensors.numpy import load_file
from scenes import (
    ITEMS,
    MORE,
    Scene,
    State,
    cache_content,
    d,
    encoder,
    in_gallery,
    nothing,
    query_map,
    unit,
    write_images,
    write_once_more,
)
from syscalls import run_watched

from xcompat import XbtModel, cli
from xcompat.methods import FctModel
from xcompat.retrieval import Gallery

RECIPE = {
    "output_dir": "run",
    "cache_dir": "cache",
    "old": "encoder 1",
    "new": "encoder 2",
    "data": {"pairs": {"path": "pairs"}, "texts": [{"path": "texts.txt"}], "test": {"path": "pairs"}},
    "training": {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_steps": 1, "logging_steps": 1},
    "evaluation": {"resamples": 100, "ks": [1], "examples": 1},
    "stages": [{"name": "phi", "method": "projection"}],
}
CACHES = 6
"""Of texts, images and captions, each by two encoders."""


def typed(*arguments: str) -> Callable[[Path], None]:
    """Return what types a command line in a folder; an exit code that is not 0 is raised.

    Images are blank: they are drawn in memory, which takes half the time of a report and opens no file of the folder.
    """

    def run(folder: Path) -> None:
        Figure.savefig = blank
        os.chdir(folder)
        os.environ["COLUMNS"] = "200"
        sys.argv = ["xcompat", *arguments]
        cli.main()

    return run


def blank(figure: Figure, file: IO[bytes], **_: object) -> None:
    """Write a white pixel in the place of a figure."""
    Image.new("L", (1, 1)).save(file, "PNG")


def make_world(folder: Path) -> Path:
    """Write what the commands are typed at: models, images, an index and a recipe."""
    world = folder / "world"
    world.mkdir(parents=True)
    old, _ = encoder(world, 1), encoder(world, 2)
    write_images(world / "photos", 4)
    write_images(world / "more", 6)
    for name in range(4):
        (world / "more" / f"{name}.png").unlink()
    FctModel.from_encoder(str(world / "encoder 2"), old=old.describe_old()).export(world / "fct")
    XbtModel.from_encoder(str(world / "encoder 2"), old=old.describe_old()).export(world / "xbt")
    query_map().save_pretrained(world / "map")
    index = faiss.IndexFlatIP(d)
    index.add(unit(ITEMS, d, 0))
    faiss.write_index(index, str(world / "old.faiss"))
    (world / "ids.txt").write_text("\n".join(f"item {row}" for row in range(ITEMS)) + "\n")
    write_images(world / "pairs", 8)
    captions = [f"{row}.png,thing number {row} of many" for row in range(8)]
    (world / "pairs" / "captions.csv").write_text("\n".join(["image,caption", *captions]) + "\n")
    (world / "texts.txt").write_text(
        "\n".join(f"sentence {row} about {'a dog' if row % 3 else 'cats'}" for row in range(12)) + "\n"
    )
    (world / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return world


def grown(folder: Path) -> None:
    """Add vectors to the index that a gallery has adopted."""
    index = faiss.read_index(str(folder / "old.faiss"))
    index.add(unit(MORE, d, 5))
    faiss.write_index(index, str(folder / "old.faiss"))
    (folder / "all ids.txt").write_text("\n".join(f"item {row}" for row in range(ITEMS + MORE)) + "\n")


def resynced(folder: Path) -> State:
    """Read a gallery whose index has grown: before that is taken over it shows nothing, after it all."""
    return in_gallery(folder) if len(Gallery.open(folder / "gallery")) > ITEMS else None


def unchanged(folder: Path) -> State:
    """Look at every file, for a command that changes none."""
    return {
        str(path.relative_to(folder)): np.frombuffer(path.read_bytes(), np.uint8).astype(np.float32)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def without_report(folder: Path) -> None:
    """Take away what a trained stage was judged by, so that it is judged anew."""
    shutil.rmtree(folder / "run" / "report")


def faiss_scores(folder: Path) -> State:
    if not (folder / "new.faiss").exists():
        return None
    scores_Qk, rows_Qk = faiss.read_index(str(folder / "new.faiss")).search(unit(5, 12, 3), ITEMS)
    return {str(query): scores[np.argsort(rows)] for query, (scores, rows) in enumerate(zip(scores_Qk, rows_Qk, strict=True))}


def trained(folder: Path, run: str = "run", ended_with: str = "run/report/report.json") -> State:
    """Read the weights of a finished run: they are the same, to the bit, whatever happened on the way."""
    if not (folder / ended_with).exists():
        return None
    weights = load_file(folder / run / "model" / "model.safetensors")
    return {name: values.astype(np.float32) for name, values in weights.items()}


def caches(folder: Path) -> State:
    """Read all embedding caches; None while one is not finished."""
    found = {path.name: cache_content(path) for path in (folder / "cache").glob("*") if not path.name.startswith(".")}
    if len(found) < CACHES or None in found.values():
        return None
    return {f"{name}/{row}": embed for name, rows in found.items() for row, embed in (rows or {}).items()}


def exported(name: str, folder: Path) -> State:
    """Say which files an export has written, and how large they are: an export is there whole or not at all."""
    if not (folder / name).exists():
        return None
    files = (path for path in (folder / name).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): np.array([path.stat().st_size], np.float32) for path in files}


def command_scenes(world: Path) -> list[Scene]:
    def after(*before: tuple[str, ...], also: Callable[[Path], object]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            shutil.copytree(world, folder)
            for arguments in before:
                outcome = run_watched(partial(typed(*arguments), folder), folder, None)
                assert outcome.code == 0, (
                    f"{' '.join(arguments)} ended with {outcome.code}: {outcome.output[-1500:]} {outcome.errors[-1500:]}"
                )
            also(folder)

        return prepare

    build = ("gallery", "build", "photos", "--model", "encoder 1", "--out", "gallery")
    add = ("gallery", "add", "gallery", "more", "--model", "encoder 1")
    adopt = ("gallery", "build", "--from-faiss", "old.faiss", "--ids", "ids.txt", "--model", "encoder 1", "--out", "gallery")
    train, embed = ("train", "recipe.yaml"), ("embed", "recipe.yaml")

    def scene(
        arguments: tuple[str, ...],
        read: Callable[[Path], State],
        *before: tuple[str, ...],
        also: Callable[[Path], object] = nothing,
        **options: Any,
    ) -> Scene:
        name = "xcompat " + " ".join(argument for argument in arguments[:4] if not argument.startswith("-"))
        writer = write_once_more if read is in_gallery else None
        return Scene(name, after(*before, also=also), typed(*arguments), read, after=writer, **options)

    compared = partial(trained, run="run/seed-0", ended_with="run/comparison/compare.json")
    upgrade = ("gallery", "upgrade", "gallery", "--model")
    return [
        scene(build, in_gallery, between=({},)),
        scene(adopt, in_gallery),
        scene(("gallery", "resync", "gallery", "--ids", "all ids.txt"), resynced, adopt, also=grown),
        scene(add, in_gallery, build),
        scene(("gallery", "search", "gallery", "a dog", "--model", "encoder 1"), unchanged, build, reads=True),
        scene(("gallery", "info", "gallery"), unchanged, build, reads=True),
        scene(("gallery", "verify", "gallery"), unchanged, build, add, reads=True),
        scene(("gallery", "doctor", "gallery", "--model", "encoder 1", "--images", "photos"), unchanged, build, reads=True),
        scene(("gallery", "rollback", "gallery", "1"), in_gallery, build, add),
        scene((*upgrade, "fct"), in_gallery, build),
        scene((*upgrade, "xbt", "--backfill", "photos"), in_gallery, build),
        scene(("gallery", "compact", "gallery"), in_gallery, build, add),
        scene(("export", "faiss", "old.faiss", "--model", "map", "--out", "new.faiss"), faiss_scores),
        scene(("export", "sentence-transformers", "xbt", "--out", "st"), partial(exported, "st"), slow=True),
        scene(("export", "onnx", "xbt", "--out", "onnx"), partial(exported, "onnx"), slow=True),
        scene(embed, caches, slow=True),
        scene(train, trained, slow=True),
        scene(("evaluate", "recipe.yaml"), trained, train, also=without_report, slow=True),
        scene(("report", "run"), trained, train, slow=True),
        scene(("compare", "recipe.yaml"), compared, slow=True),
    ]
