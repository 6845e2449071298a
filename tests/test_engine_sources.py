"""Tables that `xcompat embed` reads beside Parquet: versions of Lance tables, and the metadata of Iceberg tables."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_engines import OLD_DIM, Run, files_in, lists, save_map, typed, write_lance

from xcompat.engines import iceberg, lance, sources
from xcompat.engines.kinds import read_source
from xcompat.models.embedder import load_checkpoint
from xcompat.stores.mapping import Mapping

pytest.importorskip("lancedb")
ROWS = 230


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_map(tmp_path_factory.mktemp("map") / "map", seed=0)


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, OLD_DIM)).astype(np.float32)


@pytest.fixture
def embed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs ``xcompat embed`` on parts of 60 rows."""
    monkeypatch.setattr(sources, "PART_ROWS", 60)
    return typed(monkeypatch, capsys)


# --------------------------------------------------------------------------------------------------------- Lance


@pytest.mark.parametrize("store", ["", "file-object-store://"])
def test_a_lance_table_gives_what_its_rows_in_parquet_give(
    embed: Run, model: str, vectors: np.ndarray, tmp_path: Path, store: str
) -> None:
    place = f"{store}{tmp_path}/items.lance"
    write_lance(place, vectors)
    code, out, error = embed(place, "--model", model, "--out", tmp_path / "out")
    assert code == 0 and not error and "holds 185 embeddings" in out and "in 4 files" in out
    left = lists(vectors).filter(pa.array([row % 100 >= 15 for row in range(ROWS)]))
    pq.write_table(left, tmp_path / "items.parquet", row_group_size=60)
    assert embed(tmp_path / "items.parquet", "--model", model, "--out", tmp_path / "same")[0] == 0
    one, same = (pq.read_table(tmp_path / name) for name in ("out", "same"))
    assert one["id"].to_pylist() == left["id"].to_pylist() and one.equals(same), "bit by bit"


def test_blocks_of_a_lance_table_do_not_begin_anew_with_its_fragments(tmp_path: Path, vectors: np.ndarray) -> None:
    write_lance(tmp_path / "items.lance", vectors)
    found = read_source(str(tmp_path / "items.lance"))
    blocks = list(found.reader.blocks(found.parts[0], lambda names: [names[2], names[0]], 50))
    assert [len(block) for block in blocks] == [50, 50, 50, 35] and blocks[0].schema.names == ["price", "id"]
    assert [row for block in blocks for row in block["price"].to_pylist()] == [row for row in range(ROWS) if row % 100 >= 15]


def test_a_run_on_a_lance_table_goes_on_with_the_version_that_it_began_with(
    embed: Run, model: str, vectors: np.ndarray, tmp_path: Path
) -> None:
    place, out = tmp_path / "items.lance", tmp_path / "out"
    table = write_lance(place, vectors)
    assert embed(place, "--model", model, "--out", out)[0] == 0
    whole, pinned = files_in(out), f"{place}?version={table.version}"
    for number in (0, 2):
        (out / f"part-{number:06}.parquet").unlink()
    table.add(lists(vectors[:7]))
    table.delete("price = 20")
    code, _, error = embed(place, "--model", model, "--out", out)
    assert code == 2 and f"was begun with {pinned}, and this is {place}?version={table.version}; name the first" in error
    code, said, _ = embed(pinned, "--model", model, "--out", out)
    assert code == 0 and "120 made in" in said and files_in(out) == whole


def test_another_table_in_the_place_of_the_first_is_noticed(embed: Run, model: str, vectors: np.ndarray, tmp_path: Path) -> None:
    place = tmp_path / "items.lance"
    write_lance(place, vectors)
    assert embed(place, "--model", model, "--out", tmp_path / "out")[0] == 0
    shutil.rmtree(place)
    write_lance(place, vectors[::-1])
    code, _, error = embed(place, "--model", model, "--out", tmp_path / "out")
    assert code == 2 and "was begun with another files" in error


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("item.lance", "item.lance does not exist; did you mean"),
        ("empty.lance", "empty.lance is no Lance table, or has none of its versions"),
        ("items.lance?version=first", "'first' is no version; write"),
        ("items.lance?version=99", "Version 99 no longer exists"),
        ("bare.lance", "holds no rows; there is nothing to embed"),
        ("nulls.lance", "nulls.lance?version=1, 3 rows from 1 on: a row after the first 0 has no id; every item needs its own"),
    ],
)
def test_mistakes_about_a_lance_table_are_one_line(
    embed: Run, model: str, vectors: np.ndarray, tmp_path: Path, named: str, said: str
) -> None:
    import lancedb

    write_lance(tmp_path / "items.lance", vectors)
    (tmp_path / "empty.lance").mkdir()
    lancedb.connect(tmp_path).create_table("bare", lists(vectors)[:0])
    lancedb.connect(tmp_path).create_table("nulls", lists(vectors)[:3].set_column(0, "id", pa.array(["a", None, "b"])))
    code, _, error = embed(tmp_path / named, "--model", model, "--out", tmp_path / "out")
    assert code == 2 and said in error and len(error.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.glob("*.lance")) == ["bare.lance", "empty.lance", "items.lance", "nulls.lance"]


# ------------------------------------------------------------------------------------------------------- Iceberg

STAND_IN = {
    "__init__.py": "",
    "io/__init__.py": "",
    "io/pyarrow.py": "class PyArrowFileIO:\n    def new_input(self, location):\n        return location",
    "serializers.py": """
import json
from types import SimpleNamespace

def named(values):
    return SimpleNamespace(**values)

class FromInputFile:
    @staticmethod
    def table_metadata(location):
        with open(location) as file:
            told = json.load(file, object_hook=named)
        return SimpleNamespace(schema=lambda: told.schema, tasks=told.tasks)
""",
    "table.py": """
class DataScan:
    def __init__(self, table_metadata, io):
        self.tasks = table_metadata.tasks

    def plan_files(self):
        return self.tasks
""",
}
"""What is used of PyIceberg, by its names; it keeps in one JSON file what Iceberg keeps in several files of Avro."""


@pytest.fixture
def pyiceberg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, code in STAND_IN.items():
        file = tmp_path / "site" / "pyiceberg" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyiceberg"]:
        del sys.modules[name]


@pytest.fixture
def table(tmp_path: Path, vectors: np.ndarray) -> dict[str, Any]:
    """Write a table's files in its folder, one of them of an older version, and return what its metadata say."""
    rows = lists(vectors)
    fields = [field.with_metadata({"PARQUET:field_id": str(number)}) for number, field in enumerate(rows.schema, 1)]
    rows = rows.cast(pa.schema(fields))
    folder = tmp_path / "items" / "data"
    folder.mkdir(parents=True)
    for name, part in (("b", rows[:130]), ("a", rows[130:]), ("0-old", rows[:50])):
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=20)
    tasks = [
        {"file": {"file_path": place, "file_format": "PARQUET"}, "delete_files": []}
        for place in (f"file://{folder}/b.parquet", f"{folder}/a.parquet")
    ]
    schema = {"fields": [{"name": name, "field_id": number} for number, name in enumerate(rows.schema.names, 1)]}
    return {"schema": schema, "tasks": tasks}


def write_metadata(tmp_path: Path, table: dict[str, Any]) -> Path:
    file = tmp_path / "items" / "metadata" / "v3.metadata.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(table))
    return file


@pytest.mark.usefixtures("pyiceberg")
def test_the_files_of_one_version_of_an_iceberg_table_are_read(
    embed: Run, model: str, vectors: np.ndarray, table: dict[str, Any], tmp_path: Path
) -> None:
    metadata = write_metadata(tmp_path, table)
    code, out, error = embed(metadata, "--model", model, "--out", tmp_path / "out")
    assert code == 0 and not error and f"holds {ROWS} embeddings" in out and "in 5 files" in out
    order = [*range(130, ROWS), *range(130)]
    made = pq.read_table(tmp_path / "out")
    assert made["id"].to_pylist() == [f"item-{row}" for row in order], "in the order of the files' names"
    truth = Mapping(load_checkpoint(model))(vectors[order])
    np.testing.assert_allclose(np.stack(made["embedding"].to_numpy()), truth, atol=1e-6)
    assert "all were there" in embed(metadata, "--model", model, "--out", tmp_path / "out")[1]


def test_the_folder_of_an_iceberg_table_is_not_read_as_parquet(
    embed: Run, model: str, table: dict[str, Any], tmp_path: Path
) -> None:
    write_metadata(tmp_path, table)
    code, _, error = embed(tmp_path / "items", "--model", model, "--out", tmp_path / "out")
    assert code == 2 and f"name the metadata of a version, such as {tmp_path}/items/metadata/v3.metadata.json" in error


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("deleted rows", "marks rows of"),
        ("another format", "b.parquet, which is no Parquet; rewrite its data files as Parquet"),
        ("a lost file", "c.parquet, which does not exist"),
        ("another place", "which is in another file system; keep a table in one"),
        ("a renamed column", "a.parquet, where 'vector' is a column that has another name now; rewrite its data files"),
        ("no metadata", "cannot be read as metadata of an Iceberg table"),
        ("no files", "holds no rows; there is nothing to embed"),
    ],
)
@pytest.mark.usefixtures("pyiceberg")
def test_what_cannot_be_read_of_an_iceberg_table_is_one_line(
    embed: Run, model: str, table: dict[str, Any], tmp_path: Path, spoil: str, said: str
) -> None:
    first = table["tasks"][0]["file"]
    if spoil == "deleted rows":
        table["tasks"][0]["delete_files"] = ["deletes.parquet"]
    elif spoil == "another format":
        first["file_format"] = "ORC"
    elif spoil == "a lost file":
        first["file_path"] = str(tmp_path / "items" / "data" / "c.parquet")
    elif spoil == "another place":
        first["file_path"] = "mock:///c.parquet"
    elif spoil == "a renamed column":
        table["schema"]["fields"][1]["field_id"] = 7
    elif spoil == "no files":
        table["tasks"] = []
    metadata = write_metadata(tmp_path, table)
    if spoil == "no metadata":
        metadata.write_text("[")
    code, _, error = embed(metadata, "--model", model, "--out", tmp_path / "out")
    assert code == 2 and said in error and len(error.splitlines()) == 1 and not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------- both


@pytest.mark.parametrize(
    ("package", "named", "advice"),
    [
        ("lancedb", "s3://bucket/items.lance", "pip install 'xcompat[lancedb]'"),
        ("pyiceberg", "s3://bucket/items/metadata/v3.metadata.json", "pip install 'pyiceberg[pyarrow]'"),
    ],
)
def test_what_reads_a_table_is_named_where_it_is_missing(
    embed: Run, model: str, monkeypatch: pytest.MonkeyPatch, package: str, named: str, advice: str
) -> None:
    for module in (lance, iceberg):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find_spec(name))
    code, _, error = embed(named, "--model", model, "--out", "out")
    assert code == 2 and advice in error and len(error.splitlines()) == 1
