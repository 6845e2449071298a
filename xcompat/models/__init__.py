"""The contract of all methods, and what several of them share; the methods themselves are in ``xcompat.methods``."""

from __future__ import annotations

from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig, describe_old

__all__ = ["CompatConfig", "CompatModel", "describe_old"]
