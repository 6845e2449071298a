"""Re-ranked searches beside a naive reference, the embeddings that they keep, backfills of these, and shadows of a switch."""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets as hf
import numpy as np
import pytest
import torch
from conftest import Run, refuses, store, write_photos
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import xcompat.stores
from xcompat import Fingerprint, ProcrustesModel, XcompatError
from xcompat.core.arrays import normalise_rows
from xcompat.data.schema import ID
from xcompat.embeddings.provider import Provider, ServedMap
from xcompat.models import describe_old
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, Hit, commands, ingestion, new_embeddings, originals
from xcompat.retrieval.backfilling import Backfill, remaining_rows
from xcompat.retrieval.fallback import OldQueries
from xcompat.retrieval.ingestion import ingest
from xcompat.retrieval.new_embeddings import NewEmbeddings
from xcompat.retrieval.originals import Texts, load_originals
from xcompat.retrieval.ranking_comparison import find
from xcompat.retrieval.reranking import CANDIDATES, OLD_WEIGHT, Reranker
from xcompat.stores.base import Rows, Store
from xcompat.stores.new_embeddings import StoreEmbeddings
from xcompat.stores.shadow import Pair, SearchSetup, Shadow, compare_ways

ITEMS, DEPTH = 24, 10
NAMES = [f"{row:02}.png" for row in range(ITEMS)]


@dataclass
class Shop:
    """A gallery of an old model's embeddings of photos, two thirds of them red, and queries of a newer model that differ."""

    gallery: Gallery
    photos: Path
    old: Embedder
    newer: Embedder
    asked: NDArray[np.float32]

    def reranker(self, candidates: int = DEPTH, **options: Any) -> Reranker:
        return Reranker(self.newer, load_originals(self.photos), candidates, **options)

    def search(self, top_k: int, rerank: Reranker | None = None, **options: Any) -> list[list[Hit]]:
        return self.gallery.search(self.asked, self.newer.model, top_k, rerank=rerank or self.reranker(), **options)

    def kept(self) -> NewEmbeddings:
        model: Any = self.newer.model
        return NewEmbeddings(self.gallery.path, Embedder.from_model(model, "own").fingerprint, self.asked.shape[1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, old_folder: str, compatible_folder: str) -> Shop:
    folder, old, newer = tmp_path_factory.mktemp("shop"), load_embedder(old_folder), load_embedder(compatible_folder)
    photos, gallery = write_photos(folder / "photos", ITEMS), Gallery.create(folder / "gallery", old)
    ingest(gallery, load_originals(photos), old)
    embeds = gallery.vectors(NAMES)
    about = [{"colour": "red" if row % 3 else "blue", "album": row // 4} for row in range(ITEMS)]
    store(gallery, np.stack([embeds[name] for name in NAMES]), NAMES, about, replace=True)
    dim = newer.model.config.embedding_dim  # type: ignore[union-attr]
    asked = normalise_rows(np.random.default_rng(5).normal(size=(5, dim)).astype(np.float32))
    return Shop(gallery, photos, old, newer, asked)


@pytest.fixture
def shop(built: Shop, tmp_path: Path) -> Shop:
    photos, folder = (Path(shutil.copytree(each, tmp_path / each.name)) for each in (built.photos, built.gallery.path))
    return replace(built, gallery=Gallery.open(folder), photos=photos)


def naive_order(shop: Shop, query: NDArray[np.float32], hits: list[Hit], missing: set[str]) -> dict[str, float]:
    model: Any = shop.newer.model

    def own_view(embeds: torch.Tensor) -> NDArray[np.float32]:
        with torch.inference_mode():
            return torch.nn.functional.normalize(model.self_view(embeds), dim=-1).numpy()[0]

    scores = {}
    for hit in hits:
        if hit.id not in missing:
            pixels = shop.newer.processor.images([Image.open(shop.photos / hit.id)])
            new = own_view(shop.newer.embed({"pixel_values": pixels}, "own")) @ own_view(torch.from_numpy(query[None]))
            scores[hit.id] = (1 - OLD_WEIGHT) * new + OLD_WEIGHT * hit.score
    shift = np.mean([scores[hit.id] - hit.score for hit in hits if hit.id in scores])
    scores |= {hit.id: hit.score + shift for hit in hits if hit.id in missing}
    return {name: float(scores[name]) for name in sorted(scores, key=lambda name: -scores[name])}


def refuse_to_embed(*_: object, **__: object) -> Any:
    raise AssertionError("nothing is left to embed")


def test_originals_of_others_are_named(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    old, originals = shop.old, load_originals(shop.photos)
    hits = shop.gallery.search(old.embed(old.processor.texts(["a dog"])), old, DEPTH)[0]
    for source in (old, shop.newer):  # the newer model has made nothing of what is stored, and cannot tell
        Reranker(shop.newer, originals).notice_other_originals(source, shop.gallery, hits)
    assert not caplog.text
    first, second = (shop.photos / hit.id for hit in hits[:2])
    for file in (first, second):
        Image.new("RGB", (20, 20), "white").save(file)
    Reranker(shop.newer, originals).notice_other_originals(old, shop.gallery, hits)
    assert "2 of 8 compared originals differ from those that the gallery stores" in caplog.text
    assert first.name in caplog.text or second.name in caplog.text
    assert f"delete {shop.gallery.path / new_embeddings.FOLDER}" in caplog.text


@pytest.mark.parametrize("shift", [0, 1])
def test_originals_of_other_items_are_noticed_with_a_map(shift: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw, old, names = np.random.default_rng(0), Fingerprint.from_string("old"), [f"item {row}" for row in range(20)]
    new_ND, weight_Dd = draw.normal(size=(20, 6)).astype(np.float32), draw.normal(size=(6, 4))
    config = ProcrustesModel.config_class(old=describe_old(old, 4), embedding_dim=6)
    model = ProcrustesModel(config).set_map(torch.from_numpy(weight_Dd), torch.zeros(4)).eval()
    gallery = Gallery.create(tmp_path / "gallery", old, dim=4)
    store(gallery, normalise_rows((new_ND @ weight_Dd + 0.5 * draw.normal(size=(20, 4))).astype(np.float32)), names)
    wanted = {hit.id: hit for hit in gallery.search(np.ones((1, 4), np.float32), old, 20)[0]}
    rerank = Reranker(ServedMap(model, Provider(refuse_to_embed, "new")))
    rerank._notice_unrelated_originals(gallery, wanted, dict(zip(names, np.roll(new_ND, shift, axis=0), strict=True)))
    assert ("the originals seem to be other items" in caplog.text) == bool(shift)


def test_models_choose_weights_and_numbers_within_ranges(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    newer: Any = shop.newer
    assert (Reranker(newer).old_weight, Reranker(newer).candidates) == (OLD_WEIGHT, CANDIDATES)
    monkeypatch.setattr(newer.model.config, "rerank_old_weight", 0.0)
    monkeypatch.setattr(newer.model.config, "rerank_candidates", 50)
    assert Reranker(newer).old_weight == 0 and Reranker(newer, old_weight=0.5).old_weight == 0.5
    assert Reranker(newer).candidates == 50 and Reranker(newer, candidates=7).candidates == 7
    for numbers, message in (({"candidates": 0}, "at least 1"), ({"old_weight": 1.0}, "from 0 to below 1")):
        refuses(message, shop.reranker, **numbers)
    refuses("--images", shop.search, 10, Reranker(shop.newer))


def test_order_equals_naive_reference(shop: Shop) -> None:
    plain = shop.gallery.search(shop.asked, shop.newer.model, DEPTH)
    missing = {plain[0][0].id, plain[1][2].id}
    expected = [naive_order(shop, query, hits, missing) for query, hits in zip(shop.asked, plain, strict=True)]
    rerank = shop.reranker()
    (shop.photos / min(missing)).unlink()
    (shop.photos / max(missing)).write_bytes(b"no image")
    found = shop.search(4, rerank)
    for hits, scores in zip(found, expected, strict=True):
        assert [hit.id for hit in hits] == list(scores)[:4]
        np.testing.assert_allclose([hit.score for hit in hits], list(scores.values())[:4], atol=1e-5)
    candidates = {hit.id for hits in plain for hit in hits}
    assert rerank.counts.missing == 2 and rerank.counts.embedded == len(candidates) - 2
    assert str(rerank.counts).endswith(", 2 unreadable")
    assert [list(map(str, hits)) for hits in found] != [list(map(str, hits[:4])) for hits in plain]


def test_old_queries_stores_filters_and_groups_are_reranked(shop: Shop) -> None:
    old_QD = np.random.default_rng(3).normal(size=(len(shop.asked), shop.old.dim)).astype(np.float32)
    plain = shop.gallery.search(old_QD, shop.old, DEPTH)
    found = shop.gallery.search(old_QD, shop.old, DEPTH, rerank=shop.reranker(), rerank_queries=shop.asked)
    for query, hits, candidates in zip(shop.asked, found, plain, strict=True):
        assert [hit.id for hit in hits] == list(naive_order(shop, query, candidates, set()))
    expected = shop.search(4)
    store, rerank = xcompat.stores.open(f"file://{shop.gallery.path}"), shop.reranker()
    found = Store.find(store, shop.asked, shop.newer.model, 4, rerank=rerank)
    for hits, wanted in zip(found, expected, strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in wanted]
        np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in wanted], atol=1e-5)
    assert rerank.counts.embedded > 0 and rerank.counts.cached == 0, "only galleries keep new embeddings"
    rerank = shop.reranker()
    for hits in shop.search(5, rerank, where={"colour": "blue"}):
        assert len(hits) == 5 and {hit.metadata["colour"] for hit in hits if hit.metadata} == {"blue"}
    for hits in shop.search(5, rerank, group_by="album"):
        assert len({hit.group for hit in hits}) == 5
    old_queries = OldQueries(shop.old, np.roll(shop.asked, 1, axis=0)[:, : shop.old.dim], 0.5)
    assert all(len(hits) == 3 for hits in shop.search(3, rerank, old_queries=old_queries))
    refuses("dimensions", shop.search, 3, rerank, rerank_queries=shop.asked[:, :3])


def test_budgets_and_the_cache_limit_what_is_embedded(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    rerank = shop.reranker(budget=3)
    assert all(len(hits) == 5 for hits in shop.search(5, rerank))
    assert rerank.counts.embedded == 3
    shop.gallery.search(-shop.asked, shop.newer.model, 5, rerank=rerank)
    assert rerank.counts.embedded == 3
    first, again = shop.search(4), shop.reranker()
    monkeypatch.setattr(type(again.originals), "embed", refuse_to_embed)
    assert shop.search(4, again) == first
    assert again.counts.embedded == 0 and again.counts.cached > 0
    with pytest.raises(AssertionError, match="nothing is left"):
        shop.search(4, shop.reranker(keep=False))


def test_changed_originals(shop: Shop) -> None:
    shop.search(10, shop.reranker(ITEMS))
    gallery, kept = shop.gallery, shop.kept()
    assert kept.known_ids([*NAMES, "absent"], gallery.generation) == kept.get(NAMES, gallery.generation).keys() == set(NAMES)
    state = gallery.generation
    gallery.add(np.ones((1, 8)), [NAMES[3]], replace=True)
    gallery.remove([NAMES[4]])
    gallery.commit()
    assert kept.get(NAMES, gallery.generation).keys() == set(NAMES) - {NAMES[3], NAMES[4]}
    kept.put({NAMES[3]: np.ones(kept.dim, np.float32)}, state)  # by a search that still sees the state before
    assert NAMES[3] not in kept.get(NAMES, gallery.generation)
    kept.put({NAMES[3]: np.ones(kept.dim, np.float32)}, gallery.generation)
    assert NAMES[3] in kept.get(NAMES, gallery.generation)
    gallery.rollback(state)
    assert kept.get(NAMES, gallery.generation).keys() == set(NAMES) - {NAMES[3], NAMES[4]}


def test_backfill_by_demand(shop: Shop, tmp_path: Path) -> None:
    gallery, newer, originals = shop.gallery, shop.newer, load_originals(shop.photos)
    shutil.copytree(gallery.path, tmp_path / "other")
    wanted = {hit.id for hits in shop.search(4, shop.reranker(4, record_demand=True, budget=6)) for hit in hits}
    plan = Backfill(gallery, originals, newer, budget=5)
    assert len(plan.cached) == 6 and plan.items == 5
    first = [plan.originals.ids[row] for row in plan.to_embed.tolist()]
    assert set(first[: len(wanted) - 6]) <= wanted and not set(first[len(wanted) - 6 :]) & wanted
    added = plan.run()
    assert (added.added, added.cached) == (5, 6) and gallery.counts()[newer.fingerprint] == 11
    assert Backfill(gallery, originals, newer).run().added == ITEMS - 11

    in_one_go = Gallery.open(tmp_path / "other")
    assert Backfill(in_one_go, originals, newer).run().added == ITEMS
    one, other = gallery.vectors(NAMES), in_one_go.vectors(NAMES)
    np.testing.assert_allclose([one[name] for name in NAMES], [other[name] for name in NAMES], atol=1e-6)
    assert gallery.metadata(NAMES) == in_one_go.metadata(NAMES)
    assert len(shop.kept().get(NAMES, gallery.generation)) == 6, "the gallery holds views, and re-ranking own embeddings"


def test_damaged_or_locked_cache_stops_no_search(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    expected = shop.search(4)
    (file,) = (shop.gallery.path / "new_embeddings").glob("*.sqlite")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE items SET embedding = zeroblob(length(embedding))")
    connection.close()
    rerank = shop.reranker()
    assert shop.search(4, rerank) == expected  # checksums differ: embedded again
    assert rerank.counts.cached == 0 and rerank.counts.embedded > 0
    for beside in file.parent.glob("*.sqlite*"):
        beside.write_bytes(b"damaged" * 1000)
    assert shop.search(4) == expected
    assert "new embeddings are not cached" in caplog.text and str(file) in caplog.text


def test_full_disk_stops_no_search(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    expected = shop.search(4, shop.reranker(keep=False))
    rerank = shop.reranker(record_demand=True)
    kept = rerank._cache(shop.gallery)
    kept._connection.execute("PRAGMA max_page_count = 1")  # SQLite raises it to the size of the file, which then cannot grow

    def fill() -> None:
        for row in range(1000):
            kept.put({f"other {row}": shop.asked[0]}, 0)

    refuses("database or disk is full", fill)
    before = len(kept)
    assert shop.search(4, rerank) == expected
    assert "database or disk is full" in caplog.text and "the search continues" in caplog.text and len(kept) == before
    kept._connection.execute(f"PRAGMA max_page_count = {2**30}")
    assert shop.search(4, rerank) == expected
    assert len(kept) == before + rerank.counts.embedded // 2


@pytest.mark.parametrize("fails", [False, True])
def test_rows_that_a_store_does_not_find_are_not_cached(shop: Shop, fails: bool) -> None:
    class DeletedRows:
        def read_current(self, *_: object) -> tuple[dict[str, NDArray[np.float32]], Rows]:
            if fails:
                raise XcompatError("the store is unavailable")
            return {}, Rows([], np.empty((0, 8), np.float32), [])

    store: Any = DeletedRows()
    hits = shop.gallery.search(shop.asked, shop.newer.model, DEPTH)
    rerank, plain = shop.reranker(), shop.reranker()
    assert rerank.order(shop.asked, hits, cache=StoreEmbeddings(store, "new")) == plain.order(shop.asked, hits)
    assert rerank.counts.embedded == plain.counts.embedded > 0


def test_writers_of_several_processes_keep_all(tmp_path: Path) -> None:
    model = Fingerprint.from_string("new")

    def write(part: int) -> None:
        kept = NewEmbeddings(tmp_path, model, 4)
        for row in range(20):
            kept.put({f"{part}-{row}": np.full(4, part, np.float32)}, 0)
        kept.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert len(NewEmbeddings(tmp_path, model, 4)) == 80
    refuses("does not hold embeddings of", NewEmbeddings, tmp_path, model, 5)


def test_process_waits_while_another_creates_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Fingerprint.from_string("new")
    path = tmp_path / new_embeddings.FOLDER / f"{model.digest[:16]}.sqlite"
    path.parent.mkdir()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # another process between opening a new file and its first commit
    monkeypatch.setattr(new_embeddings, "LOCK_SECONDS", 0.0)
    refuses("database is locked", NewEmbeddings, tmp_path, model, 2)
    monkeypatch.setattr(new_embeddings, "LOCK_SECONDS", 10.0)
    waits = list[float]()

    def finish_other(seconds: float) -> None:
        waits.append(seconds)
        other.execute("COMMIT")

    monkeypatch.setattr(new_embeddings.time, "sleep", finish_other)
    kept = NewEmbeddings(tmp_path, model, 2)
    kept.put({"a": np.ones(2, np.float32)}, 0)
    assert kept.get(["a"], 0).keys() == {"a"} and len(waits) == 1
    other.close()


def test_interrupted_writes_and_equal_hashes_mix_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = NewEmbeddings(tmp_path, Fingerprint.from_string("new"), 2)
    kept.put({"a": np.ones(2, np.float32)}, 0)

    class Dying(dict[str, Any]):
        def items(self) -> Any:
            yield "b", np.ones(2, np.float32)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.put(Dying(), 0)
    kept.close()
    assert NewEmbeddings(tmp_path, Fingerprint.from_string("new"), 2).get(["a", "b"], 0).keys() == {"a"}
    kept = NewEmbeddings(tmp_path, Fingerprint.from_string("new"), 2)
    monkeypatch.setattr(new_embeddings, "_hash", lambda name: (7, name.encode()))
    kept.put({"a": np.ones(2, np.float32)}, 0)
    assert kept.get(["a"], 0).keys() == {"a"} and not kept.get(["b"], 0) and not kept.known_ids(["b"], 0)
    kept.put({"b": np.zeros(2, np.float32)}, 0)
    assert kept.get(["b"], 0).keys() == {"b"} and not kept.get(["a"], 0)
    assert kept.get(["b", "a"], 0).keys() == kept.known_ids(["b", "a"], 0) == {"b"}


def test_caches_keep_their_limits(shop: Shop, tmp_path: Path) -> None:
    shop.search(4, shop.reranker())
    again = shop.reranker(cache_days=0)
    shop.search(4, again)
    assert again.counts.cached == 0 and again.counts.embedded > 0, "all are too old"
    assert len(shop.kept()) < again.counts.embedded, "older ones are deleted when others are stored"
    small = shop.reranker(ITEMS, cache_bytes=20_000)
    shop.search(4, small)
    path = shop.kept().path
    assert small.counts.embedded and path.stat().st_size < 100_000
    model, dim = Fingerprint.from_string("new"), 256
    kept = NewEmbeddings(tmp_path, model, dim, max_bytes=200_000)
    for start in range(0, 1000, 50):
        kept.put({str(row): np.full(dim, row, np.float32) for row in range(start, start + 50)}, 0)
    assert 50 <= len(kept) < 200
    assert kept.get(["999", "0"], 0).keys() == {"999"}
    assert NewEmbeddings(tmp_path, model, dim, max_days=0).get(["999"], 0) == {}


def test_images_at_addresses_are_reranked(shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    embeds = shop.gallery.vectors(NAMES)
    about = [{"url": f"https://shop.example/{name}?token=secret"} for name in NAMES]
    store(shop.gallery, np.stack([embeds[name] for name in NAMES]), NAMES, about, replace=True)
    wanted = shop.search(DEPTH, shop.reranker(keep=False))
    by_address = {"address_column": "url", "keep": False}
    refused = Reranker(shop.newer, None, DEPTH, **by_address)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", 443))])
    assert shop.search(DEPTH, refused) == shop.gallery.search(shop.asked, shop.newer.model, DEPTH), "old scores stay"
    said = " ".join("".join(capsys.readouterr()).split())
    assert refused.counts.missing == len({hit.id for hits in wanted for hit in hits}) and "secret" not in said
    assert said.count("images of shop.example cannot be downloaded: shop.example (127.0.0.1) is not a public") == 1
    asked: list[str] = []

    def fetch(url: str, _: bool) -> bytes:
        asked.append(url)
        return (shop.photos / url.partition("?")[0].rpartition("/")[2]).read_bytes()

    monkeypatch.setattr("xcompat.retrieval.addressed_images.fetch", fetch)
    monkeypatch.setattr("xcompat.retrieval.addressed_images.IN_MEMORY", 5)
    for hits, others in zip(shop.search(DEPTH, Reranker(shop.newer, None, DEPTH, **by_address)), wanted, strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in others]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in others], abs=1e-6), "in batches of 5"
    assert len(asked) == len(set(asked)) == len({hit.id for hits in wanted for hit in hits})
    with pytest.raises(XcompatError, match="no candidate has an address in its metadata under 'link'"):
        shop.search(DEPTH, Reranker(shop.newer, None, DEPTH, address_column="link"))
    refuses("not both", shop.reranker, address_column="url")


QUERIES = ["a dog", "a red shoe", "two cats on grass", "the letter alpha"]


@pytest.fixture(scope="module")
def gallery(photos: Path, old: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    folder = tmp_path_factory.mktemp("shadow") / "gallery"
    commands.build(folder, load_originals(photos), old, "Flat", None)
    return Gallery.open(folder)


def test_numbers_of_a_shadow_are_those_of_two_searches(gallery: Gallery, old: Embedder, new: Embedder, photos: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in gallery.path.rglob("*")}
    rerank = Reranker(new, load_originals(photos), keep=False)
    for way in (SearchSetup(new), SearchSetup(new, rerank=rerank)):
        *_, seen = compare_ways(gallery, SearchSetup(old), way, QUERIES, top_k=5)
        found = [[[hit.id for hit in find(gallery, old, query, 5, None)] for query in QUERIES]]
        found += [[[hit.id for hit in find(gallery, new, query, 5, None, way.rerank)] for query in QUERIES]]
        shares = [len({*one} & {*other}) / 5 for one, other in zip(*found, strict=True)]
        assert [pair.overlap for pair in seen.pairs] == shares and seen.overlap[0] == pytest.approx(sum(shares) / len(shares))
        assert seen.same_first == sum(one[0] == other[0] for one, other in zip(*found, strict=True)) / len(QUERIES)
        assert [pair.overlap for pair in seen.disagreements()] == sorted(share for share in shares if share < 1)
        assert all(0 < median <= most for median, most in (seen.milliseconds(0), seen.milliseconds(1)))
    assert {file: file.stat().st_mtime_ns for file in gallery.path.rglob("*")} == before


def hits(names: str) -> list[Hit]:
    return [Hit(name, 1.0, Fingerprint("0", "m"), None) for name in names]


@pytest.mark.parametrize(
    ("new", "items", "limit_ms", "failed", "reason"),
    [
        ("abc", 100, None, [], "all 3 queries were answered"),
        ("abc", 100, 1000.0, [], "95 % of them within 200 ms"),
        ("abc", 100, 100.0, [], "5 % of the queries take longer than 200 ms; the limit is 100 ms"),
        ("xyz", 100, None, [], "only 0.0 % of the hits are the same, close to chance"),
        ("abc", 100, None, [("a", "no memory")], "the new configuration failed 1 queries, e.g. 'a'"),
    ],
)
def test_reasons_against(new: str, items: int, limit_ms: float | None, failed: list[tuple[str, str]], reason: str) -> None:
    pairs = [Pair(query, hits("abc"), hits(new), (0.1, 0.2)) for query in "abc"]
    answer = Shadow(3, items, pairs, failed).answer(limit_ms)
    assert reason in answer.reason and answer.go is ("answered, 95" in answer.reason or reason.startswith("all"))


@pytest.mark.parametrize("address", ["{}", "file://{}"])
def test_a_shadow_on_the_command_line(
    address: str, run_xcompat: Run, gallery: Gallery, old_folder: str, compatible_folder: str, tmp_path: Path
) -> None:
    (tmp_path / "queries.txt").write_text("".join(f"{query}\n" for query in QUERIES))
    ways = ("--old", old_folder, "--model", compatible_folder, "--queries", tmp_path / "queries.txt")
    out = tmp_path / "shadow.json"
    code, said, _ = run_xcompat("shadow", address.format(gallery.path), *ways, "--top-k", 40, "--out", out)
    assert code == 0 and "same hits among 40" in said and "Go: all 4 queries" in said
    told = json.loads(out.read_text())
    assert told["go"] and {each["query"] for each in told["queries"]} == set(QUERIES) and told["overlap"]["mean"] == 1
    assert f"{out} exists" in run_xcompat.refusal("shadow", gallery.path, *ways, "--out", out)
    code, said, _ = run_xcompat("shadow", gallery.path, *ways, "--limit-ms", 0.001, "--limit", 2, "--top-k", 40)
    assert code == 1 and "No-go: 5 % of the queries take longer" in said and "2 queries, 40 items" in said


def test_a_shadow_of_a_re_ranking_from_stdin_and_of_images(
    run_xcompat: Run, gallery: Gallery, old_folder: str, compatible_folder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a dog\n\na cat\n"))
    ways = ("--old", old_folder, "--model", old_folder, "--queries", "-", "--top-k", 20)
    rerank = ("--rerank", 20, "--rerank-with", compatible_folder, "--images", photos)
    code, said, _ = run_xcompat("shadow", gallery.path, *ways, *rerank)
    assert code == 0 and "2 queries, 40 items" in said and "embedded" in said
    ways = ("--old", old_folder, "--model", compatible_folder, "--queries", photos, "--top-k", 40)
    assert "40 queries, 40 items" in run_xcompat.output("shadow", gallery.path, *ways)


def embedded_anew(gallery: Gallery, new: Embedder) -> list[str]:
    digest = new.fingerprint.digest
    parts = [items.ids for each in gallery.segments if each.record.version == digest for _, items in each.blocks(1000)]
    return [name for part in parts for name in part]


def test_a_killed_backfill(photos: Path, old: Embedder, new: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.build(tmp_path / "gallery", load_originals(photos), old, "Flat", None)
    gallery = Gallery.open(tmp_path / "gallery")
    monkeypatch.setattr(ingestion, "COMMIT_EVERY", -1.0)
    monkeypatch.setattr(originals, "IMAGES_AT_ONCE", 1)
    monkeypatch.setattr(originals, "images_per_batch", lambda *_: 4)
    plan, embed, calls = Backfill(gallery, load_originals(photos), new, 20), new.embed, []

    def dies_after(batch: dict[str, Tensor]) -> Tensor:
        calls.append(batch)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return embed(batch)

    order = [f"{row:02}.png" for row in plan.remaining]
    monkeypatch.setattr(new, "embed", dies_after)
    with pytest.raises(KeyboardInterrupt):
        plan.run()
    gallery.close()
    monkeypatch.setattr(new, "embed", embed)
    seen = Gallery.open(gallery.path)
    assert embedded_anew(seen, new) == order[:12] and len(seen) == 40
    assert Backfill(seen, load_originals(photos), new, 8).run().added == 8
    assert embedded_anew(seen, new) == order[:20] and seen.damage() == []
    assert sorted(order) != order and sorted(order) == sorted(name.name for name in photos.iterdir())
    assert Backfill(seen, load_originals(photos), new).run().added == 20


def test_the_order_of_a_backfill_depends_on_ids_alone(tmp_path: Path) -> None:
    ids = [f"class {label}/{number}.png" for label in range(10) for number in range(200)]
    empty = Gallery.create(tmp_path / "gallery", Fingerprint.from_string("old"), dim=2)
    gallery = store(empty, np.random.default_rng(0).normal(size=(len(ids), 2)), ids)
    model = SimpleNamespace(fingerprint=Fingerprint.from_string("new"))

    def rows_of(names: list[str]) -> list[str]:
        return [names[row] for row in remaining_rows(gallery, Texts(hf.Dataset.from_dict({ID: names})), model)]

    order = rows_of(ids)
    assert rows_of(np.random.default_rng(1).permutation(ids).tolist()) == order
    assert rows_of(some := sorted([*ids[::3], "not there.png"])) == [name for name in order if name in some]
    for done in (500, 1000, 1500):  # of each of ten classes a tenth, give or take five standard deviations
        counts = Counter(name.split("/")[0] for name in order[:done])
        deviation = (done * 0.1 * 0.9 * (1 - done / len(ids))) ** 0.5
        assert all(abs(counts[f"class {label}"] - done / 10) < 5 * deviation for label in range(10))
