"""faiss on GPUs: what goes there, and that it changes no result; cards are stood in for, but in the tests at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from schedule import mostly_nightly
from store_places import unit_vectors

from xcompat.retrieval import faiss_building, faiss_index
from xcompat.retrieval.faiss_building import build_faiss
from xcompat.retrieval.faiss_index import FaissIndex, write_faiss
from xcompat.retrieval.manifest import Metric

DIM, ROWS = 8, 3000
WITHOUT_KERNELS = ("IndexHNSW", "FastScan", "IndexRefine")


STORED, QUERIES = unit_vectors(ROWS, DIM), unit_vectors(7, DIM, 1)
BLOCKS = np.array_split(STORED, 3)


class OnGpus:
    """An index on stand-ins of GPUs, with their limits."""

    MOST = 2048  # neighbours

    def __init__(self, index: Any) -> None:
        self.index = faiss.clone_index(index)

    def search(self, queries_Qd: np.ndarray, k: int) -> Any:
        if k > self.MOST:
            raise RuntimeError("GPU index only supports min/max-K selection up to 2048")
        return self.index.search(queries_Qd, k)


@pytest.fixture(autouse=True)
def _few_vectors_train_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_building, "PER_CENTROID", 0)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for two GPUs; return the kinds of indexes that were copied there."""
    kinds: list[str] = []

    def to_gpus(index: Any) -> Any:
        kind = type(faiss.downcast_index(index)).__name__
        if any(name in kind for name in WITHOUT_KERNELS):
            raise RuntimeError("This index type is not implemented on GPU.")
        kinds.append(kind.removesuffix("IP").removesuffix("L2"))
        return OnGpus(index) if index.ntotal == ROWS else faiss.clone_index(index)

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", to_gpus, raising=False)
    return kinds


def built(factory: str, metric: Metric = "ip") -> FaissIndex:
    return build_faiss(factory, DIM, metric, BLOCKS, ROWS)[0]


def written(index: FaissIndex, path: Path) -> bytes:
    write_faiss(index.index, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("factory", "times"),
    [
        *(("IVF16,Flat", 2), ("IVF16,SQ8", 2), ("IVF16,PQ1", 2)),  # for its centroids, then for the lists of what is added
        *(("IVF16,PQ4x4fs", 1), ("PCA4,IVF16,SQ8", 1), ("IVF16,SQ8,RFlat", 1), ("IVF16_HNSW8,Flat", 1)),
        *(("HNSW8", 0), ("Flat", 0)),
    ],
)
@pytest.mark.parametrize("metric", mostly_nightly(["ip", "l2"], "ip".__eq__))
def test_gpus_build_equal_bytes(factory: str, times: int, metric: Metric, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    alone = written(built(factory, metric), tmp_path / "alone.faiss")
    copied: list[str] = request.getfixturevalue("copied")
    assert written(built(factory, metric), tmp_path / "index.faiss") == alone
    assert copied == times * ["IndexFlat"]


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "HNSW8"])
def test_gpus_search_where_faiss_has_kernels_for_it(factory: str, request: pytest.FixtureRequest) -> None:
    index = built(factory)
    index.set_parameters("efSearch=64" if factory == "HNSW8" else "nprobe=8" if factory != "Flat" else "")
    expected = index.search(QUERIES, 5)
    copied: list[str] = request.getfixturevalue("copied")
    index.__dict__.pop("_gpu_index")
    for _ in range(2):
        for found, wanted in zip(index.search(QUERIES, 5), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    assert len(copied) == (factory != "HNSW8"), "the copy is kept from query to query"


def test_parameters_reach_gpus_and_other_searches_the_cpu(copied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    index, exact = built("IVF16,Flat"), np.argsort(-(QUERIES @ STORED.T), axis=1)
    copied.clear()
    for probed, is_exact in ((1, False), (16, True)):
        index.set_parameters(f"nprobe={probed}")
        assert np.array_equal(index.search(QUERIES, 5)[1], exact[:, :5]) is is_exact
    assert copied == ["IndexIVFFlat"] * 2
    index = built("Flat")
    monkeypatch.setattr(OnGpus, "MOST", 20)
    assert np.array_equal(index.search(QUERIES, 20)[1], exact[:, :20])
    assert np.array_equal(index.search(QUERIES, 21)[1], exact[:, :21]), "more neighbours than the kernels take"
    monkeypatch.setattr(OnGpus, "search", lambda *_: pytest.fail("a filter is not for GPUs"))
    kept_N = np.arange(ROWS) % 2 == 0
    assert np.array_equal(index.search(QUERIES[:1], 5, kept_N)[1][0], [row for row in exact[0] if kept_N[row]][:5])
    assert copied == ["IndexIVFFlat"] * 2 + ["IndexFlat"]


@pytest.mark.parametrize(("left", "said"), [(object(), 1), (None, 0)], ids=["overwritten", "alone"])
def test_double_faiss_is_said(left: object, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As after `pip install faiss-gpu faiss-cpu`: the module is that for CPUs, and a file of the other is left beside it."""
    monkeypatch.setattr(faiss_index, "find_spec", {"faiss._gpu_build": left}.get)
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    faiss_index._say_if_overwritten.cache_clear()
    built("Flat"), built("Flat")
    faiss_index._say_if_overwritten.cache_clear()
    assert caplog.text.count("faiss-cpu has overwritten files of faiss-gpu, so no GPU is used") == len(caplog.records) == said


@pytest.mark.skipif(not faiss.get_num_gpus(), reason="needs faiss-gpu and a CUDA device")
@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "IVF16,SQ8", "IVF16,PQ4x4fs", "HNSW8"])
def test_gpus_find_what_the_cpu_finds(factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = built(factory)
    if factory.startswith("IVF"):
        index.set_parameters("nprobe=16")  # all lists: which vector is in which does not matter
    scores_Qk, rows_Qk = index.search(QUERIES, 10)
    everything_Qk = index.search(QUERIES, ROWS)[1]
    monkeypatch.setattr(faiss, "get_num_gpus", int)
    index.__dict__.pop("_gpu_index")
    alone_Qk, same_Qk = index.search(QUERIES, 10)
    np.testing.assert_allclose(scores_Qk, alone_Qk, atol=1e-4)
    assert (rows_Qk == same_Qk).mean() > 0.95, "scores that all but tie may change places, no others"
    assert everything_Qk.shape == (len(QUERIES), ROWS), "more neighbours than the kernels take"
