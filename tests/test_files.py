"""Atomic, durable writes that lose nothing by an error, a kill or a full disk, and exports that replace only their own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from conftest import Run, refuses, store
from safetensors.torch import save_file
from test_gallery_leftovers import at_call, killed
from test_index_gallery import write_index

from xcompat import Fingerprint, XcompatError
from xcompat.core import failures, files
from xcompat.core.checksums import difference, file_record
from xcompat.core.files import atomic_path, clear_leftovers, files_below, list_entries, read_json, write_array, write_json
from xcompat.core.ownership import MARKER, owned_path, read_marker, require_replaceable
from xcompat.export import to_faiss
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.quickstart.characters import run_quickstart
from xcompat.retrieval import Gallery
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


@pytest.mark.parametrize("step", range(9))
def test_a_kill_at_any_step_leaves_one_of_both(way: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = folder_of(tmp_path / "target", "old.txt")
    with monkeypatch.context() as patched:
        at_call(patched, step, (files, "_exchange"))
        killed(lambda: replace_folder(target))
    if way == "exchange":
        assert content(target) in (["old.txt"], ["new.txt"])
    replace_folder(target)  # the next start
    assert content(target) == ["new.txt"] and content(tmp_path) == ["target"]


def test_only_leftovers_of_ended_writers_are_cleared(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "a") as temporary:
        temporary.write_text("begun")
        clear_leftovers(tmp_path)
        with atomic_path(tmp_path / "a") as other:
            other.write_text("other")
        assert temporary.read_text() == "begun"
    assert (tmp_path / "a").read_text() == "begun" and content(tmp_path) == ["a"]
    ours, theirs = ".a.12345678.xcompat-partial", ".a.12345678.partial"  # another program's download, for example
    for name in (ours, theirs, ".git", ".a.partial", "a.12345678.xcompat-partial", ".mine.12345678"):
        folder_of(tmp_path / name, "x")
    (tmp_path / ".b.12345678.xcompat-partial").symlink_to(tmp_path / ".git")
    clear_leftovers(tmp_path)
    kept = [theirs, ".a.partial", ".b.12345678.xcompat-partial", ".git", ".mine.12345678", "a", "a.12345678.xcompat-partial"]
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


def test_places_of_another_kind_are_kept_and_long_names_taken(tmp_path: Path) -> None:
    folder_of(tmp_path / "folder", "old.txt")
    with pytest.raises(IsADirectoryError), atomic_path(tmp_path / "folder") as temporary:
        temporary.write_text("a file")
    assert content(tmp_path / "folder") == ["old.txt"]
    with pytest.raises(NotADirectoryError):
        replace_folder(tmp_path / "folder" / "old.txt")
    assert (tmp_path / "folder" / "old.txt").read_text() == "folder old.txt"
    with atomic_path(tmp_path / ("n" * 255)) as temporary:
        temporary.write_text("whole")
    assert (tmp_path / ("n" * 255)).read_text() == "whole"


def test_damaged_json_and_changed_files_are_named(tmp_path: Path) -> None:
    for text in (b"{", b"\xff", b"[" * 100_000, b"9" * 5000, b""):
        (tmp_path / "a.json").write_bytes(text)
        refuses(r"a\.json is not valid JSON", read_json, tmp_path / "a.json")
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


@cache
def exported() -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(torch.nn.Linear(80, 80), (torch.ones(1, 80),), dynamo=True, verbose=False)
    assert program is not None
    return program


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


WRITERS: dict[str, Callable[[Path], object]] = {
    "faiss": faiss_index,
    "rows": rows,
    "array": lambda path: write_array(path, np.ones(7000, np.float32)),
    "weights": lambda path: save_file({"weight": torch.ones(7000)}, path),
    "json": lambda path: write_json(path, {"text": "x" * 30_000}),
    "onnx": lambda path: exported().save(path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_is_whole_or_its_writer_fails(kind: str, tiny_disk: Path, tmp_path: Path) -> None:
    write = WRITERS[kind]
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


MADE_BY = "export example"
OLD, EYE = Fingerprint.from_string("old"), np.eye(8, dtype=np.float32)


def make(path: Path, text: str = "made", **options: object) -> None:
    with owned_path(path, MADE_BY, **options) as temporary:  # type: ignore[arg-type]
        if path.suffix:
            temporary.write_text(text)
        else:
            (temporary / "inner").mkdir(parents=True)
            (temporary / "inner" / "a.txt").write_text(text)


def snapshot(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", ["folder", "file.txt"])
def test_a_command_replaces_its_own(name: str, tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        make(tmp_path / name, text)
        assert text in snapshot(tmp_path).values()
    made = read_marker(tmp_path / name)
    assert made is not None and made.made_by == MADE_BY and len(made.files) == 1


SPOILT: dict[str, Callable[[Path, Path, Path], object]] = {
    "another's": lambda place, own, marker: (marker.unlink(), own.write_text("a user's")),
    "changed": lambda place, own, marker: own.write_text("edited"),
    "of another command": lambda place, own, marker: marker.write_text(marker.read_text().replace(MADE_BY, "export other")),
    "marker gone": lambda place, own, marker: marker.unlink(),
    "marker damaged": lambda place, own, marker: marker.write_text("{}"),
    "more": lambda place, own, marker: (place / "notes.txt").write_text("a user's"),
    "a link": lambda place, own, marker: (place / "notes.txt").symlink_to(place / "nowhere"),
}


@pytest.mark.parametrize(
    ("name", "spoilt"), [*(("folder", how) for how in SPOILT), *(("a.txt", how) for how in list(SPOILT)[:5])]
)
def test_what_it_did_not_make_is_left_alone(name: str, spoilt: str, tmp_path: Path) -> None:
    place = tmp_path / name
    own = place / "inner" / "a.txt" if name == "folder" else place
    make(place)
    SPOILT[spoilt](place, own, place / MARKER if name == "folder" else tmp_path / f"{name}{MARKER}")
    before = snapshot(tmp_path)
    refuses("by `xcompat export example`; move it, choose another place, or add --overwrite", make, place, "again")
    assert snapshot(tmp_path) == before
    make(place, "again", overwrite=True)
    assert own.read_text() == "again" and not (place / "notes.txt").is_symlink()
    make(place, "its own from here on")


def test_what_comes_while_it_works_is_left_alone(tmp_path: Path) -> None:
    def slowly() -> None:
        with owned_path(tmp_path / "a.txt", MADE_BY) as temporary:
            temporary.write_text("made")
            (tmp_path / "a.txt").write_text("a user's")

    refuses("was not made by", slowly)
    assert snapshot(tmp_path) == {"a.txt": "a user's"}


@pytest.mark.parametrize("first", [True, False], ids=["before the file", "before anything"])
def test_a_kill_before_the_marker_stops_no_later_call(first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.txt", "first")
    replace, calls = Path.replace, iter(range(9))

    def dying(path: Path, to: Path) -> Path:
        if next(calls) == int(first):
            raise KeyboardInterrupt
        return replace(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "a.txt", "second")
    assert (tmp_path / "a.txt").read_text() == "first"
    make(tmp_path / "a.txt", "third")
    assert (tmp_path / "a.txt").read_text() == "third"


@pytest.mark.parametrize("overwrite", [True, False])
def test_what_is_read_is_never_replaced(overwrite: bool, tmp_path: Path) -> None:
    source = tmp_path / "run" / "model" / "in.txt"
    source.parent.mkdir(parents=True)
    source.write_text("a user's")
    os.link(source, tmp_path / "same.txt")
    (tmp_path / "link.txt").symlink_to(source)
    for place in (source, source.parent, tmp_path / "run", tmp_path / "same.txt", tmp_path / "link.txt"):
        with pytest.raises(XcompatError, match="is an input of `xcompat export example` .*in.txt.; write to another place"):
            require_replaceable(place, MADE_BY, overwrite, [source])
    require_replaceable(tmp_path / "run" / "exported", MADE_BY, overwrite, [source])


@pytest.mark.parametrize("overwrite", [False, True, None])
@pytest.mark.parametrize("place", [".", "..", "./", "../inner"])
def test_current_folder_is_refused(place: str, overwrite: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "notes.txt").write_text("a user's")
    monkeypatch.chdir(tmp_path / "inner")
    refuses("is the current folder or a parent of it", require_replaceable, Path(place), MADE_BY, overwrite)
    assert snapshot(tmp_path) == {"inner/notes.txt": "a user's"}


def test_a_folder_that_a_kill_hid_is_not_taken_for_a_free_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.txt").write_text("a user's")
    hidden = tmp_path / ".docs.12345678.xcompat-partial"
    hidden.mkdir()
    (tmp_path / "docs").rename(hidden / f"docs{files._PREVIOUS}")
    refuses(r"notes.txt was not made by", make, tmp_path / "docs")
    assert snapshot(tmp_path) == {"docs/notes.txt": "a user's"}


def ridge() -> CompatModel:
    return METHODS["ridge"](METHODS["ridge"].config_class(old=describe_old(OLD, dim=8), embedding_dim=16)).eval()


@pytest.mark.parametrize("kind", ["sentence-transformers", "onnx"])
def test_an_export_deletes_no_folder_of_documents(kind: str, folder_of: dict[str, str], tmp_path: Path, run_xcompat: Run) -> None:
    old = describe_old(OLD, dim=8)
    METHODS["bct"].from_encoder(folder_of["clip"], old=old, classes=["cat", "dog"], dim=8).export(tmp_path / "run" / "model")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("years of work")
    for out, said in (("docs", "thesis.txt was not made by"), ("run", "is an input of"), ("run/model", "is an input of")):
        assert said in run_xcompat.refusal("export", kind, tmp_path / "run", "--out", tmp_path / out, "--space", "own")
    assert (tmp_path / "docs" / "thesis.txt").read_text() == "years of work" and (tmp_path / "run/model/config.json").exists()


def test_exports_keep_other_indexes(tmp_path: Path, run_xcompat: Run) -> None:
    ridge().export(tmp_path / "run" / "model")
    for name in ("old.faiss", "other.faiss"):
        write_index(tmp_path / name, EYE)
    before = (tmp_path / "old.faiss").read_bytes()
    command = ["export", "faiss", tmp_path / "old.faiss", "--model", tmp_path / "run", "--out"]
    for more in ([], ["--overwrite"]):
        assert "is an input of" in run_xcompat.refusal(*command, tmp_path / "old.faiss", *more)
    assert "not made" in run_xcompat.refusal(*command, tmp_path / "other.faiss")
    assert (tmp_path / "old.faiss").read_bytes() == (tmp_path / "other.faiss").read_bytes() == before
    for flag in (["--overwrite"], [], []):
        code, printed, more = run_xcompat(*command, tmp_path / "other.faiss", *flag)
        assert code == 0 and "a faiss file does not record its model" in printed + more
    assert faiss.read_index(str(tmp_path / "other.faiss")).d == 16


def test_a_gallery_knows_whose_embeddings_go_into_an_export(tmp_path: Path) -> None:
    names, stranger = [str(row) for row in range(8)], Fingerprint.from_string("of the same dimension")
    right = store(Gallery.create(tmp_path / "right", OLD, dim=8), EYE, names)
    other = store(Gallery.create(tmp_path / "other", stranger, dim=8), EYE, names)
    to_faiss(ridge(), right.path, tmp_path / "new.faiss")
    about = read_marker(tmp_path / "new.faiss")
    assert about is not None and about.about["vectors"] == str(OLD) and about.about["queries"].startswith("RidgeModel@")
    refuses("of the same dimension@", to_faiss, ridge(), other.path, tmp_path / "wrong.faiss")
    store(right, np.ones((1, 8), np.float32), ["one more"])
    with pytest.raises(XcompatError, match="is not a single faiss index; merge it with `xcompat gallery compact"):
        to_faiss(ridge(), right.path, tmp_path / "wrong.faiss")
    adopted = Gallery.from_faiss(tmp_path / "adopted", write_index(tmp_path / "own.faiss", EYE), names, OLD)
    to_faiss(ridge(), adopted.path, tmp_path / "from_adopted.faiss")
    assert not (tmp_path / "wrong.faiss").exists() and (tmp_path / "from_adopted.faiss").exists()


def test_the_quickstart_replaces_no_other_recipe(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "recipe.yaml").write_text("method: bct\n")
    refuses(r"recipe.yaml differs from the quickstart's recipe", run_quickstart, tmp_path)
    assert (tmp_path / "recipe.yaml").read_text() == "method: bct\n"
