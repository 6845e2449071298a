"""Older spaces and fingerprints for compatible models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Set
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.heads import first_dims
from xcompat.models.checkpoint import load_unrounded
from xcompat.models.config import Metric
from xcompat.models.lineage import Lineage, hash_model, identity_settings
from xcompat.models.query_memory import QueryMemory
from xcompat.score_scale import CarriedThreshold, ScoreScales, Thresholds


class SpacesModel(PreTrainedModel):
    """Base class for :class:`~xcompat.models.base.CompatModel` with older spaces and fingerprints."""

    embeds_in_memory: ClassVar[bool] = False
    """Whether this is a map over cached embeddings, with a separate encoder that is loaded on first use."""
    maps_galleries: bool = False
    """Whether the model maps stored old embeddings into the new space (:meth:`upgrade`), and not queries."""
    compares_by_l2: ClassVar[bool] = False
    """Whether the method supports unnormalised embeddings with L2 distance."""
    config: Any
    encoder: Encoder | None
    revision: str | None = None
    """Commit of a model from the Hub; None for a folder."""
    _left_out: Set[str] = frozenset()
    _read_from: tuple[Any, dict[str, Any]] | None = None
    """Source of the weights, if they were loaded with a dtype."""
    _processor: Processor | None
    memory: QueryMemory | None
    _hashed: tuple[object, tuple[str, str]] | None = None

    @property
    @abstractmethod
    def processor(self) -> Processor:
        """Return the encoder's preprocessing."""

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

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint over encoder, adapters, heads, preprocessing and memory."""
        return self.lineage.model

    @property
    def lineage(self) -> Lineage:
        """Return the fingerprints and dimensions of all embeddings that the model writes or searches.

        Changed weights are hashed again. :attr:`compatible_with` and ``config.versions`` need no weights.
        """
        # cached, because galleries need it for every query and hashing gigabytes takes seconds
        settings = self._identity_settings()
        state = settings, Fingerprint.state(self)
        if self._hashed is None or self._hashed[0] != state:
            model = load_unrounded(self)
            self._hashed = state, hash_model(model, model.memory, settings)
        return self._build_lineage(self._hashed[1])

    @property
    def written_lineage(self) -> Lineage:
        """Return the lineage after :meth:`save_pretrained`; rounded weights in a half-precision model change it."""
        if self._read_from is None:
            return self.lineage
        return self._build_lineage(hash_model(self, self.memory, self._identity_settings()))

    def _build_lineage(self, digests: tuple[str, str]) -> Lineage:
        return Lineage.build(self._display_name, self.config, digests, self.stores_view)

    def _identity_settings(self) -> str:
        return identity_settings(self.config, None if self.embeds_in_memory else self.processor)

    @property
    def _display_name(self) -> str:
        return self.name_or_path or type(self).__name__

    @property
    def compatible_with(self) -> list[Fingerprint]:
        """Return the versions whose galleries this model can search, nearest first."""
        return [version.fingerprint for version in self.config.versions]

    def to_space(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Turn own embeddings into queries for an older gallery: :meth:`to_space_without_memory`, then the memory.

        Args:
            embeds: (B, D) from :meth:`embed_images` or :meth:`embed_texts`.
            version: the gallery's version; None to use the old model from training, the only version with a memory.

        Returns:
            (B, d) float32, L2-normalised.

        Raises:
            FingerprintMismatchError: the model is not compatible with this version.
            XcompatError: the model maps galleries, or the embeddings have a wrong type or shape.
        """
        self.require_version(version)
        if self.maps_galleries:
            raise XcompatError(f"{type(self).__name__} maps galleries: upgrade the stored embeddings instead")
        self._require_embeddings(embeds, "its own embeddings", self.config.embedding_dim)
        own = self.to_space_without_memory(embeds, version)
        return own if self.memory is None or version not in (None, self.compatible_with[0]) else self.memory(embeds, own)

    def _require_embeddings(self, embeds: Tensor, what: str, dim: int) -> None:
        name = type(self).__name__
        if not isinstance(embeds, Tensor):
            fix = "torch.from_numpy(...)" if type(embeds).__module__ == "numpy" else "torch.tensor(...)"
            raise XcompatError(f"{name} takes embeddings as a torch tensor (B, {dim}), not {type(embeds).__name__}; use {fix}")
        if embeds.ndim != 2 or embeds.shape[1] != dim:
            raise XcompatError(f"{name} takes {what} (B, {dim}), not {tuple(embeds.shape)}")

    def to_space_without_memory(self, embeds: Tensor, version: Fingerprint | None = None) -> Tensor:
        """Convert own embeddings to an older space without the memory: :meth:`to_old_space`, or its first dimensions.

        Args:
            embeds: (B, D).
            version: a version in :attr:`compatible_with`; None to use the old model from training.

        Returns:
            (B, d) float32, L2-normalised.
        """
        view = self.to_old_space(embeds)
        dim = view.shape[1] if version is None else dict(self.config.versions).get(version, view.shape[1])
        return view if dim == view.shape[1] else self.apply_metric(view[:, :dim])

    def to_old_space(self, embeds: Tensor) -> Tensor:
        """Convert own embeddings (B, D) to the old model's space (B, d); by default their first d dimensions, normalised."""
        assert self.config.old is not None
        return self.apply_metric(embeds[:, : self.config.old["dim"]])

    def remember(self, memory: QueryMemory | None) -> Self:
        """Set or remove the memory for queries (in a gallery map, for stored embeddings), and return the model.

        The model's fingerprint changes, but not its stored embeddings' fingerprint.

        Args:
            memory: memory from new to old dimensions (old to new in a gallery map); None for no memory.

        Raises:
            XcompatError: the model has no old space, or the memory has other dimensions.
        """
        dims = self._memory_dims()
        if memory is not None and self.metric == "l2":
            raise XcompatError("a memory needs unit vectors, but these embeddings use L2 distance; remove memory")
        if memory is not None and memory.dims != dims:
            raise XcompatError(
                f"a memory from {memory.dims[0]} to {memory.dims[1]} dimensions does not fit {type(self).__name__}, which maps "
                f"{dims[0]} to {dims[1]}"
            )
        self.memory = memory.to(self.device).requires_grad_(False) if memory is not None else None
        self.config.memory = memory.settings if memory is not None else None
        return self

    @property
    def score_scales(self) -> ScoreScales | None:
        """Return the scales between scores for own and for old gallery embeddings, if known."""
        return ScoreScales.read(self.config.score_scales) if self.config.score_scales is not None else None

    def threshold(self, old: float) -> CarriedThreshold:
        """Return the new score threshold for an old threshold, for old-gallery queries without re-ranking.

        It was measured on validation pairs. Use ``xcompat evaluate --threshold`` to measure a test set.

        Args:
            old: the service's cosine threshold.

        Raises:
            XcompatError: there is no measurement for this threshold.

        Example:
            ``model.threshold(old=0.75).score``
        """
        known = Thresholds.read(self.config.thresholds) if self.config.thresholds is not None else None
        if known is not None and (found := known.interpolate(old)) is not None:
            return found
        reach = "no thresholds" if known is None else f"thresholds from {known.old[0]:g} to {known.old[-1]:g}"
        measure = f"measure it on a test set with `xcompat evaluate --threshold {old:g}`"
        raise XcompatError(f"threshold {old:g} is unknown: {self._display_name} has {reach}; {measure}")

    def confidence(self, embeds: Tensor) -> Tensor | None:
        """Return the probability that each query finds no less than the old query, if the memory is calibrated (`xcompat map`).

        Args:
            embeds: (B, D) from :meth:`embed_images` or :meth:`embed_texts`.

        Returns:
            (B,) float32 in (0, 1); None without a calibration, and for a gallery map.
        """
        return self.memory.confidence(embeds) if self.memory is not None and self.is_confident else None

    @property
    def is_confident(self) -> bool:
        """Return whether the model has a :meth:`confidence`."""
        return self.memory is not None and self.memory.calibration is not None and not self.maps_galleries

    def _memory_dims(self) -> tuple[int, int]:
        """Return the dimensions of keys (mapped space) and values (target space)."""
        if self.config.old is None:
            raise XcompatError(f"{type(self).__name__} has no old space for a memory; remove memory")
        new, old = self.config.embedding_dim, int(self.config.old["dim"])
        return (old, new) if self.maps_galleries else (new, old)

    def require_version(self, version: Fingerprint | None) -> None:
        """Raise if the model is not compatible with a gallery.

        Args:
            version: the gallery's version; None to use the old model from training.

        Raises:
            FingerprintMismatchError: the model is compatible with other versions, listed in the error.
            XcompatError: the model has no old model.
        """
        if self.config.old is None:
            raise XcompatError(f"{type(self).__name__} was trained without an old model and cannot search an old gallery")
        if version is not None and version not in (known := self.compatible_with):
            names = ", ".join(map(str, known))
            raise FingerprintMismatchError(
                f"this model is compatible with {names}, not with {version}; choose a model trained for it"
            )

    def self_view(self, embeds: Tensor) -> Tensor:
        """Convert own embeddings for comparison among themselves (new/new); by default unchanged."""
        return embeds

    def upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings into the new space: :meth:`own_upgrade`, then a gallery map's memory.

        Args:
            old_embeds: (B, d) stored embeddings.
            side_info: (B, S) stored side-information, for methods that use it.

        Returns:
            The embeddings to store instead.

        Raises:
            XcompatError: the embeddings have a wrong type or shape.
        """
        if self.maps_galleries:
            self._require_embeddings(old_embeds, "embeddings of the old model", self.config.old["dim"])
        own = self.own_upgrade(old_embeds, side_info)
        return own if self.memory is None or not self.maps_galleries else self.memory(old_embeds, own)

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

    def own_upgrade(self, old_embeds: Tensor, side_info: Tensor | None = None) -> Tensor:
        """Map stored old embeddings (B, d) to (B, D) without the memory; unchanged unless the method maps galleries."""
        return old_embeds

    @property
    def view_layers(self) -> Iterable[nn.Module] | None:
        """Return the nearest :meth:`to_space`'s layers, without normalisation (see :attr:`embed_layers`)."""
        return self.own_view_layers if self.memory is None else None

    @property
    def own_view_layers(self) -> Iterable[nn.Module] | None:
        """Return the layers for :meth:`to_space_without_memory`, without normalisation."""
        assert self.config.old is not None
        dims = self.config.embedding_dim, self.config.old["dim"]
        return () if dims[0] == dims[1] else (first_dims(*dims),)

    @property
    def stores_view(self) -> bool:
        """Return whether galleries store embeddings in the old space, so that a chain of updates shares it."""
        return bool(self.compatible_with) and not self.maps_galleries

    def to_gallery_space(self, embeds: Tensor) -> Tensor:
        """Convert own embeddings for storage in a gallery, without the memory."""
        return self.to_space_without_memory(embeds) if self.stores_view else embeds
