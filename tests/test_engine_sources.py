"""Tables that `xcompat embed` reads beside Parquet: versions of Lance tables, and the metadata of Iceberg tables."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run
from test_engines import files_in, lists, save_map, write_lance

from xcompat.engines import iceberg, lance, sources
from xcompat.models.embedder import load_checkpoint
from xcompat.stores.mapping import Mapping

pytest.importorskip("lancedb")
N, OLD_DIM = 230, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_map(tmp_path_factory.mktemp("map") / "map", seed=0)


@pytest.fixture
def embed(run_xcompat: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(sources, "PART_ROWS", 60)
    return Run(run_xcompat, "embed")


@pytest.mark.parametrize("store", ["", "file-object-store://"])
def test_lance_tables_equal_rows_in_parquet(embed: Run, model: str, vectors: np.ndarray, tmp_path: Path, store: str) -> None:
    place = f"{store}{tmp_path}/items.lance"
    write_lance(place, vectors)
    out = embed.output(place, "--model", model, "--out", tmp_path / "out")
    assert "holds 185 embeddings" in out and "in 4 files" in out
    left = lists(vectors).filter(pa.array([row % 100 >= 15 for row in range(N)]))
    pq.write_table(left, tmp_path / "items.parquet", row_group_size=60)
    embed.output(tmp_path / "items.parquet", "--model", model, "--out", tmp_path / "same")
    one, same = (pq.read_table(tmp_path / name) for name in ("out", "same"))
    assert one["id"].to_pylist() == left["id"].to_pylist() and one.equals(same), "bit by bit"


def test_a_run_on_a_lance_table_keeps_its_version(embed: Run, model: str, vectors: np.ndarray, tmp_path: Path) -> None:
    place, out = tmp_path / "items.lance", tmp_path / "out"
    table = write_lance(place, vectors)
    embed.output(place, "--model", model, "--out", out)
    whole, pinned = files_in(out), f"{place}?version={table.version}"
    for number in (0, 2):
        (out / f"part-{number:06}.parquet").unlink()
    table.add(lists(vectors[:7]))
    table.delete("price = 20")
    error = embed.refusal(place, "--model", model, "--out", out)
    assert f"was started with {pinned}, not {place}?version={table.version}; use the same input to continue" in error
    assert "120 computed in" in embed.output(pinned, "--model", model, "--out", out) and files_in(out) == whole
    shutil.rmtree(place)
    write_lance(place, vectors[::-1])
    error = embed.refusal(place, "--model", model, "--out", out)
    assert f"items.lance?version=4 has changed since {out} was started" in error, "another table in its place"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("item.lance", "item.lance does not exist; did you mean"),
        ("empty.lance", "empty.lance is not a Lance table or has no versions"),
        ("items.lance?version=first", "invalid version 'first'; use"),
        ("items.lance?version=99", "Version 99 no longer exists"),
        ("bare.lance", "has no rows; there is nothing to embed"),
        ("nulls.lance", "nulls.lance?version=1, 3 rows from 1 on: missing id after row 0; give every row an id"),
    ],
)
def test_mistakes_about_lance_tables(embed: Run, model: str, vectors: np.ndarray, tmp_path: Path, named: str, said: str) -> None:
    import lancedb

    write_lance(tmp_path / "items.lance", vectors)
    (tmp_path / "empty.lance").mkdir()
    lancedb.connect(tmp_path).create_table("bare", lists(vectors)[:0])
    lancedb.connect(tmp_path).create_table("nulls", lists(vectors)[:3].set_column(0, "id", pa.array(["a", None, "b"])))
    assert said in embed.refusal(tmp_path / named, "--model", model, "--out", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob("*.lance")) == ["bare.lance", "empty.lance", "items.lance", "nulls.lance"]


@pytest.fixture
def table(tmp_path: Path, vectors: np.ndarray) -> Any:
    catalogs = pytest.importorskip("pyiceberg.catalog.memory")
    catalog = catalogs.InMemoryCatalog("here", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    rows = lists(vectors)
    made = catalog.create_table("shop.items", schema=rows.schema)
    made.append(rows[:130])
    made.append(rows[130:])
    return made


def test_one_version_of_an_iceberg_table_is_read(embed: Run, model: str, vectors: np.ndarray, table: Any, tmp_path: Path) -> None:
    before = table.metadata_location
    table.delete("id = 'item-7'")
    now = table.metadata_location
    assert f"holds {N - 1} embeddings" in embed.output(now, "--model", model, "--out", tmp_path / "out")
    made = pq.read_table(tmp_path / "out")
    order = [int(name.removeprefix("item-")) for name in made["id"].to_pylist()]
    assert sorted(order) == [row for row in range(N) if row != 7]
    truth = Mapping(load_checkpoint(model))(vectors[order])
    np.testing.assert_allclose(np.stack(made["embedding"].to_numpy()), truth, atol=1e-6)
    embed.output(before.removeprefix("file://"), "--model", model, "--out", tmp_path / "older")
    assert sorted(pq.read_table(tmp_path / "older")["id"].to_pylist()) == sorted(f"item-{row}" for row in range(N))
    assert "was started with" in embed.refusal(before, "--model", model, "--out", tmp_path / "out")
    error = embed.refusal(tmp_path / "shop" / "items", "--model", model, "--out", tmp_path / "new")
    assert f"use the metadata file of a single version, e.g. {now.removeprefix('file://')}" in error


@pytest.mark.parametrize(("log", "kind"), [("_delta_log", "Delta"), (".hoodie", "Hudi")])
def test_delta_and_hudi_folders_are_no_parquet(log: str, kind: str, embed: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "items" / log).mkdir(parents=True)
    (tmp_path / "items" / "part-0.parquet").write_bytes(b"rows that were removed")
    error = embed.refusal(tmp_path / "items", "--model", model, "--out", tmp_path / "out")
    assert f"is a {kind} table, and its files include deleted rows; write the current rows as" in error


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("deleted rows", "as deleted; rewrite its data files"),
        ("another format", "is not Parquet; rewrite its data files as Parquet"),
        ("another place", "is in another file system; move all data files into one file system"),
        ("a lost file", ".parquet does not exist"),
        ("a renamed column", "has the column 'vector', which was renamed later; rewrite the data files"),
        ("no metadata", "cannot be read as Iceberg metadata"),
        ("no files", "has no rows; there is nothing to embed"),
    ],
)
def test_what_cannot_be_read_of_an_iceberg_table_is_one_line(
    embed: Run, model: str, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, said: str
) -> None:
    planned = iceberg._plan_files(table.metadata_location)
    file = {"file_path": planned[1][0][0].file_path, "file_format": "PARQUET"}
    written_by_others = {  # PyIceberg writes none of these
        "deleted rows": [(SimpleNamespace(**file), ["deletes.parquet"])],
        "another format": [(SimpleNamespace(**file | {"file_format": "ORC"}), [])],
        "another place": [(SimpleNamespace(**file | {"file_path": "mock:///c.parquet"}), [])],
    }
    if spoil in written_by_others:
        monkeypatch.setattr(iceberg, "_plan_files", lambda uri: (planned[0], written_by_others[spoil]))
    elif spoil == "a lost file":
        Path(file["file_path"].removeprefix("file://")).unlink()
    elif spoil == "a renamed column":
        with table.update_schema() as update:
            update.rename_column("vector", "before")
        with table.update_schema() as update:
            update.add_column("vector", table.schema().find_type("before"))
    elif spoil == "no metadata":
        Path(table.metadata_location.removeprefix("file://")).write_text("[")
    elif spoil == "no files":
        table.delete("price >= 0")
    assert said in embed.refusal(table.metadata_location, "--model", model, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("package", "named", "advice"),
    [
        ("lancedb", "s3://bucket/items.lance", '`pip install -e ".[lancedb]"`'),
        ("pyiceberg", "s3://bucket/items/metadata/v3.metadata.json", '`pip install -e ".[iceberg]"`'),
    ],
)
def test_missing_readers(embed: Run, model: str, monkeypatch: pytest.MonkeyPatch, package: str, named: str, advice: str) -> None:
    for module in (lance, iceberg):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find_spec(name))
    assert advice in embed.refusal(named, "--model", model, "--out", "out")
