"""From a recipe, or a data set at hand, to a trained, evaluated and reported model; the only code that knows the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xcompat.training.notebook import CompatTrainer

__all__ = ["CompatTrainer"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class, which loads torch and transformers when it is first used
    if name == "CompatTrainer":
        from xcompat.training.notebook import CompatTrainer

        return CompatTrainer
    raise AttributeError(f"module 'xcompat.training' has no attribute {name!r}")
