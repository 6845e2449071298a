"""UniBCT: old prototypes, refined by the new model's view of typical samples per class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.distributed import compute_in_shares
from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.losses import cross_entropy_to
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge, Rows, samples_of_classes
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class UniBctConfig(ClassifiedConfig):
    """Configuration of :class:`UniBctModel`.

    Args:
        compat_weight: weight for the loss against the prototypes.
        old_scale: factor on cosines between features and prototypes; None for plain dot products.
        propagation: the graph's λ, in [0, 1): the share of its weight that a sample passes on; 0 keeps class means.
        temperature: the graph's τ.
        refresh_at: training progress at each graph rebuild, as shares from 0 to below 1. The public code has epochs 10 and 20 of
            35.
    """

    model_type = "xcompat-unibct"

    compat_weight: Annotated[float, Field(ge=0)] = 1.0
    old_scale: Annotated[float, Field(gt=0)] | None = 16.0
    propagation: float = 0.9
    temperature: Annotated[float, Field(gt=0)] = 0.05
    refresh_at: list[Annotated[float, Field(ge=0, lt=1)]] = field(default_factory=lambda: [0.3, 0.6])


@register
class UniBctModel(ClassifiedModel):
    """L = CE(W, f) + w·CE(P̃, f[:d]), P̃ structurally refined prototypes (Zhang et al. 2022; as UniBCT in MixBCT).

    In each class, E = softmax(N Nᵀ/τ) without its diagonal is the graph over new embeddings N, and O are the old embeddings. The
    prototype is the mean of (1 − λ)(I − λE)⁻¹O (:func:`refined_weights`), and the class mean before the first refresh. The method
    needs old embeddings for the new training set, but no old classes. docs/methods/unibct.md lists the differences from the
    public code.
    """

    config_class = UniBctConfig
    only_for_training = ("prototypes_Cd",)
    citation = "Zhang et al., Towards universal backward-compatible representation learning, IJCAI 2022"

    prototypes_Cd: Tensor

    def __init__(self, config: UniBctConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        if not 0 <= config.propagation < 1:
            raise XcompatError(f"options.propagation is {config.propagation}; give a share of at least 0 and below 1")
        self.refresh_at = tuple(config.refresh_at)
        self._old: OldKnowledge | None = None

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        if not options["propagation"]:
            for name in ("temperature", "refresh_at"):
                yield name, "there is no graph, because a propagation of 0 keeps class means"
        if not options["refresh_at"]:
            for name in ("propagation", "temperature"):
                yield name, "there is no graph, because options.refresh_at is empty"

    def build_for_training(self) -> None:
        """Allocate the prototypes. Checkpoints contain them, because a resumed run cannot recompute them."""
        if self.config.classes and self.config.old is not None:
            # rows of 0 mark classes without old samples; NaN would fail comparisons of checkpoints
            self.register_buffer("prototypes_Cd", torch.zeros(len(self.config.classes), self.config.old["dim"]))

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Start at class means, and keep the old embeddings."""
        old.embeddings("unibct")
        self._old = old
        self._set(torch.from_numpy(np.array(old.prototypes())))

    @override
    def refresh(self, new_ND: NDArray[np.float32]) -> None:
        """Refine the prototypes by the current new embeddings, each process a share of the classes."""
        assert self._old is not None
        old_Nd, config = self._old.embeddings("unibct"), self.config
        samples = samples_of_classes(self._old.labels_N, self._old.n_classes)

        def refine(labels_c: NDArray[np.int64]) -> NDArray[np.float32]:
            refined_cd = np.full((len(labels_c), old_Nd.shape[1]), np.nan, np.float32)
            for row, label in enumerate(labels_c):
                old_nd, new_nD = (torch.from_numpy(side[samples[label]]).double() for side in (old_Nd, new_ND))
                readable_n = old_nd[:, 0].isfinite() & new_nD[:, 0].isfinite()
                if readable_n.any():
                    old_nd, new_nD = (F.normalize(side[readable_n], dim=-1) for side in (old_nd, new_nD))
                    refined_cd[row] = refined_weights(new_nD, config.propagation, config.temperature) @ old_nd
            return refined_cd

        self._set(torch.from_numpy(compute_in_shares(len(samples), refine)))

    def _set(self, prototypes_Cd: Tensor) -> None:
        if not prototypes_Cd.isfinite().any():
            raise XcompatError("the old model knows no class of the training set; choose the right old model")
        self.prototypes_Cd.copy_(prototypes_Cd.nan_to_num(nan=0.0))

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        if self._old is None:
            raise XcompatError("unibct is not prepared; call prepare(OldKnowledge(...)) first")
        features_BD, labels_B = output["features"], batch["labels"]
        absent_C = (self.prototypes_Cd == 0).all(dim=1)
        prototypes_Cd = self.prototypes_Cd.masked_fill(absent_C[:, None], torch.nan)
        compatible = cross_entropy_to(prototypes_Cd, self.old_features(features_BD), labels_B, self.config.old_scale)
        return self.classification_loss(features_BD, labels_B) + self.config.compat_weight * compatible


def refined_weights(new_nD: Tensor, propagation: float, temperature: float) -> Tensor:
    """Weigh a class's samples by their centrality among the new embeddings.

    The mean of (1 − λ)(I − λE)⁻¹O over rows is pᵀO with (I − λEᵀ)p = (1 − λ)/n·1. p is the graph's personalised PageRank: every
    sample passes the share λ of its weight to its neighbours.

    Args:
        new_nD: the class's new embeddings, L2-normalised; memory use is n² numbers.
        propagation: λ, in [0, 1).
        temperature: τ.

    Returns:
        (n,) float64, nonnegative, with sum 1.

    Example:
        >>> refined_weights(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 0.5, 0.1).round(decimals=2).tolist()
        [0.42, 0.42, 0.17]
    """
    n = len(new_nD)
    if n == 1:
        return torch.ones(1, dtype=torch.float64)
    similarity_nn = (new_nD.double() @ new_nD.double().T / temperature).fill_diagonal_(-torch.inf)
    edges_nn = similarity_nn.softmax(dim=1)
    start_n = torch.full((n,), (1 - propagation) / n, dtype=torch.float64)
    return torch.linalg.solve(torch.eye(n, dtype=torch.float64) - propagation * edges_nn.T, start_n)
