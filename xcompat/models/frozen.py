"""A frozen model in a recipe's role (old or new): a model that embeds, or the stored embeddings of a lost one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders import EncoderSource
from xcompat.models.config import Compares
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.old_knowledge import Rows
from xcompat.models.stored import StoredModel
from xcompat.vectors import is_stored


class FrozenModel(Protocol):
    """The interface of a model whose embeddings do not change, for caches, methods and evaluations.

    :class:`~xcompat.models.embedder.Embedder` computes embeddings; :class:`~xcompat.models.stored.StoredModel` looks them up.
    """

    fingerprint: Fingerprint
    dim: int
    reads: Literal["images", "captions"]
    """Whether the model embeds the image or the caption of a captioned image."""

    @property
    def metric(self) -> Compares:
        """Return how the model's embeddings are compared."""

    @property
    def name(self) -> str:
        """Return the model's name for people."""

    @property
    def classes(self) -> list[str]:
        """Return the names of the model's classes in its own order; empty if it has none."""

    def lookup(self, ids: Sequence[str]) -> Rows | None:
        """Find the stored embeddings of images.

        Args:
            ids: the ids of the images.

        Returns:
            (len(ids), d) float32, L2-normalised, read when they are asked for; None from a model that computes embeddings.

        Raises:
            XcompatError: an id has no stored embedding.
        """

    def require_model(self, otherwise: str) -> Embedder:
        """Return the model that embeds, or refuse.

        Args:
            otherwise: the error message after the model's name, if only stored embeddings exist.

        Raises:
            XcompatError: only stored embeddings exist.
        """

    def require_embeddings(self, method: str) -> None:
        """Refuse a method, by its name, that learns from embeddings if only prototypes are stored."""

    def prototypes_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return stored prototypes in the order of ``classes`` (C, d), NaN for missing ones; None if there are embeddings."""

    def classifier_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return the classifier's rows in the order of ``classes`` (C, d), NaN for missing ones; None without a classifier."""

    def describe_old(self) -> dict[str, Any]:
        """Return this model's description for ``CompatConfig.old``."""


def load_frozen(source: EncoderSource | str, device: torch.device | str = "cpu") -> FrozenModel:
    """Load a model that embeds, or the stored embeddings or prototypes of one that is lost.

    Args:
        source: as :func:`~xcompat.models.embedder.load_embedder` takes it, or a folder of embeddings or prototypes.
        device: where to compute.

    Returns:
        The frozen model.
    """
    name = source if isinstance(source, str) else source.name
    return StoredModel(name) if is_stored(name) else load_embedder(source, device)
