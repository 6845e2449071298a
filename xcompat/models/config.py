"""What every compatible model's ``config.json`` says."""

from __future__ import annotations

import os
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import model_folder
from xcompat.encoders.build_limits import check_config
from xcompat.score_scale import ScoreScales, Thresholds

_TRANSFORMERS_KEYS = {*PreTrainedConfig().to_dict(), "torch_dtype", "name_or_path", "use_cache", "num_labels"}
"""What transformers itself writes into every configuration or passes to it."""

Compares = Literal["cosine", "l2"]
"""How embeddings are compared: by cosine, of length 1, or by L2 distance, of any length."""
QUERIES = "queries"
"""The role, in the description of an encoder, of a model that put before texts what it puts before queries."""
_OF_A_VERSION = {"name", "fingerprint", "dim"}


@cache
def _choices(config: type) -> dict[str, tuple[Any, ...]]:
    """Return the values that each option with a fixed set of them may have."""
    hints = get_type_hints(config, localns={"torch": torch})  # torch: in transformers' own hints
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


@cache
def _ranges(config: type) -> dict[str, TypeAdapter[Any]]:
    """Return what reads each option that declares a range."""
    plain, full = (get_type_hints(config, localns={"torch": torch}, include_extras=more) for more in (False, True))
    return {name: TypeAdapter(hint) for name, hint in full.items() if hint != plain[name] and name not in _TRANSFORMERS_KEYS}


class CompatConfig(PreTrainedConfig):
    """What every compatible model's ``config.json`` says.

    Args:
        encoder: the new encoder: ``library``, ``name``, ``revision``, ``config``, ``fingerprint`` and ``dim`` (unadapted);
            of a model of texts also its prompts, and ``role`` if a map was learned from its embeddings of queries.
        old: the model to stay compatible with: ``name``, ``fingerprint``, ``dim``, ``logit_scale`` and
            ``compatible_with``, the earlier versions whose galleries share its space.
        embedding_dim: D, the dimension of what :meth:`CompatModel.embed_images` returns.
        adapters: LoRA and prompts on the encoder, as :class:`~xcompat.encoders.AdapterConfig`.
        weights: what the checkpoint holds; ``adapters`` for what differs from the encoder's own weights alone, which are those of
            ``encoder["name"]`` at ``encoder["revision"]``.
        logit_scale: fixed factor on cosine similarities in a loss that has one; "τ = 2.6592" in XBT is its logarithm.
        memory: what queries, or mapped galleries, remember: ``entries``, ``sharpness``, ``share`` and, if true, ``confident`` of
            :class:`~xcompat.models.query_memory.QueryMemory`; see :meth:`CompatModel.remember`.
        score_scales: how scores against the model's own embeddings compare with scores against old ones:
            :class:`~xcompat.score_scale.ScoreScales`; left out if None.
        thresholds: old score thresholds and those that replace them: :class:`~xcompat.score_scale.Thresholds`; left out if None.
        old_share: weight of the old model's query on the arc between both (:func:`~xcompat.heads.slerp`), if the model was
            chosen to search together with the old one; left out if None.
        rerank_old_weight: weight of old scores in a re-ranking, chosen on held-out items; left out if None.
        started_from: the map that `xcompat map --start-from` took: ``name``, ``revision``, ``fingerprint``; left out if None.
        service: the service whose embeddings a map was fitted on: its ``name``, the ``function`` that asked it, and the
            ``sketch`` of its answers to a few test texts; left out if None.

    Raises:
        XcompatError: for an unknown key, or a value that is none of those a key has, naming the nearest known one.
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
    started_from: dict | None = None
    service: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - any JSON value
        """Refuse what transformers would accept silently, then let it set up the rest."""
        known = {field.name for field in fields(type(self))}
        check_config({name: getattr(self, name) for name in known} | kwargs, type(self).__name__)
        for key in kwargs:
            if key not in _TRANSFORMERS_KEYS and not key.startswith(("_", "attn_", "output_", "experts_")):
                own = known - _TRANSFORMERS_KEYS
                raise XcompatError(f"{type(self).__name__} has no option {key!r}; {nearest(key, own)}")
        for name, choices in _choices(type(self)).items():  # type: ignore[arg-type] # mypy asks the instances for a hash
            if (given := getattr(self, name)) not in choices:
                raise XcompatError(f"{type(self).__name__} has no {name} {given!r}; {nearest(str(given), choices)}")
        for version in [self.old, *(self.old.get("compatible_with") or [])] if isinstance(self.old, dict) else []:
            if not isinstance(version, dict) or _OF_A_VERSION - version.keys():
                raise XcompatError(
                    f"{type(self).__name__} knows an older model only in part: a version has {', '.join(sorted(_OF_A_VERSION))}, "
                    "as describe_old gives it"
                )
        if self.score_scales is not None:
            ScoreScales.read(self.score_scales)
        if self.thresholds is not None:
            Thresholds.read(self.thresholds)
        super().__post_init__(**kwargs)

    def require_ranges(self) -> None:
        """Refuse values out of the ranges that options declare; a model that was made with one can still be loaded.

        Raises:
            XcompatError: naming the option, its range and the value.
        """
        for name, reader in _ranges(type(self)).items():  # type: ignore[arg-type] # mypy asks the instances for a hash
            try:
                reader.validate_python(given := getattr(self, name))
            except ValidationError as error:
                raise XcompatError(f"{type(self).__name__}, {name}: {error.errors()[0]['msg']} (found {given!r})") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all keys but those that most models do not have."""
        written = super().to_dict()
        for optional in ("score_scales", "thresholds", "old_share", "rerank_old_weight", "started_from", "service"):
            if getattr(self, optional) is None:
                del written[optional]
        return written

    @classmethod
    def get_config_dict(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        **kwargs: Any,  # noqa: ANN401 - transformers' own
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a configuration as transformers does, from the folder of a run too."""
        name = pretrained_model_name_or_path
        return super().get_config_dict(name if kwargs.get("subfolder") else model_folder(name), **kwargs)


def describe_old(
    fingerprint: Fingerprint, dim: int, logit_scale: float | None = None, compatible_with: list[Fingerprint] | None = None
) -> dict[str, Any]:
    """Describe an old model for ``CompatConfig.old``.

    Args:
        fingerprint: its identity and name.
        dim: d, the dimension of its embeddings.
        logit_scale: the scale it was trained with, if known.
        compatible_with: earlier versions whose galleries share its space.

    Returns:
        A JSON-like dictionary.
    """
    earlier = [{"name": version.name, "fingerprint": version.digest, "dim": dim} for version in compatible_with or []]
    return {
        "name": fingerprint.name,
        "fingerprint": fingerprint.digest,
        "dim": dim,
        "logit_scale": logit_scale,
        "compatible_with": earlier,
    }
