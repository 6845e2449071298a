"""What pages tell to type, typed: commands of `xcompat` in this process, which has imported the libraries already."""

from __future__ import annotations

import shlex
import sys

import pytest

from xcompat import cli


def commands_of(block: str) -> list[list[str]]:
    """Return the words of each command of a shell block, without comments; a backslash continues a line."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def type_in(words: list[str], code: int = 0) -> None:
    """Run a command of `xcompat`, which ends with an exit code."""
    program, *_ = words
    assert program == "xcompat"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            cli.main()
    assert (stop.value.code or 0) == code, f"{shlex.join(words)} ended with {stop.value.code}"
