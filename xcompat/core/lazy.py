"""Public names of packages, and large libraries, that load on first use."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["datasets", "dist", "faiss", "import_on_use", "without_collection"]


def import_on_use(package: str, places: Mapping[str, Collection[str]]) -> Callable[[str], object]:
    """Return a package's ``__getattr__``, which imports a public name's module, and e.g. torch, on first use.

    Args:
        package: name of the package.
        places: module of the package -> its public names.
    """
    modules = {name: module for module, names in places.items() for name in names}

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find


@contextmanager
def without_collection() -> Iterator[None]:
    """Import PyTorch without garbage collection, for the command line.

    The imports create half a million objects that stay, and each collection would check all of them. Later collections skip them
    too. Does nothing if PyTorch is loaded already.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # nanobind reports leaks of modules that are not collected at exit
        gc.enable()


class _LazyModule(ModuleType):
    """A module that is imported when an attribute is read."""

    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import datasets
    import faiss
    import torch.distributed as dist
else:
    datasets, dist, faiss = (_LazyModule(name) for name in ("datasets", "torch.distributed", "faiss"))
