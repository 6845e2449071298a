"""Real embeddings in Chroma, LanceDB, Qdrant, Milvus Lite and SQLite, migrated by a process per verb, with kills in between."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import warm
from killing import KILL_AFTER
from store_places import PLACES, solve_map

import xcompat.stores
from xcompat import Fingerprint
from xcompat.core.arrays import normalise_rows

TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "text"
EMBEDDINGS = TEXT / "embeddings"
OLD, NEW = "wordllama", "all-minilm-l6"
ZEROS = (470, 994)
"""Rows of the old model that are zero: documents without words that it knows."""
STORES = {
    "chroma": ("chroma", "ChromaStore", "chromadb"),
    "lancedb": ("lancedb", "LanceStore", "lancedb"),
    "qdrant": ("qdrant_store", "QdrantStore", "qdrant_client"),
    "milvus": ("milvus", "MilvusStore", "pymilvus"),
    "sqlite": ("sqlite", "SqliteStore", "apsw"),
}
"""Place -> module and class of the store, and the package of its client."""
pytestmark = pytest.mark.skipif(not EMBEDDINGS.is_dir(), reason=f"{EMBEDDINGS} is not there")


def load(model: str, name: str) -> np.ndarray:
    return np.load(EMBEDDINGS / model / f"{name}.npy").astype(np.float32)


@pytest.fixture(scope="module")
def map_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    old, new = (load(model, "cranfield_docs")[::2] for model in (OLD, NEW))
    old, new = (rows[old.any(1)] for rows in (old, new))
    solve_map(normalise_rows(old), new, Fingerprint.from_string(OLD)).save_pretrained(folder := tmp_path_factory.mktemp("map"))
    return folder


class Collection:
    def __init__(self, kind: str, uri: str, folder: Path, model: Path) -> None:
        self.kind, self.uri, self.folder, self.model = kind, uri, folder, model
        ids = [(EMBEDDINGS / f"cranfield_{what}_ids.txt").read_text().split() for what in ("queries", "docs")]
        rows = {item: str(row) for row, item in enumerate(ids[1])}
        self.relevant: list[set[str]] = [set() for _ in ids[0]]
        with (TEXT / "cranfield" / "qrels.tsv").open() as file:
            for judged in csv.DictReader(file, delimiter="\t"):
                if int(judged["code"]) > 0:
                    self.relevant[ids[0].index(judged["query_id"])].add(rows[judged["doc_id"]])

    def run(self, verb: str, *options: object) -> str:
        given = ["--model", self.model] if verb in ("plan", "start", "verify", "switch") else []
        done = self.start("-m", "xcompat", "migrate", verb, self.uri, *given, *options)
        assert done.returncode == 0, (verb, done.stdout, done.stderr)
        return " ".join(done.stdout.split())

    def kill(self, method: str, calls: int, verb: str, *options: object) -> None:
        module, store, _ = STORES[self.kind]
        given = ["--model", self.model] if verb in ("start", "switch") else []
        done = self.start("-c", KILL_AFTER, f"stores.{module}", store, method, calls, "migrate", verb, self.uri, *given, *options)
        assert done.returncode == -9, (verb, done.stdout, done.stderr)

    def start(self, *arguments: object) -> CompletedProcess[str]:
        return warm.run(*arguments, folder=self.folder, COLUMNS="200")

    def find(self, queries_QD: np.ndarray) -> list[list[str]]:
        """Return the first ten hits of each question, by this process alone."""
        store: Any = xcompat.stores.open(self.uri)
        hits = store.search(queries_QD, top_k=10)
        store.close()
        release(self.kind, self.uri)
        return [[hit.id for hit in each] for each in hits]

    def quality(self, model: str) -> float:
        """Return nDCG@10 of the questions, embedded by a model."""
        gains, found = 1 / np.log2(np.arange(2, 12)), self.find(load(model, "cranfield_queries"))
        scores = [
            sum(gain for gain, item in zip(gains, hits, strict=False) if item in relevant) / gains[: max(1, len(relevant))].sum()
            for hits, relevant in zip(found, self.relevant, strict=True)
        ]
        return float(np.mean(scores))


def release(kind: str, uri: str) -> None:
    """End the Milvus Lite of this process, which keeps its file to itself."""
    if kind == "milvus":
        from milvus_lite.server_manager import server_manager_instance

        server_manager_instance.release_server(uri.removeprefix("milvus://").partition("?")[0])


@pytest.fixture(params=STORES)
def collection(request: pytest.FixtureRequest, tmp_path: Path, map_folder: Path) -> Collection:
    """The documents as their own client stores them, with the vectors of the old model."""
    pytest.importorskip(STORES[request.param][2])
    with PLACES[request.param](request, tmp_path) as place:
        place.fill(load(OLD, "cranfield_docs"))
        uri = place.uri()
    release(request.param, uri)
    return Collection(request.param, uri, tmp_path, map_folder)


@pytest.mark.nightly
def test_a_migration_by_a_process_per_verb_survives_kills(collection: Collection) -> None:
    """Old questions find what they found until the switch, and new questions no less after it."""
    run, kill, into = collection.run, collection.kill, "embedding_new"
    before = collection.quality(OLD)
    assert before == pytest.approx(0.32, abs=0.02)
    said = run("plan", "--from", OLD)
    assert "1,400" in said and f"2 of the first rows have no usable vector: '{ZEROS[0]}' is zero" in said
    kill("write", 2, "start", "--from", OLD, "--into", into, "--batch", 400)
    assert "filling, " in run("status")
    assert collection.quality(OLD) == before
    assert f"filled {into} in" in run("start", "--batch", 400)
    said = run("status")
    assert "0 lack a new vector" in said and "2 rows have no usable vector" in said
    said = run("verify")
    assert "1,400 rows, 0 without a new vector" in said and "2 rows have no usable old vector" in said
    assert collection.quality(OLD) == before
    kill("switch", 1, "switch")
    run("switch")
    assert (after := collection.quality(NEW)) > before - 0.02
    kill("switch_back", 1, "rollback")
    run("rollback")
    assert collection.quality(OLD) == before
    run("switch")
    kill("drop_space", 1, "finish", "--yes")
    run("finish", "--yes")
    assert collection.quality(NEW) == pytest.approx(after, abs=1e-3)
    store = xcompat.stores.open(collection.uri)
    assert json.loads(json.dumps(store.describe()))["rows"] == 1400 and len(store.spaces()) == 1
    store.close()
