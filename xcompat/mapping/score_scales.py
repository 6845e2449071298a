"""Fit the score scales of a map on the pairs that it was fitted on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings, TurnedEmbeddings
from xcompat.models import CompatModel
from xcompat.models.old_knowledge import Rows
from xcompat.models.score_scale import ScoredItems, fit_score_scales

SAMPLE = 512
"""Most queries, and most searched items, of each kind."""


def scale_scores(model: CompatModel, pairs: PairedEmbeddings | CaptionedEmbeddings) -> None:
    """Fit ``config.score_scales`` of a model; leave it None if there are too few pairs.

    Args:
        model: with the memory that it is saved with.
        pairs: embeddings of both models, e.g. those that the model was fitted on.
    """
    draw = np.random.default_rng(0)
    if isinstance(pairs, CaptionedEmbeddings):
        kinds = [(pairs.texts, pairs.images), (pairs.images, pairs.texts), (pairs.images, pairs.images)]
    else:
        kinds = [(pairs, pairs)]
    scales = fit_score_scales(model, [_drawn(asking, searched, draw) for asking, searched in kinds])
    model.config.score_scales = scales.settings if scales is not None else None


def _drawn(asking: PairedEmbeddings, searched: PairedEmbeddings, draw: np.random.Generator) -> ScoredItems:
    """Draw queries and searched items; no item is both."""
    rows_Q = draw.permutation(len(asking))[:SAMPLE]
    rows_N = draw.permutation(len(searched))[:SAMPLE]
    if asking is searched:
        drawn = draw.permutation(len(asking))[: 2 * SAMPLE]
        rows_Q, rows_N = drawn[::2], drawn[1::2]
    side = None
    if isinstance(searched, TurnedEmbeddings):  # the sides of a map of galleries are exchanged
        side = _tensor(searched.side_NS, rows_N) if searched.side_NS is not None else None
        return ScoredItems(*_both(asking.old_Nd, asking.new_ND, rows_Q), *_both(searched.old_Nd, searched.new_ND, rows_N), side)
    return ScoredItems(*_both(asking.new_ND, asking.old_Nd, rows_Q), *_both(searched.new_ND, searched.old_Nd, rows_N))


def _both(new_ND: Rows, old_Nd: Rows, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return _tensor(new_ND, rows), _tensor(old_Nd, rows)


def _tensor(embeds_ND: Rows, rows: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.array(embeds_ND[np.sort(rows)], np.float32))
