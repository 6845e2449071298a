"""AlexNet (Krizhevsky, arXiv 1404.5997), the first model in BT²'s series of updates."""

# no `from __future__ import annotations`: `strict` reads the types of the fields

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

SMALLEST = 63
"""Minimum image side in pixels, given a convolution of stride 4 and three poolings."""


@strict
class AlexNetConfig(PreTrainedConfig):
    """Configuration of :class:`AlexNetModel`.

    Args:
        image_size: image side in pixels, at least 63.
    """

    model_type = "alexnet"

    image_size: int = 224


class AlexNetModel(PreTrainedModel):
    """torchvision's AlexNet without classifier, with random weights.

    ``pooler_output`` has 4,096 values. For BT²'s linear layer with 128 outputs, use ``options: {dim: 128}`` in a recipe.

    Args:
        config: the configuration.

    Raises:
        ValueError: the images are too small.

    Example:
        >>> import torch
        >>> model = AlexNetModel(AlexNetConfig(image_size=64)).eval()
        >>> model(torch.zeros(2, 3, 64, 64)).pooler_output.shape
        torch.Size([2, 4096])
    """

    config_class = AlexNetConfig
    config: AlexNetConfig
    base_model_prefix = "alexnet"
    main_input_name = "pixel_values"

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__(config)
        from torchvision.models import alexnet  # a slow import

        if config.image_size < SMALLEST:
            raise ValueError(f"image_size is {config.image_size}, too small for AlexNet; use {SMALLEST} or more")
        self.layers = alexnet()
        self.layers.classifier[-1] = nn.Identity()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep torchvision's weights."""

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutputWithPoolingAndNoAttention:
        """Return ``pooler_output`` (B, 4096)."""
        return BaseModelOutputWithPoolingAndNoAttention(pooler_output=self.layers(pixel_values))


AutoConfig.register(AlexNetConfig.model_type, AlexNetConfig, exist_ok=True)
AutoModel.register(AlexNetConfig, AlexNetModel, exist_ok=True)
