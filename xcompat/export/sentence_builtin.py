"""Export as sentence-transformers' own modules, which load without xcompat."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from torch import nn

from xcompat.encoders.auto_classes import Call, auto_calls, save_for_auto_classes
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import SENTENCE_TRANSFORMERS
from xcompat.export.modules import Space, convert_read_errors
from xcompat.heads import first_dims
from xcompat.models.base import CompatModel

TOLERANCE = 1e-4
"""Maximum difference from the model's embeddings. Above it, the model is exported as xcompat's own module."""


def stock_modules(model: CompatModel, space: Space) -> list[nn.Module] | None:
    """Return a model as sentence-transformers' own modules: encoder, normalisation, layers, normalisation.

    Args:
        model: frozen, in evaluation mode, with an encoder, or a map with an encoder.
        space: as in :class:`~xcompat.export.modules.Tower`.

    Returns:
        The modules. None if transformers' auto classes cannot load the encoder, or the model is not a layer sequence.
    """
    layers = [model.embed_layers] if space == "own" else [model.embed_layers, model.view_layers]
    if any(row is None for row in layers):
        return None
    inside = model._get_encoder()
    if isinstance(inside, CompatModel):
        before = stock_modules(inside, "old" if inside.stores_view else "own")
    else:
        before = _encoder(inside, model.processor, model.embeds_texts) if isinstance(inside, Encoder) else None
    if before is None:
        return None
    modules = before
    for row in layers:
        modules += _row(row or ())
        if not isinstance(modules[-1], Normalize):
            modules.append(Normalize())
    return modules


def _encoder(encoder: Encoder, processor: Processor, with_texts: bool) -> list[nn.Module] | None:
    if encoder.library == SENTENCE_TRANSFORMERS:
        return _of_texts(encoder, processor)
    if (calls := auto_calls(encoder)) is None:
        return None
    if not with_texts:  # a model trained only on images may have a text tower of another space
        calls.pop("text", None)
    with TemporaryDirectory() as folder:
        save_for_auto_classes(encoder, processor, folder)
        transformer = _transformer(folder, calls, processor)
    dim, pooling = encoder.embedding_dim, calls["image"].pooling
    if pooling is not None:
        return [transformer, Pooling(dim, pooling)]
    return [transformer] if _reports_dim(transformer, dim) else [transformer, _dense(first_dims(dim, dim))]


def _of_texts(encoder: Encoder, processor: Processor) -> list[nn.Module]:
    encoder = copy.deepcopy(encoder).float()
    encoder.merge_adapters()
    with TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        processor.save_pretrained(folder)
        with convert_read_errors(folder):
            loaded = SentenceTransformer(folder, device="cpu")
            loaded.truncate_dim = None
    dim = loaded.get_embedding_dimension()
    kept = [_dense(first_dims(dim, encoder.embedding_dim))] if dim is not None and dim > encoder.embedding_dim else []
    return [*loaded, *kept]


def prompts_of(processor: Processor, space: Space) -> dict[str, object]:
    """Return the prompts for both roles, and the default role: queries in an old space, passages in the own space.

    Args:
        processor: the model's processor.
        space: as in :class:`~xcompat.export.modules.Tower`.
    """
    described = processor.describe()
    if "query_prompt" not in described:
        return {}
    prompts = {"query": described["query_prompt"], "document": described["passage_prompt"]}
    unsaid = "query" if space == "old" else "document"
    return {"prompts": prompts, "default_prompt_name": unsaid if prompts[unsaid] else None}


def _transformer(folder: str, calls: dict[str, Call], processor: Processor) -> Transformer:
    texts = {
        "padding": "max_length" if processor.pad_to_max_length else True,
        "padding_side": "right",
        "return_attention_mask": processor.masks_padding,
        "return_token_type_ids": False,
    }
    loading = {"backend": "pil"}
    with convert_read_errors(folder):
        transformer: Any = Transformer(
            folder,
            processor_kwargs=dict(loading),
            processing_kwargs={"text": texts} if "text" in calls else None,
            modality_config={name: {"method": call.method, "method_output_name": call.output} for name, call in calls.items()},
            module_output_name="sentence_embedding" if calls["image"].pooling is None else "token_embeddings",
        )
    if "text" in calls:
        transformer.max_seq_length = processor.max_length
    transformer.processor_kwargs = loading  # sentence-transformers reads them from its file, but does not save them
    transformer.config_keys = [*transformer.config_keys, "processor_kwargs"]
    return transformer


def _reports_dim(transformer: Transformer, dim: int) -> bool:
    """Return whether a module reports its dimension. Some architectures cannot."""
    try:
        return transformer.get_embedding_dimension() == dim
    except ValueError:
        return False


def _row(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Convert layers to modules. GELU becomes the preceding Dense's activation (after a LayerNorm, an added identity Dense's)."""
    modules: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Linear):
            modules.append(_dense(layer))
        elif isinstance(layer, nn.LayerNorm):
            norm = LayerNorm(layer.normalized_shape[0])
            norm.norm.load_state_dict(layer.state_dict())
            modules.append(norm)
        else:
            assert isinstance(layer, nn.GELU), layer
            if not isinstance(modules[-1], Dense):
                assert isinstance(modules[-1], LayerNorm)
                dim = modules[-1].dimension
                modules.append(_dense(first_dims(dim, dim)))
            modules[-1].activation_function = nn.GELU()
    return modules


def _dense(layer: nn.Linear) -> Dense:
    dense = Dense(layer.in_features, layer.out_features, bias=layer.bias is not None, activation_function=None)
    dense.linear.load_state_dict(layer.state_dict())
    return dense


def save_stock(modules: list[nn.Module], folder: Path, wanted: SentenceTransformer, prompts: dict[str, Any]) -> bool:
    """Write modules, load them with plain sentence-transformers, and keep them if they embed like the model.

    Args:
        modules: from :func:`stock_modules`.
        folder: a folder that does not exist yet.
        wanted: the model.
        prompts: from :func:`prompts_of`.

    Returns:
        Whether they were kept. If not, the folder is deleted.
    """
    SentenceTransformer(modules=modules, device="cpu", **prompts).save(str(folder), create_model_card=False)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (61, 83, 3), dtype=np.uint8))
    probes: list[list[Any]] = [[image]] if wanted.supports("image") else []
    if wanted.supports("text"):
        probes.append(["A Red shoe", "two DOGS, and more than any tower reads " * 40])
    if wanted.dtype != torch.float32:  # the modules' weights are float32
        wanted = copy.deepcopy(wanted).float()
    embeds = [wanted.encode(probe) for probe in probes]
    # twice: transformers takes a momentary disk error for a missing file
    alike = any(_embeds_alike(folder, probes, embeds) for _ in range(2))
    if not alike:
        shutil.rmtree(folder)
    return alike


def _embeds_alike(folder: Path, probes: list[list[object]], embeds: list[np.ndarray]) -> bool:
    with convert_read_errors(folder):
        found = SentenceTransformer(str(folder), device="cpu")
    return all(np.allclose(found.encode(probe), each, rtol=0, atol=TOLERANCE) for probe, each in zip(probes, embeds, strict=True))
