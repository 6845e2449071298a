"""Store for Milvus collections migrated in place. Spaces are vector fields, and a switch changes a record."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import numpy as np
import xxhash
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient
from pymilvus.client.types import LoadState
from pymilvus.exceptions import MilvusException
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import advance_bar, progress_bar
from xcompat.stores.base import BEFORE, Rows, Space
from xcompat.stores.milvus_client import lite_file, plain_errors
from xcompat.stores.milvus_records import IN_PLACE, Records
from xcompat.stores.milvus_schema import STATE, indexes_like, mark_of
from xcompat.stores.milvus_store import BYTES, STRONG, MilvusStore
from xcompat.stores.uri import StoreUri

ROWS = 1_000
"""Maximum rows per partial update. Milvus reads and rewrites them with all their fields."""
OLDEST = (3, 0, 1)
"""First version that adds vector fields, and whose partial updates do not undo simultaneous writes."""
DIGITS = 16
"""Length of a hash. The field :data:`STATE` holds the old vector's and the new one's."""


class Change(TypedDict):
    """State of a migration in place.

    Args:
        field: the old field.
        into: the new field.
        searched: which of both is searched.
        step: ``planned``, ``adding`` once fields of ours can exist, ``ready`` once the new field is searchable.
        load: options to load the collection as before.
    """

    field: str
    into: str
    searched: str
    step: Literal["planned", "adding", "ready"]
    load: NotRequired[dict[str, Any]]


class MilvusFields(MilvusStore):
    """Milvus collection with vector fields, migrated in place.

    Milvus cannot rename fields: the migration's record says which field is searched. A new vector is written with the field
    ``xcompat_state`` in one partial update, and no other field changes.
    """

    renames: ClassVar[bool] = False

    def __init__(self, uri: StoreUri, client: MilvusClient, records: Records) -> None:
        super().__init__(uri, client, records)
        self.space = self.change["field"] if self.change is not None and self._is_own(self.change) else self.field
        self.spaces()

    # ------------------------------------------------------------------------------------------------- fields

    @override
    def _open_collection(self) -> dict[str, Any]:
        self.change, self.into, self.vector_fields = self._read_change(), "", dict[str, str]()
        description = self._describe_collection(self.records.about)
        if not self._is_loaded() and (self.change is None or self.change["step"] != "adding"):  # the new field may lack an index
            self._load(self.records.about)
        return description

    def _is_loaded(self) -> bool:
        with plain_errors(self.uri):
            return bool(self.client.get_load_state(self.records.about)["state"] == LoadState.Loaded)

    @override
    def _load(self, name: str) -> None:
        if self.change is None or "load" not in self.change:
            super()._load(name)
            return
        with plain_errors(self.uri):
            self.client.load_collection(name, **self.change["load"])

    @override
    def _vector_field(self, known: list[str]) -> str:
        given, change = self.uri.options.get("field"), self.change
        if change is not None and given in (None, change["field"], change["into"]):
            return change["field"] if change["field"] in known else change["into"]  # a killed finish can have dropped it
        return super()._vector_field(known)

    def _fields(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self._describe_collection(self.records.about)["fields"]}

    @override
    def _collection(self, space: str) -> str:
        return self.records.about

    @override
    def _field(self, space: str) -> str:
        if space not in self.vector_fields:
            self.spaces()
        return self.vector_fields[space]

    @override
    def _fields_read(self, space: str, content: str | None) -> list[str]:
        named, fields = [self.key, self._field(space)], self._fields()
        if self.change is not None and self.change["step"] == "ready":
            named += [name for name in (self.change["field"], self.change["into"], STATE) if name in fields]
        return list(dict.fromkeys([*named, *([content] if content is not None else [])]))

    def _read_change(self) -> Change | None:
        change: Change | None = (self.records.read("migration") or {}).get(IN_PLACE)
        return change

    def _is_own(self, change: Change) -> bool:
        """Return whether a change is this field's. The collection can have another field's."""
        return self.field in (change["field"], change["into"])

    @override
    def spaces(self) -> dict[str, Space]:
        known, change = self._fields(), self._read_change()
        self.change = change if change is not None and self._is_own(change) else None
        if self.change is None and self.space not in known and self.into in known:  # after finish
            self.space = self.field = self.into
        found = {self.space: self.field}
        if self.change is not None:
            self.into = self.change["into"]
            if self.change["searched"] == self.into:
                found = {self.space: self.into, self.space + BEFORE: self.change["field"]}
            elif self.change["step"] == "ready":
                found[self.into] = self.into
        self.vector_fields = {name: field for name, field in found.items() if field in known}
        if self.space not in self.vector_fields:
            raise XcompatError(f"{self.uri} no longer has the field {self.field!r}; choose one with field=")
        self._searched = {name: self._space(name) for name in self.vector_fields}
        return dict(self._searched)

    @override
    def _find_space(self, name: str) -> Space:
        """Return a space to search. The same name can mean another field after a switch."""
        if name not in self._searched or self._read_change() != self.change:
            self.spaces()
        return self._searched[name]

    # ------------------------------------------------------------------------------------------------- rows

    @override
    def _has_rows(self, space: str) -> bool:
        return True

    @override
    def _copy(self, row: dict[str, Any], field: str) -> dict[str, Any]:
        return {self.key: row[self.key], STATE: self._source(row)}

    def _source(self, row: dict[str, Any]) -> str | None:
        """Return the hash of the old vector that a row's new one was made of: None if a service wrote it, "" without one."""
        if self.change is None or (new_D := row.get(self.change["into"])) is None:
            return ""
        state = row.get(STATE) or ""
        return state[:DIGITS] if state[DIGITS:] == _hash(new_D) else None

    @override
    def _state(self, row: dict[str, Any], vector_D: NDArray[np.float32], copy: dict[str, Any]) -> str:
        """Return the hash of a row's old vector."""
        old_D = row.get(self.change["field"]) if self.change is not None else vector_D
        return _hash(old_D) if old_D is not None else ""

    @override
    def _lacking(self, other: str, own: str, rows: Rows) -> Rows:
        if self._field(other) == self._field(own):
            return rows.pick([])
        current = {None} if other == self.space else set()  # after the switch, vectors of services are current
        sources = [copy[STATE] for copy in rows.copies or []]
        return rows.pick([row for row, state in enumerate(rows.states) if sources[row] not in current | {state}])

    @override
    def write(self, space: str, rows: Rows) -> int:
        field, written = self._field(space), 0
        size = max(1, min(ROWS, BYTES // max(rows.vectors_ND[:1].nbytes, 1)))
        new = [
            {self.key: copy[self.key], field: vector_D, STATE: state + _hash(vector_D)}
            for copy, vector_D, state in zip(rows.copies or [], rows.vectors_ND, rows.states, strict=True)
        ]
        for start in range(0, len(new), size):
            written += self._update(space, new[start : start + size])
        return written

    def _update(self, space: str, rows: list[dict[str, Any]]) -> int:
        """Write fields of the rows that still exist. Return their number."""
        while rows:
            with plain_errors(self.uri):
                try:
                    self.client.upsert(self.records.about, rows, partial_update=True)
                    break
                except MilvusException:  # Milvus refuses all rows if one was deleted
                    kept = self._get(space, [row[self.key] for row in rows], [self.key])
                    if len(kept) == len(rows):
                        raise
            rows = [row for row in rows if row[self.key] in kept]
        return len(rows)

    @override
    def delete_orphans(self, space: str, like: str) -> int:
        return 0

    # ------------------------------------------------------------------------------------------------- migration

    @override
    def check_space(self, dim: int, dtype: str) -> None:
        super().check_space(dim, dtype)
        copy = "remove in_place= to migrate into a second collection"
        if lite_file(self.uri) is not None:
            raise XcompatError(f"{self.uri}: Milvus Lite cannot add vector fields; {copy}")
        with plain_errors(self.uri):
            version = self.client.get_server_version()
        found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
        if found is None or tuple(map(int, found.groups())) < OLDEST:
            raise XcompatError(f"{self.uri} is Milvus {version}, but in_place= needs 3.0.1 or later; update Milvus, or {copy}")
        if reason := self._harm():
            raise XcompatError(f"{self.uri} cannot be migrated in place: {reason}; {copy}")

    def _harm(self) -> str:
        """Return how partial updates would harm rows, or ""."""
        made, fields = self._describe_collection(self.records.about), self._fields().values()
        with plain_errors(self.uri):
            partitions = self.client.list_partitions(self.records.about)
        if self.automatic:
            return "an update could change its ids (auto_id)"
        if len(partitions) > 1 and not any(one.get("is_partition_key") for one in fields):
            return f"an update would move rows between the partitions {', '.join(partitions)}"
        if made.get("functions") or made.get("struct_array_fields"):
            return "xcompat does not update rows with functions or structs"
        optional = [one.get("nullable") or one.get("is_primary") or one.get("default_value") is not None for one in fields]
        return "all its fields are optional, so an update could recreate a deleted row" if all(optional) else ""

    @override
    def notes(self, dim: int, dtype: str) -> list[str]:
        made, fields = self._describe_collection(self.records.about), self._fields().values()
        is_only = sum("VECTOR" in DataType(one["type"]).name for one in fields) == 1
        expires = "collection.ttl.seconds" in made.get("properties", {})
        return [
            *([f"after start, searches without anns_field={self.field} fail: set it in your services first"] if is_only else []),
            f"start first reloads {self.records.about}: until Milvus has loaded it again, searches fail",
            f"Milvus cannot rename fields: after switch, your services must change {self.field} to the new name (anns_field=)",
            *(
                []
                if self._is_nullable(self.space)
                else [f"until finish, services must also write {self.field}, which is required"]
            ),
            *(["start rewrites all rows, so their time to live begins again (collection.ttl.seconds)"] if expires else []),
        ]

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        self.check_space(dim, dtype)
        self.spaces()
        assert self.change is not None, "set_record comes first"
        if self.change["step"] == "planned":
            self._require_names(name)
            self._note(step="adding")
        self.records.write(self._model_key(self.records.about, name), {"digest": model.digest, "name": model.name})
        with plain_errors(self.uri):
            self._add_fields(name, dim)
            if not self._is_searchable(name, dim):
                self._reload()
                if not self._is_searchable(name, dim):
                    raise XcompatError(f"{self.uri}: Milvus did not load {name}; check its log, then run start again")
        self._note(step="ready")
        self.spaces()

    def _require_names(self, name: str) -> None:
        """Raise if a field has a name of the new ones."""
        if STATE in self._fields() and mark_of(self._describe_collection(self.records.about)) is not None:
            self._drop_field(STATE)  # of an earlier migration into a second collection
        if found := [field for field in (name, STATE, self.space + BEFORE) if field in self._fields()]:
            raise XcompatError(f"{self.uri} already has a field {found[0]!r}; choose another name or delete it")

    def _add_fields(self, name: str, dim: int) -> None:
        """Add the fields and an index that do not exist yet."""
        collection, known, options = self.records.about, self._fields(), {"nullable": True}
        if STATE not in known:
            self.client.add_collection_field(collection, STATE, DataType.VARCHAR, max_length=64, **options)
        if name not in known:
            self.client.add_collection_field(collection, name, DataType.FLOAT_VECTOR, dim=dim, **options)
        if not self.client.list_indexes(collection, field_name=name):
            own = self.client.list_indexes(collection, field_name=self.field)[0]
            like = {**self.client.describe_index(collection, own), "field_name": name, "index_name": name}
            self.client.create_index(collection, indexes_like([like]))

    def _is_searchable(self, field: str, dim: int) -> bool:
        try:
            self.client.search(self.records.about, data=[[1.0] * dim], anns_field=field, limit=1, **STRONG)
        except MilvusException as error:
            if "not loaded" not in error.message:
                raise
            return False
        return True

    def _reload(self) -> None:
        """Release and load the collection, as Milvus only searches a new field afterwards."""
        collection = self.records.about
        if self._is_loaded():
            groups = [replica.resource_group for replica in self.client.describe_replica(collection)]
            self._note(load={"replica_number": len(groups), "resource_groups": groups if len(set(groups)) > 1 else groups[:1]})
            self.client.release_collection(collection)
        change = self._read_change()
        self.client.load_collection(collection, _async=True, **(change.get("load", {}) if change is not None else {}))
        with progress_bar() as bar:
            task, percent = bar.add_task(f"loading {collection}", total=100, unit="percent"), 0
            while (found := self.client.get_load_state(collection))["state"] != LoadState.Loaded:
                advance_bar(bar, task, int(found.get("progress", 0)) - percent)
                percent = int(found.get("progress", 0))
                self.renew_lease()
                time.sleep(1)
            advance_bar(bar, task, 100 - percent)

    @override
    def switch(self, space: str) -> None:
        self._set_searched("into")

    @override
    def switch_back(self, space: str) -> None:
        self._set_searched("field")

    def _set_searched(self, which: Literal["field", "into"]) -> None:
        self.spaces()
        if self.change is not None and self.change[which] in self._fields():
            self._note(searched=self.change[which])
            self.spaces()

    @override
    def drop_space(self, name: str) -> None:
        self._drop_field(self._field(name))
        self.spaces()

    def _drop_field(self, field: str) -> None:
        if field in self._fields():
            with plain_errors(self.uri):
                self.client.drop_collection_field(self.records.about, field)
        self.records.write(self._model_key(self.records.about, field), None)

    # ------------------------------------------------------------------------------------------------- records

    def _note(self, **values: object) -> None:
        """Change the state of the change in the migration's record."""
        found = self.records.read("migration") or {}
        self.records.write("migration", {**found, IN_PLACE: {**found[IN_PLACE], **values}})

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        found = self.records.read(key)
        if key != "migration" or found is None:
            return found
        if IN_PLACE not in found:
            raise XcompatError(f"{self.uri} is already being migrated into a second collection; remove in_place=")
        return {name: value for name, value in found.items() if name != IN_PLACE} if self._is_own(found[IN_PLACE]) else None

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        """Write a record. A migration's first record also marks the collection, and its end drops the fields of ours."""
        if key != "migration":
            self.records.write(key, value)
            return
        change = self._read_change()
        if change is not None and not self._is_own(change):
            raise XcompatError(
                f"the field {change['field']} of {self.uri} is already being migrated in place; run `xcompat migrate finish` or "
                f"`rollback` with field={change['field']} first"
            )
        if value is not None:
            new = {"field": self.field, "into": value["into"], "searched": self.field, "step": "planned"}
            self.records.write(key, {**value, IN_PLACE: change or new})
        elif change is not None:
            self._end(change)
        self.spaces()

    def _end(self, change: Change) -> None:
        """Drop all fields of ours that are not searched, load the collection, and delete the record."""
        if change["step"] != "planned":
            for field in (STATE, change["field"] if change["searched"] == change["into"] else change["into"]):
                self._drop_field(field)
            if not self._is_loaded():
                try:
                    self._load(self.records.about)
                except XcompatError as error:
                    raise XcompatError(f"{error}; searches fail until it is loaded: run `xcompat migrate rollback`") from error
        self.records.write("migration", None)


def _hash(vector_D: object) -> str:
    return xxhash.xxh3_64_hexdigest(np.asarray(vector_D, np.float32).tobytes())
