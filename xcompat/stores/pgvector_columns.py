"""Exchange of two vector columns in a PostgreSQL table, with their properties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from psycopg import sql

from xcompat.core.errors import XcompatError
from xcompat.stores.pgvector_client import Client
from xcompat.stores.pgvector_dependents import NOT_NULL, Dependent, Resize, find_columns, find_dependents
from xcompat.stores.pgvector_indexes import Copies
from xcompat.stores.pgvector_records import Records
from xcompat.stores.pgvector_triggers import follow, unfollow

RECORD = "column"
"""Key of the record with the column's properties before the first switch."""
PLAIN_BYTES = 8_000
"""Maximum size of a vector with storage PLAIN, which must fit a page."""


class Properties(NamedTuple):
    """A column's constraints and default.

    Args:
        required: whether it is NOT NULL.
        constraint: the NOT NULL constraint's name as SQL, None before PostgreSQL 18.
        default: default expression as SQL, or None.
    """

    required: bool
    constraint: str | None
    default: str | None


class Exchange(NamedTuple):
    """Exchange of two columns.

    Args:
        client: connection with a transaction and the table lock.
        records: the table's records.
        schema: the table's schema.
        table: name with the schema.
        live: searched column, before and after.
        aside: its later name.
        incoming: the other column's earlier name.
        dtype: its number type.
        resize: adjusts casts to its dimension.
    """

    client: Client
    records: Records
    schema: str
    table: sql.SQL
    live: str
    aside: str
    incoming: str
    dtype: str
    resize: Resize

    def run(self, is_back: bool) -> None:
        """Exchange the columns. Checks on all rows are recorded for :func:`settle`.

        Args:
            is_back: whether it undoes an earlier exchange.

        Raises:
            XcompatError: an object that uses the column cannot be recreated.
        """
        before = self.records.read(RECORD) or {}
        dependents = self._dependents()
        known = Properties(**before["was"]) if before else self._properties()
        unfollow(self.client, self.table)
        for dependent in dependents:
            if dependent.drop:
                self.client.run(dependent.drop)
        self._release(self.live)
        copies = Copies(self.client, self.table, self.live, self.incoming, self.dtype, self.resize)
        copies.exchange_names(self.aside.removeprefix(self.live))
        self._do("ALTER TABLE {table} RENAME COLUMN {live} TO {aside}")
        self._do("ALTER TABLE {table} RENAME COLUMN {incoming} TO {live}")
        copy_settings(self.client, self.table, self.aside, self.live)
        if known.required and not is_back:
            self._fill_with_zeros()
        default = known.default if is_back else resized_default(self.client, known.default, self.dtype, self.resize.new)
        if default is not None:
            self._do("ALTER TABLE {table} ALTER COLUMN {live} SET DEFAULT {default}", default=sql.SQL(default))
        open_rows = known.required and self._has_nulls()
        later = [statement for dependent in dependents for statement in dependent.validate]
        later += [statement for statement in before.get("later", []) if "VALIDATE" in statement and NOT_NULL not in statement]
        if known.required and not open_rows:
            later += self._require(known)
        for dependent in reversed(dependents):
            for statement in dependent.create:
                self.client.run(statement)
        same = self.resize.old == self.resize.new
        follow(self.client, self.schema, self.table, self.aside, self.live, receive=same and not is_back, require=open_rows)
        self.records.write(RECORD, {"was": known._asdict(), "later": later})

    def _dependents(self) -> list[Dependent]:
        found = find_dependents(self.client, find_columns(self.client, self.table, self.live), self.resize)
        others = find_dependents(self.client, find_columns(self.client, self.table, self.incoming), self.resize)
        both = [one.name for one in found if one.name in {other.name for other in others}]
        if both:
            raise XcompatError(f"{both[0]} uses {self.live} and {self.incoming} in {self.client.uri}; drop it first")
        refuse_obstacles(self.client, found)
        return found

    def _properties(self) -> Properties:
        return Properties(*self.client.ask(_PROPERTIES, self.table.as_string(self.client.connection), self.live)[0])

    def _release(self, column: str) -> None:
        for change in (
            "ALTER COLUMN {column} DROP DEFAULT",
            "ALTER COLUMN {column} DROP NOT NULL",
            "DROP CONSTRAINT IF EXISTS {check}",
        ):
            self._do("ALTER TABLE {table} " + change, column=sql.Identifier(column))

    def _fill_with_zeros(self) -> None:
        if self._has_nulls() and self.resize.new is not None:
            zeros = sql.SQL("array_fill(0, ARRAY[{}])::vector").format(sql.Literal(self.resize.new))
            self._do("UPDATE {table} SET {live} = {zeros} WHERE {live} IS NULL", zeros=zeros)

    def _has_nulls(self) -> bool:
        return bool(self._do("SELECT FROM {table} WHERE {live} IS NULL LIMIT 1"))

    def _require(self, known: Properties) -> list[str]:
        """Require vectors in new rows, and return the statements for NOT NULL."""
        self._do("ALTER TABLE {table} ADD CONSTRAINT {check} CHECK ({live} IS NOT NULL) NOT VALID")
        later = [
            "ALTER TABLE {table} VALIDATE CONSTRAINT {check}",
            "ALTER TABLE {table} ALTER COLUMN {live} SET NOT NULL",
            "ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {check}",
        ]
        if known.constraint is not None:
            later.append(f"RENAME {known.constraint}")
        return [self._sql(statement).as_string(self.client.connection) for statement in later]

    def _do(self, statement: str, **parts: sql.Composable) -> list[Any]:
        return self.client.execute(self._sql(statement, **parts))

    def _sql(self, statement: str, **parts: sql.Composable) -> sql.Composed:
        names = {name: sql.Identifier(getattr(self, name)) for name in ("live", "aside", "incoming")}
        return sql.SQL(statement).format(table=self.table, check=sql.Identifier(NOT_NULL), **names, **parts)


def settle(client: Client, records: Records, table: sql.SQL, column: str) -> None:
    """Run an exchange's recorded checks, while others write.

    Args:
        client: connection for writes.
        records: the table's records.
        table: name with the schema.
        column: searched column.
    """
    while later := (known := records.read(RECORD) or {}).get("later"):
        with client.connection.transaction():
            first = later[0]
            if first.startswith("RENAME "):
                rename_not_null(client, table, column, first.removeprefix("RENAME "))
            else:
                client.run(first)
            records.write(RECORD, {**known, "later": later[1:]})


def rename_not_null(client: Client, table: sql.SQL, column: str, name: str) -> None:
    """Restore the name of a column's NOT NULL constraint."""
    found = client.ask(_PROPERTIES, table.as_string(client.connection), column)[0]
    if found[1] not in (None, name):
        client.run(f"ALTER TABLE {table.as_string(client.connection)} RENAME CONSTRAINT {found[1]} TO {name}")


def restore_not_null(client: Client, records: Records, table: sql.SQL, column: str) -> int:
    """Restore NOT NULL after a rollback, and return the number of rows that prevent it."""
    known = records.read(RECORD)
    if known is None:
        return 0
    was, named = Properties(**known["was"]), {"table": table, "column": sql.Identifier(column)}
    records.write(RECORD, None)
    if not was.required:
        return 0
    client.execute(
        sql.SQL("ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {check}").format(check=sql.Identifier(NOT_NULL), **named)
    )
    rows = client.execute(sql.SQL("SELECT count(*) FROM {table} WHERE {column} IS NULL").format(**named))[0][0]
    if not rows:
        client.execute(sql.SQL("ALTER TABLE {table} ALTER COLUMN {column} SET NOT NULL").format(**named))
        if was.constraint is not None:
            rename_not_null(client, table, column, was.constraint)
    return int(rows)


def copy_settings(client: Client, table: sql.SQL, source: str, target: str) -> None:
    """Copy a column's privileges, comment and settings, in all partitions."""
    for own, other in zip(find_columns(client, table, source), find_columns(client, table, target), strict=True):
        for (statement,) in client.ask(_SETTINGS, PLAIN_BYTES, own.relation, own.number, other.number):
            client.run(statement)


def resized_default(client: Client, default: str | None, dtype: str, dim: int | None) -> str | None:
    """Return a column's default for another dimension, or None."""
    if default is None or dim is None:
        return None
    kind = "halfvec" if dtype == "float16" else "vector"
    try:
        is_zero, size = client.ask(sql.SQL(f"SELECT vector_norm(({default})::vector) = 0, vector_dims(({default})::vector)"))[0]
    except XcompatError:
        return None
    if size == dim:
        return default
    return f"array_fill(0, ARRAY[{dim}])::{kind}" if is_zero else None


def refuse_obstacles(client: Client, dependents: Iterable[Dependent]) -> None:
    """Raise if an object that uses the column cannot be recreated."""
    for dependent in dependents:
        if dependent.obstacle:
            raise XcompatError(f"{client.uri}: {dependent.obstacle}")


_PROPERTIES = """
SELECT attnotnull, (
    SELECT quote_ident(conname) FROM pg_constraint WHERE conrelid = attrelid AND contype = 'n' AND conkey = ARRAY[attnum]),
  (SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = attrelid AND adnum = attnum AND attgenerated = '')
FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = %s
"""
_SETTINGS = """
SELECT statement FROM (
  SELECT o.*, to_jsonb(o) AS old, to_jsonb(n) AS new, o.attrelid::regclass AS rel, quote_ident(n.attname) AS own, %s AS plain,
    n.atttypmod * 4 AS bytes FROM pg_attribute o JOIN pg_attribute n USING (attrelid)
  WHERE o.attrelid = %s AND o.attnum = %s AND n.attnum = %s) AS pair,
LATERAL (
  SELECT format('ALTER TABLE ONLY %%s ALTER COLUMN %%s SET STORAGE %%s', rel, own,
    CASE attstorage WHEN 'p' THEN 'PLAIN' WHEN 'e' THEN 'EXTERNAL' WHEN 'm' THEN 'MAIN' ELSE 'EXTENDED' END)
  WHERE old->>'attstorage' <> new->>'attstorage' AND (attstorage <> 'p' OR bytes < plain)
  UNION ALL SELECT format('ALTER TABLE ONLY %%s ALTER COLUMN %%s SET COMPRESSION %%s', rel, own,
    CASE old->>'attcompression' WHEN 'p' THEN 'pglz' WHEN 'l' THEN 'lz4' ELSE 'DEFAULT' END)
  WHERE old->>'attcompression' <> new->>'attcompression'
  UNION ALL SELECT format('ALTER TABLE ONLY %%s ALTER COLUMN %%s SET STATISTICS %%s', rel, own, coalesce(attstattarget, -1))
  WHERE attstattarget IS DISTINCT FROM (new->>'attstattarget')::int
  UNION ALL SELECT format('ALTER TABLE ONLY %%s ALTER COLUMN %%s SET (%%s)', rel, own, array_to_string(attoptions, ', '))
  WHERE attoptions IS NOT NULL
  UNION ALL SELECT format('COMMENT ON COLUMN %%s.%%s IS %%L', rel, own, col_description(attrelid, attnum))
  WHERE col_description(attrelid, attnum) IS NOT NULL
  UNION ALL SELECT format('GRANT %%s (%%s) ON %%s TO %%s%%s', a.privilege_type, own, rel,
    CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
    CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END) FROM aclexplode(attacl) a
) AS made (statement)
"""
