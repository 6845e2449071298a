"""SimCLR: contrast between an image's two views, learned from images alone; the best side-information for FCT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.losses import nt_xent_loss
from xcompat.models.backbone import BackboneConfig
from xcompat.models.registry import register
from xcompat.models.unlabelled import UnlabelledModel
from xcompat.outputs import Batch, CompatOutput, Views

_SMALLEST = 0.05
"""Least share of an image's area in a small crop (Caron et al. 2020)."""


class SimClrConfig(BackboneConfig):
    """Configuration of :class:`SimClrModel`.

    Args:
        temperature: τ.
        crops: number of small crops per image, which search its two views.
        crop_size: crop side in pixels.
        crop_scale: largest share of the image's area in a crop; the smallest is 5 %.
        binarise: whether embeddings are bits: 1 for each feature above 0, else 0. The loss compares these bits.
    """

    model_type = "xcompat-simclr"

    temperature: Annotated[float, Field(gt=0)] = 0.1
    crops: int = 0
    crop_size: int = 96
    crop_scale: float = 0.4
    binarise: bool = False


@register
class SimClrModel(UnlabelledModel):
    """L = NT-Xent over the global batch, ψ(x) = BN(W_proj · backbone(x)) (Chen et al. 2020; FCT Appendix D.4.1).

    The loss compares the stored embeddings, without a projector. ``data.augmentation`` draws two views, and ``crops`` small crops
    search both (multi-crop; Caron et al. 2020). ``binarise`` stores signs and uses tanh's gradient to train them
    (straight-through; Bengio et al. 2013); the paper's compressed ψ (Appendix G) uses arXiv 2110.00552.
    """

    config_class = SimClrConfig
    columns = ("pixel_values", "second_pixel_values")
    columns_if_known = ("crop_pixel_values",)
    ends_linearly = False  # a batch norm follows
    syncs_batch_norm = True  # as in the paper: statistics of a process's own part would tell its views from others
    citation = "Chen et al., A simple framework for contrastive learning of visual representations, ICML 2020"

    def __init__(self, config: SimClrConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.norm = nn.BatchNorm1d(config.embedding_dim)  # with a slope, instead of the plain `batch_norm`
        self.post_init()
        if config.crops and config.for_training:
            self.encoder.embeds_any_size = True
            if encoder is not None:
                self._try_crop()

    @classmethod
    @override
    def _check_dims(cls, config: BackboneConfig) -> None:
        """Raise for impossible crops."""
        super()._check_dims(config)
        assert isinstance(config, SimClrConfig)
        if config.crops < 0 or config.crop_size < 1:
            raise XcompatError(
                f"options.crops is {config.crops} of {config.crop_size} pixels; set 0 or more crops of at least 1 pixel"
            )
        if not _SMALLEST <= config.crop_scale <= 1:
            raise XcompatError(f"options.crop_scale is {config.crop_scale}; use {_SMALLEST} to 1, a share of the image's area")

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        yield "batch_norm", "simclr has its own batch norm"
        if not options["crops"]:
            yield from dict.fromkeys(("crop_size", "crop_scale"), "it has no effect without options.crops").items()

    def _try_crop(self) -> None:
        """Raise before training if the encoder cannot embed images in the crops' size."""
        side = self.config.crop_size
        try:
            with torch.no_grad():
                self.eval().features(torch.zeros(1, 3, side, side, dtype=self.dtype, device=self.device))
        except (ValueError, AssertionError, RuntimeError) as error:
            raise XcompatError(
                f"options.crops: the encoder does not support images of {side} pixels ({str(error).splitlines()[0]}); "
                "set options.crop_size, or crops to 0"
            ) from None

    @property
    @override
    def views(self) -> Views:
        if not self.config.crops:
            return Views(second=True)
        return Views(True, self.config.crops, self.config.crop_size, (_SMALLEST, self.config.crop_scale))

    @override
    def required_columns(self, batch: Batch) -> list[str]:
        """Return the columns for the loss, with small crops if enabled."""
        return super().required_columns(batch) + ["crop_pixel_values"] * bool(self.config.crops)

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Embed images as :meth:`embed_images` does, and keep their features."""
        output = super().embed_batch(batch)
        if self.config.binarise:
            output["image_embeds"] = _bits(output["features"])
        return output

    @override
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed images; with ``binarise``, as bits without unit length."""
        if self.config.binarise:
            return _bits(self.features(pixel_values))
        return super().embed_images(pixel_values)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        first_BD = self._unit_vectors(output["features"])
        second_BD = self._unit_vectors(self.features(batch["second_pixel_values"]))
        crops: tuple[Tensor, ...] = ()
        if self.config.crops:
            crops_BNCSS = batch["crop_pixel_values"]
            features = self.features(crops_BNCSS.flatten(0, 1))
            crops = self._unit_vectors(features).unflatten(0, crops_BNCSS.shape[:2]).unbind(dim=1)
        return nt_xent_loss(first_BD, second_BD, self.config.temperature, crops)

    def _unit_vectors(self, features: Tensor) -> Tensor:
        """Return unit vectors for the loss: features, or their signs with tanh's gradient."""
        features = features.float()
        if self.config.binarise:
            soft = features.tanh()
            signs = torch.where(features > 0, 1.0, -1.0)
            features = signs + soft - soft.detach()
        return F.normalize(features, dim=-1)


def _bits(features: Tensor) -> Tensor:
    return (features > 0).float()
