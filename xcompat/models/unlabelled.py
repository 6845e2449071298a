"""Base class for models that learn from images only, for side-information."""

from __future__ import annotations

from typing import Any, ClassVar

from xcompat.encoders.base import Encoder
from xcompat.models.backbone import BackboneModel


class UnlabelledModel(BackboneModel):
    """Backbone that learns from images only."""

    columns: ClassVar[tuple[str, ...]] = ("pixel_values",)
    compares_with_old = False
    compares_by_l2 = True

    @classmethod
    def embedding_dim_for(cls, encoder: Encoder, old: dict[str, object] | None, options: dict[str, Any]) -> int:
        """Return ``dim``, or the backbone's width."""
        return options["dim"] if options.get("dim") is not None else encoder.embedding_dim
