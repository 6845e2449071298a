"""Store for Chroma, a folder or a server. Spaces are collections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import chromadb
import numpy as np
import xxhash
from chromadb.errors import NotFoundError
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.retrieval import Hit
from xcompat.retrieval.manifest import Metric
from xcompat.stores.base import BEFORE, UNKNOWN, Rows, Space, Store
from xcompat.stores.chroma_client import RETRYING, connect, plain_errors
from xcompat.stores.lease import Lease
from xcompat.stores.uri import StoreUri

OPTIONS = ("collection", "tenant", "database", "ssl")
METRICS: dict[str, Metric] = {"cosine": "cosine", "ip": "ip", "l2": "l2"}
RECORDS = "xcompat_records"
"""Collection with the records of xcompat, as JSON documents."""
STATE = "xcompat_state"
"""Metadata key of a copied row: hash of its source row."""
DOCUMENT = "#document"
"""Chroma's key for the text of a row."""
ROWS: list[Any] = ["embeddings", "metadatas", "documents", "uris"]
EXAMPLE = '{"price": {"$lt": 50}}'
MAKING = "_xcompat"
"""Suffix of a new collection until its record is written."""
PIECES = 32
"""Positions in a collection to sample from."""


class ChromaStore(Store):
    """Chroma collection, and its copy with new vectors."""

    def __init__(self, uri: StoreUri) -> None:
        self.uri = uri
        self.client = connect(uri)
        self.space = uri.require("collection")
        self._lease = Lease(self)
        own = self._find_collection(self.space) or (
            self._find_collection(self.space + BEFORE) if self.record("migration") else None
        )
        if own is None:  # not an interrupted switch either
            with plain_errors(uri):
                raise self._missing(self.space)
        kinds = [kind for kind in ("hnsw", "spann") if own.configuration_json.get(kind)]
        self.metric = METRICS[own.configuration_json[kinds[0]]["space"]]
        self._searched: dict[str, tuple[chromadb.Collection, Space]] = {}

    # ------------------------------------------------------------------------------------------------- collections

    def _find_collection(self, name: str) -> chromadb.Collection | None:
        """Return a collection without its embedding function, or None."""
        with plain_errors(self.uri):
            try:
                return self.client.get_collection(name, embedding_function=None)
            except NotFoundError:
                return None

    def _collection(self, name: str) -> chromadb.Collection:
        if (found := self._find_collection(name)) is None:
            raise self._missing(name)
        return found

    def _missing(self, name: str) -> XcompatError:
        names = [one.name for one in self.client.list_collections() if one.name != RECORDS]
        return XcompatError(f"{self.uri}: there is no collection {name!r}; {nearest(name, names)}")

    @override
    def spaces(self) -> dict[str, Space]:
        known = {name: self._find_collection(name) for name in sorted({self.space, *self.added_spaces()})}
        found = {name: (one, self._space(name, one)) for name, one in known.items() if one is not None}
        into = (self.record("migration") or {}).get("into")  # not ours without a record of its model
        self._searched = {name: one for name, one in found.items() if name != into or one[1].fingerprint is not None}
        return {name: space for name, (_, space) in self._searched.items()}

    def _space(self, name: str, collection: chromadb.Collection) -> Space:
        first_1D = self._read(collection, limit=1, include=["embeddings"])["embeddings"]
        dim = len(first_1D[0]) if first_1D is not None and len(first_1D) else None
        model = self._model(collection)
        return Space(name, dim, "float32", Fingerprint(model["digest"], model["name"]) if model else None)

    def _model(self, collection: chromadb.Collection) -> dict[str, Any] | None:
        """Return a collection's record: its model and its source collection."""
        return self._row(str(collection.id))

    # ------------------------------------------------------------------------------------------------- reading

    @override
    def count(self, space: str | None = None, without: str | None = None) -> int:
        if (found := self._find_collection(name := space or self.space)) is None:  # during a switch
            return 0
        if without is not None and self.count(without):  # else no row has one
            return sum(len(rows.ids) for rows in self.rows(self._most, without=without, space=name))
        with plain_errors(self.uri):
            return found.count()

    @override
    def search(
        self,
        vectors_QD: ArrayLike,
        top_k: int = 10,
        filter: Mapping[str, object] | str | None = None,
        space: str | None = None,
    ) -> list[list[Hit]]:
        name = space or self.space
        if name not in self._searched:
            self.spaces()
        collection, own = self._searched[name]
        queries_QD = self.queries(vectors_QD, own)
        asked: dict[str, Any] = {"query_embeddings": queries_QD, "n_results": top_k, "include": ["distances"]}
        with plain_errors(self.uri):
            found = collection.query(**asked, **_conditions(filter))
        version, one = own.fingerprint or UNKNOWN, 0.0 if self.metric == "l2" else 1.0
        distances = found["distances"] or []
        return [
            [Hit(item, one - away, version, None) for item, away in zip(*each, strict=True)]
            for each in zip(found["ids"], distances, strict=True)
        ]

    @override
    def sample(self, count: int, other: str, content: str | None = None) -> tuple[Rows, NDArray[np.float32]]:
        own, new, total = self._collection(self.space), self._collection(other), self.count()
        pieces = max(1, min(PIECES, -(-total // max(count, 1))))
        read = [self._page(own, -(-count // pieces), total * piece // pieces, content) for piece in range(pieces)]
        stale = {item for rows in read for item in self._lacking(new, own, rows, newer=False).ids}
        ids = [item for rows in read for item in rows.ids if item not in stale][:count]
        found = self._read(new, ids=ids or [""], include=["embeddings"])
        others = dict(zip(found["ids"], np.asarray(found["embeddings"], np.float32), strict=True))
        if not others:
            return Rows([], np.empty((0, 0), np.float32), []), np.empty((0, 0), np.float32)
        picked = [rows.pick([at for at, item in enumerate(rows.ids) if item in others]) for rows in read]
        both = [item for rows in picked for item in rows.ids]
        contents = None if content is None else [value for rows in picked for value in rows.contents or []]
        own_ND = np.concatenate([rows.vectors_ND for rows in picked if rows.ids])
        return Rows(both, own_ND, [""] * len(both), contents), np.stack([others[item] for item in both])

    @override
    def read_fields(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = self._read(self._collection(self.space), ids=[*ids], include=["metadatas", "documents"])
        each = zip(found["ids"], found["metadatas"], found["documents"], strict=True)
        known = {item: {**(metadata or {}), DOCUMENT: document} for item, metadata, document in each}
        return {item: {name: row[name] for name in fields if name in row} for item, row in known.items()}

    @override
    def rows(
        self,
        batch: int,
        after: str | None = None,
        without: str | None = None,
        space: str | None = None,
        content: str | None = None,
    ) -> Iterator[Rows]:
        """Read by position, because Chroma cannot seek an id. Concurrent deletes can skip rows.

        A migration reads again until all rows are written, and once more after the switch.
        """
        own = self._collection(space or self.space)
        other = self._find_collection(without) if without is not None else None
        offset = 0
        while (page := self._page(own, batch, offset, content)).ids:
            offset += len(page.ids)
            rows = page if other is None else self._lacking(other, own, page, newer=without == self.space)
            if rows.ids:
                yield rows

    def _page(self, collection: chromadb.Collection, limit: int, offset: int, content: str | None) -> Rows:
        page = self._read(collection, limit=limit, offset=offset, include=ROWS)
        vectors_ND = np.asarray(page["embeddings"], np.float32)
        plain = [{key: value for key, value in (each or {}).items() if key != STATE} for each in page["metadatas"] or []]
        copies = list(zip(plain, page["documents"] or [], page["uris"] or [], strict=True))
        states = [_state(vector_D, copy) for vector_D, copy in zip(vectors_ND, copies, strict=True)]
        contents = None
        if content is not None:
            contents = [document if content == DOCUMENT else metadata.get(content) for metadata, document, _ in copies]
        return Rows(page["ids"], vectors_ND, states, contents, copies)

    def _lacking(self, other: chromadb.Collection, own: chromadb.Collection, rows: Rows, newer: bool) -> Rows:
        """Return the rows missing or outdated in another collection. Services can have newer rows."""
        held = self._read_states(other, rows.ids)
        copied = (self._model(other) or {}).get("source") == str(own.id)  # else its states belong to other rows
        known = {None} if newer else set()
        lacks = [
            number
            for number, (item, state) in enumerate(zip(rows.ids, rows.states, strict=True))
            if item not in held or (copied and held[item] not in known | {state})
        ]
        return rows.pick(lacks)

    def _read_states(self, collection: chromadb.Collection, ids: list[str]) -> dict[str, str | None]:
        """Return the existing ids with their states. A state is None if the row is not a copy."""
        held: dict[str, Any] = {}
        for start in range(0, len(ids), self._most):
            found = self._read(collection, ids=ids[start : start + self._most], include=["metadatas"])
            held |= {item: (one or {}).get(STATE) for item, one in zip(found["ids"], found["metadatas"] or [], strict=True)}
        return held

    def _read(self, collection: chromadb.Collection, **asked: Any) -> Any:  # noqa: ANN401 - vectors are arrays
        """Read rows, and retry if concurrent deletes raise an error."""
        with plain_errors(self.uri):
            return RETRYING(collection.get, **asked)

    @property
    def _most(self) -> int:
        """Maximum rows per call."""
        return self.client.get_max_batch_size()

    # ------------------------------------------------------------------------------------------------- writing

    @override
    def name_model(self, space: str, model: Fingerprint) -> None:
        if space not in (known := self.spaces()):
            raise XcompatError(f"{self.uri} has no space {space!r}; {nearest(space, known)}")
        collection = self._collection(space)
        self._set_row(str(collection.id), {**(self._model(collection) or {}), "digest": model.digest, "name": model.name})

    @override
    def add_space(self, name: str, dim: int, model: Fingerprint, dtype: str = "float32") -> None:
        if dtype != "float32":
            raise XcompatError(f"{self.uri}: Chroma only stores float32; remove --dtype")
        for taken in (name, self.space + BEFORE):
            if self._find_collection(taken) is not None:
                raise XcompatError(f"{self.uri} already has a collection {taken!r}; choose another name or delete it")
        own = self._collection(self.space)
        index: Any = {kind: own.configuration_json[kind] for kind in ("hnsw", "spann") if own.configuration_json.get(kind)}
        making = name + MAKING
        with plain_errors(self.uri):
            made = self.client.create_collection(making, metadata=own.metadata, configuration=index, embedding_function=None)
        self._set_row(str(made.id), {"digest": model.digest, "name": model.name, "source": str(own.id)})
        try:
            self._rename(making, name)
        except XcompatError:  # invalid name for Chroma
            self.drop_space(making)
            raise

    @override
    def write(self, space: str, rows: Rows) -> int:
        collection = self._collection(space)
        for start in range(0, len(rows.ids), self._most):
            piece = slice(start, start + self._most)
            metadatas, documents, uris = zip(*(rows.copies or [])[piece], strict=True)
            states = [{**one, STATE: state} for one, state in zip(metadatas, rows.states[piece], strict=True)]
            with plain_errors(self.uri):
                stale = self._read(collection, ids=rows.ids[piece], include=[])["ids"]
                if stale:  # an update would keep old fields
                    collection.delete(ids=stale)
                collection.add(rows.ids[piece], rows.vectors_ND[piece], states, list(documents), uris=list(uris))  # type: ignore[arg-type]
        return len(rows.ids)

    @override
    def delete_orphans(self, space: str, like: str) -> int:
        new, old = self._collection(space), self._collection(like)
        offset, stale = 0, list[str]()
        with plain_errors(self.uri):
            while (page := self._read(new, limit=self._most, offset=offset, include=["metadatas"]))["ids"]:
                offset += len(page["ids"])
                each = zip(page["ids"], page["metadatas"] or [], strict=True)
                ours = [item for item, one in each if space != self.space or (one and STATE in one)]
                stale += set(ours).difference(self._read(old, ids=ours, include=[])["ids"]) if ours else []
            for start in range(0, len(stale), self._most):
                new.delete(ids=stale[start : start + self._most])
        return len(stale)

    @override
    def index_like(self, space: str) -> list[str]:
        """Do nothing: Chroma indexes on write, with the copied configuration."""
        return []

    @override
    def switch(self, space: str) -> None:
        """Rename both collections. The name is missing between the two renames."""
        if self._find_collection(self.space + BEFORE) is None:
            self._rename(self.space, self.space + BEFORE)
        if self._find_collection(space) is not None:
            self._rename(space, self.space)

    @override
    def switch_back(self, space: str) -> None:
        if self._find_collection(self.space + BEFORE) is None:
            return
        if self._find_collection(self.space) is not None:
            self._rename(self.space, space)
        self._rename(self.space + BEFORE, self.space)

    def _rename(self, old: str, new: str) -> None:
        self._searched = {}
        with plain_errors(self.uri):
            self._collection(old).modify(name=new)

    @override
    def drop_space(self, name: str) -> None:
        self._searched = {}
        dropped = self._collection(name)
        with plain_errors(self.uri):
            self.client.delete_collection(name)
        self._set_row(str(dropped.id), None)

    @override
    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    @contextmanager
    def migration_lease(self) -> Iterator[None]:
        with self._lease.hold():
            begun = self.record("migration")
            if begun is not None and self._find_collection(left := begun["into"] + MAKING) is not None:  # from a killed process
                self.client.delete_collection(left)
            yield

    @override
    def renew_lease(self) -> None:
        self._lease.renew()

    # ------------------------------------------------------------------------------------------------- records

    @override
    def record(self, key: str) -> dict[str, Any] | None:
        return self._row(f"{self.space}/{key}")

    @override
    def set_record(self, key: str, value: Mapping[str, object] | None) -> None:
        self._set_row(f"{self.space}/{key}", value)

    def _row(self, name: str) -> dict[str, object] | None:
        if (records := self._find_collection(RECORDS)) is None:
            return None
        with plain_errors(self.uri):
            found = records.get(ids=[name], include=["documents"])["documents"]
        return json.loads(found[0]) if found else None

    def _set_row(self, name: str, value: Mapping[str, object] | None) -> None:
        with plain_errors(self.uri):
            records = self.client.get_or_create_collection(RECORDS, embedding_function=None)
            if value is None:
                records.delete(ids=[name])
            else:
                records.upsert([name], np.zeros((1, 1), np.float32), documents=[json.dumps(value)])  # a row needs a vector

    @override
    def close(self) -> None:
        self.client.close()


def _conditions(filter: Mapping[str, object] | str | None) -> dict[str, Any]:  # noqa: A002
    """Return a filter on metadata, and on the text under ``#document``, for Chroma."""
    try:
        where = dict(json.loads(filter) if isinstance(filter, str) else filter or {})
    except (json.JSONDecodeError, TypeError, ValueError):
        raise XcompatError(f'{filter!r} is not a Chroma filter; write JSON, e.g. {{"price": {{"$lt": 50}}}}') from None
    text = where.pop(DOCUMENT, None)
    return {"where": where or None, "where_document": text}


def _state(vector_D: NDArray[np.float32], copy: tuple[Any, ...]) -> str:
    rest = json.dumps(copy, sort_keys=True, default=vars).encode()  # for sparse vectors
    return xxhash.xxh3_64_hexdigest(vector_D.tobytes() + rest)


def open_store(uri: str) -> ChromaStore:
    """Open a collection by its address."""
    return ChromaStore(StoreUri.parse(uri, OPTIONS))
