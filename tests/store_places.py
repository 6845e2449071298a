"""Databases to test stores on: each one made, filled, changed and read by its own client, as its users do."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from numpy.typing import NDArray

import xcompat.stores
from xcompat import Fingerprint
from xcompat.methods import RidgeModel
from xcompat.models import describe_old
from xcompat.retrieval import Gallery
from xcompat.stores import Store

OLD = Fingerprint.from_string("the old model")


def unit_vectors(count: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def solve_map(
    old_Nd: NDArray[np.float32], new_ND: NDArray[np.float32], old: Fingerprint = OLD, direction: str = "old_to_new"
) -> RidgeModel:
    """Solve a map of an old model's stored vectors to a new model's, or of the new model's queries to the old ones."""
    described, dim = describe_old(old, old_Nd.shape[1]), new_ND.shape[1]
    pairs = torch.nn.functional.normalize(torch.from_numpy(new_ND), dim=1), torch.from_numpy(old_Nd)
    return RidgeModel(RidgeModel.config_class(old=described, embedding_dim=dim, direction=direction)).fit([pairs]).eval()


def map_of_galleries(vectors_Nd: NDArray[np.float32], dim: int) -> RidgeModel:
    """Solve a map of the old model's vectors to so many dimensions."""
    turn_dD = np.random.default_rng(1).standard_normal((vectors_Nd.shape[1], dim)).astype(np.float32)
    return solve_map(vectors_Nd, vectors_Nd @ turn_dD)


class Readable(ABC):
    """A store of items with a vector and a price."""

    cheap: Any  # the filter ``price < 3`` in its language
    metrics: tuple[str, ...] = ("cosine", "ip", "l2")  # by which it can compare
    shared = True  # whether several clients may open it at once
    threads = True  # whether two threads may write with one client

    def __init__(self) -> None:
        self.opened: list[Store] = []

    def open(self, **options: str) -> Store:
        """Open the store, after the last one was closed where only one may be open."""
        if not self.shared:
            self.close()
        self.opened.append(xcompat.stores.open(self.uri(**options)))
        return self.opened[-1]

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    @abstractmethod
    def uri(self, **options: str) -> str: ...

    def fill(self, vectors_ND: NDArray[np.float32], metric: str = "cosine", prices: dict[int, int] | None = None) -> None:
        """Make the items; unless prices by id are given, ids are the numbers of the rows and prices their last digits."""
        self._insert(vectors_ND, metric, {row: row % 10 for row in range(len(vectors_ND))} if prices is None else prices)

    @abstractmethod
    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None: ...


class Place(Readable):
    """A database, which others change too."""

    into = "embedding_new"  # the name of a new space
    refusals: tuple[type[Exception], ...]  # of its client, where vectors have another dimension or there is nothing of the name

    def finished(self, space: str) -> str:
        """Return the name of the searched space after a migration from a space."""
        return space

    @abstractmethod
    def clear(self) -> None: ...

    @abstractmethod
    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None: ...

    @abstractmethod
    def note(self, item: str, value: str | None) -> None: ...

    def empty(self, item: str) -> None:
        """Remove the vector of an item, where the store allows it."""
        raise NotImplementedError

    @abstractmethod
    def delete(self, item: str) -> None: ...

    @abstractmethod
    def dim(self) -> int: ...

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def rows(self) -> dict[str, dict[str, Any]]:
        """Return all fields but the vector of each item that is searched, without xcompat's own where these are meant to stay."""

    @abstractmethod
    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        """Return the vectors of a space by id, without rows that have none."""

    @abstractmethod
    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None: ...

    @abstractmethod
    def everything(self) -> Any:
        """Return all that users put there and its schema, to compare with what it was."""


class PostgresPlace(Place):
    cheap = "price < 3"

    def __init__(self, server: str, connection: Any) -> None:
        import psycopg

        super().__init__()
        self.server, self.connection, self.refusals = server, connection, (psycopg.errors.DataException,)

    def clear(self) -> None:
        self.connection.execute("DROP TABLE IF EXISTS items, xcompat_records, xcompat_demand CASCADE")

    def uri(self, **options: str) -> str:
        return self.server + "".join(f"&{name}={value}" for name, value in {"table": "items", **options}.items())

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        self.connection.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, price int, embedding vector({vectors_ND.shape[1]}))")
        rows = [(*item, str(vector.tolist())) for item, vector in zip(prices.items(), vectors_ND, strict=True)]
        self.connection.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        changed = "price = EXCLUDED.price, embedding = EXCLUDED.embedding"
        statement = f"INSERT INTO items (id, price, embedding) VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE SET {changed}"
        self.connection.execute(statement, (item, price, str(vector_D.tolist())))

    def note(self, item: str, value: str | None) -> None:
        self.connection.execute("ALTER TABLE items ADD COLUMN IF NOT EXISTS about text")
        self.connection.execute("UPDATE items SET about = %s WHERE id = %s", (value, item))

    def empty(self, item: str) -> None:
        self.connection.execute("UPDATE items SET embedding = NULL WHERE id = %s", (item,))

    def delete(self, item: str) -> None:
        self.connection.execute("DELETE FROM items WHERE id = %s", (item,))

    def dim(self) -> int:
        asked = "SELECT atttypmod FROM pg_attribute WHERE attrelid = 'items'::regclass AND attname = 'embedding'"
        return int(self.connection.execute(asked).fetchone()[0])

    def names(self) -> list[str]:
        columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'items' ORDER BY 1"
        triggers = "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal"
        return [name for asked in (columns, triggers) for (name,) in self.connection.execute(asked).fetchall()]

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = self.connection.execute("SELECT to_jsonb(items) - 'embedding' FROM items").fetchall()
        return {str(row["id"]): row for (row,) in rows}

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        rows = self.connection.execute(f"SELECT id::text, {space}::text FROM items WHERE {space} IS NOT NULL").fetchall()
        return {item: np.array(json.loads(vector), np.float32) for item, vector in rows}

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        self.connection.execute(f"UPDATE items SET {space} = %s WHERE id = %s", (str(vector_D.tolist()), item))

    def everything(self) -> Any:
        return self.names(), self.connection.execute("SELECT id, price, embedding::text FROM items ORDER BY id").fetchall()


@contextmanager
def postgres_place(request: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    import psycopg

    server = request.getfixturevalue("postgres")
    with psycopg.connect(server, autocommit=True) as connection:
        place = PostgresPlace(server, connection)
        place.clear()
        yield place


class ChromaPlace(Place):
    into = "items_new"
    cheap = '{"price": {"$lt": 3}}'  # as the command line gives it; a dict does as well

    def __init__(self, address: str, client: Any) -> None:
        from chromadb.errors import ChromaError

        super().__init__()
        self.address, self.client = address, client
        self.refusals = (ChromaError,)  # the other dimension, and no collection between the two renames of a switch

    def clear(self) -> None:
        for name in self.names():
            self.client.delete_collection(name)

    def uri(self, **options: str) -> str:
        return f"{self.address}?collection=items"

    def collection(self, name: str = "items") -> Any:
        return self.client.get_collection(name, embedding_function=None)

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        options = {"metadata": {"shop": "ours"}, "configuration": {"hnsw": {"space": metric, "ef_construction": 200}}}
        known = {str(item): {"price": price} for item, price in prices.items()}
        items = self.client.create_collection("items", embedding_function=None, **options)
        items.add([*known], vectors_ND, [*known.values()], [f"item {item}" for item in known])

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        self.collection().upsert([item], vector_D[None], [{"price": price}], [f"item {item}"])

    def note(self, item: str, value: str | None) -> None:
        self.collection().update([item], metadatas=[{"about": value}])

    def delete(self, item: str) -> None:
        self.collection().delete([item])

    def dim(self) -> int:
        return int(self.collection().get(limit=1, include=["embeddings"])["embeddings"].shape[1])

    def names(self) -> list[str]:
        return sorted(each.name for each in self.client.list_collections())

    def rows(self) -> dict[str, dict[str, Any]]:
        found = self.collection().get(include=["metadatas", "documents"])
        each = zip(found["ids"], found["metadatas"], found["documents"], strict=True)
        return {item: {**metadata, "xcompat_state": "", "#document": document} for item, metadata, document in each}

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        found = self.collection(space).get(include=["embeddings"])
        return dict(zip(found["ids"], found["embeddings"].astype(np.float32), strict=True))

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        self.collection(space).update([item], vector_D[None])

    def everything(self) -> Any:
        found = []
        for each in sorted(self.client.list_collections(), key=lambda one: one.name):
            if each.name != "xcompat_records":
                rows = each.get(include=["embeddings", "metadatas", "documents", "uris"])
                rows["embeddings"] = rows["embeddings"].tolist()
                found.append([each.name, str(each.id), each.configuration_json, each.metadata, rows])
        return found


@contextmanager
def chroma_place(request: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    chromadb = pytest.importorskip("chromadb")
    settings = chromadb.config.Settings(anonymized_telemetry=False)
    with chromadb.PersistentClient(folder / "chroma", settings) as client:
        yield ChromaPlace(f"chroma://{folder / 'chroma'}", client)


class LancePlace(Place):
    cheap = "price < 3"
    refusals = (RuntimeError, OSError, ValueError)  # the other dimension, and commits of others that come in between

    def __init__(self, folder: Path) -> None:
        import lancedb

        super().__init__()
        self.folder = folder
        self.database = lancedb.connect(folder, read_consistency_interval=timedelta(0))

    def clear(self) -> None:
        self.database.drop_all_tables()

    @property
    def table(self) -> Any:
        return self.database.open_table("items")

    def uri(self, **options: str) -> str:
        return f"lancedb://{self.folder}?{urlencode({'table': 'items', **options})}"

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        rows = {"id": [*prices], "price": [*prices.values()], "embedding": fixed_size(vectors_ND)}
        self.database.create_table("items", pa.table(rows))

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        row = pa.table({"id": [int(item)], "price": [price], "embedding": fixed_size(vector_D[None])})
        self.table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(row)

    def note(self, item: str, value: str | None) -> None:
        if "about" not in self.table.schema.names:
            self.table.add_columns(pa.field("about", pa.string()))
        self.table.update(where=f"id = {item}", values={"about": value})

    def empty(self, item: str) -> None:
        row = self.table.search().where(f"id = {item}").to_arrow()
        place = row.schema.get_field_index("embedding")
        field = row.schema.field(place)
        self._update(row.set_column(place, field, pa.nulls(1, field.type)), on_bad_vectors="null")

    def _update(self, rows: pa.Table, **options: str) -> None:
        self.table.merge_insert("id").when_matched_update_all().execute(rows, **options)

    def delete(self, item: str) -> None:
        self.table.delete(f"id = {item}")

    def dim(self) -> int:
        return int(self.table.schema.field("embedding").type.list_size)

    def names(self) -> list[str]:
        return [*self.database.list_tables().tables, *self.table.schema.names]

    def rows(self) -> dict[str, dict[str, Any]]:
        return {str(row["id"]): row for row in self.table.to_arrow().drop_columns(["embedding"]).to_pylist()}

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        rows = self.table.search().where(f"{space} IS NOT NULL").select(["id", space]).to_arrow().to_pylist()
        return {str(row["id"]): np.array(row[space], np.float32) for row in rows}

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        self._update(pa.table({"id": [int(item)], space: fixed_size(vector_D[None])}))

    def everything(self) -> Any:
        return self.table.to_arrow().sort_by("id"), self.table.schema, self.database.list_tables().tables


def fixed_size(vectors_ND: NDArray[Any]) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(vectors_ND).reshape(-1)), vectors_ND.shape[1])


class GalleryPlace(Readable):
    cheap: Any = {"price": [0, 1, 2]}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def uri(self, **options: str) -> str:
        return f"file://{self.folder}"

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        gallery = Gallery.create(self.folder, OLD, dim=vectors_ND.shape[1], metric=metric)
        ids, known = [str(item) for item in prices], [{"price": price} for price in prices.values()]
        for part in (slice(231), slice(231, None)):
            gallery.add(vectors_ND[part], ids[part], known[part])
            gallery.commit()


class MilvusPlace(Place):
    into = "items_new"
    cheap = "price < 3"

    def __init__(self, address: str, client: Any) -> None:
        from pymilvus.exceptions import MilvusException

        super().__init__()
        self.address, self.client = address, client
        self.refusals = (MilvusException,)  # the other dimension, and no collection between the two renames of a switch

    def clear(self) -> None:
        for name in self.names():
            self.client.drop_collection(name)

    def uri(self, **options: str) -> str:
        return f"{self.address}?collection=items"

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        from pymilvus import DataType

        schema, index = self.client.create_schema(enable_dynamic_field=True), self.client.prepare_index_params()
        schema.add_field("id", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=vectors_ND.shape[1])
        index.add_index("vector", "FLAT", metric_type=metric.upper())
        self.client.create_collection("items", schema=schema, index_params=index, consistency_level="Strong")
        items = zip(prices.items(), vectors_ND, strict=True)
        self.client.insert("items", [{"id": item, "vector": vector, "price": price} for (item, price), vector in items])

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        self.client.upsert("items", [{"id": int(item), "vector": vector_D, "price": price}])

    def note(self, item: str, value: str | None) -> None:
        row = self.client.get("items", ids=[int(item)], output_fields=["*"])[0]
        self.client.upsert("items", [{**row, "about": value}])

    def delete(self, item: str) -> None:
        self.client.delete("items", ids=[int(item)])

    def dim(self) -> int:
        fields = self.client.describe_collection("items")["fields"]
        return int(next(field["params"]["dim"] for field in fields if field["name"] == "vector"))

    def names(self) -> list[str]:
        return sorted(self.client.list_collections())

    def rows(self) -> dict[str, dict[str, Any]]:
        found = self.client.query("items", filter="id >= 0", output_fields=["id", "price"])
        return {str(row["id"]): dict(row) for row in found}

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        rows = self.client.query(space, filter="id >= 0", output_fields=["vector"])
        return {str(row["id"]): np.array(row["vector"], np.float32) for row in rows}

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        row = self.client.get(space, ids=[int(item)], output_fields=["*"])[0]
        self.client.upsert(space, [{**row, "vector": vector_D}])

    def everything(self) -> Any:
        names = [name for name in self.names() if name != "xcompat_records"]
        rows = [sorted(map(str, self.client.query(name, filter="id >= 0", output_fields=["*"]))) for name in names]
        made = [str(self.client.describe_collection(name)) for name in names]
        return names, made, rows


def short_sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Let the client of Milvus ask after 10 ms whether an index is there, not after half a second."""
    sleep(min(seconds, 0.01))


@contextmanager
def milvus_place(request: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    pymilvus = pytest.importorskip("pymilvus")
    client = pymilvus.MilvusClient(str(folder / "milvus.db"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("time.sleep", short_sleep)
        yield MilvusPlace(f"milvus://{folder / 'milvus.db'}", client)
    client.close()


class MilvusFieldsPlace(MilvusPlace):
    """A collection on a stand-in for a Milvus 3 server, which is migrated in place.

    Its services ask the records which field is searched, as others change the name in their settings. They also write the old
    field, which is required until it is dropped.
    """

    into = "vector_new"

    def uri(self, **options: str) -> str:
        return f"{self.address}?collection=items&in_place=true"

    def finished(self, space: str) -> str:
        return self.into

    def fields(self) -> dict[str, int]:
        """Return the dimension of each vector field."""
        fields = self.client.describe_collection("items")["fields"]
        return {one["name"]: int(one["params"]["dim"]) for one in fields if "dim" in one["params"]}

    def searched(self) -> str:
        found = self.client.get("xcompat_records", ["items/migration"]) if self.client.has_collection("xcompat_records") else []
        begun = found[0]["value"].get("in_place") if found else None
        return str(begun["searched"]) if begun else next(iter(self.fields()))

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        searched, fields = self.searched(), self.fields()
        old = {"vector": np.full(fields["vector"], 0.5, np.float32)} if searched != "vector" and "vector" in fields else {}
        self.client.upsert("items", [{"id": int(item), **old, searched: vector_D, "price": price}])

    def dim(self) -> int:
        return self.fields()[self.searched()]

    def names(self) -> list[str]:
        return [*super().names(), *(self.fields() if self.client.has_collection("items") else ())]

    def clear(self) -> None:
        for name in super().names():
            self.client.drop_collection(name)

    def held(self, space: str) -> str:
        """Return the field of a space."""
        return {"vector": self.searched(), "vector_before": "vector"}.get(space, space)

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        field = self.held(space)
        rows = self.client.query("items", filter="id >= 0", output_fields=[field])
        return {str(row["id"]): np.array(row[field], np.float32) for row in rows if row[field] is not None}

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        """Write a vector with the state that belongs to it: one without is that of a service, and made again."""
        state = self.client.get("items", ids=[int(item)], output_fields=["xcompat_state"])[0]["xcompat_state"]
        belonging = state[:16] + xxhash.xxh3_64_hexdigest(vector_D.astype(np.float32).tobytes())
        row = {"id": int(item), self.held(space): vector_D, "xcompat_state": belonging}
        self.client.upsert("items", [row], partial_update=True)

    def everything(self) -> Any:
        rows = self.client.query("items", filter="id >= 0", output_fields=["*"])
        return self.client.describe_collection("items")["fields"], self.fields(), sorted(map(str, rows))


@contextmanager
def milvus_server_place(folder: Path) -> Iterator[Place]:
    """Start a stand-in for a server of Milvus 3, which any address with a host reaches."""
    pytest.importorskip("pymilvus")
    from milvus_server import Server

    server = Server(folder / "milvus.db")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("xcompat.stores.milvus.connect", server.connect)
        patched.setattr("time.sleep", short_sleep)
        client = server.connect()
        yield MilvusFieldsPlace("milvus://stand-in:19530", client)
        client.close()


class QdrantPlace(Place):
    """A collection of Qdrant behind an alias: in a folder that one client alone may open, or on a stand-in for a server."""

    cheap = '{"must": [{"key": "price", "range": {"lt": 3}}]}'
    first: str | None = None
    """The name of the vector that services search at first; without one, the collection has one vector."""

    def __init__(self, address: str, engine: Any = None) -> None:
        from qdrant_client import models
        from qdrant_client.http.exceptions import UnexpectedResponse

        super().__init__()
        self.address, self.engine, self.shared = address, engine, engine is not None
        self.models, self.refusals = models, (UnexpectedResponse,)

    def clear(self) -> None:
        with self.client() as client:
            for found in client.get_collections().collections:
                client.delete_collection(found.name)

    def uri(self, **options: str) -> str:
        return f"{self.address}/items" + "?" * bool(options) + "&".join(f"{name}={value}" for name, value in options.items())

    @contextmanager
    def client(self) -> Iterator[Any]:
        """Open a client of its own, or take that of the store, where only one may be open."""
        from qdrant_client import QdrantClient

        if self.engine is not None or self.opened:
            yield self.engine or self.opened[-1].client  # type: ignore[attr-defined]
            return
        client = QdrantClient(path=self.address.removeprefix("qdrant://"))
        yield client
        client.close()

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        distance = self.models.Distance({"cosine": "Cosine", "ip": "Dot", "l2": "Euclid"}[metric])
        params, payloads = (
            self.models.VectorParams(size=vectors_ND.shape[1], distance=distance),
            [{"price": price} for price in prices.values()],
        )
        with self.client() as client:
            client.create_collection("items_v1", called(self.first, params))
            client.upload_collection("items_v1", called(self.first, vectors_ND), payloads, [*prices])
            alias = self.models.CreateAlias(collection_name="items_v1", alias_name="items")
            client.update_collection_aliases([self.models.CreateAliasOperation(create_alias=alias)])

    def searched(self, client: Any) -> str | None:
        """Return the name of the vector that services write and search."""
        return None

    def held(self, client: Any, space: str) -> tuple[str, str | None]:
        """Return the collection of a space, and the name of its vector there."""
        return space, None

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        with self.client() as client:
            vector = called(self.searched(client), vector_D.tolist())
            client.upsert("items", [self.models.PointStruct(id=int(item), vector=vector, payload={"price": price})])

    def note(self, item: str, value: str | None) -> None:
        with self.client() as client:
            client.set_payload("items", {"about": value}, [int(item)])

    def empty(self, item: str) -> None:
        with self.client() as client:
            client.upsert("items", [self.models.PointStruct(id=int(item), vector={}, payload={"price": 1})])

    def delete(self, item: str) -> None:
        with self.client() as client:
            client.delete("items", [int(item)])

    def dim(self) -> int:
        with self.client() as client:
            return int(client.get_collection("items").config.params.vectors.size)

    def names(self) -> list[str]:
        with self.client() as client:
            aliases = [f"{alias.alias_name} = {alias.collection_name}" for alias in client.get_aliases().aliases]
            return sorted([*aliases, *(found.name for found in client.get_collections().collections)])

    def rows(self) -> dict[str, dict[str, Any]]:
        with self.client() as client:
            return {str(point.id): point.payload for point in client.scroll("items", limit=100_000)[0]}

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        """Read a space, as directions: the local mode brings vectors to length 1 only when it searches."""
        with self.client() as client:
            collection, name = self.held(client, space)
            points, _ = client.scroll(collection, limit=100_000, with_vectors=True)
        held = {str(point.id): point.vector if name is None else (point.vector or {}).get(name) for point in points}
        found = {item: np.array(vector) for item, vector in held.items() if isinstance(vector, list)}
        return {item: (vector / (np.linalg.norm(vector) or 1)).astype(np.float32) for item, vector in found.items()}

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        with self.client() as client:
            collection, name = self.held(client, space)
            client.update_vectors(collection, [self.models.PointVectors(id=int(item), vector=called(name, vector_D.tolist()))])

    def everything(self) -> Any:
        with self.client() as client:
            aliases = {alias.alias_name: alias.collection_name for alias in client.get_aliases().aliases}
            names = sorted(found.name for found in client.get_collections().collections)
            held = {name: client.scroll(name, limit=10_000, with_vectors=True)[0] for name in names}
            return aliases, held, {name: client.get_collection(name).config for name in names}


def called(name: str | None, vector: Any) -> Any:
    """Return what a point or a collection has of a vector with a name, or of the only one."""
    return vector if name is None else {name: vector}


@contextmanager
def qdrant_place(folder: Path, kind: type[QdrantPlace] = QdrantPlace) -> Iterator[Place]:
    """Make an empty folder of the client's local mode."""
    from qdrant_client import QdrantClient

    QdrantClient(path=str(folder / "qdrant")).close()
    yield kind(f"qdrant://{folder}/qdrant")


@contextmanager
def qdrant_server_place(kind: type[QdrantPlace] = QdrantPlace) -> Iterator[Place]:
    """Start a stand-in for a server."""
    from qdrant_server import served

    with served() as server:
        yield kind(f"qdrant://127.0.0.1:{server.port}", server.client)


class QdrantVectorsPlace(QdrantPlace):
    """A collection of Qdrant with a named vector, which is migrated in place.

    Its services ask the metadata which vector is searched, as others change the name in their settings.
    """

    first = "embedding"

    def __init__(self, address: str, engine: Any = None) -> None:
        super().__init__(address, engine)
        self.threads = self.shared  # the local mode has one transaction per collection

    def uri(self, **options: str) -> str:
        return super().uri(**{"in_place": "true", **options})

    def finished(self, space: str) -> str:
        return self.into

    def searched(self, client: Any) -> str:
        config = client.get_collection("items").config
        names = config.params.vectors.keys()
        begun = (config.metadata or {}).get("xcompat_in_place")
        return str(begun["searched"]) if begun else next(name for name in ("embedding", self.into) if name in names)

    def held(self, client: Any, space: str) -> tuple[str, str]:
        return "items", {"embedding": self.searched(client), "embedding_before": "embedding"}.get(space, space)

    def dim(self) -> int:
        with self.client() as client:
            return int(client.get_collection("items").config.params.vectors[self.searched(client)].size)

    def names(self) -> list[str]:
        with self.client() as client:
            return [*super().names(), *sorted(client.get_collection("items").config.params.vectors)]

    def rows(self) -> dict[str, dict[str, Any]]:
        with self.client() as client:
            has = self.models.HasVectorCondition(has_vector=self.searched(client))
            points, _ = client.scroll("items", self.models.Filter(must=[has]), limit=100_000)
            return {str(point.id): point.payload for point in points}


class SqlitePlace(Place):
    into = "items_new"
    cheap = "price < 3"
    metrics = ("cosine", "l2")

    def __init__(self, file: Path) -> None:
        import apsw
        import sqlite_vec

        super().__init__()
        self.file, self.connection, self.refusals = file, apsw.Connection(str(file)), (apsw.SQLError,)
        self.connection.set_busy_timeout(30_000)
        self.connection.transaction_mode = "IMMEDIATE"  # a read that becomes a write may not wait
        self.connection.enable_load_extension(True)
        self.connection.load_extension(sqlite_vec.loadable_path())

    def clear(self) -> None:
        for table in ("items", "items_new", "items_before", "items_xcompat", "xcompat_records"):
            self.connection.execute(f"DROP TABLE IF EXISTS {table}")

    def uri(self, **options: str) -> str:
        return f"sqlite://{self.file}?table=items"

    def _insert(self, vectors_ND: NDArray[np.float32], metric: str, prices: dict[int, int]) -> None:
        embedding = f"embedding float[{vectors_ND.shape[1]}] distance_metric={metric}"
        columns = f"id integer primary key, price integer, +about text, {embedding}"
        self.connection.execute(f"CREATE VIRTUAL TABLE items USING vec0({columns})")
        rows = zip(prices.items(), vectors_ND, strict=True)
        with self.connection:
            asked = "INSERT INTO items (id, price, embedding) VALUES (?, ?, ?)"
            self.connection.executemany(asked, ((*row, vector.tobytes()) for row, vector in rows))

    def put(self, item: str, vector_D: NDArray[np.float32], price: int = 1) -> None:
        vector = vector_D.astype(np.float32).tobytes()
        with self.connection:
            if list(self.connection.execute("SELECT id FROM items WHERE id = ?", (int(item),))):
                asked = "UPDATE items SET price = ?, embedding = ? WHERE id = ?"
            else:
                asked = "INSERT INTO items (price, embedding, id) VALUES (?, ?, ?)"
            self.connection.execute(asked, (price, vector, int(item)))

    def note(self, item: str, value: str | None) -> None:
        self.connection.execute("UPDATE items SET about = ? WHERE id = ?", (value, int(item)))

    def delete(self, item: str) -> None:
        self.connection.execute("DELETE FROM items WHERE id = ?", (int(item),))

    def dim(self) -> int:
        made = next(iter(self.connection.execute("SELECT sql FROM sqlite_schema WHERE name = 'items'")))[0]
        return int(made.partition("float[")[2].partition("]")[0])

    def names(self) -> list[str]:
        return sorted(name for (name,) in self.connection.execute("SELECT name FROM sqlite_schema"))

    def rows(self) -> dict[str, dict[str, Any]]:
        found = self.connection.execute("SELECT id, price, about FROM items")
        return {str(item): {"price": price, "about": about} for item, price, about in found}

    def vectors(self, space: str) -> dict[str, NDArray[np.float32]]:
        found = self.connection.execute(f"SELECT id, embedding FROM {space}")
        return {str(item): np.frombuffer(vector, np.float32) for item, vector in found}

    def spoil(self, space: str, item: str, vector_D: NDArray[np.float32]) -> None:
        self.connection.execute(f"UPDATE {space} SET embedding = ? WHERE id = ?", (vector_D.tobytes(), int(item)))

    def everything(self) -> Any:
        asked = "SELECT name, sql FROM sqlite_schema WHERE tbl_name <> 'xcompat_records' ORDER BY name"
        return list(self.connection.execute(asked)), list(self.connection.execute("SELECT * FROM items ORDER BY id"))


@contextmanager
def sqlite_place(_: pytest.FixtureRequest, folder: Path) -> Iterator[Place]:
    pytest.importorskip("apsw")
    place = SqlitePlace(folder / "items.db")
    yield place
    place.connection.close()


PLACES = {
    "postgresql": postgres_place,
    "chroma": chroma_place,
    "lancedb": lambda _, folder: nullcontext(LancePlace(folder)),
    "milvus": milvus_place,
    "milvus-in-place": lambda _, folder: milvus_server_place(folder),
    "qdrant": lambda _, folder: qdrant_place(folder),
    "qdrant-server": lambda *_: qdrant_server_place(),
    "qdrant-in-place": lambda _, folder: qdrant_place(folder, QdrantVectorsPlace),
    "qdrant-server-in-place": lambda *_: qdrant_server_place(QdrantVectorsPlace),
    "sqlite": sqlite_place,
}
"""Name of a test -> what makes an empty database in a folder, or on a server that tests share."""
READABLE = {**PLACES, "file": lambda _, folder: nullcontext(GalleryPlace(folder / "items"))}
"""Likewise, with stores that are read alone."""
