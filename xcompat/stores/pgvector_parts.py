"""Part of a PostgreSQL table: a condition's rows. A switch exchanges their vectors, not the columns."""

from __future__ import annotations

from typing import Any, NamedTuple

from psycopg import sql

from xcompat.core.errors import XcompatError
from xcompat.stores.pgvector_client import Client, plain_errors
from xcompat.stores.pgvector_triggers import follow, unfollow


class Part(NamedTuple):
    """A condition's rows.

    Args:
        client: connection for writes.
        schema: the table's schema.
        table: name with the schema.
        column: searched column.
        condition: SQL condition.
    """

    client: Client
    schema: str
    table: sql.SQL
    column: str
    condition: str

    def refuse(self, dim: int, dtype: str, old_dim: int | None, old_dtype: str) -> None:
        """Raise if the searched column cannot hold the new vectors in these rows. Try it on a row, and undo the try.

        Args:
            dim: the new vectors' dimension.
            dtype: their number type.
            old_dim: the searched column's declared dimension, or None.
            old_dtype: its number type.

        Raises:
            XcompatError: the type, an index or another object prevents it.
        """
        name = f"{self.column} of {self.client.uri}"
        if dtype != old_dtype:
            raise XcompatError(f"{name} has {old_dtype} numbers, which --where cannot change; set --dtype {old_dtype}")
        if old_dim not in (None, dim):
            raise XcompatError(
                f"{name} is declared with {old_dim:,} dimensions, but the new vectors have {dim:,}; run ALTER TABLE "
                f"{self._name} ALTER COLUMN {self.client.quote(self.column)} TYPE "
                f"{_kind(dtype)} first, or remove --where to migrate all rows"
            )
        try:
            with plain_errors(self.client.uri), self.client.connection.transaction(force_rollback=True):
                self._do("SET LOCAL lock_timeout = '2s'")
                self._do(_TRIAL, dim=sql.Literal(dim), number=sql.Literal(dim**-0.5), kind=sql.SQL(_kind(dtype)))
        except XcompatError as error:
            raise XcompatError(
                f"{error}: these rows cannot hold vectors of {dim:,} dimensions; drop the index, constraint or column that "
                "prevents it, and create it again after switch"
            ) from error

    def notes(self, rows: int) -> list[str]:
        """Return sentences about changes that services would notice.

        Args:
            rows: number of rows with a vector.
        """
        return [
            "from start until finish the table has one more column: COPY without a column list fails, SELECT * returns it",
            f"switch locks the table while it writes the new vectors of {rows:,} rows into {self.column}",
            f"from switch on, query these rows with the new model and their condition: WHERE {self.condition}",
        ]

    def exchange(self, live: str, incoming: str, aside: str, is_back: bool) -> None:
        """Exchange two columns' vectors, and rename the column without searches.

        Args:
            live: searched column.
            incoming: other column.
            aside: its later name.
            is_back: whether it undoes an earlier exchange. Rows without an old vector lose their new vector.
        """
        names = {name: sql.Identifier(value) for name, value in (("live", live), ("new", incoming), ("aside", aside))}
        unfollow(self.client, self.table)
        if is_back:
            self._refuse_lost(names)
            self._do("UPDATE {table} SET {live} = {new}, {new} = {live} WHERE {new} IS NOT NULL OR ({condition})", **names)
        else:  # rows can have left the part since they were filled
            self._do("UPDATE {table} SET {new} = NULL WHERE {new} IS NOT NULL AND ({condition}) IS NOT TRUE", **names)
            self._do("UPDATE {table} SET {live} = {new}, {new} = {live} WHERE {new} IS NOT NULL", **names)
        self._do("ALTER TABLE {table} RENAME COLUMN {new} TO {aside}", **names)
        follow(self.client, self.schema, self.table, aside, live)

    def _refuse_lost(self, names: dict[str, sql.Identifier]) -> None:
        """Raise if rows without an old vector prevent a rollback."""
        required = self._do(_REQUIRED, name=sql.Literal(self.column), relation=sql.Literal(self._name))
        lost = self._do("SELECT count(*) FROM {table} WHERE {live} IS NOT NULL AND {new} IS NULL AND ({condition})", **names)
        if required and lost[0][0]:
            raise XcompatError(
                f"{self.column} of {self.client.uri} is NOT NULL, but {lost[0][0]:,} rows changed after the switch and have no "
                "old vector; delete these rows or drop NOT NULL, then run rollback again"
            )

    @property
    def _name(self) -> str:
        return self.table.as_string(self.client.connection)

    def _do(self, statement: str, **parts: sql.Composable) -> list[Any]:
        condition = sql.SQL(escape_condition(self.condition))
        own = sql.Identifier(self.column)
        return self.client.execute(sql.SQL(statement).format(table=self.table, condition=condition, own=own, **parts))


def escape_condition(condition: str) -> str:
    """Return a condition for a query with parameters.

    Example:
        >>> escape_condition("name LIKE 'a%'")
        "name LIKE 'a%%'"
    """
    return condition.replace("%", "%%")


def models_record(condition: str | None) -> str:
    """Return the key of the record with the models of a part's columns."""
    return "spaces" if condition is None else f"spaces where {condition}"


def _kind(dtype: str) -> str:
    return "halfvec" if dtype == "float16" else "vector"


_REQUIRED = "SELECT FROM pg_attribute WHERE attrelid = to_regclass({relation}) AND attname = {name} AND attnotnull"
_TRIAL = """
UPDATE {table} SET {own} = array_fill({number}::real, ARRAY[{dim}])::{kind} WHERE ctid = (
  SELECT ctid FROM {table} WHERE {own} IS NOT NULL AND ({condition}) LIMIT 1 FOR UPDATE SKIP LOCKED)
"""
