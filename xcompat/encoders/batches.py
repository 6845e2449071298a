"""What every model that embeds has in common, whatever it is made of: one call for images and for texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from xcompat.encoders.base import Encoder

Space = Literal["own", "stored"]
"""``own``: what a model makes of an item. ``stored``: what its gallery holds of it, which may be its view of an older space."""


class EmbedsBatches(ABC):
    """An encoder, a compatible model, or what the last layer of either reads."""

    @abstractmethod
    def embed_images(self, pixel_values: Tensor) -> Tensor:
        """Embed preprocessed images: (B, C, H, W) to (B, D) float32."""

    @abstractmethod
    def embed_texts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed tokenised texts: (B, L) int64 to (B, D) float32."""

    def stored(self, embeds: Tensor) -> Tensor:
        """Return what a gallery of this model holds: its embeddings, unless it shares an older space."""
        return embeds

    def embed(self, batch: Mapping[str, Tensor], space: Space = "own") -> Tensor:
        """Embed one batch of images (``pixel_values``) or of texts (``input_ids``).

        Args:
            batch: from the processor.
            space: in which the embeddings are to lie.

        Returns:
            (B, D) float32; in the space ``stored`` (B, d).
        """
        if "pixel_values" in batch:
            embeds = self.embed_images(batch["pixel_values"])
        else:
            embeds = self.embed_texts(batch["input_ids"], batch.get("attention_mask"))
        return self.stored(embeds) if space == "stored" else embeds

    @property
    def text_encoder(self) -> Encoder | None:
        """Return the encoder inside that reads texts as they are; None where another model stands between."""
        return None
