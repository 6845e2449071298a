"""The page's address and password."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from xcompat.core.errors import XcompatError
from xcompat.serve.hosts import LOOPBACK

VARIABLE = "XCOMPAT_SERVE_PASSWORD"


class Options(NamedTuple):
    """The page's address and password.

    Args:
        host: address to listen at. Other machines can reach it unless it is a loopback address.
        port: port to listen at. 0 to use any free port.
        password: required for a host that other machines can reach.
        browser: whether to open the page in a browser.
        names: the page's further host names.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    password: str | None = None
    browser: bool = True
    names: tuple[str, ...] = ()

    def require_password(self) -> None:
        """Raise if other machines can reach the page and it has no password.

        Raises:
            XcompatError: a password is missing.
        """
        if self.password is None and self.host not in LOOPBACK:
            raise XcompatError(
                f"other machines can reach --host {self.host}; set a password in {VARIABLE}, or in a file with --password-file"
            )


def read_password(file: Path | None) -> str | None:
    """Return the password from a file or the environment, and remove it from child processes' environment.

    Args:
        file: file with the password in its first line.

    Raises:
        XcompatError: the file cannot be read, or the password is empty.
    """
    given = os.environ.pop(VARIABLE, None)
    place = VARIABLE
    if file is not None:
        place = f"--password-file {file}"
        try:
            given = file.read_text(encoding="utf-8").partition("\n")[0].rstrip("\r")
        except (OSError, ValueError) as error:
            raise XcompatError(f"{place} cannot be read ({error}); use a text file with the password in its first line") from None
    if given == "":
        raise XcompatError(f"the password of {place} is empty")
    return given
