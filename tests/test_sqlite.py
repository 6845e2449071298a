"""SQLite: which columns are copied, triggers, keys, filters, and what is refused; test_stores.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_places import OLD, SqlitePlace, sqlite_place

import xcompat.stores
from xcompat import XcompatError
from xcompat.methods import RidgeModel
from xcompat.stores import migration
from xcompat.stores.mapping import Mapping

pytest.importorskip("apsw")
pytest.importorskip("sqlite_vec")
pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 60, 8, 12


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlitePlace]:
    """An empty file."""
    with sqlite_place(request, tmp_path) as found:
        assert isinstance(found, SqlitePlace)
        yield found
        found.close()


def asked(place: SqlitePlace, statement: str, *values: Any) -> list[Any]:
    return list(place.connection.execute(statement, values))


def test_everything_beside_the_vector_is_copied(place: SqlitePlace, vectors: np.ndarray, model: RidgeModel) -> None:
    """Other vectors, partitions, text keys, and the options of the table."""
    columns = "id text primary key, shop text partition key, seen boolean, +about text, q int8[4], b bit[8], image float[2]"
    place.connection.execute(
        f"CREATE VIRTUAL TABLE items USING vec0({columns}, e float[{OLD_DIM}] distance_metric=l2, chunk_size=16)"
    )
    for row, vector in enumerate(vectors):
        values = f"i{row}", f"s{row % 3}", row % 2, None, b"\1\2\3\4", b"\7", np.ones(2, np.float32).tobytes(), vector.tobytes()
        asked(place, "INSERT INTO items VALUES (?, ?, ?, ?, vec_int8(?), vec_bit(?), ?, ?)", *values)
    with pytest.raises(
        XcompatError, match=r"the table needs a column of float vectors, but it has image, e; choose one with column="
    ):
        place.open()
    store = xcompat.stores.open(f"{place.uri()}&column=e")
    place.opened.append(store)
    store.name_model("items", OLD)
    migration.start(store, Mapping(model))
    migration.switch(store, Mapping(model))
    kept = "SELECT id, shop, seen, about, q, b, image FROM items{} ORDER BY id"
    assert asked(place, kept.format("")) == asked(place, kept.format("_before")) and len(asked(place, kept.format(""))) == N
    made = {item: np.frombuffer(vector, np.float32) for item, vector in asked(place, "SELECT id, e FROM items")}
    np.testing.assert_allclose([made[f"i{row}"] for row in range(N)], Mapping(model)(vectors), atol=1e-5)
    assert store.find(Mapping(model)(vectors[7:8]), model, 1)[0][0].id == "i7"
    assert "chunk_size=16" in asked(place, "SELECT sql FROM sqlite_schema WHERE name = 'items'")[0][0]


def test_triggers_and_views_follow_the_switch(place: SqlitePlace, vectors: np.ndarray, model: RidgeModel) -> None:
    """As LangChain makes them: a table of texts, whose trigger fills the table of vectors."""
    place.connection.execute(
        "CREATE TABLE docs (rowid INTEGER PRIMARY KEY, body TEXT, e BLOB);"
        f"CREATE VIRTUAL TABLE items USING vec0(e float[{OLD_DIM}]);"
        "CREATE TRIGGER fill AFTER INSERT ON docs BEGIN INSERT INTO items(rowid, e) VALUES (new.rowid, new.e); END;"
        "CREATE VIEW found AS SELECT body FROM docs JOIN items ON items.rowid = docs.rowid"
    )
    for row, vector in enumerate(vectors):
        asked(place, "INSERT INTO docs VALUES (?, ?, ?)", row, f"text {row}", vector.tobytes())
    store = place.open()
    assert next(store.rows(3, content="docs.body")).contents == ["text 0", "text 1", "text 2"]
    assert store.read_fields(["7"], ["docs.body"]) == {"7": {"docs.body": "text 7"}}
    store.name_model("items", OLD)
    migration.start(store, Mapping(model), batch=25)
    migration.switch(store, Mapping(model))
    new = Mapping(model)(vectors[:1])
    asked(place, "INSERT INTO docs VALUES (?, ?, ?)", 99, "text 99", new.tobytes())
    assert asked(place, "SELECT count(*) FROM found") == [(N + 1,)]
    assert migration.rollback(store)[1] == 1
    assert asked(place, "SELECT count(*) FROM found") == [(N,)]


def test_filters_are_any_condition(place: SqlitePlace, vectors: np.ndarray) -> None:
    """sqlite-vec itself finds fewer hits with OR, and refuses columns with a plus sign."""
    place.fill(vectors)
    place.note("4", "red")
    store = place.open()
    for condition, expected in [
        ("price = 1 OR price = 7", {row for row in range(N) if row % 10 in (1, 7)}),
        ("about = 'red'", {4}),
        ("id IN (SELECT value FROM json_each('[3, 5]'))", {3, 5}),
    ]:
        assert {int(hit.id) for hit in store.search(vectors[:1], N, condition)[0]} == expected
    with pytest.raises(XcompatError, match=r"sqlite:///.*no such column: prise"):
        store.search(vectors[:1], 3, "prise < 3")


def test_zero_vectors_do_not_displace_hits(place: SqlitePlace, vectors: np.ndarray) -> None:
    """Their cosine is no number, by which sqlite-vec cannot sort."""
    place.fill(np.where(np.arange(N)[:, None] % 2, vectors, np.float32(0)))
    hits = place.open().search(vectors[1:2], 5, "price < 9")[0]
    scores = vectors[1] @ vectors.T
    expected = [row for row in np.argsort(-scores) if row % 2 and row % 10 < 9][:5]
    assert [int(hit.id) for hit in hits] == expected


def test_an_unchanged_file_is_not_compared_twice(
    place: SqlitePlace, vectors: np.ndarray, model: RidgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch locks the file: whatever nobody has changed since the last round costs nothing then."""
    place.fill(vectors)
    store = place.open()
    store.name_model("items", OLD)
    migration.start(store, Mapping(model))
    monkeypatch.setattr(store, "_blocks", None)
    assert store.count("items", "items_new") == 0 and not list(store.rows(10, None, "items_new"))
    place.put("3", vectors[5])
    monkeypatch.undo()
    assert store.count("items", "items_new") == 1 and [rows.ids for rows in store.rows(10, None, "items_new")] == [["3"]]


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("sqlite://items.db?table=items", "is not an absolute path; use sqlite:///FILE"),
        ("sqlite:///nowhere.db?table=items", "file /nowhere.db does not exist"),
        ("{}?table=itms", "there is no vec0 table 'itms'; did you mean 'items'?"),
        ("{}?table=docs", "there is no vec0 table 'docs'; known: items, manhattan"),
        ("{}?table=manhattan", "manhattan compares by l1, but maps need cosine or l2"),
        ("{}?table=items&metric=ip", "has no option 'metric'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(place: SqlitePlace, vectors: np.ndarray, uri: str, why: str) -> None:
    place.fill(vectors)
    place.connection.execute("CREATE TABLE docs (body); CREATE VIRTUAL TABLE manhattan USING vec0(e float[4] distance_metric=L1)")
    with pytest.raises(XcompatError) as refusal:
        xcompat.stores.open(uri.format(f"sqlite://{place.file}"))
    assert why in str(refusal.value) and "\n" not in str(refusal.value)


def test_half_precision_is_refused(place: SqlitePlace, vectors: np.ndarray, model: RidgeModel) -> None:
    place.fill(vectors)
    store = place.open()
    store.name_model("items", OLD)
    with pytest.raises(XcompatError, match="sqlite-vec stores vectors to search as float32; remove --dtype"):
        migration.start(store, Mapping(model), dtype="float16")


def test_an_installed_package_adds_a_store(place: SqlitePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.fill(np.eye(OLD_DIM, dtype=np.float32))
    (tmp_path / "mydb-1.dist-info").mkdir()
    (tmp_path / "mydb-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mydb\nVersion: 1\n")
    names = "[xcompat.stores]\nmydb = my_database:open_store\nbroken = no_database:open_store\n"
    (tmp_path / "mydb-1.dist-info" / "entry_points.txt").write_text(names)
    code = 'from xcompat.stores import sqlite\n\ndef open_store(uri):\n    return sqlite.open_store("sqlite" + uri[4:])\n'
    (tmp_path / "my_database.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    store = xcompat.stores.open(place.uri().replace("sqlite:", "mydb:"))
    assert store.count() == OLD_DIM
    store.close()
    with pytest.raises(XcompatError, match="no_database:open_store fails: .*; update or remove its package"):
        xcompat.stores.open("broken:///items")
    with pytest.raises(XcompatError, match="nodb is not a kind of store"):
        xcompat.stores.open("nodb:///items")
