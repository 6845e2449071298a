"""Frozen models that compute embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel, PreTrainedConfig

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import model_folder, split_revision
from xcompat.core.precision import Autocast, cuda_products, resolve_autocast
from xcompat.encoders import NOT_XCOMPAT, EncoderSource, load_encoder, reading_model, require_model, require_xcompat_model
from xcompat.encoders.base import Encoder, Space
from xcompat.encoders.model_files import is_xcompat_model
from xcompat.encoders.penultimate import Penultimate
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import PREFIX
from xcompat.models.base import CompatModel
from xcompat.models.config import QUERIES, Metric, describe_old
from xcompat.models.old_knowledge import rows_by_class


@dataclass
class Embedder:
    """Frozen model that embeds in one of its spaces (a :class:`FrozenModel`).

    For a compatible model, this is usually its gallery's space (:meth:`CompatModel.to_gallery_space`), so a chain of updates
    stays compatible.

    Args:
        model: an encoder, a compatible model, or penultimate features.
        processor: its preprocessing.
        fingerprint: its identity in this space.
        dim: dimension of :meth:`embed`.
        logit_scale: the old model's training scale, if known.
        compatible_with: model versions whose galleries it can search.
        reads: whether it embeds the image or the caption of a captioned image (captions for text encoders, BT² §4.7).
        autocast: half precision for computing; None to use the weights' dtype.
        space: space of :meth:`embed`.
        passages: the same model with the passage prompt, if this model is :meth:`for_queries`.
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
        """Use the fastest memory layout for convolutions; embeddings differ by rounding."""
        torch.nn.Module.to(self.model, memory_format=torch.channels_last)

    @classmethod
    def from_model(cls, model: CompatModel, space: Space, autocast: Autocast = "auto") -> Embedder:
        """Return a compatible model's embedder.

        Args:
            model: frozen, in evaluation mode.
            space: ``own`` for the model's embeddings, ``stored`` for its gallery's.
            autocast: half precision for computing; None to use the weights' dtype, ``auto`` for bfloat16 on GPUs only.
        """
        autocast = resolve_autocast(autocast, next(model.parameters()))
        if space == "own":
            return cls(model, model.processor, *model.lineage.embeds, autocast=autocast)
        # a model that maps galleries embeds queries and new items like the plain new model
        shared = [] if model.maps_galleries else model.compatible_with
        scale = model.config.logit_scale
        return cls(model, model.processor, *model.lineage.stores, scale, shared, autocast=autocast, space="stored")

    @property
    def name(self) -> str:
        """Return the model's display name."""
        return self.fingerprint.name

    @property
    def version(self) -> Fingerprint:
        """Return the fingerprint of stored embeddings, i.e. of passages."""
        return (self.passages or self).fingerprint

    @property
    def metric(self) -> Metric:
        """Return the embeddings' metric."""
        return self.model.metric if isinstance(self.model, CompatModel) else "cosine"

    @property
    def device(self) -> torch.device:
        """Return the model's device."""
        return next(self.model.parameters()).device

    @property
    def precision(self) -> str:
        """Return the dtype it computes in, e.g. ``bfloat16``."""
        return str(self.autocast or next(self.model.parameters()).dtype).removeprefix("torch.")

    @property
    def classes(self) -> list[str]:
        """Return the class names in the classifier's order; empty without classes."""
        return list(getattr(getattr(self.model, "config", None), "classes", None) or [])

    @torch.inference_mode()
    def embed(self, batch: Mapping[str, Tensor], space: Space | None = None) -> Tensor:
        """Embed a batch of images (``pixel_values``) or texts (``input_ids``).

        Args:
            batch: the processor's batch.
            space: embedding space, by default the embedder's.

        Returns:
            (B, d) float32, L2-normalised.
        """
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        is_exact = self.autocast is None and self.device.type == "cuda"  # torch's convolutions are in TF32 by default
        with (
            cuda_products(tf32=False) if is_exact else nullcontext(),
            torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None),
        ):
            return self.model.embed(batch, space or self.space).float()

    def for_queries(self) -> Embedder:
        """Return the model with the query prompt, if it differs from the passage prompt.

        Query embeddings have a separate fingerprint for caches. A gallery's version is the passages' fingerprint.
        """
        processor = self.processor.for_queries()
        if processor is self.processor:
            return self
        return replace(self, processor=processor, fingerprint=self.fingerprint.derive(QUERIES), passages=self)

    def lookup(self, ids: Sequence[str]) -> None:
        """Return None, because this model computes embeddings."""

    def require_model(self, error_message: str) -> Embedder:
        """Return the embedder itself."""
        return self

    def require_embeddings(self, method: str) -> None:
        """Do nothing, because this model computes all embeddings."""

    def prototypes_of(self, classes: Sequence[str]) -> None:
        """Return None, because prototypes are mean embeddings."""

    def classifier_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return classifier rows for ``classes`` (C, d), NaN for missing rows; None without a classifier."""
        classifier = getattr(self.model, "classifier", None)
        if classifier is None or classifier.weight is None or not self.classes:
            return None
        return rows_by_class(classifier.weight, self.classes, classes)

    def describe_old(self) -> dict[str, Any]:
        """Return this model's description for ``CompatConfig.old``; earlier versions keep their dimensions."""
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

    def describe_encoder(self) -> dict[str, object]:
        """Return this model's description for ``CompatConfig.encoder``: the passages' fingerprint, and ``role`` for queries."""
        model: Any = self.model
        known = {**model.description, "fingerprint": self.version.digest, "dim": self.dim}
        if self.metric == "l2":
            known["metric"] = "l2"
        return known | {"role": QUERIES} if self.passages is not None else known


def load_embedder(source: EncoderSource | str, device: torch.device | str = "cpu", autocast: Autocast = "auto") -> Embedder:
    """Load a frozen model that embeds: a supported library's encoder, or an xcompat checkpoint.

    Args:
        source: name, folder of a model or run, or source with revision.
        device: the model's device.
        autocast: half precision for computing; None to use the weights' dtype, ``auto`` for bfloat16 on GPUs only.
    """
    source = require_model(source)
    if is_checkpoint(source.name, source.revision):
        return Embedder.from_model(torch.nn.Module.to(load_checkpoint(source), device), "stored", autocast)
    encoder, processor = load_encoder(source)
    fingerprint = encoder.fingerprint(processor)
    encoder = encoder.requires_grad_(False).eval().to(device)
    autocast = resolve_autocast(autocast, next(encoder.parameters()))
    return Embedder(encoder, processor, fingerprint, encoder.embedding_dim, encoder.logit_scale, autocast=autocast)


def load_checkpoint(source: EncoderSource | str) -> CompatModel:
    """Load a frozen xcompat model, without training-only parts. A map's encoder is loaded on first use.

    Args:
        source: name, folder of a model or run, or source with revision.

    Raises:
        XcompatError: there is no xcompat model.
    """
    source = require_xcompat_model(source)
    if not is_checkpoint(source.name, source.revision):
        raise XcompatError(f"{source.name} {NOT_XCOMPAT}")
    source.require_settings_used()
    if source.image_size is not None:
        raise XcompatError(f"{source.name} reads images of the size it was trained with; remove image_size")
    with reading_model(source.name, source.revision):
        model: CompatModel = AutoModel.from_pretrained(
            source.name, revision=source.revision or "main", trust_remote_code=source.trust_remote_code
        )
    return model.for_inference()


def penultimate_embedder(embedder: Embedder) -> Embedder:
    """Return an embedder for penultimate features (B, P), not normalised, with a separate fingerprint.

    Raises:
        XcompatError: the last layer is not linear.
    """
    model = Penultimate(embedder.model, embedder.name)
    return Embedder(
        model, embedder.processor, embedder.fingerprint.derive("penultimate"), model.head.in_features, autocast=embedder.autocast
    )


def named_fingerprint(name: str) -> Fingerprint:
    """Return the fingerprint of a model that cannot embed here: of a map without its encoder, or of the bare name."""
    if is_checkpoint(model_folder(name)):
        return load_checkpoint(name).lineage.stores.fingerprint
    return Fingerprint.from_string(name)


def is_checkpoint(name: str, revision: str | None = None) -> bool:
    """Return whether a folder or Hub name is an xcompat model.

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
        return is_xcompat_model(folder)
    try:
        return str(PreTrainedConfig.get_config_dict(name, revision=revision or "main")[0].get("model_type", "")).startswith(
            "xcompat"
        )
    except OSError:  # missing, or another library's; loading the model reports the error
        return False
