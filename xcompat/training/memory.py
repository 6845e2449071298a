"""Choice of a trained model's learned transform and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors.torch import load_file, save_file

from xcompat.core.arrays import number_strings
from xcompat.core.errors import NoValidationDataError
from xcompat.core.files import atomic_path, read_json, write_json
from xcompat.core.progress import console, literal, notice
from xcompat.data import flatten_captions
from xcompat.data.schema import ID, SIDE_INFO
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.mapping import CaptionedEmbeddings, Choice, PairedEmbeddings, choose
from xcompat.mapping.candidates import Candidate, CandidateParts, Paired
from xcompat.mapping.choice_report import as_json, describe_choice, print_choice
from xcompat.mapping.paired import SwappedEmbeddings, number_groups
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.indexed_memory import build_memory
from xcompat.models.query_memory import QueryMemory
from xcompat.training.overlap import warn_of_shared_texts
from xcompat.training.record import CHOICE, OLD_MEMORY
from xcompat.training.stage import Stage
from xcompat.training.stage_recipe import StageRecipe

GUESSES = {"classes": {"power": 0.25, "share": 0.5}, "galleries": {"share": 0.5}, "pairs": {"sharpness": 60.0, "share": 0.5}}
"""Settings without a validation split."""

P = TypeVar("P", bound=PairedEmbeddings)


def pairs_to_remember(stage: Stage, model: CompatModel) -> Paired:
    """Embed training data for a memory (all processes).

    Raises:
        XcompatError: there is nothing to remember.
    """
    new = stage.as_input(stage.embedder("new")) if model.embeds_in_memory else Embedder.from_model(model, "own")
    if model.maps_galleries:
        return gallery_pairs(stage, new, model)
    return labelled_pairs(stage, new) if stage.settings.memory == "classes" else captioned_pairs(stage, new)


def remember(model: CompatModel, pairs: Paired, settings: StageRecipe, seed: int, folder: Path) -> None:
    """Choose a trained model's learned transform and memory on a validation split.

    The memory is the queries', or the mapped gallery's for gallery maps.

    Args:
        model: gets the memory, if it finds more.
        pairs: from :func:`pairs_to_remember`.
        settings: the trained stage.
        seed: random seed for the validation split.
        folder: stage folder, for the candidates' record.
    """
    kind, method = "galleries" if model.maps_galleries else str(settings.memory), settings.method
    known = CandidateParts(pairs, lines={method: lambda *_: model}, codec=settings.memory_codec)
    choice: Choice | None = None
    try:
        choice = choose(pairs, settings.searched_classes, seed, known.lines, beside_line=True)
        candidate = choice.chosen.candidate
        print_candidates(choice)
    except NoValidationDataError as error:
        candidate = Candidate(method, **GUESSES[kind])
        notice(f"{error}: the settings of the memory are not validated")
    model.remember(known.memory(candidate, choice.confidence if choice is not None else None))
    write_candidates(folder, candidate, choice, known)


def print_candidates(choice: Choice) -> None:
    """Print candidates and results."""
    print_choice(choice)
    for line in describe_choice(choice):
        console.print(f"  {literal(line)}")


def write_candidates(folder: Path, candidate: Candidate, choice: Choice | None, known: CandidateParts, **verdict: bool) -> None:
    """Write the candidates, and a memory like the chosen memory for a single model.

    A report compares with this single model: the old model, or for gallery maps the new model.

    Args:
        folder: stage folder.
        candidate: the chosen candidate.
        choice: candidates and results, or None.
        known: training data of the memory.
        verdict: for chosen maps, whether they are surely at or above old queries.
    """
    memory = CandidateParts(known.pairs.of_old(), lines=known.lines, codec=known.codec).memory(candidate)
    said = {"chosen": str(candidate), "memory": memory.settings if memory is not None else None}
    write_json(folder / CHOICE, said | (as_json(choice) if choice is not None else {}) | verdict)
    if memory is not None:
        with atomic_path(folder / OLD_MEMORY) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in memory.state_dict().items()}, temporary)


def memory_of_one(folder: Path) -> QueryMemory | None:
    """Read the single model's memory of :func:`write_candidates`, or None."""
    file = folder / OLD_MEMORY
    if not file.exists():
        return None
    tensors = load_file(file)
    dim = tensors["metric.mean_d"].shape[0]
    memory = build_memory(read_json(folder / CHOICE)["memory"], dim, dim)
    memory.load_state_dict(tensors)
    memory.check()
    return memory


def labelled_pairs(stage: Stage, new: Embedder) -> PairedEmbeddings:
    """Embed labelled images with both models, without unreadable ones.

    Args:
        stage: the stage.
        new: query model before any map.
    """
    caches = stage.cache(new), stage.cache(stage.frozen("old"))
    return without_unreadable(PairedEmbeddings(*caches, stage.images.labels()), *caches)


def gallery_pairs(stage: Stage, new: Embedder, model: CompatModel) -> SwappedEmbeddings:
    """Embed labelled images for a gallery map, without unreadable ones.

    Args:
        stage: the stage.
        new: new model, whose queries are not mapped.
        model: the map, possibly with side-information.

    Returns:
        Embeddings with old and new exchanged.
    """
    caches = stage.cache(stage.frozen("old")), stage.cache(new)
    sides = [stage.cache(stage.frozen(SIDE_INFO))] if getattr(model.config, SIDE_INFO, None) is not None else []
    turned = SwappedEmbeddings(*caches, stage.images.labels(), side_NS=sides[0] if sides else None)
    return without_unreadable(turned, *caches, *sides)


def captioned_pairs(stage: Stage, new: Embedder) -> CaptionedEmbeddings:
    """Embed images and distinct captions with both models, grouped by id.

    Args:
        stage: the stage.
        new: query model before any map.

    Returns:
        Embeddings without unreadable images.
    """
    texts, text_ids = flatten_captions(stage.remembered_images)
    if stage.settings.data.remembered is not None:  # for data.pairs, training has warned already
        warn_of_shared_texts(stage, texts, "data.remembered")
    image_groups_N, text_groups_M = number_groups(stage.remembered_images[ID], text_ids, texts)
    _, rows_M = np.unique(number_strings(texts)[1], return_index=True)
    new_images, new_texts = stage.remembered_caches(new)
    old_images, old_texts = stage.remembered_caches(stage.embedder("old"))
    images = without_unreadable(PairedEmbeddings(new_images, old_images, image_groups_N), new_images, old_images)
    texts_alone = without_unreadable(PairedEmbeddings(new_texts, old_texts, text_groups_M[rows_M]), new_texts, old_texts)
    return CaptionedEmbeddings.join_complete(images, texts_alone)


def without_unreadable(pairs: P, *caches: EmbeddingCache) -> P:
    """Drop items that are unreadable for a model; others stay in their caches."""
    kept_N = np.all([cache.readable() for cache in caches], axis=0)
    return pairs if kept_N.all() else pairs.narrowed(np.flatnonzero(kept_N))
