"""Autoencoder: an embedding from which a decoder reconstructs the image, as side-information for FCT."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.encoders.base import Encoder
from xcompat.models.backbone import BackboneConfig
from xcompat.models.registry import register
from xcompat.models.unlabelled import UnlabelledModel
from xcompat.outputs import Batch, CompatOutput

SIDE = 32
"""Height and width of the reconstruction, in pixels."""


class AutoencoderConfig(BackboneConfig):
    """Configuration of :class:`AutoencoderModel`."""

    model_type = "xcompat-autoencoder"


@register
class AutoencoderModel(UnlabelledModel):
    """L = mean ‖decode(ψ(x)) − x‖², ψ(x) = W_proj · backbone(x) (FCT §5.1, Appendix D.4.2).

    The target is the preprocessed image, averaged down to 32 × 32 pixels. The paper reconstructs the whole image with a
    MobileNetV2-like decoder. Inference does not use the decoder.
    """

    config_class = AutoencoderConfig
    only_for_training = ("decoder",)
    citation = "Ramanujan et al., Forward compatible training for large-scale embedding retrieval systems, CVPR 2022, §5.1"

    def __init__(self, config: AutoencoderConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        if config.for_training:
            self.decoder = _decoder(config.embedding_dim)
        self.post_init()

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return F.mse_loss(self.decoder(output["features"]), F.adaptive_avg_pool2d(batch["pixel_values"], SIDE))


def _decoder(dim: int) -> nn.Sequential:
    """Return layers from (B, D) to (B, 3, 32, 32): 4 pixels a side, doubled three times."""
    layers: list[nn.Module] = [nn.Linear(dim, 128 * 4 * 4), nn.Unflatten(1, (128, 4, 4))]
    for width, narrower in ((128, 64), (64, 32), (32, 16)):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, narrower, kernel_size=4, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(16, 3, kernel_size=3, padding=1))
