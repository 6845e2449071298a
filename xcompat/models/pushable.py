"""Pushing compatible models to the Hub with a model card."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

from xcompat.core.distributed import is_main_process
from xcompat.hub.card import ModelFacts
from xcompat.hub.endpoint import replace_by_hub_name
from xcompat.hub.push import push_model
from xcompat.models.trainable_model import LearningModel

_PUSH_ARGUMENTS = (
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


class PushableModel(LearningModel):
    """Base class for the Hub methods of :class:`~xcompat.models.base.CompatModel`."""

    @property
    @abstractmethod
    def embeds_texts(self) -> bool:
        """Return whether the model embeds texts."""

    @property
    @abstractmethod
    def embeds_images(self) -> bool:
        """Return whether the model embeds images."""

    def facts(self) -> ModelFacts:
        """Return the facts for the model card."""
        config = self.config
        described, old = config.encoder, config.old
        versions = [] if old is None else [old, *(old.get("compatible_with") or [])]
        return ModelFacts(
            method=config.model_type.removeprefix("xcompat-"),
            citation=self.citation,
            fingerprint=self.written_fingerprint() if described is not None else None,
            dim=config.embedding_dim,
            compatible_with=[replace_by_hub_name(version) for version in versions],
            base=replace_by_hub_name(described) if described is not None else None,
            holds="map" if self.encoder is None else config.weights,
            embeds_texts=self.embeds_texts,
            embeds_images=self.embeds_images,
            maps_galleries=self.maps_galleries,
            side_info=getattr(config, "side_info", None),
            remembers=config.memory["entries"] if config.memory is not None else None,
            embeds=[each.digest for each in self.saved_embedding_fingerprints()],
            started_from=replace_by_hub_name(config.started_from) if config.started_from is not None else None,
        )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,  # noqa: ANN401 - transformers' own
        push_to_hub: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Write the model (:meth:`CheckpointModel.save_pretrained`), and optionally push it.

        Args:
            save_directory: output folder for ``from_pretrained``, created if missing.
            args: as in transformers.
            push_to_hub: whether to push the model, by default under the folder's name (``repo_id``).
            kwargs: as in transformers and :meth:`push_to_hub`.
        """
        of_push = {key: kwargs.pop(key) for key in _PUSH_ARGUMENTS if push_to_hub and key in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub and is_main_process():
            self.push_to_hub(of_push.pop("repo_id", Path(save_directory).name), token=kwargs.get("token"), **of_push)

    def push_to_hub(  # type: ignore[override]  # transformers' own takes anything
        self,
        repo_id: str,
        *,
        overwrite: bool = False,
        private: bool | None = None,
        license: str | None = None,  # noqa: A002 - the Hub's word
        tags: str | list[str] | None = None,
        max_shard_size: int | str = "50GB",
        **kwargs: Any,  # noqa: ANN401 - the Hub's own
    ) -> str:
        """Push the model with its preprocessing and a card, and return the commit's address.

        Args:
            repo_id: ``user/name``.
            overwrite: whether to replace another model.
            private: whether the repository is private; by default only if the base is gated or private.
            license: license on the card.
            tags: additional card tags.
            max_shard_size: maximum size of a weight file.
            kwargs: as in transformers, e.g. ``revision``, ``token`` and ``commit_message``.

        Raises:
            XcompatError: the repository contains another model or has another visibility, or the Hub refuses or cannot be
                reached.
        """
        return push_model(
            repo_id,
            self.facts(),
            self.config.to_dict(),
            partial(self.save_pretrained, max_shard_size=max_shard_size),
            overwrite=overwrite,
            private=private,
            license=license,
            tags=[tags] if isinstance(tags, str) else tags or [],
            **kwargs,
        )
