"""The short form of every campaign, and that the harness sees what it is there to see."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import long_run
import pytest
import warm
from campaigns import PARTS, campaigns
from disks import Disk, Recorder, listing_of
from document import write_report
from injections import Fault, failing
from kills import killed_before
from rows import Row, read_rows, updated, whole, write_rows
from schedule import mostly_nightly
from syscalls import Call, run_watched, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


GROUPS = [["power cuts: Flat: add", "histories"], ["power cuts", "attacks"], ["kills"], ["injected errors", "full disks"]]


@pytest.mark.parametrize("groups", mostly_nightly(GROUPS, GROUPS[0].__eq__))
def test_nothing_is_lost(groups: list[str], tmp_path: Path) -> None:
    only = [argument for group in groups for argument in ("--only", group)]
    done = warm.run(Path(long_run.__file__), "--short", *only, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_parts_of_a_row_are_told_as_one(tmp_path: Path) -> None:
    parts = [Row("kills", "a", 2, ["x"], 1.0), Row("kills", "b", 1), Row("kills", "a", 3, ["y"], 0.5)]
    assert whole(parts) == [Row("kills", "a", 5, ["x", "y"], 1.5), Row("kills", "b", 1)]
    long = [campaign for campaign in campaigns(tmp_path, long=True) if campaign.name == "xcompat train recipe.yaml"]
    assert len({campaign.part for campaign in long if campaign.group == "injected errors"}) == PARTS["xcompat train recipe.yaml"]


def test_rows_that_are_not_made_anew_are_told_as_they_were(tmp_path: Path) -> None:
    known = [Row("kills", "a", 2, ["x"], 1.0, "2026-01-01", "here", "mended"), Row("readers", "b", 1, date="2026-01-01")]
    write_rows(tmp_path / "faults.json", known)
    anew = Row("kills", "c", 3)
    anew.end(2.0)
    rows = updated(read_rows(tmp_path / "faults.json"), [anew, Row("readers", "b", 7, date="2026-02-01", machine="there")])
    assert rows == [known[0], anew, Row("readers", "b", 7, date="2026-02-01", machine="there")]
    assert anew.date and "torch" in anew.machine
    write_report(tmp_path / "faults.md", rows)
    told = (tmp_path / "faults.md").read_text().splitlines()
    lines = ["- 2026-01-01: here", "| a | 2 | 1 | 2026-01-01 |", "- a: x", "- a: mended", "| b | 7 | 0 | 2026-02-01 |"]
    assert not {*lines, "| **all** | 12 | 1 |"} - {*told}


def test_the_page_is_what_its_rows_say(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("number", "left"), [(1, {}), (2, {"new": b""}), (3, {"new": b"content"}), (5, {"name": b"content"})])
def test_a_kill_comes_before_the_call(number: int, left: dict[str, bytes], tmp_path: Path) -> None:
    outcome = run_watched(lambda: written(tmp_path), tmp_path, killed_before(number))
    assert outcome.code == -9 and not outcome.reported and listing_of(tmp_path) == left


def test_a_call_fails_as_it_is_told(tmp_path: Path) -> None:
    seen: list[Call] = []
    outcome = run_watched(lambda: written(tmp_path), tmp_path, failing(Fault(2, errno.EDQUOT), seen))
    assert outcome.code == 70 and "Errno 122" in outcome.errors and not outcome.reported
    assert [(call.name, call.paths) for call in seen] == [("write", ("new",))]
    assert run_watched(lambda: written(tmp_path), tmp_path, lambda _: None).reported


def test_calls_of_libraries_in_c_are_seen(tmp_path: Path) -> None:
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
