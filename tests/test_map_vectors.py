"""Stored vectors as databases, services and tools write them: read with their ids, as sides of a map, and checked as pairs."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refuses
from safetensors.numpy import save_file
from store_places import unit_vectors
from test_map import normalised

from xcompat.core.errors import XcompatError
from xcompat.embeddings.embed import embed_images
from xcompat.mapping import PairedEmbeddings, fit_map, load_paired
from xcompat.mapping.agreement import choose_by_labels_or_agreement
from xcompat.mapping.candidates import LINES, WHITENED, Candidate
from xcompat.mapping.choice_report import as_json, describe_choice
from xcompat.mapping.cleaning import drop_wrong_pairs
from xcompat.mapping.held_out import HeldOutClasses
from xcompat.mapping.pair_checks import find_right_pairs, first_of_copies
from xcompat.mapping.sides import read_sides
from xcompat.models.stored import StoredModel
from xcompat.stores.places import Reading, read_place, require_reading
from xcompat.training.folder_test_sets import load_embedding_folder
from xcompat.vectors import Columns, read_vectors
from xcompat.vectors.formats import is_stored, is_table, stored_at
from xcompat.vectors.reading import choosable_names
from xcompat.vectors.tables import column_names

ITEMS, DIM = 40, 6
TEXTS = Path(__file__).parents[2] / "shared" / "data" / "text" / "embeddings"
IDS = [f"item {row}" for row in range(ITEMS)]


def made(seed: int = 0, dim: int = DIM) -> np.ndarray:
    return unit_vectors(ITEMS, dim, seed)


def parquet(file: Path, rows: Any, ids: Any = IDS, kind: pa.DataType | None = None, **columns: Any) -> Path:
    embedding = pa.array(rows if isinstance(rows, list) else list(rows), kind)
    pq.write_table(pa.table({"id": pa.array(ids), "embedding": embedding, **columns}), file, row_group_size=7)
    return file


def json_lines(file: Path, rows: Any, ids: Any = IDS, column: str = "embedding") -> Path:
    lines = [json.dumps({"n": 1, "id": name, column: np.asarray(row).tolist()}) for name, row in zip(ids, rows, strict=True)]
    (gzip.open if file.suffix == ".gz" else open)(file, "wt").write("\n".join(lines) + "\n\n")
    return file


def shards(folder: Path, rows: np.ndarray) -> Path:
    folder.mkdir()
    parquet(folder / "b.parquet", rows[15:], IDS[15:])
    json_lines(folder / "a.jsonl", rows[:15], IDS[:15], "vector")
    return folder


TABLES: dict[str, Callable[[Path, np.ndarray], Path]] = {
    "double": lambda here, rows: parquet(here / "a.parquet", rows, kind=pa.large_list(pa.float64())),
    "half": lambda here, rows: parquet(here / "a.parquet", rows.astype(np.float16), kind=pa.list_(pa.float16())),
    "fixed": lambda here, rows: parquet(here / "a.parquet", rows, kind=pa.list_(pa.float32(), DIM)),
    "values": lambda here, rows: json_lines(here / "a.ndjson", rows, column="values"),
    "packed": lambda here, rows: json_lines(here / "a.jsonl.gz", rows, column="vector"),
    "shards": lambda here, rows: shards(here / "shards", rows),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_hold_ids_and_rows(name: str, tmp_path: Path) -> None:
    rows = made().astype(np.float16 if name == "half" else np.float32)
    path = TABLES[name](tmp_path, rows)
    found = read_vectors(path)
    assert is_table(path) and found.ids == IDS and found.rows_ND.dtype == rows.dtype, "half precision stays half"
    assert isinstance(found.rows_ND, np.memmap), "read into memory that is mapped"
    np.testing.assert_array_equal(found.rows_ND, rows)


def test_ids_may_be_numbers_and_are_compared_as_text(tmp_path: Path) -> None:
    old = parquet(tmp_path / "old.parquet", made(), list(range(ITEMS)))
    new = json_lines(tmp_path / "new.jsonl", made(1)[::-1], list(range(ITEMS))[::-1])
    found = load_paired(old, new)
    np.testing.assert_array_equal(found.new_ND, made(1))
    np.testing.assert_array_equal(found.old_Nd, made())
    assert found.notes == ()


@pytest.mark.parametrize("of", ["dimension", "row", "all"])
def test_int8_is_multiplied_by_its_scale(of: str, tmp_path: Path) -> None:
    rows = made() * np.linspace(0.5, 2, DIM)  # dimensions that one scale for all would weigh wrongly
    rows = normalised(rows)
    scale = {"dimension": np.abs(rows).max(0), "row": np.abs(rows).max(1, keepdims=True), "all": np.abs(rows).max()}[of] / 127
    np.save(tmp_path / "a.npy", np.round(rows / scale).astype(np.int8))
    np.save(tmp_path / "a_scale.npy", scale)
    found = read_vectors(tmp_path / "a.npy").rows_ND
    np.testing.assert_allclose(found, rows, atol=0.01)
    np.testing.assert_allclose(np.linalg.norm(found.astype(np.float32), axis=1), 1, atol=1e-3)


def test_int8_whose_zero_is_no_zero_has_an_offset(tmp_path: Path) -> None:
    rows = made()
    low, step = rows.min(0), (rows.max(0) - rows.min(0)) / 255  # as sentence-transformers quantises
    np.save(tmp_path / "a.npy", ((rows - low) / step - 128).astype(np.int8))
    np.save(tmp_path / "a_scale.npy", step)
    np.save(tmp_path / "a_offset.npy", low + 128 * step)
    np.testing.assert_allclose(read_vectors(tmp_path / "a.npy").rows_ND, rows, atol=0.02)


def test_int8_in_parquet_has_a_column_of_scales(tmp_path: Path) -> None:
    rows = made()
    scale = np.abs(rows).max(1) / 127
    whole = np.round(rows / scale[:, None]).astype(np.int8)
    kind = pa.list_(pa.int8())
    found = read_vectors(parquet(tmp_path / "a.parquet", whole, kind=kind, scale=pa.array(scale)))
    np.testing.assert_allclose(found.rows_ND, rows, atol=0.01)
    for column, said in (
        ({}, "int8 without a scale: add a column 'scale'"),
        ({"scale": pa.array(IDS)}, "'scale' is string"),
        ({"scale": pa.array(-scale)}, "a scale that is not a positive number"),
    ):
        refuses(said, read_vectors, parquet(tmp_path / "b.parquet", whole, kind=kind, **column))


def test_scales_that_say_nothing_are_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((ITEMS, DIM), np.int8))
    for scale, said in (
        (None, r"int8 without a scale: write .* a_scale.npy, of shape \(1, D\)"),
        (np.ones(DIM + 1), r"has shape \(7,\); for \(40, 6\) embeddings it has \(1, 6\), or \(40, 1\)"),
        (np.zeros(DIM), "a scale that is not a positive number"),
    ):
        if scale is not None:
            np.save(tmp_path / "a_scale.npy", scale)
        refuses(said, read_vectors, tmp_path / "a.npy")


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "text": (lambda here: parquet(here / "a.parquet", ["a red shoe"] * ITEMS), "row 0 of .* holds no vector .'a red shoe'"),
    "text in JSON": (lambda here: json_lines(here / "a.jsonl", ["AAAA"] * ITEMS), "holds no vector .'AAAA'"),
    "truth in JSON": (lambda here: json_lines(here / "a.jsonl", [True] * ITEMS), "'embedding' is bool; it should hold lists"),
    "dims": (lambda here: parquet(here / "a.parquet", [*made()[:30], *made(0, 5)[30:]]), "row 30 of .* has 5 dimensions, .* 6"),
    "dims in JSON": (lambda here: json_lines(here / "a.jsonl", [*made()[:9], *made(0, 5)[9:]]), "row 9 of .* has 5 dimensions"),
    "no rows": (lambda here: parquet(here / "a.parquet", [None] * ITEMS, kind=pa.list_(pa.float32())), "holds no embeddings"),
    "no column": (lambda here: json_lines(here / "a.jsonl", made(), column="vec"), "no column 'embedding' .it has"),
    "no id in a row": (lambda here: parquet(here / "a.parquet", made(), [*IDS[1:], None]), "row 39 of .* has no id"),
    "ids of floats": (lambda here: parquet(here / "a.parquet", made(), [float(row) for row in range(ITEMS)]), "'id' is double"),
    "cut": (lambda here: _cut(parquet(here / "a.parquet", made())), "cannot read .* after row 0"),
    "cut JSON": (lambda here: _cut(json_lines(here / "a.jsonl.gz", made())), "cannot read .* after row"),
    "no JSON lines": (lambda here: _written(here / "a.jsonl", "a b c\n"), "first line is not a JSON object"),
    "later": (lambda here: _written(here / "a.jsonl", '{"id": "a", "embedding": [1]}\n{"id": 3'), "cannot read .* after row"),
    "nothing": (lambda here: _written(here / "a.jsonl", "\n"), "holds no embeddings"),
}


def _cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-40])
    return file


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


UNUSABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "ids twice": (lambda here: parquet(here / "new.parquet", made(), ["a"] * ITEMS), "contains the id 'a' more than once"),
    "other ids": (lambda here: parquet(here / "new.parquet", made(), [f"no {name}" for name in IDS]), "share no id"),
    "no ids": (lambda here: (np.save(here / "new.npy", made()), here / "new.npy")[1], "new.npy has rows without ids"),
    "other file": (lambda here: _written(here / "new.txt", "a"), "new.txt is not a file of embeddings"),
    "no file": (lambda here: here / "new.parquet", "new.parquet does not exist"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_sides_that_do_not_fit_are_one_line(what: str, tmp_path: Path) -> None:
    write, said = UNUSABLE[what]
    refuses(said, load_paired, parquet(tmp_path / "old.parquet", made()), write(tmp_path))


def test_an_evaluation_reads_tables_in_place_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "image_embeds").mkdir()
    parquet(tmp_path / "image_embeds" / "part-0.parquet", made()[:9], IDS[:9])
    json_lines(tmp_path / "image_embeds" / "part-1.jsonl.gz", made()[9:], IDS[9:])
    np.save(tmp_path / "text_embeds.npy", made(1))
    refuses(r"lacks text_ids.txt", load_embedding_folder, tmp_path)
    (tmp_path / "text_ids.txt").write_text("\n".join(IDS))
    found = load_embedding_folder(tmp_path)
    assert found.image_ids == found.text_ids == IDS
    np.testing.assert_array_equal(found.image_embeds_ND, made())


def test_of_two_files_for_one_kind_neither_is_taken(tmp_path: Path) -> None:
    np.save(tmp_path / "image_embeds.npy", made())
    assert stored_at(tmp_path / "image_embeds") == tmp_path / "image_embeds.npy"
    parquet(tmp_path / "image_embeds.parquet", made())
    refuses(r"holds image_embeds.npy and image_embeds.parquet; keep one and delete the others", read_sides, tmp_path)
    (tmp_path / "image_embeds.npy").unlink()
    shards(tmp_path / "image_embeds", made())
    refuses(r"holds image_embeds.parquet and image_embeds; keep", stored_at, tmp_path / "image_embeds")


def test_a_lost_model_is_known_by_a_table_without_bad_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_stored(str(tmp_path)) and stored_at(tmp_path / "image_embeds") is None
    parquet(tmp_path / "image_embeds.parquet", 3 * made())
    model = StoredModel(tmp_path)
    assert is_stored(str(tmp_path)) and model.dim == DIM
    np.testing.assert_allclose(model.lookup(IDS[::-1])[:], made()[::-1], rtol=1e-6)
    assert model.lookup(IDS[1:]).shape == (ITEMS - 1, DIM)
    rows: list = made().tolist()
    rows[2], rows[5] = None, [0.0] * DIM
    parquet(tmp_path / "image_embeds.parquet", rows, kind=pa.list_(pa.float32()))
    model, images = StoredModel(tmp_path), datasets.Dataset.from_dict({"id": IDS})
    assert "2 of 40 rows" in caplog.text and "row 2 ('item 2') has no embedding; row 5 ('item 5') holds only zeros" in caplog.text
    cache = embed_images(model, images, tmp_path / "cache", "digest", shard_rows=16)
    assert np.flatnonzero(~cache.readable()).tolist() == [2, 5]


def drawn(seed: int = 0, noise: float = 0.4, items: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Embed the same items by two models, one of which sees them through noise."""
    draw = np.random.default_rng(seed)
    meant = draw.standard_normal((items, 16))
    turn = np.linalg.qr(draw.standard_normal((24, 24)))[0][:16]
    return normalised(meant @ turn), normalised(meant + noise * draw.standard_normal(meant.shape))


def mixed_up(old: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Give the first items the old embeddings of each other; return them and which they are."""
    count = round(share * len(old))
    return np.concatenate([np.roll(old[:count], 1, axis=0), old[count:]]), np.arange(len(old)) < count


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_wrong_pairs_are_found(share: float) -> None:
    new, old = drawn()
    wrong_old, is_wrong = mixed_up(old, share)
    kept = find_right_pairs(new, wrong_old)
    assert kept is not None
    assert (~kept[is_wrong]).mean() > 0.95 and kept[~is_wrong].mean() > 0.97


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0, 2.0, 1e6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_right_pairs_are_never_dropped(noise: float, seed: int) -> None:
    assert find_right_pairs(*drawn(seed, noise)) is None


@pytest.mark.skipif(not TEXTS.exists(), reason="the embeddings of real text models are not here")
def test_real_pairs_are_never_dropped() -> None:
    for name in ("scifact_docs", "generic"):
        sides = [np.load(TEXTS / model / f"{name}.npy")[:2000] for model in ("all-minilm-l6", "wordllama")]
        assert find_right_pairs(*sides) is None, name
    mixed, is_wrong = mixed_up(sides[1], 0.1)
    kept = find_right_pairs(sides[0], mixed)
    assert kept is not None and (~kept[is_wrong]).mean() > 0.8 and kept[~is_wrong].mean() > 0.98


def test_dropped_pairs_are_counted_and_the_map_is_better() -> None:
    new, old = drawn()
    wrong_old, is_wrong = mixed_up(old, 0.3)
    right = drop_wrong_pairs(PairedEmbeddings(new, wrong_old))
    assert right.rows_R is not None and right.dropped == len(old) - len(right.pairs) == len(old) - len(right.rows_R)
    assert f"Dropped {right.dropped} of 600 pairs" in right.pairs.notes[-1]
    fitted = fit_map(wrong_old, new)
    assert fitted.dropped == right.dropped
    cosines = (fitted.to_space(new) * old).sum(1)[is_wrong]
    assert cosines.mean() > 0.8, "items whose pair was wrong are mapped to their own place"


def test_copies_on_both_sides_are_held_out_once_and_said() -> None:
    new, old = drawn(items=50)
    new, old = np.concatenate([new, new[:5], new[5:8]]), np.concatenate([old, old[:5], old[10:13]])
    first = first_of_copies(new.astype(np.float16), old)
    assert first is not None
    np.testing.assert_array_equal(first, [*range(50), 55, 56, 57])
    assert first_of_copies(new[:50], old[:50]) is None
    new, old = drawn(items=200)
    labels = np.arange(200) % 10
    pairs = PairedEmbeddings(*(np.concatenate([side, side]) for side in (new, old)), np.concatenate([labels, labels]))
    choice = choose_by_labels_or_agreement(pairs, "unknown", 0, {WHITENED: LINES[WHITENED]})
    alone = choose_by_labels_or_agreement(PairedEmbeddings(new, old, labels), "unknown", 0, {WHITENED: LINES[WHITENED]})
    assert choice.copies == 200 and as_json(choice)["copies"] == 200 and choice.floor == alone.floor
    assert any("200 items are exact copies of others" in line for line in describe_choice(choice))
    lines = describe_choice(replace(choice, by_chance=True))
    assert any(line.startswith("! No better than chance") for line in lines)
    assert not any(line.startswith("New queries are surely at or above") for line in lines)


@pytest.mark.parametrize("seed", range(4))
def test_labels_at_random_are_no_better_than_chance(seed: int) -> None:
    new, old = drawn(seed, items=480)
    labels = np.random.default_rng(100 + seed).permutation(np.arange(480) % 12)
    held = HeldOutClasses(PairedEmbeddings(new, old, labels), "unknown", LINES, seed)
    assert held.is_by_chance(Candidate(WHITENED))


ROWS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
NAMES = ["007", "b", "c d", 'e"', "é"]
NAMED_ROWS = list(zip(NAMES, ROWS.tolist(), strict=True))
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
        written.writerows([name, f"a text,\nof {name}", str(row.tolist())] for name, row in zip(NAMES, ROWS, strict=True))


def _parquet(file: Path, rows: list[Any]) -> None:
    pq.write_table(pa.table({"id": NAMES, "embedding": rows}), file)


def _tensors(file: Path) -> None:
    save_file({"embeddings": ROWS, "other": ROWS[:2]}, file, metadata={"ids": json.dumps(NAMES)})


def _dataset() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"_id": NAMES, "emb": ROWS.tolist()})


def _feather(path: Path) -> None:
    table = pa.table({"doc_id": NAMES, "vector": list(ROWS)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _clip_retrieval(here: Path) -> Path:
    (here / "img_emb").mkdir()
    (here / "metadata").mkdir()
    for number, part in enumerate((slice(0, 2), slice(2, None))):
        np.save(here / "img_emb" / f"img_emb_{9 + number}.npy", ROWS[part])  # 10 after 9
        pq.write_table(
            pa.table({"image_path": NAMES[part], "key": ["x"] * len(NAMES[part])}), here / f"metadata/m_{9 + number}.parquet"
        )
    return here


def _points(vector: Callable[[list[float]], object] = lambda row: row) -> list[dict[str, object]]:
    return [{"id": name, "vector": vector(row), "payload": {"text": "a", "values": 3}} for name, row in NAMED_ROWS]


def _batch(encode: Callable[[list[float]], object] = lambda row: row) -> list[object]:
    bodies = ({"data": [{"index": 0, "embedding": encode(row)}]} for _, row in NAMED_ROWS)
    answers = [{"response": {"status_code": 200, "body": body}, "error": None} for body in bodies]
    return [answer | {"custom_id": name} for name, answer in zip(NAMES, answers, strict=True)]


def _base64(row: list[float]) -> str:
    return base64.b64encode(np.float32(row).tobytes()).decode()


def _search_hits() -> list[object]:
    return [{"_index": "a", "_id": name, "_source": {"embedding": row}} for name, row in NAMED_ROWS]


DOCUMENTS: dict[str, Callable[[], object]] = {
    "Qdrant scroll": lambda: {"result": {"points": _points(), "next_page_offset": None}, "status": "ok"},
    "pages of a scroll": lambda: [{"result": {"points": _points()[:2]}}, {"result": {"points": _points()[2:]}}],
    "Elasticsearch": lambda: {"hits": {"total": 5, "hits": _search_hits()}},
    "Pinecone fetch": lambda: {"namespace": "", "vectors": {name: {"id": name, "values": row} for name, row in NAMED_ROWS}},
    "Pinecone upsert": lambda: {"vectors": [{"id": name, "values": row} for name, row in NAMED_ROWS]},
    "Weaviate": lambda: {
        "objects": [
            {"class": "A", "id": name, "properties": {"title": "t"}, "vectors": {"default": row}} for name, row in NAMED_ROWS
        ]
    },
    "Weaviate GraphQL": lambda: {
        "data": {"Get": {"Things": [{"_additional": {"id": name, "vector": row}} for name, row in NAMED_ROWS]}}
    },
    "Solr": lambda: {"responseHeader": {}, "response": {"docs": [{"id": name, "vector": row} for name, row in NAMED_ROWS]}},
    "Chroma get": lambda: {"ids": NAMES, "embeddings": ROWS.tolist(), "documents": None},
    "id to vector": lambda: dict(NAMED_ROWS),
}
JSON_LINES: dict[str, Callable[[], list[object]]] = {
    "Qdrant with a named vector": lambda: list(_points(lambda row: {"image": row, "sparse": {"indices": [1]}})),
    "Elasticsearch lines": _search_hits,
    "mongoexport": lambda: [{"_id": {"$oid": name}, "embedding": row} for name, row in NAMED_ROWS],
    "Bedrock batch": lambda: [{"recordId": name, "modelOutput": {"embedding": row}} for name, row in NAMED_ROWS],
    "Gemini batch": lambda: [{"key": name, "response": {"embedding": {"values": row}}} for name, row in NAMED_ROWS],
    "OpenAI batch": _batch,
    "OpenAI batch in base64": lambda: _batch(_base64),
    "JSON lines in base64": lambda: [{"key": name, "embedding": _base64(row)} for name, row in NAMED_ROWS],
}
FILES: dict[str, Write] = {
    "CSV of a cookbook": _to("a.csv", lambda file: _csv(file, ["id", "text", "embedding"])),
    "compressed TSV": _to("a.tsv.gz", lambda file: _csv(file, ["doc_id", "text", "vector"], "\t")),
    "Parquet": _to("a.parquet", lambda file: _parquet(file, list(ROWS))),
    "Parquet with vectors as NumPy prints them": _to("a.parquet", lambda file: _parquet(file, [str(row) for row in ROWS])),
    "npz": _to("a.npz", lambda file: np.savez(file, ids=np.array(NAMES), embeddings=ROWS, labels=np.arange(5))),
    "safetensors": _to("a.safetensors", _tensors),
    "Feather": _to("a.feather", _feather),
    "data set on disk": _to("saved", lambda folder: _dataset().save_to_disk(folder, num_shards=2)),
    "clip-retrieval": _clip_retrieval,
    "elasticdump": lambda here: _lines(here, _search_hits()).rename(here / "a.json"),
}


FORMATS = (*DOCUMENTS, *JSON_LINES, *FILES)


def write_format(name: str, here: Path) -> Path:
    if name in FILES:
        return FILES[name](here)
    return _json(here, DOCUMENTS[name]()) if name in DOCUMENTS else _lines(here, JSON_LINES[name]())


@pytest.mark.parametrize("name", FORMATS)
def test_vectors_and_ids_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    path = write_format(name, tmp_path)
    found = read_vectors(path)
    assert found.ids == NAMES
    np.testing.assert_allclose(found.rows_ND, ROWS, rtol=1e-6 if "NumPy" not in name else 1e-4)
    assert is_table(path) or path.suffix in (".npz", ".safetensors")


def test_columns_and_names_within_fields_can_be_chosen(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": ["x"] * 5, "sku": NAMES, "image": list(ROWS), "embedding": list(ROWS[::-1])}), tmp_path / "a.parquet"
    )
    found = read_vectors(tmp_path / "a.parquet", Columns("sku", "image"))
    assert found.ids == NAMES and np.array_equal(found.rows_ND, ROWS)
    assert column_names(tmp_path / "a.parquet") == ["id", "sku", "image", "embedding"]
    points = _points(lambda row: {"text": row[::-1], "image": row})
    dump = _json(tmp_path, {"result": {"points": points}})
    refuses(r"item 0 has several vectors \(text, image\); choose one with --vector-name", read_vectors, dump)
    assert np.array_equal(read_vectors(dump, Columns(vector="image")).rows_ND, ROWS)
    for number, (point, name) in enumerate(zip(points, NAMES, strict=True)):
        point |= {"id": number, "payload": {"sku": name}}
    for path in (_json(tmp_path, {"result": {"points": points}}), _lines(tmp_path, list(points))):
        found = read_vectors(path, Columns("sku", "image"))
        assert found.ids == NAMES and np.array_equal(found.rows_ND, ROWS)
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
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (tmp_path / "short.txt").write_text("a\n")
    paths = _without_ids(tmp_path)
    assert len(paths) == 8
    for path in paths:
        assert read_vectors(path, Columns(needs_ids=False)).ids is None, path
        found = read_place(path, Reading(tmp_path / "ids.txt"))
        assert found.ids == NAMES and np.allclose(found.rows_ND, ROWS), path
        refuses(f"short.txt has 1 lines, but .*{path.name} has 5 rows", read_place, path, Reading(tmp_path / "short.txt"))


def test_items_may_lack_embeddings_but_not_ids(tmp_path: Path) -> None:
    items = [{"id": "a", "vector": [1.0, 2.0]}, {"vector": [1.0, 2.0]}]
    with pytest.raises(XcompatError, match="item 1 of .* has no id; choose its field with --id-column"):
        read_vectors(_json(tmp_path, items), Columns(needs_ids=False))
    (tmp_path / "saved").mkdir()
    pq.write_table(pa.table({"id": NAMES, "vector": list(ROWS)}), tmp_path / "saved" / "a.parquet")
    pq.write_table(pa.table({"vector": list(ROWS)}), tmp_path / "saved" / "b.parquet")
    refuses("only 5 of 10 rows from .*a.parquet on have an id", read_vectors, tmp_path / "saved", Columns(needs_ids=False))
    lines = [*_batch(), {"custom_id": "f", "response": None, "error": {"code": "429"}}]
    found = read_vectors(_lines(tmp_path, lines))
    assert found.ids == [*NAMES, "f"] and np.isnan(found.rows_ND[5]).all() and np.isfinite(found.rows_ND[:5]).all()


def test_a_file_of_ids_replaces_row_numbers(tmp_path: Path) -> None:
    answers = [{"object": "embedding", "index": row, "embedding": [1.0, row]} for row in range(3)]
    (tmp_path / "answer.json").write_text(json.dumps({"object": "list", "data": answers}), encoding="utf-8")
    (tmp_path / "ids.txt").write_text("a\nb\nc\n", encoding="utf-8")
    assert list(read_place(tmp_path / "answer.json", Reading()).ids or ()) == ["0", "1", "2"]
    assert list(read_place(tmp_path / "answer.json", Reading(tmp_path / "ids.txt")).ids or ()) == ["a", "b", "c"]


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


@pytest.mark.parametrize(("write", "said"), [*BAD.values(), *WRONG.values()], ids=[*BAD, *WRONG])
def test_what_cannot_be_read_is_one_line(write: Write, said: str, tmp_path: Path) -> None:
    refuses(said, read_vectors, write(tmp_path))
