"""Readers beside writers that add, remove, commit, compact and roll back: whatever is read is one committed state.

Before a state is committed its content is written down, so that a reader knows what it must see. Two writers take turns, and get
into each other's way between them.

    python faults/readers.py [READS]
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from filelock import FileLock

from xcompat import Fingerprint, XcompatError
from xcompat.core.errors import GenerationGoneError
from xcompat.core.files import write_json
from xcompat.core.progress import console
from xcompat.retrieval import Gallery

MODEL = Fingerprint.from_string("model")
DIM = 8
WRITTEN = "written"
"""A file that is there once the writers have ended."""
NAMES = [f"item {number}" for number in range(24)]
WRITERS, READERS = 2, 3
READS_OF_A_STATE = 10  # about
TURNS = ("commit", "commit", "commit", "rollback", "commit", "commit", "commit", "compact")
HELD = 4
"""Galleries that a reader has opened and comes back to: their states may be compacted away meanwhile."""
State = dict[str, int]


@dataclass
class Outcome:
    """What came of it.

    Args:
        reads: how many there were.
        refused: how many of them were refused because their state was really gone.
        changes: kind of change -> how many were committed meanwhile.
        problems: what was half-visible, or refused without reason; one line each.
    """

    reads: int = 0
    refused: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def run(reads: int, write: Callable[[Path, int, int], Outcome] | None = None) -> Outcome:
    """Read a gallery while others write to it.

    Args:
        reads: how often at least, by all readers together.
        write: what a writer does, in the place of :func:`write_in_turn`.

    Returns:
        What came of it.
    """
    memory = Path("/dev/shm")  # a disk that is flushed would let few changes happen between two reads
    with tempfile.TemporaryDirectory(prefix="readers-", dir=memory if memory.is_dir() else None) as temporary:
        folder = Path(temporary)
        Gallery.create(folder / "gallery", MODEL, dim=DIM)
        _write_down(folder, 0, {})
        # no forks of this process: in a fork, what its threads had locked stays so
        with ProcessPoolExecutor(READERS + WRITERS, get_context("forkserver")) as pool:
            shares = [len(range(number, reads, READERS)) for number in range(READERS)]
            readers = [pool.submit(_read, folder, number, share) for number, share in enumerate(shares)]
            changes = reads // READS_OF_A_STATE // WRITERS
            writers = [pool.submit(write or write_in_turn, folder, number, changes) for number in range(WRITERS)]
            total = Outcome()
            try:
                for writer in writers:
                    _add(total, writer.result())
            finally:
                (folder / WRITTEN).touch()
            for reader in readers:
                _add(total, reader.result())
        return total


def _add(total: Outcome, part: Outcome) -> None:
    total.reads += part.reads
    total.refused += part.refused
    total.changes.update(part.changes)
    total.problems += part.problems[:20]


def write_in_turn(folder: Path, number: int, changes: int) -> Outcome:
    """Make so many changes, each in its turn."""
    chance, outcome, console.quiet = random.Random(f"writer {number}"), Outcome(), True
    while outcome.changes.total() < changes:
        try:
            if chance.random() < 0.2:
                _get_in_the_way(folder, chance)
            with FileLock(folder / "turn", poll_interval=0.001):
                kind = TURNS[outcome.changes.total() % len(TURNS)]
                _change(folder, kind, chance)
                outcome.changes[kind] += 1
        except XcompatError as error:
            if "another process is writing" not in str(error):
                outcome.problems.append(f"a writer was refused: {error}")
        except Exception as error:
            outcome.problems.append(f"a writer failed: {error!r}")
            break
    return outcome


def _change(folder: Path, kind: str, chance: random.Random) -> None:
    with Gallery.open(folder / "gallery") as gallery:
        state, following = _written_down(folder, gallery.generation), gallery.generation + 1
        if kind == "compact":
            _write_down(folder, following, state)
            gallery.compact()
        elif kind == "rollback":
            earlier = chance.choice(gallery.generations()).generation
            _write_down(folder, following, _written_down(folder, earlier))
            gallery.rollback(earlier)
        else:
            put = {name: chance.randrange(10**6) for name in chance.sample(NAMES, 3)}
            gone = [name for name in chance.sample(sorted(state), min(2, len(state))) if name not in put]
            embeds, metadata = np.stack([*map(_vector, put.values())]), [{"n": seed} for seed in put.values()]
            gallery.add(embeds, list(put), metadata, replace=True)
            if gone:
                gallery.remove(gone)
            _write_down(folder, following, {name: seed for name, seed in (state | put).items() if name not in gone})
            gallery.commit()


def _get_in_the_way(folder: Path, chance: random.Random) -> None:
    """Begin to write without waiting for one's turn, and think better of it."""
    with Gallery.open(folder / "gallery") as gallery:
        gallery.add(_vector(1)[None], ["never there"])
        if chance.random() < 0.5:
            gallery.staging().flush()


def _read(folder: Path, number: int, reads: int) -> Outcome:
    chance, outcome = random.Random(f"reader {number}"), Outcome()
    held: list[Gallery] = []
    while outcome.reads < reads or not (folder / WRITTEN).exists():
        outcome.reads += 1
        asked: Gallery | None = None
        try:
            if len(held) == HELD:
                asked = held.pop(chance.randrange(HELD))
            else:
                asked = Gallery.open(folder / "gallery")
                held += [asked] if chance.random() < 0.5 else []
            problem = chance.choice([_searched, _searched, _looked_up, _verified, _listed, _earlier])(folder, asked, chance)
        except GenerationGoneError as error:
            outcome.refused += 1
            problem = None if asked is not None and _is_gone(asked) else f"refused although it is there: {error}"
        except Exception as error:
            problem = repr(error)
        if problem:
            outcome.problems.append(f"generation {asked and asked.generation}: {problem}")
    return outcome


def _searched(folder: Path, gallery: Gallery, _: random.Random) -> str | None:
    state, query = _written_down(folder, gallery.generation), _vector(0)
    hits = gallery.search(query[None], MODEL, top_k=len(NAMES) + 1)[0]
    if {hit.id: hit.metadata for hit in hits} != {name: {"n": seed} for name, seed in state.items()} or len(hits) != len(state):
        return f"a search found {[(hit.id, hit.metadata) for hit in hits]} in place of {state}"
    scores = [float(query @ _vector(state[hit.id])) for hit in hits]
    if not np.allclose([hit.score for hit in hits], scores, atol=1e-5) or [hit.score for hit in hits] != sorted(
        (hit.score for hit in hits), reverse=True
    ):
        return f"a search scored {[hit.score for hit in hits]} in place of {scores}"
    return None


def _looked_up(folder: Path, gallery: Gallery, _: random.Random) -> str | None:
    state = _written_down(folder, gallery.generation)
    names = [*NAMES, "never there"]
    there = {name for name, version in zip(names, gallery.find(names), strict=True) if version}
    return None if there == set(state) and len(gallery) == len(state) else f"found {there}, and not {set(state)}"


def _verified(_: Path, gallery: Gallery, __: random.Random) -> str | None:
    wrong = gallery.damage()
    return f"a false alarm: {wrong}" if wrong else None


def _listed(folder: Path, gallery: Gallery, _: random.Random) -> str | None:
    listed = {manifest.generation: manifest.rows for manifest in gallery.generations()}
    if not listed or listed != {number: len(_written_down(folder, number)) for number in listed}:
        return f"a list of states that never were: {listed}"
    return None


def _earlier(folder: Path, gallery: Gallery, chance: random.Random) -> str | None:
    """Open a state that is listed; it may be compacted away before that, but then it is listed no more."""
    earlier = chance.choice(gallery.generations()).generation
    try:
        return _searched(folder, Gallery.open(gallery.path, earlier), chance)
    except GenerationGoneError:
        listed = [manifest.generation for manifest in gallery.generations()]
        return f"refused state {earlier} although it is listed" if earlier in listed else None


def _is_gone(gallery: Gallery) -> bool:
    kept = {manifest.generation for manifest in gallery.generations()}
    return gallery.generation not in kept and gallery.generation < max(kept)


def _write_down(folder: Path, generation: int, state: State) -> None:
    write_json(folder / "states" / f"{generation}.json", state)


def _written_down(folder: Path, generation: int) -> State:
    return json.loads((folder / "states" / f"{generation}.json").read_text(encoding="utf-8"))


@cache
def _vector(seed: int) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=DIM)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    outcome = run(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
    sys.stdout.write(f"{outcome.reads:,} reads, {outcome.refused:,} of states that were gone, beside {dict(outcome.changes)}: ")
    sys.stdout.write(f"{len(outcome.problems):,} problems\n" + "".join(f"{problem}\n" for problem in outcome.problems[:20]))
    sys.exit(bool(outcome.problems))
