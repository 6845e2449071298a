"""Training, evaluation and reports of compatible models; the only subpackage that uses the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcompat.training.notebook import CompatTrainer

__all__ = ["CompatTrainer"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class; loads torch and transformers on first use
    if name == "CompatTrainer":
        from xcompat.training.notebook import CompatTrainer

        return CompatTrainer
    raise AttributeError(f"module 'xcompat.training' has no attribute {name!r}")
