"""Download pictures from URLs that strangers may choose: only from public addresses, with limits on bytes and time."""

from __future__ import annotations

import asyncio
import ipaddress
from concurrent.futures import ThreadPoolExecutor
from socket import SOCK_STREAM
from typing import Any

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # as transformers does

from xcompat.data.images import UnusableSampleError

PATIENCE = 30.0
"""Seconds that a picture may take, from resolving its host to its last byte."""
MOST_BYTES = 64 << 20
"""Bytes that a picture may have."""
MOST_REDIRECTS = 3
_CONNECTING = 10.0  # seconds for each address of a host, before the next is tried
_HEADERS = {"User-Agent": "xcompat", "Accept-Encoding": "identity"}  # some sites refuse clients without a name


def fetch(url: str, allow_private_addresses: bool = False) -> bytes:
    """Download a URL.

    A host's name is resolved once, its addresses are checked, and the connection goes to one of these, after a redirect too.
    Proxies, cookies and passwords of the environment are not used: behind a proxy nobody could say where a request ends up.

    Args:
        url: ``http://`` or ``https://``.
        allow_private_addresses: whether the host may be this machine or belong to a private network.

    Returns:
        At most `MOST_BYTES` bytes.

    Raises:
        UnusableSampleError: the download fails, or the address is refused. The message repeats no secrets of the URL.
    """
    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running event loop already
        return thread.submit(asyncio.run, _read_in_time(url, allow_private_addresses)).result()


def shown_address(url: str) -> str:
    """Return a URL for messages: without user, password, query and fragment, which may be secrets.

    Example:
        >>> shown_address("https://me:secret@photos.example:8443/shoe.png?X-Amz-Signature=secret")
        'https://photos.example:8443/shoe.png'
    """
    try:
        return str(httpx.URL(url).copy_with(userinfo=b"", query=None, fragment=None))
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return url.partition("://")[0] + "://..."


def is_public(address: str) -> bool:
    """Return whether an IPv4 or IPv6 address belongs to the public Internet.

    IPv6 addresses that wrap an IPv4 address count as private: they could lead anywhere.

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
    except (httpx.InvalidURL, UnicodeError):  # their messages repeat parts of the URL
        raise UnusableSampleError("that is no address") from None
    except httpx.HTTPError as error:
        raise UnusableSampleError(f"{' '.join(str(error).split())[:200] or type(error).__name__}") from None


async def _read(text: str, allow_private_addresses: bool) -> bytes:
    """Download, checking the address anew after each redirect."""
    url = httpx.URL(text)
    for _ in range(1 + MOST_REDIRECTS):
        addresses = await _addresses(url, allow_private_addresses)
        async with httpx.AsyncHTTPTransport() as transport:
            response = await _ask(transport, url, addresses)
            if not response.has_redirect_location:
                return await _content(response)
            url = url.join(response.headers["Location"])
    raise UnusableSampleError(f"it was redirected more than {MOST_REDIRECTS} times")


async def _addresses(url: Any, allow_private_addresses: bool) -> list[str]:  # noqa: ANN401 - httpx's type has no stable name
    """Resolve the host, however it is written; refuse it if one of its addresses is not public."""
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
    """Send the request to the first address that answers, under the URL's host name."""
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
    """Read a response's body, counting the bytes that arrive, whatever its headers claim."""
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
