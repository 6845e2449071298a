"""Output for a choice of maps: a table on the terminal, sentences, and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.metric_names import metric_name
from xcompat.core.progress import Table, console
from xcompat.evaluation import PairedDifference
from xcompat.hub.metadata import Gain
from xcompat.mapping.agreement import SHARED
from xcompat.mapping.candidates import WHITENED, Candidate
from xcompat.mapping.folds import NEIGHBOURS
from xcompat.mapping.held_out import Trial
from xcompat.mapping.item_memory import LEAST_COVERAGE, ItemMemory
from xcompat.mapping.reranking import RerankedTrial
from xcompat.mapping.selection import Choice
from xcompat.report.wording import backfill_warning, gain, gain_with_interval, interval

EVIDENCE = "classes (--labels), captions of images or questions about texts (docs/embeddings.md)"


def choice_title(choice: Choice) -> str:
    """Return the common title of :func:`choice_tables`."""
    if choice.of_agreement:
        return f"gain over old queries in the share of the new model's {NEIGHBOURS} nearest items, in points, with 95 % intervals"
    return "gain over old queries on the validation split in points, with 95 % intervals"


def choice_tables(choice: Choice, is_written: bool = True) -> list[Table]:
    """Return a table per protocol with the best candidates' gains over old queries; the chosen candidate is marked.

    Args:
        choice: the trials.
        is_written: whether the chosen candidate becomes a map; otherwise it is marked as the best.
    """
    return [_protocol_table(choice, protocol, "chosen" if is_written else "best") for protocol in choice.n_queries]


def _protocol_table(choice: Choice, protocol: str, mark: str) -> Table:
    only = ", shown only, not decisive" if protocol in choice.chosen.shown_only else ""
    title = f"{protocol} ({choice.n_queries[protocol]:,} queries{only})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("candidate", min_width=9)
    for metric in choice.floor[protocol]:
        table.add_column(metric_name(metric), no_wrap=True)

    def add(name: str, trial: Trial, style: str = "") -> None:
        gains = trial.gains[protocol].values()
        table.add_row(name, *(gain_with_interval(found.mean, found.low, found.high) for found in gains), style=style)

    table.add_row("old queries", *(f"{100 * value:.1f} %" for value in choice.floor[protocol].values()))
    for trial in choice.trials_to_show():
        is_chosen = trial is choice.chosen
        kind = trial.candidate.kind.replace("learned ", "")  # every kind fits into 80 columns
        add(f"{kind} ({mark})" if is_chosen else kind, trial, "bold" * is_chosen)
    if choice.without_new_model is not None:
        add("old model, same transform and memory", choice.without_new_model, "dim")
    if choice.mixed is not None:
        add(f"{mark}, half-way with old queries", choice.mixed, "dim")
    if choice.reranked is not None:
        add(f"{mark}, {choice.reranked.candidates} hits re-ranked", choice.reranked.trial, "dim")
    return table


def choice_html(choice: Choice) -> str:
    """Return :func:`choice_tables` as HTML, for notebooks."""
    return f"<p>{_as_html(choice_title(choice))}</p>" + "".join(map(_table_html, choice_tables(choice)))


def _table_html(table: Table) -> str:
    def row(tag: str, cells: Iterable[object]) -> str:
        return f"<tr>{''.join(f'<{tag}>{_as_html(cell)}</{tag}>' for cell in cells)}</tr>"

    rows = zip(*(column.cells for column in table.columns), strict=True)
    head = row("th", (column.header for column in table.columns))
    return f"<table><caption>{_as_html(table.title)}</caption>{head}{''.join(row('td', cells) for cells in rows)}</table>"


def _as_html(text: object) -> str:
    return escape(str(text)).replace("\n", "<br>")


def print_choice(choice: Choice, to: Console = console, is_written: bool = True) -> None:
    """Print the tables of a choice, as in :func:`choice_tables`."""
    to.print(choice_title(choice))
    for table in choice_tables(choice, is_written):
        to.print()
        to.print(table)
    to.print()


class MapReport(dict[str, Any]):
    """Measurements of a map, as in ``report.json`` of `xcompat map`. Printed, and in notebooks, they are tables and sentences.

    Args:
        choice: the trials; None if there were too few items, for an empty report.
    """

    def __init__(self, choice: Choice | None) -> None:
        super().__init__(as_json(choice) | {"verdict": choice.is_safe} if choice is not None else {})
        self._choice = choice

    @override
    def __repr__(self) -> str:
        if self._choice is None:
            return "MapReport(): too few items for a validation split"
        shown = StringIO()
        paper = Console(file=shown, width=100, highlight=False, markup=False)
        print_choice(self._choice, paper)
        for sentence in self._describe(self._choice):
            paper.print(sentence)
        return shown.getvalue()

    def _repr_html_(self) -> str:
        if self._choice is None:
            return escape(repr(self))
        return choice_html(self._choice) + "".join(f"<p>{_as_html(sentence)}</p>" for sentence in self._describe(self._choice))

    @staticmethod
    def _describe(choice: Choice) -> list[str]:
        is_missing = choice.of_agreement and not choice.is_safe
        return describe_choice(choice) + ([f"Add {describe_missing(choice)}."] if is_missing else [])


def describe_choice(choice: Choice) -> list[str]:
    """Return the results of a choice as sentences."""
    best, held = choice.chosen, _describe_input(choice)
    sure = _describe_confidence(choice)
    if choice.of_agreement:
        return [*held, _describe_agreement(choice), *_describe_item_memory(choice.item_memory)]
    if (choice.by_chance or choice.is_other_kind) and best.is_surely_no_worse:
        return [*held, *sure]  # the gains are chance, or of other searches
    if not choice.is_safe:
        mix = ""
        if choice.mixed is not None:
            mix = (
                f" Mixed half-way with old queries, the lowest interval is {_lowest(choice.mixed)}: if you can still run the old "
                "model, add --old-model."
            )
        return [*held, f"{_describe_doubt(best)}.{mix}", *sure]
    said = [
        *held,
        f"New queries are surely at or above old ones on the validation split; the lowest gain is {_least(best)}. On as many "
        f"other queries, expect {interval(best.least.expected)}.",
    ]
    if choice.without_new_model is not None:
        own = choice.without_new_model
        said.append(
            f"Mean gain: {100 * best.mean:+.1f} points. The old model with the same learned transform and memory has "
            f"{100 * own.mean:+.1f}, without any new model."
        )
    return [*said, *sure]


def _describe_input(choice: Choice) -> list[str]:
    """Return warnings and facts about the pairs and the candidates."""
    held = []
    if choice.by_chance:
        held.append(
            "! No better than chance: queries swapped between items find as much. Check that ids or rows name the same "
            f"items on both sides{'' if choice.of_agreement else ', and that classes or captions are right'}."
        )
    if choice.copies:
        held.append(
            f"{choice.copies:,} item{'s are exact copies' if choice.copies > 1 else ' is an exact copy'} of others: the "
            "validation split uses one of each, and the saved map learns from all."
        )
    if choice.learned_at_most is not None:
        held.append(f"Candidates learned from at most {choice.learned_at_most:,} items; the saved map learns from all.")
    if choice.too_few_for_ridge is not None:
        held.append(
            f"Candidates learned from {choice.too_few_for_ridge:,} items, fewer than twice the dimensions of an embedding: "
            "ridge regression is not tried. Add more items."
        )
    if choice.is_other_kind:
        held.append(
            "! The test set searches images with texts and texts with images, but the pairs are only texts or only images, so "
            "new queries may find less than old ones. Set data.remembered to images with captions: the worse direction decides."
        )
    held += choice.left_out
    return held + ([backfill_warning(choice.backfill_losses)] if choice.backfill_losses else [])


def _describe_agreement(choice: Choice) -> str:
    (protocol, floor), gains = next(iter(choice.floor.items())), next(iter(choice.chosen.gains.values()))
    old, change = floor[SHARED], gains[SHARED]
    found = (
        f"Of the {NEIGHBOURS} items that the new model finds nearest, {choice.chosen.candidate} finds "
        f"{100 * (old + change.mean):.0f} % in the {'mapped' if choice.of_galleries else 'old'} gallery and old queries find "
        f"{100 * old:.0f} %{' in the old one' if choice.of_galleries else ''} "
        f"({gain_with_interval(change.mean, change.low, change.high)} points, {choice.n_queries[protocol]:,} {protocol})."
    )
    if (first := choice.first_neighbours) is not None:
        points = gain_with_interval(first.mean, first.low, first.high)
        found = f"{found} The map alone changes the mean reciprocal rank of the nearest one by {points} points."
    has_most = choice.chosen.least.mean >= max(trial.least.mean for trial in choice.trials)
    if choice.chosen.candidate.line == WHITENED and not (has_most or choice.sentences):
        found = (
            f"{found} Other maps find more of them, but whitened had the best queries in all measured upgrades (docs/maps.md)."
        )
    if choice.sentences:
        ranks = ", ".join(
            f"{line} {100 * rank:.0f}" for line, rank in sorted(choice.sentences.items(), key=lambda each: -each[1])
        )
        found = f"{found} Mean reciprocal rank (%) of a held-out text searched by one of its sentences: {ranks}."
    if choice.is_other_kind or choice.by_chance:
        return found  # a line above has the fix
    if choice.is_safe:
        return (
            f"{found} In all measured upgrades to a better model with this agreement, new queries found at least as much as "
            f"old ones. Add {EVIDENCE} to test this, and the new model, on your data."
        )
    return f"{found} This agreement does not show that new queries find as much as old ones."


def _describe_item_memory(found: ItemMemory | None) -> list[str]:
    if found is None:
        return []
    if found.gain is None:
        return [
            f"A memory of the items is not tried: they are {100 * found.coverage:.0f} % of the gallery, and it needs at least "
            f"{100 * LEAST_COVERAGE:.0f} %."
        ]
    return [
        f"In the whole gallery, queries find {100 * found.alone:.0f} % of these nearest items without a memory of the items and "
        f"{100 * (found.alone + found.gain.mean):.0f} % with it "
        f"({gain_with_interval(found.gain.mean, found.gain.low, found.gain.high)} points, {found.n_queries:,} held-out items): "
        f"{'the map uses the memory' if found.is_chosen else 'the map does not use it'}."
    ]


def describe_missing(choice: Choice) -> str:
    """Return what could show, beside or instead of agreement, that new queries find as much as old ones."""
    given, needed = choice.pair_counts
    no_mixture = choice.chosen.candidate.old_share > 0 or choice.of_galleries
    pairs = f"more pairs ({given:,} are given, at least {needed:,} are needed)" if choice.of_few_pairs else ""
    other = "" if no_mixture else "the old model with --old-model to mix both queries"
    more = " and ".join(filter(None, (pairs, other)))
    return EVIDENCE + (f", or {more}" if more else "")


def _describe_alone(choice: Choice) -> dict[str, str]:
    """Return the lowest result without old queries, by the parts of the memory that an export keeps (``--memory``)."""
    line, power, damping = (chosen := choice.chosen.candidate).line, chosen.power, chosen.damping
    exported = {
        "full": replace(chosen, old_share=0.0),
        "transform": Candidate(line, power, damping),
        "none": Candidate(line),
    }
    tried = {trial.candidate: trial for trial in choice.trials}
    return {parts: _lowest(tried[candidate]) for parts, candidate in exported.items() if candidate in tried}


def _least(trial: Trial) -> str:
    return _describe_cell(*min(trial.cells(), key=lambda cell: cell[2].mean))


def _lowest(trial: Trial) -> str:
    return _describe_cell(*min(trial.cells(), key=lambda cell: cell[2].low))


def _describe_doubt(best: Trial) -> str:
    """Return a sentence without a full stop on the results of the best candidate that can be below those of old queries."""
    gains = [gain for _, _, gain in best.cells()]
    below = sum(gain.low < 0 for gain in gains)
    return (
        f"The best candidate, {best.candidate}, may find less than old queries: {below} of {len(gains)} intervals "
        f"{'reach' if below > 1 else 'reaches'} below zero, the lowest with {_lowest(best)}"
    )


def _describe_cell(protocol: str, metric: str, found: PairedDifference) -> str:
    return f"{gain(found.mean)} points ({interval((found.low, found.high))}) at {metric_name(metric)}, {protocol}"


def _describe_confidence(choice: Choice) -> list[str]:
    """Return a sentence on a memory's confidence, or on why it has none; empty without a memory."""
    found = choice.confidence
    if found is None:
        return [f"Queries have no confidence: {choice.no_confidence}."] if choice.remembers else []
    every, surer = (round(100 * share) for share in (found.hurt, found.risk[0.5]))
    if surer >= every:
        return [
            f"Do not choose by confidence which queries the old model answers: {every} % of all queries found less than old "
            f"ones, and {surer} % of the half with the highest confidence."
        ]
    said = (
        f"Each query has a confidence, the probability that it finds no less than an old one (AUROC {found.area.value:.2f}, "
        f"{found.area.low:.2f} to {found.area.high:.2f}; calibration error {100 * found.error:.0f} points): {every} % of all "
        f"queries found less, and {surer} % of the half with the highest confidence. With `gallery search --fallback "
        "OLD_MODEL`, the old model answers queries of low confidence."
    )
    if choice.than is None:
        return [said]
    return [f"{said} On items that neither model was trained on, the error can be larger."]


def as_json(choice: Choice) -> dict[str, object]:
    """Return all measurements of a choice as JSON."""
    without = choice.without_new_model
    return {
        "objective": choice.objective,
        "floor": choice.floor,
        "shown_only": list(choice.chosen.shown_only),
        "cases": [asdict(case) for case in choice.cases],
        "queries": choice.n_queries,
        "learned_at_most": choice.learned_at_most,
        "too_few_for_ridge": choice.too_few_for_ridge,
        "of_agreement": choice.of_agreement,
        "first_neighbours": _difference(choice.first_neighbours),
        "sentences": dict(choice.sentences),
        "by_chance": choice.by_chance,
        "copies": choice.copies,
        "is_other_kind": choice.is_other_kind,
        "left_out": list(choice.left_out),
        "backfill_losses": [loss._asdict() for loss in choice.backfill_losses],
        "trials": [_trial(trial) for trial in choice.trials],
        "alone": _describe_alone(choice),
        "without_new_model": _trial(without) if without is not None else None,
        "mixed": _trial(choice.mixed) if choice.mixed is not None else None,
        "reranked": _reranked(choice.reranked),
        "confidence": _confidence(choice),
        "item_memory": _item_memory(choice.item_memory),
    }


def _reranked(found: RerankedTrial | None) -> dict[str, object] | None:
    if found is None:
        return None
    losses = {str(k): _difference(loss) for k, loss in found.losses.items()}
    return _trial(found.trial) | {"old_weight": found.old_weight, "candidates": found.candidates, "losses": losses}


def _difference(found: PairedDifference | None) -> dict[str, object] | None:
    return {"mean": found.mean, "ci95": [found.low, found.high]} if found is not None else None


def _item_memory(found: ItemMemory | None) -> dict[str, object] | None:
    if found is None:
        return None
    gain = _difference(found.gain)
    return {"coverage": found.coverage, "alone": found.alone, "gain": gain, "queries": found.n_queries, "chosen": found.is_chosen}


def _confidence(choice: Choice) -> dict[str, object]:
    found = choice.confidence
    if found is None:
        return {"none": choice.no_confidence}
    return {
        "slope": found.slope,
        "offset": found.offset,
        "auroc": {"value": found.area.value, "ci95": [found.area.low, found.area.high]},
        "calibration_error": found.error,
        "hurt": found.hurt,
        "hurt_of_the_surest": {f"{share:g}": risk for share, risk in found.risk.items()},
    }


def _trial(trial: Trial) -> dict[str, object]:
    gains = {
        protocol: {
            metric: {"mean": gain.mean, "ci95": [gain.low, gain.high], "expected95": list(gain.expected)}
            for metric, gain in gains.items()
        }
        for protocol, gains in trial.gains.items()
    }
    return {"name": str(trial.candidate), **asdict(trial.candidate), "worst": trial.worst, "mean": trial.mean, "gains": gains}


def read_gains(document: dict[str, Any], file: Path) -> list[Gain]:
    """Read the gains of the saved map from its ``report.json``.

    Args:
        document: content of the file.
        file: path for the error message.

    Returns:
        The gains; empty without a validation split or labels.

    Raises:
        XcompatError: the file is damaged.
    """
    if document.get("of_agreement"):
        return []
    try:
        name = document["model"]["name"]
        gains: dict[str, Any] = next((trial["gains"] for trial in document.get("trials", []) if trial["name"] == name), {})
        return [
            Gain(
                protocol,
                metric,
                old := document["floor"][protocol][metric],
                old + found["mean"],
                found["mean"],
                (low, high),
            )
            for protocol, metrics in gains.items()
            for metric, found in metrics.items()
            for low, high in [found["ci95"]]
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise XcompatError(f"{file} is not a complete report of a map; run `xcompat map` again") from None
