"""Penultimate features: the input of the last linear layer of an image tower, whose output is the embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import EmbedsBatches

IMAGES_ALONE = "penultimate features are of images alone, and there are texts to embed; set options.input to embedding"


class Penultimate(nn.Module, EmbedsBatches):
    """A frozen model that returns the input of its last linear layer instead of embeddings.

    Args:
        model: embeds images, and has that layer as ``image_head``.
        name: the model's name, for errors.

    Raises:
        XcompatError: its embedding is not the output of a linear layer.

    Example:
        >>> import torch
        >>> from xcompat.encoders.standins import stand_in
        >>> encoder, processor = stand_in("clip", dim=8)
        >>> penultimate = Penultimate(encoder, "clip")
        >>> penultimate.embed_images(torch.zeros(2, 3, 32, 32)).shape, penultimate.head.out_features
        (torch.Size([2, 32]), 8)
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        if getattr(model, "image_head", None) is None:
            raise XcompatError(
                f"{name} has no penultimate features: its image embedding does not come out of a linear layer; "
                "set options.input to embedding"
            )
        self.model: Any = model

    @property
    def head(self) -> nn.Linear:
        """Return the layer that maps the features to embeddings before normalisation."""
        return self.model.image_head

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Return the penultimate features of preprocessed images.

        Args:
            pixel_values: (B, C, H, W) as the model takes them.

        Returns:
            (B, P) float32, of any length.
        """
        read: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        try:
            self.model.embed_images(pixel_values)
        finally:
            hook.remove()
        (features_BP,) = read
        return features_BP.float()

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Refuse texts, which do not pass that layer."""
        raise XcompatError(IMAGES_ALONE)
