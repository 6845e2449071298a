"""Shards and texts elsewhere: addresses of the web, of object stores and of the Hub, and commands, read as streams."""

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
from xcompat.core.progress import progress_bar, rate_of

WEB, STORES, HUB, PIPE = ("https://", "http://"), ("s3://", "gs://"), "hf://", "pipe:"
SCHEMES = (*WEB, *STORES, HUB, PIPE)
BLOCK = 2**20
ALLOW_PIPES = "XCOMPAT_ALLOW_PIPES"
"""The variable of the environment that allows ``pipe:``: a recipe, which may be a stranger's, cannot set it."""


def is_address(path: object) -> TypeGuard[str]:
    """Return whether a path is read from elsewhere where it is streamed; a file of that name comes first.

    Example:
        >>> is_address("https://shards.example/0.tar"), is_address("pipe:zcat 0.tar.gz"), is_address("shards/0.tar")
        (True, True, False)
    """
    return isinstance(path, str) and path.startswith(SCHEMES) and not Path(path).exists()


def addresses(path: str | list[str]) -> list[str] | None:
    """List the shards that a path names elsewhere.

    Args:
        path: an address, with a brace range or (on the Hub) a glob, or a list of these.

    Returns:
        Addresses in order; None if the path names local files.

    Raises:
        XcompatError: some are local and some are not, one is no address, a command is named and not allowed, or nothing on the
            Hub matches.
    """
    given = [path] if isinstance(path, str) else path
    elsewhere = [each for each in given if is_address(each)]
    if not elsewhere:
        return None
    if len(elsewhere) < len(given):
        local = next(each for each in given if each not in elsewhere)
        raise XcompatError(f"{local} is here and {shown(elsewhere[0])} is elsewhere; a stream reads one or the other")
    return [found for each in elsewhere for one in _expanded(each) for found in _matching(one)]


def _expanded(address: str) -> list[str]:
    """Write brace ranges out; in a command, whose braces may be its own, only those of numbers."""
    from braceexpand import braceexpand

    if address.startswith(PIPE):
        if not address.removeprefix(PIPE).strip():
            raise XcompatError(f"{PIPE} names no command; write the one that prints what is to be read")
        parts = re.split(r"(\{\d+\.\.\d+\})", address)
        return list(map("".join, product(*(braceexpand(part) if number % 2 else [part] for number, part in enumerate(parts)))))
    try:
        expanded = list(braceexpand(address))
        if all(urlsplit(one).netloc for one in expanded):
            return expanded
    except ValueError:  # of braces, and of what is no address
        pass
    raise XcompatError(f"{shown(address)} is no address, or its braces do not fit; mend it")


def _matching(address: str) -> list[str]:
    if address.startswith(PIPE):
        _require_pipes(address)
    if not address.startswith(HUB) or not set(address) & set("*?["):
        return [address]
    from huggingface_hub import HfFileSystem

    try:
        found = sorted(f"{HUB}{path}" for path in HfFileSystem().glob(address.removeprefix(HUB)))
    except Exception as error:  # of the network, of names that cannot be, of what may not be read
        raise XcompatError(f"{shown(address)} cannot be looked up: {why(error)}") from None
    if not found:
        raise XcompatError(f"nothing on the Hub matches {address}")
    return found


def _require_pipes(address: str) -> None:
    if os.environ.get(ALLOW_PIPES) != "1":
        raise XcompatError(
            f"{shown(address)} is a command that would run on this machine; set {ALLOW_PIPES}=1 once you have read and trust it"
        )


def shown(address: str) -> str:
    """Return an address for messages: without user, password, query and fragment, which may be secrets; of a command its name.

    Example:
        >>> shown("https://me:secret@shards.example/0.tar?token=secret"), shown("pipe:aws s3 cp s3://b/0.tar - --profile me")
        ('https://shards.example/0.tar', 'pipe:aws ...')
    """
    if address.startswith(PIPE):
        return " ".join([f"{PIPE}{address.removeprefix(PIPE).strip()}".split(maxsplit=1)[0], "..."])
    scheme, _, rest = address.partition("://")  # by hand: this is for what is no address, too
    place, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


def why(error: Exception) -> str:
    """Return why an address could not be read, without what it holds itself."""
    causes = [error, error.__cause__, error.__context__]
    status = next((found for each in causes if (found := getattr(each, "status", None)) is not None), None)
    if status is not None and status not in (404, 410):
        return f"its server answers {status}"
    if any("Connect" in type(each).__name__ for each in causes):
        return "its server cannot be reached"
    if isinstance(error, FileNotFoundError):  # what fsspec makes of every failure
        return "it does not exist"
    if "range requests" in str(error):  # as fsspec says it, with advice for programs
        return "its server sends whole files only, and no parts (HTTP range requests); copy it here, or to one that does"
    if ended := re.search(r": exit (-?\d+) \(read\)", str(error)):  # as webdataset says it, after the command
        return f"the command ended with {ended[1]}"
    reason = "" if "://" in str(error) or PIPE in str(error) else f": {error}"
    return f"{type(error).__name__}{reason}"


@contextmanager
def opened(address: str) -> Iterator[Any]:
    """Open an address for reading from its beginning.

    Reads are repeated where a connection breaks, from where it broke: by ``datasets`` on the web and on the Hub, by Arrow in
    object stores. A command is not run again.

    Args:
        address: one of :func:`addresses`.
    """
    stream = _open(address)
    try:
        yield stream
    except BaseException:
        with suppress(Exception):
            stream.close()
        raise
    stream.close()  # a command that failed says so here


@contextmanager
def fetched(address: str, folder: Path) -> Iterator[Path]:
    """Copy what lies at an address into a file that has its name, for readers that need one; it is deleted in the end.

    Args:
        address: one of :func:`addresses`.
        folder: an existing folder with room for it.

    Raises:
        XcompatError: it cannot be read.
    """
    name = "" if address.startswith(PIPE) else PurePosixPath(urlsplit(address).path).name
    with temporary_folder(folder / "fetched") as place:
        file = place / (name or "output")
        with file.open("wb") as target, progress_bar() as bar:
            task = bar.add_task(shown(address), total=None, rate="")
            for block in _blocks(address):
                target.write(block)  # an error of this disk is not one of the address
                rate_of(bar, task, len(block) / 1e6, "MB")
        yield file


def _blocks(address: str) -> Iterator[bytes]:
    try:
        with opened(address) as stream:
            while block := stream.read(BLOCK):
                yield block
    except XcompatError:
        raise
    except Exception as error:  # each kind of address has its own
        raise XcompatError(f"{shown(address)} cannot be read: {why(error)}") from None


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
