"""The choice of a line where nothing says what a query should find: by what the new model finds among held-out items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.arrays import normalise_rows, rows_of
from xcompat.core.errors import NothingHeldOutError
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.mapping.candidates import LINES, WHITENED, Candidate, Paired, Solver
from xcompat.mapping.choosing import MIXED, Choice, careful, choose
from xcompat.mapping.cleaning import leave_out_copies
from xcompat.mapping.folds import HELD_OUT, QUERIES, Searched
from xcompat.mapping.held_out import HeldOut, Measured, Queries, Trial
from xcompat.mapping.paired import PairedEmbeddings
from xcompat.mapping.sentences import Sentences, Texts
from xcompat.models.old_knowledge import Rows

LEARNED = 25_000
"""Most items that a fold learns from: of 2,048 dimensions in float32 they take 200 MB of each side."""
SEARCHED = 10_000
"""Most held-out items that are searched."""
FEWEST = 40
"""Least items from which some are held out."""
NEIGHBOURS = 10
PROTOCOL = "held-out items"
SHARED = f"neighbours@{NEIGHBOURS}"


class HeldOutItems(HeldOut):
    """Items whose mapped new embeddings search the old embeddings of other items.

    ``neighbours@10`` is the share of an item's 10 nearest neighbours by the new model that are among the 10 that its query finds
    by the old embeddings. Old queries find some of them too: what they find is the floor.
    """

    sharpnesses, shares, powers = (), (), ()

    def __init__(self, pairs: PairedEmbeddings, lines: Mapping[str, Solver], seed: int) -> None:
        if len(pairs) < FEWEST:
            raise NothingHeldOutError(f"too few items to hold any out: it takes {FEWEST}, and there are {len(pairs)}")
        self.pairs = pairs
        order_N = np.random.default_rng(seed).permutation(len(pairs))
        held = min(SEARCHED, round(HELD_OUT * len(pairs)))
        folds = [np.roll(order_N, -number * held) for number in range(2)]
        self.learned_rows = [np.sort(rows_N[held:][:LEARNED]) for rows_N in folds]
        self.searched_rows = [rows_N[:held] for rows_N in folds]  # in random order: the first of them ask
        self.searched = [_unit(pairs.old_Nd, rows_G) for rows_G in self.searched_rows]
        own = (_unit(pairs.new_ND, rows_G) for rows_G in self.searched_rows)
        self.near = [_nearest(new_GD[:QUERIES], new_GD) for new_GD in own]
        super().__init__(lines, seed)

    @override
    def learned(self) -> Iterable[Paired]:
        return [self.pairs.take(rows_F) for rows_F in self.learned_rows]

    @override
    def measured(self, queries: Queries) -> list[Measured]:
        parts = []
        for number, (rows_G, old_Gd, near_QK) in enumerate(zip(self.searched_rows, self.searched, self.near, strict=True)):
            rows_Q = rows_G[:QUERIES]
            asked_Qd = queries(number, PROTOCOL, rows_Q, self.pairs)
            shared_Q = (_nearest(asked_Qd, old_Gd)[:, :, None] == near_QK[:, None, :]).any(2).mean(1)
            parts.append(Measured(number, PROTOCOL, {SHARED: shared_Q}, shared_Q, rows_Q, rows_Q, len(rows_G)))
        return parts

    def searched_folds(self) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Return the rows and the old embeddings of the items that each fold searches."""
        return list(zip(self.searched_rows, self.searched, strict=True))

    @override
    def re_embedded(self, candidate: Candidate) -> list[Measured]:
        """Measure the old gallery again: without labels nothing says what a re-embedded one loses."""
        return self.measured(self.queries_of(candidate))

    @override
    def with_old_queries(self) -> HeldOut:
        return HeldOutItems(self.pairs.of_old(), LINES, self.seed)


def agree(
    pairs: PairedEmbeddings,
    seed: int = 0,
    lines: Mapping[str, Solver] = LINES,
    with_old_model: bool = False,
    texts: Texts | None = None,
) -> Choice:
    """Choose a line without labels, and measure how far its queries agree with the new model.

    With texts, the line is taken whose queries find most texts by one of their sentences. Without texts, it is the whitened line
    if it agrees surely more than old queries do: in all upgrades with labels that were measured it finds more than the other
    lines, and agreement does not show it, because on photos it favours rotations (docs/results/lines.md). A map that was brought
    along is taken instead if it agrees more.

    Args:
        pairs: the training set; its classes are not read.
        seed: of the folds and of the intervals.
        lines: the solver of each line, by name.
        with_old_model: whether the old model can embed queries; they then meet new ones half-way. Agreement overrates lines alone
            where queries are not like what is stored (docs/results/lines.md).
        texts: what the pairs are embeddings of, and the new model.

    Returns:
        Every trial, and the best.

    Raises:
        NothingHeldOutError: there are too few items to hold any out.
    """
    held = HeldOutItems(pairs, lines, seed)
    held.direction = TEXT_TO_TEXT if texts is not None else held.direction
    trials = [held.try_(Candidate(name)) for name in lines]
    sentences = {}
    if texts is not None and len(asking := Sentences(held, held.searched_folds(), texts)):
        sentences = {trial.candidate.line: float(asking.reciprocal_ranks(trial.candidate).mean()) for trial in trials}
        chosen = max(trials, key=lambda trial: sentences[trial.candidate.line])
    else:
        chosen = _preferred(trials)
    if with_old_model:
        chosen = held.try_(replace(chosen.candidate, old_share=MIXED))
        trials.append(chosen)
    most = max(map(len, held.learned_rows))
    return Choice(
        trials=trials,
        chosen=chosen,
        without_new_model=None,
        floor=held.floor_means(),
        n_queries={PROTOCOL: sum(min(QUERIES, len(rows_G)) for rows_G in held.searched_rows)},
        learned_at_most=most if most == LEARNED else None,
        no_confidence="they remember nothing",
        of_agreement=True,
        of_few_pairs=len(pairs) < 2 * max(pairs.dims),
        sentences=sentences,
        by_chance=held.is_by_chance(chosen.candidate),
        cases=held.cases(chosen.candidate),
    )


def _preferred(trials: list[Trial]) -> Trial:
    """Return the whitened line, or a map of others that agrees more; if it agrees no more than old queries, the best of all."""
    own = next((trial for trial in trials if trial.candidate.line == WHITENED and trial.is_surely_better), None)
    if own is None:
        return careful(trials)
    return max([own, *(trial for trial in trials if trial.candidate.line not in LINES)], key=lambda trial: trial.mean)


def choose_by_what_is_known(
    pairs: Paired,
    searched: Searched,
    seed: int,
    lines: Mapping[str, Solver],
    with_old_model: bool = False,
    texts: Texts | None = None,
) -> Choice:
    """Choose by classes or captions; where neither is known, by agreement with the new model.

    Args:
        pairs: the training set.
        searched: what is known of the classes that will be searched.
        seed: of the folds and of the intervals.
        lines: the solver of each line, by name.
        with_old_model: whether the old model can embed queries.
        texts: as :func:`agree` takes them.

    Raises:
        NothingHeldOutError: there are too few items to hold any out.
    """

    def choose_from(pairs: Paired, texts: Texts | None) -> Choice:
        if isinstance(pairs, PairedEmbeddings) and pairs.labels_N is None:
            return agree(pairs, seed, lines, with_old_model, texts)
        return choose(pairs, searched, seed, lines, with_old_model=with_old_model)

    distinct, kept, copies = leave_out_copies(pairs, texts.texts if texts is not None else None)
    if copies:
        with suppress(NothingHeldOutError):  # where nearly all are copies, they are held out as they are
            asking = texts._replace(texts=kept) if texts is not None and kept is not None else None
            return replace(choose_from(distinct, asking), copies=copies)
    return choose_from(pairs, texts)


def _unit(rows_ND: Rows, rows_G: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return some rows, each divided by its length, so that none is nearer to all queries for being longer."""
    return normalise_rows(rows_of(rows_ND, rows_G))


def _nearest(asked_Qd: NDArray[np.float32], old_Gd: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the places of the nearest entries (Q, K); the first entry is the first query's own item, and so on."""
    scores_QG = asked_Qd @ old_Gd.T
    np.fill_diagonal(scores_QG, -np.inf)
    return np.argpartition(-scores_QG, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]
