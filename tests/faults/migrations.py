"""SIGKILL migrations in PostgreSQL beside a process that writes: they end row by row as one that nobody disturbs."""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from syscalls import run_watched

sys.path.append(str(Path(__file__).parents[1]))  # where this is run as a script
import postgres

import xcompat.stores
from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

ROWS, KINDS, OLD_DIM, NEW_DIM, BATCH = 1000, 64, 16, 24, 25
KILLS = 4
"""Of each verb of a migration."""
VERBS = ("start", "verify", "switch", "rollback", "switch", "finish")
BUSY = "is being migrated by another process"


class Scene:
    """A table whose rows say which of some vectors each has: ``kind`` is changed together with the vector.

    Args:
        uri: of the server.
        database: a connection to it.
    """

    def __init__(self, uri: str, database: Any) -> None:
        self.server, self.database = uri, database
        self.mapping = Mapping(postgres.solved(OLD_DIM, NEW_DIM))
        self.old = postgres.unit(KINDS, OLD_DIM, 5)
        self.vectors = [[postgres.text(row) for row in rows] for rows in (self.old, self.mapping(self.old))]

    def begin(self, kinds: dict[int, int]) -> None:
        """Make the table anew."""
        postgres.fill(self.database, self.old[list(kinds.values())])
        self.database.execute("ALTER TABLE items ADD COLUMN kind int")
        put = "UPDATE items SET id = %s, kind = %s WHERE id = %s"
        self.database.cursor().executemany(put, [(-1 - id_, kind, row) for row, (id_, kind) in enumerate(kinds.items())])
        self.database.execute("UPDATE items SET id = -1 - id")
        xcompat.stores.open(f"{self.server}&table=items").name_model("embedding", postgres.OLD)

    def do(self, verb: str) -> None:
        """Do one step, unless it is done."""
        store = xcompat.stores.open(f"{self.server}&table=items")
        state = (store.record(migration.RECORD) or {"state": "none"})["state"]
        if verb == "start" and state != "switched":
            migration.start(store, self.mapping, batch=BATCH)
        elif verb == "verify":
            assert migration.verify(store, self.mapping, queries=20).wrong == 0
        elif verb == "switch" and state != "switched":
            migration.switch(store, self.mapping)
        elif verb == "rollback" and state == "switched":
            migration.rollback(store)
        elif verb == "finish" and state == "switched":
            migration.finish(store)

    def rows(self) -> dict[int, tuple[int, Any]]:
        """Return the kind and the vector of each row."""
        found = self.database.execute("SELECT id, kind, embedding::text FROM items").fetchall()
        return {id_: (kind, vector) for id_, kind, vector in found}

    def repair(self, connection: Any) -> None:
        """Write the vectors of rows that a rollback has left without, as a service would."""
        for id_, kind in connection.execute("SELECT id, kind FROM items WHERE embedding IS NULL").fetchall():
            self.put("UPDATE items SET kind = %s, embedding = %s WHERE id = %s", connection, kind, id_)

    def put(self, statement: str, connection: Any, kind: int, *more: int) -> None:
        """Write a vector of the model that the column is of."""
        import psycopg

        for vectors in self.vectors:
            with suppress(psycopg.errors.DataException):  # the other dimension
                connection.execute(statement, (kind, vectors[kind], *more))
                return

    def write_for_ever(self) -> None:
        """Insert, change and delete rows."""
        import psycopg

        draw = random.Random(0)
        with psycopg.connect(self.server, autocommit=True) as connection:
            for new in range(10 * ROWS, sys.maxsize):
                kind, id_ = draw.randrange(KINDS), draw.randrange(ROWS)
                self.put("INSERT INTO items (kind, embedding, id) VALUES (%s, %s, %s)", connection, kind, new)
                self.put("UPDATE items SET kind = %s, embedding = %s WHERE id = %s", connection, kind, id_)
                connection.execute("DELETE FROM items WHERE id = %s", (draw.choice((new - 20, draw.randrange(ROWS))),))
                if not new % 50:
                    self.repair(connection)
                time.sleep(0.002)  # leaves the migration some of the machine


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do something in another process meanwhile."""
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), "the writer has failed"
    finally:
        process.kill()
        process.join()


def killed_migrations(folder: Path, kills: int, each: int = KILLS) -> Iterator[str | None]:
    """Kill every step of migrations at random moments, and let it be done then.

    Args:
        folder: an empty one.
        kills: how many at least; whole migrations are made.
        each: how many of each verb, before it is left to end.

    Yields:
        For each kill None, or what is wrong; after each migration what is wrong with its rows.
    """
    import psycopg

    draw, killed = random.Random(0), 0
    with postgres.running() as uri, psycopg.connect(uri, autocommit=True) as database:
        scene = Scene(uri, database)
        seconds = undisturbed(scene, folder, {row: row % KINDS for row in range(ROWS)})
        while killed < kills:
            scene.begin({row: row % KINDS for row in range(ROWS)})
            with beside(scene.write_for_ever):
                for verb in VERBS:
                    for problem in killed_step(scene, folder, verb, [draw.uniform(0, 1.2 * seconds[verb]) for _ in range(each)]):
                        killed += 1
                        yield problem
            if wrong := compared(scene, folder):
                yield wrong


def killed_step(scene: Scene, folder: Path, verb: str, moments: list[float]) -> Iterator[str | None]:
    """Kill a step at moments, where it is not done before, and then do it; yield what is wrong for each kill."""
    for moment in moments:
        outcome = run_watched(lambda: scene.do(verb), folder, None, kill_after=moment)
        if outcome.code == -9:
            yield None
        elif outcome.code and BUSY not in outcome.errors:
            yield f"{verb} fails after a kill: {outcome.errors.strip()[-600:]}"
    done(scene, folder, verb)


def done(scene: Scene, folder: Path, verb: str) -> float:
    """Do a step, once the server has noticed that the last one was killed; return its seconds."""
    for _ in range(200):
        started = time.monotonic()
        outcome = run_watched(lambda: scene.do(verb), folder, None)
        if outcome.code == 0:
            return time.monotonic() - started
        assert BUSY in outcome.errors, outcome.errors
    raise AssertionError("the claim of a process that was killed is never given back")


def undisturbed(scene: Scene, folder: Path, kinds: dict[int, int]) -> dict[str, float]:
    """Migrate rows of these kinds; return the seconds of each step."""
    scene.begin(kinds)
    return {verb: done(scene, folder, verb) for verb in VERBS}


def compared(scene: Scene, folder: Path) -> str | None:
    """Return how a table differs from one of the same rows whose migration nobody disturbs; None if it does not."""
    scene.repair(scene.database)
    found = scene.rows()
    columns = "SELECT attname FROM pg_attribute WHERE attrelid = 'items'::regclass AND attnum > 0 AND NOT attisdropped"
    names = sorted(name for (name,) in scene.database.execute(columns).fetchall())
    undisturbed(scene, folder, {id_: kind for id_, (kind, _) in found.items()})
    expected = scene.rows()
    if names != ["embedding", "id", "kind"] or found.keys() != expected.keys():
        return f"columns {names}, {len(found.keys() ^ expected.keys())} rows too many or too few"
    numbers = [np.array([np.fromstring(rows[id_][1][1:-1], sep=",") for id_ in found]) for rows in (found, expected)]
    wrong = int((np.abs(numbers[0] - numbers[1]).max(1) > 1e-5).sum()) if numbers[0].shape == numbers[1].shape else len(found)
    return f"{wrong} of {len(found)} rows have another vector than without kills" if wrong else None
