"""Compatibility between query models and stored embeddings."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcompat.core.arrays import normalise_rows, row_lengths
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice_once
from xcompat.retrieval.manifest import Manifest, Metric, VersionRecord
from xcompat.score_scale import ScoreScale
from xcompat.vectors.checks import UNIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from xcompat.models.base import CompatModel
    from xcompat.models.config import Metric
    from xcompat.models.embedder import Embedder

    Model: TypeAlias = CompatModel | Embedder | Fingerprint

UPGRADED = "upgrade"
"""Derivation name for fingerprints of mapped embeddings."""
JOIN_ADVICE = "use a run or map of the new model that is compatible with the old one: its queries search both"
CHUNK = 8192


def stored_version(model: Model, dim: int | None) -> VersionRecord:
    """Describe the embeddings that a model stores in a gallery.

    Args:
        model: a compatible model, a result of ``load_embedder``, or a fingerprint.
        dim: dimension of the stored embeddings; required with a fingerprint.

    Raises:
        XcompatError: a fingerprint's dimension is missing or below 1.
    """
    compat = _compat(model)
    if compat is not None:
        shares = tuple(older.digest for older in compat.compatible_with) if compat.stores_view else ()
        version, dim = compat.lineage.stores
        known = {"digest": version.digest, "name": version.name, "dim": dim, "shares": shares}
        if compat.maps_galleries or not compat.compatible_with:
            return VersionRecord(**known)
        scale = tuple(compat.score_scales.old) if compat.score_scales is not None else None
        return VersionRecord(**known, scaled_to=compat.compatible_with[0].digest, score_scale=scale)
    version = identity(model)
    own = dim if isinstance(model, Fingerprint) else cast("Embedder", model).dim
    if own is None:
        raise XcompatError(f"dim is required when only the fingerprint {version} is given; set the dimension of its embeddings")
    if own < 1:
        raise XcompatError(f"dim is {own}; it must be at least 1")
    return VersionRecord(digest=version.digest, name=version.name, dim=own)


def searchable_versions(model: CompatModel | Embedder) -> list[VersionRecord]:
    """List the versions that a model's queries can search without another map.

    Args:
        model: as in :func:`stored_version`.

    Returns:
        Compatible older versions, nearest first, unless it maps galleries; then its own version.
    """
    own, compat = stored_version(model, None), _compat(model)
    if compat is None or not compat.stores_view:
        return [own]
    return [*(VersionRecord(digest=older.digest, name=older.name, dim=dim) for older, dim in compat.config.versions), own]


def upgraded_version(model: CompatModel) -> VersionRecord:
    """Describe the embeddings that a model maps; they share its encoder's space, if known."""
    own = model.fingerprint()
    shares = (model.config.encoder["fingerprint"],) if model.embeds_in_memory and model.config.encoder is not None else ()
    digest = own.derive(UPGRADED).digest
    side = model.config.new_side_info["fingerprint"] if model.writes_side_info else None
    scale = tuple(model.score_scales.new) if model.score_scales is not None else None
    known = {"digest": digest, "name": own.name, "dim": model.config.embedding_dim, "shares": shares, "side_info": side}
    return VersionRecord(**known, scaled_to=model.lineage.stores.fingerprint.digest, score_scale=scale)


def identity(model: Model) -> Fingerprint:
    """Return a model's fingerprint."""
    if isinstance(model, Fingerprint):
        return model
    from xcompat.models.embedder import Embedder

    if isinstance(model, str):
        raise XcompatError(f"{model!r} is a name; use Fingerprint.from_string({model!r}), or load the model with load_embedder")
    return model.fingerprint if isinstance(model, Embedder) else model.fingerprint()


def require_like_sides(known: VersionRecord, have: set[int], side_dim: int, by: str | None) -> None:
    """Raise if a version's side-information is incomplete, or from two models or with two dimensions.

    Args:
        known: the stored version.
        have: dimensions of its side-information; 0 without any.
        side_dim: dimension of the new side-information.
        by: digest of the model that made it; None if unknown.
    """
    if {dim > 0 for dim in have} != {side_dim > 0}:
        raise XcompatError(
            f"the {known.fingerprint} embeddings of this gallery have {'no ' if side_dim else ''}side-information, unlike these "
            "items; use --side-info for all items or for none"
        )
    if side_dim and known.side_info != by:
        raise XcompatError(
            f"the gallery's {known.fingerprint} embeddings have side-information by another model than these items "
            "(--side-info); use the same model for both"
        )
    if have != {side_dim}:
        raise XcompatError(
            f"the gallery's {known.fingerprint} embeddings have side-information of {min(have)} dimensions, but these items "
            f"have {side_dim}; use the same model for both"
        )


def own_metric(model: Model) -> Metric:
    """Return how a model's embeddings are compared; cosine for a fingerprint."""
    return "cosine" if isinstance(model, Fingerprint) else model.metric


def require_metric(model: Model, metric: Metric) -> None:
    """Raise if the model needs L2 distance, but the gallery has another metric."""
    if own_metric(model) == "l2" and metric != "l2":
        raise XcompatError(
            f"embeddings of {identity(model)} are compared by L2 distance, but this gallery compares by {metric}; make a gallery "
            "with metric l2, e.g. with `xcompat gallery build` and this model"
        )


def stored_embeddings(
    model: Model | None, embeds_ND: ArrayLike, versions: Sequence[VersionRecord]
) -> tuple[VersionRecord, NDArray[np.float32]]:
    """Convert a model's own embeddings to the stored form.

    Args:
        model: as in :func:`stored_version`; None for the gallery's first model, with embeddings in stored form.
        embeds_ND: (N, D) embeddings as output by the model.
        versions: the gallery's versions.

    Returns:
        The model's version, and (N, d) float32 embeddings.

    Raises:
        XcompatError: the embeddings have another dimension.
    """
    stored, compat = as_float32(embeds_ND), None if model is None else _compat(model)
    if compat is not None and compat is model and compat.stores_view:
        stored = _apply_in_chunks(compat.to_gallery_space, stored, compat)
    record = versions[0] if model is None else stored_version(model, stored.shape[-1])
    if stored.ndim == 2 and stored.shape[1] != record.dim:
        raise XcompatError(f"{record.fingerprint} stores {record.dim} dimensions, but these embeddings have {stored.shape[1]}")
    known = next((version for version in versions if version.digest == record.digest), record)
    return record, stored if model is None else scale_to_length(model, stored, known)


def query_view(model: Model, embeds_QD: ArrayLike, version: VersionRecord) -> NDArray[np.float32] | None:
    """Convert queries to the stored embeddings' space.

    Args:
        model: the query model; with a fingerprint, queries are unchanged.
        embeds_QD: (Q, D) query embeddings as output by the model.
        version: the stored embeddings' version.

    Returns:
        (Q, d) float32; None if not comparable.
    """
    embeds = as_float32(embeds_QD)
    compat = _compat(model)
    if compat is None:
        known = {version.digest, *version.shares}
        stores = getattr(model, "passages", None) or model  # an embedder with query prompts searches its passages
        return embeds if identity(stores).digest in known else None
    if compat is not model:  # an embedder outputs the stored form
        shared = {compat.lineage.stores.fingerprint.digest}
        if compat.stores_view:
            shared |= {older.digest for older in compat.compatible_with}
        return embeds if shared & {version.digest, *version.shares} else None
    return _compat_view(compat, _at_length_one(compat, embeds), version)


def _at_length_one(model: CompatModel, embeds_QD: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise inputs if a map was fitted on unit vectors; zero queries become NaN."""
    if not model.embeds_in_memory or model.metric != "cosine":
        return embeds_QD
    lengths_Q = row_lengths(embeds_QD)
    if (np.abs(lengths_Q - 1) <= UNIT).all():
        return embeds_QD
    return np.where(lengths_Q[:, None] == 0, np.float32("nan"), normalise_rows(embeds_QD))


def _compat_view(model: CompatModel, embeds: NDArray[np.float32], version: VersionRecord) -> NDArray[np.float32] | None:
    own = model.lineage.stores.fingerprint
    if version.digest == own.digest:  # metric and memory help here as for old embeddings
        return _apply_in_chunks(model.to_space if model.stores_view else model.self_view, embeds, model)
    if model.maps_galleries:
        mapped = version.digest == model.fingerprint().derive(UPGRADED).digest
        return _apply_in_chunks(model.self_view, embeds, model) if mapped else _plain(model, embeds, version)
    for older in model.compatible_with:
        if older.digest in (version.digest, *version.shares):
            return _apply_in_chunks(partial(model.to_space, version=older), embeds, model)
    return _plain(model, embeds, version)


def _plain(model: CompatModel, embeds: NDArray[np.float32], version: VersionRecord) -> NDArray[np.float32] | None:
    """Return queries unmapped for a gallery of the map's own encoder."""
    of_encoder = model.embeds_in_memory and (model.config.encoder or {}).get("fingerprint") == version.digest
    return _apply_in_chunks(model.self_view, embeds, model) if of_encoder else None


def query_views(
    model: Model, embeds_QD: ArrayLike, manifest: Manifest, place: object = "GALLERY"
) -> list[tuple[VersionRecord, NDArray[np.float32]]]:
    """Convert queries to each version's space in a gallery.

    Args:
        model: the query model.
        embeds_QD: (Q, D) query embeddings as output by the model.
        manifest: the gallery's state.
        place: the gallery folder, for messages.

    Returns:
        Each version with embeddings, and the queries in its space.

    Raises:
        FingerprintMismatchError: the queries cannot be compared with a version; with the fix.
    """
    views = []
    for version in manifest.present():
        view = query_view(model, embeds_QD, version)
        if view is None:
            raise FingerprintMismatchError(
                f"queries of {identity(model)} cannot be compared with the {version.fingerprint} embeddings of this gallery: "
                f"{_advice(model, version, place)}"
            )
        views.append((version, scale_to_length(model, view, version)))
    require_metric(model, manifest.metric)
    return views


def scale_to_length(model: Model, embeds_ND: NDArray[np.float32], version: VersionRecord) -> NDArray[np.float32]:
    """Scale a model's embeddings to the length of unnormalised stored embeddings."""
    if version.length == 1 or isinstance(model, Fingerprint):
        return embeds_ND
    return normalise_rows(embeds_ND) * np.float32(version.length)


def takes_old_queries(model: Model, version: VersionRecord) -> bool:
    """Return whether old queries can replace or join a model's queries for a version.

    True if the model searches it with a memory, or was fitted to search together with the old model.
    """
    compat = _compat(model)
    if compat is None or compat is not model or compat.maps_galleries:
        return False
    if compat.memory is None and compat.config.old_share is None:
        return False
    if version.digest == compat.lineage.stores.fingerprint.digest:
        return False
    return compat.compatible_with[0].digest in (version.digest, *version.shares)


def notice_missing_old(model: Model, measured: str = "") -> None:
    """Print a notice if a map needs old queries but searches without them; ``measured`` is its result without them."""
    compat = _compat(model)
    if compat is not None and compat.config.old_share is not None:
        notice_once(
            f"{identity(model)} was fitted to search together with queries of the old model, which are missing here; new "
            f"queries alone may find less than old queries{measured}. `xcompat gallery search`, `xcompat serve` and the pipeline "
            "use both"
        )


def score_scale(model: Model, version: VersionRecord) -> ScoreScale | None:
    """Return the scale for a model's scores against a version.

    Args:
        model: the query model.
        version: the stored embeddings' version.

    Returns:
        The scale to scores against ``version.scaled_to``; None if unknown.
    """
    if version.scaled_to is None:
        return ScoreScale()
    compat = _compat(model)
    searches_own = compat is not None and not compat.maps_galleries and version.digest == compat.lineage.stores.fingerprint.digest
    if compat is not None and compat is model and searches_own:
        return compat.score_scales.new if compat.score_scales is not None else None
    return ScoreScale(*version.score_scale) if version.score_scale is not None else None


def gallery_scales(model: Model, versions: Sequence[VersionRecord], metric: Metric) -> list[ScoreScale] | None:
    """Return the scales from each version's scores to the oldest version's.

    Args:
        model: the query model.
        versions: versions with embeddings, oldest first.
        metric: the gallery's metric.

    Returns:
        A scale per version, in the gallery's score units; None if any is unknown.
    """
    known = {version.digest: version for version in versions}

    def total(version: VersionRecord) -> ScoreScale | None:
        own = score_scale(model, version)
        older = known.get(version.scaled_to or "")
        if own is None or older is None:
            return own
        further = total(older)
        return further.compose(own) if further is not None else None

    is_l2_model = own_metric(model) == "l2"
    scales = []
    for version in versions:
        scale = total(version)
        if scale is None:
            return None
        scales.append(scale if is_l2_model else _in_units(scale, version.length, versions[0].length, metric))
    return scales


def _in_units(scale: ScoreScale, length: float, length_of_oldest: float, metric: Metric) -> ScoreScale:
    """Convert a cosine scale to the gallery's scores."""
    unit = length_of_oldest**2
    slope = scale.slope * unit / length**2
    if metric == "l2":  # a score is 2·length²·(cosine - 1)
        return ScoreScale(slope, 2 * unit * (scale.slope + scale.offset - 1))
    return ScoreScale(slope, scale.offset * unit)


def query_confidence(model: Model, embeds_QD: ArrayLike, manifest: Manifest) -> NDArray[np.float32] | None:
    """Return a model's confidence in its queries, if they use a memory.

    Args:
        model: the query model.
        embeds_QD: (Q, D) query embeddings as output by the model.
        manifest: the gallery's state.

    Returns:
        (Q,) from :meth:`~xcompat.models.base.CompatModel.confidence`; None without confidence, or without use of the memory.
    """
    compat = _compat(model)
    if compat is None or not compat.is_confident or not any(takes_old_queries(model, version) for version in manifest.present()):
        return None
    return _apply_in_chunks(
        cast("Callable[[Tensor], Tensor]", compat.confidence), _at_length_one(compat, as_float32(embeds_QD)), compat
    )


def require_views(model: Model, manifest: Manifest, place: object = "GALLERY") -> None:
    """Raise if a model cannot search every version (see :func:`query_views`)."""
    query_views(model, _any_query(model), manifest, place)


def require_joinable(model: Model, manifest: Manifest, place: object = "GALLERY") -> None:
    """Raise if no single model could search this model's and the stored embeddings.

    Raises:
        FingerprintMismatchError: the model cannot search a version; with the fix.
    """
    require_common_search(model, manifest.present(), place)
    require_metric(model, manifest.metric)


def require_common_search(model: Model, versions: Iterable[VersionRecord], place: object = "GALLERY") -> None:
    """Raise if a model cannot search all versions (see :func:`require_joinable`)."""
    model = _compat(model) or model
    for version in versions:
        if not fits(model, version):
            raise FingerprintMismatchError(
                f"no single model could search embeddings of {identity(model)} and the {version.fingerprint} embeddings of this "
                f"gallery: {_advice(model, version, place) if _compat(model) is not None else JOIN_ADVICE}"
            )


def fits(model: Model, version: VersionRecord) -> bool:
    """Return whether a model's queries can be compared with a version."""
    return query_view(model, _any_query(model), version) is not None


def _any_query(model: Model) -> NDArray[np.float32]:
    compat = _compat(model)
    return np.ones((1, compat.config.embedding_dim if compat is not None and compat is model else 1), np.float32)


def alias_advice(model: Model, version: VersionRecord, place: object) -> str | None:
    """Return the alias command if model and version may be the same; None if they certainly differ.

    Args:
        model: the query model.
        version: stored embeddings that do not match its queries.
        place: the gallery folder, or a store's address.
    """
    compat, own = _compat(model), version.fingerprint
    if compat is not None and compat.maps_galleries:
        return None
    known = compat.config.versions if compat is not None else [(identity(model), version.dim)]
    for candidate, dim in known:
        if dim == version.dim and (candidate.is_name_only or own.is_name_only):
            which = "map was fitted for" if compat is not None else "queries are of"
            called = f"the {which} {'the name ' if candidate.is_name_only else ''}{candidate.name!r}"
            command = f"xcompat gallery alias {shlex.quote(str(place))} {shlex.quote(candidate.name)}"
            named = f"the name {own.name!r}" if own.is_name_only else own
            return f"{called}. If that and {named} are the same model, run `{command}`, then repeat this command"
    return None


def aliased_version(versions: Sequence[VersionRecord], alias: Fingerprint) -> VersionRecord:
    """Return an alias's version: the only version, or the only version known by name.

    Raises:
        XcompatError: there is no such version, or it has other weights.
    """
    matching = [version for version in versions if alias.is_name_only or version.fingerprint.is_name_only] or list(versions)
    version = matching[0]
    if len(matching) > 1:
        raise XcompatError(
            f"this gallery holds embeddings of {', '.join(str(each.fingerprint) for each in matching)}, and {alias.name!r} could "
            "be any of them; fit the map again with the model itself as --old-model"
        )
    if not (alias.is_name_only or version.fingerprint.is_name_only) and alias.digest != version.digest:
        raise XcompatError(
            f"{alias} is another model than {version.fingerprint}, which made this gallery: weights or preprocessing differ; "
            "fit the map again with embeddings of the gallery's model"
        )
    return version


def _advice(model: Model, version: VersionRecord, place: object) -> str:
    compat = _compat(model)
    upgrades = compat is not None and compat.maps_galleries and version.digest in [old.digest for old in compat.compatible_with]
    if not upgrades and (advice := alias_advice(model, version, place)) is not None:
        return advice
    if compat is None:
        return "query with the model that made them, or with one trained to be compatible with it"
    known = ", ".join(map(str, compat.compatible_with)) or "nothing"
    if compat.maps_galleries:
        return f"this model maps galleries of {known}; run `xcompat gallery upgrade` with it first"
    return f"this model is compatible with {known}; use one trained for that version, or re-embed with `--backfill`"


def _compat(model: Model) -> CompatModel | None:
    """Return the compatible model, possibly inside an embedder."""
    if isinstance(model, Fingerprint):  # needs no import of torch
        return None
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder

    inner = model.model if isinstance(model, Embedder) else model
    return inner if isinstance(inner, CompatModel) else None


def as_float32(embeds: ArrayLike) -> NDArray[np.float32]:
    """Convert embeddings to a float32 matrix; a single embedding becomes a row."""
    if hasattr(embeds, "detach"):
        embeds = embeds.detach().cpu().float().numpy()
    array = np.ascontiguousarray(embeds, dtype=np.float32)
    return array[None] if array.ndim == 1 else array


def _apply_in_chunks(function: Callable[[Tensor], Tensor], embeds: NDArray[np.float32], model: Any) -> NDArray[np.float32]:  # noqa: ANN401
    """Apply a model function to embeddings in chunks."""
    import torch

    with torch.inference_mode():
        blocks = torch.from_numpy(embeds).split(CHUNK)
        return np.concatenate([function(block.to(model.device)).float().cpu().numpy() for block in blocks])
