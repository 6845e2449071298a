"""Kinds of user paths: local files, folders and Hub names. Also suggestions for misspelt paths."""

from __future__ import annotations

import difflib
import glob
import os
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

RUNS = "runs"
"""Default folder of runs and reports, which nobody looks for on the Hub."""
MAX_ENTRIES = 10_000
"""Maximum folder entries to search for similar names."""
MIN_SIMILARITY = 0.8
"""Minimum similarity at which a name without an owner counts as a misspelt local name."""


def is_local(name: str) -> bool:
    """Return whether a model or data set name can only be a local path, by its form or because its first folder exists.

    Names below :data:`RUNS` are always local.

    Example:
        >>> is_local("./clip"), is_local("/data/clip"), is_local("runs/clip"), is_local("openai/clip-vit-base-patch32")
        (True, True, True, False)
    """
    folder, slash, rest = name.partition("/")
    is_path = name.startswith((".", "/", "~")) or "/" in rest
    return is_path or Path(name).exists() or bool(slash and (folder == RUNS or Path(folder).is_dir()))


def is_misspelt(name: str) -> bool:
    """Return whether a missing name looks like a misspelt local file. Hub names with an owner never do.

    Example:
        >>> is_misspelt("asked.tx"), is_misspelt("me/asked.tx"), is_misspelt("squad")
        (True, False, False)
    """
    if "/" in name:
        return False
    return re.search(r"\.[A-Za-z]\w{0,5}$", name) is not None or bool(
        difflib.get_close_matches(name, _names(Path()), n=1, cutoff=MIN_SIMILARITY)
    )


def is_file(text: str) -> bool:
    """Return whether a text is a file path. Any text works, also very long texts.

    Example:
        >>> is_file(__file__), is_file("a red shoe " * 1000)
        (True, False)
    """
    return os.path.isfile(text)  # noqa: PTH113 - Path raises for overlong names


def model_folder(name: str | os.PathLike[str]) -> str:
    """Return the ``model`` folder of a finished run, or the name unchanged.

    Args:
        name: model name, model folder, or run folder.

    Example:
        >>> import tempfile
        >>> run = Path(tempfile.mkdtemp())
        >>> (run / "model").mkdir()
        >>> (run / "model" / "config.json").touch()
        >>> model_folder(run) == str(run / "model"), model_folder("me/model")
        (True, 'me/model')
    """
    ended = Path(name) / "model"
    return str(ended) if (ended / "config.json").exists() and not (Path(name) / "config.json").exists() else os.fspath(name)


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``NAME@REVISION`` of a model on the Hub. Local paths stay as they are.

    Args:
        name: model name, optionally with open_clip's or sentence-transformers' prefix.

    Returns:
        The name, and the branch, tag, commit or None.

    Example:
        >>> split_revision("openai/clip-vit-base-patch32@3d74acf"), split_revision("gpt2"), split_revision("./me@home")
        (('openai/clip-vit-base-patch32', '3d74acf'), ('gpt2', None), ('./me@home', None))
    """
    place, at, revision = name.rpartition("@")
    plain = name.removeprefix("hf-hub:").removeprefix("sentence-transformers:")
    if not at or not place or not revision or is_local(plain):
        return name, None
    return place, revision


def nearest_path(path: str | Path) -> str:
    """Suggest an existing path in place of a missing path, for the end of an error message.

    Args:
        path: a file, a folder or a glob.

    Returns:
        ``"did you mean 'photos/train'?"``, or the last existing folder if it has no similar name.

    Example:
        >>> import tempfile
        >>> here = Path(tempfile.mkdtemp())
        >>> (here / "train").mkdir()
        >>> nearest_path(here / "trian" / "*.tar").replace(str(here), "photos")
        "did you mean 'photos/train/*.tar'?"
    """
    path = Path(path).expanduser()
    last = next(parent for parent in path.parents if parent.exists())
    wrong, *rest = path.parts[len(last.parts) :]
    close = [] if glob.has_magic(wrong) else difflib.get_close_matches(wrong, _names(last), n=1, cutoff=0.6)
    if close:
        return f"did you mean {str(last.joinpath(close[0], *rest))!r}?"
    return f"there is no {wrong} in {last.resolve()}"


def _names(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry.name for entry in islice(entries, MAX_ENTRIES)]
    return []  # a file, or a folder that may not be read
