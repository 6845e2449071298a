"""NCCL: new embeddings and their logits agree with neighbourhoods of old embeddings instead of single embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.distributed import device, gather_objects, my_share
from xcompat.core.errors import XcompatError
from xcompat.losses import neighbour_weights, neighbourhood_loss
from xcompat.models.classified import ClassifiedConfig, ClassifiedModel
from xcompat.models.old_knowledge import OldKnowledge, Rows, class_means
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput

DISTANCES_AT_ONCE = 2**23
"""Most distances between samples and centres in memory."""


class NcclConfig(ClassifiedConfig):
    """Configuration of :class:`NcclModel`.

    Args:
        feature_weight: α.
        logit_weight: β; the public code has .01, tuned on a term without gradient there.
        temperature: t; the public code has 1, but then a softmax over cosines is nearly flat. 0.05 was chosen on validation faces
            (``recipes/vision/search_glyphs.yaml``).
        bank_size: most old embeddings to compare with a sample, drawn once from the training set's credible old embeddings.
        max_entropy: largest class entropy for a credible old embedding, as a share of the maximum entropy.
    """

    model_type = "xcompat-nccl"

    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    logit_weight: Annotated[float, Field(ge=0)] = 0.01
    temperature: Annotated[float, Field(gt=0)] = 0.05
    bank_size: Annotated[int, Field(ge=1)] = 8192
    max_entropy: Annotated[float, Field(ge=0, le=1)] = 0.5


@register
class NcclModel(ClassifiedModel):
    """L = CE(W, f) + α·L_feat + β·L_logit, neighbourhood consensus contrast (Wu et al. 2022).

    Both terms are :func:`xcompat.losses.neighbourhood_loss` with the same weights from the old space. L_feat compares f̂[:d] with
    stored old embeddings. L_logit compares the new classifier's logits for both, which are cosines with W's rows, so no old
    classifier is needed. The bank is exact, because old embeddings never change; samples train only the classifier if their class
    is not in the bank. docs/methods/nccl.md lists the differences from the paper.
    """

    config_class = NcclConfig
    columns = ("pixel_values", "labels", "old_embeds")
    citation = "Wu et al., Neighborhood consensus contrastive learning for backward-compatible representation, AAAI 2022"

    made_by_prepare = ("bank_Qd", "bank_labels_Q")
    bank_Qd: Tensor | None
    bank_labels_Q: Tensor | None

    @classmethod
    @override
    def refuse_unread(cls, options: Mapping[str, object], on_captions: bool) -> None:
        """Raise also for a logit comparison if the head has no logits."""
        super().refuse_unread(options, on_captions)
        if options.get("head") == "triplet" and options.get("logit_weight", cls.config_class.logit_weight):
            raise XcompatError("options.head: nccl compares logits, but a triplet head has none; set options.logit_weight to 0")

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Fill the bank with credible old embeddings."""
        entropies_N, classes = class_entropies(old)
        # rounding can lift the entropy of a uniform distribution above the maximum
        credible_Q = np.flatnonzero(entropies_N <= self.config.max_entropy * np.log(classes) + 1e-6)
        if not len(credible_Q):
            raise XcompatError("no training image passes options.max_entropy; increase it (maximum 1)")
        if len(credible_Q) > self.config.bank_size:
            drawn = torch.randperm(len(credible_Q))[: self.config.bank_size].sort().values
            credible_Q = credible_Q[drawn.numpy()]
        self.bank_Qd = F.normalize(torch.from_numpy(old.embeddings("nccl")[credible_Q]).to(self.device), dim=-1)
        self.bank_labels_Q = torch.from_numpy(old.labels_N[credible_Q]).to(self.device)

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        if self.bank_Qd is None or self.bank_labels_Q is None:
            raise XcompatError("nccl is not prepared; call prepare(OldKnowledge(...)) first")
        config, features_BD, labels_B, old_Bd = self.config, output["features"], batch["labels"], batch["old_embeds"]
        loss = self.classification_loss(features_BD, labels_B)
        with torch.autocast(features_BD.device.type, enabled=False):
            new_Bd = F.normalize(self.old_features(features_BD), dim=-1)
            readable_B1 = old_Bd[:, :1].isfinite()
            weights_BQ = readable_B1 * neighbour_weights(old_Bd.nan_to_num(nan=0.0), self.bank_Qd, labels_B, self.bank_labels_Q)
            loss = loss + config.feature_weight * neighbourhood_loss(new_Bd, self.bank_Qd, weights_BQ, config.temperature)
            if config.logit_weight:
                assert self.classifier is not None and self.classifier.weight is not None
                weight_Cd = F.normalize(self.old_features(self.classifier.weight), dim=-1)
                said_Bd, bank_Qd = consensus(new_Bd, self.bank_Qd, weight_Cd)
                loss = loss + config.logit_weight * neighbourhood_loss(said_Bd, bank_Qd, weights_BQ, config.temperature)
        return loss


def consensus(new_Bd: Tensor, bank_Qd: Tensor, weight_Cd: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors for the cosines between logits z = W·new and Z = W·bank, without computing the bank's logits.

    z·Z = newᵀ(WᵀW)bank needs only a (d, d) matrix; logits for 8,192 stored embeddings over 100,000 classes would take 3 GB.

    Args:
        new_Bd: new embeddings.
        bank_Qd: old embeddings; their logits are targets, without gradient.
        weight_Cd: the classifier's rows.

    Returns:
        (B, d) and (Q, d).

    Example:
        >>> new, bank, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [3.0, 4.0]]), torch.eye(2)
        >>> said, stored = consensus(new, bank, weight)
        >>> [round(cosine, 3) for cosine in (said @ stored.T)[0].tolist()]
        [1.0, 0.6]
    """
    target_Cd = weight_Cd.detach()
    length_B1 = (new_Bd @ weight_Cd.T).norm(dim=-1, keepdim=True)
    length_Q1 = ((bank_Qd @ (target_Cd.T @ target_Cd)) * bank_Qd).sum(dim=-1, keepdim=True).clamp(min=1e-12).sqrt()
    return new_Bd @ (weight_Cd.T @ target_Cd) / length_B1.clamp(min=1e-6), bank_Qd / length_Q1


def class_entropies(old: OldKnowledge) -> tuple[NDArray[np.float64], int]:
    """Return the entropy of each old embedding's class distribution, independent of its own label.

    p(k | o) ∝ exp(−‖o − c_k‖²/2σ²) over all classes' centres; entropies are in nats. σ² is the variance per dimension within
    classes, pooled over all classes, because classes with few samples cannot estimate their own.

    Each process computes a share, on its CUDA device if it has one. All get the result.

    Args:
        old: the training set's old embeddings.

    Returns:
        (N,) entropies, NaN for unreadable images, and the number of classes with a centre.

    Raises:
        XcompatError: only prototypes are known.
    """
    embeds_Nd, labels_N = old.embeddings("nccl"), old.labels_N
    place = device() if device().type == "cuda" else torch.device("cpu")  # others may lack float64
    centres_Cd = torch.from_numpy(class_means(embeds_Nd, labels_N, old.n_classes)).double().to(place)
    centres_Kd = centres_Cd[centres_Cd[:, 0].isfinite()]
    mine, rows = my_share(np.arange(len(labels_N)), shared=True), max(1, DISTANCES_AT_ONCE // len(centres_Kd))
    blocks = [mine[start : start + rows] for start in range(0, len(mine), rows)]

    def compute(of_block: Callable[[Tensor, Tensor], Tensor]) -> NDArray[np.float64]:
        """Compute a number per row, block by block."""
        parts = [
            of_block(torch.from_numpy(embeds_Nd[block]).to(place).double(), torch.from_numpy(labels_N[block]).to(place))
            for block in blocks
        ]
        share_N = torch.cat(parts).numpy(force=True) if parts else np.empty(0)
        return np.concatenate(gather_objects(share_N, shared=True))

    squares_N = compute(lambda embeds_Bd, labels_B: (embeds_Bd - centres_Cd[labels_B]).square().mean(dim=1))
    variance = max(float(torch.from_numpy(squares_N).nanmean()), 1e-12)

    def entropy(embeds_Bd: Tensor, labels_B: Tensor) -> Tensor:
        log_shares_BK = (-torch.cdist(embeds_Bd, centres_Kd).square() / (2 * variance)).log_softmax(dim=1)
        return -(log_shares_BK.exp() * log_shares_BK).sum(dim=1)

    return compute(entropy), len(centres_Kd)
