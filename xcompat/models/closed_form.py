"""Linear query maps that are solved, not trained: the first minute of an upgrade."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.encoders.base import Encoder
from xcompat.errors import XcompatError
from xcompat.fingerprint import Fingerprint
from xcompat.models.base import CompatConfig, CompatModel


@dataclass
class Moments:
    """Second moments of paired embeddings, summed in float64 so that any number of rows fits in memory.

    Args:
        count: number of pairs N.
        new_D: sum of the new embeddings.
        old_d: sum of the old embeddings.
        new_new_DD: sum of outer products of the new embeddings.
        new_old_Dd: sum of outer products of new with old embeddings.
    """

    count: int
    new_D: Tensor
    old_d: Tensor
    new_new_DD: Tensor
    new_old_Dd: Tensor


class ClosedFormModel(CompatModel):
    """A map new → old of the form ``normalise(x @ weight + bias)``.

    Args:
        config: the configuration.
        encoder: the frozen new encoder for later inference, not part of the checkpoint.
    """

    columns: ClassVar[tuple[str, ...]] = ("new_embeds", "old_embeds")
    embeds_in_memory = True

    def __init__(self, config: CompatConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        assert config.old is not None
        self.weight = torch.nn.Parameter(torch.zeros(config.embedding_dim, config.old["dim"]), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(config.old["dim"]), requires_grad=False)
        self.post_init()

    def set_trainable(self) -> None:
        """Freeze everything: the map is solved."""
        self.requires_grad_(False)

    def view(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Map new embeddings into the old space (see :meth:`CompatModel.view`)."""
        self.require_version(version)
        return F.normalize((embeds @ self.weight + self.bias).float(), dim=-1)

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Solve for the map in one pass over paired embeddings.

        Args:
            batches: pairs of new (B, D) and old (B, d) embeddings of the same samples, L2-normalised.

        Returns:
            The model itself.

        Raises:
            XcompatError: when there are no pairs.
        """
        moments: Moments | None = None
        for new_BD, old_Bd in batches:
            new, old = new_BD.double(), old_Bd.double()
            if moments is None:
                dims = new.shape[1], old.shape[1]
                zeros = [torch.zeros(s, dtype=torch.float64) for s in ((dims[0],), (dims[1],), (dims[0], dims[0]), dims)]
                moments = Moments(0, *zeros)
            moments.count += len(new)
            moments.new_D += new.sum(0)
            moments.old_d += old.sum(0)
            moments.new_new_DD += new.T @ new
            moments.new_old_Dd += new.T @ old
        if moments is None or moments.count == 0:
            raise XcompatError("a closed-form map needs paired embeddings to be solved from, and there are none")
        weight_Dd, bias_d = self.solve(moments)
        with torch.no_grad():
            self.weight.copy_(weight_Dd)
            self.bias.copy_(bias_d)
        return self

    @abstractmethod
    def solve(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return weight (D, d) and bias (d,) from the moments of the pairs."""
