"""FastFill: FCT's gallery map with an uncertainty per item, to re-embed the least certain items first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.forward_map import ForwardMapConfig, ForwardMapModel, squared_distances
from xcompat.models.old_knowledge import OldKnowledge, Rows, class_means
from xcompat.models.registry import register
from xcompat.outputs import Batch, CompatOutput


class FastfillConfig(ForwardMapConfig):
    """Configuration of :class:`FastfillModel`.

    Args:
        alignment_weight: λ, the squared distance's weight beside the classification of mapped embeddings.
        scale: factor on the cosines between mapped embeddings and class means.
        smoothing: label smoothing, the share of a label spread over all classes.
    """

    model_type = "xcompat-fastfill"

    alignment_weight: Annotated[float, Field(ge=0)] = 1.0
    scale: Annotated[float, Field(gt=0)] = 30.0
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1


@dataclass
class FastfillOutput(CompatOutput):
    """Mapped embeddings with their uncertainty.

    Args:
        log_variance_B: (B,) float32, s = log σ².
    """

    log_variance_B: Tensor | None = None


@register
class FastfillModel(ForwardMapModel):
    """L = mean ½·exp(−s)·e + ½·s, e = λ·‖h(o, ψ) − n‖² + CE(W, h(o, ψ)), s = log σ²(o, ψ) (Jaeckle et al. 2023, §3).

    This is the Gaussian negative log likelihood in Kendall and Gal (2017): s learns the size of an item's error e. s is an
    additional output of h's last layer; the authors' code has it linear in h(o). W's rows are the class means of new embeddings,
    and logits are scaled cosines; the paper uses the new model's classifier. λ is 1 as in the authors' code, which takes a mean
    over dimensions instead of a sum.
    """

    config_class = FastfillConfig
    columns: ClassVar[tuple[str, ...]] = ("new_embeds", "old_embeds", "labels")
    citation = "Jaeckle et al., FastFill: efficient compatible model update, ICLR 2023"

    means_KD: Tensor | None
    rows_C: Tensor

    def __init__(self, config: FastfillConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.log_variance = nn.Linear(config.mixer_width, 1)
        self.register_buffer("means_KD", None, persistent=False)
        self.register_buffer("rows_C", torch.empty(0, dtype=torch.long), persistent=False)
        self.post_init()

    @override
    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Compute the new embeddings' class means."""
        assert new_ND is not None
        means_CD = torch.from_numpy(class_means(new_ND, old.labels_N, old.n_classes))
        known_C = means_CD[:, 0].isfinite()  # labels never name a class without a readable sample
        self.means_KD = F.normalize(means_CD[known_C], dim=-1).to(self.device)
        self.rows_C = (known_C.cumsum(0) - 1).to(self.device)

    def uncertainty(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Return stored items' log σ². The paper re-embeds the largest first.

        Args:
            old_embeds: (B, d) stored embeddings.
            side_info: (B, S) stored side-information, if the map was trained with it.

        Returns:
            (B,) float32.

        Example:
            >>> from xcompat.models.config import describe_old
            >>> from xcompat.core.fingerprint import Fingerprint
            >>> old = describe_old(Fingerprint.from_string("old"), dim=4)
            >>> FastfillModel(FastfillConfig(old=old, embedding_dim=8)).eval().uncertainty(torch.randn(2, 4)).shape
            torch.Size([2])
        """
        self.require_side_info(side_info)
        return self._log_variance(self.transform.to_last_layer(old_embeds, side_info))

    def _log_variance(self, inside_BM: Tensor) -> Tensor:
        return self.log_variance(inside_BM)[:, 0].float()

    @override
    def embed_batch(self, batch: Batch) -> FastfillOutput:
        """Map old embeddings, and return their uncertainty."""
        self.begin_batch(batch)
        inside_BM = self.transform.to_last_layer(batch["old_embeds"], batch.get("side_info"))
        return FastfillOutput(
            image_embeds=self.transform.apply_last_layer(inside_BM), log_variance_B=self._log_variance(inside_BM)
        )

    @override
    def map_loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        if self.means_KD is None:
            raise XcompatError("FastfillModel is not prepared; call prepare(OldKnowledge(...), new_embeddings) first")
        mapped_BD, s_B, labels_B = output["image_embeds"], output["log_variance_B"], batch["labels"]
        logits_BK = self.config.scale * F.normalize(mapped_BD, dim=-1) @ self.means_KD.T
        named_B = F.cross_entropy(logits_BK, self.rows_C[labels_B], reduction="none", label_smoothing=self.config.smoothing)
        far_B = squared_distances(mapped_BD, batch["new_embeds"], self.transform.unit)
        error_B = self.config.alignment_weight * far_B + named_B
        return (torch.exp(-s_B) * error_B + s_B).mean() / 2
