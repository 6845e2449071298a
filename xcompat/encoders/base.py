"""Base class for encoders."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders.adapter_settings import AdapterConfig
from xcompat.encoders.adapters import VisualPrompts, adapters_disabled, inject_lora, merge_lora
from xcompat.encoders.processor import Processor

DEFAULT_LOGIT_SCALE = 1 / 0.07
"""CLIP's initial scale, exp(2.6592), and XBT's fixed temperature."""


Space = Literal["own", "stored"]
"""``own``: the model's embeddings. ``stored``: the gallery's embeddings, in an older space if the model shares one."""


class EmbedsBatches(ABC):
    """Interface for encoders, compatible models and penultimate features."""

    @abstractmethod
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed preprocessed images (B, C, H, W) as (B, D) float32."""

    @abstractmethod
    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed tokenised texts (B, L) int64 as (B, D) float32."""

    def to_gallery_space(self, embeds: Tensor) -> Tensor:
        """Convert embeddings to the gallery's space; unchanged unless the model shares an older space."""
        return embeds

    def embed(self, batch: Mapping[str, Tensor], space: Space = "own") -> Tensor:
        """Embed a processor's batch of images (``pixel_values``) or texts (``input_ids``).

        Args:
            batch: the batch's columns.
            space: embedding space.

        Returns:
            (B, D) float32, or (B, d) in the space ``stored``.
        """
        if "pixel_values" in batch:
            embeds = self.embed_images(batch["pixel_values"])
        else:
            embeds = self.embed_texts(batch["input_ids"], batch.get("attention_mask"))
        return self.to_gallery_space(embeds) if space == "stored" else embeds

    @property
    def text_encoder(self) -> Encoder | None:
        """Return the text encoder; None if another model processes texts first."""
        return None


class Encoder(nn.Module, EmbedsBatches):
    """Image tower, text tower or both, in one embedding space.

    Args:
        model: the library's module.
        embedding_dim: D, the space's dimension.
        description: JSON to rebuild the architecture without weights: ``library``, ``name``, ``revision``, ``config``.
    """

    library: ClassVar[str]
    has_images: ClassVar[bool] = True
    has_text: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ("logit_scale", "logit_bias")
    """Name parts of parameters without effect on embeddings, which would get no gradients in training."""
    image_head_name: ClassVar[str | None] = None
    """Attribute name of the last layer of image towers; None if there is no such layer."""
    embeds_any_size: bool = False
    """Whether to interpolate the positions of a transformer for images of another size, e.g. small training crops."""
    model: Any  # only the subclass knows its library's type
    prompts: VisualPrompts | None

    def __init__(self, model: nn.Module, embedding_dim: int, description: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.embedding_dim = embedding_dim
        self.description = description
        self.prompts = None
        self._keeps_statistics = False

    def train(self, mode: bool = True) -> Self:
        """Set training mode; with LoRA, batch norms stay in evaluation mode, so LoRA can be switched off."""
        super().train(mode)
        if self._keeps_statistics:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Return the weights' dtype."""
        return next(self.model.parameters()).dtype

    def image_features(self, pixel_values: Tensor) -> Tensor:
        """Return unnormalised image features (B, D) in the weights' dtype."""
        return self._image_features(pixel_values.to(self.dtype))

    @abstractmethod
    def _image_features(self, pixel_values: Tensor) -> Tensor: ...

    @abstractmethod
    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return unnormalised text features (B, D)."""

    @property
    @abstractmethod
    def towers(self) -> dict[str, nn.Module]:
        """Return the towers by name (``image``, ``text``)."""

    @property
    def peft_base(self) -> nn.Module:
        """Return the module that PEFT adapts when it loads the base by name."""
        return self.model

    @property
    def layer_classes(self) -> set[str]:
        """Return the class names that FSDP shards as units."""
        return set(getattr(self.model, "_no_split_modules", None) or ())

    @property
    def image_head(self) -> nn.Linear | None:
        """Return the image tower's last linear layer, or None."""
        head = getattr(self.model, self.image_head_name, None) if self.image_head_name is not None else None
        return head if isinstance(head, nn.Linear) else None

    @property
    def image_embedding_layer(self) -> nn.Module | None:
        """Return the layer with the image tokens as output, to append visual prompts there, or None."""
        return None

    @property
    def image_width(self) -> int:
        """Return the image tokens' width."""
        raise XcompatError(f"{self.name} has no token width: visual prompts need a vision transformer")

    @property
    def shares_prefixes(self) -> bool:
        """Return whether texts can share computed prefixes (:mod:`xcompat.encoders.prefixes`)."""
        return False

    def rebuild_masks(self) -> None:
        """Restore buffers missing from checkpoints; by default none."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model in its library's format, readable without xcompat."""

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed preprocessed images (B, C, H, W) from :meth:`Processor.images` as (B, D) float32, L2-normalised."""
        return F.normalize(self.image_features(pixel_values).float(), dim=-1)

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed tokenised texts from :meth:`Processor.texts`.

        Args:
            input_ids: (B, L) int64.
            attention_mask: (B, L) int64; None for models that read their padding.

        Returns:
            (B, D) float32, L2-normalised.
        """
        return F.normalize(self.text_features(input_ids, attention_mask).float(), dim=-1)

    @property
    def text_encoder(self) -> Encoder | None:
        """Return the encoder itself."""
        return self

    @property
    def name(self) -> str:
        """Return the loaded model's name or folder."""
        return self.description["name"]

    @property
    def logit_scale(self) -> float:
        """Return the cosine factor in the model's training (exponential of the stored logarithm)."""
        parameter = getattr(self.model, "logit_scale", None)
        return math.exp(float(parameter)) if parameter is not None and not parameter.is_meta else DEFAULT_LOGIT_SCALE

    def fingerprint(self, processor: Processor) -> Fingerprint:
        """Return the fingerprint over architecture, weights and preprocessing, independent of name and library version."""
        parts = {
            "library": self.library,
            "architecture": architecture_of(self.description["config"]),
            "processor": processor.describe(),
        }
        return Fingerprint.from_module(self.model, json.loads(json.dumps(parts, default=str)), self.name)

    def add_adapters(self, config: AdapterConfig) -> None:
        """Add LoRA (initially the identity) and visual prompts to the towers.

        Raises:
            XcompatError: the towers do not support them.
        """
        if config.lora is not None:
            inject_lora(self.towers, config.lora)
            self._keeps_statistics = True
            self.train(self.training)
        if config.prompts:
            layer = self.image_embedding_layer
            if layer is None:
                raise XcompatError(f"{self.name} cannot take visual prompts: its image tower has no token embedding layer")
            self.prompts = VisualPrompts(config.prompts, self.image_width)
            layer.register_forward_hook(self._append_prompts)

    def _append_prompts(self, module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        return self.prompts(output) if self.prompts is not None and self.prompts.enabled else None

    def adapter_parameters(self) -> list[nn.Parameter]:
        """Return the LoRA and prompt parameters."""
        return [parameter for name, parameter in self.named_parameters() if "lora_" in name or name.startswith("prompts.")]

    def image_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that affect image embeddings, including adapters."""
        # some text parameters are outside the text tower
        beside = ("model.text", "model.token_embedding", "model.positional_embedding", "model.ln_final")
        tower = self.towers.get("text")
        texts = {id(parameter) for parameter in tower.parameters()} if tower is not None else set()
        return [
            parameter
            for name, parameter in self.named_parameters()
            if id(parameter) not in texts and not name.startswith(beside) and not any(word in name for word in self.unused)
        ]

    def freeze_images(self) -> None:
        """Freeze the image parameters, including adapters, for training on texts only."""
        if "image" in self.towers:
            for parameter in self.image_parameters():
                parameter.requires_grad_(False)

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Use the original weights, bit for bit, inside the block."""
        with adapters_disabled(self):
            yield

    def merge_adapters(self) -> None:
        """Merge LoRA into the weights and remove it. Prompts stay, because they are part of the input."""
        merge_lora(self)
        self._keeps_statistics = False


_NOT_ARCHITECTURE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "name_or_path"}


def architecture_of(config: Any) -> Any:  # noqa: ANN401 - nested JSON
    """Return a nested configuration without keys irrelevant to embeddings."""
    if isinstance(config, dict):
        return {key: architecture_of(value) for key, value in config.items() if key not in _NOT_ARCHITECTURE}
    return config
