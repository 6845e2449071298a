"""Stored vectors of any format, read as one side of a map, an evaluation or a lost model, and checked as pairs."""

from __future__ import annotations

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
from store_places import unit_vectors
from test_map import normalised

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
from xcompat.training.folder_test_sets import load_embedding_folder
from xcompat.vectors import read_vectors
from xcompat.vectors.formats import is_stored, is_table, stored_at

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


FORMATS: dict[str, Callable[[Path, np.ndarray], Path]] = {
    "double": lambda here, rows: parquet(here / "a.parquet", rows, kind=pa.large_list(pa.float64())),
    "half": lambda here, rows: parquet(here / "a.parquet", rows.astype(np.float16), kind=pa.list_(pa.float16())),
    "fixed": lambda here, rows: parquet(here / "a.parquet", rows, kind=pa.list_(pa.float32(), DIM)),
    "values": lambda here, rows: json_lines(here / "a.ndjson", rows, column="values"),
    "packed": lambda here, rows: json_lines(here / "a.jsonl.gz", rows, column="vector"),
    "shards": lambda here, rows: shards(here / "shards", rows),
}


@pytest.mark.parametrize("name", FORMATS)
def test_tables_hold_ids_and_rows(name: str, tmp_path: Path) -> None:
    rows = made().astype(np.float16 if name == "half" else np.float32)
    path = FORMATS[name](tmp_path, rows)
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
    "no id": (lambda here: parquet(here / "a.parquet", made(), [*IDS[1:], None]), "row 39 of .* has no id"),
    "ids of floats": (lambda here: parquet(here / "a.parquet", made(), [float(row) for row in range(ITEMS)]), "'id' is double"),
    "cut": (lambda here: _cut(parquet(here / "a.parquet", made())), "cannot read .* after row 0"),
    "cut JSON": (lambda here: _cut(json_lines(here / "a.jsonl.gz", made())), "cannot read .* after row"),
    "no JSON": (lambda here: _written(here / "a.jsonl", "a b c\n"), "first line is not a JSON object"),
    "later": (lambda here: _written(here / "a.jsonl", '{"id": "a", "embedding": [1]}\n{"id": 3'), "cannot read .* after row"),
    "nothing": (lambda here: _written(here / "a.jsonl", "\n"), "holds no embeddings"),
}


def _cut(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-40])
    return file


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_one_line(what: str, tmp_path: Path) -> None:
    write, said = BAD[what]
    refuses(said, read_vectors, write(tmp_path))


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


def test_copies_are_the_pairs_equal_on_both_sides() -> None:
    new, old = drawn(items=50)
    new, old = np.concatenate([new, new[:5], new[5:8]]), np.concatenate([old, old[:5], old[10:13]])
    first = first_of_copies(new.astype(np.float16), old)
    assert first is not None
    np.testing.assert_array_equal(first, [*range(50), 55, 56, 57])
    assert first_of_copies(new[:50], old[:50]) is None


def test_copies_are_held_out_once_and_said() -> None:
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
