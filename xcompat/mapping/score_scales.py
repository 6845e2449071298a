"""Score scales and thresholds of a map, fitted on its training pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.arrays import forget_pages
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings, SwappedEmbeddings
from xcompat.mapping.thresholds import fit_thresholds
from xcompat.models import CompatModel
from xcompat.models.old_knowledge import Rows
from xcompat.models.score_scale import FEWEST as FEWEST_SCORED
from xcompat.models.score_scale import ScoredItems, fit_score_scales

Paired = PairedEmbeddings | CaptionedEmbeddings
SAMPLE = 512
"""Most queries, and most searched items, per direction of search."""
FOLDS = 4
FEWEST = FOLDS * 2 * FEWEST_SCORED
"""Fewest items, or captioned images, for cross-fitting: each fold needs both sides."""
NO_OVERFIT = 5
"""Items per dimension of the larger space from which a solved map scores its training items like others."""


def scale_scores(model: CompatModel, pairs: Paired, solve: Callable[[Paired], CompatModel] | None = None) -> None:
    """Fit ``config.score_scales`` and ``config.thresholds`` of a model; leave them None if there are too few pairs.

    A map overfits few pairs, and their scores misrepresent later items. Then each part of the pairs is scored by a map solved
    without it.

    Args:
        model: model with its final memory.
        pairs: embeddings of both models, e.g. the training pairs.
        solve: solves the model from other pairs; None if it was not trained on these pairs.
    """
    draw = np.random.default_rng(0)
    samples = [(solved, sample) for solved, part in _held_out(model, pairs, solve, draw) for sample in _samples(part, draw)]
    scales, thresholds = fit_score_scales(samples), fit_thresholds(samples)
    model.config.score_scales = scales.settings if scales is not None else None
    model.config.thresholds = thresholds._asdict() if thresholds is not None else None


def _held_out(
    model: CompatModel, pairs: Paired, solve: Callable[[Paired], CompatModel] | None, draw: np.random.Generator
) -> Iterator[tuple[CompatModel, Paired]]:
    """Yield models with held-out pairs, or the model with all pairs if overfitting is negligible."""
    if solve is None or not FEWEST <= (count := _count(pairs)) < NO_OVERFIT * max(pairs.dims):
        yield model, pairs
        return
    parts = np.array_split(draw.permutation(count), FOLDS)
    for number, held in enumerate(parts):
        rest = np.concatenate([part for other, part in enumerate(parts) if other != number])
        yield solve(pairs.take(np.sort(rest))), pairs.take(np.sort(held))


def _count(pairs: Paired) -> int:
    return int(pairs.groups[0].max()) + 1 if isinstance(pairs, CaptionedEmbeddings) else len(pairs)


def _samples(pairs: Paired, draw: np.random.Generator) -> Sequence[ScoredItems]:
    if isinstance(pairs, CaptionedEmbeddings):
        kinds = [(pairs.texts, pairs.images), (pairs.images, pairs.texts), (pairs.images, pairs.images)]
    else:
        kinds = [(pairs, pairs)]
    return [_draw_items(asking, searched, draw) for asking, searched in kinds]


def _draw_items(asking: PairedEmbeddings, searched: PairedEmbeddings, draw: np.random.Generator) -> ScoredItems:
    """Draw queries and searched items without overlap."""
    rows_Q = draw.permutation(len(asking))[:SAMPLE]
    rows_N = draw.permutation(len(searched))[:SAMPLE]
    if asking is searched:
        drawn = draw.permutation(len(asking))[: 2 * SAMPLE]
        rows_Q, rows_N = drawn[::2], drawn[1::2]
    sides = (asking, rows_Q), (searched, rows_N)
    side, labels = None, [None if each.labels_N is None else each.labels_N[np.sort(rows)] for each, rows in sides]
    if isinstance(searched, SwappedEmbeddings):  # old and new are exchanged
        side = _tensor(searched.side_NS, rows_N) if searched.side_NS is not None else None
        both = *_both_sides(asking.old_Nd, asking.new_ND, rows_Q), *_both_sides(searched.old_Nd, searched.new_ND, rows_N)
    else:
        both = *_both_sides(asking.new_ND, asking.old_Nd, rows_Q), *_both_sides(searched.new_ND, searched.old_Nd, rows_N)
    return ScoredItems(*both, side, *labels)


def _both_sides(new_ND: Rows, old_Nd: Rows, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return _tensor(new_ND, rows), _tensor(old_Nd, rows)


def _tensor(embeds_ND: Rows, rows: NDArray[np.int64]) -> Tensor:
    drawn = torch.from_numpy(np.array(embeds_ND[np.sort(rows)], np.float32))
    forget_pages(embeds_ND)
    return drawn
