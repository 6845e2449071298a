"""Store for PostgreSQL with pgvector. Spaces are ``vector`` or ``halfvec`` columns in one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, LiteralString

import numpy as np
import psycopg
from numpy.typing import ArrayLike, NDArray
from psycopg import sql
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, Rows, Space, Store
from xcompat.stores.pgvector_client import TYPES, Client, array, plain_errors, retry_with_backoff, select_extra_column
from xcompat.stores.pgvector_columns import Exchange, copy_settings, restore_not_null, settle
from xcompat.stores.pgvector_dependents import Resize, find_columns, find_dependents
from xcompat.stores.pgvector_indexes import Copies, indexes
from xcompat.stores.pgvector_keys import Key
from xcompat.stores.pgvector_parts import Part, escape_condition, models_record
from xcompat.stores.pgvector_records import Records
from xcompat.stores.pgvector_search import OPERATORS, Searches
from xcompat.stores.pgvector_survey import Survey
from xcompat.stores.pgvector_triggers import follow, unfollow
from xcompat.stores.uri import StoreUri

OPTIONS = ("table", "schema", "column", "id", "metric")
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://", re.IGNORECASE)
DTYPES = {kind: dtype for dtype, kind in TYPES.items()}


class PgVectorStore(Store):
    """PostgreSQL table. Each write is one transaction, and skips rows that changed meanwhile."""

    supports_locking = True
    reports_version = True
    supports_cache = True

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.client = Client(uri)
        self.table, self.schema = self._relation(uri.require("table"))
        self.records = Records(self.client, self.schema, self._name)
        self.client.regained = self.records.claim_again
        columns = self._columns()
        vectors = [name for name, kind in columns.items() if kind.partition("(")[0] in DTYPES]
        added = self.added_spaces()
        computed = {name for (name,) in self.client.ask(_COMPUTED, self._name)}
        own = [name for name in vectors if name not in added | computed or name == uri.options.get("column")]
        self.space = uri.choose("column", own, "a column of type vector or halfvec")
        self.key = self._key(columns)
        self.metric = uri.metric() or self._metric()
        self.searches = Searches(self.client, self.records, self.table, self.key, self.metric, self.spaces)

    @override
    def restrict(self, condition: str | None) -> None:
        if condition is not None:
            checked = sql.SQL("SELECT FROM {} WHERE ({}) LIMIT 1").format(self.table, sql.SQL(escape_condition(condition)))
            try:
                self.client.ask(checked)
            except XcompatError as error:
                raise XcompatError(f"{error}; --where takes an SQL condition on columns of the table") from error
        self.condition, self.models_record = condition, models_record(condition)
        self.searches.use_record(self.models_record)

    @override
    def restrict_to_part(self, condition: str) -> None:
        if self.record(models_record(condition)) is not None:
            self.restrict(condition)

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """Connection for writes."""
        return self.client.connection

    # ------------------------------------------------------------------------------------------------- the table

    def _relation(self, name: str) -> tuple[sql.SQL, str]:
        """Return the table's quoted name as SQL, and its schema.

        An exact name comes first, e.g. ``Item`` for the SQL name ``"Item"``, then a SQL name.
        """
        if schema := self.uri.options.get("schema"):
            name = f"{schema}.{name}"
        found = self.client.ask(_NAMED + "relname = %s AND pg_table_is_visible(c.oid)", name)
        found = found or self.client.ask(_NAMED + "nspname || '.' || relname = %s", name)
        if not found:
            with suppress(XcompatError):  # not a valid SQL name
                found = self.client.ask(_NAMED + "c.oid = to_regclass(%s)", name)
        if not found:
            tables = [table for (table,) in self.client.ask(_TABLES)]
            raise XcompatError(f"{self.uri}: there is no table {name!r}; {nearest(name, tables)}")
        quoted, schema, kind = found[0]
        if kind not in "rp":
            tables = [table for (table,) in self.client.ask(_TABLES + _IN_VIEW, quoted)]
            named = f": {', '.join(tables)}" if tables else ""
            raise XcompatError(f"{self.uri}: {name} is a {_RELATIONS[kind]}; choose the table with its rows{named}")
        return sql.SQL(quoted), schema

    def _columns(self) -> dict[str, str]:
        asked = (
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        )
        return dict(self.client.ask(asked, self.table.as_string(self.connection)))

    def _kind(self, column: str) -> str:
        """Return a column's type without its size."""
        return self._columns()[column].partition("(")[0]

    def _key(self, columns: dict[str, str]) -> Key:
        """Return the primary key, or the unique index in the address."""
        found: list[str] = [",".join(names) for (names,) in self.client.ask(_UNIQUE, self._name)]
        if not found:
            free = "id"
            while free in columns:
                free = f"row_{free}"
            raise XcompatError(
                f"{self.uri}: the table needs a primary key or a unique index on NOT NULL columns; add one, e.g. ALTER TABLE "
                f"{self._name} ADD COLUMN {free} bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
            )
        known = found if "id" in self.uri.options else found[:1]
        names = tuple(self.uri.choose("id", known, "a primary key or a unique index (id=COLUMN or id=COLUMN,COLUMN)").split(","))
        return Key(names, tuple(columns[name] for name in names))

    def _metric(self) -> Metric:
        """Return the metric of the column's index, else cosine."""
        made = " ".join(index.made for index in indexes(self.client, self.table, self.space))
        return next((metric for metric in OPERATORS if f"_{metric}_ops" in made), "cosine")

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def spaces(self) -> dict[str, Space]:
        models = self._models()
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
        asked = [self._is_own]
        asked += [sql.SQL("{} IS NOT NULL").format(sql.Identifier(space))] if space is not None else []
        asked += [sql.SQL("{} IS NULL").format(sql.Identifier(without))] if without is not None else []
        where = sql.SQL(" AND ").join(asked)
        return int(self.client.ask(sql.SQL("SELECT count(*) FROM {} WHERE {}").format(self.table, where))[0][0])

    @override
    def count_zeros(self, space: str) -> int:
        asked = sql.SQL("SELECT count(*) FROM {} WHERE vector_norm({}::vector) = 0 AND {}")
        return int(self.client.ask(asked.format(self.table, sql.Identifier(space), self._is_own))[0][0])

    @override
    def ids_without_vector(self, count: int) -> list[str]:
        asked = sql.SQL("SELECT {} FROM {} AS t WHERE {} IS NULL AND {} ORDER BY {} LIMIT %s")
        names = self.key.text, self.table, sql.Identifier(self.space), self._is_own, self.key.order
        return [item for (item,) in self.client.ask(asked.format(*names), count)]

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        wanted = " AND ".join(f"({each})" for each in (self.condition, filter) if each)
        return self.searches(space or self.space, lambda own: self.queries(vectors_QD, own), top_k, wanted or None)

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        share = min(100.0, 500.0 * count / max(self.count(self.space), 1))  # it samples pages, LIMIT cuts the rows
        asked = sql.SQL(
            "SELECT {key}, {own}, xmin::text, {other} {content} FROM {table} AS t TABLESAMPLE SYSTEM (%s) REPEATABLE (0) "
            "WHERE {own} IS NOT NULL AND {other} IS NOT NULL AND {is_own} ORDER BY md5({key}) LIMIT %s"
        ).format(
            is_own=self._is_own,
            key=self.key.text,
            own=sql.Identifier(self.space),
            other=sql.Identifier(other),
            content=select_extra_column(content),
            table=self.table,
        )
        found = self.client.rows_of_bytes(asked, share, count)
        ids, own, states, others, *contents = zip(*found, strict=True) if found else ((), (), (), ())
        rows = Rows(list(ids), array(own, self._kind(self.space)), list(states), list(contents[0]) if contents else None)
        return rows, array(others, self._kind(other))

    @override
    def read_current(
        self, ids: Sequence[str], space: str, content: str | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], Rows]:
        asked = sql.SQL(
            "SELECT {key}, {own}, xmin::text, {other} {content} FROM {table} AS t WHERE {own} IS NOT NULL AND {is_own} "
            "AND EXISTS (SELECT FROM unnest(%s::text[]) AS r (id) WHERE {is_same})"
        ).format(
            key=self.key.text,
            own=sql.Identifier(self.space),
            other=sql.Identifier(space),
            content=select_extra_column(content),
            table=self.table,
            is_own=self._is_own,
            is_same=self.key.is_same,
        )
        place = {item: number for number, item in enumerate(ids)}
        found = sorted(self.client.rows_of_bytes(asked, [*ids]), key=lambda row: place[row[0]])
        left, made = [row for row in found if row[3] is None], [row for row in found if row[3] is not None]
        own_ND = array([row[1] for row in left], self._kind(self.space))
        contents = [row[4] for row in left] if content is not None else None
        current_ND = array([row[3] for row in made], self._kind(space))
        rows = Rows([row[0] for row in left], own_ND, [row[2] for row in left], contents)
        return dict(zip([row[0] for row in made], current_ND, strict=True)), rows

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        asked = sql.SQL(
            "SELECT {key}, jsonb_build_object({pairs}) FROM {table} AS t "
            "WHERE EXISTS (SELECT FROM unnest(%s::text[]) AS r (id) WHERE {is_same})"
        ).format(
            key=self.key.text,
            pairs=sql.SQL(", ").join(sql.SQL("{}, t.{}").format(sql.Literal(name), sql.Identifier(name)) for name in fields),
            table=self.table,
            is_same=self.key.is_same,
        )
        return dict(self.client.ask(asked, [*ids]))

    @override
    def count_demand(self, ids: Iterable[str]) -> None:
        self.records.count_demand(ids)

    @override
    def demanded_ids(self) -> list[str]:
        return self.records.demanded_ids()

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
        lacks = sql.SQL("AND {} IS NULL").format(sql.Identifier(without)) if without is not None else sql.SQL("")

        def page_query(after: str | None) -> sql.Composed:
            behind = sql.SQL("AND {}").format(self.key.is_behind) if after is not None else sql.SQL("")
            return sql.SQL(
                "SELECT {key}, {own}, xmin::text {more} FROM {table} AS t WHERE {own} IS NOT NULL AND {is_own} {lacks} {behind} "
                "ORDER BY {order} LIMIT %s"
            ).format(
                is_own=self._is_own,
                key=self.key.text,
                own=sql.Identifier(own),
                more=select_extra_column(content),
                table=self.table,
                lacks=lacks,
                behind=behind,
                order=self.key.order,
            )

        return self._blocks(self.client if self.client.in_transaction else None, page_query, self._kind(own), batch, after)

    def _blocks(
        self, reader: Client | None, asked: Callable[[str | None], sql.Composed], stored: str, batch: int, after: str | None
    ) -> Iterator[Rows]:
        client = reader or retry_with_backoff(lambda: Client(self.uri))
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
            raise XcompatError(f"{self.uri} already has a column {name!r}; choose another name")
        with plain_errors(self.uri), self.connection.transaction():
            kind = f"{TYPES[dtype]}({dim})" if self.condition is None else self._columns()[self.space]
            self._do("ALTER TABLE {table} ADD COLUMN {new} {kind}", new=name, kind=sql.SQL(kind))
            copy_settings(self.client, self.table, self.space, name)
            follow(self.client, self.schema, self.table, name, self.space)
            self.name_model(name, model)

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        if self.condition is None:
            self._survey(dim, dtype).refuse()
        else:
            self._survey(dim, dtype).refuse_table()
            own = self.spaces()[self.space]
            self._part(self.condition).refuse(dim, dtype, own.dim, own.dtype)

    @override
    def notes(self, dim: int, dtype: str) -> list[str]:
        if self.condition is None:
            return self._survey(dim, dtype).notes()
        return self._part(self.condition).notes(self.count(self.space))

    def _part(self, condition: str) -> Part:
        return Part(self.client, self.schema, self.table, self.space, condition)

    def _survey(self, dim: int, dtype: str) -> Survey:
        return Survey(self.client, self.table, self.space, self.spaces()[self.space].dim, dim, dtype)

    @override
    def write(self, space: str, rows: Rows) -> int:
        block = self.client.block(rows.vectors_ND, self._kind(space))
        parts = {"is_same": self.key.is_same, "kind": sql.SQL(block.kind)}
        asked = sql.SQL(_UPDATE).format(table=self.table, new=sql.Identifier(space), **parts)
        apart = not self.client.in_transaction

        def update() -> int:
            with self.connection.transaction():
                self._do("SET LOCAL work_mem = '256MB'")  # keep a block in memory
                if apart:  # rows lost in a server crash are written again
                    self._do("SET LOCAL synchronous_commit = off")
                return self.connection.execute(asked, (rows.ids, rows.states, block)).rowcount

        return self.client.retry(update)

    @override
    def switch(self, space: str) -> None:
        if self.space + BEFORE not in self._columns():
            self._exchange(self.space + BEFORE, space, is_back=False)

    @override
    def switch_back(self, space: str) -> None:
        if self.space + BEFORE in self._columns():
            self._exchange(space, self.space + BEFORE, is_back=True)

    def _exchange(self, aside: str, incoming: str, is_back: bool) -> None:
        """Exchange the searched column and another column, with their properties. In a part, exchange the vectors."""
        if self.condition is not None:
            self._exchange_part(self.condition, aside, incoming, is_back)
            return
        spaces, models = self.spaces(), self.record("spaces") or {}
        resize = Resize(spaces[self.space].dim, spaces[incoming].dim)
        columns = self.space, aside, incoming, spaces[incoming].dtype, resize
        names = {self.space: aside, incoming: self.space}

        def exchange() -> None:
            with plain_errors(self.uri), self.connection.transaction():
                Exchange(self.client, self.records, self.schema, self.table, *columns).run(is_back)
                self.set_record("spaces", {names.get(name, name): model for name, model in models.items()})
                self.records.delete_prefix(models_record(""))  # all rows have the same model now

        self.client.retry_deadlocks(exchange)

    def _exchange_part(self, condition: str, aside: str, incoming: str, is_back: bool) -> None:
        whole, models = self.record("spaces") or {}, self._models()
        if is_back and _WHOLE in models:
            whole[self.space] = models.pop(_WHOLE)
        elif not is_back and self.space in whole:  # from now on, the column has vectors of two models
            models[_WHOLE] = whole.pop(self.space)
        with plain_errors(self.uri), self.connection.transaction():
            self._part(condition).exchange(self.space, incoming, aside, is_back)
            self.set_record("spaces", whole)
            names = {self.space: aside, incoming: self.space}
            self.set_record(self.models_record, {names.get(name, name): model for name, model in models.items()})

    @override
    def finish_switch(self) -> None:
        def finish() -> None:
            with plain_errors(self.uri):
                settle(self.client, self.records, self.table, self.space)

        self.client.retry_deadlocks(finish)

    @override
    def drop_space(self, name: str) -> None:
        models = self.record(self.models_record) or {}
        if used := find_dependents(self.client, find_columns(self.client, self.table, name), Resize(None, None)):
            raise XcompatError(f"{used[0].name} uses {name} in {self.uri}; drop it first")
        with plain_errors(self.uri), self.connection.transaction():
            unfollow(self.client, self.table)
            self._do("ALTER TABLE {table} DROP COLUMN {new}", new=name)
            self.records.forget_demand()
            kept = {other: model for other, model in models.items() if other not in (name, _WHOLE)}
            self.set_record(self.models_record, kept)
            if rows := restore_not_null(self.client, self.records, self.table, self.space):
                notice(
                    f"{self.space} in {self.uri} is no longer NOT NULL: {rows:,} rows have no vector of the old model. Write "
                    "their vectors or delete them, then SET NOT NULL again"
                )

    @override
    @contextmanager
    def exclusive(self) -> Iterator[None]:
        readers = find_dependents(self.client, find_columns(self.client, self.table, self.space), Resize(None, None))
        with plain_errors(self.uri), self.connection.transaction():
            self.client.lock(self.table, first=[reader.lock for reader in readers if reader.lock])
            yield

    @override
    @contextmanager
    def migration_lease(self) -> Iterator[None]:
        with self.records.hold_lock():
            yield

    @override
    def index_like(self, space: str) -> list[str]:
        return self._copies(self.space, space).build() if self.condition is None else []

    @override
    def missing_indexes(self, space: str, like: str) -> list[str]:
        return self._copies(like, space).missing() if self.condition is None else []

    def _copies(self, old: str, new: str) -> Copies:
        spaces = self.spaces()
        return Copies(self.client, self.table, old, new, spaces[new].dtype, Resize(spaces[old].dim, spaces[new].dim))

    # ------------------------------------------------------------------------------------------------- records

    @property
    @override
    def model_advice(self) -> str:
        prefix = models_record("")
        if self.condition is not None or not (parts := self.records.keys(prefix)):
            return super().model_advice
        named = "; ".join([*(key.removeprefix(prefix) for key in parts[:_SHOWN]), *(["…"] if len(parts) > _SHOWN else [])])
        return f"rows of the table have models of their own; choose them with --where CONDITION: {named}"

    def _models(self) -> dict[str, Any]:
        """Return the recorded models by column. A part falls back to the whole table's models."""
        return {**(self.record("spaces") or {}), **(self.record(self.models_record) or {})}

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        return self.records.read(key)

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        self.records.write(key, value)

    @override
    def close(self) -> None:
        self.connection.close()

    # ------------------------------------------------------------------------------------------------- SQL

    @property
    def _is_own(self) -> sql.Composable:
        """Condition to limit the store's rows."""
        return sql.SQL("({})").format(sql.SQL(escape_condition(self.condition or "TRUE")))

    @property
    def _name(self) -> str:
        return self.table.as_string(self.connection)

    def _do(self, statement: str, **parts: str | sql.Composable) -> None:
        """Execute a statement about the table. String parts are identifiers."""
        named = {name: sql.Identifier(part) if isinstance(part, str) else part for name, part in parts.items()}
        self.client.execute(sql.SQL(statement).format(table=self.table, **named))


_SHOWN = 5
"""Number of conditions in a message."""
_WHOLE = ""
"""Key in the models of a part for the column's earlier model in all rows."""
_UPDATE = """
UPDATE {table} AS t SET {new} = r.vector FROM unnest(%s::text[], %s::text[], %s::{kind}[]) AS r (id, state, vector)
WHERE {is_same} AND t.xmin::text = r.state
"""


_NAMED: LiteralString = """
SELECT format('%%I.%%I', nspname, relname), nspname, relkind FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE relkind IN ('r', 'p', 'v', 'm', 'f') AND """
_RELATIONS = {"v": "view", "m": "materialized view", "f": "foreign table"}
_TABLES = """
SELECT CASE WHEN pg_table_is_visible(c.oid) THEN relname ELSE nspname || '.' || relname END
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace
WHERE relkind IN ('r', 'p') AND nspname !~ '^pg_' AND nspname <> 'information_schema'
"""
_IN_VIEW = """AND c.oid IN (
  SELECT d.refobjid FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
  WHERE d.refclassid = 'pg_class'::regclass AND r.ev_class = to_regclass(%s))
ORDER BY 1
"""
_UNIQUE = """
SELECT ARRAY(SELECT attname::text FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
  JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number WHERE place <= i.indnkeyatts ORDER BY place)
FROM pg_index i WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
  AND NOT EXISTS (SELECT FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place)
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number WHERE place <= i.indnkeyatts AND NOT a.attnotnull)
ORDER BY NOT i.indisprimary, i.indnkeyatts, i.indexrelid
"""
_COMPUTED = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attgenerated <> ''"
"""Generated columns, e.g. a ``halfvec`` copy."""


def open_store(uri: str) -> PgVectorStore:
    """Open a table by its address. A driver as in SQLAlchemy is allowed: ``postgresql+psycopg://``."""
    return PgVectorStore(StoreUri.parse(_DRIVER.sub(r"\1://", uri, count=1), OPTIONS, passes_on=True))
