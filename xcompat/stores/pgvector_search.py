"""Searches in PostgreSQL in one round trip, with a check for column changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pgvector import Vector
from psycopg import sql

from xcompat.core.errors import XcompatError
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import UNKNOWN, Space
from xcompat.stores.pgvector_client import Client
from xcompat.stores.pgvector_keys import Key
from xcompat.stores.pgvector_records import Records

OPERATORS: dict[Metric, str] = {"cosine": "<=>", "ip": "<#>", "l2": "<->"}
_ITERATES = "(SELECT (string_to_array(extversion, '.'))[1:2]::int[] >= ARRAY[0, 8] FROM pg_extension WHERE extname = 'vector')"
"""Whether pgvector supports iterative scans for filters."""
_KNOWN = "coalesce(nullif(current_setting('hnsw.ef_search', true), '')::int, 40)"
"""Current setting, or pgvector's default before it is loaded."""
_WIDE = f"SELECT set_config('hnsw.ef_search', least(1000, greatest({_KNOWN}, %s))::text, true)"
"""Keeps at least ``top_k`` HNSW candidates in one transaction, because HNSW returns no more hits."""
_ITERATIVE = "".join(f", set_config('{kind}.iterative_scan', 'relaxed_order', true)" for kind in ("hnsw", "ivfflat"))
_ASKED = """
SELECT * FROM (SELECT {}, {}, {} FROM {} WHERE {} IS NOT NULL {} ORDER BY 2 LIMIT %s) AS found (id, away, said)
ORDER BY away + 0
"""
"""The sum forces a sort, because iterative scans return distances only approximately sorted."""


class _State(NamedTuple):
    """A column in its last known state, with its record and the support for iterative scans."""

    said: str | None
    space: Space
    iterates: bool


class Searches:
    """Searches in a table.

    Two queries to check the column first would cost as much as a search. So each search returns the columns' record with its
    hits, and is repeated after a change.

    Args:
        client: connection.
        records: the table's records.
        table: table name.
        key: a row's key.
        metric: search metric.
        look: returns all vector columns.
    """

    def __init__(
        self, client: Client, records: Records, table: sql.SQL, key: Key, metric: Metric, look: Callable[[], dict[str, Space]]
    ) -> None:
        self.client, self.records, self.table, self.key, self.metric, self.look = client, records, table, key, metric, look
        self.models_record = "spaces"
        self._seen: dict[str, _State] = {}

    def use_record(self, key: str) -> None:
        """Read the columns' models from another record."""
        self.models_record, self._seen = key, {}

    def __call__(
        self,
        name: str,
        queries: Callable[[Space], NDArray[np.float32]],
        top_k: int,
        filter: str | None,  # noqa: A002
    ) -> list[list[Hit]]:
        """Find a column's nearest vectors.

        Args:
            name: column name.
            queries: returns the queries (Q, D) for the current column, or raises.
            top_k: maximum hits per query.
            filter: SQL condition.
        """
        if (seen := self._seen.get(name)) is not None:
            with suppress(XcompatError):  # the column can have changed
                if (hits := self._find_hits(seen, queries(seen.space), top_k, filter)) is not None:
                    return hits
        hits = None
        while hits is None:
            asked = sql.SQL("SELECT {}, {}").format(self.records.as_sql(self.models_record), sql.SQL(_ITERATES))
            said, iterates = self.client.ask(asked)[0]
            seen = _State(said, self.look()[name], iterates)
            if self.records.exists:  # else a change would stay unnoticed
                self._seen[name] = seen
            hits = self._find_hits(seen, queries(seen.space), top_k, filter)
        return hits

    def _find_hits(self, seen: _State, queries_QD: NDArray[np.float32], top_k: int, filter: str | None) -> list[list[Hit]] | None:  # noqa: A002
        """Return the hits, or None if the record has changed."""
        column = sql.Identifier(seen.space.name)
        half = sql.SQL("::halfvec" if seen.space.dtype == "float16" else "")
        distance = sql.SQL("{} {} %s::vector{}").format(column, sql.SQL(OPERATORS[self.metric]), half)
        where = sql.SQL(f"AND ({filter.replace('%', '%%')})") if filter else sql.SQL("")
        asked = sql.SQL(_ASKED).format(
            self.key.text, distance, self.records.as_sql(self.models_record), self.table, column, where
        )
        wide = sql.SQL(_WIDE + _ITERATIVE * seen.iterates)
        found = self.client.retry(lambda: self._rows(wide, asked, queries_QD, top_k))
        if any(said != seen.said for each in found for _, _, said in each):
            return None
        version = seen.space.fingerprint or UNKNOWN
        return [[Hit(item, self._score(float(away)), version, None) for item, away, _ in each] for each in found]

    def _rows(self, wide: sql.SQL, asked: sql.Composed, queries_QD: NDArray[np.float32], top_k: int) -> list[list[Any]]:
        connection = self.client.connection
        with connection.pipeline():  # one transaction and round trip
            connection.execute(wide, (top_k,))
            asking = [connection.execute(asked, (Vector(query_D), top_k)) for query_D in queries_QD]
        return [cursor.fetchall() for cursor in asking]

    def _score(self, distance: float) -> float:
        return {"cosine": 1 - distance, "ip": -distance, "l2": -(distance**2)}[self.metric]
