"""Corpora: every text once, none of the held-out ones, from every format, and clear words when something is wrong."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.data import CorpusSource, PairSource, load_texts
from xcompat.data.corpora import HashSet


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def write(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_are_stripped_and_blanks_and_duplicates_dropped(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "\ufeffa dog\r\n\n  a cat \n \t\nA dog\na dog\nein Hündchen\x85x")
    assert load_texts(path)["text"][:] == ["a dog", "a cat", "A dog", "ein Hündchen\x85x"]


def test_sources_of_all_formats(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one\ntwo\n")
    write(tmp_path / "b.jsonl", '{"text": "two"}\n\n{"text": ["three", ""]}\n')
    pd.DataFrame({"caption": [["four", "one"], ["five"]], "other": [1, 2]}).to_parquet(tmp_path / "c.parquet")
    with tarfile.open(tmp_path / "d.tar", "w") as tar:
        for name, text in (("k1.txt", b"six"), ("k2.txt", b"one")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    datasets.Dataset.from_dict({"sentence": ["seven", " six "]}).save_to_disk(tmp_path / "e")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.png").write_bytes(b"not opened")
    write(tmp_path / "f" / "captions.csv", "image,caption\nx.png,eight\nx.png,seven\n")
    sources = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.parquet", "d.tar")]
    sources += [CorpusSource(path=str(tmp_path / "e"), text_column="sentence"), PairSource(path=str(tmp_path / "f"))]
    texts = load_texts(sources)["text"][:]
    assert texts == ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def test_held_out_captions_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.txt", "A dog, running.\na  dog running\na dog\n!!!\nSTRASSE\n")
    dataset = load_texts(path, exclude=["a dog running", "???", "Straße"])
    assert dataset["text"][:] == ["a dog", "!!!"]
    assert "2 distinct texts of 5 (0 duplicates and 3 held-out captions left out)" in " ".join(capsys.readouterr().out.split())
    assert len(load_texts(path)) == 5  # another cache, not the one without the captions


def test_limit_counts_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xcompat.data.corpora.BATCH", 4)
    path = write(tmp_path / "a.txt", "".join(f"text {n // 2}\n" for n in range(100)))
    assert load_texts(path, limit=6, exclude=["text 0"])["text"][:] == [f"text {n}" for n in range(1, 7)]
    assert len(load_texts(path)) == 50


def test_the_cache_is_reused_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "one\n")
    first = load_texts(path)
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.data.corpora._keep_new_texts", lambda *_: pytest.fail("read again"))
        assert load_texts(path)._fingerprint == first._fingerprint
    write(tmp_path / "a.txt", "one\ntwo\n")
    assert load_texts(path)["text"][:] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", "empty corpus: none of 0 texts"),
        ("a.txt", b"good\n\xff\xfe\n", "a.txt is not UTF-8 text near line"),
        ("a.txt.gz", gzip.compress(b"good line\n" * 1000, mtime=0)[:-9], "a.txt.gz cannot be read after line"),
        ("a.txt.gz", b"no gzip", "a.txt.gz cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not valid JSON"),
        ("a.jsonl", b'["a"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"txet": "a"}\n', "line 1 has no column named text"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read"),
        ("a.tar", b"no tar", "1 of 1 shards cannot be read"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(XcompatError, match=message) as caught:
        load_texts(str(tmp_path / name))
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "hf_cache").rglob("*.arrow"))


def test_missing_files_columns_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"title": "a"}\n')
    (tmp_path / "empty").mkdir()
    cases = {
        "does not exist": str(tmp_path / "gone.txt"),
        "contains no text files": str(tmp_path / "empty"),
        "did you mean 'title'": CorpusSource(path=str(tmp_path / "a.jsonl"), text_column="titel"),
    }
    for message, source in cases.items():
        with pytest.raises(XcompatError, match=message):
            load_texts(source)
    with pytest.raises(XcompatError, match="empty corpus.*no sources"):
        load_texts([])
    with pytest.raises(XcompatError, match=r"none of 1 texts is left \(1 excluded\)"):
        load_texts(str(tmp_path / "a.jsonl"), exclude=["A"])


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=12))
def test_seen_agrees_with_a_python_set(batches: list[list[int]]) -> None:
    seen, known = HashSet(), set()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected
    assert sorted(value for run in seen.runs for value in run.tolist()) == sorted(known)
