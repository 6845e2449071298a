"""File lookup of transformers' auto classes for compatible models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from xcompat.core.errors import XcompatError
from xcompat.core.paths import model_folder
from xcompat.encoders import EncoderSource, load_processor
from xcompat.encoders.build_limits import check_config_files
from xcompat.encoders.processor import Processor
from xcompat.encoders.transformers_encoder import IMAGE_BACKEND
from xcompat.methods import METHODS
from xcompat.models.config import CompatConfig

_PREFIX = f"{CompatConfig.model_type}-"
_PREPROCESSING = ("AutoProcessor", "AutoImageProcessor", "AutoTokenizer")


def load(
    auto_class: str,
    loader: Callable[..., Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    *args: Any,  # noqa: ANN401 - transformers' own
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401 - what the auto class gives
    """Load a model, configuration or processor for an auto class.

    A run's folder stands for its final model. ``AutoProcessor`` returns a compatible model's own processor. If a checkpoint has
    no files for ``AutoImageProcessor`` or ``AutoTokenizer``, they return parts of it: a map's files lie with its encoder, and
    timm and open_clip have other formats. ``AutoImageProcessor`` resizes like the model's own processor by default.

    Args:
        auto_class: name of the class.
        loader: its ``from_pretrained``.
        pretrained_model_name_or_path: argument of ``loader``.
        args: arguments of ``loader``.
        kwargs: arguments of ``loader``.

    Returns:
        The loaded object.
    """
    name = os.fspath(pretrained_model_name_or_path)
    if kwargs.get("subfolder"):
        return loader(name, *args, **kwargs)
    name = model_folder(name)
    if auto_class == "AutoConfig":
        _check_own_config(Path(name))
    if auto_class not in _PREPROCESSING or not _is_compatible(name, kwargs):
        return loader(name, *args, **kwargs)
    if auto_class == "AutoProcessor":
        return processor_of(name, kwargs.get("revision"), kwargs.get("trust_remote_code", False))
    if auto_class == "AutoImageProcessor":
        kwargs.setdefault("backend", IMAGE_BACKEND)
    try:
        return loader(name, *args, **kwargs)
    except (OSError, ValueError):  # transformers' errors for a missing file
        processor: Any = processor_of(name, kwargs.get("revision"), kwargs.get("trust_remote_code", False))
        if auto_class == "AutoImageProcessor":
            processor.require_images()
            return getattr(processor, "image_processor", processor)  # open_clip has none, but its processor has the same call
        tokenizer = getattr(processor, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise
        return tokenizer


def processor_of(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Processor:
    """Load the preprocessing of a compatible model, from its checkpoint or from a map's encoder.

    Args:
        name: folder or Hub name of the model.
        revision: branch, tag or commit.
        trust_remote_code: whether to run the method's code beside the model.

    Returns:
        The processor, as ``model.processor`` returns it, without loading the model.

    Raises:
        XcompatError: the map has no encoder, or preprocessing files are missing.
    """
    config: Any = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if not METHODS[config.model_type.removeprefix(_PREFIX)].embeds_in_memory:
        return load_processor(config.encoder, EncoderSource(name=name, revision=revision))
    if config.encoder is None:
        raise XcompatError(f"{name} was fitted on embeddings without an encoder: their preprocessing is unknown")
    if config.encoder["library"] == CompatConfig.model_type:
        return processor_of(config.encoder["name"], config.encoder.get("revision"))
    return load_processor(config.encoder, EncoderSource.from_description(config.encoder))


def _check_own_config(folder: Path) -> None:
    """Reject impossible numbers in a compatible model's configuration."""
    file = folder / "config.json"
    if file.is_file() and f'"{_PREFIX}' in file.read_text(encoding="utf-8", errors="replace"):
        check_config_files(folder)


def _is_compatible(name: str, given: Mapping[str, object]) -> bool:
    where = {key: given[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in given}
    try:
        return str(PreTrainedConfig.get_config_dict(name, **where)[0].get("model_type", "")).startswith(_PREFIX)
    except OSError:  # no configuration
        return False
