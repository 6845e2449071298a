"""Store for Milvus, a server or a Milvus Lite file. Spaces are collections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import Any

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, UNKNOWN, Rows, Space, Store
from xcompat.stores.lease import Lease
from xcompat.stores.milvus_client import lite_file, plain_errors
from xcompat.stores.milvus_lite import load_collection
from xcompat.stores.milvus_records import COLLECTION, IN_PLACE, Records
from xcompat.stores.milvus_schema import MARK, STATE, indexes_like, mark_of, require_copyable, schema_like
from xcompat.stores.uri import StoreUri

METRICS: dict[str, Metric] = {"COSINE": "cosine", "IP": "ip", "L2": "l2"}
BYTES = 2**25
"""Maximum bytes of vectors per call. Milvus accepts 64 MB."""
STRONG = {"consistency_level": "Strong"}


class MilvusStore(Store):
    """Milvus collection or alias, and its copy with new vectors."""

    _most = 16_000  # rows per call, Milvus accepts 16,384

    def __init__(self, uri: StoreUri, client: MilvusClient, records: Records) -> None:
        self.uri, self.client, self.records = uri, client, records
        self.space = records.about
        self._lease = Lease(self)
        made = self._open_collection()
        self.key, self.numeric = next(
            (one["name"], one["type"] == DataType.INT64) for one in made["fields"] if "is_primary" in one
        )
        self.automatic = bool(made.get("auto_id"))
        self.field = self._vector_field([one["name"] for one in made["fields"] if one["type"] == DataType.FLOAT_VECTOR])
        self.metric = self._metric(made["collection_name"])
        self._searched: dict[str, Space] = {}

    # ------------------------------------------------------------------------------------------------- collections

    def _open_collection(self) -> dict[str, Any]:
        """Load the collections, and return the description of the searched one."""
        for name in {self.space, *self.added_spaces()}:
            self._load(name)
        halfway = not self._is_there(self.space) and self._is_there(self.space + BEFORE)  # in the middle of a switch
        return self._describe_collection(self.space + BEFORE if halfway else self.space)

    def _load(self, name: str) -> None:
        """Load a collection if it exists. Milvus Lite releases all collections when its process ends."""
        if self._is_there(name):
            with plain_errors(self.uri):
                load_collection(self.client, name, lite_file(self.uri))

    def _is_there(self, name: str) -> bool:
        with plain_errors(self.uri):
            return bool(self.client.has_collection(name))

    def _describe_collection(self, name: str) -> dict[str, Any]:
        with plain_errors(self.uri):
            if not self.client.has_collection(name):
                names = [one for one in self.client.list_collections() if one != COLLECTION]
                raise XcompatError(f"{self.uri}: there is no collection {name!r}; {nearest(name, names)}")
            return dict(self.client.describe_collection(name))

    def _aliased_collection(self, alias: str) -> str | None:
        try:
            return str(self.client.describe_alias(alias)["collection_name"])
        except MilvusException:
            return None

    def _vector_field(self, known: list[str]) -> str:
        given = self.uri.options.get("field")
        if given is not None and given not in known:
            raise XcompatError(f"{self.uri}: {given!r} is not a float vector field; {nearest(given, known)}")
        if given is None and len(known) != 1:
            raise XcompatError(f"{self.uri} has these float vector fields: {', '.join(known) or 'none'}; choose one with field=")
        return given or known[0]

    def _metric(self, collection: str) -> Metric:
        with plain_errors(self.uri):
            names = self.client.list_indexes(collection, field_name=self.field)
            found = self.client.describe_index(collection, names[0])["metric_type"] if names else "COSINE"
        if found not in METRICS:
            raise XcompatError(f"{self.uri}: {self.field} has metric {found}; only {', '.join(METRICS)} are supported")
        return METRICS[found]

    def _collection(self, space: str) -> str:
        """Return the collection or alias with a space's vectors."""
        return space

    def _field(self, space: str) -> str:
        """Return the name of a space's vector field."""
        return self.field

    def _fields_read(self, space: str, content: str | None) -> list[str]:
        """Return the fields to read with a space's rows."""
        return ["*"]

    @override
    def added_spaces(self) -> set[str]:
        copying = self._copying()
        return {copying["into"], copying["space"] + BEFORE} if copying else set()

    def _copying(self) -> dict[str, Any]:
        """Return the record of a migration into a second collection, or an empty one."""
        found = self.records.read("migration") or {}
        return found if IN_PLACE not in found else {}

    @override
    def spaces(self) -> dict[str, Space]:
        names = sorted(name for name in {self.space, *self.added_spaces()} if self._is_there(name))
        known = {name: self._space(name) for name in names}
        into = self._copying().get("into")  # not ours without a record of its model
        self._searched = {name: one for name, one in known.items() if name != into or one.fingerprint is not None}
        return dict(self._searched)

    def _space(self, name: str) -> Space:
        fields = {one["name"]: one for one in self._describe_collection(self._collection(name))["fields"]}
        model = self._model(name)
        known = Fingerprint(model["digest"], model["name"]) if model else None
        return Space(name, int(fields[self._field(name)]["params"]["dim"]), "float32", known)

    def _identity(self, name: str) -> str:
        """Return a permanent name: a copy's mark, else the name before a switch."""
        return mark_of(self._describe_collection(name)) or name.removesuffix(BEFORE)

    def _model_key(self, collection: str, field: str) -> str:
        """Return the key of the record of a field's model."""
        return f"model/{self._identity(collection)}/{field}"

    def _model(self, space: str) -> dict[str, Any] | None:
        """Return a space's record: its model and its source collection."""
        return self.record(self._model_key(self._collection(space), self._field(space)))

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        name = space or self.space
        if not self._is_there(self._collection(name)):  # during a switch or after finish
            return 0
        compared = without is not None and self._has_rows(without)  # else no row has one
        if compared or (space is not None and self._is_nullable(name)):
            return sum(len(rows.ids) for rows in self.rows(self._most, without=without, space=name))
        with plain_errors(self.uri):
            found = self.client.query(self._collection(name), filter="", output_fields=["count(*)"], **STRONG)
        return int(found[0]["count(*)"])

    def _has_rows(self, space: str) -> bool:
        return self.count(space) > 0

    def _is_nullable(self, space: str) -> bool:
        """Return whether rows of a space can lack a vector. Milvus 3 has such fields."""
        fields = self._describe_collection(self._collection(space))["fields"]
        return any(one["name"] == self._field(space) and one.get("nullable") for one in fields)

    @override
    def ids_without_vector(self, count: int) -> list[str]:
        field = self._field(self.space)
        rows = chain.from_iterable(self._pages(self.space, self._most, [self.key, field]))
        return [str(row[self.key]) for row in islice((row for row in rows if row[field] is None), count)]

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        own = self._find_space(space or self.space)
        queries_QD = self.queries(vectors_QD, own)
        asked: dict[str, Any] = {"anns_field": self._field(own.name), "limit": top_k, "output_fields": [self.key]}
        with plain_errors(self.uri):
            found = self.client.search(self._collection(own.name), data=list(queries_QD), filter=filter or "", **asked)
        version, sign = own.fingerprint or UNKNOWN, -1 if self.metric == "l2" else 1
        return [[Hit(str(hit[self.key]), sign * hit["distance"], version, None) for hit in hits] for hits in found]

    def _find_space(self, name: str) -> Space:
        if name not in self._searched:
            self.spaces()
        return self._searched[name]

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        step = max(1, self.count() // max(count, 1))
        pages = self._pages(self.space, self._most, [self.key])
        ids = [row[self.key] for row in islice(chain.from_iterable(pages), 0, step * count, step)]
        rows = self._rows(list(self._get(self.space, ids, self._fields_read(self.space, content)).values()), self.space, content)
        stale, field = set(self._lacking(other, self.space, rows).ids), self._field(other)
        found = self._get(other, ids, [self.key, field])
        others = {str(item): row[field] for item, row in found.items() if str(item) not in stale}
        rows = rows.pick([at for at, item in enumerate(rows.ids) if item in others])
        return rows, np.array([others[item] for item in rows.ids], np.float32).reshape(len(rows.ids), self._space(other).dim or 0)

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = self._get(self.space, [int(item) for item in ids] if self.numeric else [*ids], [self.key, *fields])
        return {str(item): {name: row[name] for name in fields if name in row} for item, row in found.items()}

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        name = space or self.space
        there = without is not None and self._is_there(self._collection(without))
        dim, fields = self._space(name).dim or 1, self._fields_read(name, content)
        for page in self._pages(name, min(batch, self._most, max(1, BYTES // (4 * dim))), fields, after):
            rows = self._rows(page, name, content)
            if without is not None and there:
                rows = self._lacking(without, name, rows)
            if rows.ids:
                yield rows

    def _pages(self, space: str, limit: int, fields: list[str], after: str | None = None, where: str = "") -> Iterator[list[Any]]:
        """Read rows in id order.

        Each page has its own iterator, because pymilvus does not quote the id to continue from.
        """
        name, last = self._collection(space), after if after is None or not self.numeric else int(after)
        while True:
            asked = [where] * bool(where) + ([f"{self.key} > {_literal(last)}"] if last is not None else [])
            with plain_errors(self.uri):
                pages = self.client.query_iterator(name, limit, filter=" and ".join(asked), output_fields=fields, **STRONG)
                page = pages.next()
                pages.close()
            if not page:
                return
            yield page
            last = page[-1][self.key]

    def _rows(self, page: list[Any], space: str, content: str | None) -> Rows:
        field = self._field(space)
        page = [row for row in page if row[field] is not None]
        vectors_ND = np.array([row[field] for row in page], np.float32)
        ids = [str(row[self.key]) for row in page]
        contents = [row.get(content) for row in page] if content is not None else None
        copies = [self._copy(row, field) for row in page]
        states = [self._state(*each) for each in zip(page, vectors_ND, copies, strict=True)]
        return Rows(ids, vectors_ND, states, contents, copies)

    def _copy(self, row: dict[str, Any], field: str) -> dict[str, Any]:
        """Return the other fields of a row."""
        return {name: value for name, value in row.items() if name not in (field, STATE)}

    def _state(self, row: dict[str, Any], vector_D: NDArray[np.float32], copy: dict[str, Any]) -> str:
        """Return a value that changes with a row."""
        return xxhash.xxh3_64_hexdigest(vector_D.tobytes() + json.dumps(copy, sort_keys=True, default=list).encode())

    def _lacking(self, other: str, own: str, rows: Rows) -> Rows:
        """Return the rows missing or outdated in another collection."""
        copied = (self._model(other) or {}).get("source") == self._identity(own)  # else its states belong to other rows
        held = self._get(other, [copy[self.key] for copy in rows.copies or []], [self.key, *[STATE] * copied])
        kept = {str(item): row.get(STATE) for item, row in held.items()}
        newer = {None} if other == self.space or not copied else set()
        lacks = [
            number
            for number, (item, state) in enumerate(zip(rows.ids, rows.states, strict=True))
            if item not in kept or kept[item] not in newer | {state}
        ]
        return rows.pick(lacks)

    def _get(self, space: str, ids: list[Any], fields: list[str]) -> dict[Any, Any]:
        """Return the existing rows by key."""
        name, found = self._collection(space), dict[Any, Any]()
        for start in range(0, len(ids), self._most):
            with plain_errors(self.uri):
                rows = self.client.query(name, f"{self.key} in {_literal(ids[start : start + self._most])}", fields, **STRONG)
            found |= {row[self.key]: row for row in rows}
        return found

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        if dtype != "float32":
            raise XcompatError(f"{self.uri}: xcompat only writes float32 vectors into Milvus; remove --dtype")

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        self.check_space(dim, dtype)
        for taken in (name, self.space + BEFORE):
            if self._is_there(taken):
                raise XcompatError(f"{self.uri} already has a collection {taken!r}; choose another name or drop it")
        made = self._describe_collection(self.space)
        if lost := self.count() - self.count(self.space):
            raise XcompatError(f"{self.uri}: a copy would lose {lost:,} rows without a vector; delete them, or use in_place=true")
        with plain_errors(self.uri):
            require_copyable(str(self.uri), made, self.client.list_partitions(self.space))
            indexes = [self.client.describe_index(self.space, index) for index in self.client.list_indexes(self.space)]
            like = schema_like(made, self.field, dim)
        known = {"digest": model.digest, "name": model.name, "source": self._identity(self.space)}
        self.set_record(f"model/{like['properties'][MARK]}/{self.field}", known)  # first: a collection without it is not ours
        try:
            with plain_errors(self.uri):
                self.client.create_collection(name, index_params=indexes_like(indexes), **like)
                if mark_of(self._describe_collection(name)) is None:
                    raise XcompatError(f"{self.uri}: this Milvus version does not store collection properties; update Milvus")
        except XcompatError:
            self.client.drop_collection(name)  # it can exist without indexes
            raise

    @override
    def name_model(self, space: str, model: Fingerprint) -> None:
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        what = {**(self._model(space) or {}), "digest": model.digest, "name": model.name}
        self.set_record(self._model_key(self._collection(space), self._field(space)), what)

    @override
    def write(self, space: str, rows: Rows) -> int:
        new = [
            {**copy, self.field: vector_D, STATE: state}
            for copy, vector_D, state in zip(rows.copies or [], rows.vectors_ND, rows.states, strict=True)
        ]
        most = max(1, min(self._most, BYTES // max(rows.vectors_ND[:1].nbytes, 1)))
        for start in range(0, len(new), most):
            piece = new[start : start + most]
            with plain_errors(self.uri):
                if self.automatic:  # an upsert would assign other ids
                    self._delete(space, [row[self.key] for row in piece])
                    made = self.client.insert(space, piece)["ids"]
                    if list(made) != [row[self.key] for row in piece]:
                        raise XcompatError(
                            f"{self.uri}: this Milvus version assigns other ids to copies (auto_id); update Milvus"
                        )
                else:
                    self.client.upsert(space, piece)
        return len(new)

    def _delete(self, space: str, ids: list[object]) -> None:
        with plain_errors(self.uri):
            for start in range(0, len(ids), self._most):
                self.client.delete(space, filter=f"{self.key} in {_literal(ids[start : start + self._most])}")

    @override
    def delete_orphans(self, space: str, like: str) -> int:
        stale: list[Any] = []
        for page in self._pages(space, self._most, [self.key], where=f"{STATE} is not null" if space == self.space else ""):
            ids = [row[self.key] for row in page]
            stale += set(ids).difference(self._get(like, ids, [self.key]))
        self._delete(space, stale)
        return len(stale)

    @override
    def index_like(self, space: str) -> list[str]:
        """Flush rows from memory. The indexes exist since the collection's creation."""
        with plain_errors(self.uri):
            self.client.flush(space)
        return []

    @override
    def switch(self, space: str) -> None:
        """Point the alias at the new collection, atomically. Without an alias, rename both collections."""
        self._searched = {}
        old, before = self._aliased_collection(self.space), self.space + BEFORE
        with plain_errors(self.uri):
            if old is not None:
                if not self._is_there(before):
                    self.client.create_alias(old, before)
                if old != space:
                    self.client.alter_alias(space, self.space)
                return
        if not self._is_there(before):
            self._rename(self.space, before)
        if self._is_there(space):
            self._rename(space, self.space)

    @override
    def switch_back(self, space: str) -> None:
        self._searched = {}
        new, before = self._aliased_collection(self.space), self.space + BEFORE
        if not self._is_there(before):
            return
        with plain_errors(self.uri):
            if new is not None:
                if new == space:
                    self.client.alter_alias(self._aliased_collection(before), self.space)
                self.client.drop_alias(before)
                return
        if self._is_there(self.space):
            self._rename(self.space, space)
        self._rename(before, self.space)

    def _rename(self, old: str, new: str) -> None:
        with plain_errors(self.uri):
            self.client.rename_collection(old, new)
            self.client.load_collection(new)  # Milvus Lite releases renamed collections

    @override
    def drop_space(self, name: str) -> None:
        self._searched = {}
        known = self._model_key(name, self.field)
        with plain_errors(self.uri):
            if (collection := self._aliased_collection(name)) is not None:
                self.client.drop_alias(name)
            self.client.drop_collection(collection or name)
        self.set_record(known, None)

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def migration_lease(self) -> AbstractContextManager[None]:
        return self._lease.hold()

    @override
    def renew_lease(self) -> None:
        self._lease.renew()

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        found = self.records.read(key)
        if found is not None and IN_PLACE in found:
            raise XcompatError(f"{self.uri} is being migrated in place; open it again")
        return found

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        self.records.write(key, value)

    @override
    def close(self) -> None:
        self.client.close()


def _literal(value: object) -> str:
    """Return ids as a Milvus expression."""
    return json.dumps(value, ensure_ascii=False)
