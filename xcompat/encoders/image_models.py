"""transformers' image models with a small stem or with timm's initial weights."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, ResNetConfig, ResNetModel, TimmWrapperConfig, TimmWrapperModel

from xcompat.core.errors import XcompatError


class TimmModel(TimmWrapperModel):
    """Timm model with timm's initial weights. The transformers wrapper would draw every layer from N(0, 0.02²)."""

    def post_init(self) -> None:
        """Finish construction. Transformers' initialisation runs only on the meta device, where it restores unsaved buffers."""
        if not any(parameter.is_meta for parameter in self.timm_model.parameters()):
            for module in self.timm_model.modules():
                module._is_hf_initialized = True
        super().post_init()


class SmallStemTimm(TimmModel):
    """Timm ResNet with the small stem."""

    def __init__(self, config: TimmWrapperConfig) -> None:
        super().__init__(config)
        resnet = self.timm_model
        stem = getattr(resnet, "conv1", None)
        if not isinstance(stem, nn.Conv2d) or not hasattr(resnet, "maxpool"):
            raise XcompatError(f"stem: small needs a ResNet with a single stem convolution, not timm's {config.architecture}")
        resnet.conv1 = _small(stem)
        resnet.maxpool = nn.Identity()


class SmallStemResNet(ResNetModel):
    """Transformers ResNet with the small stem."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        self.embedder.embedder.convolution = _small(self.embedder.embedder.convolution)
        self.embedder.pooler = nn.Identity()  # type: ignore[assignment]


def small_stem_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the model class for ``stem: small``; its models save ``stem`` in ``config.json``.

    The stem is a 3x3 convolution with stride 1 without pooling, as in ResNets for CIFAR (He et al. 2016, §4.2). ImageNet's stem
    would reduce 32x32 pixels to 8x8. The two stems' weights are not interchangeable.

    Raises:
        XcompatError: the architecture has no such stem.
    """
    classes: dict[str, type[PreTrainedModel]] = {"resnet": SmallStemResNet, "timm_wrapper": SmallStemTimm}
    if config.model_type not in classes:
        raise XcompatError(f"stem: small needs a ResNet (model_type resnet, or a ResNet of timm), not {config.model_type}")
    return classes[config.model_type]


def _small(stem: nn.Conv2d) -> nn.Conv2d:
    convolution = nn.Conv2d(stem.in_channels, stem.out_channels, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")  # as both libraries draw the stem
    return convolution
