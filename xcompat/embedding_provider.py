"""Embeddings by a service: a function of the user's is asked in batches, and what it has answered is never asked again."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.cache_filling import Batches, fill_cache
from xcompat.data import BadSamples
from xcompat.embedding_cache import CacheInfo, EmbeddingCache
from xcompat.errors import XcompatError, nearest, what_failed
from xcompat.files import read_json
from xcompat.fingerprint import Fingerprint
from xcompat.progress import Waiting, console, literal
from xcompat.vectors import require_unit

BYTES_PER_TOKEN = 4  # of UTF-8, about, in tokenizers of today
ATTEMPTS = 4
LONGEST_WAIT = 60  # seconds between two attempts

Function = Callable[[list[str]], Any]
"""From texts to embeddings of length 1, a row for each."""


@dataclass
class Provider:
    """A service that embeds texts, as a function calls it.

    Args:
        embed: takes a list of texts and returns an array (or lists) of as many embeddings of length 1. What it raises is tried
            again, :data:`ATTEMPTS` times in all.
        name: of the service's model; equal names stand for equal embeddings.
        requests_per_minute: most calls in a minute; None for no limit.
        price: of a million tokens, for the estimate; None to show none.
        batch: texts of a call, and of a shard of the cache.
    """

    embed: Function
    name: str
    requests_per_minute: float | None = None
    price: float | None = None
    batch: int = 128
    _earliest: float = field(default=0.0, init=False)

    @property
    def fingerprint(self) -> Fingerprint:
        """Return the model's identity: its name, as nothing else is known."""
        return Fingerprint.from_string(self.name)

    def embed_texts(self, texts: Sequence[str], path: str | Path, data_digest: str) -> EmbeddingCache:
        """Embed texts once; what a killed or failed run was answered is kept, shard by shard.

        Args:
            texts: any sequence that yields lists of strings for slices.
            path: folder of the cache; a finished cache is opened, an unfinished one continued.
            data_digest: identifies the texts and their order.

        Returns:
            The cache.

        Raises:
            XcompatError: the function failed, or returned something else than embeddings; or there are no texts.
        """
        path, answered = Path(path), list[NDArray[np.float32]]()
        dim = read_json(path / "plan.json").get("dim") if (path / "plan.json").exists() else None
        if dim is None and len(texts):  # the first answer says
            self._announce(texts[:])
            answered = [self.ask(list(texts[: self.batch]))]
            dim = answered[0].shape[1]

        def embed_shards(shards: Sequence[slice], _: Waiting) -> Iterator[Batches]:
            if not answered:
                self._announce(text for shard in shards for text in texts[shard])
            for shard in shards:
                rows_BD = answered.pop() if answered else self.ask(list(texts[shard]), dim)
                yield iter([(np.arange(len(rows_BD)), torch.from_numpy(rows_BD))])

        info = CacheInfo(self.fingerprint.digest, self.name, data_digest, "texts", len(texts), dim or 1, self.batch)
        return fill_cache(info, path, embed_shards, BadSamples())

    def ask(self, texts: list[str], dim: int | None = None) -> NDArray[np.float32]:
        """Embed one batch.

        Args:
            texts: B texts.
            dim: the dimension of earlier answers; None for any.

        Returns:
            (B, D) float32.

        Raises:
            XcompatError: see :meth:`embed_texts`.
        """
        from tenacity import Retrying, stop_after_attempt, wait_random_exponential

        retrying = Retrying(stop=stop_after_attempt(ATTEMPTS), wait=wait_random_exponential(max=LONGEST_WAIT), reraise=True)
        try:
            answer = retrying(self._call, texts)
        except Exception as error:  # whatever a library of a service raises
            kept = "what it has answered is kept: start again to continue"
            raise XcompatError(f"{self.name} failed {ATTEMPTS} times ({what_failed(error)}); {kept}") from error
        return self._checked(answer, len(texts), dim)

    def _call(self, texts: list[str]) -> Any:  # noqa: ANN401 - whatever the function returns
        time.sleep(max(0.0, self._earliest - time.monotonic()))
        if self.requests_per_minute is not None:
            self._earliest = time.monotonic() + 60 / self.requests_per_minute
        return self.embed(texts)

    def _checked(self, answer: Any, count: int, dim: int | None) -> NDArray[np.float32]:  # noqa: ANN401 - any answer
        try:
            rows_BD = np.array(answer, np.float32)
        except (TypeError, ValueError) as error:
            raise XcompatError(f"{self.name} returned no matrix of numbers ({what_failed(error)}); return a row a text") from None
        if rows_BD.ndim != 2 or len(rows_BD) != count or not rows_BD.size:
            raise XcompatError(f"{self.name} returned shape {rows_BD.shape} for {count} texts; return a row for each of them")
        if dim is not None and rows_BD.shape[1] != dim:
            raise XcompatError(f"{self.name} returned {rows_BD.shape[1]} dimensions, and {dim} before; name one model")
        require_unit(torch.from_numpy(rows_BD), f"an answer of {self.name}")
        return rows_BD

    def _announce(self, texts: Iterable[str]) -> None:
        """Print how much is going to be embedded, and what that costs."""
        count = characters = size = 0
        for text in texts:
            count, characters, size = count + 1, characters + len(text), size + len(text.encode())
        tokens = size / BYTES_PER_TOKEN
        cost = f", about {tokens / 1e6 * self.price:,.2f} at {self.price:g} per million" if self.price is not None else ""
        line = f"{self.name} embeds {count:,} texts of {characters:,} characters: about {tokens:,.0f} tokens{cost}"
        console.print(literal(line), soft_wrap=True)


def load_function(name: str) -> Function:
    """Import a function that the user named; modules of the current folder are found too.

    Args:
        name: ``module:function``.

    Returns:
        The function.

    Raises:
        XcompatError: there is none, or its module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise XcompatError(f"{name!r} names no function; write module:function, such as my_service:embed for my_service.py")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module raises when it is imported
        raise XcompatError(f"{module_name}, which {name!r} names, cannot be imported ({what_failed(error)})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise XcompatError(f"{module_name} has no function {attribute!r}; {nearest(attribute, functions)}")
    loaded: Function = function
    return loaded
