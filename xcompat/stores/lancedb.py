"""Store for LanceDB, on disk or object storage. Spaces are vector columns in one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.lock import lock_writer
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, UNKNOWN, Rows, Space, Store
from xcompat.stores.lancedb_client import RETRYING, copy_index_config, plain_errors, resolve_location
from xcompat.stores.lease import Lease
from xcompat.stores.uri import StoreUri

OPTIONS = ("table", "column", "id", "metric")
DISTANCES: dict[Metric, str] = {"cosine": "cosine", "ip": "dot", "l2": "l2"}
TYPES = {"float32": pa.float32(), "float16": pa.float16()}
STATE = "xcompat_state"
"""Column beside a new space: hashes of the old and the new vector."""
ROW_ID = "xcompat_id"
"""Column with unique ids during a migration, if the table has none."""
POSITION = "_rowid"
"""LanceDB's own row id. It changes when a row changes."""
HASH = 16
"""Characters in a hash."""
MODEL = b"xcompat:model"
"""Metadata key of a column for its model. It survives renames."""
RECORDS = "_xcompat"
"""Suffix of the table with the records of xcompat. It exists only during a migration."""
ALWAYS = timedelta(days=36_500)
"""Age limit that keeps old versions, since their deletion is up to the user."""


class LanceStore(Store):
    """LanceDB table. Each write is one version. Row states detect concurrent changes."""

    reports_version = True

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        where, self.folder = resolve_location(uri)
        self.name = uri.require("table")
        with plain_errors(uri):
            self.database = lancedb.connect(where, read_consistency_interval=timedelta(0), storage_options=uri.rest or None)
        if (table := self._open(self.name)) is None:
            tables = [name for name in self.database.list_tables().tables or [] if not name.endswith(RECORDS)]
            raise XcompatError(f"{uri}: there is no table {self.name!r}; {nearest(self.name, tables)}")
        self.table = table
        self.lease = Lease(self)
        added = self.added_spaces()
        own = [name for name in self.spaces() if name not in added or name == uri.options.get("column")]
        self.space = uri.choose("column", own, "a column of fixed-size float32 or float16 vectors")
        keys = self._keys()
        self.key = uri.choose("id", keys, "an id column of integers or texts") if keys or "id" in uri.options else POSITION
        self.metric = uri.metric() or self._metric()

    # ------------------------------------------------------------------------------------------------- the table

    def _open(self, name: str) -> Any | None:  # noqa: ANN401
        with plain_errors(self.uri):
            try:
                return self.database.open_table(name)
            except ValueError as error:
                if "was not found" in str(error):
                    return None
                raise

    def _keys(self) -> list[str]:
        """Return the possible key columns: ``id`` if it exists and the address has no other."""
        own = [field for field in self.table.schema if field.name not in (STATE, ROW_ID)]
        known = [field.name for field in own if pa.types.is_integer(field.type) or _is_text(field.type)]
        return ["id"] if "id" in known and "id" not in self.uri.options else known

    @property
    def _row_key(self) -> str:
        """Column to identify rows during a migration."""
        return ROW_ID if ROW_ID in self.table.schema.names else self.key

    def _has_unique_ids(self) -> bool:
        """Return whether the id column identifies each row."""
        if self.key == POSITION:
            return False
        with plain_errors(self.uri):
            ids = self.table.search().select([self.key]).to_arrow()[self.key]
        return not ids.null_count and pc.count_distinct(ids).as_py() == len(ids)

    def _set_row_ids(self) -> None:
        """Give services' new rows an id, if the table has such ids."""
        if ROW_ID in self.table.schema.names:
            with plain_errors(self.uri):
                lacking = self.table.count_rows(f"{ROW_ID} IS NULL")
            if lacking:
                self._do(self.table.update, where=f"{ROW_ID} IS NULL", values_sql={ROW_ID: "uuid()"})

    def _metric(self) -> Metric:
        """Return the metric of the column's index, else cosine."""
        made = [self.table.index_stats(index.name).distance_type for index in self._indexes(self.space)]
        return next((metric for metric, distance in DISTANCES.items() if distance in made), "cosine")

    def _indexes(self, column: str) -> list[Any]:
        """Return a column's approximate indexes."""
        with plain_errors(self.uri):
            return [index for index in self.table.list_indices() if index.columns == [column]]

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def spaces(self) -> dict[str, Space]:
        found = {}
        with plain_errors(self.uri):
            for field in self.table.schema:
                if pa.types.is_fixed_size_list(field.type) and field.type.value_type in TYPES.values():
                    dtype = next(dtype for dtype, kind in TYPES.items() if kind == field.type.value_type)
                    said = (field.metadata or {}).get(MODEL)
                    model = Fingerprint(**json.loads(said)) if said else None
                    found[field.name] = Space(field.name, field.type.list_size, dtype, model)
        return found

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        if without is not None:
            return sum(len(found) for found in self._read(10_000, space or self.space, without))
        with plain_errors(self.uri):
            return int(self.table.count_rows(f"{_quote(space)} IS NOT NULL" if space is not None else None))

    @override
    def ids_without_vector(self, count: int) -> list[str]:
        with plain_errors(self.uri):
            asked = self.table.search().where(f"{_quote(self.space)} IS NULL").select([self.key])
            return _ids(asked.limit(count).to_arrow()[self.key])

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        own = self.spaces()[space or self.space]
        queries_QD = self.queries(vectors_QD, own)
        if not len(queries_QD):
            return []
        with plain_errors(self.uri):
            asked = self.table.search(queries_QD, vector_column_name=own.name).distance_type(DISTANCES[self.metric])
            asked = asked.where(filter) if filter else asked
            found = asked.limit(top_k).select([self.key, "_distance"]).to_arrow().combine_chunks()
        ids, version = found[self.key].cast(pa.string()).to_pylist(), own.fingerprint or UNKNOWN
        hits: list[list[Hit]] = [[] for _ in queries_QD]
        numbers = found["query_index"].to_pylist() if len(queries_QD) > 1 else [0] * len(found)
        for number, name, away in zip(numbers, ids, found["_distance"].to_pylist(), strict=True):
            hits[number].append(Hit(name, self._score(away), version, None))
        return hits

    def _score(self, distance: float) -> float:
        return -distance if self.metric == "l2" else 1 - distance

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        both = f"{_quote(self.space)} IS NOT NULL AND {_quote(other)} IS NOT NULL"
        with plain_errors(self.uri):
            asked = self.database.open_table(self.name)
            asked.checkout(asked.version)  # pin a version: row positions can change
            known = asked.search().where(both).select([self.key]).with_row_id(True).to_arrow()["_rowid"].to_numpy()
            chosen = known[np.linspace(0, len(known) - 1, min(count, len(known))).astype(int)].tolist()
            columns = {"key": self._row_key, "vector": self.space, "other": other}
            columns |= {"content": content} if content is not None else {}
            columns |= {"was": STATE} if other != self.space else {}
            read = {name: _quote(column) for name, column in columns.items()}
            found = asked.take_row_ids(chosen).select(read).to_arrow()
        if other != self.space:  # skip rows with an outdated other vector
            made_of = [(was or "")[:HASH] for was in found["was"].to_pylist()]
            same = [state == was for state, was in zip(_states(_array(found["vector"])), made_of, strict=True)]
            found = found.filter(pa.array(same, pa.bool_()))
        contents = found["content"].to_pylist() if content is not None else None
        rows = Rows(_ids(found["key"]), _array(found["vector"]), [""] * len(found), contents)
        return rows, _array(found["other"])

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        with plain_errors(self.uri):
            is_text = self.key != POSITION and _is_text(self.table.schema.field(self.key).type)
            listed = ", ".join("'" + item.replace("'", "''") + "'" if is_text else item for item in ids) or "NULL"
            asked = self.table.search().where(f"{_quote(self.key)} IN ({listed})").limit(len(ids))
            found = asked.select([*dict.fromkeys([self.key, *fields])]).to_arrow()
        return dict(zip(_ids(found[self.key]), found.select([*fields]).to_pylist(), strict=True))

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        if without is not None:
            self._set_row_ids()
        waiting = None
        for found in self._read(batch, space or self.space, without, content):
            waiting = pa.concat_tables([waiting, found]) if waiting is not None else found
            while len(waiting) >= batch:
                yield _rows(waiting.slice(0, batch))
                waiting = waiting.slice(batch)
        if waiting is not None and len(waiting):
            yield _rows(waiting)

    def _read(self, batch: int, space: str, without: str | None, content: str | None = None) -> Iterator[pa.Table]:
        """Read rows with their states, from one snapshot."""
        read = {"key": self._row_key, "vector": space} | ({"content": content} if content is not None else {})
        asked = {name: _quote(column) for name, column in read.items()}
        if without is not None:
            asked["there"] = f"{_quote(without)} IS NOT NULL"
            if without == self._followed_space():
                asked |= {"was": _quote(STATE)} | ({"now": _quote(without)} if without == self.space else {})
        with plain_errors(self.uri):
            query = self.table.search().where(f"{_quote(space)} IS NOT NULL").select(asked)
            for found in query.to_batches(batch):
                states = _states(_array(pa.chunked_array([found["vector"]])))
                table = pa.Table.from_batches([found]).append_column("state", pa.array(states, pa.string()))
                if without is not None:
                    table = table.filter(pa.array(_lacks(table), pa.bool_()))
                yield table.select([*read, "state"])

    def _followed_space(self) -> str | None:
        """Return the space with states: the migration's space, under its current name."""
        if (known := self.record("migration")) is None:
            return None
        return str(known["into"] if known["into"] in self.table.schema.names else known["space"])

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def name_model(self, space: str, model: Fingerprint) -> None:
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        said = {key.decode(): value.decode() for key, value in _metadata(model).items()}
        self._do(self.table.update_field_metadata, {"path": space, "metadata": said})

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        for column in (name, STATE):
            if column in self.table.schema.names:
                raise XcompatError(f"{self.uri} already has a column {column!r}; choose another name or drop it")
        if ROW_ID not in self.table.schema.names and not self._has_unique_ids():
            self._do(self.table.add_columns, {ROW_ID: "uuid()"})
        added = [pa.field(name, pa.list_(TYPES[dtype], dim), metadata=_metadata(model)), pa.field(STATE, pa.string())]
        self._do(self.table.add_columns, added)

    @override
    def notes(self, dim: int, dtype: str) -> list[str]:
        if self._has_unique_ids():
            return []
        why = "the table has no id column" if self.key == POSITION else f"{self.key} has missing or duplicate ids"
        return [f"{why}: start adds the column {ROW_ID} with unique ids, and finish drops it"]

    @override
    def write(self, space: str, rows: Rows) -> int:
        kind = self.table.schema.field(space).type
        flat = np.ascontiguousarray(rows.vectors_ND, kind.value_type.to_pandas_dtype()).reshape(-1)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(flat), type=kind)
        key = self._row_key
        ids = pa.array(rows.ids, pa.string()).cast(self.table.schema.field(key).type)
        states = [old + new for old, new in zip(rows.states, _states(_array(pa.chunked_array([vectors]))), strict=True)]
        written = pa.table({key: ids, space: vectors, STATE: pa.array(states, pa.string())})
        return int(self._do(self.table.merge_insert(key).when_matched_update_all().execute, written).num_updated_rows)

    @override
    def index_like(self, space: str) -> list[str]:
        """Copy the searched column's approximate indexes to another column, and update all indexes."""
        made, dim = [index.name for index in self._indexes(space)], self.spaces()[space].dim
        for index in self._indexes(self.space)[len(made) :]:
            with plain_errors(self.uri):  # index names survive earlier migrations
                taken = {other.name for other in self.table.list_indices()}
            name = next(name for number in count() if (name := f"{space}_idx{number or ''}") not in taken)
            distance = self.table.index_stats(index.name).distance_type
            self._do(self.table.create_index, space, config=copy_index_config(index, distance, dim), name=name)
            made.append(name)
        if self.table.list_indices():  # written rows moved outside all indexes
            self._do(self.table.optimize, cleanup_older_than=ALWAYS)
        return made

    @override
    def missing_indexes(self, space: str, like: str) -> list[str]:
        return [index.name for index in self._indexes(like)[len(self._indexes(space)) :]]

    @override
    def switch(self, space: str) -> None:
        if self.space + BEFORE not in self.table.schema.names:
            self._rename({self.space: self.space + BEFORE, space: self.space})

    @override
    def switch_back(self, space: str) -> None:
        if self.space + BEFORE in self.table.schema.names:
            self._rename({self.space: space, self.space + BEFORE: self.space})

    def _rename(self, names: dict[str, str]) -> None:
        """Rename columns in one commit."""
        self._do(self.table.alter_columns, *({"path": old, "rename": new} for old, new in names.items()))

    @override
    def drop_space(self, name: str) -> None:
        self._do(self.table.drop_columns, [column for column in (name, STATE) if column in self.table.schema.names])

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    @contextmanager
    def migration_lease(self) -> Iterator[None]:
        if self.folder is None:
            self._clear()
            with self.lease.hold():
                yield
            return
        with plain_errors(self.uri):
            lock = lock_writer(self.folder / f"{self.name}.lance")
        try:
            self._clear()
            yield
        finally:
            lock.release()

    def _clear(self) -> None:
        """Delete a killed process's empty records table."""
        records = self._open(self.name + RECORDS)
        with plain_errors(self.uri):
            if records is None or not records.count_rows():
                self.database.drop_table(self.name + RECORDS, ignore_missing=True)  # type: ignore[call-arg]  # the cloud lacks it

    @override
    def renew_lease(self) -> None:
        if self.folder is None:
            self.lease.renew()

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        if (records := self._open(self.name + RECORDS)) is None:
            return None
        with plain_errors(self.uri):
            found = records.search().where(f"key = '{key}'").select(["value"]).to_arrow()["value"].to_pylist()
        return json.loads(found[0]) if found else None

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        if key == "migration" and value is None and ROW_ID in self.table.schema.names:
            self._do(self.table.drop_columns, [ROW_ID])
        records = self._open(self.name + RECORDS)
        with plain_errors(self.uri):
            if value is not None:
                schema = pa.schema({"key": pa.string(), "value": pa.string()})
                records = records or self.database.create_table(self.name + RECORDS, schema=schema)
                said = pa.table({"key": [key], "value": [json.dumps(value)]}, schema)
                records.merge_insert("key").when_matched_update_all().when_not_matched_insert_all().execute(said)
            elif records is not None:
                records.delete(f"key = '{key}'")
                if not records.count_rows():  # an interrupted drop would restore an older version
                    records.optimize(cleanup_older_than=timedelta(milliseconds=1), delete_unverified=True)
                    self.database.drop_table(self.name + RECORDS)

    @override
    def close(self) -> None:
        return

    def _do(self, change: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Change the table, and retry after concurrent commits."""
        with plain_errors(self.uri):
            return RETRYING(change, *args, **options)


def _quote(column: str) -> str:
    return f"`{column}`"


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _metadata(model: Fingerprint) -> dict[bytes, bytes]:
    return {MODEL: json.dumps({"digest": model.digest, "name": model.name}).encode()}


def _ids(column: pa.ChunkedArray) -> list[str]:
    ids: list[str] = column.cast(pa.string()).to_pylist()
    return ids


def _array(column: pa.ChunkedArray) -> NDArray[np.float32]:
    """Return vectors (N, D) as a float32 copy. Missing numbers are NaN."""
    flat = column.combine_chunks().flatten()
    return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, column.type.list_size)


def _states(vectors_ND: NDArray[np.float32]) -> list[str]:
    return [xxhash.xxh3_64_hexdigest(vector_D) for vector_D in vectors_ND]


def _lacks(table: pa.Table) -> list[bool]:
    """Return for each row whether the other space lacks its vector.

    Args:
        table: columns ``state`` (the vector's) and ``there`` (whether the other vector exists). Optionally ``was`` (hashes at the
            last write) and ``now`` (current other vector, if searched). If a vector differs from ``was``, a service wrote it and
            it is newer.
    """
    there, states = table["there"].to_pylist(), table["state"].to_pylist()
    if "was" not in table.column_names:
        return [not one for one in there]
    was = [one or "" for one in table["was"].to_pylist()]
    lacks = [not one or known[:HASH] != state for one, known, state in zip(there, was, states, strict=True)]
    if "now" in table.column_names:
        for row in np.flatnonzero(np.logical_and(lacks, there)):
            lacks[row] = _states(np.array([table["now"][row].as_py()], np.float32))[0] == was[row][HASH:]
    return lacks


def _rows(table: pa.Table) -> Rows:
    contents = table["content"].to_pylist() if "content" in table.column_names else None
    return Rows(_ids(table["key"]), _array(table["vector"]), table["state"].to_pylist(), contents)


def open_store(uri: str) -> LanceStore:
    """Open a table by its address."""
    return LanceStore(StoreUri.parse(uri, OPTIONS, passes_on="+" in uri.partition(":")[0]))
