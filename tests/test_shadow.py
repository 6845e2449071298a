"""A shadow answers the same queries in two ways, says what would change, and leaves what it searches as it was."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_photos

from xcompat import Fingerprint
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, Hit, commands
from xcompat.retrieval.originals import load_originals
from xcompat.retrieval.ranking_comparison import find
from xcompat.retrieval.reranking import Reranker
from xcompat.stores.shadow import Pair, SearchSetup, Shadow, compare_ways

QUERIES = ["a dog", "a red shoe", "two cats on grass", "the letter alpha"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("shadow") / "photos", 24)


@pytest.fixture(scope="module")
def old(old_folder: str) -> Embedder:
    return load_embedder(old_folder)


@pytest.fixture(scope="module")
def new(compatible_folder: str) -> Embedder:
    return load_embedder(compatible_folder)


@pytest.fixture(scope="module")
def gallery(photos: Path, old: Embedder) -> Gallery:
    commands.build(photos.with_name("gallery"), load_originals(photos), old, "Flat", None)
    return Gallery.open(photos.with_name("gallery"))


def test_numbers_are_those_of_two_searches(gallery: Gallery, old: Embedder, new: Embedder, photos: Path) -> None:
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
def test_the_command_line(
    address: str, run_xcompat: Run, gallery: Gallery, old_folder: str, compatible_folder: str, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "queries.txt").write_text("".join(f"{query}\n" for query in QUERIES))
    ways = ("--old", old_folder, "--model", compatible_folder, "--queries", tmp_path / "queries.txt")
    out = tmp_path / "shadow.json"
    code, said, _ = run_xcompat("shadow", address.format(gallery.path), *ways, "--top-k", 24, "--out", out)
    assert code == 0 and "same hits among 24" in said and "Go: all 4 queries" in said
    told = json.loads(out.read_text())
    assert told["go"] and {each["query"] for each in told["queries"]} == set(QUERIES) and told["overlap"]["mean"] == 1
    code, _, said = run_xcompat("shadow", gallery.path, *ways, "--out", out)
    assert code == 2 and f"{out} exists" in said
    code, said, _ = run_xcompat("shadow", gallery.path, *ways, "--limit-ms", 0.001, "--limit", 2, "--top-k", 24)
    assert code == 1 and "No-go: 5 % of the queries take longer" in said and "2 queries, 24 items" in said


def test_today_with_a_re_ranking_and_queries_from_stdin(
    run_xcompat: Run, gallery: Gallery, old_folder: str, compatible_folder: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a dog\n\na cat\n"))
    ways = ("--old", old_folder, "--model", old_folder, "--queries", "-", "--top-k", 20)
    rerank = ("--rerank", 20, "--rerank-with", compatible_folder, "--originals", photos)
    code, said, _ = run_xcompat("shadow", gallery.path, *ways, *rerank)
    assert code == 0 and "2 queries, 24 items" in said and "embedded" in said


def test_images_that_ask(run_xcompat: Run, gallery: Gallery, old_folder: str, compatible_folder: str, photos: Path) -> None:
    ways = ("--old", old_folder, "--model", compatible_folder, "--queries", photos, "--top-k", 24)
    code, said, _ = run_xcompat("shadow", gallery.path, *ways)
    assert code == 0 and "24 queries, 24 items" in said
