"""Token ids and tokenizer digests for transformers tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from xcompat.core.checksums import json_digest
from xcompat.encoders.processor import Processor


def token_ids(
    processor: Processor,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Return B texts' token ids without padding, and count truncated texts in ``processor``.

    Args:
        processor: its ``count_truncated`` increases.
        tokenizer: transformers tokenizer.
        texts: B texts.
        max_length: maximum number of tokens; None for no limit.
        add_special_tokens: whether to add special tokens.
    """
    batch = tokenizer(
        list(texts),
        truncation=max_length is not None,
        max_length=max_length,
        padding=False,
        return_attention_mask=False,
        add_special_tokens=add_special_tokens,
    )
    processor.count_truncated += sum(bool(encoding.overflowing) for encoding in batch.encodings or [])
    return batch["input_ids"]


def describe_tokens(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's digest without its truncation and padding, which are settings from the last call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    state = {k: v for k, v in state.items() if k not in {"truncation", "padding"}}
    return json_digest(state)
