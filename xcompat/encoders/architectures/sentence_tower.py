"""Text towers from sentence-transformers models for ``VisionTextDualEncoderModel``."""

# no `from __future__ import annotations`: `strict` reads the types of the fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from huggingface_hub.dataclasses import strict
from tokenizers import Tokenizer
from tokenizers.processors import Sequence
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from xcompat.core.errors import XcompatError
from xcompat.encoders import load_encoder
from xcompat.encoders.text_files import SENTENCE_TRANSFORMERS

if TYPE_CHECKING:
    from xcompat.encoders import EncoderSource


@strict
class SentenceTowerConfig(PreTrainedConfig):
    """Configuration of :class:`SentenceTowerModel`.

    Args:
        modules: sentence-transformers modules, as in a text encoder's description.
        hidden_size: dimension W of the embeddings.
        max_position_embeddings: maximum number of tokens.
    """

    model_type = "sentence_tower"

    modules: list | tuple = ()
    hidden_size: int = 0
    max_position_embeddings: int = 512


class SentenceTowerModel(PreTrainedModel):
    """Sentence-transformers text encoder with the interface of a transformers text model.

    ``pooler_output`` is the model's own pooling (B, W), before normalisation by :class:`~xcompat.encoders.base.Encoder`. With a
    plain transformers text model it would be the pooler of the first token, which sentence-transformers models do not train.
    """

    config_class = SentenceTowerConfig
    config: SentenceTowerConfig
    base_model_prefix = "sentence_tower"
    _supports_sdpa = True

    def __init__(self, config: SentenceTowerConfig) -> None:
        super().__init__(config)
        from xcompat.encoders.text_encoder import build_text_encoder

        described = {"name": config.model_type, "config": {"modules": config.modules}, "embedding_dim": config.hidden_size}
        self.encoder = build_text_encoder(described)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **_: object,
    ) -> BaseModelOutputWithPooling:
        """Return ``pooler_output``, the text embeddings (B, W)."""
        return BaseModelOutputWithPooling(pooler_output=self.encoder.text_features(input_ids, attention_mask))


AutoConfig.register(SentenceTowerConfig.model_type, SentenceTowerConfig, exist_ok=True)
AutoModel.register(SentenceTowerConfig, SentenceTowerModel, exist_ok=True)


def join_towers(image: "EncoderSource | str", text: "EncoderSource | str", dim: int, folder: str | Path) -> None:
    """Write a ``VisionTextDualEncoderModel`` from two pretrained encoders, with untrained projections.

    Args:
        image: image model of transformers with a pooled output.
        text: sentence-transformers model without prompts.
        dim: dimension of the shared space.
        folder: output folder for ``load_encoder``.

    Raises:
        XcompatError: an encoder is unsuitable.
    """
    from xcompat.encoders.image_encoder import ImageEncoder
    from xcompat.encoders.text_encoder import TextEncoder
    from xcompat.encoders.text_processor import TextProcessor

    (image_encoder, pixels), (text_encoder, tokens) = load_encoder(image), load_encoder(text)
    if not isinstance(image_encoder, ImageEncoder) or not isinstance(text_encoder, TextEncoder):
        raise XcompatError(f"join_towers needs an image model and a {SENTENCE_TRANSFORMERS} model, in this order")
    assert isinstance(tokens, TextProcessor)
    described, vision = text_encoder.description, image_encoder.model
    settings = described["config"]
    has_prompts = described["query_prompt"] or described["passage_prompt"]
    if has_prompts or settings["lower_case"]:
        unsupported = "prompts" if has_prompts else "do_lower_case"
        raise XcompatError(
            f"{text_encoder.name} uses {unsupported}, which a model of images and texts cannot keep; choose a text model without"
        )
    with torch.no_grad():
        features = vision(torch.zeros(1, 3, *pixels.image_size)).pooler_output
    if features is None or features.shape != (1, image_encoder.embedding_dim):
        raise XcompatError(f"{image_encoder.name} has no pooled output of shape (B, W); use another image model")
    config = SentenceTowerConfig(modules=settings["modules"], hidden_size=text_encoder.embedding_dim)
    config.max_position_embeddings = settings["max_length"] or config.max_position_embeddings
    tower = SentenceTowerModel(config)
    tower.encoder.load_state_dict(text_encoder.state_dict())
    vision.config.hidden_size = image_encoder.embedding_dim  # the projection's input, which convolutional networks do not state
    # by the package's name, as their modules load CLIP, which a map of embeddings does not need
    joined = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision.config, config, projection_dim=dim)
    transformers.VisionTextDualEncoderModel(joined, vision, tower).save_pretrained(folder)
    pixels.save_pretrained(folder)
    _with_padding(tokens.tokenizer, settings["special_tokens"]).save_pretrained(folder)


def _with_padding(tokenizer: PreTrainedTokenizerBase, special_tokens: bool) -> PreTrainedTokenizerBase:
    """Return a tokenizer with a padding token, which adds special tokens only if its model expects them."""
    if special_tokens and tokenizer.pad_token_id is not None:
        return tokenizer
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if not special_tokens:
        backend.post_processor = Sequence([])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=tokenizer.pad_token or backend.id_to_token(0))
