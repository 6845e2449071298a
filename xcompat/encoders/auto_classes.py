"""Encoders that transformers' own auto classes load, without this library: how they are called there, and their folder."""

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

MODELS: Any = transformers.MODEL_MAPPING
PROCESSORS: Any = transformers.PROCESSOR_MAPPING  # both from the class of a configuration


class Call(NamedTuple):
    """How the class that ``AutoModel`` loads gives the features of one modality.

    Args:
        method: its method.
        output: name of what is read of the method's output.
        pooling: what is made of an output per token or position; None where features come out as they are.
    """

    method: str
    output: str
    pooling: Literal["cls", "mean"] | None = None


def auto_calls(encoder: Encoder) -> dict[str, Call] | None:
    """Return how ``AutoModel`` and ``AutoProcessor`` alone give an encoder's features.

    Args:
        encoder: of any library.

    Returns:
        The call for ``image`` and, where there is a text tower, for ``text``. None where it takes more than they know: visual
        prompts, BLIP's retrieval heads, SigLIP 2's grid of patches, a projection or stem beside the architecture, timm (whose
        transform takes no grey pictures) and open_clip.
    """
    model = encoder.model
    if encoder.prompts is not None or type(model) is not MODELS.get(type(getattr(model, "config", None)), None):
        return None
    if isinstance(encoder, ImageEncoder):
        return {"image": _image_call(encoder)}
    if type(encoder) is not TransformersEncoder or PROCESSORS.get(type(model.config), None) is None:
        return None
    return {tower: Call(f"get_{tower}_features", "pooler_output") for tower in ("image", "text")}


@torch.no_grad()
def _image_call(encoder: ImageEncoder) -> Call:
    """Ask the model itself, with a blank picture."""
    device = next(encoder.parameters()).device
    blank = torch.zeros(1, 3, *encoder.description["image_size"], dtype=encoder.dtype, device=device)
    name, features = encoder.read_output(blank)
    if features.ndim == 2:
        return Call("forward", name)
    return Call("forward", name, "cls" if features.ndim == 3 and encoder.has_class_token else "mean")


def save_for_auto_classes(encoder: Encoder, processor: Processor, folder: str | Path) -> None:
    """Write an encoder that has :func:`auto_calls`, LoRA merged, in float32, as ``AutoModel`` and ``AutoProcessor`` read it.

    Args:
        encoder: left as it is.
        processor: its preprocessing.
        folder: an existing folder.
    """
    if encoder.adapter_parameters() or encoder.dtype != torch.float32:
        encoder = copy.deepcopy(encoder).float()
        encoder.merge_adapters()
    encoder.save_pretrained(folder)
    assert isinstance(processor, ImageOnlyProcessor | TransformersProcessor)
    image_processor: Any = copy.deepcopy(processor.image_processor)
    image_processor.do_convert_rgb = True  # what this library does before it calls one
    if isinstance(processor, ImageOnlyProcessor):
        image_processor.save_pretrained(folder)
    else:
        joint = PROCESSORS[type(encoder.model.config)]
        joint(image_processor=image_processor, tokenizer=processor.tokenizer).save_pretrained(folder)
