"""Store for Milvus collections migrated in place. Spaces are vector fields, and a switch changes a record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient
from pymilvus.client.types import LoadState
from pymilvus.exceptions import MilvusException
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.stores.base import BEFORE, Rows, Space
from xcompat.stores.milvus_client import lite_file, plain_errors
from xcompat.stores.milvus_records import Records
from xcompat.stores.milvus_schema import STATE, indexes_like
from xcompat.stores.milvus_store import BYTES, STRONG, MilvusStore
from xcompat.stores.uri import StoreUri

IN_PLACE = "in_place"
"""Key in a migration's record: the old ``field``, the new ``into``, which of both is ``searched``, the ``step`` of start, and
the options to ``load`` the collection as before."""
ROWS = 1_000
"""Maximum rows per partial update. Milvus reads and rewrites them with all their fields."""
OLDEST = (3, 0, 1)
"""First version that adds vector fields, and whose partial updates do not undo simultaneous writes."""


class MilvusFields(MilvusStore):
    """Milvus collection with vector fields, migrated in place.

    Milvus cannot rename fields: the migration's record says which field is searched. The field ``xcompat_state`` holds a hash of
    the old vector that the new one was made of. Both are written in one partial update, and no other field changes.
    """

    renames: ClassVar[bool] = False

    def __init__(self, uri: StoreUri, client: MilvusClient, records: Records) -> None:
        super().__init__(uri, client, records)
        self.space = begun["field"] if (begun := self._own_begun()) is not None else self.field
        self.spaces()

    # ------------------------------------------------------------------------------------------------- fields

    @override
    def _open_collection(self) -> dict[str, Any]:
        made = self._describe_collection(self.records.about)
        self.begun, self.into, self.names = self._read_begun(), "", dict[str, str]()
        self.kept = [one["name"] for one in made["fields"] if one.get("is_primary") or one.get("is_partition_key")]
        with plain_errors(self.uri):
            state = self.client.get_load_state(self.records.about)["state"]
        if state != LoadState.Loaded:  # loading a loaded collection fails while its new field has no index
            self._load(self.records.about)
        return made

    @override
    def _load(self, name: str) -> None:
        if self.begun is None or "load" not in self.begun:
            super()._load(name)
            return
        with plain_errors(self.uri):
            self.client.load_collection(name, **self.begun["load"])

    @override
    def _vector_field(self, known: list[str]) -> str:
        given = self.uri.options.get("field")
        if self.begun is not None and given in (None, self.begun["field"], self.begun["into"]):
            return str(self.begun["field" if self.begun["field"] in known else "into"])  # a killed finish can have dropped it
        return super()._vector_field(known)

    def _fields(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self._describe_collection(self.records.about)["fields"]}

    @override
    def _collection(self, space: str) -> str:
        return self.records.about

    @override
    def _field(self, space: str) -> str:
        if space not in self.names:
            self.spaces()
        return self.names[space]

    @override
    def _fields_read(self, space: str, content: str | None) -> list[str]:
        named = [*self.kept, self._field(space), *([STATE] if STATE in self._fields() else [])]
        return list(dict.fromkeys([*named, *([content] if content is not None else [])]))

    def _read_begun(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = (self.records.read("migration") or {}).get(IN_PLACE)
        return found

    def _is_own(self, begun: dict[str, Any]) -> bool:
        """Return whether a migration is this field's. The collection can have another field's."""
        return self.field in (begun["field"], begun["into"])

    def _own_begun(self) -> dict[str, Any] | None:
        begun = self._read_begun()
        return begun if begun is not None and self._is_own(begun) else None

    @override
    def spaces(self) -> dict[str, Space]:
        known, self.begun = self._fields(), self._own_begun()
        if self.begun is None and self.space not in known and self.into in known:  # after finish
            self.space = self.field = self.into
        self.names = {self.space: self.field}
        if (begun := self.begun) is not None:
            self.into = begun["into"]
            if begun["searched"] == self.into:
                self.names = {self.space: self.into, self.space + BEFORE: begun["field"]}
            elif begun["step"] == "ready":
                self.names[self.into] = self.into
        self.names = {name: field for name, field in self.names.items() if field in known}
        if self.space not in self.names:
            raise XcompatError(f"{self.uri} no longer has the field {self.field!r}; choose one with field=")
        self._searched = {name: self._space(name) for name in self.names}
        return dict(self._searched)

    @override
    def _find_space(self, name: str) -> Space:
        return self.spaces()[name]  # the same name can mean another field

    # ------------------------------------------------------------------------------------------------- rows

    @override
    def _has_rows(self, space: str) -> bool:
        return True

    @override
    def _rows(self, page: list[Any], space: str, content: str | None) -> Rows:
        rows, own = super()._rows(page, space, content), {row[self.key]: row for row in page}
        copies = [{name: own[copy[self.key]].get(name) for name in (*self.kept, STATE)} for copy in rows.copies or []]
        return rows._replace(states=[_hash(vector_D) for vector_D in rows.vectors_ND], copies=copies)

    @override
    def _lacking(self, other: str, own: str, rows: Rows) -> Rows:
        if self._field(other) == self._field(own):
            return rows.pick([])
        made, keys = [copy[STATE] for copy in rows.copies or []], [copy[self.key] for copy in rows.copies or []]
        lacks = [number for number, state in enumerate(rows.states) if made[number] != state]
        if self.begun is None or self._field(own) != self.begun["field"]:  # new vectors not made of the old ones
            held = self._get(other, keys, [self.key, self._field(other)])
            olds = {item: _hash(np.asarray(row[self._field(other)], np.float32)) for item, row in held.items()}
            return rows.pick([number for number, item in enumerate(keys) if made[number] != olds.get(item)])
        if other == self.space:  # services' new vectors are newer
            asked = [keys[number] for number in lacks if made[number] is None]
            held = self._get(other, asked, [self.key, self._field(other)])
            newer = {item for item, row in held.items() if row[self._field(other)] is not None}
            lacks = [number for number in lacks if keys[number] not in newer]
        return rows.pick(lacks)

    @override
    def write(self, space: str, rows: Rows) -> int:
        field, written = self._field(space), 0
        new = [
            {**copy, field: vector_D, STATE: state}
            for copy, vector_D, state in zip(rows.copies or [], rows.vectors_ND, rows.states, strict=True)
        ]
        size = max(1, min(ROWS, BYTES // max(rows.vectors_ND[:1].nbytes, 1)))
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
            partitions = self.client.list_partitions(self.records.about)
        found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
        if found is None or tuple(map(int, found.groups())) < OLDEST:
            raise XcompatError(f"{self.uri} is Milvus {version}, but in_place= needs 3.0.1 or later; update Milvus, or {copy}")
        made, fields = self._describe_collection(self.records.about), self._fields().values()
        reason = None
        if self.automatic:
            reason = "an update could change its ids (auto_id)"
        elif len(partitions) > 1 and not any(one.get("is_partition_key") for one in fields):
            reason = f"an update would move rows between the partitions {', '.join(partitions)}"
        elif made.get("functions") or made.get("struct_array_fields"):
            reason = "xcompat does not update rows with functions or structs"
        elif all(one.get("nullable") or one.get("is_primary") or one.get("default_value") is not None for one in fields):
            reason = "all its fields are optional, so an update could recreate a deleted row"
        if reason is not None:
            raise XcompatError(f"{self.uri} cannot be migrated in place: {reason}; {copy}")

    @override
    def notes(self, dim: int, dtype: str) -> list[str]:
        is_required, made = not self._is_nullable(self.space), self._describe_collection(self.records.about)
        expires = "collection.ttl.seconds" in made.get("properties", {})
        return [
            f"Milvus cannot rename fields: after switch, your services must change {self.field} to the new name (anns_field=)",
            f"start first reloads {self.records.about}: until Milvus has loaded it again, searches fail",
            *([f"until finish, services must also write {self.field}, which is required"] if is_required else []),
            *(["start rewrites all rows, so their time to live begins again (collection.ttl.seconds)"] if expires else []),
        ]

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        self.check_space(dim, dtype)
        begun, collection = self._own_begun(), self.records.about
        assert begun is not None, "set_record comes first"
        if begun["step"] == "begun":
            if found := [field for field in (name, STATE, self.space + BEFORE) if field in self._fields()]:
                raise XcompatError(f"{self.uri} already has a field {found[0]!r}; choose another name or delete it")
            self._note(step="adding")
        self.records.write(self._key_of(name), {"digest": model.digest, "name": model.name})
        known, options = self._fields(), {"nullable": True}
        with plain_errors(self.uri):
            if STATE not in known:
                self.client.add_collection_field(collection, STATE, DataType.VARCHAR, max_length=64, **options)
            if name not in known:
                self.client.add_collection_field(collection, name, DataType.FLOAT_VECTOR, dim=dim, **options)
            if not self.client.list_indexes(collection, field_name=name):
                own = self.client.list_indexes(collection, field_name=self.field)[0]
                like = {**self.client.describe_index(collection, own), "field_name": name, "index_name": name}
                self.client.create_index(collection, indexes_like([like]))
            if not self._is_searchable(name, dim):
                self._reload()
                if not self._is_searchable(name, dim):
                    raise XcompatError(f"{self.uri}: Milvus did not load {name}; reload the collection, then run start again")
        self._note(step="ready")
        self.spaces()

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
        replicas = self.client.describe_replica(self.records.about)
        groups = sorted({replica.resource_group for replica in replicas})
        self._note(load={"replica_number": len(replicas), "resource_groups": groups})
        self.begun = self._own_begun()
        self.client.release_collection(self.records.about)
        self._load(self.records.about)

    @override
    def switch(self, space: str) -> None:
        self._set_searched("into")

    @override
    def switch_back(self, space: str) -> None:
        self._set_searched("field")

    def _set_searched(self, which: str) -> None:
        begun = self._own_begun()
        if begun is not None and begun[which] in self._fields():  # a killed finish can have dropped the old field
            self._note(searched=begun[which])
            self.spaces()

    @override
    def drop_space(self, name: str) -> None:
        self._drop_field(self._field(name))
        self.spaces()

    def _drop_field(self, field: str) -> None:
        if field in self._fields():
            with plain_errors(self.uri):
                self.client.drop_collection_field(self.records.about, field)
        self.records.write(self._key_of(field), None)

    # ------------------------------------------------------------------------------------------------- records

    def _key_of(self, field: str) -> str:
        return f"model/{self._identity(self.records.about)}/{field}"

    def _note(self, **values: object) -> None:
        found = self.records.read("migration") or {}
        self.records.write("migration", {**found, IN_PLACE: {**found[IN_PLACE], **values}})

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        found = self.records.read(key)
        if key != "migration" or found is None:
            return found
        return {name: value for name, value in found.items() if name != IN_PLACE} if self._is_own(found[IN_PLACE]) else None

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        """Write a record. A migration's first record also marks the collection, and its end drops the fields of ours."""
        if key != "migration":
            super().set_record(key, value)
            return
        begun = self._read_begun()
        if begun is not None and not self._is_own(begun):
            raise XcompatError(
                f"the field {begun['field']} of {self.uri} is already being migrated in place; run `xcompat migrate finish` or "
                f"`rollback` with field={begun['field']} first"
            )
        if value is not None:
            new = {"field": self.field, "into": value["into"], "searched": self.field, "step": "begun"}
            self.records.write(key, {**value, IN_PLACE: begun or new})
        elif begun is not None:
            if begun["step"] != "begun":  # else no field is ours
                for field in (STATE, begun["field"] if begun["searched"] == begun["into"] else begun["into"]):
                    self._drop_field(field)
            self.records.write(key, None)
        self.spaces()


def _hash(vector_D: NDArray[np.float32]) -> str:
    return xxhash.xxh3_64_hexdigest(vector_D.tobytes())
