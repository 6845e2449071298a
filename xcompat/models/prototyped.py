"""The base of methods that classify new features by the old model's frozen weights: class prototypes or its classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

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
        compat_weight: λ, the weight of the loss against the old weights.
        old_weights: the frozen row of each class: ``prototypes``, its mean old embedding in the new training set;
            ``classifier``, its row in the old model's classifier; or ``both``, that row, and for classes that the old model never
            learned their prototype, brought to the rows' mean length. Samples of classes without a row do not enter that loss.
        old_scale: factor on cosines between features and old weights; None for plain dot products, which also depend on both
            lengths: prototypes of unit embeddings are shorter than 1. With ``metric: l2`` they are always dot products.
    """

    compat_weight: Annotated[float, Field(ge=0)] = 1.0
    old_weights: OldWeights = "prototypes"
    old_scale: Annotated[float, Field(gt=0)] | None = 16.0


class PrototypedModel(ClassifiedModel):
    """A classified model that holds a frozen row for each class that the old model knows."""

    config_class = PrototypedConfig
    made_by_prepare = ("old_weights_Cd",)
    old_weights_Cd: Tensor | None

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, Any], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if options["metric"] == "l2":
            yield "old_scale", "cosines, whose factor it is, do not see the lengths that metric: l2 compares"

    @property
    def old_scale(self) -> float | None:
        """Return the factor on cosines with old weights; None for dot products, which see lengths as L2 distances do."""
        return None if self.metric == "l2" else self.config.old_scale

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Keep the frozen rows."""
        weights_Cd = old.weights(self.config.old_weights)
        if not weights_Cd.isfinite().any():
            raise XcompatError("no class of the training set is known to the old model; is it the right one?")
        self.old_weights_Cd = weights_Cd.to(self.device)

    def old_classification_loss(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return CE(W_old, f[:d])."""
        return cross_entropy_to(self._old_weights(), self.old_features(features_BD), labels_B, self.old_scale)

    def _old_weights(self) -> Tensor:
        if self.old_weights_Cd is None:
            name = type(self).__name__
            raise XcompatError(f"{name} has not been told what the old model knows; call prepare(OldKnowledge(...)) first")
        return self.old_weights_Cd
