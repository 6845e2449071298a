"""Maps over cached embeddings and their training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import set_seed

from xcompat.core.distributed import from_main_process
from xcompat.embeddings.embed import EmbeddingCache
from xcompat.models import CompatModel
from xcompat.models.closed_form import readable_pairs
from xcompat.models.frozen import FrozenModel
from xcompat.training.columns import map_data
from xcompat.training.cost import SolvingCost
from xcompat.training.stage import Stage

if TYPE_CHECKING:
    from xcompat.training.training_sets import Data


def solved_map(stage: Stage, cost: Path) -> CompatModel:
    """Solve a stage's map in the first process for all, and write its cost."""
    model, new, old = _map_and_caches(stage)
    solving = SolvingCost(cost)
    solved = from_main_process(lambda: model.fit(solving.count_rows(readable_pairs(new, old))))
    solving.write(solved)
    return solved


def map_and_data(stage: Stage) -> tuple[CompatModel, Data]:
    """Return a stage's prepared map and its training embeddings."""
    model, new, old = _map_and_caches(stage)
    images = stage.images if stage.settings.data.images is not None else None
    return model, map_data(model, new, old, images, {role: stage.embed_training_data(frozen) for role, frozen in stage.sides()})


def fill_map_caches(stage: Stage, role: str) -> None:
    """Embed a map's training data with the model in a role, if needed."""
    if role == "new":
        frozen: FrozenModel = stage.with_query_prompt(stage.as_input(stage.embedder(role)))
    elif role == "old" or role in stage.method.columns_if_known:
        frozen = stage.frozen(role)
    else:
        return
    stage.embed_training_data(frozen)
    if stage.settings.memory == "classes":  # its memory has plain images
        stage.cache(frozen)


def _map_and_caches(stage: Stage) -> tuple[CompatModel, EmbeddingCache, EmbeddingCache]:
    plain, old = stage.embedder("new"), stage.frozen("old")
    described, new = stage.with_query_prompt(plain).describe_encoder(), stage.as_input(plain)
    known: dict[str, Any] = {role: frozen.describe_old() for role, frozen in stage.sides()} | stage.settings.options
    config = stage.method.config_class(encoder=described, old=old.describe_old(), embedding_dim=new.dim, **known)
    set_seed(stage.seed)
    return stage.method(config), stage.embed_training_data(stage.with_query_prompt(new)), stage.embed_training_data(old)
