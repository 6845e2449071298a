"""Many processes and machines: a model as a function of Arrow tables, and engines that spread tables over workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcompat.engines.tables import TableModel

__all__ = ["TableModel"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class, which loads torch when it is first used
    if name == "TableModel":
        from xcompat.engines.tables import TableModel

        return TableModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
