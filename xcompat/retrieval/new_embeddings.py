"""Cache of new embeddings for an old gallery's items."""

from __future__ import annotations

import functools
import sqlite3
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError
from xcompat.core.files import make_folder
from xcompat.core.fingerprint import Fingerprint

FOLDER = "new_embeddings"
SCHEMA = 1
LOCK_SECONDS, LOCK_POLL_SECONDS = 10.0, 0.01
"""Longest wait for another writing process, and time between attempts."""
CACHED_KIB = 8_192
"""Pages in memory, in KiB: the inner pages of large files, beyond those that SQLite maps. More is slower until it is full."""
PER_STATEMENT = 500
"""Ids per statement; old SQLite versions take at most 999 values."""
PRUNED_SHARE = 0.1
"""Share of the oldest embeddings to delete when the file reaches its limit."""
_DIGEST = struct.Struct(">q8s")
"""Row number, and the rest of an id's hash."""
_VALID = "embedding IS NOT NULL AND valid_from <= ? AND made >= ?"
_TABLES = f"""
CREATE TABLE about (model TEXT NOT NULL, dim INTEGER NOT NULL);
CREATE TABLE items (
    id INTEGER PRIMARY KEY,
    rest BLOB NOT NULL,
    embedding BLOB,
    checksum BLOB,
    made REAL,
    valid_from INTEGER NOT NULL DEFAULT 0,
    demand INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_age ON items (made) WHERE embedding IS NOT NULL;
CREATE INDEX by_demand ON items (demand) WHERE demand > 0;
PRAGMA user_version = {SCHEMA};
"""


class NewEmbeddings:
    """Cache of a new model's embeddings for gallery items, in an SQLite file.

    Re-ranked searches fill it and a backfill uses it, from any number of processes. A killed process loses only uncommitted data.
    Changing or removing an item invalidates its embedding. Ids are stored as hashes, which reveal no names: 64 bits are the row
    number, so that a look-up searches a single tree, and the other 64 bits are compared.

    Args:
        gallery: the gallery folder.
        model: fingerprint of the model's own embeddings.
        dim: their dimension.
        max_bytes: size limit; beyond it, the oldest embeddings are deleted.
        max_days: maximum age before an embedding expires.

    Raises:
        XcompatError: the file is damaged, or cannot be written.

    Example:
        >>> import tempfile
        >>> kept = NewEmbeddings(Path(tempfile.mkdtemp()), Fingerprint.from_string("new"), dim=2)
        >>> kept.put({"a": np.ones(2, np.float32)}, generation=3)
        >>> kept.get(["a", "b"], generation=3)
        {'a': array([1., 1.], dtype=float32)}
    """

    def __init__(
        self,
        gallery: Path,
        model: Fingerprint,
        dim: int,
        max_bytes: int | None = None,
        max_days: float | None = None,
    ) -> None:
        self.path = gallery / FOLDER / f"{model.digest[:16]}.sqlite"
        self.dim, self.max_bytes, self.max_days = dim, max_bytes, max_days
        self._lock = threading.Lock()
        with self._explain_errors():
            make_folder(self.path.parent)
            self._connection = _connect(self.path)
            with self._writing() as connection:
                if not connection.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in _TABLES.split(";\n"):
                        connection.execute(statement)
                    connection.execute("INSERT INTO about VALUES (?, ?)", (model.digest, dim))
            schema = self._connection.execute("PRAGMA user_version").fetchone()[0]
            known = self._connection.execute("SELECT model, dim FROM about").fetchone() if schema == SCHEMA else None
        if known != (model.digest, dim):
            raise XcompatError(f"{self.path} does not hold embeddings of {model} with {dim} dimensions; delete the file")

    @classmethod
    def find(cls, gallery: Path, model: Fingerprint, dim: int) -> NewEmbeddings | None:
        """Return the existing cache for a model, if any; arguments as in the class."""
        return cls(gallery, model, dim) if (gallery / FOLDER / f"{model.digest[:16]}.sqlite").is_file() else None

    def __len__(self) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT COUNT(*) FROM items WHERE embedding IS NOT NULL").fetchone()[0])

    def get(self, ids: Sequence[str], generation: int) -> dict[str, NDArray[np.float32]]:
        """Return the items' valid embeddings.

        Args:
            ids: item ids.
            generation: the searched state's number.

        Returns:
            Id -> (D,) float32, without damaged embeddings.
        """
        size = 4 * self.dim
        names, rows = self._select("embedding, checksum", ids, generation)
        found = {
            names[key, rest]: embedding
            for key, rest, embedding, checksum in rows
            if (key, rest) in names and len(embedding) == size and xxhash.xxh3_64_digest(embedding) == checksum
        }
        embeds_ND = np.frombuffer(b"".join(found.values()), "<f4").reshape(len(found), self.dim)
        return dict(zip(found, embeds_ND, strict=True))

    def known_ids(self, ids: Sequence[str], generation: int) -> set[str]:
        """Return the ids with a valid embedding; arguments as in :meth:`get`."""
        names, rows = self._select("made", ids, generation)
        return {names[key, rest] for key, rest, _ in rows if (key, rest) in names}

    def _select(
        self, columns: str, ids: Sequence[str], generation: int
    ) -> tuple[dict[tuple[int, bytes], str], list[tuple[Any, ...]]]:
        """Return hash -> id, and rows with a valid embedding: both parts of the hash, then the columns."""
        names, rows = {_hash(name): name for name in ids}, list[tuple[Any, ...]]()
        keys = [key for key, _ in names]
        with self._reading() as connection:
            for start in range(0, len(keys), PER_STATEMENT):
                part = keys[start : start + PER_STATEMENT]
                found = connection.execute(_statement(columns, len(part)), (*part, generation, self._oldest))
                rows += found.fetchall()  # at once: each row alone costs a call
        return names, rows

    @property
    def _oldest(self) -> float:
        """Time before which embeddings are expired."""
        return 0.0 if self.max_days is None else time.time() - 86400 * self.max_days

    def put(self, embeds: Mapping[str, NDArray[np.float32]], generation: int) -> None:
        """Store embeddings, in one transaction.

        Args:
            embeds: id -> (D,).
            generation: the searched state's number; items replaced since are skipped.
        """
        now = time.time()
        rows = []
        for name, embed_D in embeds.items():
            embedding = np.ascontiguousarray(embed_D, "<f4").tobytes()
            rows.append((*_hash(name), embedding, xxhash.xxh3_64_digest(embedding), now, generation))
        with self._explain_errors(), self._writing() as connection:
            connection.executemany(
                "INSERT INTO items VALUES (?1, ?2, ?3, ?4, ?5, 0, 0) ON CONFLICT (id) DO UPDATE SET (rest, embedding, checksum, "
                "made) = (excluded.rest, excluded.embedding, excluded.checksum, excluded.made) WHERE valid_from <= ?6",
                rows,
            )
            self._prune(connection)

    def _prune(self, connection: sqlite3.Connection) -> None:
        if self.max_days is not None:
            connection.execute("UPDATE items SET embedding = NULL WHERE made < ?", (self._oldest,))
        while self.max_bytes is not None and _used_bytes(connection) > self.max_bytes:
            count = connection.execute("SELECT COUNT(*) FROM items WHERE embedding IS NOT NULL").fetchone()[0]
            if not count:
                return
            oldest = connection.execute(
                "SELECT id FROM items WHERE embedding IS NOT NULL ORDER BY made LIMIT ?", (1 + int(PRUNED_SHARE * count),)
            ).fetchall()
            connection.executemany("DELETE FROM items WHERE id = ? AND valid_from = 0 AND demand = 0", oldest)
            connection.executemany("UPDATE items SET embedding = NULL WHERE id = ?", oldest)

    def count_demand(self, ids: Iterable[str]) -> None:
        """Count a query's candidates, without storing the query."""
        with self._explain_errors(), self._writing() as connection:
            connection.executemany(
                "INSERT INTO items (id, rest, demand) VALUES (?, ?, 1) ON CONFLICT (id) DO UPDATE SET demand = demand + 1",
                [_hash(name) for name in ids],
            )

    def demand(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Return how often each item was counted as a candidate: (N,)."""
        with self._reading() as connection:
            counts = dict(connection.execute("SELECT id, demand FROM items WHERE demand > 0"))
        return np.array([counts.get(_hash(name)[0], 0) for name in ids] if counts else np.zeros(len(ids)), np.int64)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._explain_errors(), self._lock:
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _transaction(self._connection):
            yield self._connection

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn errors from SQLite and the file system into one line."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise XcompatError(f"{self.path} cannot be used ({error}); delete it if it is damaged: it is a cache") from None


def forget_items(gallery: Path, ids: Sequence[str], generation: int) -> None:
    """Invalidate items' embeddings before a commit removes or replaces them.

    Args:
        gallery: the gallery folder.
        ids: the items' ids.
        generation: the next commit's number.
    """
    for connection in _all_files(gallery):
        connection.executemany(
            "INSERT INTO items (id, rest, valid_from) VALUES (?1, ?2, ?3) "
            "ON CONFLICT (id) DO UPDATE SET embedding = NULL, valid_from = ?3",
            [(*_hash(name), generation) for name in ids],
        )


def forget_since(gallery: Path, restored: int, generation: int) -> None:
    """Invalidate embeddings of items changed after a restored state.

    Args:
        gallery: the gallery folder.
        restored: the restored state's number.
        generation: the next commit's number.
    """
    for connection in _all_files(gallery):
        connection.execute("UPDATE items SET embedding = NULL, valid_from = ? WHERE valid_from > ?", (generation, restored))


def _all_files(gallery: Path) -> Iterator[sqlite3.Connection]:
    """Yield a transaction for every model's file."""
    for path in sorted((gallery / FOLDER).glob("*.sqlite")):
        try:
            with closing(_connect(path)) as connection, _transaction(connection):
                if connection.execute("PRAGMA user_version").fetchone()[0] == SCHEMA:
                    yield connection
        except sqlite3.Error as error:
            raise XcompatError(f"{path} cannot be used ({error}); delete it: it is a cache") from None


@functools.cache
def _statement(columns: str, count: int) -> str:
    """Return the SQL that selects columns of valid items. ``IN`` would be slower: SQLite sorts its values into a table."""
    keys = ", ".join(["(?)"] * count)
    return f"WITH keys(key) AS (VALUES {keys}) SELECT id, rest, {columns} FROM keys CROSS JOIN items ON id = key WHERE {_VALID}"


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
    _use_write_ahead_log(connection)
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA mmap_size = {2**40}")  # SQLite maps at most 2 GB
    connection.execute(f"PRAGMA cache_size = -{CACHED_KIB}")
    return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch a new file to the write-ahead log. SQLite itself does not wait if another process is creating the same file."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(LOCK_POLL_SECONDS)


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # a full disk ends it
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _hash(name: str) -> tuple[int, bytes]:
    """Return a name's row number and the rest of its hash."""
    key, rest = _DIGEST.unpack(xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass")))
    return key, rest
