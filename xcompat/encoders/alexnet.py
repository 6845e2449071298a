"""AlexNet, which BT²'s series of updates begins with (Krizhevsky, arXiv 1404.5997): torchvision alone has it."""

# annotations are no strings here: `strict` reads the types of the fields
from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

SMALLEST = 63
"""Pixels of the smallest side that a convolution of stride 4 and three poolings leave something of."""


@strict
class AlexNetConfig(PreTrainedConfig):
    """Configuration of :class:`AlexNetModel`.

    Args:
        image_size: side of the images in pixels, 63 or more.
    """

    model_type = "alexnet"

    image_size: int = 224


class AlexNetModel(PreTrainedModel):
    """torchvision's AlexNet without its classifier, with the random weights that torchvision draws.

    ``pooler_output`` is what the classifier would read, 4,096 values. A linear layer of 128 behind it, as in BT², is
    ``options: {dim: 128}`` of a recipe.

    Args:
        config: the configuration.

    Raises:
        ValueError: the images are too small for its three poolings.

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
        from torchvision.models import alexnet  # late: it imports every architecture

        if config.image_size < SMALLEST:
            raise ValueError(f"image_size is {config.image_size}, which its poolings leave nothing of; give {SMALLEST} or more")
        self.layers = alexnet()
        self.layers.classifier[-1] = nn.Identity()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the weights that torchvision drew."""

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPoolingAndNoAttention:  # noqa: ANN401 - transformers'
        """Return ``pooler_output`` (B, 4096)."""
        return BaseModelOutputWithPoolingAndNoAttention(pooler_output=self.layers(pixel_values))


AutoConfig.register(AlexNetConfig.model_type, AlexNetConfig, exist_ok=True)
AutoModel.register(AlexNetConfig, AlexNetModel, exist_ok=True)
