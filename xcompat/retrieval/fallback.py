"""Search with the old model too: where the new model is not sure, or always, the old query replaces or joins the new one."""

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
    of_length,
    query_confidence,
    query_view,
    stored_version,
    takes_old_queries,
)

if TYPE_CHECKING:
    from xcompat.retrieval.versions import Model


class OldQueries(NamedTuple):
    """Queries of the old model for some of the queries of a search.

    Args:
        model: the old model.
        embeds_Qd: (Q, d) its queries; rows of NaN where only the new query searches.
        share: the weight of the old query on the arc between both (:func:`xcompat.heads.slerp`), 1 for the old query alone.
    """

    model: Model
    embeds_Qd: ArrayLike
    share: float = 1.0

    def asked(self) -> NDArray[np.bool_]:
        """Return which queries have an old one (Q,)."""
        return np.isfinite(as_float32(self.embeds_Qd).sum(axis=1))

    def among(self, model: Model, version: VersionRecord, queries_Qd: NDArray[np.float32]) -> NDArray[np.float32]:
        """Replace new queries by old ones, or mix both, wherever old queries can search.

        Args:
            model: the new model.
            version: the version of the stored embeddings.
            queries_Qd: (Q, d) the new queries, in the space of that version.

        Returns:
            (Q, d) float32 queries.

        Raises:
            FingerprintMismatchError: the old model did not make the stored embeddings.
            XcompatError: old and new queries differ in shape.
        """
        import torch

        old_Qd = query_view(self.model, self.embeds_Qd, version)
        if old_Qd is None:
            if not takes_old_queries(model, version):
                return queries_Qd
            raise FingerprintMismatchError(_not_the_old(self.model, version))
        if old_Qd.shape != queries_Qd.shape:
            raise XcompatError(f"{old_Qd.shape} old queries do not stand beside {queries_Qd.shape} new ones")
        asked_Q = self.asked()
        chosen_Fd = old_Qd[asked_Q]
        if self.share < 1:
            chosen_Fd = slerp(torch.from_numpy(queries_Qd[asked_Q]), torch.from_numpy(chosen_Fd), self.share).numpy()
        mixed_Qd = queries_Qd.copy()
        mixed_Qd[asked_Q] = of_length(self.model, chosen_Fd, version)
        return mixed_Qd


@dataclass(frozen=True)
class Fallback:
    """When the old model's query is used, and with which weight.

    Args:
        model: the old model, which embedded the gallery.
        below: confidence from which on the new query searches alone; None to use every old query.
        share: the weight of the old query, as in :class:`OldQueries`.
    """

    model: Embedder
    below: float | None = 0.5
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers outside (0, 1]."""
        for name in ("share",) if self.below is None else ("below", "share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise XcompatError(f"fallback: {name} is {value!r}; give a number above 0, and 1 at most")

    @classmethod
    def described(cls, options: Mapping[str, Any], device: torch.device | str) -> Self:
        """Load the old model.

        Args:
            options: ``model``, a name or what ``load_embedder`` returns, and optionally ``below`` and ``share``.
            device: the device of the old model.

        Raises:
            XcompatError: an option is unknown, or no model is named.
        """
        known = [field.name for field in fields(cls)]
        for name in options.keys() - set(known):
            raise XcompatError(f"fallback has no option {name!r}; {nearest(name, known)}")
        if (model := options.get("model")) is None:
            raise XcompatError("fallback asks the old model: name it as model, the one that embedded the gallery")
        return cls(**{**options, "model": model if isinstance(model, Embedder) else load_embedder(str(model), device)})

    @classmethod
    def of(cls, model: object, device: torch.device | str, given: Mapping[str, Any] | None = None) -> Self | None:
        """Load the old model that is given, or that a map was chosen to search together with; None if there is neither.

        Args:
            model: what embeds queries.
            device: the device of the old model.
            given: options of :meth:`described`; they take precedence over those of the map.

        Raises:
            XcompatError: the old model cannot be loaded.
        """
        options = {**_options_of(model), **(given or {})}
        return cls.described(options, device) if options or given is not None else None

    def require(self, model: Model, manifest: Manifest) -> None:
        """Refuse a query model without confidence, and an old model that did not embed the gallery.

        Raises:
            FingerprintMismatchError: the old model did not make embeddings that the query model searches with its memory.
            XcompatError: the query model has no confidence.
        """
        if self.below is not None and not getattr(model, "is_confident", False):
            raise XcompatError(
                f"queries of {identity(model)} do not say how sure they are: leave the fallback out, or take a model whose "
                "queries remember, of which enough could be held out to calibrate them"
            )
        for version in manifest.present():
            if takes_old_queries(model, version) and not fits(self.model, version):
                raise FingerprintMismatchError(_not_the_old(self.model, version))

    def old_queries(
        self,
        model: Model,
        manifest: Manifest,
        embeds_QD: ArrayLike,
        embed: Callable[[list[int]], torch.Tensor | NDArray[np.float32]],
    ) -> NDArray[np.float32]:
        """Embed with the old model the queries that the new model is not sure of, or all of them.

        Args:
            model: the query model.
            manifest: the gallery's state.
            embeds_QD: (Q, D) query embeddings as the query model outputs them.
            embed: embeds the queries with some row numbers with the old model.

        Returns:
            (Q, d) float32, as :class:`OldQueries` takes them.
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
    """Return the options of a map that was chosen to search together with the old model; none of any other model."""
    config: Any = getattr(getattr(model, "model", model), "config", None)
    if (share := getattr(config, "old_share", None)) is None:
        return {}
    name, revision = config.old["name"], config.old.get("revision")
    return {"model": name if revision is None else f"{name}@{revision}", "below": None, "share": share}


def _not_the_old(model: Model, version: VersionRecord) -> str:
    made = stored_version(model, version.dim).fingerprint
    return f"the fallback did not make the {version.fingerprint} embeddings here, its own are {made}: name the model that did"
