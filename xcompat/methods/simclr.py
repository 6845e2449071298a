"""SimCLR: contrast between two views of an image, learned from images alone; the side-information that helps FCT most."""

from __future__ import annotations

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
        binarise: whether embeddings are bits: 1 for each feature above 0, else 0.
    """

    model_type = "xcompat-simclr"

    temperature: float = 0.1
    binarise: bool = False


class SimClrModel(UnlabelledModel):
    """L = NT-Xent over the global batch, ψ(x) = BN(W_proj · backbone(x)) (Chen et al. 2020; fct.txt Appendix D.4.1).

    There is no projector: the loss compares the stored embeddings themselves, the output of a last batch norm. FCT takes more
    than two crops; here ``data.augmentation`` draws two views. ``binarise`` stores signs, in place of the paper's compressed ψ
    (Appendix G), which is trained for compression.
    """

    config_class = SimClrConfig
    columns = ("pixel_values", "second_pixel_values")
    ends_linearly = False  # a batch norm follows
    citation = "Chen et al., A simple framework for contrastive learning of visual representations, ICML 2020"

    def __init__(self, config: SimClrConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.norm = nn.BatchNorm1d(config.embedding_dim)
        self.post_init()

    @override
    def features(self, pixel_values: Tensor) -> Tensor:
        return self.norm(super().features(pixel_values))

    @override
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed images; ``binarise`` gives bits, whose length is not 1."""
        if self.config.binarise:
            return (self.features(pixel_values) > 0).float()
        return super().embed_images(pixel_values)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        first_BD = F.normalize(output["features"], dim=-1)
        second_BD = F.normalize(self.features(batch["second_pixel_values"]).float(), dim=-1)
        return nt_xent_loss(first_BD, second_BD, self.config.temperature)
