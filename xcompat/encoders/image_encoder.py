"""Image encoders without a text tower, from transformers and timm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from PIL.Image import Image, new
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, BaseImageProcessor, PreTrainedConfig, PreTrainedModel

from xcompat.core.errors import XcompatError
from xcompat.encoders.base import Encoder
from xcompat.encoders.model_files import copy_permissions
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import SENTENCE_TRANSFORMERS
from xcompat.encoders.transformers_encoder import (
    IMAGE_BACKEND,
    describe_pixels,
    pixel_settings,
    process_images,
    use_torch_momentum,
)

_LABELS = {"id2label", "label2id", "label_names", "num_classes", "num_labels", "problem_type"}
"""Configuration keys of a classifier, which the encoder does not contain."""
NO_TEXT: dict[str, Any] = {"max_length": 0, "pad_to_max_length": False, "masks_padding": False, "pad_token_id": 0}
"""Fields of a :class:`Processor` without tokenizer."""


@dataclass
class ImageOnlyProcessor(Processor):
    """transformers' image processor."""

    image_processor: BaseImageProcessor = field(kw_only=True)

    def pixels(self, images: list[Image]) -> Tensor:
        """Return preprocessed images (B, C, H, W) float32."""
        return process_images(self, self.image_processor, _rgb(images))

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Raise, because there is no tokenizer."""
        raise XcompatError("an image encoder has no tokenizer; to embed texts, choose an image-text model (CLIP, SigLIP)")

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the image processor."""
        self.image_processor.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """Return the settings that change pixels."""
        return {"backend": IMAGE_BACKEND, "pixels": describe_pixels(self.image_processor)}


def _rgb(images: Sequence[Image]) -> list[Image]:
    return [image if image.mode == "RGB" else image.convert("RGB") for image in images]


class TimmProcessor(ImageOnlyProcessor):
    """timm's image transform, built from the ``pretrained_cfg`` in the encoder's description."""

    def pixels(self, images: list[Image]) -> Tensor:
        """Return preprocessed images (B, C, H, W) float32."""
        return self.image_processor(_rgb(images), return_tensors="pt")["pixel_values"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write nothing, because timm keeps the preprocessing in the model's configuration."""


class ImageEncoder(Encoder):
    """Image tower without text tower; D is its pooled features' width.

    Features are ``image_embeds`` with a projection, otherwise ``pooler_output``. If the pooler has no weights, they are the
    class token, or the mean over tokens or positions.
    """

    library: ClassVar[str] = "transformers-image"
    has_text: ClassVar[bool] = False
    image_head_name: ClassVar[str | None] = "visual_projection"
    unused: ClassVar[tuple[str, ...]] = ("mask_token",)

    def __init__(self, model: nn.Module, embedding_dim: int, description: dict[str, Any]) -> None:
        super().__init__(model, embedding_dim, description)
        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
        self.has_class_token = bool(names & {"cls_token", "class_embedding"})

    def _image_features(self, pixel_values: Tensor) -> Tensor:
        name, features = self.read_output(pixel_values)
        if name != "last_hidden_state":
            return features.flatten(1)
        if features.ndim == 4:
            return features.mean(dim=(2, 3))
        return features[:, 0] if self.has_class_token else features.mean(dim=1)

    def read_output(self, pixel_values: Tensor) -> tuple[str, Tensor]:
        """Return the name of the model output with the features, and its value: (B, D), (B, N, D) or (B, D, H, W)."""
        output = self.model(pixel_values=pixel_values, **self._of_another_size(pixel_values))
        for name in ("image_embeds", "pooler_output"):
            if (features := getattr(output, name, None)) is not None:
                return name, features
        return "last_hidden_state", output.last_hidden_state

    def _of_another_size(self, pixel_values: Tensor) -> dict[str, bool]:
        if not self.embeds_any_size or tuple(pixel_values.shape[-2:]) == tuple(self.description["image_size"]):
            return {}
        resizes = "interpolate_pos_encoding" in signature(self.model.forward).parameters
        return {"interpolate_pos_encoding": True} if resizes else {}

    def text_features(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Raise, because there is no text tower."""
        raise XcompatError(f"{self.name} has no text tower; to embed texts, choose an image-text model (CLIP, SigLIP)")

    @property
    def towers(self) -> dict[str, nn.Module]:
        """Return the image tower."""
        return {"image": self.model}

    @property
    def image_embedding_layer(self) -> nn.Module | None:
        """Return the token embedding layer if its output for a blank image is a token sequence, otherwise None."""
        device = next(self.model.parameters()).device
        blank = torch.zeros(1, 3, *self.description["image_size"], dtype=self.dtype, device=device)
        for name, module in self.model.named_modules():
            if name.rsplit(".", 1)[-1] == "embeddings":
                with torch.no_grad():
                    tokens = module(blank)
                return module if isinstance(tokens, Tensor) and tokens.ndim == 3 else None
        return None

    @property
    def image_width(self) -> int:
        """Return the hidden size."""
        return self.model.config.hidden_size

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model in its library's format."""
        self.model.save_pretrained(folder)
        copy_permissions(folder)


def build_image_encoder(description: dict[str, Any]) -> ImageEncoder:
    """Build an image encoder with random weights from :attr:`Encoder.description`."""
    return _wrap(build_image_model(AutoConfig.for_model(**description["config"])), description)


def build_image_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build an image model with random weights, including the configured stem or projection.

    Raises:
        XcompatError: it is not an image model, or cannot have a small stem.
    """
    return _model_class(config)._from_config(config)


def load_image_encoder(name: str, revision: str | None, trust_remote_code: bool, image_size: int | None = None) -> ImageEncoder:
    """Load an image encoder (safetensors only) in float32, in evaluation mode.

    Args:
        name: folder or Hub name.
        revision: branch, tag or commit; None to use the default branch.
        trust_remote_code: whether to run code from the repository.
        image_size: input image side in pixels; None to use the default.

    Raises:
        XcompatError: it is not an image encoder, or weights are missing.
    """
    where: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **where)
    _refuse_other_preprocessing(name, config)
    if getattr(config, "model_args", None):
        config.model_args.pop("num_classes", None)  # timm writes it there, and the wrapper passes it again
    loader = AutoModel if trust_remote_code and hasattr(config, "auto_map") else _model_class(config)
    loaded: Any = loader.from_pretrained(
        name, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **where
    )
    model, info = loaded
    absent = {key for key in info["missing_keys"] if not key.startswith("pooler.")}
    if absent:
        raise XcompatError(f"{name} lacks {len(absent)} weights, e.g. {min(absent)}; download or save it again")
    has_pooler = not info["missing_keys"]
    description = {"library": ImageEncoder.library, "name": name, "revision": revision, "config": config.to_dict()}
    processor = load_image_processor(name, revision, trust_remote_code, description, image_size)
    return measure_encoder(model, description | {"pooler": has_pooler}, processor)


def _refuse_other_preprocessing(name: str, config: PreTrainedConfig) -> None:
    """Raise for a compatible model around open_clip or sentence-transformers."""
    inside: Any = getattr(config, "encoder", None)
    library = inside.get("library") if isinstance(inside, dict) else None
    if library in ("open_clip", SENTENCE_TRANSFORMERS):
        raise XcompatError(
            f"{name} is a compatible model around an encoder of {library} and cannot be trained further; "
            f"use its encoder ({inside.get('name')}), or a compatible model around an encoder of transformers"
        )


def measure_encoder(model: PreTrainedModel, description: dict[str, Any], processor: Processor) -> ImageEncoder:
    """Return an encoder in evaluation mode, with the dimension measured on one image.

    Args:
        model: model with weights.
        description: ``library``, ``name``, ``revision``, ``config``, and ``pooler`` (whether it has weights).
        processor: its preprocessing.

    Raises:
        XcompatError: the preprocessing does not match, or does more than resize and normalise.
    """
    height, width = processor.image_size
    image = new("RGB", (width, height), (255, 128, 0))
    pixels = processor.images([image])
    expected = torch.tensor([255, 128, 0], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, height, width)
    name = description["name"]
    if pixels.shape != expected.shape or not torch.allclose(pixels, processor.to_pixels(expected), atol=0.01):
        raise XcompatError(
            f"the image processor of {name} does more than resize and normalise RGB, unsupported in training; "
            "fix its preprocessor_config.json"
        )
    encoder = _wrap(model, description | {"image_size": [height, width], "embedding_dim": 0}).eval()
    try:
        with torch.no_grad():
            dim = encoder.image_features(pixels).shape[1]
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:  # each library has its own
        reason = " ".join(str(error).split())
        raise XcompatError(f"{name} cannot embed RGB images of {height}x{width} pixels: {reason}") from error
    encoder.embedding_dim = encoder.description["embedding_dim"] = dim
    return encoder


def _wrap(model: PreTrainedModel, description: dict[str, Any]) -> ImageEncoder:
    if not description["pooler"]:
        model.pooler = None  # type: ignore[assignment]
    use_torch_momentum(model, 0.003)
    config = {key: value for key, value in description["config"].items() if key not in _LABELS}
    plain = json.loads(json.dumps(description | {"config": config}, default=str))
    return ImageEncoder(model, description["embedding_dim"], plain)


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if (getattr(config, "model_args", None) or {}).get("checkpoint_path"):
        raise XcompatError(
            f"the configuration of {config.architecture} sets checkpoint_path; delete this line: "
            "only the model's safetensors are loaded"
        )
    if getattr(config, "stem", None) == "small":
        from xcompat.encoders.image_models import small_stem_class

        return small_stem_class(config)
    if config.model_type == "timm_wrapper":
        from xcompat.encoders.image_models import TimmModel

        return TimmModel
    saved_as = (config.architectures or [""])[0]
    if saved_as.endswith("VisionModelWithProjection"):
        return getattr(transformers, saved_as)
    found = transformers.MODEL_MAPPING.get(type(config), None)
    if not isinstance(found, type) or found.main_input_name != "pixel_values":
        raise XcompatError(f"{config.model_type} models do not embed images; choose an image or image-text model")
    return found


def load_image_processor(
    name: str, revision: str | None, trust_remote_code: bool, description: dict[str, Any], image_size: int | None = None
) -> ImageOnlyProcessor:
    """Load an image encoder's preprocessing.

    Args:
        name: folder or Hub name; unused for timm.
        revision: branch, tag or commit; None to use the default branch.
        trust_remote_code: whether to run code from the repository.
        description: the encoder's description, with timm's preprocessing.
        image_size: image side in pixels; None to use the default. Unused for timm.
    """
    config = description["config"]
    if config["model_type"] == "timm_wrapper":
        image_processor = transformers.TimmWrapperImageProcessor(config.get("pretrained_cfg") or {}, config["architecture"])
        settings = image_processor.data_config
        return TimmProcessor(
            image_size=tuple(settings["input_size"][-2:]),
            mean=tuple(settings["mean"]),
            std=tuple(settings["std"]),
            interpolation=settings["interpolation"],
            image_processor=image_processor,
            **NO_TEXT,
        )
    where: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    image_processor = AutoImageProcessor.from_pretrained(name, backend=IMAGE_BACKEND, **where)
    made_for, _ = pixel_settings(image_processor)["image_size"]
    if image_size not in (None, made_for):
        scaled = {
            key: {side: round(length * image_size / made_for) for side, length in dict(size).items() if length}
            for key in ("size", "crop_size")
            if (size := getattr(image_processor, key, None))
        }
        image_processor = AutoImageProcessor.from_pretrained(name, backend=IMAGE_BACKEND, **scaled, **where)
    return image_only_processor(image_processor)


def image_only_processor(image_processor: BaseImageProcessor) -> ImageOnlyProcessor:
    """Return a processor without tokenizer around transformers' image processor."""
    return ImageOnlyProcessor(image_processor=image_processor, **pixel_settings(image_processor), **NO_TEXT)
