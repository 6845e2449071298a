"""Exports replace what they made themselves and nothing else."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from xcompat import Fingerprint, XcompatError
from xcompat.core import files
from xcompat.core.ownership import MARKER, owned_path, read_marker, require_replaceable
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.retrieval import Gallery

MADE_BY = "export example"
OLD = Fingerprint.from_string("old")


def write(path: Path, text: str = "made", **options: object) -> None:
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
        write(tmp_path / name, text)
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
    ("name", "spoilt"), [*itertools.product(["folder"], SPOILT), *itertools.product(["file.txt"], list(SPOILT)[:5])]
)
def test_what_it_did_not_make_is_left_alone(name: str, spoilt: str, tmp_path: Path) -> None:
    place = tmp_path / name
    own = place / "inner" / "a.txt" if name == "folder" else place
    write(place)
    SPOILT[spoilt](place, own, place / MARKER if name == "folder" else tmp_path / f"{name}{MARKER}")
    before = snapshot(tmp_path)
    with pytest.raises(XcompatError, match="by `xcompat export example`; move it, choose another place, or add --overwrite"):
        write(place, "again")
    assert snapshot(tmp_path) == before
    write(place, "again", overwrite=True)
    assert own.read_text() == "again" and not (place / "notes.txt").is_symlink()
    write(place, "its own from here on")


def test_what_comes_while_it_works_is_left_alone(tmp_path: Path) -> None:
    def slowly() -> None:
        with owned_path(tmp_path / "a.txt", MADE_BY) as temporary:
            temporary.write_text("made")
            (tmp_path / "a.txt").write_text("a user's")

    with pytest.raises(XcompatError, match="was not made by"):
        slowly()
    assert snapshot(tmp_path) == {"a.txt": "a user's"}


@pytest.mark.parametrize("first", [True, False], ids=["before the file", "before anything"])
def test_a_kill_before_the_marker_stops_no_later_call(first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt", "first")
    replace, calls = Path.replace, iter(range(9))

    def dying(path: Path, to: Path) -> Path:
        if next(calls) == int(first):
            raise KeyboardInterrupt
        return replace(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "a.txt", "second")
    assert (tmp_path / "a.txt").read_text() == "first"
    write(tmp_path / "a.txt", "third")
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
    with pytest.raises(XcompatError, match="is the current folder or a parent of it"):
        require_replaceable(Path(place), MADE_BY, overwrite)
    assert snapshot(tmp_path) == {"inner/notes.txt": "a user's"}


def test_a_folder_that_a_kill_hid_is_not_taken_for_a_free_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.txt").write_text("a user's")
    hidden = tmp_path / ".docs.12345678.xcompat-partial"
    hidden.mkdir()
    (tmp_path / "docs").rename(hidden / f"docs{files._PREVIOUS}")
    with pytest.raises(XcompatError, match=r"notes.txt was not made by"):
        write(tmp_path / "docs")
    assert snapshot(tmp_path) == {"docs/notes.txt": "a user's"}


def ridge() -> CompatModel:
    return METHODS["ridge"](METHODS["ridge"].config_class(old=describe_old(OLD, dim=8), embedding_dim=16)).eval()


def write_index(path: Path) -> Path:
    index = faiss.IndexFlatIP(8)
    index.add(np.eye(8, dtype=np.float32))
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("kind", ["sentence-transformers", "onnx"])
def test_an_export_deletes_no_folder_of_documents(
    kind: str, folder_of: dict[str, str], tmp_path: Path, run_xcompat: Callable[..., tuple[int, str, str]]
) -> None:
    old = describe_old(OLD, dim=8)
    METHODS["bct"].from_encoder(folder_of["clip"], old=old, classes=["cat", "dog"], dim=8).export(tmp_path / "run" / "model")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("years of work")
    for out, said in (("docs", "thesis.txt was not made by"), ("run", "is an input of"), ("run/model", "is an input of")):
        arguments = ["export", kind, tmp_path / "run", "--out", tmp_path / out, "--space", "own"]
        code, _, printed = run_xcompat(*arguments)
        assert code == 2 and said in printed.splitlines()[-1] and "Traceback" not in printed
    assert (tmp_path / "docs" / "thesis.txt").read_text() == "years of work" and (tmp_path / "run/model/config.json").exists()


def test_exports_keep_other_indexes(tmp_path: Path, run_xcompat: Callable[..., tuple[int, str, str]]) -> None:
    ridge().export(tmp_path / "run" / "model")
    for name in ("old.faiss", "other.faiss"):
        write_index(tmp_path / name)
    before = (tmp_path / "old.faiss").read_bytes()
    command = ["export", "faiss", tmp_path / "old.faiss", "--model", tmp_path / "run", "--out"]
    for out, flag, said in (
        ("old.faiss", [], "is an input of"),
        ("old.faiss", ["--overwrite"], "is an input of"),
        ("other.faiss", [], "not made"),
    ):
        code, _, printed = run_xcompat(*command, tmp_path / out, *flag)
        assert code == 2 and said in printed
    assert (tmp_path / "old.faiss").read_bytes() == (tmp_path / "other.faiss").read_bytes() == before
    for flag in (["--overwrite"], [], []):
        code, printed, more = run_xcompat(*command, tmp_path / "other.faiss", *flag)
        assert code == 0 and "a faiss file does not record its model" in printed + more
    assert faiss.read_index(str(tmp_path / "other.faiss")).d == 16


def test_a_gallery_knows_whose_embeddings_go_into_an_export(tmp_path: Path) -> None:
    from xcompat.export import to_faiss

    def gallery(name: str, version: Fingerprint) -> Gallery:
        made = Gallery.create(tmp_path / name, version, dim=8)
        made.add(np.eye(8, dtype=np.float32), [f"{name} {row}" for row in range(8)])
        made.commit()
        return made

    right, other = gallery("right", OLD), gallery("other", Fingerprint.from_string("of the same dimension"))
    to_faiss(ridge(), right.path, tmp_path / "new.faiss")
    about = read_marker(tmp_path / "new.faiss")
    assert about is not None and about.about["vectors"] == str(OLD) and about.about["queries"].startswith("RidgeModel@")
    with pytest.raises(XcompatError, match="of the same dimension@"):
        to_faiss(ridge(), other.path, tmp_path / "wrong.faiss")
    right.add(np.ones((1, 8), np.float32), ["one more"])
    right.commit()
    with pytest.raises(XcompatError, match="is not a single faiss index; merge it with `xcompat gallery compact"):
        to_faiss(ridge(), right.path, tmp_path / "wrong.faiss")
    adopted = Gallery.from_faiss(tmp_path / "adopted", write_index(tmp_path / "own.faiss"), [str(row) for row in range(8)], OLD)
    to_faiss(ridge(), adopted.path, tmp_path / "from_adopted.faiss")
    assert not (tmp_path / "wrong.faiss").exists() and (tmp_path / "from_adopted.faiss").exists()


def test_the_quickstart_replaces_no_other_recipe(tmp_path: Path) -> None:
    from xcompat.quickstart.characters import run_quickstart

    (tmp_path / "data").mkdir()
    (tmp_path / "recipe.yaml").write_text("method: bct\n")
    with pytest.raises(XcompatError, match=r"recipe.yaml differs from the quickstart's recipe"):
        run_quickstart(tmp_path)
    assert (tmp_path / "recipe.yaml").read_text() == "method: bct\n"
