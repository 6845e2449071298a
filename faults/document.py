"""Write what came of the long form into ``docs/faults.md``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rows import Row

WHAT = {
    "kills": "SIGKILL before calls that change a file (each call for Flat, else a sample) and at random moments. Each file then "
    "verifies, and the same command completes without loss or temporary files.",
    "killed migrations": "SIGKILL at random moments, four times per verb of `xcompat migrate` (start, verify, switch, rollback, "
    "switch, finish), and four times in re-ranked searches that cache new embeddings (PostgreSQL, Qdrant, SQLite). A "
    "[service](stores.md#services-beside-a-migration) writes all the time. At the end the store contains "
    "exactly its items. PostgreSQL, Chroma and Milvus Lite (one request at a time) run as servers, Qdrant as a stand-in "
    "(`tests/qdrant_server.py`), LanceDB as a folder, SQLite as a file.",
    "power cuts": "Each trial is a disk state after a file operation if only synced data is safe: lost files, names without "
    "data, zeros, partial data, or a folder lost or kept. A sample is also continued.",
    "injected errors": "ENOSPC, EIO, EACCES, EROFS or EDQUOT at file operations that change a file or first read it. ENOSPC and "
    "EROFS also persist. No data is lost: the command prints one line and exits with 2, or completes.",
    "full disks": "A tmpfs with no free page, then one, two, … until the command succeeds.",
    "histories": "hypothesis mixes gallery operations and kills. Each trial compares a state with a dictionary.",
    "damaged inputs": "Truncated, bit-flipped, overwritten and swapped files give the right result or an error in one line.",
    "attacks": "Random requests with a secret file, `/etc/passwd`, `/dev/zero` or another server, as texts and gradio files. No "
    "answer contains a file, a folder listing or a server error, and no request reaches the other server.",
    "readers": "Readers beside a writer that commits, compacts and rolls back. Each trial is a read.",
}


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the document.

    Args:
        path: where.
        rows: of every campaign.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    dates: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        dates[re.sub(r"^(Linux [\d.]+)[^,]*", r"\1", row.machine)].add(row.date)  # without the build of the kernel
    machines = sorted((", ".join(sorted(found)), machine) for machine, found in dates.items())
    lines = [
        "# Faults",
        "",
        "This page lists results of fault injection. A failure is any other outcome than its section describes, e.g. "
        "a crash or a wrong result. Fixed failures stay listed.",
        "",
        "Use `make faults` to repeat all trials, or repeat a kind or operation with "
        '`python faults/long_run.py --only "killed migrations"`.',
        "",
        *(f"- {found}: {machine}" for found, machine in machines),
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
            "| operation | trials | failures | measured |",
            "|---|---:|---:|---|",
        ]
        lines += [f"{_line(row.name, [row])} {row.date} |" for row in found]
        failures = [f"- {row.name}: {' '.join(failure.split())}" for row in found for failure in row.failures[:3]]
        lines += ["", "Failures (at most three per operation):", "", *failures] if failures else []
        if notes := [f"- {row.name}: {row.note}" for row in found if row.note]:
            lines += ["", "Fixes:", "", *notes]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(name: str, rows: Sequence[Row]) -> str:
    return f"| {name} | {sum(row.trials for row in rows):,} | {sum(len(row.failures) for row in rows):,} |"
