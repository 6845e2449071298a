"""Errors for people: what is wrong, where, and how to mend it, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SPELLED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


_BREAKS = {ord("\t"): "\\t", ord("\n"): "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}

_CREDENTIALS = re.compile(r"([A-Za-z][\w+.-]+:/{1,2})[^/\s@]+@")  # one slash: Path() of a URL drops the other


def visible(text: str) -> str:
    r"""Spell out control characters and marks that reverse the direction of text: names and ids may come from strangers.

    Args:
        text: any text; line breaks and tabs stay.

    Example:
        >>> visible("\x1b[2Jshoe")
        '\\x1b[2Jshoe'
    """
    return text.translate(_SPELLED)


def visible_line(text: str) -> str:
    r"""Spell out what :func:`visible` does, line breaks and tabs too: a name could otherwise forge a line of output.

    Example:
        >>> visible_line("a\nxcompat: done")
        'a\\nxcompat: done'
    """
    return text.translate(_SPELLED | _BREAKS)


def without_secrets(text: str) -> str:
    """Mask the user and password of URLs.

    Example:
        >>> without_secrets("https://me:secret@hub.example/x is not there")
        'https://***@hub.example/x is not there'
    """
    return _CREDENTIALS.sub(r"\1***@", text)


class XcompatError(ValueError):
    """A mistake that the user can mend; the command line prints only its message and exits with code 2."""

    def __str__(self) -> str:
        """Return the message in one line; parts of it may come from a file or a server."""
        return without_secrets(visible_line(super().__str__()))


class MissingPathError(XcompatError):
    """A local file or folder that a recipe or a command names does not exist."""


class FingerprintMismatchError(XcompatError):
    """Embeddings of two models that are not compatible were about to be compared."""


class GenerationGoneError(XcompatError):
    """A gallery does not have a generation: it never had, or a compaction deleted it. Opening again gives the newest one."""


class NothingHeldOutError(XcompatError):
    """There are too few data, or too little is known about them, to hold any out: a choice would be a guess."""


class TrainingDivergedError(XcompatError):
    """The loss or the gradient stopped being finite."""


def what_failed(error: BaseException) -> str:
    """Return the type of a library's error and the beginning of its message, in one line.

    Example:
        >>> what_failed(KeyError("width"))
        "KeyError: 'width'"
    """
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that was meant, for the end of an error message.

    Args:
        name: what the user wrote.
        known: the valid names.

    Returns:
        ``"did you mean 'x'?"``, or the list of known names if none is similar.

    Example:
        >>> nearest("learing_rate", ["learning_rate", "seed"])
        "did you mean 'learning_rate'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
