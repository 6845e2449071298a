"""Safe download of images from untrusted URLs: public addresses only, limited bytes and time."""

from __future__ import annotations

import asyncio
import ipaddress
from concurrent.futures import ThreadPoolExecutor
from socket import SOCK_STREAM
from typing import Any

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # as transformers does

from xcompat.data.images import UnusableSampleError

PATIENCE = 30.0
"""Timeout in seconds per image, from resolving the host to the last byte."""
MOST_BYTES = 64 << 20
"""Largest image in bytes."""
MOST_REDIRECTS = 3
_CONNECTING = 10.0  # seconds per address of a host
_HEADERS = {"User-Agent": "xcompat", "Accept-Encoding": "identity"}  # some sites refuse clients without a name


def fetch(url: str, allow_private_addresses: bool = False) -> bytes:
    """Download a URL.

    The host is resolved once, its addresses are checked, and the connection uses a checked address; the same holds for redirects.
    Proxies, cookies and passwords from the environment are ignored.

    Args:
        url: ``http://`` or ``https://``.
        allow_private_addresses: whether to allow this machine and private networks.

    Returns:
        At most `MOST_BYTES` bytes.

    Raises:
        UnusableSampleError: the download failed or was refused; without the URL's secrets.
    """
    with ThreadPoolExecutor(1) as thread:  # a notebook's main thread already runs an event loop
        return thread.submit(asyncio.run, _read_in_time(url, allow_private_addresses)).result()


def shown_address(url: str) -> str:
    """Return a URL for messages, without secrets (user, password, query and fragment).

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

    IPv6 addresses that wrap an IPv4 address count as private.

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
        raise UnusableSampleError("invalid address") from None
    except httpx.HTTPError as error:
        raise UnusableSampleError(f"{' '.join(str(error).split())[:200] or type(error).__name__}") from None


async def _read(text: str, allow_private_addresses: bool) -> bytes:
    """Download, and check the address again after each redirect."""
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
    """Resolve the host; refuse it if an address is not public."""
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
            f"{where} is not a public address; set allow_private_addresses=True if you trust the source of the URLs"
        )
    return addresses


async def _ask(transport: Any, url: Any, addresses: list[str]) -> Any:  # noqa: ANN401
    """Send the request to the first address that answers."""
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
    """Read a body and count its bytes, without trusting headers."""
    if response.status_code != 200:
        raise UnusableSampleError(f"the server returned {response.status_code} {response.reason_phrase}".rstrip())
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise UnusableSampleError("the server sent compressed content, which is not supported")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > MOST_BYTES:
            raise UnusableSampleError(f"it has more than {MOST_BYTES >> 20} MiB")
    return bytes(content)
