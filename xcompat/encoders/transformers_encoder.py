"""transformers' image-text encoders: CLIP, SigLIP, SigLIP 2, BLIP and VisionTextDualEncoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    BaseImageProcessor,
    BlipForImageTextRetrieval,
    CLIPModel,
    CLIPTextModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.tokenization_utils_base import FULL_TOKENIZER_FILE, TOKENIZER_CONFIG_FILE

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.encoders.build_limits import check_image_size
from xcompat.encoders.hub_cache import require_fetched
from xcompat.encoders.model_files import copy_permissions
from xcompat.encoders.processor import Processor
from xcompat.encoders.tokens import describe_tokens, token_ids

IMAGE_BACKEND = "pil"
"""PIL and torchvision resize differently (up to .03 after normalisation), and saved configurations do not contain the backend."""


@dataclass
class TransformersProcessor(Processor):
    """transformers' image processor and tokenizer."""

    image_processor: BaseImageProcessor = field(kw_only=True)
    tokenizer: PreTrainedTokenizerBase = field(kw_only=True)

    def pixels(self, images: list[Image]) -> Tensor:
        """Return preprocessed images (B, C, H, W) float32."""
        return process_images(self, self.image_processor, images)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids per text, truncated to ``max_length``."""
        return token_ids(self, self.tokenizer, texts, self.max_length)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the image processor and the tokenizer."""
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """Return the settings that change pixels or tokens."""
        return {
            "backend": IMAGE_BACKEND,
            "pixels": describe_pixels(self.image_processor),
            "tokens": describe_tokens(self.tokenizer),
            "max_length": self.max_length,
            "pad_to_max_length": self.pad_to_max_length,
        }


class TransformersEncoder(Encoder):
    """Model with ``get_image_features`` and ``get_text_features``."""

    library: ClassVar[str] = "transformers"
    image_head_name: ClassVar[str | None] = "visual_projection"

    def _image_features(self, pixel_values: Tensor) -> Tensor:
        return self.model.get_image_features(pixel_values=pixel_values).pooler_output

    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return unnormalised text features (B, D)."""
        return self.model.get_text_features(input_ids=input_ids, attention_mask=attention_mask).pooler_output

    @property
    def towers(self) -> dict[str, nn.Module]:
        """Return the image and text towers."""
        text = getattr(self.model, "text_model", None) or self.model.text_encoder  # BLIP calls it text_encoder
        return {"image": self.model.vision_model, "text": text}

    @property
    def image_embedding_layer(self) -> nn.Module | None:
        """Return the image tower's embedding layer, or None."""
        for name, module in self.towers["image"].named_modules():
            if name.rsplit(".", 1)[-1] == "embeddings":
                return module
        return None

    @property
    def image_width(self) -> int:
        """Return the image tower's hidden size."""
        return self.model.config.vision_config.hidden_size

    @property
    def shares_prefixes(self) -> bool:
        """Return whether this is CLIP's causal text tower, and its attention accepts a custom mask."""
        model = self.model
        clip = type(model) is CLIPModel and type(model.text_model) is CLIPTextModel
        return clip and not model.text_model.training and model.text_model.config._attn_implementation in {"sdpa", "eager"}

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model in transformers' format."""
        self.model.save_pretrained(folder)
        copy_permissions(folder)


class BlipEncoder(TransformersEncoder):
    """BLIP with its retrieval heads: class tokens through ``vision_proj`` and ``text_proj``."""

    unused: ClassVar[tuple[str, ...]] = (*Encoder.unused, "crossattention", "itm_head")  # the matching head reads both inputs
    image_head_name: ClassVar[str | None] = "vision_proj"

    def _image_features(self, pixel_values: Tensor) -> Tensor:
        tokens_BNW = self.model.vision_model(pixel_values=pixel_values).last_hidden_state
        return self.model.vision_proj(tokens_BNW[:, 0])

    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return unnormalised text features (B, D)."""
        tokens_BLW = self.model.text_encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.model.text_proj(tokens_BLW[:, 0])


class Siglip2Encoder(TransformersEncoder):
    """SigLIP 2 on square images with a fixed patch grid.

    ``pixel_values`` thus stays an ordinary tensor. The aspect ratio is not kept, as in SigLIP with a fixed size.
    """

    def _image_features(self, pixel_values: Tensor) -> Tensor:
        patch = self.model.config.vision_config.patch_size
        batch, channels, height, width = pixel_values.shape
        grid = (height // patch, width // patch)
        patches = pixel_values.reshape(batch, channels, grid[0], patch, grid[1], patch).permute(0, 2, 4, 3, 5, 1)
        patches_BNP = patches.reshape(batch, grid[0] * grid[1], patch * patch * channels)
        mask_BN = torch.ones(patches_BNP.shape[:2], dtype=torch.int64, device=pixel_values.device)
        shapes = torch.tensor([grid] * batch)  # on the CPU, because each value is read separately and would synchronise a GPU
        return self.model.get_image_features(
            pixel_values=patches_BNP, pixel_attention_mask=mask_BN, spatial_shapes=shapes
        ).pooler_output


def _encoder_class(model_type: str) -> type[TransformersEncoder]:
    return {"blip": BlipEncoder, "siglip2": Siglip2Encoder}.get(model_type, TransformersEncoder)


def embedding_dim(config: PreTrainedConfig) -> int:
    """Return an image-text model's D from its configuration."""
    for holder, key in ((config, "image_text_hidden_size"), (config, "projection_dim"), (config.text_config, "projection_size")):
        # BlipConfig has both: its retrieval heads end in image_text_hidden_size
        if config.model_type != "blip" and key == "image_text_hidden_size":
            continue
        if (dim := getattr(holder, key, None)) is not None:
            return dim
    return config.text_config.hidden_size


def build_transformers_encoder(description: dict[str, Any]) -> TransformersEncoder:
    """Build an encoder with random weights from :attr:`Encoder.description`."""
    config: Any = AutoConfig.for_model(**description["config"])
    model = BlipForImageTextRetrieval(config) if config.model_type == "blip" else AutoModel.from_config(config)
    return _wrap(model, description)


def load_transformers_encoder(name: str, revision: str | None, trust_remote_code: bool) -> TransformersEncoder:
    """Load an encoder (safetensors only) in float32, in evaluation mode.

    Args:
        name: folder or Hub name.
        revision: branch, tag or commit; None for the default branch.
        trust_remote_code: whether to run code from the repository.
    """
    where: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **where)
    loader = BlipForImageTextRetrieval if config.model_type == "blip" else AutoModel
    loaded: Any = loader.from_pretrained(name, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **where)
    model, info = loaded
    if absent := info["missing_keys"]:
        raise XcompatError(f"{name} lacks {len(absent)} weights, e.g. {min(absent)}; download or save it again")
    if not hasattr(model, "get_image_features") and config.model_type != "blip":
        raise XcompatError(f"{name} ({config.model_type}) has no shared image-text space; use CLIP or SigLIP")
    return _wrap(model, {"library": "transformers", "name": name, "revision": revision, "config": config.to_dict()}).eval()


def _wrap(model: PreTrainedModel, description: dict[str, object]) -> TransformersEncoder:
    use_torch_momentum(model, 0.003)
    config = model.config
    return _encoder_class(config.model_type)(model, embedding_dim(config), json.loads(json.dumps(description, default=str)))


def use_torch_momentum(model: nn.Module, least: float) -> None:
    """Convert TensorFlow batch-norm momentum (1 - PyTorch's) to PyTorch's, in place.

    MobileNet (V1 .9997, V2 .997) and EfficientNet (.99) have it: a single training step would overwrite their statistics.

    Args:
        model: model to change.
        least: minimum for converted values (V1's .0003 is too slow): .003 for fine-tuning, .1 (PyTorch's default) from scratch.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None and module.momentum > 0.5:
            module.momentum = max(1 - module.momentum, least)


def load_transformers_processor(
    name: str, revision: str | None, trust_remote_code: bool, description: dict[str, Any]
) -> TransformersProcessor:
    """Load the image processor and the tokenizer.

    Args:
        name: folder or Hub name.
        revision: branch, tag or commit; None for the default branch.
        trust_remote_code: whether to run code from the repository.
        description: the encoder's description.

    Raises:
        XcompatError: the vocabulary is missing; transformers would only keep special tokens.
        OSError: a file cannot be downloaded; transformers would continue without it.
    """
    where: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    for file in (TOKENIZER_CONFIG_FILE, FULL_TOKENIZER_FILE):
        require_fetched(name, file, where["revision"])
    config = AutoConfig.for_model(**description["config"])
    # AutoTokenizer would replace a generic tokenizer by the architecture's usual one
    generic = get_tokenizer_config(name, **where).get("tokenizer_class") in {"PreTrainedTokenizerFast", "TokenizersBackend"}
    tokenizer = (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(name, **where)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise XcompatError(f"{name} has no vocabulary; restore its tokenizer.json from the model's source")
    if tokenizer.pad_token_id is None:
        raise XcompatError(f"{name} has no padding token; restore its tokenizer_config.json from the model's source")
    image_processor = AutoImageProcessor.from_pretrained(name, backend=IMAGE_BACKEND, **where)
    if type(image_processor).__name__.startswith("Siglip2"):
        image_processor = _square_siglip2_processor(config)
    return make_processor(image_processor, tokenizer, config)


def make_processor(
    image_processor: Any,  # noqa: ANN401 - a BaseImageProcessor, which does not declare the attributes
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
) -> TransformersProcessor:
    """Return an architecture's processor.

    Args:
        image_processor: image processor with ``size`` or ``crop_size``.
        tokenizer: tokenizer with a padding token.
        config: the model's configuration.
    """
    text_type = config.text_config.model_type
    longest = getattr(config.text_config, "max_position_embeddings", tokenizer.model_max_length)
    return TransformersProcessor(
        **pixel_settings(image_processor),
        max_length=min(longest, tokenizer.model_max_length),
        pad_to_max_length=text_type.startswith("siglip"),  # pools the last position, even if it is padding
        masks_padding=not text_type.startswith(("siglip", "clip")),
        pad_token_id=tokenizer.pad_token_id,
        image_processor=image_processor,
        tokenizer=tokenizer,
    )


def process_images(processor: Processor, image_processor: Any, images: list[Image]) -> Tensor:  # noqa: ANN401 - as in make_processor
    """Return B images as ``(B, C, H, W)`` float32, resized by the library and normalised as one batch, which is faster."""
    if not image_processor.do_rescale or image_processor.rescale_factor != 1 / 255:
        return image_processor(images, return_tensors="pt")["pixel_values"]
    resized_BCHW = image_processor(images, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"]
    return processor.to_pixels(resized_BCHW)


def pixel_settings(image_processor: Any) -> dict[str, Any]:  # noqa: ANN401 - as in make_processor
    """Return a :class:`Processor`'s image fields: ``image_size``, ``mean``, ``std`` and ``interpolation``."""
    check_image_size({name: getattr(image_processor, name, None) or () for name in ("size", "crop_size")})
    size = (
        getattr(image_processor, "do_center_crop", False) and getattr(image_processor, "crop_size", None)
    ) or image_processor.size
    edge = dict(size).get("shortest_edge")
    normalise = getattr(image_processor, "do_normalize", True)
    return {
        "image_size": (edge, edge) if edge else (size["height"], size["width"]),
        "mean": tuple(image_processor.image_mean) if normalise else (0.0, 0.0, 0.0),
        "std": tuple(image_processor.image_std) if normalise else (1.0, 1.0, 1.0),
        "interpolation": Resampling(image_processor.resample).name.lower(),
    }


def describe_pixels(image_processor: BaseImageProcessor) -> dict[str, object]:
    """Return an image processor's settings without its class name."""
    return {k: v for k, v in image_processor.to_dict().items() if k not in {"image_processor_type", "processor_class"}}


def image_edge(config: PreTrainedConfig) -> int:
    """Return the default side in pixels for an architecture's square images."""
    vision = config.vision_config
    if (size := getattr(vision, "image_size", None)) is not None:
        return size
    return int(vision.num_patches**0.5) * vision.patch_size  # SigLIP 2: the grid of the position table


def _square_siglip2_processor(config: PreTrainedConfig) -> BaseImageProcessor:
    """Return a fixed-size image processor; SigLIP 2's would cut patches."""
    edge = image_edge(config)
    return SiglipImageProcessorPil(size={"height": edge, "width": edge}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
