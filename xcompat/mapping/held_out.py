"""Validation splits of a training set, and candidates' results on them compared with the old model."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.arrays import copy_rows, normalise_rows
from xcompat.core.threads import map_over_cores, one_blas_thread
from xcompat.evaluation import PairedDifference, bootstrap_interval, paired_bootstrap
from xcompat.evaluation.cases import ALL, IMAGE_TO_IMAGE, IMAGE_TO_TEXT, TEXT_TO_IMAGE, TEXT_TO_TEXT, BackfillLoss, Case
from xcompat.evaluation.intervals import paired_bootstraps
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.metrics import rank_first_hits
from xcompat.evaluation.ranking import rank
from xcompat.evaluation.reranked import FirstHits, find_first_hits
from xcompat.heads import slerp
from xcompat.mapping.candidates import LINES, Candidate, CandidateParts, Paired, Solver
from xcompat.mapping.confidence import Evidence
from xcompat.mapping.folds import POPULATIONS, QUERIES, Searched, caption_folds, folds
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings, SwappedEmbeddings
from xcompat.vectors.codecs import AS_THEY_ARE

CPU = torch.device("cpu")
RESAMPLES, LEVEL = 1000, 0.95
CHANCE_LEVEL = 0.99
"""Level of the interval that compares a candidate with chance: one in 200 chance maps goes unnoticed."""
POWERS = (0.15, 0.25, 0.35, 0.5)
RECALLS = (1, 5, 10)
QUESTION_TO_PASSAGE, PASSAGE_TO_QUESTION = "question to passage", "passage to question"
_DIRECTIONS = {TEXT_TO_IMAGE: TEXT_TO_IMAGE, IMAGE_TO_TEXT: IMAGE_TO_TEXT, QUESTION_TO_PASSAGE: TEXT_TO_TEXT}
_ALIKE = "embeddings do not differ within their classes."
_STANDARD_ERRORS = 1.96  # half the width of a 95 % interval
Values = dict[str, dict[str, np.ndarray]]
"""Protocol -> metric -> value of each query."""
Reranking = Callable[[float, int], list["FoldResult"]]
"""Maps the old scores' weight and the number of re-ranked hits to results."""
Queries = Callable[[int, str, NDArray[np.int64], PairedEmbeddings], NDArray[np.float32]]
"""Maps a fold's number, a protocol, and rows of some pairs to queries in the searched space."""


Sides = tuple[Queries, Queries]
"""Functions that embed items as queries, and as gallery entries."""


class FoldResult(NamedTuple):
    """Results of a fold's queries with a protocol.

    Args:
        fold: fold number.
        protocol: protocol name.
        found: metric -> value of each query.
        quality_Q: a number per query: average precision, or for captions the reciprocal rank.
        about_Q: item of each query.
        clusters_Q: each query's bootstrap cluster: its class or caption group.
        n_gallery: number of searched items.
    """

    fold: int
    protocol: str
    found: Mapping[str, np.ndarray]
    quality_Q: NDArray[np.float64]
    about_Q: NDArray[np.int64]
    clusters_Q: NDArray[np.int64]
    n_gallery: int


class FoldSearch(NamedTuple):
    """A fold's queries with a protocol, before they are measured.

    Args:
        fold: fold number.
        protocol: protocol name.
        pairs: queries and searched items.
        sides: embeddings of the queries and of the searched items.
        rows: their rows.
        about_Q: item of each query.
        clusters_Q: each query's bootstrap cluster.
    """

    fold: int
    protocol: str
    pairs: LabelledPairs
    sides: tuple[PairedEmbeddings, PairedEmbeddings]
    rows: tuple[NDArray[np.int64], NDArray[np.int64]]
    about_Q: NDArray[np.int64]
    clusters_Q: NDArray[np.int64]

    def find_first_hits(self, count: int) -> FirstHits:
        """Return each query's first hits, with scores of the new model."""
        own_QE, own_GE = (copy_rows(side.new_ND, rows) for side, rows in zip(self.sides, self.rows, strict=True))
        return find_first_hits(self.pairs, own_QE, own_GE, count)

    def result(self, found: Mapping[str, np.ndarray], quality_Q: NDArray[np.float64]) -> FoldResult:
        """Return the results of its queries; arguments as in :class:`FoldResult`."""
        return FoldResult(self.fold, self.protocol, found, quality_Q, self.about_Q, self.clusters_Q, self.pairs.n_gallery)


@dataclass(frozen=True)
class Trial:
    """A candidate's gains over old queries on the same held-out gallery.

    Args:
        candidate: the candidate.
        gains: protocol -> metric -> new/old minus old/old, paired over the queries of all folds.
        shown_only: protocols that do not affect the choice.
    """

    candidate: Candidate
    gains: dict[str, dict[str, PairedDifference]]
    shown_only: tuple[str, ...] = ()

    def cells(self) -> Iterator[tuple[str, str, PairedDifference]]:
        """Yield protocol, metric and gain of all protocols that affect the choice."""
        deciding = {protocol: gains for protocol, gains in self.gains.items() if protocol not in self.shown_only}
        return ((protocol, metric, gain) for protocol, gains in deciding.items() for metric, gain in gains.items())

    @property
    def least(self) -> PairedDifference:
        """Smallest gain over these protocols and all metrics."""
        return min((gain for _, _, gain in self.cells()), key=lambda gain: gain.mean)

    @property
    def worst(self) -> float:
        """Mean of the smallest gain."""
        return self.least.mean

    @property
    def error(self) -> float:
        """Standard error of the smallest gain."""
        return (self.least.high - self.least.low) / (2 * _STANDARD_ERRORS)

    @property
    def is_surely_better(self) -> bool:
        """Whether every interval is above zero."""
        return all(gain.low > 0 for _, _, gain in self.cells())

    @property
    def is_surely_no_worse(self) -> bool:
        """Whether no interval reaches below zero."""
        return all(gain.low >= 0 for _, _, gain in self.cells())

    @property
    def mean(self) -> float:
        """Mean gain."""
        return float(np.mean([gain.mean for _, _, gain in self.cells()]))


class ValidationSplit(ABC):
    """Folds of a training set, the candidate parts learned from each, and the results of old queries.

    Args:
        lines: linear map name -> solver.
        seed: random seed for folds and intervals.
    """

    sharpnesses: Sequence[float]
    shares: Sequence[float]
    powers: Sequence[float]
    of_galleries = False
    direction = IMAGE_TO_IMAGE
    """Direction of search in ``report.json``, unless protocols are directions."""
    left_out: tuple[str, ...] = ()
    """Sentences about candidates that cannot be solved and are not tried."""
    shown_only: tuple[str, ...] = ()
    """Protocols with results that are only shown, and do not affect the choice."""
    learned_rows: list[NDArray[np.int64]]
    """Rows, or groups, that each fold learns from."""

    def __init__(self, lines: Mapping[str, Solver], seed: int) -> None:
        self.lines, self.seed = lines, seed
        self._results: dict[Candidate, list[FoldResult]] = {}
        self._mapped: dict[tuple[int, str], tuple[NDArray[np.int64], PairedEmbeddings]] = {}  # rows that candidates mapped
        self.known = [CandidateParts(pairs, lines=lines, codec=AS_THEY_ARE) for pairs in self.training_pairs()]
        self.old = self.measure_old()
        self.floor = _merge_folds(self.old)
        self.clusters = {
            protocol: np.concatenate([each.clusters_Q for each in self.old if each.protocol == protocol])
            for protocol in self.floor
        }

    def results_of(self, candidate: Candidate) -> list[FoldResult]:
        """Return a candidate's results, measured once."""
        self._measure_candidates([candidate])
        return self._results[candidate]

    def _measure_candidates(self, candidates: Iterable[Candidate]) -> None:
        missing = [each for each in dict.fromkeys(candidates) if each not in self._results]
        sides = [self.sides_of(self.queries_of(each)) for each in missing]
        self._results.update(zip(missing, self.measure_searches(sides), strict=True))

    def floor_means(self) -> dict[str, dict[str, float]]:
        """Return the results of old queries: protocol -> metric -> mean."""
        return {name: {metric: float(v.mean()) for metric, v in metrics.items()} for name, metrics in self.floor.items()}

    def cases(self, candidate: Candidate) -> tuple[Case, ...]:
        """Return results for old queries and a candidate by protocol, as cases of ``report.json``."""
        sizes = {each.protocol: each.n_gallery for each in self.old}
        cases = []
        for query, found in (("old", self.floor), ("new", _merge_folds(self.results_of(candidate)))):
            for protocol, metrics in found.items():
                if protocol in self.shown_only:
                    continue
                ci95 = {
                    metric: bootstrap_interval(values_Q, RESAMPLES, seed=self.seed, clusters_Q=self.clusters[protocol])
                    for metric, values_Q in metrics.items()
                }
                means = {metric: float(values_Q.mean()) for metric, values_Q in metrics.items()}
                direction = _DIRECTIONS.get(protocol, self.direction)
                counts = len(self.clusters[protocol]), sizes[protocol]
                cases.append(Case(query, "old", direction, *counts, means, ci95, POPULATIONS.get(protocol, ALL)))
        return tuple(cases)

    @abstractmethod
    def training_pairs(self) -> Iterable[Paired]:
        """Return each fold's training pairs."""

    def sides_of(self, mapped: Queries) -> Sides:
        """Return the functions that embed queries and gallery items; a candidate maps one of these sides."""
        return mapped, _stored_embeddings

    def measure(self, mapped: Queries) -> list[FoldResult]:
        """Measure every query of every fold; the argument as in :meth:`sides_of`."""
        return self.measure_search(*self.sides_of(mapped))

    @abstractmethod
    def measure_search(self, asked: Queries, searched: Queries) -> list[FoldResult]:
        """Measure held-out items as queries.

        Args:
            asked: embeds items as queries.
            searched: embeds items as gallery entries.
        """

    def measure_searches(self, sides: Sequence[Sides]) -> list[list[FoldResult]]:
        """Measure several searches, as :meth:`measure_search` does."""
        return [self.measure_search(*each) for each in sides]

    def measure_old(self) -> list[FoldResult]:
        """Measure old queries on old galleries."""
        return self.measure(_stored_embeddings)

    def prepare_reranking(self, queries: Queries, most: int) -> Reranking | None:
        """Return a function that measures queries with hits re-ranked by the new model; None if this is not supported.

        Args:
            queries: maps queries to the searched space.
            most: largest number of re-ranked hits per query.
        """
        return None

    @abstractmethod
    def with_old_queries(self) -> ValidationSplit:
        """Return the same folds with the old model in place of the new model."""

    def backfill_losses(self, candidate: Candidate) -> tuple[BackfillLoss, ...]:
        """Return the metrics that fall after the new model has re-embedded the gallery."""
        losses = []
        now, after = _merge_folds(self.results_of(candidate)), _merge_folds(self.measure_re_embedded(candidate))
        for protocol, metrics in now.items():
            for metric, values_Q in metrics.items() if protocol not in self.shown_only else ():
                before, then = float(values_Q.mean()), float(after[protocol][metric].mean())
                if then < before:
                    losses.append(BackfillLoss(protocol, metric, before, then))
        return tuple(losses)

    @abstractmethod
    def measure_re_embedded(self, candidate: Candidate) -> list[FoldResult]:
        """Measure a candidate's queries in a gallery re-embedded by the new model."""

    def stored_by(self, candidate: Candidate) -> Queries:
        """Return the function that embeds gallery items with the new model and a candidate's linear map."""

        def stored(fold: int, _: str, rows_Q: NDArray[np.int64], side: PairedEmbeddings) -> NDArray[np.float32]:
            line = self.known[fold].line(candidate.line)
            with torch.inference_mode():
                return (
                    line.to_space_without_memory(torch.from_numpy(copy_rows(side.new_ND, rows_Q)).to(line.device)).cpu().numpy()
                )

        return stored

    def queries_of(self, candidate: Candidate) -> Queries:
        """Return a candidate's map of queries, learned from each fold."""

        def queries(fold: int, protocol: str, rows_Q: NDArray[np.int64], side: PairedEmbeddings) -> NDArray[np.float32]:
            self._mapped[fold, protocol] = rows_Q, side
            mapped_Qd = self.known[fold].queries(candidate, partial(side.inputs, rows_Q), protocol)
            if candidate.old_share:
                mapped_Qd = slerp(
                    mapped_Qd, torch.from_numpy(normalise_rows(copy_rows(side.old_Nd, rows_Q))), candidate.old_share
                )
            return mapped_Qd.numpy()

        return queries

    def evidence(self, candidate: Candidate) -> Evidence:
        """Measure for each query the length of its recalled embedding, and whether the candidate hurts it."""

        def measure_norms(fold: int, protocol: str) -> NDArray[np.float64]:
            rows_Q, side = self._mapped[fold, protocol]
            recalled_Qd = self.known[fold].recall_embeddings(candidate, partial(side.inputs, rows_Q), protocol)
            return recalled_Qd.norm(dim=1).double().numpy()

        new = self.results_of(candidate)
        hurt = [mine.quality_Q < floor.quality_Q for mine, floor in zip(new, self.old, strict=True)]
        folds = [np.full(len(each.quality_Q), each.fold) for each in new]
        about = [each.about_Q * len(self.known) + each.fold for each in new]
        norms_Q = [measure_norms(each.fold, each.protocol) for each in new]
        return Evidence(*(np.concatenate(parts) for parts in (norms_Q, hurt, folds, about)))

    def try_candidate(self, candidate: Candidate) -> Trial:
        """Measure a candidate."""
        return self.compare_with_old(candidate, self.results_of(candidate))

    def try_candidates(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Measure candidates together, so that cores do not wait for the last fold of each."""
        self._measure_candidates(candidates)
        return [self.try_candidate(each) for each in candidates]

    def compare_with_old(self, candidate: Candidate, results: Sequence[FoldResult]) -> Trial:
        """Return a candidate's gains over old queries."""
        gains = {}
        for protocol, metrics in _merge_folds(results).items():
            own_QK, old_QK = (np.stack([*values.values()], axis=1) for values in (metrics, self.floor[protocol]))
            changes = paired_bootstraps(own_QK, old_QK, RESAMPLES, LEVEL, self.seed, self.clusters[protocol])
            gains[protocol] = dict(zip(metrics, changes, strict=True))
        return Trial(candidate, gains, self.shown_only)

    def is_by_chance(self, candidate: Candidate) -> bool:
        """Return whether a candidate's queries do not surely beat the same queries swapped between items.

        Swapped queries find items by chance, depending on class sizes and on entries near to everything. All metrics are
        averaged, because a single metric can reach its maximum on few items.
        """
        queries, protocols = self.queries_of(candidate), list(self.floor)

        def dealt(fold: int, protocol: str, rows_Q: NDArray[np.int64], side: PairedEmbeddings) -> NDArray[np.float32]:
            draw = np.random.default_rng((self.seed, fold, protocols.index(protocol)))  # folds are measured in any order
            return queries(fold, protocol, rows_Q, side)[draw.permutation(len(rows_Q))]

        own_Q, dealt_Q = (
            np.concatenate([np.mean(list(each.found.values()), axis=0) for each in results])
            for results in (self.results_of(candidate), self.measure(dealt))
        )
        # queries of one item give similar results with all protocols
        clusters_Q = np.concatenate([each.clusters_Q for each in self.old])
        return paired_bootstrap(own_Q, dealt_Q, RESAMPLES, CHANCE_LEVEL, self.seed, clusters_Q).low <= 0


class RerankableSplit(ValidationSplit):
    """Validation split whose searches can be re-ranked by the new model."""

    @override
    def prepare_reranking(self, queries: Queries, most: int) -> Reranking | None:
        searches = self._search_folds([(queries, _stored_embeddings)])
        with one_blas_thread():
            hits = list(map_over_cores(lambda each: (each, each.find_first_hits(most)), searches, CPU))

        def measure(old_weight: float, k: int) -> list[FoldResult]:
            def measure_search(found: tuple[FoldSearch, FirstHits]) -> FoldResult:
                return self.measure_pairs(found[0], found[1].rerank(k, old_weight))

            return list(map_over_cores(measure_search, hits, CPU))

        return measure

    @override
    def measure_search(self, asked: Queries, searched: Queries) -> list[FoldResult]:
        return self.measure_searches([(asked, searched)])[0]

    @override
    def measure_searches(self, sides: Sequence[Sides]) -> list[list[FoldResult]]:
        with one_blas_thread():  # NumPy's threads would compete with those of the folds
            results = list(map_over_cores(lambda each: self.measure_pairs(each, each.pairs), self._search_folds(sides), CPU))
        count = len(results) // max(1, len(sides))  # each has the same queries
        return [results[place * count :][:count] for place in range(len(sides))]

    def _search_folds(self, sides: Sequence[Sides]) -> Iterator[FoldSearch]:
        """Yield the searches of all folds; a core maps a fold's queries, and only it uses the fold's parts.

        Searches of a fold are measured while the next folds are mapped, as cores would wait for the last of five folds.
        """

        def search_fold(one: tuple[int, Sides]) -> list[FoldSearch]:
            fold, (asked, searched) = one
            with self.known[fold].lock:
                return [*self.searches_of(fold, asked, searched)]

        every = ((fold, each) for each in sides for fold in range(len(self.learned_rows)))
        return chain.from_iterable(map_over_cores(search_fold, every, CPU))

    @abstractmethod
    def searches_of(self, fold: int, asked: Queries, searched: Queries) -> Iterator[FoldSearch]:
        """Yield the searches of a fold; further arguments as in :meth:`measure_search`."""

    @abstractmethod
    def measure_pairs(self, search: FoldSearch, pairs: LabelledPairs) -> FoldResult:
        """Measure a search, with its own scores or re-ranked ones."""


class HeldOutClasses(RerankableSplit):
    """Items that search items of their own class."""

    sharpnesses = (20.0, 30.0, 40.0)
    powers: Sequence[float] = POWERS
    shares: Sequence[float] = (0.3, 0.5, 0.8, 1.2)

    def __init__(self, pairs: PairedEmbeddings, searched: Searched, lines: Mapping[str, Solver], seed: int) -> None:
        assert pairs.labels_N is not None
        self.pairs, self.labels_N, self.searched = pairs, pairs.labels_N, searched
        self.folds = list(folds(pairs.labels_N, searched, seed))
        self.learned_rows = [fold.fit_F for fold in self.folds]
        self._in_stored: dict[tuple[int, str], LabelledPairs] = {}  # all candidates search the same stored embeddings
        super().__init__(lines, seed)
        differ = map_over_cores(CandidateParts.differ, self.known, CPU)
        new, old = (all(each) for each in zip(*differ, strict=True))
        if self.powers and not old:
            self.powers = ()
            self.left_out += (f"No learned transform is tried: old {_ALIKE}",)
        if not new:
            self.shares = ()
            self.left_out += (f"No memory is tried: {'old' if self.of_galleries else 'new'} {_ALIKE}",)

    @override
    def training_pairs(self) -> Iterable[Paired]:
        return [self.pairs.take(fit_F) for fit_F in self.learned_rows]

    @override
    def searches_of(self, fold: int, asked: Queries, searched: Queries) -> Iterator[FoldSearch]:
        for protocol, rows_Q in self.folds[fold].queries.items():
            rows_G, asked_Qd = self.folds[fold].galleries[protocol], asked(fold, protocol, rows_Q, self.pairs)
            labels_Q, is_stored = self.labels_N[rows_Q], searched is _stored_embeddings
            if is_stored and (fold, protocol) in self._in_stored:
                pairs = self._in_stored[fold, protocol].with_queries(asked_Qd)
            else:
                searched_Gd = searched(fold, protocol, rows_G, self.pairs)
                pairs = LabelledPairs(Items(asked_Qd, labels_Q, rows_Q), Items(searched_Gd, self.labels_N[rows_G], rows_G))
            if is_stored:
                self._in_stored[fold, protocol] = pairs
            yield FoldSearch(fold, protocol, pairs, (self.pairs, self.pairs), (rows_Q, rows_G), rows_Q, labels_Q)

    @override
    def measure_pairs(self, search: FoldSearch, pairs: LabelledPairs) -> FoldResult:
        ranked = rank(pairs)
        assert (ranked.positives_Q > 0).all()  # folds hold out at least two items per class
        first_Q, precision_Q = ranked.first_hit_ranks_Q, ranked.average_precision_Q
        found = {"cmc@1": first_Q < 1, "cmc@5": first_Q < 5, "map": precision_Q}
        return search.result(found, precision_Q)

    @override
    def measure_re_embedded(self, candidate: Candidate) -> list[FoldResult]:
        alone = replace(candidate, old_share=0.0)  # old queries join where old embeddings are left
        return self.measure_search(self.queries_of(alone), self.stored_by(alone))

    @override
    def with_old_queries(self) -> ValidationSplit:
        beside = copy.copy(self)  # with the same folds, galleries and results of old queries
        beside.pairs, beside.lines, beside.known = self.pairs.of_old(), LINES, [each.of_old() for each in self.known]
        beside._results, beside._mapped = {}, {}
        beside.shares = self.shares if all(old for _, old in map(CandidateParts.differ, self.known)) else ()
        return beside


class SwappedSplit(ValidationSplit):
    """New embeddings of items that search mapped old embeddings of others; the pairs exchange old and new.

    No learned transform is tried: it would change mapped embeddings, but not queries and new embeddings.
    """

    powers: Sequence[float] = ()
    of_galleries = True

    @override
    def prepare_reranking(self, queries: Queries, most: int) -> Reranking | None:
        return None  # this map moves old embeddings

    @override
    def sides_of(self, mapped: Queries) -> Sides:
        return _stored_embeddings, mapped

    @override
    def measure_re_embedded(self, candidate: Candidate) -> list[FoldResult]:
        return self.measure_search(_stored_embeddings, _stored_embeddings)

    @override
    def measure_old(self) -> list[FoldResult]:

        def old(_: int, __: str, rows_Q: NDArray[np.int64], turned: PairedEmbeddings) -> NDArray[np.float32]:
            return normalise_rows(copy_rows(turned.new_ND, rows_Q))

        return self.measure_search(old, old)


class HeldOutGalleries(SwappedSplit, HeldOutClasses):
    """Mapped galleries of items with classes."""

    pairs: SwappedEmbeddings

    @override
    def with_old_queries(self) -> ValidationSplit:
        of_old = SwappedEmbeddings(self.pairs.new_ND, self.pairs.new_ND, self.labels_N)
        return HeldOutGalleries(of_old, self.searched, LINES, self.seed)


class HeldOutCaptions(RerankableSplit):
    """Captions that search images, or questions that search passages, and the reverse.

    Results of passages that search questions are only shown and do not affect the choice.
    """

    sharpnesses = (40.0, 60.0, 100.0)
    shares: Sequence[float] = (0.3, 0.5, 0.8, 1.2)
    powers: Sequence[float] = ()

    def __init__(self, pairs: CaptionedEmbeddings, lines: Mapping[str, Solver], seed: int) -> None:
        self.pairs = pairs
        self.protocols = TEXT_TO_IMAGE, IMAGE_TO_TEXT
        if pairs.are_questions:
            self.protocols = QUESTION_TO_PASSAGE, PASSAGE_TO_QUESTION
            self.shown_only = (PASSAGE_TO_QUESTION,)
        folds = list(caption_folds(int(pairs.groups[0].max()) + 1, seed))
        self.learned_rows = [learned_K for learned_K, _ in folds]
        self.searched = [pairs.take(searched_K) for _, searched_K in folds]
        draw = np.random.default_rng(seed)
        self.asked = [
            [np.sort(draw.permutation(len(side))[:QUERIES]) for side in (each.images, each.texts)] for each in self.searched
        ]
        super().__init__(lines, seed)

    @override
    def training_pairs(self) -> Iterable[Paired]:
        return [self.pairs.take(learned_K) for learned_K in self.learned_rows]

    @override
    def measure_re_embedded(self, candidate: Candidate) -> list[FoldResult]:
        alone = replace(candidate, old_share=0.0)  # old queries join where old embeddings are left
        return self.measure_search(self.queries_of(alone), self.stored_by(alone))

    @override
    def searches_of(self, fold: int, asked: Queries, searched: Queries) -> Iterator[FoldSearch]:
        pairs = self.searched[fold]
        sides, groups = (pairs.images, pairs.texts), pairs.groups
        for protocol, asking, found in zip(self.protocols, (1, 0), (0, 1), strict=True):
            rows_Q, entries_G = self.asked[fold][asking], np.arange(len(sides[found]))
            groups_Q = groups[asking][rows_Q]
            compared = LabelledPairs(
                Items(asked(fold, protocol, rows_Q, sides[asking]), groups_Q),
                Items(searched(fold, protocol, entries_G, sides[found]), groups[found]),
            )
            both, clusters_Q = (sides[asking], sides[found]), groups_Q * len(self.searched) + fold
            yield FoldSearch(fold, protocol, compared, both, (rows_Q, entries_G), groups_Q, clusters_Q)

    @override
    def measure_pairs(self, search: FoldSearch, pairs: LabelledPairs) -> FoldResult:
        is_reranked = pairs is not search.pairs
        first_Q = rank(pairs).first_hit_ranks_Q if is_reranked else rank_first_hits(pairs)  # counts are faster than sorting
        return search.result({f"recall@{k}": first_Q < k for k in RECALLS}, 1 / (1.0 + first_Q))

    @override
    def with_old_queries(self) -> ValidationSplit:
        return HeldOutCaptions(self.pairs.of_old(), LINES, self.seed)


class HeldOutCaptionedGalleries(SwappedSplit, HeldOutCaptions):
    """Mapped galleries of images with captions, or of passages with questions. No memory is tried."""

    shares = ()


def _stored_embeddings(_: int, __: str, rows_Q: NDArray[np.int64], side: PairedEmbeddings) -> NDArray[np.float32]:
    """Return the items' own embeddings in the searched space."""
    return copy_rows(side.old_Nd, rows_Q)


def _merge_folds(parts: Sequence[FoldResult]) -> Values:
    return {
        protocol: {
            metric: np.concatenate([each.found[metric] for each in parts if each.protocol == protocol]).astype(np.float64)
            for metric in parts[0].found
        }
        for protocol in dict.fromkeys(each.protocol for each in parts)
    }
