"""PostgreSQL with pgvector: spaces are columns of type ``vector`` or ``halfvec`` of one table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pgvector import Vector
from psycopg import sql
from psycopg.types.json import Jsonb
from typing_extensions import override

from xcompat.errors import XcompatError, nearest
from xcompat.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, UNKNOWN, Rows, Space, Store
from xcompat.stores.postgres import array, connect, explained, numbers
from xcompat.stores.uri import StoreUri

OPTIONS = ("table", "column", "id", "metric")
OPERATORS: dict[Metric, str] = {"cosine": "<=>", "ip": "<#>", "l2": "<->"}
TYPES = {"float32": "vector", "float16": "halfvec"}
RECORDS = "xcompat_records"
"""The table, beside the user's own, that holds what xcompat knows of it."""


class PgVectorStore(Store):
    """One table. Every write is one transaction; rows that somebody else changes meanwhile are left for the next round."""

    locks = True

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.connection = connect(uri)
        self.table, self.schema = self._relation(uri.require("table"))
        columns = self._columns()
        vectors = [name for name, kind in columns.items() if kind.partition("(")[0] in TYPES.values()]
        added = self.added_spaces()
        own = [name for name in vectors if name not in added or name == uri.options.get("column")]
        self.space = self._one_of(uri.options.get("column"), own, "column", "a column of type vector or halfvec")
        self.key = self._one_of(
            uri.options.get("id"), self._unique_columns(), "id", "a column with a primary key or a unique index"
        )
        self.key_type = columns[self.key]
        self.metric = self._metric(uri.options.get("metric"))

    # ------------------------------------------------------------------------------------------------- the table

    def _relation(self, name: str) -> tuple[sql.SQL, str]:
        """Find the table; return its name as SQL, quoted by the server, and its schema."""
        found = self._all(
            "SELECT to_regclass(%s)::text, n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.oid = to_regclass(%s)",
            name,
            name,
        )
        if not found:
            tables = [
                row[0] for row in self._all("SELECT tablename FROM pg_tables WHERE schemaname = ANY(current_schemas(false))")
            ]
            raise XcompatError(f"{self.uri}: there is no table {name!r}; {nearest(name, tables)}")
        return sql.SQL(found[0][0]), found[0][1]

    def _columns(self) -> dict[str, str]:
        """Return every column of the table with its type."""
        asked = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return dict(self._all(asked, self.table.as_string(self.connection)))

    def _unique_columns(self) -> list[str]:
        """Return the columns that identify a row alone: the primary key first."""
        asked = (
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL AND a.attnotnull "
            "AND i.indexprs IS NULL ORDER BY NOT i.indisprimary LIMIT %s"
        )
        return [
            name for (name,) in self._all(asked, self.table.as_string(self.connection), 1 if "id" not in self.uri.options else 99)
        ]

    def _one_of(self, given: str | None, known: Sequence[str], option: str, what: str) -> str:
        if given is not None and given not in known:
            raise XcompatError(f"{self.uri}: {given!r} is not {what}; {nearest(given, known)}")
        if given is None and len(known) != 1:
            found = f"it has {', '.join(known)}" if known else "it has none"
            raise XcompatError(f"{self.uri}: the table needs {what}, and {found}; name one with {option}=")
        return given or known[0]

    def _metric(self, given: str | None) -> Metric:
        """Return how vectors are compared: as the address says, else as an index of the column does, else by cosine."""
        if given is not None:
            if given not in OPERATORS:
                raise XcompatError(f"{self.uri}: there is no metric {given!r}; {nearest(given, OPERATORS)}")
            return given
        made = " ".join(how for _, how in self._indexes(self.space))
        return next((metric for metric in OPERATORS if f"_{metric}_ops" in made), "cosine")

    def _indexes(self, column: str) -> list[tuple[str, str]]:
        """Return the names of a column's approximate indexes, and the end of the statement that makes each."""
        asked = "SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = to_regclass(%s)"
        found = self._all(asked, self.table.as_string(self.connection))
        quoted = sql.Identifier(column).as_string(self.connection)
        return [
            (name, made.split(" USING ", 1)[1])
            for name, made in found
            if " USING " in made
            and (f"({column} " in made or f"({quoted} " in made)
            and ("USING hnsw" in made or "USING ivfflat" in made)
        ]

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def spaces(self) -> dict[str, Space]:
        models = self.record("spaces") or {}
        found = {}
        for name, kind in self._columns().items():
            plain, _, size = kind.partition("(")
            if plain in TYPES.values():
                dtype = next(dtype for dtype, other in TYPES.items() if other == plain)
                model = models.get(name)
                known = Fingerprint(model["digest"], model["name"]) if model else None
                found[name] = Space(name, int(size.rstrip(")")) if size else None, dtype, known)
        return found

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        asked = [sql.SQL("{} IS NOT NULL").format(sql.Identifier(space))] if space is not None else []
        asked += [sql.SQL("{} IS NULL").format(sql.Identifier(without))] if without is not None else []
        where = sql.SQL("WHERE {}").format(sql.SQL(" AND ").join(asked)) if asked else sql.SQL("")
        return int(self._all(sql.SQL("SELECT count(*) FROM {} {}").format(self.table, where))[0][0])

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        own = self.spaces()[space or self.space]
        queries_QD = np.atleast_2d(np.asarray(vectors_QD, np.float32))
        if own.dim is not None and queries_QD.shape[1] != own.dim:
            raise XcompatError(f"the queries have {queries_QD.shape[1]} dimensions, {own.name} of {self.uri} has {own.dim}")
        half = sql.SQL("::halfvec" if own.dtype == "float16" else "")
        distance = sql.SQL("{} {} %s::vector{}").format(sql.Identifier(own.name), sql.SQL(OPERATORS[self.metric]), half)
        where = sql.SQL(f"AND ({filter.replace('%', '%%')})") if filter else sql.SQL("")
        asked = sql.SQL("SELECT {}::text, {} FROM {} WHERE {} IS NOT NULL {} ORDER BY 2 LIMIT %s").format(
            sql.Identifier(self.key), distance, self.table, sql.Identifier(own.name), where
        )
        version = own.fingerprint or UNKNOWN
        with explained(self.uri), self.connection.pipeline():
            asking = [self.connection.execute(asked, (Vector(query_D), top_k)) for query_D in queries_QD]
            found = [cursor.fetchall() for cursor in asking]
        return [[Hit(name, self._score(float(away)), version, None) for name, away in each] for each in found]

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        share = min(
            100.0, 500.0 * count / max(self.count(self.space), 1)
        )  # pages, whose rows are cut to the number that is asked for
        asked = sql.SQL(
            "SELECT {key}::text, {own}, xmin::text, {other} {content} FROM {table} TABLESAMPLE SYSTEM (%s) REPEATABLE (0) "
            "WHERE {own} IS NOT NULL AND {other} IS NOT NULL ORDER BY md5({key}::text) LIMIT %s"
        ).format(
            key=sql.Identifier(self.key),
            own=sql.Identifier(self.space),
            other=sql.Identifier(other),
            content=_too(content),
            table=self.table,
        )
        with explained(self.uri):
            found = self.connection.cursor(binary=True).execute(asked, (share, count)).fetchall()
        ids, own, states, others, *contents = zip(*found, strict=True) if found else ((), (), (), ())
        return Rows(list(ids), array(own), list(states), list(contents[0]) if contents else None), array(others)

    def _score(self, distance: float) -> float:
        return {"cosine": 1 - distance, "ip": -distance, "l2": -(distance**2)}[self.metric]

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        lacks = sql.SQL("AND {} IS NULL").format(sql.Identifier(without)) if without is not None else sql.SQL("")
        key, own, kind = sql.Identifier(self.key), sql.Identifier(space or self.space), sql.SQL(self.key_type)
        while True:
            behind = sql.SQL("AND {} > %s::{}").format(key, kind) if after is not None else sql.SQL("")
            asked = sql.SQL(
                "SELECT t.{0}::text, {1}, xmin::text {5} FROM {2} AS t WHERE {1} IS NOT NULL {3} {4} ORDER BY t.{0} LIMIT %s"
            ).format(key, own, self.table, lacks, behind, _too(content))
            given = (batch,) if after is None else (after, batch)
            with explained(self.uri):
                found = self.connection.cursor(binary=True).execute(asked, given).fetchall()
            if not found:
                return
            ids, vectors, states, *contents = zip(*found, strict=True)
            after = ids[-1]
            yield Rows(list(ids), array(vectors), list(states), list(contents[0]) if contents else None)

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        if name in self._columns():
            raise XcompatError(f"{self.uri} has a column {name!r} already; choose another name")
        with explained(self.uri), self.connection.transaction():
            self._do("ALTER TABLE {table} ADD COLUMN {new} {kind}", new=name, kind=sql.SQL(f"{TYPES[dtype]}({dim})"))
            self._follow(name)
            self.name_model(name, model)

    def _follow(self, space: str) -> None:
        """Empty a space of each row whose vector changes in the one that is searched, so that it is found missing there."""
        for statement in (_FUNCTION, _TRIGGER):
            self._do(statement, new=space, old=self.space)

    def _unfollow(self, space: str) -> None:
        for statement in ("DROP TRIGGER IF EXISTS {trigger} ON {table}", "DROP FUNCTION IF EXISTS {function}()"):
            self._do(statement, new=space)

    @override
    def write(self, space: str, rows: Rows) -> int:
        kind = TYPES[self.spaces()[space].dtype]
        with explained(self.uri), self.connection.transaction(), self.connection.cursor() as cursor:
            self._do(_ROOM, kind=sql.SQL(kind))
            with cursor.copy("COPY pg_temp.xcompat_rows FROM STDIN WITH (FORMAT BINARY)") as copy:
                copy.set_types(["text", "text", kind])
                for row in zip(rows.ids, rows.states, numbers(rows.vectors_ND, kind), strict=True):
                    copy.write_row(row)
            parts = {"key": sql.Identifier(self.key), "key_type": sql.SQL(self.key_type)}
            cursor.execute(sql.SQL(_UPDATE).format(table=self.table, new=sql.Identifier(space), **parts))
            self._do("DROP TABLE pg_temp.xcompat_rows")
            return cursor.rowcount

    @override
    def switch(self, space: str) -> None:
        if self.space + BEFORE in self._columns():
            return
        with explained(self.uri), self.connection.transaction():
            self._unfollow(space)
            self._rename({self.space: self.space + BEFORE, space: self.space})

    @override
    def switch_back(self, space: str) -> None:
        if self.space + BEFORE not in self._columns():
            return
        with explained(self.uri), self.connection.transaction():
            self._rename({self.space: space, self.space + BEFORE: self.space})
            self._follow(space)

    def _rename(self, names: dict[str, str]) -> None:
        """Rename columns, and what is known of them."""
        models = self.record("spaces") or {}
        for old, new in names.items():
            self._do("ALTER TABLE {table} RENAME COLUMN {old} TO {new}", old=old, new=new)
        self.set_record("spaces", {names.get(name, name): model for name, model in models.items()})

    @override
    def drop_space(self, name: str) -> None:
        models = self.record("spaces") or {}
        with explained(self.uri), self.connection.transaction():
            self._unfollow(name)
            self._do("ALTER TABLE {table} DROP COLUMN {new}", new=name)
            self.set_record("spaces", {other: model for other, model in models.items() if other != name})

    @override
    @contextmanager
    def alone(self) -> Iterator[None]:
        with explained(self.uri), self.connection.transaction():
            self._do("LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            yield

    @override
    @contextmanager
    def claimed(self) -> Iterator[None]:
        asked = "SELECT pg_try_advisory_lock(hashtext('xcompat'), to_regclass(%s)::oid::int)"
        if not self._all(asked, self._name)[0][0]:
            raise XcompatError(f"{self.uri} is being migrated by another process; wait for it, or stop it first")
        try:
            yield
        finally:
            self._all("SELECT pg_advisory_unlock(hashtext('xcompat'), to_regclass(%s)::oid::int)", self._name)

    @override
    def index_like(self, space: str) -> list[str]:
        """Build the approximate indexes of the searched column for another one too, without locking writers out."""
        made = []
        for number, (_, how) in enumerate(self._indexes(self.space)):
            name = f"{self._name.split('.')[-1].strip(chr(34))}_{space}_xcompat_{number}"[:63]
            if not self._all(
                "SELECT 1 FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid WHERE relname = %s AND indisvalid", name
            ):
                how = re.sub(
                    r"\(.*? (vector|halfvec)_",
                    f"({sql.Identifier(space).as_string(self.connection)} {TYPES[self.spaces()[space].dtype]}_",
                    how,
                    count=1,
                )
                self._do("DROP INDEX CONCURRENTLY IF EXISTS {index}", index=sql.Identifier(self.schema, name))
                self._do(
                    "CREATE INDEX CONCURRENTLY {index} ON {table} USING " + how.replace("{", "{{").replace("}", "}}"),
                    index=sql.Identifier(name),
                )
            made.append(name)
        return made

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        if not self._all("SELECT to_regclass(%s)::text", f'"{self.schema}".{RECORDS}')[0][0]:
            return None
        found = self._all(sql.SQL("SELECT value FROM {} WHERE relation = %s AND key = %s").format(self._records), self._name, key)
        return found[0][0] if found else None

    @override
    def set_record(self, key: str, value: dict[str, Any] | None) -> None:
        with explained(self.uri), self.connection.transaction():
            self._do(_RECORDS, records=self._records)
            self._all(sql.SQL("DELETE FROM {} WHERE relation = %s AND key = %s").format(self._records), self._name, key)
            if value is not None:
                self._all(sql.SQL("INSERT INTO {} VALUES (%s, %s, %s)").format(self._records), self._name, key, Jsonb(value))

    @override
    def close(self) -> None:
        self.connection.close()

    # ------------------------------------------------------------------------------------------------- SQL

    @property
    def _name(self) -> str:
        return self.table.as_string(self.connection)

    @property
    def _records(self) -> sql.Identifier:
        return sql.Identifier(self.schema, RECORDS)

    def _all(self, asked: LiteralString | sql.SQL | sql.Composed, *given: Any) -> list[Any]:  # noqa: ANN401
        """Return the rows of a statement, none if it gives none."""
        with explained(self.uri):
            cursor = self.connection.execute(asked, given)
            return cursor.fetchall() if cursor.description is not None else []

    def _do(self, statement: str, **parts: str | sql.Composable) -> None:
        """Execute a statement about the table; parts that are strings are names."""
        named = {name: sql.Identifier(part) if isinstance(part, str) else part for name, part in parts.items()}
        if isinstance(new := parts.get("new"), str):
            mark = f"xcompat_{new}_follows"
            named |= {"trigger": sql.Identifier(mark), "function": sql.Identifier(self.schema, mark)}
        self._all(sql.SQL(statement).format(table=self.table, key=sql.Identifier(self.key), **named))


_RECORDS = "CREATE TABLE IF NOT EXISTS {records} (relation text, key text, value jsonb NOT NULL, PRIMARY KEY (relation, key))"
_FUNCTION = """
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF NEW.{old} IS DISTINCT FROM OLD.{old} THEN NEW.{new} := NULL; END IF; RETURN NEW; END $$
"""
_TRIGGER = "CREATE TRIGGER {trigger} BEFORE UPDATE OF {old} ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"
_ROOM = "CREATE TEMPORARY TABLE xcompat_rows (id text, state text, vector {kind}) ON COMMIT DROP"
_UPDATE = """
UPDATE {table} AS t SET {new} = r.vector FROM pg_temp.xcompat_rows AS r
WHERE t.{key} = r.id::{key_type} AND t.xmin::text = r.state
"""


def _too(column: str | None) -> sql.Composable:
    """Return SQL that selects one column more."""
    return sql.SQL(", {}").format(sql.Identifier(column)) if column is not None else sql.SQL("")


def open_store(uri: str) -> PgVectorStore:
    """Open a table by its address."""
    return PgVectorStore(StoreUri.parse(uri, OPTIONS, passes_on=True))
