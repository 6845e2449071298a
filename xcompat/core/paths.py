"""What a user's path means: a file or folder on this machine, or a name on the Hub; and suggestions for misspelt paths."""

from __future__ import annotations

import difflib
import glob
import os
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

LISTED = 10_000
"""Entries of a folder that are searched for similar names."""
ALIKE = 0.8
"""How alike a name without an owner and one that is here are, so that the latter is meant and nothing on the Hub."""


def is_local(name: str) -> bool:
    """Return whether a name of a model or data set can only be a local path: by its form, or because its first folder exists.

    Example:
        >>> is_local("./clip"), is_local("/data/clip"), is_local("~/clip"), is_local("openai/clip-vit-base-patch32")
        (True, True, True, False)
    """
    folder, slash, rest = name.partition("/")
    return name.startswith((".", "/", "~")) or "/" in rest or Path(name).exists() or bool(slash and Path(folder).is_dir())


def is_misspelt(name: str) -> bool:
    """Return whether a name that is not here is a file's or one of here, misspelt: it has no owner, as what is on the Hub has.

    Example:
        >>> is_misspelt("asked.tx"), is_misspelt("me/asked.tx"), is_misspelt("squad")
        (True, False, False)
    """
    if "/" in name:
        return False
    return re.search(r"\.[A-Za-z]\w{0,5}$", name) is not None or bool(
        difflib.get_close_matches(name, _names(Path()), n=1, cutoff=ALIKE)
    )


def is_file(text: str) -> bool:
    """Return whether a text is the path of a file; it may be of any length, and may be no path at all.

    Example:
        >>> is_file(__file__), is_file("a red shoe " * 1000)
        (True, False)
    """
    return os.path.isfile(text)  # noqa: PTH113 - Path raises for overlong names


def model_folder(name: str | os.PathLike[str]) -> str:
    """Return where a model lies: the folder ``model`` of a run that ended with one, and any other name as it is.

    Args:
        name: of a model, its folder, or the folder of a run.

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
    """Split ``NAME@REVISION`` of a model on the Hub; the name of a local path stays as it is.

    Args:
        name: of a model; open_clip's and sentence-transformers' prefixes are part of it.

    Returns:
        The name, and the branch, tag or commit; None if it names none.

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
    """Suggest the path that was meant by one that does not exist, for the end of an error message.

    Args:
        path: a file, a folder or a glob.

    Returns:
        ``"did you mean 'photos/train'?"``, or the last folder that exists when nothing in it has a similar name.

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
        return [entry.name for entry in islice(entries, LISTED)]
    return []  # a file, or a folder that may not be read
