"""A stand-in for a Qdrant server: what its client sends over HTTP is done by the client's own local mode, in memory.

It keeps the settings of collections, refuses a wrong key, and can be cut off. It shares nothing with a server's storage, index
and concurrency.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from qdrant_client import QdrantClient, models
from qdrant_client.local.qdrant_local import QdrantLocal

PARAMS = ("shard_number", "replication_factor", "write_consistency_factor", "on_disk_payload", "sharding_method")


class Server:
    """A server on loopback, which reports ``statuses`` of collections, one after the other, before it reports green."""

    def __init__(self, key: str | None = None, reader: str | None = None, version: str = "1.20.0") -> None:
        self.key, self.reader, self.version = key, reader, version
        self.statuses: list[str] = []
        self.answers = 10**9
        self.client = QdrantClient(":memory:")
        engine = self.client._client
        assert isinstance(engine, QdrantLocal)
        self.engine = engine
        self.made: dict[str, dict[str, Any]] = {}
        self.indexed: dict[str, dict[str, Any]] = {}
        self.vectors: dict[tuple[str, str], dict[str, Any]] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                server.answers -= 1
                if server.answers < 0:  # cut off
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, said = server.done(self.command, self.path.split("?")[0], body, self.headers.get("api-key"))
                content = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        return self.http.server_port

    def done(self, method: str, path: str, body: bytes, key: str | None) -> tuple[int, Any]:
        reads = method == "GET" or (re.search(r"/points(/(scroll|count|query|query/batch))?$", path) and method == "POST")
        if self.key is not None and key != self.key and not (reads and key == self.reader):
            return (403 if key == self.reader else 401), {"status": {"error": "Forbidden: the key does not allow that"}}
        if path == "/":
            return 200, {"title": "a stand-in", "version": self.version}
        try:
            return 200, {"result": self.result(method, path, json.loads(body or b"{}")), "status": "ok", "time": 0.0}
        except KeyError as error:
            return 404, {"status": {"error": f"Not found: No point with id {error} found"}, "time": 0.0}
        except ValueError as error:
            return 400, {"status": {"error": f"Wrong input: {error}"}, "time": 0.0}

    def result(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if path == "/collections":
            return plain(self.engine.get_collections())
        if path == "/aliases":
            return plain(self.engine.get_aliases())
        if path == "/collections/aliases":
            return self.engine.update_collection_aliases(models.ChangeAliasesOperation(**body).actions)
        name, _, verb = path.removeprefix("/collections/").partition("/")
        if verb.startswith("vectors/"):
            return self.change_vector(name, verb.removeprefix("vectors/"), body if method == "PUT" else None)
        return getattr(self, f"{method}_{verb.replace('/', '_')}".rstrip("_").lower())(name, body)

    def get(self, name: str, _: Any) -> Any:
        info = plain(self.engine.get_collection(name))
        made = self.made.get(name, {})
        config = info["config"]
        config["params"].update({key: made[key] for key in PARAMS if key in made})
        for vector, params in config["params"]["vectors"].items():
            if (name, vector) in self.vectors:
                params.update(self.vectors[name, vector])
        for key, value in made.items():
            if key.endswith("_config"):
                known = config.get(other := key.replace("optimizers", "optimizer"))
                config[other] = {**known, **value} if known else value
        info["payload_schema"] = self.indexed.get(name, {})
        info["status"] = self.statuses.pop(0) if self.statuses else "green"
        return info

    def put(self, name: str, body: dict[str, Any]) -> Any:
        made = models.CreateCollection(**body)
        self.made[name] = body
        return self.engine.create_collection(name, made.vectors, made.sparse_vectors, made.metadata)

    def patch(self, name: str, body: dict[str, Any]) -> Any:
        asked = models.UpdateCollection(**body)
        for vector, change in (body.get("vectors") or {}).items():
            self.vectors.setdefault((name, vector), {}).update(change)
        return self.engine.update_collection(name, metadata=asked.metadata, vectors_config=asked.vectors)

    def change_vector(self, name: str, vector: str, body: dict[str, Any] | None) -> Any:
        """Add a named vector, or delete it; keep the number type, which the local mode ignores."""
        self.vectors.pop((name, vector), None)
        if body is None:
            return plain(self.engine.delete_vector_name(name, vector))
        asked = models.DenseVectorNameConfig(**body)
        self.vectors[name, vector] = {"datatype": asked.dense.datatype} if asked.dense.datatype else {}
        return plain(self.engine.create_vector_name(name, vector, asked))

    def delete(self, name: str, _: Any) -> Any:
        return self.engine.delete_collection(name)

    def put_index(self, name: str, body: dict[str, Any]) -> Any:
        schema = body["field_schema"]
        kind = schema if isinstance(schema, str) else schema["type"]
        params = None if isinstance(schema, str) else schema
        self.indexed.setdefault(name, {})[body["field_name"]] = {"data_type": kind, "params": params, "points": 0}
        return {"operation_id": 0, "status": "completed"}

    def put_points(self, name: str, body: dict[str, Any]) -> Any:
        return plain(self.engine.upsert(name, models.PointsList(**body).points))

    def put_points_vectors(self, name: str, body: dict[str, Any]) -> Any:
        asked = models.UpdateVectors(**body)
        return plain(self.engine.update_vectors(name, asked.points, update_filter=asked.update_filter))

    def post_points(self, name: str, body: dict[str, Any]) -> Any:
        asked = models.PointRequest(**body)
        return [plain(found) for found in self.engine.retrieve(name, asked.ids, asked.with_payload or False, asked.with_vector)]

    def post_points_scroll(self, name: str, body: dict[str, Any]) -> Any:
        asked = models.ScrollRequest(**body)
        points, more = self.engine.scroll(
            name, asked.filter, asked.limit, None, asked.offset, asked.with_payload or False, asked.with_vector
        )
        return {"points": [plain(point) for point in points], "next_page_offset": more}

    def post_points_count(self, name: str, body: dict[str, Any]) -> Any:
        return plain(self.engine.count(name, models.CountRequest(**body).filter))

    def post_points_delete(self, name: str, body: dict[str, Any]) -> Any:
        return plain(self.engine.delete(name, models.PointIdsList(**body)))

    def post_points_payload_delete(self, name: str, body: dict[str, Any]) -> Any:
        asked = models.DeletePayload(**body)
        assert asked.filter is not None
        return plain(self.engine.delete_payload(name, asked.keys, models.FilterSelector(filter=asked.filter)))

    def post_points_query(self, name: str, body: dict[str, Any]) -> Any:
        return self.post_points_query_batch(name, {"searches": [body]})[0]

    def post_points_query_batch(self, name: str, body: dict[str, Any]) -> Any:
        kept = {vector: array.copy() for vector, array in self.engine._get_collection(name).vectors.items()}
        found = self.engine.query_batch_points(name, models.QueryRequestBatch(**body).searches)
        self.engine._get_collection(name).vectors.update(kept)  # the local mode brings them to length 1 again, and rounds
        return [plain(each) for each in found]


def plain(model: Any) -> Any:
    return model.model_dump(mode="json", exclude_none=True)


@contextmanager
def served(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
