"""Commands on file systems that are really full, at every size of theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from injections import said_wrong
from kills import LONG, Stage

PAGE = 4096


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system of some bytes over a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def cannot_mount(folder: Path) -> str | None:
    """Return why nothing can be mounted here; None where it can."""
    if shutil.which("mount") is None:
        return "there is no mount"
    try:
        with mounted(folder, 64 * PAGE):
            return None
    except (OSError, subprocess.CalledProcessError):
        return "mounting needs privileges that are not here"


def full(stage: Stage, step: int = 1) -> Iterator[str | None]:
    """Run a command with no page free, with one, with two, until it succeeds; then, with room, once more.

    Args:
        stage: where it is played.
        step: pages more each time.

    Yields:
        What is wrong after each; None when nothing is.
    """
    for free in range(0, 100_000, step):
        with mounted(stage.place, 2**30):
            shutil.copytree(stage.prepared, stage.work, symlinks=True)
            used = os.statvfs(stage.place)
            size = (used.f_blocks - used.f_bfree + free) * PAGE
            subprocess.run(["mount", "-o", f"remount,size={max(size, PAGE)}", stage.place], check=True)
            outcome = stage.play(kill_after=LONG)
            problem = said_wrong(stage, outcome) or stage.wrong(outcome.code == 0)
            subprocess.run(["mount", "-o", f"remount,size={2**30}", stage.place], check=True)
            problem = problem or stage.continued()
            yield problem and f"{free} pages free: {problem}"
            if outcome.code == 0:
                return
