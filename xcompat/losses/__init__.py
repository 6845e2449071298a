"""Losses: tensors in, scalar out; no model, no configuration, no state."""

from xcompat.losses.contrastive import clip_contrastive_loss, siglip_loss

__all__ = ["clip_contrastive_loss", "siglip_loss"]
