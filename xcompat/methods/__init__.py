"""Methods, a file per method: the file's name is the method's, and ``@register`` adds its model."""

from __future__ import annotations

import importlib
import pkgutil

from xcompat.core.plugins import import_entry_points, run_code_files
from xcompat.encoders import architectures  # noqa: F401 - register themselves with AutoModel, as methods do
from xcompat.models.registry import METHODS


def _classes() -> dict[str, type]:
    return {each.__name__: each for model in METHODS.values() for each in (model.config_class, model)}


def __getattr__(name: str) -> object:
    if name == "__all__":
        return ["METHODS", *sorted(_classes())]
    if name in (known := _classes()):
        return known[name]
    raise AttributeError(f"module 'xcompat.methods' has no attribute {name!r}")


for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
import_entry_points("xcompat.methods")
run_code_files()
