"""Train a stage on the kind of data that its method learns from: embeddings, labelled images, or images with captions."""

from __future__ import annotations

from xcompat.data.schema import ID, LABELS
from xcompat.models import CompatModel
from xcompat.models.stored import StoredModel, is_stored
from xcompat.training.from_embeddings import fill_map_caches, map_and_data, solved_map
from xcompat.training.from_labels import fill_labelled_caches, labelled_model_and_data
from xcompat.training.from_pairs import fill_pair_caches, pair_model_and_data
from xcompat.training.overlap import warn_of_shared_images
from xcompat.training.stage import Stage
from xcompat.training.trainer import check_services, train, training_arguments, triplet_sampler


def train_stage(stage: Stage) -> CompatModel:
    """Build a stage's model, train or solve it, and return it."""
    settings, method = stage.settings, stage.models.method
    if settings.data.images is not None:
        warn_of_shared_images(stage.data)
    if method.is_solved:
        return solved_map(stage)
    if method.embeds_in_memory:
        model, batches = map_and_data(stage)
    elif settings.data.images is not None or LABELS in method.columns:
        model, batches = labelled_model_and_data(stage)
    else:
        model, batches = pair_model_and_data(stage)
    return train(model, batches, settings, stage.seed, stage.paths.checkpoints)


def check_inputs(stage: Stage) -> None:
    """Refuse faults of a stage that are known before any training, so that no earlier stage is trained for nothing.

    Raises:
        XcompatError: the training section does not fit, a tracker is not installed, dimensions do not fit, a class is unknown or
            without images, triplets cannot be made, or a stored old embedding is missing.
    """
    settings, method = stage.settings, stage.models.method
    if not method.is_solved:
        check_services(settings, training_arguments(settings, stage.seed, stage.paths.checkpoints))
    if (dim := stage.models.old_dim()) is not None:
        method.check_plan(dim, settings.options)
    if settings.data.images is None:
        return
    triplet_sampler(settings, stage.data.images, stage.seed)
    if settings.old is not None and is_stored(settings.old.name):
        old = StoredModel(settings.old.name)
        if old.embeds_Nd is not None:
            old.lookup(stage.data.images.dataset[ID])


def fill_caches(stage: Stage, role: str) -> None:
    """Embed the stage's training data with the model in a role, as far as its training will read them."""
    if stage.models.method.embeds_in_memory:
        fill_map_caches(stage, role)
    elif stage.settings.data.images is not None:
        fill_labelled_caches(stage, role)
    else:
        fill_pair_caches(stage, role)
