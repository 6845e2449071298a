"""The recipes that come with xcompat: listed, found by name, and copied to where they can be changed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from rich.table import Table

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.files import atomic_path, files_below
from xcompat.core.progress import console, literal

PLACES = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes")
"""Inside the package, where a wheel puts them, and beside it, where they are in a clone."""


def shipped_recipes() -> dict[str, Path]:
    """Return the files of all recipes by their names, such as ``clip/b32_to_l14``, sorted.

    Raises:
        XcompatError: the installation has none.
    """
    folder = next((place for place in PLACES if place.is_dir()), None)
    if folder is None:
        raise XcompatError(f"{PLACES[0]} does not exist, so this installation has no recipes; install xcompat again")
    files = sorted(file for file in files_below(folder) if file.suffix == ".yaml")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def find_recipes(name: str) -> dict[str, Path]:
    """Return the recipes that a user means.

    Args:
        name: a recipe's name, the last part of one, or a folder of several; ``recipes/`` before it and ``.yaml`` behind it are
            left out.

    Returns:
        The files by name.

    Raises:
        XcompatError: there is none, or the last part is that of several.

    Example:
        >>> list(find_recipes("recipes/clip/b32_to_l14.yaml")), list(find_recipes("b32_to_l14"))
        (['clip/b32_to_l14'], ['clip/b32_to_l14'])
    """
    known, wanted = shipped_recipes(), name.removesuffix(".yaml").removeprefix("./").removeprefix("recipes/").strip("/")
    if wanted in known:
        return {wanted: known[wanted]}
    if inside := {each: file for each, file in known.items() if each.startswith(f"{wanted}/")}:
        return inside
    ending = {each: file for each, file in known.items() if each.endswith(f"/{wanted}")}
    if len(ending) > 1:
        raise XcompatError(f"several recipes are called {wanted}: {', '.join(ending)}; name one of them")
    if not ending:
        raise XcompatError(f"no recipe that comes with xcompat is called {name!r}; {nearest(wanted, known)}")
    return ending


def suggestion(path: Path) -> str:
    """Return what to do about a recipe that is no file here: the end of a message."""
    try:
        name = next(iter(find_recipes(str(path))))
    except XcompatError:
        return "`xcompat recipes` lists those that come with xcompat"
    return f"one that comes with xcompat is copied by `xcompat recipes {name} --to recipes`"


def about(file: Path) -> str:
    """Return the first sentence of a recipe's own comment."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line.lstrip("# ").strip() for line in lines))[0].rstrip(".")


def copy_recipes(recipes: Mapping[str, Path], folder: Path) -> list[Path]:
    """Copy recipes into a folder, in which they keep their names.

    Args:
        recipes: by name, of :func:`find_recipes`.
        folder: where to; made if missing.

    Returns:
        The copies.

    Raises:
        XcompatError: one of them is there already; then none is copied, and nothing is overwritten.
    """
    copies = {folder / f"{name}.yaml": file for name, file in recipes.items()}
    if there := [copy for copy in copies if copy.exists() or copy.is_symlink()]:
        raise XcompatError(f"{there[0]} exists and is not overwritten; choose another folder with --to, or move it away")
    for copy, file in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(copy) as temporary:
            shutil.copyfile(file, temporary)
    return list(copies)


def print_recipes(name: str | None, to: Path | None) -> None:
    """Do what ``xcompat recipes`` is asked to.

    Args:
        name: of one or several; None for all.
        to: the folder to copy them into; None to list several, and to print one as it is.

    Raises:
        XcompatError: see :func:`find_recipes` and :func:`copy_recipes`.
    """
    found = shipped_recipes() if name is None else find_recipes(name)
    if to is not None:
        for copy in copy_recipes(found, to):
            console.print(literal(copy), soft_wrap=True)
    elif len(found) == 1:
        console.out(next(iter(found.values())).read_text(encoding="utf-8"), highlight=False, end="")
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        for each, file in found.items():
            table.add_row(literal(each), f"[dim]{literal(about(file))}[/]")
        console.print(table)
        console.print("[dim]Copy one: xcompat recipes NAME --to recipes[/]", soft_wrap=True)
