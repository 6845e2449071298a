"""What killed writers leave and disks damage, readers while others write, and who may write: nothing wrong is read or lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import refuses, store
from schedule import mostly_nightly
from test_gallery import CLIP, DIM, found, naive, names, vectors
from test_index_gallery import write_index

from xcompat import XcompatError
from xcompat.core import checksums
from xcompat.core.checksums import FileRecord
from xcompat.core.errors import GenerationGoneError
from xcompat.core.files import PARTIAL
from xcompat.retrieval import Gallery, commands, compaction, faiss_building, integrity, manifest, snapshot
from xcompat.retrieval.integrity import CHECKED
from xcompat.retrieval.lock import lock_writer
from xcompat.retrieval.manifest import read_manifest


def killed(work: Callable[[], object]) -> None:
    """Do something in a process that may end itself in the middle of it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def at_call(monkeypatch: pytest.MonkeyPatch, number: int, *more: tuple[Any, str]) -> None:
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

    for owner, name in (*((os, name) for name in ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")), *more):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


def a_gallery(path: Path, commits: int = 2, **options: Any) -> Gallery:
    gallery = Gallery.create(path, CLIP, dim=DIM, **options)
    for number in range(commits):
        store(gallery, vectors(10, number), names(10, f"part {number}"))
    return gallery


def contents(gallery: Gallery) -> list[list[str]]:
    return found(gallery, vectors(3, 77), 100)


def takes_the_lock(gallery: Gallery) -> None:
    gallery.staging()
    gallery.close()


def test_what_is_not_the_gallerys_own_survives_a_compaction(tmp_path: Path) -> None:
    gallery, outside = a_gallery(tmp_path / "gallery"), tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years")
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
def test_compaction_killed_at_any_call_leaves_states_whole(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = a_gallery(tmp_path / "gallery", 3)
    gallery.remove(["part 0 1", "part 2 1"])
    gallery.commit()
    before = contents(gallery)
    with monkeypatch.context() as patched:
        at_call(patched, call)
        killed(gallery.compact)
    for state in Gallery.open(gallery.path).generations():
        assert Gallery.open(gallery.path, state.generation).damage() == []
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


@pytest.mark.parametrize("call", mostly_nightly(range(24), lambda call: call % 6 == 0))
def test_making_a_gallery_is_done_again_after_a_kill(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_index(tmp_path / "own.faiss", vectors(5))
    makers = {
        "created": lambda: Gallery.create(tmp_path / "created", CLIP, dim=DIM),
        "adopted": lambda: Gallery.from_faiss(tmp_path / "adopted", own, names(5), CLIP),
    }
    for name, make in makers.items():
        with monkeypatch.context() as patched:
            at_call(patched, call)
            killed(make)
        gallery = Gallery.open(tmp_path / name) if (tmp_path / name / "gallery.json").exists() else make()
        store(gallery, vectors(2, 1), names(2, "new"))
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
    refuses(f"is not empty .it holds {foreign.split('/', maxsplit=1)[0]}", Gallery.create, folder, CLIP, dim=DIM)
    assert (folder / foreign).read_text() == "mine"


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
    for state in gallery.generations():
        assert Gallery.open(gallery.path, state.generation).damage() == []


def test_nothing_is_lost_with_a_manifest_or_a_state(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    gallery.rollback(1)
    old = gallery.path / "generations" / "00000002.json"
    whole = old.read_text()
    old.write_text(whole[: len(whole) // 2])
    takes_the_lock(gallery)
    old.write_text(whole)
    assert gallery.rollback(2) == 4 and len(gallery) == 20 and gallery.damage() == []
    (gallery.path / "gallery.json").unlink()
    refuses("is not empty", Gallery.create, gallery.path, CLIP, dim=DIM)
    shutil.copy(gallery.path / "generations" / "00000004.json", gallery.path / "gallery.json")
    assert len(Gallery.open(gallery.path)) == 20 and Gallery.open(gallery.path).damage() == []


@pytest.mark.parametrize("place", ["faiss", "adopted"])
def test_a_state_of_which_something_is_gone_is_not_returned_to(place: str, tmp_path: Path) -> None:
    if place == "adopted":
        own = write_index(tmp_path / "own.faiss", vectors(5))
        gallery = Gallery.from_faiss(tmp_path / "gallery", own, names(5), CLIP)
    else:
        gallery = a_gallery(tmp_path / "gallery", 1)
    wanted = gallery.generation
    first = gallery.segments[0].record
    gallery.remove(gallery.segments[0].ids(np.arange(first.rows)))
    gallery.commit()
    (tmp_path / "own.faiss" if place == "adopted" else gallery.path / "segments" / first.name / "index.faiss").unlink()
    before = read_manifest(gallery.path)
    refuses(f"cannot return to generation {wanted} of .*{'|'.join((first.name, 'own'))}", gallery.rollback, wanted)
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


def between(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, happens: Callable[[], object]) -> None:
    """Let something happen, once, right after a function has returned."""
    original, left = getattr(module, name), [happens]

    def called(*arguments: Any) -> Any:
        result = original(*arguments)
        if left:
            left.pop()()
        return result

    monkeypatch.setattr(module, name, called)


@pytest.mark.parametrize("happens", ["compact", "commit", "rollback"])
@pytest.mark.parametrize("after", ["known_generations", "read_manifest", "_read"])
def test_states_are_listed_meanwhile(after: str, happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    writer = Gallery.open(gallery.path)

    def change() -> None:
        if happens == "commit":
            writer.add(vectors(1, 8), ["new"])
            writer.commit()
        else:
            writer.compact() if happens == "compact" else writer.rollback(1)

    between(monkeypatch, manifest, after, change)
    listed = gallery.generations()
    monkeypatch.undo()
    kept = [state.generation for state in writer.generations()]
    assert [state.generation for state in listed] in ([0, 1, 2], kept) and listed


@pytest.mark.parametrize("happens", ["compact", "commit"])
@pytest.mark.parametrize("after", ["read_manifest", "_generation_path"])
def test_no_false_alarm_of_a_changed_manifest(after: str, happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    writer = Gallery.open(gallery.path)
    writer.add(vectors(1, 8), ["new"])
    between(monkeypatch, manifest, after, writer.compact if happens == "compact" else writer.commit)
    assert manifest.is_current_whole(gallery.path)


def test_compaction_under_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    between(monkeypatch, snapshot, "is_current_whole", Gallery.open(gallery.path).compact)
    assert commands.verify(gallery)["passed"]
    assert "20 items in 1 segment" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(GenerationGoneError, match="open the gallery again"):
        gallery.damage()
    gallery = a_gallery(tmp_path / "another")
    cold, warm = Gallery.open(gallery.path), Gallery.open(gallery.path)
    before = contents(warm)
    Gallery.open(gallery.path).compact()
    for ask in (lambda: contents(cold), lambda: cold.find(["part 0 1"]), cold.damage, cold.verify):
        with pytest.raises(GenerationGoneError, match=r"^generation 2 of .* was compacted away .*; open the gallery again$"):
            ask()
    assert contents(warm) == before, "a file that is open stays readable"
    assert contents(Gallery.open(gallery.path)) == before


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_one_writer_at_a_time_where_storage_has_no_locks(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_lock(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refused_lock)
    gallery = a_gallery(tmp_path / "gallery", 1)

    def write() -> None:
        gallery.add(vectors(1, 8), ["never"])
        os._exit(9)

    killed(write)
    assert (gallery.path / ".lock.owner").exists(), "a writer that died holds no lock"
    gallery.add(vectors(1, 8), ["new"])
    said = refuses("", Gallery.open(gallery.path).remove, ["part 0 1"])
    assert f"(process {os.getpid()} on {socket.gethostname()}" in said and f"delete {gallery.path / '.lock.owner'}" in said
    assert gallery.commit() == 2 and gallery.find(["new", "never"]) == [CLIP, None] and gallery.damage() == []
    with Gallery.open(gallery.path) as other:
        other.remove(["part 0 1"])
        assert other.commit() == 3


def test_threads_and_failed_writers_leave_no_lock_behind(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery", 1)
    with ThreadPoolExecutor(1) as pool:  # its thread lives on, as that of a service does
        pool.submit(gallery.add, vectors(1, 8), ["new"]).result()
        assert gallery.commit() == 2
        other = Gallery.open(gallery.path)
        other.remove(["new"])
        assert other.commit() == 3
    lock = lock_writer(tmp_path)
    assert not lock.is_thread_local(), "older filelocks keep what they hold for each thread"
    lock.release()
    aside = (gallery.path / "gallery.json").rename(tmp_path / "gallery.json")
    refuses("is not a gallery", gallery.add, vectors(1, 8), ["newer"])
    aside.rename(gallery.path / "gallery.json")
    gallery.add(vectors(1, 8), ["newer"])
    assert gallery.commit() == 4, "who found no gallery left no lock behind"


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a gallery of ten items, one of them removed."""
    monkeypatch.setattr(faiss_building, "PER_CENTROID", 0)
    made = Gallery.create(tmp_path / "gallery", CLIP, dim=4, index="SQ8")
    embeds = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    store(made, embeds, names(10), side_info_NS=embeds)
    made.remove(["item 3"])
    made.commit()
    return made.path


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def use(folder: Path) -> None:
    """Read every file of a gallery."""
    gallery = Gallery.open(folder)
    gallery.search(np.ones((1, 4)), CLIP, top_k=10)
    gallery.find(["item 5"])
    gallery.segments[0].vectors(np.arange(2))
    gallery.segments[0].side_info(np.arange(2))


def test_a_flipped_bit_is_refused_by_whoever_reads_the_file(gallery: Path) -> None:
    use(gallery)
    files = [*gallery.glob("removed/*.npy"), *gallery.glob("segments/*/*.*")]
    assert len(files) == 7
    for file in files:
        flip(file)
        refuses(f"{file.name} has changed since it was written; .*xcompat gallery verify", use, gallery)
        flip(file)
        use(gallery)


@pytest.mark.parametrize(("old", "new"), [("cosine", "ip"), ('"rows": 10', '"rows": 11'), ('"by": "add"', '"by": "odd"')])
def test_a_manifest_that_still_parses_is_refused(old: str, new: str, gallery: Path) -> None:
    for path in (gallery / "gallery.json", gallery / "generations" / "00000002.json"):
        whole = path.read_text()
        damaged = whole.replace(old, new)
        assert damaged != whole
        path.write_text(damaged)
        with pytest.raises(XcompatError, match=rf"{path.name} is damaged \(it has changed since it was committed\)"):
            read_manifest(gallery, None if path.name == "gallery.json" else 2)
        path.write_text(json.dumps(json.loads(whole), indent=4))
        assert read_manifest(gallery, None if path.name == "gallery.json" else 2).generation == 2
    shutil.copy(gallery / "generations" / "00000001.json", gallery / "generations" / "00000002.json")
    refuses("it is generation 1", Gallery.open, gallery, generation=2)


def test_a_manifest_that_is_none_is_one_line(gallery: Path) -> None:
    for text in ("[" * 100_000, '{"schema_version": ' + "9" * 5000 + "}", "[]", "\ud800"):
        (gallery / "gallery.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        refuses("gallery.json is damaged", Gallery.open, gallery)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of files as they are read in full, where every file is a large one."""
    names: list[str] = []
    plain: Callable[[Path, FileRecord], list[str]] = checksums.difference

    def difference(path: Path, record: FileRecord) -> list[str]:
        names.append(path.name)
        return plain(path, record)

    monkeypatch.setattr(checksums, "difference", difference)
    monkeypatch.setattr(integrity, "LARGE", 0)
    return names


def test_a_large_file_is_read_in_full_once_by_all_processes(gallery: Path, compared: list[str]) -> None:
    checksums._intact.clear()
    use(gallery)
    assert sorted(compared) == sorted({*compared}) and "index.faiss" in compared
    compared.clear()
    checksums._intact.clear()  # as another process finds it
    use(gallery)
    assert not compared
    (index,) = gallery.glob("segments/*/index.faiss")
    flip(index)
    checksums._intact.clear()
    refuses("index.faiss has changed", use, gallery)
    flip(index)
    checksums._intact.clear()
    use(gallery)
    assert compared == ["index.faiss", "index.faiss"]
    for remembered in (b"", b"[]", b'{"a": 1}', b'{"a": [[]]}', b"\xff", b"[" * 100_000):
        (gallery / CHECKED).write_bytes(remembered)
        checksums._intact.clear()
        compared.clear()
        use(gallery)
        assert "index.faiss" in compared, "what is remembered may be lost or damaged"


def test_a_compaction_measures_folders_that_others_change(gallery: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = compaction.folder_size(gallery)
    assert size == sum(file.stat().st_size for file in gallery.rglob("*") if file.is_file())

    def walk(folder: Path) -> Iterator[Any]:
        yield from ((place, folders, [*names, "deleted.npy"]) for place, folders, names in os.walk(folder))

    monkeypatch.setattr(compaction, "os", SimpleNamespace(walk=walk, stat=os.stat, path=os.path))
    assert compaction.folder_size(gallery) == size and Gallery.open(gallery).compact() > 0
