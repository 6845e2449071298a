"""iResNet, InsightFace's backbone for face recognition (Duta et al., arXiv 2004.04989)."""

# no `from __future__ import annotations`: `strict` reads the types of the fields

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention


@strict
class IResNetConfig(PreTrainedConfig):
    """Configuration of :class:`IResNetModel`; the defaults are iResNet-50 on aligned faces.

    Args:
        depths: blocks per stage: [2, 2, 2, 2] for iResNet-18, [3, 4, 6, 3] for 34, [3, 4, 14, 3] for 50, [3, 13, 30, 3] for 100.
        hidden_sizes: channels per stage.
        image_size: image side in pixels, which determines the feature width.
    """

    model_type = "iresnet"

    depths: list[int] | tuple[int, ...] = (3, 4, 14, 3)
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    image_size: int = 112


class _Block(nn.Module):
    """y = BN(conv(PReLU(BN(conv(BN(x)))))) + shortcut(x), without activation after the sum."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.BatchNorm2d(inside),
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.PReLU(outside),
            nn.Conv2d(outside, outside, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.shortcut(x)


class IResNetModel(PreTrainedModel):
    """ResNet with batch norms around each block, PReLU, a stem without stride, and no pooling.

    ``pooler_output`` contains all values in the last stage (7·7·512 for 112 pixels). For a face model's fully connected layer and
    batch norm, use ``options: {dim: 512, batch_norm: true}`` in a recipe.

    Args:
        config: the configuration.

    Raises:
        ValueError: the lists have different lengths, or a number is below 1.

    Example:
        >>> model = IResNetModel(IResNetConfig(depths=[1, 1], hidden_sizes=[4, 8], image_size=16))
        >>> model(torch.zeros(2, 3, 16, 16)).pooler_output.shape
        torch.Size([2, 128])
    """

    config_class = IResNetConfig
    config: IResNetConfig
    base_model_prefix = "iresnet"
    main_input_name = "pixel_values"

    def __init__(self, config: IResNetConfig) -> None:
        super().__init__(config)
        if len(config.depths) != len(config.hidden_sizes) or not config.depths:
            counts = f"depths has {len(config.depths)} stages and hidden_sizes {len(config.hidden_sizes)}"
            raise ValueError(f"{counts}; use the same number")
        if min(*config.depths, *config.hidden_sizes) < 1:
            raise ValueError("depths and hidden_sizes must be at least 1")
        inside = config.hidden_sizes[0]
        self.stem = nn.Sequential(nn.Conv2d(3, inside, 3, padding=1, bias=False), nn.BatchNorm2d(inside), nn.PReLU(inside))
        stages = []
        for outside, depth in zip(config.hidden_sizes, config.depths, strict=True):
            stages.append(nn.Sequential(_Block(inside, outside, 2), *(_Block(outside, outside, 1) for _ in range(depth - 1))))
            inside = outside
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(inside)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw convolutions from N(0, 0.1²), as in InsightFace."""
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):
            initialization.normal_(module.weight, 0, 0.1)
        elif isinstance(module, nn.PReLU):
            initialization.constant_(module.weight, 0.25)

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutputWithPoolingAndNoAttention:
        """Return ``last_hidden_state``, the feature map (B, C, H, W), and ``pooler_output``, its values (B, C·H·W)."""
        last = self.norm(self.stages(self.stem(pixel_values)))
        return BaseModelOutputWithPoolingAndNoAttention(last_hidden_state=last, pooler_output=last.flatten(1))


AutoConfig.register(IResNetConfig.model_type, IResNetConfig, exist_ok=True)
AutoModel.register(IResNetConfig, IResNetModel, exist_ok=True)
