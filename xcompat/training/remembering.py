"""Choose the metric and the memory of a stage's model on held-out training data."""

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
from xcompat.training.overlap import warn_of_shared_texts
from xcompat.training.record import CHOICE, OLD_MEMORY
from xcompat.training.stage import Stage, StageData, StageModels

GUESSES = {"classes": {"power": 0.25, "share": 0.5}, "galleries": {"share": 0.5}, "pairs": {"sharpness": 60.0, "share": 0.5}}
"""Settings of a candidate that is taken unseen, if there are too few items to hold any out."""

P = TypeVar("P", bound=PairedEmbeddings)


def remember(stage: Stage, model: CompatModel) -> None:
    """Choose the metric and memory of a trained model's queries on held-out data; all processes embed, the first one chooses.

    If the model maps galleries, the mapped gallery gets the memory. The stage's folder gets a record of the candidates.

    Args:
        stage: the stage that was trained.
        model: its model; it gets the memory, or none if none finds more.

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
    """Print the candidates and their results."""
    console.print(choice_table(choice))
    for line in said_of(choice):
        console.print(f"  {literal(line)}", soft_wrap=True)


def record(stage: Stage, candidate: Candidate, choice: Choice | None, known: Known) -> None:
    """Write the candidates, and a memory like the chosen one for a single model, which a report compares with.

    That model is the old one; for a map of galleries it is the new one.

    Args:
        stage: the stage.
        candidate: the chosen candidate.
        choice: the candidates and their results; None if nothing could be held out.
        known: the training data of the memory.
    """
    memory = Known(known.pairs.of_old(), lines=known.lines, codec=known.codec).memory(candidate)
    said = {"chosen": str(candidate), "memory": memory.settings if memory is not None else None}
    write_json(stage.paths.folder / CHOICE, said | (as_json(choice) if choice is not None else {}))
    if memory is not None:
        with atomic_path(stage.paths.folder / OLD_MEMORY) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in memory.state_dict().items()}, temporary)


def memory_of_one(stage: Stage) -> QueryMemory | None:
    """Read the memory of a single model that :func:`record` wrote; None if the stage's model has no memory."""
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
    """Embed the labelled images of a stage with both models, without those that either cannot read.

    Args:
        stage: the stage.
        new: the model of the queries, before any map.
    """
    caches = stage.data.cache(new), stage.data.cache(stage.models.frozen("old"))
    return _readable(PairedEmbeddings(*caches, stage.data.images.labels()), *caches)


def gallery_pairs(stage: Stage, new: Embedder, model: CompatModel) -> TurnedEmbeddings:
    """Embed the labelled images of a stage that maps galleries, without those that one of the models cannot read.

    Args:
        stage: the stage.
        new: the new model, whose queries are not mapped.
        model: the map, which may read side-information.

    Returns:
        The embeddings, with old and new exchanged.
    """
    caches = stage.data.cache(stage.models.frozen("old")), stage.data.cache(new)
    sides = [stage.data.cache(stage.models.frozen(SIDE_INFO))] if getattr(model.config, SIDE_INFO, None) is not None else []
    turned = TurnedEmbeddings(*caches, stage.data.images.labels(), side_NS=sides[0] if sides else None)
    return _readable(turned, *caches, *sides)


def captioned_pairs(stage: Stage, new: Embedder) -> CaptionedEmbeddings:
    """Embed images and distinct captions of a stage with both models, grouped by what they describe.

    Args:
        stage: the stage.
        new: the model of the queries, before any map.

    Returns:
        The embeddings, without images that either model cannot read.
    """
    source = stage.settings.remembered_pairs
    assert source is not None
    pairs = load_pairs(source)
    if stage.settings.data.remembered is not None:  # for data.pairs, training has warned already
        warn_of_shared_texts(stage.data, flatten_captions(pairs)[0], "data.remembered")
    texts, text_ids = flatten_captions(pairs)
    image_groups_N, text_groups_M = grouped(pairs[ID], text_ids, texts)
    _, rows_M = np.unique(texts, return_index=True)
    new_images, new_texts = caption_caches(stage.data, new)
    old_images, old_texts = caption_caches(stage.data, stage.models.embedder("old"))
    images = _readable(PairedEmbeddings(new_images, old_images, image_groups_N), new_images, old_images)
    texts_alone = _readable(PairedEmbeddings(new_texts, old_texts, text_groups_M[rows_M]), new_texts, old_texts)
    return CaptionedEmbeddings.whole(images, texts_alone)


def caption_caches(data: StageData, embedder: Embedder) -> tuple[EmbeddingCache, EmbeddingCache]:
    """Embed the images with captions that queries may remember, and the distinct captions, sorted."""
    source = data.settings.remembered_pairs
    assert source is not None
    pairs, cache_dir = load_pairs(source), data.cache_dir
    texts, _ = flatten_captions(pairs)
    images = cached_images(embedder, pairs, cache_dir, source.max_bad_share)
    return images, cached_captions(embedder, np.unique(texts).tolist(), cache_dir)


def _new(models: StageModels, model: CompatModel) -> Embedder:
    """Return the model of the queries before any map: the trained model, or the new one that a map belongs to."""
    if model.embeds_in_memory:
        return models.as_input(models.embedder("new"))
    return Embedder.of(model, "own")


def _readable(pairs: P, *caches: EmbeddingCache) -> P:
    """Leave out items that one of the models could not read."""
    kept_N = np.all([cache.readable() for cache in caches], axis=0)
    return pairs if kept_N.all() else pairs.take(np.flatnonzero(kept_N))
