"""A push that is killed is done or not."""

from __future__ import annotations

from pathlib import Path

from pushes import killed_pushes


def test_a_killed_push_is_done_or_not(tmp_path: Path) -> None:
    assert list(killed_pushes(tmp_path, trials=8)) == [None] * 8
