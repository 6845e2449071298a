"""Three processes that share the queries rank them as one does, to the last bit, and say alike what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import warm

from xcompat.core.errors import XcompatError
from xcompat.evaluation.metrics import first_hit_ranks
from xcompat.evaluation.ranking import ranking_per_query

RANKS = 3


def _data() -> tuple[np.ndarray, np.ndarray, list[int], list[int]]:
    """Return coarse embeddings, so that many scores tie, and classes of which some are on one side only."""
    generator = np.random.default_rng(0)
    queries, gallery = generator.integers(-1, 2, (50, 4)) + 0.5, generator.integers(-1, 2, (70, 4)) + 0.5
    return queries, gallery, generator.integers(0, 9, 50).tolist(), generator.integers(3, 12, 70).tolist()


def _ranked(shared: bool, queries_at: slice) -> dict[str, Any]:
    queries, gallery, query_labels, gallery_labels = _data()
    queries, query_labels = queries[queries_at], query_labels[queries_at]
    found = ranking_per_query(queries, gallery, query_labels, gallery_labels, chunk_size=7, shared=shared)
    first = first_hit_ranks(queries, gallery, query_labels, gallery_labels, chunk_size=7, shared=shared)
    return {"first": first, **vars(found)}


def _rank_main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {"many": _ranked(True, slice(None)), "fewer_than_ranks": _ranked(True, slice(0, 2))}
    try:
        ranking_per_query(np.eye(4), np.eye(4), "abcd", "efgh", shared=True)
    except XcompatError as error:
        results["none"] = str(error)
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


def test_shared_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    warm.spawn(_rank_main, (str(tmp_path / "store"), str(tmp_path / "out")), RANKS)
    assert {0, 1, 2} & set(_data()[2]), "some queries find nothing"
    for rank in range(RANKS):
        results = torch.load(tmp_path / f"out.{rank}", weights_only=False)
        for name, queries_at in (("many", slice(None)), ("fewer_than_ranks", slice(0, 2))):
            for key, expected in _ranked(False, queries_at).items():
                np.testing.assert_array_equal(results[name][key], expected, err_msg=f"{name} {key} on rank {rank}")
        assert results["none"].startswith("no query has another item of its class")
