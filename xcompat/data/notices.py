"""One line for what was left out, on the main process only."""

from __future__ import annotations

import functools

from xcompat.errors import visible_line
from xcompat.progress import console


def notice(line: str) -> None:
    """Print a line about samples, shards or texts that were left out.

    Args:
        line: plain text; names in it may hold brackets, which are no markup.
    """
    console.print(f"! {visible_line(line)}", style="yellow", markup=False, soft_wrap=True)


@functools.cache
def notice_once(line: str) -> None:
    """Print a line that holds for many samples, the first time only; workers of a data loader each print their own.

    Args:
        line: plain text.
    """
    notice(line)
