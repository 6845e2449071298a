"""Facts that a method declares for recipes, and hooks that it can override."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from xcompat.core.errors import XcompatError, require_no_problems
from xcompat.encoders.base import Encoder
from xcompat.heads import first_dims
from xcompat.models.config import Metric
from xcompat.models.old_knowledge import OldKnowledge, Rows
from xcompat.outputs import PASSAGES, Batch, CompatOutput, Views


class MethodDeclarations:
    """Declarations and hooks of a method, with their defaults. They have no state and read only the configuration."""

    config: Any
    config_class: type[PreTrainedConfig] | None

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
    embeds_in_memory: ClassVar[bool] = False
    """Whether this is a map over cached embeddings, with a separate encoder that is loaded on first use."""
    maps_galleries: bool = False
    """Whether the model maps stored old embeddings into the new space (:meth:`upgrade`), and not queries."""
    compares_by_l2: ClassVar[bool] = False
    """Whether the method supports unnormalised embeddings with L2 distance."""
    citation: ClassVar[str] = ""

    # ------------------------------------------------------------------------------------------------ checks of recipes

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

    @classmethod
    def embedding_dim_for(cls, encoder: Encoder, old: dict[str, object] | None, options: dict[str, object]) -> int:
        """Return D for an encoder; by default the encoder's dimension."""
        return encoder.embedding_dim

    @classmethod
    def _require_fitting_old(cls, old: object) -> None:
        """Raise if the old model is missing, not described or not needed."""
        if old is not None and not cls.compares_with_old:
            raise XcompatError(f"{cls.__name__} is trained without an old model and cannot search an old gallery; remove old")
        if old is None and cls.compares_with_old:
            raise XcompatError(f"{cls.__name__} needs an old model; pass old=load_embedder(NAME).describe_old()")
        if old is not None and not isinstance(old, dict):
            raise XcompatError(
                f"{cls.__name__} needs a description of the old model; pass load_embedder({str(old)!r}).describe_old()"
            )

    # --------------------------------------------------------------------------------------------------------- training

    def set_trainable(self) -> None:
        """Set ``requires_grad`` for the configuration; by default everything is trained."""

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

    # ----------------------------------------------------------------------------------------------------------- spaces

    @property
    def metric(self) -> Metric:
        """Return the embeddings' metric."""
        return getattr(self.config, "metric", "cosine")

    def apply_metric(self, embeds: Tensor) -> Tensor:
        """Return embeddings (B, D) float32, normalised unless the metric is L2."""
        return embeds.float() if self.metric == "l2" else F.normalize(embeds.float(), dim=-1)

    def _require_one_metric(self) -> None:
        """Raise if the model's metric differs from the old or mapped embeddings' metric."""
        sides = {"the old model": self.config.old, "the new model": self.config.encoder if self.embeds_in_memory else None}
        known = {side: described.get("metric", "cosine") for side, described in sides.items() if described is not None}
        if not self.compares_by_l2 and "l2" in (self.metric, *known.values()):
            which = next((side for side, metric in known.items() if metric == "l2"), "its own")
            raise XcompatError(
                f"{type(self).__name__} gives unit vectors, but the embeddings of {which} need L2 distance; "
                "set options.metric of their stage to cosine"
            )
        for side, metric in known.items():
            if metric != self.metric:
                raise XcompatError(
                    f"embeddings of {side} have the metric {metric}, but {type(self).__name__} has {self.metric}; train both "
                    "with the same options.metric"
                )

    @property
    def embed_layers(self) -> Iterable[nn.Module] | None:
        """Return the layers from the encoder's features to the embedding before normalisation.

        Each is an ``nn.Linear``, ``nn.LayerNorm`` or ``nn.GELU``. None if the model is not a sequence of such layers.
        """
        return ()

    @property
    def stores_view(self) -> bool:
        """Return whether galleries store embeddings in the old space, so that a chain of updates shares it."""
        return bool(self.config.versions) and not self.maps_galleries

    def to_old_space(self, embeds: Tensor) -> Tensor:
        """Convert own embeddings (B, D) to the old model's space (B, d); by default their first d dimensions, normalised."""
        assert self.config.old is not None
        return self.apply_metric(embeds[:, : self.config.old["dim"]])

    @property
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        """Return the layers for :meth:`to_space_without_memory`, without normalisation."""
        assert self.config.old is not None
        dims = self.config.embedding_dim, self.config.old["dim"]
        return () if dims[0] == dims[1] else (first_dims(*dims),)

    def self_view(self, embeds: Tensor) -> Tensor:
        """Convert own embeddings for comparison among themselves (new/new); by default unchanged."""
        return embeds

    def own_upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings (B, d) to (B, D) without the memory; unchanged unless the method maps galleries."""
        return old_embeds

    @property
    def reads_side_info(self) -> bool:
        """Return whether a gallery map needs side-information."""
        return False

    @property
    def writes_side_info(self) -> bool:
        """Return whether a gallery map also maps side-information for the next update (:meth:`upgrade_side`)."""
        return False

    def upgrade_side(self, old_embeds: Tensor, side_info: Tensor) -> Tensor:
        """Map stored side-information to the new model's, if :attr:`writes_side_info`.

        Args:
            old_embeds: (B, d) stored embeddings.
            side_info: (B, S) stored side-information.

        Returns:
            (B, S') float32, L2-normalised.

        Raises:
            XcompatError: this model does not map side-information.
        """
        raise XcompatError("this model does not map side-information: train it with new_side_info")

    @classmethod
    def _require_embeddings(cls, embeds: Tensor, what: str, dim: int) -> None:
        """Raise if embeddings have a wrong type or shape."""
        name = cls.__name__
        if not isinstance(embeds, Tensor):
            fix = "torch.from_numpy(...)" if type(embeds).__module__ == "numpy" else "torch.tensor(...)"
            raise XcompatError(f"{name} takes embeddings as a torch tensor (B, {dim}), not {type(embeds).__name__}; use {fix}")
        if embeds.ndim != 2 or embeds.shape[1] != dim:
            raise XcompatError(f"{name} takes {what} (B, {dim}), not {tuple(embeds.shape)}")
