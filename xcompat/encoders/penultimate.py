"""Penultimate features: inputs to an image tower's last linear layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import EmbedsBatches

TEXTS_UNSUPPORTED = "penultimate features do not support texts; set options.input to embedding"


class Penultimate(nn.Module, EmbedsBatches):
    """Frozen model that returns the input of its last linear layer instead of embeddings.

    Args:
        model: image model with an ``image_head``.
        name: model name for errors.

    Raises:
        XcompatError: the last layer is not linear.

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
                f"{name} has no penultimate features, because its last layer is not linear; set options.input to embedding"
            )
        self.model: Any = model

    @property
    def head(self) -> nn.Linear:
        """Return the linear layer from features to embeddings before normalisation."""
        return self.model.image_head

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Return preprocessed images' penultimate features.

        Args:
            pixel_values: (B, C, H, W), the model's input.

        Returns:
            (B, P) float32, not normalised.
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
        """Raise, because penultimate features do not support texts."""
        raise XcompatError(TEXTS_UNSUPPORTED)
