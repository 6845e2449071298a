"""What models share that learn from images alone, without classes, captions or an old model: the makers of side-information."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.encoders.base import Encoder
from xcompat.errors import XcompatError
from xcompat.models.base import CompatModel
from xcompat.models.config import CompatConfig
from xcompat.outputs import CompatOutput


class UnlabelledConfig(CompatConfig):
    """Configuration of :class:`UnlabelledModel`.

    Args:
        dim: dimension of the embedding; None for the backbone's own.
        for_training: whether the parts exist that only training needs; False in a finished model.
    """

    dim: int | None = None
    for_training: bool = True


class UnlabelledModel(CompatModel):
    """features = W_proj · backbone(x) (B, D); what is minimised is the subclass's :meth:`loss`.

    Args:
        config: the configuration.
        encoder: an encoder already loaded; built without weights from the configuration if None.
    """

    config_class = UnlabelledConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values",)
    compares_with_old = False
    only_for_training: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that leave when training is done."""

    def __init__(self, config: UnlabelledConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert self.encoder is not None
        self.neck = nn.Linear(self.encoder.embedding_dim, config.dim) if config.dim is not None else nn.Identity()

    @classmethod
    def embedding_dim_for(cls, width: int, old: dict[str, Any] | None, options: dict[str, Any]) -> int:
        """Return D: what the options say, else the backbone's width."""
        return options.get("dim") or width

    def features(self, pixel_values: Tensor) -> Tensor:
        """Return embeddings before normalisation.

        Args:
            pixel_values: (B, C, H, W) float32.

        Returns:
            (B, D).
        """
        assert self.encoder is not None
        return self.neck(self.encoder.image_features(pixel_values))

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """See :meth:`CompatModel.embed_images`."""
        return F.normalize(self.features(pixel_values).float(), dim=-1)

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Refuse: images alone are in the model's space."""
        raise XcompatError(f"{self.name_or_path or type(self).__name__} was trained on images alone: it cannot embed texts")

    def forward(
        self,
        pixel_values: Tensor | None = None,
        second_pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_loss: bool = True,
    ) -> CompatOutput:
        """Compute the method's loss.

        Args:
            pixel_values: (B, C, H, W) float32.
            second_pixel_values: another view of the same images, for methods that compare two.
            input_ids: captions that come with the images; not read.
            attention_mask: not read.
            labels: classes that come with the images; not read.
            return_loss: whether to compute the loss.

        Returns:
            Loss and the embeddings.
        """
        given = {"pixel_values": pixel_values, "second_pixel_values": second_pixel_values}
        self._require(**{name: given[name] for name in self.columns})
        assert pixel_values is not None
        features = self.features(pixel_values).float()
        loss = self.loss(features, pixel_values, second_pixel_values) if return_loss else None
        return CompatOutput(loss=loss, image_embeds=F.normalize(features, dim=-1))

    @abstractmethod
    def loss(self, features_BD: Tensor, pixel_values: Tensor, second_pixel_values: Tensor | None) -> Tensor:
        """Return what is minimised."""

    def set_trainable(self) -> None:
        """Train adapters alone where there are adapters, else everything that embeddings of images depend on."""
        assert self.encoder is not None
        chosen = {id(parameter) for parameter in self.encoder.adapter_parameters() or self.encoder.image_parameters()}
        for parameter in self.encoder.parameters():
            parameter.requires_grad_(id(parameter) in chosen)

    def for_inference(self) -> Self:
        """Return the model without what only training needs, in evaluation mode."""
        for name in self.only_for_training:
            if hasattr(self, name):
                delattr(self, name)
        self.config.for_training = False
        return super().for_inference()

    def export(self, folder: str | Path) -> None:
        """Write the finished model: backbone and projection."""
        self.for_inference()
        super().export(folder)
