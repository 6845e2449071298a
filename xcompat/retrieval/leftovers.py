"""What writers that were killed left in a gallery: known by its names, and deleted by the next writer."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xcompat.errors import XcompatError
from xcompat.files import clear_leftovers, listed, make_folder, read_json, sync_folder
from xcompat.retrieval.backend import Backend
from xcompat.retrieval.lock import LOCK, OWNER, lock_writer
from xcompat.retrieval.manifest import CURRENT, GENERATIONS, REMOVED, SEGMENTS, read_manifest

BEGUN = ".begun"
"""In a folder from before the first file of a gallery is written until the gallery is there."""
_JOURNAL = re.compile(r"upgrade-[0-9a-f]{16}\.json")
_GENERATION = re.compile(r"\d{8}\.json")
_SEGMENT = re.compile(r"[0-9a-f]{16}")
_REMOVED = re.compile(r"[0-9a-f]{16}-\d{8}\.npy")
_NAMED = re.compile(r'"([0-9a-f]{16}(?:-\d{8}\.npy)?)"')
_OLD_TEMPORARY = re.compile(
    r"\.(gallery\.json|upgrade-[0-9a-f]{16}\.json|\d{8}\.json|[0-9a-f]{16}-\d{8}\.npy|([0-9a-f]{16}))\.[a-z0-9_]{8}"
)
"""Of versions of xcompat whose temporary folders did not end in ``.partial``; the second group is a segment's name."""


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Hold the writer's lock while a gallery is made where nothing is, or where making one was cut off.

    Args:
        folder: of the gallery; :func:`require_empty` holds for it.

    Raises:
        XcompatError: something else is there, or another process makes one.
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
    """Refuse a folder that holds something where a gallery is to be made; what is left of one that was begun is nothing."""
    if folder.is_dir():
        foreign = next((entry for entry in sorted(folder.iterdir()) if not _is_begun(entry)), None)
    else:
        foreign = folder if folder.exists() else None
    if foreign is not None:
        raise XcompatError(
            f"{folder} is not empty (it holds {foreign.name}); choose another folder, or add to the gallery that is there"
        )


def was_not_reported(folder: Path) -> bool:
    """Return whether a gallery was made there, and whoever made it was killed or failed before it could say so.

    Nobody has written to it since: the next writer takes the marker away.
    """
    return (folder / BEGUN).is_file() and (folder / CURRENT).is_file()


def _is_begun(entry: Path) -> bool:
    """Return whether something is left of a gallery that was begun and never there: its marker says that none was."""
    if entry.name in (LOCK, OWNER, BEGUN):
        return True
    if not (entry.parent / BEGUN).is_file() or (entry.parent / CURRENT).exists():
        return False
    if entry.name in (GENERATIONS, SEGMENTS):
        ours = _GENERATION if entry.name == GENERATIONS else _SEGMENT
        return all(ours.fullmatch(inner.name) or _is_temporary(inner) for inner in entry.iterdir())
    return _is_temporary(entry)


def _clear_begun(folder: Path) -> None:
    for file in listed(folder / GENERATIONS, "*.json"):
        file.unlink()
    for segment in _ours(folder / SEGMENTS, _SEGMENT):
        shutil.rmtree(segment)
    _clear_temporaries(folder)


def clear(folder: Path, backend: Backend) -> None:
    """Delete what no state of a gallery needs: temporary files, journals of upgrades that cannot go on, and what nobody names.

    What is named is what any kept generation names, or the journal of an upgrade that can go on. Links, and whatever has not a
    name of ours, stay. The caller holds the writer's lock.

    Args:
        folder: the gallery.
        backend: where its vectors are.

    Raises:
        XcompatError: its Milvus does not answer.
        OSError: something cannot be deleted.
    """
    (folder / BEGUN).unlink(missing_ok=True)
    for journal in _ours(folder, _JOURNAL):
        if not _goes_on(folder, journal):
            journal.unlink()
    begun = {match[2] for path in _inside(folder / SEGMENTS) if (match := _OLD_TEMPORARY.fullmatch(path.name)) and match[2]}
    segments = begun | {path.name for path in _ours(folder / SEGMENTS, _SEGMENT)}
    removed = {path.name for path in _ours(folder / REMOVED, _REMOVED)}
    for name in sorted(_unnamed(folder, segments | removed)):
        if name in removed:
            (folder / REMOVED / name).unlink()
        else:
            backend.drop(name)  # while its folder still says that there may be something
            if (folder / SEGMENTS / name).is_dir():
                shutil.rmtree(folder / SEGMENTS / name)
    _clear_temporaries(folder)


def _goes_on(folder: Path, journal: Path) -> bool:
    """Return whether an upgrade can be continued: it holds for the generation it was begun in."""
    try:
        return bool(read_json(journal)["generation"] == read_manifest(folder).generation)
    except (XcompatError, KeyError, TypeError):
        return False


def _unnamed(folder: Path, names: set[str]) -> set[str]:
    """Return which names neither a generation nor a journal says; the older ones are read only while names are left."""
    generations = sorted(_ours(folder / GENERATIONS, _GENERATION), reverse=True)
    for file in (folder / CURRENT, *_ours(folder, _JOURNAL), *generations):
        if not names:
            break
        text = file.read_text(encoding="utf-8", errors="replace").rstrip()
        if not text.endswith("}"):  # cut short: nobody knows what it named
            return set()
        names = names - set(_NAMED.findall(text))
    return names


def _clear_temporaries(folder: Path) -> None:
    for place in (folder, folder / GENERATIONS, folder / SEGMENTS, folder / REMOVED):
        clear_leftovers(place)
        for path in _inside(place):
            if _OLD_TEMPORARY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


def _is_temporary(path: Path) -> bool:
    return _OLD_TEMPORARY.fullmatch(path.name.removesuffix(".partial")) is not None


def _ours(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return what has a name of ours, links left out."""
    return [path for path in _inside(folder) if name.fullmatch(path.name) and not path.is_symlink()]


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
