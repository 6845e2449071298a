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
from xcompat.training.cost import FILE as COST
from xcompat.training.from_embeddings import fill_map_caches, map_and_data, solved_map
from xcompat.training.from_labels import fill_labelled_caches, labelled_model_and_data
from xcompat.training.from_pairs import fill_pair_caches, pair_model_and_data
from xcompat.training.overlap import warn_of_shared_images
from xcompat.training.sharding import syncs_batch_norms
from xcompat.training.stage import STORED_ROLES, Stage
from xcompat.training.stored_models import is_stored, load_stored
from xcompat.training.trainer import check_services, check_size, train, training_arguments
from xcompat.training.training_sets import triplet_sampler


def train_stage(stage: Stage, checkpoints: Path) -> CompatModel:
    """Build, and train or solve, a stage's model."""
    if stage.settings.data.images is not None:
        warn_of_shared_images(stage)
    if stage.method.is_solved:
        return solved_map(stage, checkpoints.with_name(COST))
    if stage.method.embeds_in_memory:
        build = map_and_data
    elif stage.settings.trains_on_labelled:
        build = labelled_model_and_data
    else:
        build = pair_model_and_data
    return train(*build(stage), stage.settings, stage.seed, checkpoints)


def check_inputs(stage: Stage, checkpoints: Path) -> None:
    """Raise for errors known before training.

    Raises:
        XcompatError: settings, dimensions, classes or triplets do not fit, or a tracker or stored embedding is missing.
    """
    if not stage.method.is_solved:
        arguments = training_arguments(stage.settings, stage.seed, checkpoints)
        check_services(stage.settings, arguments)
        syncs_batch_norms(stage.method, stage.settings.sync_batch_norm, arguments.world_size, arguments.device)
        if stage.settings.is_trained:
            _check_size(stage, arguments)
    if (dim := stage.old_dim()) is not None:
        stage.method.check_plan(dim, stage.settings.options)
    if stage.settings.data.images is None:
        return
    for role in STORED_ROLES if stage.settings.views(stage.seed) else ():
        if (source := getattr(stage.settings, role)) is not None and is_stored(source.name):
            raise XcompatError(
                f"{stage.settings.name}: {source.name} contains embeddings of plain images, but data.views needs a model; set "
                f"{role} to the model, or remove data.views"
            )
    if stage.settings.old is not None and is_stored(stage.settings.old.name):
        old = load_stored(stage.settings.old)
        if old.embeds_Nd is not None:
            old.lookup(stage.images.dataset[ID])


def _check_size(stage: Stage, arguments: TrainingArguments) -> None:
    """Raise if the data, as far as countable now, cannot fill a batch."""
    if stage.settings.data.images is not None:
        sampler = triplet_sampler(stage.settings, stage.images, stage.seed)
        check_size(len(stage.images) * max(1, stage.settings.data.views) if sampler is None else len(sampler), arguments)
    source = stage.settings.data.text_pairs or stage.settings.data.pairs
    if not stage.settings.trains_on_captions or source is None:
        return
    if isinstance(source, PairSource) and source.streaming:
        check_size(None, arguments)
    elif local_files(source.path) is not None:
        pairs = load_pairs(source) if isinstance(source, PairSource) else stage.text_pairs
        assert pairs is not None, "a source was named"
        check_size(len(rows_of_ids(pairs) if stage.settings.data.one_per_id else pairs), arguments)


def fill_caches(stage: Stage, role: str) -> None:
    """Embed training data with the model in a role, if needed."""
    if stage.method.embeds_in_memory:
        fill_map_caches(stage, role)
    elif stage.settings.data.images is not None:
        fill_labelled_caches(stage, role)
    else:
        fill_pair_caches(stage, role)
