"""Reading and writing of compatible models, with or without their base's weights."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.utils.hub import cached_file, resolve_revision

from xcompat.core.checksums import CHECKSUMS
from xcompat.core.distributed import is_main_process
from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import model_folder
from xcompat.core.progress import notice
from xcompat.encoders import AdapterConfig, EncoderSource, load_encoder, reading_model
from xcompat.encoders.adapters import save_lora
from xcompat.encoders.alignment import copy_unaligned
from xcompat.encoders.base import Encoder
from xcompat.encoders.model_files import LORA, copy_permissions, record_model, require_whole
from xcompat.encoders.processor import Processor
from xcompat.hub.endpoint import is_hub_name, look_up, plain_name
from xcompat.models.config import QUERIES


class _SavedModel(Protocol):
    config: Any
    encoder: Encoder | None
    name_or_path: str | None
    _processor: Processor | None
    _left_out: Set[str]
    _read_from: tuple[Any, dict[str, Any]] | None

    @property
    def processor(self) -> Processor: ...

    def state_dict(self) -> dict[str, Tensor]: ...


M = TypeVar("M", bound=_SavedModel)


def load(cls: type[M], name: str | os.PathLike[Any] | None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - transformers' own
    """Load a model of a class: :meth:`~xcompat.models.CompatModel.from_pretrained`."""
    if name is not None and not kwargs.get("subfolder"):
        name = model_folder(name)
    with_info = kwargs.pop("output_loading_info", False)
    kwargs.setdefault("use_safetensors", True)
    where: dict[str, Any] = {key: kwargs[key] for key in ("token", "cache_dir", "local_files_only") if key in kwargs}
    kwargs["revision"] = resolve_revision(name, kwargs.get("revision") or "main", **where)
    subfolder = kwargs.get("subfolder", "")
    is_folder = Path(str(name)).is_dir()
    with reading_model(str(name)):
        if is_folder:
            require_whole(Path(str(name), subfolder))
        read: Any = PreTrainedModel.from_pretrained
        model, info = loaded = read.__func__(cls, name, *args, output_loading_info=True, **kwargs)
        if not is_folder:
            _require_whole_snapshot(str(name), subfolder=subfolder, revision=kwargs["revision"], **where)
    model.revision = getattr(kwargs["revision"], "resolved", None)
    if kwargs.get("dtype", kwargs.get("torch_dtype", "auto")) != "auto":
        model._read_from = name, {**where, "revision": kwargs["revision"]}
    if model._left_out:
        info["missing_keys"] = {*info["missing_keys"], *(model._left_out - _restore_base_weights(model))}
    if model.encoder is not None:
        model.encoder.rebuild_masks()  # transformers skips modules with all weights in the file
    copy_unaligned(model)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            some = ", ".join(map(str, sorted(info[kind], key=str)[:3]))
            raise XcompatError(
                f"the checkpoint {name} does not match its configuration: "
                f"{len(info[kind])} {kind.replace('_', ' ')}, e.g. {some}; fit or train it again with this version of xcompat"
            )
    if model.memory is not None:
        model.memory.check()
    model.set_trainable()
    _notice_role(model)
    return loaded if with_info else model


def load_unrounded(model: M) -> M:
    """Return the saved checkpoint if a model has the same weights in another precision; otherwise the model."""
    if model._read_from is None:
        return model
    name, where = model._read_from
    kind: Any = type(model)
    try:
        saved = kind.from_pretrained(name, **where)
    except (OSError, XcompatError) as error:
        raise XcompatError(
            f"cannot verify this half-precision model, because its source {name} is unavailable: "
            f"{' '.join(str(error).split())}; restore it or load the model from its new location"
        ) from error
    own = model.state_dict()
    if saved.state_dict().keys() != own.keys():
        saved.for_inference()  # this model may lack its training-only parts
    weights = saved.state_dict()
    same = weights.keys() == own.keys() and all(torch.equal(weights[key].to(own[key].dtype), own[key].cpu()) for key in own)
    return saved if same else model


def _notice_role(model: Any) -> None:  # noqa: ANN401 - a loaded model
    """Print a notice if a map fitted on passages maps queries (or the reverse), and their prompts differ."""
    described = model.config.encoder or {}
    prompts = {role: described.get(f"{role}_prompt") for role in ("query", "passage")}
    learned = "query" if described.get("role") == QUERIES else "passage"
    mapped = "passage" if model.maps_galleries else "query"
    if model.embeds_in_memory and prompts["query"] != prompts["passage"] and mapped != learned:
        notice(
            f"{model.name_or_path} maps embeddings with the prompt {prompts[mapped]!r}, but was fitted on embeddings with "
            f"{prompts[learned]!r}: fit the map again with the right prompt (use Embedder.for_queries for the query prompt)"
        )


def save(model: _SavedModel, folder: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - transformers' own
    """Write a model's files: :meth:`~xcompat.models.CompatModel.save_pretrained`."""
    if model.config.weights == "adapters":
        kwargs["state_dict"] = _differences_from_base(model, kwargs.get("state_dict") or model.state_dict())
    write: Any = PreTrainedModel.save_pretrained
    write(model, folder, *args, **kwargs)
    if not is_main_process():
        return
    folder = Path(folder)
    copy_permissions(folder)
    is_known = model._processor is not None or bool(model.name_or_path)  # False for a model built from a configuration
    if model.encoder is not None and is_known:
        model.processor.save_pretrained(folder)
    _save_lora(model, folder / LORA)
    record_model(folder)


def _save_lora(model: _SavedModel, folder: Path) -> None:
    """Write an additional LoRA copy in PEFT's format.

    PEFT's format has no prompts or heads, and transformers would load such a folder with PEFT only.
    """
    adapters = AdapterConfig(**(model.config.adapters or {}))
    if model.config.weights == "adapters" and model.encoder is not None and adapters.lora is not None:
        base = model.config.encoder
        save_lora(model.encoder.peft_base, adapters.lora, plain_name(base["name"]), base.get("revision"), folder)
        copy_permissions(folder, "adapter_config.json")


# ------------------------------------------------------------------------------------------ adapters without their base


def leave_out_base(model: _SavedModel) -> None:
    """Set a model to save only differences from its base: :meth:`~xcompat.models.CompatModel.leave_out_base`."""
    described, name = model.config.encoder, type(model).__name__
    if model.encoder is None:
        raise XcompatError(f"{name} is a map without encoder, so there is no base to leave out; save the map")
    if model.config.adapters is None:
        raise XcompatError(f"{name} was trained without adapters, so its whole encoder is new; save all of it")
    if is_hub_name(described["name"]) and (found := look_up(described["name"], described.get("revision"))) is not None:
        model.config.encoder = {**described, "revision": found.commit}
    _base_weights(model)
    model.config.weights = "adapters"


def hide_base_weights(model: _SavedModel, loading_info: Any) -> None:  # noqa: ANN401 - transformers' own
    """Hide base weights from transformers' warning about missing keys; :func:`load` restores them."""
    if model.config.weights == "adapters":
        model._left_out = {key for key in loading_info.missing_keys if key.startswith("encoder.model.")}
        loading_info.missing_keys -= model._left_out


def _base_weights(model: _SavedModel) -> dict[str, Tensor]:
    """Load the base weights, under the parameter names that a model has without adapters."""
    described = model.config.encoder
    name, revision = described["name"], described.get("revision")
    at = f"{name} at {revision}" if revision else name
    try:
        base, processor = load_encoder(EncoderSource.from_description(described))
    except XcompatError as error:
        raise XcompatError(f"the base {at} of these adapters is unavailable: {error}") from error
    wanted, found = Fingerprint(described["fingerprint"], name), base.fingerprint(processor)
    if found != wanted:
        raise FingerprintMismatchError(
            f"these adapters need {wanted}, but the base {at} is {found}; restore the base of their training, or "
            "choose a checkpoint with all weights"
        )
    return {f"encoder.{key}": tensor for key, tensor in base.state_dict().items()}


@torch.no_grad()
def _restore_base_weights(model: _SavedModel) -> set[str]:
    """Load the missing weights from the base and return their names."""
    base, own = _base_weights(model), model.state_dict()
    taken = {key for key in model._left_out if _without_adapter(key) in base}
    for key in taken:
        own[key].copy_(base[_without_adapter(key)])
    return taken


def _differences_from_base(model: _SavedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    base = _base_weights(model)

    def is_same(key: str, tensor: Tensor) -> bool:
        original = base.get(_without_adapter(key))
        return original is not None and torch.equal(original.to(tensor.dtype), tensor.cpu())  # rounded as in loading

    return {key: tensor for key, tensor in weights.items() if not is_same(key, tensor)}


def _require_whole_snapshot(name: str, **where: object) -> None:
    """Raise if a Hub model's downloaded files differ from the pushed files."""
    record = cached_file(name, CHECKSUMS, _raise_exceptions_for_missing_entries=False, **where)
    if record is not None:
        require_whole(Path(record).parent, in_part=True)


def _without_adapter(key: str) -> str:
    """Return a weight's name without LoRA's wrapper."""
    return key.replace(".base_layer.", ".")


def load_map_encoder(described: dict[str, Any] | None) -> tuple[Any, Processor]:
    """Load the frozen encoder in ``config.encoder``, and its preprocessing.

    Raises:
        FingerprintMismatchError: the encoder has changed since the map was made.
        XcompatError: the map has no encoder.
    """
    if described is None:
        raise XcompatError(
            "this map was fitted on embeddings only: use embeddings as queries (--queries q.npy), set your "
            "embedding function (--embed-with, embed_with=), or fit the map again with --new-model"
        )
    name = described["name"]
    if described["library"] == "xcompat":
        with reading_model(name):
            where = {"revision": described.get("revision") or "main", "trust_remote_code": False}  # None would ask the user
            model: Any = AutoModel.from_pretrained(name, **where).for_inference()
        found, processor = model.lineage.stores.fingerprint, model.processor
    else:
        model, processor = load_encoder(EncoderSource.from_description(described))
        found, model = model.fingerprint(processor), model.requires_grad_(False).eval()
    Fingerprint(described["fingerprint"], name).require(found, f"the encoder at {name}")
    return model, processor
