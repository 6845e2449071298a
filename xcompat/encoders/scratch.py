"""Encoders that start from nothing: small models trained in a recipe, and tiny stand-ins for dry runs and tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from transformers import AutoConfig

from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.errors import XcompatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ScratchSource(BaseModel):
    """An encoder to be trained from random weights, its tokenizer learned from the training texts.

    Args:
        model: a transformers configuration: ``model_type``, ``text_config``, ``vision_config``, ``projection_dim``; the
            tokens' count and special ids are filled in.
        vocab_size: most tokens the byte-level BPE tokenizer may have.
        mean: grey value in [0, 1] taken off the pixels.
        std: what the pixels are divided by after that.
    """

    model_config = ConfigDict(extra="forbid")
    model: dict[str, Any]
    vocab_size: int = 2048
    mean: float = 0.5
    std: float = 0.5


def encoder_from_scratch(source: ScratchSource, texts: Iterable[str], seed: int = 0) -> tuple[Encoder, Processor]:
    """Build an encoder with random weights and a tokenizer learned from texts.

    Args:
        source: the architecture.
        texts: what the tokenizer learns from.
        seed: of the weights.

    Returns:
        The encoder and its processor.
    """
    from transformers import CLIPImageProcessorPil

    from xcompat.encoders.transformers_encoder import build_transformers_encoder, image_edge, make_processor

    text_config = source.model.get("text_config", {})
    max_length = text_config.get("max_position_embeddings", 77)
    tokenizer = train_tokenizer(texts, source.vocab_size, max_length)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    filled = source.model | {"text_config": text_config | ids | {"vocab_size": len(tokenizer)}}
    config = AutoConfig.for_model(**filled)
    edge = image_edge(config)
    image_processor = CLIPImageProcessorPil(
        size={"height": edge, "width": edge}, do_center_crop=False, image_mean=[source.mean] * 3, image_std=[source.std] * 3
    )
    description = {"library": "transformers", "name": "from scratch", "revision": None, "config": config.to_dict()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = build_transformers_encoder(description)
    return encoder, make_processor(image_processor, tokenizer, config)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 2048, max_length: int = 32) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that fits a CLIP text tower.

    CLIP pools at the first end-of-text token, except that a config with ``eos_token_id == 2`` pools at the highest id
    instead (a legacy of old checkpoints): hence pad 0, eos 1, bos 2. Copy the three ids into the text config.

    Args:
        texts: what to learn the merges from; their order does not matter.
        vocab_size: tokens in all, with 256 bytes and 3 special tokens; the texts may give fewer.
        max_length: tokens a text may have with bos and eos, the model's ``max_position_embeddings``.

    Returns:
        A tokenizer that lower-cases and can encode any text.

    Raises:
        XcompatError: no text, or a vocabulary too small for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pad, eos, bos = special = ["<|pad|>", "<|eos|>", "<|bos|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(special):
        raise XcompatError(
            f"vocab_size={vocab_size} cannot hold the {len(alphabet)} bytes; use {len(alphabet) + len(special)} or more"
        )
    corpus = sorted(set(texts))
    if not corpus:
        raise XcompatError("the tokenizer was given no text to learn from; check the text corpus")
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
