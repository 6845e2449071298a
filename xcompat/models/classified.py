"""Base class for image methods with a backbone, a projection and a classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field
from torch import Tensor
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders import EncoderSource
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.losses.classification import (
    USUAL_TRIPLET_MARGIN,
    ClassificationHead,
    HeadKind,
    batch_hard_triplet_loss,
    numbers_of_head,
)
from xcompat.models.backbone import BackboneConfig, BackboneModel
from xcompat.models.config import describe_old
from xcompat.models.frozen import load_frozen
from xcompat.outputs import Batch, CompatOutput


class ClassifiedConfig(BackboneConfig):
    """Configuration of :class:`ClassifiedModel`.

    Args:
        classes: names of the C classes in label order; None for no classifier.
        extra_dim: e, number of dimensions to append to the old space.
        head: feature classifier.
        head_scale: s, factor on cosines; None for the head's default.
        head_margin: m in ArcFace and CosFace; None for the default.
        keeps_classifier: whether a finished model has a feature classifier, even if training classifies other inputs.
        triplet_weight: weight of batch-hard triplets, added to the classification loss as in re-identification; batches then
            contain equally many images per class.
        triplet_margin: these triplets' margin, a distance between unit vectors; None for 0.3.
    """

    classes: list[str] | None = None
    extra_dim: int = 0
    head: HeadKind = "softmax"
    head_scale: Annotated[float, Field(gt=0)] | None = None
    head_margin: Annotated[float, Field(ge=0)] | None = None
    keeps_classifier: bool = False
    triplet_weight: float = 0.0
    triplet_margin: Annotated[float, Field(ge=0)] | None = None


class ClassifiedModel(BackboneModel):
    """:class:`BackboneModel` with a classifier; the features' first d dimensions are the old space."""

    config_class = ClassifiedConfig
    columns: ClassVar[tuple[str, ...]] = ("pixel_values", "labels")
    learns_classes = True

    def __init__(self, config: ClassifiedConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.classifier: ClassificationHead | None = None
        if config.triplet_weight < 0:
            raise XcompatError(f"options.triplet_weight is {config.triplet_weight:g}; set 0 or more")
        if config.classes and ("classifier" not in self.only_for_training or config.keeps_classifier):
            self.classifier = self._head(config.embedding_dim)
        if config.for_training:
            self.build_for_training()
        self.post_init()

    @classmethod
    def _check_dims(cls, config: BackboneConfig) -> None:
        super()._check_dims(config)
        dim, extra = config.embedding_dim, config.extra_dim
        if extra < 0:
            raise XcompatError(f"options.extra_dim is {extra}; set 0 or more")
        if cls.compares_with_old and config.old is not None and dim < config.old["dim"]:
            raise XcompatError(
                f"new embeddings need at least the {config.old['dim']} dimensions of the old ones, but options.dim and "
                f"options.extra_dim give {dim}; increase them, or remove dim"
            )

    @classmethod
    @override
    def from_encoder(
        cls,
        encoder: str | EncoderSource | tuple[Encoder, Processor],
        old: dict[str, object] | str | EncoderSource | None = None,
        **options: object,
    ) -> Self:
        """Start a method from a backbone.

        Args:
            encoder: name, folder, source, or a loaded encoder and its processor.
            old: the old model: a name, a folder with a model, stored embeddings or prototypes, or ``describe_old()``.
            options: the method's configuration; ``classes`` default to the old model's.

        Returns:
            The model in float32, in evaluation mode.
        """
        if isinstance(old, str | EncoderSource):
            frozen = load_frozen(old)
            options = {"classes": frozen.classes or None} | options
            old = frozen.describe_old()
        return super().from_encoder(encoder, old, **options)

    @classmethod
    def embedding_dim_for(cls, encoder: Encoder, old: dict[str, Any] | None, options: dict[str, Any]) -> int:
        """Return ``dim`` (by default the old model's dimension, or the backbone's width) plus ``extra_dim``."""
        dim = cls.planned_dim(old["dim"] if old is not None and cls.compares_with_old else encoder.embedding_dim, options)
        assert dim is not None
        return dim

    @classmethod
    @override
    def planned_dim(cls, usual: int | None, options: Mapping[str, Any]) -> int | None:
        base = options["dim"] if options.get("dim") is not None else usual
        return int(base + options.get("extra_dim", cls.config_class.extra_dim)) if base is not None else None

    @classmethod
    @override
    def check_plan(cls, old_dim: int, options: Mapping[str, Any]) -> None:
        if cls.compares_with_old:
            old = describe_old(Fingerprint.from_string("planned"), old_dim)
            dim = cls.planned_dim(old_dim, options)
            assert dim is not None
            cls._check_dims(cls.config_class(old=old, embedding_dim=dim, **options))

    @classmethod
    @override
    def balances_batches(cls, options: Mapping[str, object]) -> bool:
        """Return whether the loss uses triplets."""
        return options.get("head") == "triplet" or bool(options.get("triplet_weight"))

    @classmethod
    @override
    def unread_options(cls, options: Mapping[str, Any], on_captions: bool) -> Iterator[tuple[str, str]]:
        yield from super().unread_options(options, on_captions)
        head = options["head"]
        for name in {"scale", "margin"} - numbers_of_head(head):
            yield f"head_{name}", f"a {head} head has no {name}"
        if head == "triplet":
            yield "triplet_weight", "head: triplet has no classification loss to add triplets to"
        if not options["triplet_weight"]:
            yield "triplet_margin", "it has no effect without triplet_weight"

    def build_for_training(self) -> None:
        """Build the modules in ``only_for_training``."""

    def classifier_of_features(self) -> Tensor | None:
        """Return classifier rows (C, D) for feature vectors, or None.

        Use them to train the next model in a chain (``old_weights: classifier``).
        """
        return self.classifier.weight if self.classifier is not None else None

    @override
    def export(self, folder: str | Path) -> None:
        """Write the finished model with a feature classifier, without training-only parts."""
        brought = self.config.for_training and "classifier" in self.only_for_training
        rows_CD = self.classifier_of_features() if brought else None
        self.for_inference()
        if rows_CD is not None:
            assert not self.config.keeps_classifier
            self.config.keeps_classifier = True
            self.classifier = self._head(self.config.embedding_dim).to(self.device).requires_grad_(False)
            assert self.classifier.weight is not None
            self.classifier.weight.data = rows_CD.detach().to(self.classifier.weight.dtype)
        super().export(folder)

    def _head(self, dim: int) -> ClassificationHead:
        config = self.config
        return ClassificationHead(dim, len(config.classes), config.head, scale=config.head_scale, margin=config.head_margin)

    @property
    def stores_view(self) -> bool:
        """Return False: galleries contain whole embeddings, which start with the older spaces."""
        return False

    def old_features(self, features_BD: Tensor) -> Tensor:
        """Return the first d dimensions, for comparison with old embeddings."""
        return features_BD[:, : self.config.old["dim"]]

    @override
    def loss(self, output: CompatOutput, batch: Batch) -> Tensor:
        return self.classification_loss(output["features"], batch["labels"])

    def classification_loss(self, features_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Return the new features' classification loss, plus the weighted triplet loss."""
        assert self.classifier is not None
        loss: Tensor = self.classifier(features_BD, labels_B)
        if not self.config.triplet_weight:
            return loss
        margin = self.config.triplet_margin if self.config.triplet_margin is not None else USUAL_TRIPLET_MARGIN
        return loss + self.config.triplet_weight * batch_hard_triplet_loss(features_BD, labels_B, margin)
