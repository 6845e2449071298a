"""The interface that all encoder libraries implement."""

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
"""CLIP's scale at initialisation, exp(2.6592): the fixed temperature of XBT."""


Space = Literal["own", "stored"]
"""``own``: a model's embedding of an item. ``stored``: what its gallery holds, which may be its view of an older space."""


class EmbedsBatches(ABC):
    """An encoder, a compatible model, or the penultimate features of either."""

    @abstractmethod
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed preprocessed images: (B, C, H, W) to (B, D) float32."""

    @abstractmethod
    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed tokenised texts: (B, L) int64 to (B, D) float32."""

    def stored(self, embeds: Tensor) -> Tensor:
        """Return what a gallery of this model holds: the embeddings, unless it shares an older space."""
        return embeds

    def embed(self, batch: Mapping[str, Tensor], space: Space = "own") -> Tensor:
        """Embed one batch of images (``pixel_values``) or of texts (``input_ids``).

        Args:
            batch: from the processor.
            space: of the embeddings.

        Returns:
            (B, D) float32, or (B, d) in the space ``stored``.
        """
        if "pixel_values" in batch:
            embeds = self.embed_images(batch["pixel_values"])
        else:
            embeds = self.embed_texts(batch["input_ids"], batch.get("attention_mask"))
        return self.stored(embeds) if space == "stored" else embeds

    @property
    def text_encoder(self) -> Encoder | None:
        """Return the encoder that embeds texts directly; None if another model processes them first."""
        return None


class Encoder(nn.Module, EmbedsBatches):
    """An image tower and a text tower in the same space; ``has_images`` or ``has_text`` is False where there is but one.

    Args:
        model: the library's own module.
        embedding_dim: D, the dimension of that space.
        description: JSON that rebuilds the architecture without weights: ``library``, ``name``, ``revision``, ``config``.
    """

    library: ClassVar[str]
    has_images: ClassVar[bool] = True
    has_text: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ("logit_scale", "logit_bias")
    """Parts of the names of parameters that do not affect embeddings, and would get no gradients in training."""
    image_head_name: ClassVar[str | None] = None
    """The library's name of the last layer of its image towers; None if they do not end in a layer."""
    embeds_any_size: bool = False
    """Whether a transformer stretches its positions over images of another size, as small crops in training are."""
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
        """Set training mode; with LoRA, batch norms keep evaluation mode, because changed statistics cannot be switched off."""
        super().train(mode)
        if self._keeps_statistics:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of the weights, in which the towers compute."""
        return next(self.model.parameters()).dtype

    def image_features(self, pixel_values: Tensor) -> Tensor:
        """Return projected image features (B, D), not normalised, in the precision of the weights."""
        return self._image_features(pixel_values.to(self.dtype))

    @abstractmethod
    def _image_features(self, pixel_values: Tensor) -> Tensor: ...

    @abstractmethod
    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return projected text features (B, D), not normalised."""

    @property
    @abstractmethod
    def towers(self) -> dict[str, nn.Module]:
        """Return the towers there are, ``image`` and ``text``, for adapters."""

    @property
    def peft_base(self) -> nn.Module:
        """Return the module that PEFT puts LoRA on when it loads the base by its name."""
        return self.model

    @property
    def layer_classes(self) -> set[str]:
        """Return the names of the classes that FSDP shards as one piece each."""
        return set(getattr(self.model, "_no_split_modules", None) or ())

    @property
    def image_head(self) -> nn.Linear | None:
        """Return the linear layer whose output are the image features; None without such a layer."""
        head = getattr(self.model, self.image_head_name, None) if self.image_head_name is not None else None
        return head if isinstance(head, nn.Linear) else None

    @property
    def image_embedding_layer(self) -> nn.Module | None:
        """Return the layer whose output are the image tower's tokens, to which visual prompts are appended; None without one."""
        return None

    @property
    def image_width(self) -> int:
        """Return the width of the image tower's tokens."""
        raise XcompatError(f"{self.name} has no token width: visual prompts need a vision transformer")

    @property
    def shares_prefixes(self) -> bool:
        """Return whether texts can share computed prefixes (:mod:`xcompat.encoders.prefixes`)."""
        return False

    def rebuild_masks(self) -> None:
        """Restore buffers that are missing in checkpoints; most models have none."""

    @abstractmethod
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model in its own library's format, readable without xcompat."""

    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed preprocessed images.

        Args:
            pixel_values: (B, C, H, W) from :meth:`Processor.images`.

        Returns:
            (B, D) float32, L2-normalised.
        """
        return F.normalize(self.image_features(pixel_values).float(), dim=-1)

    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed tokenised texts.

        Args:
            input_ids: (B, L) int64 from :meth:`Processor.texts`.
            attention_mask: (B, L) int64, or None for models that read their padding.

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
        """Return the name or folder the encoder was loaded from."""
        return self.description["name"]

    @property
    def logit_scale(self) -> float:
        """Return the factor on cosine similarities in the model's own training (the exponential of the stored logarithm)."""
        parameter = getattr(self.model, "logit_scale", None)
        return math.exp(float(parameter)) if parameter is not None and not parameter.is_meta else DEFAULT_LOGIT_SCALE

    def fingerprint(self, processor: Processor) -> Fingerprint:
        """Return the identity of architecture, weights and preprocessing together.

        Args:
            processor: the preprocessing of the embeddings.

        Returns:
            The fingerprint, which does not depend on the name, the folder or the library's version.
        """
        parts = {
            "library": self.library,
            "architecture": architecture_of(self.description["config"]),
            "processor": processor.describe(),
        }
        return Fingerprint.from_module(self.model, json.loads(json.dumps(parts, default=str)), self.name)

    def add_adapters(self, config: AdapterConfig) -> None:
        """Add LoRA and visual prompts to the towers; LoRA starts as the identity.

        Args:
            config: ranks, targets and the number of prompts.

        Raises:
            XcompatError: the towers cannot take them.
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

    def _append_prompts(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:  # noqa: ANN401 - hook signature
        return self.prompts(output) if self.prompts is not None and self.prompts.enabled else None

    def adapter_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of LoRA and prompts."""
        return [parameter for name, parameter in self.named_parameters() if "lora_" in name or name.startswith("prompts.")]

    def image_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that image embeddings depend on, including adapters."""
        # some of the text's parameters lie outside its tower
        beside = ("model.text", "model.token_embedding", "model.positional_embedding", "model.ln_final")
        tower = self.towers.get("text")
        texts = {id(parameter) for parameter in tower.parameters()} if tower is not None else set()
        return [
            parameter
            for name, parameter in self.named_parameters()
            if id(parameter) not in texts and not name.startswith(beside) and not any(word in name for word in self.unused)
        ]

    def freeze_images(self) -> None:
        """Freeze what embeds images, adapters included, where texts alone are learned from; the text tower stays as it is."""
        if "image" in self.towers:
            for parameter in self.image_parameters():
                parameter.requires_grad_(False)

    @contextmanager
    def adapters_disabled(self) -> Iterator[None]:
        """Compute with the original weights alone, bit for bit, inside the block."""
        with adapters_disabled(self):
            yield

    def merge_adapters(self) -> None:
        """Fold LoRA into the weights and remove it; prompts stay, because they are part of the input."""
        merge_lora(self)
        self._keeps_statistics = False


_NOT_ARCHITECTURE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "name_or_path"}


def architecture_of(config: Any) -> Any:  # noqa: ANN401 - nested JSON
    """Return a configuration without the keys that do not affect embeddings, at every level."""
    if isinstance(config, dict):
        return {key: architecture_of(value) for key, value in config.items() if key not in _NOT_ARCHITECTURE}
    return config
