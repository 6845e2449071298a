"""Modules for exports, from pixels or tokens to embeddings in the old or the own space."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from xcompat.core.errors import XcompatError, describe_error
from xcompat.models.base import CompatModel

Space = Literal["old", "own"]
"""``old``: embeddings to search an index of the old model. ``own``: embeddings for an index of the new model."""


def sources_of(model: CompatModel) -> list[Path]:
    """Return the local folders of a model and its encoder, which exports must not replace."""
    names = [model.name_or_path, (model.config.encoder or {}).get("name")]
    return [Path(name) for name in names if name and Path(name).exists()]


class Tower(nn.Module):
    """A model's image or text part, with its embeddings in one space.

    Args:
        model: frozen, in evaluation mode.
        space: the embeddings' space.

    Raises:
        XcompatError: the model does not map queries into an old space.
    """

    def __init__(self, model: CompatModel, space: Space) -> None:
        super().__init__()
        if space == "old" and (model.maps_galleries or not model.compatible_with):
            raise XcompatError(
                f"{type(model).__name__} does not map queries into an old space; export the model with space='own'"
            )
        self.model, self.space = model, space
        self.encoder = model._get_encoder()  # maps do not register it, and its weights would be exported as constants

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return self.model.config.old["dim"] if self.space == "old" else self.model.config.embedding_dim

    def place(self, embeds_BD: Tensor) -> Tensor:
        """Map the new model's embeddings into the space: (B, dim) float32."""
        return self.model.to_space(embeds_BD) if self.space == "old" else embeds_BD


class ImageTower(Tower):
    """Image tower."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Embed images.

        Args:
            pixel_values: (B, C, H, W) float32 from the model's processor.

        Returns:
            (B, dim) float32.
        """
        return self.place(self.model.embed_images(pixel_values))


class TextTower(Tower):
    """Text tower."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embed texts.

        Args:
            input_ids: (B, L) int64 from the model's processor.
            attention_mask: (B, L) int64, or None for models that read their padding.

        Returns:
            (B, dim) float32.
        """
        return self.place(self.model.embed_texts(input_ids, attention_mask))


@contextmanager
def convert_read_errors(written: str | Path) -> Iterator[None]:
    """Convert library errors while reading a file just written into a one-line :class:`XcompatError`."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # each library raises its own kinds
        raise XcompatError(f"cannot read back the export at {written}: {describe_error(error)}; check the disk") from error
