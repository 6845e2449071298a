"""What a migration would meet in a PostgreSQL table: obstacles, and changes that services notice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from psycopg import sql

from xcompat.core.errors import XcompatError
from xcompat.stores.base import BEFORE
from xcompat.stores.pgvector_client import TYPES, Client
from xcompat.stores.pgvector_columns import PLAIN_BYTES, refuse_obstacles, resized_default
from xcompat.stores.pgvector_dependents import Dependent, Resize, find_columns, find_dependents
from xcompat.stores.pgvector_indexes import NAME_BYTES, indexes

MOST = {"vector": 2_000, "halfvec": 4_000, "bit": 64_000}
"""Most dimensions that pgvector builds an index for, by the type of the key."""
_OPERATORS = re.compile(r" (vector|halfvec|bit)_\w+_ops")
_NUMBERS = {kind: dtype for dtype, kind in TYPES.items()}
_FEWER = "a map into fewer, or drop that index first"
LOOKED_AT = 100
"""Rows on which constraints are tried with a new vector."""


class Survey(NamedTuple):
    """A look at a table before its column of vectors is migrated; nothing is written.

    Args:
        client: a connection.
        table: its name, with the schema.
        column: the column that is searched.
        old_dim: of its vectors; None if it does not say.
        dim: of the new vectors.
        dtype: how the new column keeps its numbers.
    """

    client: Client
    table: sql.SQL
    column: str
    old_dim: int | None
    dim: int
    dtype: str

    def refuse(self) -> None:
        """Raise if the column cannot be migrated.

        Raises:
            XcompatError: the table or an object that uses the column stands in the way.
        """
        self._refuse_table()
        self._refuse_indexes()
        refuse_obstacles(self.client, self._dependents())
        for name, condition in self.client.ask(_CHECKS, self._name, self.column):
            if not self._accepts(Resize(self.old_dim, self.dim)(condition)):
                raise XcompatError(
                    f"{self.client.uri}: constraint {name} would refuse vectors of {self.dim:,} dimensions; "
                    "drop it or change it first"
                )

    def notes(self) -> list[str]:
        """Return what changes for services, in sentences."""
        columns = self.client.ask(_ORDER, self._name)
        names = [name for name, _ in columns]
        behind = names[names.index(self.column) + 1 :]
        found = [
            "from start until finish the table has one more column: COPY without a column list fails, SELECT * returns it",
            "from switch until finish INSERT without a column list fails" if self.dim != self.old_dim else "",
            f"after finish {self.column} is the last column, behind {', '.join(behind)}: name the columns in INSERT and COPY"
            if behind
            else "",
            *self._lost(),
        ]
        if recreated := [one.name for one in self._dependents() if one.create]:
            found.append(f"switch recreates {', '.join(recreated)}")
        found += [one.note for one in self._dependents() if one.note]
        if published := [name for (name,) in self.client.ask(_PUBLISHED, self._name)]:
            found.append(
                f"publication {', '.join(published)} sends the new column too: add it to the subscribers' table before start"
            )
        return [note for note in found if note]

    @property
    def _name(self) -> str:
        return self.table.as_string(self.client.connection)

    def _dependents(self) -> list[Dependent]:
        return find_dependents(self.client, find_columns(self.client, self.table, self.column), Resize(self.old_dim, self.dim))

    def _lost(self) -> Iterator[str]:
        """Yield what the new column cannot take over."""
        ((default, storage),) = self.client.ask(_DEFAULT, self._name, self.column)
        if default is not None and resized_default(self.client, default, self.dtype, self.dim) is None:
            yield f"the default {default} does not fit the new vectors and is dropped at switch"
        if storage == "p" and self.dim * 4 >= PLAIN_BYTES:
            yield "storage PLAIN is too small for the new vectors: the new column keeps EXTERNAL"

    def _refuse_table(self) -> None:
        ((kind, partition, parent, heirs, typed, generated, hidden, taken),) = self.client.ask(
            _TABLE, self.column + BEFORE, self.column, self._name
        )
        wrong = {
            f"is a partition of {parent}; migrate that table": partition,
            f"inherits from {parent}; end that first (ALTER TABLE … NO INHERIT)": parent and not partition,
            "has tables that inherit from it; end that first (ALTER TABLE … NO INHERIT)": heirs and kind != "p",
            "is a table of a composite type, which cannot get a column (ALTER TABLE … NOT OF)": typed,
            f"computes {self.column} itself (GENERATED ALWAYS), so no new vectors can be written there": generated,
            "hides rows from this user by row-level security; use a role with BYPASSRLS": hidden,
            f"has a column {self.column + BEFORE}, the name that the old vectors get; rename it first": taken,
            f"calls its column {self.column}, which leaves no room for {BEFORE}: names have {NAME_BYTES} bytes": (
                len((self.column + BEFORE).encode()) > NAME_BYTES
            ),
        }
        for why, is_so in wrong.items():
            if is_so:
                raise XcompatError(f"{self.client.uri}: the table {why}")

    def _refuse_indexes(self) -> None:
        own = self.client.quote(self.column)
        for index in indexes(self.client, self.table, self.column):
            made = index.like(own, own, self.dtype, Resize(self.old_dim, self.dim))
            kind = found[1] if index.is_approximate and (found := _OPERATORS.search(made)) else None
            if kind not in MOST or self.dim <= MOST[kind]:
                continue
            other = "--dtype float16" if f"({own} vector_" in made and self.dim <= MOST["halfvec"] else _FEWER
            raise XcompatError(
                f"{self.column} of {self.client.uri} has an approximate index ({index.plain}), which pgvector builds for "
                f"{_NUMBERS.get(kind, kind)} of {MOST[kind]:,} dimensions at most, and the new vectors "
                f"have {self.dim:,}; take {other}"
            )

    def _accepts(self, condition: str) -> bool:
        """Whether a constraint holds for rows with a new vector, tried on some rows."""
        others = [sql.Identifier(name) for name, _ in self.client.ask(_ORDER, self._name) if name != self.column]
        new = sql.SQL("array_fill({}::real, ARRAY[{}])::{}").format(
            sql.Literal(self.dim**-0.5), sql.Literal(self.dim), sql.SQL(TYPES[self.dtype])
        )
        asked = sql.SQL("SELECT FROM (SELECT {} FROM {} WHERE {own} IS NOT NULL LIMIT {}) AS t WHERE NOT ({}) LIMIT 1").format(
            sql.SQL(", ").join([*others, sql.SQL("{} AS {}").format(new, sql.Identifier(self.column))]),
            self.table,
            sql.Literal(LOOKED_AT),
            sql.SQL(condition.replace("%", "%%")),
            own=sql.Identifier(self.column),
        )
        try:
            return not self.client.ask(asked)
        except XcompatError:  # e.g. it compares with a vector of the old dimension
            return False


_TABLE = """
SELECT relkind, relispartition, (SELECT inhparent::regclass::text FROM pg_inherits WHERE inhrelid = c.oid LIMIT 1),
  EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid), reloftype <> 0, a.attgenerated <> '', row_security_active(c.oid),
  EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attname = %s AND NOT attisdropped)
FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid AND attname = %s WHERE c.oid = to_regclass(%s)
"""
_ORDER = """
SELECT attname, attnum FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_CHECKS = """
SELECT conname, pg_get_expr(conbin, conrelid) FROM pg_constraint
WHERE conrelid = to_regclass(%s) AND contype = 'c' AND (
  SELECT attnum FROM pg_attribute WHERE attrelid = conrelid AND attname = %s) = ANY(conkey)
"""
_DEFAULT = """
SELECT (SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = attrelid AND adnum = attnum), attstorage
FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = %s
"""
_PUBLISHED = """
SELECT DISTINCT pubname FROM pg_publication_tables t JOIN pg_class c ON c.relname = tablename
JOIN pg_namespace n ON n.oid = relnamespace AND nspname = schemaname WHERE c.oid = to_regclass(%s) ORDER BY 1
"""
