"""SIGKILL migrations in databases beside a service that writes: they end row by row as one that nobody disturbs.

python faults/migrations.py Chroma --kills 20  # one store, a number of kills
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray
from syscalls import run_watched

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # where this is run as a script
import store_servers
from store_places import OLD, Place, map_of_galleries, unit_vectors
from store_servers import Connect

from xcompat import XcompatError
from xcompat.stores import migration
from xcompat.stores.base import Store
from xcompat.stores.mapping import Mapping
from xcompat.stores.new_embeddings import StoreEmbeddings

T = TypeVar("T")
ITEMS, KINDS, OLD_DIM, NEW_DIM, BATCH = 300, 64, 16, 24, 25
KILLS = 4
"""Of each verb of a migration."""
VERBS = ("search", "start", "verify", "switch", "rollback", "switch", "finish")
BUSY = "is being migrated by another process"
PATIENCE = 60.0
"""Seconds after which a service that is always refused has failed."""
PAUSE = 0.002
"""Seconds that a service leaves to the migration after each few of its writes."""
CANDIDATES = 20
"""Hits that a re-ranked search embeds together."""
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Scene:
    """A store that several processes open.

    Args:
        server: runs it in a folder, and gives what opens it.
        module: of ``xcompat.stores``, which every process has imported.
    """

    server: Callable[[Path], contextlib.AbstractContextManager[Connect]]
    module: str


SCENES = {
    "PostgreSQL": Scene(store_servers.postgres_server, "pgvector"),
    "Qdrant": Scene(store_servers.qdrant_server, "qdrant"),
    "Qdrant in place": Scene(store_servers.qdrant_server_in_place, "qdrant"),
    "LanceDB": Scene(store_servers.lance_folder, "lancedb"),
    "Milvus Lite": Scene(store_servers.milvus_server, "milvus"),
    "Chroma": Scene(store_servers.chroma_server, "chroma"),
    "SQLite": Scene(store_servers.sqlite_file, "sqlite"),
}
"""By the names of the stores."""


class Models:
    """The old model and the new one: vectors of some kinds of items, whose price is their kind."""

    def __init__(self) -> None:
        self.old = unit_vectors(KINDS, OLD_DIM)
        self.mapping = Mapping(map_of_galleries(unit_vectors(300, OLD_DIM), NEW_DIM))
        self.of = {OLD_DIM: self.old, NEW_DIM: self.mapping(self.old)}


class Service:
    """Whoever writes items meanwhile, knows them by their name alone, and asks again what it means before and after each write.

    It embeds by the model whose dimension is there now, and does what ``docs/stores.md`` asks of services: after a rollback it
    repeats what it wrote since the switch, which is in the new space alone; where a store cannot be locked, it repeats what it
    wrote into the new space while ``switch`` ran, which may have undone it.

    Args:
        place: a client of its own.
        models: embed.
        held: the kind of each item.
        switching: whether ``switch`` is run.
    """

    def __init__(self, place: Place, models: Models, held: dict[int, int], switching: Any) -> None:
        self.place, self.models, self.held, self.switching = place, models, held, switching
        self.dim, self.supports_locking = OLD_DIM, place.open().supports_locking
        self.since: dict[int, int | None] = {}
        self.unsure: set[int] = set()

    def write_until(self, ended: Any, items: int) -> dict[int, int]:
        """Insert, change and delete items until an event; return what there must be then."""
        draw = random.Random(0)
        for new in count(10 * items):
            if ended.is_set():
                break
            self.write(new, draw.randrange(KINDS))
            self.write(draw.randrange(items), draw.randrange(KINDS))
            self.write(draw.choice((new - 20, draw.randrange(items))), None)
            self.settle()
            time.sleep(PAUSE)
        self.settle()
        return self.held

    def write(self, item: int, kind: int | None) -> None:
        """Insert or change an item, or delete it with None."""
        for dim in self.asked():
            running = self.switching.is_set()
            try:
                if kind is None:
                    self.place.delete(str(item))
                else:
                    self.place.put(str(item), self.models.of[dim][kind], kind)
            except self.place.refusals:
                continue
            if next(self.asked()) == dim:
                break
        self.held.pop(item, None)
        if kind is not None:
            self.held[item] = kind
        if dim == NEW_DIM:
            self.since[item] = kind
            if running and not self.supports_locking:
                self.unsure.add(item)

    def asked(self) -> Iterator[int]:
        """Ask for the dimension of the items, again and again; repeat what a rollback has left behind."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            try:
                dim = self.place.dim()
            except self.place.refusals:  # as between the two renames of a switch
                continue
            if dim != self.dim:
                self.dim, repeated, self.since, self.unsure = dim, self.since, {}, set()
                for item, kind in repeated.items() if dim == OLD_DIM else ():
                    self.write(item, kind)
            yield dim
        raise AssertionError("the service is always refused")

    def settle(self) -> None:
        """Write again, once a switch is done, what that may have undone."""
        next(self.asked())
        if not self.switching.is_set():
            for item in self.unsure:
                self.write(item, self.held.get(item))
            self.unsure = set()


class Found(NamedTuple):
    """What a store holds.

    Args:
        names: of what stands there.
        rows: all fields but the vector, by id.
        vectors: by id.
    """

    names: list[str]
    rows: dict[str, dict[str, Any]]
    vectors: dict[str, NDArray[np.float32]]


class Trial:
    """A store that is migrated, always in other processes: what a client has started in one does not outlive a fork.

    Args:
        scene: the store.
        connect: opens it.
        folder: an empty one.
        items: how many there are at first.
    """

    def __init__(self, scene: Scene, connect: Connect, folder: Path, items: int) -> None:
        self.scene, self.connect, self.folder, self.items = scene, connect, folder, items
        self.models = Models()
        self.switching = FORK.Event()

    def begin(self, kinds: dict[int, int]) -> None:
        """Make the items anew, of these kinds."""

        def made() -> None:
            place = self.connect()
            place.clear()
            place.fill(self.models.old[list(kinds.values())], prices=kinds)
            store = place.open()
            store.name_model(store.space, OLD)

        apart(made)

    def found(self) -> Found:
        def read() -> Found:
            place = self.connect()
            space = place.open().space
            return Found(place.names(), place.rows(), place.vectors(space))

        return apart(read)

    @contextlib.contextmanager
    def beside_a_service(self, kinds: dict[int, int]) -> Iterator[dict[int, int]]:
        """Let a service write meanwhile; the kinds are what it has left in the end."""
        ended = FORK.Event()
        ours, theirs = FORK.Pipe(duplex=False)

        def serve() -> None:
            service = Service(self.connect(), self.models, dict(kinds), self.switching)
            theirs.send(service.write_until(ended, self.items))

        process = FORK.Process(target=serve, daemon=True)
        process.start()
        theirs.close()
        try:
            yield kinds
            ended.set()
            left = ours.recv()
            kinds.clear()
            kinds.update(left)
        except EOFError:
            raise AssertionError("the service has failed") from None
        finally:
            process.kill()
            process.join()

    def do(self, verb: str) -> None:
        """Do one step, unless it is done."""
        store, mapping = self.connect().open(), self.models.mapping
        state = (store.record(migration.RECORD) or {"state": "none"})["state"]
        if verb == "search" and store.supports_cache and state in ("none", "filling"):
            self.search(store)
        elif verb == "start" and state != "switched":
            migration.start(store, mapping, batch=BATCH)
        elif verb == "verify":
            assert migration.verify(store, mapping, queries=20).wrong == 0
        elif verb == "switch" and state != "switched":
            migration.switch(store, mapping)
        elif verb == "rollback" and state in ("switched", "switching back"):
            migration.rollback(store)
        elif verb == "finish":
            with contextlib.suppress(XcompatError) if state == "none" else contextlib.nullcontext():  # it is done
                migration.finish(store)

    def search(self, store: Store) -> None:
        """Re-rank hits until half of the rows have new embeddings, which the migration then uses."""
        migration.start(store, self.models.mapping, batch=BATCH, budget=0)
        record, ids = store.record(migration.RECORD), [item for block, _ in store.stream() for item in block][::2]
        assert record is not None
        for start in range(0, len(ids), CANDIDATES):
            cache, hits = StoreEmbeddings(store, record["into"]), ids[start : start + CANDIDATES]
            known = cache.get(hits, 0)
            originals, _ = store.read_current([item for item in hits if item not in known], store.space)
            if originals:
                cache.put(dict(zip(originals, self.models.mapping(np.stack([*originals.values()])), strict=True)), 0)

    def killed(self, verb: str, moments: list[float]) -> Iterator[str | None]:
        """Kill a step at moments, where it is not done before, and then do it; yield what is wrong for each kill."""
        if verb == "switch":
            self.switching.set()
        for moment in moments:
            outcome = run_watched(lambda: self.do(verb), self.folder, None, kill_after=moment)
            if outcome.code == -9:
                yield None
            elif outcome.code and BUSY not in outcome.errors:
                yield f"{verb} fails after a kill: {outcome.errors.strip()[-600:]}"
        self.done(verb)
        self.switching.clear()

    def done(self, verb: str) -> float:
        """Do a step, once the server has noticed that the last one was killed; return its seconds."""
        for _ in range(200):
            started = time.monotonic()
            outcome = run_watched(lambda: self.do(verb), self.folder, None)
            if outcome.code == 0:
                return time.monotonic() - started
            assert BUSY in outcome.errors, outcome.errors
        raise AssertionError("the claim of a process that was killed is never given back")

    def undisturbed(self, kinds: dict[int, int]) -> dict[str, float]:
        """Migrate items of these kinds; return the seconds of each step."""
        self.begin(kinds)
        return {verb: self.done(verb) for verb in VERBS}

    def compared(self, kinds: dict[int, int]) -> str | None:
        """Return how what is there differs from a migration of these items that nobody disturbs; None if it does not."""
        found = self.found()
        self.undisturbed(kinds)
        return difference(found, self.found())


def difference(found: Found, expected: Found) -> str | None:
    """Return in which way what was found is not what was expected; None if it is."""
    if found.names != expected.names:
        return f"there are {found.names}, not {expected.names}"
    if lost := expected.rows.keys() - found.rows.keys():
        return f"{len(lost)} of {len(expected.rows)} rows are lost, such as {min(lost)}"
    if more := found.rows.keys() - expected.rows.keys():
        return f"{len(more)} rows are there that were deleted, such as {min(more)}"
    if wrong := [item for item, row in expected.rows.items() if found.rows[item] != row]:
        was, said = found.rows[wrong[0]], expected.rows[wrong[0]]
        return f"{len(wrong)} of {len(expected.rows)} rows are not what was written last, such as {was}, which is {said}"
    wrong = [item for item, vector_D in expected.vectors.items() if not _same(found.vectors.get(item), vector_D)]
    return f"{len(wrong)} of {len(expected.rows)} rows have another vector than without kills" if wrong else None


def _same(found_D: NDArray[np.float32] | None, expected_D: NDArray[np.float32]) -> bool:
    return found_D is not None and found_D.shape == expected_D.shape and np.abs(found_D - expected_D).max() <= 1e-5


def apart(work: Callable[[], T]) -> T:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: theirs.send(work()))
    process.start()
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    finally:
        process.join()


def killed_migrations(name: str, folder: Path, kills: int, each: int = KILLS, items: int = ITEMS) -> Iterator[str | None]:
    """Kill every step of migrations at random moments, and let it be done then.

    Args:
        name: of the store.
        folder: an empty one.
        kills: how many at least; whole migrations are made.
        each: how many of each verb, before it is left to end.
        items: how many there are at first.

    Yields:
        For each kill None, or what is wrong; after each migration what is wrong with its rows.
    """
    draw, killed, scene = random.Random(0), 0, SCENES[name]
    importlib.import_module(f"xcompat.stores.{scene.module}")
    folder.mkdir(parents=True, exist_ok=True)
    with scene.server(folder) as connect:
        trial, kinds = Trial(scene, connect, folder, items), {item: item % KINDS for item in range(items)}
        seconds = trial.undisturbed(kinds)
        while killed < kills:
            trial.begin(kinds)
            with trial.beside_a_service(dict(kinds)) as left:
                for verb in VERBS:
                    for problem in trial.killed(verb, [draw.uniform(0, 1.2 * seconds[verb]) for _ in range(each)]):
                        killed += 1
                        yield problem
            if wrong := trial.compared(left):
                yield wrong


def main(store: str, kills: int = 20, each: int = KILLS, items: int = ITEMS) -> None:
    """Kill migrations in one store; exit with code 1 if something is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        trials = list(killed_migrations(store, Path(folder).resolve(), kills, each, items))
    problems = [problem for problem in trials if problem]
    print("\n".join([f"{store}: {len(trials)} kills, {len(problems)} failures", *problems]))  # noqa: T201
    raise typer.Exit(bool(problems))


if __name__ == "__main__":
    typer.run(main)
