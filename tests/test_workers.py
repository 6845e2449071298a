"""Work on workers and threads: in order, and bit by bit what one process or thread makes, whoever is killed."""

from __future__ import annotations

import functools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from conftest import refuses, write_photos
from store_places import OLD, PLACES, map_of_galleries, unit_vectors
from test_stores import filled
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from xcompat import CompatModel, XbtModel, XcompatError
from xcompat.cli import app
from xcompat.core import threads
from xcompat.core.parallel import Executor, run_locally, unwrap
from xcompat.core.threads import (
    SMALL,
    map_in_rounds,
    map_in_threads,
    map_over_cores,
    one_thread_if_small,
    unlocked_property,
    use_share_of_cores,
)
from xcompat.engines import models
from xcompat.engines.models import NamedModel
from xcompat.engines.ray import _Worker
from xcompat.evaluation import first_hit_ranks, ranking_per_query
from xcompat.models.embedder import load_checkpoint, load_embedder
from xcompat.retrieval import Gallery, ingestion, upgrading
from xcompat.retrieval.upgrading import map_block
from xcompat.stores import migration
from xcompat.stores.embedding import Embedding
from xcompat.stores.mapping import Mapping

N, OLD_DIM, NEW_DIM, BLOCK = 430, 16, 24, 50


@pytest.fixture(scope="module")
def model(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("map") / "map"
    map_of_galleries(vectors, NEW_DIM).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def gallery(tmp_path: Path, vectors: np.ndarray) -> Path:
    """Three segments, from the middle one of which some items were removed."""
    made = Gallery.create(tmp_path / "one", OLD, dim=OLD_DIM)
    for rows in (range(170), range(170, 290), range(290, N)):
        made.add(vectors[rows], [f"item-{row}" for row in rows], [{"row": row} for row in rows])
        made.commit()
    made.remove([f"item-{row}" for row in range(180, 200)])
    made.commit()
    return made.path


def copied(gallery: Path, name: str) -> Gallery:
    return Gallery.open(shutil.copytree(gallery, gallery.with_name(name)))


def contents(gallery: Gallery) -> list[tuple[str, list[str], list[str | None], bytes]]:
    found = []
    for segment in Gallery.open(gallery.path).segments:
        ((_, items),) = segment.blocks(10_000)
        found.append((segment.record.version, items.ids, items.metadata, items.embeds[0].tobytes()))
    return found


def dying(notes: str, function: Callable[..., Any], model: object, block: object) -> Any:
    """Do what a function does, on two nodes, after the worker that is the first was killed."""
    import ray

    folder = Path(notes)
    (folder / f"node-{ray.get_runtime_context().get_node_id()}").touch()
    while len(list(folder.glob("node-*"))) < 2:
        time.sleep(0.05)
    made = function(model, block)
    try:
        (folder / "killed").touch(exist_ok=False)
    except FileExistsError:
        return made
    os.kill(os.getpid(), signal.SIGKILL)
    return None


@pytest.fixture
def killing(tmp_path: Path) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Return what makes a function kill its first worker; afterwards both nodes have worked, and one was killed."""
    cloudpickle = pytest.importorskip("ray").cloudpickle
    cloudpickle.register_pickle_by_value(sys.modules[dying.__module__])  # workers do not find tests
    notes = tmp_path / "notes"
    notes.mkdir()
    yield lambda function: functools.partial(dying, str(notes), function)
    assert len(list(notes.glob("node-*"))) == 2 and (notes / "killed").exists()


@pytest.fixture(scope="module")
def two_workers(model: str, cluster: Any) -> Iterator[Any]:
    """Two workers that load the map: each takes seconds to start, so tests share them."""
    from xcompat.engines.workers import Workers

    with Workers("ray", 2).pool(model, load_checkpoint(model)) as spread:
        yield spread


def worker_here(name: str, model: Any) -> Executor:
    """Return what puts blocks through a worker in this process, sent and received as to and from one of Ray's."""
    worker = pickle.loads(pickle.dumps(_Worker(NamedModel.from_loaded(name, model))))  # noqa: S301

    def spread(function: Callable[..., Any], model: object, blocks: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for kept, block in blocks:
            sent, given = pickle.loads(pickle.dumps((function, block)))  # noqa: S301
            yield kept, unwrap(pickle.loads(pickle.dumps(worker.make(sent, given))))  # noqa: S301

    return spread


@pytest.mark.nightly
def test_a_worker_is_lost(gallery: Path, model: str, two_workers: Any, killing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    newer, one, many = load_checkpoint(model), copied(gallery, "alone"), copied(gallery, "many")
    monkeypatch.setattr("xcompat.retrieval.staging.FLUSH_BYTES", 70 * NEW_DIM * 4)  # the journal is written in the middle
    assert one.upgrade(newer, BLOCK) == N - 20
    monkeypatch.setattr(upgrading, "map_block", killing(map_block))
    assert many.upgrade(newer, BLOCK, two_workers) == N - 20
    assert contents(many) == contents(one) and many.damage() == [] and len(contents(one)) > 3


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_originals_are_embedded_anew_by_workers(kind: str, tmp_path: Path, old_folder: str, folder_of: dict[str, str]) -> None:
    from xcompat.retrieval.backfilling import Backfill
    from xcompat.retrieval.originals import load_originals

    source = tmp_path / "texts.txt" if kind == "texts" else tmp_path / "photos"
    if kind == "texts":
        source.write_text("".join(f"{'so very ' * (row % 3)}bear {row}\n" for row in range(1200)) + "word " * 500)
    else:
        write_photos(source, 203)
    originals, old, newer = load_originals(source), load_embedder(old_folder), str(tmp_path / "newer")
    XbtModel.from_encoder(folder_of["clip"], old=old.describe_old()).export(newer)
    new = load_embedder(newer)
    made = Gallery.create(tmp_path / "one", old)
    ingestion.ingest(made, originals, old)
    if kind == "images":
        (source / "70.png").write_bytes(b"no image")  # the first is found by whoever reads it
    many = copied(made.path, "many")
    alone = Backfill(made, originals, new).run()
    assert Backfill(many, originals, new).run(worker_here(newer, new)) == alone
    assert alone.unreadable == (kind == "images") and bool(alone.truncated) == (kind == "texts")
    assert contents(many) == contents(made)


@pytest.mark.parametrize("kind", ["map", "embed"])
def test_a_store_is_migrated_by_workers(
    kind: str, tmp_path: Path, vectors: np.ndarray, model: str, folder_of: dict[str, str], request: pytest.FixtureRequest
) -> None:
    name, found = model if kind == "map" else folder_of["clip"], []
    for has_workers in (False, True):
        filling: Any = Mapping(load_checkpoint(name)) if kind == "map" else Embedding(load_embedder(name), "about")
        folder = tmp_path / str(has_workers)
        folder.mkdir()
        with PLACES["qdrant"](request, folder) as place:
            store = filled(place, vectors[:200])
            for row in range(200):
                place.note(str(row), f"a thing called {row}" if row != 7 else None)
            workers = {"spread": worker_here(name, filling.model)} if has_workers else {}
            assert migration.start(store, filling, place.into, batch=BLOCK, **workers).written == (200 if kind == "map" else 199)
            found.append({item: vector.tobytes() for item, vector in place.vectors(place.into).items()})
            place.close()
    assert found[0] == found[1]


def test_few_blocks_are_under_way_in_order_until_one_is_refused(model: str, two_workers: Any) -> None:
    taken, given = 0, 0

    def blocks() -> Iterator[tuple[int, upgrading.Block]]:
        nonlocal taken
        for number in range(30):
            taken += 1
            assert taken - given <= 2 * 2 + 1
            yield number, upgrading.Block(unit_vectors(5, OLD_DIM) * (number + 1), unit=False)

    newer, unit = load_checkpoint(model), upgrading.Block(unit_vectors(5, OLD_DIM))
    for _ in range(2):  # its workers stay for another round
        taken, given = 0, 0
        for kept, made in two_workers(map_block, newer, blocks()):
            assert kept == given
            np.testing.assert_allclose(made.embeds_nd, map_block(newer, unit).embeds_nd, atol=1e-6)
            given += 1
        assert given == 30
    cloudpickle = pytest.importorskip("ray").cloudpickle
    cloudpickle.register_pickle_by_value(sys.modules[refusing.__module__])
    refuses("^three is not mapped$", list, two_workers(refusing, None, ((number, number) for number in range(9))))


def refusing(model: object, block: int) -> int:
    if block == 3:
        raise XcompatError("three is not mapped")
    return block


def test_a_worker_refuses_a_model_that_is_another_or_not_there(tmp_path: Path, vectors: np.ndarray) -> None:
    """In this process: what a worker answers is sent as it is above."""
    name = tmp_path / "map"
    map_of_galleries(vectors, NEW_DIM).save_pretrained(name)
    began = NamedModel.from_loaded(str(name), load_checkpoint(str(name)))
    map_of_galleries(vectors[:100], NEW_DIM).save_pretrained(name)
    refuses("is .* on this worker, expected ", unwrap, _Worker(began).make(refusing, 0))
    shutil.rmtree(name)
    models._load.cache_clear()
    refuses(re.escape(str(name)), unwrap, _Worker(began).make(refusing, 0))


@pytest.mark.parametrize("verb", [("gallery", "upgrade"), ("migrate", "start")])
def test_misfit_engines_are_one_line(verb: tuple[str, str], gallery: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(gallery) if verb[0] == "gallery" else f"file://{gallery}"
    result = CliRunner().invoke(app, [*verb, place, "--model", model, "--engine", "daft"])
    said = "this command reads and writes in a single process; use --engine ray or accelerate launch"
    assert isinstance(result.exception, XcompatError) and said in str(result.exception)
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, [*verb, place, "--model", model, "--engine", "ray"])
    assert "--engine starts its own workers; use either accelerate launch" in str(result.exception)


@pytest.mark.parametrize("at", [0, 1, 4, 8])
def test_an_upgrade_stopped_behind_workers_continues(gallery: Path, model: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(function: Any, model: Any, blocks: Any) -> Iterator[Any]:
        for number, each in enumerate(list(run_locally(function, model, blocks))):  # all are made before the first is written
            if number == at:
                raise KeyboardInterrupt
            yield each

    newer, one, stopping = load_checkpoint(model), copied(gallery, "alone"), copied(gallery, "stopped")
    monkeypatch.setattr("xcompat.retrieval.staging.FLUSH_BYTES", 70 * NEW_DIM * 4)
    one.upgrade(newer, BLOCK)
    with pytest.raises(KeyboardInterrupt):
        stopping.upgrade(newer, BLOCK, stopped)
    assert contents(stopping) == contents(Gallery.open(gallery)), "nothing is seen before it is whole"
    assert Gallery.open(stopping.path).upgrade(newer, BLOCK) == N - 20
    assert contents(stopping) == contents(one) and Gallery.open(stopping.path).damage() == []


FEW_ROWS = """
import sys
from xcompat import cli
from xcompat.retrieval import gallery
gallery.Gallery.upgrade.__defaults__ = (50, *gallery.Gallery.upgrade.__defaults__[1:])
cli.main()
"""


def test_processes_of_accelerate_map_a_gallery_or_all_end(gallery: Path, model: str, tmp_path: Path) -> None:
    one, many = copied(gallery, "alone"), copied(gallery, "many")
    one.upgrade(load_checkpoint(model), BLOCK)
    done = warm.run("-c", FEW_ROWS, "gallery", "upgrade", many.path, "--model", model, folder=tmp_path, ranks=2)
    assert done.returncode == 0 and done.stdout.count("410 embeddings mapped") == 1, done.stderr
    assert contents(many) == contents(one)
    spoilt: CompatModel = load_checkpoint(model)  # an item of the last block is mapped to nothing, by whoever has that block
    with torch.no_grad():
        for weights in spoilt.parameters():
            weights.zero_()
    spoilt.save_pretrained(tmp_path / "spoilt")
    done = warm.run("-c", FEW_ROWS, "gallery", "upgrade", gallery, "--model", tmp_path / "spoilt", folder=tmp_path, ranks=2)
    assert done.returncode == 2 and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_accelerate_migrates_a_store(vectors: np.ndarray, model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with PLACES["qdrant"](request, tmp_path) as place:  # a folder that one process alone may open
        filled(place, vectors)
        place.close()
        given = ("migrate", "start", place.uri(), "--model", model, "--into", place.into, "--batch", BLOCK)
        done = warm.run("-m", "xcompat", *given, folder=tmp_path, ranks=2)
        assert done.returncode == 0 and f"{N} rows written" in " ".join(done.stdout.split()), done.stderr
        found = place.vectors(place.into)
        made = Mapping(load_checkpoint(model))(vectors)
        np.testing.assert_allclose([found[str(row)] for row in range(N)], made, atol=1e-6)


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


def test_rounds_compute_no_more_than_needed_and_errors_end_them() -> None:
    begun: list[int] = []

    def square(item: int) -> int:
        begun.append(item)
        return item**2

    results = map_in_rounds(square, range(8), 3)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert sorted(begun) == [0, 1, 2]
    assert list(results) == [item**2 for item in range(3, 8)]
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


def test_threads_compute_properties_of_different_objects_together() -> None:
    both_compute = threading.Barrier(2, timeout=60)  # breaks if one thread waits for the other's property

    class Part:
        @unlocked_property
        def place(self) -> int:
            return both_compute.wait()

    parts = [Part(), Part()]
    places = list(map_in_threads(lambda part: part.place, parts, threads=2))
    assert sorted(places) == [0, 1]
    assert [part.place for part in parts] == places  # computed once


@pytest.mark.usefixtures("three_threads")
def test_items_and_small_matrices_use_one_core_and_others_theirs() -> None:
    together = threading.Barrier(3, timeout=60)

    def threads(item: int) -> int:
        together.wait()
        return torch.get_num_threads()

    assert list(map_over_cores(threads, range(6), CPU)) == [1] * 6
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 3
    for dim, used in ((SMALL, 1), (SMALL + 1, 3)):
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
def test_gpu_processes_share_cores(environment: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
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
