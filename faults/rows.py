"""What came of campaigns, as ``docs/faults.json`` keeps it and ``docs/faults.md`` tells it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

LIBRARIES = (
    *("numpy", "torch", "transformers", "datasets", "faiss-cpu", "pyarrow", "safetensors", "hypothesis"),
    *("milvus-lite", "pymilvus", "qdrant-client", "lancedb", "chromadb", "psycopg", "apsw"),
)


@dataclass
class Row:
    """What came of the trials of one kind on one operation.

    Args:
        group: the kind.
        name: the operation.
        trials: how many.
        failures: what went wrong in those in which something did.
        seconds: how long they took.
        date: the day on which they ended.
        machine: where they were made, and with which libraries.
        note: what became of the failures, written by hand into ``docs/faults.json``.
    """

    group: str
    name: str
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""
    machine: str = ""
    note: str = ""

    def take(self, problem: str | None) -> None:
        self.trials += 1
        if problem:
            self.failures.append(problem)

    def end(self, seconds: float) -> None:
        """Write down when and where the trials were made."""
        self.seconds, self.date, self.machine = seconds, f"{datetime.now(UTC):%Y-%m-%d}", _machine()


def whole(parts: Iterable[Row]) -> list[Row]:
    """Put the parts of each row together, in the order of the first ones; the last one says when and where."""
    rows: dict[tuple[str, str], Row] = {}
    for part in parts:
        row = rows.setdefault((part.group, part.name), Row(part.group, part.name))
        row.trials += part.trials
        row.failures += part.failures
        row.seconds += part.seconds
        row.date, row.machine, row.note = part.date, part.machine, part.note
    return list(rows.values())


def updated(known: Iterable[Row], made: Iterable[Row]) -> list[Row]:
    """Return rows, those that were made anew in the place of what was known of them, by kind and name."""
    rows = {(row.group, row.name): row for row in (*known, *made)}
    return [rows[key] for key in sorted(rows)]


def read_rows(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _machine() -> str:
    from xcompat.core.threads import usable_cores

    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return (
        f"Linux {platform.release()}, {platform.machine()}, {usable_cores()} cores, {int(memory.split()[1]) / 2**20:.0f} GiB; "
        f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    )
