"""Automatic choice of a query map for recipes without a method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from xcompat.core.distributed import is_main_process
from xcompat.core.errors import NoValidationDataError, XcompatError
from xcompat.core.files import read_json
from xcompat.core.progress import notice
from xcompat.data.schema import TEXT
from xcompat.mapping import CaptionedEmbeddings, Choice, PairedEmbeddings, fit
from xcompat.mapping.agreement import choose_by_labels_or_agreement
from xcompat.mapping.candidates import GUESS, LINES, CandidateParts, Described, Paired, Solver
from xcompat.mapping.query_cost import describe_old_query_ms, measure_query_ms
from xcompat.mapping.selection import merge_choices
from xcompat.mapping.sentences import Texts
from xcompat.methods import QueryMapModel
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, penultimate_embedder
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.training.cost import FILE as COST
from xcompat.training.cost import SolvingCost
from xcompat.training.memory import captioned_pairs, labelled_pairs, print_candidates, write_candidates
from xcompat.training.overlap import warn_of_shared_images
from xcompat.training.record import CHOICE
from xcompat.training.stage import Stage
from xcompat.training.stage_recipe import StageRecipe

OF_FEATURES = "procrustes of penultimate features"


def choose_map(stage: Stage, folder: Path) -> CompatModel | None:
    """Try all candidate maps on a validation split, and solve the best on all data.

    All processes embed, the first chooses. Candidates are solved in closed form: trained maps take minutes and find no more
    (docs/results/chosen_map.md).

    Args:
        stage: the stage.
        folder: stage folder, for the candidates' record.

    Returns:
        The map, with a memory if it finds more; None on all but the first process.

    Raises:
        XcompatError: data or models are missing.
    """
    if stage.settings.data.images is not None:
        warn_of_shared_images(stage)
    plain, frozen = stage.embedder("new"), stage.frozen("old")
    old = frozen if isinstance(frozen, Embedder) and frozen.reads == "images" else None  # embeds the same queries
    known = [
        CandidateParts(pairs, frozen.describe_old(), lines, stage.settings.memory_codec) for pairs, lines in _inputs(stage, plain)
    ]
    if not is_main_process():
        return None
    solving = SolvingCost(folder / COST)
    solving.samples = max(len(each.pairs) for each in known)  # each sample counts once for all candidates
    choice: Choice | None = None
    try:
        asked, texts = (stage.settings.searched_classes, stage.seed), _texts(stage, plain)
        choice = merge_choices(
            [choose_by_labels_or_agreement(each.pairs, *asked, each.lines, old is not None, texts) for each in known]
        )
        of_both = any(isinstance(each.pairs, CaptionedEmbeddings) for each in known)
        choice = replace(choice, is_other_kind=stage.settings.data.test is not None and not of_both)
        print_candidates(choice)
    except NoValidationDataError as error:
        notice(f"{error}: the map is not validated")
    candidate = choice.chosen.candidate if choice is not None else replace(GUESS, line=next(iter(known[0].lines)))
    if old is not None and candidate.old_share:
        notice(describe_old_query_ms(old, measure_query_ms(old)))
    taken = next(each for each in known if candidate.line in each.lines)
    model = fit(candidate, taken, choice.confidence if choice is not None else None)
    model.config.encoder = stage.with_query_prompt(plain).describe_encoder()
    if choice is not None and choice.reranked is not None:
        choice.reranked.store_in(model)
    solving.write(model)
    write_candidates(folder, candidate, choice, taken, verdict=choice is not None and choice.is_safe)
    return model


def read_verdict(folder: Path) -> bool | None:
    """Return whether the chosen map is surely at or above old queries; None if none was chosen."""
    file = folder / CHOICE
    return read_json(file).get("verdict") if file.exists() else None


def _inputs(stage: Stage, plain: Embedder) -> Iterator[tuple[Paired, Mapping[str, Solver]]]:
    """Yield embedding pairs with the solvers to try.

    A final layer trained on these classes is better on its training images than elsewhere, which misleads validation. Then only
    penultimate features are tried (docs/results/trained_maps.md).
    """
    if stage.settings.data.images is not None:
        features = _features(stage.settings, plain)
        if features is None or set(plain.classes).isdisjoint(stage.images.classes):
            yield labelled_pairs(stage, plain), LINES
        if features is not None:
            yield labelled_pairs(stage, features), {OF_FEATURES: partial(_solve_from_features, plain.describe_encoder())}
    elif stage.settings.remembered_pairs is not None:
        yield captioned_pairs(stage, plain), LINES
    else:
        yield PairedEmbeddings(stage.cache_of_new(plain), stage.cache(stage.frozen("old"))), LINES


def _texts(stage: Stage, new: Embedder) -> Texts | None:
    """Return the texts of the pairs, whose sentences are evidence; None for images and captions."""
    settings = stage.settings
    if settings.data.images is not None or settings.remembered_pairs is not None or settings.data.embeddings_of != "texts":
        return None
    return Texts(stage.training_texts()[TEXT][:], new)


def _features(settings: StageRecipe, plain: Embedder) -> Embedder | None:
    """Return penultimate features; None without a final linear layer, or if the test set has texts."""
    if settings.data.queries is None and settings.data.templates is None and settings.data.tests():
        return None
    try:
        return penultimate_embedder(plain)
    except XcompatError:
        return None


def _solve_from_features(encoder: dict[str, object], pairs: Paired, old: Described) -> QueryMapModel:
    together = pairs.together()
    assert together.labels_N is not None
    options: dict[str, Any] = {"input": "penultimate", "encoder": encoder}
    model = QueryMapModel(QueryMapModel.config_class(old=old, embedding_dim=pairs.dims[0], **options))
    model.prepare(OldKnowledge(together.n_classes, together.labels_N, together.old_Nd), together.new_ND)
    return model.eval()
