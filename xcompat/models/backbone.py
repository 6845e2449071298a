"""The base of models that train a backbone for images: a projection, embeddings, and parts that only training needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.base import CompatModel
from xcompat.models.config import Compares, CompatConfig
from xcompat.outputs import Batch, CompatOutput


class BackboneConfig(CompatConfig):
    """Configuration of :class:`BackboneModel`.

    Args:
        dim: dimension of the embedding without extra dimensions; None for the old model's, or without one the backbone's.
        batch_norm: whether a batch norm without a slope follows the projection, as face recognition has it: each dimension of the
            features has mean 0 and variance 1 over the training set. Not of BT², nor of SimCLR, which has a norm of its own.
        metric: how embeddings are compared: by ``cosine``, of length 1, or by ``l2`` distance, as they are; of independent, BCT,
            SimCLR and the autoencoder. Maps of them by FCT, galleries and evaluations follow.
        for_training: whether the model has the parts that only training needs; False in a finished model.
    """

    dim: int | None = None
    batch_norm: bool = False
    metric: Compares = "cosine"
    for_training: bool = True


class BackboneModel(CompatModel):
    """features = W_proj · backbone(x) (B, D); a subclass writes the :meth:`loss`.

    Args:
        config: the configuration.
        encoder: an encoder already loaded; built without weights from the configuration if None.
    """

    config_class = BackboneConfig
    encoder: Encoder
    only_for_training: ClassVar[tuple[str, ...]] = ()
    """Names of the modules and buffers that :meth:`for_inference` removes."""
    made_by_prepare: ClassVar[tuple[str, ...]] = ()
    """Names of the buffers that :meth:`prepare` fills; None before, and in no checkpoint."""
    ends_linearly: ClassVar[bool] = True
    """Whether the features are the output of a linear layer; False where other operations follow the last one."""

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
        """Refuse impossible dimensions before anything is built."""
        if config.dim is not None and config.dim < 1:
            raise XcompatError(f"options.dim is {config.dim}; an embedding has at least 1 dimension")

    @classmethod
    @override
    def trains_encoder(cls, options: Mapping[str, Any]) -> bool:
        """Return whether there are no adapters, which are trained in its place."""
        adapters = options.get("adapters") or {}
        return not (adapters.get("lora") or adapters.get("prompts"))

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, Any], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if not cls.compares_by_l2:
            yield "metric", f"{cls.__name__} gives unit vectors, which are compared by cosine"

    @property
    def image_head(self) -> nn.Linear | None:
        """Return the linear layer whose output are the features; None where there is none (:attr:`ends_linearly`)."""
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
        """Embed images, and keep their features."""
        self.require_columns(batch, ("pixel_values",))
        features = self.features(batch["pixel_values"]).float()
        return CompatOutput(image_embeds=self.of_metric(features), features=features)

    @override
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        return self.of_metric(self.features(pixel_values))

    @property
    @override
    def embed_layers(self) -> Iterable[nn.Module] | None:
        """Return the projection, which embeds images only."""
        if self.metric == "l2" or not self.ends_linearly or self.config.batch_norm:
            return None
        if isinstance(self.neck, nn.Linear) and self.embeds_texts:
            return None
        return (self.neck,) if isinstance(self.neck, nn.Linear) else ()

    @property
    def embeds_texts(self) -> bool:
        """Return whether the model was trained on captions; one trained on images alone does not embed texts."""
        return "input_ids" in self.columns

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed texts, or refuse unless :attr:`embeds_texts`."""
        if not self.embeds_texts:
            raise XcompatError(f"{self.name_or_path or type(self).__name__} was trained on images alone: it cannot embed texts")
        return super().embed_texts(input_ids, attention_mask)

    def set_trainable(self) -> None:
        """Train the heads and the image tower's adapters; without adapters, all encoder weights that embed images."""
        chosen = {id(parameter) for parameter in self.encoder.image_parameters()}
        if adapters := {id(parameter) for parameter in self.encoder.adapter_parameters()}:
            chosen &= adapters
            if not chosen:
                raise XcompatError("adapters.lora.towers names the text tower alone, which images do not go through; name image")
        for parameter in self.encoder.parameters():
            parameter.requires_grad_(id(parameter) in chosen)

    def for_inference(self) -> Self:
        """Return the model in evaluation mode, without the parts that only training needs."""
        if self.config.for_training:
            for name in self.only_for_training:
                if hasattr(self, name):
                    delattr(self, name)
        self.config.for_training = False
        return super().for_inference()

    def export(self, folder: str | Path) -> None:
        """Write the finished model, without the parts that only training needs."""
        self.for_inference()
        super().export(folder)


def _without_slope(dim: int) -> nn.BatchNorm1d:
    """Return a batch norm that shifts and does not stretch: lengths are the classifier's to choose (ArcFace's own backbones)."""
    norm = nn.BatchNorm1d(dim)
    norm.weight.requires_grad_(False)
    return norm
