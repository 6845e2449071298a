"""Store addresses: URIs with the table or collection and the space in the query."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast, get_args
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from xcompat.core.errors import XcompatError, nearest
from xcompat.retrieval.manifest import Metric


@dataclass(frozen=True)
class StoreUri:
    """Parsed address.

    Args:
        parts: the URI's parts without its query.
        options: the store's query options.
        rest: its client's query options.
    """

    parts: SplitResult
    options: dict[str, str] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, uri: str, known: tuple[str, ...], passes_on: bool = False) -> StoreUri:
        """Parse a URI.

        Args:
            uri: e.g. ``postgresql://user@host/db?table=items&column=embedding``.
            known: the store's options.
            passes_on: whether other options go to the client. Else they raise.

        Raises:
            XcompatError: the URI is ambiguous, or an option is unknown or duplicate.
        """
        parts = split(uri)
        given = parse_qsl(parts.query, keep_blank_values=True)
        for name, _ in given:
            if sum(name == other for other, _ in given) > 1:
                raise XcompatError(f"{without_credentials(uri)} has {name} twice; remove one")
            if name not in known and not passes_on:
                raise XcompatError(f"{without_credentials(uri)} has no option {name!r}; {nearest(name, known)}")
        own = {name: value for name, value in given if name in known}
        return cls(parts._replace(query="", fragment=""), own, {name: value for name, value in given if name not in known})

    @property
    def client(self) -> str:
        """Address for the client, possibly with a password. Never print it."""
        query = urlencode(self.rest, quote_via=quote)  # libpq reads + as a plus sign
        return self.parts._replace(query=query).geturl()

    def scrub(self, text: str) -> str:
        """Remove passwords from a client message."""
        query = [value for name, value in self.rest.items() if _is_secret(name)]
        password = self.parts.netloc.rpartition("@")[0].partition(":")[2]
        for secret in (self.client, password, unquote(password), *query):
            text = text.replace(secret, "…") if secret else text
        return text

    def __str__(self) -> str:
        """Return the address for messages, without secrets."""
        return without_credentials(self.parts._replace(query=urlencode(self.options)).geturl())

    def require(self, name: str) -> str:
        """Return an option.

        Raises:
            XcompatError: it is missing.
        """
        if not (value := self.options.get(name)):
            raise XcompatError(f"{self} has no {name}; add ?{name}=NAME to the address")
        return value

    def choose(self, option: str, known: Sequence[str], what: str) -> str:
        """Return the column in an option, or the only suitable column.

        Args:
            option: option name.
            known: suitable columns.
            what: description of suitable columns, for messages.

        Raises:
            XcompatError: the column is unsuitable, or the choice ambiguous.
        """
        given = self.options.get(option)
        if given is not None and given not in known:  # quoted or in capitals, as in SQL
            given = next((name for name in (given.strip('"'), given.lower()) if name in known), given)
        if given is not None and given not in known:
            raise XcompatError(f"{self}: {given!r} is not {what}; {nearest(given, known)}")
        if given is None and len(known) != 1:
            found = f"it has {', '.join(known)}; choose one with {option}=" if known else "it has none; choose another table"
            raise XcompatError(f"{self}: the table needs {what}, but {found}")
        return given or known[0]

    def metric(self) -> Metric | None:
        """Return the metric in the address, or None.

        Raises:
            XcompatError: the metric is unknown.
        """
        if (given := self.options.get("metric")) is None:
            return None
        if given not in get_args(Metric):
            raise XcompatError(f"{self}: unknown metric {given!r}; {nearest(given, get_args(Metric))}")
        return cast("Metric", given)

    def in_place(self) -> bool:
        """Return whether the address asks for a migration in place.

        Raises:
            XcompatError: the value is unknown.
        """
        if (given := self.options.get("in_place", "true")) != "true":
            raise XcompatError(f"{self}: in_place={given} is unknown; use in_place=true, or remove it")
        return "in_place" in self.options


_PATHS = ("file", "lancedb", "chroma", "sqlite")
"""Schemes with paths that can contain an @."""


def split(uri: str) -> SplitResult:
    """Split an address, and raise if a password could end up in another part.

    Raises:
        XcompatError: the URI or port is invalid, or an ``@`` shows unescaped characters in user or password.
    """
    scheme, _, rest = uri.partition("://")
    what = f"the {scheme}:// address" if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) else "the address"
    spelled = "in a user, password or option, write / ? # [ ] @ : as %2F %3F %23 %5B %5D %40 %3A"
    try:
        parts = urlsplit(uri)
    except ValueError:  # its message quotes the address
        raise XcompatError(f"{what} cannot be read; {spelled}") from None
    in_path = not parts.netloc and parts.scheme.partition("+")[0] not in _PATHS and "@" in rest.partition("?")[0]
    if in_path:
        raise XcompatError(f"{what} has an @ after ///, so a password can follow; write two slashes before the user")
    before_host = rest.rpartition("@")[0]
    if parts.netloc and ":" in before_host and set("/?#@") & set(before_host):
        raise XcompatError(f"{what} has an @ after / ? # or @, so a password can end there; {spelled}")
    try:
        for host in parts.netloc.rpartition("@")[2].split(","):  # PostgreSQL accepts several
            _ = urlsplit(f"//{host}").port
    except ValueError:
        raise XcompatError(f"{what} has an invalid port (maximum 65535); {spelled}") from None
    return parts if parts.netloc else parts._replace(path=re.sub("^/+", "/", parts.path))  # four slashes, as in SQLAlchemy


def without_credentials(uri: str) -> str:
    """Return a URI without user and password.

    Example:
        >>> without_credentials("postgresql://me:secret@db.example:5432/shop?table=items&password=secret")
        'postgresql://db.example:5432/shop?table=items'
    """
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    query = [(name, value) for name, value in parse_qsl(parts.query) if not _is_secret(name)]
    return f"{parts.scheme}://{host}{parts.path}{'?' * bool(query)}{urlencode(query)}"


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in ("password", "token", "key", "secret", "user", "passfile"))
