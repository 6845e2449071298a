"""Token ids exactly as a model of sentence-transformers wants them, with the prompt of passages or that of queries."""

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
"""The fields of a :class:`Processor` when there are no pixels."""
UNLIMITED = VERY_LARGE_INTEGER
"""``max_length`` of a model that reads texts of any length."""


@dataclass
class TextProcessor(Processor):
    """A tokenizer, and the prompts that go before queries and before passages.

    Args:
        tokenizer: without padding of its own.
        prompt: what goes before every text: one of the two below.
        query_prompt: what goes before a query.
        passage_prompt: what goes before a passage, as galleries store it.
        special_tokens: whether the tokenizer adds its special tokens.
        lower_case: whether texts are lower-cased first.
    """

    tokenizer: PreTrainedTokenizerBase = field(kw_only=True)
    prompt: str = field(kw_only=True)
    query_prompt: str = field(kw_only=True)
    passage_prompt: str = field(kw_only=True)
    special_tokens: bool = field(kw_only=True)
    lower_case: bool = field(kw_only=True)

    def for_queries(self) -> TextProcessor:
        """See :meth:`Processor.for_queries`."""
        return self if self.prompt == self.query_prompt else replace(self, prompt=self.query_prompt, count_truncated=0)

    def pixels(self, images: list[Image]) -> Tensor:
        """Make nothing: :meth:`images` refuses what there is no image tower for."""
        raise NotImplementedError

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """See :meth:`Processor.tokenize`; the prompt comes first and counts."""
        prompted = [self.prompt + text for text in texts]
        if self.lower_case:
            prompted = list(map(Lowercase().normalize_str, prompted))
        limit = self.max_length if self.max_length < UNLIMITED else None
        return token_ids(self, self.tokenizer, prompted, limit, add_special_tokens=self.special_tokens)

    def save_pretrained(self, folder: str | Path) -> None:
        """See :meth:`Processor.save_pretrained`; prompts and the longest length stay in the encoder's description."""
        self.tokenizer.save_pretrained(folder)

    def describe(self) -> dict[str, Any]:
        """See :meth:`Processor.describe`; both roles of one model are described alike."""
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
    """Load the tokenizer of a model for texts.

    Args:
        name: folder or Hub name of a model of sentence-transformers, or of a checkpoint that holds one.
        revision: branch, tag or commit; None for the default branch.
        trust_remote_code: whether code from the repository may run.
        description: the encoder's description, which holds its prompts and how long texts may be.

    Returns:
        The processor of passages.

    Raises:
        XcompatError: there is no vocabulary.
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
        raise XcompatError(f"{name} holds no vocabulary; bring back its tokenizer.json from where the model came from")
    return make_text_processor(tokenizer, description)


def make_text_processor(tokenizer: PreTrainedTokenizerBase, description: dict[str, Any]) -> TextProcessor:
    """Join a tokenizer with what an encoder's description says of texts.

    Args:
        tokenizer: of the encoder.
        description: with ``query_prompt``, ``passage_prompt``, and in ``config`` ``max_length`` (None for any),
            ``special_tokens`` and ``lower_case``.

    Returns:
        The processor of passages.
    """
    config = description["config"]
    return TextProcessor(
        **NO_IMAGES,
        max_length=config["max_length"] or UNLIMITED,
        pad_to_max_length=False,
        masks_padding=True,
        pad_token_id=tokenizer.pad_token_id or 0,  # of a model without one, whose padding is masked like any other
        tokenizer=tokenizer,
        prompt=description["passage_prompt"],
        query_prompt=description["query_prompt"],
        passage_prompt=description["passage_prompt"],
        special_tokens=config["special_tokens"],
        lower_case=config["lower_case"],
    )
