"""Texts: queries of new models on the stored vectors of an old one, by map, pairs, and without it.

    python benchmarks/studies/texts.py

Needs ../shared/data/text. Models are made by the study itself (texts_models.py): the old ones are latent semantic analyses of
words (128 dimensions), new ones transformers trained from scratch, of captions and glosses (256 and 512) or of passages, and for
passages an analysis of parts of words (512). Gains are in points over old queries, with 95 % intervals over queries. Each
finished table is kept under runs/texts, as models and embeddings are, and printed again by the next call. Prints Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.random import Generator
from texts_maps import LINES, TRAINED, chosen, mapped, microseconds, remembering, usable
from texts_models import OUT, Embed, Rows, Transformer, console, parts_of_words, words
from texts_tasks import Groups, Task, captions, cranfield, first_groups, glosses, scifact

from xcompat.core.files import atomic_path, read_json, write_array, write_json
from xcompat.core.metric_names import metric_name
from xcompat.evaluation import GradedQueries, PairedDifference, graded_per_query, paired_bootstrap
from xcompat.mapping import PairedEmbeddings
from xcompat.models import CompatModel
from xcompat.report.wording import gain_with_interval

METRICS = ("ndcg@10", "recall@10", "map")
PAIRS, COUNTS, STORED, OLD_TEXTS = 10_000, (100, 1_000, 10_000, 30_000, 100_000), (100, 1_000, 5_000), 60_000
"""Pairs unless a table says otherwise, numbers of pairs, of stored texts embedded anew, and of texts that old models are of."""
GENERAL, WIDE, PASSAGES, PARTS = (
    "transformer of captions and glosses",
    "the same, 512",
    "transformer of passages",
    "parts of words",
)


class Kept:
    """A model by name, that is made when an embedding of it is first wanted, and whose embeddings are kept."""

    def __init__(self, name: str, make: Callable[[], Embed]) -> None:
        self.name, self._make = name, make

    @cached_property
    def _embed(self) -> Embed:
        return self._make()

    def __call__(self, part: str, texts: Sequence[str]) -> Rows:
        """Embed texts, which are known by the name of a part."""
        file = OUT / "embeddings" / f"{self.name.replace(' ', '_')}-{part}.npy"
        if not file.exists():
            with atomic_path(file) as unfinished:
                write_array(unfinished, self._embed(texts))
        embeds_ND = np.load(file)
        assert len(embeds_ND) == len(texts), f"{file} is of other texts; delete it"
        return embeds_ND


class Contest:
    """A task, its old model's stored vectors, and what queries find there.

    Args:
        task: the task; the old model is made of what is searched, and of other texts where there are any.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.ids = task, (list(task.queries), list(task.texts))
        others = chain.from_iterable(first_groups(task.learn, OLD_TEXTS) if task.apart else [])
        self.old = Kept(f"words of {task.name}", lambda: words([*task.texts.values(), *others]))
        self.stored_GD = self.texts(self.old)
        self.floor = self.found(self.queries(self.old), self.stored_GD)

    def texts(self, model: Kept) -> Rows:
        """Embed what is searched."""
        return model(f"{self.task.name}-texts", [*self.task.texts.values()])

    def queries(self, model: Kept) -> Rows:
        """Embed what asks."""
        return model(f"{self.task.name}-queries", [*self.task.queries.values()])

    def found(self, queries_Qd: Rows, texts_Gd: Rows) -> GradedQueries:
        """Search."""
        return graded_per_query(queries_Qd, texts_Gd, *self.ids, self.task.qrels, (10,))

    def gains(self, found: GradedQueries) -> list[PairedDifference]:
        """Compare with old queries on the old gallery."""
        return [paired_bootstrap(found.values[metric], self.floor.values[metric]) for metric in METRICS]

    def with_map(self, model: CompatModel, new: Kept) -> GradedQueries:
        """Search stored vectors by mapped queries."""
        with torch.inference_mode():
            view_Qd = torch.cat([model.to_space(rows) for rows in torch.from_numpy(self.queries(new)).split(1024)])
        return self.found(view_Qd.numpy(), self.stored_GD)

    def learned(self, new: Kept, count: int, task: Task | None = None) -> tuple[PairedEmbeddings, PairedEmbeddings]:
        """Embed so many texts to learn from by both models: of what is found, and of what asks, labelled by group."""
        task = task or self.task
        groups = first_groups(task.learn, count)
        flat = list(chain.from_iterable(groups))
        part = f"{task.name}-learn{len(flat)}"
        new_ND, old_Nd = new(part, flat), self.old(part, flat)
        label_N = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        asks_N = np.diff(label_N, prepend=-1) > 0
        items, queries = (PairedEmbeddings(new_ND[kept], old_Nd[kept], label_N[kept]) for kept in (~asks_N, asks_N))
        return items, queries

    def passages(self, new: Kept) -> PairedEmbeddings:
        """Return what is searched, embedded by both models."""
        return PairedEmbeddings(self.texts(new), self.stored_GD)


def together(*sides: PairedEmbeddings) -> PairedEmbeddings:
    """Return the usable pairs of both sides."""
    return usable(*(np.concatenate([getattr(side, name) for side in sides]) for name in ("new_ND", "old_Nd")))


def cell(gain: PairedDifference) -> str:
    """Format a gain."""
    return gain_with_interval(gain.mean, gain.low, gain.high)


def kept(name: str, table: Callable[[], Iterator[str]]) -> None:
    """Print a table, made now or kept."""
    file = OUT / "tables" / f"{name}.json"
    if not file.exists():
        started, lines = time.monotonic(), []
        for line in table():
            console.print(line)
            lines.append(line)
        write_json(file, {"lines": lines, "minutes": round((time.monotonic() - started) / 60, 1)})
    found = read_json(file)
    print("", *found["lines"], "", f"{found['minutes']} minutes", sep="\n", flush=True)  # noqa: T201 - what is asked for


def all_maps(contest: Contest, new: Kept, trained: bool) -> Iterator[str]:
    """Yield a table of every map of a new model's queries, or of those that are solved or chosen alone."""
    about = f"{contest.task.name}: {len(contest.floor.rows_J):,} queries, {len(contest.task.texts):,} texts; new is {new.name}"
    yield f"| {about} | {' | '.join(f'{metric_name(metric)} | gain' for metric in METRICS)} | µs |"
    yield f"|---|{'---:|---:|' * len(METRICS)}---:|"

    def row(label: str, found: GradedQueries, cost: float | None = None) -> str:
        said = [cell(gain) if found is not contest.floor else "" for gain in contest.gains(found)]
        cells = [f"{100 * found.values[metric].mean():.1f} | {gain}" for metric, gain in zip(METRICS, said, strict=True)]
        return f"| {label} | {' | '.join(cells)} | {'' if cost is None else f'{cost:.0f}'} |"

    yield row("old/old", contest.floor)
    queries_QD, dim = contest.queries(new), contest.stored_GD.shape[1]
    yield row(f"independent/old, first {dim} dimensions", contest.found(queries_QD[:, :dim], contest.stored_GD))
    pairs, candidates = learned_pairs(contest, new)
    names = [*LINES, *(TRAINED if trained else ())]
    for label, model in chain(((name, mapped(name, pairs)) for name in names), candidates):
        yield row(f"new/old, {label}", contest.with_map(model, new), microseconds(model, queries_QD))
    yield row("new/new", contest.found(queries_QD, contest.texts(new)))


def learned_pairs(contest: Contest, new: Kept) -> tuple[PairedEmbeddings, Iterator[tuple[str, CompatModel]]]:
    """Return pairs to learn from, and the map that is chosen where questions with their answers are known."""
    if not contest.task.learn:
        return together(contest.passages(new)), iter(())
    items, queries = contest.learned(new, PAIRS)
    pairs = together(items, queries) if contest.task.apart else together(contest.passages(new))

    def candidates() -> Iterator[tuple[str, CompatModel]]:
        candidate, model = chosen(items, queries)
        yield f"chosen: {candidate}", model

    return pairs, candidates()


def by_count(contest: Contest, new: Kept) -> Iterator[str]:
    """Yield a table by the number of pairs."""
    yield f"| {contest.task.name}, gain at nDCG@10 | {' | '.join(f'{count:,} pairs' for count in COUNTS)} |"
    yield f"|---|{'---:|' * len(COUNTS)}"
    sides = {count: contest.learned(new, count) for count in COUNTS}

    def line(label: str, make: Callable[[int], CompatModel]) -> str:
        gains = [contest.gains(contest.with_map(make(count), new))[0] for count in COUNTS]
        return f"| {label} | {' | '.join(map(cell, gains))} |"

    for name in (*LINES, "Drift-Adapter, network", "φ with noise"):
        yield line(name, lambda count, name=name: mapped(name, together(*sides[count])))
    yield line("chosen (`xcompat map`)", lambda count: chosen(*sides[count])[1])


def by_domain(contests: Sequence[Contest], new: Kept, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a table by the domain of the pairs."""
    yield f"| gain at nDCG@10, {PAIRS:,} pairs of | {' | '.join(contest.task.name for contest in contests)} |"
    yield f"|---|{'---:|' * len(contests)}"
    for task in tasks:
        for name in (*LINES, "Drift-Adapter, network"):
            pairs = [together(*contest.learned(new, PAIRS, task)) for contest in contests]
            gains = [
                contest.gains(contest.with_map(mapped(name, each), new))[0] for contest, each in zip(contests, pairs, strict=True)
            ]
            yield f"| {task.name.lower()}: {name} | {' | '.join(map(cell, gains))} |"


def without_old_model(contest: Contest, new: Kept) -> Iterator[str]:
    """Yield a table of what is learned from stored vectors and their texts alone, so many of them embedded anew."""
    passages = contest.passages(new)
    counts = [*(count for count in STORED if count < len(passages)), len(passages)]
    heads = " | ".join(f"{count:,}" for count in counts)
    yield f"| {contest.task.name}, {new.name}: gain at nDCG@10, re-embedded texts | {heads} |"
    yield f"|---|{'---:|' * len(counts)}"
    order = np.random.default_rng(0).permutation(len(passages))
    for name in (*LINES, "Drift-Adapter, network", "Procrustes + memory"):
        gains = []
        for count in counts:
            pairs = together(passages.take(np.sort(order[:count])))
            model = mapped(name, pairs) if name in LINES | TRAINED else remembering(mapped("Procrustes", pairs), pairs)
            gains.append(contest.gains(contest.with_map(model, new))[0])
        yield f"| {name} | {' | '.join(map(cell, gains))} |"
    own = contest.gains(contest.found(contest.queries(new), contest.texts(new)))[0]
    yield f"| new/new: all re-embedded, no map | {' | '.join([''] * (len(counts) - 1))} | {cell(own)} |"


def pairs_of(kinds: Sequence[Groups]) -> Callable[[Generator, int], list[tuple[str, str]]]:
    """Return what draws pairs of one kind a batch, each of two texts of a group."""

    def draw(generator: Generator, count: int) -> list[tuple[str, str]]:
        groups = kinds[generator.integers(len(kinds))]
        drawn = (groups[row] for row in generator.choice(len(groups), count, replace=False))
        return [(group[first], group[second]) for group in drawn for first, second in [generator.choice(len(group), 2, False)]]

    return draw


def halves(texts: Sequence[str]) -> Groups:
    """Return sentences of each text, of which any two belong together (the inverse cloze task, Lee et al. 2019)."""
    parts = ([part for part in text.replace(" . ", ". ").split(". ") if len(part.split()) > 3] for text in texts)
    return [part for part in parts if len(part) > 1]


def transformer(kinds: Sequence[Groups], folder: Path, peaks: bool = False) -> Transformer:
    """Train a transformer, or open the trained one."""
    texts = chain.from_iterable(chain.from_iterable(kinds))
    return Transformer(folder, peaks).learn(texts, pairs_of(kinds), steps=(500, 100), batch=256)


def main() -> None:
    """Make models and tables."""
    started = time.monotonic()
    tasks = {task.name: task for task in (captions(), glosses(), scifact(), cranfield())}
    plain = [task for task in tasks.values() if task.apart]
    judged = [task for task in tasks.values() if not task.apart]
    sentences = [halves([text for task in judged for text in task.texts.values()])]

    def trained(name: str, kinds: Sequence[Groups], peaks: bool = False) -> Kept:
        return Kept(name, partial(transformer, kinds, OUT / name.replace(" ", "_"), peaks))

    kinds = [task.learn for task in plain]
    general, wide, passages = trained(GENERAL, kinds), trained(WIDE, kinds, peaks=True), trained(PASSAGES, sentences)
    own = {
        task.name: general if task.apart else Kept(PARTS, partial(parts_of_words, [*task.texts.values()]))
        for task in tasks.values()
    }
    contests = {name: Contest(task) for name, task in tasks.items()}
    for name, contest in contests.items():
        kept(name, lambda name=name, contest=contest: all_maps(contest, own[name], trained=True))
        kept(f"{name}-stored", lambda name=name, contest=contest: without_old_model(contest, own[name]))
    kept("domain", lambda: by_domain([contests[task.name] for task in plain], general, plain))
    for task in plain:
        kept(f"{task.name}-count", lambda task=task: by_count(contests[task.name], general))
    for name, contest in contests.items():
        for other in (wide if contest.task.apart else general, passages):
            kept(f"{name}-{other.name}", lambda contest=contest, other=other: all_maps(contest, other, trained=False))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    console.print(f"{(time.monotonic() - started) / 60:.0f} minutes now, {versions}")


if __name__ == "__main__":
    main()
