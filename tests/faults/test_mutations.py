"""Damaged inputs in the normal suite: a few hundred trials, and that the harness sees what it is there to see."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import mutations
import pytest
from mutation_galleries import galleries
from mutation_subjects import Answer, Subject
from mutations import Outcome, Tally, Trial, as_markdown, tally
from schedule import mostly_nightly

from xcompat import XcompatError


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


def test_the_harness_sees_each_outcome_and_sees_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "SECONDS", 0.1)
    (tmp_path / "whole" / "it").mkdir(parents=True)
    (tmp_path / "whole" / "it" / "file").write_bytes(bytes(64))
    subject = Subject("it", tmp_path / "whole" / "it", ("*",), asked)
    first, second = tally(subject, 16, seed=53), tally(subject, 16, seed=53)
    assert first.counts == second.counts and first.trials == 16
    assert [(trial.damage, trial.outcome) for trial in first.failures] == [
        (trial.damage, trial.outcome) for trial in second.failures
    ]
    assert {Outcome.TRACEBACK, Outcome.SIGNAL, Outcome.HANG, Outcome.REFUSED, Outcome.WRONG} <= set(first.counts)
    assert (tmp_path / "whole" / "it" / "file").read_bytes() == bytes(64)


def test_the_table_counts_everything() -> None:
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
