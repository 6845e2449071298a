"""What tokenizers of transformers have in common: ids without padding, what was cut off, and a digest for fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from xcompat.encoders.processor import Processor


def token_ids(
    processor: Processor,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Tokenise texts without padding, and count those that lose their end.

    Args:
        processor: gets the count.
        tokenizer: of transformers.
        texts: B of them.
        max_length: most tokens; None for any number.
        add_special_tokens: whether special tokens are added.

    Returns:
        B lists of ids.
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
    """Return a digest of all that makes tokens of a text, but for truncation and padding.

    These two are a call's settings, left over in the tokenizer by whoever used it last.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str()) if backend is not None else {"vocab": tokenizer.get_vocab()}
    state = {k: v for k, v in state.items() if k not in {"truncation", "padding"}}
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
