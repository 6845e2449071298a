"""Pictures from addresses that somebody else may have chosen: from public addresses alone, so many bytes, in so much time."""

from __future__ import annotations

import asyncio
import ipaddress
from concurrent.futures import ThreadPoolExecutor
from socket import SOCK_STREAM
from typing import Any

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # as transformers does

from xcompat.data.images import UnusableSampleError

PATIENCE = 30.0
"""Seconds that a picture may take, from asking for its host's addresses to its last byte."""
MOST_BYTES = 64 << 20
"""Bytes that a picture may have."""
MOST_REDIRECTS = 3
_CONNECTING = 10.0  # seconds for one of a host's addresses, before the next is tried
_HEADERS = {"User-Agent": "xcompat", "Accept-Encoding": "identity"}  # some sites refuse who has no name


def fetch(url: str, allow_private_addresses: bool = False) -> bytes:
    """Read what lies at an address.

    A host's name is resolved once, and the connection goes to an address that was looked at, after a redirect too. Proxies,
    cookies and passwords of the environment are not used: behind a proxy nobody could say where a request ends up.

    Args:
        url: ``http://`` or ``https://``.
        allow_private_addresses: whether the host may be this machine, or one of a network that is not public.

    Returns:
        At most `MOST_BYTES` bytes.

    Raises:
        UnusableSampleError: it cannot be had, or is not to be asked for. No message repeats what may be a secret in the address.
    """
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running event loop already
        return thread.submit(asyncio.run, _read_in_time(url, allow_private_addresses)).result()


def shown_address(url: str) -> str:
    """Return an address for messages: without user, password, query and fragment, which may be secrets.

    Example:
        >>> shown_address("https://me:secret@photos.example:8443/shoe.png?X-Amz-Signature=secret")
        'https://photos.example:8443/shoe.png'
    """
    try:
        return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return url.partition("://")[0] + "://..."


def is_public(address: str) -> bool:
    """Return whether an IP address is of the public Internet.

    Those that only carry an IPv4 address inside are not: they could lead anywhere.

    Args:
        address: IPv4 or IPv6.

    Example:
        >>> [is_public(address) for address in ("1.1.1.1", "127.0.0.1", "169.254.169.254", "::ffff:1.1.1.1")]
        [True, False, False, False]
    """
    ip = ipaddress.ip_address(address)
    if not ip.is_global or ip.is_multicast or ip.is_reserved or ip.is_link_local or ip.is_unspecified:
        return False
    return ip.version == 4 or not (ip.is_site_local or ip.ipv4_mapped or ip.sixtofour or ip.teredo)


async def _read_in_time(url: str, allow_private_addresses: bool) -> bytes:
    try:
        async with asyncio.timeout(PATIENCE):
            return await _read(url, allow_private_addresses)
    except TimeoutError:
        raise UnusableSampleError(f"it took longer than {PATIENCE:g} seconds") from None
    except (httpx.InvalidURL, UnicodeError):  # what they say repeats parts of the address
        raise UnusableSampleError("that is no address") from None
    except httpx.HTTPError as error:
        raise UnusableSampleError(f"{' '.join(str(error).split())[:200] or type(error).__name__}") from None


async def _read(text: str, allow_private_addresses: bool) -> bytes:
    """Follow redirects, each looked at as the first address was."""
    url = httpx.URL(text)
    for _ in range(1 + MOST_REDIRECTS):
        addresses = await _addresses(url, allow_private_addresses)
        async with httpx.AsyncHTTPTransport() as transport:
            response = await _ask(transport, url, addresses)
            if not response.has_redirect_location:
                return await _content(response)
            url = url.join(response.headers["Location"])
    raise UnusableSampleError(f"it was redirected more than {MOST_REDIRECTS} times")


async def _addresses(url: Any, allow_private_addresses: bool) -> list[str]:  # noqa: ANN401 - httpx's, whose name differs
    """Resolve the host, whatever way it is written; one address that is not public is enough to refuse it."""
    if url.scheme not in ("http", "https"):
        raise UnusableSampleError(f"{url.scheme} is neither http nor https")
    host = url.raw_host.decode("ascii")
    if not host or not 0 < (80 if url.port is None else url.port) < 1 << 16:
        raise httpx.InvalidURL("no host, or no port")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, url.port, type=SOCK_STREAM)
    except OSError as error:
        raise UnusableSampleError(f"{host} has no address ({error.strerror})") from None
    addresses = list(dict.fromkeys(str(where[0]) for *_, where in found))
    inside = [] if allow_private_addresses else [address for address in addresses if not is_public(address)]
    if inside:
        where = host if inside[0] == host else f"{host} ({inside[0]})"
        raise UnusableSampleError(
            f"{where} is not a public address; allow_private_addresses=True allows it, where those who name pictures are trusted"
        )
    return addresses


async def _ask(transport: Any, url: Any, addresses: list[str]) -> Any:  # noqa: ANN401
    """Connect to the first address that answers, in the name of the host that the URL has."""
    request = httpx.Request("GET", url, headers=_HEADERS)
    if url.userinfo:
        request = next(httpx.BasicAuth(url.username, url.password).auth_flow(request))
    settings = {"sni_hostname": url.raw_host.decode("ascii"), "timeout": {"connect": _CONNECTING}}
    failed: Exception = UnusableSampleError(f"{url.host} has no address")
    for address in addresses:
        to = httpx.Request("GET", url.copy_with(host=address), headers=request.headers, extensions=settings)
        try:
            return await transport.handle_async_request(to)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            failed = error
    raise failed


async def _content(response: Any) -> bytes:  # noqa: ANN401 - httpx's
    """Read a body, counting what really arrives."""
    if response.status_code != 200:
        raise UnusableSampleError(f"the server says {response.status_code} {response.reason_phrase}".rstrip())
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise UnusableSampleError("the server has compressed it, which it was asked not to do")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MOST_BYTES:
            raise UnusableSampleError(f"it has more than {MOST_BYTES >> 20} MiB")
    return bytes(content)
