"""Connection to PostgreSQL with pgvector. It reconnects, and transfers vectors as bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString, TypeVar

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector.psycopg import register_vector
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.pq import Format, TransactionStatus
from psycopg.types import TypeInfo
from psycopg.types.string import ByteaBinaryLoader
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_cause_type,
    retry_if_exception_type,
    stop_after_attempt,
    wait_fixed,
    wait_random_exponential,
)
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, literal
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri

T = TypeVar("T")
ATTEMPTS, LONGEST_WAIT = 10, 10.0
"""Attempts to reconnect, and maximum seconds between them: half a minute in total."""
PATIENCE, PAUSE = "2s", 5.0
"""Time to wait for a lock, which blocks later queries, and seconds of pause for these."""
TOGETHER = 800
"""Milliseconds to wait for several locks. After a second, PostgreSQL checks for deadlocks, and would cancel a service that locks
the table before a view."""
LOST = ("08", "57P01", "57P02", "57P03")
"""Prefixes of error codes for ended or refused connections."""
FULL = "53100"
_REFUSED = ("authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry", "permission denied")
"""Parts of a new connection's errors that stay the same later. They have no code."""
NEEDED = {"PostgreSQL": (13, 0), "pgvector": (0, 7)}
"""Minimum versions of the server and the extension, which needs ``halfvec``."""
TYPES = {"float32": "vector", "float16": "halfvec"}
"""Number type -> column type."""
NUMBERS = {"vector": ">f4", "halfvec": ">f2"}
"""Column type -> number type in transfers."""
HEADER = 4
"""Bytes before the numbers of a vector: dimension and two zero bytes."""
_HOLDERS = """
SELECT DISTINCT format('process %%s (%%s) since %%s', pid, application_name, to_char(xact_start, 'YYYY-MM-DD HH24:MI:SS'))
FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE relation = to_regclass(%s) AND granted AND pid <> pg_backend_pid()
ORDER BY 1
"""


@dataclass(frozen=True)
class Block:
    """Vectors sent as one array, ``vector[]`` or ``halfvec[]``.

    Args:
        vectors_ND: (N, D) float32.
        kind: the vectors' type.
        oid: its OID in the database.
    """

    vectors_ND: NDArray[np.float32]
    kind: str
    oid: int


class BlockDumper(Dumper):
    """Binary encoder for blocks. Sending vectors one by one would take longer than PostgreSQL itself."""

    format = Format.BINARY

    @override
    def dump(self, obj: Block) -> bytes:
        count, dim = obj.vectors_ND.shape
        numbers = np.dtype(NUMBERS[obj.kind])
        rows = np.zeros(count, [("bytes", ">i4"), ("dim", ">u2"), ("unused", ">u2"), ("numbers", numbers, (dim,))])
        rows["bytes"], rows["dim"], rows["numbers"] = HEADER + dim * numbers.itemsize, dim, obj.vectors_ND
        return struct.pack(">iiIii", 1, 0, obj.oid, count, 1) + rows.tobytes()  # array dimensions, nulls, type, size, first index


class Client:
    """Connection that reconnects outside transactions.

    Args:
        uri: address.

    Attributes:
        regained: called after a reconnect. A :class:`LostConnectionError` in it triggers another attempt.
    """

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.regained: Callable[[], None] = lambda: None
        self.connection = connect(uri)
        with plain_errors(uri):
            found = {kind: TypeInfo.fetch(self.connection, kind) for kind in NUMBERS}
        self.oids = {kind: info.oid for kind, info in found.items() if info is not None}

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self.connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def retry(self, work: Callable[[], T]) -> T:
        """Run idempotent work, and retry after a reconnect. Inside a transaction it runs once."""
        return self._attempt(work) if self.in_transaction else retry_with_backoff(lambda: self._attempt(work))

    def ask(self, asked: LiteralString | sql.SQL | sql.Composed, *given: Any) -> list[Any]:  # noqa: ANN401
        """Return a query's rows, and retry after a reconnect."""
        return self.retry(lambda: self.execute(asked, *given))

    def execute(self, asked: LiteralString | sql.SQL | sql.Composed, *given: object) -> list[Any]:
        """Execute a statement once, and return its rows."""
        with plain_errors(self.uri):
            cursor = self.connection.execute(asked, given)
            return cursor.fetchall() if cursor.description is not None else []

    def quote(self, name: str) -> str:
        """Return a name quoted by PostgreSQL if necessary."""
        return str(self.ask("SELECT quote_ident(%s)", name)[0][0])

    def run(self, statement: str) -> None:
        """Execute a complete SQL statement once."""
        with plain_errors(self.uri):
            self.connection.execute(sql.SQL(statement))

    def lock(self, table: sql.SQL, mode: LiteralString = "ACCESS EXCLUSIVE", first: Sequence[str] = ()) -> None:
        """Lock a table until the transaction ends, and print the holders of other locks.

        It waits in short attempts, because a waiting lock blocks all later queries.

        Args:
            table: name with the schema.
            mode: lock mode.
            first: statements to lock e.g. views, which their readers lock before the table.
        """
        patience = f"{max(TOGETHER // (len(first) + 1), 1)}ms" if first else PATIENCE
        asked = sql.SQL("LOCK TABLE {} IN {} MODE").format(table, sql.SQL(mode))
        said: list[str] = []

        def attempt() -> None:
            with self.connection.transaction():  # a savepoint of the open transaction
                self.connection.execute("SELECT set_config('lock_timeout', %s, true)", (patience,))
                for statement in first:
                    self.connection.execute(sql.SQL(statement))
                self.connection.execute(asked)
                self.connection.execute("SET LOCAL lock_timeout TO DEFAULT")

        def say(_: RetryCallState) -> None:
            found = [name for (name,) in self.execute(_HOLDERS, table.as_string(self.connection))] or ["another transaction"]
            if said != found:
                said[:] = found
                console.print(f"waiting for {literal(self.uri)}, in use by {literal(', '.join(said))}", soft_wrap=True)

        held = retry_if_exception_type((psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected))
        Retrying(retry=held, wait=wait_fixed(PAUSE), before_sleep=say)(attempt)

    def retry_deadlocks(self, transaction: Callable[[], None]) -> None:
        """Repeat a transaction that PostgreSQL cancels to end a deadlock, as with a service that locks in another order."""
        ended = retry_if_exception_cause_type(psycopg.errors.DeadlockDetected)
        wait = wait_random_exponential(multiplier=0.1, max=LONGEST_WAIT)
        Retrying(retry=ended, stop=stop_after_attempt(ATTEMPTS), wait=wait, reraise=True)(transaction)

    def _attempt(self, work: Callable[[], T]) -> T:
        try:
            if self.connection.closed and not self.in_transaction:
                self.connection = connect(self.uri)
                self.regained()
            with plain_errors(self.uri):
                return work()
        except LostConnectionError:
            self.connection.close()
            raise

    def block(self, vectors_ND: NDArray[np.float32], kind: str) -> Block:
        """Return vectors (N, D) as a parameter of an SQL statement."""
        return Block(vectors_ND, kind, self.oids[kind])

    def rows_of_bytes(self, asked: sql.Composed, *given: object) -> list[Any]:
        """Return a query's rows with vectors as bytes, for :func:`array`."""

        def ask() -> list[Any]:
            cursor = self.connection.cursor(binary=True)
            for oid in self.oids.values():
                cursor.adapters.register_loader(oid, ByteaBinaryLoader)
            return cursor.execute(asked, given).fetchall()

        return self.retry(ask)


def retry_with_backoff(work: Callable[[], T]) -> T:
    """Retry with exponential backoff after a lost connection."""
    wait = wait_random_exponential(multiplier=0.1, max=LONGEST_WAIT)
    lost = retry_if_exception_type(LostConnectionError)
    return Retrying(retry=lost, stop=stop_after_attempt(ATTEMPTS), wait=wait, reraise=True)(work)


def connect(uri: StoreUri) -> psycopg.Connection[Any]:
    """Connect to a database with pgvector."""
    with plain_errors(uri):
        connection = psycopg.connect(uri.client, autocommit=True)
        known = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
        if known is None:
            raise XcompatError(
                f"{uri} has no pgvector; install pgvector on its server if it is missing, then run `CREATE EXTENSION vector` in "
                "this database"
            )
        extension = tuple(int(part) for part in known[0].split(".")[:2])
        for name, found in (("PostgreSQL", divmod(connection.info.server_version, 10_000)), ("pgvector", extension)):
            if found < NEEDED[name]:
                said, needed = (".".join(map(str, version)) for version in (found, NEEDED[name]))
                raise XcompatError(f"{uri} has {name} {said}; upgrade it to {needed} or later")
        register_vector(connection)
        connection.adapters.register_dumper(Block, BlockDumper)
        return connection


@contextmanager
def plain_errors(uri: StoreUri) -> Iterator[None]:
    """Raise PostgreSQL's errors as one line."""
    try:
        yield
    except psycopg.Error as error:
        said = uri.scrub(error.diag.message_primary or " ".join(str(error).split()))
        if "invalid URI query parameter" in said:
            raise XcompatError(f"{uri}: {said}; remove it from the address") from None
        if isinstance(error, psycopg.OperationalError) and error.sqlstate is None and any(part in said for part in _REFUSED):
            raise XcompatError(f"{uri}: {said}; check the user, the password and the database in the address") from error
        if isinstance(error, psycopg.OperationalError) and (error.sqlstate is None or error.sqlstate.startswith(LOST)):
            raise LostConnectionError(
                f"{uri} does not answer ({said}); when it does, run the command again: finished work is kept"
            ) from error
        after = "; free disk space there, then run the command again to continue" if error.sqlstate == FULL else ""
        raise XcompatError(f"{uri}: {said}{after}") from error


def array(vectors: Sequence[bytes], kind: str) -> NDArray[np.float32]:
    """Convert vectors from :meth:`Client.rows_of_bytes` to (N, D) float32."""
    if not vectors:
        return np.empty((0, 0), np.float32)
    if len({len(vector) for vector in vectors}) > 1:
        raise XcompatError("the column has vectors of several dimensions; use a column with vectors of one model")
    bytes_NB = np.frombuffer(b"".join(vectors), np.uint8).reshape(len(vectors), -1)
    return bytes_NB[:, HEADER:].view(NUMBERS[kind]).astype(np.float32)


def select_extra_column(column: str | None) -> sql.Composable:
    """Return SQL for an additional column, or empty SQL."""
    return sql.SQL(", {}").format(sql.Identifier(column)) if column is not None else sql.SQL("")
