"""Score scale fitting between old and new gallery embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from xcompat.heads import slerp
from xcompat.score_scale import ScoreScale, ScoreScales

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel

FEWEST = 16
"""Minimum queries and items for fitting a scale."""
TAIL = 0.05
"""Share of a query's scores in its tail, which contains the hits."""


class ScoredItems(NamedTuple):
    """Queries and items with both models' embeddings, row by row.

    Args:
        new_QD: (Q, D) the new model's query embeddings.
        old_Qd: (Q, d) the old model's query embeddings.
        new_ND: (N, D) the new model's item embeddings.
        old_Nd: (N, d) the old model's item embeddings.
        side_info_NS: (N, S) the items' side-information, if the map reads it.
        labels_Q: int64 (Q,) each query's class; None if unknown.
        labels_N: int64 (N,) each item's class; None if unknown.
    """

    new_QD: Tensor
    old_Qd: Tensor
    new_ND: Tensor
    old_Nd: Tensor
    side_info_NS: Tensor | None = None
    labels_Q: NDArray[np.int64] | None = None
    labels_N: NDArray[np.int64] | None = None


def fit_score_scales(samples: Sequence[tuple[CompatModel, ScoredItems]]) -> ScoreScales | None:
    """Fit a model's score scales on items with both models' embeddings.

    A partly re-embedded gallery contains two kinds of vectors, with systematically different query scores. A scale matches both
    score distributions' upper tails: the mean score where a query's best 5 % begin, and the mean excess above it. It does not
    depend on the gallery's items.

    Args:
        samples: a sample or several per kind of query and item, each with a model that maps its embeddings into the old space, or
            old embeddings into its own.

    Returns:
        The scales; None if every sample has fewer than :data:`FEWEST` queries or items, or if scores do not differ.
    """
    samples = [(model, items) for model, items in samples if min(len(items.new_QD), len(items.new_ND)) >= FEWEST]
    if not samples:
        return None
    tails_KSV = torch.stack([_tails(model, items) for model, items in samples]).mean(0)  # equal weights of query kinds
    scales = [_match_tails(*tails_SV) for tails_SV in tails_KSV]
    return None if None in scales else ScoreScales(*scales)  # type: ignore[arg-type]  # none is None


@torch.inference_mode()
def _tails(model: CompatModel, items: ScoredItems) -> Tensor:
    """Return the tails of new and old queries' scores, against added and native embeddings: (2, 2, 2)."""
    new_QD, old_Qd, new_ND, old_Nd = (rows.to(model.device) for rows in items[:4])
    own_QD, own_Nd = model.self_view(new_QD), model.to_gallery_space(new_ND)
    if model.maps_galleries:  # the gallery mixes mapped and new embeddings
        side_NS = None if items.side_info_NS is None else items.side_info_NS.to(model.device)
        new = _scores(model, own_QD, model.upgrade(old_Nd, side_NS)), _scores(model, own_QD, own_Nd)
        return torch.stack([torch.stack([mean_tail(scores) for scores in new])] * 2)
    viewed_Qd, old_Qd, old_Nd = model.to_space(new_QD), model.apply_metric(old_Qd), model.apply_metric(old_Nd)
    if model.config.old_share is not None:
        viewed_Qd = slerp(viewed_Qd, F.normalize(old_Qd, dim=-1), model.config.old_share)
    if not model.stores_view:  # the gallery mixes whole and old embeddings; old queries cannot search whole ones
        new = _scores(model, own_QD, own_Nd), _scores(model, viewed_Qd, old_Nd)
        return torch.stack([torch.stack([mean_tail(scores) for scores in new])] * 2)
    return torch.stack(
        [
            torch.stack([mean_tail(_scores(model, asking, searched)) for searched in (own_Nd, old_Nd)])
            for asking in (viewed_Qd, old_Qd)
        ]
    )


def _scores(model: CompatModel, queries_Qd: Tensor, searched_Nd: Tensor) -> Tensor:
    """Return scores (Q, N) as in a gallery: cosines, or negative squared distances."""
    queries_Qd, searched_Nd = queries_Qd.double(), searched_Nd.double()
    return -(torch.cdist(queries_Qd, searched_Nd) ** 2) if model.metric == "l2" else queries_Qd @ searched_Nd.T


def mean_tail(scores_QN: Tensor) -> Tensor:
    """Return the queries' mean tail start, and their scores' mean excess above it: (2,)."""
    best_Qk = scores_QN.topk(max(2, round(TAIL * scores_QN.shape[1])) + 1, dim=1).values
    start_Q = best_Qk[:, -1]
    return torch.stack([start_Q.mean(), (best_Qk[:, :-1].mean(1) - start_Q).mean()])


def _match_tails(added: Tensor, native: Tensor) -> ScoreScale | None:
    """Return the scale from a tail (start, excess) to another tail; None if either has no excess."""
    slope = float(native[1] / added[1])
    if not (math.isfinite(slope) and slope > 0):
        return None
    return ScoreScale(slope, float(native[0] - slope * added[0]))
