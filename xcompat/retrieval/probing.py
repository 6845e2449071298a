"""Read a foreign faiss index in a separate process first: on a damaged file faiss crashes or hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.retrieval.faiss_probe import FOUND

SECONDS, BYTES_PER_SECOND = 60.0, 20e6
"""Time limit, fixed and per byte: a slow disk reads a hundred megabytes a second."""
_BINARY = {
    "IBxF": "IndexBinaryFlat",
    "IBwF": "IndexBinaryIVF",
    "IBFf": "IndexBinaryFromFloat",
    "IBHf": "IndexBinaryHNSW",
    "IBHh": "IndexBinaryHash",
    "IBHm": "IndexBinaryMultiHash",
    "IBMp": "IndexBinaryIDMap",
    "IBM2": "IndexBinaryIDMap2",
}
_SCRIPT = Path(__file__).with_name("faiss_probe.py")


def require_readable(path: Path, vectors: bool = True) -> None:
    """Refuse a faiss index that would crash this process.

    Another process, which imports only faiss, reads the file, checks that its parts fit each other, searches it and reconstructs
    vectors. It cannot notice an altered vector: the file holds no checksum.

    Args:
        path: the index file.
        vectors: whether the caller will reconstruct vectors.

    Raises:
        XcompatError: the file cannot be read, contradicts itself, or crashed or blocked that process.
    """
    _require_floats(path)
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


def _require_floats(path: Path) -> None:
    """Refuse an index of bits."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(b"IB"):
        kind = _BINARY.get(head.decode("ascii", "replace"), "IndexBinary")
        raise XcompatError(
            f"{path} is a binary index ({kind}), which compares bits by their Hamming distance; give the index of the float "
            "embeddings from which the bits were made"
        )


def _look_apart(path: Path, vectors: bool, limit: float) -> tuple[int, str]:
    """Probe an index in another process; return its exit code and the last line of its stderr."""
    command = [sys.executable, str(_SCRIPT), str(path.resolve()), *["vectors"] * vectors]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
