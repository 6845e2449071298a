"""Errors that users can fix: the place, the cause and the fix in a single line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_SPELLED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


_BREAKS = {ord("\t"): "\\t", ord("\n"): "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}

_CREDENTIALS = re.compile(r"([A-Za-z][\w+.-]+:/{1,2})[^/\s@]+@")  # one slash: Path() of a URL drops the other


def visible(text: str) -> str:
    r"""Escape control characters and text direction marks, because names and ids can come from strangers.

    Args:
        text: any text. Line breaks and tabs stay.

    Example:
        >>> visible("\x1b[2Jshoe")
        '\\x1b[2Jshoe'
    """
    return text.translate(_SPELLED)


def visible_line(text: str) -> str:
    r"""Escape line breaks and tabs too, so that a name cannot forge a line of output.

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
    r"""Mistake that the user can fix. The command line prints only its message and exits with code 2.

    Args:
        messages: a line for each mistake. Parts can come from a file or a server, so line breaks in them are escaped.

    Example:
        >>> print(XcompatError("a\nb", "c"))
        a\nb
        c
    """

    def __init__(self, *messages: str) -> None:
        super().__init__(*messages)

    def __str__(self) -> str:
        """Return a line for each mistake."""
        return "\n".join(without_secrets(visible_line(str(message))) for message in self.args)


class MissingPathError(XcompatError):
    """A local file or folder in a recipe or command does not exist."""


class InterruptedRunError(XcompatError):
    """Ctrl-C ended a run that can be continued."""


class FingerprintMismatchError(XcompatError):
    """Embeddings of two incompatible models would be compared."""


class GenerationGoneError(XcompatError):
    """A gallery generation never existed or was deleted by a compaction. Open the gallery again to use the newest generation."""


class NoValidationDataError(XcompatError):
    """The data are too few, or too poorly described, for a validation split."""


class TrainingDivergedError(XcompatError):
    """The loss or the gradient is no longer finite."""


def require_no_problems(problems: Iterable[str]) -> None:
    """Raise one error with a line for each problem, if there are any.

    Args:
        problems: messages with place, cause and fix; repeated ones count once.
    """
    if found := tuple(dict.fromkeys(problems)):
        raise XcompatError(*found)


@contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Append the messages of an error in the block to a list, instead of raising."""
    try:
        yield
    except ValueError as error:
        problems += map(str, error.args)


def describe_error(error: BaseException) -> str:
    """Return a library error's type and the start of its message, as a single line.

    Example:
        >>> describe_error(KeyError("width"))
        "KeyError: 'width'"
    """
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest a known name for the end of an error message.

    Args:
        name: the user's text.
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
