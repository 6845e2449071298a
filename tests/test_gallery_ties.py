"""Exact ties in galleries: items with equal vectors are found in gallery order, whichever way they are searched."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule import mostly_nightly

from xcompat import Fingerprint
from xcompat.retrieval import Gallery
from xcompat.retrieval.items import check_items
from xcompat.retrieval.manifest import VersionRecord

OLD, NEW, DIM = Fingerprint.from_string("old"), Fingerprint.from_string("new"), 8
VERSIONS = [VersionRecord(digest=OLD.digest, name="old", dim=DIM)]
VERSIONS += [VersionRecord(digest=NEW.digest, name="new", dim=DIM, shares=(OLD.digest,))]
POOL = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(25, DIM)).astype(np.float32)  # faiss takes another way from 20 queries on


class Item(NamedTuple):
    """An item of the naive gallery: number of its version, number of its vector, and metadata."""

    version: int
    vector: int
    about: dict[str, Any] | None


Row = st.tuples(st.integers(0, 30), st.integers(0, 2), st.sampled_from([None, {"shop": 0}, {"shop": 1}]))
Added = st.lists(Row, min_size=1, max_size=12, unique_by=lambda item: item[0])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), Added),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
        st.tuples(st.just("commit")),
        st.tuples(st.just("compact")),
    ),
    max_size=12,
)


class Twins:
    """A gallery, and a dictionary of the same items in the order in which they were added."""

    def __init__(self, folder: Path, metric: Any) -> None:
        self.gallery, self.metric = Gallery.create(folder / "g", OLD, dim=DIM, metric=metric), metric
        self.items: dict[str, Item] = {}

    def add(self, version: int, added: list[tuple[int, int, dict[str, Any] | None]]) -> None:
        names = [f"item {number}" for number, _, _ in added]
        about = [each for _, _, each in added]
        items = check_items(POOL[[vector for _, vector, _ in added]], names, about, None, self.metric)
        self.gallery.staging().add(VERSIONS[version], items, replace=True)
        for name, (_, vector, each) in zip(names, added, strict=True):
            self.items.pop(name, None)
            self.items[name] = Item(version, vector, each)

    def remove(self, numbers: list[int]) -> None:
        names = sorted({f"item {number}" for number in numbers} & self.items.keys())
        if names:
            self.gallery.remove(names)
            self.items = {name: item for name, item in self.items.items() if name not in names}

    def naive(self, query: int, k: int, where: dict[str, Any] | None, group_by: str | None) -> list[str]:
        stored, asked = POOL.astype(np.float64), QUERIES[query].astype(np.float64)
        if self.metric == "cosine":
            stored, asked = stored / np.linalg.norm(stored, axis=1, keepdims=True), asked / np.linalg.norm(asked)
        scores = -((stored - asked) ** 2).sum(1) if self.metric == "l2" else stored @ asked
        order = [record.digest for record in self.gallery.manifest.versions]
        ranked = sorted(
            self.items,
            key=lambda name: (-scores[self.items[name].vector], order.index(VERSIONS[self.items[name].version].digest)),
        )
        ranked = [name for name in ranked if where is None or (self.items[name].about or {}).get("shop") in where["shop"]]
        if group_by is not None:
            first: dict[Any, str] = {}
            for name in ranked:
                first.setdefault((self.items[name].about or {"shop": name})[group_by], name)
            ranked = list(first.values())
        return ranked[:k]

    def check(self) -> None:
        gallery = Gallery.open(self.gallery.path)
        for k in (1, 3, 40):
            for options in ({}, {"where": {"shop": [0]}}, {"where": {"shop": [0, 1]}}, {"group_by": "shop"}):
                options = {"where": None, "group_by": None, **options}
                naive = [self.naive(query, k, **options) for query in range(len(QUERIES))]
                hits = gallery.search(QUERIES, OLD, top_k=k, **options)
                assert [[hit.id for hit in each] for each in hits] == naive, (k, options)
                alone = gallery.search(QUERIES[:1], OLD, top_k=k, **options)
                assert [hit.id for hit in alone[0]] == naive[0], (k, options)


@pytest.mark.parametrize("metric", mostly_nightly(["cosine", "ip", "l2"], "cosine".__eq__))
@settings(max_examples=15, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_ties_are_found_in_gallery_order(metric: str, steps: list[Any]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ties-"))
    twins = Twins(folder, metric)
    for name, *arguments in [*steps, ("commit",)]:
        if name in ("commit", "compact"):
            twins.gallery.commit()
            getattr(twins.gallery, name)()
        else:
            getattr(twins, name)(*arguments)
    twins.check()
    twins.gallery.compact()
    twins.check()
    shutil.rmtree(folder)


@pytest.mark.parametrize("factory", ["Flat", "IVF4,Flat", "IVF4,SQ8", "SQ8", "IDMap,Flat"])
def test_ties_of_an_adopted_index_are_found_in_its_order(factory: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(2).normal(size=(400, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    same = np.sort(np.random.default_rng(3).choice(400, 60, replace=False))
    vectors[same] = vectors[same[0]]
    index = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add_with_ids(vectors, np.arange(400)) if "IDMap" in factory else index.add(vectors)
    faiss.write_index(index, str(tmp_path / "i.faiss"))
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "i.faiss", [str(row) for row in range(400)], OLD)
    query, effort = vectors[same[:1]], "nprobe=4" if "IVF" in factory else None
    for k in (1, 7, 59, 60):
        for batch in (1, 25):
            hits = gallery.search(np.repeat(query, batch, 0), OLD, top_k=k, parameters=effort)
            assert [[hit.id for hit in each] for each in hits] == [[str(row) for row in same[:k]]] * batch, (k, batch)
    gallery.remove([str(same[0])])
    gallery.commit()
    assert [hit.id for hit in gallery.search(query, OLD, top_k=5, parameters=effort)[0]] == [str(row) for row in same[1:6]]
    gallery.compact()
    assert [hit.id for hit in gallery.search(query, OLD, top_k=5)[0]] == [str(row) for row in same[1:6]]
