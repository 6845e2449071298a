"""Specimens of what this project writes beside galleries: checkpoints, caches, reports, finished runs, and what a Hub answers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import yaml
from mutation_data import image, listening
from mutation_subjects import Answer, Subject, command

TEXTS = [f"{'word ' * (n % 4)}number {n}" for n in range(12)]


def checkpoints(whole: Path) -> list[Subject]:
    """Encoders and compatible models, each beside a gallery that it searches."""
    from xcompat import XbtModel
    from xcompat.encoders.standins import save_stand_in
    from xcompat.methods import ProcrustesModel
    from xcompat.models.embedder import load_embedder
    from xcompat.retrieval import Gallery

    old = save_stand_in(whole / "models" / "old", "clip", 8, seed=2)
    made = []
    for name in ("clip", "siglip", "open_clip", "vision-text-dual-encoder", "xbt", "procrustes"):
        subject = Subject(f"checkpoint {name}", whole / f"checkpoint {name}", ("model/*",), ask_checkpoint)
        if name == "xbt":
            XbtModel.from_encoder(
                save_stand_in(whole / "models" / "new", "clip", 16, seed=1), old=load_embedder(old).describe_old()
            ).export(subject.place / "model")
        elif name == "procrustes":
            new = load_embedder(str(whole / "models" / "new"))
            model = ProcrustesModel.from_encoder(str(whole / "models" / "new"), old=load_embedder(old).describe_old())
            model.fit([(rows(new), rows(load_embedder(old)))]).export(subject.place / "model")
        else:
            save_stand_in(subject.place / "model", name, 8, seed=3)
        stored_by = load_embedder(old if name in ("xbt", "procrustes") else str(subject.place / "model"))
        with Gallery.create(subject.place / "gallery", stored_by) as gallery:
            gallery.add(rows(stored_by), [f"item {row}" for row in range(len(TEXTS))])
            gallery.commit()
        subject.place.rename(subject.folder)
        made.append(subject)
    return made


def rows(embedder: Any) -> Any:
    return embedder.embed(embedder.processor.texts(TEXTS))


def ask_checkpoint(folder: Path) -> Answer:
    """Search with a text and an image, as one types it."""
    image(3).save(folder / "query.png")
    found = [
        command("gallery", "search", folder / "gallery", query, "--model", folder / "model")
        for query in ("word number 3", folder / "query.png")
    ]
    return Answer([each.value for each in found], sum((each.said for each in found), ()))


def caches(whole: Path) -> list[Subject]:
    from xcompat.embeddings.embed import embed_images, embed_texts
    from xcompat.models.embedder import load_embedder

    folder, other = whole / "cache", whole / "cache of another"
    for place, model in ((folder, "old"), (other, "new")):
        embedder = load_embedder(str(whole / "models" / model))
        embed_texts(embedder, TEXTS, place / "texts", "digest", shard_rows=5)
        embed_images(embedder, images_of(whole), place / "images", "digest", shard_rows=3)
    models = whole / "models" / "old"
    subject = Subject("embedding cache", folder, ("*/*",), lambda place: fill(place, models), foreign=other)
    unfinished = whole / "unfinished"
    embed_texts(load_embedder(str(models)), TEXTS, unfinished / "texts", "digest", shard_rows=5)
    (unfinished / "texts" / "cache.json").unlink()
    (unfinished / "texts" / "shard-00001.npy").unlink()
    return [subject, replace(subject, name="embedding cache that was cut off", folder=unfinished, foreign=None, weight=0.5)]


def images_of(whole: Path) -> Any:
    from xcompat.data import load_pairs

    return load_pairs(str(whole / "captions.csv"))


def fill(folder: Path, model: Path) -> Answer:
    """Fill caches, as training does before it reads them."""
    from xcompat.embeddings.embed import embed_images, embed_texts
    from xcompat.models.embedder import load_embedder

    def ask() -> Any:
        embedder = load_embedder(str(model))
        made = [embed_texts(embedder, TEXTS, folder / "texts", "digest", shard_rows=5)]
        if (folder / "images").exists():
            made.append(embed_images(embedder, images_of(model.parent.parent), folder / "images", "digest", shard_rows=3))
        return [(np.nan_to_num(cache[:]).tolist(), cache.fingerprint, cache.readable().tolist()) for cache in made]

    return listening(ask)


def runs(whole: Path) -> list[Subject]:
    subject = Subject(
        "finished run", whole / "run", ("run/**/*.json", "run/**/recipe.yaml", "run/**/*.safetensors"), train, weight=0.3
    )
    source = {"path": str(whole / "captions.csv"), "max_bad_share": 0.2}
    raw = {
        "output_dir": str(subject.place / "run"),
        "cache_dir": str(subject.place / "cache"),
        "method": "projection",
        "old": str(whole / "models" / "old"),
        "new": str(whole / "models" / "new"),
        "data": {"pairs": source, "texts": [{"path": str(whole / "texts" / "texts.txt")}], "test": source},
        "training": {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1},
        "evaluation": {"resamples": 100, "ks": [1, 5], "examples": 1},
    }
    subject.place.mkdir(parents=True)
    (subject.place / "recipe.yaml").write_text(yaml.safe_dump(raw))
    command("train", subject.place / "recipe.yaml")
    subject.place.rename(subject.folder)
    report = next(subject.folder.glob("run/**/report.json")).parent.relative_to(subject.folder)
    files = (f"{report}/report.json", f"{report}/report_data.safetensors")
    drawn = Subject("report", subject.folder, files, lambda folder: draw(folder / report), has_checksum=False, weight=0.7)
    return [
        subject,
        drawn,
        replace(drawn, name="report, drawn", ask=lambda folder: command("report", folder / report), weight=0.1),
    ]


def train(folder: Path) -> Answer:
    """Start a finished run again: nothing is left to be done."""
    said = command("train", folder / "recipe.yaml").said
    report = next(folder.glob("run/**/report.json"))
    model = next(folder.glob("run/**/model.safetensors"))
    return Answer((json.loads(report.read_text())["cases"], model.read_bytes()), said)


def draw(folder: Path) -> Answer:
    from xcompat.core.progress import console
    from xcompat.report import load_report, print_report

    def ask() -> Any:
        report = load_report(folder)
        print_report(report, console)
        return [case.metrics for case in report.cases], [panel.title for panel in report.panels]

    return listening(ask)


def answers(whole: Path) -> list[Subject]:
    """What a Hub says of a model, and the files that it sends."""
    from xcompat import Fingerprint
    from xcompat.models import describe_old

    folder = whole / "hub"
    folder.mkdir()
    older = describe_old(Fingerprint.from_string("base"), dim=8) | {"name": "me/base"}
    config = {"model_type": "xcompat-bct", "embedding_dim": 16, "old": older | {"compatible_with": []}}
    (folder / "config.json").write_text(json.dumps(config))
    card = {"fingerprint": Fingerprint.from_string("newer").digest, "license": "mit"}
    names = [{"rfilename": name} for name in ("config.json", "README.md")]
    about = {"id": "me/newer", "sha": "0" * 40, "siblings": names, "private": False, "gated": False, "cardData": card, "tags": []}
    (folder / "info.json").write_text(json.dumps(about))
    return [
        Subject("answers of a Hub, lineage", folder, ("*.json",), lineage, has_checksum=False),
        Subject("answers of a Hub, pulled", folder, ("*.json",), pull, has_checksum=False, weight=0.3),
    ]


@contextlib.contextmanager
def hub(folder: Path) -> Iterator[None]:
    """Serve a Hub whose answers about a model are files."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where this is run as a script
    import hub_server

    handler, plain = hub_server._Handler, hub_server._Handler.info

    def info(self: Any, body: bytes, repo: str, revision: str = "main") -> None:
        if repo == "me/newer":
            return self._answer(200, (folder / "info.json").read_bytes())
        return plain(self, body, repo, revision)

    with hub_server.served(folder / "hub cache") as server, mock.patch.object(handler, "info", info):
        server.repos["me/newer"] = hub_server.Repository()
        server.repos["me/newer"].commits["0" * 40] = {"config.json": (folder / "config.json").read_bytes()}
        server.repos["me/newer"].branches["main"] = "0" * 40
        server.repos["me/base"] = hub_server.Repository()
        server.repos["me/base"].commit({"config.json": b'{"model_type": "clip"}'})
        yield


def lineage(folder: Path) -> Answer:
    with hub(folder):
        return command("lineage", "me/newer")


def pull(folder: Path) -> Answer:
    """Ask for a model of which nothing but its configuration is there: refused, however that is damaged."""
    from xcompat import XcompatError

    with hub(folder):
        try:
            return command("gallery", "build", folder, "--model", "me/newer", "--out", folder / "gallery")
        except XcompatError as error:
            if "\n" in str(error).strip():
                raise
            return Answer("refused")
