"""Training for a stage on any kind of data."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments

from xcompat.core.errors import XcompatError
from xcompat.data import PairSource, load_pairs
from xcompat.data.pairs import rows_of_ids
from xcompat.data.schema import ID
from xcompat.data.sources import local_files
from xcompat.models import CompatModel
from xcompat.models.stored import StoredModel
from xcompat.training.cost import FILE as COST
from xcompat.training.from_embeddings import fill_map_caches, map_and_data, solved_map
from xcompat.training.from_labels import fill_labelled_caches, labelled_model_and_data
from xcompat.training.from_pairs import fill_pair_caches, pair_model_and_data
from xcompat.training.overlap import warn_of_shared_images
from xcompat.training.stage import STORED_ROLES, StageData, StageModels
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import check_services, check_size, train, training_arguments
from xcompat.training.training_sets import triplet_sampler
from xcompat.vectors.formats import is_stored


def train_stage(settings: StageRecipe, models: StageModels, data: StageData, seed: int, checkpoints: Path) -> CompatModel:
    """Build, and train or solve, a stage's model."""
    if settings.data.images is not None:
        warn_of_shared_images(data)
    if models.method.is_solved:
        return solved_map(settings, models, data, seed, checkpoints.with_name(COST))
    if models.method.embeds_in_memory:
        build = map_and_data
    elif settings.trains_on_labelled:
        build = labelled_model_and_data
    else:
        build = pair_model_and_data
    return train(*build(settings, models, data, seed), settings, seed, checkpoints)


def check_inputs(settings: StageRecipe, models: StageModels, data: StageData, seed: int, checkpoints: Path) -> None:
    """Raise for errors known before training.

    Raises:
        XcompatError: settings, dimensions, classes or triplets do not fit, or a tracker or stored embedding is missing.
    """
    if not models.method.is_solved:
        arguments = training_arguments(settings, seed, checkpoints)
        check_services(settings, arguments)
        if settings.is_trained:
            _check_size(settings, models, data, seed, arguments)
    if (dim := models.old_dim()) is not None:
        models.method.check_plan(dim, settings.options)
    if settings.data.images is None:
        return
    for role in STORED_ROLES if settings.views(seed) else ():
        if (source := getattr(settings, role)) is not None and is_stored(source.name):
            raise XcompatError(
                f"{settings.name}: {source.name} contains embeddings of plain images, but data.views needs a model; set "
                f"{role} to the model, or remove data.views"
            )
    if settings.old is not None and is_stored(settings.old.name):
        old = StoredModel(settings.old.name)
        if old.embeds_Nd is not None:
            old.lookup(data.images.dataset[ID])


def _check_size(settings: StageRecipe, models: StageModels, data: StageData, seed: int, arguments: TrainingArguments) -> None:
    """Raise if the data, as far as countable now, cannot fill a batch."""
    if settings.data.images is not None:
        sampler = triplet_sampler(settings, data.images, seed)
        check_size(len(data.images) * max(1, settings.data.views) if sampler is None else len(sampler), arguments)
    source = settings.data.text_pairs or settings.data.pairs
    if not settings.trains_on_captions or source is None:
        return
    if isinstance(source, PairSource) and source.streaming:
        check_size(None, arguments)
    elif local_files(source.path) is not None:
        pairs = load_pairs(source) if isinstance(source, PairSource) else data.text_pairs
        assert pairs is not None, "a source was named"
        check_size(len(rows_of_ids(pairs) if settings.data.one_per_id else pairs), arguments)


def fill_caches(settings: StageRecipe, models: StageModels, data: StageData, role: str) -> None:
    """Embed training data with the model in a role, if needed."""
    if models.method.embeds_in_memory:
        fill_map_caches(models, data, role)
    elif settings.data.images is not None:
        fill_labelled_caches(models, data, role)
    else:
        fill_pair_caches(models, data, role)
