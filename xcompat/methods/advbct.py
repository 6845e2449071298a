"""AdvBCT: a discriminator cannot tell new embeddings from old ones, and they stay in elastic balls around old classes."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.distributed import compute_in_shares, sum_over_ranks
from xcompat.core.errors import XcompatError
from xcompat.losses.classification import mean_of_known
from xcompat.losses.gathering import sum_with_grad
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge, Rows, class_means, samples_of_classes
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput

HIDDEN, EPSILON = 100, 1e-5  # of the discriminator and its batch norm
NOT_PREPARED = "advbct is not prepared; call prepare(OldKnowledge(...)) first"
FEWEST_FOR_OUTLIERS = 4  # fewer distances have no meaningful quartiles


class AdvBctConfig(ClassifiedConfig):
    """Configuration of :class:`AdvBctModel`.

    Args:
        adversarial_weight: the discriminator loss's weight at the start of training.
        boundary_weight: weight for the loss outside the class's ball. The public code has 1, but then the discriminator wins; 10
            was chosen on validation faces (``recipes/vision/search_glyphs.yaml``).
        threshold: T, largest radius for a growing ball, at most 2; None for the median old radius. The public code has 1, .5
            and .4.
    """

    model_type = "xcompat-advbct"

    adversarial_weight: Annotated[float, Field(ge=0)] = 1.0
    boundary_weight: Annotated[float, Field(ge=0)] = 10.0
    threshold: Annotated[float, Field(gt=0, le=2)] | None = None


@register
class AdvBctModel(ClassifiedModel):
    """L = CE(W, f) + L_p2s + (1 − p)·L_adv, p the progress of training (Pan et al. 2023).

    L_adv is a discriminator's cross-entropy between f̂[:d] and the same images' old embeddings. A gradient reversal layer
    multiplies its gradient into f by −(2/(1 + exp(−10p)) − 1). L_p2s is the mean of ‖f̂[:d] − c_y‖ − r_y − σ(u_y)(T − r_y) where
    positive: c_y is the class's mean old embedding, not normalised; r_y is the largest distance to c_y without outliers; u_y is
    learned. The learned radius lies between r_y and T, and the loss only enlarges it. docs/methods/advbct.md lists the
    differences from the public code.
    """

    config_class = AdvBctConfig
    columns = ("pixel_values", "labels", "old_embeds")
    only_for_training = ("discriminator", "growth_C")
    made_by_prepare = ("centres_Cd", "radii_C", "elapsed")
    citation = "Pan et al., Boundary-aware backward-compatible representation via adversarial learning, CVPR 2023"

    centres_Cd: Tensor | None
    radii_C: Tensor | None
    elapsed: Tensor | None

    @property
    def progress(self) -> float:
        """The training progress. A tensor holds it, because each new number would compile the step again."""
        return 0.0 if self.elapsed is None else float(self.elapsed)

    @progress.setter
    def progress(self, progress: float) -> None:
        if self.elapsed is None:
            raise XcompatError(NOT_PREPARED)
        self.elapsed.fill_(progress)

    def build_for_training(self) -> None:
        """Build the discriminator and every ball's learned growth."""
        if self.config.classes and self.config.old is not None:
            self.discriminator = Discriminator(self.config.old["dim"])
            self.growth_C = nn.Parameter(torch.empty(len(self.config.classes)).uniform_(-1, 1))

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Compute the old classes' centres and radii."""
        embeds_Nd = old.embeddings("advbct")
        centres_Cd = class_means(embeds_Nd, old.labels_N, old.n_classes)
        radii_C = class_radii(embeds_Nd, centres_Cd, samples_of_classes(old.labels_N, old.n_classes))
        if not np.isfinite(radii_C).any():
            raise XcompatError("advbct needs old embeddings of at least two images of some class; check the old model")
        self.centres_Cd, self.radii_C = (torch.from_numpy(array).to(self.device) for array in (centres_Cd, radii_C))
        self.elapsed = torch.zeros((), device=self.device)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        if self.elapsed is None:
            raise XcompatError(NOT_PREPARED)
        config, features_BD, labels_B = self.config, output["features"], batch["labels"]
        loss = self.classification_loss(features_BD, labels_B)
        with torch.autocast(features_BD.device.type, enabled=False):
            new_Bd = F.normalize(self.old_features(features_BD), dim=-1)
            loss = loss + config.boundary_weight * self._boundary_loss(new_Bd, labels_B)
            adversarial = self._adversarial_loss(new_Bd, batch["old_embeds"])
            return loss + config.adversarial_weight * (1 - self.elapsed) * adversarial

    def _boundary_loss(self, new_Bd: Tensor, labels_B: Tensor) -> Tensor:
        """Return L_p2s; classes without a radius contribute nothing."""
        assert self.centres_Cd is not None and self.radii_C is not None
        threshold = self.radii_C.nanmedian() if self.config.threshold is None else self.config.threshold
        known_B = self.radii_C[labels_B].isfinite()
        radii_B = self.radii_C[labels_B].nan_to_num(nan=0.0)
        elastic_B = radii_B + self.growth_C[labels_B].sigmoid() * (threshold - radii_B)
        beyond_B = F.relu((new_Bd - self.centres_Cd[labels_B].nan_to_num(nan=0.0)).norm(dim=-1) - elastic_B)
        return mean_of_known(beyond_B, known_B & (beyond_B > 0))

    def _adversarial_loss(self, new_Bd: Tensor, old_Bd: Tensor) -> Tensor:
        """Return L_adv over the samples with a readable old embedding."""
        assert self.elapsed is not None
        readable_B = old_Bd[:, 0].isfinite()
        strength = 2 * (10 * self.elapsed).sigmoid() - 1
        # the values of new_Bd, with the gradient times -strength (Ganin and Lempitsky 2015)
        reversed_Bd = new_Bd.detach() - strength * (new_Bd - new_Bd.detach())
        both_Ad = torch.cat([reversed_Bd, old_Bd.nan_to_num(nan=0.0)])
        is_old_A = torch.arange(len(both_Ad), device=both_Ad.device) >= len(both_Ad) // 2
        readable_A = readable_B.repeat(2)
        losses_A = F.cross_entropy(self.discriminator(both_Ad, readable_A), is_old_A.long(), reduction="none")
        return mean_of_known(losses_A, readable_A)


class Discriminator(nn.Module):
    """Classifier of new and old embeddings: Linear-BN-ReLU-Linear.

    Args:
        dim: d, the input's dimension.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden, self.norm, self.output = nn.Linear(dim, HIDDEN), CountedBatchNorm(HIDDEN), nn.Linear(HIDDEN, 2)

    def forward(self, rows_Ad: Tensor, counted_A: Tensor) -> Tensor:
        """Return logits (A, 2).

        Args:
            rows_Ad: embeddings.
            counted_A: (A,) bool, the rows for the batch norm's statistics.
        """
        logits_A2: Tensor = self.output(F.relu(self.norm(self.hidden(rows_Ad), counted_A)))
        return logits_A2


class CountedBatchNorm(nn.Module):
    """Batch norm with the statistics of some rows of all processes, without running statistics, as only training uses it.

    Rows are weighted instead of selected: shapes do not depend on the data, so a training step compiles to a single graph.

    Args:
        dim: number of features.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, rows_AH: Tensor, counted_A: Tensor) -> Tensor:
        """Normalise all rows by the statistics of the counted ones, or of all if none counts on any process."""
        counted, rows = sum_over_ranks(torch.stack([counted_A.sum(), torch.ones_like(counted_A).sum()]))
        share_A = torch.where(counted > 0, counted_A / counted, 1 / rows)
        centred_AH = rows_AH - sum_with_grad(share_A @ rows_AH)
        return centred_AH * (sum_with_grad(share_A @ centred_AH.square()) + EPSILON).rsqrt() * self.weight + self.bias


def class_radii(embeds_Nd: Rows, centres_Cd: NDArray[np.float32], samples: list[NDArray[np.int64]]) -> NDArray[np.float32]:
    """Return each class's largest distance to its centre, without outliers beyond Q3 + 1.5·(Q3 − Q1).

    Each process computes a share of the classes, so every process must call this.

    Args:
        embeds_Nd: old embeddings; NaN rows are ignored.
        centres_Cd: each class's centre.
        samples: each class's rows; classes with fewer than four samples have no outliers.

    Returns:
        (C,) float32, NaN for classes with fewer than two readable samples.

    Example:
        >>> embeds = np.array([[0.0], [2.0], [7.0]], np.float32)
        >>> class_radii(embeds, np.array([[1.0], [7.0]], np.float32), [np.array([0, 1]), np.array([2])]).tolist()
        [1.0, nan]
    """

    def radius(label: int) -> float:
        distances_n = np.linalg.norm(embeds_Nd[samples[label]] - centres_Cd[label], axis=1)
        distances_n = distances_n[np.isfinite(distances_n)]
        if len(distances_n) >= FEWEST_FOR_OUTLIERS:
            low, high = np.quantile(distances_n, [0.25, 0.75])
            distances_n = distances_n[distances_n <= high + 1.5 * (high - low)]
        return float(distances_n.max()) if len(distances_n) > 1 else math.nan

    return compute_in_shares(len(samples), lambda labels_c: np.array([radius(label) for label in labels_c], np.float32))
