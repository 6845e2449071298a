"""A stand-in for a Milvus 3 server: Milvus Lite with vector fields that are added, dropped and updated alone.

Milvus Lite has none of these. The stand-in does what the tests of Milvus 3 ask of a server: rows have no vector in a new field, a
field is searched after an index and a reload, and a partial update of a row that does not exist is refused as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient
from pymilvus.client.types import LoadState, ReplicaInfo
from pymilvus.exceptions import MilvusException

EVERY = 16_000
"""Rows per query, as many as Milvus Lite allows."""


class Server:
    """What all clients of one file share.

    Args:
        file: of Milvus Lite.
        version: that the server reports.
    """

    def __init__(self, file: Path, version: str = "v3.0.1") -> None:
        self.file, self.version, self.lock = file, version, threading.RLock()
        self.added: dict[str, dict[str, dict[str, Any]]] = {}
        self.dropped: dict[str, set[str]] = {}
        self.indexes: dict[str, dict[str, dict[str, Any]]] = {}
        self.searchable: dict[str, set[str]] = {}
        self.values: dict[str, dict[Any, dict[str, Any]]] = {}
        self.reloads: list[dict[str, Any]] = []
        self.fails_to_load = False

    def connect(self, *_: Any) -> Client:
        client = Client(str(self.file))
        client.server = self
        return client


def locked(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let one client after the other call, so that a partial update sees no other write."""

    def alone(self: Client, *args: Any, **options: Any) -> Any:
        with self.server.lock:
            return call(self, *args, **options)

    return alone


class Client(MilvusClient):
    """A client of the stand-in."""

    server: Server

    def get_server_version(self, *_: Any, **__: Any) -> str:
        return self.server.version

    def _real(self, name: str) -> str:
        return str(super().describe_collection(name)["collection_name"])

    def _added(self, name: str) -> dict[str, dict[str, Any]]:
        return self.server.added.setdefault(self._real(name), {})

    def _values(self, name: str) -> dict[Any, dict[str, Any]]:
        return self.server.values.setdefault(self._real(name), {})

    def _key(self, name: str) -> str:
        made = super().describe_collection(name)["fields"]
        return next(str(one["name"]) for one in made if "is_primary" in one)

    # ------------------------------------------------------------------------------------------------- schemas

    @locked
    def describe_collection(self, name: str, *args: Any, **options: Any) -> Any:
        found = super().describe_collection(name, *args, **options)
        dropped = self.server.dropped.get(found["collection_name"], set())
        kept = [one for one in found["fields"] if one["name"] not in dropped]
        return {**found, "fields": [*kept, *self.server.added.get(found["collection_name"], {}).values()]}

    @locked
    def add_collection_field(self, name: str, field: str, kind: DataType, *, nullable: bool, **params: int) -> None:
        if not nullable or any(one["name"] == field for one in self.describe_collection(name)["fields"]):
            raise MilvusException(message=f"field {field} cannot be added")
        self._added(name)[field] = {"name": field, "type": kind, "params": params, "nullable": True}

    @locked
    def drop_collection_field(self, name: str, field: str) -> None:
        vectors = [one["name"] for one in self.describe_collection(name)["fields"] if one["type"] == DataType.FLOAT_VECTOR]
        if vectors == [field]:
            raise MilvusException(message="the last vector field cannot be dropped")
        if self._added(name).pop(field, None) is None:
            self.server.dropped.setdefault(self._real(name), set()).add(field)
        self.server.indexes.get(self._real(name), {}).pop(field, None)
        self.server.searchable.get(self._real(name), set()).discard(field)
        for values in self._values(name).values():
            values.pop(field, None)

    @locked
    def create_index(self, name: str, params: Any, *args: Any, **options: Any) -> None:
        for one in params:
            if one.field_name not in self._added(name):
                super().create_index(name, params, *args, **options)
                return
            found = {"index_type": one.index_type, "field_name": one.field_name, "index_name": one.index_name}
            more = {key: value for key, value in one.to_dict().items() if key not in found}
            self.server.indexes.setdefault(self._real(name), {})[one.field_name] = {**found, **more}

    @locked
    def list_indexes(self, name: str, field_name: str = "", **_: Any) -> list[str]:
        dropped = self.server.dropped.get(self._real(name), set())
        own = [index for index in super().list_indexes(name, field_name) if index not in dropped]
        added = self.server.indexes.get(self._real(name), {}).values()
        return [*own, *(one["index_name"] for one in added if field_name in ("", one["field_name"]))]

    @locked
    def describe_index(self, name: str, index: str, *args: Any, **options: Any) -> Any:
        added = self.server.indexes.get(self._real(name), {}).values()
        mine = next((one for one in added if one["index_name"] == index), None)
        return mine or super().describe_index(name, index, *args, **options)

    @locked
    def load_collection(self, name: str, *args: Any, **options: Any) -> None:
        indexed = self.server.indexes.get(self._real(name), {}).keys()
        vectors = {field for field, one in self._added(name).items() if one["type"] == DataType.FLOAT_VECTOR}
        if missing := vectors - indexed:
            raise MilvusException(message=f"there is no vector index on field: {sorted(missing)}, please create index first")
        if "replica_number" in options:
            self.server.reloads.append({key: value for key, value in options.items() if key != "_async"})
        if self.server.fails_to_load and name != "xcompat_records":
            raise MilvusException(message="insufficient memory")
        super().load_collection(name)
        self.server.searchable[self._real(name)] = vectors

    @locked
    def release_collection(self, name: str, *args: Any, **options: Any) -> None:
        self.server.searchable.pop(self._real(name), None)
        super().release_collection(name, *args, **options)

    @locked
    def describe_replica(self, name: str, *_: Any, **__: Any) -> list[ReplicaInfo]:
        if self.get_load_state(name)["state"] != LoadState.Loaded:
            raise MilvusException(message="collection not loaded")
        return [ReplicaInfo(number, [], [], group, {}) for number, group in enumerate(("fast", "fast", "slow"))]

    @locked
    def drop_collection(self, name: str, *args: Any, **options: Any) -> None:
        if self.has_collection(name):
            for kept in (self.server.added, self.server.dropped, self.server.indexes, self.server.values):
                kept.pop(self._real(name), None)
        super().drop_collection(name, *args, **options)

    # ------------------------------------------------------------------------------------------------- rows

    @locked
    def insert(self, name: str, data: Any, **_: Any) -> Any:
        return self._put(name, data, super().insert)

    @locked
    def upsert(self, name: str, data: Any, *, partial_update: bool = False, **_: Any) -> Any:
        if not partial_update:
            return self._put(name, data, super().upsert)
        key, rows = self._key(name), data if isinstance(data, list) else [data]
        held = {row[key]: row for row in self.query(name, f"{key} in {[row[key] for row in rows]}", ["*"])}
        fields = self.describe_collection(name)["fields"]
        required = {one["name"] for one in fields if not one.get("nullable") and one.get("default_value") is None}
        if any(row[key] not in held and required - row.keys() for row in rows):
            raise MilvusException(message=f"fieldSchema({min(required)}) has no corresponding fieldData pass in")
        return self._put(name, [{**held.get(row[key], {}), **row} for row in rows], super().upsert)

    def _put(self, name: str, data: Any, write: Callable[..., Any]) -> Any:
        rows, added = data if isinstance(data, list) else [data], self._added(name)
        dropped = self.server.dropped.get(self._real(name), set())
        made = super().describe_collection(name)["fields"]
        dims = {one["name"]: one["params"].get("dim") for one in made if one["name"] in dropped}
        empty = {field: [0.0] * int(dim) if dim is not None else None for field, dim in dims.items()}
        for field, one in added.items():
            sizes = {len(row[field]) for row in rows if row.get(field) is not None and one["type"] == DataType.FLOAT_VECTOR}
            if sizes - {one["params"].get("dim")}:
                raise MilvusException(message=f"the length of {field} is wrong: {sizes}")
        done = write(name, [{key: value for key, value in {**row, **empty}.items() if key not in added} for row in rows])
        values, key = self._values(name), self._key(name)
        for row in rows if added else ():
            values[row[key]] = {field: row[field] for field in added if row.get(field) is not None}
        return done

    @locked
    def delete(self, name: str, ids: Any = None, *args: Any, filter: str = "", **options: Any) -> Any:  # noqa: A002
        if values := self._values(name):
            found = (
                list(ids) if ids is not None else [row[self._key(name)] for row in self.query(name, filter, [self._key(name)])]
            )
            for item in found:
                values.pop(item, None)
        return super().delete(name, ids, *args, filter=filter, **options)

    @locked
    def query(self, name: str, filter: str = "", output_fields: Any = None, **options: Any) -> Any:  # noqa: A002
        fields, key = output_fields or [], self._key(name)
        if "count(*)" in fields or not self._added(name):
            return super().query(name, filter, output_fields, **options)
        own = [field for field in fields if field not in self._added(name)]
        found = super().query(name, filter, list({*own, key}), **({"limit": EVERY} | options))
        return self._with_added(name, found, fields)

    def _with_added(self, name: str, rows: list[Any], fields: list[str]) -> list[dict[str, Any]]:
        dropped, values, key = self.server.dropped.get(self._real(name), set()), self._values(name), self._key(name)
        added = [field for field in self._added(name) if field in fields or "*" in fields]
        return [
            {field: value for field, value in dict(row).items() if field not in dropped}
            | {field: plain(values.get(row[key], {}).get(field)) for field in added}
            for row in rows
        ]

    @locked
    def get(self, name: str, ids: Any, output_fields: Any = None, **options: Any) -> Any:
        if not self._added(name):
            return super().get(name, ids, output_fields, **options)
        return self.query(name, f"{self._key(name)} in {list(ids)}", output_fields)

    @locked
    def query_iterator(self, name: str, limit: int, *, filter: str = "", output_fields: Any = None, **options: Any) -> Any:  # noqa: A002
        added = self._added(name)
        own = [field for field in output_fields if field not in added]
        pages = super().query_iterator(name, limit, filter=filter, output_fields=own or [self._key(name)], **options)
        return Pages(self, name, pages, output_fields) if added else pages

    @locked
    def search(self, name: str, data: Any, *, filter: str = "", anns_field: str = "", limit: int = 10, **options: Any) -> Any:  # noqa: A002
        fields = [one["name"] for one in self.describe_collection(name)["fields"] if one["type"] == DataType.FLOAT_VECTOR]
        if not anns_field and len(fields) > 1:
            raise MilvusException(message="multiple anns_fields exist, please specify a anns_field in search_params")
        anns_field = anns_field or fields[0]
        if anns_field in self.server.dropped.get(self._real(name), set()):
            raise MilvusException(message=f"field {anns_field} not exist")
        if anns_field not in self._added(name):
            return super().search(name, data, filter, limit, anns_field=anns_field, **options)
        if anns_field not in self.server.searchable.get(self._real(name), set()):
            raise MilvusException(message=f"field {anns_field} is not loaded, please reload the collection")
        key, index = self._key(name), self.server.indexes[self._real(name)][anns_field]
        held = {item: values[anns_field] for item, values in self._values(name).items() if anns_field in values}
        wanted = [row[key] for row in self.query(name, filter, [key])] if filter else list(held)
        keys = [item for item in wanted if item in held]
        dim = self._added(name)[anns_field]["params"]["dim"]
        if any(len(query) != dim for query in data):
            raise MilvusException(message="vector dimension mismatch")
        vectors = np.array([held[item] for item in keys], np.float32).reshape(-1, dim)
        return [nearest(np.asarray(query), vectors, keys, key, limit, index["metric_type"]) for query in data]


class Pages:
    """The pages of an iterator, with the fields that were added."""

    def __init__(self, client: Client, name: str, pages: Any, fields: list[str]) -> None:
        self.client, self.name, self.pages, self.fields = client, name, pages, fields

    def next(self) -> list[dict[str, Any]]:
        with self.client.server.lock:
            return self.client._with_added(self.name, self.pages.next(), self.fields)

    def close(self) -> None:
        self.pages.close()


def plain(value: Any) -> Any:
    """Return a value as a server does: vectors as lists of numbers in single precision."""
    return np.asarray(value, np.float32).tolist() if value is not None and not isinstance(value, str) else value


def nearest(query: np.ndarray, vectors: np.ndarray, keys: list[Any], key: str, limit: int, metric: str) -> list[dict[str, Any]]:
    """Compare a query with all vectors, as an index of the metric does."""
    scores = vectors @ query
    if metric == "COSINE":
        scores = scores / np.maximum(np.linalg.norm(vectors, axis=1) * np.linalg.norm(query), 1e-30)
    if metric == "L2":
        scores = -np.square(vectors - query).sum(1)
    order = np.argsort(-scores, kind="stable")[:limit]
    return [{key: keys[row], "distance": float(abs(scores[row]) if metric == "L2" else scores[row])} for row in order]
