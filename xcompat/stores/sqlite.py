"""Store for SQLite with sqlite-vec. Spaces are ``vec0`` tables in one file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple
from urllib.parse import unquote

import apsw
import numpy as np
import sqlite_vec
import xxhash
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, UNKNOWN, LostConnectionError, Rows, Space, Store
from xcompat.stores.lease import Lease
from xcompat.stores.uri import StoreUri

OPTIONS = ("table", "column")
METRICS: dict[str, Metric] = {"l2": "l2", "cosine": "cosine"}
RECORDS = "xcompat_records"
"""Table with the records of xcompat."""
STATE = "_xcompat"
"""Suffix of the table with hashes: each new row's source, and the row as it was written."""
HASH = "xcompat_hash"
"""SQL function of this module's connections."""
WAIT = 30_000
"""Milliseconds to wait for another process's lock."""
CACHE = 65_536
"""KiB of cached pages: sqlite-vec keeps 1,024 vectors in a chain of pages, which is read up to each vector."""
_ARGUMENTS = re.compile(r"using\s+vec0\s*\((.*)\)\s*$", re.IGNORECASE | re.DOTALL)
_VECTOR = re.compile(r"(?:^|,)\s*(\w+)\s+(float|f32|int8|i8|bit)\s*\[\s*(\d+)\s*\]([^,]*)", re.IGNORECASE)
_METRIC = re.compile(r"distance_metric\s*=\s*(\w+)", re.IGNORECASE)
_SHADOW = re.compile(r"_(info|chunks|rowids|auxiliary|(vector_chunks|metadatachunks|metadatatext)\d\d)")
"""Endings of the tables that sqlite-vec keeps for a ``vec0`` table."""
_READ = {"float": "{}", "f32": "{}", "int8": "vec_int8({})", "i8": "vec_int8({})", "bit": "vec_bit({})"}


class Vec0(NamedTuple):
    """Definition of a ``vec0`` table.

    Args:
        arguments: text between the parentheses.
        columns: all columns, with the key.
        key: primary key, or ``rowid``.
        is_integer: whether the key is an integer, else a text.
    """

    arguments: str
    columns: list[str]
    key: str
    is_integer: bool

    @property
    def floats(self) -> list[str]:
        """Columns of float vectors."""
        return [found[1] for found in _VECTOR.finditer(self.arguments) if found[2].lower() in ("float", "f32")]

    def vector(self, column: str) -> re.Match[str]:
        """Return a vector column's definition: name, type, dimension and options."""
        return next(found for found in _VECTOR.finditer(self.arguments) if found[1] == column)

    def with_dim(self, column: str, dim: int) -> str:
        """Return the arguments of a table whose vectors in a column have another dimension."""
        start, end = self.vector(column).span(3)
        return f"{self.arguments[:start]}{dim}{self.arguments[end:]}"

    def hash_of(self, alias: str) -> str:
        """Return the SQL of a row's hash."""
        return f"{HASH}({', '.join(f'{alias}.{_quote(column)}' for column in self.columns)})"

    def copies(self, vector: str) -> str:
        """Return the SQL of all values of a row ``t``, with ``?`` for a vector."""
        kinds = {found[1]: _READ[found[2].lower()] for found in _VECTOR.finditer(self.arguments)}
        each = ["?" if name == vector else kinds.get(name, "{}").format(f"t.{_quote(name)}") for name in self.columns]
        return ", ".join(each)


class SqliteStore(Store):
    """``vec0`` table in an SQLite file, and its copy with new vectors. Each write is one transaction."""

    supports_locking = True
    reports_version = True
    supports_cache = True

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.connection, self._lock = connect(uri), RLock()  # SQLite refuses two threads at once
        self.space, self.state = uri.require("table"), uri.require("table") + STATE
        if (own := self._vec0(self.space)) is None:
            tables = [name for (name,) in self._ask("SELECT name FROM sqlite_schema WHERE sql LIKE '%using vec0%'")]
            raise XcompatError(f"{uri}: there is no vec0 table {self.space!r}; {nearest(self.space, tables)}")
        self.column = uri.choose("column", own.floats, "a column of float vectors")
        self.key, self.is_integer = _quote(own.key), own.is_integer
        given = _METRIC.search(own.vector(self.column)[4])
        distance = given[1].lower() if given else "l2"
        if distance not in METRICS:
            raise XcompatError(f"{uri}: {self.space} compares by {distance}, but maps need cosine or l2")
        self.metric = METRICS[distance]
        self._lease = Lease(self)
        self._complete: tuple[str, str, int] | None = None
        """Space and new space without missing rows, and the version of the file at that time."""

    # ------------------------------------------------------------------------------------------------- the file

    def _ask(self, statement: str, *values: object) -> list[Any]:
        with self._lock, plain_errors(self.uri):
            return list(self.connection.execute(statement, values))

    def _vec0(self, table: str) -> Vec0 | None:
        """Return a table's definition, or None if there is none."""
        found = self._ask("SELECT sql FROM sqlite_schema WHERE name = ?", table)
        if not found or (arguments := _ARGUMENTS.search(found[0][0] or "")) is None:
            return None
        known = self._ask("SELECT name, pk FROM pragma_table_xinfo(?) WHERE hidden = 0", table)
        key = next((name for name, is_key in known if is_key), "rowid")
        is_text = re.search(rf"(?:^|,)\s*{key}\s+text\s+primary", arguments[1], re.IGNORECASE)
        return Vec0(arguments[1].strip(), [name for name, _ in known], key, is_text is None)

    def _existing(self, table: str) -> Vec0:
        if (found := self._vec0(table)) is None:
            raise XcompatError(f"{self.uri} has no vec0 table {table!r}")
        return found

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        """Run a block in a transaction, or in the current one."""
        with self._lock:
            if self.connection.in_transaction:
                yield
                return
            with plain_errors(self.uri):
                self.connection.execute(f"BEGIN {kind}")
                try:
                    yield
                    self.connection.execute("COMMIT")
                finally:
                    if self.connection.in_transaction:
                        self.connection.execute("ROLLBACK")

    @override
    def spaces(self) -> dict[str, Space]:
        models, found = self.record("spaces") or {}, {}
        for name in sorted({self.space, *self.added_spaces()}):
            if (table := self._vec0(name)) is not None:
                model = models.get(name)
                known = Fingerprint(model["digest"], model["name"]) if model else None
                found[name] = Space(name, int(table.vector(self.column)[3]), "float32", known)
        return found

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        own = space or self.space
        if without is None:
            return int(self._ask(f"SELECT count(*) FROM {_quote(own)}")[0][0])
        version = self._version()
        if self._is_complete(own, without):
            return 0
        lacking = f"FROM {_quote(own)} AS t {self._join_other_space(without)} WHERE {self._lacks(own, without)}"
        found = int(self._ask(f"SELECT count(*) {lacking}")[0][0])
        self._complete = None if found else (own, without, version)
        return found

    def _version(self) -> int:
        """Return a number that changes when another connection changes the file."""
        return int(self._ask("PRAGMA data_version")[0][0])

    def _is_complete(self, own: str, without: str) -> bool:
        """Return whether no row can lack a vector. A switch leaves none, because it locks the file."""
        return without == self.space or self._complete == (own, without, self._version())

    def _join_other_space(self, other: str) -> str:
        """Return the SQL that joins rows ``t`` with their rows ``w`` in another space and their hashes ``s``."""
        key = self.key
        return f"LEFT JOIN {_quote(other)} AS w ON w.{key} = t.{key} LEFT JOIN {_quote(self.state)} AS s ON s.id = t.{key}"

    def _lacks(self, own: str, other: str) -> str:
        """Return the SQL condition: the row ``t`` is missing or outdated in another space."""
        known = "made" if other == self.space + BEFORE else "source"  # services change the searched rows
        return f"(w.{self.key} IS NULL OR s.{known} IS NOT {self._existing(own).hash_of('t')})"

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        with self._transaction("DEFERRED"):
            own = self.spaces()[space or self.space]
            queries_QD = self.queries(vectors_QD, own)
            return [self._nearest(own, query_D.tobytes(), top_k, filter) for query_D in queries_QD]

    def _nearest(self, own: Space, query: bytes, top_k: int, condition: str | None) -> list[Hit]:
        table, column = _quote(own.name), _quote(self.column)
        limited = f"AND {self.key} IN (SELECT {self.key} FROM {table} WHERE {condition})" if condition else ""
        asked = f"SELECT {self.key}, distance FROM {table} WHERE {column} MATCH ? AND k = ? {limited} ORDER BY distance"
        found, version = self._ask(asked, query, top_k), own.fingerprint or UNKNOWN
        has_direction = f"{column} <> zeroblob({4 * (own.dim or 0)})"
        if any(distance is None for _, distance in found) and has_direction not in (condition or ""):
            return self._nearest(own, query, top_k, f"({condition or 'TRUE'}) AND {has_direction}")  # zeros displace hits
        return [Hit(str(item), self._score(distance), version, None) for item, distance in found if distance is not None]

    def _score(self, distance: float) -> float:
        return -(distance**2) if self.metric == "l2" else 1 - distance

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        asked = self._select(self.space, other, content, "NOT " if other != self.space else None)
        with self._lock:
            known = self._ids(self.connection, self.space)
        chosen = [known[at] for at in np.linspace(0, len(known) - 1, min(count, len(known))).astype(int)]
        found = self._ask(asked, json.dumps(chosen))
        return _rows(found, content), _array([row[4] for row in found])

    @override
    def read_current(
        self, ids: Sequence[str], space: str, content: str | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], Rows]:
        keys = json.dumps(self._keys(ids))
        made = self._ask(self._select(self.space, space, None, "NOT "), keys)
        left = self._ask(self._select(self.space, space, content, ""), keys)
        return dict(zip([str(row[0]) for row in made], _array([row[4] for row in made]), strict=True)), _rows(left, content)

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        asked = (
            f"SELECT t.{self.key}, {', '.join(map(self._content, fields))} "
            f"FROM json_each(?) AS j CROSS JOIN {_quote(self.space)} AS t ON t.{self.key} = j.value"
        )
        found = self._ask(asked, json.dumps(self._keys(ids)))
        return {str(item): dict(zip(fields, values, strict=True)) for item, *values in found}

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        """Use a separate connection to read, unless this connection holds the lock."""
        own = space or self.space
        if without is not None and self._is_complete(own, without):
            return iter(())
        with self._lock:
            version, reader = self._version(), self.connection if self.connection.in_transaction else None
        asked = self._select(own, without or own, content, None if without is None else "")
        blocks = self._blocks(reader, asked, own, content, batch, after)
        return blocks if without is None or after is not None else self._note_complete(blocks, (own, without, version))

    def _note_complete(self, blocks: Iterator[Rows], complete: tuple[str, str, int]) -> Iterator[Rows]:
        """Yield the blocks of missing rows. If there are none, note it."""
        is_complete = True
        for rows in blocks:
            is_complete = False
            yield rows
        if is_complete:
            self._complete = complete

    def _blocks(
        self, reader: apsw.Connection | None, asked: str, own: str, content: str | None, batch: int, after: str | None
    ) -> Iterator[Rows]:
        connection, last = reader or connect(self.uri), self._keys([after])[0] if after is not None else None
        try:
            while ids := self._ids(connection, own, last):  # with rows added at the end meanwhile
                last = ids[-1]
                for start in range(0, len(ids), batch):
                    with plain_errors(self.uri):
                        found = list(connection.execute(asked, (json.dumps(ids[start : start + batch]),)))
                    if found:
                        yield _rows(found, content)
        finally:
            if reader is None:
                connection.close()

    def _ids(self, connection: apsw.Connection, table: str, after: object = None) -> list[Any]:
        """Return the sorted keys of all rows, or of rows after a key."""
        asked = f"SELECT {self.key} FROM {_quote(table)} WHERE ?1 IS NULL OR {self.key} > ?1"
        with plain_errors(self.uri):
            return sorted(item for (item,) in connection.execute(asked, (after,)))

    def _keys(self, ids: Iterable[str]) -> list[Any]:
        """Return ids in the key's type, without ids that cannot be keys."""
        return [int(item) for item in ids if re.fullmatch(r"-?\d+", item)] if self.is_integer else list(ids)

    def _select(self, own: str, other: str, content: str | None, lacks: str | None) -> str:
        """Return the SQL to read rows by a JSON list of keys: key, vector, hash, content and the other space's vector.

        Args:
            own: space to read.
            other: another space.
            content: field to read too.
            lacks: "" for rows missing in the other space, "NOT " for its current rows, or None for all rows.
        """
        column = _quote(self.column)
        beside, condition = ("", "TRUE") if lacks is None else (self._join_other_space(other), lacks + self._lacks(own, other))
        return (
            f"SELECT t.{self.key}, t.{column}, {self._existing(own).hash_of('t')}, {self._content(content)}, "
            f"{'t' if lacks is None else 'w'}.{column} FROM json_each(?) AS j CROSS JOIN {_quote(own)} AS t "
            f"ON t.{self.key} = j.value {beside} WHERE {condition} ORDER BY j.key"
        )

    def _content(self, field: str | None) -> str:
        """Return the SQL of a field: a column, or ``TABLE.COLUMN`` of the row with the same id."""
        table, dot, column = (field or "").rpartition(".")
        if dot:
            return f"(SELECT c.{_quote(column)} FROM {_quote(table)} AS c WHERE c.rowid = t.{self.key})"
        return f"t.{_quote(column)}" if field is not None else "NULL"

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        if dtype != "float32":
            raise XcompatError(f"{self.uri}: sqlite-vec stores vectors to search as float32; remove --dtype")

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        self.check_space(dim, dtype)
        for taken in (name, self.space + BEFORE, self.state):
            if self._ask("SELECT name FROM sqlite_schema WHERE name = ?", taken):
                raise XcompatError(f"{self.uri} already has a table {taken!r}; choose another name or drop it")
        with self._transaction("IMMEDIATE"):
            made = self._existing(self.space).with_dim(self.column, dim)
            self._ask(f"CREATE VIRTUAL TABLE {_quote(name)} USING vec0({made})")
            self._ask(f"CREATE TABLE {_quote(self.state)} (id PRIMARY KEY, source TEXT, made TEXT) WITHOUT ROWID")
            self.name_model(name, model)

    @override
    def write(self, space: str, rows: Rows) -> int:
        own, key = self._existing(self.space), self.key
        keys, vectors = self._keys(rows.ids), [vector_D.tobytes() for vector_D in np.asarray(rows.vectors_ND, np.float32)]
        columns, new, state = ", ".join(map(_quote, own.columns)), _quote(space), _quote(self.state)
        copied = (
            f"INSERT INTO {new} ({columns}) SELECT {own.copies(self.column)} FROM {_quote(self.space)} AS t "
            f"WHERE t.{key} = ? AND {own.hash_of('t')} = ?"
        )
        noted = f"REPLACE INTO {state} SELECT w.{key}, ?, {own.hash_of('w')} FROM {new} AS w WHERE w.{key} = ? RETURNING 1"
        with self._transaction("IMMEDIATE"):
            many = self.connection.executemany
            many(f"DELETE FROM {new} WHERE {key} = ?", [(item,) for item in keys])
            many(copied, zip(vectors, keys, rows.states, strict=True))
            return len(list(many(noted, zip(rows.states, keys, strict=True))))

    @override
    def delete_orphans(self, space: str, like: str) -> int:
        if space == self.space:
            return 0
        new, key = _quote(space), self.key
        stale = self._ask(f"SELECT {key} FROM {new} EXCEPT SELECT {key} FROM {_quote(like)}")
        if stale:
            with self._transaction("IMMEDIATE"):
                self.connection.executemany(f"DELETE FROM {new} WHERE {key} = ?", stale)
                self.connection.executemany(f"DELETE FROM {_quote(self.state)} WHERE id = ?", stale)
        return len(stale)

    @override
    def index_like(self, space: str) -> list[str]:
        """Do nothing: sqlite-vec compares all vectors."""
        return []

    @override
    def switch(self, space: str) -> None:
        if self._vec0(self.space + BEFORE) is None:
            self._rename({self.space: self.space + BEFORE, space: self.space})

    @override
    def switch_back(self, space: str) -> None:
        if (own := self._vec0(self.space + BEFORE)) is None:
            return
        with self._transaction("IMMEDIATE"):  # rows that services changed since the switch are filled again
            beside = f"FROM {_quote(self.space)} AS t JOIN {_quote(self.state)} AS s ON s.id = t.{self.key}"
            changed = f"SELECT s.id {beside} WHERE s.made IS NOT {own.hash_of('t')}"
            self._ask(f"DELETE FROM {_quote(self.state)} WHERE id IN ({changed})")
            self._rename({self.space: space, self.space + BEFORE: self.space})

    def _rename(self, names: dict[str, str]) -> None:
        """Rename tables, and the tables that sqlite-vec keeps for them, in one transaction."""
        self._complete = None
        with self._transaction("IMMEDIATE"):
            for old, new in names.items():
                tables = [name for (name,) in self._ask("SELECT name FROM sqlite_schema WHERE type = 'table'")]
                self._ask(f"ALTER TABLE {_quote(old)} RENAME TO {_quote(new)}")
                for name in tables:
                    if name.startswith(old) and _SHADOW.fullmatch(ending := name[len(old) :]):
                        self._ask(f"ALTER TABLE {_quote(name)} RENAME TO {_quote(new + ending)}")
            for name in names.values():  # a table that a later sqlite-vec adds would be missed: undo the transaction
                self._ask(f"SELECT * FROM {_quote(name)} LIMIT 1")
            models = self.record("spaces") or {}
            self.set_record("spaces", {names.get(name, name): model for name, model in models.items()})

    @override
    def drop_space(self, name: str) -> None:
        models = self.record("spaces") or {}
        with self._transaction("IMMEDIATE"):
            self._ask(f"DROP TABLE {_quote(name)}")
            self._ask(f"DROP TABLE IF EXISTS {_quote(self.state)}")
            self.set_record("spaces", {other: model for other, model in models.items() if other != name})

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return self._transaction("IMMEDIATE")

    @override
    @contextmanager
    def migration_lease(self) -> Iterator[None]:
        with self._lease.hold():
            yield

    @override
    def renew_lease(self) -> None:
        self._lease.renew()

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        if not self._ask("SELECT name FROM sqlite_schema WHERE name = ?", RECORDS):
            return None
        found = self._ask(f"SELECT value FROM {RECORDS} WHERE name = ? AND key = ?", self.space, key)
        return json.loads(found[0][0]) if found else None

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        with self._transaction("IMMEDIATE"):
            self._ask(f"CREATE TABLE IF NOT EXISTS {RECORDS} (name TEXT, key TEXT, value TEXT, PRIMARY KEY (name, key))")
            if value is None:
                self._ask(f"DELETE FROM {RECORDS} WHERE name = ? AND key = ?", self.space, key)
            else:
                self._ask(f"REPLACE INTO {RECORDS} VALUES (?, ?, ?)", self.space, key, json.dumps(value))

    @override
    def close(self) -> None:
        self.connection.close()


def connect(uri: StoreUri) -> apsw.Connection:
    """Open a file with sqlite-vec.

    Raises:
        XcompatError: there is no such database.
    """
    if uri.parts.netloc:
        raise XcompatError(f"{uri} is not an absolute path; use sqlite:///FILE?table=NAME with three slashes")
    if not (file := Path(unquote(uri.parts.path))).is_file():
        raise XcompatError(f"{uri}: file {file} does not exist; write an absolute path after sqlite://")
    with plain_errors(uri):
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(WAIT)
        connection.enable_load_extension(True)
        connection.load_extension(sqlite_vec.loadable_path())
        connection.enable_load_extension(False)
        connection.create_scalar_function(HASH, _hash, deterministic=True)
        connection.execute(f"PRAGMA cache_size = -{CACHE}")
        connection.execute("PRAGMA legacy_alter_table = ON")  # triggers and views keep the names that they use
        return connection


@contextmanager
def plain_errors(uri: StoreUri) -> Iterator[None]:
    """Raise SQLite's errors as one line."""
    try:
        yield
    except apsw.BusyError as error:
        raise LostConnectionError(
            f"{uri}: another process has locked the file for {WAIT // 1000} s; run the command again to continue"
        ) from error
    except apsw.Error as error:
        raise XcompatError(f"{uri}: {' '.join(str(error).split())[:300]}") from error


def _hash(*values: Any) -> str:  # noqa: ANN401 - any SQL value
    made = xxhash.xxh3_64()
    for value in values:
        made.update(value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass"))
        made.update(b"\0")
    return made.hexdigest()


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _array(vectors: list[bytes]) -> NDArray[np.float32]:
    """Return vectors (N, D) as a float32 copy."""
    if not vectors:
        return np.empty((0, 0), np.float32)
    return np.frombuffer(b"".join(vectors), np.float32).reshape(len(vectors), -1).copy()


def _rows(found: list[Any], content: str | None) -> Rows:
    contents = [row[3] for row in found] if content is not None else None
    return Rows([str(row[0]) for row in found], _array([row[1] for row in found]), [row[2] for row in found], contents)


def open_store(uri: str) -> SqliteStore:
    """Open a table by its address."""
    return SqliteStore(StoreUri.parse(uri, OPTIONS))
