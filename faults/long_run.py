"""Kill, cut the power, fill disks and damage files, many times, and write ``docs/faults.md``.

python faults/long_run.py                             # the long form, some hours; stopped, it goes on where it was
python faults/long_run.py --only "killed migrations"  # some rows anew; docs/faults.json keeps the others as they are
python faults/long_run.py --short                     # what the normal suite runs

What is done is in runs/faults; a row whose file is deleted there is made again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before libraries start threads that a fork would lose
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import typer
from campaigns import Campaign, campaigns
from document import write_report
from rich.progress import Progress, TaskID
from rows import Row, read_rows, updated, whole, write_rows
from syscalls import why_not

from xcompat.core.progress import advance_bar, console, progress_bar, silence_libraries

ROOT = Path(__file__).resolve().parents[1]
TOLD = ROOT / "docs" / "faults.json"
KEPT = ROOT / "runs" / "faults"


def main(
    only: Annotated[list[str], typer.Option(help="Only kinds or operations in whose name this is.")] = [],  # noqa: B006
    short: Annotated[bool, typer.Option("--short", help="The form that the normal suite runs; nothing is written.")] = False,
) -> None:
    """Try everything, and write docs/faults.md; exit with code 1 if something failed."""
    if reason := why_not():
        console.print(f"left out: {reason}")
        raise typer.Exit(3)
    silence_libraries()
    rows = []
    for row in run(only, long=not short):
        rows.append(row)
        mark = "[red]✗[/]" if row.failures else "[green]✓[/]"
        console.print(
            f"{mark} {row.group}: {row.name}: {row.trials:,} trials, {len(row.failures)} failures ({row.seconds:.0f} s)"
        )
        for failure in row.failures:
            console.print(f"    {failure}", markup=False, soft_wrap=True)
    if not short:
        told = updated(read_rows(TOLD), whole(rows))
        write_rows(TOLD, told)
        write_report(TOLD.with_suffix(".md"), told)
    if any(row.failures for row in rows):
        raise typer.Exit(1)


def run(only: list[str], long: bool) -> Iterator[Row]:
    """Run campaigns and yield what came of each; rows of the long form are kept, and not made again."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        wanted = [each for each in campaigns(folder / "shared", long) if _is_wanted(each, only)]
        bar = progress_bar()
        bar.live.auto_refresh = False  # a child forked while its thread holds a lock would wait for it for ever
        with bar:
            for each in wanted:
                kept = KEPT / f"{each.group} {each.name}{each.part}.json".replace("/", "-")
                if long and kept.exists():
                    yield from read_rows(kept)
                    continue
                task = bar.add_task(f"{each.group}: {each.name}{each.part}", total=None, unit="trials")
                row = each.run(folder / "trials", partial(_tell, bar, task))
                bar.remove_task(task)
                shutil.rmtree(folder / "trials", ignore_errors=True)
                if long:
                    write_rows(kept, [row])
                yield row


def _tell(bar: Progress, task: TaskID) -> None:
    advance_bar(bar, task, 1)
    bar.refresh()


def _is_wanted(campaign: Campaign, only: list[str]) -> bool:
    return not only or any(word in f"{campaign.group}: {campaign.name}" for word in only)


if __name__ == "__main__":
    typer.run(main)
