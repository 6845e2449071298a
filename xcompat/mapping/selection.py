"""Choice of a map: the candidate with the best queries on held-out items and classes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xcompat.core.errors import NoValidationDataError
from xcompat.evaluation import PairedDifference
from xcompat.evaluation.cases import BackfillLoss, Case
from xcompat.mapping.candidates import LINES, WHITENED, Candidate, Paired, Solver, drop_unstable_ridge
from xcompat.mapping.confidence import Calibration, calibrate
from xcompat.mapping.folds import LEARNED, Searched
from xcompat.mapping.held_out import (
    HeldOutCaptionedGalleries,
    HeldOutCaptions,
    HeldOutClasses,
    HeldOutGalleries,
    Trial,
    ValidationSplit,
)
from xcompat.mapping.item_memory import ItemMemory, with_item_memory
from xcompat.mapping.paired import CaptionedEmbeddings, SwappedEmbeddings
from xcompat.mapping.reranking import RerankedTrial, choose_reranking
from xcompat.vectors.codecs import MemoryParts

DAMPINGS = (0.1, 0.3, 1.0)
MIXED = 0.5
"""Weight of the old query in a half-way mixture."""
OLD_SHARES = (0.3, 0.5, 0.7)


NEARLY_ALL, MUCH_MORE = 0.9, 1.5
"""Least share of the new model's neighbours, or for a map alone least multiple of the share that old queries find."""


@dataclass(frozen=True)
class Choice:
    """All trials, and the chosen trial.

    Args:
        trials: all trials, in order.
        chosen: best trial (:attr:`objective`).
        without_new_model: old model with the best's learned transform and memory; None without either.
        floor: protocol -> metric -> value of old queries.
        n_queries: protocol -> number of queries.
        learned_at_most: items, or captioned images, per fold if capped; else None.
        too_few_for_ridge: items per fold if too few to try ridge regression; else None.
        than: linear map as baseline of learned transform and memory; None for old queries. Needed if models trained on
            held-out items.
        mixed: best map, mixed half-way with old queries; None if it is safe or already mixed.
        confidence: calibration of the best's memory, or None.
        no_confidence: reason for no calibration.
        of_galleries: whether stored embeddings are mapped, not queries.
        of_agreement: whether trials measure agreement (:func:`~xcompat.mapping.agreement.choose_by_agreement`).
        of_few_pairs: whether there are fewer pairs than twice the larger dimension.
        pair_counts: number of pairs, and twice the larger dimension; zeros with labels.
        sentences: map -> mean reciprocal rank of held-out texts by their sentences; empty without texts.
        first_neighbours: change of the mean reciprocal rank of the new model's nearest neighbour, from old queries to the chosen
            map alone; None with labels.
        remembers: whether the chosen map has a memory.
        left_out: sentences about untried candidates.
        backfill_losses: metrics that fall after a backfill with the new model.
        copies: number of exact copies, which are not held out.
        cases: results of old queries and the chosen map, by population.
        reranked: best map with hits re-ranked by the new model, or None.
        by_chance: whether the chosen map does not surely beat chance
            (:meth:`~xcompat.mapping.held_out.ValidationSplit.is_by_chance`).
        item_memory: results of a memory of all items, or None if it was not tried.
        is_other_kind: whether queries search items of another kind (texts and images), but each pair is of a single kind.
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
    pair_counts: tuple[int, int] = (0, 0)
    sentences: Mapping[str, float] = field(default_factory=dict)
    first_neighbours: PairedDifference | None = None
    remembers: bool = False
    by_chance: bool = False
    left_out: tuple[str, ...] = ()
    backfill_losses: tuple[BackfillLoss, ...] = ()
    cases: tuple[Case, ...] = ()
    copies: int = 0
    reranked: RerankedTrial | None = None
    item_memory: ItemMemory | None = None
    is_other_kind: bool = False

    @property
    def candidate(self) -> Candidate:
        """Chosen candidate, with a memory of all items if that is chosen too."""
        chosen = self.chosen.candidate
        return with_item_memory(chosen) if self.item_memory is not None and self.item_memory.is_chosen else chosen

    @property
    def is_safe(self) -> bool:
        """Whether the chosen map is surely at or above old queries.

        Without labels, agreement with the new model replaces this test (:attr:`agrees_enough`). Searches between texts and
        images can lose where searches among texts gain (docs/results/leaderboard.md).
        """
        is_enough = self.agrees_enough if self.of_agreement else self.chosen.is_surely_no_worse
        return is_enough and not self.by_chance and not self.is_other_kind

    @property
    def agrees_enough(self) -> bool:
        """Whether measured upgrades to a better model with this agreement kept quality (docs/results/lines.md).

        Queries must find nearly all of the new model's neighbours. With many pairs, surely more than old queries is enough for a
        mixture, and 1.5 times as many for a map alone. A map with 1.4 times as many lost 4 points. The map alone must also find
        the nearest neighbour surely no later than old queries: mixtures with maps that found it later lost 1.3 and 2.3 points.
        """
        (floor,) = (value for metrics in self.floor.values() for value in metrics.values())
        found = floor + self.chosen.least.low
        if found >= NEARLY_ALL:
            return True
        if self.first_neighbours is not None and self.first_neighbours.low < 0:
            return False
        is_mixed = self.chosen.candidate.old_share > 0
        return self.chosen.is_surely_better and not self.of_few_pairs and (is_mixed or found >= MUCH_MORE * floor)

    @property
    def objective(self) -> str:
        """Criterion of the choice, in words."""
        if self.of_agreement:
            if self.sentences:
                return "the largest mean reciprocal rank of a held-out text, searched by one of its sentences"
            return "whitened, if it surely finds more of the new model's nearest neighbours than old queries do"
        beside = "old queries" if self.than is None else "the same without learned transform and memory"
        best = f"the worst gain over {beside} among protocols and metrics, to a tenth of a point, then the mean gain"
        careful = "; if it is not surely above zero, the largest mean gain of close candidates with a small memory"
        return best + careful * (self.than is None)

    def trials_to_show(self) -> list[Trial]:
        """Return a trial per kind of candidate: the chosen one, or the best of its kind."""
        kinds: dict[str, list[Trial]] = {}
        for trial in self.trials:
            kinds.setdefault(trial.candidate.kind, []).append(trial)
        kinds[self.chosen.candidate.kind] = [self.chosen]
        return [select_best(trials, self.than) for trials in kinds.values()]


def select_best(trials: Iterable[Trial], than: Trial | None = None) -> Trial:
    """Return the trial with the largest worst gain over protocols and metrics (to 0.1 points), then the largest mean.

    Args:
        trials: at least 1.
        than: baseline trial; None for gains over old queries.
    """

    def worst(trial: Trial) -> float:
        return min(
            gain.mean - (than.gains[protocol][metric].mean if than is not None else 0.0)
            for protocol, metric, gain in trial.cells()
        )

    return max(trials, key=lambda trial: (round(1000 * worst(trial)), trial.mean))


def select_conservative(trials: Collection[Trial]) -> Trial:
    """Return the best trial with all gains surely above zero; else the best mean among close trials.

    Few held-out items are weak evidence. Memories with large shares cost most on unseen classes, and the smallest share almost
    nothing (one-standard-error rule, Breiman et al. 1984, Classification and Regression Trees §3.4.3).

    Args:
        trials: at least 1.
    """
    if sure := [trial for trial in trials if trial.is_surely_better]:
        return select_best(sure)
    best = select_best(trials)
    close = [trial for trial in trials if trial.worst >= best.worst - best.error]
    mildest = min((trial.candidate.share for trial in close if trial.candidate.share), default=0.0)
    return max((trial for trial in close if trial.candidate.share <= mildest), key=lambda trial: trial.mean)


def merge_choices(choices: Sequence[Choice]) -> Choice:
    """Merge the choices for several map inputs, e.g. layers of the new model, on the same items.

    Layers trained on held-out items look too good, earlier layers less so. Among inputs with a worst gain within a standard error
    of the best, the earliest layer wins.

    Args:
        choices: at least 1, the new model's last layer first.

    Returns:
        The winning input's choice, with the trials of all.
    """
    best = select_best(choice.chosen for choice in choices)
    taken = [choice for choice in choices if choice.chosen.worst >= best.worst - best.error][-1]
    return replace(taken, trials=[trial for choice in choices for trial in choice.trials])


def _try_candidates(held: ValidationSplit, lines: Iterable[str], than: Trial | None) -> list[Trial]:
    """Try all linear maps, the two best with each transform, memories on the best, and dampings on the best of these."""
    alone = [Candidate(name) for name in lines]
    trials = {than.candidate: than} if than is not None else {}

    def best_of(candidates: Sequence[Candidate]) -> Candidate:
        missing = [each for each in candidates if each not in trials]
        trials.update(zip(missing, held.try_candidates(missing), strict=True))
        return select_best((trials[each] for each in candidates), than).candidate

    first = best_of(alone)
    second = [best_of(others)] if (others := [line for line in alone if line != first]) else []
    best = best_of([first, *(replace(line, power=power) for line in (first, *second) for power in held.powers)])
    if held.shares:
        best = best_of([replace(best, sharpness=beta, share=share) for beta in held.sharpnesses for share in held.shares])
    if best.power is not None:
        best_of([best, *(replace(best, damping=damping) for damping in DAMPINGS)])
    return list(trials.values())


def mixtures(held: ValidationSplit, trials: Collection[Trial], chosen: Trial) -> list[Trial]:
    """Mix the chosen candidate, the best linear map and the whitened map with old queries.

    Args:
        held: validation split.
        trials: trials without old queries.
        chosen: best of them.
    """
    line = select_best(trial for trial in trials if trial.candidate.kind == trial.candidate.line).candidate
    bases = dict.fromkeys((chosen.candidate, line, replace(line, line=WHITENED)))
    mixed = [replace(base, old_share=share) for base in bases if base.line in held.lines for share in OLD_SHARES]
    return held.try_candidates(mixed)


def _calibrate_memory(held: ValidationSplit, candidate: Candidate, brought: bool) -> tuple[Calibration | None, str]:
    """Return the calibration of a candidate's memory, or None and the reason."""
    if candidate.share and not held.of_galleries:
        return calibrate(held.evidence(candidate))
    if brought:
        return None, "the memory came with the map, which may have its own calibration"
    return None, "the gallery has the memory, not the queries" if held.of_galleries else "the map has no memory"


def _try_half_way(held: ValidationSplit, chosen: Trial) -> Trial | None:
    """Mix the chosen candidate half-way with old queries, unless it is safe or already mixed."""
    if chosen.is_surely_no_worse or chosen.candidate.old_share or held.of_galleries:
        return None
    return held.try_candidate(replace(chosen.candidate, old_share=MIXED))


def _try_old_model(held: ValidationSplit, chosen: Trial) -> Trial | None:
    """Try the old model with the chosen learned transform and memory, if any."""
    if chosen.candidate.power is None and not chosen.candidate.share:
        return None  # old queries are the baseline itself
    beside = held.with_old_queries()
    if chosen.candidate.share and not beside.shares:
        return None
    return beside.try_candidate(replace(chosen.candidate, line="rotation", old_share=0.0))


def _held_out(pairs: Paired, searched: Searched, lines: Mapping[str, Solver], seed: int) -> ValidationSplit:
    if isinstance(pairs, CaptionedEmbeddings):
        return (HeldOutCaptionedGalleries if pairs.direction == "old_to_new" else HeldOutCaptions)(pairs, lines, seed)
    if pairs.labels_N is None:
        raise NoValidationDataError("a validation split needs classes or captions")
    return (HeldOutGalleries if isinstance(pairs, SwappedEmbeddings) else HeldOutClasses)(pairs, searched, lines, seed)


def choose(
    pairs: Paired,
    searched: Searched = "unknown",
    seed: int = 0,
    lines: Mapping[str, Solver] = LINES,
    beside_line: bool = False,
    with_old_model: bool = False,
    memory: MemoryParts = "full",
) -> Choice:
    """Try candidates part by part: linear maps with learned transforms, memories, and finer settings.

    If no map is surely at or above old queries, mixtures with old queries are tried.

    Args:
        pairs: training set with classes or captions; turned for maps of galleries, which have no learned transform.
        searched: classes that users will search.
        seed: random seed for folds and intervals.
        lines: linear map name -> solver.
        beside_line: whether the first linear map is the baseline instead of old queries, for a model trained on held-out items.
        with_old_model: whether the old model can embed queries.
        memory: parts of a memory to try.

    Returns:
        All trials, and the best trial.

    Raises:
        NoValidationDataError: no classes or captions, or too few items for a validation split.
    """
    held = _held_out(pairs, searched, lines, seed)
    held.shares, held.powers = held.shares if memory == "full" else (), () if memory == "none" else held.powers
    than = held.try_candidate(Candidate(next(iter(lines)))) if beside_line else None
    fewest = min(len(each.pairs) for each in held.known)
    tried = drop_unstable_ridge(lines, fewest, pairs.dims[0])
    trials = _try_candidates(held, tried, than)
    chosen = select_best(trials, than) if than is not None else select_conservative(trials)
    if with_old_model and than is None and not (held.of_galleries or chosen.is_surely_no_worse):
        trials += mixtures(held, trials, chosen)
        chosen = select_conservative(trials)
    brought = held.known[0].line(chosen.candidate.line).memory is not None
    confidence, no_confidence = _calibrate_memory(held, chosen.candidate, brought)
    return Choice(
        trials=trials,
        chosen=chosen,
        reranked=choose_reranking(held, chosen.candidate),
        without_new_model=_try_old_model(held, chosen),
        floor=held.floor_means(),
        n_queries={name: len(next(iter(metrics.values()))) for name, metrics in held.floor.items()},
        learned_at_most=LEARNED if max(map(len, held.learned_rows)) == LEARNED else None,
        too_few_for_ridge=fewest if len(tried) < len(lines) else None,
        than=than,
        mixed=_try_half_way(held, chosen),
        confidence=confidence,
        no_confidence=no_confidence,
        of_galleries=held.of_galleries,
        remembers=brought or chosen.candidate.share > 0,
        by_chance=held.is_by_chance(chosen.candidate),
        left_out=held.left_out,
        cases=held.cases(chosen.candidate),
        backfill_losses=held.backfill_losses(chosen.candidate),
    )
