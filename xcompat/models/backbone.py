"""Base class for models that train an image backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig, Metric
from xcompat.outputs import Batch, CompatOutput


class BackboneConfig(CompatConfig):
    """Configuration of :class:`BackboneModel`.

    Args:
        dim: embedding dimension without extra dimensions; None for the old model's, or without an old model the backbone's.
        batch_norm: whether a batch norm without slope follows the projection, as in face recognition: each feature has mean 0 and
            variance 1 over the training set. Not for BT² and SimCLR.
        metric: ``cosine`` for unit embeddings, or ``l2`` for distances between unnormalised embeddings (independent, BCT, SimCLR
            and autoencoder only). It also applies to FCT maps, galleries and evaluations.
        for_training: whether the model has training-only parts; False in a finished model.
    """

    dim: int | None = None
    batch_norm: bool = False
    metric: Metric = "cosine"
    for_training: bool = True


class BackboneModel(CompatModel):
    """features = W_proj · backbone(x) (B, D); subclasses implement :meth:`loss`.

    Args:
        config: the configuration.
        encoder: loaded encoder; by default built from the configuration, without weights.
    """

    config_class = BackboneConfig
    encoder: Encoder
    only_for_training: ClassVar[tuple[str, ...]] = ()
    """Modules and buffers that :meth:`for_inference` removes."""
    made_by_prepare: ClassVar[tuple[str, ...]] = ()
    """Buffers that :meth:`prepare` fills; initially None, not saved."""
    ends_linearly: ClassVar[bool] = True
    """Whether the features are the output of a linear layer."""

    def __init__(self, config: BackboneConfig, encoder: Encoder | None = None) -> None:
        self._check_dims(config)
        super().__init__(config, encoder)
        for name in self.made_by_prepare:
            self.register_buffer(name, None, persistent=False)
        width = self.encoder.embedding_dim
        projected = config.dim is not None or config.embedding_dim != width
        self.neck = nn.Linear(width, config.embedding_dim) if projected else nn.Identity()
        self.norm = _without_slope(config.embedding_dim) if config.batch_norm else nn.Identity()

    @classmethod
    def _check_dims(cls, config: BackboneConfig) -> None:
        """Raise if dimensions are impossible, before anything is built."""
        if config.dim is not None and config.dim < 1:
            raise XcompatError(f"options.dim is {config.dim}; set 1 or more")

    @classmethod
    @override
    def trains_encoder(cls, options: Mapping[str, Any]) -> bool:
        """Return whether there are no adapters to train instead."""
        adapters = options.get("adapters") or {}
        return not (adapters.get("lora") or adapters.get("prompts"))

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if not cls.compares_by_l2:
            yield "metric", f"{cls.__name__} gives unit vectors for cosine similarity"

    @property
    def image_head(self) -> nn.Linear | None:
        """Return the linear layer with the features as output, or None."""
        if not self.ends_linearly or self.config.batch_norm:
            return None
        return self.neck if isinstance(self.neck, nn.Linear) else self.encoder.image_head

    def features(self, pixel_values: Tensor) -> Tensor:
        """Return embeddings before normalisation.

        Args:
            pixel_values: (B, C, H, W) float32.

        Returns:
            (B, D).
        """
        return self.norm(self.neck(self.encoder.image_features(pixel_values)))

    @override
    def embed_batch(self, batch: Batch) -> CompatOutput:
        self.require_columns(batch, ("pixel_values",))
        features = self.features(batch["pixel_values"]).float()
        return CompatOutput(image_embeds=self.apply_metric(features), features=features)

    @override
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        return self.apply_metric(self.features(pixel_values))

    @property
    @override
    def embed_layers(self) -> Iterable[nn.Module] | None:
        """Return the projection, which embeds only images."""
        if self.metric == "l2" or not self.ends_linearly or self.config.batch_norm:
            return None
        if isinstance(self.neck, nn.Linear) and self.embeds_texts:
            return None
        return (self.neck,) if isinstance(self.neck, nn.Linear) else ()

    @property
    def embeds_texts(self) -> bool:
        """Return whether the model was trained on captions. A model trained on images does not embed texts."""
        return "input_ids" in self.columns

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed texts, or raise without :attr:`embeds_texts`."""
        if not self.embeds_texts:
            raise XcompatError(f"{self.name_or_path or type(self).__name__} was trained on images only and cannot embed texts")
        return super().embed_texts(input_ids, attention_mask)

    def set_trainable(self) -> None:
        """Train the heads and the image tower's adapters, or without adapters all encoder weights for images."""
        chosen = {id(parameter) for parameter in self.encoder.image_parameters()}
        if adapters := {id(parameter) for parameter in self.encoder.adapter_parameters()}:
            chosen &= adapters
            if not chosen:
                raise XcompatError("adapters.lora.towers has only the text tower, but training uses images; add image")
        for parameter in self.encoder.parameters():
            parameter.requires_grad_(id(parameter) in chosen)

    def for_inference(self) -> Self:
        """Return the model in evaluation mode, without training-only parts."""
        if self.config.for_training:
            for name in self.only_for_training:
                if hasattr(self, name):
                    delattr(self, name)
        self.config.for_training = False
        return super().for_inference()

    def export(self, folder: str | Path) -> None:
        """Write the finished model, without training-only parts."""
        self.for_inference()
        super().export(folder)


def _without_slope(dim: int) -> nn.BatchNorm1d:
    """Return a batch norm with offset but without slope, as in ArcFace's backbones; the classifier chooses lengths."""
    norm = nn.BatchNorm1d(dim)
    norm.weight.requires_grad_(False)
    return norm
