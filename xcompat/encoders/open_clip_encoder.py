"""open_clip encoders (safetensors only)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import open_clip
import torch
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transformer import VisionTransformer, text_global_pool
from PIL.Image import Image
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, read_json, write_json
from xcompat.encoders.base import Encoder
from xcompat.encoders.build_limits import check_config, limit_model_size
from xcompat.encoders.model_files import copy_permissions
from xcompat.encoders.processor import Processor

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
HUB_PREFIX = "hf-hub:"


@dataclass
class OpenClipProcessor(Processor):
    """open_clip's image transform and tokenizer."""

    transform: Callable[[Image], Tensor] = field(kw_only=True)
    tokenizer: HFTokenizer | SimpleTokenizer = field(kw_only=True)
    config: dict[str, Any] = field(kw_only=True)

    def pixels(self, images: list[Image]) -> Tensor:
        """Return preprocessed images (B, C, H, W) float32."""
        return torch.stack([self.transform(image) for image in images])

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids per text, without open_clip's padding, and count truncated texts."""
        tokens_BL = self.tokenizer(list(texts))
        if self.pad_to_max_length:
            return tokens_BL.tolist()
        lengths = tokens_BL.argmax(dim=1) + 1  # up to the end token, CLIP's highest id; padding and "!" share id 0
        full = [text for text, length in zip(texts, lengths.tolist(), strict=True) if length == self.max_length]
        self.count_truncated += sum(len(self.tokenizer.encode(text)) + 2 > self.max_length for text in full)
        return [row[:length].tolist() for row, length in zip(tokens_BL, lengths.tolist(), strict=True)]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the configuration and the tokenizer."""
        write_json(Path(folder) / CONFIG_FILE, self.config)
        if isinstance(self.tokenizer, HFTokenizer):
            self.tokenizer.tokenizer.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """Return the settings that change pixels or tokens."""
        own = isinstance(self.tokenizer, HFTokenizer)
        vocabulary = self.tokenizer.tokenizer.get_vocab() if own else self.tokenizer.encoder
        tokens = hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()
        return {"transform": str(self.transform), "tokens": tokens, "max_length": self.max_length}


class OpenClipEncoder(Encoder):
    """``open_clip.CLIP`` or ``CustomTextCLIP``."""

    library: ClassVar[str] = "open_clip"

    def _image_features(self, pixel_values: Tensor) -> Tensor:
        return self.model.encode_image(pixel_values)

    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return unnormalised text features (B, D), like ``CLIP.encode_text`` but for any number of tokens."""
        model = self.model
        if not isinstance(model, open_clip.CLIP):
            return model.encode_text(input_ids)
        length = input_ids.shape[1]
        dtype = model.transformer.get_cast_dtype()
        tokens_BLW = model.token_embedding(input_ids).to(dtype) + model.positional_embedding[:length].to(dtype)
        mask = None if model.attn_mask is None else model.attn_mask[:length, :length]
        tokens_BLW = model.ln_final(model.transformer(tokens_BLW, attn_mask=mask))
        pooled_BW = text_global_pool(tokens_BLW, input_ids, model.text_pool_type, eos_token_id=model.text_eos_id)
        if isinstance(model.text_projection, nn.Linear):
            return model.text_projection(pooled_BW)
        return pooled_BW if model.text_projection is None else pooled_BW @ model.text_projection

    @property
    def towers(self) -> dict[str, nn.Module]:
        """Return the image and text towers."""
        text = self.model.transformer if isinstance(self.model, open_clip.CLIP) else self.model.text
        return {"image": self.model.visual, "text": text}

    @property
    def image_embedding_layer(self) -> nn.Module | None:
        """Return the patch dropout, so training drops no prompts, or None."""
        visual = self.model.visual
        if isinstance(visual, VisionTransformer):
            return visual.patch_dropout
        trunk: Any = getattr(visual, "trunk", None)  # timm; its other towers depend on token positions
        return trunk.patch_drop if type(trunk).__name__ == "VisionTransformer" else None

    @property
    def image_width(self) -> int:
        """Return the image tower's token width."""
        visual = self.model.visual
        return visual.trunk.embed_dim if hasattr(visual, "trunk") else visual.conv1.out_channels

    @property
    def layer_classes(self) -> set[str]:
        """Return the class names that FSDP shards as units."""
        return {"ResidualAttentionBlock"}

    def rebuild_masks(self) -> None:
        """Compute the causal masks again, because checkpoints do not contain them."""
        for module in self.model.modules():
            mask = getattr(module, "attn_mask", None)
            if isinstance(mask, Tensor):
                module.attn_mask = torch.full_like(mask, float("-inf"), device=mask.device).triu_(1)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model in open_clip's format."""
        write_json(Path(folder) / CONFIG_FILE, self.description["config"])
        with atomic_path(Path(folder) / WEIGHTS_FILE) as temporary:
            save_model(self.model, str(temporary))
        copy_permissions(folder, CONFIG_FILE)


def _trims_padding(model_cfg: dict[str, Any]) -> bool:
    """Return whether the text tower is causal and pools at the end token, so padding has no effect."""
    text = model_cfg["text_cfg"]
    return text.get("pool_type", "argmax") == "argmax" and not text.get("no_causal_mask") and not text.get("hf_model_name")


def open_clip_folder(name: str, revision: str | None) -> Path:
    """Return an open_clip model's folder, after downloading a Hub model (safetensors only)."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = [CONFIG_FILE, WEIGHTS_FILE, "tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt"]
        folder = Path(snapshot_download(name.removeprefix(HUB_PREFIX), revision=revision, allow_patterns=wanted))
    return folder


def build_open_clip_encoder(description: dict[str, Any]) -> OpenClipEncoder:
    """Build an encoder with random weights."""
    model_cfg = {key: value for key, value in description["config"]["model_cfg"].items() if key != "custom_text"}
    check_config(model_cfg, f"{description['name']}, {CONFIG_FILE}")
    # do not download pretrained towers, because this model's weights replace them
    model_cfg["text_cfg"] = {**model_cfg["text_cfg"], "hf_model_pretrained": False}
    if "timm_model_name" in model_cfg["vision_cfg"]:
        model_cfg["vision_cfg"] = {**model_cfg["vision_cfg"], "timm_model_pretrained": False}
    custom = description["config"]["model_cfg"].get("custom_text") or "hf_model_name" in model_cfg["text_cfg"]
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    with limit_model_size(description["name"]), torch.device("meta"):
        kind(**model_cfg)  # finds damage before allocating memory
    model = kind(**model_cfg)
    return OpenClipEncoder(model, model_cfg["embed_dim"], description)


def load_open_clip_encoder(name: str, revision: str | None) -> OpenClipEncoder:
    """Load an encoder in float32, in evaluation mode, from a folder or ``hf-hub:`` and a Hub name."""
    folder = open_clip_folder(name, revision)
    weights = folder / WEIGHTS_FILE
    if not weights.exists():
        raise XcompatError(f"{name} has no {WEIGHTS_FILE}: only safetensors are loaded; convert the weights first")
    description = {"library": "open_clip", "name": name, "revision": revision, "config": read_json(folder / CONFIG_FILE)}
    encoder = build_open_clip_encoder(description)
    encoder.model.load_state_dict(load_file(weights))
    return encoder.eval()


def _tokenizer(folder: Path, text_cfg: dict[str, Any]) -> HFTokenizer | SimpleTokenizer:
    length = text_cfg.get("context_length", 77)
    settings = dict(text_cfg.get("tokenizer_kwargs") or {})
    settings.pop("trust_remote_code", None)  # only the user can allow this
    if text_cfg.get("hf_tokenizer_name"):
        return HFTokenizer(str(folder), context_length=length, trust_remote_code=False, **settings)
    return SimpleTokenizer(context_length=length, **settings)


def load_open_clip_processor(folder: Path, description: dict[str, Any]) -> OpenClipProcessor:
    """Build a configuration's image transform and tokenizer."""
    config = description["config"]
    model_cfg = config["model_cfg"]
    size = model_cfg["vision_cfg"].get("image_size", 224)
    given = {key: value for key, value in config.get("preprocess_cfg", {}).items() if key != "size"}
    preprocess = open_clip.transform.PreprocessCfg(size=size, **given)
    return OpenClipProcessor(
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        mean=tuple(preprocess.mean),
        std=tuple(preprocess.std),
        interpolation=preprocess.interpolation,
        max_length=model_cfg["text_cfg"].get("context_length", 77),
        pad_to_max_length=not _trims_padding(model_cfg),
        masks_padding=False,  # open_clip's towers accept no mask
        pad_token_id=0,
        transform=open_clip.transform.image_transform_v2(preprocess, is_train=False),
        tokenizer=_tokenizer(folder, model_cfg["text_cfg"]),
        config=config,
    )
