"""What a stage's model remembers: chosen on what the stage learned from."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from safetensors.torch import load_file, save_file

from xcompat.data import flatten_captions, load_pairs
from xcompat.data.schema import ID, SIDE_INFO
from xcompat.distributed import is_main_process
from xcompat.embedding import EmbeddingCache
from xcompat.errors import NothingHeldOutError
from xcompat.files import atomic_path, read_json, write_json
from xcompat.mapping import CaptionedEmbeddings, Choice, PairedEmbeddings, choose
from xcompat.mapping.candidates import Candidate, Known, Paired
from xcompat.mapping.paired import TurnedEmbeddings, grouped
from xcompat.mapping.showing import as_json, choice_table, said_of
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.models.indexed_memory import described
from xcompat.models.query_memory import QueryMemory
from xcompat.progress import console, literal, notice
from xcompat.training.caches import cached_captions, cached_images
from xcompat.training.overlap import warn_of_shared_captions
from xcompat.training.record import CHOICE, OLD_MEMORY
from xcompat.training.stage import Stage, StageData, StageModels

GUESSES = {"classes": {"power": 0.25, "share": 0.5}, "galleries": {"share": 0.5}, "pairs": {"sharpness": 60.0, "share": 0.5}}
"""What is taken where there are too few items to hold any out."""

P = TypeVar("P", bound=PairedEmbeddings)


def remember(stage: Stage, model: CompatModel) -> None:
    """Choose what a trained model's queries wear by what was held out, and let them; all processes embed, the first one chooses.

    Of a model that maps galleries it is what is mapped that remembers. Beside the model stands what was tried, and the same
    memory of one model alone, which a report shows beside it.

    Args:
        stage: the stage that was trained.
        model: its model, which remembers from now on, or not where nothing finds more.

    Raises:
        XcompatError: there is nothing to remember.
    """
    settings = stage.settings
    if settings.memory is None:
        return
    model.eval()
    kind, method, new = "galleries" if model.maps_galleries else settings.memory, settings.method, _new(stage.models, model)
    pairs: Paired
    if kind == "galleries":
        pairs = gallery_pairs(stage, new, model)
    else:
        pairs = labelled_pairs(stage, new) if kind == "classes" else captioned_pairs(stage, new)
    if not is_main_process():
        return
    known = Known(pairs, lines={method: lambda *_: model}, codec=settings.memory_codec)
    choice: Choice | None = None
    try:
        choice = choose(pairs, settings.searched_classes, stage.seed, known.lines, beside_line=True)
        candidate = choice.chosen.candidate
        show(choice)
    except NothingHeldOutError as error:
        candidate = Candidate(method, **GUESSES[kind])
        notice(f"{error}: what {'galleries' if kind == 'galleries' else 'queries'} remember is a guess")
    model.remember(known.memory(candidate, choice.confidence if choice is not None else None))
    record(stage, candidate, choice, known)


def show(choice: Choice) -> None:
    """Print what was tried, and what came of it."""
    console.print(choice_table(choice))
    for line in said_of(choice):
        console.print(f"  {literal(line)}", soft_wrap=True)


def record(stage: Stage, candidate: Candidate, choice: Choice | None, known: Known) -> None:
    """Write what was tried beside the model, and the same memory of one model alone, which a report shows beside it.

    That is the memory of old queries; of a map of galleries, that of the new model's own queries and galleries.

    Args:
        stage: the stage.
        candidate: what is taken.
        choice: what was tried; None where nothing could be.
        known: what was learned from.
    """
    memory = Known(known.pairs.of_old(), lines=known.lines, codec=known.codec).memory(candidate)
    said = {"chosen": str(candidate), "memory": memory.settings if memory is not None else None}
    write_json(stage.paths.folder / CHOICE, said | (as_json(choice) if choice is not None else {}))
    if memory is not None:
        with atomic_path(stage.paths.folder / OLD_MEMORY) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in memory.state_dict().items()}, temporary)


def memory_of_one(stage: Stage) -> QueryMemory | None:
    """Read what one model alone would remember: old queries, or the new model where the stage maps galleries.

    Args:
        stage: a stage that is done.

    Returns:
        The memory; None where the stage's model remembers nothing.
    """
    file = stage.paths.folder / OLD_MEMORY
    if not file.exists():
        return None
    tensors = load_file(file)
    dim = tensors["metric.mean_d"].shape[0]
    memory = described(read_json(stage.paths.folder / CHOICE)["memory"], dim, dim)
    memory.load_state_dict(tensors)
    memory.check()
    return memory


def labelled_pairs(stage: Stage, new: Embedder) -> PairedEmbeddings:
    """Embed the labelled images that a stage learns from.

    Args:
        stage: the stage.
        new: what embeds queries before they are mapped.

    Returns:
        What both models can read.
    """
    caches = stage.data.cache(new), stage.data.cache(stage.models.frozen("old"))
    return _readable(PairedEmbeddings(*caches, stage.data.images.labels()), *caches)


def gallery_pairs(stage: Stage, new: Embedder, model: CompatModel) -> TurnedEmbeddings:
    """Embed the labelled images that a map of galleries learns from.

    Args:
        stage: the stage.
        new: the new model, whose queries stay as they are.
        model: the map, which may read side-information.

    Returns:
        What all models can read, old and new turned.
    """
    caches = stage.data.cache(stage.models.frozen("old")), stage.data.cache(new)
    sides = [stage.data.cache(stage.models.frozen(SIDE_INFO))] if getattr(model.config, SIDE_INFO, None) is not None else []
    turned = TurnedEmbeddings(*caches, stage.data.images.labels(), side_NS=sides[0] if sides else None)
    return _readable(turned, *caches, *sides)


def captioned_pairs(stage: Stage, new: Embedder) -> CaptionedEmbeddings:
    """Embed images and captions, one that several images have once, and bring together what belongs together.

    Args:
        stage: the stage.
        new: what embeds queries before they are mapped.

    Returns:
        What both models can read.
    """
    source = stage.settings.remembered_pairs
    assert source is not None
    pairs = load_pairs(source)
    if stage.settings.data.remembered is not None:  # of data.pairs it was said when they were learned from
        warn_of_shared_captions(stage.data, pairs, "data.remembered")
    texts, text_ids = flatten_captions(pairs)
    image_groups_N, text_groups_M = grouped(pairs[ID], text_ids, texts)
    _, rows_M = np.unique(texts, return_index=True)
    new_images, new_texts = caption_caches(stage.data, new)
    old_images, old_texts = caption_caches(stage.data, stage.models.embedder("old"))
    images = _readable(PairedEmbeddings(new_images, old_images, image_groups_N), new_images, old_images)
    texts_alone = _readable(PairedEmbeddings(new_texts, old_texts, text_groups_M[rows_M]), new_texts, old_texts)
    return CaptionedEmbeddings.whole(images, texts_alone)


def caption_caches(data: StageData, embedder: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
    """Embed the images that a stage's queries may remember, and their captions, each once and sorted.

    Args:
        data: with pairs.
        embedder: the frozen model.
    """
    source = data.settings.remembered_pairs
    assert source is not None
    pairs, cache_dir = load_pairs(source), data.cache_dir
    texts, _ = flatten_captions(pairs)
    images = cached_images(embedder, pairs, cache_dir, source.max_bad_share)
    return images, cached_captions(embedder, np.unique(texts).tolist(), cache_dir)


def _new(models: StageModels, model: CompatModel) -> Embedder:
    """Return what embeds queries before they are mapped: the trained model, or the new one that a map belongs to."""
    if model.embeds_in_memory:
        return models.as_input(models.embedder("new"))
    return Embedder.of(model, "own")


def _readable(pairs: P, *caches: EmbeddingCache) -> P:
    """Leave out what one of the models could not read."""
    kept_N = np.all([cache.readable() for cache in caches], axis=0)
    return pairs if kept_N.all() else pairs.take(np.flatnonzero(kept_N))
