"""Write what came of the long form into ``docs/faults.md``."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from campaigns import Row

WHAT = {
    "kills": "SIGKILL before every call that changes a file (Flat; of other operations before a sample of them), and at random "
    "moments. After each the folder is opened and every file verified, it holds a committed state and all that was reported, and "
    "the same command, run again, ends as if nothing had happened and leaves no temporary file. Migrations of a database end "
    "row by row as one of the same rows that nobody disturbs.",
    "power cuts": "Every file operation was recorded at its system call, whoever made it. After each the states are built that "
    "a disk may be in if only what was synced is sure: all else lost, names without data, zeros, data in part, the names of one "
    "folder lost or alone there. A trial is a state; a sample of them is gone on from as well.",
    "injected errors": "ENOSPC, EIO, EACCES, EROFS and EDQUOT, by turns, at every file operation that changes something and at "
    "the first of its kind on each file that is read, ENOSPC and EROFS also for good "
    "from there on. Nothing is lost; the command says one line and ends with code 2, or does its work all the same.",
    "full disks": "A tmpfs with no free page, one, two, until the command succeeds.",
    "histories": "hypothesis plays histories of adding, replacing, removing, committing, closing, opening, rolling back, "
    "compacting, upgrading and being killed; a trial is a state compared with a dictionary.",
    "damaged inputs": "Files cut off, with bits flipped, overwritten, exchanged: the right answer, or one line of what is wrong.",
    "readers": "Readers beside a writer that commits, compacts and rolls back: a trial is a read.",
}
LIBRARIES = ("numpy", "torch", "transformers", "datasets", "faiss-cpu", "pyarrow", "safetensors", "milvus-lite", "hypothesis")


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the document.

    Args:
        path: where.
        rows: of every campaign.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    lines = [
        "# Faults",
        "",
        "What was tried to lose data, and what came of it. `make faults` writes this file; a failure that it finds stays in it.",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}; Linux {platform.release()}, {platform.machine()}, {_cores()} cores, "
        f"{int(memory.split()[1]) / 2**20:.0f} GiB; Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        + f". All campaigns one after the other: {sum(row.seconds for row in rows) / 60:.0f} minutes.",
        "",
        "| kind | trials | failures |",
        "|---|---:|---:|",
        *(_line(group, found) for group, found in groups.items()),
        _line("**all**", rows),
    ]
    for group, found in groups.items():
        lines += [
            "",
            f"## {group.capitalize()}",
            "",
            WHAT.get(group, ""),
            "",
            "| operation | trials | failures |",
            "|---|---:|---:|",
        ]
        lines += [_line(row.name, [row]) for row in found]
        failures = [f"- {row.name}: {failure}" for row in found for failure in row.failures[:3]]
        lines += ["", "Of the failures, three of each operation at most:", "", *failures] if failures else []
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(name: str, rows: Sequence[Row]) -> str:
    return f"| {name} | {sum(row.trials for row in rows):,} | {sum(len(row.failures) for row in rows):,} |"


def _cores() -> int:
    from xcompat.threads import usable_cores

    return usable_cores()
