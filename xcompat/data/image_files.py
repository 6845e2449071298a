"""Image files in folders, recognised by name or content, with notices about all other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from xcompat.core.errors import XcompatError
from xcompat.core.files import files_below
from xcompat.core.progress import notice_once

HEIC_SUFFIXES = (".heic", ".heif", ".hif")
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".mpo", ".jp2"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
    *HEIC_SUFFIXES,
)
OTHER_SUFFIXES = (
    *(".txt", ".json", ".jsonl", ".csv", ".tsv", ".xml", ".html", ".md", ".pdf", ".yaml", ".yml", ".log", ".ini", ".db", ".py"),
    *(".gz", ".zip", ".tar", ".tgz", ".parquet", ".npy", ".npz", ".pt", ".safetensors", ".aae", ".xmp", ".svg"),
    *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".mp3", ".wav", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"),
)
"""Suffixes of files that Pillow cannot read. Files with unlisted suffixes, or none, are checked by content."""
SYSTEM_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir")
"""System files in folders, in addition to names that begin with a dot."""
INSTALL_HEIC = 'HEIC images need pillow-heif: run `pip install -e ".[heic]"` in a clone of xcompat'
MAX_NAMED = 5  # maximum number of files named in a message
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")


class FolderFiles(NamedTuple):
    """Files of a folder by kind.

    Args:
        images: images to read.
        heic: HEIC images that this installation cannot read.
        misnamed: images with names that are not UTF-8.
        others: hidden files, and files that are not images.
    """

    images: list[Path]
    heic: list[Path]
    misnamed: list[Path]
    others: list[Path]


def images_below(path: Path) -> Iterator[Path]:
    """Yield an image file, or the images below a folder, except hidden files (e.g. ``._x.jpg`` on macOS)."""
    if not path.is_dir():
        return iter([path] if _is_image(path) else [])
    return (file for file in files_below(path) if not _is_hidden(file.relative_to(path)) and _is_image(file))


def list_images(path: Path) -> FolderFiles:
    """Classify a file, or the files below a folder."""
    found = FolderFiles([], [], [], [])
    is_folder, reads_heic = path.is_dir(), can_read_heic()
    for file in sorted(files_below(path)) if is_folder else [path]:
        if (is_folder and _is_hidden(file.relative_to(path))) or not _is_image(file):
            found.others.append(file)
        elif not _is_utf8(str(file)):
            found.misnamed.append(file)
        elif is_folder and not reads_heic and _is_heic(file):
            found.heic.append(file)
        else:
            found.images.append(file)
    return found


def image_files(paths: list[Path]) -> list[tuple[Path, str]]:
    """List image files below folders with their ids: relative paths with forward slashes.

    Prints a notice about skipped files.

    Raises:
        XcompatError: there are no images.
    """
    found = []
    for path in paths:
        listed = list_images(path)
        folder = path if path.is_dir() else path.parent
        _notice_left_out(path, listed)
        found += [(file, file.relative_to(folder).as_posix()) for file in listed.images]
        if not found and listed.heic:
            raise XcompatError(f"{path}: {len(listed.heic):,} images cannot be read; {INSTALL_HEIC}")
    if not found:
        raise XcompatError(f"{paths[0]}: no images there; check the path")
    return found


def notice_unread(folder: Path, read: Iterable[Path]) -> None:
    """Print a notice with the count and names of a folder's unread entries.

    Args:
        folder: the folder.
        read: files in it that were read.
    """
    known = set(read)
    left_out = sorted(
        (entry for entry in folder.iterdir() if entry not in known), key=lambda entry: (_is_system(entry.name), entry)
    )
    if left_out:
        notice_once(f"{folder}: {count_names('file', left_out, folder)} not read")


def count_names(what: str, files: list[Path], folder: Path) -> str:
    """Count files and name the first ones: ``2 files (a.txt, b.json) are``.

    Example:
        >>> count_names("file", [Path("a/x.txt"), Path("a/y.md")], Path("a"))
        '2 files (x.txt, y.md) are'
    """
    names = [str(file.relative_to(folder)).encode(errors="backslashreplace").decode() for file in files[:MAX_NAMED]]
    more = f" and {len(files) - MAX_NAMED:,} more" if len(files) > MAX_NAMED else ""
    return f"{len(files):,} {what}{'s' if len(files) > 1 else ''} ({', '.join(names)}{more}) {'are' if len(files) > 1 else 'is'}"


def can_read_heic() -> bool:
    """Return whether pillow-heif is installed."""
    return find_spec("pillow_heif") is not None


def has_image_header(head: bytes) -> bool:
    """Return whether bytes begin an image file.

    Args:
        head: at least the first 16 bytes.
    """
    if head[:2] == b"BM":
        return head[6:10] == bytes(4)  # text may begin with the same two letters
    return head.startswith(_STARTS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP") or has_brand(head, avif=True)


def has_brand(head: bytes, *, avif: bool) -> bool:
    """Return whether bytes begin a HEIC file (with ``avif``, HEIC or AVIF)."""
    return head[4:8] == b"ftyp" and head[8:12] in (*_HEIC_BRANDS, *(_AVIF_BRANDS if avif else ()))


def read_head(file: Path) -> bytes:
    """Return the first 32 bytes of a file, or none if it is unreadable."""
    try:
        if not file.is_file():
            return b""
        with file.open("rb") as handle:
            return handle.read(32)
    except OSError:
        return b""


def _is_image(file: Path) -> bool:
    name = file.name.lower()
    if name.endswith(IMAGE_SUFFIXES):
        return True
    return not name.endswith(OTHER_SUFFIXES) and has_image_header(read_head(file))


def _is_heic(file: Path) -> bool:
    head = read_head(file)
    return has_brand(head, avif=False) or (file.name.lower().endswith(HEIC_SUFFIXES) and not has_image_header(head))


def _is_hidden(inside: Path) -> bool:
    return any(map(_is_system, inside.parts))


def _is_system(name: str) -> bool:
    return name.startswith(".") or name in SYSTEM_NAMES


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _notice_left_out(path: Path, listed: FolderFiles) -> None:
    if listed.heic:
        notice_once(f"{path}: {count_names('image', listed.heic, path)} left out; {INSTALL_HEIC}")
    if listed.misnamed:
        notice_once(f"{path}: {count_names('image', listed.misnamed, path)} left out, as names must be UTF-8; rename them")
    others = sorted(listed.others, key=lambda file: (_is_hidden(file.relative_to(path)), file)) if path.is_dir() else []
    if others:
        notice_once(f"{path}: {count_names('file', others, path)} left out, as they are hidden or not images")
