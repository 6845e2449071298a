"""Approximate indexes of a PostgreSQL table, with those of its partitions, and others like them."""

from __future__ import annotations

import re
from typing import NamedTuple

from psycopg import sql

from xcompat.stores.pgvector_client import TYPES, Client, explained


class Index(NamedTuple):
    """An approximate index of one column.

    Args:
        name: as SQL writes it.
        table: the table that it is of, or the partition, as SQL writes it.
        made: the end of the statement that makes it: its kind, its column and its options.
        spans: whether it is of a partitioned table, which holds nothing but the indexes of the partitions.
        valid: whether it was built to its end.
    """

    name: str
    table: str
    made: str
    spans: bool
    valid: bool

    def like(self, column: str, dtype: str) -> str:
        """Return the end of the statement that makes the same for another column, whose name is SQL."""
        return re.sub(r"\(.*? (vector|halfvec)_", lambda _: f"({column} {TYPES[dtype]}_", self.made, count=1)


_ASKED = """
SELECT i.indexrelid::regclass::text, i.indrelid::regclass::text, pg_get_indexdef(i.indexrelid), c.relkind = 'I', i.indisvalid
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE indrelid IN (SELECT relid FROM pg_partition_tree(to_regclass(%s)) UNION SELECT to_regclass(%s))
ORDER BY c.relkind = 'I', i.indexrelid
"""


def indexes(client: Client, table: sql.SQL, column: str) -> list[Index]:
    """Return a column's approximate indexes, those of partitions before those that span them."""
    named = table.as_string(client.connection)
    quoted = sql.Identifier(column).as_string(client.connection)
    found = [
        Index(name, of, made.split(" USING ", 1)[1], spans, valid)
        for name, of, made, spans, valid in client.ask(_ASKED, named, named)
        if "USING hnsw" in made or "USING ivfflat" in made
    ]
    return [index for index in found if f"({column} " in index.made or f"({quoted} " in index.made]


def index_like(client: Client, table: sql.SQL, old: str, new: str, dtype: str) -> list[str]:
    """Build the approximate indexes of a column for another one too, without locking writers out; return their names.

    PostgreSQL names them: after a migration, an index of the searched column is still called by what that column was called.

    Args:
        client: the connection that writes.
        table: its name, with the schema.
        old: the column that has them.
        new: the column that gets them.
        dtype: how that keeps its numbers.
    """
    quoted = sql.Identifier(new).as_string(client.connection)
    for index in indexes(client, table, old):
        how = index.like(quoted, dtype)
        same = [one for one in indexes(client, table, new) if one.table == index.table and one.like(quoted, dtype) == how]
        if not index.valid or any(one.valid for one in same):
            continue
        for left in same:  # of a build that was killed
            client.execute(sql.SQL("DROP INDEX CONCURRENTLY {}").format(sql.SQL(left.name)))
        of, made = sql.SQL(index.table), sql.SQL("CREATE INDEX {} ON {} USING {}")
        if not index.spans:
            client.execute(made.format(sql.SQL("CONCURRENTLY"), of, sql.SQL(how)))
            continue
        with explained(client.uri), client.connection.transaction():  # takes over those of the partitions, and builds nothing
            client.lock(of, "SHARE")
            client.execute(made.format(sql.SQL(""), of, sql.SQL(how)))
    return [index.name for index in indexes(client, table, new)]
