"""Fit score scales: match the scores that the same queries reach against two kinds of embeddings of the same items."""

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
"""Fewest queries, and fewest searched items, that a scale is fitted on."""
TAIL = 0.05
"""Share of a query's scores that are its tail: hits come from there."""


class ScoredItems(NamedTuple):
    """Queries and searched items that both models embedded, row by row.

    Args:
        new_QD: (Q, D) queries of the new model, as it embeds them.
        old_Qd: (Q, d) the same queries of the old model.
        new_ND: (N, D) searched items of the new model, as it embeds them.
        old_Nd: (N, d) the same items of the old model.
        side_info_NS: (N, S) their side-information, for a map that reads it.
        labels_Q: int64 (Q,) class of each query; None if unknown.
        labels_N: int64 (N,) class of each item; None if unknown.
    """

    new_QD: Tensor
    old_Qd: Tensor
    new_ND: Tensor
    old_Nd: Tensor
    side_info_NS: Tensor | None = None
    labels_Q: NDArray[np.int64] | None = None
    labels_N: NDArray[np.int64] | None = None


def fit_score_scales(samples: Sequence[tuple[CompatModel, ScoredItems]]) -> ScoreScales | None:
    """Fit the scales of a model on items that both models embedded.

    A partly re-embedded gallery holds two kinds of vectors. The same query scores higher or lower against one kind than against
    the other, for related and for unrelated items alike. A scale matches the upper tails of both kinds of scores: the mean score
    where a query's best 5 % begin, and by how much those exceed it on average. It needs no items of the gallery, so it holds for
    the first new item as for the last.

    Args:
        samples: one or more for each kind of query and of searched item, each with a model that brings its queries and what it
            embeds into the old space, or old embeddings into its own.

    Returns:
        The scales; None if the samples have fewer than :data:`FEWEST` queries or items, or if their scores do not differ.
    """
    samples = [(model, items) for model, items in samples if min(len(items.new_QD), len(items.new_ND)) >= FEWEST]
    if not samples:
        return None
    tails_KSV = torch.stack([_tails(model, items) for model, items in samples]).mean(0)  # kinds of queries weigh the same
    scales = [_matched(*tails_SV) for tails_SV in tails_KSV]
    return None if None in scales else ScoreScales(*scales)  # type: ignore[arg-type]  # none is None


@torch.inference_mode()
def _tails(model: CompatModel, items: ScoredItems) -> Tensor:
    """Return the tails of scores of new and of old queries, against added and against native embeddings: (2, 2, 2)."""
    new_QD, old_Qd, new_ND, old_Nd = (rows.to(model.device) for rows in items[:4])
    own_QD, own_Nd = model.self_view(new_QD), model.stored(new_ND)
    if model.maps_galleries:  # mapped embeddings stand beside new ones
        side_NS = None if items.side_info_NS is None else items.side_info_NS.to(model.device)
        new = _scores(model, own_QD, model.upgrade(old_Nd, side_NS)), _scores(model, own_QD, own_Nd)
        return torch.stack([torch.stack([mean_tail(scores) for scores in new])] * 2)
    viewed_Qd, old_Qd, old_Nd = model.view(new_QD), model.of_metric(old_Qd), model.of_metric(old_Nd)
    if model.config.old_share is not None:
        viewed_Qd = slerp(viewed_Qd, F.normalize(old_Qd, dim=-1), model.config.old_share)
    if not model.stores_view:  # whole embeddings stand beside old ones, and old queries do not search them
        new = _scores(model, own_QD, own_Nd), _scores(model, viewed_Qd, old_Nd)
        return torch.stack([torch.stack([mean_tail(scores) for scores in new])] * 2)
    return torch.stack(
        [
            torch.stack([mean_tail(_scores(model, asking, searched)) for searched in (own_Nd, old_Nd)])
            for asking in (viewed_Qd, old_Qd)
        ]
    )


def _scores(model: CompatModel, queries_Qd: Tensor, searched_Nd: Tensor) -> Tensor:
    """Return (Q, N) scores as a gallery computes them: cosines, or minus squared distances."""
    queries_Qd, searched_Nd = queries_Qd.double(), searched_Nd.double()
    return -(torch.cdist(queries_Qd, searched_Nd) ** 2) if model.metric == "l2" else queries_Qd @ searched_Nd.T


def mean_tail(scores_QN: Tensor) -> Tensor:
    """Return the mean start of the queries' tails, and the mean excess of the scores in them over it: (2,)."""
    best_Qk = scores_QN.topk(max(2, round(TAIL * scores_QN.shape[1])) + 1, dim=1).values
    start_Q = best_Qk[:, -1]
    return torch.stack([start_Q.mean(), (best_Qk[:, :-1].mean(1) - start_Q).mean()])


def _matched(added: Tensor, native: Tensor) -> ScoreScale | None:
    """Return the scale that brings one tail, its start and excess, to another; None if one of them has no excess."""
    slope = float(native[1] / added[1])
    if not (math.isfinite(slope) and slope > 0):
        return None
    return ScoreScale(slope, float(native[0] - slope * added[0]))
