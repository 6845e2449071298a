"""Cut the power after every file operation: in whatever is left, what was committed is there and can be gone on with."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator

from disks import Disk, Listing, Recorder, listing_of, written
from kills import Stage, undisturbed
from scenes import copied


def power_cut(stage: Stage, most: int | None = None) -> Iterator[str | None]:
    """Record the operation of a scene, and look at what every beginning of it may leave on a disk.

    Args:
        stage: where it is played.
        most: about how many of the states on disk to go on from; None for each.

    Yields:
        What is wrong with a state on disk; None when nothing is. States that are the same to the byte are looked at once.
    """
    copied(stage.prepared, stage.work)
    disk, recorder = Disk(listing_of(stage.place)), Recorder(stage.place)
    undisturbed(stage.play(recorder.answer))
    after = listing_of(stage.place)
    seen: set[bytes] = set()
    every = 1 if most is None else max(1, len(recorder.events) * 3 // most)
    for number, event in enumerate([None, *recorder.events]):
        if event is not None:
            disk.apply(event)
        for lost, listing in disk.crashes():
            reported = number == len(recorder.events)
            digest = _digest(listing) + bytes([reported])
            if digest in seen:
                continue
            seen.add(digest)
            shutil.rmtree(stage.place)
            stage.place.mkdir()
            written(listing, stage.place)
            problem = stage.wrong(reported) or (stage.continued() if len(seen) % every == 0 else None)
            done = "nothing" if event is None else f"{event.name} {' '.join(map(str, event.paths))}"
            yield problem and f"power cut after {done} ({number} of {len(recorder.events)}), {lost}: {problem}"
    assert next(disk.crashes())[1] == after, "the recording, replayed, is not what is on the disk: an operation was overlooked"


def _digest(listing: Listing) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for path, content in sorted(listing.items()):
        digest.update(f"{path}\0{'folder' if content is None else len(content)}\0".encode() + (content or b""))
    return digest.digest()
