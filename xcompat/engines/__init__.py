"""Models as functions over Arrow tables, and engines to run them on many workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcompat.engines.tables import TableModel

__all__ = ["TableModel"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the class loads torch on first use
    if name == "TableModel":
        from xcompat.engines.tables import TableModel

        return TableModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
