"""Many machines: a model as a function of tables, and the same bytes from one process, two, Daft and two nodes of Ray."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import warm
from conftest import Run, refuses
from PIL import Image
from pyarrow import fs
from store_places import solve_map, unit_vectors

from xcompat import XcompatError
from xcompat.core.errors import FingerprintMismatchError
from xcompat.embeddings.embed import embed_in_memory
from xcompat.engines import TableModel, filesystems, models, sources, tables
from xcompat.engines.partitions import Job
from xcompat.engines.source_types import read_source
from xcompat.engines.sources import Part
from xcompat.engines.workers import ENGINES
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.stores.mapping import Mapping

OLD_DIM, NEW_DIM, N = 16, 24, 230


def save_map(folder: Path, seed: int, direction: str = "old_to_new") -> str:
    old, new = (unit_vectors(300, dim, seed) for dim in (OLD_DIM, NEW_DIM))
    solve_map(old, new, direction=direction).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_map(tmp_path_factory.mktemp("map") / "map", seed=0)


def lists(rows: np.ndarray, name: str = "vector") -> pa.Table:
    """Return a table of vectors with their ids, and a column that nobody asks for."""
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    return pa.table({"id": [f"item-{row}" for row in range(len(rows))], name: column, "price": range(len(rows))})


@pytest.fixture
def source(tmp_path: Path, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two files of row groups of 20, of which three make a part, and what is not to be read."""
    monkeypatch.setattr(sources, "PART_ROWS", 60)
    folder = tmp_path / "items"
    for name, rows in (("a.parquet", slice(0, 130)), ("deeper/b.parquet", slice(130, N))):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        named = lists(vectors).rename_columns({"id": "doc_id"})  # one of the usual names
        pq.write_table(named[rows], folder / name, row_group_size=20)
    (folder / "_metadata.parquet").touch()
    (folder / "notes.txt").touch()
    return folder


@pytest.fixture
def run(run_xcompat: Run) -> Run:
    return Run(run_xcompat, "embed")


def write_lance(place: Path | str, rows: np.ndarray) -> Any:
    """Write a table of LanceDB in three fragments, of which each has lost rows, and return it."""
    import lancedb

    folder, _, name = str(place).rpartition("/")
    table = lists(np.concatenate([rows, rows[:40]]))
    made = lancedb.connect(folder).create_table(name.removesuffix(".lance"), table[:100])
    made.add(table[100:130])
    made.add(table[130:])
    made.delete(f"price % 100 < 15 AND price < {len(rows)} OR price >= {len(rows)}")
    return made


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the plan and the parts of a folder; each part has a checksum file beside it."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if not file.name.startswith("_part-")}


@pytest.mark.parametrize(("kind", "fixed"), [(pa.float16(), True), (pa.float32(), False), (pa.float64(), True)])
def test_a_column_is_mapped_and_all_others_stay(model: str, vectors: np.ndarray, kind: pa.DataType, fixed: bool) -> None:
    wanted = pa.list_(kind, OLD_DIM) if fixed else pa.list_(kind)
    table = lists(vectors).set_column(1, "vector", pa.array([row.astype(np.float16) for row in vectors]).cast(wanted))
    function = pickle.loads(pickle.dumps(TableModel.open(model, "vectors", "vector")))  # noqa: S301 - it is ours
    mapped = function(table)
    assert function(pa.concat_tables([table[:7], table[7:]])).equals(mapped) and not len(function(table[:0]))
    assert len(pickle.dumps(function)) < 2000, "a name, not weights"
    assert mapped.select(table.column_names).equals(table) and mapped.column_names == [*table.column_names, "embedding"]
    found = np.stack(mapped["embedding"].to_numpy())
    truth = Mapping(load_checkpoint(model))(vectors.astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(found, truth, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows, "there is no column 'embedding'"),
        (lambda rows: [None, *rows[1:]], "row 1 of column 'vector' has no embedding; remove such rows"),
        (lambda rows: [*rows[:9], [0.5] * 3, *rows[10:]], "row 10 of column 'vector' has 3 dimensions, those before it 16"),
        (lambda rows: [[*row, 1.0] for row in rows], "has 17 dimensions, but"),
        (lambda rows: [*rows[:5], [0.0] * OLD_DIM, *rows[6:]], "column 'vector' row 6 is zero and has no direction"),
        (lambda rows: [*rows[:5], [np.nan] * OLD_DIM, *rows[6:]], "column 'vector' row 6 is not finite"),
        (lambda rows: ["text"] * len(rows), "holds no vector ('text'); write numbers in brackets"),
    ],
)
def test_what_cannot_be_mapped_is_one_line(model: str, vectors: np.ndarray, change: Any, said: str) -> None:
    table = lists(vectors)
    column = "vector" if "'embedding'" not in said else "embedding"
    with pytest.raises(XcompatError, match=re.escape(said)):
        TableModel.open(model, "vectors", column)(table.set_column(1, "vector", pa.array(change(vectors.tolist()))))


def test_another_model_under_the_same_name_is_refused(tmp_path: Path, vectors: np.ndarray) -> None:
    function = TableModel.open(save_map(tmp_path / "map", seed=1), "vectors", "vector")
    save_map(tmp_path / "map", seed=2)
    models._load.cache_clear()
    reason = r"is .* on this worker, expected .*; copy the same files to every machine"
    with pytest.raises(FingerprintMismatchError, match=reason):
        function(lists(vectors))


def test_texts_and_images_are_embedded(old_folder: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    texts = ["two dogs", "a red running shoe", "a shoe", "two dogs"]
    embedded = TableModel.open(old_folder, "texts")(pa.table({"text": pa.array(texts).dictionary_encode()}))
    embedder = load_embedder(old_folder)
    np.testing.assert_allclose(np.stack(embedded["embedding"].to_numpy()), embed_in_memory(embedder, texts), atol=1e-5)
    assert embedded.schema.field("embedding").type.list_size == embedder.dim


@pytest.mark.parametrize("reads", ["texts", "images"])
def test_what_the_model_makes_nothing_finite_of_is_no_image_that_cannot_be_read(
    old_folder: str, tmp_path: Path, images: list[Image.Image], monkeypatch: pytest.MonkeyPatch, reads: Any
) -> None:
    for name in ("0.png", "1.png"):
        images[0].save(tmp_path / name)
    rows = ["one", "two", "three"] if reads == "texts" else [str(tmp_path / name) for name in ("lost.png", "0.png", "1.png")]
    function, embed_contents = TableModel.open(old_folder, reads), tables.embed_contents

    def spoilt(*given: Any) -> Any:
        embedded = embed_contents(*given)
        embedded.embeds_ND[2, 5] = np.nan
        return embedded

    monkeypatch.setattr(tables, "embed_contents", spoilt)
    refuses(r"row 3: the embedding by .* is not finite; remove such rows", function, pa.table({function.column: rows}))


def test_images_come_as_bytes_paths_or_both(old_folder: str, images: list[Image.Image], tmp_path: Path) -> None:
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    paths = [str(tmp_path / f"{number}.png") for number in range(len(images))]
    stored = [Path(path).read_bytes() for path in paths]
    function = TableModel.open(old_folder, "images")
    both = [{"bytes": content, "path": "x.png"} for content in stored]
    made = [function(pa.table({"image": rows}))["embedding"] for rows in (paths, stored, both)]
    assert made[0].equals(made[1]) and made[1].equals(made[2]) and not made[0].null_count
    spoilt = function(pa.table({"image": [*stored[:1], b"no image", *stored[1:]]}))["embedding"]
    assert spoilt.is_null().to_pylist() == [False, True, *[False] * (len(stored) - 1)]


def test_sparks_example_is_a_function_of_batches(model: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark gives a function the batches of each partition, and checks what it returns against the schema; here a test does."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "mapInArrow" in block)
    seen: list[Any] = []

    class Frame:
        def mapInArrow(self, function: Any, schema: str) -> None:  # noqa: N802 - Spark's own
            batches = lists(vectors, "embedding").select(["id", "embedding"]).to_batches(max_chunksize=50)
            sent = pickle.loads(pickle.dumps(seen[0]))  # noqa: S301 - it is ours
            names = [part.split()[0] for part in schema.split(", ")]
            seen.append(pa.Table.from_batches(function(iter(batches))))
            assert seen[-1].column_names == names and sent == seen[0]

    opened = TableModel.open(model, "vectors")
    monkeypatch.setattr(TableModel, "open", lambda *_: seen.append(opened) or opened)
    exec(compile(code, "docs/engines.md", "exec"), {"items": Frame()})  # noqa: S102 - our own page
    np.testing.assert_allclose(np.stack(seen[-1]["embedding"].to_numpy()), Mapping(load_checkpoint(model))(vectors), atol=1e-6)


def test_a_second_run_adds_the_missing(run: Run, model: str, source: Path, vectors: np.ndarray, tmp_path: Path) -> None:
    command = (source, "--model", model, "--out", tmp_path / "out")
    code, out, error = run(*command)
    assert code == 0 and not error and f"holds {N} embeddings of {model} in 5 files" in out
    made = [pq.read_table(tmp_path / "out" / f"part-{number:06}.parquet") for number in range(5)]
    assert [len(table) for table in made] == [60, 60, 10, 60, 40], "no part spans two files"
    table = pa.concat_tables(made)
    assert table["id"].to_pylist() == [f"item-{row}" for row in range(N)] and table.column_names == ["id", "embedding"]
    np.testing.assert_allclose(np.stack(table["embedding"].to_numpy()), Mapping(load_checkpoint(model))(vectors), atol=1e-6)
    about = made[0].schema.metadata[b"xcompat"].decode()
    assert Mapping(load_checkpoint(model)).target[0].digest in about
    whole = files_in(tmp_path / "out")
    for number in (1, 4):
        (tmp_path / "out" / f"part-{number:06}.parquet").unlink()
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("part-*")}
    assert "100 computed in" in run.output(*command) and files_in(tmp_path / "out") == whole
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert "nothing to do" in run.output(*command)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("byte", "part-000001.parquet has changed since it was written; writing this part again"),
        ("no checksum", "part-000001.parquet has no checksum; writing this part again"),
        ("checksum", "part-000001.parquet has a damaged checksum; writing this part again"),
    ],
)
def test_a_damaged_part_is_made_again(run: Run, model: str, source: Path, tmp_path: Path, damage: str, said: str) -> None:
    out, command = tmp_path / "out", (source, "--model", model, "--out", tmp_path / "out")
    run.output(*command)
    whole = files_in(out)
    part, checksum = out / "part-000001.parquet", out / "_part-000001.parquet.json"
    if damage == "byte":
        content = part.read_bytes()
        middle = len(content) // 2
        part.write_bytes(content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :])
        with pytest.raises(OSError, match="CRC"):
            pq.read_table(part, page_checksum_verification=True)
    elif damage == "no checksum":
        checksum.unlink()
    else:
        checksum.write_text("{")
    told = run.output(*command)
    assert said in told and "60 computed in" in told
    assert files_in(out) == whole and "nothing to do" in run.output(*command)


def copy_part(out: Path, number: int) -> None:
    shutil.copy(out / "part-000001.parquet", out / f"part-{number:06}.parquet")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("other model", "was started with another fingerprint"),
        ("other dtype", "was started with another dtype ('float32', now 'float16'); choose another folder"),
        (lambda source, _: os.utime(source / "a.parquet", (1, 1)), "items has changed since "),
        (lambda _, out: (out / "_plan.json").unlink(), "not written by `xcompat embed`; choose another folder"),
        (lambda _, out: (out / "_plan.json").write_text("mine"), "contains a _plan.json not written by `xcompat embed`"),
        (lambda _, out: copy_part(out, 2), "part-000002.parquet was not written by this `xcompat embed` run; move it"),
        (lambda _, out: copy_part(out, 9), "part-000009.parquet is not a part of this `xcompat embed` run; move it"),
        ("a file in its place", "is a file; choose a folder for --out"),
    ],
)
def test_nothing_else_is_replaced(run: Run, model: str, source: Path, tmp_path: Path, spoil: Any, said: str) -> None:
    out, more = tmp_path / "out", ["--dtype", "float16"] if spoil == "other dtype" else []
    run.output(source, "--model", model, "--out", out)
    if spoil == "other model":
        model = save_map(tmp_path / "other", seed=3)
    elif spoil == "a file in its place":
        shutil.rmtree(out)
        out.write_text("mine")
    elif callable(spoil):
        spoil(source, out)
    before = files_in(out) if out.is_dir() else out.read_text()
    assert said in run.refusal(source, "--model", model, "--out", out, *more)
    assert (files_in(out) if out.is_dir() else out.read_text()) == before


@pytest.mark.parametrize("address", ["{tmp_path}/items", "file://{tmp_path}/items", "s3://bucket/items"])
def test_what_is_made_is_never_read_as_a_source(
    run: Run, model: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    stand_in_for_a_bucket(tmp_path, monkeypatch)
    address = address.format(tmp_path=tmp_path)
    inside = f"{address}/deeper/out" if address.startswith("s3") else source / "deeper" / "out"
    error = run.refusal(address, "--model", model, "--out", inside)
    assert f"deeper/out is inside {address}, so later runs would read the output as input" in error
    assert not (source / "deeper" / "out").exists()
    run.output(source, "--model", model, "--out", tmp_path / "out")
    shutil.copytree(tmp_path / "out", source / "out")  # as earlier releases took it
    error = run.refusal(address, "--model", model, "--out", tmp_path / "other")
    assert f"out was written by `xcompat embed` and is inside {address}" in error
    assert not (tmp_path / "other").exists()
    assert len(read_source(str(source / "out")).parts) == 5, "named itself it is a source as any other"


def test_a_bad_row_stops_it_and_what_is_made_is_kept(run: Run, model: str, source: Path, tmp_path: Path) -> None:
    table = pq.read_table(source / "deeper" / "b.parquet")
    rows = table["vector"].to_pylist()
    spoilt = table.set_column(1, "vector", pa.array([*rows[:70], None, *rows[71:]], pa.list_(pa.float32())))
    pq.write_table(spoilt, source / "deeper" / "b.parquet", row_group_size=20)
    error = run.refusal(source, "--model", model, "--out", tmp_path / "out")
    assert "b.parquet, 40 rows from 61 on: row 11 of column 'vector' has no embedding" in error
    assert "finished parts are kept, run the command again to continue" in error
    assert len(files_in(tmp_path / "out")) == 5, "the plan and four parts"


@pytest.mark.parametrize("while_read", [False, True])
def test_a_file_that_changes_meanwhile_is_noticed(
    run: Run, model: str, source: Path, vectors: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_read: bool
) -> None:
    make, tables_of = Job._make, Job._tables

    def replaced() -> None:
        pq.write_table(lists(vectors[::-1])[130:N], source / "new", row_group_size=20)
        (source / "new").rename(source / "deeper" / "b.parquet")

    def before(self: Job, part: Part) -> Any:
        if part.number == 3 and not while_read:
            replaced()
        return make(self, part)

    def between(self: Job, part: Part) -> Iterator[pa.Table]:
        for table in tables_of(self, part):
            if part.number == 3 and while_read:
                replaced()
            yield table

    monkeypatch.setattr(Job, "_make", before)
    monkeypatch.setattr(Job, "_tables", between)
    error = run.refusal(source, "--model", model, "--out", tmp_path / "out")
    assert "b.parquet, 60 rows from 1 on: the file has changed since the run started" in error
    assert sorted(files_in(tmp_path / "out")) == ["_plan.json", *(f"part-{number:06}.parquet" for number in range(3))]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("nowhere --model {model} --out out", "nowhere does not exist"),
        ("{source}", "set the model with --model, and the output folder with --out"),
        ("{source} a=1 --model {model} --out out", "'a=1' overrides a recipe value"),
        ("{source} --model {model} --out out --workers 2", "need an engine; choose one with --engine"),
        ("recipe.yaml --engine ray", "--engine applies to tables"),
        ("{source} --model {model} --out out --column prices", "has no column 'prices'; did you mean 'price'?"),
        ("{source} --model {model} --out out --column price", "choose a column of vectors, texts or images"),
        ("{source} --model {model} --out out --id-column vector", "both name 'vector'"),
        ("{source} --model {queries} --out out", "maps queries, not stored vectors"),
        ("nosuch://bucket/items --model {model} --out out", "nosuch://bucket/items cannot be opened"),
        *(("{source} --model {model} --out made --engine " + engine, f'`pip install -e ".[{engine}]"`') for engine in ENGINES),
    ],
)
def test_mistakes_are_one_line(
    run: Run, model: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for engine in ENGINES:  # not installed
        monkeypatch.setitem(sys.modules, engine, None)
    queries = save_map(tmp_path / "queries", 0, "new_to_old") if "{queries}" in typed else ""
    assert said in run.refusal(*typed.format(model=model, source=source, queries=queries).split())
    assert not (tmp_path / "out").exists()


def test_a_column_is_chosen_by_its_name_unless_two_could_be_meant(
    run: Run, old_folder: str, tmp_path: Path, images: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    images[0].save(tmp_path / "0.png")
    stored = [(tmp_path / "0.png").read_bytes()] * 3
    table = pa.table({"key": [4, 5, 6], "text": ["a shoe", "two dogs", "word " * 500], "image": [*stored[:2], b"no image"]})
    pq.write_table(table, tmp_path / "items.parquet")
    command = (tmp_path / "items.parquet", "--model", old_folder, "--id-column", "key")
    assert "has 'text' and 'image'; choose one with --column" in run.refusal(*command, "--out", tmp_path / "x")
    out = run.output(*command, "--out", tmp_path / "texts", "--column", "text")
    assert "truncated 1 of 3 texts to the maximum length of" in out
    assert pq.read_table(tmp_path / "texts")["id"].to_pylist() == [4, 5, 6]
    command = (*command, "--out", tmp_path / "images", "--column", "image")
    assert "1 of 3 images cannot be read, e.g. '6'; fix or remove them" in run.refusal(*command)
    monkeypatch.setattr("xcompat.engines.commands.MOST_UNREAD", 0.5)
    out = run.output(*command)
    assert all(said in out for said in ("skipped 1 of 3 images that cannot be read, e.g. '6'", "holds 2 emb", "nothing to do"))
    assert pq.read_table(tmp_path / "images")["id"].to_pylist() == [4, 5]


def test_images_that_cannot_be_read_are_refused_until_they_are_mended(
    run: Run, old_folder: str, tmp_path: Path, images: list[Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 2)
    paths = [str(tmp_path / f"{number}.png") for number in range(4)]
    for path in paths:
        images[0].save(path)
    Path(paths[2]).write_bytes(b"no image")
    pq.write_table(pa.table({"id": range(4), "image": paths}), tmp_path / "items.parquet", row_group_size=1)
    command = (tmp_path / "items.parquet", "--model", old_folder, "--out", tmp_path / "out")
    for _ in range(2):
        assert "1 of 4 images cannot be read, e.g. '2'; fix or remove them" in run.refusal(*command)
    unmended = files_in(tmp_path / "out")
    images[1].save(paths[2])
    out = run.output(*command)
    assert "holds 4 embeddings" in out and "2 computed in" in out, "the part that lacked one, and no other"
    made = files_in(tmp_path / "out")
    assert pq.read_table(tmp_path / "out")["id"].to_pylist() == list(range(4)) and "nothing to do" in run.output(*command)
    assert {name for name in made if made[name] != unmended[name]} == {"part-000001.parquet"}


def stand_in_for_a_bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    found = filesystems.resolve_filesystem

    def resolve(uri: str) -> tuple[Any, str]:
        return (bucket, uri.partition("bucket/")[2]) if uri.startswith("s3") else found(uri)

    for module in (filesystems, sys.modules["xcompat.engines.commands"]):
        monkeypatch.setattr(module, "resolve_filesystem", resolve)


def test_buckets_keep_no_key(run: Run, model: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder stands for a bucket: it is no file system of this machine to Arrow, so that nothing can be renamed."""
    stand_in_for_a_bucket(tmp_path, monkeypatch)
    more = ("--model", model, "--dtype", "float16", "--out")
    run.output(source, *more, tmp_path / "here")
    command = ("s3://ME:KEY@bucket/items", *more, "s3://ME:KEY@bucket/there")
    code, *said = run(*command)
    here, there = (pq.read_table(tmp_path / name) for name in ("here", "there"))
    assert here.equals(there) and here.schema.field("embedding").type.value_type == pa.float16()
    plan = tmp_path / "there" / "_plan.json"
    assert code == 0 and "s3://***@bucket/there holds" in said[0] and '"source": "s3://***@bucket/items"' in plan.read_text()
    assert "KEY" not in "".join(said) and not any(b"KEY" in content for content in files_in(tmp_path / "there").values())
    plan.write_text(plan.read_text().replace("***", "ME:OLD"))  # as earlier releases wrote it
    assert "nothing to do" in run(*command)[1]
    os.utime(source / "a.parquet", (1, 1))
    assert "items has changed since s3://***@bucket/there was started" in run(*command)[2], "the same address, by other keys"


def test_two_ranks(run: Run, old_folder: str, tmp_path: Path, images: list[Image.Image], monkeypatch: pytest.MonkeyPatch) -> None:
    images[0].save(tmp_path / "0.png")
    paths = [str(tmp_path / name) for name in ("0.png", "lost.png", "0.png", "gone.png", "0.png")]
    pq.write_table(pa.table({"id": range(5), "image": paths}), tmp_path / "items.parquet", row_group_size=1)
    monkeypatch.setattr(sources, "PART_ROWS", 2)
    monkeypatch.setattr("xcompat.engines.commands.MOST_UNREAD", 0.4)
    assert run(tmp_path / "items.parquet", "--model", old_folder, "--out", tmp_path / "one")[0] == 0
    code = "from xcompat import cli; from xcompat.engines import commands, sources\n"
    code += "commands.MOST_UNREAD = 0.3; sources.PART_ROWS = 2; cli.main()"
    command = ("embed", tmp_path / "items.parquet", "--model", old_folder, "--out", tmp_path / "two")
    done = warm.run("-c", code, *command, folder=tmp_path, ranks=2)
    assert done.returncode != 0 and "2 of 5 images cannot be read, e.g. '1'; fix or remove them" in done.stderr
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


@pytest.mark.parametrize(  # Parquet by Ray: where a worker is killed
    ("engine", "kind", "workers"),
    [
        ("daft", "parquet", 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("daft", "parquet", 1), ("ray", "lance", 2))),
    ],
)
def test_an_engine_writes_the_same_bytes(
    run: Run, model: str, source: Path, vectors: np.ndarray, tmp_path: Path, engine: str, kind: str, workers: int, request: Any
) -> None:
    pytest.importorskip(engine)
    if engine == "ray":
        request.getfixturevalue("cluster")
    if kind == "lance":
        pytest.importorskip("lancedb")
        source = tmp_path / "items.lance"
        write_lance(source, np.concatenate([vectors, vectors[:45]]))
    run.output(source, "--model", model, "--out", tmp_path / "one")
    (tmp_path / "many").mkdir()
    for name in ("_plan.json", "part-000001.parquet", "_part-000001.parquet.json"):  # as a run that was stopped leaves them
        shutil.copy(tmp_path / "one" / name, tmp_path / "many")
    many = (source, "--model", model, "--out", tmp_path / "many", "--engine", engine, "--workers", workers)
    assert "170 computed in" in run.output(*many)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "many")


@pytest.mark.parametrize(("there", "workers"), [(0, []), (1, ["--workers", "2"])])
def test_daft_is_not_asked_for_more_gpus_than_there_are(
    run: Run, model: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, workers: list[str]
) -> None:
    pytest.importorskip("daft")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    command = (source, "--model", model, "--out", tmp_path / "out", "--engine", "daft", "--gpus-per-worker", 1)
    assert f"this machine has {there} GPUs, too few for {there + 1} workers with 1 each" in run.refusal(*command, *workers)


class DyingJob(Job):
    """Notes who works, waits for a second worker, and kills the one that is first in the middle of part 2."""

    def _tables(self, part: Part) -> Iterator[pa.Table]:
        import ray

        notes = Path(self.out).parent / "notes"
        (notes / f"node-{ray.get_runtime_context().get_node_id()}").touch()
        while len(list(notes.glob("node-*"))) < 2:
            time.sleep(0.05)
        for table in super()._tables(part):
            yield table
            if part.number == 2:
                try:
                    (notes / "killed").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.nightly
def test_a_killed_worker_changes_nothing(run: Run, model: str, source: Path, tmp_path: Path, cluster: Any) -> None:
    from ray import cloudpickle

    from xcompat.engines import ray as on_ray

    cloudpickle.register_pickle_by_value(sys.modules[DyingJob.__module__])  # workers do not find tests
    assert run(source, "--model", model, "--out", tmp_path / "one")[0] == 0
    (tmp_path / "notes").mkdir()
    found = read_source(str(source))
    plan = re.search(r'"plan": "(\w+)"', pq.read_schema(tmp_path / "one" / "part-000000.parquet").metadata[b"xcompat"].decode())
    function = TableModel.open(model, "vectors", "vector")
    assert plan is not None
    job = DyingJob(function, found.reader, str(tmp_path / "two"), "id", plan[1])
    done = list(on_ray.run(job, found.parts, workers=2))
    assert sorted(each.number for each in done) == list(range(5)) and not any(each.error for each in done)
    assert len(list((tmp_path / "notes").glob("node-*"))) == 2 and (tmp_path / "notes" / "killed").exists()
    one, two = files_in(tmp_path / "one"), files_in(tmp_path / "two")
    assert {**two, "_plan.json": one["_plan.json"]} == one, "and no half-written file is left"


def test_an_error_of_daft_is_one_line() -> None:
    daft = pytest.importorskip("daft")

    from xcompat.engines import daft as on_daft

    died = RuntimeError("UDF worker exited with signal 9")
    with (
        mock.patch.object(daft.DataFrame, "iter_rows", side_effect=died),
        pytest.raises(XcompatError, match=r"a Daft worker died \(.*signal 9.*\); run the command again to continue"),
    ):
        list(on_daft.run(Job(None, None, "out", "id", "a plan"), [Part(0, "table", 0, 1)], workers=1))
