"""Texts as items: what is read from every kind of table, passages, and what is refused."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcompat.core.errors import XcompatError
from xcompat.data import TextSource, load_text_items, split_passages

ROWS = [{"id": "b", "title": "Bears", "text": "bears sleep in winter"}, {"id": "a", "title": "Ants", "text": "ants work all day"}]


def _written(folder, name):
    file = folder / name
    lines = [json.dumps(row) for row in ROWS]
    if name.endswith(".jsonl"):
        file.write_text("\n".join(lines))
    elif name.endswith(".gz"):
        file.write_bytes(gzip.compress("\n".join(lines).encode()))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    else:
        separator = "," if name.endswith(".csv") else "\t"
        file.write_text("\n".join(separator.join(row) for row in (ROWS[0].keys(), *(row.values() for row in ROWS))))
    return file


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.jsonl.gz", "docs.csv", "docs.tsv", "docs.parquet"])
def test_every_kind_of_table_gives_the_same_items(tmp_path, name):
    items = load_text_items(TextSource(path=str(_written(tmp_path, name))))
    assert items["id"][:] == ["b", "a"]
    assert items["text"][:] == ["bears sleep in winter", "ants work all day"]
    assert [json.loads(about) for about in items["metadata"]] == [{"title": "Bears"}, {"title": "Ants"}]


def test_a_saved_data_set_gives_the_same_items(tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    items = load_text_items(str(tmp_path / "saved"))
    assert items["id"][:] == ["b", "a"] and items["text"][1] == "ants work all day"


def test_lines_of_plain_text_are_called_by_their_number(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    items = load_text_items(tmp_path / "lines.txt")
    assert items["id"][:] == ["0", "1"] and items["text"][:] == ["one", "two"] and items["metadata"][0] is None


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


def test_documents_without_text_are_counted_and_left_out(tmp_path, capsys):
    (tmp_path / "docs.jsonl").write_text('{"id": "x", "text": " "}\n{"id": "y", "text": "here"}\n{"id": "z", "text": null}\n')
    assert load_text_items(tmp_path / "docs.jsonl")["id"][:] == ["y"]
    assert "2 of 3 documents have no text" in " ".join(capsys.readouterr().out.split())


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
    ],
)
def test_bad_rows_are_refused_by_place(tmp_path, lines, options, said):
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    with pytest.raises(XcompatError, match=said):
        load_text_items(TextSource(path=str(tmp_path / "docs.jsonl"), **options))


def test_passages_must_be_longer_than_they_overlap():
    with pytest.raises(ValueError, match="overlap is 3 and words is 3"):
        TextSource(path="docs.jsonl", words=3, overlap=3)


def test_a_table_with_surplus_fields_is_refused(tmp_path):
    (tmp_path / "docs.csv").write_text("id,text\n1,a,b\n2,c,d\n")
    with pytest.raises(XcompatError, match="more fields than its header"):
        load_text_items(tmp_path / "docs.csv")
