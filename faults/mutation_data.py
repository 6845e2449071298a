"""Specimens of what people bring: images, captions, shards, tables, texts, recipes, arrays, lists of classes."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from mutation_subjects import Answer, Subject, command, complaints
from PIL import Image

IMAGES = 6


def image(number: int, mode: str = "RGB", size: int = 24) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
    pixels[: size // 2] //= 8
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def listening(ask: Callable[[], Any]) -> Answer:
    """Ask, and hear whether something is said to be amiss."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        value = ask()
    return Answer(value, complaints(out.getvalue()))


def images(whole: Path) -> list[Subject]:
    folder = whole / "images"
    folder.mkdir()
    forms = {"png": "RGB", "jpg": "RGB", "webp": "RGB", "gif": "P", "bmp": "RGB", "tif": "RGB"}
    for suffix, mode in forms.items():
        image(1, mode).save(folder / f"plain.{suffix}")
    image(2, "RGBA").save(folder / "clear.png")
    image(3, "P").save(folder / "palette.png")
    image(4, "CMYK").save(folder / "print.jpg")
    image(5).save(folder / "progressive.jpg", progressive=True)
    Image.fromarray(np.arange(576, dtype=np.uint16).reshape(24, 24) * 100).save(folder / "deep.png")
    image(6).save(folder / "packed.tif", compression="tiff_lzw")
    frames = [image(number, "P") for number in range(3)]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    return [
        Subject(
            f"image {path.name}",
            folder,
            (path.name,),
            lambda folder, name=path.name: look(folder / name),
            has_checksum=False,
            weight=0.3,
        )
        for path in sorted(folder.iterdir())
    ]


def look(path: Path) -> Answer:
    from xcompat.data.images import open_image

    return Answer(hashlib.sha256(open_image(str(path)).tobytes()).hexdigest())


def pairs(whole: Path) -> list[Subject]:
    rows = [{"image": f"{number}.png", "caption": f"thing {number} of many"} for number in range(IMAGES)]
    separated = {"csv": ",", "tsv": "\t"}
    tables = {
        suffix: "\n".join([mark.join(rows[0]), *(mark.join(row.values()) for row in rows), ""])
        for suffix, mark in separated.items()
    }
    tables["jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
    made = []
    for suffix, text in tables.items():
        for name in (f"captions.{suffix}", f"captions.{suffix}.gz"):
            folder = whole / name
            folder.mkdir()
            for number in range(IMAGES):
                image(number).save(folder / f"{number}.png")
            (folder / name).write_bytes(gzip.compress(text.encode(), mtime=0) if name.endswith("gz") else text.encode())
            made.append(Subject(name, folder, (name,), load, has_checksum=False, weight=0.5))
    made += [shards(whole, "shard.tar"), shards(whole, "shard.tar.gz"), parquet(whole), saved(whole)]
    return made


def load(folder: Path) -> Answer:
    """Load images with captions, and decode them."""
    from xcompat.data import BadSamples, load_pairs
    from xcompat.data.pairs import iterate_images

    def ask() -> Any:
        dataset = load_pairs(str(folder))
        bad = BadSamples(total=len(dataset))
        sizes = [
            rows.tolist()
            for rows, _ in iterate_images(dataset, 4, bad=bad, prepare=lambda images: [each.size for each in images])
        ]
        return dataset["id"][:], dataset["caption"][:], sizes

    return listening(ask)


def shards(whole: Path, name: str) -> Subject:
    folder = whole / f"{name} of shards"
    folder.mkdir()
    with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as tar:
        for number in range(IMAGES):
            about = json.dumps({"title": f"thing {number}"}).encode()
            for suffix, content in (("png", encoded(image(number))), ("txt", f"thing {number}".encode()), ("json", about)):
                member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return Subject(name, folder, (name,), load, has_checksum=False)


def parquet(whole: Path) -> Subject:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = whole / "parquet"
    folder.mkdir()
    images = [{"bytes": encoded(image(number)), "path": f"{number}.png"} for number in range(IMAGES)]
    table = pa.table(
        {"image": images, "caption": [f"thing {number}" for number in range(IMAGES)], "id": [str(n) for n in range(IMAGES)]}
    )
    pq.write_table(table, folder / "pairs.parquet")
    return Subject("pairs.parquet", folder, ("*.parquet",), load, has_checksum=False)


def saved(whole: Path) -> Subject:
    import datasets

    folder = whole / "saved"
    images = [{"bytes": encoded(image(number)), "path": f"{number}.png"} for number in range(IMAGES)]
    columns = {
        "image": images,
        "caption": [f"thing {number}" for number in range(IMAGES)],
        "id": [str(n) for n in range(IMAGES)],
    }
    dataset = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image(decode=False))
    dataset.save_to_disk(folder)
    return Subject("saved data set", folder, ("*",), load, has_checksum=False, weight=0.5)


def texts(whole: Path) -> list[Subject]:
    folder = whole / "texts"
    folder.mkdir()
    lines = [f"sentence {row} about {'a dog' if row % 3 else 'cats'}" for row in range(20)]
    plain, objects = "\n".join(lines) + "\n", "".join(json.dumps({"text": line}) + "\n" for line in lines)
    for name, text in (("texts.txt", plain), ("texts.jsonl", objects)):
        (folder / name).write_text(text)
        (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    words = [f"word {row}" for row in range(12)]
    (folder / "classes.txt").write_text("\n".join(words) + "\n")
    (folder / "classes.tsv").write_text("\n".join(["index\tname", *(f"{row}\t{word}" for row, word in enumerate(words))]) + "\n")
    (folder / "classes.csv").write_text(
        "\n".join(["index,alphabet,character", *(f"{row},a{row // 4},c{row % 4}" for row in range(12))]) + "\n"
    )
    made = []
    for path in sorted(folder.iterdir()):
        ask = classes if path.name.startswith("classes") else corpus
        made.append(
            Subject(
                path.name,
                folder,
                (path.name,),
                lambda folder, ask=ask, name=path.name: ask(folder / name),
                has_checksum=False,
                weight=0.4,
            )
        )
    return made


def classes(path: Path) -> Answer:
    from xcompat.data.classes import load_classes

    return Answer(load_classes(path))


def corpus(path: Path) -> Answer:
    from xcompat.data import CorpusSource, load_texts

    return listening(lambda: load_texts([CorpusSource(path=str(path))])["text"][:])


def recipes(whole: Path) -> list[Subject]:
    folder = whole / "recipes"
    folder.mkdir()
    raw = {
        "output_dir": "run",
        "cache_dir": "cache",
        "old": "old/model",
        "new": {"name": "new/model", "revision": "main"},
        "data": {"pairs": {"path": "pairs", "max_bad_share": 0.1}, "texts": [{"path": "texts.txt"}], "test": {"path": "test"}},
        "training": {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "bf16": False},
        "evaluation": {"resamples": 100, "ks": [1, 5], "examples": 1},
        "seeds": [0, 1],
        "stages": [
            {"name": "phi", "method": "projection"},
            {
                "name": "pair",
                "method": "xbt",
                "projection": "stage:phi",
                "options": {"adapters": {"lora": {"rank": 2}, "prompts": 2}},
            },
        ],
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    return [Subject("recipe", folder, ("recipe.yaml",), recipe, has_checksum=False)]


def recipe(folder: Path) -> Answer:
    from xcompat.training.recipe import load_recipe

    return Answer(load_recipe(folder / "recipe.yaml", []).model_dump(mode="json"))


def arrays(whole: Path) -> list[Subject]:
    folder = whole / "arrays"
    for name, dim in (("old", 8), ("new", 8), ("own", 12)):
        (folder / name).mkdir(parents=True)
        for kind in ("image", "text"):
            rows = np.random.default_rng(dim + len(name)).normal(size=(20, dim)).astype(np.float32)
            np.save(folder / name / f"{kind}_embeds.npy", rows + 0.1 * (kind == "text"))
            (folder / name / f"{kind}_ids.txt").write_text("".join(f"item {row}\n" for row in range(20)))
    stored = whole / "stored"
    stored.mkdir()
    for path in (folder / "old").glob("image_*"):
        (stored / path.name).write_bytes(path.read_bytes())
    return [
        Subject("evaluate --old --new", folder, ("*/*",), evaluate, has_checksum=False, weight=0.3),
        Subject("old model of which arrays are left", stored, ("*",), stored_model, has_checksum=False, weight=0.5),
    ]


def evaluate(folder: Path) -> Answer:
    from xcompat.report import load_report

    new_own = ("--new-own", folder / "own")
    command("evaluate", "--old", folder / "old", "--new", folder / "new", *new_own, "--output", folder / "report")
    return Answer([case.metrics for case in load_report(folder / "report").cases])


def stored_model(folder: Path) -> Answer:
    from xcompat.models.stored import StoredModel

    model = StoredModel(folder)
    return Answer((model.lookup([f"item {row}" for row in (3, 7)])[:].tolist(), model.fingerprint.digest))
