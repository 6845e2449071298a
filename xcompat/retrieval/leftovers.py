"""Cleanup of gallery files left by killed writers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.core.files import PARTIAL, clear_leftovers, list_entries, make_folder, read_json, sync_folder
from xcompat.retrieval.lock import LOCK, OWNER, lock_writer
from xcompat.retrieval.manifest import CURRENT, GENERATIONS, REMOVED, SEGMENTS, read_manifest

BEGUN = ".begun"
"""Marker file of an unfinished gallery."""
_JOURNAL = re.compile(r"upgrade-[0-9a-f]{16}\.json")
_GENERATION = re.compile(r"\d{8}\.json")
_SEGMENT = re.compile(r"[0-9a-f]{16}")
_REMOVED = re.compile(r"[0-9a-f]{16}-\d{8}\.npy")
_NAMED = re.compile(r'"([0-9a-f]{16}(?:-\d{8}\.npy)?)"')
_TEMPORARY = re.compile(
    r"\.(gallery\.json|upgrade-[0-9a-f]{16}\.json|\d{8}\.json|[0-9a-f]{16}-\d{8}\.npy|[0-9a-f]{16})\.[a-z0-9_]{8}"
    + re.escape(PARTIAL)
)


@contextmanager
def create_in_folder(folder: Path) -> Iterator[None]:
    """Hold the writer lock while a gallery is created in an empty or unfinished folder.

    Raises:
        XcompatError: the folder contains other files, or another process creates a gallery there.
    """
    make_folder(folder)
    lock = lock_writer(folder)
    try:
        require_empty(folder)
        if (folder / BEGUN).exists():
            _clear_begun(folder)
        (folder / BEGUN).touch()
        sync_folder(folder)
        yield
        (folder / BEGUN).unlink()
    finally:
        lock.release()


def require_empty(folder: Path) -> None:
    """Raise if a folder contains anything but an unfinished gallery."""
    if folder.is_dir():
        foreign = next((entry for entry in sorted(folder.iterdir()) if not _is_begun(entry)), None)
    else:
        foreign = folder if folder.exists() else None
    if foreign is not None:
        raise XcompatError(
            f"{folder} is not empty (it holds {foreign.name}); choose another folder, or add to the existing gallery"
        )


def is_unreported(folder: Path) -> bool:
    """Return whether a gallery is complete, but its creator was killed before reporting success.

    The next writer deletes the marker.
    """
    return (folder / BEGUN).is_file() and (folder / CURRENT).is_file()


def _is_begun(entry: Path) -> bool:
    if entry.name in (LOCK, OWNER, BEGUN):
        return True
    if not (entry.parent / BEGUN).is_file() or (entry.parent / CURRENT).exists():
        return False
    if entry.name in (GENERATIONS, SEGMENTS):
        ours = _GENERATION if entry.name == GENERATIONS else _SEGMENT
        return all(ours.fullmatch(inner.name) or _is_temporary(inner) for inner in entry.iterdir())
    return _is_temporary(entry)


def _clear_begun(folder: Path) -> None:
    for file in list_entries(folder / GENERATIONS, "*.json"):
        file.unlink()
    for segment in _ours(folder / SEGMENTS, _SEGMENT):
        shutil.rmtree(segment)
    _clear_temporaries(folder)


def clear(folder: Path) -> None:
    """Delete files that no gallery state needs; the caller holds the writer lock.

    These are temporary files, invalid upgrade journals, and segments and removal files without a mention in any generation or
    valid journal. Links and files with unknown names stay.

    Raises:
        OSError: a file cannot be deleted.
    """
    (folder / BEGUN).unlink(missing_ok=True)
    for journal in _ours(folder, _JOURNAL):
        if not _can_continue(folder, journal):
            journal.unlink()
    segments = {path.name for path in _ours(folder / SEGMENTS, _SEGMENT)}
    removed = {path.name for path in _ours(folder / REMOVED, _REMOVED)}
    for name in sorted(_find_unnamed(folder, segments | removed)):
        if name in removed:
            (folder / REMOVED / name).unlink()
        elif (folder / SEGMENTS / name).is_dir():
            shutil.rmtree(folder / SEGMENTS / name)
    _clear_temporaries(folder)


def _can_continue(folder: Path, journal: Path) -> bool:
    try:
        return bool(read_json(journal)["generation"] == read_manifest(folder).generation)
    except (XcompatError, KeyError, TypeError):
        return False


def _find_unnamed(folder: Path, names: set[str]) -> set[str]:
    """Return names without a mention in any generation or journal."""
    generations = sorted(_ours(folder / GENERATIONS, _GENERATION), reverse=True)
    for file in (folder / CURRENT, *_ours(folder, _JOURNAL), *generations):
        if not names:
            break
        text = file.read_text(encoding="utf-8", errors="replace").rstrip()
        if not text.endswith("}"):  # truncated: missing names are unknown
            return set()
        names = names - set(_NAMED.findall(text))
    return names


def _clear_temporaries(folder: Path) -> None:
    for place in (folder, folder / GENERATIONS, folder / SEGMENTS, folder / REMOVED):
        clear_leftovers(place)


def _is_temporary(path: Path) -> bool:
    return _TEMPORARY.fullmatch(path.name) is not None


def _ours(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return entries with matching names, without links."""
    return [path for path in _list_folder(folder) if name.fullmatch(path.name) and not path.is_symlink()]


def _list_folder(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
