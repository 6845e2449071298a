"""Classification losses: softmax with and without margins, against frozen old weights, and batch-hard triplets.

Logits (B samples, C classes) are computed for a few samples at a time, and again in the backward pass. At most three blocks of
``LOGITS_AT_ONCE`` numbers exist at a time (96 MiB in float32 for any batch), so 100,000 classes fit beside a backbone. Every
sample has its own softmax, so blocks give the same result as the whole matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from xcompat.core.distributed import mean_over_ranks
from xcompat.core.errors import XcompatError, nearest

HeadKind = Literal["softmax", "normalized_softmax", "arcface", "cosface", "triplet"]

LOGITS_AT_ONCE = 2**23
"""Most logits in one block, unless there are more classes."""

USUAL_TRIPLET_MARGIN = 0.3
"""Default margin of triplets (Hermans et al. 2017 try 0.1 to 1; 0.3 is usual in re-identification)."""

_LEFT_OUT = -100  # the label that torch's cross-entropy ignores
ABSENT = -1e30
"""Logit of a class without a row, with a softmax of 0. Infinity would give NaN if all classes are absent."""
_USUAL: dict[str, tuple[float | None, float | None]] = {
    "softmax": (None, None),
    "normalized_softmax": (20.0, None),
    "arcface": (64.0, 0.5),
    "cosface": (64.0, 0.35),
    "triplet": (None, USUAL_TRIPLET_MARGIN),
}
"""Default scale and margin of each kind of head; None without one."""


def softmax_loss(
    features_BD: Tensor,
    weight_CD: Tensor,
    labels_B: Tensor,
    scale: float | None = None,
    *,
    angular_margin: float = 0.0,
    cosine_margin: float = 0.0,
) -> Tensor:
    """Return the softmax cross-entropy without bias, plain or over cosines with a margin.

    The logits are x·w without a scale. With a scale s they are s·cos θ, and s·(cos(θ + m1) − m2) for the true class. This is
    normalised softmax (Wang et al. 2017; Zhai and Wu 2019) without margins, ArcFace with m1 (Deng et al. 2019, Eqn. 3), and
    CosFace with m2 (Wang et al. 2018, Eqn. 4). Beyond θ = π − m1, where cos(θ + m1) would rise again, it is cos θ − m1·sin m1, as
    in ArcFace's public code.

    Args:
        features_BD: features of any length; raw for plain softmax.
        weight_CD: a row per class.
        labels_B: (B,) int64 in [0, C).
        scale: s; None to use plain dot products, without normalisation.
        angular_margin: m1, radians.
        cosine_margin: m2.

    Returns:
        Scalar, in nats: the mean over the samples.

    Raises:
        XcompatError: features and weights have different dimensions, or there is a margin without a scale.

    Example:
        >>> softmax_loss(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), 64.0).item()
        0.0
    """
    if scale is None and (angular_margin or cosine_margin):
        raise XcompatError("a margin needs cosines, but without a scale logits are dot products; set a scale, e.g. 64")
    margin = functools.partial(_with_margin, angle=angular_margin, cosine=cosine_margin)
    return _losses(features_BD, weight_CD, labels_B, scale, margin=margin if angular_margin or cosine_margin else None).mean()


def cross_entropy_to(weights_Cd: Tensor, embeds_Bd: Tensor, labels_B: Tensor, scale: float | None = None) -> Tensor:
    """Return the cross-entropy between new embeddings and frozen old weights (Shen et al. 2020, influence loss).

    Samples contribute nothing if their class has no row: the row is NaN, or the label is beyond the last row. Such a class is not
    a negative, but an old class without new samples is.

    Args:
        weights_Cd: frozen prototypes or old classifier rows; NaN for classes unknown to the old model.
        embeds_Bd: new embeddings in the old dimension: the first d dimensions if expanded.
        labels_B: (B,) int64, at least 0.
        scale: factor on cosines; None to use dot products as in the paper, which depend on both lengths. They suit raw features
            and classifiers, not unit embeddings, because unit embeddings' prototypes are shorter than 1.

    Returns:
        Scalar, in nats: the mean over the samples with a row on all ranks, or 0 without any (with a gradient of 0). Its mean over
        the ranks equals a single process's loss on the whole batch.

    Raises:
        XcompatError: embeddings and weights have different dimensions.

    Example:
        >>> old = torch.tensor([[1.0, 0.0], [torch.nan, torch.nan]])
        >>> cross_entropy_to(old, torch.ones(3, 2), torch.tensor([0, 1, 2])).item()  # one known class: nothing to confuse
        0.0
    """
    row_B, known_B = rows_of_labels(weights_Cd, labels_B)
    absent_C = weights_Cd[:, 0].isnan()
    bias_C = torch.zeros_like(absent_C, dtype=loss_dtype(embeds_Bd, weights_Cd)).masked_fill(absent_C, ABSENT)
    targets_B = row_B.masked_fill(~known_B, _LEFT_OUT)
    return mean_of_known(_losses(embeds_Bd, weights_Cd.nan_to_num(nan=0.0), targets_B, scale, bias_C=bias_C), known_B)


def batch_hard_triplet_loss(features_BD: Tensor, labels_B: Tensor, margin: float = USUAL_TRIPLET_MARGIN) -> Tensor:
    """Return a hinge on the farthest same-class and the nearest other sample (Hermans et al. 2017, Eqn. 5, batch hard).

    Distances are Euclidean, not squared, between normalised features, because galleries are compared by cosine; the paper uses
    raw features. An anchor needs another sample in its class and a sample in another class.

    Args:
        features_BD: this rank's features; each rank mines only its own samples.
        labels_B: (B,) int64.
        margin: m, a distance; unit vectors are at most 2 apart.

    Returns:
        Scalar: the mean over all anchors, including those that satisfy the margin.

    Raises:
        XcompatError: the batch has no anchor. On other devices than CPUs, and in a compiled step, the loss is then 0.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> batch_hard_triplet_loss(features, torch.tensor([0, 0, 1])).item()
        0.0
    """
    same_BB = labels_B[:, None] == labels_B
    positive_BB = same_BB & ~torch.eye(len(labels_B), dtype=torch.bool, device=labels_B.device)
    anchor_B = positive_BB.any(dim=1) & ~same_BB.all(dim=1)
    looks = labels_B.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would be waited for
    if looks and not anchor_B.any():
        raise XcompatError(
            "the batch has no triplet: it has fewer than two samples of every class, or a single class; "
            "draw several samples of several classes into every batch"
        )
    embeds_BD = F.normalize(features_BD.to(loss_dtype(features_BD)), dim=-1)
    # a matrix product would lose small distances in rounding
    distance_BB = torch.cdist(embeds_BD, embeds_BD, compute_mode="donot_use_mm_for_euclid_dist")
    farthest_B = distance_BB.masked_fill(~positive_BB, -torch.inf).amax(dim=1)
    nearest_B = distance_BB.masked_fill(same_BB, torch.inf).amin(dim=1)
    return mean_of_known(F.relu(farthest_B - nearest_B + margin), anchor_B)


class ClassificationHead(nn.Module):
    """Trainable classifier and its loss.

    Args:
        dim: D, the feature dimension.
        num_classes: C.
        kind: ``softmax`` on raw features, ``normalized_softmax``, ``arcface``, ``cosface`` (see :func:`softmax_loss`), or
            ``triplet``, which has no weights (:func:`batch_hard_triplet_loss`).
        scale: s, factor on cosines; None to use the default: 20, and 64 with a margin.
        margin: None to use the default: 0.5 rad for ArcFace, 0.35 for CosFace, a distance of 0.3 for triplets.

    Raises:
        XcompatError: the kind is unknown, or has no scale or margin.

    Example:
        >>> ClassificationHead(8, 100, "arcface")
        ClassificationHead(arcface, scale=64.0, margin=0.5)
    """

    weight: nn.Parameter | None

    def __init__(
        self, dim: int, num_classes: int, kind: HeadKind = "softmax", scale: float | None = None, margin: float | None = None
    ) -> None:
        super().__init__()
        if kind not in _USUAL:
            raise XcompatError(f"unknown classification head {kind!r}; {nearest(kind, _USUAL)}")
        self.kind = kind
        self.scale, self.margin = _choose(kind, "scale", scale, 0), _choose(kind, "margin", margin, 1)
        self.register_parameter("weight", None if kind == "triplet" else nn.Parameter(torch.empty(num_classes, dim)))
        if self.weight is not None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # like torch's linear layers

    def forward(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Classify features and return the loss.

        Args:
            features_BD: features before normalisation.
            labels_B: (B,) int64 in [0, C).

        Returns:
            Scalar loss: the mean over the batch.
        """
        if self.weight is None:
            assert self.margin is not None
            return batch_hard_triplet_loss(features_BD, labels_B, self.margin)
        margin = self.margin or 0.0
        angular, cosine = (margin, 0.0) if self.kind == "arcface" else (0.0, margin)
        return softmax_loss(features_BD, self.weight, labels_B, self.scale, angular_margin=angular, cosine_margin=cosine)

    def extra_repr(self) -> str:
        """Return kind, scale and margin for ``print(model)``."""
        given = [f"{name}={value}" for name, value in (("scale", self.scale), ("margin", self.margin)) if value is not None]
        return ", ".join([self.kind, *given])


def loss_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the loss precision for these tensors: the widest input dtype, at least float32."""
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def in_blocks(block: Callable[..., Tensor], rows: int, *tensors: Tensor) -> list[Tensor]:
    """Apply a function to blocks of rows; the backward pass recomputes several blocks to save memory.

    Args:
        block: function to call with a block from each tensor.
        rows: most rows per block.
        tensors: tensors of equal length.

    Returns:
        A result per block.
    """
    if len(tensors[0]) <= rows:
        return [block(*tensors)]
    parts = zip(*(tensor.split(rows) for tensor in tensors), strict=True)
    return [checkpoint(block, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]


def rows_of_labels(weights_Cd: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's row (B,), 0 for classes beyond the last row, and whether the row exists (B,)."""
    exists_B = labels_B < len(weights_Cd)
    row_B = labels_B.where(exists_B, torch.zeros_like(labels_B))
    return row_B, exists_B & ~weights_Cd[row_B, 0].isnan()


def mean_of_known(losses_B: Tensor, known_B: Tensor) -> Tensor:
    """Average losses so that every sample weighs the same on every rank.

    Args:
        losses_B: this rank's finite losses.
        known_B: (B,) bool, the samples that count.

    Returns:
        Scalar: this rank's sum divided by the mean count per rank, 0 if no rank has any. Data-parallel training averages
        gradients over the ranks, which gives the mean over all samples.
    """
    known = known_B.to(losses_B.dtype)
    count = mean_over_ranks(known.sum())
    return (losses_B * known).sum() / (count + (count == 0))


def _losses(
    embeds_BD: Tensor,
    weight_CD: Tensor,
    labels_B: Tensor,
    scale: float | None,
    *,
    bias_C: Tensor | None = None,
    margin: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return each sample's cross-entropy (B,), in blocks; 0 for the label ``_LEFT_OUT``."""
    if embeds_BD.shape[1] != weight_CD.shape[1]:
        raise XcompatError(
            f"features of dimension {embeds_BD.shape[1]} cannot be classified by weights of dimension {weight_CD.shape[1]}; "
            "pass only the old dimensions of expanded features"
        )
    dtype = loss_dtype(embeds_BD, weight_CD)
    embeds_BD, weight_CD = embeds_BD.to(dtype), weight_CD.to(dtype)
    if scale is not None:
        embeds_BD, weight_CD = F.normalize(embeds_BD, dim=-1), F.normalize(weight_CD, dim=-1)
    block = functools.partial(_block_losses, weight_CD=weight_CD, scale=scale, bias_C=bias_C, margin=margin)
    return torch.cat(in_blocks(block, max(1, LOGITS_AT_ONCE // len(weight_CD)), embeds_BD, labels_B))


def _block_losses(
    embeds_BD: Tensor,
    labels_B: Tensor,
    *,
    weight_CD: Tensor,
    scale: float | None,
    bias_C: Tensor | None,
    margin: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    with torch.autocast(embeds_BD.device.type, enabled=False):  # bf16 logits would be rounded to 1/4 at scale 64
        logits_BC = F.linear(embeds_BD, weight_CD, bias_C)
        if margin is not None:
            own = torch.arange(len(labels_B), device=labels_B.device), labels_B
            logits_BC[own] = margin(logits_BC[own])
        if scale is not None:
            logits_BC.mul_(scale)
        return F.cross_entropy(logits_BC, labels_B, ignore_index=_LEFT_OUT, reduction="none")


def _with_margin(cosines: Tensor, *, angle: float, cosine: float) -> Tensor:
    """Return cos(θ + angle) − cosine, decreasing over all of [0, π]."""
    sines = (1 - cosines.square()).clamp(min=torch.finfo(cosines.dtype).eps).sqrt()  # its slope at 0 is infinite
    turned = cosines * math.cos(angle) - sines * math.sin(angle)
    return torch.where(cosines >= -math.cos(angle), turned, cosines - angle * math.sin(angle)) - cosine


def numbers_of_head(kind: HeadKind) -> set[str]:
    """Return which settings a head kind has: ``scale``, ``margin`` or both.

    Example:
        >>> numbers_of_head("triplet")
        {'margin'}
    """
    return {name for name, usual in zip(("scale", "margin"), _USUAL[kind], strict=True) if usual is not None}


def _choose(kind: str, name: str, given: float | None, place: int) -> float | None:
    usual = _USUAL[kind][place]
    if given is not None and usual is None:
        raise XcompatError(f"a {kind} head has no {name}, but {name} is {given}; remove it, or choose another kind")
    return usual if given is None else given
