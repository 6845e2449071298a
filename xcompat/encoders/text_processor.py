"""Preprocessing for sentence-transformers text models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from xcompat.core.errors import XcompatError
from xcompat.encoders.processor import Processor
from xcompat.encoders.text_files import first_module, text_folder
from xcompat.encoders.tokens import describe_tokens, token_ids

NO_IMAGES: dict[str, Any] = {"image_size": (0, 0), "mean": (), "std": (), "interpolation": ""}
"""Fields of a :class:`Processor` without images."""
UNLIMITED = VERY_LARGE_INTEGER
"""``max_length`` of models without a limit."""


@dataclass
class TextProcessor(Processor):
    """Tokenizer with prompts for queries and passages.

    Args:
        tokenizer: tokenizer without padding.
        prompt: prompt before every text; either of the next two.
        query_prompt: prompt before queries.
        passage_prompt: prompt before passages, i.e. gallery items.
        special_tokens: whether the tokenizer adds special tokens.
        lower_case: whether to lower-case texts first.
    """

    tokenizer: PreTrainedTokenizerBase = field(kw_only=True)
    prompt: str = field(kw_only=True)
    query_prompt: str = field(kw_only=True)
    passage_prompt: str = field(kw_only=True)
    special_tokens: bool = field(kw_only=True)
    lower_case: bool = field(kw_only=True)

    def for_queries(self) -> TextProcessor:
        """Return the processor with the query prompt."""
        return self if self.prompt == self.query_prompt else replace(self, prompt=self.query_prompt, count_truncated=0)

    def pixels(self, images: list[Image]) -> Tensor:
        """Raise, because there is no image tower; :meth:`images` raises first."""
        raise NotImplementedError

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids per text, including the prompt, truncated to ``max_length``."""
        prompted = [self.prompt + text for text in texts]
        if self.lower_case:
            prompted = list(map(Lowercase().normalize_str, prompted))
        limit = self.max_length if self.max_length < UNLIMITED else None
        return token_ids(self, self.tokenizer, prompted, limit, add_special_tokens=self.special_tokens)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer. Prompts and ``max_length`` stay in the encoder's description."""
        self.tokenizer.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """Return all settings that change tokens; the same for queries and passages."""
        return {
            "tokens": describe_tokens(self.tokenizer),
            "truncation_side": self.tokenizer.truncation_side,
            "max_length": self.max_length,
            "special_tokens": self.special_tokens,
            "lower_case": self.lower_case,
            "query_prompt": self.query_prompt,
            "passage_prompt": self.passage_prompt,
        }


def load_text_processor(name: str, revision: str | None, trust_remote_code: bool, description: dict[str, Any]) -> TextProcessor:
    """Load the passage processor.

    Args:
        name: folder or Hub name of a sentence-transformers model, or of a checkpoint around it.
        revision: branch, tag or commit; None to use the default branch.
        trust_remote_code: whether to run code from the repository.
        description: the encoder's description.

    Raises:
        XcompatError: the vocabulary is missing.
    """
    folder = text_folder(name, revision, weights=False)
    tokenizer: Any
    if description["config"]["special_tokens"]:
        where = folder / first_module(folder)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    else:
        file = folder / first_module(folder) / "tokenizer.json"
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(file)))
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise XcompatError(f"{name} has no vocabulary; restore its tokenizer.json from the model's source")
    return make_text_processor(tokenizer, description)


def make_text_processor(tokenizer: PreTrainedTokenizerBase, description: dict[str, Any]) -> TextProcessor:
    """Return the passage processor for an encoder's tokenizer and description."""
    config = description["config"]
    return TextProcessor(
        **NO_IMAGES,
        max_length=config["max_length"] or UNLIMITED,
        pad_to_max_length=False,
        masks_padding=True,
        pad_token_id=tokenizer.pad_token_id or 0,  # any token will do, because padding is masked
        tokenizer=tokenizer,
        prompt=description["passage_prompt"],
        query_prompt=description["query_prompt"],
        passage_prompt=description["passage_prompt"],
        special_tokens=config["special_tokens"],
        lower_case=config["lower_case"],
    )
