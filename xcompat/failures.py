"""What stops a command, for people: one line where input or machine are at fault, and for a bug what a report of it needs."""

from __future__ import annotations

import errno
import os
import platform
import re
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version

from xcompat.errors import XcompatError, visible_line, without_secrets
from xcompat.fingerprint import Fingerprint

INTERRUPTED = "interrupted; start again to continue"
NOBODY_READS = "whoever read what is printed has gone (broken pipe); start again to continue"
FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    errno.EACCES: "choose another place, or give yourself access",
    errno.EPERM: "choose another place, or give yourself access",
    errno.EROFS: "choose a place that can be written",
    errno.EIO: "the disk or its connection fails: check it and start again to continue",
    errno.ESTALE: "the disk or its connection fails: check it and start again to continue",
    errno.EMFILE: "raise the limit of open files (`ulimit -n 65536`)",
    errno.ENFILE: "close what holds so many files open, and start again to continue",
    errno.ENOMEM: "choose a smaller batch, or a machine with more memory",
}
"""What mends what the machine refuses."""
WORDS = {os.strerror(number): number for number in (*FULL, *REMEDIES)} | {
    "PytorchStreamWriter failed writing": errno.ENOSPC,
    "basic_ios::clear: iostream error": errno.ENOSPC,  # PyTorch again, where the last bytes do not go to disk
    ". unexpected pos ": errno.ENOSPC,
    "Parent directory ": errno.EIO,  # PyTorch again, of a folder that was just made and cannot be looked at
    "DefaultCPUAllocator: ": errno.ENOMEM,
    "std::bad_alloc": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
}
"""How libraries that are not written in Python report the machine's refusals."""
NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
LIBRARIES = ("torch", "transformers", "faiss-cpu")


def explain(error: BaseException) -> str | None:
    """Say in one line what a user can mend.

    Args:
        error: what a command raised.

    Returns:
        The line; None for what nobody but us can mend, a bug.

    Example:
        >>> explain(PermissionError(errno.EACCES, "Permission denied", "/data/run"))
        'cannot read or write /data/run: Permission denied; choose another place, or give yourself access'
        >>> explain(KeyError("x")) is None
        True
    """
    seen: BaseException | None = error
    while seen is not None:  # a library wraps what the machine refused in an error of its own
        line = _explain_one(seen)
        if line is not None:
            return without_secrets(visible_line(line))
        seen = seen.__cause__
    return None


def _explain_one(error: BaseException) -> str | None:
    if isinstance(error, XcompatError):
        return _said(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return NOBODY_READS
    if isinstance(error, RecursionError):
        return "something in the input is nested too deeply to be read; flatten it"
    return _explain_library(error) or _explain_machine(error)


def _explain_library(error: BaseException) -> str | None:
    """Say which library is missing, or which value pydantic refuses."""
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != "xcompat":
        name = error.name.partition(".")[0]
        return f"the library {name} is not installed; `pip install {name}`"
    pydantic = sys.modules.get("pydantic")  # whoever raised it has imported it
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, (error.title, *first["loc"])))
        return f"{place}: {first['msg'].removeprefix('Value error, ')} (found {_short(first['input'])})"
    return None


def _explain_machine(error: BaseException) -> str | None:
    """Say what the machine refused: its disk, its memory, its network."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else _number(error)
    file, said = getattr(error, "filename", None), _said(error)
    file = os.fsdecode(file) if isinstance(file, bytes) else file  # of some libraries
    if number in FULL:
        return f"no space left on the device while writing {file or 'a file'}; free some and start again to continue"
    if number == errno.ENOMEM:
        return f"out of memory{f' ({said})' if said else ''}; {REMEDIES[errno.ENOMEM]}"
    remedy = REMEDIES.get(number or 0, "mend that and start again to continue")
    if isinstance(error, OSError) and file is not None:
        return f"cannot read or write {file}: {error.strerror}; {remedy}"
    if any(kind.__module__.partition(".")[0] in NETWORK for kind in type(error).__mro__):
        return f"the network failed ({said or type(error).__name__}); start again to continue"
    if isinstance(error, OSError) or number is not None:
        return f"{said or type(error).__name__}; {remedy}"
    return None


def _number(error: BaseException) -> int | None:
    """Return the number of a refusal of the operating system, from what a library says of it if need be."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    said = str(error)
    if found := re.search(r"(?:\berrno|\bos error) (\d+)", said, re.IGNORECASE):
        return int(found[1])
    return next((number for words, number in WORDS.items() if words in said), None)


def _said(error: BaseException) -> str:
    """Return what an error says in one line, without the traceback that a data loader's worker puts before it."""
    said = ValueError.__str__(error) if isinstance(error, XcompatError) else str(error)  # a traceback with its lines
    if "\nOriginal Traceback" in said:
        return re.sub(r"^[\w.]*(Error|Exception): ", "", said.strip().splitlines()[-1])
    return str(error) if isinstance(error, XcompatError) else " ".join(said.split())


def _short(value: object) -> str:
    said = " ".join(repr(value).split())
    return said if len(said) <= 80 else f"{said[:77]}..."


def origin(error: BaseException) -> str:
    """Say what whoever mends a bug must know: versions, machine, and the models that were at work.

    Args:
        error: the bug, with its traceback.

    Returns:
        One line, to stand under the traceback.
    """
    installed = [f"xcompat {installed_version('xcompat')}", f"Python {platform.python_version()}"]
    installed += [f"{name} {installed_version(name)}" for name in LIBRARIES]
    models = f"; models: {', '.join(found)}" if (found := _models(error)) else ""
    return f"This is a bug. Please report it with all lines above: {', '.join(installed)}, {platform.platform()}{models}"


def installed_version(name: str) -> str:
    """Return which version of a library is installed, without importing it.

    Args:
        name: as the package index knows it.

    Returns:
        Its version, or ``not installed``.
    """
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _models(error: BaseException) -> list[str]:
    """Return the fingerprints that the functions of a traceback held, themselves or in an object."""
    found: dict[str, None] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in list(frame.f_locals.values()):
            held = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
            found |= {str(one): None for one in (value, *held) if isinstance(one, Fingerprint)}
    return list(found)
