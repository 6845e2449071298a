"""The choice of a map: the candidate whose queries find most among held-out items and classes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xcompat.core.errors import NothingHeldOutError
from xcompat.evaluation.cases import BackfillLoss, Case
from xcompat.mapping.candidates import LINES, WHITENED, Candidate, Paired, Solver, steady
from xcompat.mapping.confidence import Calibration, calibrate
from xcompat.mapping.folds import LEARNED, Searched
from xcompat.mapping.held_out import HeldOut, HeldOutCaptions, HeldOutClasses, HeldOutGalleries, Trial
from xcompat.mapping.paired import CaptionedEmbeddings, TurnedEmbeddings
from xcompat.score_scale import OLD_WEIGHT

DAMPINGS = (0.1, 0.3, 1.0)
MIXED = 0.5
"""The weight of the old query where it joins the new one half-way."""
OLD_SHARES = (0.3, 0.5, 0.7)
OLD_WEIGHTS = (OLD_WEIGHT, 0.0, 0.5)
"""Weights of old scores in a re-ranking."""
"""The weights that are tried."""


NEARLY_ALL, MUCH_MORE = 0.9, 1.5
"""Share of the new model's neighbours, and how many times as many as old queries find, that a map alone has to find."""


@dataclass(frozen=True)
class Choice:
    """All trials, and the chosen one.

    Args:
        trials: all, in the order of trying.
        chosen: the best of them (:attr:`objective`).
        without_new_model: the old model with the metric and the memory of the best, the part of its gain that needs no new model;
            None if the best has neither, or the old model can have no such memory.
        floor: protocol -> metric -> value of old queries.
        n_queries: protocol -> number of queries.
        learned_at_most: the number of items, or captioned images, that each fold learned from, if there were more; else None.
        too_few_for_ridge: the number of items that a fold learned from, if these were too few to try ridge regression; else None.
        than: the line whose gains were subtracted from those of metric and memory; None to compare with old queries. Both models
            may have trained on the held-out items, the old one on more of them, and gains over old queries then say less.
        mixed: the best, half-way with old queries; only where the best map is not surely at or above these, and no old model can
            embed queries.
        confidence: the calibration of the best's memory; None without one.
        no_confidence: why there is none.
        of_galleries: whether the maps are of stored embeddings, not of queries.
        of_agreement: whether the new model's neighbours were what all looked for (:func:`~xcompat.mapping.agreement.agree`).
        of_few_pairs: whether there are fewer than twice as many pairs as the larger space has dimensions.
        sentences: line -> mean reciprocal rank of a held-out text, asked for by one of its sentences; empty without texts.
        remembers: whether what is chosen has a memory, its own or one that came with the map.
        left_out: sentences about candidates that could not be solved, and were not tried.
        backfill_losses: metrics on which what is chosen finds less once the new model has re-embedded everything.
        copies: the number of items that are exact copies of others, and were not held out.
        cases: what old queries and those of the chosen candidate find, by population.
        reranked: the best, the first hits scored again by the new model; None if that cannot be measured.
        rerank_weight: weight of old scores in it, the best of :data:`OLD_WEIGHTS`; None without it.
        by_chance: whether what is chosen finds no more than chance (:meth:`~xcompat.mapping.held_out.HeldOut.is_by_chance`).
    """

    trials: list[Trial]
    chosen: Trial
    without_new_model: Trial | None
    floor: dict[str, dict[str, float]]
    n_queries: dict[str, int]
    learned_at_most: int | None = None
    too_few_for_ridge: int | None = None
    than: Trial | None = None
    mixed: Trial | None = None
    confidence: Calibration | None = None
    no_confidence: str = ""
    of_galleries: bool = False
    of_agreement: bool = False
    of_few_pairs: bool = False
    sentences: Mapping[str, float] = field(default_factory=dict)
    remembers: bool = False
    by_chance: bool = False
    left_out: tuple[str, ...] = ()
    backfill_losses: tuple[BackfillLoss, ...] = ()
    cases: tuple[Case, ...] = ()
    copies: int = 0
    reranked: Trial | None = None
    rerank_weight: float | None = None

    @property
    def is_safe(self) -> bool:
        """Whether what is chosen is surely at or above old queries.

        Without labels, agreement with the new model has to stand for it (:attr:`agrees_enough`).
        """
        return (self.agrees_enough if self.of_agreement else self.chosen.is_surely_no_worse) and not self.by_chance

    @property
    def agrees_enough(self) -> bool:
        """Whether queries agree so far with the new model that no upgrade measured with as much lost (docs/results/lines.md).

        They find nearly all of the new model's neighbours. Or there are many pairs, and they surely find more of them than old
        queries do: half-way queries any number more, a map alone 1.5 times as many. One of 1.4 times as many lost 4 points.
        """
        (floor,) = (value for metrics in self.floor.values() for value in metrics.values())
        found = floor + self.chosen.least.low
        if found >= NEARLY_ALL:
            return True
        is_mixed = self.chosen.candidate.old_share > 0
        return self.chosen.is_surely_better and not self.of_few_pairs and (is_mixed or found >= MUCH_MORE * floor)

    @property
    def objective(self) -> str:
        """The criterion of the choice, in words."""
        if self.of_agreement:
            if self.sentences:
                return "the largest mean reciprocal rank of a held-out text, asked for by one of its sentences"
            return "whitened, if it finds surely more of the new model's nearest neighbours than old queries do"
        beside = "old queries" if self.than is None else "the same without metric and memory"
        best = f"the worst gain over {beside} among protocols and metrics, to a tenth of a point, then the mean gain"
        careful = "; where it is not surely above zero, the largest mean gain of what is close to it and remembers little"
        return best + careful * (self.than is None)

    def shown(self) -> list[Trial]:
        """Return, in the order of trying, the best trial of each kind of candidate, and the chosen one, which need not be one."""
        kinds = dict.fromkeys(trial.candidate.kind for trial in self.trials)
        best = [better((trial for trial in self.trials if trial.candidate.kind == kind), self.than) for kind in kinds]
        return [trial for trial in self.trials if trial is self.chosen or any(trial is each for each in best)]


def better(trials: Iterable[Trial], than: Trial | None = None) -> Trial:
    """Return the trial with the largest worst gain over protocols and metrics, to a tenth of a point, then the largest mean.

    Args:
        trials: one or more.
        than: the trial whose gains are subtracted; None for gains over old queries.
    """

    def worst(trial: Trial) -> float:
        return min(
            gain.mean - (than.gains[protocol][metric].mean if than is not None else 0.0)
            for protocol, metric, gain in trial.cells()
        )

    return max(trials, key=lambda trial: (round(1000 * worst(trial)), trial.mean))


def careful(trials: Collection[Trial]) -> Trial:
    """Return the best trial whose every gain is surely above zero; else the best mean among close ones.

    Few held-out items are weak evidence. A memory with a large share costs most on unseen classes; the smallest share costs
    almost nothing there and gains on all others (after the rule of one standard error, Breiman et al. 1984, Classification and
    Regression Trees §3.4.3).

    Args:
        trials: one or more.
    """
    if sure := [trial for trial in trials if trial.is_surely_better]:
        return better(sure)
    best = better(trials)
    close = [trial for trial in trials if trial.worst >= best.worst - best.error]
    mildest = min((trial.candidate.share for trial in close if trial.candidate.share), default=0.0)
    return max((trial for trial in close if trial.candidate.share <= mildest), key=lambda trial: trial.mean)


def joined(choices: Sequence[Choice]) -> Choice:
    """Join the choices for several inputs of the map, such as layers of the new model, on the same items.

    A layer that was trained on the held-out items finds more of them than of unseen items, and earlier layers less so. Among
    inputs whose worst gain is within a standard error of the best, the one furthest from the last layer is therefore taken.

    Args:
        choices: one or more, the new model's last layer first.

    Returns:
        The choice of the taken input, with the trials of all.
    """
    best = better(choice.chosen for choice in choices)
    taken = [choice for choice in choices if choice.chosen.worst >= best.worst - best.error][-1]
    return replace(taken, trials=[trial for choice in choices for trial in choice.trials])


def _tried(held: HeldOut, lines: Iterable[str], than: Trial | None) -> list[Trial]:
    """Try every line, the two best with every metric, then memories on the best of these, then dampings of the best of those."""
    alone = [Candidate(name) for name in lines]
    trials = {than.candidate: than} if than is not None else {}

    def best_of(candidates: Sequence[Candidate]) -> Candidate:
        for each in candidates:
            if each not in trials:
                trials[each] = held.try_(each)
        return better((trials[each] for each in candidates), than).candidate

    first = best_of(alone)
    second = [best_of(others)] if (others := [line for line in alone if line != first]) else []
    best = best_of([first, *(replace(line, power=power) for line in (first, *second) for power in held.powers)])
    if held.shares:
        best = best_of([replace(best, sharpness=beta, share=share) for beta in held.sharpnesses for share in held.shares])
    if best.power is not None:
        best_of([best, *(replace(best, damping=damping) for damping in DAMPINGS)])
    return list(trials.values())


def mixtures(held: HeldOut, trials: Collection[Trial], chosen: Trial) -> list[Trial]:
    """Try the chosen candidate, the best line and the whitened line together with old queries.

    Args:
        held: what is held out.
        trials: those without old queries.
        chosen: the best of them.
    """
    line = better(trial for trial in trials if trial.candidate.kind == trial.candidate.line).candidate
    bases = dict.fromkeys((chosen.candidate, line, replace(line, line=WHITENED)))
    return [held.try_(replace(base, old_share=share)) for base in bases if base.line in held.lines for share in OLD_SHARES]


def _calibrated(held: HeldOut, candidate: Candidate, brought: bool) -> tuple[Calibration | None, str]:
    """Return the calibration of a candidate's memory, or None and why there is none."""
    if candidate.share and not held.of_galleries:
        return calibrate(held.evidence(candidate))
    if brought:
        return None, "what they remember came with the map, and was calibrated where that was made, if anywhere"
    return None, "what they search remembers, not they" if held.of_galleries else "they remember nothing"


def _reranked(held: HeldOut, candidate: Candidate) -> tuple[Trial | None, float | None]:
    """Try a candidate whose first hits the new model scores again, with several weights of old scores; return the best."""
    tried = {weight: held.try_reranked(candidate, weight) for weight in OLD_WEIGHTS}
    found = {weight: trial for weight, trial in tried.items() if trial is not None}
    if not found:
        return None, None
    best = better(found.values())
    return best, next(weight for weight, trial in found.items() if trial is best)


def _half_way(held: HeldOut, chosen: Trial) -> Trial | None:
    """Try the chosen candidate half-way with old queries, unless it needs none or has them."""
    if chosen.is_surely_no_worse or chosen.candidate.old_share or held.of_galleries:
        return None
    return held.try_(replace(chosen.candidate, old_share=MIXED))


def _old_alone(held: HeldOut, chosen: Trial) -> Trial | None:
    """Try the old model with the metric and the memory of the chosen candidate, if it has either."""
    if chosen.candidate.power is None and not chosen.candidate.share:
        return None  # old queries are the floor itself
    beside = held.with_old_queries()
    if chosen.candidate.share and not beside.shares:
        return None
    return beside.try_(replace(chosen.candidate, line="rotation", old_share=0.0))


def _held_out(pairs: Paired, searched: Searched, lines: Mapping[str, Solver], seed: int) -> HeldOut:
    """Hold out parts of a training set."""
    if isinstance(pairs, CaptionedEmbeddings):
        return HeldOutCaptions(pairs, lines, seed)
    if pairs.labels_N is None:
        raise NothingHeldOutError("no classes or captions are known, so nothing says what a query should find")
    return (HeldOutGalleries if isinstance(pairs, TurnedEmbeddings) else HeldOutClasses)(pairs, searched, lines, seed)


def choose(
    pairs: Paired,
    searched: Searched = "unknown",
    seed: int = 0,
    lines: Mapping[str, Solver] = LINES,
    beside_line: bool = False,
    with_old_model: bool = False,
) -> Choice:
    """Try candidates part by part: lines with metrics, memories, and finer settings.

    Where no map is surely at or above old queries, and the old model can embed queries too, mixtures of both queries are tried.

    Args:
        pairs: the training set, with classes or with captions; turned for maps of galleries, which take no metric.
        searched: what is known of the classes that will be searched.
        seed: of the folds and of the intervals.
        lines: the solver of each line, by name.
        beside_line: whether metric and memory are compared with the first line alone instead of old queries, for a model that was
            trained on the held-out items, as the old one may have been.
        with_old_model: whether the old model can embed queries.

    Returns:
        Every trial, and the best.

    Raises:
        NothingHeldOutError: neither classes nor captions are known, or there are too few items to hold any out.
    """
    held = _held_out(pairs, searched, lines, seed)
    than = held.try_(Candidate(next(iter(lines)))) if beside_line else None
    fewest = min(len(each.pairs) for each in held.known)
    tried = steady(lines, fewest, pairs.dims[0])
    trials = _tried(held, tried, than)
    chosen = better(trials, than) if than is not None else careful(trials)
    if with_old_model and than is None and not (held.of_galleries or chosen.is_surely_no_worse):
        trials += mixtures(held, trials, chosen)
        chosen = careful(trials)
    brought = held.known[0].line(chosen.candidate.line).memory is not None
    confidence, no_confidence = _calibrated(held, chosen.candidate, brought)
    reranked, rerank_weight = _reranked(held, chosen.candidate)
    return Choice(
        trials=trials,
        chosen=chosen,
        reranked=reranked,
        rerank_weight=rerank_weight,
        without_new_model=_old_alone(held, chosen),
        floor=held.floor_means(),
        n_queries={name: len(next(iter(metrics.values()))) for name, metrics in held.floor.items()},
        learned_at_most=LEARNED if max(map(len, held.learned_rows)) == LEARNED else None,
        too_few_for_ridge=fewest if len(tried) < len(lines) else None,
        than=than,
        mixed=_half_way(held, chosen),
        confidence=confidence,
        no_confidence=no_confidence,
        of_galleries=held.of_galleries,
        remembers=brought or chosen.candidate.share > 0,
        by_chance=held.is_by_chance(chosen.candidate),
        left_out=held.left_out,
        cases=held.cases(chosen.candidate),
        backfill_losses=held.backfill_losses(chosen.candidate),
    )
