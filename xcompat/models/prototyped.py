"""Base class for methods with frozen old classifier weights: class prototypes or the old model's classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.losses.classification import cross_entropy_to
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge, OldWeights, Rows


class PrototypedConfig(ClassifiedConfig):
    """Configuration of :class:`PrototypedModel`.

    Args:
        compat_weight: λ, weight of the loss against the old weights.
        old_weights: each class's frozen row: ``prototypes`` (mean old embedding in the new training set), ``classifier`` (row in
            the old classifier), or ``both`` (classifier row; for classes without a row, the prototype scaled to the rows' mean
            length). The loss skips samples if their class has no row.
        old_scale: factor on cosines between features and old weights; None for dot products, which depend on lengths (unit
            embeddings' prototypes are shorter than 1). Ignored with ``metric: l2``.
    """

    compat_weight: Annotated[float, Field(ge=0)] = 1.0
    old_weights: OldWeights = "prototypes"
    old_scale: Annotated[float, Field(gt=0)] | None = 16.0


class PrototypedModel(ClassifiedModel):
    """Classified model with a frozen row per old-model class."""

    config_class = PrototypedConfig
    made_by_prepare = ("old_weights_Cd",)
    old_weights_Cd: Tensor | None

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if options["metric"] == "l2":
            yield "old_scale", "metric: l2 compares dot products, not cosines"

    @property
    def old_scale(self) -> float | None:
        """Return the factor on cosines with old weights; None for dot products."""
        return None if self.metric == "l2" else self.config.old_scale

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        weights_Cd = old.weights(self.config.old_weights)
        if not weights_Cd.isfinite().any():
            raise XcompatError("the old model knows no class of the training set; choose the right old model")
        self.old_weights_Cd = weights_Cd.to(self.device)

    def old_classification_loss(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return CE(W_old, f[:d])."""
        return cross_entropy_to(self._old_weights(), self.old_features(features_BD), labels_B, self.old_scale)

    def _old_weights(self) -> Tensor:
        if self.old_weights_Cd is None:
            name = type(self).__name__
            raise XcompatError(f"{name} has no old weights yet; call prepare(OldKnowledge(...)) first")
        return self.old_weights_Cd
