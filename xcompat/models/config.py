"""Configuration of compatible models (``config.json``)."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import model_folder
from xcompat.encoders.build_limits import check_config
from xcompat.score_scale import ScoreScales, Thresholds

_TRANSFORMERS_KEYS = {*PreTrainedConfig().to_dict(), "torch_dtype", "name_or_path", "use_cache", "num_labels", "auto_map"}
"""Keys that transformers adds to configurations."""

Metric = Literal["cosine", "l2"]
"""Metric of embeddings: cosine of unit vectors, or L2 distance of vectors of any length."""
QUERIES = "queries"
"""Role of an encoder that used the prompt of queries."""
_VERSION_KEYS = {"name", "fingerprint", "dim"}


class Version(NamedTuple):
    """Embeddings of one model."""

    fingerprint: Fingerprint
    dim: int


@cache
def _choices(config: type) -> dict[str, tuple[Any, ...]]:
    """Return the valid values for options with a fixed set."""
    hints = get_type_hints(config, localns={"torch": torch})  # torch: in transformers' own hints
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


@cache
def _ranges(config: type) -> dict[str, TypeAdapter[Any]]:
    """Return validators for options with a range."""
    plain, full = (get_type_hints(config, localns={"torch": torch}, include_extras=more) for more in (False, True))
    return {name: TypeAdapter(hint) for name, hint in full.items() if hint != plain[name] and name not in _TRANSFORMERS_KEYS}


class CompatConfig(PreTrainedConfig):
    """Configuration of a compatible model.

    Args:
        encoder: the new encoder: ``library``, ``name``, ``revision``, ``config``, ``fingerprint`` and ``dim`` (without
            adapters); for text models also prompts, and ``role`` if a map was fitted on query embeddings.
        old: the old model: ``name``, ``fingerprint``, ``dim``, ``logit_scale`` and ``compatible_with`` (earlier versions in its
            space).
        embedding_dim: D, dimension of :meth:`CompatModel.embed_images`.
        adapters: the encoder's :class:`~xcompat.encoders.AdapterConfig`.
        weights: the checkpoint's contents: ``all``, or ``adapters`` for the differences from ``encoder["name"]`` at
            ``encoder["revision"]``.
        logit_scale: fixed factor on cosines in the loss; XBT's "τ = 2.6592" is its logarithm.
        memory: settings for the :class:`~xcompat.models.query_memory.QueryMemory` (:meth:`CompatModel.remember`): ``entries``,
            ``sharpness``, ``share``, and ``confident`` if true.
        score_scales: :class:`~xcompat.score_scale.ScoreScales` between scores for old and new gallery embeddings, or None.
        thresholds: :class:`~xcompat.score_scale.Thresholds`, old score thresholds and their replacements, or None.
        old_share: the old query's weight in searches with both models (:func:`~xcompat.heads.slerp`), or None.
        rerank_old_weight: the old scores' weight in re-ranking, chosen on the validation split, or None.
        rerank_candidates: number of hits to re-rank, also chosen on the validation split, or None.
        started_from: map for `xcompat map --start-from`: ``name``, ``revision``, ``fingerprint``, or None.
        service: a map's embedding service: ``name``, ``function``, and ``sketch`` from its embeddings of test texts, or None.
        training_items: hashes of a map's training items (:func:`~xcompat.mapping.training_items.sketch_items`), or None.

    Raises:
        XcompatError: a key or value is unknown; the error contains the nearest known value.
    """

    model_type: ClassVar[str] = "xcompat"

    encoder: dict | None = None
    old: dict | None = None
    embedding_dim: int = 0
    adapters: dict | None = None
    weights: Literal["all", "adapters"] = "all"
    logit_scale: Annotated[float, Field(gt=0)] = 1 / 0.07
    memory: dict | None = None
    score_scales: dict | None = None
    thresholds: dict | None = None
    old_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    rerank_old_weight: Annotated[float, Field(ge=0, lt=1)] | None = None
    rerank_candidates: Annotated[int, Field(ge=1)] | None = None
    started_from: dict | None = None
    service: dict | None = None
    training_items: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - any JSON value
        """Raise on options that transformers would silently accept."""
        known = {field.name for field in fields(type(self))}
        check_config({name: getattr(self, name) for name in known} | kwargs, type(self).__name__)
        for key in kwargs:
            if key not in _TRANSFORMERS_KEYS and not key.startswith(("_", "attn_", "output_", "experts_")):
                own = known - _TRANSFORMERS_KEYS
                raise XcompatError(f"{type(self).__name__} has no option {key!r}; {nearest(key, own)}")
        for name, choices in _choices(type(self)).items():  # type: ignore[arg-type] # mypy asks the instances for a hash
            if (given := getattr(self, name)) not in choices:
                raise XcompatError(f"{type(self).__name__} has no {name} {given!r}; {nearest(str(given), choices)}")
        for version in described_versions(self.old) if isinstance(self.old, dict) else []:
            if not isinstance(version, dict) or _VERSION_KEYS - version.keys():
                raise XcompatError(
                    f"{type(self).__name__} has an incomplete old model: each version needs {', '.join(sorted(_VERSION_KEYS))}; "
                    "use describe_old"
                )
        if self.score_scales is not None:
            ScoreScales.read(self.score_scales)
        if self.thresholds is not None:
            Thresholds.read(self.thresholds)
        if self.training_items is not None and re.fullmatch("([0-9a-f]{8})*", str(self.training_items)) is None:
            raise XcompatError(f"{type(self).__name__}, training_items are not hashes of 8 hexadecimal digits; fit the map again")
        super().__post_init__(**kwargs)

    @property
    def versions(self) -> tuple[Version, ...]:
        """Return the old model's version and the earlier ones in its space, nearest first."""
        known = described_versions(self.old)
        return tuple(Version(Fingerprint(each["fingerprint"], each["name"]), each["dim"]) for each in known)

    def require_ranges(self) -> None:
        """Raise if a value is out of range; loading accepts such values."""
        for name, reader in _ranges(type(self)).items():  # type: ignore[arg-type] # mypy asks the instances for a hash
            try:
                reader.validate_python(given := getattr(self, name))
            except ValidationError as error:
                raise XcompatError(f"{type(self).__name__}, {name}: {error.errors()[0]['msg']} (found {given!r})") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all keys, without optional keys that are None."""
        written = super().to_dict()
        optional_keys = (
            "score_scales",
            "thresholds",
            "old_share",
            "rerank_old_weight",
            "rerank_candidates",
            "started_from",
            "service",
            "training_items",
        )
        for optional in optional_keys:
            if getattr(self, optional) is None:
                del written[optional]
        return written

    @classmethod
    def get_config_dict(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        **kwargs: object,
    ) -> tuple[dict[str, object], dict[str, object]]:
        """Read a configuration as in transformers, also from a run folder."""
        name = pretrained_model_name_or_path
        return super().get_config_dict(name if kwargs.get("subfolder") else model_folder(name), **kwargs)


def described_versions(old: dict[str, Any] | None) -> list[Any]:
    """Return the description of an old model and those of the earlier versions in its space, nearest first."""
    return [old, *(old.get("compatible_with") or [])] if old is not None else []


def describe_old(
    fingerprint: Fingerprint, dim: int, logit_scale: float | None = None, compatible_with: list[Fingerprint] | None = None
) -> dict[str, Any]:
    """Describe an old model for ``CompatConfig.old``, as JSON-like dictionary.

    Args:
        fingerprint: the old model's identity and name.
        dim: d, the old model's embedding dimension.
        logit_scale: the old model's training scale, if known.
        compatible_with: earlier versions with galleries in the same space.
    """
    earlier = [{"name": version.name, "fingerprint": version.digest, "dim": dim} for version in compatible_with or []]
    return {
        "name": fingerprint.name,
        "fingerprint": fingerprint.digest,
        "dim": dim,
        "logit_scale": logit_scale,
        "compatible_with": earlier,
    }
