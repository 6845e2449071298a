"""Check of a PostgreSQL table before a migration, for obstacles and visible changes."""

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
"""Key type -> maximum dimension of a pgvector index."""
_OPERATORS = re.compile(r" (vector|halfvec|bit)_\w+_ops")
_NUMBERS = {kind: dtype for dtype, kind in TYPES.items()}
_FEWER = "use a map to fewer dimensions, or drop the index"
LOOKED_AT = 100
"""Rows to test constraints on."""


class Survey(NamedTuple):
    """Read-only check of a table before a migration.

    Args:
        client: connection.
        table: name with the schema.
        column: searched column.
        old_dim: its dimension, or None if undeclared.
        dim: the new vectors' dimension.
        dtype: the new column's number type.
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
            XcompatError: the table, or an object that uses the column, prevents it.
        """
        self.refuse_table()
        self._refuse_indexes()
        refuse_obstacles(self.client, self._dependents())
        for name, condition in self.client.ask(_CHECKS, self._name, self.column):
            if not self._accepts(Resize(self.old_dim, self.dim)(condition)):
                raise XcompatError(
                    f"{self.client.uri}: constraint {name} rejects vectors of {self.dim:,} dimensions; drop or change it first"
                )

    def notes(self) -> list[str]:
        """Return sentences about changes that services would notice."""
        columns = self.client.ask(_ORDER, self._name)
        names = [name for name, _ in columns]
        behind = names[names.index(self.column) + 1 :]
        found = [
            "from start until finish the table has one more column: COPY without a column list fails, SELECT * returns it",
            "from switch until finish INSERT without a column list fails" if self.dim != self.old_dim else "",
            f"after finish {self.column} is the last column, after {', '.join(behind)}: name the columns in INSERT and COPY"
            if behind
            else "",
            *self._find_losses(),
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

    def _find_losses(self) -> Iterator[str]:
        """Yield properties that the new column cannot have."""
        ((default, storage),) = self.client.ask(_DEFAULT, self._name, self.column)
        if default is not None and resized_default(self.client, default, self.dtype, self.dim) is None:
            yield f"switch drops the default {default}, which does not fit the new vectors"
        if storage == "p" and self.dim * 4 >= PLAIN_BYTES:
            yield "storage PLAIN is too small for the new vectors: the new column keeps EXTERNAL"

    def refuse_table(self) -> None:
        """Raise if the table cannot get another column for the vectors."""
        ((kind, partition, parent, heirs, typed, generated, hidden, taken),) = self.client.ask(
            _TABLE, self.column + BEFORE, self.column, self._name
        )
        wrong = {
            f"is a partition of {parent}; migrate that table": partition,
            f"inherits from {parent}; detach it first (ALTER TABLE … NO INHERIT)": parent and not partition,
            "has child tables; detach them first (ALTER TABLE … NO INHERIT)": heirs and kind != "p",
            "has a composite type, so no column can be added; detach it (ALTER TABLE … NOT OF)": typed,
            f"computes {self.column} itself (GENERATED ALWAYS), so it cannot be written; choose another column": generated,
            "hides rows from this user by row-level security; use a role with BYPASSRLS": hidden,
            f"has a column {self.column + BEFORE}, which the migration needs as a name; rename it first": taken,
            f"has a column name too long to append {BEFORE} ({self.column}, maximum {NAME_BYTES} bytes); rename it first": (
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
            other = "use --dtype float16" if f"({own} vector_" in made and self.dim <= MOST["halfvec"] else _FEWER
            raise XcompatError(
                f"{self.column} of {self.client.uri} has an approximate index ({index.plain}); pgvector supports "
                f"{_NUMBERS.get(kind, kind)} with at most {MOST[kind]:,} dimensions, but the new vectors "
                f"have {self.dim:,}; {other}"
            )

    def _accepts(self, condition: str) -> bool:
        """Return whether a constraint accepts new vectors, tried on some rows."""
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
        except XcompatError:  # e.g. a comparison with an old vector
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
