"""Encoders for transformers' auto classes: method calls and files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers

from xcompat.encoders.base import Encoder
from xcompat.encoders.image_encoder import ImageEncoder, ImageOnlyProcessor
from xcompat.encoders.processor import Processor
from xcompat.encoders.transformers_encoder import TransformersEncoder, TransformersProcessor

MODELS: Any = transformers.MODEL_MAPPING  # keys are configuration classes
PROCESSORS: Any = transformers.PROCESSOR_MAPPING


class Call(NamedTuple):
    """``AutoModel`` method to compute a modality's features.

    Args:
        method: method name.
        output: the attribute with the features, in the method's output.
        pooling: pooling over tokens or positions; None if the output is already pooled.
    """

    method: str
    output: str
    pooling: Literal["cls", "mean"] | None = None


def auto_calls(encoder: Encoder) -> dict[str, Call] | None:
    """Return the calls to compute an encoder's features with only ``AutoModel`` and ``AutoProcessor``, by tower.

    None if they do not suffice: visual prompts, BLIP's retrieval heads, SigLIP 2's patch grid, an added projection or stem, timm
    (its transform rejects grey images), open_clip and xcompat models.
    """
    model = encoder.model
    classes = {type(model), *(type(part) for part in model.modules() if isinstance(part, transformers.PreTrainedModel))}
    ours = any(each.__module__.partition(".")[0] == __package__.partition(".")[0] for each in classes)
    if encoder.prompts is not None or ours or type(model) is not MODELS.get(type(getattr(model, "config", None)), None):
        return None
    if isinstance(encoder, ImageEncoder):
        return {"image": _image_call(encoder)}
    if type(encoder) is not TransformersEncoder or PROCESSORS.get(type(model.config), None) is None:
        return None
    return {tower: Call(f"get_{tower}_features", "pooler_output") for tower in ("image", "text")}


@torch.no_grad()
def _image_call(encoder: ImageEncoder) -> Call:
    """Return the call, determined with a blank image."""
    device = next(encoder.parameters()).device
    blank = torch.zeros(1, 3, *encoder.description["image_size"], dtype=encoder.dtype, device=device)
    name, features = encoder.read_output(blank)
    if features.ndim == 2:
        return Call("forward", name)
    return Call("forward", name, "cls" if features.ndim == 3 and encoder.has_class_token else "mean")


def save_for_auto_classes(encoder: Encoder, processor: Processor, folder: str | Path) -> None:
    """Write an encoder with :func:`auto_calls` in float32, with merged LoRA; the encoder itself does not change."""
    if encoder.adapter_parameters() or encoder.dtype != torch.float32:
        encoder = copy.deepcopy(encoder).float()
        encoder.merge_adapters()
    encoder.save_pretrained(folder)
    assert isinstance(processor, ImageOnlyProcessor | TransformersProcessor)
    image_processor: Any = copy.deepcopy(processor.image_processor)
    image_processor.do_convert_rgb = True  # xcompat converts images before it calls the processor
    if isinstance(processor, ImageOnlyProcessor):
        image_processor.save_pretrained(folder)
    else:
        joint = PROCESSORS[type(encoder.model.config)]
        joint(image_processor=image_processor, tokenizer=processor.tokenizer).save_pretrained(folder)
