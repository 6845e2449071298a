"""Errors for people: what is wrong, where, and how to mend it, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_SPELLED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


_BREAKS = {ord("\t"): "\\t", ord("\n"): "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}

_CREDENTIALS = re.compile(r"([A-Za-z][\w+.-]+:/{1,2})[^/\s@]+@")  # a path made of an address has one slash


def visible(text: str) -> str:
    r"""Spell out what a terminal would obey, or what turns the order of letters: names and ids may come from strangers.

    Args:
        text: any; its lines stay lines.

    Example:
        >>> visible("\x1b[2Jshoe")
        '\\x1b[2Jshoe'
    """
    return text.translate(_SPELLED)


def visible_line(text: str) -> str:
    r"""Spell out what :func:`visible` does, and what would begin another line: a name could forge one.

    Example:
        >>> visible_line("a\nxcompat: done")
        'a\\nxcompat: done'
    """
    return text.translate(_SPELLED | _BREAKS)


def without_secrets(text: str) -> str:
    """Leave out the user and password of addresses.

    Example:
        >>> without_secrets("https://me:secret@hub.example/x is not there")
        'https://***@hub.example/x is not there'
    """
    return _CREDENTIALS.sub(r"\1***@", text)


class XcompatError(ValueError):
    """A mistake the user can mend; the command line prints its message alone and exits with code 2."""

    def __str__(self) -> str:
        """Return the message in one line; it may repeat what a file or an answer holds."""
        return without_secrets(visible_line(super().__str__()))


class FingerprintMismatchError(XcompatError):
    """Embeddings of two different models were about to be compared as if they were of one."""


class GenerationGoneError(XcompatError):
    """A gallery does not keep a state: it never did, or a compaction has forgotten it. Open the gallery again for its newest."""


class NothingHeldOutError(XcompatError):
    """Too little is there, or known of it, to hold any out: a choice would be a guess."""


class TrainingDivergedError(XcompatError):
    """The loss or the gradient stopped being finite."""


def what_failed(error: BaseException) -> str:
    """Return in one line what a library raised.

    Args:
        error: of any kind.

    Returns:
        Its kind and the beginning of what it says.

    Example:
        >>> what_failed(KeyError("width"))
        "KeyError: 'width'"
    """
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name is meant, for the end of an error message.

    Args:
        name: what the user wrote.
        known: the names that would have been right.

    Returns:
        ``"did you mean 'x'?"``, or the list of known names when none is near.

    Example:
        >>> nearest("learing_rate", ["learning_rate", "seed"])
        "did you mean 'learning_rate'?"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
