"""A recipe that names no method: the map of queries that finds most of what was held out of the training set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np

from xcompat.data import EmbeddingPairDataset, collate_embeddings
from xcompat.data.notices import notice
from xcompat.data.schema import INDEX, LABELS
from xcompat.distributed import from_main_process, is_main_process
from xcompat.errors import NothingHeldOutError, XcompatError
from xcompat.mapping import Choice, PairedEmbeddings, choose, fit
from xcompat.mapping.candidates import GUESS, LINES, Described, Known, Paired, Solver
from xcompat.mapping.choosing import joined
from xcompat.models import CompatModel, QueryMapModel
from xcompat.models.embedder import Embedder, penultimate
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.training.build import warn_of_shared_images
from xcompat.training.remembering import captioned_pairs, labelled_pairs, record, show
from xcompat.training.stage import Stage, seed_everything
from xcompat.training.trainer import Data, train

SHAPES: dict[str, Literal["linear", "residual"]] = {"trained line": "linear", "network": "residual"}
"""What is trained beside the lines that are solved."""


def train_chosen(stage: Stage) -> CompatModel:
    """Try what a map of queries can be made of, and solve or train the best on everything.

    Args:
        stage: with labelled images, images with captions, or texts, of which nothing can be held out.

    Returns:
        The map, whose queries remember where that finds more.

    Raises:
        XcompatError: data or models are missing, or the training section does not fit.
    """
    if stage.part.data.images is not None:
        warn_of_shared_images(stage)
    plain, old = stage.embedder("new"), stage.old().describe_old()
    known = [Known(pairs, old, lines, stage.part.memory_codec) for pairs, lines in _inputs(stage, plain)]
    choice: Choice | None = None
    try:
        choice = joined([choose(each.pairs, stage.part.searched_classes, stage.recipe.seed, each.lines) for each in known])
    except NothingHeldOutError as error:
        notice(f"{error}: the line that is taken is a guess")
    # the first process decides for all, which train together what is to be trained
    candidate = from_main_process(lambda: choice.chosen.candidate if choice is not None else GUESS)
    taken = next(each for each in known if candidate.line in each.lines)
    model = fit(candidate, taken, choice.confidence if choice is not None else None)
    model.config.encoder = plain.describe_encoder()
    if is_main_process():
        if choice is not None:
            show(choice)
        record(stage, candidate, choice, taken)
    return model


def _inputs(stage: Stage, plain: Embedder) -> Iterator[tuple[Paired, dict[str, Solver]]]:
    """Yield what can be mapped, with what maps it: embeddings, and penultimate features of images where there are such."""
    data, described = stage.part.data, plain.describe_encoder()
    embeddings: dict[str, Any] = {"input": "embedding", "encoder": described}
    if data.images is not None:
        yield labelled_pairs(stage, plain), dict(LINES) | _trained_lines(stage, embeddings)
        if (features := _features(stage, plain)) is not None:
            of, options = " of penultimate features", embeddings | {"input": "penultimate"}
            started = {"procrustes" + of: partial(_started, options)}
            yield labelled_pairs(stage, features), started | _trained_lines(stage, options, of)
    elif stage.part.remembered_pairs is not None:
        yield captioned_pairs(stage, plain), dict(LINES) | _trained_lines(stage, embeddings)
    else:
        yield PairedEmbeddings(stage.cache(plain), stage.cache(stage.old())), dict(LINES)


def _features(stage: Stage, plain: Embedder) -> Embedder | None:
    """Return what embeds images by penultimate features; None where no linear layer follows them, or captions are judged."""
    if stage.part.data.test is not None:
        return None
    try:
        return penultimate(plain)
    except XcompatError:
        return None


def _trained_lines(stage: Stage, options: dict[str, Any], of: str = "") -> dict[str, Solver]:
    trained = Counter[str]()  # a folder of checkpoints for each training, in an order that is the same when it goes on

    def solver(name: str, shape: str) -> Solver:
        def solve(pairs: Paired, old: Described) -> CompatModel:
            seed_everything(stage.recipe.seed)
            together = pairs.together()
            model = _started(options | {"shape": shape}, together, old)
            known: dict[str, Any] = {INDEX: np.arange(len(together))}
            if together.labels_N is not None:
                known[LABELS] = together.labels_N
            data = Data(EmbeddingPairDataset(together.new_ND, together.old_Nd, None, known), collate_embeddings)
            trained[name] += 1
            part = stage.part.model_copy(update={"name": f"{stage.part.name}: {name}, {trained[name]} of 3"})
            folder = stage.checkpoints_dir / f"{shape}-{options['input']}-{trained[name]}"
            return train(model, data, part, stage.recipe.seed, folder).eval()

        return solve

    return {name + of: solver(name + of, shape) for name, shape in SHAPES.items()}


def _started(options: dict[str, Any], pairs: Paired, old: Described) -> QueryMapModel:
    """Return a query map at its closed form."""
    together = pairs.together()
    model = QueryMapModel(QueryMapModel.config_class(old=old, embedding_dim=pairs.dims[0], **options))
    labels_N = together.labels_N if together.labels_N is not None else np.empty(0, np.int64)
    model.prepare(OldKnowledge(together.n_classes, labels_N, together.old_Nd), together.new_ND)
    return model.eval()
