"""Which queries can be compared with which stored embeddings, and in which view."""

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
from xcompat.vectors import UNIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from xcompat.models.base import CompatModel
    from xcompat.models.config import Compares
    from xcompat.models.embedder import Embedder

    Model: TypeAlias = CompatModel | Embedder | Fingerprint

UPGRADED = "upgrade"
"""Name under which the fingerprint of embeddings mapped from an older version derives from the mapping model's."""
JOINING = "name a run or map of the new model that is compatible with the old one: it embeds anew, and its queries search both"
CHUNK = 8192


def stored_version(model: Model, dim: int | None) -> VersionRecord:
    """Describe the embeddings that a model stores in a gallery.

    Args:
        model: a compatible model, a frozen one as ``load_embedder`` gives it, or the fingerprint of vectors made elsewhere.
        dim: dimension of the stored embeddings; needed with a fingerprint only.

    Returns:
        The version.

    Raises:
        XcompatError: a fingerprint comes without a dimension, or with one below 1.
    """
    compat = _compat(model)
    if compat is not None:
        version = compat.stored_fingerprint()
        shares = tuple(older.digest for older in compat.compatible_with) if compat.stores_view else ()
        known = {"digest": version.digest, "name": version.name, "dim": compat.stored_dim, "shares": shares}
        if compat.maps_galleries or not compat.compatible_with:
            return VersionRecord(**known)
        scale = tuple(compat.score_scales.old) if compat.score_scales is not None else None
        return VersionRecord(**known, scaled_to=compat.compatible_with[0].digest, score_scale=scale)
    version = identity(model)
    own = dim if isinstance(model, Fingerprint) else cast("Embedder", model).dim
    if own is None:
        raise XcompatError(f"nothing is known of {version} but its name: give the dimension of its embeddings as dim")
    if own < 1:
        raise XcompatError(f"embeddings have at least 1 dimension, not {own}")
    return VersionRecord(digest=version.digest, name=version.name, dim=own)


def searchable_versions(model: CompatModel | Embedder) -> list[VersionRecord]:
    """List the versions that a model's queries search without another map, the one that a new model is for first.

    Args:
        model: as in :func:`stored_version`.

    Returns:
        The older versions it is compatible with, the nearest first, unless it maps galleries; then what it stores itself.
    """
    own, compat = stored_version(model, None), _compat(model)
    if compat is None or not compat.stores_view:
        return [own]
    return [*(VersionRecord(digest=older.digest, name=older.name, dim=dim) for older, dim in compat.version_dims()), own]


def upgraded_version(model: CompatModel) -> VersionRecord:
    """Describe the embeddings that a model maps from older ones: they stand where the encoder has its own, if that is known."""
    own = model.fingerprint()
    shares = tuple(encoder.digest for encoder in model.embeds_written()) if model.embeds_in_memory else ()
    digest = own.derived(UPGRADED).digest
    side = model.config.new_side_info["fingerprint"] if model.writes_side_info else None
    scale = tuple(model.score_scales.new) if model.score_scales is not None else None
    known = {"digest": digest, "name": own.name, "dim": model.config.embedding_dim, "shares": shares, "side_info": side}
    return VersionRecord(**known, scaled_to=model.stored_fingerprint().digest, score_scale=scale)


def identity(model: Model) -> Fingerprint:
    """Return a model's fingerprint."""
    if isinstance(model, Fingerprint):
        return model
    from xcompat.models.embedder import Embedder

    if isinstance(model, str):
        raise XcompatError(
            f"{model!r} is a name: give Fingerprint.from_string({model!r}), or the model as load_embedder loads it"
        )
    return model.fingerprint if isinstance(model, Embedder) else model.fingerprint()


def require_like_sides(known: VersionRecord, have: set[int], side_dim: int, by: str | None) -> None:
    """Refuse side-information beside a part of a model's embeddings only, of two models, or of two widths.

    Args:
        known: the version that is stored.
        have: dimensions of the side-information of its embeddings; 0 where there is none.
        side_dim: those of what comes to them.
        by: digest of the model that made that; None if nobody said.
    """
    if {dim > 0 for dim in have} != {side_dim > 0}:
        raise XcompatError(
            f"what {known.fingerprint} embedded in this gallery has {'no ' if side_dim else ''}side-information, and these items "
            "differ in that; give it for all or for none (--side-info)"
        )
    if side_dim and known.side_info != by:
        raise XcompatError(
            f"the side-information beside the {known.fingerprint} embeddings of this gallery is of another model than that of "
            "these items (--side-info); take the same model"
        )
    if have != {side_dim}:
        raise XcompatError(
            f"the side-information beside the {known.fingerprint} embeddings of this gallery has {min(have)} dimensions, that of "
            f"these items {side_dim}; take the same model"
        )


def own_metric(model: Model) -> Compares:
    """Return how a model's embeddings are compared; by cosine if only a fingerprint is known."""
    return "cosine" if isinstance(model, Fingerprint) else model.metric


def require_metric(model: Model, metric: Metric) -> None:
    """Refuse embeddings of any length, which are compared by L2 distance, where a gallery compares otherwise."""
    if own_metric(model) == "l2" and metric != "l2":
        raise XcompatError(
            f"embeddings of {identity(model)} are compared by L2 distance, and this gallery compares by {metric}; make one with "
            "metric l2, as `xcompat gallery build` does with that model"
        )


def stored_embeddings(
    model: Model | None, embeds_ND: ArrayLike, versions: Sequence[VersionRecord]
) -> tuple[VersionRecord, NDArray[np.float32]]:
    """Bring a model's own embeddings into the form in which a gallery stores them.

    Args:
        model: as in :func:`stored_version`; None for the model that the gallery was made for, with embeddings in stored form.
        embeds_ND: (N, D) embeddings as the model outputs them; an embedder outputs the stored form.
        versions: the gallery's versions.

    Returns:
        The model's version, and (N, d) float32 embeddings.

    Raises:
        XcompatError: the embeddings have another dimension.
    """
    stored, compat = as_float32(embeds_ND), None if model is None else _compat(model)
    if compat is not None and compat is model and compat.stores_view:
        stored = _through(compat.stored, stored, compat)
    record = versions[0] if model is None else stored_version(model, stored.shape[-1])
    if stored.ndim == 2 and stored.shape[1] != record.dim:
        raise XcompatError(f"{record.fingerprint} stores {record.dim} dimensions, these embeddings have {stored.shape[1]}")
    known = next((version for version in versions if version.digest == record.digest), record)
    return record, stored if model is None else of_length(model, stored, known)


def query_view(model: Model, embeds_QD: ArrayLike, version: VersionRecord) -> NDArray[np.float32] | None:
    """Bring queries into the space of stored embeddings.

    Args:
        model: the query model; with a fingerprint, queries are compared as they are.
        embeds_QD: (Q, D) query embeddings as the model outputs them.
        version: the version of the stored embeddings.

    Returns:
        (Q, d) float32; None if the two cannot be compared.
    """
    embeds = as_float32(embeds_QD)
    compat = _compat(model)
    if compat is None:
        known = {version.digest, *version.shares}
        stores = getattr(model, "passages", None) or model  # with the prompt of queries it asks for its passages
        return embeds if identity(stores).digest in known else None
    if compat is not model:  # an embedder outputs the stored form
        shared = {compat.stored_fingerprint().digest}
        if compat.stores_view:
            shared |= {older.digest for older in compat.compatible_with}
        return embeds if shared & {version.digest, *version.shares} else None
    return _compat_view(compat, _at_length_one(compat, embeds), version)


def _at_length_one(model: CompatModel, embeds_QD: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the inputs of a map at length 1, as those it was fitted on; a query without a direction becomes NaN."""
    if not model.embeds_in_memory or model.metric != "cosine":
        return embeds_QD
    lengths_Q = row_lengths(embeds_QD)
    if (np.abs(lengths_Q - 1) <= UNIT).all():
        return embeds_QD
    return np.where(lengths_Q[:, None] == 0, np.float32("nan"), normalise_rows(embeds_QD))


def _compat_view(model: CompatModel, embeds: NDArray[np.float32], version: VersionRecord) -> NDArray[np.float32] | None:
    own = model.stored_fingerprint()
    if version.digest == own.digest:  # its metric and memory help here as they do among old embeddings
        return _through(model.view if model.stores_view else model.self_view, embeds, model)
    if model.maps_galleries:
        mapped = version.digest == model.fingerprint().derived(UPGRADED).digest
        return _through(model.self_view, embeds, model) if mapped else _plain(model, embeds, version)
    for older in model.compatible_with:
        if older.digest in (version.digest, *version.shares):
            return _through(partial(model.view, version=older), embeds, model)
    return _plain(model, embeds, version)


def _plain(model: CompatModel, embeds: NDArray[np.float32], version: VersionRecord) -> NDArray[np.float32] | None:
    """Return the queries unmapped if a map over embeddings searches a gallery of the encoder that it belongs to."""
    of_encoder = model.embeds_in_memory and (model.config.encoder or {}).get("fingerprint") == version.digest
    return _through(model.self_view, embeds, model) if of_encoder else None


def query_views(
    model: Model, embeds_QD: ArrayLike, manifest: Manifest, place: object = "GALLERY"
) -> list[tuple[VersionRecord, NDArray[np.float32]]]:
    """Bring queries into the space of each version in a gallery.

    Args:
        model: the query model.
        embeds_QD: (Q, D) query embeddings as the model outputs them.
        manifest: the gallery's state.
        place: the gallery's folder, for messages.

    Returns:
        Each version that has embeddings, with the queries in its space.

    Raises:
        FingerprintMismatchError: the queries cannot be compared with a version; names the model, the version and the remedy.
    """
    views = []
    for version in manifest.present():
        view = query_view(model, embeds_QD, version)
        if view is None:
            raise FingerprintMismatchError(
                f"queries of {identity(model)} cannot be compared with the {version.fingerprint} embeddings of this gallery: "
                f"{_advice(model, version, place)}"
            )
        views.append((version, of_length(model, view, version)))
    require_metric(model, manifest.metric)
    return views


def of_length(model: Model, embeds_ND: NDArray[np.float32], version: VersionRecord) -> NDArray[np.float32]:
    """Scale a model's embeddings to the length of stored ones that were never normalised; a fingerprint's stay as they are."""
    if version.length == 1 or isinstance(model, Fingerprint):
        return embeds_ND
    return normalise_rows(embeds_ND) * np.float32(version.length)


def takes_old_queries(model: Model, version: VersionRecord) -> bool:
    """Return whether old queries may replace or join those of a model among stored embeddings of a version.

    They may if the model is not its own and searches it with a memory, or was chosen to search together with the old model.
    """
    compat = _compat(model)
    if compat is None or compat is not model or compat.maps_galleries:
        return False
    if compat.memory is None and compat.config.old_share is None:
        return False
    if version.digest == compat.stored_fingerprint().digest:
        return False
    return compat.compatible_with[0].digest in (version.digest, *version.shares)


def notice_missing_old(model: Model) -> None:
    """Say once that a model was chosen to search together with the old one, where it searches alone."""
    compat = _compat(model)
    if compat is not None and compat.config.old_share is not None:
        notice_once(
            f"{identity(model)} was chosen to search half-way with queries of the old model, which are missing here: it may find "
            "less than old queries"
        )


def score_scale(model: Model, version: VersionRecord) -> ScoreScale | None:
    """Return the scale of a model's scores against stored embeddings of a version.

    Args:
        model: the query model.
        version: the version of the stored embeddings.

    Returns:
        The scale to scores against ``version.scaled_to``; None if it is unknown.
    """
    if version.scaled_to is None:
        return ScoreScale()
    compat = _compat(model)
    searches_own = compat is not None and not compat.maps_galleries and version.digest == compat.stored_fingerprint().digest
    if compat is not None and compat is model and searches_own:
        return compat.score_scales.new if compat.score_scales is not None else None
    return ScoreScale(*version.score_scale) if version.score_scale is not None else None


def gallery_scales(model: Model, versions: Sequence[VersionRecord], metric: Metric) -> list[ScoreScale] | None:
    """Return the scales that bring a model's scores against all versions of a gallery to that of the oldest.

    Args:
        model: the query model.
        versions: those with embeddings, the oldest first.
        metric: of the gallery; ``l2`` scores of unit vectors are brought to cosines and back.

    Returns:
        A scale for each version, in units of the gallery's scores; None if one is unknown.
    """
    known = {version.digest: version for version in versions}

    def total(version: VersionRecord) -> ScoreScale | None:
        own = score_scale(model, version)
        older = known.get(version.scaled_to or "")
        if own is None or older is None:
            return own
        further = total(older)
        return further.after(own) if further is not None else None

    is_l2_model = own_metric(model) == "l2"
    scales = []
    for version in versions:
        scale = total(version)
        if scale is None:
            return None
        scales.append(scale if is_l2_model else _in_units(scale, version.length, versions[0].length, metric))
    return scales


def _in_units(scale: ScoreScale, length: float, length_of_oldest: float, metric: Metric) -> ScoreScale:
    """Return a scale of cosines as a scale of the gallery's scores, against embeddings of some length."""
    unit = length_of_oldest**2
    slope = scale.slope * unit / length**2
    if metric == "l2":  # a score is 2·length²·(cosine - 1)
        return ScoreScale(slope, 2 * unit * (scale.slope + scale.offset - 1))
    return ScoreScale(slope, scale.offset * unit)


def query_confidence(model: Model, embeds_QD: ArrayLike, manifest: Manifest) -> NDArray[np.float32] | None:
    """Return the model's confidence in its queries, for models whose queries use a memory.

    Args:
        model: the query model.
        embeds_QD: (Q, D) query embeddings as the model outputs them.
        manifest: the gallery's state.

    Returns:
        (Q,) as :meth:`~xcompat.models.base.CompatModel.confidence` returns it; None if the model has no confidence, or searches
        nothing here with its memory.
    """
    compat = _compat(model)
    if compat is None or not compat.is_confident or not any(takes_old_queries(model, version) for version in manifest.present()):
        return None
    return _through(cast("Callable[[Tensor], Tensor]", compat.confidence), _at_length_one(compat, as_float32(embeds_QD)), compat)


def require_views(model: Model, manifest: Manifest, place: object = "GALLERY") -> None:
    """Refuse a model whose queries cannot be compared with every version in a gallery (see :func:`query_views`)."""
    query_views(model, _any_query(model), manifest, place)


def require_joinable(model: Model, manifest: Manifest, place: object = "GALLERY") -> None:
    """Refuse a model whose own embeddings would split a gallery: no one model could search them and what is there.

    Raises:
        FingerprintMismatchError: names the model, the version that it does not search, and the remedy.
    """
    require_common_search(model, manifest.present(), place)
    require_metric(model, manifest.metric)


def require_common_search(model: Model, versions: Iterable[VersionRecord], place: object = "GALLERY") -> None:
    """Refuse a model whose queries do not search all of some versions (see :func:`require_joinable`)."""
    model = _compat(model) or model
    for version in versions:
        if not fits(model, version):
            raise FingerprintMismatchError(
                f"no one model could search embeddings of {identity(model)} beside the {version.fingerprint} embeddings of this "
                f"gallery: {_advice(model, version, place) if _compat(model) is not None else JOINING}"
            )


def fits(model: Model, version: VersionRecord) -> bool:
    """Return whether a model's queries can be compared with stored embeddings of a version."""
    return query_view(model, _any_query(model), version) is not None


def _any_query(model: Model) -> NDArray[np.float32]:
    compat = _compat(model)
    return np.ones((1, compat.config.embedding_dim if compat is not None and compat is model else 1), np.float32)


def alias_advice(model: Model, version: VersionRecord, place: object) -> str | None:
    """Return the command that helps if a model and a version may be one under two names; None if they are surely two.

    Args:
        model: the query model.
        version: stored embeddings that its queries do not fit.
        place: the gallery's folder, or the address of a store.
    """
    compat, own = _compat(model), version.fingerprint
    if compat is not None and compat.maps_galleries:
        return None
    known = compat.version_dims() if compat is not None else [(identity(model), version.dim)]
    for candidate, dim in known:
        if dim == version.dim and (candidate.is_of_name or own.is_of_name):
            which = "map was fitted for" if compat is not None else "queries are of"
            called = f"the {which} {'the name ' if candidate.is_of_name else ''}{candidate.name!r}"
            command = f"xcompat gallery alias {shlex.quote(str(place))} {shlex.quote(candidate.name)}"
            named = f"the name {own.name!r}" if own.is_of_name else own
            return f"{called}. If that and {named} are the same model, run `{command}`, then repeat this command"
    return None


def aliased_version(versions: Sequence[VersionRecord], alias: Fingerprint) -> VersionRecord:
    """Return the version that another identity of its model is for: the only one, or the only one known by name alone.

    Raises:
        XcompatError: there is no such version, or it is of other weights than the alias.
    """
    matching = [version for version in versions if alias.is_of_name or version.fingerprint.is_of_name] or list(versions)
    version = matching[0]
    if len(matching) > 1:
        raise XcompatError(
            f"this gallery holds embeddings of {', '.join(str(each.fingerprint) for each in matching)}, and {alias.name!r} could "
            "be any of them; fit the map again with the model itself as --old-model"
        )
    if not (alias.is_of_name or version.fingerprint.is_of_name) and alias.digest != version.digest:
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
    """Return the compatible model that a model is, or that an embedder holds."""
    if isinstance(model, Fingerprint):  # needs no import of torch
        return None
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder

    inner = model.model if isinstance(model, Embedder) else model
    return inner if isinstance(inner, CompatModel) else None


def as_float32(embeds: ArrayLike) -> NDArray[np.float32]:
    """Return an array or tensor of embeddings as a float32 matrix; one embedding becomes a matrix of one row."""
    if hasattr(embeds, "detach"):
        embeds = embeds.detach().cpu().float().numpy()
    array = np.ascontiguousarray(embeds, dtype=np.float32)
    return array[None] if array.ndim == 1 else array


def _through(function: Callable[[Tensor], Tensor], embeds: NDArray[np.float32], model: Any) -> NDArray[np.float32]:  # noqa: ANN401
    """Apply a function of a model to embeddings, a few thousand at a time."""
    import torch

    with torch.inference_mode():
        blocks = torch.from_numpy(embeds).split(CHUNK)
        return np.concatenate([function(block.to(model.device)).float().cpu().numpy() for block in blocks])
