"""Training interface for methods: columns, losses, and recipe checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from xcompat.core.errors import XcompatError, require_no_problems
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.models.spaces import SpacesModel
from xcompat.outputs import Batch, CompatOutput, Views

PASSAGES = (
    "passage_input_ids",
    "passage_attention_mask",
    "passage_ids",
    "negative_input_ids",
    "negative_attention_mask",
    "negative_ids",
)
"""Batch columns of searched texts, which replace ``pixel_values``."""


class LearningModel(SpacesModel):
    """Trainable model. A method sets its input columns in ``columns`` and implements ``loss``."""

    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # for the Trainer: losses are batch means, divided by the accumulated steps

    columns: ClassVar[tuple[str, ...]] = ()
    """Required batch columns of the loss."""
    columns_if_known: ClassVar[tuple[str, ...]] = ()
    """Optional batch columns of the loss."""
    embedded: tuple[str, ...] = ("pixel_values", "input_ids")
    """Batch columns to embed; the others are targets."""
    loss_of_embeddings: ClassVar[bool] = False
    """Whether the loss reads only embeddings of images and texts, so that ``mini_batch_size`` works."""
    syncs_batch_norm: ClassVar[bool] = False
    """Default of ``sync_batch_norm``: whether batch norms of all GPUs share their statistics."""
    starts_from_projection: ClassVar[bool] = False
    """Whether φ must come from a pretrained :class:`~xcompat.methods.ProjectionModel`."""
    is_solved: ClassVar[bool] = False
    """Whether the map has a closed form, without training steps."""
    learns_classes: ClassVar[bool] = False
    """Whether the method classifies and needs class names."""
    compares_with_old: ClassVar[bool] = True
    """Whether the model is compatible with old galleries."""
    citation: ClassVar[str] = ""

    progress: float = 0.0
    """Training progress in [0, 1), set before every step, for losses with a schedule."""
    refresh_at: Sequence[float] = ()
    """Progress values for calls of :meth:`refresh`."""

    # -------------------------------------------------------------------------------- checks of recipes

    @classmethod
    def maps_galleries_with(cls, options: Mapping[str, object]) -> bool:
        """Return whether a model with these options maps galleries instead of queries."""
        return cls.maps_galleries

    @classmethod
    def maps_features(cls, options: Mapping[str, object]) -> bool:
        """Return whether a map with these options reads penultimate features instead of embeddings."""
        return False

    @classmethod
    def balances_batches(cls, options: Mapping[str, object]) -> bool:
        """Return whether batches need equally many samples per class."""
        return False

    @classmethod
    def reads_logit_scale(cls, options: Mapping[str, object], on_captions: bool) -> bool:
        """Return whether the loss multiplies cosines by ``logit_scale``.

        Args:
            options: the method's configuration.
            on_captions: whether training uses captions or texts.
        """
        return False

    @classmethod
    def trains_encoder(cls, options: Mapping[str, object]) -> bool:
        """Return whether training changes the encoder's own weights."""
        return not cls.embeds_in_memory

    @classmethod
    def unread_options(cls, options: Mapping[str, object], on_captions: bool) -> Iterator[tuple[str, str]]:
        """Yield the options without effect beside the others, each with the reason.

        A weight of 0 is not such a case: it switches off its loss term on purpose.

        Args:
            options: the method's complete configuration, including defaults.
            on_captions: whether training uses captions or texts.
        """
        if cls.embeds_in_memory:
            yield "adapters", f"{cls.__name__} is a map of embeddings and does not change the encoder"
        if not cls.reads_logit_scale(options, on_captions):
            yield "logit_scale", f"the loss of {cls.__name__} does not use it here"

    @classmethod
    def refuse_unread(cls, options: Mapping[str, object], on_captions: bool) -> None:
        """Raise for options without effect, and for options that exclude each other.

        Args:
            options: the method's configuration.
            on_captions: whether training uses captions or texts.
        """
        assert cls.config_class is not None
        usual: Any = cls.config_class()
        whole = {field.name: getattr(usual, field.name) for field in fields(usual)} | dict(options)
        unread: dict[str, str] = {}
        for name, why in cls.unread_options(whole, on_captions):
            if whole[name] != getattr(usual, name):
                unread.setdefault(name, why)
        require_no_problems(f"options.{name}: {why}; remove {name}" for name, why in unread.items())

    @classmethod
    def planned_dim(cls, usual: int | None, options: Mapping[str, object]) -> int | None:
        """Return a planned model's D; None if it depends on the encoder.

        Args:
            usual: the old model's dimension, if any.
            options: the method's configuration.
        """
        return None

    @classmethod
    def check_plan(cls, old_dim: int, options: Mapping[str, object]) -> None:
        """Raise if dimensions are impossible, before an encoder or old model exists.

        Args:
            old_dim: d, the planned old model's dimension.
            options: the method's configuration.
        """

    # -------------------------------------------------------------------------------------------------------- learning

    @property
    def views(self) -> Views:
        """Return the loss's image views; by default one augmented view."""
        return Views()

    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Read the old model's knowledge of the training set, before training.

        Args:
            old: the old model's known embeddings, prototypes and classifier.
            new_ND: the new model's embeddings, for maps.
        """

    def extra_columns(self, old: OldKnowledge) -> dict[str, NDArray[np.number]]:
        """Return the method's additional columns by name, with a row per training image.

        Args:
            old: as in :meth:`prepare`.
        """
        return {}

    def start_from(self, projection: nn.Module) -> None:
        """Copy the weights of a pretrained φ, if :attr:`starts_from_projection`."""
        raise TypeError(f"{type(self).__name__} starts from no projection")

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Solve for the map, if :attr:`is_solved`, and return the model.

        Args:
            batches: pairs of new (B, D) and old (B, d) embeddings for the same samples, L2-normalised.
        """
        raise TypeError(f"{type(self).__name__} is trained, not solved")

    def refresh(self, new_ND: NDArray[np.float32]) -> None:
        """Use the partly trained model's embeddings of the training set.

        Args:
            new_ND: embeddings in evaluation mode, without augmentation; NaN rows are unreadable images.
        """

    def forward(
        self,
        pixel_values: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        old_embeds: Tensor | None = None,
        new_embeds: Tensor | None = None,
        return_loss: bool | None = None,
        **others: Tensor | None,
    ) -> CompatOutput:
        """Embed a batch and compute the method's loss.

        Args:
            pixel_values: (B, C, H, W) float32 from ``processor.images``.
            input_ids: (B, L) int64 from ``processor.texts``.
            attention_mask: (B, L) int64; None for models that read their padding.
            labels: (B,) int64 classes in [0, C).
            old_embeds: (B, d) the old model's embeddings, L2-normalised.
            new_embeds: (B, D) the new model's embeddings: independently trained, or a map's input.
            return_loss: whether to compute the loss; by default unless the batch contains only columns to embed.
            others: other columns in ``columns`` and ``columns_if_known``.

        Returns:
            The embeddings and the loss.

        Raises:
            XcompatError: the batch lacks a column.
        """
        if unknown := others.keys() - {*self.columns, *self.columns_if_known}:
            raise TypeError(f"{type(self).__name__} has no column {', '.join(sorted(unknown))}; remove it from the batch")
        given = {
            "pixel_values": pixel_values,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "old_embeds": old_embeds,
            "new_embeds": new_embeds,
            **others,
        }
        batch = {name: column for name, column in given.items() if column is not None}
        wanted = self._needs_loss(batch) if return_loss is None else return_loss
        if wanted:
            self.require_columns(batch, self.required_columns(batch))
        # images or texts for a map; torch.compile cannot trace isdisjoint of keys
        has_no_source = self.embeds_in_memory and not any(name in batch for name in self.embedded)
        output = self.embed_inputs(batch) if has_no_source else self.embed_batch(batch)
        if wanted:
            output.loss = self.loss(output, batch)
        return output

    @abstractmethod
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Embed a batch's columns in ``embedded``, without a loss.

        Raises:
            XcompatError: there is nothing to embed.
        """

    @abstractmethod
    def embed_inputs(self, batch: Batch) -> CompatOutput:
        """Embed images and texts (``pixel_values``, ``input_ids``, ``attention_mask``) for a new gallery.

        Raises:
            XcompatError: there is nothing to embed.
        """

    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Return a batch's loss, a scalar.

        Args:
            output: output of :meth:`embed_batch`.
            batch: columns, including all in ``columns``.
        """
        raise TypeError(f"{type(self).__name__} is not trained")

    def required_columns(self, batch: Batch) -> list[str]:
        """Return a batch's required columns: passages instead of images if it contains passages."""
        passages = PASSAGES[0]
        return [passages if name == "pixel_values" and passages in batch else name for name in self.columns]

    def require_columns(self, batch: Batch, names: Iterable[str]) -> None:
        """Raise if a batch lacks columns, with their names."""
        if missing := [name for name in names if name not in batch]:
            raise XcompatError(
                f"{type(self).__name__} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)} in the batch"
            )

    def _needs_loss(self, batch: Batch) -> bool:
        """Return whether to compute the loss: the batch contains targets, or all columns for a model in training."""
        read = set(self.columns) & batch.keys()
        return not read <= set(self.embedded) or (len(read) == len(self.columns) and getattr(self.config, "for_training", True))
