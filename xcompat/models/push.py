"""Preparation of compatible models for the Hub."""

from __future__ import annotations

from functools import partial
from typing import Any

from xcompat.hub.card import ModelFacts
from xcompat.hub.endpoint import replace_by_hub_name
from xcompat.hub.push import PushedModel
from xcompat.models.config import described_versions

PUSH_ARGUMENTS = (
    "repo_id",
    "commit_message",
    "commit_description",
    "create_pr",
    "private",
    "revision",
    "overwrite",
    "license",
    "tags",
)
"""Arguments of ``save_pretrained(push_to_hub=True)`` for the push."""


def prepare_push(model: Any, max_shard_size: int | str = "50GB") -> PushedModel:  # noqa: ANN401 - a CompatModel
    """Return a model's facts, configuration and files, with weight files up to a size."""
    return PushedModel(model_facts(model), model.config.to_dict(), partial(model.save_pretrained, max_shard_size=max_shard_size))


def model_facts(model: Any) -> ModelFacts:  # noqa: ANN401 - a CompatModel, which imports this module
    """Return the facts for a model's card."""
    config = model.config
    described, embeds = config.encoder, []
    if model.embeds_in_memory:
        embeds = [described["fingerprint"]] if described is not None else []
    else:
        written = model.written_lineage
        embeds = list(dict.fromkeys(version.fingerprint.digest for version in (written.embeds, written.stores)))
    return ModelFacts(
        method=config.model_type.removeprefix("xcompat-"),
        citation=model.citation,
        fingerprint=model.written_lineage.model if described is not None else None,
        dim=config.embedding_dim,
        compatible_with=[replace_by_hub_name(version) for version in described_versions(config.old)],
        base=replace_by_hub_name(described) if described is not None else None,
        holds="map" if model.encoder is None else config.weights,
        embeds_texts=model.embeds_texts,
        embeds_images=model.embeds_images,
        maps_galleries=model.maps_galleries,
        side_info=getattr(config, "side_info", None),
        remembers=config.memory["entries"] if config.memory is not None else None,
        embeds=embeds,
        started_from=replace_by_hub_name(config.started_from) if config.started_from is not None else None,
    )
