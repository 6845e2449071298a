"""Store for Qdrant collections migrated in place. Spaces are named vectors, and a switch changes the metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from qdrant_client import models
from qdrant_client.http.exceptions import UnexpectedResponse
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.stores.base import BEFORE, Rows, Space
from xcompat.stores.qdrant_collections import (
    STATE,
    Point,
    dense_vectors,
    hash_vector,
    metadata_of,
    plain_errors,
    space_of,
    vector_of,
)
from xcompat.stores.qdrant_store import NUMBERS, POINTS, QdrantStore

RECORD = "in_place"
"""Metadata key: the old ``vector``, the new ``into``, which of both is ``searched``, and the new ``model`` once it exists."""
OLDEST = (1, 18)
"""First version that adds named vectors to a collection."""
BYTES = 8
"""Size of a hash in the vector :data:`STATE`."""
SETTINGS = ("hnsw_config", "quantization_config", "on_disk", "memory")
"""Settings of a vector to copy."""


class QdrantVectors(QdrantStore):
    """Qdrant collection with named vectors, migrated in place.

    Qdrant cannot rename vectors: the metadata records which vector is searched. The vector ``xcompat_state`` holds a hash of the
    old vector that the new one was made of. Both are written in one operation, and payloads do not change.
    """

    renames: ClassVar[bool] = False

    @override
    def _choose_space(self, name: str) -> tuple[str, str, models.VectorParams]:
        self.collection, self.into = self._real(name), ""
        info = self._info(self.collection)
        begun, known, given = metadata_of(info).get(RECORD), dense_vectors(info), self.uri.options.get("vector")
        if begun is not None and given in (None, begun["vector"], begun["into"]):
            vector: str = begun["vector"]
            return vector, vector, known.get(vector) or known[begun["into"]]  # a killed finish can have deleted the first
        if not (vector := vector_of(self.uri, info)):
            raise XcompatError(
                f"{self.uri} has an unnamed vector, and Qdrant could not delete it after a migration in place; remove in_place= "
                "to migrate into a second collection"
            )
        return vector, vector, known[vector]

    # ------------------------------------------------------------------------------------------------- vectors

    @override
    def _home(self) -> str:
        return self.collection

    @override
    def _collection(self, space: str) -> str:
        return self.collection

    @override
    def _vector(self, space: str) -> str:
        if space not in self.names:
            self.spaces()
        return self.names[space]

    @override
    def _vectors_read(self, space: str) -> bool | list[str]:
        has_states = self.begun is not None and self.begun["model"] is not None
        return [self._vector(space), *([STATE] if has_states else [])]

    def _own_record(self, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the record of this vector's migration. The collection can have another vector's."""
        found: dict[str, Any] | None = metadata.get(RECORD)
        return found if found is not None and found["vector"] == self.vector else None

    @override
    def spaces(self) -> dict[str, Space]:
        info = self._info(self.collection)
        known, metadata = dense_vectors(info), metadata_of(info)
        self.begun = begun = self._own_record(metadata)
        if begun is None and self.vector not in known and self.into in known:  # after finish
            self.space = self.vector = self.into
            self.before = self.space + BEFORE
        names = {self.space: self.vector}
        if begun is not None:
            self.into = begun["into"]
            if begun["searched"] == self.into:
                names = {self.space: self.into, self.before: self.vector}
            elif begun["model"] is not None:
                names[self.into] = self.into
        self.names = {name: vector for name, vector in names.items() if vector in known}
        if self.space not in self.names:
            raise XcompatError(f"{self.uri} no longer has the vector {names[self.space]!r}; choose one with vector=")
        new = begun["model"] if begun is not None else None
        made_by = {self.into: new} if begun is not None else {}
        found = {name: made_by.get(vector, metadata.get("model")) for name, vector in self.names.items()}
        self.known = {name: space_of(name, known[self.names[name]], model) for name, model in found.items()}
        return dict(self.known)

    @override
    def _find_space(self, name: str, dim: int) -> Space:
        return self.spaces()[name]  # the same name can mean another vector of the same dimension

    # ------------------------------------------------------------------------------------------------- points

    @override
    def _point(self, found: models.Record | models.ScoredPoint, space: str) -> Point:
        vectors = dict(found.vector) if isinstance(found.vector, dict) else {}
        own_D = np.asarray(vectors.pop(self._vector(space), []), np.float64)
        found.vector = vectors
        return Point(found, own_D.astype(np.float32) if own_D.size else None, hash_vector(own_D, self.metric).hexdigest())

    @override
    def _lacking(self, space: str, other: str) -> Callable[[list[Point]], list[Point]]:
        vector, source = self._vector(space), self._vector(other)
        followed = self.begun is not None and (source, vector) == (self.begun["vector"], self.begun["into"])
        newer = {None} if space == self.space else set()

        def lacking(points: list[Point]) -> list[Point]:
            there = self._ids_with(vector, [point.rest.id for point in points])
            return [
                point
                for point in points
                if point.rest.id not in there or (followed and _stored_state(point) not in newer | {point.state})
            ]

        return lacking

    def _ids_with(self, vector: str, ids: list[Any]) -> set[Any]:
        """Return the ids of points with a vector."""
        wanted = models.Filter(must=[models.HasIdCondition(has_id=ids), models.HasVectorCondition(has_vector=vector)])
        with plain_errors(self.uri):
            found = self.client.scroll(self.collection, wanted, len(ids), with_payload=False)[0] if ids else []
        return {record.id for record in found}

    @override
    def write(self, space: str, rows: Rows) -> int:
        vector, points, written = self._vector(space), rows.copies or [], 0
        size = max(1, min(POINTS, NUMBERS // (rows.vectors_ND.shape[1] + BYTES)))
        for start in range(0, len(points), size):
            part = zip(points[start : start + size], rows.vectors_ND[start : start + size], strict=True)
            written += self._update(
                [
                    models.PointVectors(
                        id=point.rest.id, vector={vector: new_D.tolist(), STATE: [*map(float, bytes.fromhex(point.state))]}
                    )
                    for point, new_D in part
                ]
            )
        return written

    def _update(self, points: list[models.PointVectors]) -> int:
        """Write vectors of the points that still exist and have an old vector. Return their number."""
        unchanged = models.Filter(must=[models.HasVectorCondition(has_vector=self.vector)])
        while points:
            with plain_errors(self.uri):
                try:
                    self.client.update_vectors(self.collection, points, wait=True, update_filter=unchanged)
                    break
                except (KeyError, UnexpectedResponse) as error:  # a deleted point: KeyError in the local mode
                    if isinstance(error, UnexpectedResponse) and error.status_code != 404:
                        raise
                    kept = {found.id for found in self.client.retrieve(self.collection, [each.id for each in points], False)}
                    if len(kept) == len(points):
                        raise
            points = [each for each in points if each.id in kept]
        return len(points)

    @override
    def delete_orphans(self, space: str, like: str) -> int:
        return 0

    # ------------------------------------------------------------------------------------------------- migration

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        if self.embedded:
            return
        with plain_errors(self.uri):
            version = self.client.info().version
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise XcompatError(
                f"{self.uri} is Qdrant {version}, which cannot add vectors to collections; use 1.18 or later, or remove in_place="
            )

    @override
    def notes(self, dim: int, dtype: str) -> list[str]:
        return [f"Qdrant cannot rename vectors: after switch, your services must change {self.vector} to the new name (using=)"]

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        info = self._info(self.collection)
        self._require_no_shard_keys(info)
        params, begun = info.config.params, self._own_record(metadata_of(info))
        assert begun is not None, "set_record comes first"
        if begun["model"] is None:
            dense: Any = params.vectors or {}
            taken = {*dense, *(params.sparse_vectors or {}), self.before}
            if found := [vector for vector in (name, STATE) if vector in taken]:
                raise XcompatError(f"{self.uri} already has a vector {found[0]!r}; choose another name or delete it")
        self._note(self.collection, **{RECORD: {**begun, "model": {"digest": model.digest, "name": model.name}}})
        distance = dense_vectors(info)[self.vector].distance
        self._create(STATE, BYTES, models.Distance.EUCLID, "uint8")
        self._create(name, dim, distance, dtype)
        self._copy_settings(name)
        self.spaces()

    def _create(self, name: str, dim: int, distance: models.Distance, dtype: str) -> None:
        dense = models.DenseVectorConfig(size=dim, distance=distance, datatype=models.VectorStorageDatatype(dtype))
        with plain_errors(self.uri):
            self.client.create_vector_name(self.collection, name, models.DenseVectorNameConfig(dense=dense))

    def _copy_settings(self, name: str) -> None:
        """Give a vector the searched vector's settings, and build no graph of states."""
        known = dense_vectors(self._info(self.collection))
        old, new = known[self.vector], known[name]
        copied = {each: value for each in SETTINGS if (value := getattr(old, each, None)) not in (None, getattr(new, each, None))}
        changes = {name: models.VectorParamsDiff(**copied)} if copied else {}
        if known[STATE].hnsw_config is None:
            changes[STATE] = models.VectorParamsDiff(hnsw_config=models.HnswConfigDiff(m=0))
        if changes:
            with plain_errors(self.uri):
                self.client.update_collection(self.collection, vectors_config=changes)

    @override
    def name_model(self, space: str, model: Fingerprint) -> None:
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        said = {"digest": model.digest, "name": model.name}
        is_new = self.begun is not None and self.names[space] == self.into
        self._note(self.collection, **({RECORD: {**(self.begun or {}), "model": said}} if is_new else {"model": said}))
        self.spaces()

    @override
    def index_like(self, space: str) -> list[str]:
        """Complete the settings of a killed start, and wait until the vectors are indexed. Payload indexes are shared."""
        self._copy_settings(self._vector(space))
        self._wait_for_index(self.collection)
        return []

    @override
    def missing_indexes(self, space: str, like: str) -> list[str]:
        return []

    @override
    def switch(self, space: str) -> None:
        self._set_searched("into")

    @override
    def switch_back(self, space: str) -> None:
        self._set_searched("vector")

    def _set_searched(self, which: str) -> None:
        info = self._info(self.collection)
        begun = self._own_record(metadata_of(info))
        if begun is not None and begun[which] in dense_vectors(info):  # a killed finish can have deleted the old vector
            self._note(self.collection, **{RECORD: {**begun, "searched": begun[which]}})
            self.spaces()

    @override
    def drop_space(self, name: str) -> None:
        self._delete(self._vector(name))
        self.spaces()

    def _delete(self, vector: str) -> None:
        with plain_errors(self.uri):
            self.client.delete_vector_name(self.collection, vector)

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        metadata = self._read_metadata(self.collection)
        return None if key == "migration" and self._own_record(metadata) is None else metadata.get(key)

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        """Write a record. A migration's first record also marks the collection, and its end removes the mark."""
        if key != "migration":
            super().set_record(key, value)
            return
        begun = self._read_metadata(self.collection).get(RECORD)
        if begun is not None and begun["vector"] != self.vector:
            raise XcompatError(
                f"the vector {begun['vector']} of {self.uri} is already being migrated in place; run `xcompat migrate finish` or "
                f"`rollback` with vector={begun['vector']} first"
            )
        if value is not None:
            new = {"vector": self.vector, "into": value["into"], "searched": self.vector, "model": None}
            self._note(self.collection, migration=value, **{RECORD: begun or new})
        elif begun is not None:
            self._end(begun)
        self.spaces()

    def _end(self, begun: dict[str, Any]) -> None:
        """Delete all vectors of ours that are not searched, then the mark."""
        model = self.spaces()[self.space].fingerprint
        if begun["model"] is not None:
            for vector in {STATE, begun["into"]} - {begun["searched"]}:
                self._delete(vector)
        said = {"digest": model.digest, "name": model.name} if model is not None else None
        self._note(self.collection, migration=None, model=said, **{RECORD: None})


def _stored_state(point: Point) -> str | None:
    """Return the hash of the old vector that the new one was made of, or None if a service wrote the new one."""
    found: Any = (point.rest.vector or {}).get(STATE)  # type: ignore[union-attr]
    return bytes(np.rint(found).astype(np.uint8)).hex() if found is not None else None
