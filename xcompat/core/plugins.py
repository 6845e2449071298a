"""Classes from a user's Python files (``path.py:Class``, ``XCOMPAT_CODE``), and entry points of installed packages."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from xcompat.core.errors import MissingPathError, XcompatError, describe_error, nearest
from xcompat.core.paths import nearest_path

CODE = "XCOMPAT_CODE"
"""Environment variable with the user's Python files. Models and recipes cannot set it, as they may come from strangers."""
FILE_MODULES = "xcompat_files."
"""Prefix of the module names of Python files."""
_SEPARATOR = ".py:"


def is_file_class(name: str) -> bool:
    """Return whether a name means a class in a Python file.

    Example:
        >>> is_file_class("methods/line.py:LineModel"), is_file_class("xbt")
        (True, False)
    """
    return _SEPARATOR in name


def class_file(name: str) -> Path:
    """Return the Python file of ``path.py:Class``.

    Args:
        name: for which :func:`is_file_class` is true.

    Raises:
        MissingPathError: the file does not exist.
    """
    file = Path(name.rpartition(":")[0])
    if not file.is_file():
        raise MissingPathError(f"{file} does not exist; {nearest_path(file)}")
    return file


def run_code_files() -> None:
    """Run the Python files in ``XCOMPAT_CODE``, separated as in ``PATH``. They register their methods and encoders.

    Raises:
        XcompatError: a file does not exist or fails.
    """
    for file in map(Path, filter(None, os.environ.get(CODE, "").split(os.pathsep))):
        if not file.is_file():
            raise MissingPathError(f"{CODE}: {file} does not exist; {nearest_path(file)}")
        _run_file(file.resolve())


def load_class(name: str, base: type) -> type[Any]:
    """Run a Python file once per process, and return a class in it.

    Args:
        name: ``path.py:Class``.
        base: required base class.

    Raises:
        XcompatError: the file does not exist or fails, or has no such class.
    """
    class_name, module = name.rpartition(":")[2], _run_file(class_file(name).resolve())
    found = {key: value for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)}
    if class_name not in found:
        own = [key for key, value in found.items() if value.__module__ == module.__name__]
        raise XcompatError(f"{name}: the file has no {base.__name__} {class_name!r}; {nearest(class_name, own)}")
    return found[class_name]


@cache
def _run_file(file: Path) -> Any:  # noqa: ANN401 - a module
    spec = importlib.util.spec_from_file_location(f"{FILE_MODULES}{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        if isinstance(error, XcompatError):
            raise
        raise XcompatError(f"{file} fails: {describe_error(error)}; fix the file") from error
    return module


def entry_point_names(group: str) -> set[str]:
    """Return the names in an entry point group, without importing the packages."""
    return {found.name for found in entry_points(group=group)}


def import_entry_points(group: str) -> None:
    """Import the modules in an entry point group, which register their classes. A module that fails is a warning."""
    for found in entry_points(group=group):
        try:
            importlib.import_module(found.module)
        except Exception as error:  # another package's failure must not break this one
            warnings.warn(f"cannot load {found.name} ({found.value}): {describe_error(error)}", stacklevel=2)


def load_entry_point(group: str, name: str) -> Any:  # noqa: ANN401 - any object
    """Import an object from an installed package.

    Args:
        group: the entry point group.
        name: a name of :func:`entry_point_names`.

    Raises:
        XcompatError: the package fails.
    """
    found = next(iter(entry_points(group=group, name=name)))
    try:
        return found.load()
    except Exception as error:
        raise XcompatError(f"{found.value} fails: {describe_error(error)}; update or remove its package") from error
