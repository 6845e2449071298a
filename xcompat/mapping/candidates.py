"""Candidates for a map: a linear map ("line"), a learned transform of queries, and a memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from xcompat.core.fingerprint import Fingerprint
from xcompat.core.threads import unlocked_property
from xcompat.mapping.confidence import Calibration
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings
from xcompat.mapping.score_scales import scale_scores
from xcompat.mapping.training_items import sketch_items
from xcompat.methods import ProcrustesModel, RidgeModel, WhitenedModel
from xcompat.models import CompatModel
from xcompat.models.config import describe_old
from xcompat.models.memory_contents import ClassMemoryContents, ClassStatistics, PairMemoryContents
from xcompat.models.query_memory import LearnedTransform, QueryMemory

Paired = PairedEmbeddings | CaptionedEmbeddings
Described = dict[str, object]
Solver = Callable[[Paired, Described], CompatModel]
"""Maps pairs and the old model (from ``describe_old``) to a linear map; an imported map ignores the pairs."""
Inputs = Callable[[], Sequence[np.ndarray]]
"""Reads the inputs of queries. Most candidates share earlier results and need none."""


def _settings(pairs: Paired, old: Described) -> dict[str, Any]:
    """Return the settings of every linear map. Swapped pairs give a map of galleries."""
    new_dim = pairs.dims[pairs.direction == "old_to_new"]
    return {"old": old, "embedding_dim": new_dim, "direction": pairs.direction}


def rotation(centre: bool = False, scale: bool = False) -> Solver:
    """Return the solver of a rotation (see :class:`~xcompat.methods.procrustes.ProcrustesConfig`)."""

    def solve(pairs: Paired, old: Described) -> CompatModel:
        config = ProcrustesModel.config_class(**_settings(pairs, old), centre=centre, scale=scale)
        return ProcrustesModel(config).fit_moments(pairs.moments).eval()

    return solve


def solve_ridge(pairs: Paired, old: Described) -> CompatModel:
    """Solve a ridge regression."""
    return RidgeModel(RidgeModel.config_class(**_settings(pairs, old))).fit_moments(pairs.moments).eval()


def solve_whitened(pairs: Paired, old: Described) -> CompatModel:
    """Solve a whitened map."""
    return WhitenedModel(WhitenedModel.config_class(**_settings(pairs, old))).fit_moments(pairs.moments).eval()


WHITENED = "whitened"
LINES: dict[str, Solver] = {
    "rotation": rotation(),
    "centred rotation": rotation(centre=True),
    "scaled rotation": rotation(centre=True, scale=True),
    "ridge": solve_ridge,
    WHITENED: solve_whitened,
}
"""Solvers of linear maps by name: from the new space to the old one, or the reverse with swapped pairs."""


def drop_unstable_ridge(lines: Mapping[str, Solver], learned: int, dim: int) -> Mapping[str, Solver]:
    """Drop ridge regression if a fold learns from fewer items than twice the embedding dimension.

    With a weak penalty, its error peaks where both numbers are equal (double descent; Hastie et al. 2022, Surprises in
    High-Dimensional Ridgeless Least Squares Interpolation). Near this peak, results on a fold do not predict those on all items.

    Args:
        lines: linear map name -> solver.
        learned: items per fold.
        dim: dimension of the mapped embeddings.

    Returns:
        The other maps, or all if there are no others.
    """
    return {name: solve for name, solve in lines.items() if solve is not solve_ridge or learned >= 2 * dim} or lines


@dataclass(frozen=True)
class Candidate:
    """Map of queries and its settings.

    Args:
        line: linear map from the new space to the old space.
        power: α of the learned transform; None for no transform.
        damping: ε of the learned transform.
        sharpness: β of the memory.
        share: λ of the memory; 0 for no memory.
        old_share: weight of the old query in a mix with the new query (:func:`~xcompat.heads.slerp`); 0 for the map alone.
    """

    line: str
    power: float | None = None
    damping: float = 0.3
    sharpness: float = 30.0
    share: float = 0.0
    old_share: float = 0.0

    @property
    def kind(self) -> str:
        """Parts of the candidate, without their settings."""
        parts = {"learned transform": self.power is not None, "memory": self.share, "old query": self.old_share}
        return " + ".join([self.line, *(part for part, has in parts.items() if has)])

    def __str__(self) -> str:
        settings = [f"α {self.power:g}, ε {self.damping:g}"] if self.power is not None else []
        settings += [f"β {self.sharpness:g}, λ {self.share:g}"] if self.share else []
        settings += [f"weight {self.old_share:g}"] if self.old_share else []
        return ", ".join([self.kind, *settings])


LEAST_SPREAD = 1e-12
"""Least variance per dimension that counts as a difference within classes: float32 rounding gives less."""
GUESS = Candidate(WHITENED)
"""Candidate if there are too few items for a validation split."""


class CandidateParts:
    """Parts of candidates, learned from a training set on first use.

    Args:
        pairs: training set.
        old: old model, from ``describe_old``; a placeholder if None.
        lines: linear map name -> solver.
        codec: codec for the memory's entries (see :meth:`ClassMemoryContents.build_memory`).

    Attributes:
        lock: held by the thread that uses the parts.
    """

    def __init__(
        self, pairs: Paired, old: Described | None = None, lines: Mapping[str, Solver] = LINES, codec: str | None = None
    ) -> None:
        self.pairs, self.codec, self.lock = pairs, codec, Lock()
        self.old = old or describe_old(Fingerprint.from_string("old"), pairs.dims[pairs.direction == "new_to_old"])
        self.lines = lines
        self._lines: dict[str, CompatModel] = {}
        self._transforms: dict[tuple[float | None, float], LearnedTransform] = {}
        self._memory: tuple[LearnedTransform, QueryMemory] | None = None
        self._computed: dict[Hashable, Tensor] = {}
        self._transformed: dict[Hashable, tuple[Hashable, Tensor]] = {}

    def of_old(self) -> CandidateParts:
        """Return parts for old queries of the same labelled items, with the same statistics of old embeddings."""
        parts, (_, old) = CandidateParts(self.pairs.of_old(), codec=self.codec), self._statistics
        parts._statistics, parts._transforms = (old, old), dict(self._transforms)
        return parts

    def line(self, name: str) -> CompatModel:
        """Return a linear map by name, solved on first use."""
        if name not in self._lines:
            self._lines[name] = self.lines[name](self.pairs, self.old)
        return self._lines[name]

    @unlocked_property
    def _statistics(self) -> tuple[ClassStatistics, ClassStatistics]:
        pairs = self.pairs
        assert isinstance(pairs, PairedEmbeddings) and pairs.labels_N is not None
        new, old = (ClassStatistics.compute(side, pairs.labels_N, pairs.n_classes) for side in (pairs.new_ND, pairs.old_Nd))
        return new, old

    def differ(self) -> tuple[bool, bool]:
        """Return whether new, and old, embeddings of labelled items differ within classes.

        A memory needs this for its keys (new embeddings), and a learned transform for old embeddings.
        """
        new, old = (float(side.within_dd.diagonal().mean()) > LEAST_SPREAD for side in self._statistics)
        return new, old

    @unlocked_property
    def _memory_contents(self) -> ClassMemoryContents | PairMemoryContents:
        pairs = self.pairs
        if isinstance(pairs, CaptionedEmbeddings):
            new, old = ((getattr(pairs.images, side), getattr(pairs.texts, side)) for side in ("new_ND", "old_Nd"))
            return PairMemoryContents.compute(new, old, pairs.groups)
        if pairs.labels_N is None:
            return PairMemoryContents.of_items(pairs.new_ND, pairs.old_Nd)
        return ClassMemoryContents.compute(*self._statistics, pairs.new_ND, pairs.labels_N)

    def _build_transform(self, candidate: Candidate) -> LearnedTransform:
        key = candidate.power, candidate.damping
        if key not in self._transforms:
            if candidate.power is None:
                self._transforms[key] = LearnedTransform(self.pairs.dims[1])
            else:
                _, old = self._statistics
                self._transforms[key] = LearnedTransform.solve(
                    old.mean_d, old.within_dd, candidate.power, candidate.damping, old.eigen
                )
        return self._transforms[key]

    def memory(self, candidate: Candidate, confidence: Calibration | None = None) -> QueryMemory | None:
        """Return a candidate's learned transform and memory, with the calibration if given; None if it has neither."""
        if candidate.power is None and not candidate.share:
            return None
        transform = self._build_transform(candidate)
        if not candidate.share:
            alone = QueryMemory(*self.pairs.dims, entries=0)
            alone.metric = transform
            return alone
        if self._memory is None or self._memory[0] is not transform:  # entries do not depend on β and λ
            self._memory = (
                transform,
                self._memory_contents.build_memory(transform, candidate.sharpness, candidate.share, self.codec),
            )
        memory = self._memory[1]
        memory.sharpness, memory.share = candidate.sharpness, candidate.share
        return memory.calibrate(confidence.slope, confidence.offset) if confidence is not None else memory

    def queries(self, candidate: Candidate, inputs: Inputs, asked: Hashable) -> Tensor:
        """Map queries to the old space; with turned pairs, map stored embeddings to the new space.

        Args:
            candidate: the candidate.
            inputs: reads the map's inputs for the queries (see :meth:`PairedEmbeddings.inputs`).
            asked: key of the queries, to share results between candidates.

        Returns:
            (Q, d) float32, L2-normalised.
        """
        line = self.line(candidate.line)

        def own() -> Tensor:
            placed = [each.to(line.device) for each in _tensors(inputs)]
            return (line.own_upgrade(*placed) if line.maps_galleries else line.to_space_without_memory(placed[0])).cpu()

        with torch.inference_mode():
            own_Qd = self._compute_once((asked, candidate.line), own)
            if candidate.power is None and not candidate.share:
                return own_Qd if line.memory is None else line.memory(_tensors(inputs)[0], own_Qd)
            key = candidate.line, candidate.power, candidate.damping
            if asked not in self._transformed or self._transformed[asked][0] != key:  # memories of other β and λ share it
                self._transformed[asked] = key, self._build_transform(candidate)(own_Qd)
            transformed_Qd = self._transformed[asked][1]
            if candidate.share:
                transformed_Qd = transformed_Qd + candidate.share * self.recall_embeddings(candidate, inputs, asked)
            return F.normalize(transformed_Qd, dim=-1)

    @torch.inference_mode()
    def recall_embeddings(self, candidate: Candidate, inputs: Inputs, asked: Hashable) -> Tensor:
        """Return the recalled old embeddings (Q, d) of queries; arguments as in :meth:`queries`."""
        memory = self.memory(candidate)
        assert memory is not None
        of_memory = bool(candidate.share), candidate.power, candidate.damping, candidate.sharpness
        return self._compute_once((asked, *of_memory), lambda: memory.recall(_tensors(inputs)[0]))

    def _compute_once(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        if key not in self._computed:
            self._computed[key] = compute()
        return self._computed[key]


def fit(candidate: Candidate, known: CandidateParts, confidence: Calibration | None = None) -> CompatModel:
    """Build a candidate's model, with its score scales and a sketch of its training items.

    Args:
        candidate: parts and settings of the map.
        known: parts learned from a training set.
        confidence: calibration of the map's memory; None for no confidence.
    """

    def solve_copy(pairs: Paired, old: Described) -> CompatModel:  # an imported map must not change
        return copy.deepcopy(known.lines[candidate.line](pairs, old))

    def solve(pairs: Paired) -> CompatModel:
        return _assemble_model(candidate, CandidateParts(pairs, known.old, {candidate.line: solve_copy}, known.codec), None)

    model = _assemble_model(candidate, known, confidence)
    scale_scores(model, known.pairs, solve)
    if not model.maps_galleries:
        model.config.training_items = sketch_items(old_Bd.numpy() for _, old_Bd in known.pairs.batches())
    return model


def _assemble_model(candidate: Candidate, known: CandidateParts, confidence: Calibration | None) -> CompatModel:
    """Return a candidate's model without score scales."""
    line, memory = known.line(candidate.line), known.memory(candidate, confidence)
    model = line if memory is None else line.remember(memory)  # an imported map can have its own memory
    model.config.old_share = candidate.old_share or None
    return model


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [torch.from_numpy(np.array(each, np.float32)) for each in inputs()]
