"""Specimens of galleries, and of the faiss indexes that they adopt."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from mutation_subjects import Answer, Subject, command

DIM, ROWS, OWN_ROWS = 8, 60, 300
INDEXES = ("Flat", "HNSW8", "IVF4,Flat", "IVF4,PQ4x4", "SQ8", "PQ4x4")
OWN_INDEXES = (*INDEXES, "IDMap,Flat", "OPQ4_8,IVF4,PQ4x4", "PCA8,Flat", "IVF4,SQ8")


def unit(count: int, dim: int, seed: int) -> Any:
    rows = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fill_gallery(folder: Path, index: str, seed: int) -> None:
    """Make a gallery of two segments and a removal, with metadata and side-information."""
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery, faiss_building

    with (
        mock.patch.object(faiss_building, "PER_CENTROID", 0),
        Gallery.create(folder, Fingerprint.from_string("old"), dim=DIM, index=index) as gallery,
    ):
        for part in range(2):
            rows = range(part * ROWS, (part + 1) * ROWS)
            about = [{"n": row, "colour": ["red", "blue"][row % 2]} if row % 5 else None for row in rows]
            gallery.add(
                unit(ROWS, DIM, seed + part), [f"item {row}" for row in rows], about, side_info_NS=unit(ROWS, 3, seed + part)
            )
            gallery.commit()
        gallery.remove(["item 3", "item 70"])
        gallery.commit("tidy")


def search_gallery(folder: Path) -> Answer:
    """Ask a gallery everything that it answers without changing."""
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery

    gallery, old = Gallery.open(folder), Fingerprint.from_string("old")
    queries = unit(3, DIM, 99)
    ask: dict[str, Any] = {"parameters": None}
    hits = gallery.search(queries, old, top_k=2 * ROWS, **ask) + gallery.search(queries, old, top_k=9, where={"colour": "red"})
    found = gallery.find([f"item {row}" for row in (0, 3, 61, 500)])
    states = [(each.generation, each.by, each.rows) for each in gallery.generations()]
    about = gallery.versions[0].name, gallery.metric, gallery.generation, len(gallery), states
    side = [None if (each := segment.side_info(np.arange(4))) is None else each.tolist() for segment in gallery.segments]
    vectors = [segment.vectors(np.arange(4)).tolist() for segment in gallery.segments]
    return Answer((hits, found, about, side, vectors))


def compact_gallery(folder: Path) -> Answer:
    """Compact a gallery, which writes everything anew, and ask the result."""
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery, faiss_building

    with mock.patch.object(faiss_building, "PER_CENTROID", 0):
        Gallery.open(folder).compact()
    gallery = Gallery.open(folder)
    hits = gallery.search(unit(3, DIM, 99), Fingerprint.from_string("old"), top_k=2 * ROWS)
    return Answer((hits, len(gallery)))


def change_gallery(folder: Path) -> Answer:
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery

    with Gallery.open(folder) as gallery:
        gallery.add(unit(3, DIM, 5), ["item 7", "item 90", "item new"], side_info_NS=unit(3, 3, 5), replace=True)
        gallery.remove(["item 8", "item 100"])
        gallery.commit()
        gallery.rollback(1)
        gallery.rollback(4)
    gallery = Gallery.open(folder)
    hits = gallery.search(unit(3, DIM, 99), Fingerprint.from_string("old"), top_k=2 * ROWS)
    return Answer((hits, len(gallery), gallery.generation))


def galleries(whole: Path) -> list[Subject]:
    made = []
    for index in INDEXES:
        folder, other = whole / f"gallery {index}", whole / f"other {index}"
        fill_gallery(folder, index, seed=0)
        fill_gallery(other, index, seed=10)
        align(other, folder)
        subject = Subject(f"gallery of {index}, searched", folder, ("**/*",), search_gallery, foreign=other)
        made.append(subject)
        if index in ("Flat", "IVF4,PQ4x4"):
            made.append(replace(subject, name=f"gallery of {index}, compacted", ask=compact_gallery, weight=0.5))
            made.append(replace(subject, name=f"gallery of {index}, changed", ask=change_gallery, weight=0.5))
    return made


def align(other: Path, folder: Path) -> None:
    """Give the files of one gallery the names of another's."""
    for here, there in zip(sorted((folder / "segments").iterdir()), sorted((other / "segments").iterdir()), strict=True):
        there.rename(there.with_name(f"{here.name}.new"))
    for path in (other / "segments").glob("*.new"):
        path.rename(path.with_suffix(""))
    removed = sorted((other / "removed").iterdir())
    for here, there in zip(sorted((folder / "removed").iterdir()), removed, strict=True):
        there.rename(there.with_name(f"{here.name}.new"))
    for path in (other / "removed").glob("*.new"):
        path.rename(path.with_suffix(""))


def own_indexes(whole: Path) -> list[Subject]:
    """Indexes of the user's: adopted, given a map of queries, and searched after they were adopted."""
    import faiss

    from xcompat import Fingerprint
    from xcompat.methods import ProcrustesConfig, ProcrustesModel
    from xcompat.models.config import describe_old
    from xcompat.retrieval import Gallery

    old = Fingerprint.from_string("old")
    made = []
    for factory in OWN_INDEXES:
        folder = whole / f"own {factory}"
        folder.mkdir()
        index = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(unit(OWN_ROWS, DIM, 1))
        add = index.add_with_ids if factory.startswith("IDMap") else lambda rows, _, index=index: index.add(rows)
        add(unit(OWN_ROWS, DIM, 1), np.arange(OWN_ROWS) * 3)
        faiss.write_index(index, str(folder / "own.faiss"))
        (folder / "ids.txt").write_text("".join(f"item {row}\n" for row in range(OWN_ROWS)))
        files = ("own.faiss",) if factory != "Flat" else ("*",)
        made.append(Subject(f"own {factory}, adopted", folder, files, adopt, has_checksum=False, weight=0.4))
    for factory in ("HNSW8", "IVF4,PQ4x4"):
        folder = whole / f"mapped {factory}"
        folder.mkdir()
        (folder / "own.faiss").write_bytes((whole / f"own {factory}" / "own.faiss").read_bytes())
        model = ProcrustesModel(ProcrustesConfig(old=describe_old(old, DIM), embedding_dim=DIM))
        model.save_pretrained(folder / "model")
        made.append(Subject(f"own {factory}, exported", folder, ("own.faiss",), export_faiss, has_checksum=False, weight=0.4))
    for factory in ("Flat", "IVF4,PQ4x4"):
        subject = Subject(f"own {factory}, searched", whole / f"adopted {factory}", ("own.faiss",), search_adopted)
        subject.place.mkdir(parents=True)
        (subject.place / "own.faiss").write_bytes((whole / f"own {factory}" / "own.faiss").read_bytes())
        names = [f"item {row}" for row in range(OWN_ROWS)]
        Gallery.from_faiss(subject.place / "gallery", subject.place / "own.faiss", names, old)
        subject.place.rename(subject.folder)
        made.append(subject)
    return made


def look_apart(path: Path, vectors: bool, limit: float) -> tuple[int, str]:
    """Look at an index in a forked process, which need not import faiss as the real one does."""
    from xcompat.retrieval import faiss_probe

    reading, writing = os.pipe()
    if not (pid := os.fork()):
        said = faiss_probe.check_index(str(path), vectors)
        os.write(writing, said.encode())
        os._exit(faiss_probe.FOUND if said else 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        if not select.select([said], [], [], limit)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise subprocess.TimeoutExpired("probe", limit)
        words = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), words


def adopt(folder: Path) -> Answer:
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery, probing

    name = "/no/such/model"
    with mock.patch.object(probing, "_probe_in_subprocess", look_apart), mock.patch.object(probing, "SECONDS", 8.0):
        own = ("--from-faiss", folder / "own.faiss", "--ids", folder / "ids.txt")
        command("gallery", "build", *own, "--model", name, "--out", folder / "g")
    gallery = Gallery.open(folder / "g")
    return Answer(gallery.search(unit(3, DIM, 99), Fingerprint.from_string(name), top_k=ROWS))


def export_faiss(folder: Path) -> Answer:
    import faiss

    from xcompat.retrieval import probing

    with mock.patch.object(probing, "_probe_in_subprocess", look_apart), mock.patch.object(probing, "SECONDS", 8.0):
        command("export", "faiss", folder / "own.faiss", "--model", folder / "model", "--out", folder / "out.faiss")
    scores, rows = faiss.read_index(str(folder / "out.faiss")).search(unit(3, DIM, 99), 10)
    return Answer((scores.tolist(), rows.tolist()))


def search_adopted(folder: Path) -> Answer:
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery

    return Answer(Gallery.open(folder / "gallery").search(unit(3, DIM, 99), Fingerprint.from_string("old"), top_k=ROWS))


def upgrades(whole: Path) -> list[Subject]:
    """A gallery whose upgrade was cut off before the commit: its journal, and what it had written."""
    from xcompat.retrieval import Gallery, upgrading

    subject = Subject("upgrade that was cut off", whole / "upgrade", ("upgrade-*.json", "gallery.json", "segments/*/*"), upgrade)
    fill_gallery(subject.place, "Flat", seed=0)
    with (
        mock.patch.object(upgrading, "_record", side_effect=_recorded(upgrading._record)),
        contextlib.suppress(KeyboardInterrupt),
    ):
        Gallery.open(subject.place).upgrade(gallery_map(), batch_size=16)
    assert list(subject.place.glob("upgrade-*.json"))
    subject.place.rename(subject.folder)
    return [subject, replace(subject, name="journal of an upgrade", files=("upgrade-*.json",), weight=0.5)]


def _recorded(record: Any) -> Any:
    """Return what stops an upgrade after its first segment."""

    def once(*arguments: Any) -> None:
        record(*arguments)
        raise KeyboardInterrupt

    return once


def gallery_map() -> Any:
    import torch

    from xcompat import Fingerprint
    from xcompat.methods import FctConfig, FctModel
    from xcompat.models.config import describe_old

    torch.manual_seed(0)
    return FctModel(FctConfig(old=describe_old(Fingerprint.from_string("old"), DIM), embedding_dim=12)).eval()


def upgrade(folder: Path) -> Answer:
    from xcompat.retrieval import Gallery

    model = gallery_map()
    with Gallery.open(folder) as gallery:
        gallery.upgrade(model)
    gallery = Gallery.open(folder)
    hits = gallery.search(unit(3, 12, 99), model, top_k=2 * ROWS)  # in blocks of another size, scores are rounded otherwise
    return Answer(([[hit.id for hit in found] for found in hits], len(gallery), gallery.generation))
