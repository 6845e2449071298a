"""Images at web addresses in the metadata of hits."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from xcompat.core.lazy import datasets as hf
from xcompat.core.progress import notice_once
from xcompat.data.images import UnusableSampleError
from xcompat.data.schema import ID, IMAGE
from xcompat.retrieval.fetching import fetch, shown_address
from xcompat.retrieval.originals import Images

FETCHED_AT_ONCE = 16


def fetch_images(addresses: Mapping[str, str], allow_private_addresses: bool = False) -> Images:
    """Download the images of hits, several at once. Images that cannot be downloaded count as unreadable.

    Args:
        addresses: id -> address, ``http://`` or ``https://``.
        allow_private_addresses: as in :func:`~xcompat.retrieval.fetching.fetch`.

    Returns:
        Originals for :class:`~xcompat.retrieval.Reranker`.
    """
    with ThreadPoolExecutor(FETCHED_AT_ONCE) as threads:
        found = list(threads.map(partial(_fetch, allow_private_addresses=allow_private_addresses), addresses.values()))
    if failed := [(url, error) for url, (_, error) in zip(addresses.values(), found, strict=True) if error]:
        url, error = failed[0]
        notice_once(f"{len(failed)} of {len(found)} images cannot be downloaded, e.g. {shown_address(url)}: {error}")
    images = [{"bytes": data, "path": None} for data, _ in found]
    return Images(hf.Dataset.from_dict({ID: [*addresses], IMAGE: images}))


def _fetch(url: str, allow_private_addresses: bool) -> tuple[bytes, str]:
    """Return an image's bytes, or none and the reason."""
    try:
        return fetch(url, allow_private_addresses), ""
    except UnusableSampleError as error:
        return b"", str(error)
