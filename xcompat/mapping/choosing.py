"""Which map of queries a training set says is the best: by what each finds on items and classes that were held out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.errors import NothingHeldOutError
from xcompat.evaluation import PairedDifference, first_hit_ranks, paired_bootstrap, ranking_per_query
from xcompat.evaluation.protocol import IMAGE_TO_TEXT, TEXT_TO_IMAGE
from xcompat.mapping.candidates import LINES, Candidate, Known, Paired, Solver
from xcompat.mapping.confidence import Calibration, Evidence, calibrate
from xcompat.mapping.folds import LEARNED, QUERIES, Searched, caption_folds, folds
from xcompat.mapping.paired import CaptionedEmbeddings, PairedEmbeddings
from xcompat.models.codes import AS_THEY_ARE

RESAMPLES = 1000
POWERS, DAMPINGS = (0.15, 0.25, 0.35, 0.5), (0.1, 0.3, 1.0)
RECALLS = (1, 5, 10)
_STANDARD_ERRORS = 1.96  # from the mean to the end of an interval of 95 %
Values = dict[str, dict[str, np.ndarray]]
"""Protocol -> metric -> value of each query."""
Queries = Callable[[int, str, NDArray[np.int64], PairedEmbeddings], NDArray[np.float32]]
"""Of the number of a fold, the protocol, and rows of what is asked there: queries in the old space."""


class Measured(NamedTuple):
    """What queries of one fold find by one protocol.

    Args:
        fold: its number.
        protocol: its name.
        found: metric -> value of each query.
        quality_Q: what each finds as one number: average precision, or of captions the reciprocal rank.
        about_Q: what each is about.
    """

    fold: int
    protocol: str
    found: Mapping[str, np.ndarray]
    quality_Q: NDArray[np.float64]
    about_Q: NDArray[np.int64]


@dataclass(frozen=True)
class Trial:
    """What a candidate finds on what was held out, beside old queries on the same gallery.

    Args:
        candidate: the candidate.
        gains: protocol -> metric -> new/old minus old/old, paired over the queries of all folds.
    """

    candidate: Candidate
    gains: dict[str, dict[str, PairedDifference]]

    def cells(self) -> Iterator[tuple[str, str, PairedDifference]]:
        """Yield protocol, metric and gain."""
        return ((protocol, metric, gain) for protocol, gains in self.gains.items() for metric, gain in gains.items())

    @property
    def least(self) -> PairedDifference:
        """The smallest gain over all protocols and metrics."""
        return min((gain for _, _, gain in self.cells()), key=lambda gain: gain.mean)

    @property
    def worst(self) -> float:
        """The mean of the smallest gain."""
        return self.least.mean

    @property
    def mean(self) -> float:
        """The mean gain."""
        return float(np.mean([gain.mean for _, _, gain in self.cells()]))


@dataclass(frozen=True)
class Choice:
    """What was tried and what is taken.

    Args:
        trials: all, in the order of trying.
        chosen: the best of them (:attr:`objective`).
        without_new_model: old queries with the metric and the memory of the best: what of its gain needs no new model; None where
            it has neither.
        floor: protocol -> metric -> what old queries find.
        n_queries: protocol -> how many were asked.
        learned_at_most: how many items, or captioned images, each fold learned from, where it could have learned from more.
        than: where one line was given, that line alone: both models may have learned from the very items that are held out, and
            the old one more of them, so that gains over old queries say less than those over the line.
        confidence: how sure queries of the best are, None where nothing says so.
        no_confidence: why not.
    """

    trials: list[Trial]
    chosen: Trial
    without_new_model: Trial | None
    floor: dict[str, dict[str, float]]
    n_queries: dict[str, int]
    learned_at_most: int | None = None
    than: Trial | None = None
    confidence: Calibration | None = None
    no_confidence: str = ""

    @property
    def objective(self) -> str:
        """What was the best."""
        beside = "old queries" if self.than is None else "queries without metric and memory"
        best = f"the worst gain over {beside} among protocols and metrics, to a tenth of a point, then the mean gain"
        careful = "; where that gain is not surely above zero, of all within a standard error of it the least share of memory"
        return best + careful * (self.than is None)

    def best_of_each_kind(self) -> list[Trial]:
        """Return the best trial of each kind of candidate, in the order of trying."""
        kinds = dict.fromkeys(trial.candidate.kind for trial in self.trials)
        return [better((trial for trial in self.trials if trial.candidate.kind == kind), self.than) for kind in kinds]


class _HeldOut(ABC):
    """Folds of a training set, what is learned from each, and what old queries find there.

    Args:
        lines: what solves each line.
        seed: of the folds and of the intervals.
    """

    sharpnesses: Sequence[float]
    shares: Sequence[float]
    powers: Sequence[float]
    learned_rows: list[NDArray[np.int64]]
    """What each fold learns from."""

    def __init__(self, lines: Mapping[str, Solver], seed: int) -> None:
        self.lines, self.seed = lines, seed
        self.known = [Known(pairs, lines=lines, codec=AS_THEY_ARE) for pairs in self.learned()]
        self.old = self.measured(lambda _, __, rows_Q, side: side.old_Nd[rows_Q])
        self.floor = _joined(self.old)

    @abstractmethod
    def learned(self) -> Iterable[Paired]:
        """Return what is learned from in each fold."""

    @abstractmethod
    def measured(self, queries: Queries) -> list[Measured]:
        """Measure every query of every fold.

        Args:
            queries: brings what is asked to the old space.
        """

    @abstractmethod
    def with_old_queries(self) -> _HeldOut:
        """Return the same with the old model in the place of the new one."""

    def queries_of(self, candidate: Candidate) -> Queries:
        """Return what brings queries to the old space as a candidate does, with what each fold teaches it."""

        def queries(fold: int, protocol: str, rows_Q: NDArray[np.int64], side: PairedEmbeddings) -> NDArray[np.float32]:
            return self.known[fold].queries(candidate, side.new_ND[rows_Q], protocol).numpy()

        return queries

    def evidence(self, candidate: Candidate) -> Evidence:
        """Gather which queries of a candidate find less than old ones, and how much each leans on what is remembered."""
        leaning = list[NDArray[np.float64]]()
        queries = self.queries_of(candidate)

        def noted(fold: int, protocol: str, rows_Q: NDArray[np.int64], side: PairedEmbeddings) -> NDArray[np.float32]:
            recalled_Qd = self.known[fold].recalled(candidate, side.new_ND[rows_Q], protocol)
            leaning.append(recalled_Qd.norm(dim=1).double().numpy())
            return queries(fold, protocol, rows_Q, side)

        new = self.measured(noted)
        hurt = [mine.quality_Q < floor.quality_Q for mine, floor in zip(new, self.old, strict=True)]
        folds = [np.full(len(each.quality_Q), each.fold) for each in new]
        about = [each.about_Q * len(self.known) + each.fold for each in new]
        return Evidence(*(np.concatenate(parts) for parts in (leaning, hurt, folds, about)))

    def try_(self, candidate: Candidate) -> Trial:
        """Measure a candidate."""
        found = _joined(self.measured(self.queries_of(candidate)))
        gains = {
            protocol: {
                metric: paired_bootstrap(values_Q, self.floor[protocol][metric], RESAMPLES, seed=self.seed)
                for metric, values_Q in metrics.items()
            }
            for protocol, metrics in found.items()
        }
        return Trial(candidate, gains)


class _HeldOutClasses(_HeldOut):
    """Items that search items of their own class."""

    sharpnesses, shares, powers = (20.0, 30.0, 40.0), (0.3, 0.5, 0.8, 1.2), POWERS

    def __init__(self, pairs: PairedEmbeddings, searched: Searched, lines: Mapping[str, Solver], seed: int) -> None:
        assert pairs.labels_N is not None
        self.pairs, self.labels_N, self.searched = pairs, pairs.labels_N, searched
        self.folds = list(folds(pairs.labels_N, searched, seed))
        self.learned_rows = [fold.fit_F for fold in self.folds]
        super().__init__(lines, seed)

    def learned(self) -> Iterable[Paired]:
        return [self.pairs.take(fit_F) for fit_F in self.learned_rows]

    def measured(self, queries: Queries) -> list[Measured]:
        parts = []
        for number, fold in enumerate(self.folds):
            for protocol, rows_Q in fold.searched.items():
                old_Qd, labels_Q = self.pairs.old_Nd[rows_Q], self.labels_N[rows_Q]
                asked_Qd = queries(number, protocol, rows_Q, self.pairs)
                ranked = ranking_per_query(asked_Qd, old_Qd, labels_Q, labels_Q, rows_Q, rows_Q)
                assert (ranked.positives_Q > 0).all()  # of each class, folds hold out two items at least
                first_Q, precision_Q = ranked.first_hit_ranks_Q, ranked.average_precision_Q
                found = {"cmc@1": first_Q < 1, "cmc@5": first_Q < 5, "map@1.0": precision_Q}
                parts.append(Measured(number, protocol, found, precision_Q, rows_Q))
        return parts

    def with_old_queries(self) -> _HeldOut:
        return _HeldOutClasses(self.pairs.of_old(), self.searched, LINES, self.seed)


class _HeldOutCaptions(_HeldOut):
    """Captions that search images, and images that search captions."""

    sharpnesses, shares, powers = (40.0, 60.0, 100.0), (0.3, 0.5, 0.8, 1.2), ()

    def __init__(self, pairs: CaptionedEmbeddings, lines: Mapping[str, Solver], seed: int) -> None:
        self.pairs = pairs
        folds = list(caption_folds(int(pairs.groups[0].max()) + 1, seed))
        self.learned_rows = [learned_K for learned_K, _ in folds]
        self.searched = [pairs.take(searched_K) for _, searched_K in folds]
        draw = np.random.default_rng(seed)
        self.asked = [
            [np.sort(draw.permutation(len(side))[:QUERIES]) for side in (each.images, each.texts)] for each in self.searched
        ]
        super().__init__(lines, seed)

    def learned(self) -> Iterable[Paired]:
        return [self.pairs.take(learned_K) for learned_K in self.learned_rows]

    def measured(self, queries: Queries) -> list[Measured]:
        parts = []
        for number, pairs in enumerate(self.searched):
            sides, groups = (pairs.images, pairs.texts), pairs.groups
            for protocol, asking, searched in ((TEXT_TO_IMAGE, 1, 0), (IMAGE_TO_TEXT, 0, 1)):
                rows_Q = self.asked[number][asking]
                asked_Qd = queries(number, protocol, rows_Q, sides[asking])
                first_Q = first_hit_ranks(asked_Qd, sides[searched].old_Nd[:], groups[asking][rows_Q], groups[searched])
                found = {f"recall@{k}": first_Q < k for k in RECALLS}
                parts.append(Measured(number, protocol, found, 1 / (1.0 + first_Q), groups[asking][rows_Q]))
        return parts

    def with_old_queries(self) -> _HeldOut:
        return _HeldOutCaptions(self.pairs.of_old(), LINES, self.seed)


def _joined(parts: Sequence[Measured]) -> Values:
    """Put the folds of each protocol behind one another."""
    return {
        protocol: {
            metric: np.concatenate([each.found[metric] for each in parts if each.protocol == protocol]).astype(np.float64)
            for metric in parts[0].found
        }
        for protocol in dict.fromkeys(each.protocol for each in parts)
    }


def better(trials: Iterable[Trial], than: Trial | None = None) -> Trial:
    """Return the best: of the largest worst gain over protocols and metrics, to a tenth of a point, then of the largest mean.

    Args:
        trials: one or more.
        than: whose gains are taken off; those over old queries count if None.
    """

    def worst(trial: Trial) -> float:
        return min(
            gain.mean - (than.gains[protocol][metric].mean if than is not None else 0.0)
            for protocol, metric, gain in trial.cells()
        )

    return max(trials, key=lambda trial: (round(1000 * worst(trial)), trial.mean))


def careful(trials: Collection[Trial]) -> Trial:
    """Return the best where its worst gain is surely above zero; else, of all within a standard error, what remembers least.

    Few items held out say little, and a memory that is too bold costs most on classes that nobody has shown (the rule of one
    standard error, Breiman et al. 1984, Classification and Regression Trees §3.4.3).

    Args:
        trials: one or more.
    """
    best = better(trials)
    if best.least.low > 0:
        return best
    error = (best.least.high - best.least.low) / (2 * _STANDARD_ERRORS)
    close = [trial for trial in trials if trial.worst >= best.worst - error]
    share = min(trial.candidate.share for trial in close)
    return better(trial for trial in close if trial.candidate.share == share)


def joined(choices: Sequence[Choice]) -> Choice:
    """Put choices among lines of several inputs of the same items together.

    Args:
        choices: one or more.

    Returns:
        All their trials, and the best of what each took.
    """
    best = better(choice.chosen for choice in choices)
    taken = next(choice for choice in choices if choice.chosen is best)
    return replace(taken, trials=[trial for choice in choices for trial in choice.trials])


def choose(pairs: Paired, searched: Searched = "unknown", seed: int = 0, lines: Mapping[str, Solver] = LINES) -> Choice:
    """Try what a map can be made of, a part after the other: a line, its metric, its memory, and then finer settings.

    Args:
        pairs: the training set, with classes or with captions.
        searched: what is known of the classes that will be searched.
        seed: of the folds and of the intervals.
        lines: what brings the new space to the old one, by name; where it is one alone, metric and memory are judged beside it.

    Returns:
        Every trial, and the best.

    Raises:
        NothingHeldOutError: neither is known, or there are too few items to hold any out.
    """
    held: _HeldOut
    if isinstance(pairs, CaptionedEmbeddings):
        held = _HeldOutCaptions(pairs, lines, seed)
    elif pairs.labels_N is None:
        raise NothingHeldOutError("no classes or captions are known, so nothing says what a query should find")
    else:
        held = _HeldOutClasses(pairs, searched, lines, seed)
    alone = [Candidate(name) for name in lines]
    than = held.try_(alone[0]) if len(alone) == 1 else None
    trials = {alone[0]: than} if than is not None else {}

    def best_of(candidates: Sequence[Candidate]) -> Candidate:
        for each in candidates:
            if each not in trials:
                trials[each] = held.try_(each)
        return better((trials[each] for each in candidates), than).candidate

    best = best_of(alone)
    if held.powers:
        best = best_of([*alone, *(replace(line, power=power) for line in alone for power in held.powers)])
    best = best_of([replace(best, sharpness=beta, share=share) for beta in held.sharpnesses for share in held.shares])
    if held.powers:
        best_of([best, *(replace(best, damping=damping) for damping in DAMPINGS)])
    chosen = better(trials.values(), than) if than is not None else careful(trials.values())
    floor = {name: {metric: float(v.mean()) for metric, v in metrics.items()} for name, metrics in held.floor.items()}
    counts = {name: len(next(iter(metrics.values()))) for name, metrics in held.floor.items()}
    without_new_model = None
    if chosen.candidate.power is not None or chosen.candidate.share:  # a rotation of old embeddings to themselves is none
        without_new_model = held.with_old_queries().try_(replace(chosen.candidate, line="procrustes"))
    confidence, no_confidence = None, "they remember nothing"
    if chosen.candidate.share:
        confidence, no_confidence = calibrate(held.evidence(chosen.candidate))
    most = max(map(len, held.learned_rows))
    return Choice(
        trials=list(trials.values()),
        chosen=chosen,
        without_new_model=without_new_model,
        floor=floor,
        n_queries=counts,
        learned_at_most=most if most == LEARNED else None,
        than=than,
        confidence=confidence,
        no_confidence=no_confidence,
    )
