"""Encoders that transformers' auto classes load without this library: the calls that embed there, and the folder to write."""

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

MODELS: Any = transformers.MODEL_MAPPING  # both map a configuration's class
PROCESSORS: Any = transformers.PROCESSOR_MAPPING


class Call(NamedTuple):
    """How a class that ``AutoModel`` loads computes the features of one modality.

    Args:
        method: the name of its method.
        output: the attribute of the method's output that holds the features.
        pooling: how outputs per token or position become features; None if the output is the features.
    """

    method: str
    output: str
    pooling: Literal["cls", "mean"] | None = None


def auto_calls(encoder: Encoder) -> dict[str, Call] | None:
    """Return how ``AutoModel`` and ``AutoProcessor`` alone compute an encoder's features.

    Args:
        encoder: of any library.

    Returns:
        The call for ``image`` and, if there is a text tower, for ``text``. None for encoders beyond these classes: with visual
        prompts, BLIP's retrieval heads, SigLIP 2's grid of patches, an added projection or stem, of timm (whose transform takes
        no grey pictures), of open_clip or of this library.
    """
    model = encoder.model
    ours = type(model).__module__.partition(".")[0] == __package__.partition(".")[0]
    if encoder.prompts is not None or ours or type(model) is not MODELS.get(type(getattr(model, "config", None)), None):
        return None
    if isinstance(encoder, ImageEncoder):
        return {"image": _image_call(encoder)}
    if type(encoder) is not TransformersEncoder or PROCESSORS.get(type(model.config), None) is None:
        return None
    return {tower: Call(f"get_{tower}_features", "pooler_output") for tower in ("image", "text")}


@torch.no_grad()
def _image_call(encoder: ImageEncoder) -> Call:
    """Find the call from the model's output for a blank image."""
    device = next(encoder.parameters()).device
    blank = torch.zeros(1, 3, *encoder.description["image_size"], dtype=encoder.dtype, device=device)
    name, features = encoder.read_output(blank)
    if features.ndim == 2:
        return Call("forward", name)
    return Call("forward", name, "cls" if features.ndim == 3 and encoder.has_class_token else "mean")


def save_for_auto_classes(encoder: Encoder, processor: Processor, folder: str | Path) -> None:
    """Write an encoder that has :func:`auto_calls` for ``AutoModel`` and ``AutoProcessor``, in float32 and with LoRA merged.

    Args:
        encoder: not changed.
        processor: its preprocessing.
        folder: an existing folder.
    """
    if encoder.adapter_parameters() or encoder.dtype != torch.float32:
        encoder = copy.deepcopy(encoder).float()
        encoder.merge_adapters()
    encoder.save_pretrained(folder)
    assert isinstance(processor, ImageOnlyProcessor | TransformersProcessor)
    image_processor: Any = copy.deepcopy(processor.image_processor)
    image_processor.do_convert_rgb = True  # this library converts images before it calls the processor
    if isinstance(processor, ImageOnlyProcessor):
        image_processor.save_pretrained(folder)
    else:
        joint = PROCESSORS[type(encoder.model.config)]
        joint(image_processor=image_processor, tokenizer=processor.tokenizer).save_pretrained(folder)
