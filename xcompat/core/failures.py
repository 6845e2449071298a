"""Explanations of failed commands: a line for user and machine faults, and report details for bugs."""

from __future__ import annotations

import errno
import os
import platform
import re
import sys
import traceback
from collections.abc import Sequence

from xcompat.core.errors import XcompatError, visible_line, without_secrets
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.provenance import installed_version

INTERRUPTED = "interrupted; start again to continue"
BROKEN_PIPE = "output pipe closed; run the command again to continue"
PIPE_CLOSED = 141
"""Exit code that shells use for a program with a closed output pipe."""
ONLY_PRINT = {"classes", "find", "help", "lineage", "recipes"} | {
    *("gallery doctor", "gallery info", "gallery search", "gallery verify"),
    *("migrate plan", "migrate status", "migrate verify"),
}
"""Commands that only print, so that a closed pipe (e.g. to `head`) leaves no work undone."""
STARTS_OVER = {"demo", "plan", "report", "serve"}
"""Other commands that keep no partial work, so that nothing continues after Ctrl-C."""
FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    errno.EACCES: "choose another place, or give yourself access",
    errno.EPERM: "choose another place, or give yourself access",
    errno.EROFS: "choose a place that can be written",
    errno.EIO: "the disk or its connection fails: check it and start again to continue",
    errno.ESTALE: "the disk or its connection fails: check it and start again to continue",
    errno.EMFILE: "raise the limit of open files (`ulimit -n 65536`)",
    errno.ENFILE: "close programs with many open files, and start again to continue",
    errno.ENOMEM: "choose a smaller batch, or a machine with more memory",
}
"""Error number of the operating system -> remedy."""
ERROR_TEXTS = {os.strerror(number): number for number in (*FULL, *REMEDIES)} | {
    "PytorchStreamWriter failed writing": errno.ENOSPC,
    "basic_ios::clear: iostream error": errno.ENOSPC,  # PyTorch, if the last bytes cannot be written
    ". unexpected pos ": errno.ENOSPC,
    "Parent directory ": errno.EIO,  # PyTorch, if a new folder cannot be read
    "DefaultCPUAllocator: ": errno.ENOMEM,
    "std::bad_alloc": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
}
"""Text by which native libraries report an operating system error -> its number."""
NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
LIBRARIES = ("torch", "transformers", "faiss-cpu", "faiss-gpu")
INSTALLED_BY = {"faiss": 'in a clone of xcompat, run `pip install -e ".[cpu]"`, or `pip install -e ".[gpu]"` for CUDA'}
"""Module -> install commands, if its package has another name."""


def only_prints(words: Sequence[str]) -> bool:
    """Return whether a command only prints.

    Args:
        words: the typed command, without the program's name.

    Example:
        >>> only_prints(["gallery", "info", "g"]), only_prints(["train", "--help"]), only_prints(["gallery", "compact", "g"])
        (True, True, False)
    """
    is_help = not words or not {"-h", "--help", "--version"}.isdisjoint(words)
    return is_help or not ONLY_PRINT.isdisjoint((words[0], " ".join(words[:2])))


def drop_advice(line: str, words: Sequence[str]) -> str:
    """Drop the advice to continue an interrupted command that keeps no partial work.

    Args:
        line: the error.
        words: the typed command, without the program's name.

    Example:
        >>> drop_advice(INTERRUPTED, ["serve", "gallery"]), drop_advice(INTERRUPTED, ["train", "recipe.yaml"])
        ('interrupted', 'interrupted; start again to continue')
    """
    has_no_rest = only_prints(words) or words[0] in STARTS_OVER
    return "interrupted" if line == INTERRUPTED and has_no_rest else line


def explain(error: BaseException) -> str | None:
    """Explain a user error in a line for each mistake.

    Args:
        error: the command's exception.

    Returns:
        The lines, or None for a bug.

    Example:
        >>> explain(PermissionError(errno.EACCES, "Permission denied", "/data/run"))
        'cannot read or write /data/run: Permission denied; choose another place, or give yourself access'
        >>> explain(KeyError("x")) is None
        True
    """
    seen: BaseException | None = error
    while seen is not None:  # libraries wrap errors of the operating system in their own
        line = _explain_one(seen)
        if line is not None:
            lines = line.split("\n") if isinstance(seen, XcompatError) else [line]
            return "\n".join(without_secrets(visible_line(each)) for each in lines)
        seen = seen.__cause__
    return None


def _explain_one(error: BaseException) -> str | None:
    if isinstance(error, XcompatError):
        return _message_of(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return BROKEN_PIPE
    if isinstance(error, RecursionError):
        return "the input is nested too deeply; flatten it"
    return _explain_library(error) or _explain_machine(error)


def _explain_library(error: BaseException) -> str | None:
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "xcompat":
        name = error.name.partition(".")[0]
        return f"the library {name} is not installed; {INSTALLED_BY.get(name, f'`pip install {name}`')}"
    pydantic = sys.modules.get("pydantic")  # imported already if it raised the error
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, (error.title, *first["loc"])))
        return f"{place}: {first['msg'].removeprefix('Value error, ')} (found {_short(first['input'])})"
    return None


def _explain_machine(error: BaseException) -> str | None:
    number = errno.ENOMEM if isinstance(error, MemoryError) else _number(error)
    file, said = getattr(error, "filename", None), _message_of(error)
    file = os.fsdecode(file) if isinstance(file, bytes) else file  # some libraries give bytes
    if number in FULL:
        return f"no space left on the device while writing {file or 'a file'}; free some and start again to continue"
    if number == errno.ENOMEM:
        return f"out of memory{f' ({said})' if said else ''}; {REMEDIES[errno.ENOMEM]}"
    remedy = REMEDIES.get(number or 0, "fix this and start again to continue")
    if isinstance(error, OSError) and file is not None:
        return f"cannot read or write {file}: {error.strerror}; {remedy}"
    if any(kind.__module__.partition(".")[0] in NETWORK for kind in type(error).__mro__):
        return f"the network failed ({said or type(error).__name__}); start again to continue"
    if isinstance(error, OSError) or number is not None:
        return f"{said or type(error).__name__}; {remedy}"
    return None


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    said = str(error)
    if found := re.search(r"(?:\berrno|\bos error) (\d+)", said, re.IGNORECASE):
        return int(found[1])
    return next((number for words, number in ERROR_TEXTS.items() if words in said), None)


def _message_of(error: BaseException) -> str:
    """Return an error's message in one line, without the traceback of a data loader worker."""
    said = ValueError.__str__(error) if isinstance(error, XcompatError) else str(error)  # keeps the lines of a traceback
    if "\nOriginal Traceback" in said:
        return re.sub(r"^[\w.]*(Error|Exception): ", "", said.strip().splitlines()[-1])
    return str(error) if isinstance(error, XcompatError) else " ".join(said.split())


def _short(value: object) -> str:
    said = " ".join(repr(value).split())
    return said if len(said) <= 80 else f"{said[:77]}..."


def origin(error: BaseException) -> str:
    """Return the line below a bug's traceback: versions, machine, and the models in use."""
    installed = [f"xcompat {installed_version('xcompat')}", f"Python {platform.python_version()}"]
    installed += [f"{name} {installed_version(name)}" for name in LIBRARIES]
    models = f"; models: {', '.join(found)}" if (found := _models(error)) else ""
    return f"This is a bug. Please report it with all lines above: {', '.join(installed)}, {platform.platform()}{models}"


def _models(error: BaseException) -> list[str]:
    found: dict[str, None] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            held = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
            found |= {str(one): None for one in (value, *held) if isinstance(one, Fingerprint)}
    return list(found)
