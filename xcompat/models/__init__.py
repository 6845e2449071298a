"""Base class for compatible models. The methods are in ``xcompat.methods``."""

from __future__ import annotations

from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig, describe_old
from xcompat.models.registry import register

__all__ = ["CompatConfig", "CompatModel", "describe_old", "register"]
