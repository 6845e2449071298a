"""Work spread over cores: in order, no further ahead than needed, and with the result of one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from xcompat.core import threads
from xcompat.core.threads import SMALL, map_in_rounds, map_in_threads, map_over_cores, one_thread_if_small, use_share_of_cores
from xcompat.evaluation import first_hit_ranks, ranking_per_query

CPU = torch.device("cpu")


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_come_in_order_and_items_are_read_no_further_than_needed(threads: int) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            read.append(item)
            yield item

    results = map_in_threads(lambda item: item**2, items(), threads)
    assert next(results) == 0
    assert len(read) == threads + 2
    assert list(results) == [item**2 for item in range(1, 20)]


def test_a_round_computes_nothing_while_its_results_are_used() -> None:
    begun: list[int] = []

    def square(item: int) -> int:
        begun.append(item)
        return item**2

    results = map_in_rounds(square, range(8), 3)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert sorted(begun) == [0, 1, 2]
    assert list(results) == [item**2 for item in range(3, 8)]


def test_an_error_reaches_who_asks_and_ends_the_work() -> None:
    begun: list[int] = []

    def fail_at_three(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise KeyError("three")
        return item

    results = map_in_threads(fail_at_three, range(1000), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        next(results)
    assert max(begun) <= 3 + 2


@pytest.mark.usefixtures("three_threads")
def test_every_item_computes_on_one_core_and_others_keep_theirs() -> None:
    together = threading.Barrier(3, timeout=60)

    def threads(item: int) -> int:
        together.wait()
        return torch.get_num_threads()

    assert list(map_over_cores(threads, range(6), CPU)) == [1] * 6
    assert torch.get_num_threads() == 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [3]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("dim", "used"), [(SMALL, 1), (SMALL + 1, 3)])
def test_small_matrices_are_decomposed_in_one_thread(dim: int, used: int) -> None:
    with one_thread_if_small(dim):
        assert torch.get_num_threads() == used
    assert torch.get_num_threads() == 3


def test_ranks_of_several_threads_are_those_of_one(three_threads: None) -> None:
    generator = np.random.default_rng(0)
    queries, gallery = generator.normal(size=(70, 12)), generator.normal(size=(210, 12))
    labels = generator.integers(30, size=70), generator.integers(30, size=210)

    def ranks() -> list[bytes]:
        ranked = ranking_per_query(queries, gallery, *labels, chunk_size=16)
        found = first_hit_ranks(queries, gallery, *labels, chunk_size=16)
        return [found.tobytes(), ranked.first_hit_ranks_Q.tobytes(), ranked.average_precision_Q.tobytes()]

    by_three = ranks()
    torch.set_num_threads(1)
    assert by_three == ranks()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, 3),
        ({"ACCELERATE_USE_CPU": "False", "OMP_NUM_THREADS": "1"}, 6),
        ({"LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "True", "OMP_NUM_THREADS": "1"}, None),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_processes_of_a_launcher_for_gpus_share_the_cores(
    environment: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "ACCELERATE_USE_CPU", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)

    def counts() -> set[int]:
        return {torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())}

    with threadpool_limits(1):
        before = torch.get_num_threads()
        try:
            use_share_of_cores()
            assert counts() == ({1} if expected is None else {expected})
            assert os.environ["OMP_NUM_THREADS"] == (environment["OMP_NUM_THREADS"] if expected is None else str(expected))
        finally:
            torch.set_num_threads(before)


# Pages that four arrays of 64 MiB, each freed before the next, take from the system: left alone, and told to keep what is freed.
FAULTS = """
import platform, resource
import numpy as np
from xcompat.core.threads import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        np.full(2**23, 1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

left_alone = faults()
keep_freed_memory()
faults()
print(platform.libc_ver()[0] == "glibc", left_alone, faults())
"""


def test_what_was_freed_is_used_again() -> None:
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    is_glibc, left_alone, kept = ran.stdout.split()
    if is_glibc != "True":
        pytest.skip("only glibc is told to keep what is freed")
    assert int(kept) < int(left_alone) / 10
