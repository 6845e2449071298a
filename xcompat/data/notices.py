"""One line for what was left out, on the main process only."""

from __future__ import annotations

from xcompat.progress import console


def notice(line: str) -> None:
    """Print a line about samples, shards or texts that were left out.

    Args:
        line: plain text; names in it may hold brackets, which are no markup.
    """
    console.print(f"! {line}", style="yellow", markup=False, soft_wrap=True)
