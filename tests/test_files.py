"""Durable, atomic writes: old or new at every instant, nothing lost by an error or a full disk, nothing left by the dead."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xcompat import XcompatError
from xcompat.core import failures, files
from xcompat.core.checksums import difference, file_record
from xcompat.core.files import (
    atomic_path,
    clear_leftovers,
    files_below,
    list_entries,
    read_json,
    write_array,
    write_json,
)
from xcompat.retrieval.faiss_building import make_index
from xcompat.retrieval.faiss_index import write_faiss
from xcompat.retrieval.items import Items
from xcompat.retrieval.segment import write_rows


def folder_of(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text(f"{path.name} {name}")
    return path


def replace_folder(path: Path) -> None:
    with atomic_path(path) as temporary:
        folder_of(temporary, "new.txt")


def content(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replace folders as Linux can, and as every other system does."""
    if request.param == "two renames":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    return str(request.param)


def test_an_error_at_any_step_leaves_the_old_folder(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that fails after the old folder was set aside must not take it along."""
    rename = Path.rename
    failed = 0
    for step in range(4):
        target, count = folder_of(tmp_path / str(step) / "target", "old.txt"), iter(range(100))

        def failing(path: Path, to: Path, step: int = step, count: Any = count) -> Path:
            if next(count) == step:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return rename(path, to)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", failing)
            try:
                replace_folder(target)
            except OSError:
                failed += 1
                assert content(target) == ["old.txt"]
        clear_leftovers(target.parent)
        assert content(target) in (["old.txt"], ["new.txt"]) and content(target.parent) == ["target"]
    assert failed == (2 if way == "two renames" else 0)


def test_what_can_be_put_back_neither_now_nor_at_once_is_put_back_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target, rename, done = folder_of(tmp_path / "target", "old.txt"), Path.rename, []

    def only_the_first(path: Path, to: Path) -> Path:
        done.append(path)
        if len(done) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", only_the_first)
        with pytest.raises(OSError, match="Input/output error"):
            replace_folder(target)
    assert not target.exists()
    clear_leftovers(tmp_path)
    assert content(target) == ["old.txt"] and content(tmp_path) == ["target"]


def killed_before(step: int, target: Path) -> None:
    """Replace a folder in a process that is killed before its nth call that changes something."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    left = iter(range(step))

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return run

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (os, "rmdir"), (os, "unlink"), (files, "_exchange")):
        setattr(owner, name, dying(getattr(owner, name)))
    try:
        replace_folder(target)
    finally:
        os._exit(0)


@pytest.mark.parametrize("step", range(8))
def test_a_kill_between_any_two_steps_leaves_one_of_both(way: str, step: int, tmp_path: Path) -> None:
    target = folder_of(tmp_path / "target", "old.txt")
    killed_before(step, target)
    if way == "exchange":
        assert content(target) in (["old.txt"], ["new.txt"])
    replace_folder(target)  # the next start
    assert content(target) == ["new.txt"] and content(tmp_path) == ["target"]


def test_what_a_living_writer_has_begun_is_left_alone(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("begun")
        clear_leftovers(tmp_path)
        with atomic_path(tmp_path / "a") as other:
            other.write_text("other")
        assert temporary.read_text() == "begun"
    assert (tmp_path / "a").read_text() == "begun" and content(tmp_path) == ["a"]


def test_only_leftovers_are_cleared(tmp_path: Path) -> None:
    ours, theirs = ".a.12345678.xcompat-partial", ".a.12345678.partial"  # another program's download, for example
    for name in (ours, theirs, ".git", ".a.partial", "a.12345678.xcompat-partial", ".mine.12345678"):
        folder_of(tmp_path / name, "x")
    (tmp_path / ".b.12345678.xcompat-partial").symlink_to(tmp_path / ".git")
    clear_leftovers(tmp_path)
    kept = [theirs, ".a.partial", ".b.12345678.xcompat-partial", ".git", ".mine.12345678", "a.12345678.xcompat-partial"]
    assert content(tmp_path) == sorted(kept)
    assert content(tmp_path / ".git") == ["x"]
    clear_leftovers(tmp_path / "missing")


def test_data_are_flushed_before_their_name_and_the_name_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, str]] = []

    def seen(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Any, *rest: Any) -> Any:
            place = str(Path(f"/proc/self/fd/{first}").readlink()) if isinstance(first, int) else str(rest[0] if rest else first)
            steps.append((name, Path(place).name if "partial/" not in place else f"partial/{Path(place).name}"))
            return original(first, *rest)

        return run

    monkeypatch.setattr(os, "fsync", seen("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", seen("replace", Path.replace))
    with atomic_path(tmp_path / "made" / "folder") as temporary:
        folder_of(temporary / "inner", "file.txt")
    synced = [("fsync", name) for name in (tmp_path.name, "partial/file.txt", "partial/inner", "partial/folder")]
    assert steps == [*synced, ("replace", "folder"), ("fsync", "made")]


def test_a_file_takes_no_folder_s_place_and_a_folder_no_file_s(tmp_path: Path) -> None:
    folder_of(tmp_path / "folder", "old.txt")
    with pytest.raises(IsADirectoryError), atomic_path(tmp_path / "folder") as temporary:
        temporary.write_text("a file")
    assert content(tmp_path / "folder") == ["old.txt"]
    with pytest.raises(NotADirectoryError):
        replace_folder(tmp_path / "folder" / "old.txt")
    assert (tmp_path / "folder" / "old.txt").read_text() == "folder old.txt"


def test_a_name_as_long_as_the_system_allows(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)
    with atomic_path(target) as temporary:
        temporary.write_text("whole")
    assert target.read_text() == "whole"


@pytest.mark.parametrize(
    "text", [b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b""], ids=["cut", "bytes", "deep", "digits", "empty"]
)
def test_what_is_no_json_is_one_line(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(XcompatError, match=r"a\.json is not valid JSON") as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_every_difference_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"whole")
    record = file_record(file)
    assert difference(file, record) == []
    for bad, said in ((b"while", "has changed since"), (b"who", "has 3 bytes, expected 5")):
        file.write_bytes(bad)
        assert said in difference(file, record)[0]
    file.unlink()
    assert "is missing" in difference(file, record)[0]


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u8", "|u1", "?", ">i2"])
@pytest.mark.parametrize("shape", [(0,), (7,), (3, 5), (0, 4), ()])
def test_an_array_is_written_byte_for_byte_as_numpy_writes_it(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for given in (array, array.T, np.repeat(array[..., None], 2, -1)[..., 0]):
        write_array(tmp_path / "own.npy", given)
        np.save(tmp_path / "numpy.npy", np.array(given, order="C"), allow_pickle=False)
        assert (tmp_path / "own.npy").read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "kept" / "inner").mkdir(parents=True)
    (tmp_path / "kept" / "inner" / "a.txt").write_text("a")
    (tmp_path / "kept" / "b.txt").write_text("b")
    (tmp_path / "kept" / "link").symlink_to("inner")
    found = [file.relative_to(tmp_path).as_posix() for file in files_below(tmp_path)]
    assert found == ["kept/b.txt", "kept/inner/a.txt", "kept/link"]
    assert list_entries(tmp_path / "kept", "*.txt") == [tmp_path / "kept" / "b.txt"] and list_entries(tmp_path / "none") == []

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", refuse)  # root may read whatever its permissions
    monkeypatch.setattr(os, "scandir", refuse)
    for look in (list_entries, lambda folder: list(files_below(folder))):
        with pytest.raises(PermissionError):
            look(tmp_path / "kept")


def test_a_temporary_folder_that_could_not_be_removed_is_not_published(tmp_path, monkeypatch):
    kept = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda folder, ignore_errors=False: None if ignore_errors else kept(folder))
    with atomic_path(tmp_path / "made") as temporary:
        temporary.mkdir()
        write_json(temporary / "inner.json", 1)
        assert len(list(temporary.iterdir())) == 2, "what the inner writer could not remove"
    assert [file.name for file in (tmp_path / "made").iterdir()] == ["inner.json"]


PAGE = 4096
PAGES = 20  # of the largest of the files, and some more


def faiss_index(path: Path) -> None:
    index = make_index("Flat", 8, "ip")
    index.add(np.ones((1500, 8), np.float32))  # no multiple of a page, so that the last bytes are written when it is closed
    write_faiss(index, path)


def rows(path: Path) -> None:
    path.mkdir()
    write_rows(path, Items(ids=[f"item {number}" for number in range(600)], metadata=[None] * 600))


def array(path: Path) -> None:
    write_array(path, np.ones(7000, np.float32))


def weights(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(7000)}, path)


def json(path: Path) -> None:
    write_json(path, {"text": "x" * 30_000})


def onnx(path: Path) -> None:
    exported().save(path)


@cache
def exported() -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(torch.nn.Linear(80, 80), (torch.ones(1, 80),), dynamo=True, verbose=False)
    assert program is not None
    return program


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


@pytest.mark.parametrize("write", [faiss_index, rows, array, weights, json, onnx])
def test_a_file_is_whole_or_its_writer_says_that_it_is_not(
    write: Callable[[Path], None], tiny_disk: Path, tmp_path: Path
) -> None:
    write(tmp_path / "whole")
    whole, refused = size_of(tmp_path / "whole"), 0
    for pages in range(PAGES):
        filler = tiny_disk / "filler"
        filler.write_bytes(bytes((os.statvfs(tiny_disk).f_bavail - pages) * PAGE))
        said = None
        try:
            with atomic_path(tiny_disk / "file") as temporary:
                write(temporary)
        except Exception as error:
            said = error
        if said is None:
            assert size_of(tiny_disk / "file") == whole
        else:
            assert "no space left" in str(failures.explain(said)), said
            assert not (tiny_disk / "file").exists()
            refused += 1
        assert {path.name for path in tiny_disk.iterdir()} <= {"filler", "file"}, "nothing half-written"
        subprocess.run(["rm", "-r", *tiny_disk.iterdir()], check=True)
    assert 0 < refused < PAGES, "some disks were too small, some were not"


@pytest.mark.parametrize("numbers", [1, 10**6])
def test_what_pytorch_says_of_a_full_disk_is_understood(numbers: int) -> None:
    with pytest.raises(RuntimeError) as said:
        torch.save({"state": torch.zeros(numbers)}, "/dev/full")
    assert "no space left" in str(failures.explain(said.value))
