"""Answers to failed requests: one line for the visitor, details in the terminal."""

from __future__ import annotations

import re
import traceback

from starlette.responses import PlainTextResponse

from xcompat.core.errors import XcompatError
from xcompat.core.failures import explain, origin
from xcompat.core.progress import console, literal
from xcompat.serve.lane import BusyError

_FOLDERS = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\"]+/)+(?=[^\s/'\"])")
FAILED = "something went wrong on the server; its terminal shows the details"


def hide_folders(line: str) -> str:
    """Remove the folders from a line's absolute paths, because visitors should not see them.

    Example:
        >>> hide_folders("/home/me/photos/a.png is missing; see https://example.org/a/b")
        'a.png is missing; see https://example.org/a/b'
    """
    return _FOLDERS.sub("", line)


def answer_failure(error: Exception) -> PlainTextResponse:
    """Return the answer to a failed request.

    Args:
        error: the reason. Visitors see their own mistakes, and the terminal shows server faults.
    """
    if isinstance(error, BusyError):
        return PlainTextResponse(error.line, error.status, headers={"retry-after": "1"})
    if isinstance(error, XcompatError):
        return PlainTextResponse(hide_folders(str(error)), 400)
    if (line := explain(error)) is not None:
        console.print(f"[yellow]![/] {literal(line)}", soft_wrap=True)
    else:
        error.add_note(origin(error))
        traceback.print_exception(error)
    return PlainTextResponse(FAILED, 500)
