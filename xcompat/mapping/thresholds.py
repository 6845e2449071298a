"""Thresholds of a model: old cosines, and its queries' equivalent scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from xcompat.evaluation.cases import Keeps
from xcompat.evaluation.thresholds import ThresholdTransfer
from xcompat.heads import slerp
from xcompat.models import CompatModel
from xcompat.models.score_scale import ScoredItems
from xcompat.score_scale import Thresholds

EDGES = np.arange(-500, 501) / 500
"""Scores at which pairs are counted."""
GRID = EDGES[50:-20:25]
"""Old thresholds to carry over, in steps of .05; others are interpolated."""
FEWEST = 30
"""Fewest pairs above and below an old threshold to carry it over."""
RESAMPLES, SEED = 200, 0


class _ScoredQueries(NamedTuple):
    """Cosines of old and new queries with gallery items, and the true matches if known."""

    old_QN: NDArray[np.float32]
    new_QN: NDArray[np.float32]
    match_QN: NDArray[np.bool_] | None


def fit_thresholds(samples: Sequence[tuple[CompatModel, ScoredItems]]) -> Thresholds | None:
    """Carry old thresholds over to a model's queries, on items embedded by both models.

    Args:
        samples: queries and searched items, each with a model to map queries to the old space, or old embeddings to its own.

    Returns:
        The thresholds; None if scores are not cosines, or there are too few pairs. They keep the share of true matches if classes
        are known, and the number of hits otherwise.
    """
    if not samples or any(model.metric == "l2" for model, _ in samples):
        return None
    scored = [_ScoredQueries(*_scores(model, items), _matches(items)) for model, items in samples]
    has_matches = all(each.match_QN is not None and each.match_QN.sum() >= 2 * FEWEST for each in scored)
    keeps: Keeps = "matches" if has_matches else "hits"
    old_QB, new_QB = (_count_pairs(scored, side, keeps) for side in ("old_QN", "new_QN"))
    carried = ThresholdTransfer(old_QB[:, 1:], new_QB[:, 1:], EDGES, None, RESAMPLES, SEED)
    rows = []
    for threshold in GRID.tolist():
        above = old_QB[:, 1 + int(np.argmin(np.abs(EDGES - threshold)))].sum()
        score, ci95 = carried.transfer(threshold)
        if score is not None and ci95 is not None and FEWEST <= above <= old_QB[:, 0].sum() - FEWEST:
            rows.append((threshold, score, *ci95))
    return Thresholds(keeps, *map(tuple, zip(*rows, strict=True))) if len(rows) > 1 else None


def _count_pairs(scored: Sequence[_ScoredQueries], side: str, keeps: Keeps) -> NDArray[np.float64]:
    """Return each query's number of pairs (true matches or all), then those at or above each edge: (Q, 1 + B)."""
    above, n_bins = [], len(EDGES) + 1
    for each in scored:
        scores_QN: NDArray[np.float32] = getattr(each, side)
        kept_QN = np.ones_like(scores_QN) if keeps == "hits" or each.match_QN is None else each.match_QN
        bins_QN = np.searchsorted(EDGES, scores_QN, side="right") + np.arange(len(scores_QN))[:, None] * n_bins
        counts_QB = np.bincount(bins_QN.ravel(), kept_QN.ravel(), len(scores_QN) * n_bins).reshape(len(scores_QN), -1)
        above.append(counts_QB[:, ::-1].cumsum(axis=1)[:, ::-1])
    return np.concatenate(above).astype(np.float64)


def _matches(items: ScoredItems) -> NDArray[np.bool_] | None:
    if items.labels_Q is None or items.labels_N is None:
        return None
    return np.asarray(items.labels_Q[:, None] == items.labels_N[None])


@torch.inference_mode()
def _scores(model: CompatModel, items: ScoredItems) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (Q, N) cosines of old queries with old items, and of the model's queries with the gallery before a backfill."""
    new_QD, old_Qd, _, old_Nd = (rows.to(model.device) for rows in items[:4])
    old_Qd, old_Nd = model.apply_metric(old_Qd), model.apply_metric(old_Nd)
    if model.maps_galleries:
        side_NS = None if items.side_info_NS is None else items.side_info_NS.to(model.device)
        asked, searched = model.self_view(new_QD), model.upgrade(items.old_Nd.to(model.device), side_NS)
    else:
        asked, searched = model.to_space(new_QD), old_Nd
        if model.config.old_share is not None:
            asked = slerp(asked, old_Qd, model.config.old_share)
    scores = old_Qd @ old_Nd.T, F.normalize(asked.float(), dim=-1) @ F.normalize(searched.float(), dim=-1).T
    return scores[0].cpu().numpy(), scores[1].cpu().numpy()
