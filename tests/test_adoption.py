"""Adopted faiss indexes: what is looked at, what is noticed when they change, and what is taken over."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import faiss
import numpy as np
import pytest
import torch
from conftest import refuses, store
from schedule import mostly_nightly
from store_places import unit_vectors as unit
from test_gallery_versions import solved

from xcompat import Fingerprint, XcompatError
from xcompat.retrieval import Gallery, adopted_index, adoption, staging
from xcompat.retrieval.manifest import write_manifest

OLD = Fingerprint.from_string("old")
D, d, N = 12, 8, 200
IP, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
LONGER = np.concatenate([unit(N, d, 0), unit(3, d, 5)])
FACTORIES = ("Flat", "IVF4,Flat", "HNSW8")


def names(count: int) -> list[str]:
    return [f"i{number}" for number in range(count)]


def write_index(path: Path, vectors: np.ndarray, factory: str = "Flat", wrapped: bool = False, metric: int = IP) -> Any:
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(unit(1000, vectors.shape[1], 99))
    if wrapped:
        index = faiss.IndexIDMap2(index)
        index.add_with_ids(vectors, np.arange(1000, 1000 + len(vectors)))
    else:
        index.add(vectors)
    faiss.write_index(index, str(path))
    return index


def found(gallery: Gallery, queries: np.ndarray, asking: Any = OLD, top_k: int = 1) -> list[list[str]]:
    return [[hit.id for hit in hits] for hits in gallery.search(queries, asking, top_k=top_k)]


def later(path: Path) -> None:
    """Move the time of a file's last write, which may be the same where a test is fast."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


def flip(path: Path, seconds: int = 1) -> None:
    before, damaged = path.stat(), bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x40
    path.write_bytes(damaged)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + seconds * 10**9))


CHANGES: dict[str, Callable[..., object]] = {
    "fewer": lambda path, *kind: write_index(path, unit(N, d, 0)[1:], *kind),
    "more": lambda path, *kind: write_index(path, LONGER, *kind),
    "exchanged": lambda path, *kind: write_index(path, unit(N, d, 0)[::-1].copy(), *kind),
    "flipped": lambda path, *_: flip(path),
    "flipped in silence": lambda path, *_: flip(path, seconds=0),
    "replaced": lambda path, *_: path.write_text("I am no index, but long enough to be one"),
    "gone": lambda path, *_: path.unlink(),
}


@pytest.mark.parametrize(("factory", "wrapped"), [("Flat", False), ("IVF4,Flat", True), ("HNSW8", False)])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fewer", "holds 199 vectors, but the gallery knows 200: some were removed"),
        ("more", "holds 203 vectors, but the gallery knows 200: .*`xcompat gallery resync .*/g --ids FILE`"),
        *((each, "still holds 200 vectors, but its bytes have changed") for each in list(CHANGES)[2:5]),
        ("replaced", "own.faiss "),
        ("gone", "own.faiss does not exist; restore the faiss index"),
    ],
)
def test_an_adopted_index_that_changed_is_refused(change: str, message: str, factory: str, wrapped: bool, tmp_path: Path) -> None:
    own = tmp_path / "own.faiss"
    write_index(own, unit(N, d, 0), factory, wrapped)
    whole = own.read_bytes()
    Gallery.from_faiss(tmp_path / "g", own, names(N), OLD)
    later(own)  # what is written again a moment later has another time
    CHANGES[change](own, factory, wrapped)
    gallery = Gallery.open(tmp_path / "g")
    assert len(gallery) == N and gallery.find(["i3", "x"]) == [OLD, None]
    for use in (lambda: gallery.search(unit(1, d, 1), OLD), lambda: gallery.segments[0].vectors(np.arange(3))):
        refuses(message, use)
    own.write_bytes(whole)
    assert found(gallery, unit(N, d, 0)[[9]]) == [["i9"]]


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_byte_anywhere_is_found_where_the_time_moved(factory: str, tmp_path: Path) -> None:
    own = tmp_path / "own.faiss"
    write_index(own, unit(4000, d, 0), factory)  # longer than what is sampled
    Gallery.from_faiss(tmp_path / "g", own, names(4000), OLD)
    whole = own.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 20).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1
        own.write_bytes(damaged)
        later(own)
        refuses(r"own\.faiss", Gallery.open(tmp_path / "g").search, unit(1, d, 1), OLD)


def test_another_time_is_refused_only_while_the_index_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.faiss"
    write_index(own, unit(N, d, 0))
    gallery = Gallery.from_faiss(tmp_path / "g", own, names(N), OLD)
    assert found(gallery, unit(N, d, 0)[[9]]) == [["i9"]]
    later(own)
    for use in (lambda: gallery.search(unit(1, d, 1), OLD), lambda: gallery.segments[0].vectors(np.arange(3))):
        refuses("changed while it was open; open the gallery again", use)
    assert found(Gallery.open(tmp_path / "g"), unit(N, d, 0)[[9]]) == [["i9"]]
    assert Gallery.open(tmp_path / "g").resync() == 1 and Gallery.open(tmp_path / "g").resync() == 1
    monkeypatch.setattr(adopted_index, "_checksum", lambda *_: pytest.fail("all of the file is read"))
    assert found(Gallery.open(tmp_path / "g"), unit(N, d, 0)[[9]]) == [["i9"]]
    assert found(Gallery.open(tmp_path / "g", 0), unit(N, d, 0)[[9]]) == [["i9"]]


def grown(tmp_path: Path, factory: str = "Flat", wrapped: bool = False) -> tuple[Path, np.ndarray]:
    """Adopt an index, remove an item from the gallery, add one, and let the index grow by three."""
    own, vectors = tmp_path / "own.faiss", LONGER
    index = write_index(own, vectors[:N], factory, wrapped)
    gallery = Gallery.from_faiss(tmp_path / "g", own, names(N), OLD, [{"n": number} for number in range(N)])
    gallery.remove(["i9"])
    store(gallery, unit(1, d, 7), ["of the gallery"])
    if wrapped:
        index.add_with_ids(vectors[N:], np.arange(3))
    else:
        index.add(vectors[N:])
    faiss.write_index(index, str(own))
    return own, vectors


@pytest.mark.parametrize(
    ("factory", "wrapped"),
    [("Flat", False), ("Flat", True), ("IVF4,Flat", True), ("HNSW8", False), ("SQ8", True), ("IVF4,PQ4x4", False)],
)
def test_what_was_added_to_an_index_is_taken_over(factory: str, wrapped: bool, tmp_path: Path) -> None:
    _, vectors = grown(tmp_path, factory, wrapped)
    gallery = Gallery.open(tmp_path / "g")
    assert gallery.resync(names(N + 3)) == 2 and len(gallery) == N + 3
    assert gallery.resync(names(N + 3)) == 2, "the same again changes nothing"
    assert gallery.find(["i9", "i10", "i201", "of the gallery"]) == [None, OLD, OLD, OLD]
    known = gallery.segments[0]
    assert known.metadata(np.array([3, N])) == [{"n": 3}, None] and known.record.n_removed == 1
    hits = gallery.search(vectors[[9, 10, 201]], OLD, top_k=N + 3)
    assert all("i9" not in [hit.id for hit in each] for each in hits)
    if "PQ" not in factory:
        assert [each[0].id for each in hits[1:]] == ["i10", "i201"]
    assert gallery.damage() == [] and gallery.generations()[-1].by == "resync"
    gallery.rollback(1)
    assert gallery.resync([*names(N), "i9", "a", "b"]) == 4 and gallery.find(["i9"]) == [OLD], "what was removed may come back"


@pytest.mark.parametrize("factory", [*FACTORIES, "PQ4x4"])
def test_earlier_states_find_their_own_rows_in_a_longer_index(factory: str, tmp_path: Path) -> None:
    own, vectors = grown(tmp_path, factory)
    before = own.read_bytes()
    gallery = Gallery.open(tmp_path / "g")
    gallery.resync(names(N + 3))
    for generation, items in ((0, N), (1, N), (2, N + 3)):
        earlier = Gallery.open(tmp_path / "g", generation)
        every = [hit.id for hit in earlier.search(vectors[[201]], OLD, top_k=2 * N)[0]]
        assert len(every) == len(set(every)) and ("i201" in every) == (generation == 2) and len(earlier) == items
        assert earlier.damage() == []
    gallery.rollback(0)
    assert "i201" not in found(gallery, vectors[[201]], top_k=2 * N)[0]
    gallery.compact()  # forgets the generation that took the new rows over
    gallery = Gallery.open(tmp_path / "g")
    assert "i201" not in found(gallery, vectors[[201]], top_k=2 * N)[0] and gallery.damage() == []
    assert len(Gallery.open(tmp_path / "g")) == N and own.read_bytes() == before
    assert gallery.resync(names(N + 3)) == gallery.generation and len(gallery) == N + 3
    if "PQ" not in factory:
        assert found(gallery, vectors[[201]]) == [["i201"]]


def test_an_index_that_was_put_back_is_searched_by_the_states_that_know_it(tmp_path: Path) -> None:
    own, vectors = tmp_path / "own.faiss", unit(N, d, 0)
    write_index(own, vectors)
    whole = own.read_bytes()
    gallery = Gallery.from_faiss(tmp_path / "g", own, names(N), OLD)
    write_index(own, LONGER)
    gallery.resync(names(N + 3))
    own.write_bytes(whole)
    later(own)
    refuses("the gallery knows 203: some were removed", Gallery.open(tmp_path / "g").search, vectors[:1], OLD)
    assert found(Gallery.open(tmp_path / "g", 0), vectors[[9]]) == [["i9"]]
    gallery.rollback(0)
    assert found(gallery, vectors[[9]]) == [["i9"]]
    write_index(own, LONGER)
    assert gallery.resync(names(N + 3)) == 3
    gallery.rollback(2)
    own.write_bytes(whole)
    refuses("or accept it with `xcompat gallery resync", Gallery.open(tmp_path / "g").search, vectors[:1], OLD)
    assert gallery.resync() == 5 and found(gallery, vectors[[9]]) == [["i9"]]


def test_a_resync_that_is_cut_off_is_done_by_the_same_again(tmp_path: Path) -> None:
    _, vectors = grown(tmp_path)
    for module, name in ((adoption, "write_rows"), (adoption, "removed_rows"), (staging, "write_manifest")):
        gallery = Gallery.open(tmp_path / "g")
        with mock.patch.object(module, name, side_effect=OSError("cut off")), pytest.raises(OSError, match="cut off"):
            gallery.resync(names(N + 3))
        assert Gallery.open(tmp_path / "g").generation == 1
    gallery = Gallery.open(tmp_path / "g")
    assert gallery.resync(names(N + 3)) == 2 and found(gallery, vectors[[201]]) == [["i201"]]
    gallery.compact()
    assert gallery.damage() == [] and found(gallery, vectors[[201]]) == [["i201"]]


ALL_ALTERED = "200 of the first 200 vectors of .*, the first being 'i0': vectors were removed, altered or reordered"


@pytest.mark.parametrize(
    ("change", "ids", "message"),
    [
        ("fewer", names(N - 1), "holds 199 vectors of 8 dimensions, but the gallery knows 200 of 8; after removals"),
        ("exchanged", names(N), ALL_ALTERED),
        ("more", None, "3 vectors were added to .*: set the ids of all 203, in order, with --ids"),
        ("more", names(3), "set the ids of all 203.*got 3"),
        ("more", [*names(N - 1), "x", "y", "z", "a"], "id 200 is 'x', but this vector is stored as 'i199'"),
        ("more", [*names(N), "a", "b", "a"], "'a' is given twice"),
        ("more", [*names(N), "a", "b", "i5"], "'i5' was added to .* but is in the gallery already"),
        ("more", [*names(N), "a", "b", "mine"], "'mine' was added to .* but is in the gallery already"),
        ("replaced", names(N), "is not a readable faiss index"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(change: str, ids: list[str] | None, message: str, tmp_path: Path) -> None:
    own = tmp_path / "own.faiss"
    write_index(own, unit(N, d, 0))
    gallery = store(Gallery.from_faiss(tmp_path / "g", own, names(N), OLD), unit(1, d, 7), ["mine"])
    CHANGES[change](own)
    refuses(message, gallery.resync, ids)
    assert Gallery.open(tmp_path / "g").generation == 1
    refuses("holds no adopted index", Gallery.create(tmp_path / "empty", OLD, dim=d).resync)


@pytest.mark.parametrize("factory", FACTORIES)
def test_what_is_not_finite_is_not_adopted(factory: str, tmp_path: Path) -> None:
    for value in (np.nan, np.inf):
        vectors = unit(N, d, 0)
        vectors[[150, 160], 3] = value
        write_index(tmp_path / "own.faiss", vectors, factory)
        said = r"vector 150 \('i150'\) of .*own.faiss is not finite, like 1 more"
        with pytest.raises(XcompatError, match=f"{said}|its lists hold 198 of 200 vectors"):  # an IVF drops them
            Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", names(N), OLD)
    write_index(tmp_path / "own.faiss", np.zeros((N, d), np.float32), factory)
    refuses("all 200 vectors of .* are zero", Gallery.from_faiss, tmp_path / "g", tmp_path / "own.faiss", names(N), OLD)
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize("metric", [IP, L2])
@pytest.mark.parametrize("factory", mostly_nightly(["SQ8", "PQ4x4", "IVF4,PQ4x4"], "SQ8".__eq__))
def test_what_a_quantiser_shortens_counts_as_of_length_1(factory: str, metric: int, tmp_path: Path) -> None:
    write_index(tmp_path / "own.faiss", unit(1000, d, 0), factory, metric=metric)
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", names(1000), OLD)
    assert gallery.manifest.versions[0].length == 1 and gallery.metric == ("l2" if metric == L2 else "cosine")


@pytest.mark.parametrize("metric", [IP, L2])
@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_queries_are_brought_to_vectors_that_were_never_normalised(metric: int, spread: float, tmp_path: Path) -> None:
    """Classes of items: the share of queries whose nearest item is of their class is that of the user's own search."""
    generator, model = np.random.default_rng(0), solved()
    centres = unit(40, D, 3)
    items = np.repeat(centres, 10, axis=0) + 0.2 * generator.normal(size=(400, D)).astype(np.float32)
    queries = np.repeat(centres, 5, axis=0) + 0.2 * generator.normal(size=(200, D)).astype(np.float32)
    directions = [torch.nn.functional.normalize(torch.from_numpy(each), dim=-1) for each in (items, queries)]
    views = [model.to_space(each).detach().numpy() for each in directions]
    lengths = [30 * np.exp(spread * generator.normal(size=(len(each), 1))).astype(np.float32) for each in views]
    raw_items, raw_queries = (each * length for each, length in zip(views, lengths, strict=True))
    index = write_index(tmp_path / "own.faiss", raw_items, metric=metric)
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", names(400), OLD)
    own_rows = index.search(raw_queries, 1)[1][:, 0]
    assert found(gallery, raw_queries) == [[f"i{row}"] for row in own_rows], "a bare name's vectors are compared as they are"
    asked = [int(hits[0][1:]) for hits in found(gallery, queries, model)]
    expected = np.mean(own_rows // 10 == np.arange(200) // 5)
    assert expected > 0.5
    assert np.mean(np.array(asked) // 10 == np.arange(200) // 5) == pytest.approx(expected, abs=0.0 if spread == 0 else 0.03)


def test_an_unconfirmed_adoption_is_repeated(tmp_path: Path) -> None:
    write_index(tmp_path / "own.faiss", unit(N, d, 0))

    def adopt(ids: list[str] | None = None, model: Fingerprint = OLD) -> Gallery:
        return Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", ids or names(N), model)

    def published(folder: Path, manifest: Any) -> None:
        write_manifest(folder, manifest)
        raise OSError(5, "Input/output error")

    with mock.patch.object(adoption, "write_manifest", published), pytest.raises(OSError, match="Input/output error"):
        adopt()
    for other in (lambda: adopt(names(N)[::-1]), lambda: adopt(model=Fingerprint.from_string("another"))):
        refuses("g is not empty", other)
    assert found(adopt(), unit(N, d, 0)[:3]) == [["i0"], ["i1"], ["i2"]]
    with adopt() as gallery:
        gallery.remove(["i0"])
        gallery.commit()
    refuses("g is not empty", adopt)  # it is in use
