"""Choice of a map without labels, by agreement with the new model's neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.arrays import copy_rows, normalise_rows
from xcompat.core.errors import NoValidationDataError
from xcompat.evaluation import PairedDifference, paired_bootstrap
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.mapping.candidates import LINES, WHITENED, Candidate, Paired, Solver
from xcompat.mapping.cleaning import leave_out_copies
from xcompat.mapping.folds import HELD_OUT, NEIGHBOURS, QUERIES, Searched
from xcompat.mapping.held_out import RESAMPLES, FoldResult, Queries, Sides, SwappedSplit, Trial, ValidationSplit
from xcompat.mapping.item_memory import LEAST_COVERAGE, ItemMemory, with_item_memory
from xcompat.mapping.paired import PairedEmbeddings, SwappedEmbeddings
from xcompat.mapping.selection import MIXED, Choice, choose, select_conservative
from xcompat.mapping.sentences import Sentences, Texts
from xcompat.models.old_knowledge import Rows
from xcompat.vectors.codecs import MemoryParts

LEARNED = 25_000
"""Most items that a fold learns from: 2,048 float32 dimensions take 200 MB per side."""
SEARCHED = 10_000
"""Most validation items to search."""
FEWEST = 40
"""Fewest items for a validation split."""
HELD_OUT_OF_GALLERY = 0.1, 0.5
"""Least and most of a gallery's items to hold out from a memory of its items."""
PROTOCOL = "held-out items"
SHARED = f"neighbours@{NEIGHBOURS}"


class HeldOutItems(ValidationSplit):
    """Validation items whose mapped new embeddings search the old embeddings of other items.

    ``neighbours@10`` is the share of an item's 10 nearest neighbours, by the new model, among its 10 hits in the old embeddings.
    The old queries' share is the baseline. A query's quality is the reciprocal rank of the nearest of these neighbours.

    Args:
        pairs: training set.
        lines: linear map name -> solver.
        seed: random seed for folds and intervals.
        coverage: share of the gallery that the pairs cover, to hold out the rest and search learned items too; None to search
            held-out items only.
    """

    sharpnesses, shares = (), ()
    powers: Sequence[float] = ()

    def __init__(self, pairs: PairedEmbeddings, lines: Mapping[str, Solver], seed: int, coverage: float | None = None) -> None:
        if len(pairs) < FEWEST:
            raise NoValidationDataError(f"too few items for a validation split: at least {FEWEST} are needed, found {len(pairs)}")
        self.pairs = pairs
        order_N = np.random.default_rng(seed).permutation(len(pairs))
        held = min(SEARCHED, round(HELD_OUT * len(pairs)))
        if coverage is not None:
            held = round(float(np.clip(1 - coverage, *HELD_OUT_OF_GALLERY)) * min(len(pairs), SEARCHED + LEARNED))
        folds = [np.roll(order_N, -number * held) for number in range(2)]
        self.learned_rows = [np.sort(rows_N[held:][:LEARNED]) for rows_N in folds]
        searched = held if coverage is None else held + LEARNED
        self.searched_rows = [rows_N[:searched] for rows_N in folds]  # random order: the first rows are queries
        self.n_queries = min(QUERIES, held)
        self.searched = [_unit(pairs.old_Nd, rows_G) for rows_G in self.searched_rows]
        own = self.searched if self.of_galleries else (_unit(pairs.new_ND, rows_G) for rows_G in self.searched_rows)
        self.near = [_nearest(_scores(new_GD[: self.n_queries], new_GD)) for new_GD in own]
        super().__init__(lines, seed)

    @override
    def training_pairs(self) -> Iterable[Paired]:
        return [self.pairs.take(rows_F) for rows_F in self.learned_rows]

    @override
    def sides_of(self, mapped: Queries) -> Sides:
        return mapped, lambda number, *_: self.searched[number]

    @override
    def measure_search(self, asked: Queries, searched: Queries) -> list[FoldResult]:
        parts = []
        for number, (rows_G, near_QK) in enumerate(zip(self.searched_rows, self.near, strict=True)):
            rows_Q = rows_G[: self.n_queries]
            scores_QG = _scores(asked(number, PROTOCOL, rows_Q, self.pairs), searched(number, PROTOCOL, rows_G, self.pairs))
            shared_Q = (_nearest(scores_QG)[:, :, None] == near_QK[:, None, :]).any(2).mean(1)
            ranks_Q = (scores_QG >= np.take_along_axis(scores_QG, near_QK[:, :1], axis=1)).sum(1)
            parts.append(FoldResult(number, PROTOCOL, {SHARED: shared_Q}, 1 / ranks_Q, rows_Q, rows_Q, len(rows_G)))
        return parts

    def compare_first_neighbours(self, candidate: Candidate) -> PairedDifference:
        """Return how a candidate changes the mean reciprocal rank of the new model's nearest neighbour."""
        own_Q, old_Q = (np.concatenate([each.quality_Q for each in found]) for found in (self.results_of(candidate), self.old))
        return paired_bootstrap(own_Q, old_Q, RESAMPLES, seed=self.seed, clusters_Q=self.clusters[PROTOCOL])

    def searched_folds(self) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Return each fold's searched rows and old embeddings."""
        return list(zip(self.searched_rows, self.searched, strict=True))

    @override
    def measure_re_embedded(self, candidate: Candidate) -> list[FoldResult]:
        """Measure the old gallery again: without labels, the loss after re-embedding is unknown."""
        return self.results_of(candidate)

    @override
    def with_old_queries(self) -> ValidationSplit:
        return HeldOutItems(self.pairs.of_old(), LINES, self.seed)


class HeldOutItemGalleries(SwappedSplit, HeldOutItems):
    """Mapped galleries of items, searched by new embeddings of other items."""


def _try_item_memory(pairs: PairedEmbeddings, lines: Mapping[str, Solver], seed: int, chosen: Candidate) -> ItemMemory:
    """Compare the chosen map with and without a memory of all items, in galleries of which it knows the same share."""
    if pairs.coverage < LEAST_COVERAGE:
        return ItemMemory(pairs.coverage)
    held = HeldOutItems(pairs, lines, seed, pairs.coverage)
    found = [
        np.concatenate([each.found[SHARED] for each in held.results_of(candidate)])
        for candidate in (chosen, with_item_memory(chosen))
    ]
    gain = paired_bootstrap(found[1], found[0], RESAMPLES, seed=seed, clusters_Q=held.clusters[PROTOCOL])
    return ItemMemory(pairs.coverage, float(found[0].mean()), gain, len(found[0]))


def choose_by_agreement(
    pairs: PairedEmbeddings,
    seed: int = 0,
    lines: Mapping[str, Solver] = LINES,
    with_old_model: bool = False,
    texts: Texts | None = None,
    remember_items: bool = False,
) -> Choice:
    """Choose a linear map without labels, and measure its agreement with the new model.

    With texts, the map that finds most texts by their sentences wins. Without texts, the whitened map wins if it surely
    agrees more than old queries do. It finds most in all labelled upgrades, but on photos agreement favours rotations
    (docs/results/lines.md). An imported map wins if it agrees more.

    Args:
        pairs: training set, used without classes.
        seed: random seed for folds and intervals.
        lines: linear map name -> solver.
        with_old_model: whether to mix in old queries half-way. Agreement overrates maps alone if queries differ from stored items
            (docs/results/lines.md).
        texts: texts of the pairs, and the new model.
        remember_items: whether to try a memory of all items.

    Returns:
        All trials, and the best trial.

    Raises:
        NoValidationDataError: too few items for a validation split.
    """
    held = (HeldOutItemGalleries if isinstance(pairs, SwappedEmbeddings) else HeldOutItems)(pairs, lines, seed)
    held.direction = TEXT_TO_TEXT if texts is not None else held.direction
    trials = held.try_candidates([Candidate(name) for name in lines])
    sentences = {}
    if texts is not None and len(asking := Sentences(held, held.searched_folds(), texts, pairs)):
        sentences = {trial.candidate.line: float(asking.reciprocal_ranks(trial.candidate).mean()) for trial in trials}
        chosen = max(trials, key=lambda trial: sentences[trial.candidate.line])
    else:
        chosen = _prefer_whitened(trials)
    if with_old_model and not held.of_galleries:
        chosen = held.try_candidate(replace(chosen.candidate, old_share=MIXED))
        trials.append(chosen)
    most = max(map(len, held.learned_rows))
    return Choice(
        trials=trials,
        chosen=chosen,
        without_new_model=None,
        floor=held.floor_means(),
        n_queries={PROTOCOL: held.n_queries * len(held.searched_rows)},
        learned_at_most=most if most == LEARNED else None,
        no_confidence="the map has no memory",
        of_agreement=True,
        of_galleries=held.of_galleries,
        of_few_pairs=len(pairs) < 2 * max(pairs.dims),
        pair_counts=(len(pairs), 2 * max(pairs.dims)),
        sentences=sentences,
        first_neighbours=held.compare_first_neighbours(replace(chosen.candidate, old_share=0.0)),
        by_chance=held.is_by_chance(chosen.candidate),
        cases=held.cases(chosen.candidate),
        item_memory=_try_item_memory(pairs, lines, seed, chosen.candidate) if remember_items else None,
    )


def _prefer_whitened(trials: list[Trial]) -> Trial:
    """Return the whitened map or a better imported map; if whitening does not surely beat old queries, the best of all."""
    own = next((trial for trial in trials if trial.candidate.line == WHITENED and trial.is_surely_better), None)
    if own is None:
        return select_conservative(trials)
    return max([own, *(trial for trial in trials if trial.candidate.line not in LINES)], key=lambda trial: trial.mean)


def choose_by_labels_or_agreement(
    pairs: Paired,
    searched: Searched,
    seed: int,
    lines: Mapping[str, Solver],
    with_old_model: bool = False,
    texts: Texts | None = None,
    remember_items: bool = False,
    memory: MemoryParts = "full",
) -> Choice:
    """Choose by classes or captions, or by agreement with the new model if neither is known.

    Args:
        pairs: training set.
        searched: classes that users will search.
        seed: random seed for folds and intervals.
        lines: linear map name -> solver.
        with_old_model: whether the old model can embed queries.
        texts: as in :func:`choose_by_agreement`.
        remember_items: as in :func:`choose_by_agreement`, for pairs without classes or captions.
        memory: as in :func:`~xcompat.mapping.selection.choose`.

    Raises:
        NoValidationDataError: too few items for a validation split.
    """

    def choose_from(pairs: Paired, texts: Texts | None) -> Choice:
        if isinstance(pairs, PairedEmbeddings) and pairs.labels_N is None:
            return choose_by_agreement(pairs, seed, lines, with_old_model, texts, remember_items)
        return choose(pairs, searched, seed, lines, with_old_model=with_old_model, memory=memory)

    distinct, kept, copies = leave_out_copies(pairs, texts.texts if texts is not None else None)
    if copies:
        with suppress(NoValidationDataError):  # if nearly all items are copies, keep the copies
            asking = texts._replace(texts=kept) if texts is not None and kept is not None else None
            return replace(choose_from(distinct, asking), copies=copies)
    return choose_from(pairs, texts)


def _unit(rows_ND: Rows, rows_G: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return rows divided by their lengths, as long rows would be near to every query."""
    return normalise_rows(copy_rows(rows_ND, rows_G))


def _scores(asked_Qd: NDArray[np.float32], old_Gd: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the similarities of queries and entries, -inf of its own item: entry i belongs to query i."""
    scores_QG = asked_Qd @ old_Gd.T
    np.fill_diagonal(scores_QG, -np.inf)
    return scores_QG


def _nearest(scores_QG: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the entries with the highest scores of each query (Q, K), best first."""
    near_QK = np.argpartition(-scores_QG, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]
    order_QK = np.argsort(-np.take_along_axis(scores_QG, near_QK, axis=1), axis=1)
    return np.take_along_axis(near_QK, order_QK, axis=1)
