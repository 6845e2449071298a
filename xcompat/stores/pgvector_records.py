"""xcompat's records in PostgreSQL, and the migration lock."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from xcompat.core.errors import XcompatError
from xcompat.stores.base import LostConnectionError
from xcompat.stores.pgvector_client import Client

RECORDS = "xcompat_records"
"""Table with the records, beside the user's table."""
CLAIM = "claim"
"""Key of the record with the current or last, killed migration process."""
_MADE = "CREATE TABLE IF NOT EXISTS {} (relation text, key text, value jsonb NOT NULL, PRIMARY KEY (relation, key))"
DEMAND = "xcompat_demand"
"""Table with the number of searches that had a row among their candidates."""
_DEMANDED = "CREATE TABLE IF NOT EXISTS {} (relation text, id text, count bigint NOT NULL, PRIMARY KEY (relation, id))"
_COUNT = """
INSERT INTO {0} AS d SELECT %s, id, 1 FROM unnest(%s::text[]) AS r (id) ORDER BY id
ON CONFLICT (relation, id) DO UPDATE SET count = d.count + 1
"""
_READ = "SELECT value FROM {} WHERE relation = %s AND key = %s"
_LOCK = "(hashtext('xcompat'), to_regclass(%s)::oid::int)"


class Records:
    """A table's records.

    Args:
        client: connection for writes.
        schema: the user table's schema.
        relation: user's table with its schema, as SQL.
    """

    def __init__(self, client: Client, schema: str, relation: str) -> None:
        self.client, self.relation, self.table = client, relation, sql.Identifier(schema, RECORDS)
        self.exists, self.claim = False, ""
        self.demand = sql.Identifier(schema, DEMAND)

    def read(self, key: str) -> dict[str, Any] | None:
        """Return a record, or None."""
        if not self.exists:
            if not self.client.ask("SELECT to_regclass(%s)::text", self.table.as_string(self.client.connection))[0][0]:
                return None
            self.exists = not self.client.in_transaction  # an open transaction can undo its creation
        return self.client.retry(lambda: self._read_record(key))

    def _read_record(self, key: str) -> dict[str, object] | None:
        found = self.client.execute(sql.SQL(_READ).format(self.table), self.relation, key)
        return found[0][0] if found else None

    def as_sql(self, key: str) -> sql.Composable:
        """Return an SQL expression for a record as text, to read it with other data."""
        if not self.exists:
            return sql.SQL("NULL")
        found = sql.SQL("(SELECT value::text FROM {} WHERE relation = {} AND key = {})")
        return found.format(self.table, sql.Literal(self.relation), sql.Literal(key))

    def write(self, key: str, value: Mapping[str, object] | None) -> None:
        """Replace a record, or delete it with None."""
        self.client.retry(lambda: self._put(key, value))

    def _put(self, key: str, value: Mapping[str, object] | None) -> None:
        with self.client.connection.transaction():
            self.client.execute(sql.SQL(_MADE).format(self.table))
            self.client.execute(sql.SQL("DELETE FROM {} WHERE relation = %s AND key = %s").format(self.table), self.relation, key)
            if value is not None:
                put = sql.SQL("INSERT INTO {} VALUES (%s, %s, %s)").format(self.table)
                self.client.execute(put, self.relation, key, Jsonb(value))

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of records with a key prefix."""
        if not self.exists:
            return []
        asked = sql.SQL("SELECT key FROM {} WHERE relation = %s AND starts_with(key, %s) ORDER BY 1").format(self.table)
        return [key for (key,) in self.client.ask(asked, self.relation, prefix)]

    def delete_prefix(self, prefix: str) -> None:
        """Delete all records by key prefix."""
        asked = sql.SQL("DELETE FROM {} WHERE relation = %s AND starts_with(key, %s)").format(self.table)
        self.client.execute(asked, self.relation, prefix)

    def count_demand(self, ids: Iterable[str]) -> None:
        """Count rows as candidates of a search."""
        names = sorted(set(ids))

        def count() -> None:
            with self.client.connection.transaction():
                self.client.execute(sql.SQL(_DEMANDED).format(self.demand))
                self.client.execute(sql.SQL(_COUNT).format(self.demand), self.relation, names)

        self.client.retry(count)

    def demanded_ids(self) -> list[str]:
        """Return the counted rows, most frequent first."""
        if not self._has_demand():
            return []
        asked = sql.SQL("SELECT id FROM {} WHERE relation = %s ORDER BY count DESC, id").format(self.demand)
        return [item for (item,) in self.client.ask(asked, self.relation)]

    def forget_demand(self) -> None:
        """Delete the counts."""
        if self._has_demand():
            self.client.execute(sql.SQL("DELETE FROM {} WHERE relation = %s").format(self.demand), self.relation)

    def _has_demand(self) -> bool:
        return bool(self.client.ask("SELECT to_regclass(%s)::text", self.demand.as_string(self.client.connection))[0][0])

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the migration lock. It ends with the process."""
        if not self.client.retry(self._lock):
            raise XcompatError(f"{self.client.uri} is being migrated by another process; wait for it or stop it")
        claim = uuid.uuid4().hex
        self.write(CLAIM, {"by": claim})
        self.claim = claim
        try:
            yield
        finally:
            self.claim = ""
            if not self.client.connection.closed:  # else it ended with the connection
                self.write(CLAIM, None)
                self.client.execute(f"SELECT pg_advisory_unlock{_LOCK}", self.relation)

    def _lock(self) -> bool:
        return bool(self.client.execute(f"SELECT pg_try_advisory_lock{_LOCK}", self.relation)[0][0])

    def claim_again(self) -> None:
        """Lock again after a lost connection. Raise if another process had the lock meanwhile."""
        if not self.claim:
            return
        if not self._lock():  # the server can still count the lost connection
            raise LostConnectionError(
                f"lost the connection to {self.client.uri}, and another process migrates it now; wait for it"
            )
        if self._read_record(CLAIM) != {"by": self.claim}:
            self.client.connection.close()
            raise XcompatError(
                f"lost the connection to {self.client.uri}, and another process has migrated it since; check its status"
            )
