"""Pairs from texts: what a model or a service embeds of them, beside stored embeddings of the same texts or the old model's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import numbered
from xcompat.core.distributed import from_main_process, process_state
from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json, write_json
from xcompat.data import load_items_of_text
from xcompat.data.schema import ID, TEXT
from xcompat.embeddings.embed import embed_texts
from xcompat.embeddings.provider import ALIKE, Provider, compare_sketches, load_function
from xcompat.mapping.asked import Texts
from xcompat.mapping.candidates import Paired
from xcompat.mapping.domain import describe_shift, sample_side
from xcompat.mapping.paired import PairedEmbeddings, picked
from xcompat.mapping.sides import Side, holds_embeddings, read_sides
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.old_knowledge import Rows
from xcompat.vectors import BAD_SHARE

if TYPE_CHECKING:
    import datasets

Source = Side | Embedder | Provider
"""One side: its stored embeddings, or what embeds."""
TEXTS = "text"
OWN_ID = "give each text an id of its own on both sides"
DIGESTED = 4096  # texts read at a time


@dataclass(frozen=True)
class TextPairs:
    """Pairs, and the models that embedded them.

    Args:
        pairs: both models' embeddings of the same texts.
        old: the old model; None if its embeddings were stored.
        new: the new model, as it embeds queries; None if its embeddings were stored, or a service made them.
        service: the service that made them, as a map's configuration describes it; None without one.
        texts: the texts, row by row; None if embeddings alone are known.
    """

    pairs: Paired
    old: Embedder | None
    new: Embedder | None
    service: dict[str, Any] | None = None
    texts: Sequence[str] | None = None


def pairs_of_texts(old: Path, new: Path, texts: Texts, cache_dir: Path, max_bad_share: float = BAD_SHARE) -> TextPairs:
    """Embed texts with each side that is a model, and join them with the other side by their ids.

    The new model embeds them as queries, because queries are what the map will be given; the old one as what a gallery holds.

    Args:
        old: the old model, or its embeddings (see :func:`~xcompat.mapping.sides.read_sides`); rows without ids are in the order
            of the texts.
        new: the new model, likewise; with a service, the name of its model.
        texts: the texts.
        cache_dir: folder of what is embedded; a further call continues there, and embeds nothing twice.
        max_bad_share: the share of stored rows that may have no usable embedding.

    Returns:
        The pairs in the order of the texts.

    Raises:
        XcompatError: both sides are embeddings, or share no text.
    """
    old_source = _source(old, max_bad_share)
    service = texts.embed_with
    new_source: Source = (
        _source(new, max_bad_share)
        if service is None
        else Provider(load_function(service), str(new), texts.requests_per_minute, texts.price)
    )
    if isinstance(old_source, Side) and isinstance(new_source, Side):
        raise XcompatError("--texts names what is to be embedded, and both sides are embeddings; name a model as --new")
    items = load_items_of_text(texts.path)
    ids: list[str] = items[ID][:]
    old_places_N, new_places_N = (_places(source, ids, texts.path) for source in (old_source, new_source))
    kept_N = np.flatnonzero((old_places_N >= 0) & (new_places_N >= 0))
    taken = items if len(kept_N) == len(items) else items.select(kept_N)
    asked = new_source.for_queries() if isinstance(new_source, Embedder) else new_source
    described = None
    if isinstance(asked, Provider) and service is not None:
        process_state()  # processes must have joined the group before one of them acts for all
        described = from_main_process(partial(describe_service, asked, service, _cache_folder(asked, taken, cache_dir)))
    old_Nd = _embeddings(old_source, taken, old_places_N[kept_N], cache_dir)
    new_ND = _embeddings(asked, taken, new_places_N[kept_N], cache_dir)
    stored, places_N = (old_source, old_places_N) if isinstance(old_source, Side) else (new_source, new_places_N)
    labels_N = _classes(stored, places_N[kept_N])
    notes = _notes(stored, ids, kept_N, texts.path)
    if isinstance(old_source, Side) and len(old_Nd) < old_source.usable_N.sum():
        notes = (*notes, *describe_shift(old_Nd, sample_side(old_source), str(old)))
    old_model, new_model = (each if isinstance(each, Embedder) else None for each in (old_source, asked))
    return TextPairs(PairedEmbeddings(new_ND, old_Nd, labels_N, notes), old_model, new_model, described, taken[TEXT])


def describe_service(provider: Provider, function: str, cache: Path) -> dict[str, Any]:
    """Describe a service by its answers to a few test texts, which must be those that a cache was begun with.

    Args:
        provider: the service.
        function: the name of the function that asks it.
        cache: the folder of what it embeds. If the cache is finished by the same function, nothing is asked.

    Raises:
        XcompatError: another model answered when the cache was begun.
    """
    record = cache.with_name(f"{cache.name}.service.json")
    known = read_json(record) if record.exists() else None
    if known is not None and known["function"] == function and (cache / "cache.json").exists():
        return known
    sketch = provider.sketch()
    if known is not None and (cosine := compare_sketches(known["sketch"], sketch)) < ALIKE:
        raise XcompatError(
            f"{function} does not embed as {known['function']} did when {cache} was begun (mean cosine {cosine:.2f}); "
            f"use {known['function']}, or delete {cache.parent} and embed all texts again"
        )
    record.parent.mkdir(parents=True, exist_ok=True)
    described = {"name": provider.name, "function": function, "sketch": sketch}
    write_json(record, described)
    return described


def _cache_folder(source: Embedder | Provider, items: datasets.Dataset, cache_dir: Path) -> Path:
    return cache_dir / f"texts-{source.fingerprint.digest[:16]}-{_digest(items)[:16]}"


def _source(path: Path, max_bad_share: float) -> Source:
    """Read stored embeddings, or load a model."""
    if not holds_embeddings(path):
        return load_embedder(str(path))
    sides = read_sides(path, max_bad_share)
    return sides[TEXTS] if TEXTS in sides else next(iter(sides.values()))


def _places(source: Source, ids: list[str], texts: Path) -> NDArray[np.int64]:
    """Return the row of each text in what is stored; -1 where it has none."""
    if not isinstance(source, Side):
        return np.arange(len(ids))
    if source.ids is None:
        if len(source.embeds_ND) != len(ids):
            raise XcompatError(
                f"{source.path} has {len(source.embeds_ND):,} rows and {texts} {len(ids):,} texts; rows without ids are in the "
                "order of the texts"
            )
        return np.where(source.usable_N, np.arange(len(ids)), -1)
    count = Counter(source.ids)  # of texts that share an id none can be told from the others
    place = {name: row for row, name in enumerate(source.ids) if count[name] == 1 and source.usable_N[row]}
    places_N = np.array([place.get(name, -1) for name in ids], np.int64)
    if (places_N < 0).all():
        if shared := next((name for name in ids if name in count), None):
            raise XcompatError(f"{source.path} names {shared!r} {count[shared]} times, so no row is that of a text; {OWN_ID}")
        raise XcompatError(f"{source.path} and {texts} share no id ({source.ids[0]!r}, {ids[0]!r}); each text has its id in both")
    return places_N


def _classes(source: Source, places_N: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the class of each text, if what is stored has classes."""
    if not isinstance(source, Side) or source.labels is None:
        return None
    return numbered([source.labels[row] for row in places_N.tolist()])[1]


def _notes(source: Source, ids: list[str], kept_N: NDArray[np.int64], texts: Path) -> tuple[str, ...]:
    """Say how many texts are used, if some, or some stored embeddings, have no partner."""
    if not isinstance(source, Side) or len(kept_N) == len(ids) == len(source.embeds_ND):
        return source.notes if isinstance(source, Side) else ()
    stored = f"the {len(source.embeds_ND):,} embeddings of {source.path}"
    used = f"{len(kept_N):,} of the {len(ids):,} texts of {texts} have one of {stored}."
    count, given = Counter(source.ids), set(ids)
    shared = [name for name, times in count.items() if times > 1 and name in given]
    if not shared:
        return *source.notes, used
    alike = f"Left out are {len(shared):,} whose id several embeddings have, such as {shared[0]!r}: {OWN_ID}."
    return *source.notes, used, alike


def _embeddings(source: Source, items: datasets.Dataset, places_N: NDArray[np.int64], cache_dir: Path) -> Rows:
    """Return the embeddings of texts: looked up, or computed and cached under the digests of model and texts."""
    if isinstance(source, Side):
        return picked(source.embeds_ND, places_N)
    digest, folder = _digest(items), _cache_folder(source, items, cache_dir)
    if isinstance(source, Provider):
        return source.embed_texts(items[TEXT], folder, digest)
    return embed_texts(source, items[TEXT], folder, digest)


def _digest(items: datasets.Dataset) -> str:
    """Hash the texts, so that a file that was touched or moved is not embedded again."""
    digest = hashlib.sha256()
    for start in range(0, len(items), DIGESTED):
        for text in items[start : start + DIGESTED][TEXT]:
            digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()
