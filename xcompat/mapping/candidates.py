"""What a map of queries can be made of: a line, the metric that queries wear on it, and what they remember."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from xcompat.fingerprint import Fingerprint
from xcompat.mapping.paired import PairedEmbeddings
from xcompat.models import CompatModel, ProcrustesModel, RidgeModel
from xcompat.models.closed_form import ClosedFormModel, readable_pairs
from xcompat.models.config import describe_old
from xcompat.models.query_memory import ClassStatistics, QueryMemory, QueryMetric, RememberedClasses

Line = Literal["procrustes", "ridge"]


@dataclass(frozen=True)
class Candidate:
    """A map of queries and its settings.

    Args:
        line: what brings the new space to the old one.
        power: α of the metric; None for no metric, and then no memory either.
        damping: ε of the metric.
        sharpness: β of the memory.
        share: λ of the memory; 0 for none.
    """

    line: Line
    power: float | None = None
    damping: float = 0.3
    sharpness: float = 30.0
    share: float = 0.0

    @property
    def kind(self) -> str:
        """What people call it."""
        if self.power is None:
            return self.line
        return f"{self.line} + metric" if not self.share else f"{self.line} + metric + memory"

    def __str__(self) -> str:
        if self.power is None:
            return self.kind
        metric = f"{self.kind}, α {self.power:g}, ε {self.damping:g}"
        return metric if not self.share else f"{metric}, β {self.sharpness:g}, λ {self.share:g}"


class Known:
    """What is learned from a training set, each part when a candidate first needs it.

    Args:
        pairs: the training set.
        old: the old model as ``describe_old`` gives it; made up if None.
    """

    def __init__(self, pairs: PairedEmbeddings, old: dict[str, object] | None = None) -> None:
        self.pairs = pairs
        self.old = old or describe_old(Fingerprint.from_string("old"), pairs.old_Nd.shape[1])
        self._lines: dict[Line, ClosedFormModel] = {}
        self._metrics: dict[tuple[float, float], QueryMetric] = {}

    def line(self, kind: Line) -> ClosedFormModel:
        """Return a solved line; it is made once."""
        if kind not in self._lines:
            described = {"old": self.old, "embedding_dim": self.pairs.new_ND.shape[1]}
            if kind == "ridge":
                model: ClosedFormModel = RidgeModel(RidgeModel.config_class(**described))
            else:
                model = ProcrustesModel(ProcrustesModel.config_class(**described, centre=True, scale=True))
            self._lines[kind] = model.fit(readable_pairs(self.pairs.new_ND, self.pairs.old_Nd)).eval()
        return self._lines[kind]

    @cached_property
    def _statistics(self) -> tuple[ClassStatistics, ClassStatistics]:
        """Means and covariances of the new and of the old embeddings."""
        assert self.pairs.labels_N is not None
        new, old = (
            ClassStatistics.of(side, self.pairs.labels_N, self.pairs.n_classes) for side in (self.pairs.new_ND, self.pairs.old_Nd)
        )
        return new, old

    @cached_property
    def _remembered(self) -> RememberedClasses:
        assert self.pairs.labels_N is not None
        return RememberedClasses.of(*self._statistics, self.pairs.new_ND, self.pairs.labels_N)

    def _metric(self, power: float, damping: float) -> QueryMetric:
        """Return a solved metric; it is made once."""
        if (power, damping) not in self._metrics:
            _, old = self._statistics
            self._metrics[power, damping] = QueryMetric.solve(old.mean_d, old.within_dd, power, damping)
        return self._metrics[power, damping]

    def worn(self, candidate: Candidate) -> QueryMemory | None:
        """Return the metric and the memory of a candidate."""
        if candidate.power is None:
            return None
        metric = self._metric(candidate.power, candidate.damping)
        if candidate.share:
            return self._remembered.memory(metric, candidate.sharpness, candidate.share)
        alone = QueryMemory(self.pairs.new_ND.shape[1], self.pairs.old_Nd.shape[1], entries=0)
        alone.metric = metric
        return alone

    def queries(self, candidate: Candidate, new_QD: np.ndarray) -> Tensor:
        """Bring queries into the old space as a candidate would (Q, d)."""
        with torch.inference_mode():
            inputs_QD = torch.from_numpy(np.array(new_QD, np.float32))
            own_Qd = self.line(candidate.line).own_view(inputs_QD)
            memory = self.worn(candidate)
            return own_Qd if memory is None else memory(inputs_QD, own_Qd)


def fit(candidate: Candidate, known: Known) -> CompatModel:
    """Return a candidate as a model like any other.

    Args:
        candidate: what it is made of.
        known: the training set.
    """
    return known.line(candidate.line).remember(known.worn(candidate))
