"""Any history of a gallery ends like that of a dictionary, also where the process is killed on the way."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from kills import killed_before
from numpy.typing import NDArray
from scenes import OLD, D, d, gallery_content, gallery_map, same, unit
from syscalls import run_watched

from xcompat import Fingerprint, FingerprintMismatchError
from xcompat.retrieval import Gallery

OTHER = Fingerprint.from_string("other")
Numbers = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)
Content = dict[str, NDArray[np.float32]]


class Histories(RuleBasedStateMachine):
    """A gallery beside a dictionary of what it should hold, and one of each state that it can return to."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="history-"))
        self.gallery = Gallery.create(self.folder / "gallery", OLD, dim=d)
        self.stored: Content = {}
        self.waiting: Content = {}
        self.states: dict[int, Content] = {0: {}}
        self.seed = 0

    def fresh(self, numbers: list[int], dim: int = d) -> Content:
        """Return new embeddings of some items."""
        self.seed += 1
        return dict(zip([f"item {number}" for number in numbers], unit(len(numbers), dim, self.seed), strict=True))

    def committed(self, content: Content) -> None:
        """Check a new state, as whoever opens the gallery finds it."""
        self.stored = self.waiting = content
        self.states[self.gallery.generation] = content
        self.check(Gallery.open(self.gallery.path).generation)

    def check(self, generation: int) -> None:
        found = gallery_content(self.gallery.path)
        assert same(found, self.states[generation]), (found, self.states[generation])
        if found and {embed.shape for embed in found.values()} == {(d,)}:
            queries_Qd = unit(2, d, 1)
            order_Qn = np.argsort(-queries_Qd @ np.stack(list(found.values())).T, axis=1)
            hits = Gallery.open(self.gallery.path).search(queries_Qd, OLD, top_k=12)
            assert [[hit.id for hit in row] for row in hits] == [[list(found)[place] for place in order] for order in order_Qn]
        kept = [manifest.generation for manifest in self.gallery.generations()]
        assert kept == sorted(self.states), (kept, sorted(self.states))
        type(self).steps += 1

    @rule(numbers=Numbers, other=st.booleans())
    def add(self, numbers: list[int], other: bool) -> None:
        """Add items, those that are there anew; some are of another model."""
        new = self.fresh(numbers, 6 if other else d)
        self.gallery.add(np.stack(list(new.values())), list(new), version=OTHER if other else OLD, replace=True)
        self.waiting = self.waiting | new

    @rule(numbers=Numbers)
    def remove(self, numbers: list[int]) -> None:
        gone = {f"item {number}" for number in numbers} & self.waiting.keys()
        if gone:
            self.gallery.remove(sorted(gone))
            self.waiting = {name: embed for name, embed in self.waiting.items() if name not in gone}

    @rule()
    def commit(self) -> None:
        """Publish what waits, unless no one model could search it."""
        if len({len(embed) for embed in self.waiting.values()}) > 1:
            self.refuse(self.gallery.commit)
        else:
            self.gallery.commit()
            self.committed(self.waiting)

    def refuse(self, change: Callable[[], object]) -> None:
        """Check that a commit of embeddings of two models is refused; other changes wait until they are discarded."""
        try:
            change()
        except FingerprintMismatchError:
            assert same(gallery_content(self.gallery.path), self.stored)
        else:
            raise AssertionError("a gallery of two models that do not fit was committed")

    @rule(reopen=st.booleans())
    def forget(self, reopen: bool) -> None:
        """Close, perhaps open anew: what was not committed is gone."""
        self.gallery.close()
        self.waiting = self.stored
        if reopen:
            self.gallery = Gallery.open(self.gallery.path)

    @rule(place=st.integers(0, 9))
    def roll_back(self, place: int) -> None:
        generation = sorted(self.states)[place % len(self.states)]
        content = self.states[generation]
        self.gallery.rollback(generation)
        self.committed(content)

    @rule()
    def compact(self) -> None:
        self.commit()
        if self.stored is self.waiting:
            self.gallery.compact()
            self.states = {}
            self.committed(self.waiting)

    @precondition(lambda self: self.stored and self.gallery.versions == [OLD])
    @rule()
    def upgrade(self) -> None:
        """Map what is stored to a newer model."""
        self.gallery.close()
        mapped = gallery_map().upgrade(torch.from_numpy(np.stack(list(self.stored.values()))))
        self.gallery.upgrade(gallery_map())
        self.committed(dict(zip(self.stored, mapped.detach().numpy(), strict=True)))
        assert all(embed.shape == (D,) for embed in self.stored.values())

    @rule(number=st.integers(1, 90), numbers=Numbers, tidy=st.booleans())
    def kill(self, number: int, numbers: list[int], tidy: bool) -> None:
        """Kill a process that commits, or one that tidies up; what it reports or shows is there whole."""
        self.gallery.close()
        self.waiting = self.stored
        tidy = tidy or any(len(embed) != d for embed in self.stored.values())  # another model's, which OLD would split
        new = {} if tidy else self.fresh(numbers)
        path = self.gallery.path

        def change() -> None:
            gallery = Gallery.open(path)
            if tidy:
                gallery.compact()
            else:
                gallery.add(np.stack(list(new.values())), list(new), version=OLD, replace=True)
                gallery.commit()

        before = self.gallery.generation
        outcome = run_watched(change, self.folder, killed_before(number), kill_after=60.0)
        self.gallery = Gallery.open(path)
        done = self.gallery.generation != before
        assert done or tidy or not outcome.reported, "what was reported is not there"  # what is tidy stays the same generation
        if tidy:
            kept = {manifest.generation for manifest in self.gallery.generations()}
            self.states = {generation: content for generation, content in self.states.items() if generation in kept}
        self.committed(self.stored | new if done else self.stored)

    def teardown(self) -> None:
        self.gallery.close()
        shutil.rmtree(self.folder)


def histories(examples: int) -> Iterator[str | None]:
    """Play histories.

    Args:
        examples: how many, of up to 25 steps.

    Yields:
        For each state that was compared None, or the history that goes wrong.
    """
    Histories.steps = 0
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    how = settings(max_examples=examples, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=quiet)
    problem = None
    try:
        run_state_machine_as_test(Histories, settings=how)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        problem = f"{type(error).__name__}: {str(error)[:300]} after {'; '.join(notes)[:1500]}"
    yield from [None] * Histories.steps
    if problem:
        yield problem
