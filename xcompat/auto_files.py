"""Where transformers' auto classes find the files of a compatible model: in the folder of a run, and at the encoder of a map."""

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
    """Load what an auto class loads of a name.

    A run's folder stands for the model that it ended with. ``AutoProcessor`` of a compatible model gives the model's own
    processor. ``AutoImageProcessor``, which resizes as that one does unless told otherwise, and ``AutoTokenizer`` give its parts
    where a checkpoint has no files of theirs: a map has none, as its encoder and its preprocessing lie elsewhere, and timm and
    open_clip have formats of their own.

    Args:
        auto_class: name of the class.
        loader: its ``from_pretrained``.
        pretrained_model_name_or_path: as it takes it.
        args: as it takes them.
        kwargs: as it takes them.

    Returns:
        What the class gives.
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
        return processor_of(name, kwargs.get("revision"))
    if auto_class == "AutoImageProcessor":
        kwargs.setdefault("backend", IMAGE_BACKEND)
    try:
        return loader(name, *args, **kwargs)
    except (OSError, ValueError):  # transformers' ways to say that there is none
        processor: Any = processor_of(name, kwargs.get("revision"))
        if auto_class == "AutoImageProcessor":
            processor.require_images()
            return getattr(processor, "image_processor", processor)  # open_clip has none, and a processor is called like one
        tokenizer = getattr(processor, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise
        return tokenizer


def processor_of(name: str, revision: str | None = None) -> Processor:
    """Load the preprocessing of a compatible model: from its checkpoint, or from where the encoder of a map lies.

    Args:
        name: folder or Hub name of the model.
        revision: branch, tag or commit.

    Returns:
        The processor, as ``model.processor`` gives it, without the model.

    Raises:
        XcompatError: the map knows no encoder, or there is no preprocessing where it should be.
    """
    config: Any = AutoConfig.from_pretrained(name, revision=revision)
    if not METHODS[config.model_type.removeprefix(_PREFIX)].embeds_in_memory:
        return load_processor(config.encoder, EncoderSource(name=name, revision=revision))
    if config.encoder is None:
        raise XcompatError(f"{name} was fitted on embeddings alone: no preprocessing is known of what made them")
    if config.encoder["library"] == CompatConfig.model_type:
        return processor_of(config.encoder["name"], config.encoder.get("revision"))
    return load_processor(config.encoder, EncoderSource.described(config.encoder))


def _check_own_config(folder: Path) -> None:
    """Refuse the configuration of a compatible model if a number in it cannot be; transformers reads those of other models."""
    file = folder / "config.json"
    if file.is_file() and f'"{_PREFIX}' in file.read_text(encoding="utf-8", errors="replace"):
        check_config_files(folder)


def _is_compatible(name: str, given: Mapping[str, Any]) -> bool:
    where = {key: given[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in given}
    try:
        return str(PreTrainedConfig.get_config_dict(name, **where)[0].get("model_type", "")).startswith(_PREFIX)
    except OSError:  # no configuration: of another kind
        return False
