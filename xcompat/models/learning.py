"""What a method learns from and how: its columns, its loss, and what a recipe asks of it before training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from xcompat.core.errors import XcompatError
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
"""Columns of a batch of texts that search texts; those that stand in place of ``pixel_values``."""


class LearningModel(SpacesModel):
    """A model that can be trained: a method says in ``columns`` what it learns from, and writes ``loss``."""

    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # the Trainer asks: a loss is the mean over its batch, which accumulated steps divide

    columns: ClassVar[tuple[str, ...]] = ()
    """Batch columns the loss needs."""
    columns_if_known: ClassVar[tuple[str, ...]] = ()
    """Batch columns that change the loss where the data have them."""
    embedded: tuple[str, ...] = ("pixel_values", "input_ids")
    """Batch columns that are embedded; the others are what embeddings are compared with."""
    loss_of_embeddings: ClassVar[bool] = False
    """Whether the loss reads images and texts by their embeddings alone, so that ``mini_batch_size`` works."""
    starts_from_projection: ClassVar[bool] = False
    """True when φ must come from a pretrained :class:`~xcompat.methods.ProjectionModel`."""
    is_solved: ClassVar[bool] = False
    """True for a map in closed form, which no step trains."""
    learns_classes: ClassVar[bool] = False
    """True for a method that classifies, and is told the names of the classes."""
    compares_with_old: ClassVar[bool] = True
    """False for a method that makes no promise about old galleries."""
    citation: ClassVar[str] = ""

    progress: float = 0.0
    """How far training is, in [0, 1), set before every step, for losses that follow a schedule."""
    refresh_at: Sequence[float] = ()
    """Shares of training after which :meth:`refresh` is called."""

    # -------------------------------------------------------------------------------- what a recipe asks of a method

    @classmethod
    def maps_galleries_with(cls, options: Mapping[str, Any]) -> bool:
        """Return whether a model with these options maps galleries, and leaves queries as they are."""
        return cls.maps_galleries

    @classmethod
    def maps_features(cls, options: Mapping[str, Any]) -> bool:
        """Return whether a map with these options reads penultimate features of the new model, not its embeddings."""
        return False

    @classmethod
    def balances_batches(cls, options: Mapping[str, Any]) -> bool:
        """Return whether a batch must hold equally many samples of each of its classes."""
        return False

    @classmethod
    def reads_logit_scale(cls, options: Mapping[str, Any], on_captions: bool) -> bool:
        """Return whether the loss of a model with these options multiplies cosines by ``logit_scale``.

        Args:
            options: the method's configuration.
            on_captions: whether it will learn from captions or texts.
        """
        return False

    @classmethod
    def trains_encoder(cls, options: Mapping[str, Any]) -> bool:
        """Return whether the encoder's own weights, beside adapters, are trained with these options."""
        return not cls.embeds_in_memory

    @classmethod
    def unread_options(cls, options: Mapping[str, Any], on_captions: bool) -> Iterator[tuple[str, str]]:
        """Yield the options that a model would not read beside the others, each with the reason.

        A weight of 0 is no such case: it says itself that its term of the loss, and all that belongs to it, is left out.

        Args:
            options: the method's whole configuration, with the usual values of what is not given.
            on_captions: whether it will learn from captions or texts.
        """
        if cls.embeds_in_memory:
            yield "adapters", f"{cls.__name__} is a map of embeddings, and the encoder that makes them stays as it is"
        if not cls.reads_logit_scale(options, on_captions):
            yield "logit_scale", f"the loss of {cls.__name__} does not read it here"

    @classmethod
    def refuse_unread(cls, options: Mapping[str, Any], on_captions: bool) -> None:
        """Refuse options that a model which is to be made would not read, and such as exclude each other.

        Args:
            options: the method's configuration.
            on_captions: whether it will learn from captions or texts.

        Raises:
            XcompatError: naming the option.
        """
        assert cls.config_class is not None
        usual: Any = cls.config_class()
        whole = {field.name: getattr(usual, field.name) for field in fields(usual)} | dict(options)
        for name, why in cls.unread_options(whole, on_captions):
            if whole[name] != getattr(usual, name):
                raise XcompatError(f"options.{name}: {why}; leave {name} out")

    @classmethod
    def planned_dim(cls, usual: int | None, options: Mapping[str, Any]) -> int | None:
        """Return D of a model that is to be made, where that does not depend on its encoder.

        Args:
            usual: the old model's dimension; None without one.
            options: the method's configuration.
        """
        return None

    @classmethod
    def check_plan(cls, old_dim: int, options: Mapping[str, Any]) -> None:
        """Refuse dimensions that cannot be, before there is an encoder or an old model.

        Args:
            old_dim: d, which the old model will have.
            options: the method's configuration.

        Raises:
            XcompatError: naming what does not fit.
        """

    # -------------------------------------------------------------------------------------------------------- learning

    @property
    def views(self) -> Views:
        """Return what the loss reads of each image: unless a method says otherwise, one augmented view."""
        return Views()

    def prepare(self, old: OldKnowledge, new_ND: Rows | None = None) -> None:
        """Take what is known of the old model on the training set, before training begins.

        Args:
            old: embeddings, prototypes and classifier of the old model, as far as they are known.
            new_ND: embeddings of the new model, for maps over them.
        """

    def extra_columns(self, old: OldKnowledge) -> dict[str, NDArray[Any]]:
        """Return columns that the method alone reads, by name, a row for each training image.

        Args:
            old: as :meth:`prepare` takes it.
        """
        return {}

    def start_from(self, projection: nn.Module) -> None:
        """Take the weights of a pretrained φ, where :attr:`starts_from_projection`."""
        raise TypeError(f"{type(self).__name__} starts from no projection")

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """Solve for the map, where :attr:`is_solved`.

        Args:
            batches: pairs of new (B, D) and old (B, d) embeddings of the same samples, L2-normalised.

        Returns:
            The model itself.
        """
        raise TypeError(f"{type(self).__name__} is trained, not solved")

    def refresh(self, new_ND: NDArray[np.float32]) -> None:
        """Take what the model, as far as it is trained, now says of the training set.

        Args:
            new_ND: its own embeddings of the training images, in evaluation mode and without augmentation; a row of NaN is an
                unreadable image.
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
        """Embed a batch, and compute the method's loss of it.

        Args:
            pixel_values: (B, C, H, W) float32 from ``processor.images``.
            input_ids: (B, L) int64 from ``processor.texts``.
            attention_mask: (B, L) int64; None for models that read their padding.
            labels: (B,) int64 classes in [0, C).
            old_embeds: (B, d) embeddings of the old model, L2-normalised.
            new_embeds: (B, D) embeddings of the new model: of one that was trained independently, or what a map maps.
            return_loss: whether to compute the loss; None computes it unless the batch holds no more than what is embedded.
            others: the other ones of ``columns`` and ``columns_if_known``.

        Returns:
            The embeddings, and the loss.

        Raises:
            XcompatError: the batch lacks a column.
        """
        if unknown := others.keys() - {*self.columns, *self.columns_if_known}:
            raise TypeError(f"{type(self).__name__} reads no column {', '.join(sorted(unknown))}")
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
        wanted = self._learns_from(batch) if return_loss is None else return_loss
        if wanted:
            self.require_columns(batch, self.columns_of(batch))
        has_no_source = self.embeds_in_memory and batch.keys().isdisjoint(self.embedded)  # pictures and texts, given to a map
        output = self.embed_inputs(batch) if has_no_source else self.embed_batch(batch)
        if wanted:
            output.loss = self.loss(output, batch)
        return output

    @abstractmethod
    def embed_batch(self, batch: Batch) -> CompatOutput:
        """Embed what a batch holds.

        Args:
            batch: its columns, of which those in ``embedded`` are read.

        Returns:
            The embeddings, without a loss.

        Raises:
            XcompatError: there is nothing to embed.
        """

    @abstractmethod
    def embed_inputs(self, batch: Batch) -> CompatOutput:
        """Embed images and texts as a new gallery stores them.

        Args:
            batch: ``pixel_values``, ``input_ids`` and ``attention_mask``, as far as there are any.

        Returns:
            The embeddings.

        Raises:
            XcompatError: there is nothing to embed.
        """

    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        """Compute the loss of a batch.

        Args:
            output: what :meth:`embed_batch` made of it.
            batch: its columns, all of ``columns`` among them.

        Returns:
            Scalar.
        """
        raise TypeError(f"{type(self).__name__} is not trained")

    def columns_of(self, batch: Batch) -> list[str]:
        """Return the columns that the loss of a batch needs: passages in place of images, if the batch holds passages."""
        passages = PASSAGES[0]
        return [passages if name == "pixel_values" and passages in batch else name for name in self.columns]

    def require_columns(self, batch: Batch, names: Iterable[str]) -> None:
        """Refuse a batch that lacks columns.

        Args:
            batch: its columns.
            names: those that are needed.

        Raises:
            XcompatError: naming the class and the columns that are missing.
        """
        if missing := [name for name in names if name not in batch]:
            raise XcompatError(
                f"{type(self).__name__} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)} in the batch"
            )

    def _learns_from(self, batch: Batch) -> bool:
        """Return whether a batch holds more than what is embedded, or all that a model under training reads."""
        read = set(self.columns) & batch.keys()
        return not read <= set(self.embedded) or (len(read) == len(self.columns) and getattr(self.config, "for_training", True))
