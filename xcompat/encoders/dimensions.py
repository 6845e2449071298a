"""Embedding dimensions from configurations, without weights or downloads."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json
from xcompat.core.paths import is_local
from xcompat.encoders import EncoderSource
from xcompat.encoders.build_limits import check_config, limit_model_size
from xcompat.encoders.scratch import ScratchSource, image_model
from xcompat.encoders.text_files import MODEL_CONFIG, MODULES, SENTENCE_TRANSFORMERS

_OPENAI = re.compile(r"openai/clip-vit-(base|large)-patch(\d+)(?:-\d+)?")
_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
EDGE = 224
"""Default side of images for measuring a model."""


def read_embedding_dim(source: EncoderSource) -> int | None:
    """Read a model's D from its configuration, or from the timm and open_clip registries.

    Args:
        source: folder, or Hub name in the Hub cache or registries.

    Returns:
        None if the local configuration is missing or insufficient.
    """
    if source.library == SENTENCE_TRANSFORMERS:
        folder = _cached_folder(source, MODULES)
        dim = _text_dim(folder) if folder is not None else None
        return source.truncate_dim or dim
    if source.library == "open_clip":
        folder = _cached_folder(source, "open_clip_config.json")
        if folder is None:
            return _registered_dim(source.place)
        return int(read_json(folder / "open_clip_config.json")["model_cfg"]["embed_dim"])
    folder = _cached_folder(source, "config.json")
    if folder is None:
        return _registered_dim(source.place)
    config = read_json(folder / "config.json")
    if str(config.get("model_type", "")).startswith("xcompat"):
        return int(config.get("embedding_dim") or 0) or None
    check_config(config, str(folder / "config.json"))
    return _dim_of_config(config, source.name)


def scratch_dim(source: ScratchSource) -> int | None:
    """Return an architecture's D for training from scratch."""
    if not source.image_only:
        return _dim_of_config(source.model, "model")
    with torch.device("meta"):
        config, model = image_model(source)
    return _measured_dim(model, source.image_size or int(getattr(config, "image_size", EDGE)))


def _cached_folder(source: EncoderSource, file: str) -> Path | None:
    """Return the folder, local or in the Hub cache, if it contains the file."""
    from huggingface_hub import try_to_load_from_cache

    place = source.place.removeprefix("hf-hub:")
    if Path(place).is_dir():
        return Path(place) if (Path(place) / file).is_file() else None
    if is_local(place):
        return None
    found = try_to_load_from_cache(place, file, revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None


def _registered_dim(name: str) -> int | None:
    import open_clip
    import timm

    name = name.removeprefix("hf-hub:")
    owner, _, model = name.partition("/")
    architecture = _open_clip_models().get(name)
    if (found := _OPENAI.fullmatch(name)) is not None:
        prefix = f"timm/vit_{found[1]}_patch{found[2]}_clip_"
        architecture = next((known for each, known in _open_clip_models().items() if each.startswith(prefix)), None)
    if architecture is not None:
        return int(open_clip.get_model_config(architecture)["embed_dim"])
    if owner == "timm" and timm.is_model(model.partition(".")[0]):
        with torch.device("meta"):
            features: Any = timm.create_model(model.partition(".")[0], pretrained=False, num_classes=0).num_features
            return int(features)
    return None


@cache
def _open_clip_models() -> dict[str, str]:
    """Return Hub name -> architecture for all open_clip models."""
    from open_clip.pretrained import _PRETRAINED

    weights = [(name, about) for name, each in _PRETRAINED.items() for about in each.values()]
    return {about["hf_hub"].rstrip("/"): name for name, about in weights if about.get("hf_hub")}


def _text_dim(folder: Path) -> int | None:
    """Return the dimension in the last module that sets it."""
    about = read_json(folder / MODEL_CONFIG) if (folder / MODEL_CONFIG).is_file() else {}
    if about.get("truncate_dim"):
        return int(about["truncate_dim"])
    for module in reversed(read_json(folder / MODULES)):
        file = folder / module["path"] / "config.json"
        settings = read_json(file) if file.is_file() else {}
        if "out_features" in settings:
            return int(settings["out_features"])
        width = settings.get("embedding_dimension", settings.get("word_embedding_dimension"))
        if width is not None:
            modes = sum(bool(settings.get(f"pooling_mode_{mode}")) for mode in _POOLINGS)
            named = settings.get("pooling_mode")
            return int(width) * max(1, modes, len(named) if isinstance(named, list) else 0)
    return None


def _dim_of_config(values: dict[str, Any], name: str) -> int | None:
    from transformers import AutoConfig

    from xcompat.encoders.image_encoder import build_image_model
    from xcompat.encoders.transformers_encoder import embedding_dim

    try:
        config: Any = AutoConfig.for_model(**values)
        if hasattr(config, "text_config"):
            return int(embedding_dim(config))
        if getattr(config, "model_args", None):
            config.model_args.pop("num_classes", None)
        with limit_model_size(name), torch.device("meta"):
            model = build_image_model(config)
    except XcompatError:
        raise
    except Exception:  # libraries raise errors of many types; loading the model reports them
        return None
    size = (getattr(config, "pretrained_cfg", None) or {}).get("input_size") or (3, getattr(config, "image_size", EDGE))
    return _measured_dim(model, size[-1] if isinstance(size[-1], int) else EDGE)


def _measured_dim(model: torch.nn.Module, edge: int) -> int | None:
    """Return an image model's feature width, measured on the meta device."""
    from xcompat.encoders.image_encoder import ImageEncoder

    described = {"library": ImageEncoder.library, "name": "", "config": {}, "image_size": [edge, edge]}
    encoder = ImageEncoder(model, 0, described).eval()
    try:
        with torch.no_grad():
            return int(encoder._image_features(torch.empty(1, 3, edge, edge, device="meta")).shape[1])
    except Exception:  # as above; some models need values, which the meta device lacks
        return None
