"""Run every benchmark in a process of its own and write their rows into docs/results/speed.md: `make bench`.

python benchmarks/speed/run.py
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from measuring import COLUMNS, KEPT, Row

from xcompat.core.provenance import provenance

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "docs" / "results" / "speed.md"
SECTION = re.compile(r"(<!-- speed -->\n).*(<!-- /speed -->)", re.DOTALL)
ALSO = ("faiss-cpu", "pytorch-metric-learning", "torchmetrics", "sentence-transformers", "clip_benchmark")
LEGEND = """\
Times are medians of at least 5 alternating runs: xcompat's, then the other's. Outputs are checked for equality (slow rows: on a
part). The ratio is the speedup of xcompat. With a bound `<=`, it is xcompat's time or memory relative to the other's."""


def scripts() -> list[Path]:
    """Return the files that measure rows."""
    return sorted(path for path in HERE.glob("*.py") if "\ndef measure(" in path.read_text(encoding="utf-8"))


def rows_of(script: Path) -> list[Row]:
    """Run one script; a failure is a row too."""
    kept = KEPT / f"{script.stem}.json"
    kept.unlink(missing_ok=True)
    code = subprocess.run([sys.executable, str(script)], check=False).returncode
    if code or not kept.exists():
        return [Row(script.name, "", None, "", f"FAILED: exit code {code}")]
    return [Row(**fields) for fields in json.loads(kept.read_text(encoding="utf-8"))]


def markdown(rows: Iterable[Row]) -> str:
    """Return rows as a table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---:|---|---|"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    return "\n".join(lines)


def machine(seconds: float) -> str:
    """Say when, where, with which versions, and how long all took."""
    about = provenance()
    about["versions"].pop("xcompat")
    installed = {name: _version(name) for name in ALSO}
    versions = ", ".join(f"{name} {version}" for name, version in (about["versions"] | installed).items() if version)
    revision = about["git_revision"] or "no checkout"
    return (
        f"Written by `make bench` on {datetime.date.today()}, revision {revision}: {about['machine']['device']}, "
        f"{about['machine']['threads']} threads, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB; "
        f"{seconds / 60:.0f} minutes.\n"
        f"Versions: {versions}."
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Run all and write the section; the exit code is 1 if a script failed, and 0 if only a bound was missed."""
    started = time.perf_counter()
    rows = [row for script in scripts() for row in rows_of(script)]
    text = f"{machine(time.perf_counter() - started)}\n{LEGEND}\n\n{markdown(rows)}\n"
    RESULTS.write_text(
        SECTION.sub(lambda found: f"{found[1]}{text}{found[2]}", RESULTS.read_text(encoding="utf-8")), encoding="utf-8"
    )
    sys.exit(any(row.detail.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    main()
