"""Losses: tensors in, scalar out; only :class:`ClassificationHead` has weights."""

from xcompat.losses.alignment import ace_loss, angular_alignment_loss, classifier_kl_loss, l2_alignment_loss
from xcompat.losses.classification import ClassificationHead, batch_hard_triplet_loss, cross_entropy_to, softmax_loss
from xcompat.losses.contrastive import (
    bank_contrast_loss,
    clip_contrastive_loss,
    neighbour_weights,
    neighbourhood_loss,
    nt_xent_loss,
    ract_loss,
    siglip_loss,
)

__all__ = [
    "ClassificationHead",
    "ace_loss",
    "angular_alignment_loss",
    "bank_contrast_loss",
    "batch_hard_triplet_loss",
    "classifier_kl_loss",
    "clip_contrastive_loss",
    "cross_entropy_to",
    "l2_alignment_loss",
    "neighbour_weights",
    "neighbourhood_loss",
    "nt_xent_loss",
    "ract_loss",
    "siglip_loss",
    "softmax_loss",
]
