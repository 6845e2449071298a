"""Embeddings by a service: a function of the user's is asked in batches, and what it has answered is never asked again."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xcompat.core.arrays import normalise_rows
from xcompat.core.distributed import from_main_process, process_state
from xcompat.core.errors import XcompatError, nearest, what_failed
from xcompat.core.files import read_json
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import Waiting, console, literal, notice
from xcompat.data import BadSamples
from xcompat.embeddings.cache import CacheInfo, EmbeddingCache
from xcompat.embeddings.cache_filling import Batches, fill_cache
from xcompat.encoders.base import Space
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint
from xcompat.vectors import first_not_unit

BYTES_PER_TOKEN = 4  # of UTF-8, about, in tokenizers of today
ATTEMPTS = 4
SHOWN = 40  # characters of a text in a message
LONGEST_WAIT = 60  # seconds between two attempts
PROBES = ("The quick brown fox jumps over the lazy dog.", "opening hours and prices", "def add(a, b): return a + b")
"""Texts whose embeddings tell whether a service still answers as it did."""
SKETCHED = 32  # dimensions of a sketch
ALIKE, OTHER = 0.99, 0.5
"""Mean cosine of sketches: above the first the service answers as before; below the second another model does."""
KEPT = "what it has answered is kept: start again to continue"

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
        process_state()  # must come first: shards are dealt only to processes that have joined the group
        path, answered = Path(path), dict[int, NDArray[np.float32]]()

        def first_answer() -> int:
            self._announce(texts[:])
            answered[0] = self.ask(list(texts[: self.batch]), mend=KEPT)
            return answered[0].shape[1]

        begun = from_main_process(lambda: _begun_with(path))
        dim = from_main_process(first_answer) if begun is None and len(texts) else begun

        def embed_shards(shards: Sequence[slice], _: Waiting) -> Iterator[Batches]:
            if begun is not None:
                self._announce(text for shard in shards for text in texts[shard])
            for shard in shards:
                rows_BD = answered.pop(shard.start, None)  # of the first process, which has the first shard
                if rows_BD is None:
                    rows_BD = self.ask(list(texts[shard]), dim, KEPT, shard.start)
                yield iter([(np.arange(len(rows_BD)), torch.from_numpy(rows_BD))])

        info = CacheInfo(self.fingerprint.digest, self.name, data_digest, "texts", len(texts), dim or 1, self.batch)
        return fill_cache(info, path, embed_shards, BadSamples())

    def ask(
        self, texts: list[str], dim: int | None = None, mend: str = "ask again later", before: int = 0
    ) -> NDArray[np.float32]:
        """Embed one batch.

        Args:
            texts: B texts.
            dim: the dimension of earlier answers; None for any.
            mend: what helps if the function fails each time.
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
        except Exception as error:  # whatever a library of a service raises
            raise XcompatError(f"{self.name} failed {ATTEMPTS} times ({what_failed(error)}); {mend}") from error
        return self._checked(answer, texts, dim, before)

    def sketch(self) -> list[list[float]]:
        """Ask for the embeddings of :data:`PROBES`, and return their first numbers."""
        return sketch_rows(self.ask(list(PROBES)))

    def _call(self, texts: list[str]) -> Any:  # noqa: ANN401 - whatever the function returns
        time.sleep(max(0.0, self._earliest - time.monotonic()))
        if self.requests_per_minute is not None:
            self._earliest = time.monotonic() + 60 / self.requests_per_minute
        return self.embed(texts)

    def _checked(self, answer: Any, texts: list[str], dim: int | None, before: int) -> NDArray[np.float32]:  # noqa: ANN401
        try:
            rows_BD = np.array(answer, np.float32)
        except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors that have gradients
            raise XcompatError(f"{self.name} returned no matrix of numbers ({what_failed(error)}); return a row a text") from None
        if rows_BD.ndim != 2 or len(rows_BD) != len(texts) or not rows_BD.size:
            raise XcompatError(f"{self.name} returned shape {rows_BD.shape} for {len(texts)} texts; return a row for each")
        if dim is not None and rows_BD.shape[1] != dim:
            raise XcompatError(f"{self.name} returned {rows_BD.shape[1]} dimensions, and {dim} before; name one model")
        if (found := first_not_unit(torch.from_numpy(rows_BD))) is not None:
            row, wrong = found
            raise XcompatError(f"row {before + row} of the texts, {texts[row][:SHOWN]!r}, as {self.name} embeds it {wrong}")
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


@dataclass(frozen=True)
class ServedMap:
    """A map that was fitted on a service's embeddings, and the service: together they embed texts.

    Args:
        model: the map.
        provider: the service.
    """

    model: CompatModel
    provider: Provider
    _compared: list[float] = field(default_factory=list, init=False, compare=False, repr=False)

    @classmethod
    def load(cls, model: str | Path | nn.Module, embed_with: str | Function | Provider) -> Self:
        """Join a map with a service.

        Args:
            model: a run's folder, a checkpoint, a name on the Hub, or a model that is loaded already.
            embed_with: the service, the function that calls it, or that function's name as :func:`load_function` takes it.

        Returns:
            Both, the map without what only training needs.

        Raises:
            XcompatError: the model is no map, or embeds by an encoder of its own.
        """
        loaded = load_checkpoint(str(model)) if isinstance(model, str | Path) else model
        if not isinstance(loaded, CompatModel) or not loaded.embeds_in_memory or loaded.config.encoder is not None:
            name = getattr(loaded, "name_or_path", "") or type(loaded).__name__
            raise XcompatError(f"{name} has an encoder of its own, and takes no function in its place: leave that out")
        if isinstance(embed_with, str):
            embed_with = Provider(load_function(embed_with), embed_with)
        elif not isinstance(embed_with, Provider):
            embed_with = Provider(embed_with, getattr(embed_with, "__name__", type(embed_with).__name__))
        return cls(loaded.for_inference(), embed_with)

    def embed(self, texts: Sequence[object], space: Space = "own") -> Tensor:
        """Embed texts, a call for as many as the service takes.

        Args:
            texts: B strings.
            space: ``own``, as the service embeds them, or ``stored``, as a gallery of the map holds them.

        Returns:
            (B, D) float32, or (B, d) in the space ``stored``.

        Raises:
            XcompatError: they are not all texts, or the service fails or returns something else than the map's embeddings.
        """
        asked = [text for text in texts if isinstance(text, str)]
        if len(asked) < len(texts):
            raise XcompatError(f"{self.provider.name} embeds texts, and nothing else; give strings that are no paths of pictures")
        size, dim = self.provider.batch, self.model.config.embedding_dim
        probes = [] if self._compared or self.model.config.service is None else list(PROBES)
        sent = [*probes, *asked]
        rows_BD = np.empty((len(sent), dim), np.float32)
        for start in range(0, len(sent), size):
            answer = self.provider.ask(sent[start : start + size], before=start - len(probes))
            if answer.shape[1] != dim:
                wrong = f"{self.provider.name} returned {answer.shape[1]} dimensions, and the map takes {dim}"
                raise XcompatError(f"{wrong}; {self._advice()}")
            rows_BD[start : start + size] = answer
        if probes:
            self._require_same_service(rows_BD[: len(probes)])
        own_BD = torch.from_numpy(rows_BD[len(probes) :]).to(self.model.device)
        with torch.inference_mode():
            return self.model.stored(own_BD) if space == "stored" else own_BD

    def _require_same_service(self, rows_PD: NDArray[np.float32]) -> None:
        """Compare answers with those that the map was fitted on."""
        known = self.model.config.service
        assert known is not None
        cosine = compare_sketches(sketch_rows(rows_PD), known["sketch"])
        said = (
            f"{self.provider.name} does not embed as {known['name']} did when this map was fitted: mean cosine {cosine:.2f} of "
            f"{len(PROBES)} test texts"
        )
        if cosine < OTHER:
            raise XcompatError(f"{said}; {self._advice()}, or fit the map again with this one")
        if cosine < ALIKE:
            notice(f"{said}; {self._advice()} if the hits are poor, or fit the map again with this one")
        self._compared.append(cosine)

    def _advice(self) -> str:
        known = self.model.config.service
        if known is None:
            return "name the function that it was made with"
        return f"use the function that it was fitted with (--embed-with {known['function']}, model {known['name']})"


def sketch_rows(rows_PD: NDArray[np.float32]) -> list[list[float]]:
    """Return the first numbers of a few embeddings: enough to tell models apart, and short enough for a configuration."""
    return [[round(value, 5) for value in row] for row in rows_PD[:, :SKETCHED].tolist()]


def compare_sketches(one: list[list[float]], other: list[list[float]]) -> float:
    """Return the mean cosine of two sketches; 0 if they have different shapes.

    Example:
        >>> compare_sketches([[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.0], [1.0, 0.0]])
        0.5
    """
    first, second = (np.array(rows, np.float64) for rows in (one, other))
    if first.shape != second.shape:
        return 0.0
    return float((normalise_rows(first) * normalise_rows(second)).sum(axis=1).mean())


def _begun_with(path: Path) -> int | None:
    """Return the dimension of a cache that was begun or finished; None if there is none."""
    written = [file for file in (path / "plan.json", path / "cache.json") if file.exists()]
    fields = read_json(written[0]) if written else None
    return fields.get("dim") if isinstance(fields, dict) else None


Asking = TypeVar("Asking", CompatModel, Fingerprint)


@overload
def asking(source: Embedder | ServedMap) -> CompatModel | Embedder: ...


@overload
def asking(source: Asking) -> Asking: ...


def asking(source: Embedder | ServedMap | CompatModel | Fingerprint) -> CompatModel | Embedder | Fingerprint:
    """Return the query model: the compatible model itself, which knows its views, or else the embedder or the name."""
    if isinstance(source, ServedMap):
        return source.model
    return source.model if isinstance(source, Embedder) and isinstance(source.model, CompatModel) else source


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
