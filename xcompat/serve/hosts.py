"""The page's host names, and its visitors' addresses."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

LOOPBACK = ("127.0.0.1", "::1", "localhost")
EVERY_ADDRESS = ("0.0.0.0", "::")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


def is_own_host(header: str, host: str, names: Sequence[str] = ()) -> bool:
    """Return whether a `Host` header names this page, to reject foreign names that point at this machine.

    Args:
        header: the header's value.
        host: the server's listening address. If it listens at all addresses, any IP address is valid.
        names: the page's further host names.

    Example:
        >>> names = ["photos.example"]
        >>> [is_own_host(header, "127.0.0.1", names) for header in ("localhost:80", "photos.example", "evil.example")]
        [True, True, False]
    """
    if (found := _HOST.fullmatch(header)) is None:
        return False
    name = found[1].strip("[]").lower()
    if name in (known.lower() for known in (host, *names)):
        return True
    if host in LOOPBACK:
        return name in LOOPBACK
    return host in EVERY_ADDRESS and (name in (*LOOPBACK, socket.gethostname().lower()) or _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def client_address(host: str) -> str:
    """Return the address to count a client by. Use the 64-bit network for IPv6, because a client has many addresses there.

    Example:
        >>> client_address("203.0.113.7"), client_address("2001:db8::1:2"), client_address("::ffff:203.0.113.7")
        ('203.0.113.7', '2001:db8::', '203.0.113.7')
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)).network_address)
