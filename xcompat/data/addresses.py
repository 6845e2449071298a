"""Remote shards and texts, read as streams: addresses on the web, in object stores and on the Hub, and commands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from xcompat.core.errors import XcompatError
from xcompat.core.files import temporary_folder
from xcompat.core.progress import advance_bar, progress_bar

WEB, STORES, HUB, PIPE = ("https://", "http://"), ("s3://", "gs://"), "hf://", "pipe:"
SCHEMES = (*WEB, *STORES, HUB, PIPE)
BLOCK = 2**20
ALLOW_PIPES = "XCOMPAT_ALLOW_PIPES"
"""Environment variable that allows ``pipe:``. Recipes cannot set it, as they may come from strangers."""


def is_address(path: object) -> TypeGuard[str]:
    """Return whether a path is a remote address. An existing file of that name takes precedence.

    Example:
        >>> is_address("https://shards.example/0.tar"), is_address("pipe:zcat 0.tar.gz"), is_address("shards/0.tar")
        (True, True, False)
    """
    return isinstance(path, str) and path.startswith(SCHEMES) and not Path(path).exists()


def list_addresses(path: str | list[str]) -> list[str] | None:
    """List a path's remote shards.

    Args:
        path: an address, optionally with a brace range or (on the Hub) a glob, or a list of addresses.

    Returns:
        Addresses in order; None for local files.

    Raises:
        XcompatError: local and remote paths are mixed, an address is invalid, a command is not allowed, or nothing on the Hub
            matches.
    """
    given = [path] if isinstance(path, str) else path
    elsewhere = [each for each in given if is_address(each)]
    if not elsewhere:
        return None
    if len(elsewhere) < len(given):
        local = next(each for each in given if each not in elsewhere)
        raise XcompatError(f"{local} is local and {redact_address(elsewhere[0])} is remote; give only local or only remote paths")
    return [found for each in elsewhere for one in _expand_braces(each) for found in _matching(one)]


def _expand_braces(address: str) -> list[str]:
    """Expand brace ranges. In commands, expand only ranges of numbers, as other braces may be the command's own."""
    from braceexpand import braceexpand

    if address.startswith(PIPE):
        if not address.removeprefix(PIPE).strip():
            raise XcompatError(f"{PIPE} contains no command; add one that prints the data")
        parts = re.split(r"(\{\d+\.\.\d+\})", address)
        return list(map("".join, product(*(braceexpand(part) if number % 2 else [part] for number, part in enumerate(parts)))))
    try:
        expanded = list(braceexpand(address))
        if all(urlsplit(one).netloc for one in expanded):
            return expanded
    except ValueError:  # invalid braces or addresses
        pass
    raise XcompatError(f"{redact_address(address)} is not a valid address; check the scheme and the braces")


def _matching(address: str) -> list[str]:
    if address.startswith(PIPE):
        _require_pipes(address)
    if not address.startswith(HUB) or not set(address) & set("*?["):
        return [address]
    from huggingface_hub import HfFileSystem

    try:
        found = sorted(f"{HUB}{path}" for path in HfFileSystem().glob(address.removeprefix(HUB)))
    except Exception as error:  # network errors, invalid names, missing permissions
        raise XcompatError(f"{redact_address(address)} cannot be looked up: {describe_failure(error)}") from None
    if not found:
        raise XcompatError(f"no file on the Hub matches {address}; check the repository and the pattern")
    return found


def _require_pipes(address: str) -> None:
    if os.environ.get(ALLOW_PIPES) != "1":
        raise XcompatError(
            f"{redact_address(address)} runs a command on this machine; set {ALLOW_PIPES}=1 if you trust this command"
        )


def redact_address(address: str) -> str:
    """Return an address for messages, without possible secrets (user, password, query, fragment); for a command, its name.

    Example:
        >>> redact_address("https://me:secret@shards.example/0.tar?token=secret")
        'https://shards.example/0.tar'
        >>> redact_address("pipe:aws s3 cp s3://b/0.tar - --profile me")
        'pipe:aws ...'
    """
    if address.startswith(PIPE):
        return " ".join([f"{PIPE}{address.removeprefix(PIPE).strip()}".split(maxsplit=1)[0], "..."])
    scheme, _, rest = address.partition("://")  # not urlsplit: invalid addresses must work, too
    place, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


def describe_failure(error: Exception) -> str:
    """Describe why an address could not be read, without repeating the address."""
    causes = [error, error.__cause__, error.__context__]
    status = next((found for each in causes if (found := getattr(each, "status", None)) is not None), None)
    if status is not None and status not in (404, 410):
        return f"its server answers {status}"
    if any("Connect" in type(each).__name__ for each in causes):
        return "its server cannot be reached"
    if isinstance(error, FileNotFoundError):  # fsspec raises it for every failure
        return "it does not exist"
    if "range requests" in str(error):  # fsspec's wording
        return "its server does not support HTTP range requests; download it first, or use a server that supports them"
    if ended := re.search(r": exit (-?\d+) \(read\)", str(error)):  # webdataset's wording
        return f"the command ended with {ended[1]}"
    reason = "" if "://" in str(error) or PIPE in str(error) else f": {error}"
    return f"{type(error).__name__}{reason}"


@contextmanager
def open_address(address: str) -> Iterator[Any]:
    """Open an address for reading from the beginning.

    Interrupted reads resume where they broke: through ``datasets`` on the web and the Hub, through Arrow in object stores.
    Commands do not run again.

    Args:
        address: from :func:`list_addresses`.
    """
    stream = _open(address)
    try:
        yield stream
    except BaseException:
        with suppress(Exception):
            stream.close()
        raise
    stream.close()  # raises if a command failed


@contextmanager
def download_address(address: str, folder: Path) -> Iterator[Path]:
    """Download an address to a temporary file with the same name, for readers that need a file.

    Args:
        address: from :func:`list_addresses`.
        folder: existing folder with enough space.

    Raises:
        XcompatError: the address cannot be read.
    """
    name = "" if address.startswith(PIPE) else PurePosixPath(urlsplit(address).path).name
    with temporary_folder(folder / "fetched") as place:
        file = place / (name or "output")
        with file.open("wb") as target, progress_bar() as bar:
            task = bar.add_task(redact_address(address), total=None, unit="MB")
            for block in _blocks(address):
                target.write(block)  # local disk errors are not errors of the address
                advance_bar(bar, task, len(block) / 1e6)
        yield file


def _blocks(address: str) -> Iterator[bytes]:
    try:
        with open_address(address) as stream:
            while block := stream.read(BLOCK):
                yield block
    except XcompatError:
        raise
    except Exception as error:  # each kind of address raises its own types
        raise XcompatError(f"{redact_address(address)} cannot be read: {describe_failure(error)}") from None


def _open(address: str) -> Any:  # noqa: ANN401 - files of many libraries
    if address.startswith(PIPE):
        from webdataset.gopen import gopen_pipe

        _require_pipes(address)
        return gopen_pipe(address)
    if address.startswith(STORES):
        from pyarrow import fs

        system, path = fs.FileSystem.from_uri(address)
        return system.open_input_stream(path, compression=None)
    from datasets.download.streaming_download_manager import xopen

    return xopen(address, "rb")
