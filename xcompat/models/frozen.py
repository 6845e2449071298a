"""Frozen models in a recipe: a model that embeds, or stored embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders import EncoderSource
from xcompat.models.config import Metric
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.old_knowledge import Rows
from xcompat.models.stored import StoredModel
from xcompat.vectors.formats import is_stored


class FrozenModel(Protocol):
    """Interface for models with fixed embeddings.

    :class:`~xcompat.models.embedder.Embedder` computes embeddings; :class:`~xcompat.models.stored.StoredModel` looks them up.
    """

    fingerprint: Fingerprint
    dim: int
    reads: Literal["images", "captions"]
    """Whether to embed the image or the caption of a captioned image."""

    @property
    def metric(self) -> Metric:
        """Return the embeddings' metric."""

    @property
    def name(self) -> str:
        """Return the model's display name."""

    @property
    def precision(self) -> str:
        """Return the dtype the model computes in, e.g. ``bfloat16``; ``float32`` for stored embeddings."""

    @property
    def classes(self) -> list[str]:
        """Return the class names in the model's order; empty without classes."""

    def lookup(self, ids: Sequence[str]) -> Rows | None:
        """Return the images' stored embeddings.

        Args:
            ids: image ids.

        Returns:
            (len(ids), d) float32, L2-normalised, read on demand; None for a model that computes embeddings.

        Raises:
            XcompatError: an id has no stored embedding.
        """

    def require_model(self, error_message: str) -> Embedder:
        """Return the model that embeds, or raise.

        Args:
            error_message: error message after the model's name.

        Raises:
            XcompatError: there are only stored embeddings.
        """

    def require_embeddings(self, method: str) -> None:
        """Raise for a method that needs embeddings if there are only prototypes."""

    def prototypes_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return stored prototypes for ``classes`` (C, d), NaN for missing prototypes; None if there are embeddings."""

    def classifier_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return classifier rows for ``classes`` (C, d), NaN for missing rows; None without a classifier."""

    def describe_old(self) -> dict[str, Any]:
        """Return this model's description for ``CompatConfig.old``."""


def load_frozen(source: EncoderSource | str, device: torch.device | str = "cpu") -> FrozenModel:
    """Load a frozen model: a model that embeds, or a folder with stored embeddings or prototypes.

    Args:
        source: as in :func:`~xcompat.models.embedder.load_embedder`, or the folder.
        device: the model's device.
    """
    name = source if isinstance(source, str) else source.name
    return StoredModel(name) if is_stored(name) else load_embedder(source, device)
