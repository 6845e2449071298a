"""Every store: what a database holds is found as in memory, and migrated in place while others write, are killed and undone."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from conftest import refuses
from PIL import Image
from schedule import mostly_nightly, mostly_nightly_rows
from store_places import OLD, PLACES, READABLE, Place, map_of_galleries, solve_map, unit_vectors
from typer.testing import CliRunner

import xcompat.stores
from xcompat import Fingerprint, FingerprintMismatchError, RidgeModel, XcompatError
from xcompat.cli import app
from xcompat.embeddings.embed import Contents, embed_contents
from xcompat.encoders.standins import save_stand_in
from xcompat.models.embedder import load_embedder
from xcompat.retrieval.doctor import Finding
from xcompat.retrieval.originals import load_originals
from xcompat.retrieval.reranking import Reranker
from xcompat.retrieval.upgrading import Block
from xcompat.stores import Rows, Store, commands, doctor, lease, migration
from xcompat.stores.embedding import Embedding
from xcompat.stores.mapping import Mapping
from xcompat.stores.uri import StoreUri, split, without_credentials

pytestmark = pytest.mark.usefixtures("few_searches")
N, OLD_DIM, NEW_DIM = 300, 16, 24
DAILY = ("postgresql", "qdrant")
"""Stores whose tests take a second; those of the others run nightly, but for a whole migration."""
IN_PLACE = ("qdrant-in-place", "qdrant-server-in-place")
SWITCHING = ("lancedb", "milvus-in-place", "qdrant", "qdrant-server", *IN_PLACE)
EMPTYING = ("postgresql", "lancedb", "qdrant", *IN_PLACE)
every_store = pytest.mark.parametrize("place", PLACES, indirect=True)
also_chroma = pytest.mark.parametrize("place", mostly_nightly(PLACES, (*DAILY, "chroma").__contains__), indirect=True)
"""A test of what Chroma does in two steps, such as to exchange two names."""
any_store = pytest.mark.parametrize("place", mostly_nightly(PLACES, "qdrant".__eq__), indirect=True)
"""A test of migrations and commands, which are the same whatever the store."""
reading = pytest.mark.parametrize("place", READABLE, indirect=True)
"""A test that changes nothing by the store."""


@pytest.fixture(params=mostly_nightly(PLACES, DAILY.__contains__))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with READABLE[request.param](request, tmp_path) as found:
        yield found
        found.close()


def filled(place: Place, vectors: np.ndarray) -> Store:
    place.fill(vectors)
    found = place.open()
    if found.spaces()[found.space].fingerprint is None:
        found.name_model(found.space, OLD)
    return found


@pytest.fixture
def store(place: Place, vectors: np.ndarray) -> Store:
    return filled(place, vectors)


def disturbed(model: RidgeModel, disturb: Callable[[int], None]) -> Mapping:
    """Return the map, which calls a function with the number of each block before it maps it."""
    blocks = itertools.count()

    class Disturbed(Mapping):
        def prepare(self, store: Store, rows: Rows) -> tuple[Rows, Block]:
            disturb(next(blocks))
            return super().prepare(store, rows)

    return Disturbed(model)


def ids(hits: list[list[Any]]) -> list[list[str]]:
    return [[hit.id for hit in each] for each in hits]


def assert_mapped(place: Place, old: str, new: str, model: RidgeModel) -> None:
    before, after = place.vectors(old), place.vectors(new)
    assert before.keys() == after.keys() and before
    np.testing.assert_allclose(
        np.stack([after[item] for item in before]), Mapping(model)(np.stack(list(before.values()))), atol=1e-5
    )


@reading
@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_a_search_finds_what_comparing_all_vectors_finds(place: Place, vectors: np.ndarray, metric: str) -> None:
    if metric not in place.metrics:
        pytest.skip("it has no such metric")
    lengths = np.random.default_rng(2).uniform(0.5, 2, (N, 1)).astype(np.float32)
    place.fill(vectors * lengths, metric)
    queries = vectors[:5] + 0.1
    scores = {
        "cosine": queries @ vectors.T / np.linalg.norm(queries, axis=1, keepdims=True),
        "ip": queries @ (vectors * lengths).T,
        "l2": -np.square(queries[:, None] - (vectors * lengths)[None]).sum(2),
    }[metric]
    store = place.open(metric=metric)
    assert store.metric == metric
    hits = store.search(queries, top_k=7)
    assert ids(hits) == np.argsort(-scores, axis=1)[:, :7].astype(str).tolist()
    np.testing.assert_allclose([[hit.score for hit in each] for each in hits], -np.sort(-scores, axis=1)[:, :7], rtol=1e-4)


@reading
def test_rows_are_filtered_in_the_stores_language_and_streamed(store: Store, place: Place, vectors: np.ndarray) -> None:
    hits = store.search(vectors[:1], top_k=N, filter=place.cheap)[0]
    assert {int(hit.id) for hit in hits} == {row for row in range(N) if row % 10 < 3}
    blocks = list(store.stream(batch=77))
    assert [len(ids) for ids, _ in blocks] == [77, 77, 77, N - 3 * 77]
    found = {name: vector for ids, block in blocks for name, vector in zip(ids, block, strict=True)}
    np.testing.assert_allclose([found[str(row)] for row in range(N)], vectors, atol=1e-6)


def test_fields_of_rows_are_read(store: Store, place: Place) -> None:
    """Values that a row lacks, and rows that do not exist, are left out or empty."""
    place.note("4", 'a "red" shoe\'s')
    found = place.open().read_fields(["12", "4", "999"], ["about", "price"])
    assert found.keys() == {"4", "12"} and found["4"]["about"] == 'a "red" shoe\'s'
    assert found["12"]["price"] == 2 and not found["12"].get("about")


@also_chroma
def test_an_open_store_notices_that_another_has_switched(place: Place, vectors: np.ndarray) -> None:
    """Also where the new vectors have as many dimensions as the old ones."""
    if not place.shared:
        pytest.skip("one client alone may open it")
    place.fill(vectors)
    store, other, same = place.open(), place.open(), map_of_galleries(vectors, OLD_DIM)
    other.name_model(other.space, OLD)
    mapping = Mapping(same)
    before = ids(store.find(vectors[:9], OLD, 5))
    migration.start(other, mapping, place.into)
    migration.verify(other, mapping)
    assert ids(store.find(vectors[:9], OLD, 5)) == before
    migration.switch(other, mapping)
    if store.reports_version:
        assert store.search(mapping(vectors[:1]), 1)[0][0].version == mapping.target[0]
    with pytest.raises(FingerprintMismatchError, match="cannot be compared with"):
        store.find(vectors[:9], OLD, 5)
    found = store.find(mapping(vectors[:9]), same, 5)
    assert ids(found) == ids(place.open().search(mapping(vectors[:9]), 5)) == ids(store.search(mapping(vectors[:9]), 5))
    assert {hit.version for hits in found for hit in hits} == {mapping.target[0]}
    migration.rollback(place.open())
    assert ids(store.find(vectors[:9], OLD, 5)) == before


@every_store
def test_a_migration(store: Store, place: Place, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "LONGEST", 60.0)  # as it is without few_searches
    mapping, space = Mapping(model), store.space
    assert migration.plan(store, mapping)[:4] == (N, N, NEW_DIM, 4 * N * NEW_DIM)
    migration.start(store, mapping, place.into, batch=64)
    checked = migration.verify(store, mapping, queries=50)
    assert checked.passed and checked.rows == N and checked.compared == checked.searched == 50 and checked.overlap is not None
    old = place.vectors(space)
    store = place.open()
    assert store.space == space and store.describe()["dim"] == OLD_DIM, "the new space is not searched yet"
    migration.switch(store, mapping)
    assert_mapped(place, space + "_before", space, model)
    store = place.open()
    assert store.describe()["dim"] == NEW_DIM and store.describe()["fingerprint"] == mapping.target[0].digest
    assert store.find(mapping(vectors[:2]), model, 1)[1][0].id == "1"
    assert migration.rollback(store)[1] == 0
    store = place.open()
    assert store.describe()["fingerprint"] == OLD.digest
    assert {item: vector.tolist() for item, vector in place.vectors(space).items()} == {k: v.tolist() for k, v in old.items()}
    migration.switch(store, mapping)
    migration.finish(place.open())
    store = place.open()
    assert store.describe()["spaces"] == {place.finished(space): NEW_DIM} and store.count() == N
    refuses("has no migration: none was started, or `xcompat migrate finish` ended it", migration.status, store)


def test_rows_changed_meanwhile_are_caught_up(store: Store, place: Place, model: RidgeModel, vectors: np.ndarray) -> None:
    """Each block is changed, deleted and added to after it was read and before it is written."""
    if not place.threads:
        pytest.skip("its client writes in one thread")
    steps, space = iter(range(10_000)), store.space

    def disturb(_: int) -> None:
        step = next(steps)
        if step < 40 and store.spaces()[space].dim == OLD_DIM:  # after the switch, services write vectors of the new model
            place.put(str(1 + step * 7 % N), vectors[-1 - step])
            place.delete(str(step * 11 % N))
            place.put(str(1000 + step), vectors[step])

    migration.start(store, disturbed(model, disturb), place.into, batch=32)
    migration.verify(store, Mapping(model))
    disturb(0)
    migration.switch(store, disturbed(model, disturb))
    assert_mapped(place, space + "_before", space, model)
    assert len(place.vectors(space)) > N - 50


def test_writes_after_a_rollback_beat_earlier_ones(store: Store, place: Place, model: RidgeModel, vectors: np.ndarray) -> None:
    """Neither rows that they changed or inserted in the new space, nor rows that they delete afterwards."""
    space, mapping, new = store.space, Mapping(model), np.full(NEW_DIM, NEW_DIM**-0.5, np.float32)
    migration.start(store, mapping, place.into)
    migration.switch(store, mapping)
    for item in ("3", "5000", "5001"):
        place.put(item, new)
    assert migration.rollback(place.open())[1] >= 2, "so many rows came after the switch"
    place.put("3", vectors[10])
    place.put("5000", vectors[11])
    place.delete("5001")
    migration.switch(place.open(), mapping)
    assert_mapped(place, space + "_before", space, model)
    assert {"3", "5000"} < place.vectors(space).keys()


@pytest.mark.parametrize("place", mostly_nightly(SWITCHING, "qdrant".__eq__), indirect=True)
def test_writes_after_switch_win_over_writes_during_switch(
    store: Store, place: Place, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, original = np.eye(NEW_DIM, dtype=np.float32)[0], store.switch

    def switch(space: str) -> None:
        place.put("3", vectors[10])
        place.put("4", vectors[11])
        original(space)
        place.put("3", new)

    migration.start(store, Mapping(model), place.into)
    monkeypatch.setattr(store, "switch", switch)
    migration.switch(store, Mapping(model))
    found = place.vectors(store.space)
    np.testing.assert_allclose([found["3"], found["4"]], [new, Mapping(model)(vectors[11:12])[0]], atol=1e-5)


def test_switch_needs_start_and_verify(
    store: Store, place: Place, model: RidgeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that services write after the verification do not undo it, but one that fails does."""
    mapping, space = Mapping(model), store.space
    with monkeypatch.context() as patched:
        patched.setattr(store, "index_like", kill_when_empty(store.index_like, iter(())))
        with pytest.raises(KeyboardInterrupt):
            migration.start(store, mapping, place.into)
    store = place.open()
    assert not migration.verify(store, mapping).passed, "nothing is missing, but start has not ended"
    refuses(
        r"start of .* is not finished; run `xcompat migrate start` again, which keeps filled rows, then `verify`",
        migration.switch,
        store,
        mapping,
    )
    migration.start(store, mapping)
    spoiled = place.vectors(place.into)["5"]
    place.spoil(place.into, "5", -spoiled)
    with pytest.raises(XcompatError, match=rf"{place.into} in .* failed verification; run `xcompat migrate verify` for details"):
        migration.switch(store, mapping)
    assert migration.verify(store, mapping, queries=N).wrong == 1 and not commands.verify(store, mapping)["passed"]
    assert "stored vectors do not match their rows; run rollback, then start again" in " ".join(capsys.readouterr().out.split())
    refuses("failed verification", migration.switch, store, mapping)
    place.spoil(place.into, "5", spoiled)
    place.put("5000", unit_vectors(2, OLD_DIM)[1])
    checked = migration.verify(store, mapping)
    assert checked.passed and checked.missing == 1
    place.put("5001", unit_vectors(2, OLD_DIM)[0])
    migration.switch(place.open(), mapping)
    assert_mapped(place, space + "_before", space, model)


def test_switch_fills_and_verifies_when_all_rows_changed(store: Store, place: Place, model: RidgeModel) -> None:
    mapping, space = Mapping(model), store.space
    migration.start(store, mapping, place.into)
    for item, vector_D in enumerate(unit_vectors(N, OLD_DIM)[::-1]):
        place.put(str(item), vector_D)
    checked = migration.verify(store, mapping)
    assert (checked.passed, checked.compared, checked.missing) == (False, 0, N)
    migration.switch(place.open(), mapping)
    assert_mapped(place, space + "_before", space, model)


@any_store
def test_a_killed_start_continues(place: Place, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record that it writes is, in turn, the last one; rows that change afterwards are caught up all the same."""
    mapping = Mapping(model)
    for at in range(99):
        place.close()
        place.clear()
        store, left = filled(place, vectors[:40]), iter(range(at))
        writes = "_set_row" if hasattr(store, "_set_row") else "set_record"
        monkeypatch.setattr(store, writes, kill_when_empty(getattr(store, writes), left))
        try:
            migration.start(store, mapping)
            migration.verify(store, mapping)
        except KeyboardInterrupt:
            store = place.open()
            migration.start(store, mapping)
            migration.verify(store, mapping)
            place.put("7", vectors[50])
            assert migration.status(place.open())[1] == 1
            migration.switch(place.open(), mapping)
            assert_mapped(place, store.space + "_before", store.space, model)
        else:
            break
    assert at > 2


@also_chroma
@pytest.mark.parametrize("verb", ["switch", "rollback", "finish"])
def test_killed_verbs(place: Place, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Every call that changes the store is, in turn, the last one."""
    store, mapping = filled(place, vectors[:40]), Mapping(model)
    space = store.space
    migration.start(store, mapping, place.into)
    migration.verify(store, mapping)
    calls = {"switch": lambda s: migration.switch(s, mapping), "rollback": migration.rollback, "finish": migration.finish}
    for at in range(99):
        if verb != "switch" and migration.status(place.open())[0].state == "filling":
            migration.switch(place.open(), mapping)
        store, left = place.open(), iter(range(at))
        for name in ("set_record", "switch", "switch_back", "drop_space", "delete_orphans"):
            monkeypatch.setattr(store, name, kill_when_empty(getattr(store, name), left))
        try:
            calls[verb](store)
        except KeyboardInterrupt:
            if verb == "finish":  # there is but one finish: it is killed at one place more each time it is tried
                if place.open().record(migration.RECORD) is None:  # all but the claim was done
                    break
                continue
            if migration.status(place.open())[0].state != {"switch": "switched", "rollback": "filling"}[verb]:
                calls[verb](place.open())
        else:
            break
        if verb == "switch":
            assert_mapped(place, space + "_before", space, model)
            migration.rollback(place.open())
        else:
            assert_mapped(place, space, place.into, model)
    assert at > 0
    assert place.open().describe()["dim"] == (OLD_DIM if verb == "rollback" else NEW_DIM)


@also_chroma
def test_a_killed_finish_is_not_rolled_back(
    place: Place, model: RidgeModel, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a store with transactions still has the old vectors."""
    store, mapping = filled(place, vectors[:40]), Mapping(model)
    migration.start(store, mapping, place.into)
    migration.switch(store, mapping)
    monkeypatch.setattr(store, "drop_space", kill_when_empty(store.drop_space, iter(())))
    with pytest.raises(KeyboardInterrupt):
        migration.finish(store)
    store = place.open()
    if migration.migration_of(store).before in store.spaces():
        assert store.supports_locking
    else:
        refuses("a killed finish deleted .*_before of .*; run `xcompat migrate finish` again", migration.rollback, store)
    migration.finish(store)
    assert place.open().describe()["dim"] == NEW_DIM


def kill_when_empty(call: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    """Return a call that ends its process, once it is done, if an iterator that all calls share has come to its end."""

    def stopping(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        if next(left, None) is None:
            raise KeyboardInterrupt
        return result

    return stopping


def run_verb(verb: str, store: Store, mapping: Mapping) -> None:
    """Do a step, unless it is done."""
    state = (store.record(migration.RECORD) or {"state": "none"})["state"]
    if verb == "start":
        migration.start(store, mapping, batch=3)
    elif verb == "verify":
        assert migration.verify(store, mapping).passed
    elif verb == "switch" and state != "switched":
        migration.switch(store, mapping)
    elif verb == "rollback" and state != "filling":
        migration.rollback(store)
    elif verb == "finish" and state != "none":
        migration.finish(store)


def test_one_migration_at_once_and_its_rollback_change_nothing(store: Store, place: Place, model: RidgeModel) -> None:
    before = place.everything()
    with store.migration_lease(), pytest.raises(XcompatError, match="another"):
        migration.start(xcompat.stores.open(place.uri()), Mapping(model), place.into)
    migration.start(store, Mapping(model), place.into)
    refuses(f"is being migrated into {place.into}, not other", migration.start, store, Mapping(model), "other")
    migration.rollback(store)
    assert place.everything() == before


def test_a_claim_ends_with_its_process_or_its_time() -> None:
    now, records = 1000.0, dict[str, Any]()
    store = SimpleNamespace(uri="somewhere", record=records.get, set_record=records.__setitem__)
    ours, others = (lease.Lease(store, lambda: now) for _ in range(2))
    with ours.hold():
        claim = records[lease.RECORD]
        with pytest.raises(XcompatError, match="somewhere is being migrated by another process"), others.hold():
            pass
        records[lease.RECORD] = {**claim, "host": "elsewhere"}
        now += lease.SECONDS - 1
        with pytest.raises(XcompatError, match="by another process"), others.hold():
            pass
        now += 2
        with others.hold(), pytest.raises(XcompatError, match="by another process"):
            ours.renew()
    records[lease.RECORD] = claim  # it was lost with a connection
    with ours.hold():
        pass
    ended = subprocess.Popen(["true"])
    ended.wait()
    records[lease.RECORD] = {**claim, "pid": ended.pid}
    with others.hold():
        assert records[lease.RECORD]["pid"] == os.getpid()
    assert records[lease.RECORD] is None


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_rows_are_re_embedded(place: Place, vectors: np.ndarray, folder_of: dict[str, str], tmp_path: Path, kind: str) -> None:
    """One that cannot be read is named, and stops the switch until it is mended."""
    place.fill(vectors[:20])
    embedder, space = load_embedder(folder_of["clip"]), place.open().space
    images = [Image.new("RGB", (8, 8), (12 * row, 99, 250 - 9 * row)) for row in range(20)]
    abouts = [f"{row}.png" if kind == "images" else f"a thing called {row}" for row in range(20)]
    for row, image in enumerate(images):
        image.save(tmp_path / f"{row}.png")
        place.note(str(row), abouts[row] if row != 7 else None)
    store, folder = place.open(), tmp_path if kind == "images" else None
    filling = Embedding(embedder, "about", folder)
    assert migration.plan(store, filling).dim == embedder.dim
    assert migration.start(store, filling, place.into, batch=8).written == 19
    assert list(filling.unread) == ["7"]
    checked = migration.verify(store, filling)
    assert not checked.passed and checked.missing == checked.unmade == 1 and checked.wrong == 0 and checked.compared == 19
    place.note("7", abouts[7])
    assert migration.verify(store, filling).passed
    place.note("7", None)
    place.put("7", vectors[30])
    refuses("^1 rows of .* have no new vector; fix or delete them", migration.switch, store, filling)
    place.note("7", abouts[7])
    migration.switch(store, filling)
    batch = {"pixel_values": embedder.processor.images(images)} if folder else embedder.processor.texts(abouts)
    found = place.vectors(space)
    np.testing.assert_allclose([found[str(row)] for row in range(20)], embedder.embed(batch).numpy(), atol=1e-5)
    assert place.open().describe()["fingerprint"] == embedder.fingerprint.digest


@pytest.mark.parametrize("place", mostly_nightly([*DAILY, "sqlite", *IN_PLACE], DAILY.__contains__), indirect=True)
def test_re_ranked_searches_fill_the_new_space_and_a_migration_fills_the_rest(
    place: Place, vectors: np.ndarray, folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.fill(vectors[:20])
    texts = [f"a thing called {row}" for row in range(20)]
    for row, text in enumerate(texts):
        place.note(str(row), text)
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"id": "{row}", "text": "{text}"}}\n' for row, text in enumerate(texts)))
    store, new, originals = place.open(), load_embedder(folder_of["clip"]), load_originals(tmp_path / "texts.jsonl")
    store.name_model(store.space, OLD)
    embedding, into = Embedding(new, "about"), place.into
    all_new = new.embed(new.processor.texts(texts)).numpy()
    searching: dict[str, Any] = {"top_k": 3, "rerank_queries": all_new[5:7]}
    demanding = type(store).count_demand is not Store.count_demand

    def search(queries: np.ndarray = vectors[:2]) -> tuple[list[list[Any]], Reranker]:
        rerank = Reranker(new, originals, candidates=6, record_demand=demanding)
        return store.find(queries, OLD, rerank=rerank, **searching), rerank

    expected, rerank = search()
    assert rerank.counts.embedded and into not in store.spaces(), "without a migration, nothing is written"
    assert migration.start(store, embedding, into, budget=0).written == 0 == len(place.vectors(into))
    found, rerank = search()
    assert ids(found) == ids(expected) and len(place.vectors(into)) == rerank.counts.embedded > 6
    with monkeypatch.context() as patched:
        patched.setattr(type(originals), "embed", None)  # what was cached costs no model
        found, rerank = search()
        assert ids(found) == ids(expected) and rerank.counts.cached and not rerank.counts.embedded
    changed = expected[0][0].id
    place.put(changed, vectors[int(changed)] + 0.01)
    assert store.read_current([changed, "999"], into)[1].ids == [changed], "a changed row has no new embedding"
    place.note(changed, texts[int(changed)])
    seldom = {str(row) for row in range(20)} - place.vectors(into).keys() - {changed}
    if demanding:  # rows that searches found come first
        search(vectors[2:4])
        store.drop_space(into)
        store.set_record(migration.RECORD, None)
        store.count_demand([min(seldom)])
        assert migration.start(store, embedding, into, budget=1).written == 1
        assert place.vectors(into).keys() == {min(seldom)}, "the demand of the dropped space is forgotten"
        search()
    steps = iter(range(100))

    def stop(space: str, rows: Rows) -> int:
        if next(steps) == 1:
            raise KeyboardInterrupt
        return type(store).write(store, space, rows)

    monkeypatch.setattr(store, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        migration.start(store, embedding, batch=2)
    store = place.open()
    before = len(place.vectors(into))
    assert migration.start(store, embedding, batch=2).filled and 6 < before < 20
    assert migration.verify(store, embedding).passed
    found_new = place.vectors(into)
    np.testing.assert_allclose(np.stack([found_new[str(row)] for row in range(20)]), all_new, atol=1e-5)


@pytest.mark.parametrize("place", mostly_nightly(["lancedb", "chroma", "milvus"], "lancedb".__eq__), indirect=True)
def test_a_store_that_caches_nothing_says_so(
    store: Store, vectors: np.ndarray, folder_of: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = load_embedder(folder_of["clip"])
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"id": "{row}", "text": "thing {row}"}}\n' for row in range(N)))
    rerank = Reranker(new, load_originals(tmp_path / "texts.jsonl"), candidates=2, record_demand=True)
    asked = new.embed(new.processor.texts(["a thing"])).numpy()
    assert len(store.find(vectors[:1], OLD, 2, rerank=rerank, rerank_queries=asked)[0]) == 2
    assert "does not cache new embeddings: only PostgreSQL, Qdrant and SQLite do" in caplog.text


def test_rows_with_a_zero_vector_are_skipped(place: Place, model: RidgeModel, vectors: np.ndarray, tmp_path: Path) -> None:
    """They are zeros in the new space, and mapped as soon as a service writes a vector."""
    zeros = np.isin(np.arange(N), (7, 70))[:, None]
    store = filled(place, np.where(zeros, np.float32(0), vectors))
    space = store.space
    with pytest.raises(XcompatError, match=r"2 of 300 rows of .*'70' is zero and has no direction; .* increase --max-bad-share"):
        migration.start(store, Mapping(model), place.into, max_bad_share=0.001)
    model.save_pretrained(tmp_path / "map")
    place.close()
    uri, named = place.uri(), ["--model", str(tmp_path / "map")]
    found = said("migrate", "plan", uri, *named)
    assert "2 of the first rows have no usable vector: '7' is zero" in found
    assert "has no report; create one with `xcompat evaluate`" in found
    found = said("migrate", "start", uri, *named, "--max-bad-share", "0.01", "--rows-per-second", "1e9")
    assert "2 rows have no usable vector and get zeros in the new space: '7' is zero" in found
    assert "300 rows, 0 without a new vector 2 rows have no usable old vector" in said("migrate", "verify", uri, *named)
    place.open()
    place.put("7", vectors[7])
    migration.switch(store := place.open(), Mapping(model))
    new, expected = place.vectors(space), Mapping(model)(vectors)
    expected[70] = 0
    np.testing.assert_allclose(np.stack([new[str(row)] for row in range(N)]), expected, atol=1e-5)
    migration.finish(store)
    assert place.open().count() == N, "no row is lost"


@pytest.mark.parametrize("place", mostly_nightly(EMPTYING, DAILY.__contains__), indirect=True)
def test_rows_without_vector_are_named(store: Store, place: Place, model: RidgeModel, capsys: pytest.CaptureFixture[str]) -> None:
    place.empty("5")
    assert store.ids_without_vector(3) == ["5"]
    with pytest.raises(XcompatError, match="1 of 300 rows of .* have no usable vector, more than the share 0: '5' has none"):
        migration.start(store, Mapping(model), place.into, max_bad_share=0)
    commands.plan(store, Mapping(model), "float32")
    commands.start(store, Mapping(model), place.into)
    assert capsys.readouterr().out.count("1 rows have no vector and get none ('5')") == 2
    assert commands.verify(store, Mapping(model))["passed"]
    migration.switch(store, Mapping(model))
    assert len(place.vectors(store.space)) == N - 1
    assert place.open().count() == N


@any_store
@pytest.mark.parametrize("width", [20, 32], ids=["narrower than the new vectors", "wider"])
def test_padded_vectors_are_mapped(place: Place, vectors: np.ndarray, capsys: pytest.CaptureFixture[str], width: int) -> None:
    """Services pad to a fixed width: where the new vectors fit into it, they are padded too."""
    model = map_of_galleries(vectors, NEW_DIM)
    padded = np.pad(vectors, ((0, 0), (0, width - OLD_DIM)))
    padded[9] = vectors[0, 0]
    store, mapping = filled(place, padded), Mapping(model)
    space = store.space
    assert [hits[0].id for hits in store.find(vectors[:5], OLD, 1)] == ["0", "1", "2", "3", "4"]
    commands.plan(store, mapping, "float32")
    out = " ".join(capsys.readouterr().out.split())
    assert f"the last {width - OLD_DIM} of {width} numbers are padding: the map reads the first 16" in out
    assert "'9' has non-zero numbers after its first 16" in out
    migration.start(store, mapping, place.into)
    assert migration.verify(store, mapping).passed
    migration.switch(store, mapping)
    store = place.open()
    assert store.describe()["dim"] == max(width, NEW_DIM) == place.vectors(space)["3"].size
    np.testing.assert_allclose(place.vectors(space)["3"][:NEW_DIM], mapping(vectors[3:4])[0], atol=1e-5)
    assert [hits[0].id for hits in store.find(mapping(vectors[:5]), model, 1)] == ["0", "1", "2", "3", "4"]
    migration.finish(store)


def test_impossible_migrations_change_nothing(store: Store, place: Place, model: RidgeModel, vectors: np.ndarray) -> None:
    before = place.everything()
    stranger = solve_map(vectors, vectors, Fingerprint.from_string("another"), "new_to_old")
    refuses("maps queries, not stored vectors; .* `xcompat map --direction old_to_new`", Mapping, stranger)
    stranger.config.direction, stranger.maps_galleries = "old_to_new", True
    with pytest.raises(FingerprintMismatchError, match="has vectors of the old model@.*, but the map is for another@"):
        migration.start(store, Mapping(stranger), place.into)
    refuses(f"already has a space '{store.space}'", migration.start, store, Mapping(model), store.space)
    refuses("queries have 3 dimensions", store.search, np.ones((1, 3)))
    assert place.everything() == before


def test_inner_products_of_other_lengths_are_not_migrated(place: Place, model: RidgeModel, vectors: np.ndarray) -> None:
    if "ip" not in place.metrics:
        pytest.skip("it has no such metric")
    place.fill(np.concatenate([vectors[:3], 2 * vectors[3:4], vectors[4:]]), "ip")
    store = place.open(metric="ip")
    store.name_model(store.space, OLD)
    refuses("the vector of '3' has length 2", migration.start, store, Mapping(model), place.into)


def test_a_model_embeds_what_its_towers_are_for(image_folder_of: dict[str, str]) -> None:
    with pytest.raises(XcompatError, match="only embeds images; set --image-folder to the base folder of the paths in about"):
        Embedding(load_embedder(image_folder_of["vit"]), "about")
    for given in (["--image-folder", "there"], []):
        result = CliRunner().invoke(app, ["migrate", "plan", "file:///nowhere", *given])
        assert isinstance(result.exception, XcompatError)


@any_store
def test_service_search(store: Store, place: Place, vectors: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    turn = np.linalg.qr(np.random.default_rng(3).standard_normal((OLD_DIM, OLD_DIM)))[0].astype(np.float32)
    np.save("turned.npy", vectors @ turn)
    Path("turned_rows.py").write_text("import numpy as np\nembed = lambda texts: np.load('turned.npy')[list(map(int, texts))]\n")
    solve_map(vectors, vectors @ turn, OLD, "new_to_old").save_pretrained("map")
    place.close()
    given = ["--model", "map", "--embed-with", "turned_rows:embed", "--top-k", "1", "--show", "price"]
    found = said("gallery", "search", place.uri(), "17", *given)
    assert "│ 17 " in found.replace("┃", "│") and "price: 7" in found


def test_an_address_is_shown_without_what_is_secret() -> None:
    uri = StoreUri.parse("postgresql://me:pass%40word@db:5432/shop?table=items&sslmode=require", ("table",), passes_on=True)
    assert str(uri) == "postgresql://db:5432/shop?table=items" and "me:pass%40word@db:5432/shop?sslmode=require" in uri.client
    options = "options=-csearch_path%3Dshop%20-cjit%3Doff"
    assert StoreUri.parse(f"postgresql://db/shop?{options}", ("table",), passes_on=True).client.endswith(f"?{options}")
    assert without_credentials("qdrant://host:6333/items?api_key=secret") == "qdrant://host:6333/items"
    for scheme in ("chroma", "file", "lancedb", "milvus", "qdrant", "sqlite"):
        for slashes in ("///", "////"):
            assert str(StoreUri.parse(f"{scheme}:{slashes}data/shop?table=a", ("table",))) == f"{scheme}:///data/shop?table=a"
    for wrong, said in {
        "mongodb://host/db": "mongodb is not a kind of store",
        "milvus://host:abc/db?collection=x": "address has an invalid port",
        "chroma://host:99999/?collection=x": "address has an invalid port",
        "qdrant://host:a/x": "address has an invalid port",
    }.items():
        refuses(said, xcompat.stores.open, wrong)
    servers = ("postgresql://a:1,[::1]:2/x", "postgresql://me@a/x?user=me@x", "lancedb+s3://bucket/a@b")
    for fine in (*servers, "file:///home/me@work:2/g", "chroma:///c#@"):
        assert split(fine).scheme in fine


PASSWORDS = ["se/cret", "se#cret", "se?cret", "se?a=cret", "se[cret", "se]cret", "se@cret", "1/cret"]
SECRETS = itertools.product(["postgresql", "milvus", "qdrant", "chroma", "lancedb", "nothing"], PASSWORDS)


@pytest.mark.parametrize(
    ("scheme", "password"), mostly_nightly_rows(SECRETS, lambda scheme, password: scheme == "postgresql" or password == "se@cret")
)
def test_no_part_of_a_password_is_said_whatever_is_in_it(scheme: str, password: str) -> None:
    for uri in (f"{scheme}://me:{password}@db/x?table=y", f"{scheme}://{password}:{password}@db/x", f"://me:{password}@db/x"):
        for command in (["gallery", "search", uri, "a shoe", "--model", "m"], ["migrate", "status", uri]):
            result = CliRunner().invoke(app, command)
            assert isinstance(result.exception, XcompatError), (uri, command, result.exception)
            lines = str(result.exception), result.output
            assert "cret" not in "".join(lines) and "\n" not in lines[0], (uri, lines)


@pytest.fixture
def described(place: Place, folder_of: dict[str, str]) -> Place:
    """Texts with the vectors that a model made of them; one is another's, one has no text."""
    embedder = load_embedder(folder_of["clip"])
    texts = [f"a thing called {row}" for row in range(40)]
    made = embed_contents(embedder, Contents(texts)).embeds_ND
    made[5] = unit_vectors(1, embedder.dim)
    place.fill(made)
    for row, text in enumerate(texts):
        place.note(str(row), text if row != 9 else None)
    place.close()
    return place


def said(*arguments: str, code: int = 0) -> str:
    """Return in one line what a command prints, or what it is refused with."""
    result = CliRunner().invoke(app, list(arguments))
    line = str(result.exception) if isinstance(result.exception, XcompatError) else ""
    found = " ".join(f"{result.stdout} {line}".split())
    assert result.exit_code == code, found
    del result  # whose traceback holds the store, which may be open once
    gc.collect()
    return found


def test_queries_of_the_new_model_fit_mapped_vectors(store: Store, vectors: np.ndarray, model: RidgeModel) -> None:
    """The map's encoder, and names of the old model, are known to the vectors' model, whatever the spaces are called."""
    new, alias, mapping = Fingerprint("d" * 64, "the new model"), Fingerprint.from_string("old"), Mapping(copy.deepcopy(model))
    mapping.model.config.encoder = {"fingerprint": new.digest}
    store.set_aliases(OLD, [alias.digest])
    migration.start(store, mapping)
    mapped = mapping(vectors[7:8])
    for step, fits, asked, misfit in [
        (migration.switch, new, mapped, alias),
        (migration.rollback, alias, vectors[7:8], new),
        (migration.switch, new, mapped, alias),
        (migration.finish, new, mapped, alias),
    ]:
        step(store, mapping) if step is migration.switch else step(store)
        assert store.find(asked, fits, 1)[0][0].id == "7"
        with pytest.raises(FingerprintMismatchError, match="cannot be compared with"):
            store.find(asked, misfit, 1)


@any_store
def test_a_store_is_adopted_after_a_look(described: Place, folder_of: dict[str, str], model: RidgeModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "map")
    dim = load_embedder(folder_of["clip"]).dim
    other, wide = (save_stand_in(tmp_path / str(width), "clip", width, seed=5) for width in (dim, 12))
    look = ("gallery", "doctor", described.uri(), "--texts", "about", "--model")
    found = said(*look, folder_of["clip"], code=1)
    assert "looked at │ 39" in found and "made by this model │ 38" in found and "of another origin: 5" in found
    found = said(*look, other, code=1)
    assert "made by this model │ none" in found and "100.0%" in found
    found = said(*look, wide, code=1)
    assert "found no embeddings of this model" in found
    assert "but" in found and "has 12" in found and "made by this model │ │" in found
    plan = ("migrate", "plan", described.uri(), "--model", folder_of["clip"], "--embed", "about", "--from")
    for named, why in [(other, f"{other} made 0 of 39 sampled vectors of"), (wide, f"{wide} did not make")]:
        assert why in said(*plan, named, code=1) and described.open().describe()["fingerprint"] is None
        described.close()
    assert "set their model with --from" in said(
        "migrate", "plan", described.uri(), "--model", str(tmp_path / "map"), "--texts", "about", code=1
    )
    found = said(*plan, folder_of["clip"])
    assert f"{folder_of['clip']} made 38 of 39 sampled vectors of" in found and "see `xcompat gallery doctor`" in found
    store = described.open()
    assert store.describe()["fingerprint"] is None, "plan writes nothing"
    described.close()
    assert f"{other} made 0 of 39 sampled vectors of" in said(*look, other, "--record", code=1)
    assert f"has vectors of {folder_of['clip']}" in said(*look, folder_of["clip"], "--record")
    store = described.open()
    assert store.describe()["fingerprint"] == load_embedder(folder_of["clip"]).fingerprint.digest


def test_a_recorded_model_is_checked_again(described: Place, folder_of: dict[str, str], tmp_path: Path) -> None:
    other = save_stand_in(tmp_path / "other", "clip", load_embedder(folder_of["clip"]).dim, seed=5)
    store = described.open()
    store.name_model(store.space, load_embedder(other).fingerprint)
    del store
    described.close()
    doctor = ("gallery", "doctor", described.uri(), "--model", other, "--record", "--texts")
    migrate = (described.uri(), "--model", other, "--from", other, "--embed", "about")
    for command in ((*doctor, "about"), ("migrate", "plan", *migrate), ("migrate", "start", *migrate)):
        assert "made 0 of 39 sampled vectors of" in said(*command, code=1)
    assert "✓" not in said(*doctor, "about_nothing", code=1)


@any_store
def test_a_wrong_record_is_replaced_after_a_look(described: Place, folder_of: dict[str, str], tmp_path: Path) -> None:
    """As after a table was dropped and made again by the same name."""
    right, wrong = folder_of["clip"], Fingerprint.from_string("the model of an earlier table")
    store = described.open()
    store.name_model(store.space, wrong)
    del store
    described.close()
    plan = ("migrate", "plan", described.uri(), "--model", right, "--embed", "about", "--from", right)
    assert "replace it with `xcompat gallery doctor" in said(*plan, code=1)
    doctor = ("gallery", "doctor", described.uri(), "--record", "--model")
    assert "replace it with `xcompat gallery doctor" in said(*doctor, right, code=1), "only after a look"
    other = save_stand_in(tmp_path / "other", "clip", load_embedder(right).dim, seed=5)
    assert "made 0 of 39 sampled vectors of" in said(*doctor, other, "--texts", "about", code=1)
    assert "recorded that" in said(*doctor, right, "--texts", "about")
    assert "made 38 of 39 sampled vectors of" in said(*plan)


def test_vectors_mapped_into_a_model_s_space_are_not_recorded_as_its_own(
    described: Place, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding(OLD, 40, looked_at=39, cosine=0.6, fits=True, note="in the space of it")
    monkeypatch.setattr(doctor, "examine_store", lambda *_: found)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    name = folder_of["clip"]
    record = ("gallery", "doctor", described.uri(), "--model", name, "--texts", "about", "--record")
    plan = ("migrate", "plan", described.uri(), "--model", name, "--embed", "about", "--from", name)
    for command in (record, plan):
        assert "made 0 of 39 sampled vectors of" in said(*command, code=1)
    assert not transformers.utils.logging.is_progress_bar_enabled()
    store = described.open()
    store.name_model(store.space, load_embedder(name).fingerprint)
    del store
    described.close()
    assert "(in the space of it)" in said(*record, code=1), "even if the record says so"
    assert "are in the space of it" in said(*plan), "as an earlier migration left them"


@any_store
def test_what_cannot_be_looked_at_is_adopted_with_a_line(place: Place, folder_of: dict[str, str]) -> None:
    place.fill(unit_vectors(30, load_embedder(folder_of["clip"]).dim))
    place.note("3", None)
    place.close()
    line = said("gallery", "doctor", place.uri(), "--model", folder_of["clip"], "--texts", "about", "--record")
    assert "cannot verify that" in line and "no sampled row has texts in about" in line
    assert place.open().describe()["fingerprint"] == load_embedder(folder_of["clip"]).fingerprint.digest
