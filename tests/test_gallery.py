"""Galleries against a dictionary: what is added is found, what is committed stays, what is refused changes nothing."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from conftest import refuses, refusing, store
from schedule import mostly_nightly

from xcompat import Fingerprint, XcompatError
from xcompat.core.checksums import json_checksum
from xcompat.retrieval import Gallery, faiss_building, filtered_search
from xcompat.retrieval.manifest import read_manifest

DIM = 8
CLIP, OTHER = Fingerprint.from_string("clip"), Fingerprint.from_string("other")


def vectors(count: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)


def names(count: int, prefix: str = "item") -> list[str]:
    return [f"{prefix} {number}" for number in range(count)]


def create(folder: Path, **options: Any) -> Gallery:
    return Gallery.create(folder / "gallery", CLIP, **{"dim": DIM, **options})


def naive(stored: dict[str, np.ndarray], queries: np.ndarray, k: int, metric: str = "cosine") -> list[list[str]]:
    ids, matrix = list(stored), np.array(list(stored.values()), np.float64)
    queries = queries.astype(np.float64)
    if metric == "cosine":
        matrix, queries = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (matrix, queries))
    scores = -((queries[:, None] - matrix[None]) ** 2).sum(-1) if metric == "l2" else queries @ matrix.T
    return [[ids[row] for row in order] for order in np.argsort(-scores, axis=1)[:, :k].tolist()]


def found(gallery: Gallery, queries: np.ndarray, k: int, **options: Any) -> list[list[str]]:
    return [[hit.id for hit in hits] for hits in gallery.search(queries, CLIP, top_k=k, **options)]


def test_nothing_is_there_before_the_commit_and_everything_after_reopening(tmp_path: Path) -> None:
    gallery = create(tmp_path)
    gallery.add(vectors(5), names(5), [{"n": number} for number in range(5)])
    assert len(gallery) == 0 and found(gallery, vectors(1), 3) == [[]]
    gallery.close()
    assert len(Gallery.open(gallery.path)) == 0 and gallery.damage() == [], "what is not committed is forgotten"
    gallery.add(vectors(5), names(5), [{"n": number} for number in range(5)])
    assert gallery.commit() == 1
    again = Gallery.open(gallery.path)
    assert len(again) == 5 and [hit.metadata for hit in again.search(vectors(5)[[2]], CLIP, top_k=1)[0]] == [{"n": 2}]
    assert again.find(["item 1", "nobody"]) == [CLIP, None]
    unknown = ["\ud800", "item 1", "é"]  # half a surrogate pair, as a name of a file may hold
    assert again.find(unknown) == [None, CLIP, None] and again.metadata(unknown) == [None, {"n": 1}, None]
    refuses(r"'\\ud800' is not in the gallery \(1 of 2 ids are not\)", again.remove, ["\ud800", "item 1"])


@pytest.mark.parametrize("version", [None, CLIP])
def test_an_array_may_be_used_again_before_the_commit(version: Fingerprint | None, tmp_path: Path) -> None:
    gallery, embeds = create(tmp_path), vectors(3)
    embeds /= np.linalg.norm(embeds, axis=1, keepdims=True)  # what is of length 1 already needs no other array
    given = embeds.copy()
    gallery.add(given, names(3), version=version)
    given[:] = given[::-1].copy()
    gallery.commit()
    assert found(gallery, embeds, 1) == [[name] for name in names(3)]


def test_long_texts_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = create(tmp_path)
    for name in ("staging", "compaction"):
        monkeypatch.setattr(f"xcompat.retrieval.{name}.FLUSH_BYTES", 100_000)
    for part in range(4):
        gallery.add(vectors(30, part), names(30, f"part {part}"), [{"text": "word " * 500}] * 30)
    gallery.commit()
    written = [segment.record.name for segment in gallery.segments]
    assert [len(segment) for segment in gallery.segments] == [60, 60] and gallery.damage() == []
    gallery.compact()
    assert [segment.record.name for segment in gallery.segments] == written, "they are not small, so nothing is to be joined"


def test_filters_take_values_of_other_kinds_and_keep_them_apart(tmp_path: Path) -> None:
    gallery = create(tmp_path)
    values = [("red", 2020, [1, 2]), ("blue", "2020", None), ("green", 2021, [[1]])]
    store(gallery, vectors(4), names(4), [*(dict(zip("cyt", each, strict=True)) for each in values), None])

    def left(where: dict[str, Any]) -> set[int]:
        return {int(name.split()[1]) for name in found(gallery, vectors(1, 1), 4, where=where)[0]}

    for kind in (tuple, set, frozenset, np.array, list):
        assert left({"c": kind(["red", "blue"])}) == {0, 1}, kind
    assert left({"y": np.int64(2020)}) == {0} and left({"y": "2020"}) == {1} and left({"y": np.array(2020)}) == {0}
    assert left({"y": range(2019, 2022)}) == {0, 2} and left({"t": [(1, 2)]}) == {0} and left({"t": None}) == {1}
    assert left({"t": [None, [1, 2]]}) == {0, 1} and left({"nobody has it": None}) == set()
    assert left({"c": np.str_("red")}) == {0} and left({"c": ()}) == left({"c": "mauve"}) == set()
    for where, said in (
        ({"y": np.datetime64("2020-01-01")}, "the filter of 'y' holds a date; give texts, numbers"),
        ({"c": [b"red"]}, "the filter of 'c' holds a bytes"),
        ({"c": (each for each in "ab")}, "the filter of 'c' holds a generator"),
        ({7: "red"}, "the filter {7: 'red'} is not a dictionary of metadata keys; use e.g. {'colour': 'red'}"),
        ("c=red", "the filter 'c=red' is not a dictionary"),
    ):
        refuses(re.escape(said), left, where)


def ids_in(gallery: Gallery) -> set[str]:
    return {name for segment in gallery.segments for name in segment.ids(segment.present())}


@pytest.mark.parametrize("seed", mostly_nightly(range(3), lambda seed: seed == 1))
def test_rollbacks_agree_with_an_undo_stack(seed: int, tmp_path: Path) -> None:
    gallery, random = create(tmp_path), np.random.default_rng(seed)
    stack_of: dict[int, list[frozenset[str]]] = {0: [frozenset()]}  # generation -> its state, and those it was made from
    for step in range(25):
        stack, action = stack_of[gallery.generation], random.choice(["add", "add", "remove", "undo", "undo", "undo", "to"])
        if action == "undo" and len(stack) == 1:
            refuses("has no earlier state; .* --list", gallery.rollback)
            continue
        if action == "remove" and stack[-1]:
            gallery.remove([min(stack[-1])])
            stack = [*stack, stack[-1] - {min(stack[-1])}]
            gallery.commit("remove")
        elif action == "undo":
            gallery.rollback()
            stack = stack[:-1]
        elif action == "to":
            wanted = int(random.choice(list(stack_of)))
            gallery.rollback(wanted)
            stack = stack_of[wanted]
        else:
            gallery.add(vectors(1, step), [f"item {step}"])
            stack = [*stack, stack[-1] | {f"item {step}"}]
            gallery.commit()
        stack_of[gallery.generation] = stack
        assert ids_in(gallery) == stack[-1]


def test_what_is_refused_leaves_the_gallery_as_it_was(tmp_path: Path) -> None:
    gallery = store(create(tmp_path), vectors(10), names(10))
    before = read_manifest(gallery.path)
    for change, message in (
        (lambda g: g.add(vectors(1), ["item 1"]), "'item 1' is in the gallery already"),
        (lambda g: g.add(vectors(2), ["x", "x"]), "the id 'x' is given twice"),
        (lambda g: g.add(vectors(2), ["x"]), "there are 2 embeddings but 1 ids"),
        (lambda g: g.add(vectors(1), ["x"], [{"a": 1}, {}]), "1 ids but 2 metadata"),
        (lambda g: g.add(vectors(1), ["x"], ["text"]), "not an object of keys and values"),
        (lambda g: g.add(vectors(1), [""]), "invalid id ''"),
        (lambda g: g.add(vectors(1), ["two\nlines"]), "invalid id 'two"),
        (lambda g: g.add(vectors(1), [5]), "invalid id 5"),
        (lambda g: g.add(vectors(1), ["\udcff.png"]), "invalid id"),
        (lambda g: g.add(np.zeros((1, DIM)), ["x"]), "the embedding of 'x' is zero"),
        (lambda g: g.add(np.full((1, DIM), np.nan), ["x"]), "the embedding of 'x' is not finite"),
        (lambda g: g.add(vectors(1, dim=5), ["x"]), "stores 8 dimensions, but these embeddings have 5"),
        (lambda g: g.add(vectors(1), ["x"], version=OTHER, replace=True) or g.add(vectors(1, dim=5), ["y"]), "8 dimens"),
        (lambda g: g.add(vectors(1), ["x"], version=OTHER), "no single model could search embeddings of other"),
        (lambda g: g.remove(["nobody"]), "'nobody' is not in the gallery"),
        (lambda g: g.search(vectors(1), OTHER), r"queries of other@\w+ cannot be compared with the clip@\w+ embeddings"),
        (lambda g: g.search(vectors(1, dim=5), CLIP), "the queries have 5 dimensions"),
        (lambda g: g.search(np.full((1, DIM), np.inf), CLIP), "query 0 is not finite"),
        (lambda g: g.search(vectors(1), CLIP, merge="mean"), "unknown merge 'mean'"),
        (lambda g: g.search(vectors(1), CLIP, top_k=0), "top_k is 0"),
        (lambda g: g.search(vectors(1), "clip"), "'clip' is a name; use Fingerprint.from_string"),
        (lambda g: g.rollback(9), "has no generation 9"),
        (lambda g: Gallery.create(g.path, CLIP, dim=3), "is not empty"),
        (lambda g: Gallery.create(g.path / "in", CLIP), "dim is required when only the fingerprint clip"),
        (lambda g: Gallery.create(g.path / "in", CLIP, dim=3, index="Flatt"), "faiss cannot create index 'Flatt'"),
        (lambda g: Gallery.create(g.path / "in", CLIP, dim=3, metric="cosin"), "unknown metric 'cosin'; did you mean 'cosine'"),
        (lambda g: Gallery.create(g.path / "in", CLIP, dim=0), "dim is 0; it must be at least 1"),
        (lambda g: Gallery.open(g.path / "no"), "does not exist"),
    ):
        refuses(message, change, gallery)
        gallery.close()
        assert read_manifest(gallery.path) == before and gallery.damage() == [] and not (gallery.path / "in").exists()
    assert found(Gallery.open(gallery.path), vectors(10)[[4]], 1) == [["item 4"]]


def test_one_writer_at_a_time_adds_to_the_newest_state(tmp_path: Path) -> None:
    gallery = store(create(tmp_path), vectors(3), names(3))
    gallery.add(vectors(1, 5), ["waiting"])
    code = (
        "import sys; from xcompat import Fingerprint; from xcompat.retrieval import Gallery; import numpy as np\n"
        "gallery = Gallery.open(sys.argv[1]); print(len(gallery.search(np.ones((1, 8)), Fingerprint.from_string('clip'))[0]))\n"
        "gallery.add(np.ones((1, 8)), ['other'])"
    )
    other = warm.run("-c", code, gallery.path, folder=tmp_path)
    assert other.stdout.strip() == "3" and "another process is writing to" in other.stderr
    gallery.commit()
    assert len(gallery) == 4
    store(gallery, vectors(1, 6), ["free again"])
    first = create(tmp_path / "two writers")
    second = Gallery.open(first.path)
    store(first, vectors(1), ["a"])
    store(second, vectors(1, 1), ["b"])
    assert Gallery.open(first.path).find(["a", "b"]) == [CLIP, CLIP]
    first.rollback()
    assert ids_in(first) == ids_in(Gallery.open(first.path)) == {"a"}, "the newest commit of any process is undone"


def test_altered_truncated_and_forged_files_are_named(tmp_path: Path) -> None:
    gallery = store(create(tmp_path, index="SQ8"), vectors(10_000), names(10_000), side_info_NS=vectors(10_000, 3, 4))
    gallery.remove(["item 3"])
    gallery.commit()
    files = [file for file in gallery.path.rglob("*.*") if file.is_file() and not {".lock", "generations"} & {*file.parts}]
    kinds = {"index.faiss", "rows.arrow", "vectors.npy", "side_info.npy", "id_hashes.npy", "id_order.npy", "gallery.json"}
    assert kinds <= {file.name for file in files} and any(file.parent.name == "removed" for file in files)
    for file in sorted(files):
        good = file.read_bytes()
        for bad in (good[:-1], good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :], b""):
            file.write_bytes(bad)
            try:
                wrong = Gallery.open(gallery.path).damage()
            except XcompatError as error:  # a manifest that cannot be read
                wrong = [str(error)]
            assert len(wrong) >= 1 and str(file) in wrong[0], file
        file.write_bytes(good)
    assert Gallery.open(gallery.path).damage() == []
    forged = gallery.path / "gallery.json"  # leads out of the gallery
    forged.write_text(forged.read_text().replace(gallery.segments[0].record.name, "../../../../../../etc"))
    refuses("is damaged", Gallery.open, gallery.path)


def test_side_information_is_of_one_width_and_finite(tmp_path: Path) -> None:
    gallery = create(tmp_path)
    gallery.add(vectors(2), names(2), side_info_NS=vectors(2, 2, 3))
    said = "have side-information of 3 dimensions, but these items have 5; use the same model for both"
    refuses(said, gallery.add, vectors(2), names(2, "more"), side_info_NS=vectors(2, 2, 5))
    gallery.commit()
    refuses(said, gallery.add, vectors(2), names(2, "more"), side_info_NS=vectors(2, 2, 5))
    with pytest.raises(XcompatError, match="the side-information of 'more 1' is not finite"):
        gallery.add(vectors(2), names(2, "more"), side_info_NS=[[0.0, 1.0, 2.0], [np.nan, 0.0, 1.0]])
    store(gallery, vectors(2), names(2, "more"), side_info_NS=vectors(2, 2, 3))
    assert len(Gallery.open(gallery.path)) == 4


def test_a_disk_that_is_really_full_or_read_only_leaves_the_last_commit(tiny_disk: Path) -> None:
    gallery = store(create(tiny_disk), vectors(10), names(10), side_info_NS=vectors(10, 2, 2000))
    gallery.add(vectors(100, 1), names(100, "more"), side_info_NS=vectors(100, 2, 2000))
    with pytest.raises(OSError, match="No space left"):
        gallery.commit()
    gallery.close()
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    survivor = Gallery.open(gallery.path)
    assert found(survivor, vectors(10)[[4]], 1) == [["item 4"]] and len(survivor) == 10 and survivor.damage() == []
    for change in (lambda: survivor.add(vectors(1), ["x"]), survivor.compact, lambda: survivor.rollback(0)):
        with pytest.raises(OSError, match="Read-only file system"):
            change()
    assert len(Gallery.open(gallery.path)) == 10


def test_a_gallery_that_names_a_milvus_is_refused(tmp_path: Path) -> None:
    gallery = store(create(tmp_path), vectors(1), ["a"])
    file = gallery.path / "gallery.json"
    for milvus, refusal in ((None, nullcontext()), ("vectors.db", refusing("keeps its vectors in Milvus, but galleries"))):
        written = json.loads(file.read_text()) | {"milvus": milvus}
        file.write_text(json.dumps(written | {"checksum": json_checksum(written)}))
        with refusal:
            assert len(Gallery.open(gallery.path)) == 1


@pytest.mark.parametrize("index", ["Flat", "HNSW16", "IVF8,Flat", "IVF8,PQ4x4", "SQ8", "PQ4x4"])
def test_every_index_finds_and_gives_back_what_it_was_given(index: str, tmp_path: Path) -> None:
    gallery = create(tmp_path, index=index)
    embeds = vectors(12_000)
    store(gallery, embeds, names(12_000))
    assert gallery.segments[0].record.index == index
    gallery.remove(names(100))
    gallery.commit()
    unit = embeds / np.linalg.norm(embeds, axis=1, keepdims=True)
    np.testing.assert_allclose(gallery.segments[0].vectors(np.arange(200, 300)), unit[200:300], atol=1e-6)
    hits = found(gallery, embeds[[50, 500]], 20)
    assert not set(hits[0]) & set(names(100)), "what was removed is not found"
    exact = naive(dict(zip(names(12_000)[100:], embeds[100:], strict=True)), embeds[[500]], 20)[0]
    assert len(set(hits[1]) & set(exact)) >= (20 if index in ("Flat",) else 2)


def test_compaction_trains_any_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for module in ("staging", "compaction"):
        monkeypatch.setattr(f"xcompat.retrieval.{module}.FLUSH_BYTES", 3000 * DIM * 4)
    monkeypatch.setattr("xcompat.retrieval.compaction.BLOCK", 1000)
    gallery = create(tmp_path, index="IVF64,Flat")  # takes 9,984 vectors

    def grown(count: int) -> list[tuple[int, str]]:
        before = len(gallery)
        for start in range(before, before + count, 1000):
            size = min(1000, before + count - start)
            gallery.add(vectors(size, start), [f"item {row}" for row in range(start, start + size)])
        gallery.commit()
        assert gallery.segments[-1].record.index == "Flat", "what waits in memory trains none"
        gallery.compact()
        return sorted((len(segment), segment.record.index) for segment in gallery.segments)

    assert {index for _, index in grown(9_000)} == {"Flat"}
    assert "9,000 embeddings of clip" in caplog.text and "are too few to train IVF64,Flat, which needs 9,984" in caplog.text
    names_before = [segment.record.name for segment in gallery.segments]
    gallery.compact()
    assert [segment.record.name for segment in gallery.segments] == names_before, "nothing is gained by writing them anew"
    assert grown(3_500) == [(12_500, "IVF64,Flat")]
    assert grown(12_000) == [(12_000, "IVF64,Flat"), (12_500, "IVF64,Flat")]
    assert grown(4_000) == [(12_500, "IVF64,Flat"), (16_000, "IVF64,Flat")], "too few by themselves"
    assert grown(22_000)[0][0] >= 9_984 and {segment.record.index for segment in gallery.segments} == {"IVF64,Flat"}
    assert len(gallery) == 50_500 and gallery.damage() == []
    assert gallery.find(["item 0", "item 50499"]) == [CLIP, CLIP]


def test_search_parameters_hold_for_one_search_of_approximate_segments(tmp_path: Path) -> None:
    gallery = create(tmp_path, index="IVF64,Flat")
    few, many, queries = vectors(100, 2), vectors(12_000), vectors(20, 1)
    store(gallery, few, names(100, "few"))
    refuses("do not fit the index", found, gallery, queries, 5, parameters="nprobe=64")
    store(gallery, many, names(12_000))
    alone = {effort: found(gallery, queries, 5, parameters=effort) for effort in (None, "nprobe=1", "nprobe=64")}
    stored = dict(zip([*names(100, "few"), *names(12_000)], np.concatenate([few, many]), strict=True))
    assert alone["nprobe=64"] == naive(stored, queries, 5)
    refuses("do not fit the index", found, gallery, queries, 5, parameters="nprobes=64")
    assert found(gallery, queries, 5) == alone[None] and len({str(hits) for hits in alone.values()}) == 3
    efforts = [*alone] * 20
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda effort: found(gallery, queries, 5, parameters=effort), efforts))
    assert together == [alone[effort] for effort in efforts], "threads that search at once have each their own"


@pytest.mark.parametrize(
    ("index", "metric"),
    [("HNSW16", "ip"), ("IVF64,Flat", "l2"), ("IVF64,PQ4x4", "ip"), ("IVF64,SQ8,RFlat", "l2"), ("PQ4x4", "l2")],
)
def test_few_rows_are_searched_exactly(index: str, metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_building, "PER_CENTROID", 1)
    monkeypatch.setattr(filtered_search, "READ_AT_ONCE", 7 * 4 * DIM)  # seven vectors at a time
    gallery = create(tmp_path, metric=metric, index=index)
    embeds, queries = vectors(3000), vectors(25, 1)
    store(gallery, embeds, names(3000), [{"part": n % 200} for n in range(3000)])
    assert gallery.segments[0].record.index == index
    few = {name: embeds[n] for n, name in enumerate(names(3000)) if n % 200 == 7}
    for k in (10, 20):  # 15 are kept
        assert found(gallery, queries, k, where={"part": 7}) == naive(few, queries, k, metric)
    assert found(gallery, queries[:0], 5, where={"part": 7}) == []
    gallery.remove([name for name in names(3000) if name not in few])
    gallery.commit()
    assert found(gallery, queries, 10) == naive(few, queries, 10, metric)


@pytest.mark.parametrize("index", ["HNSW16", "IVF64,Flat"])
def test_an_approximate_index_finds_as_many_as_are_asked_for(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_building, "PER_CENTROID", 1)
    gallery = create(tmp_path, index=index)
    embeds = np.repeat(vectors(40), 50, 0)  # equal ones: a graph of them falls apart
    embeds[1:] += 1e-4 * vectors(1999, 1) if index != "HNSW16" else 0
    store(gallery, embeds, names(2000), [{"document": n // 50} for n in range(2000)])
    assert gallery.segments[0].record.index == index
    for k in (60, 500, 2000, 3000):
        assert [len(hits) for hits in found(gallery, vectors(3), k)] == [min(k, 2000)] * 3
    assert [len(hits) for hits in found(gallery, vectors(3), 40, group_by="document")] == [40] * 3


@pytest.mark.parametrize("index", ["HNSW16", "IVF64,Flat"])
def test_a_filter_costs_no_recall(index: str, tmp_path: Path) -> None:
    gallery = create(tmp_path, index=index)
    embeds, queries = vectors(12_000), vectors(50, 1)
    store(gallery, embeds, names(12_000), [{"part": n % 10} for n in range(12_000)])

    def recall(parts: list[int]) -> float:
        kept = {name: embeds[n] for n, name in enumerate(names(12_000)) if n % 10 in parts}
        pairs = zip(found(gallery, queries, 10, where={"part": parts}), naive(kept, queries, 10), strict=True)
        return float(np.mean([len(set(hits) & set(exact)) / 10 for hits, exact in pairs]))

    assert min(recall(list(range(some))) for some in (4, 7)) >= recall(list(range(10))) - 0.02


def test_rows_are_dropped_for_a_few_queries_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = store(create(tmp_path, index="PQ4x4"), vectors(12_000), names(12_000), [{"part": n % 10} for n in range(12_000)])
    at_once = found(gallery, vectors(9, 1), 5, where={"part": list(range(1, 10))})
    monkeypatch.setattr(filtered_search, "HITS_AT_ONCE", 2 * 1205)
    assert found(gallery, vectors(9, 1), 5, where={"part": list(range(1, 10))}) == at_once
    assert all(len(hits) == 5 and all(int(name.split()[1]) % 10 for name in hits) for hits in at_once)


BESIDE_TORCH_UTILS = """
import sys
import faiss.contrib.torch_utils  # as pytorch-metric-learning imports it: for the whole process
import numpy as np
from xcompat import Fingerprint
from xcompat.retrieval import Gallery

gallery = Gallery.open(sys.argv[1])
hits = gallery.search(np.eye(8, dtype=np.float32)[:1], Fingerprint.from_string("clip"), top_k=3, where={"odd": True})
print(*(hit.id for hit in hits[0]), sep=",", end="")
"""


def test_filters_work_beside_what_other_libraries_make_of_faiss(tmp_path: Path) -> None:
    gallery = store(create(tmp_path), vectors(20), names(20), [{"odd": bool(row % 2)} for row in range(20)])
    expected = found(gallery, np.eye(DIM, dtype=np.float32)[:1], 3, where={"odd": True})[0]
    done = warm.run("-c", BESIDE_TORCH_UTILS, gallery.path, folder=tmp_path)
    assert done.stdout.split(",") == expected, done.stderr
