"""Images at web addresses in the metadata of hits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from urllib.parse import urlsplit

from xcompat.core.lazy import datasets as hf
from xcompat.core.progress import notice_once
from xcompat.data.images import UnusableSampleError
from xcompat.data.schema import ID, IMAGE
from xcompat.retrieval.fetching import fetch, shown_address
from xcompat.retrieval.originals import Images

FETCHED_AT_ONCE = 16
IN_MEMORY = 64
"""Images of a part, whose files are in memory together."""


def fetch_images(addresses: Mapping[str, str], allow_private_addresses: bool = False) -> Iterator[Images]:
    """Download the images of hits in parts, several at once. Images that cannot be downloaded are left out.

    Args:
        addresses: id -> address, ``http://`` or ``https://``.
        allow_private_addresses: as in :func:`~xcompat.retrieval.fetching.fetch`.

    Yields:
        Originals for :class:`~xcompat.retrieval.Reranker`, at most :data:`IN_MEMORY`.
    """
    left, download = iter(addresses.items()), partial(_fetch, allow_private_addresses=allow_private_addresses)
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as threads:
        while part := dict(islice(left, IN_MEMORY)):
            read = {name: data for name, data in zip(part, threads.map(download, part.values()), strict=True) if data}
            if read:
                images = [{"bytes": data, "path": None} for data in read.values()]
                yield Images(hf.Dataset.from_dict({ID: [*read], IMAGE: images}))


def _fetch(url: str, allow_private_addresses: bool) -> bytes:
    """Return an image's bytes. Without them, return nothing and print the reason once per server."""
    try:
        return fetch(url, allow_private_addresses)
    except UnusableSampleError as error:
        notice_once(f"images of {urlsplit(shown_address(url)).netloc} cannot be downloaded: {error}")
        return b""
