"""The address of a store: a URI whose query names the table or collection and the space that is searched."""

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
    """A parsed address.

    Args:
        parts: of the URI, its query left out.
        options: what the store itself reads of the query.
        rest: what goes on to its client.
    """

    parts: SplitResult
    options: dict[str, str] = field(default_factory=dict)
    rest: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, uri: str, known: tuple[str, ...], passes_on: bool = False) -> StoreUri:
        """Split a URI.

        Args:
            uri: such as ``postgresql://user@host/db?table=items&column=embedding``.
            known: options that the store reads.
            passes_on: whether other options go on to the client, instead of being refused.

        Raises:
            XcompatError: it cannot be split without doubt, or an option is unknown or stands twice.
        """
        parts = split(uri)
        given = parse_qsl(parts.query, keep_blank_values=True)
        for name, _ in given:
            if sum(name == other for other, _ in given) > 1:
                raise XcompatError(f"{shown(uri)} names {name} twice; leave one out")
            if name not in known and not passes_on:
                raise XcompatError(f"{shown(uri)} has no option {name!r}; {nearest(name, known)}")
        own = {name: value for name, value in given if name in known}
        return cls(parts._replace(query="", fragment=""), own, {name: value for name, value in given if name not in known})

    @property
    def client(self) -> str:
        """The address for the client, which may hold a password: for nobody's eyes."""
        query = urlencode(self.rest, quote_via=quote)  # libpq takes a + for a plus sign, not for a space
        return self.parts._replace(query=query).geturl()

    def scrub(self, text: str) -> str:
        """Return a message of the client without the passwords of the address."""
        query = [value for name, value in self.rest.items() if _is_secret(name)]
        password = self.parts.netloc.rpartition("@")[0].partition(":")[2]
        for secret in (self.client, password, unquote(password), *query):
            text = text.replace(secret, "…") if secret else text
        return text

    def __str__(self) -> str:
        """Return the address without user, password and the client's own options, for messages and reports."""
        return shown(self.parts._replace(query=urlencode(self.options)).geturl())

    def require(self, name: str) -> str:
        """Return an option.

        Raises:
            XcompatError: it is not given.
        """
        if not (value := self.options.get(name)):
            raise XcompatError(f"{self} names no {name}; add it to the address, as in ?{name}=NAME")
        return value

    def choose(self, option: str, known: Sequence[str], what: str) -> str:
        """Return the column of the table that an option names, or the only one.

        Args:
            option: which may be given.
            known: the columns that fit.
            what: such a column, for messages.

        Raises:
            XcompatError: it names another, or none and there is not exactly one.
        """
        given = self.options.get(option)
        if given is not None and given not in known:  # quoted, or in capitals, as SQL would take it
            given = next((name for name in (given.strip('"'), given.lower()) if name in known), given)
        if given is not None and given not in known:
            raise XcompatError(f"{self}: {given!r} is not {what}; {nearest(given, known)}")
        if given is None and len(known) != 1:
            found = f"it has {', '.join(known)}" if known else "it has none"
            raise XcompatError(f"{self}: the table needs {what}, and {found}; name one with {option}=")
        return given or known[0]

    def metric(self) -> Metric | None:
        """Return how vectors are compared, if the address says it.

        Raises:
            XcompatError: there is no such metric.
        """
        if (given := self.options.get("metric")) is None:
            return None
        if given not in get_args(Metric):
            raise XcompatError(f"{self}: there is no metric {given!r}; {nearest(given, get_args(Metric))}")
        return cast("Metric", given)


_PATHS = ("file", "lancedb", "chroma")
"""Schemes after which a path may follow, in which an @ is a letter like any other."""


def split(uri: str) -> SplitResult:
    """Return the parts of an address; one that may hold a part of a password elsewhere than before the host is refused.

    Raises:
        XcompatError: it cannot be split, an ``@`` shows that user or password hold what ends them, or a port is no number.
    """
    scheme, _, rest = uri.partition("://")
    what = f"the {scheme}:// address" if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) else "the address"
    spelled = "write / ? # [ ] @ : of a user, a password or an option as %2F %3F %23 %5B %5D %40 %3A"
    try:
        parts = urlsplit(uri)
    except ValueError:  # it quotes the address
        raise XcompatError(f"{what} cannot be read; {spelled}") from None
    in_path = not parts.netloc and parts.scheme.partition("+")[0] not in _PATHS and "@" in rest.partition("?")[0]
    if in_path:
        raise XcompatError(f"{what} has an @ behind ///, so a password may be there; write two slashes before the user")
    before_host = rest.rpartition("@")[0]
    if parts.netloc and ":" in before_host and set("/?#@") & set(before_host):
        raise XcompatError(f"{what} has an @ after one of / ? # @, so a password may end there; {spelled}")
    try:
        for host in parts.netloc.rpartition("@")[2].split(","):  # PostgreSQL takes several
            _ = urlsplit(f"//{host}").port
    except ValueError:
        raise XcompatError(f"{what} has a port that is no number up to 65535; {spelled}") from None
    return parts


def shown(uri: str) -> str:
    """Return a URI without user and password.

    Example:
        >>> shown("postgresql://me:secret@db.example:5432/shop?table=items&password=secret")
        'postgresql://db.example:5432/shop?table=items'
    """
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    query = [(name, value) for name, value in parse_qsl(parts.query) if not _is_secret(name)]
    return f"{parts.scheme}://{host}{parts.path}{'?' * bool(query)}{urlencode(query)}"


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in ("password", "token", "key", "secret", "user", "passfile"))
