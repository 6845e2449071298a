"""Searches in PostgreSQL, each in one statement, which also tells whether its column is still the one that was looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pgvector import Vector
from psycopg import sql

from xcompat.errors import XcompatError
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import UNKNOWN, Space
from xcompat.stores.pgvector_client import Client
from xcompat.stores.pgvector_records import Records

OPERATORS: dict[Metric, str] = {"cosine": "<=>", "ip": "<#>", "l2": "<->"}


class _Seen(NamedTuple):
    """A column as it was looked at, and what was written down of all columns then."""

    said: str | None
    space: Space


class Searches:
    """Searches of one table.

    Looking at a column before each search would be two questions more, which cost as much as a search that an index answers. So
    a search returns what is written down of the columns beside its hits, and is repeated where that has changed.

    Args:
        client: asks.
        records: what is written down of the table.
        table: its name.
        key: the column that names a row.
        metric: how vectors are compared.
        look: returns all columns of vectors.
    """

    def __init__(
        self, client: Client, records: Records, table: sql.SQL, key: str, metric: Metric, look: Callable[[], dict[str, Space]]
    ) -> None:
        self.client, self.records, self.table, self.key, self.metric, self.look = client, records, table, key, metric, look
        self._seen: dict[str, _Seen] = {}

    def __call__(
        self,
        name: str,
        queries: Callable[[Space], NDArray[np.float32]],
        top_k: int,
        filter: str | None,  # noqa: A002
    ) -> list[list[Hit]]:
        """Find the nearest vectors of a column.

        Args:
            name: of the column.
            queries: returns the queries (Q, D), or refuses them, for the column as it is.
            top_k: most hits of a query.
            filter: SQL.
        """
        if (seen := self._seen.get(name)) is not None:
            with suppress(XcompatError):  # it may come from a column that is another one by now
                if (hits := self._found(seen, queries(seen.space), top_k, filter)) is not None:
                    return hits
        hits = None
        while hits is None:
            said = self.client.ask(sql.SQL("SELECT {}").format(self.records.said("spaces")))[0][0]
            seen = _Seen(said, self.look()[name])
            if self.records.exists:  # else nothing would tell that it has changed
                self._seen[name] = seen
            hits = self._found(seen, queries(seen.space), top_k, filter)
        return hits

    def _found(self, seen: _Seen, queries_QD: NDArray[np.float32], top_k: int, filter: str | None) -> list[list[Hit]] | None:  # noqa: A002
        """Return the hits; None if something else is written down of the columns by now."""
        column = sql.Identifier(seen.space.name)
        half = sql.SQL("::halfvec" if seen.space.dtype == "float16" else "")
        distance = sql.SQL("{} {} %s::vector{}").format(column, sql.SQL(OPERATORS[self.metric]), half)
        where = sql.SQL(f"AND ({filter.replace('%', '%%')})") if filter else sql.SQL("")
        asked = sql.SQL("SELECT {}::text, {}, {} FROM {} WHERE {} IS NOT NULL {} ORDER BY 2 LIMIT %s").format(
            sql.Identifier(self.key), distance, self.records.said("spaces"), self.table, column, where
        )

        given = [(Vector(query_D), top_k) for query_D in queries_QD]
        found = self.client.again(lambda: self._rows(asked, given))
        if any(said != seen.said for each in found for _, _, said in each):
            return None
        version = seen.space.fingerprint or UNKNOWN
        return [[Hit(item, self._score(float(away)), version, None) for item, away, _ in each] for each in found]

    def _rows(self, asked: sql.Composed, given: list[tuple[Vector, int]]) -> list[list[Any]]:
        connection = self.client.connection
        with connection.pipeline() if len(given) > 1 else nullcontext():  # which takes longer than one question
            asking = [connection.execute(asked, each) for each in given]
            return [cursor.fetchall() for cursor in asking]

    def _score(self, distance: float) -> float:
        return {"cosine": 1 - distance, "ip": -distance, "l2": -(distance**2)}[self.metric]
