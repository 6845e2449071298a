"""Operations that are disturbed, the state each starts from, and the states that it may leave behind."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from xcompat import Fingerprint, XcompatError
from xcompat.core.ownership import MARKER
from xcompat.data.schema import TEXT
from xcompat.embeddings.embed import EmbeddingCache, embed_images, embed_texts
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import FctConfig, FctModel, ProcrustesConfig, ProcrustesModel
from xcompat.models import CompatModel
from xcompat.models.config import describe_old
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, commands
from xcompat.retrieval.new_embeddings import NewEmbeddings
from xcompat.retrieval.originals import load_images, load_originals

State = dict[str, NDArray[np.float32]] | None
"""id -> embedding; None where nothing is there yet."""
OLD, NEW = Fingerprint.from_string("old"), Fingerprint.from_string("new")
D, d = 12, 8
ITEMS, MORE = 100, 20
TEXTS = [f"{'word ' * (number % 9)}number {number}" for number in range(23)]


@dataclass(frozen=True)
class Scene:
    """An operation that may be cut off anywhere.

    Args:
        name: of what and of which operation.
        prepare: makes the folder in which it starts.
        run: the operation; done again it continues or starts anew.
        read: opens what is there, verifies it, and returns its content.
        states: contents that may be found, the last after the operation; empty for those that a run that nobody disturbs shows.
        between: further contents between the first and the last, where these are left out.
        after: a command that may come next, and clears what the one before has left.
        reads: whether it only reads.
        slow: whether it takes seconds, so that it is tried less often.
    """

    name: str
    prepare: Callable[[Path], object]
    run: Callable[[Path], object]
    read: Callable[[Path], State]
    states: tuple[State, ...] = ()
    between: tuple[State, ...] = ()
    after: Callable[[Path], object] | None = None
    reads: bool = False
    slow: bool = False


def unit(count: int, dim: int, seed: int) -> NDArray[np.float32]:
    rows_ND = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)


def same(one: State, other: State) -> bool:
    if one is None or other is None:
        return one is other
    if one.keys() != other.keys():
        return False
    return all(one[name].shape == other[name].shape and np.allclose(one[name], other[name], atol=1e-5) for name in one)


def gallery_content(folder: Path) -> State:
    """Open a gallery, verify every file, and read each item by all that leads to it."""
    if not (folder / "gallery.json").exists():
        return None
    gallery = Gallery.open(folder)
    gallery.verify()
    found: dict[str, NDArray[np.float32]] = {}
    for segment in gallery.segments:
        rows_n = segment.present()
        names = segment.ids(rows_n)
        assert not found.keys() & set(names), "an item is there twice"
        found |= dict(zip(names, segment.vectors(rows_n), strict=True))
    assert len(found) == len(gallery), f"{len(found)} items are read, {len(gallery)} are counted"
    assert None not in gallery.find(list(found)), "an item is not found by its id"
    if found and len(gallery.versions) == 1 and gallery.manifest.index == "Flat":
        name = min(found)
        best = gallery.search(found[name][None], gallery.versions[0], top_k=1)[0][0]
        assert best.id == name, f"{name} is found as {best.id}"
    for manifest in gallery.generations():
        Gallery.open(folder, manifest.generation).verify()
    return found


def in_gallery(folder: Path) -> State:
    return gallery_content(folder / "gallery")


def items(count: int, seed: int, prefix: str = "item", dim: int = d) -> dict[str, NDArray[np.float32]]:
    return {f"{prefix} {row}": embed for row, embed in enumerate(unit(count, dim, seed))}


def put(gallery: Gallery, content: dict[str, NDArray[np.float32]], version: Fingerprint | None = None) -> None:
    """Add items to a gallery, in the place of those that are there, and commit them."""
    metadata = [{"name": name} for name in content]
    with gallery:
        gallery.add(np.stack(list(content.values())), list(content), metadata, version, replace=True)
        gallery.commit()


FIRST = items(ITEMS, 0)
ADDED = items(MORE, 1, "more") | {"item 3": unit(1, d, 9)[0]}
KEPT = {name: embed for name, embed in FIRST.items() if int(name.split()[1]) % 7}
BOTH = FIRST | ADDED
TIDIED = {name: BOTH[name] for name in BOTH if name in KEPT or name not in FIRST}


CACHED = items(30, 4, dim=D)
"""New embeddings of some of the first items."""


@dataclass(frozen=True)
class Operations:
    """Operations on the gallery of a folder; done again, each goes on or changes nothing.

    Args:
        index: what faiss is to make of each segment.
    """

    index: str

    def create(self, folder: Path) -> None:
        if not (folder / "gallery" / "gallery.json").exists():
            Gallery.create(folder / "gallery", OLD, dim=d, index=self.index)
        else:
            with Gallery.open(folder / "gallery") as made:
                made.staging()  # the next writer tidies up, also one who finds nothing to do

    def begin(self, folder: Path) -> None:
        self.create(folder)
        put(Gallery.open(folder / "gallery"), FIRST)

    def add(self, folder: Path) -> None:
        put(Gallery.open(folder / "gallery"), ADDED)

    def remove(self, folder: Path) -> None:
        """Remove some of the first."""
        with Gallery.open(folder / "gallery") as gallery:
            if gone := [name for name in FIRST if name not in KEPT and gallery.find([name]) != [None]]:
                gallery.remove(gone)
                gallery.commit("remove")

    def twice(self, folder: Path) -> None:
        self.begin(folder)
        self.add(folder)

    def untidy(self, folder: Path) -> None:
        """Make a gallery that a compaction finds something in to do."""
        self.twice(folder)
        self.remove(folder)

    def compact(self, folder: Path) -> None:
        Gallery.open(folder / "gallery").compact()

    def roll_back(self, folder: Path) -> None:
        """Return to before the last commit of :meth:`twice`."""
        Gallery.open(folder / "gallery").rollback(1)


def write_once_more(folder: Path) -> None:
    """Add an item to the gallery in a folder, or to the one that it is."""
    gallery = Gallery.open(folder / "gallery" if (folder / "gallery").exists() else folder)
    version = (gallery.manifest.present() or gallery.manifest.versions)[0]
    put(gallery, items(1, 7, "next", version.dim), version.fingerprint)


def gallery_scenes(index: str) -> list[Scene]:
    """Return every operation on a gallery that needs no images.

    Args:
        index: what faiss is to make of each segment.
    """
    do = Operations(index)
    operations: list[tuple[str, Callable[[Path], object], Callable[[Path], object], tuple[State, ...]]] = [
        ("create", nothing, do.create, (None, {})),
        ("first items", do.create, do.begin, ({}, FIRST)),
        ("add and replace", do.begin, do.add, (FIRST, BOTH)),
        ("remove", do.begin, do.remove, (FIRST, KEPT)),
        ("compact", do.untidy, do.compact, (TIDIED,)),
        ("roll back", do.twice, do.roll_back, (BOTH, FIRST)),
    ]
    scenes = [
        Scene(f"{index}: {name}", prepare, run, in_gallery, states, after=write_once_more)
        for name, prepare, run, states in operations
    ]
    return [*scenes, upgrade_scene(index, do.begin)]


def nothing(folder: Path) -> None:
    """Begin with no folder."""


@cache
def gallery_map() -> FctModel:
    torch.manual_seed(0)
    return FctModel(FctConfig(old=describe_old(OLD, d), embedding_dim=D)).eval()


def upgrade_scene(index: str, begin: Callable[[Path], object]) -> Scene:
    """Return an upgrade in many flushes, so that there is a journal to go on from."""
    model = gallery_map()
    with torch.inference_mode():
        mapped = dict(zip(FIRST, model.upgrade(torch.from_numpy(np.stack(list(FIRST.values())))).numpy(), strict=True))

    def upgrade(folder: Path) -> None:
        from xcompat.retrieval import staging

        staging.FLUSH_BYTES = 30 * D * 4
        gallery = Gallery.open(folder / "gallery")
        if gallery.versions == [OLD]:
            gallery.upgrade(model, batch_size=30)

    return Scene(f"{index}: upgrade", begin, upgrade, in_gallery, (FIRST, mapped), after=write_once_more)


@cache
def encoder(folder: Path, seed: int = 1) -> Embedder:
    return load_embedder(save_stand_in(folder / f"encoder {seed}", "clip", 8, seed=seed))


def write_images(folder: Path, count: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def image_scenes(shared: Path) -> list[Scene]:
    """Return what embeds images: ``gallery build`` and ``gallery upgrade --backfill``, and embedding caches."""
    photos, old, new = write_images(shared / "photos"), encoder(shared, 1), encoder(shared, 2)

    def build(folder: Path) -> None:
        commands.build(folder, load_originals(photos), old, "Flat", None)

    def backfill(folder: Path) -> None:
        commands.backfill(Gallery.open(folder), load_originals(photos), compatible(shared), None, False)

    def texts(folder: Path) -> None:
        embed_texts(new, TEXTS, folder, "texts", shard_rows=5)

    def images(folder: Path) -> None:
        embed_images(new, load_images(photos), folder, "images", shard_rows=2)

    return [
        Scene("images: build", nothing, build, gallery_content, between=({},), after=write_once_more),
        Scene("images: backfill", build, backfill, gallery_content, after=write_once_more),
        Scene("cache of texts", nothing, texts, cache_content),
        Scene("cache of images", nothing, images, cache_content),
    ]


def passages(file: Path, count: int) -> Path:
    file.write_text("\n".join(json.dumps({"id": f"text {row}", "text": text}) for row, text in enumerate(TEXTS[:count])))
    return file


def text_scenes(shared: Path) -> list[Scene]:
    """Return ``gallery build`` and ``gallery add`` of texts, of which every five are committed."""
    model = encoder(shared, 1)
    first, every = passages(shared / "first.jsonl", 13), passages(shared / "every.jsonl", len(TEXTS))
    embeds = {f"text {row}": model.embed(model.processor.texts([text]))[0].numpy() for row, text in enumerate(TEXTS)}

    def of(*counts: int) -> tuple[State, ...]:
        return tuple({f"text {row}": embeds[f"text {row}"] for row in range(count)} for count in counts)

    def in_parts() -> None:
        from xcompat.retrieval import ingestion, originals

        originals.TEXTS_AT_ONCE, ingestion.COMMIT_EVERY = 5, -1.0

    def build(folder: Path) -> None:
        in_parts()
        commands.build(folder, load_originals(first), model, "Flat", None)

    def add(folder: Path) -> None:
        in_parts()
        commands.add(Gallery.open(folder), load_originals(every), model, False)

    return [
        Scene("texts: build", nothing, build, texts_content, (None, *of(0, 5, 10, 13)), after=write_once_more),
        Scene("texts: add", build, add, texts_content, of(13, 18, 23), after=write_once_more),
    ]


def texts_content(folder: Path) -> State:
    """Read a gallery, in which each item has its text beside it."""
    found = gallery_content(folder)
    for segment in Gallery.open(folder).segments if found is not None else ():
        rows_n = segment.present()
        for name, about in zip(segment.ids(rows_n), segment.metadata(rows_n), strict=True):
            assert about == {TEXT: TEXTS[int(name.split()[1])]}, f"{name} has {about} beside it"
    return found


@cache
def compatible(shared: Path) -> Embedder:
    """Return a model whose queries search what ``encoder(shared, 1)`` made."""
    from xcompat import XbtModel

    torch.manual_seed(0)
    model = XbtModel.from_encoder(str(shared / "encoder 2"), old=encoder(shared, 1).describe_old())
    model.export(shared / "xbt")
    return load_embedder(str(shared / "xbt"))


def cache_content(folder: Path) -> State:
    """Read a finished embedding cache; None while it is not finished."""
    if not (folder / "cache.json").exists():
        return None
    return {str(row): embed for row, embed in enumerate(EmbeddingCache(folder)[:])}


def cached_scene() -> Scene:
    """Return a re-ranked search that keeps new embeddings beside a gallery, ten at a time."""
    blocks = [dict(list(CACHED.items())[:count]) for count in range(0, len(CACHED) + 1, 10)]

    def begin(folder: Path) -> None:
        operations = Operations("Flat")
        operations.begin(folder)
        NewEmbeddings(folder / "gallery", NEW, D).close()

    def keep(folder: Path) -> None:
        kept = NewEmbeddings(folder / "gallery", NEW, D)
        for start in range(0, len(CACHED), 10):
            kept.put(dict(list(CACHED.items())[start : start + 10]), generation=1)
        kept.close()

    def read(folder: Path) -> State:
        kept = NewEmbeddings(folder / "gallery", NEW, D)
        found = kept.get(list(CACHED), generation=1)
        kept.close()
        assert in_gallery(folder) is not None
        return found

    return Scene("new embeddings", begin, keep, read, tuple(blocks), after=write_once_more)


def query_map() -> CompatModel:
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, d), embedding_dim=D))
    return model.fit([(torch.from_numpy(unit(300, D, 1)), torch.from_numpy(unit(300, d, 2)))]).eval()


def leftovers(folder: Path) -> list[str]:
    """Return temporary files and journals that nobody needs any more."""
    hidden = [path for path in folder.rglob(".*") if path.name not in (".lock", MARKER)]
    return sorted(str(path.relative_to(folder)) for path in [*hidden, *folder.rglob("upgrade-*.json")])


def copied(source: Path, target: Path) -> None:
    """Put a prepared folder in the place of what a trial has left."""
    shutil.rmtree(target.parent, ignore_errors=True)
    target.parent.mkdir()
    if source.exists():
        shutil.copytree(source, target, symlinks=True)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file, to see whether anything has changed."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.name != ".lock"}
    return {name: (about.st_size, about.st_mtime_ns) if stat.S_ISREG(about.st_mode) else (0, 0) for name, about in found.items()}


def contents(scene: Scene, work: Path) -> State | str:
    """Read what a trial has left; what cannot be opened says why."""
    try:
        return scene.read(work)
    except (XcompatError, OSError, AssertionError, RuntimeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
