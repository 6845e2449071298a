"""``xcompat map``: from two folders of embeddings to a model, a table of what was tried, and the verdict."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from xcompat.errors import XcompatError
from xcompat.evaluation import PairedDifference
from xcompat.files import write_json
from xcompat.fingerprint import Fingerprint
from xcompat.mapping.candidates import Candidate, Known, fit
from xcompat.mapping.choosing import METRICS, Choice, Trial, choose
from xcompat.mapping.folds import Searched
from xcompat.mapping.paired import PairedEmbeddings, load_paired
from xcompat.models.config import describe_old
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.ownership import owned_path, require_replaceable
from xcompat.progress import console, literal, silence_libraries, stage
from xcompat.provenance import provenance

MADE_BY = "map"
METRIC_NAMES = dict(zip(METRICS, ("CMC@1", "CMC@5", "mAP"), strict=True))
GUESS = Candidate("procrustes")


def map_embeddings(
    old: Path, new: Path, out: Path, old_model: str | None, new_model: str | None, searched: Searched, seed: int, overwrite: bool
) -> bool:
    """Choose a map of queries by what is held out, solve it on everything, and write it as a model.

    Args:
        old: what the old model made (see :func:`~xcompat.mapping.paired.load_paired`).
        new: what the new model made of the same items.
        out: gets ``model`` and ``report.json``.
        old_model: what the gallery was made with: a model, or the name that it goes by there; the name of ``old`` if None.
        new_model: the model that embeds the queries; None where only embeddings are known, and queries come as such.
        searched: what is known of the classes that will be searched.
        seed: of the folds.
        overwrite: whether anything may be replaced.

    Returns:
        Whether new queries find more than old ones in everything that was held out.

    Raises:
        XcompatError: the embeddings cannot be used, or ``out`` holds what this command did not make.
    """
    silence_libraries()
    require_replaceable(out, MADE_BY, overwrite, (old, new))
    seconds: dict[str, float] = {}
    with stage("read", seconds):
        pairs = load_paired(old, new)
    described = _described_old(old_model, old, pairs)
    encoder = _described_new(new_model, pairs) if new_model is not None else None
    with stage("try what was held out", seconds):
        choice, no_choice = _choice(pairs, searched, seed)
    if choice is not None:
        console.print(_table(choice))
    beats = choice is not None and choice.chosen.worst > 0
    candidate = choice.chosen.candidate if choice is not None and beats else GUESS
    said = [*pairs.notes, *(_verdict(choice) if choice is not None else [f"{no_choice}: the line that is taken is a guess."])]
    with stage("solve on everything", seconds), owned_path(out, MADE_BY, overwrite, (old, new)) as temporary:
        temporary.mkdir()
        model = fit(candidate, Known(pairs, described))
        model.config.encoder = encoder
        model.save_pretrained(temporary / "model")
        document = _document(choice, candidate, pairs) | {"old": described, "new": encoder, "searched_classes": searched}
        document |= {"seed": seed, "verdict": beats, "said": said, "seconds": seconds, "run": provenance()}
        write_json(temporary / "report.json", document)
    for line in said:
        console.print(literal(line), soft_wrap=True)
    console.print(f"[green]✓[/] {literal(out / 'model')}: {literal(candidate)}", soft_wrap=True)
    return beats


def _choice(pairs: PairedEmbeddings, searched: Searched, seed: int) -> tuple[Choice | None, str | None]:
    """Return the choice, or why there is none."""
    if pairs.labels_N is None:
        return None, "no classes are known (labels.txt), so nothing says what a query should find"
    try:
        return choose(pairs, searched, seed), None
    except XcompatError as error:
        return None, str(error)


def _described_old(name: str | None, path: Path, pairs: PairedEmbeddings) -> dict[str, Any]:
    """Describe the gallery's model: loaded, or known by its name alone, as galleries that adopted an index know theirs."""
    dim = pairs.old_Nd.shape[1]
    if name is None:
        return describe_old(Fingerprint.from_string(path.stem), dim)
    if "/" not in name and not Path(name).exists():  # no model of a Hub: the gallery's name for it
        return describe_old(Fingerprint.from_string(name), dim)
    old = load_embedder(name)
    _require_dim(old, dim, "--old-model")
    return old.describe_old()


def _described_new(name: str, pairs: PairedEmbeddings) -> dict[str, Any]:
    new = load_embedder(name)
    _require_dim(new, pairs.new_ND.shape[1], "--new-model")
    return new.describe_encoder()


def _require_dim(model: Embedder, dim: int, option: str) -> None:
    if model.dim != dim:
        raise XcompatError(f"{option} {model.name} embeds in {model.dim} dimensions, the embeddings given have {dim}")


def _table(choice: Choice) -> Table:
    """Show the best of each kind: what its queries find more than old ones."""
    title = "points over old queries on what was held out, with 95 % intervals"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 1, 0))
    table.add_column("candidate", overflow="fold")
    for protocol, count in choice.n_queries.items():
        table.add_column(f"{protocol}\n{count:,} queries", no_wrap=True)
    floors = ("\n".join(f"{METRIC_NAMES[m]} {100 * v:.1f} %" for m, v in found.items()) for found in choice.floor.values())
    table.add_row("old queries", *floors)
    for trial in choice.best_of_each_kind():
        table.add_row(str(trial.candidate), *_cells(trial), style="bold" if trial is choice.chosen else "")
    if choice.without_new_model is not None:
        table.add_row("old queries with the same metric and memory", *_cells(choice.without_new_model), style="dim")
    return table


def _cells(trial: Trial) -> list[str]:
    def line(metric: str, gain: PairedDifference) -> str:
        return f"{METRIC_NAMES[metric]} {100 * gain.mean:+.1f} ({100 * gain.low:.1f} to {100 * gain.high:.1f})"

    return ["\n".join(line(metric, gain) for metric, gain in gains.items()) for gains in trial.gains.values()]


def _verdict(choice: Choice) -> list[str]:
    """Say in plain words what was found."""
    best = choice.chosen
    cells = {(protocol, metric): gain for protocol, gains in best.gains.items() for metric, gain in gains.items()}
    (protocol, metric), least = min(cells.items(), key=lambda item: item[1].mean)
    interval = f"{100 * least.low:.1f} to {100 * least.high:.1f}"
    where = f"{100 * least.mean:+.1f} points ({interval}) at {METRIC_NAMES[metric]}, {protocol}"
    if best.worst <= 0:
        return [
            f"No map finds more than old queries in everything that was held out: the best, {best.candidate}, is at {where}. "
            "Procrustes is written; where the old model is at hand, mix its queries in (xcompat.slerp)."
        ]
    above = all(gain.low > 0 for gain in cells.values())
    sure = "and every interval lies above zero" if above else "though not every interval lies above zero"
    said = [f"New queries find more than old ones in everything that was held out, {sure}; the least is {where}."]
    if choice.without_new_model is not None:
        own = choice.without_new_model
        said.append(
            f"On average {100 * best.mean:+.1f} points; old queries with the same metric and memory have {100 * own.mean:+.1f}, "
            "which needs no new model."
        )
    return said


def _document(choice: Choice | None, candidate: Candidate, pairs: PairedEmbeddings) -> dict[str, Any]:
    """Gather everything that was measured for ``report.json``."""
    document: dict[str, Any] = {
        "items": len(pairs),
        "classes": pairs.n_classes or None,
        "model": {"name": str(candidate), **asdict(candidate)},
    }
    if choice is None:
        return document
    without = choice.without_new_model
    return document | {
        "objective": "the worst gain over old queries among protocols and metrics, to a tenth of a point, then the mean gain",
        "floor": choice.floor,
        "queries": choice.n_queries,
        "trials": [_trial(trial) for trial in choice.trials],
        "without_new_model": _trial(without) if without is not None else None,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    gains = {
        protocol: {metric: {"mean": gain.mean, "ci95": [gain.low, gain.high]} for metric, gain in gains.items()}
        for protocol, gains in trial.gains.items()
    }
    return {"name": str(trial.candidate), **asdict(trial.candidate), "worst": trial.worst, "mean": trial.mean, "gains": gains}
