"""Connections to PostgreSQL: errors in one line, and vectors as psycopg gives and takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector import HalfVector, Vector
from pgvector.psycopg import register_vector

from xcompat.errors import XcompatError
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri


def connect(uri: StoreUri) -> psycopg.Connection[Any]:
    """Connect; statements are transactions of their own unless a block says otherwise."""
    with explained(uri):
        connection = psycopg.connect(uri.client, autocommit=True)
        if not connection.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchall():
            raise XcompatError(f"{uri} has no pgvector; run `CREATE EXTENSION vector` there first")
        register_vector(connection)
        return connection


@contextmanager
def explained(uri: StoreUri) -> Iterator[None]:
    """Turn the errors of PostgreSQL into one line."""
    try:
        yield
    except psycopg.Error as error:
        said = error.diag.message_primary or " ".join(str(error).split())
        if isinstance(error, psycopg.OperationalError) and error.sqlstate is None:
            raise LostConnectionError(f"{uri} does not answer ({said}); run it again once it does, and it continues") from error
        raise XcompatError(f"{uri}: {said}") from error


def array(vectors: Sequence[Any]) -> NDArray[np.float32]:
    """Return vectors as the client gives them as (N, D) float32."""
    return np.stack([vector.to_numpy() for vector in vectors]).astype(np.float32) if vectors else np.empty((0, 0), np.float32)


def numbers(vectors_ND: NDArray[np.float32], kind: str) -> Iterator[Any]:
    """Return vectors as the client takes them."""
    return (HalfVector(vector) for vector in vectors_ND) if kind == "halfvec" else (Vector(vector) for vector in vectors_ND)
