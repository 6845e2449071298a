"""SimCLR: two views of an image find each other among all others; images alone, the side-information that helps FCT most."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.encoders.base import Encoder
from xcompat.losses import nt_xent_loss
from xcompat.models.backbone import BackboneConfig
from xcompat.models.unlabelled import UnlabelledModel
from xcompat.outputs import Batch, CompatOutput


class SimClrConfig(BackboneConfig):
    """Configuration of :class:`SimClrModel`.

    Args:
        temperature: τ.
        binarise: whether a finished model's embeddings are the bits {0, 1} of what lies above 0.
    """

    model_type = "xcompat-simclr"

    temperature: float = 0.1
    binarise: bool = False


class SimClrModel(UnlabelledModel):
    """L = NT-Xent over the global batch, ψ(x) = BN(W_proj · backbone(x)) (Chen et al. 2020; fct.txt Appendix D.4.1).

    There is no projector: what is compared is what is stored, behind a last batch norm. FCT takes more than two crops; here
    views are as ``data.augmentation`` draws them. ``binarise`` stores the signs: a stand-in for the paper's compressed ψ
    (Appendix G), which is trained for it.

    Args:
        config: the configuration.
        encoder: an encoder already loaded; built without weights from the configuration if None.
    """

    config_class = SimClrConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "second_pixel_values")
    citation = "Chen et al., A simple framework for contrastive learning of visual representations, ICML 2020"

    def __init__(self, config: SimClrConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.norm = nn.BatchNorm1d(config.embedding_dim)
        self.post_init()

    @property
    def image_head(self) -> nn.Linear | None:
        """Return None: a batch norm follows the last linear layer."""
        return None

    @property
    @override
    def embed_layers(self) -> None:
        """Return None: a batch norm follows the last linear layer."""

    @override
    def features(self, pixel_values: Tensor) -> Tensor:
        return self.norm(super().features(pixel_values))

    @override
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed images; with ``binarise`` as bits, which are not of length 1."""
        if self.config.binarise:
            return (self.features(pixel_values) > 0).float()
        return super().embed_images(pixel_values)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return NT-Xent between both views."""
        second_BD = F.normalize(self.features(batch["second_pixel_values"]).float(), dim=-1)
        return nt_xent_loss(output["image_embeds"], second_BD, self.config.temperature)
