"""mini-vec2vec: a rotation between two spaces, found without pairs from both point clouds' shapes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.models.closed_form import ClosedFormModel
from xcompat.models.kmeans import find_centroids
from xcompat.models.mapped import MappedConfig
from xcompat.models.registry import register

Floats = NDArray[np.float64]
STARTS = 20
"""Starts of each quadratic assignment, which finds local optima."""
CLUSTERED, MATCHED = 2000, 1000
"""Rows to cluster, and rows to match per round of refinement."""
FINE_CLUSTERS = 500
SMOOTHING = 0.5
BEST = 1 / 3
"""Share of the matchings to use: those with the most similar inner products."""


class MiniVec2VecConfig(MappedConfig):
    """Configuration of :class:`MiniVec2VecModel`.

    Args:
        clusters: centroids per side to pair in a matching.
        runs: number of matchings, each with new centroids.
        neighbours: number of target embeddings to average into an unknown partner.
        rounds: refinement rounds.
        sample: most embeddings per side to use.
        least_agreement: least mean cosine between the maps from two separate halves of the data; below it, fitting fails. Use
            -1 to accept any map.
        seed: random seed.
    """

    model_type = "xcompat-mini_vec2vec"

    clusters: int = 20
    runs: int = 30
    neighbours: int = 50
    rounds: int = 50
    sample: int = 10_000
    least_agreement: Annotated[float, Field(ge=-1, le=1)] = 0.8
    seed: Annotated[int, Field(ge=0)] = 0


@register
class MiniVec2VecModel(ClosedFormModel):
    """g(x) = normalise(s·(x − μ_x)·W + μ_y), W with orthonormal columns (rows, if T > S), found without pairs (arXiv 2510.02348).

    Both clouds are centred and normalised. k-means finds centroids in each, and a quadratic assignment pairs them by inner
    products, on several draws. Each embedding is described by its cosines to the paired centroids and matched with the mean of
    the targets with the nearest descriptions. W is the Procrustes map for these matches. Refinement matches x·W with its nearest
    targets, and moves W halfway to their Procrustes map. Finally, the target's k-means starts at the source's mapped centroids.

    ``fit`` orders each side by a hash of the values, so it cannot know the pairs. Maps from two separate halves of the data agree
    only if the spaces match. s is the ratio of mean lengths of centred embeddings. docs/methods/mini_vec2vec.md lists the
    differences from the paper.
    """

    config_class = MiniVec2VecConfig
    citation = "Dar, mini-vec2vec: scaling universal geometry alignment with linear transformations, arXiv 2510.02348"

    def __init__(self, config: MiniVec2VecConfig, encoder: Encoder | None = None) -> None:
        for name in ("clusters", "runs", "neighbours", "rounds", "sample"):
            if getattr(config, name) < 1:
                raise XcompatError(f"options.{name} is {getattr(config, name)}; give a number from 1, or remove it")
        super().__init__(config, encoder)

    @override
    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Find the map from both sides' embeddings. Samples and their numbers can differ."""
        assert isinstance(self.config, MiniVec2VecConfig)
        sides = _Sample(self.config.sample, self.config.seed), _Sample(self.config.sample, self.config.seed + 1)
        for batch in batches:
            for side, rows in zip(sides, self.order_sides(*batch), strict=True):
                side.add(rows)
        source_NS, target_MT = (side.rows() for side in sides)
        source, target = _centre(source_NS), _centre(target_MT)
        search = _Search(self.config, np.random.default_rng(self.config.seed))
        weight_ST, agreement = search.find_map(source.unit, target.unit)
        if not agreement >= self.config.least_agreement:
            raise XcompatError(
                f"the two spaces do not match: maps from two halves of the data agree by a cosine of {agreement:.2f}, and "
                f"{self.config.least_agreement} is needed; use more and more varied embeddings, or pairs (method procrustes)"
            )
        weight_ST = weight_ST * (target.length / source.length)
        bias_T = target.mean - source.mean @ weight_ST
        return self.set_map(torch.from_numpy(weight_ST), torch.from_numpy(bias_T))


class _Sample:
    """Stream sample: the rows with the smallest value hashes, independent of the stream's order."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.key = size, seed.to_bytes(8, "little", signed=True)
        self.kept: dict[bytes, NDArray[np.float32]] = {}

    def add(self, rows_BD: Tensor) -> None:
        for row_D in np.ascontiguousarray(rows_BD.float().numpy()):
            digest = blake2b(row_D.tobytes(), digest_size=16, key=self.key).digest()
            self.kept[digest] = row_D.copy()  # a view would keep its whole batch in memory
        if len(self.kept) > 2 * self.size:
            self._cut()

    def _cut(self) -> None:
        self.kept = {digest: self.kept[digest] for digest in sorted(self.kept)[: self.size]}

    def rows(self) -> Floats:
        """Return the sample (N, D); raise for fewer than four different rows."""
        self._cut()
        if len(self.kept) < 4:
            raise XcompatError(f"mini_vec2vec needs at least 4 different embeddings of each model, found {len(self.kept)}")
        return np.stack(list(self.kept.values())).astype(np.float64)


class _Cloud(NamedTuple):
    """Embeddings as directions (N, D) from their mean (D,), and their mean distance from it."""

    unit: Floats
    mean: Floats
    length: float


def _centre(rows_ND: Floats) -> _Cloud:
    mean_D = rows_ND.mean(0)
    lengths_N = np.linalg.norm(rows_ND - mean_D, axis=1)
    return _Cloud(_unit(rows_ND - mean_D), mean_D, float(lengths_N.mean()))


def _unit(rows_ND: Floats) -> Floats:
    return np.asarray(rows_ND / np.maximum(np.linalg.norm(rows_ND, axis=1, keepdims=True), 1e-12))


def _rotation(source_NS: Floats, target_NT: Floats) -> Floats:
    left, _, right = np.linalg.svd(source_NS.T @ target_NT, full_matrices=False)
    return np.asarray(left @ right)


class _Anchors(NamedTuple):
    """Both clouds' paired centroids (C, S) and (C, T), and the correlation between their inner products."""

    source_CS: Floats
    target_CT: Floats
    score: float


class _Search:
    """The paper's steps, with common settings and random draws."""

    def __init__(self, config: MiniVec2VecConfig, draws: np.random.Generator) -> None:
        self.config, self.draws = config, draws

    def find_map(self, source_NS: Floats, target_MT: Floats) -> tuple[Floats, float]:
        """Return the map (S, T), and the mean cosine between the sources mapped by two maps from separate halves."""
        halves = ((source_NS[half::2], target_MT[half::2]) for half in (0, 1))
        first_ST, second_ST = (self.refine(self.first_map(*half), *half) for half in halves)
        agreement = float((_unit(source_NS @ first_ST) * _unit(source_NS @ second_ST)).sum(1).mean())
        left, _, right = np.linalg.svd(first_ST + second_ST, full_matrices=False)
        weight_ST = self.refine(left @ right, source_NS, target_MT)
        return self.match_clusters(weight_ST, source_NS, target_MT), agreement

    def first_map(self, source_NS: Floats, target_MT: Floats) -> Floats:
        """Match embeddings by their cosines to paired centroids."""
        runs = sorted((self.anchors(source_NS, target_MT) for _ in range(self.config.runs)), key=lambda run: -run.score)
        best = runs[: max(round(BEST * len(runs)), 1)]
        source_AS, target_AT = np.concatenate([run.source_CS for run in best]), np.concatenate([run.target_CT for run in best])
        drawn_BS = self.draw_rows(source_NS, 2 * MATCHED)
        described_BA, described_MA = _unit(drawn_BS @ _unit(source_AS).T), _unit(target_MT @ _unit(target_AT).T)
        return _rotation(drawn_BS, self.partners(described_BA @ described_MA.T, target_MT))

    def anchors(self, source_NS: Floats, target_MT: Floats) -> _Anchors:
        """Pair both sides' centroids with the most similar inner products."""
        from scipy.optimize import quadratic_assignment

        count = min(self.config.clusters, len(source_NS), len(target_MT))
        source_CS, target_CT = (self.centroids(self.draw_rows(side, CLUSTERED), count) for side in (source_NS, target_MT))
        inner = [(rows - rows.mean(0)) @ (rows - rows.mean(0)).T for rows in (source_CS, target_CT)]
        usual: dict[str, object] = {"maximize": True, "rng": self.draws}
        faq = {**usual, "P0": "randomized"}
        found = max((quadratic_assignment(*inner, method="faq", options=faq) for _ in range(STARTS)), key=lambda each: each.fun)
        guess = {**usual, "partial_guess": np.stack([np.arange(count), found.col_ind], 1)}
        found = quadratic_assignment(*inner, method="2opt", options=guess)
        return _Anchors(source_CS, target_CT[found.col_ind], found.fun / np.prod([np.linalg.norm(each) for each in inner]))

    def centroids(self, rows_ND: Floats, count: int, start_CD: Floats | None = None) -> Floats:
        """Return the k-means centroids (C, D)."""
        return find_centroids(rows_ND, count, int(self.draws.integers(2**31)), start_CD)

    def refine(self, weight_ST: Floats, source_NS: Floats, target_MT: Floats) -> Floats:
        """Match mapped embeddings with their nearest targets, repeatedly."""
        for _ in range(self.config.rounds):
            drawn_BS = self.draw_rows(source_NS, MATCHED)
            partners_BT = self.partners(_unit(drawn_BS @ weight_ST) @ target_MT.T, target_MT)
            weight_ST = (1 - SMOOTHING) * weight_ST + SMOOTHING * _rotation(drawn_BS, partners_BT)
        return weight_ST

    def match_clusters(self, weight_ST: Floats, source_NS: Floats, target_MT: Floats) -> Floats:
        """Match fine centroids; the target's k-means starts at the source's mapped centroids."""
        count = min(FINE_CLUSTERS, max(len(source_NS) // self.config.clusters, 1), len(target_MT))
        source_CS = self.centroids(source_NS, count)
        return _rotation(source_CS, self.centroids(target_MT, count, source_CS @ weight_ST))

    def partners(self, similar_BM: Floats, target_MT: Floats) -> Floats:
        """Average the most similar target embeddings (B, T)."""
        # with few embeddings, the usual number of neighbours would exceed a cluster
        count = min(self.config.neighbours, max(len(target_MT) // self.config.clusters // 2, 1))
        nearest_BK = np.argpartition(-similar_BM, count - 1, axis=1)[:, :count]
        return np.asarray(target_MT[nearest_BK].mean(1))

    def draw_rows(self, rows_ND: Floats, most: int) -> Floats:
        return rows_ND if len(rows_ND) <= most else rows_ND[self.draws.permutation(len(rows_ND))[:most]]
