"""What models share that learn from images alone, without classes, captions or an old model: the makers of side-information."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from xcompat.encoders.base import Encoder
from xcompat.models.backbone import BackboneModel
from xcompat.outputs import CompatOutput


class UnlabelledModel(BackboneModel):
    """A backbone that learns from images alone; what is minimised is the subclass's :meth:`loss`."""

    columns: ClassVar[tuple[str, ...]] = ("pixel_values",)
    compares_with_old = False

    @classmethod
    def embedding_dim_for(cls, encoder: Encoder, old: dict[str, Any] | None, options: dict[str, Any]) -> int:
        """Return D: what the options say, else the backbone's width."""
        return options["dim"] if options.get("dim") is not None else encoder.embedding_dim

    def forward(
        self,
        pixel_values: Tensor | None = None,
        second_pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the method's loss.

        Args:
            pixel_values: (B, C, H, W) float32.
            second_pixel_values: another view of the same images, for methods that compare two.
            input_ids: captions that come with the images; not read.
            attention_mask: not read.
            labels: classes that come with the images; not read.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the embeddings.
        """
        given = {"pixel_values": pixel_values, "second_pixel_values": second_pixel_values}
        self._require(**{name: given[name] for name in self.columns})
        assert pixel_values is not None
        features = self.features(pixel_values).float()
        loss = self.loss(features, pixel_values, second_pixel_values) if return_loss else None
        return CompatOutput(loss=loss, image_embeds=F.normalize(features, dim=-1))

    @abstractmethod
    def loss(self, features_BD: Tensor, pixel_values: Tensor, second_pixel_values: Tensor | None) -> Tensor:
        """Return what is minimised."""
