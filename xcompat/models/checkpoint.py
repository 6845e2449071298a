"""Checkpoints for compatible models, with or without their base's weights."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Set
from pathlib import Path
from typing import Any, Self

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
from xcompat.models.query_memory import QueryMemory


class CheckpointModel(PreTrainedModel):
    """Base class of :class:`~xcompat.models.base.CompatModel` for reading and writing."""

    encoder: Encoder | None
    _processor: Processor | None
    memory: QueryMemory | None
    revision: str | None = None
    """Commit of a model from the Hub; None for a folder."""
    _left_out: Set[str] = frozenset()
    _read_from: tuple[Any, dict[str, Any]] | None = None
    """Source of the weights, if they were loaded with a dtype."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[Any] | None,
        *model_args: Any,  # noqa: ANN401 - transformers' own
        **kwargs: Any,  # noqa: ANN401
    ) -> Self:
        """Load a checkpoint (safetensors only) in evaluation mode.

        Args:
            pretrained_model_name_or_path: model folder, run folder or Hub name.
            model_args: as in transformers.
            kwargs: as in transformers. With ``dtype``, the model (and a map's encoder) computes in this precision and returns
                float32 embeddings. Its fingerprint stays the checkpoint's, but saving it creates another model.

        Returns:
            The model (with loading information, if requested).

        Raises:
            XcompatError: a file has changed; weights are missing, unexpected, in another shape or not safetensors; or an adapter
                checkpoint's base is missing or has changed.
        """
        name = pretrained_model_name_or_path
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
            loaded: Any = super().from_pretrained(name, *model_args, output_loading_info=True, **kwargs)
            if not is_folder:
                _require_whole_snapshot(str(name), subfolder=subfolder, revision=kwargs["revision"], **where)
        model, info = loaded
        model.revision = getattr(kwargs["revision"], "resolved", None)
        if kwargs.get("dtype", kwargs.get("torch_dtype", "auto")) != "auto":
            model._read_from = name, {**where, "revision": kwargs["revision"]}
        if model._left_out:
            info["missing_keys"] = {*info["missing_keys"], *(model._left_out - model._restore_base_weights())}
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
        model._notice_role()
        return loaded if with_info else model

    def _notice_role(self) -> None:
        """Print a notice if a map fitted on passages maps queries (or the reverse), and their prompts differ."""
        described = self.config.encoder or {}
        prompts = {role: described.get(f"{role}_prompt") for role in ("query", "passage")}
        learned = "query" if described.get("role") == QUERIES else "passage"
        mapped = "passage" if self.maps_galleries else "query"
        if self.embeds_in_memory and prompts["query"] != prompts["passage"] and mapped != learned:
            notice(
                f"{self.name_or_path} maps embeddings with the prompt {prompts[mapped]!r}, but was fitted on embeddings with "
                f"{prompts[learned]!r}: fit the map again with the right prompt (use Embedder.for_queries for the query prompt)"
            )

    @property
    @abstractmethod
    def processor(self) -> Processor:
        """Return the encoder's preprocessing."""

    def _load_unrounded(self) -> Self:
        """Return the saved checkpoint if this model has the same weights in another precision; otherwise the model."""
        if self._read_from is None:
            return self
        name, where = self._read_from
        try:
            saved = type(self).from_pretrained(name, **where)
        except (OSError, XcompatError) as error:
            raise XcompatError(
                f"cannot verify this half-precision model, because its source {name} is unavailable: "
                f"{' '.join(str(error).split())}; restore it or load the model from its new location"
            ) from error
        own = self.state_dict()
        if saved.state_dict().keys() != own.keys():
            saved.for_inference()  # this model may lack its training-only parts
        weights = saved.state_dict()
        same = weights.keys() == own.keys() and all(torch.equal(weights[key].to(own[key].dtype), own[key].cpu()) for key in own)
        return saved if same else self

    # ------------------------------------------------------------------------------------------------- writing

    def export(self, folder: str | Path) -> None:
        """Write the finished model with all parts for inference.

        Args:
            folder: output folder for ``from_pretrained``, created if missing.
        """
        self.save_pretrained(folder)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Write weights, configuration and, unless it is a map, its encoder's preprocessing.

        Args:
            save_directory: output folder for ``from_pretrained``, created if missing.
            args: as in transformers.
            kwargs: as in transformers.

        Raises:
            XcompatError: the preprocessing is no longer at the model's source; the weights are written.
        """
        if self.config.weights == "adapters":
            kwargs["state_dict"] = self._differences_from_base(kwargs.get("state_dict") or self.state_dict())
        super().save_pretrained(save_directory, *args, **kwargs)
        if is_main_process():
            copy_permissions(Path(save_directory))
        is_known = self._processor is not None or bool(self.name_or_path)  # False for a model built from a configuration
        if self.encoder is not None and is_known and is_main_process():
            self.processor.save_pretrained(Path(save_directory))
        if is_main_process():
            self._save_lora(Path(save_directory) / LORA)
            record_model(Path(save_directory))

    def _save_lora(self, folder: Path) -> None:
        """Write an additional LoRA copy in PEFT's format.

        PEFT's format has no prompts or heads, and transformers would load such a folder with PEFT only.
        """
        adapters = AdapterConfig(**(self.config.adapters or {}))
        if self.config.weights == "adapters" and self.encoder is not None and adapters.lora is not None:
            base = self.config.encoder
            save_lora(self.encoder.peft_base, adapters.lora, plain_name(base["name"]), base.get("revision"), folder)
            copy_permissions(folder, "adapter_config.json")

    @abstractmethod
    def for_inference(self) -> Self:
        """Return the model in evaluation mode, without training-only parts."""

    # -------------------------------------------------------------------------------------- adapters without their base

    def leave_out_base(self) -> Self:
        """Set the model to save only adapters, prompts and heads, with its base's commit.

        Raises:
            XcompatError: it has no adapters, or its base cannot be loaded.
            FingerprintMismatchError: the base has changed since training.
        """
        described = self.config.encoder
        if self.encoder is None:
            raise XcompatError(f"{type(self).__name__} is a map without encoder, so there is no base to leave out; save the map")
        if self.config.adapters is None:
            raise XcompatError(f"{type(self).__name__} was trained without adapters, so its whole encoder is new; save all of it")
        if is_hub_name(described["name"]) and (found := look_up(described["name"], described.get("revision"))) is not None:
            self.config.encoder = {**described, "revision": found.commit}
        self._base_weights()
        self.config.weights = "adapters"
        return self

    def _base_weights(self) -> dict[str, Tensor]:
        """Load the base weights, under the parameter names that this model has without adapters."""
        described = self.config.encoder
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

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:  # noqa: ANN401 - transformers' own
        """Hide base weights from transformers' warning about missing keys."""
        super()._adjust_missing_and_unexpected_keys(loading_info)
        if self.config.weights == "adapters":
            self._left_out = {key for key in loading_info.missing_keys if key.startswith("encoder.model.")}
            loading_info.missing_keys -= self._left_out

    @torch.no_grad()
    def _restore_base_weights(self) -> set[str]:
        """Load the missing weights from the base and return their names."""
        base, own = self._base_weights(), self.state_dict()
        taken = {key for key in self._left_out if _without_adapter(key) in base}
        for key in taken:
            own[key].copy_(base[_without_adapter(key)])
        return taken

    def _differences_from_base(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        base = self._base_weights()

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


def load_map_encoder(described: dict[str, Any]) -> tuple[Any, Processor]:
    """Load the frozen encoder in ``config.encoder``, and its preprocessing.

    Raises:
        FingerprintMismatchError: the encoder has changed since the map was made.
    """
    name = described["name"]
    if described["library"] == "xcompat":
        with reading_model(name):
            model: Any = AutoModel.from_pretrained(name, revision=described.get("revision") or "main").for_inference()
        found, processor = model.stored_fingerprint(), model.processor
    else:
        model, processor = load_encoder(EncoderSource.from_description(described))
        found, model = model.fingerprint(processor), model.requires_grad_(False).eval()
    Fingerprint(described["fingerprint"], name).require(found, f"the encoder at {name}")
    return model, processor
