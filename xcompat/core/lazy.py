"""Public names of packages whose modules load on first use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def import_on_use(package: str, places: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports a public name's module, and e.g. torch, on first use.

    Args:
        package: name of the package.
        places: module of the package -> its public names.
    """
    modules = {name: module for module, names in places.items() for name in names}

    def find(name: str) -> Any:  # noqa: ANN401 - a class or function
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find
