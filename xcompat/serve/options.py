"""Where a page is served, and who may see it."""

from __future__ import annotations

from typing import NamedTuple

from xcompat.errors import XcompatError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Options(NamedTuple):
    """Where a page is served.

    Args:
        host: address to listen at; other machines reach it unless it is a loopback address.
        port: port to listen at; 0 for any that is free.
        auth: ``USER:PASSWORD``; needed for a host that other machines reach.
        browser: whether to open the page in a browser.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    auth: str | None = None
    browser: bool = True

    def credentials(self) -> tuple[str, str] | None:
        """Return user and password; None without any.

        Raises:
            XcompatError: they are not ``USER:PASSWORD``, or other machines reach the page and there are none.
        """
        if self.auth is None:
            if self.host not in LOOPBACK:
                raise XcompatError(
                    f"--host {self.host} can be reached from other machines: give the page a password with --auth USER:PASSWORD"
                )
            return None
        user, colon, password = self.auth.partition(":")
        if not (user and colon and password):
            raise XcompatError("--auth is USER:PASSWORD, both not empty")
        return user, password
