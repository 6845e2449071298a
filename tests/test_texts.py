"""Texts as items of every kind of table, values that tables have and JSON does not, and the choice of metadata columns."""

from __future__ import annotations

import datetime
import gzip
import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from xcompat import Fingerprint
from xcompat.core.errors import XcompatError
from xcompat.core.json_values import JsonColumns
from xcompat.core.surrogates import decode_utf8, replace_surrogates
from xcompat.data import PairSource, TextSource, load_pairs, load_text_items, split_passages
from xcompat.retrieval import Gallery

Run = Callable[..., tuple[int, str, str]]
DAY = datetime.datetime(2020, 1, 2, 3, 4, 5)


def write_table(folder: Path) -> Path:
    columns = {
        "id": ["007", "010"],
        "text": ["a bear", "a bee"],
        "at": [DAY, None],
        "day": [DAY.date(), DAY.date()],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "thumb": [b"\0\1", b"\2"],
        "score": [math.inf, math.nan],
        "year": [2020, 2021],
        "nested": [{"at": DAY, "tags": ["x", "y"]}, {"at": DAY, "tags": []}],
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    return folder / "t.parquet"


def test_values_without_json_become_text_or_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_text_items(str(write_table(tmp_path)))
    first, second = map(json.loads, loaded["metadata"][:])
    stamp = "2020-01-02T03:04:05"
    nested = {"at": stamp, "tags": ["x", "y"]}
    assert first == {"at": stamp, "day": "2020-01-02", "price": "1.50", "score": "inf", "year": 2020, "nested": nested}
    assert second["year"] == 2021 and "score" not in second and "at" not in second
    said = capsys.readouterr().out.replace("\n", " ")
    assert "metadata: price is kept as text, e.g. '1.50'; choose columns with --metadata COLUMN" in said
    assert "metadata: thumb drops values of type bytes" in said


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (("--metadata", "year", "--metadata", "price"), {"year", "price", "text"}),
        (("--no-metadata",), {"text"}),
        (("--no-metadata", "--no-keep-text"), set()),
    ],
)
def test_metadata_columns(options: tuple[str, ...], keys: set[str], run: Run, tmp_path: Path, folder_of: dict[str, str]) -> None:
    table, gallery = write_table(tmp_path), tmp_path / "gallery"
    code, _, err = run("build", table, "--model", folder_of["clip"], "--out", gallery, *options)
    assert (code, err) == (0, "")
    [about] = Gallery.open(gallery).metadata(["007"])
    assert set(about or {}) == keys


def test_wrong_metadata_options_are_one_line(run: Run, tmp_path: Path, folder_of: dict[str, str]) -> None:
    build = ("build", write_table(tmp_path), "--model", folder_of["clip"], "--out", tmp_path / "g", "--metadata")
    for options, said in ((["yaer"], "has no column 'yaer'; did you mean 'year'"), (["year", "--no-metadata"], "be combined")):
        code, _, err = run(*build, *options)
        assert code == 2 and said in err and not (tmp_path / "g").exists()


def test_metadata_of_captions_are_chosen_too(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "a.png", "text": "half \\ud83d", "score": Infinity, "colour": "red", "year": 2020}\n'
    )
    source = PairSource(path=str(tmp_path))
    about = json.loads(load_pairs(source, metadata=True)[0]["metadata"])
    assert about == {"score": "inf", "colour": "red", "year": 2020}
    assert json.loads(load_pairs(source, metadata=["year"])[0]["metadata"]) == {"year": 2020}
    assert load_pairs(source)[0]["caption"] == ["half \ufffd"]


def test_the_python_api_keeps_timestamps_as_text(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("m"), dim=4)
    about = [{"at": pd.Timestamp(DAY), "nan": math.nan, "empty": "", "half": "\ud83d", "raw": b"x", "n": np.int64(3)}]
    gallery.add(np.eye(4, dtype=np.float32)[:1], ["x"], about)
    gallery.commit("add")
    assert gallery.metadata(["x"]) == [{"at": DAY.isoformat(), "nan": None, "empty": "", "half": "\ufffd", "n": 3}]


@given(
    st.dictionaries(
        st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=9)
    )
)
def test_converted_rows_are_always_json(row: dict[str, object]) -> None:
    text = json.dumps(JsonColumns().convert(row), allow_nan=False, ensure_ascii=False)
    assert text.encode()


@given(st.text(st.characters(exclude_categories=())))
def test_replaced_texts_are_always_utf8(text: str) -> None:
    replaced = replace_surrogates(text)
    replaced.encode()
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert replaced == text
        assert decode_utf8(text.encode()) == text


SURROGATE = b"\xed\xa0\xbd"  # U+D83D as bytes, as some databases write it


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("t.jsonl", b'{"id": "a", "text": "fine"}\n{"id": "b\\ud83d", "text": "x \\ud83d", "k": "\\udc00"}\n', "line 2"),
        ("t.jsonl", b'{"id": "a", "text": "fine"}\n{"id": "b' + SURROGATE + b'", "text": "x ' + SURROGATE + b'"}\n', "line 2"),
        ("t.csv", b"id,text\na,fine \xc3\xa9\nb" + SURROGATE + b",x " + SURROGATE + b"\n", "line 3"),
        ("t.txt", b"fine\nx " + SURROGATE + b"\n", "line 2"),
    ],
)
def test_surrogates_are_named(name: str, content: bytes, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_bytes(content)
    loaded = load_text_items(TextSource(path=str(tmp_path / name), keep_text=True))
    assert loaded[1]["text"].startswith("x \ufffd")
    said = capsys.readouterr().out.replace("\n", "")
    assert "1 row contains half a character" in said and f"{name} {where}" in said


def test_parquet_texts_that_are_not_utf8_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = pa.array([b"fine", b"x " + SURROGATE, None], pa.binary())
    broken = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    pq.write_table(pa.table({"id": ["a", "b", "c"], "text": broken, "year": [1, 2, 3]}), tmp_path / "t.parquet")
    loaded = load_text_items(str(tmp_path / "t.parquet"))
    assert loaded["text"][:] == ["fine", "x \ufffd"] and json.loads(loaded[1]["metadata"]) == {"year": 2}
    assert "t.parquet row 2" in capsys.readouterr().out.replace("\n", "")


def test_files_beside_texts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("a bear")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "inner").mkdir()
    assert len(load_text_items(str(tmp_path))) == 1
    assert "3 files (b.pdf, inner, .DS_Store) are not read" in capsys.readouterr().out.replace("\n", " ")


def test_a_query_with_half_a_character_is_searched(run: Run, tmp_path: Path, folder_of: dict[str, str]) -> None:
    gallery, model = tmp_path / "gallery", folder_of["clip"]
    run("build", write_table(tmp_path), "--model", model, "--out", gallery)
    code, out, err = run("search", gallery, "a \udcff bear", "--model", model, "--top-k", 1, "--csv")
    assert code == 0, err
    assert out.count("\n") >= 2


ROWS = [{"id": "b", "title": "Bears", "text": "bears sleep in winter"}, {"id": "a", "title": "Ants", "text": "ants work all day"}]


def _written(folder, name):
    file = folder / name
    lines = [json.dumps(row) for row in ROWS]
    if name == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(file)
    elif name.endswith(".jsonl"):
        file.write_text("\n".join(lines))
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress("\n".join(lines).encode()))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    else:
        separator = "," if name.endswith(".csv") else "\t"
        file.write_text("\n".join(separator.join(row) for row in (ROWS[0].keys(), *(row.values() for row in ROWS))))
    return file


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.jsonl.gz", "docs.csv", "docs.tsv", "docs.parquet", "saved"])
def test_every_kind_of_table_gives_the_same_items(tmp_path, name):
    items = load_text_items(TextSource(path=str(_written(tmp_path, name))))
    assert items["id"][:] == ["b", "a"]
    assert items["text"][:] == ["bears sleep in winter", "ants work all day"]
    assert [json.loads(about) for about in items["metadata"]] == [{"title": "Bears"}, {"title": "Ants"}]


def test_columns_that_are_named(tmp_path):
    source = TextSource(
        path=str(_written(tmp_path, "docs.jsonl")), text_column=["title", "text"], id_column="title", metadata=["id"]
    )
    items = load_text_items(source)
    assert items["id"][:] == ["Bears", "Ants"] and items["text"][0] == "Bears bears sleep in winter"
    assert json.loads(items["metadata"][0]) == {"id": "b"}


def test_passages_of_documents(tmp_path):
    source = TextSource(path=str(_written(tmp_path, "docs.jsonl")), words=3, overlap=1, keep_text=True, metadata=False, limit=1)
    items = load_text_items(source)
    assert items["id"][:] == ["b#0", "b#1"] and items["text"][:] == ["bears sleep in", "in winter"]
    assert json.loads(items["metadata"][1]) == {"document": "b", "text": "in winter"}


@given(words=st.lists(st.text("ab", min_size=1, max_size=3), max_size=30), size=st.integers(1, 7), data=st.data())
def test_passages_hold_every_word_once_but_for_the_overlap(words, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    cut = [part.split() for part in split_passages(" ".join(words), size, overlap)]
    assert [word for place, part in enumerate(cut) for word in part[overlap if place else 0 :]] == words
    assert all(len(part) <= size for part in cut) and all(len(part) > overlap for part in cut[1:])


def test_rows_without_text_are_left_out(tmp_path, capsys):
    (tmp_path / "docs.jsonl").write_text('{"id": "x", "text": " "}\n{"id": "y", "text": "here"}\n{"id": "z", "text": null}\n')
    assert load_text_items(tmp_path / "docs.jsonl")["id"][:] == ["y"]
    assert "2 of 3 documents have no text" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    lines = load_text_items(tmp_path / "lines.txt")
    assert lines["id"][:] == ["0", "1"] and lines["text"][:] == ["one", "two"] and lines["metadata"][0] is None


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (['{"id": 1, "text": "a"}', '{"id": 1, "text": "b"}'], {}, "the id '1' appears twice"),
        (['{"id": 1.5, "text": "a"}'], {}, "ids must be strings or whole numbers"),
        (['{"id": 1, "text": 5}'], {}, "not text; set text_column"),
        (['{"id": 1, "words": "a"}'], {}, "no column named text"),
        (['{"id": 1, "text": "a"}'], {"text_column": "txet"}, "has no column 'txet'"),
        (['{"id": 1, "text": "a"}'], {"metadata": ["year"]}, "has no column 'year'"),
        (['{"id": 1, "text": " "}'], {}, "contains no text"),
        (['{"id": 1, "text": "a"}', "{"], {}, "line 2 is not valid JSON"),
        (["id,text", "1,a,b", "2,c,d"], {}, "more fields than its header"),
    ],
)
def test_bad_rows_are_refused_by_place(tmp_path, lines, options, said):
    file = tmp_path / ("docs.csv" if "id,text" in lines else "docs.jsonl")
    file.write_text("\n".join(lines))
    with pytest.raises(XcompatError, match=said):
        load_text_items(TextSource(path=str(file), **options))
