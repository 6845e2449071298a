"""Encoders with random weights for recipes, dry runs and tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.plugins import class_file, is_file_class
from xcompat.encoders.build_limits import check_config

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from xcompat.encoders.base import Encoder
    from xcompat.encoders.processor import Processor

QUICK = {"quick": True}
"""Validation context that skips every check with torch or transformers. A full validation follows."""


def is_quick(info: ValidationInfo) -> bool:
    """Return whether the validation context is :data:`QUICK`."""
    return isinstance(info.context, dict) and info.context.get("quick") is True


class ScratchSource(BaseModel):
    """Encoder to train from random weights. An image-text encoder also trains its tokenizer on the training texts.

    Args:
        model: transformers configuration with its ``model_type``. Image-text models have ``text_config``, ``vision_config`` and
            ``projection_dim``; vocabulary size and special ids are filled in. Image models have their configuration class's
            options, e.g. ``depths`` for a ``resnet``. Use ``path.py:Class`` for your own module
            (:func:`~xcompat.encoders.own_modules.register_encoder`), ``timm_wrapper`` with ``architecture`` and ``model_args``
            for timm,
            ``iresnet`` (:class:`~xcompat.encoders.architectures.iresnet.IResNetModel`) for faces, ``alexnet`` for
            :class:`~xcompat.encoders.architectures.alexnet.AlexNetModel`.
        vocab_size: maximum tokens in the byte-level BPE tokenizer.
        image_size: side of an image model's square images in pixels; None to use its configuration's, or 224.
        stem: ``small`` for ResNets on images with 32 or 64 pixels: a 3x3 convolution with stride 1 without pooling.
        mean: grey value in [0, 1] to subtract from pixels.
        std: divisor for the centred pixels.

    Example:
        >>> source = ScratchSource(model={"model_type": "resnet", "depths": [1, 1], "hidden_sizes": [8, 16]}, image_size=32)
        >>> encoder, processor = encoder_from_scratch(source)
        >>> encoder.embedding_dim, processor.image_size
        (16, (32, 32))
    """

    model_config = ConfigDict(extra="forbid")
    model: dict[str, Any]
    vocab_size: int = 2048
    image_size: int | None = Field(None, ge=1)
    stem: Literal["small"] | None = None
    mean: float = 0.5
    std: float = 0.5

    @model_validator(mode="after")
    def _known_architecture(self, info: ValidationInfo) -> Self:
        model_type = str(self.model.get("model_type"))
        if is_quick(info):
            if is_file_class(model_type):
                class_file(model_type)
            return self
        from transformers import CONFIG_MAPPING, PreTrainedConfig

        from xcompat.encoders.own_modules import load_model_type

        check_config(self.model, "model")
        model_type = load_model_type(model_type)
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"unknown model_type {model_type!r}; use a model_type of transformers")
        if not self.image_only:
            for option in ("image_size", "stem"):
                if getattr(self, option) is not None:
                    raise ValueError(f"{option} needs an image model; configure the image tower of {model_type} in vision_config")
            return self
        known = {field.name for field in fields(CONFIG_MAPPING[model_type])} | {"model_type"}
        if unknown := sorted(self.model.keys() - known):
            own = known - {field.name for field in fields(PreTrainedConfig)}
            raise ValueError(f"{model_type} has no option {unknown[0]!r}; {nearest(unknown[0], own)}")
        return self

    @property
    def architecture(self) -> dict[str, Any]:
        """Return ``model`` with a registered ``model_type``."""
        from xcompat.encoders.own_modules import load_model_type

        return self.model | {"model_type": load_model_type(self.model["model_type"])}

    @property
    def image_only(self) -> bool:
        """Return whether the architecture has no text tower."""
        from transformers import CONFIG_MAPPING

        return "text_config" not in CONFIG_MAPPING[self.architecture["model_type"]].sub_configs


FROM_SCRATCH = "from scratch"
"""Name of encoders with random weights."""


def encoder_from_scratch(source: ScratchSource, texts: Iterable[str] = (), seed: int = 0) -> tuple[Encoder, Processor]:
    """Build an encoder with random weights, and its processor.

    Args:
        source: the architecture.
        texts: training texts for an image-text model's tokenizer.
        seed: random seed for the weights.

    Raises:
        XcompatError: the architecture cannot be built or does not accept the image size.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _image_encoder(source) if source.image_only else _image_text_encoder(source, texts)


def _image_encoder(source: ScratchSource) -> tuple[Encoder, Processor]:
    import torch

    from xcompat.encoders.image_encoder import ImageEncoder, image_only_processor, load_image_processor, measure_encoder

    config, model = image_model(source)
    pooler = getattr(model, "pooler", None)
    description = {
        "library": ImageEncoder.library,
        "name": FROM_SCRATCH,
        "revision": None,
        "config": config.to_dict(),
        # a linear pooler would change the class token
        "pooler": pooler is None or not any(isinstance(module, torch.nn.Linear) for module in pooler.modules()),
    }
    if config.model_type == "timm_wrapper":
        processor = load_image_processor("", None, False, description)
    else:
        processor = image_only_processor(_square_images(_edge(source, config), source))
    return measure_encoder(model, description, processor), processor


def image_model(source: ScratchSource) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """Return the configuration and the image model, with random weights."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from xcompat.encoders.image_encoder import build_image_model
    from xcompat.encoders.transformers_encoder import use_torch_momentum

    try:
        config: Any = AutoConfig.for_model(**source.architecture, **({"stem": source.stem} if source.stem else {}))
        edge = _edge(source, config)
        if hasattr(config, "image_size"):
            config.image_size = edge
        if config.model_type == "timm_wrapper":  # timm keeps the preprocessing in the configuration
            resizing = {"input_size": [3, edge, edge], "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"}
            config.pretrained_cfg = resizing | {"mean": [source.mean] * 3, "std": [source.std] * 3}
        model = build_image_model(config)
    except XcompatError:
        raise
    except (StrictDataclassError, ImportError, RuntimeError, TypeError, ValueError) as error:  # ImportError: timm lacks the name
        reason = " ".join(str(error).split())
        raise XcompatError(f"cannot build {source.model['model_type']} from scratch: {reason}") from error
    use_torch_momentum(model, 0.1)
    return config, model


def _edge(source: ScratchSource, config: PreTrainedConfig) -> int:
    return source.image_size or int(getattr(config, "image_size", 224))


def _square_images(edge: int, source: ScratchSource) -> BaseImageProcessor:
    """Return an image processor that resizes to a square and normalises."""
    from transformers import CLIPImageProcessorPil

    size = {"height": edge, "width": edge}
    return CLIPImageProcessorPil(size=size, do_center_crop=False, image_mean=[source.mean] * 3, image_std=[source.std] * 3)


def _image_text_encoder(source: ScratchSource, texts: Iterable[str]) -> tuple[Encoder, Processor]:
    from transformers import AutoConfig

    from xcompat.encoders.transformers_encoder import build_transformers_encoder, image_edge, make_processor

    text_config = source.model.get("text_config", {})
    max_length = text_config.get("max_position_embeddings", 77)
    tokenizer = train_tokenizer(texts, source.vocab_size, max_length)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    filled = source.model | {"text_config": text_config | ids | {"vocab_size": len(tokenizer)}}
    config = AutoConfig.for_model(**filled)
    description = {"library": "transformers", "name": FROM_SCRATCH, "revision": None, "config": config.to_dict()}
    encoder = build_transformers_encoder(description)
    return encoder, make_processor(_square_images(image_edge(config), source), tokenizer, config)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048, max_length: int = 32) -> PreTrainedTokenizerFast:
    """Train a lower-casing byte-level BPE tokenizer for a CLIP text tower.

    CLIP pools at the first end-of-text token, or with ``eos_token_id == 2`` (old configurations) at the highest id. The ids are
    therefore pad 0, eos 1, bos 2; copy them into the text config.

    Args:
        texts: training texts in any order.
        vocab_size: maximum tokens, including 256 bytes and 3 special tokens.
        max_length: maximum tokens per text with bos and eos (``max_position_embeddings``).

    Raises:
        XcompatError: there is no text, or the vocabulary is too small.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pad, eos, bos = special = ["<|pad|>", "<|eos|>", "<|bos|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(special):
        raise XcompatError(
            f"vocab_size={vocab_size} is too small for the {len(alphabet)} bytes; use {len(alphabet) + len(special)} or more"
        )
    corpus = sorted(set(texts))
    if not corpus:
        raise XcompatError("there are no texts to train the tokenizer on; check the text corpus")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation("isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in (bos, eos)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        padding_side="right",
        truncation_side="right",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    )
