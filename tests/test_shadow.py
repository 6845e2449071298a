"""Shadows, which say what a switch would change; backfills, whose random order survives budgets and kills."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets as hf
import numpy as np
import pytest
from conftest import Run, store
from torch import Tensor

from xcompat import Fingerprint
from xcompat.data.schema import ID
from xcompat.models.embedder import Embedder
from xcompat.retrieval import Gallery, Hit, commands, ingestion, originals
from xcompat.retrieval.backfilling import Backfill, remaining_rows
from xcompat.retrieval.originals import Texts, load_originals
from xcompat.retrieval.ranking_comparison import find
from xcompat.retrieval.reranking import Reranker
from xcompat.stores.shadow import Pair, SearchSetup, Shadow, compare_ways

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
    address: str, run_xcompat: Run, gallery: Gallery, old_folder: str, compatible_folder: str, photos: Path, tmp_path: Path
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
    rerank = ("--rerank", 20, "--rerank-with", compatible_folder, "--originals", photos)
    code, said, _ = run_xcompat("shadow", gallery.path, *ways, *rerank)
    assert code == 0 and "2 queries, 40 items" in said and "embedded" in said
    ways = ("--old", old_folder, "--model", compatible_folder, "--queries", photos, "--top-k", 40)
    assert "40 queries, 40 items" in run_xcompat.output("shadow", gallery.path, *ways)


def embedded_anew(gallery: Gallery, new: Embedder) -> list[str]:
    digest = new.fingerprint.digest
    parts = [items.ids for each in gallery.segments if each.record.version == digest for _, items in each.blocks(1000)]
    return [name for part in parts for name in part]


def test_a_backfill_that_was_killed_ends_as_one_run_does(
    photos: Path, old: Embedder, new: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    model = cast("Any", SimpleNamespace(fingerprint=Fingerprint.from_string("new")))

    def rows_of(names: list[str]) -> list[str]:
        return [names[row] for row in remaining_rows(gallery, Texts(hf.Dataset.from_dict({ID: names})), model)]

    order = rows_of(ids)
    assert rows_of(np.random.default_rng(1).permutation(ids).tolist()) == order
    assert rows_of(some := sorted([*ids[::3], "not there.png"])) == [name for name in order if name in some]
    for done in (500, 1000, 1500):  # of each of ten classes a tenth, give or take five standard deviations
        counts = Counter(name.split("/")[0] for name in order[:done])
        deviation = (done * 0.1 * 0.9 * (1 - done / len(ids))) ** 0.5
        assert all(abs(counts[f"class {label}"] - done / 10) < 5 * deviation for label in range(10))
