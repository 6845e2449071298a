"""A recipe without a method: choose the query map that finds most of a held-out part of the training set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from xcompat.core.distributed import is_main_process
from xcompat.core.errors import NothingHeldOutError, XcompatError
from xcompat.core.files import read_json
from xcompat.core.progress import notice
from xcompat.mapping import Choice, PairedEmbeddings, fit
from xcompat.mapping.agreement import choose_by_what_is_known
from xcompat.mapping.candidates import GUESS, LINES, Described, Known, Paired, Solver
from xcompat.mapping.choosing import joined
from xcompat.methods import QueryMapModel
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, penultimate
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.training.cost import FILE as COST
from xcompat.training.cost import Solving
from xcompat.training.overlap import warn_of_shared_images
from xcompat.training.record import CHOICE
from xcompat.training.remembering import captioned_pairs, labelled_pairs, record, show
from xcompat.training.stage import StageData, StageModels
from xcompat.training.stage_recipe import StageRecipe

OF_FEATURES = "procrustes of penultimate features"


def choose_map(settings: StageRecipe, models: StageModels, data: StageData, seed: int, folder: Path) -> CompatModel | None:
    """Try all candidate maps of queries, and solve the best one on all data; all processes embed, the first one chooses.

    The candidates are solved, not trained: trained lines and networks took minutes instead of seconds, and found no more on other
    images (docs/results/chosen_map.md has the figures).

    Args:
        settings: the stage.
        models: the old and the new one.
        data: labelled images, images with captions, or texts, of which the line is taken that agrees most with old queries.
        seed: of what is held out.
        folder: the stage's; it gets a record of the candidates.

    Returns:
        The map, with a memory if that finds more; None on every process but the first.

    Raises:
        XcompatError: data or models are missing.
    """
    if settings.data.images is not None:
        warn_of_shared_images(data)
    plain, old = models.embedder("new"), models.frozen("old").describe_old()
    known = [Known(pairs, old, lines, settings.memory_codec) for pairs, lines in _inputs(settings, models, data, plain)]
    if not is_main_process():
        return None
    solving = Solving(folder / COST)
    solving.samples = max(len(each.pairs) for each in known)  # each once, however many candidates read it
    choice: Choice | None = None
    try:
        choice = joined([choose_by_what_is_known(each.pairs, settings.searched_classes, seed, each.lines) for each in known])
        show(choice)
    except NothingHeldOutError as error:
        notice(f"{error}: the line that is taken is a guess")
    candidate = choice.chosen.candidate if choice is not None else replace(GUESS, line=next(iter(known[0].lines)))
    taken = next(each for each in known if candidate.line in each.lines)
    model = fit(candidate, taken, choice.confidence if choice is not None else None)
    model.config.encoder = data.as_mapped(plain).describe_encoder()
    model.config.rerank_old_weight = choice.rerank_weight if choice is not None else None
    solving.write(model)
    record(folder, candidate, choice, taken, verdict=choice is not None and choice.is_safe)
    return model


def read_verdict(folder: Path) -> bool | None:
    """Return whether a stage's chosen map is surely at or above old queries; None if no map was chosen there."""
    file = folder / CHOICE
    return read_json(file).get("verdict") if file.exists() else None


def _inputs(
    settings: StageRecipe, models: StageModels, data: StageData, plain: Embedder
) -> Iterator[tuple[Paired, Mapping[str, Solver]]]:
    """Yield inputs of a map with the solvers to try on them: the new model's embeddings, and its penultimate features if any.

    A layer that was trained on these classes finds more in its training images than in others, so a held-out part of them says
    nothing about it. If the new model ends in such a layer, only its penultimate features are tried: a line from them was better
    in all four scenarios of docs/results/trained_maps.md.
    """
    if settings.data.images is not None:
        features = _features(settings, plain)
        if features is None or set(plain.classes).isdisjoint(data.images.classes):
            yield labelled_pairs(models, data, plain), LINES
        if features is not None:
            yield labelled_pairs(models, data, features), {OF_FEATURES: partial(_solved_of_features, plain.describe_encoder())}
    elif settings.remembered_pairs is not None:
        yield captioned_pairs(models, data, plain), LINES
    else:
        if settings.data.test is not None:
            notice(
                "the map learns from texts alone, and is chosen by them: queries of images may find less than old ones; name "
                "images with captions under data.remembered instead of data.texts, if there are any"
            )
        yield PairedEmbeddings(data.cache_of_new(plain), data.cache(models.frozen("old"))), LINES


def _features(settings: StageRecipe, plain: Embedder) -> Embedder | None:
    """Return the new model's penultimate features; None if no linear layer follows them, or the test set has texts."""
    if settings.data.queries is None and settings.data.templates is None and settings.data.tests():
        return None
    try:
        return penultimate(plain)
    except XcompatError:
        return None


def _solved_of_features(encoder: dict[str, Any], pairs: Paired, old: Described) -> QueryMapModel:
    """Solve for a centred rotation with a scale from penultimate features: a query map before any training."""
    together = pairs.together()
    assert together.labels_N is not None
    options: dict[str, Any] = {"input": "penultimate", "encoder": encoder}
    model = QueryMapModel(QueryMapModel.config_class(old=old, embedding_dim=pairs.dims[0], **options))
    model.prepare(OldKnowledge(together.n_classes, together.labels_N, together.old_Nd), together.new_ND)
    return model.eval()
