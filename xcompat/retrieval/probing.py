"""An index file that somebody else wrote is read in a process of its own first: on damaged ones faiss crashes, or never ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xcompat.errors import XcompatError
from xcompat.retrieval.faiss_probe import FOUND

SECONDS, BYTES_PER_SECOND = 60.0, 20e6
"""How long a whole file takes at most: a slow disk reads a hundred megabytes a second."""
_SCRIPT = Path(__file__).with_name("faiss_probe.py")


def require_readable(path: Path, vectors: bool = True) -> None:
    """Refuse a faiss index that this process could not survive.

    Another process, which imports faiss alone, reads it, looks whether its parts fit each other, searches it and takes vectors
    out. A vector that has changed is not found so: nothing in the file says what it was.

    Args:
        path: the index file.
        vectors: whether vectors are taken out later.

    Raises:
        XcompatError: it cannot be read, contradicts itself, or stopped the process that tried.
    """
    limit = SECONDS + path.stat().st_size / BYTES_PER_SECOND
    try:
        code, said = _look_apart(path, vectors, limit)
    except subprocess.TimeoutExpired:
        reason = f"faiss does not come to an end with it in {limit:.0f} s"
    else:
        if not code:
            return
        reason = said if code == FOUND and said else f"faiss breaks down on it ({code})"
    raise XcompatError(f"{path} is no readable faiss index: {reason}; write it again, or take it from a copy")


def _look_apart(path: Path, vectors: bool, limit: float) -> tuple[int, str]:
    """Look at an index in another process; return how that ended, and its last words."""
    command = [sys.executable, str(_SCRIPT), str(path), *["vectors"] * vectors]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
