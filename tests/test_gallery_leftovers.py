"""What killed writers leave: the next one goes on, deletes what was theirs, and touches nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import store
from schedule import mostly_nightly
from test_gallery import CLIP, DIM, found, naive, names, vectors

from xcompat import XcompatError
from xcompat.core.errors import GenerationGoneError
from xcompat.core.files import PARTIAL
from xcompat.retrieval import Gallery
from xcompat.retrieval.manifest import read_manifest


class Killed(BaseException):
    """Not an error that anything catches."""


def die(*_: object, **__: object) -> None:
    raise Killed


def killed(work: Callable[[], object]) -> None:
    """Do something in a process that may end itself in the middle of it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def at_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End the process at the nth call that changes something on the disk."""
    count = 0

    def dying(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:
                os._exit(9)
            return original(*args, **kwargs)

        return run

    for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


def a_gallery(path: Path, commits: int = 2, **options: Any) -> Gallery:
    gallery = Gallery.create(path, CLIP, dim=DIM, **options)
    for number in range(commits):
        store(gallery, vectors(10, number), names(10, f"part {number}"))
    return gallery


def contents(gallery: Gallery) -> list[list[str]]:
    return found(gallery, vectors(3, 77), 100)


def takes_the_lock(gallery: Gallery) -> None:
    """Be a writer who changes nothing."""
    gallery.staging()
    gallery.close()


def test_a_compaction_goes_on_after_a_kill_while_rows_were_marked_as_removed(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    gallery.remove(["part 0 1"])
    gallery.commit()
    name = gallery.segments[0].record.removed
    half = gallery.path / "removed" / f".{name}.a1b2c3d4{PARTIAL}"
    half.mkdir()
    (half / str(name)).write_bytes(b"half")
    before = contents(gallery)
    gallery.compact()
    assert contents(gallery) == before and gallery.damage() == []
    assert list((gallery.path / "removed").iterdir()) == []


def test_what_is_not_the_gallerys_own_survives_a_compaction(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years")
    gallery = a_gallery(tmp_path / "gallery")
    foreign = [gallery.path / folder / name for folder in ("segments", "generations", ".") for name in (".DS_Store", "notes.txt")]
    for file in foreign:
        file.write_text("not ours")
    for folder in ("segments", "."):
        (gallery.path / folder / "0123456789abcdef").symlink_to(outside)
    (gallery.path / "segments" / f".fedcba9876543210.a1b2c3d4{PARTIAL}").symlink_to(outside)
    before = contents(gallery)
    gallery.compact()
    takes_the_lock(gallery)
    assert contents(gallery) == before and gallery.damage() == []
    assert [file.read_text() for file in foreign] == ["not ours"] * len(foreign)
    assert (outside / "thesis.txt").read_text() == "years" and (gallery.path / "segments" / "0123456789abcdef").is_symlink()


@pytest.mark.parametrize("call", mostly_nightly(range(0, 75, 4), lambda call: call % 12 == 0))
def test_at_whatever_call_a_compaction_dies_every_state_that_is_listed_is_whole(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = a_gallery(tmp_path / "gallery", 3)
    gallery.remove(["part 0 1", "part 2 1"])
    gallery.commit()
    before = contents(gallery)
    with monkeypatch.context() as patched:
        at_call(patched, call)
        killed(gallery.compact)
    for manifest in Gallery.open(gallery.path).generations():
        assert Gallery.open(gallery.path, manifest.generation).damage() == []
    again = Gallery.open(gallery.path)
    assert contents(again) == before
    if call % 8:
        again.rollback(again.generations()[0].generation)
    else:
        again.compact()
        assert contents(again) == before and len(list((again.path / "segments").iterdir())) == 1
    assert Gallery.open(gallery.path).damage() == []


def test_a_compaction_revives_nothing_that_others_removed_or_that_waits_for_a_commit(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    other = Gallery.open(gallery.path)
    other.remove(["part 0 1"])
    other.commit()
    gallery.compact()
    assert gallery.find(["part 0 1", "part 0 2"]) == [None, CLIP] and len(gallery) == 19
    gallery.remove(["part 0 2"])
    gallery.add(vectors(1, 9), ["new"])
    gallery.compact()
    assert gallery.find(["part 0 2", "new"]) == [None, CLIP] and len(gallery) == 19


def collections(gallery: Gallery) -> set[str]:
    from xcompat.retrieval.milvus_index import connect

    return set(connect(str(gallery.manifest.milvus)).list_collections())


def named(*galleries: Gallery) -> set[str]:
    return {f"xcompat_{segment.record.name}" for gallery in galleries for segment in gallery.segments}


def test_a_compaction_drops_collections_when_no_state_names_them_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xcompat.retrieval.milvus_index import MilvusBackend

    gallery = a_gallery(tmp_path / "gallery", milvus=str(tmp_path / "vectors.db"))
    reader, before = Gallery.open(gallery.path), contents(gallery)
    with monkeypatch.context() as patched:
        drop = MilvusBackend.drop
        patched.setattr(MilvusBackend, "drop", lambda self, name: (drop(self, name), die()))
        with pytest.raises(Killed):
            gallery.compact()
    again = Gallery.open(gallery.path)
    for manifest in again.generations():
        assert Gallery.open(gallery.path, manifest.generation).damage() == []
    with pytest.raises(GenerationGoneError, match="open the gallery again"):
        contents(reader)
    assert len(collections(again)) == 2, "one was not dropped"
    takes_the_lock(again)
    assert contents(again) == before and collections(again) == named(again)


def test_collections_of_a_killed_build_are_dropped_and_those_of_other_galleries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    milvus = str(tmp_path / "vectors.db")
    gallery, other = (a_gallery(tmp_path / name, 1, milvus=milvus) for name in ("gallery", "other"))
    from xcompat.retrieval.milvus_index import connect

    with monkeypatch.context() as patched:
        patched.setattr(connect(milvus), "insert", die)
        gallery.add(vectors(3, 5), names(3, "more"))
        with pytest.raises(Killed):
            gallery.commit()
    gallery.close()
    connect(milvus).create_collection("xcompat_0123456789abcdef", dimension=4)  # of a gallery that nobody knows here
    takes_the_lock(Gallery.open(gallery.path))
    assert collections(gallery) == {*named(gallery, other), "xcompat_0123456789abcdef"}
    assert gallery.damage() == other.damage() == [] and len(list((gallery.path / "segments").iterdir())) == 1


def test_no_writer_is_stopped_by_a_milvus_that_does_not_answer_to_tidying_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xcompat.retrieval.milvus_index import MilvusBackend

    gallery = a_gallery(tmp_path / "gallery", milvus=str(tmp_path / "vectors.db"))
    (gallery.path / "segments" / "0123456789abcdef").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(MilvusBackend, "drop", lambda *_: (_ for _ in ()).throw(XcompatError("Milvus failed")))
        gallery.remove(["part 0 1"])
        gallery.commit()
        assert len(gallery) == 19 and (gallery.path / "segments" / "0123456789abcdef").is_dir()
    takes_the_lock(gallery)
    assert not (gallery.path / "segments" / "0123456789abcdef").exists()


@pytest.mark.parametrize("call", mostly_nightly(range(24), lambda call: call % 3 == 0))
def test_making_a_gallery_is_done_again_after_a_kill(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    index = faiss.IndexFlatL2(DIM)
    index.add(vectors(5))
    faiss.write_index(index, str(tmp_path / "own.faiss"))
    makers = {
        "created": lambda: Gallery.create(tmp_path / "created", CLIP, dim=DIM),
        "adopted": lambda: Gallery.from_faiss(tmp_path / "adopted", tmp_path / "own.faiss", names(5), CLIP),
    }
    for name, make in makers.items():
        with monkeypatch.context() as patched:
            at_call(patched, call)
            killed(make)
        gallery = store(
            Gallery.open(tmp_path / name) if (tmp_path / name / "gallery.json").exists() else make(),
            vectors(2, 1),
            names(2, "new"),
        )
        assert gallery.damage() == [] and len(Gallery.open(gallery.path)) == (2 if name == "created" else 7)
        left = {path.name for path in gallery.path.iterdir()}
        assert left == {".lock", "gallery.json", "generations", "segments"}
        assert len(list((gallery.path / "segments").iterdir())) == len(gallery.segments)


@pytest.mark.parametrize("foreign", ["holiday.jpg", "segments/holiday.jpg", "generations/holiday.jpg", "removed"])
def test_a_folder_with_something_else_in_it_is_refused_and_left_as_it_is(foreign: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / foreign).parent.mkdir(parents=True)
    (folder / foreign).write_text("mine")
    (folder / ".begun").touch()
    with pytest.raises(XcompatError, match=f"is not empty .it holds {foreign.split('/', maxsplit=1)[0]}"):
        Gallery.create(folder, CLIP, dim=DIM)
    assert (folder / foreign).read_text() == "mine"


def test_a_gallery_that_has_lost_its_manifest_is_not_taken_for_one_that_was_begun(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    (gallery.path / "gallery.json").unlink()
    with pytest.raises(XcompatError, match="is not empty"):
        Gallery.create(gallery.path, CLIP, dim=DIM)
    shutil.copy(gallery.path / "generations" / "00000002.json", gallery.path / "gallery.json")
    assert len(Gallery.open(gallery.path)) == 20 and Gallery.open(gallery.path).damage() == []


def test_the_next_writer_deletes_what_nobody_needs(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    gallery.remove(names(10, "part 0"))
    gallery.add(vectors(2, 4), names(2, "never"))
    gallery.staging().flush()
    gallery.commit()
    name = gallery.segments[0].record.name
    kept = {path for path in gallery.path.rglob("*") if path.parent.name != "removed"}  # nothing is left of its segment
    (gallery.path / ".begun").touch()
    orphan = gallery.path / "segments" / "0123456789abcdef"
    shutil.copytree(gallery.path / "segments" / name, orphan)
    np.save(gallery.path / "removed" / f"{name}-00000099.npy", np.zeros(3))
    (gallery.path / "upgrade-0123456789abcdef.json").write_text(json.dumps({"generation": 1, "records": [{"name": orphan.name}]}))
    (gallery.path / "upgrade-fedcba9876543210.json").write_text("{")
    temporaries = [".gallery.json.a1b2c3d4", "generations/.00000003.json.a1b2c3d4", f"removed/.{name}-00000003.npy.abcdefgh"]
    temporaries += [f"segments/.{name}.abcdefgh", ".upgrade-0123456789abcdef.json.abcdefgh"]
    for temporary in temporaries:
        (gallery.path / f"{temporary}{PARTIAL}").mkdir()
        (gallery.path / f"{temporary}{PARTIAL}" / "half").write_bytes(b"half")
    takes_the_lock(gallery)
    assert set(gallery.path.rglob("*")) == kept
    for manifest in gallery.generations():
        assert Gallery.open(gallery.path, manifest.generation).damage() == []


def test_an_upgrade_that_can_go_on_keeps_what_it_has_written(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    name = gallery.segments[0].record.name
    mapped = gallery.path / "segments" / "0123456789abcdef"
    shutil.copytree(gallery.path / "segments" / name, mapped)
    record = {**gallery.segments[0].record.model_dump(mode="json"), "name": mapped.name}
    journal = gallery.path / "upgrade-0123456789abcdef.json"
    journal.write_text(json.dumps({"generation": gallery.generation, "done": {name: 5}, "records": [record]}))
    takes_the_lock(gallery)
    assert journal.exists() and mapped.is_dir()
    gallery.remove(["part 0 1"])
    gallery.commit()
    takes_the_lock(gallery)
    assert not journal.exists() and not mapped.exists(), "it held for the state that it was begun in"


def test_nothing_is_deleted_while_a_state_cannot_be_read(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    gallery.rollback(1)
    old = gallery.path / "generations" / "00000002.json"
    whole = old.read_text()
    old.write_text(whole[: len(whole) // 2])
    takes_the_lock(gallery)
    old.write_text(whole)
    assert gallery.rollback(2) == 4 and len(gallery) == 20 and gallery.damage() == []


@pytest.mark.parametrize("place", ["faiss", "milvus", "adopted"])
def test_a_state_of_which_something_is_gone_is_not_returned_to(place: str, tmp_path: Path) -> None:
    if place == "adopted":
        import faiss

        index = faiss.IndexFlatL2(DIM)
        index.add(vectors(5))
        faiss.write_index(index, str(tmp_path / "own.faiss"))
        gallery = Gallery.from_faiss(tmp_path / "gallery", tmp_path / "own.faiss", names(5), CLIP)
    else:
        gallery = a_gallery(tmp_path / "gallery", 1, milvus=str(tmp_path / "v.db") if place == "milvus" else None)
    wanted = gallery.generation
    first = gallery.segments[0].record
    gallery.remove(gallery.segments[0].ids(np.arange(first.rows)))
    gallery.commit()
    if place == "milvus":
        from xcompat.retrieval.milvus_index import connect

        connect(str(gallery.manifest.milvus)).drop_collection(f"xcompat_{first.name}")
    else:
        (tmp_path / "own.faiss" if place == "adopted" else gallery.path / "segments" / first.name / "index.faiss").unlink()
    before = read_manifest(gallery.path)
    with pytest.raises(XcompatError, match=f"cannot return to generation {wanted} of .*{'|'.join((first.name, 'own'))}"):
        gallery.rollback(wanted)
    assert read_manifest(gallery.path) == before and Gallery.open(gallery.path).damage() == []
    assert gallery.rollback(before.generation) == before.generation + 1, "the lock is free"


def test_a_commit_that_was_cut_off_cannot_be_looked_into_or_returned_to(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    generations = gallery.path / "generations"
    shutil.copy(generations / "00000001.json", generations / "00000003.json")
    for look in (lambda: Gallery.open(gallery.path, 3), lambda: gallery.rollback(3)):
        with pytest.raises(GenerationGoneError, match=r"has no generation 3; it keeps \[0, 1, 2\]"):
            look()
    stored = {name: row for part in range(2) for name, row in zip(names(10, f"part {part}"), vectors(10, part), strict=True)}
    assert contents(gallery) == naive(stored, vectors(3, 77), 20)
