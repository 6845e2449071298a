"""Embeddings from a service. A user's function is called in batches, and its answers are cached."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcompat.core.arrays import normalise_rows
from xcompat.core.distributed import from_main_process, process_state
from xcompat.core.errors import XcompatError, describe_error, nearest
from xcompat.core.files import read_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import Waiting, console, literal, notice
from xcompat.data import BadSamples
from xcompat.embeddings.cache import CacheInfo, EmbeddingCache
from xcompat.embeddings.cache_writer import Batches, fill_cache, select_rows
from xcompat.encoders.base import Space
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint
from xcompat.vectors.checks import first_not_unit

BYTES_PER_TOKEN = 4  # approximate UTF-8 bytes per token
ATTEMPTS = 4
SHOWN = 40  # characters of a text in a message
LONGEST_WAIT = 60  # seconds between two attempts
PROBES = ("The quick brown fox jumps over the lazy dog.", "opening hours and prices", "def add(a, b): return a + b")
"""Texts whose embeddings show whether a service still uses the same model."""
SKETCHED = 32  # dimensions of a sketch
ALIKE, OTHER = 0.99, 0.5
"""Mean cosines of sketches: at least the first for the same model, below the second for another model."""
ANSWERS_SAVED = "its answers are saved: start again to continue"

Function = Callable[[list[str]], object]
"""Function from texts to embeddings of length 1, a row per text."""


@dataclass
class Provider:
    """Text embedding service, called through a function.

    Args:
        embed: takes a list of texts and returns an array (or lists) of as many unit-length embeddings. Failed calls are retried,
            up to :data:`ATTEMPTS` in all.
        name: name of the service's model. Equal names stand for equal embeddings.
        requests_per_minute: maximum calls per minute. None for no limit.
        price: price of a million tokens, for the estimate. None to print none.
        batch: texts per call and per shard of the cache.
    """

    embed: Function
    name: str
    requests_per_minute: float | None = None
    price: float | None = None
    batch: int = 128
    _earliest: float = field(default=0.0, init=False)

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model's name."""
        return Fingerprint.from_string(self.name)

    def embed_texts(self, texts: Sequence[str], path: str | Path, data_digest: str) -> EmbeddingCache:
        """Embed texts into a cache. Answers of killed or failed runs are kept, shard by shard.

        Args:
            texts: any sequence that returns lists of strings for slices.
            path: cache folder. A finished cache is opened, an unfinished cache continued.
            data_digest: identifies the texts and their order.

        Returns:
            The cache.

        Raises:
            XcompatError: the function failed or returned no embeddings, or there are no texts.
        """
        process_state()  # must come first: only processes in the group get shards
        path, answered = Path(path), dict[int, NDArray[np.float32]]()

        def first_answer() -> int:
            self._announce(texts[:])
            answered[0] = self.ask(list(texts[: self.batch]), fix=ANSWERS_SAVED)
            return answered[0].shape[1]

        begun = from_main_process(lambda: _cached_dim(path))
        dim = from_main_process(first_answer) if begun is None and len(texts) else begun

        def embed_shards(shards: Sequence[Sequence[int]], _: Waiting) -> Iterator[Batches]:
            if begun is not None:
                self._announce(text for rows in shards for text in select_rows(texts, rows))
            for rows in shards:
                rows_BD = answered.pop(rows[0], None)  # the first process has the first shard's answer
                if rows_BD is None:
                    rows_BD = self.ask(select_rows(texts, rows), dim, ANSWERS_SAVED, rows[0])
                yield iter([(np.arange(len(rows_BD)), torch.from_numpy(rows_BD))])

        info = CacheInfo(self.fingerprint.digest, self.name, data_digest, "texts", len(texts), dim or 1, self.batch)
        return fill_cache(info, path, embed_shards, BadSamples())

    def ask(self, texts: list[str], dim: int | None = None, fix: str = "try again later", before: int = 0) -> NDArray[np.float32]:
        """Embed a batch.

        Args:
            texts: B texts.
            dim: dimension of earlier answers. None for any.
            fix: advice in the error message of a failing function.
            before: number of the first text, for messages.

        Returns:
            (B, D) float32.

        Raises:
            XcompatError: see :meth:`embed_texts`.
        """
        from tenacity import Retrying, stop_after_attempt, wait_random_exponential

        retrying = Retrying(stop=stop_after_attempt(ATTEMPTS), wait=wait_random_exponential(max=LONGEST_WAIT), reraise=True)
        try:
            answer = retrying(self._call, texts)
        except Exception as error:  # a service's library may raise anything
            raise XcompatError(f"{self.name} failed {ATTEMPTS} times ({describe_error(error)}); {fix}") from error
        return self._check_answer(answer, texts, dim, before)

    def sketch(self) -> list[list[float]]:
        """Embed :data:`PROBES`, and return the first numbers of each embedding."""
        return sketch_rows(self.ask(list(PROBES)))

    def _call(self, texts: list[str]) -> object:
        time.sleep(max(0.0, self._earliest - time.monotonic()))
        if self.requests_per_minute is not None:
            self._earliest = time.monotonic() + 60 / self.requests_per_minute
        return self.embed(texts)

    def _check_answer(self, answer: object, texts: list[str], dim: int | None, before: int) -> NDArray[np.float32]:
        try:
            rows_BD = np.array(answer, np.float32)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError for tensors with gradients
            raise XcompatError(f"{self.name} returned no matrix ({describe_error(error)}); return a row per text") from None
        if rows_BD.ndim != 2 or len(rows_BD) != len(texts) or not rows_BD.size:
            raise XcompatError(f"{self.name} returned shape {rows_BD.shape} for {len(texts)} texts; return a row per text")
        if dim is not None and rows_BD.shape[1] != dim:
            raise XcompatError(f"{self.name} returned {rows_BD.shape[1]} dimensions, and {dim} before; use the same model")
        if (found := first_not_unit(torch.from_numpy(rows_BD))) is not None:
            row, wrong = found
            raise XcompatError(f"the embedding of text {before + row} ({texts[row][:SHOWN]!r}) by {self.name} {wrong}")
        return rows_BD

    def _announce(self, texts: Iterable[str]) -> None:
        count = characters = size = 0
        for text in texts:
            count, characters, size = count + 1, characters + len(text), size + len(text.encode())
        line = f"{self.name} embeds {count:,} texts of {characters:,} characters: {self.describe_cost(size)}"
        console.print(literal(line), soft_wrap=True)

    def describe_cost(self, size: float) -> str:
        """Return the estimated tokens of texts, and their price if it is known.

        Args:
            size: bytes of the texts.

        Example:
            >>> Provider(list, "a service", price=0.5).describe_cost(8_000_000)
            'about 2,000,000 tokens, about 1.00 at 0.5 per million'
        """
        tokens = size / BYTES_PER_TOKEN
        if self.price is None:
            return f"about {tokens:,.0f} tokens"
        cost = tokens / 1e6 * self.price
        return f"about {tokens:,.0f} tokens, about {f'{cost:,.2f}' if cost >= 1 else f'{cost:.2g}'} at {self.price:g} per million"


@dataclass(frozen=True)
class ServedMap:
    """Map fitted on a service's embeddings, together with the service, to embed texts.

    Args:
        model: the map.
        provider: the service.
    """

    model: CompatModel
    provider: Provider
    _compared: list[float] = field(default_factory=list, init=False, compare=False, repr=False)

    @classmethod
    def load(cls, model: str | Path | nn.Module, embed_with: str | Function | Provider) -> Self:
        """Combine a map with a service.

        Args:
            model: a run's folder, a checkpoint, a name on the Hub, or a loaded model.
            embed_with: the service, its function, or the function's name for :func:`load_function`.

        Returns:
            Both, with the map reduced to inference.

        Raises:
            XcompatError: the model is not a map, or has an encoder of its own.
        """
        loaded = load_checkpoint(str(model)) if isinstance(model, str | Path) else model
        if not isinstance(loaded, CompatModel) or not loaded.embeds_in_memory or loaded.config.encoder is not None:
            name = getattr(loaded, "name_or_path", "") or type(loaded).__name__
            raise XcompatError(f"{name} has its own encoder: remove the embedding function (--embed-with)")
        if isinstance(embed_with, str):
            embed_with = Provider(load_function(embed_with), embed_with)
        elif not isinstance(embed_with, Provider):
            embed_with = Provider(embed_with, getattr(embed_with, "__name__", type(embed_with).__name__))
        return cls(loaded.for_inference(), embed_with)

    def embed(self, texts: Sequence[object], space: Space = "own") -> Tensor:
        """Embed texts, in batches of the service.

        Args:
            texts: B strings.
            space: ``own`` for the service's embeddings, or ``stored`` for embeddings as in a gallery of the map.

        Returns:
            (B, D) float32, or (B, d) in the space ``stored``.

        Raises:
            XcompatError: an item is not a text, or the service fails or returns embeddings that do not fit the map.
        """
        asked = [text for text in texts if isinstance(text, str)]
        if len(asked) < len(texts):
            raise XcompatError(f"{self.provider.name} embeds only texts; pass texts, not paths of images")
        size, dim = self.provider.batch, self.model.config.embedding_dim
        probes = [] if self._compared or self.model.config.service is None else list(PROBES)
        sent = [*probes, *asked]
        rows_BD = np.empty((len(sent), dim), np.float32)
        for start in range(0, len(sent), size):
            answer = self.provider.ask(sent[start : start + size], before=start - len(probes))
            if answer.shape[1] != dim:
                wrong = f"{self.provider.name} returned {answer.shape[1]} dimensions, but the map takes {dim}"
                raise XcompatError(f"{wrong}; {self._advice()}")
            rows_BD[start : start + size] = answer
        if probes:
            self._require_same_service(rows_BD[: len(probes)])
        own_BD = torch.from_numpy(rows_BD[len(probes) :]).to(self.model.device)
        with torch.inference_mode():
            return self.model.to_gallery_space(own_BD) if space == "stored" else own_BD

    def _require_same_service(self, rows_PD: NDArray[np.float32]) -> None:
        known = self.model.config.service
        assert known is not None
        cosine = compare_sketches(sketch_rows(rows_PD), known["sketch"])
        said = (
            f"{self.provider.name} does not embed like {known['name']} did when this map was fitted: mean cosine {cosine:.2f} of "
            f"{len(PROBES)} test texts"
        )
        if cosine < OTHER:
            raise XcompatError(f"{said}; {self._advice()}, or fit the map again with this service")
        if cosine < ALIKE:
            notice(f"{said}; {self._advice()} if the hits are poor, or fit the map again with this service")
        self._compared.append(cosine)

    def _advice(self) -> str:
        known = self.model.config.service
        if known is None:
            return "use the function that the map was fitted with"
        return f"use the function that the map was fitted with (--embed-with {known['function']}, model {known['name']})"


def sketch_rows(rows_PD: NDArray[np.float32]) -> list[list[float]]:
    """Return the first numbers of embeddings, enough to tell models apart and short enough for a configuration."""
    return [[round(value, 5) for value in row] for row in rows_PD[:, :SKETCHED].tolist()]


def compare_sketches(one: list[list[float]], other: list[list[float]]) -> float:
    """Return the mean cosine of two sketches, or 0 for different shapes.

    Example:
        >>> compare_sketches([[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [1.0, 0.0]])
        0.5
    """
    first, second = (np.array(rows, np.float64) for rows in (one, other))
    if first.shape != second.shape:
        return 0.0
    return float((normalise_rows(first) * normalise_rows(second)).sum(axis=1).mean())


def _cached_dim(path: Path) -> int | None:
    """Return the dimension of an existing cache."""
    written = [file for file in (path / "plan.json", path / "cache.json") if file.exists()]
    fields = read_json(written[0]) if written else None
    return fields.get("dim") if isinstance(fields, dict) else None


Asking = TypeVar("Asking", CompatModel, Fingerprint)


@overload
def query_model(source: Embedder | ServedMap) -> CompatModel | Embedder: ...


@overload
def query_model(source: Asking) -> Asking: ...


def query_model(source: Embedder | ServedMap | CompatModel | Fingerprint) -> CompatModel | Embedder | Fingerprint:
    """Return the model of queries: a compatible model itself, else the embedder or fingerprint."""
    if isinstance(source, ServedMap):
        return source.model
    return source.model if isinstance(source, Embedder) and isinstance(source.model, CompatModel) else source


def load_function(name: str) -> Function:
    """Import a function by name, also from modules of the current folder.

    Args:
        name: ``module:function``.

    Returns:
        The function.

    Raises:
        XcompatError: there is no such function, or its module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise XcompatError(f"{name!r} is not a function's name; write module:function, e.g. my_service:embed for my_service.py")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an import may raise anything
        raise XcompatError(f"cannot import {module_name} for {name!r} ({describe_error(error)})") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise XcompatError(f"{module_name} has no function {attribute!r}; {nearest(attribute, functions)}")
    loaded: Function = function
    return loaded
