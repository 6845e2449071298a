"""Check of foreign faiss indexes in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from xcompat.core.errors import XcompatError

SECONDS, BYTES_PER_SECOND = 60.0, 20e6
"""Time limit, fixed and per byte. A slow disk reads a hundred megabytes per second."""
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
    """Raise if a faiss index would crash this process.

    Another process, which imports only faiss, reads the file, checks and searches it, and reconstructs vectors. Altered vectors
    are not
    detected, because the file has no checksum.

    Args:
        path: the index file.
        vectors: whether the caller will reconstruct vectors.

    Raises:
        XcompatError: the file is unreadable or inconsistent, or the process crashed or timed out.
    """
    from xcompat.retrieval.faiss_probe import FOUND

    _require_floats(path)
    limit = SECONDS + path.stat().st_size / BYTES_PER_SECOND
    try:
        code, said = _probe_in_subprocess(path, vectors, limit)
    except subprocess.TimeoutExpired:
        reason = f"faiss did not finish within {limit:.0f} s"
    else:
        if not code:
            return
        reason = said if code == FOUND and said else f"faiss crashed on it ({code})"
    raise XcompatError(f"{path} is not a readable faiss index: {reason}; write it again, or restore it from a copy")


def _require_floats(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(b"IB"):
        kind = _BINARY.get(head.decode("ascii", "replace"), "IndexBinary")
        raise XcompatError(
            f"{path} is a binary index ({kind}), which compares bits by Hamming distance; use the index of the original "
            "float embeddings"
        )


def _probe_in_subprocess(path: Path, vectors: bool, limit: float) -> tuple[int, str]:
    """Return the probe's exit code, and its last stderr line."""
    command = [sys.executable, str(_SCRIPT), str(path.resolve()), *["vectors"] * vectors]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]
