"""Many processes and machines: a model as a function of Arrow tables, and engines that spread tables over workers."""

from xcompat.engines.tables import TableModel

__all__ = ["TableModel"]
