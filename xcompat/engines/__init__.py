"""Models as functions over Arrow tables, and engines to run them on many workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.engines.tables import TableModel

__all__ = ["TableModel"]

__getattr__ = import_on_use(__name__, {"tables": ["TableModel"]})
