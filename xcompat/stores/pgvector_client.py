"""The connection to a PostgreSQL with pgvector: blocks of vectors as bytes, errors as one line, made anew where it is lost."""

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
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed, wait_random_exponential
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, literal
from xcompat.stores.base import LostConnectionError
from xcompat.stores.uri import StoreUri

T = TypeVar("T")
ATTEMPTS, LONGEST_WAIT = 10, 10.0
"""How often a lost connection is made anew before it is given up, and the most seconds between two attempts: half a minute."""
PATIENCE, PAUSE = "2s", 5.0
"""How long a lock is waited for, while whoever asks for the table waits behind it; seconds for which these go on then."""
TOGETHER = 800
"""Milliseconds for several locks together: less than the second after which PostgreSQL looks for deadlocks. So a service that
locks the table before a view, while a switch locks the view before the table, is not ended."""
LOST = ("08", "57P01", "57P02", "57P03")
"""How the codes of errors begin with which a server ends a connection, or does not accept one yet."""
FULL = "53100"
NEEDED = {"PostgreSQL": (13, 0), "pgvector": (0, 7)}
"""The oldest versions: of the server, and of the extension, which has ``halfvec`` since."""
TYPES = {"float32": "vector", "float16": "halfvec"}
"""How numbers are kept -> the type of the column."""
NUMBERS = {"vector": ">f4", "halfvec": ">f2"}
"""A type of column -> its numbers as they are sent."""
HEADER = 4
"""Bytes before the numbers of a vector: how many, and two that are zero."""
_HOLDERS = """
SELECT DISTINCT format('process %%s (%%s) since %%s', pid, application_name, to_char(xact_start, 'YYYY-MM-DD HH24:MI:SS'))
FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE relation = to_regclass(%s) AND granted AND pid <> pg_backend_pid()
ORDER BY 1
"""


@dataclass(frozen=True)
class Block:
    """Vectors that are sent as one array, ``vector[]`` or ``halfvec[]``.

    Args:
        vectors_ND: (N, D) float32.
        kind: the type of each.
        oid: its number in the database.
    """

    vectors_ND: NDArray[np.float32]
    kind: str
    oid: int


class BlockDumper(Dumper):
    """Writes the bytes of a block at once: a vector at a time takes Python longer than PostgreSQL."""

    format = Format.BINARY

    @override
    def dump(self, obj: Block) -> bytes:
        count, dim = obj.vectors_ND.shape
        numbers = np.dtype(NUMBERS[obj.kind])
        rows = np.zeros(count, [("bytes", ">i4"), ("dim", ">u2"), ("unused", ">u2"), ("numbers", numbers, (dim,))])
        rows["bytes"], rows["dim"], rows["numbers"] = HEADER + dim * numbers.itemsize, dim, obj.vectors_ND
        return struct.pack(">iiIii", 1, 0, obj.oid, count, 1) + rows.tobytes()  # dimensions of the array, nulls, type, size, from


class Client:
    """A connection that is made anew where it is lost, but for what is done inside of a transaction.

    Args:
        uri: the address.

    Attributes:
        regained: called on each further connection; if it raises a :class:`LostConnectionError`, there is one more attempt.
    """

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.regained: Callable[[], None] = lambda: None
        self.connection = connect(uri)
        with explained(uri):
            found = {kind: TypeInfo.fetch(self.connection, kind) for kind in NUMBERS}
        self.oids = {kind: info.oid for kind, info in found.items() if info is not None}

    @property
    def within(self) -> bool:
        """Whether a transaction is open."""
        return self.connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def again(self, work: Callable[[], T]) -> T:
        """Do what may be done twice, on a new connection where this one is lost; inside of a transaction once."""
        return self._attempt(work) if self.within else retried(lambda: self._attempt(work))

    def ask(self, asked: LiteralString | sql.SQL | sql.Composed, *given: Any) -> list[Any]:  # noqa: ANN401
        """Return the rows of a question, which is asked again where the connection is lost."""
        return self.again(lambda: self.execute(asked, *given))

    def execute(self, asked: LiteralString | sql.SQL | sql.Composed, *given: Any) -> list[Any]:  # noqa: ANN401
        """Execute a statement once; return its rows, none if it gives none."""
        with explained(self.uri):
            cursor = self.connection.execute(asked, given)
            return cursor.fetchall() if cursor.description is not None else []

    def quote(self, name: str) -> str:
        """Return a name as PostgreSQL writes it: quoted only where it must be."""
        return str(self.ask("SELECT quote_ident(%s)", name)[0][0])

    def run(self, statement: str) -> None:
        """Execute a complete statement once, e.g. one that the server wrote down itself."""
        with explained(self.uri):
            self.connection.execute(sql.SQL(statement))

    def lock(self, table: sql.SQL, mode: LiteralString = "ACCESS EXCLUSIVE", first: Sequence[str] = ()) -> None:
        """Lock a table until the transaction ends, as soon as others let go of it; who these are is said on the terminal.

        PostgreSQL lets nobody past who waits for such a lock. So it is waited for a moment at a time.

        Args:
            table: its name, with the schema.
            mode: of the lock.
            first: statements that lock what reads the table, e.g. its views, whose readers lock these first.
        """
        patience = f"{max(TOGETHER // (len(first) + 1), 1)}ms" if first else PATIENCE
        asked = sql.SQL("LOCK TABLE {} IN {} MODE").format(table, sql.SQL(mode))
        said: list[str] = []

        def attempt() -> None:
            with self.connection.transaction():  # a part of the one that is open, which goes on where this fails
                self.connection.execute("SELECT set_config('lock_timeout', %s, true)", (patience,))
                for statement in first:
                    self.connection.execute(sql.SQL(statement))
                self.connection.execute(asked)
                self.connection.execute("SET LOCAL lock_timeout TO DEFAULT")

        def say(_: RetryCallState) -> None:
            found = [name for (name,) in self.execute(_HOLDERS, table.as_string(self.connection))] or ["another transaction"]
            if said != found:
                said[:] = found
                console.print(f"waiting for {literal(self.uri)}, which is in use by {literal(', '.join(said))}", soft_wrap=True)

        held = retry_if_exception_type((psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected))
        Retrying(retry=held, wait=wait_fixed(PAUSE), before_sleep=say)(attempt)

    def _attempt(self, work: Callable[[], T]) -> T:
        try:
            if self.connection.closed and not self.within:
                self.connection = connect(self.uri)
                self.regained()
            with explained(self.uri):
                return work()
        except LostConnectionError:
            self.connection.close()
            raise

    def block(self, vectors_ND: NDArray[np.float32], kind: str) -> Block:
        """Return vectors (N, D) as a parameter of a statement."""
        return Block(vectors_ND, kind, self.oids[kind])

    def rows_of_bytes(self, asked: sql.Composed, *given: Any) -> list[Any]:  # noqa: ANN401
        """Return the rows of a question as :meth:`ask`, but vectors as bytes, see :func:`array`."""

        def ask() -> list[Any]:
            cursor = self.connection.cursor(binary=True)
            for oid in self.oids.values():
                cursor.adapters.register_loader(oid, ByteaBinaryLoader)
            return cursor.execute(asked, given).fetchall()

        return self.again(ask)


def retried(work: Callable[[], T]) -> T:
    """Do it until the server answers, with longer and longer waits, some times."""
    wait = wait_random_exponential(multiplier=0.1, max=LONGEST_WAIT)
    lost = retry_if_exception_type(LostConnectionError)
    return Retrying(retry=lost, stop=stop_after_attempt(ATTEMPTS), wait=wait, reraise=True)(work)


def connect(uri: StoreUri) -> psycopg.Connection[Any]:
    """Connect to a database that has pgvector."""
    with explained(uri):
        connection = psycopg.connect(uri.client, autocommit=True)
        known = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()
        if known is None:
            raise XcompatError(f"{uri} has no pgvector; run `CREATE EXTENSION vector` there first")
        extension = tuple(int(part) for part in known[0].split(".")[:2])
        for name, found in (("PostgreSQL", divmod(connection.info.server_version, 10_000)), ("pgvector", extension)):
            if found < NEEDED[name]:
                said, needed = (".".join(map(str, version)) for version in (found, NEEDED[name]))
                raise XcompatError(f"{uri} has {name} {said}, and {needed} is the oldest that works; upgrade it there first")
        register_vector(connection)
        connection.adapters.register_dumper(Block, BlockDumper)
        return connection


@contextmanager
def explained(uri: StoreUri) -> Iterator[None]:
    """Turn the errors of PostgreSQL into one line."""
    try:
        yield
    except psycopg.Error as error:
        said = uri.scrub(error.diag.message_primary or " ".join(str(error).split()))
        if "invalid URI query parameter" in said:
            raise XcompatError(f"{uri}: {said}; remove it from the address, PostgreSQL does not know it") from None
        if isinstance(error, psycopg.OperationalError) and (error.sqlstate is None or error.sqlstate.startswith(LOST)):
            raise LostConnectionError(f"{uri} does not answer ({said}); run it again once it does, and it continues") from error
        after = "; make room there and run it again, and it continues" if error.sqlstate == FULL else ""
        raise XcompatError(f"{uri}: {said}{after}") from error


def array(vectors: Sequence[bytes], kind: str) -> NDArray[np.float32]:
    """Return vectors, as :meth:`Client.rows_of_bytes` gives those of a type, as (N, D) float32."""
    if not vectors:
        return np.empty((0, 0), np.float32)
    if len({len(vector) for vector in vectors}) > 1:
        raise XcompatError("the column holds vectors of several dimensions, which no one model made")
    bytes_NB = np.frombuffer(b"".join(vectors), np.uint8).reshape(len(vectors), -1)
    return bytes_NB[:, HEADER:].view(NUMBERS[kind]).astype(np.float32)


def one_more(column: str | None) -> sql.Composable:
    """Return SQL that selects one column more, if there is one."""
    return sql.SQL(", {}").format(sql.Identifier(column)) if column is not None else sql.SQL("")
