"""Tiny encoders with random weights for dry runs and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig

from xcompat.core.errors import XcompatError, nearest
from xcompat.encoders.base import Encoder, architecture_of
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import FROM_SCRATCH, ScratchSource, encoder_from_scratch, train_tokenizer
from xcompat.encoders.text_files import SENTENCE_TRANSFORMERS

_TEXTS = ("a red running shoe", "two dogs on green grass", "greek small letter alpha with tonos")
_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = 512
"""Minimum dimension for bottleneck layers in convolutional stand-ins, which keep them small."""
_TEXT = _SIZE | {"max_position_embeddings": 16}
_VISION = _SIZE | {"image_size": 32, "patch_size": 8}


def _configurations(dim: int) -> dict[str, dict[str, object]]:
    return {
        "clip": {"projection_dim": dim, "text_config": _TEXT, "vision_config": _VISION},
        "siglip": {
            "text_config": _TEXT | {"hidden_size": dim, "projection_size": dim},
            "vision_config": _VISION | {"hidden_size": dim},
        },
        "siglip2": {
            "text_config": _TEXT | {"hidden_size": dim, "projection_size": dim},
            "vision_config": _SIZE | {"hidden_size": dim, "num_patches": 16, "patch_size": 8},
        },
        "blip": {
            "image_text_hidden_size": dim,
            "projection_dim": dim,
            "text_config": _TEXT | {"encoder_hidden_size": 32},
            "vision_config": _VISION | {"initializer_range": 0.02},  # with BLIP's 1e-10 all embeddings would be equal
        },
        "vision-text-dual-encoder": {
            "projection_dim": dim,
            "text_config": _TEXT | {"model_type": "bert"},
            "vision_config": _VISION | {"model_type": "vit"},
        },
    }


def _image_configurations(dim: int) -> dict[str, dict[str, Any]]:
    layer = "basic" if dim < WIDE else "bottleneck"  # convolutions with a quarter of the width
    wide = {"initializer_range": 0.5}  # with .02 differences would shrink below float32 precision
    return {
        # Halves 32 pixels five times. On AVX2, oneDNN writes outside its memory in gradients of convolutions with 4 channels.
        "iresnet": {"depths": [1] * 5, "hidden_sizes": [8, 8, 8, 8, dim]},
        "resnet": {"layer_type": layer, "embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, dim]},
        "mobilenet_v1": {"depth_multiplier": dim / 1024, "min_depth": dim, **wide},
        "mobilenet_v2": _mobilenet_v2(dim) | wide,
        "vit": _VISION | {"hidden_size": dim},
        "timm_wrapper": {
            "architecture": "resnet18" if dim < WIDE else "resnet50",
            "model_args": {"channels": [8, 8, 8, dim if dim < WIDE else dim // 4], "layers": [1, 1, 1, 1]},
        },
        "clip_vision_model": _VISION | {"projection_dim": dim, "architectures": ["CLIPVisionModelWithProjection"]},
    }


def _mobilenet_v2(dim: int) -> dict[str, object]:
    """Return a narrow architecture, with a wide last layer if ``dim`` is the usual 1280."""
    if dim == 1280:
        return {"depth_multiplier": 0.1, "finegrained_output": True}
    return {"depth_multiplier": dim / 1280, "depth_divisible_by": dim, "finegrained_output": False}


def stand_in(model_type: str = "clip", dim: int = 16, seed: int = 0) -> tuple[Encoder, Processor]:
    """Build a tiny encoder in evaluation mode, and its processor.

    Args:
        model_type: architecture in transformers (``timm_wrapper`` for timm), ``open_clip`` or ``sentence-transformers``.
        dim: D, a multiple of 2.
        seed: random seed for the weights.

    Example:
        >>> encoder, processor = stand_in("clip", dim=8)
        >>> encoder.embed_texts(**processor.texts(["a red shoe"])).shape
        torch.Size([1, 8])
    """
    if model_type == "open_clip":
        return _open_clip(dim, seed)
    if model_type == SENTENCE_TRANSFORMERS:
        return _text_stand_in(dim, seed)
    image_models = _image_configurations(dim)
    configurations = _configurations(dim) | image_models
    if model_type not in configurations:
        raise XcompatError(
            f"no stand-in for {model_type!r}; {nearest(model_type, [*configurations, 'open_clip', SENTENCE_TRANSFORMERS])}"
        )
    image_size = 32 if model_type in image_models else None
    model = {"model_type": model_type, **configurations[model_type]}
    source = ScratchSource(model=model, vocab_size=300, image_size=image_size)
    encoder, processor = encoder_from_scratch(source, _TEXTS, seed)
    return encoder.eval(), processor


def small_scratch(source: ScratchSource, dim: int) -> ScratchSource:
    """Return a tiny architecture of the same type, or the source itself for image-text models and types without a stand-in.

    AlexNet has only one size, so a small ResNet replaces it.

    Args:
        source: architecture to train from scratch.
        dim: the tiny architecture's D, a multiple of 2.

    Example:
        >>> large = ScratchSource(model={"model_type": "resnet", "depths": [3, 4, 6, 3]}, image_size=224)
        >>> small_scratch(large, 16).model["depths"]
        [1, 1]
    """
    model_type = source.model["model_type"]
    if model_type == "alexnet":
        model_type = "resnet"
    if not source.image_only or model_type not in (tiny := _image_configurations(dim)):
        return source
    return source.model_copy(update={"model": {"model_type": model_type, **tiny[model_type]}, "image_size": 32})


def _open_clip(dim: int, seed: int) -> tuple[Encoder, Processor]:
    from xcompat.encoders.open_clip_encoder import build_open_clip_encoder, load_open_clip_processor

    model_cfg = {
        "embed_dim": dim,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},  # heads are 64 wide
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    description = {
        "library": "open_clip",
        "name": "stand-in",
        "revision": None,
        "config": {"model_cfg": model_cfg, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_open_clip_encoder(description)
    return encoder.eval(), load_open_clip_processor(Path(), description)


def _text_stand_in(dim: int, seed: int) -> tuple[Encoder, Processor]:
    from xcompat.encoders.text_encoder import build_text_encoder
    from xcompat.encoders.text_processor import make_text_processor

    tokenizer = train_tokenizer(_TEXTS, 300, 16)
    sizes: dict[str, Any] = _TEXT | {
        "hidden_size": dim,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": False,
    }
    pooling = {"embedding_dimension": dim, "pooling_mode": "mean", "include_prompt": True}
    config = {
        "modules": [
            {"module": "Transformer", "architecture": "BertModel", "config": architecture_of(BertConfig(**sizes).to_dict())},
            {"module": "Pooling", "settings": pooling},
        ],
        "max_length": 16,
        "special_tokens": True,
        "lower_case": False,
        "truncate_dim": None,
    }
    prompts = {"query_prompt": "query: ", "passage_prompt": ""}
    description = {
        "library": SENTENCE_TRANSFORMERS,
        "name": FROM_SCRATCH,
        "revision": None,
        "config": config,
        "embedding_dim": dim,
        **prompts,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_text_encoder(description)
    return encoder.eval(), make_text_processor(tokenizer, description)


def save_stand_in(folder: str | Path, model_type: str = "clip", dim: int = 16, seed: int = 0) -> str:
    """Write a stand-in in its library's format and return the folder; other arguments as in :func:`stand_in`."""
    encoder, processor = stand_in(model_type, dim, seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    encoder.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
