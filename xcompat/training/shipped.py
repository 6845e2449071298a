"""Shipped recipes: list, find, copy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, files_below
from xcompat.core.progress import Table, console, literal

PLACES = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes")
"""Recipe folders in a wheel and in a clone."""


def shipped_recipes() -> dict[str, Path]:
    """Return name -> file of all shipped recipes, sorted, e.g. ``clip/b32_to_l14``.

    Raises:
        XcompatError: the installation has none.
    """
    folder = next((place for place in PLACES if place.is_dir()), None)
    if folder is None:
        raise XcompatError(f"{PLACES[0]} does not exist, so this installation has no recipes; reinstall xcompat")
    files = sorted(file for file in files_below(folder) if file.suffix == ".yaml")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def find_recipes(name: str) -> dict[str, Path]:
    """Return shipped recipes by name.

    Args:
        name: name, last part or folder; ``recipes/`` and ``.yaml`` are optional.

    Returns:
        Name -> file.

    Raises:
        XcompatError: no recipe, or several last parts, match.

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
        raise XcompatError(f"several recipes are named {wanted}: {', '.join(ending)}; choose one")
    if not ending:
        close = get_close_matches(wanted, known, n=1)
        fix = f"did you mean {close[0]!r}?" if close else "list them with `xcompat recipes`"
        raise XcompatError(f"xcompat has no recipe {name!r}; {fix}")
    return ending


def suggestion(path: Path) -> str:
    """Return the fix for a missing recipe, to end a message."""
    try:
        name = next(iter(find_recipes(str(path))))
    except XcompatError:
        return "list xcompat's recipes with `xcompat recipes`"
    return f"copy xcompat's recipe with `xcompat recipes {name} --to recipes`"


def first_sentence(file: Path) -> str:
    """Return the first sentence of a recipe's header, without commands, which are indented."""
    lines = takewhile(re.compile(r"#( ?\S|$)").match, file.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<=\.)\s+(?!\d)", " ".join(line.lstrip("# ").strip() for line in lines))[0].rstrip(".:")


def copy_recipes(recipes: Mapping[str, Path], folder: Path) -> list[Path]:
    """Copy recipes into a folder.

    Args:
        recipes: from :func:`find_recipes`.
        folder: target, created if missing.

    Returns:
        The copies.

    Raises:
        XcompatError: a target exists; nothing is copied.
    """
    copies = {folder / f"{name}.yaml": file for name, file in recipes.items()}
    if there := [copy for copy in copies if copy.exists() or copy.is_symlink()]:
        raise XcompatError(f"{there[0]} already exists; choose another folder with --to, or move it")
    for copy, file in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(copy) as temporary:
            shutil.copyfile(file, temporary)
    return list(copies)


def print_recipes(name: str | None, to: Path | None) -> None:
    """Run ``xcompat recipes``.

    Args:
        name: of recipes; None for all.
        to: folder for copies; None to list them, or print a single recipe.

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
        if console.is_terminal:
            table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
            table.add_column(no_wrap=True)
            for each, file in found.items():
                table.add_row(literal(each), f"[dim]{literal(first_sentence(file))}[/]")
            console.print(table)
        else:  # a table would pad each line
            width = max(map(len, found))
            console.out("\n".join(f"{each:<{width}}  {first_sentence(file)}" for each, file in found.items()), highlight=False)
        console.print(
            "[dim]Copy one: xcompat recipes NAME --to recipes. Run it: xcompat train recipes/NAME.yaml[/]", soft_wrap=True
        )
