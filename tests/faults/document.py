"""Write what came of the long form into ``docs/faults.md``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rows import Row

WHAT = {
    "kills": "SIGKILL before every call that changes a file (Flat; of other operations before a sample of them), and at random "
    "moments. After each the folder is opened and every file verified, it holds a committed state and all that was reported, and "
    "the same command, run again, ends as if nothing had happened and leaves no temporary file.",
    "killed migrations": "SIGKILL at random moments of every verb of `xcompat migrate`, four times each before it is left to "
    "end: start, verify, switch, rollback, switch again, finish. A service inserts, changes and deletes items through all of it "
    "and writes down what it did. In the end the store holds these items and no others, row by row as after a migration of them "
    "that nobody disturbs, and nothing else is left. The service does what [stores.md](stores.md#services-beside-a-migration) "
    "asks of services. PostgreSQL and Chroma run as servers; Milvus Lite runs as its own server, which answers one request after "
    "the other; what answers for Qdrant is a stand-in for a server (`tests/qdrant_server.py`); LanceDB's folder is opened by "
    "every process.",
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
    "attacks": "Requests of drawn methods, paths, headers and bodies. They name a secret file, `/etc/passwd`, `/dev/zero`, "
    "and the address of another server, as texts and as gradio's file objects. No answer holds a file, shows a folder or is an "
    "error of the server; nobody asks the other server; no file is left; a plain search goes on finding what it found.",
    "readers": "Readers beside a writer that commits, compacts and rolls back: a trial is a read.",
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
    machines = sorted({(row.date, row.machine) for row in rows})
    lines = [
        "# Faults",
        "",
        "What was tried to lose data, and what came of it. `make faults` writes this file; a failure that it finds stays in it.",
        "",
        "Each row says when it was made; one kind, or one operation, is made again by "
        '`python tests/faults/long_run.py --only "killed migrations"`, and the others stay as they are (`docs/faults.json`).',
        "",
        *(f"- {date}: {machine}" for date, machine in machines),
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
            "| operation | trials | failures | made |",
            "|---|---:|---:|---|",
        ]
        lines += [f"{_line(row.name, [row])} {row.date} |" for row in found]
        failures = [f"- {row.name}: {' '.join(failure.split())}" for row in found for failure in row.failures[:3]]
        lines += ["", "Of the failures, three of each operation at most:", "", *failures] if failures else []
        if notes := [f"- {row.name}: {row.note}" for row in found if row.note]:
            lines += ["", "What became of them:", "", *notes]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(name: str, rows: Sequence[Row]) -> str:
    return f"| {name} | {sum(row.trials for row in rows):,} | {sum(len(row.failures) for row in rows):,} |"
