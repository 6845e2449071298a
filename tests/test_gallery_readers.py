"""Readers while others write, and who may write: what is read is one state, and what is refused is really gone."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_gallery import CLIP, names, vectors
from test_gallery_leftovers import a_gallery, contents, killed

from xcompat import XcompatError
from xcompat.core.errors import GenerationGoneError
from xcompat.retrieval import Gallery, commands, manifest, snapshot
from xcompat.retrieval.lock import lock_writer


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
def test_states_are_listed_whatever_happens_meanwhile(
    after: str, happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_verification_overtaken_by_a_compaction_verifies_what_is_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    between(monkeypatch, snapshot, "is_current_whole", Gallery.open(gallery.path).compact)
    assert commands.verify(gallery)["passed"]
    assert "20 items in 1 segment" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(GenerationGoneError, match="open the gallery again"):
        gallery.damage()


@pytest.mark.parametrize("place", ["faiss", "milvus"])
def test_a_reader_whose_state_was_compacted_away_is_told_to_open_the_gallery_again(place: str, tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery", milvus=str(tmp_path / "v.db") if place == "milvus" else None)
    cold, warm = Gallery.open(gallery.path), Gallery.open(gallery.path)
    before = contents(warm)
    Gallery.open(gallery.path).compact()
    asking = [lambda: contents(cold), lambda: cold.find(["part 0 1"]), cold.damage, cold.verify]
    for ask in asking + ([lambda: contents(warm)] if place == "milvus" else []):
        with pytest.raises(GenerationGoneError, match=r"^generation 2 of .* was compacted away .*; open the gallery again$"):
            ask()
    assert place == "milvus" or contents(warm) == before, "a file that is open stays readable"
    assert contents(Gallery.open(gallery.path)) == before


def test_a_file_that_is_gone_for_another_reason_is_named(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery")
    index = gallery.path / "segments" / gallery.segments[0].record.name / "index.faiss"
    index.unlink()
    with pytest.raises(XcompatError, match="index.faiss") as refused:
        contents(Gallery.open(gallery.path))
    assert not isinstance(refused.value, GenerationGoneError)
    assert any(f"{index} is missing" in line for line in Gallery.open(gallery.path).damage())


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for storage that has no locks."""

    def refused(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refused)


@pytest.mark.usefixtures("no_flock")
def test_one_writer_at_a_time_where_storage_has_no_locks(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery", 1)
    gallery.add(vectors(1, 8), ["new"])
    with pytest.raises(XcompatError) as refused:
        Gallery.open(gallery.path).remove(["part 0 1"])
    said = str(refused.value)
    assert f"(process {os.getpid()} on {socket.gethostname()}" in said and f"delete {gallery.path / '.lock.owner'}" in said
    assert gallery.commit() == 2 and len(gallery) == 11 and gallery.damage() == []
    other = Gallery.open(gallery.path)
    other.remove(["part 0 1"])
    assert other.commit() == 3


@pytest.mark.usefixtures("no_flock")
def test_a_writer_that_died_holds_no_lock_where_storage_has_none(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery", 1)

    def write() -> None:
        gallery.add(vectors(1, 8), ["never"])
        os._exit(9)

    killed(write)
    assert (gallery.path / ".lock.owner").exists()
    gallery.add(vectors(1, 8), ["new"])
    assert gallery.commit() == 2 and gallery.find(["new", "never"]) == [CLIP, None]


@pytest.mark.usefixtures("no_flock")
def test_a_writer_on_another_machine_is_named(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery", 1)
    (gallery.path / ".lock.owner").write_text("123\nelsewhere\n")
    with pytest.raises(
        XcompatError, match=r"\(process 123 on elsewhere\), on storage without locks; .* if it is no longer running"
    ):
        gallery.add(vectors(1, 8), ["new"])
    (gallery.path / ".lock.owner").unlink()
    gallery.add(vectors(1, 8), ["new"])
    assert gallery.commit() == 2


def test_one_thread_may_add_and_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("no_flock")
def test_one_thread_may_add_and_another_commit_where_storage_has_no_locks(tmp_path: Path) -> None:
    lock = lock_writer(tmp_path)
    assert not lock.is_thread_local()
    lock.release()


def test_what_else_is_wrong_with_the_lock_is_said_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = a_gallery(tmp_path / "gallery", 1)
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        gallery.add(vectors(1, 8), names(1))


def test_a_writer_who_finds_no_gallery_any_more_leaves_no_lock_behind(tmp_path: Path) -> None:
    gallery = a_gallery(tmp_path / "gallery", 1)
    aside = (gallery.path / "gallery.json").rename(tmp_path / "gallery.json")
    with pytest.raises(XcompatError, match="is not a gallery"):
        gallery.add(vectors(1, 8), ["new"])
    aside.rename(gallery.path / "gallery.json")
    gallery.add(vectors(1, 8), ["new"])
    assert gallery.commit() == 2
