"""Losses: tensors in, scalar out; only :class:`ClassificationHead` holds weights."""

from xcompat.losses.alignment import ace_loss, angular_alignment_loss, l2_alignment_loss
from xcompat.losses.bank import bank_contrast_loss
from xcompat.losses.classification import (
    ClassificationHead,
    batch_hard_triplet_loss,
    cross_entropy_to,
    softmax_loss,
)
from xcompat.losses.contrastive import clip_contrastive_loss, siglip_loss
from xcompat.losses.distillation import classifier_kl_loss
from xcompat.losses.neighbourhood import neighbour_weights, neighbourhood_loss
from xcompat.losses.ract import ract_loss
from xcompat.losses.self_supervised import nt_xent_loss

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
