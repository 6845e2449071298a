"""Arrow files made of the user's: written again when they are damaged, and not read as a whole to find that out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import datasets
import pytest

from xcompat.core.errors import XcompatError
from xcompat.data import cache, load_texts

LINES = [f"line {n}" for n in range(300)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Return the Arrow file of a corpus, and the corpus."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "texts.txt"
    source.write_text("\n".join(LINES))
    load_texts(str(source))
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    return file, str(source)


def change(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))  # another time, however coarse the clock


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "other"])
def test_a_damaged_file_is_written_again(damage: str, made: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    file, source = made
    whole = file.read_bytes()
    place = whole.index(b"line 7") + 5
    flipped = whole[:place] + b"8" + whole[place + 1 :]
    change(file, {"flipped": flipped, "cut": whole[:-100], "emptied": b"", "other": bytes(len(whole))}[damage])
    capsys.readouterr()
    assert load_texts(source)["text"][:] == LINES
    assert "; rebuilding it" in capsys.readouterr().out
    assert file.read_bytes() == whole and load_texts(source)["text"][:] == LINES


@pytest.mark.parametrize("content", [None, "{", "[]", {"arrow_file": 3}, {"arrow_file": {"size": 3}}, "changed"])
def test_a_damaged_record_is_written_again(content: object, made: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    record = made[0].with_suffix(".json")
    whole = json.loads(record.read_text())
    if content is None:
        record.unlink()
    elif content == "changed":
        record.write_text(json.dumps(whole | {"kept": 299}))
    else:
        record.write_text(content if isinstance(content, str) else json.dumps(content))
    assert load_texts(made[1])["text"][:] == LINES
    assert "rebuilding both" in capsys.readouterr().out
    assert json.loads(record.read_text())["kept"] == whole["kept"] == 300


def test_a_file_is_read_as_a_whole_only_when_its_stamp_is_another(
    made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, source = made
    shutil.copy(file, file.with_name("copy"))
    os.utime(file.with_name("copy"), ns=(5, 5))
    compared, difference = [], cache.difference
    monkeypatch.setattr(cache, "difference", lambda path, was: compared.append(path.name) or difference(path, was))
    load_texts(source)
    assert not compared
    file.with_name("copy").replace(file)
    load_texts(source)
    load_texts(source)
    assert compared == [file.name], "a copy is compared once"


def test_files_of_before_there_were_checksums(made: tuple[Path, str]) -> None:
    file, source = made
    record = file.with_suffix(".json")
    record.write_text(json.dumps({key: value for key, value in json.loads(record.read_text()).items() if key != "arrow_file"}))
    assert load_texts(source)["text"][:] == LINES
    change(file, b"no arrow")
    with pytest.raises(XcompatError, match="cannot be read .*; delete the file to rebuild it") as caught:
        load_texts(source)
    assert "\n" not in str(caught.value)
