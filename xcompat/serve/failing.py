"""What stops an action of the page, said on the page in one line; a bug's traceback stays in the terminal."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from xcompat.failures import explain, origin
from xcompat.serve.rendering import alert

P = ParamSpec("P")


def told(action: Callable[P, str]) -> Callable[P, str]:
    """Return an action that gives what the page shows, and shows what stopped it."""

    @wraps(action)
    def telling(*arguments: P.args, **named: P.kwargs) -> str:
        try:
            return action(*arguments, **named)
        except Exception as error:
            if (line := explain(error)) is None:
                error.add_note(origin(error))
                traceback.print_exception(error)
                line = "something went wrong that is no fault of yours; the terminal says what"
            return alert(line)

    return telling
