"""Row keys in a PostgreSQL table as text."""

from __future__ import annotations

from typing import NamedTuple

from psycopg import sql


class Key(NamedTuple):
    """Columns that together identify a row.

    A single column's text is its value. Several columns' text is a JSON list, e.g. ``["shop-1", "17"]``.

    Args:
        columns: column names.
        types: types as SQL.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]

    @property
    def text(self) -> sql.Composable:
        """A row's key as text."""
        each = [sql.SQL("{}::text").format(sql.Identifier(name)) for name in self.columns]
        return each[0] if len(each) == 1 else sql.SQL("jsonb_build_array({})::text").format(sql.SQL(", ").join(each))

    @property
    def order(self) -> sql.Composable:
        """Columns of ``t`` for ORDER BY."""
        return sql.SQL(", ").join(sql.SQL("t.{}").format(sql.Identifier(name)) for name in self.columns)

    @property
    def is_behind(self) -> sql.Composable:
        """Condition with one parameter: the row of ``t`` comes after this key."""
        if len(self.columns) == 1:
            return sql.SQL("t.{} > %s::{}").format(sql.Identifier(self.columns[0]), _type(self.types[0]))
        return sql.SQL("({}) > (SELECT {} FROM (SELECT %s::jsonb AS id) AS r)").format(self.order, self._parts)

    @property
    def is_same(self) -> sql.Composable:
        """Condition: the row of ``t`` has the key ``r.id``."""
        if len(self.columns) == 1:
            return sql.SQL("t.{} = r.id::{}").format(sql.Identifier(self.columns[0]), _type(self.types[0]))
        return sql.SQL("({}) = ({})").format(self.order, self._parts)

    @property
    def _parts(self) -> sql.Composable:
        parts = (sql.SQL("(r.id::jsonb->>{})::{}").format(sql.Literal(n), _type(kind)) for n, kind in enumerate(self.types))
        return sql.SQL(", ").join(parts)


def _type(name: str) -> sql.SQL:
    return sql.SQL(name)
