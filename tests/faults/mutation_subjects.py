"""What is damaged: one small specimen of every kind of file that is read, and the question that is asked of it."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np


class Answer(NamedTuple):
    """What a subject says: anything that can be compared, and whether it said that something is amiss."""

    value: Any
    said: bool = False


@dataclass(frozen=True)
class Subject:
    """Files that are damaged, and what is asked of them.

    Args:
        name: of its row.
        folder: everything that belongs to it, whole.
        files: glob patterns of what is damaged.
        ask: the question, put to a copy of the folder; raises XcompatError for a refusal.
        has_checksum: whether another answer than the right one is wrong; else it is that of the content as it now stands.
        weight: share of the trials.
        foreign: another folder of the same layout, whose files are put in the place of this one's.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    ask: Callable[[Path], Answer]
    has_checksum: bool = True
    weight: float = 1.0
    foreign: Path | None = None

    @property
    def place(self) -> Path:
        """Where copies lie: files that name others by their full paths were made there."""
        return self.folder.parent.parent / "copies" / self.folder.name

    def paths(self) -> list[str]:
        found = {path for pattern in self.files for path in self.folder.glob(pattern) if path.is_file()}
        return sorted(str(path.relative_to(self.folder)) for path in found)

    @contextlib.contextmanager
    def copy(self) -> Iterator[Path]:
        shutil.rmtree(self.place.parent, ignore_errors=True)
        yield Path(shutil.copytree(self.folder, self.place))
        shutil.rmtree(self.place.parent, ignore_errors=True)


DIM, ROWS = 8, 60
INDEXES = ("Flat", "HNSW8", "IVF4,Flat", "IVF4,PQ4x4", "SQ8", "PQ4x4")
OWN_INDEXES = (*INDEXES, "IDMap,Flat", "OPQ4_8,IVF4,PQ4x4", "PCA8,Flat", "IVF4,SQ8")


@contextlib.contextmanager
def all_subjects(base: Path) -> Iterator[list[Subject]]:
    """Make the specimens.

    Args:
        base: an empty folder.

    Yields:
        The subjects, as long as what answers them is there.
    """
    whole = base / "whole"
    whole.mkdir()
    yield [*galleries(whole), *own_indexes(whole)]


# ---------------------------------------------------------------------------------------------------------- the question


def command(*arguments: object) -> Answer:
    """Type a command; a refusal becomes an XcompatError, everything that is not one line of it an error of another kind."""
    from xcompat import XcompatError, cli

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["xcompat", *map(str, arguments)]),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    lines = [line for line in err.getvalue().splitlines() if line.strip()]
    if code == 2:
        if not lines or not lines[-1].startswith("xcompat: "):
            raise RuntimeError(f"refused without a line: {err.getvalue()}")
        raise XcompatError(lines[-1])
    return Answer((code, out.getvalue()), said=code == 1 or "!" in out.getvalue() or "skipped" in out.getvalue())


# --------------------------------------------------------------------------------------------------------------- galleries


def unit(count: int, dim: int, seed: int) -> Any:
    rows = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fill_gallery(folder: Path, index: str, seed: int) -> None:
    """Make a gallery of two segments and a removal, with metadata and side-information."""
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery, faiss_index

    with (
        mock.patch.object(faiss_index, "PER_CENTROID", 0),
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
    from xcompat.retrieval import Gallery, faiss_index

    with mock.patch.object(faiss_index, "PER_CENTROID", 0):
        Gallery.open(folder).compact()
    gallery = Gallery.open(folder)
    hits = gallery.search(unit(3, DIM, 99), Fingerprint.from_string("old"), top_k=2 * ROWS)
    return Answer((hits, len(gallery)))


def change_gallery(folder: Path) -> Answer:
    """Replace, add and remove items, roll back, and ask the result."""
    from xcompat import Fingerprint
    from xcompat.retrieval import Gallery

    with Gallery.open(folder) as gallery:
        gallery.add(unit(3, DIM, 5), ["item 7", "item 90", "item new"], replace=True)
        gallery.remove(["item 8", "item 100"])
        gallery.commit()
        gallery.rollback(1)
        gallery.rollback(4)
    gallery = Gallery.open(folder)
    hits = gallery.search(unit(3, DIM, 99), Fingerprint.from_string("old"), top_k=2 * ROWS)
    return Answer((hits, len(gallery), gallery.generation))


def galleries(whole: Path) -> list[Subject]:
    made = []
    foreign = whole / "foreign gallery"
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
    del foreign
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
    return []
