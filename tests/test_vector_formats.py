"""Embeddings as databases, services and other tools write them are read with their ids."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refuses
from safetensors.numpy import save_file

from xcompat.core.errors import XcompatError
from xcompat.stores.places import Reading, read_place, require_reading
from xcompat.vectors import Columns, read_vectors
from xcompat.vectors.formats import is_table
from xcompat.vectors.reading import choosable_names
from xcompat.vectors.tables import column_names

ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
IDS = ["007", "b", "c d", 'e"', "é"]
ITEMS = list(zip(IDS, ROWS.tolist(), strict=True))
Write = Callable[[Path], Path]


def _json(here: Path, document: object) -> Path:
    (here / "a.json").write_text(json.dumps(document))
    return here / "a.json"


def _lines(here: Path, rows: list[object]) -> Path:
    (here / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here / "a.jsonl"


def _to(name: str, write: Callable[[Path], object]) -> Write:
    """Return what writes a file or folder of a name, and returns it."""

    def written(here: Path) -> Path:
        write(here / name)
        return here / name

    return written


def _csv(file: Path, head: list[str], delimiter: str = ",") -> None:
    opened = gzip.open if file.name.endswith(".gz") else open
    with opened(file, "wt", newline="", encoding="utf-8") as lines:
        written = csv.writer(lines, delimiter=delimiter)
        written.writerow(head)
        written.writerows([name, f"a text,\nof {name}", str(row.tolist())] for name, row in zip(IDS, ROWS, strict=True))


def _parquet(file: Path, rows: list[Any]) -> None:
    pq.write_table(pa.table({"id": IDS, "embedding": rows}), file)


def _tensors(file: Path) -> None:
    save_file({"embeddings": ROWS, "other": ROWS[:2]}, file, metadata={"ids": json.dumps(IDS)})


def _dataset() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"_id": IDS, "emb": ROWS.tolist()})


def _feather(path: Path) -> None:
    table = pa.table({"doc_id": IDS, "vector": list(ROWS)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _clip_retrieval(here: Path) -> Path:
    (here / "img_emb").mkdir()
    (here / "metadata").mkdir()
    for number, part in enumerate((slice(0, 2), slice(2, None))):
        np.save(here / "img_emb" / f"img_emb_{9 + number}.npy", ROWS[part])  # 10 after 9
        pq.write_table(
            pa.table({"image_path": IDS[part], "key": ["x"] * len(IDS[part])}), here / f"metadata/m_{9 + number}.parquet"
        )
    return here


def _points(vector: Callable[[list[float]], object] = lambda row: row) -> list[dict[str, object]]:
    return [{"id": name, "vector": vector(row), "payload": {"text": "a", "values": 3}} for name, row in ITEMS]


def _batch(encode: Callable[[list[float]], object] = lambda row: row) -> list[object]:
    bodies = ({"data": [{"index": 0, "embedding": encode(row)}]} for _, row in ITEMS)
    answers = [{"response": {"status_code": 200, "body": body}, "error": None} for body in bodies]
    return [answer | {"custom_id": name} for name, answer in zip(IDS, answers, strict=True)]


def _base64(row: list[float]) -> str:
    return base64.b64encode(np.float32(row).tobytes()).decode()


def _search_hits() -> list[object]:
    return [{"_index": "a", "_id": name, "_source": {"embedding": row}} for name, row in ITEMS]


DOCUMENTS: dict[str, Callable[[], object]] = {
    "Qdrant scroll": lambda: {"result": {"points": _points(), "next_page_offset": None}, "status": "ok"},
    "pages of a scroll": lambda: [{"result": {"points": _points()[:2]}}, {"result": {"points": _points()[2:]}}],
    "Elasticsearch": lambda: {"hits": {"total": 5, "hits": _search_hits()}},
    "Pinecone fetch": lambda: {"namespace": "", "vectors": {name: {"id": name, "values": row} for name, row in ITEMS}},
    "Pinecone upsert": lambda: {"vectors": [{"id": name, "values": row} for name, row in ITEMS]},
    "Weaviate": lambda: {
        "objects": [{"class": "A", "id": name, "properties": {"title": "t"}, "vectors": {"default": row}} for name, row in ITEMS]
    },
    "Weaviate GraphQL": lambda: {
        "data": {"Get": {"Things": [{"_additional": {"id": name, "vector": row}} for name, row in ITEMS]}}
    },
    "Solr": lambda: {"responseHeader": {}, "response": {"docs": [{"id": name, "vector": row} for name, row in ITEMS]}},
    "Chroma get": lambda: {"ids": IDS, "embeddings": ROWS.tolist(), "documents": None},
    "id to vector": lambda: dict(ITEMS),
}
LINES: dict[str, Callable[[], list[object]]] = {
    "Qdrant with a named vector": lambda: list(_points(lambda row: {"image": row, "sparse": {"indices": [1]}})),
    "Elasticsearch lines": _search_hits,
    "mongoexport": lambda: [{"_id": {"$oid": name}, "embedding": row} for name, row in ITEMS],
    "Bedrock batch": lambda: [{"recordId": name, "modelOutput": {"embedding": row}} for name, row in ITEMS],
    "Gemini batch": lambda: [{"key": name, "response": {"embedding": {"values": row}}} for name, row in ITEMS],
    "OpenAI batch": _batch,
    "OpenAI batch in base64": lambda: _batch(_base64),
    "JSON lines in base64": lambda: [{"key": name, "embedding": _base64(row)} for name, row in ITEMS],
}
FILES: dict[str, Write] = {
    "CSV of a cookbook": _to("a.csv", lambda file: _csv(file, ["id", "text", "embedding"])),
    "compressed TSV": _to("a.tsv.gz", lambda file: _csv(file, ["doc_id", "text", "vector"], "\t")),
    "Parquet": _to("a.parquet", lambda file: _parquet(file, list(ROWS))),
    "Parquet with vectors as NumPy prints them": _to("a.parquet", lambda file: _parquet(file, [str(row) for row in ROWS])),
    "npz": _to("a.npz", lambda file: np.savez(file, ids=np.array(IDS), embeddings=ROWS, labels=np.arange(5))),
    "safetensors": _to("a.safetensors", _tensors),
    "Feather": _to("a.feather", _feather),
    "data set on disk": _to("saved", lambda folder: _dataset().save_to_disk(folder, num_shards=2)),
    "clip-retrieval": _clip_retrieval,
    "elasticdump": lambda here: _lines(here, _search_hits()).rename(here / "a.json"),
}


FORMATS = (*DOCUMENTS, *LINES, *FILES)


def write_format(name: str, here: Path) -> Path:
    if name in FILES:
        return FILES[name](here)
    return _json(here, DOCUMENTS[name]()) if name in DOCUMENTS else _lines(here, LINES[name]())


@pytest.mark.parametrize("name", FORMATS)
def test_vectors_and_ids_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    path = write_format(name, tmp_path)
    found = read_vectors(path)
    assert found.ids == IDS
    np.testing.assert_allclose(found.rows_ND, ROWS, rtol=1e-6 if "NumPy" not in name else 1e-4)
    assert is_table(path) or path.suffix in (".npz", ".safetensors")


def test_columns_and_names_within_fields_can_be_chosen(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": ["x"] * 5, "sku": IDS, "image": list(ROWS), "embedding": list(ROWS[::-1])}), tmp_path / "a.parquet"
    )
    found = read_vectors(tmp_path / "a.parquet", Columns("sku", "image"))
    assert found.ids == IDS and np.array_equal(found.rows_ND, ROWS)
    assert column_names(tmp_path / "a.parquet") == ["id", "sku", "image", "embedding"]
    points = _points(lambda row: {"text": row[::-1], "image": row})
    dump = _json(tmp_path, {"result": {"points": points}})
    refuses(r"item 0 has several vectors \(text, image\); choose one with --vector-name", read_vectors, dump)
    assert np.array_equal(read_vectors(dump, Columns(vector="image")).rows_ND, ROWS)
    for number, (point, name) in enumerate(zip(points, IDS, strict=True)):
        point |= {"id": number, "payload": {"sku": name}}
    for path in (_json(tmp_path, {"result": {"points": points}}), _lines(tmp_path, list(points))):
        found = read_vectors(path, Columns("sku", "image"))
        assert found.ids == IDS and np.array_equal(found.rows_ND, ROWS)
        assert {"sku", "image"} <= set(choosable_names(path)), "misspelt names are refused"


def _without_ids(here: Path) -> list[Path]:
    vectors = [{"vector": row, "text": "a"} for row in ROWS.tolist()]
    pq.write_table(pa.table({"text": ["a"] * 5, "embedding": list(ROWS)}), here / "a.parquet")
    np.savez(here / "a.npz", embedding=ROWS)
    np.save(here / "a.npy", ROWS)
    save_file({"embedding": ROWS}, here / "a.safetensors")
    (here / "a.csv").write_text("embedding\n" + "".join(f'"{row.tolist()}"\n' for row in ROWS))
    (here / "clip" / "img_emb").mkdir(parents=True)
    np.save(here / "clip" / "img_emb" / "img_emb_0.npy", ROWS)
    files = (_json(here, {"objects": vectors}), _lines(here, list(vectors)), *here.glob("a.[pncs]*"), here / "clip")
    return sorted(set(files))


def test_files_without_ids_take_them_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in IDS))
    (tmp_path / "short.txt").write_text("a\n")
    paths = _without_ids(tmp_path)
    assert len(paths) == 8
    for path in paths:
        assert read_vectors(path, Columns(needs_ids=False)).ids is None, path
        found = read_place(path, Reading(tmp_path / "ids.txt"))
        assert found.ids == IDS and np.allclose(found.rows_ND, ROWS), path
        refuses(f"short.txt has 1 lines, but .*{path.name} has 5 rows", read_place, path, Reading(tmp_path / "short.txt"))


def test_items_may_lack_embeddings_but_not_ids(tmp_path: Path) -> None:
    items = [{"id": "a", "vector": [1.0, 2.0]}, {"vector": [1.0, 2.0]}]
    with pytest.raises(XcompatError, match="item 1 of .* has no id; choose its field with --id-column"):
        read_vectors(_json(tmp_path, items), Columns(needs_ids=False))
    (tmp_path / "saved").mkdir()
    pq.write_table(pa.table({"id": IDS, "vector": list(ROWS)}), tmp_path / "saved" / "a.parquet")
    pq.write_table(pa.table({"vector": list(ROWS)}), tmp_path / "saved" / "b.parquet")
    refuses("only 5 of 10 rows from .*a.parquet on have an id", read_vectors, tmp_path / "saved", Columns(needs_ids=False))
    lines = [*_batch(), {"custom_id": "f", "response": None, "error": {"code": "429"}}]
    found = read_vectors(_lines(tmp_path, lines))
    assert found.ids == [*IDS, "f"] and np.isnan(found.rows_ND[5]).all() and np.isfinite(found.rows_ND[:5]).all()


def test_other_ids_and_misspelt_names_are_refused(tmp_path: Path) -> None:
    for name in FORMATS:
        (tmp_path / name).mkdir()
        path = write_format(name, tmp_path / name)
        refuses("has ids of its own; remove --ids", read_place, path, Reading(tmp_path / "ids.txt"))
        known = choosable_names(path)
        for option, columns in (("--id-column", Columns(known[0] + "x")), ("--vector-name", Columns(vector=known[0] + "x"))):
            with pytest.raises(XcompatError, match=f"{option} {known[0]}x: no such name in .*; did you mean '{known[0]}'"):
                require_reading([path], Reading(columns=columns))
        require_reading([path], Reading(columns=Columns(known[0], known[-1])))


WRONG: dict[str, tuple[Write, str]] = {
    "no JSON": (_to("a.json", lambda file: file.write_text("{")), "a.json line 1 is not JSON"),
    "no items": (lambda here: _json(here, {"status": "ok"}), "holds no embeddings"),
    "an odd name": (
        lambda here: _json(here, {"hits": {"hits": [{"_id": "a", "_source": {"title": "t", "title_vector": [0.5, 1.0]}}]}}),
        "a.json holds no embeddings; choose title_vector with --vector-name",
    ),
    "an odd name in a field": (
        lambda here: _lines(here, [{"id": "a", "payload": {"body_vector": [0.5, 1.0], "image_vector": [1, 2]}}]),
        "a.jsonl holds no embeddings; choose body_vector or image_vector with --vector-name",
    ),
    "no id": (lambda here: _json(here, [{"embedding": [1.0, 2.0]}]), "item 0 of .* has no id; choose its field with --id-column"),
    "no numbers": (lambda here: _json(here, [{"id": "a", "vector": ["x"]}]), "item 0 holds no list of numbers"),
    "a matrix": (lambda here: _json(here, [{"id": "a", "vector": [[1.0], [2.0]]}]), "holds an array of 2 dimensions"),
    "a shortened vector": (
        _to("a.csv", lambda file: file.write_text('id,embedding\na,"[0.1 0.2 ... 0.9]"\n')),
        "row 0 of .*a.csv holds no vector .'.0.1 0.2 ... 0.9.'",
    ),
    "a CSV without vectors": (
        _to("a.csv", lambda file: file.write_text("id,text\na,b\n")),
        "no column 'embedding' .it has id, text.; choose one with --vector-name",
    ),
    "two matrices": (
        _to("a.npz", lambda file: np.savez(file, x=ROWS, y=ROWS)),
        "holds the matrices x, y; choose one with --vector-name",
    ),
    "objects in npz": (_to("a.npz", lambda file: np.savez(file, x=np.array([{}, 1]))), "cannot read .*a.npz"),
    "splits": (
        _to("d", lambda folder: datasets.DatasetDict(train=_dataset()).save_to_disk(folder)),
        "holds the splits train; choose one",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unreadable_files_are_explained_in_one_line(name: str, tmp_path: Path) -> None:
    write, said = WRONG[name]
    refuses(said, read_vectors, write(tmp_path))
