"""FCT: maps stored old embeddings, with stored side-information, into an unchanged new model's space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.losses import classifier_kl_loss
from xcompat.models.forward_map import ForwardMapConfig, ForwardMapModel, squared_distances
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class FctConfig(ForwardMapConfig):
    """Configuration of :class:`FctModel`.

    Args:
        loss: ``mse`` on embeddings, or ``kl`` or ``reversed_kl`` between the frozen new classifier's predictions for both.
    """

    model_type = "xcompat-fct"

    loss: Literal["mse", "kl", "reversed_kl"] = "mse"


@register
class FctModel(ForwardMapModel):
    """L = mean ‖h(φ_old, ψ) − φ_new‖², and, in a chain, mean ‖g(φ_old, ψ) − ψ_new‖² (FCT §3.3, §4.4).

    ``kl`` is KL(p_new ‖ p_h) between softmaxes over the classifier's logits, or over cosines times ``logit_scale`` for unit
    embeddings; the paper does not state the direction. Weight decay is decoupled; the paper's Adam adds it to the gradient.

    Example:
        >>> import torch
        >>> from xcompat.models.config import describe_old
        >>> from xcompat.core.fingerprint import Fingerprint
        >>> old = describe_old(Fingerprint.from_string("old"), dim=4)
        >>> FctModel(FctConfig(old=old, embedding_dim=8)).eval().upgrade(torch.randn(2, 4)).shape
        torch.Size([2, 8])
    """

    config_class = FctConfig
    citation = "Ramanujan et al., Forward compatible training for large-scale embedding retrieval systems, CVPR 2022"

    classifier_CD: Tensor | None

    def __init__(self, config: FctConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.register_buffer("classifier_CD", None, persistent=False)  # stored in the new model's checkpoint
        self.post_init()

    @classmethod
    @override
    def reads_logit_scale(cls, options: Mapping[str, object], on_captions: bool) -> bool:
        return options["loss"] != "mse"

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Copy the frozen new classifier if the loss needs it."""
        if self.config.loss == "mse":
            return
        weight = getattr(getattr(self._get_encoder(), "classifier", None), "weight", None)
        if weight is None or weight.shape[1] != self.config.embedding_dim:
            raise XcompatError(
                f"loss {self.config.loss} compares predictions of the new model's classifier, but the new model has no "
                "classifier of its embeddings; set options.loss to mse"
            )
        self.classifier_CD = weight.detach().clone()
        self._outside_encoder = []  # frees the backbone's memory while h is trained

    @override
    def map_loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        mapped_BD, new_BD = output["image_embeds"], batch["new_embeds"]
        if self.config.loss == "mse":
            return squared_distances(mapped_BD, new_BD, self.transform.unit).mean()
        if self.classifier_CD is None:
            raise XcompatError("FctModel is not prepared with the new classifier; call prepare(OldKnowledge(...)) first")
        reverse = self.config.loss == "reversed_kl"
        scale = self.config.logit_scale if self.transform.unit else None
        return classifier_kl_loss(mapped_BD, new_BD, self.classifier_CD, scale, reverse=reverse)
