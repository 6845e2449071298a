"""Indexes on a PostgreSQL column, and copies for another column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from psycopg import sql

from xcompat.stores.pgvector_client import TYPES, Client, plain_errors
from xcompat.stores.pgvector_dependents import Resize


class Index(NamedTuple):
    """Index with a column in its key, expression or condition.

    Args:
        name: name with the schema, as SQL.
        plain: name without the schema.
        table: its table or partition, as SQL.
        made: the end of its CREATE statement: kind, keys and options.
        spans: whether it only contains the partitions' indexes.
        valid: whether its build finished.
        unique: whether it is unique.
        space: tablespace as SQL, None to use the default.
        comment: comment as SQL.
    """

    name: str
    plain: str
    table: str
    made: str
    spans: bool
    valid: bool
    unique: bool
    space: str | None
    comment: str | None

    @property
    def is_approximate(self) -> bool:
        """Whether it finds nearest neighbours."""
        return self.made.startswith(("hnsw ", "ivfflat "))

    def like(self, old: str, new: str, dtype: str, resize: Resize) -> str:
        """Return the end of the CREATE statement for another column. Names are SQL."""
        return resize(rename_column(_explicit(self.made, old), old, new, dtype))

    def create(self, like: str, concurrently: bool) -> str:
        """Return a similar index's CREATE statement."""
        head, where, condition = like.partition(" WHERE ")
        made = f"{head} TABLESPACE {self.space}{where}{condition}" if self.space else like
        return f"CREATE{' UNIQUE' * self.unique} INDEX{' CONCURRENTLY' * concurrently} ON {self.table} USING {made}"


def rename_column(made: str, old: str, new: str, dtype: str) -> str:
    """Replace a column in the end of an index's CREATE statement.

    Args:
        made: statement from PostgreSQL, with columns unqualified.
        old: old column as SQL.
        new: new column as SQL.
        dtype: the new column's number type, which selects the operator class.

    Example:
        >>> rename_column("hnsw (a vector_ip_ops) WHERE (a IS NOT NULL)", "a", '"New"', "float16")
        'hnsw ("New" halfvec_ip_ops) WHERE ("New" IS NOT NULL)'
    """
    tokens = _TOKEN.findall(made)
    for number, token in enumerate(tokens):
        before, after = "".join(tokens[max(number - 2, 0) : number]), "".join(tokens[number + 1 : number + 2])
        if token == old and not before.endswith(("::", ".")) and after != "(":
            tokens[number] = new
            if after == " " and (operators := _OPERATORS.fullmatch(tokens[number + 2])):
                tokens[number + 2] = f"{TYPES[dtype]}_{operators[1]}"
    return "".join(tokens)


def _explicit(made: str, column: str) -> str:
    """Add the default operator class, which PostgreSQL omits."""
    return made.replace(f"ivfflat ({column})", f"ivfflat ({column} vector_l2_ops)", 1)


_TOKEN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|[^\W\d][\w$]*|\s+|.""", re.DOTALL)
_OPERATORS = re.compile(r"(?:vector|halfvec)_(\w+_ops)")
_ASKED = """
WITH RECURSIVE tree AS (
  SELECT to_regclass(%s)::oid AS oid UNION ALL SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid)
SELECT format('%%I.%%I', nspname, c.relname), c.relname, indrelid::regclass::text, pg_get_indexdef(indexrelid),
  c.relkind = 'I', indisvalid, indisunique, quote_ident(spcname), quote_literal(obj_description(c.oid, 'pg_class'))
FROM tree JOIN pg_index ON indrelid = tree.oid JOIN pg_class c ON c.oid = indexrelid JOIN pg_namespace n ON n.oid = relnamespace
LEFT JOIN pg_tablespace s ON s.oid = reltablespace
WHERE EXISTS (
  SELECT FROM pg_depend JOIN pg_attribute ON attrelid = refobjid AND attnum = refobjsubid
  WHERE classid = 'pg_class'::regclass AND objid = indexrelid AND refclassid = 'pg_class'::regclass AND refobjid = indrelid
    AND attname = %s)
ORDER BY c.relkind = 'I', indexrelid
"""


def indexes(client: Client, table: sql.SQL, column: str) -> list[Index]:
    """Return a column's indexes, those on partitions first."""
    quoted, found = client.quote(column), client.ask(_ASKED, table.as_string(client.connection), column)
    return [
        Index(name, plain, of, _explicit(made.split(" USING ", 1)[1], quoted), *rest) for name, plain, of, made, *rest in found
    ]


class Copies(NamedTuple):
    """Copies of a column's indexes for another column.

    Args:
        client: connection for writes.
        table: name with the schema.
        old: column with the indexes.
        new: column for the copies.
        dtype: its number type.
        resize: adjusts casts to its dimension.
    """

    client: Client
    table: sql.SQL
    old: str
    new: str
    dtype: str
    resize: Resize

    def pairs(self) -> Iterator[tuple[Index, str, list[Index]]]:
        """Yield each index, the end of its copy's CREATE statement, and existing copies."""
        old, new = self.client.quote(self.old), self.client.quote(self.new)
        for index in indexes(self.client, self.table, self.old):
            there = indexes(self.client, self.table, self.new)  # read again: an index over partitions creates theirs
            how = index.like(old, new, self.dtype, self.resize)
            yield (
                index,
                how,
                [one for one in there if one.table == index.table and one.made == how and one.unique == index.unique],
            )

    def missing(self) -> list[str]:
        """Return the names of indexes without a valid copy."""
        return [index.plain for index, _, same in self.pairs() if index.valid and not any(one.valid for one in same)]

    def build(self) -> list[str]:
        """Build missing indexes without blocking writers. Return all names."""
        for index, how, same in self.pairs():
            if not index.valid or any(one.valid for one in same):
                continue
            for left in same:  # from a killed build
                self.client.run(f"DROP INDEX CONCURRENTLY {left.name}")
            if not index.spans:
                self.client.run(index.create(how, concurrently=True))
                continue
            with plain_errors(self.client.uri), self.client.connection.transaction():  # it adopts the partitions' indexes
                self.client.lock(sql.SQL(index.table), "SHARE")
                self.client.run(index.create(how, concurrently=False))
        return [index.name for index in indexes(self.client, self.table, self.new)]

    def exchange_names(self, suffix: str) -> None:
        """Give copies their originals' names and comments, and add a suffix to the originals."""
        used: set[str] = set()
        for index, _, same in list(self.pairs()):
            copy = next((one for one in same if one.valid and one.name not in used), None)
            if copy is None:
                continue
            used.add(copy.name)
            schema = index.name.removesuffix(self.client.quote(index.plain))
            aside = self.client.quote(with_suffix(index.plain, suffix))
            self.client.run(f"ALTER INDEX {index.name} RENAME TO {aside}")
            self.client.run(f"ALTER INDEX {copy.name} RENAME TO {self.client.quote(index.plain)}")
            if index.comment:
                self.client.run(f"COMMENT ON INDEX {schema}{self.client.quote(index.plain)} IS {index.comment}")


NAME_BYTES = 63
"""Maximum bytes of a PostgreSQL name."""


def with_suffix(name: str, suffix: str) -> str:
    """Append a suffix, and cut the name to PostgreSQL's limit."""
    return name.encode()[: NAME_BYTES - len(suffix.encode())].decode(errors="ignore") + suffix
