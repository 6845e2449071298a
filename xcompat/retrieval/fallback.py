"""Searches with the old model's queries, instead of or mixed with new queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from xcompat.core.errors import FingerprintMismatchError, XcompatError, nearest
from xcompat.heads import slerp
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval.manifest import Manifest, VersionRecord
from xcompat.retrieval.versions import (
    as_float32,
    fits,
    identity,
    query_confidence,
    query_view,
    scale_to_length,
    stored_version,
    takes_old_queries,
)

if TYPE_CHECKING:
    from xcompat.retrieval.versions import Model


class OldQueries(NamedTuple):
    """Old-model queries for a search.

    Args:
        model: the old model.
        embeds_Qd: (Q, d) its queries; NaN in rows that search only with the new query.
        share: the old query's weight on the arc between both (:func:`xcompat.heads.slerp`).
    """

    model: Model
    embeds_Qd: ArrayLike
    share: float = 1.0

    def old_query_mask(self) -> NDArray[np.bool_]:
        """Return the mask (Q,) for queries with an old query."""
        return np.isfinite(as_float32(self.embeds_Qd).sum(axis=1))

    def replace_or_mix(self, model: Model, version: VersionRecord, queries_Qd: NDArray[np.float32]) -> NDArray[np.float32]:
        """Replace new queries by old queries, or mix both, if old queries can search the version.

        Args:
            model: the new model.
            version: the stored embeddings' version.
            queries_Qd: (Q, d) new queries in the version's space.

        Returns:
            (Q, d) float32 queries.

        Raises:
            FingerprintMismatchError: the old model did not make the stored embeddings.
            XcompatError: old and new queries differ in shape.
        """
        old_Qd = query_view(self.model, self.embeds_Qd, version)
        if old_Qd is None:
            if not takes_old_queries(model, version):
                return queries_Qd
            raise FingerprintMismatchError(_describe_mismatch(self.model, version))
        if old_Qd.shape != queries_Qd.shape:
            raise XcompatError(f"old queries have shape {old_Qd.shape}, new ones {queries_Qd.shape}; embed the same queries")
        asked_Q = self.old_query_mask()
        chosen_Fd = old_Qd[asked_Q]
        if self.share < 1:
            chosen_Fd = slerp(torch.from_numpy(queries_Qd[asked_Q]), torch.from_numpy(chosen_Fd), self.share).numpy()
        mixed_Qd = queries_Qd.copy()
        mixed_Qd[asked_Q] = scale_to_length(self.model, chosen_Fd, version)
        return mixed_Qd


@dataclass(frozen=True)
class Fallback:
    """Settings for searches with the old model.

    Args:
        model: the old model, which embedded the gallery.
        below: use the old query below this confidence; None to always use it.
        share: the old query's weight, as in :class:`OldQueries`.
    """

    model: Embedder
    below: float | None = 0.5
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("share",) if self.below is None else ("below", "share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise XcompatError(f"fallback: {name} is {value!r}; set a number above 0 and at most 1")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], device: torch.device | str) -> Self:
        """Load the old model.

        Args:
            options: ``model``, a name or a result of ``load_embedder``, and optionally ``below`` and ``share``.
            device: its device.

        Raises:
            XcompatError: an option is unknown, or ``model`` is missing.
        """
        known = [field.name for field in fields(cls)]
        for name in options.keys() - set(known):
            raise XcompatError(f"fallback has no option {name!r}; {nearest(name, known)}")
        if (model := options.get("model")) is None:
            raise XcompatError("fallback needs the old model; set model to the model that embedded the gallery")
        return cls(**{**options, "model": model if isinstance(model, Embedder) else load_embedder(str(model), device)})

    @classmethod
    def for_model(cls, model: object, device: torch.device | str, given: Mapping[str, object] | None = None) -> Self | None:
        """Load the old model from options or from a map's configuration, if any.

        Args:
            model: the query model, e.g. a map.
            device: the old model's device.
            given: options for :meth:`from_options`, which override the map's.

        Raises:
            XcompatError: the old model cannot be loaded.
        """
        options = {**_options_of(model), **(given or {})}
        return cls.from_options(options, device) if options or given is not None else None

    def require(self, model: Model, manifest: Manifest) -> None:
        """Raise if the fallback does not fit the query model and gallery.

        Raises:
            FingerprintMismatchError: the old model did not embed the gallery.
            XcompatError: the query model has no confidence.
        """
        if self.below is not None and not getattr(model, "is_confident", False):
            raise XcompatError(
                f"queries of {identity(model)} have no confidence; remove the fallback, or choose a model with query memory "
                "and enough validation data to calibrate it"
            )
        for version in manifest.present():
            if takes_old_queries(model, version) and not fits(self.model, version):
                raise FingerprintMismatchError(_describe_mismatch(self.model, version))

    def old_queries(
        self,
        model: Model,
        manifest: Manifest,
        embeds_QD: ArrayLike,
        embed: Callable[[list[int]], torch.Tensor | NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """Embed unsure queries, or all, with the old model.

        Args:
            model: the query model.
            manifest: the gallery's state.
            embeds_QD: (Q, D) query embeddings as output by the query model.
            embed: embeds the queries in the given rows with the old model.

        Returns:
            (Q, d) float32, for :class:`OldQueries`.
        """
        old_Qd = np.full((len(as_float32(embeds_QD)), self.model.dim), np.nan, np.float32)
        if self.below is None:
            unsure = list(range(len(old_Qd)))
        else:
            confidence_Q = query_confidence(model, embeds_QD, manifest)
            unsure = [] if confidence_Q is None else np.flatnonzero(confidence_Q < self.below).tolist()
        if unsure:
            old_Qd[unsure] = torch.as_tensor(embed(unsure)).float().cpu().numpy()
        return old_Qd


def _options_of(model: object) -> dict[str, Any]:
    """Return the options of a map that uses its old model in searches."""
    config: Any = getattr(getattr(model, "model", model), "config", None)
    if (share := getattr(config, "old_share", None)) is None:
        return {}
    name, revision = config.old["name"], config.old.get("revision")
    return {"model": name if revision is None else f"{name}@{revision}", "below": None, "share": share}


def old_model_of(model: object) -> str | None:
    """Return the name of the old model that a map uses in searches, or None."""
    return _options_of(model).get("model")


def _describe_mismatch(model: Model, version: VersionRecord) -> str:
    made = stored_version(model, version.dim).fingerprint
    return f"the fallback did not make the {version.fingerprint} embeddings here, it makes {made}; use the model that made them"
