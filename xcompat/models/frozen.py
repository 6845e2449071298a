"""A frozen model in a role of a recipe: one that embeds, or what is left of one that once did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.encoders import EncoderSource
from xcompat.fingerprint import Fingerprint
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.stored import StoredModel, is_stored


class FrozenModel(Protocol):
    """What caches, methods and evaluations ask of a model whose embeddings do not change.

    :class:`~xcompat.models.embedder.Embedder` computes them; :class:`~xcompat.models.stored.StoredModel` looks them up.
    """

    fingerprint: Fingerprint
    dim: int
    reads: Literal["images", "captions"]
    """What is embedded of an image with a caption."""

    @property
    def name(self) -> str:
        """Return what people call the model."""

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes that it knows, in its own order; none where it knows none by name."""

    def lookup(self, ids: Sequence[str]) -> NDArray[np.float32] | None:
        """Fetch embeddings of images that were computed long ago.

        Args:
            ids: which images.

        Returns:
            (len(ids), d) float32, L2-normalised; None of a model that computes them.

        Raises:
            XcompatError: one of them is not known.
        """

    def require_model(self, otherwise: str) -> Embedder:
        """Return what can embed anything, or refuse.

        Args:
            otherwise: what to say of a model that is gone, after its name.

        Raises:
            XcompatError: it is gone.
        """

    def require_embeddings(self, method: str) -> None:
        """Refuse a method that learns from embeddings where only prototypes are known, by the method's name."""

    def prototypes_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return given prototypes by class (C, d), NaN where there is none; None where there are embeddings."""

    def classifier_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return the classifier's rows in the order of ``classes`` (C, d), NaN where there is none; None without a classifier."""

    def describe_old(self) -> dict[str, Any]:
        """Describe this model as the old one of a configuration."""


def load_frozen(
    source: EncoderSource | str, device: torch.device | str = "cpu", autocast: torch.dtype | None = None
) -> FrozenModel:
    """Load a model that embeds, or what one that is gone once computed.

    Args:
        source: as :func:`~xcompat.models.embedder.load_embedder` takes it, or a folder of embeddings or prototypes.
        device: where to compute.
        autocast: half precision to compute in; None for the precision of the weights.

    Returns:
        The frozen model.
    """
    name = source if isinstance(source, str) else source.name
    return StoredModel(name) if is_stored(name) else load_embedder(source, device, autocast)
