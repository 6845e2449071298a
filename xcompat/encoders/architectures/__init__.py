"""Architectures that transformers lacks, a file per architecture, and those of installed packages."""

from __future__ import annotations

import importlib
import pkgutil

from xcompat.core.plugins import import_entry_points

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
import_entry_points("xcompat.encoders")
