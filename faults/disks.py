"""What a disk may hold after the power is cut: file operations that were recorded, replayed on a model of a file system.

As ALICE (Pillai et al., OSDI 2014) and LazyFS do it: the content of a file is sure once the file was synced, its name once its
folder was; everything else may be there, be lost, or be there in part.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from syscalls import Answer, Call

Listing: TypeAlias = "dict[str, bytes | None]"
"""path -> content of a file; None for a folder."""
_EXCHANGE, _REMOVE_FOLDER = 2, 0x200


@dataclass(eq=False)
class File:
    """A file: what it holds, and what of it is sure."""

    content: bytes = b""
    sure: bytes = b""


@dataclass(eq=False)
class Folder:
    """A folder: the names in it, and which of them are sure."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    sure: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """A call that changes something.

    Args:
        name: of the call.
        paths: relative to the watched folder.
        flags: its flags, where it has some.
        offset: where is written.
        data: what is written.
    """

    name: str
    paths: tuple[str | None, ...]
    flags: int = 0
    offset: int = 0
    data: bytes = b""


class Recorder:
    """Keeps what every call would write; its :meth:`answer` lets all pass.

    Args:
        folder: the watched folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.events = folder, list[Event]()

    def answer(self, call: Call) -> Answer:
        """Record a call that changes something."""
        if call.name == "mmap":
            assert not (call.arguments[2] & 2 and call.arguments[3] & 1), f"{call.paths} is written through memory, unseen"
        if call.changes:
            self.events.append(Event(call.name, call.paths, _flags(call), *self._written(call)))
        return None

    def _written(self, call: Call) -> tuple[int, bytes]:
        """Return offset and data of a call."""
        a, offset, data = call.arguments, 0, b""
        match call.name:
            case "write":
                offset, data = self._position(call, a[0]), call.memory(a[1], a[2])
            case "pwrite64":
                offset, data = a[3], call.memory(a[1], a[2])
            case "writev":
                parts = struct.iter_unpack("QQ", call.memory(a[1], 16 * a[2]))
                offset, data = self._position(call, a[0]), b"".join(call.memory(start, size) for start, size in parts)
            case "sendfile":
                offset, data = self._position(call, a[0]), self._copied(call, a[1], a[2], a[3])
            case "copy_file_range":
                offset = struct.unpack("q", call.memory(a[3], 8))[0] if a[3] else self._position(call, a[2])
                data = self._copied(call, a[0], a[1], a[4])
            case "truncate" | "ftruncate":
                offset = a[1]
            case "symlink" | "symlinkat":
                raise AssertionError("links are not replayed")
        return offset, data

    def _position(self, call: Call, descriptor: int) -> int:
        information = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{call.pid}/fdinfo/{descriptor}").read_text().splitlines()
            if ":\t" in line
        )
        if int(information["flags"], 8) & os.O_APPEND:
            return os.stat(f"/proc/{call.pid}/fd/{descriptor}").st_size  # noqa: PTH116 - a link of its own kind
        return int(information["pos"])

    def _copied(self, call: Call, source: int, offset_at: int, count: int) -> bytes:
        start = struct.unpack("q", call.memory(offset_at, 8))[0] if offset_at else self._position(call, source)
        with open(f"/proc/{call.pid}/fd/{source}", "rb") as file:  # noqa: PTH123
            file.seek(start)
            return file.read(count)


def _flags(call: Call) -> int:
    place = {"open": 1, "openat": 2, "renameat2": 4, "unlinkat": 2}.get(call.name)
    return os.O_CREAT | os.O_TRUNC if call.name == "creat" else 0 if place is None else ctypes.c_int(call.arguments[place]).value


class Disk:
    """A model of a file system, and what of it would outlive a power cut.

    Args:
        listing: what it holds, all of it for sure.
    """

    def __init__(self, listing: Listing) -> None:
        self.root = Folder()
        for path, content in sorted(listing.items()):
            parent = self._folder(os.path.dirname(path))  # noqa: PTH120 - paths of no file system
            assert parent is not None
            node = Folder() if content is None else File(content, content)
            parent.entries[os.path.basename(path)] = parent.sure[os.path.basename(path)] = node  # noqa: PTH119

    def _find(self, path: str) -> File | Folder | None:
        node: File | Folder | None = self.root
        for name in path.split("/") if path not in ("", ".") else ():
            node = node.entries.get(name) if isinstance(node, Folder) else None
        return node

    def _folder(self, path: str) -> Folder | None:
        node = self._find(path)
        return node if isinstance(node, Folder) else None

    def _place(self, path: str | None) -> tuple[Folder, str] | None:
        if path is None or (parent := self._folder(os.path.dirname(path))) is None:  # noqa: PTH120
            return None
        return parent, os.path.basename(path)  # noqa: PTH119

    def apply(self, event: Event) -> None:  # noqa: C901 - a case for each kind of call
        """Make a change, as the system would; one that it would refuse changes nothing."""
        node = self._find(event.paths[-1]) if event.paths[-1] is not None else None
        match event.name:
            case "open" | "openat" | "creat":
                self._open(event, node)
            case "write" | "pwrite64" | "writev" | "sendfile" | "copy_file_range":
                if isinstance(node, File):
                    before = node.content[: event.offset].ljust(event.offset, b"\0")
                    node.content = before + event.data + node.content[event.offset + len(event.data) :]
            case "truncate" | "ftruncate":
                if isinstance(node, File):
                    node.content = node.content[: event.offset].ljust(event.offset, b"\0")
            case "fsync" | "fdatasync":
                if isinstance(node, File):
                    node.sure = node.content
                elif node is not None:
                    node.sure = dict(node.entries)
            case "rename" | "renameat" | "renameat2":
                self._rename(event)
            case "unlink" | "unlinkat" | "rmdir":
                self._remove(event, node)
            case "mkdir" | "mkdirat":
                if node is None and (place := self._place(event.paths[0])):
                    place[0].entries[place[1]] = Folder()
            case "link" | "linkat":
                if node is None and (source := self._find(event.paths[0] or "")) and (place := self._place(event.paths[1])):
                    place[0].entries[place[1]] = source

    def _open(self, event: Event, node: File | Folder | None) -> None:
        if node is None and event.flags & os.O_CREAT and (place := self._place(event.paths[0])):
            place[0].entries[place[1]] = File()
        elif isinstance(node, File) and event.flags & os.O_TRUNC and not event.flags & os.O_EXCL:
            node.content = b""

    def _rename(self, event: Event) -> None:
        source, target = map(self._place, event.paths)
        assert source is not None and target is not None, f"{event} leaves the watched folder"
        moved = source[0].entries.get(source[1])
        if moved is None:
            return
        there = target[0].entries.get(target[1])
        if event.flags & _EXCHANGE:
            if there is not None:
                source[0].entries[source[1]], target[0].entries[target[1]] = there, moved
        elif not (isinstance(there, Folder) and there.entries):
            del source[0].entries[source[1]]
            target[0].entries[target[1]] = moved

    def _remove(self, event: Event, node: File | Folder | None) -> None:
        place = self._place(event.paths[0])
        folder = event.name == "rmdir" or bool(event.flags & _REMOVE_FOLDER)
        if node is not None and place is not None and isinstance(node, Folder) == folder and not getattr(node, "entries", None):
            del place[0].entries[place[1]]

    def crashes(self) -> Iterator[tuple[str, Listing]]:
        """Yield what a power cut may leave now.

        Yields:
            What has become of that which is not sure, and what is on the disk.
        """
        yield "all of it is there", self._listing(lambda folder: folder.entries, lambda file: file.content)
        yield "all of it is lost", self._listing(lambda folder: folder.sure, lambda file: file.sure)
        yield "names are there, data are not", self._listing(lambda folder: folder.entries, lambda file: file.sure)
        yield "data are zeros", self._listing(lambda folder: folder.entries, _zeros)
        yield "data are there in part", self._listing(lambda folder: folder.entries, _torn)
        for pending in [folder for folder in self._folders() if folder.entries != folder.sure]:
            yield (
                "the names of one folder are lost",
                self._listing(
                    lambda folder, one=pending: folder.sure if folder is one else folder.entries, lambda file: file.content
                ),
            )
            yield (
                "the names of one folder alone are there",
                self._listing(
                    lambda folder, one=pending: folder.entries if folder is one else folder.sure, lambda file: file.sure
                ),
            )

    def _folders(self) -> list[Folder]:
        found, waiting = list[Folder](), [self.root]
        while waiting:
            folder = waiting.pop()
            if folder not in found:
                found.append(folder)
                waiting += [node for node in [*folder.entries.values(), *folder.sure.values()] if isinstance(node, Folder)]
        return found

    def _listing(self, names, data) -> Listing:
        listing: Listing = {}

        def walk(folder: Folder, path: str) -> None:
            for name, node in names(folder).items():
                listing[path + name] = None if isinstance(node, Folder) else data(node)
                if isinstance(node, Folder):
                    walk(node, f"{path}{name}/")

        walk(self.root, "")
        return listing


def _zeros(file: File) -> bytes:
    return file.content if file.content == file.sure else bytes(len(file.content))


def _torn(file: File) -> bytes:
    half = len(file.content) // 2
    return file.content if file.content == file.sure else file.content[:half] + bytes(len(file.content) - half)


def listing_of(folder: Path) -> Listing:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def written(listing: Listing, folder: Path) -> None:
    """Write what a power cut has left."""
    for path, content in sorted(listing.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
