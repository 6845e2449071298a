"""Training, evaluation and reports of compatible models; the only subpackage that uses the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.core.lazy import import_on_use

if TYPE_CHECKING:
    from xcompat.training.notebook import CompatTrainer

__all__ = ["CompatTrainer"]

__getattr__ = import_on_use(__name__, {"notebook": ["CompatTrainer"]})
