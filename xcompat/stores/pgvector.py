"""PostgreSQL with pgvector: spaces are columns of type ``vector`` or ``halfvec`` of one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psycopg
from numpy.typing import ArrayLike, NDArray
from psycopg import sql
from typing_extensions import override

from xcompat.errors import XcompatError, nearest
from xcompat.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, Rows, Space, Store
from xcompat.stores.pgvector_client import TYPES, Client, array, explained, one_more, retried
from xcompat.stores.pgvector_indexes import index_like, indexes
from xcompat.stores.pgvector_records import Records
from xcompat.stores.pgvector_search import OPERATORS, Searches
from xcompat.stores.pgvector_triggers import follow, unfollow
from xcompat.stores.uri import StoreUri

OPTIONS = ("table", "column", "id", "metric")
INDEXED = {"float32": 2_000, "float16": 4_000}
"""Most dimensions that pgvector builds an index for."""
DTYPES = {kind: dtype for dtype, kind in TYPES.items()}


class PgVectorStore(Store):
    """One table. Every write is one transaction; rows that somebody else changes meanwhile are left for the next round."""

    locks = True
    tells = True

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.client = Client(uri)
        self.table, self.schema = self._relation(uri.require("table"))
        self.records = Records(self.client, self.schema, self._name)
        self.client.regained = self.records.claim_again
        columns = self._columns()
        vectors = [name for name, kind in columns.items() if kind.partition("(")[0] in DTYPES]
        added = self.added_spaces()
        own = [name for name in vectors if name not in added or name == uri.options.get("column")]
        self.space = uri.choose("column", own, "a column of type vector or halfvec")
        self.key = uri.choose("id", self._unique_columns(), "a column with a primary key or a unique index")
        self.key_type = columns[self.key]
        self.metric = uri.metric() or self._metric()
        self.searches = Searches(self.client, self.records, self.table, self.key, self.metric, self.spaces)

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection that writes."""
        return self.client.connection

    # ------------------------------------------------------------------------------------------------- the table

    def _relation(self, name: str) -> tuple[sql.SQL, str]:
        """Find the table; return its name as SQL, quoted by the server, and its schema."""
        asked = (
            "SELECT format('%%I.%%I', nspname, relname), nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE c.oid = to_regclass(%s)"
        )
        found = self.client.ask(asked, name)
        if not found:
            tables = [
                row[0]
                for row in self.client.ask("SELECT tablename FROM pg_tables WHERE schemaname = ANY(current_schemas(false))")
            ]
            raise XcompatError(f"{self.uri}: there is no table {name!r}; {nearest(name, tables)}")
        return sql.SQL(found[0][0]), found[0][1]

    def _columns(self) -> dict[str, str]:
        """Return every column of the table with its type."""
        asked = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return dict(self.client.ask(asked, self.table.as_string(self.connection)))

    def _kind(self, column: str) -> str:
        """Return the type of a column of vectors, without its size."""
        return self._columns()[column].partition("(")[0]

    def _unique_columns(self) -> list[str]:
        """Return the columns that identify a row alone: the primary key first."""
        asked = (
            "SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] "
            "WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indnkeyatts = 1 AND i.indpred IS NULL AND a.attnotnull "
            "AND i.indexprs IS NULL ORDER BY NOT i.indisprimary LIMIT %s"
        )
        return [
            name
            for (name,) in self.client.ask(
                asked, self.table.as_string(self.connection), 1 if "id" not in self.uri.options else 99
            )
        ]

    def _metric(self) -> Metric:
        """Return how vectors are compared: as an index of the column does, else by cosine."""
        made = " ".join(index.made for index in indexes(self.client, self.table, self.space))
        return next((metric for metric in OPERATORS if f"_{metric}_ops" in made), "cosine")

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def spaces(self) -> dict[str, Space]:
        models = self.record("spaces") or {}
        found = {}
        for name, kind in self._columns().items():
            plain, _, size = kind.partition("(")
            if plain in DTYPES:
                model = models.get(name)
                known = Fingerprint(model["digest"], model["name"]) if model else None
                found[name] = Space(name, int(size.rstrip(")")) if size else None, DTYPES[plain], known)
        return found

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        asked = [sql.SQL("{} IS NOT NULL").format(sql.Identifier(space))] if space is not None else []
        asked += [sql.SQL("{} IS NULL").format(sql.Identifier(without))] if without is not None else []
        where = sql.SQL("WHERE {}").format(sql.SQL(" AND ").join(asked)) if asked else sql.SQL("")
        return int(self.client.ask(sql.SQL("SELECT count(*) FROM {} {}").format(self.table, where))[0][0])

    @override
    def count_zeros(self, space: str) -> int:
        asked = sql.SQL("SELECT count(*) FROM {} WHERE vector_norm({}::vector) = 0").format(self.table, sql.Identifier(space))
        return int(self.client.ask(asked)[0][0])

    @override
    def ids_without_vector(self, count: int) -> list[str]:
        asked = sql.SQL("SELECT {0}::text FROM {1} WHERE {2} IS NULL ORDER BY {0} LIMIT %s")
        names = sql.Identifier(self.key), self.table, sql.Identifier(self.space)
        return [item for (item,) in self.client.ask(asked.format(*names), count)]

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        return self.searches(space or self.space, lambda own: self.queries(vectors_QD, own), top_k, filter)

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
            content=one_more(content),
            table=self.table,
        )
        found = self.client.rows_of_bytes(asked, share, count)
        ids, own, states, others, *contents = zip(*found, strict=True) if found else ((), (), (), ())
        rows = Rows(list(ids), array(own, self._kind(self.space)), list(states), list(contents[0]) if contents else None)
        return rows, array(others, self._kind(other))

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        """Read on a connection of its own, unless this one has locked all others out."""
        own = space or self.space
        key, kind = sql.Identifier(self.key), sql.SQL(self.key_type)
        lacks = sql.SQL("AND {} IS NULL").format(sql.Identifier(without)) if without is not None else sql.SQL("")

        def asked(after: str | None) -> sql.Composed:
            behind = sql.SQL("AND t.{} > %s::{}").format(key, kind) if after is not None else sql.SQL("")
            return sql.SQL(
                "SELECT t.{0}::text, {1}, xmin::text {2} FROM {3} AS t WHERE {1} IS NOT NULL {4} {5} ORDER BY t.{0} LIMIT %s"
            ).format(key, sql.Identifier(own), one_more(content), self.table, lacks, behind)

        return self._blocks(self.client if self.client.within else None, asked, self._kind(own), batch, after)

    def _blocks(
        self, reader: Client | None, asked: Callable[[str | None], sql.Composed], stored: str, batch: int, after: str | None
    ) -> Iterator[Rows]:
        client = reader or retried(lambda: Client(self.uri))
        try:
            while found := client.rows_of_bytes(asked(after), *((batch,) if after is None else (after, batch))):
                ids, vectors, states, *contents = zip(*found, strict=True)
                after = ids[-1]
                yield Rows(list(ids), array(vectors, stored), list(states), list(contents[0]) if contents else None)
        finally:
            if reader is None:
                client.connection.close()

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        if name in self._columns():
            raise XcompatError(f"{self.uri} has a column {name!r} already; choose another name")
        with explained(self.uri), self.connection.transaction():
            self._do("ALTER TABLE {table} ADD COLUMN {new} {kind}", new=name, kind=sql.SQL(f"{TYPES[dtype]}({dim})"))
            follow(self.client, self.schema, self.table, name, self.space)
            self.name_model(name, model)

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        most = INDEXED[dtype]
        if dim > most and (found := indexes(self.client, self.table, self.space)):
            other = "--dtype float16" if dim <= INDEXED["float16"] else "a map into fewer, or drop that index first"
            raise XcompatError(
                f"{self.space} of {self.uri} has an approximate index ({found[0].name}), which pgvector builds for {dtype} of "
                f"{most:,} dimensions at most, and the new vectors have {dim:,}; take {other}"
            )

    @override
    def write(self, space: str, rows: Rows) -> int:
        block = self.client.block(rows.vectors_ND, self._kind(space))
        parts = {"key": sql.Identifier(self.key), "key_type": sql.SQL(self.key_type), "kind": sql.SQL(block.kind)}
        asked = sql.SQL(_UPDATE).format(table=self.table, new=sql.Identifier(space), **parts)
        apart = not self.client.within

        def update() -> int:
            with self.connection.transaction():
                self._do("SET LOCAL work_mem = '256MB'")  # else a block goes to the disk and back
                if apart:  # what a crash of the server loses of it is found lacking, and written again
                    self._do("SET LOCAL synchronous_commit = off")
                return self.connection.execute(asked, (rows.ids, rows.states, block)).rowcount

        return self.client.again(update)

    @override
    def switch(self, space: str) -> None:
        if self.space + BEFORE in self._columns():
            return
        with explained(self.uri), self.connection.transaction():
            unfollow(self.client, self.table, space)
            self._rename({self.space: self.space + BEFORE, space: self.space})
            follow(self.client, self.schema, self.table, self.space + BEFORE, self.space)

    @override
    def switch_back(self, space: str) -> None:
        if self.space + BEFORE not in self._columns():
            return
        with explained(self.uri), self.connection.transaction():
            unfollow(self.client, self.table, self.space + BEFORE)
            self._rename({self.space: space, self.space + BEFORE: self.space})
            follow(self.client, self.schema, self.table, space, self.space)

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
            unfollow(self.client, self.table, name)
            self._do("ALTER TABLE {table} DROP COLUMN {new}", new=name)
            self.set_record("spaces", {other: model for other, model in models.items() if other != name})

    @override
    @contextmanager
    def alone(self) -> Iterator[None]:
        with explained(self.uri), self.connection.transaction():
            self.client.lock(self.table)
            yield

    @override
    @contextmanager
    def claimed(self) -> Iterator[None]:
        with self.records.claimed():
            yield

    @override
    def index_like(self, space: str) -> list[str]:
        return index_like(self.client, self.table, self.space, space, self.spaces()[space].dtype)

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        return self.records.read(key)

    @override
    def set_record(self, key: str, value: dict[str, Any] | None) -> None:
        self.records.write(key, value)

    @override
    def close(self) -> None:
        self.connection.close()

    # ------------------------------------------------------------------------------------------------- SQL

    @property
    def _name(self) -> str:
        return self.table.as_string(self.connection)

    def _do(self, statement: str, **parts: str | sql.Composable) -> None:
        """Execute a statement about the table; parts that are strings are names."""
        named = {name: sql.Identifier(part) if isinstance(part, str) else part for name, part in parts.items()}
        self.client.execute(sql.SQL(statement).format(table=self.table, key=sql.Identifier(self.key), **named))


_UPDATE = """
UPDATE {table} AS t SET {new} = r.vector FROM unnest(%s::text[], %s::text[], %s::{kind}[]) AS r (id, state, vector)
WHERE t.{key} = r.id::{key_type} AND t.xmin::text = r.state
"""


def open_store(uri: str) -> PgVectorStore:
    """Open a table by its address."""
    return PgVectorStore(StoreUri.parse(uri, OPTIONS, passes_on=True))
