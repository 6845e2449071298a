"""Readers beside writers in the normal suite: a few hundred reads, and that what is wrong is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import readers

from xcompat.retrieval import Gallery


def test_whatever_is_read_while_others_write_is_one_committed_state() -> None:
    outcome = readers.run(300)
    assert outcome.problems == [] and outcome.reads >= 300
    assert outcome.changes.total() == 30 and set(outcome.changes) == {"commit", "compact", "rollback"}


def write_without_removing(folder: Path, number: int, changes: int) -> readers.Outcome:
    Gallery.remove = lambda *_: None  # type: ignore[method-assign]  # in a process that ends with it
    return readers.write_in_turn(folder, number, changes)


@pytest.mark.nightly
def test_a_state_that_shows_what_was_removed_is_seen() -> None:
    assert readers.run(100, write_without_removing).problems
