"""A frozen model in the role of the old or the new one, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import split_revision
from xcompat.encoders import NOT_OWN, EncoderSource, load_encoder, reading_model, require_model, require_own
from xcompat.encoders.base import Encoder, Space
from xcompat.encoders.model_files import is_own
from xcompat.encoders.penultimate import Penultimate
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import PREFIX
from xcompat.models.base import CompatModel
from xcompat.models.config import QUERIES, Compares, describe_old
from xcompat.models.old_knowledge import rows_by_class


@dataclass
class Embedder:
    """A model that embeds, in one of its spaces: what caches and evaluations need of it (a :class:`FrozenModel`).

    A compatible model takes this role with what its gallery holds (:meth:`CompatModel.stored`): its view of the old space, or an
    embedding whose first dimensions are that space, so that galleries of a chain of updates fit together.

    Args:
        model: an encoder, a compatible model, or the penultimate features of one.
        processor: its preprocessing.
        fingerprint: its identity in that space.
        dim: dimension of what :meth:`embed` returns.
        logit_scale: scale of its own training, if known.
        compatible_with: versions whose galleries share its space.
        reads: what it embeds of an image with a caption; a text encoder has captions (BT² §4.7).
        autocast: half precision to compute in where that loses little; None for the precision of the weights.
        space: in which :meth:`embed` gives its embeddings.
        passages: the model with the prompt of passages, if this one has that of queries (:meth:`for_queries`).
    """

    model: Encoder | CompatModel | Penultimate
    processor: Processor
    fingerprint: Fingerprint
    dim: int
    logit_scale: float | None = None
    compatible_with: list[Fingerprint] = field(default_factory=list)
    reads: Literal["images", "captions"] = "images"
    autocast: torch.dtype | None = None
    space: Space = "own"
    passages: Embedder | None = None

    def __post_init__(self) -> None:
        """Lay convolutions out as they are fastest; embeddings differ by rounding."""
        torch.nn.Module.to(self.model, memory_format=torch.channels_last)

    @classmethod
    def of(cls, model: CompatModel, space: Space, autocast: torch.dtype | None = None) -> Embedder:
        """Take a compatible model by what it embeds itself, or by what its galleries hold.

        Args:
            model: frozen, in evaluation mode.
            space: which of the two.
            autocast: half precision to compute in; None for the precision of the weights.

        Returns:
            The model in that role.
        """
        if space == "own":
            return cls(model, model.processor, model.embeds_fingerprint(), model.config.embedding_dim, autocast=autocast)
        # queries of a model that maps galleries, and new items of these, are the plain new model's
        shared = [] if model.maps_galleries else model.compatible_with
        scale, known = model.config.logit_scale, (model.stored_fingerprint(), model.stored_dim)
        return cls(model, model.processor, *known, scale, shared, autocast=autocast, space="stored")

    @property
    def name(self) -> str:
        """Return what people call the model."""
        return self.fingerprint.name

    @property
    def version(self) -> Fingerprint:
        """Return the identity of what its galleries store, which are passages."""
        return (self.passages or self).fingerprint

    @property
    def metric(self) -> Compares:
        """Return how its embeddings are compared."""
        return self.model.metric if isinstance(self.model, CompatModel) else "cosine"

    @property
    def device(self) -> torch.device:
        """Return where the model computes."""
        return next(self.model.parameters()).device

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes that the model learned to tell apart, in the order of its classifier."""
        return list(getattr(getattr(self.model, "config", None), "classes", None) or [])

    @torch.inference_mode()
    def embed(self, batch: Mapping[str, Tensor], space: Space | None = None) -> Tensor:
        """Embed one batch of images (``pixel_values``) or texts (``input_ids``).

        Args:
            batch: from the processor.
            space: another space than the embedder's own.

        Returns:
            (B, d) float32, L2-normalised.
        """
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self.model.embed(batch, space or self.space).float()

    def for_queries(self) -> Embedder:
        """Return the model with the prompt of queries; itself, unless it puts another before queries than before passages.

        Its embeddings have an identity of their own, so that caches of queries and of passages are kept apart. A gallery's
        version is that of the passages.
        """
        processor = self.processor.for_queries()
        if processor is self.processor:
            return self
        return replace(self, processor=processor, fingerprint=self.fingerprint.derived(QUERIES), passages=self)

    def lookup(self, ids: Sequence[str]) -> None:
        """See :meth:`FrozenModel.lookup`: this model computes."""

    def require_model(self, otherwise: str) -> Embedder:
        """See :meth:`FrozenModel.require_model`: here it is."""
        return self

    def require_embeddings(self, method: str) -> None:
        """See :meth:`FrozenModel.require_embeddings`: whoever computes has them all."""

    def prototypes_of(self, classes: Sequence[str]) -> None:
        """See :meth:`FrozenModel.prototypes_of`: they are the means of what is embedded."""

    def classifier_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """See :meth:`FrozenModel.classifier_of`."""
        classifier = getattr(self.model, "classifier", None)
        if classifier is None or classifier.weight is None or not self.classes:
            return None
        return rows_by_class(classifier.weight, self.classes, classes)

    def describe_old(self) -> dict[str, Any]:
        """Describe this model as the old one of a configuration; versions before it keep their own dimensions."""
        described = describe_old(self.version, self.dim, self.logit_scale)
        if (revision := getattr(self.model, "description", {}).get("revision")) is not None:
            described["revision"] = revision
        if self.metric == "l2":
            described["metric"] = "l2"
        if self.compatible_with:
            model: Any = self.model
            nearest = model.config.old
            described["compatible_with"] = [
                {key: nearest[key] for key in ("name", "fingerprint", "dim", "revision") if key in nearest},
                *(nearest.get("compatible_with") or []),
            ]
        return described

    def describe_encoder(self) -> dict[str, Any]:
        """Describe this model as the encoder of a configuration, so that a map over its embeddings can load it later.

        A model that puts another prompt before queries has one fingerprint, that of its passages, and says the ``role`` it was
        taken in.
        """
        model: Any = self.model
        known = {**model.description, "fingerprint": self.version.digest, "dim": self.dim}
        if self.metric == "l2":
            known["metric"] = "l2"
        return known | {"role": QUERIES} if self.passages is not None else known


def load_embedder(
    source: EncoderSource | str, device: torch.device | str = "cpu", autocast: torch.dtype | None = None
) -> Embedder:
    """Load any model that embeds: an encoder of a supported library, or a checkpoint of this one.

    Args:
        source: name, folder (of a model, or of a run that ended with one), or source with revision.
        device: where to compute.
        autocast: half precision to compute in; None for the precision of the weights.

    Returns:
        The frozen model in evaluation mode.
    """
    source = require_model(source)
    if is_checkpoint(source.name, source.revision):
        return Embedder.of(torch.nn.Module.to(load_checkpoint(source), device), "stored", autocast)
    encoder, processor = load_encoder(source)
    fingerprint = encoder.fingerprint(processor)
    encoder = encoder.requires_grad_(False).eval().to(device)
    return Embedder(encoder, processor, fingerprint, encoder.embedding_dim, encoder.logit_scale, autocast=autocast)


def load_checkpoint(source: EncoderSource | str) -> CompatModel:
    """Load a model of this library; the encoder that a map belongs to is loaded when the map first embeds.

    Args:
        source: name, folder (of a model, or of a run that ended with one), or source with revision.

    Returns:
        The frozen model in evaluation mode, without what only training needs.

    Raises:
        XcompatError: there is none.
    """
    source = require_own(source)
    if not is_checkpoint(source.name, source.revision):
        raise XcompatError(f"{source.name} {NOT_OWN}")
    source.require_reads_texts()
    if source.image_size is not None:
        raise XcompatError(f"{source.name} reads images of the size it was trained with; leave out its image_size")
    with reading_model(source.name, source.revision):
        model: CompatModel = AutoModel.from_pretrained(source.name, revision=source.revision or "main")
    return model.for_inference()


def penultimate(embedder: Embedder) -> Embedder:
    """Embed images by what a model's last linear layer reads, under an identity of its own, so that caches keep both apart.

    Args:
        embedder: the frozen model.

    Returns:
        The same model, giving (B, P) features that are not normalised.

    Raises:
        XcompatError: its embedding does not come out of a linear layer.
    """
    model = Penultimate(embedder.model, embedder.name)
    return Embedder(
        model, embedder.processor, embedder.fingerprint.derived("penultimate"), model.head.in_features, autocast=embedder.autocast
    )


def is_checkpoint(name: str, revision: str | None = None) -> bool:
    """Return whether a folder or Hub name holds a model of this library (a local folder is not looked up on the Hub).

    Args:
        name: folder or Hub name, also ``NAME@REVISION``.
        revision: branch, tag or commit.
    """
    name, named = split_revision(name)
    revision = revision or named
    if name.startswith(PREFIX):
        return False
    folder = Path(name)
    if folder.is_dir():
        return is_own(folder)
    from transformers import PreTrainedConfig

    try:
        return str(PreTrainedConfig.get_config_dict(name, revision=revision or "main")[0].get("model_type", "")).startswith(
            "xcompat"
        )
    except OSError:  # not there, or of another library: whoever loads it says so
        return False
