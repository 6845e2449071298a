"""Servers of stores for several processes at once: each gives what opens a place in whichever process calls it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import postgres
from store_places import ChromaPlace, LancePlace, MilvusPlace, Place, PostgresPlace, QdrantPlace, QdrantVectorsPlace, SqlitePlace

Connect: TypeAlias = Callable[[], Place]
"""Opens a client of its own, and makes nothing."""


@contextmanager
def postgres_server(folder: Path) -> Iterator[Connect]:
    import psycopg

    with postgres.running() as uri:
        yield lambda: PostgresPlace(uri, psycopg.connect(uri, autocommit=True))


@contextmanager
def chroma_server(folder: Path) -> Iterator[Connect]:
    import chromadb

    settings = chromadb.config.Settings(anonymized_telemetry=False)
    with running(on_a_port("chroma", "run", "--path", folder, "--host", "127.0.0.1", folder=folder)) as server:
        address = f"chroma://127.0.0.1:{server.port}/"
        yield lambda: ChromaPlace(address, chromadb.HttpClient("127.0.0.1", server.port, settings=settings))


@contextmanager
def milvus_server(folder: Path) -> Iterator[Connect]:
    """Run Milvus Lite as a server, which answers one request after the other: its writes are not safe beside each other."""
    import pymilvus

    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it prints the traceback of each error that it raises
    arguments = ["server", "--data-dir", folder / "milvus", "--host", "127.0.0.1", "--max-workers", "1"]
    with running(on_a_port("milvus-lite", *arguments, folder=folder)) as server:
        host = f"127.0.0.1:{server.port}"
        yield lambda: MilvusPlace(f"milvus://{host}", pymilvus.MilvusClient(f"http://{host}"))


@contextmanager
def lance_folder(folder: Path) -> Iterator[Connect]:
    warnings.filterwarnings("ignore", "lancedb fork support is experimental", RuntimeWarning)
    yield lambda: LancePlace(folder)


@contextmanager
def sqlite_file(folder: Path) -> Iterator[Connect]:
    yield lambda: SqlitePlace(folder / "items.db")


@contextmanager
def qdrant_server(folder: Path, kind: type[QdrantPlace] = QdrantPlace) -> Iterator[Connect]:
    """Run the stand-in for a server in a process of its own."""
    from qdrant_client import QdrantClient

    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_serve_qdrant, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    yield lambda: kind(f"qdrant://127.0.0.1:{port}", QdrantClient(f"http://127.0.0.1:{port}", check_compatibility=False))
    process.kill()
    process.join()


def qdrant_server_in_place(folder: Path) -> AbstractContextManager[Connect]:
    return qdrant_server(folder, QdrantVectorsPlace)


def _serve_qdrant(port: Connection) -> None:
    from qdrant_server import served

    with served() as server:
        port.send(server.port)
        threading.Event().wait()


@dataclass
class Server:
    """A server in a process of its own, which can be started again on the same data."""

    command: list[str]
    log: Path
    answers: Callable[[], bool]
    port: int = 0
    user: str | None = None  # where root may not run it
    ending: int = signal.SIGTERM
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "ANONYMIZED_TELEMETRY": "False"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment, user=self.user)
        while self.process.poll() is None and not self.answers():
            time.sleep(0.01)
        assert self.process.poll() is None, self.log.read_text()

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(self.ending)
            self.process.wait()


def on_a_port(name: str, *arguments: object, folder: Path) -> Server:
    """Return a server that came with a package, beside Python, on a port of loopback; its log is in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments), "--port", str(port)]
    return Server(command, folder / "log", lambda: _answers(port), port)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.stop()


def _answers(port: int) -> bool:
    with socket.socket() as asking:
        return not asking.connect_ex(("127.0.0.1", port))
