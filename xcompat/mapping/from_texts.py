"""Pairs from texts: embeddings by a model or service, joined with stored embeddings or those of the other model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import RowSelection, number_strings
from xcompat.core.distributed import from_main_process, process_state
from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json, write_json
from xcompat.core.progress import notice
from xcompat.data import load_text_items
from xcompat.data.ids import match_file_names
from xcompat.data.schema import ID, TEXT
from xcompat.data.sources import files_digest
from xcompat.embeddings.embed import embed_images, embed_texts
from xcompat.embeddings.provider import ALIKE, Provider, compare_sketches, load_function
from xcompat.mapping.candidates import Paired
from xcompat.mapping.domain import describe_shift, sample_side
from xcompat.mapping.folds import Direction
from xcompat.mapping.item_labels import read_item_labels
from xcompat.mapping.paired import PairedEmbeddings, select_rows
from xcompat.mapping.request import TextInput
from xcompat.mapping.sides import Side, holds_embeddings, note_unlabelled, read_sides
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.old_knowledge import Rows
from xcompat.retrieval.originals import load_images
from xcompat.stores.places import Place, Reading
from xcompat.vectors.checks import BAD_SHARE

if TYPE_CHECKING:
    import datasets

Source = Side | Embedder | Provider
"""One side of the pairs: stored embeddings, a model, or a service."""
TEXTS = "text"
OWN_ID = "give each text a unique id on both sides"
DIGESTED = 4096  # texts per read


@dataclass(frozen=True)
class TextPairs:
    """Pairs, and the models that embedded them.

    Args:
        pairs: both models' embeddings of the same texts.
        old: old model; None if its embeddings were stored.
        new: new model, which embeds queries; None for stored embeddings or a service.
        service: service of the new side, as described in a map's configuration, or None.
        texts: the texts, row by row, or None.
    """

    pairs: Paired
    old: Embedder | None
    new: Embedder | None
    service: dict[str, Any] | None = None
    texts: Sequence[str] | None = None


def pairs_of_texts(
    old: Place,
    new: Path,
    texts: TextInput,
    cache_dir: Path,
    max_bad_share: float = BAD_SHARE,
    reading: Reading | None = None,
    direction: Direction = "new_to_old",
    sample: int | None = None,
    seed: int = 0,
    sides: StoredSides | None = None,
) -> TextPairs:
    """Embed texts or images with the sides that are models, and join both sides by ids.

    The new model embeds queries if the map receives queries, else gallery items. The old model embeds gallery items.

    Stored ids are text ids or image paths. If no path is an id, file names are compared, then file names without suffix.

    Args:
        old: old model, or its embeddings; rows without ids are in the order of the texts, or of the sorted image paths.
        new: new model or its embeddings; with a service, the name of its model.
        texts: texts or images to embed, and optionally the service.
        cache_dir: folder with cached embeddings; another call continues there.
        max_bad_share: largest share of unusable stored rows or unreadable images.
        reading: column names, the file with the old side's ids, and classes.
        direction: whether the map receives queries or stored embeddings.
        sample: number of items to embed, drawn at random by ``seed`` from those on both sides; None for all.
        seed: of the sample.
        sides: result of :func:`read_stored_sides`; None to call it.

    Returns:
        Pairs in text or image order.

    Raises:
        XcompatError: both sides are embeddings, or they share no item.
    """
    sides = sides or read_stored_sides(old, new, texts, max_bad_share, reading or Reading())
    ids: list[str] = sides.items[ID][:]
    old_source, new_source = _load_sources(old, new, texts, sides)
    kept_N = _draw_sample(sides.select(), sample, seed)
    taken = sides.items if len(kept_N) == len(sides.items) else sides.items.select(kept_N)
    asked = new_source.for_queries() if isinstance(new_source, Embedder) and direction == "new_to_old" else new_source
    described = _describe_asked(asked, texts, taken, cache_dir)
    both = (old_source, sides.old_places_N[kept_N]), (asked, sides.new_places_N[kept_N])
    if texts.are_images:
        old_Nd, new_ND, readable_N = _pair_images(both, taken, texts.path, cache_dir, max_bad_share)
        kept_N = kept_N[readable_N]
    else:
        old_Nd, new_ND = (_embeddings(source, taken, places_n, cache_dir) for source, places_n in both)
    labels_N = number_strings([str(sides.labels[row]) for row in kept_N.tolist()])[1] if sides.labels is not None else None
    notes = (*_notes(sides.stored, ids, sides.match(), texts.path), *sides.notes)
    n_stored = None
    if sides.old is not None and len(old_Nd) < (n_stored := int(sides.old.usable_N.sum())):
        notes = (*notes, *describe_shift(old_Nd, sample_side(sides.old), str(old)))
    old_model, new_model = (each if isinstance(each, Embedder) else None for each in (old_source, asked))
    pairs = PairedEmbeddings(new_ND, old_Nd, labels_N, notes, n_stored)
    return TextPairs(pairs, old_model, new_model, described, None if texts.are_images else taken[TEXT])


@dataclass(frozen=True)
class StoredSides:
    """Items, and the embeddings of them that exist before a model is loaded.

    Args:
        items: texts or images with the ids of the sides.
        old: stored old embeddings, or None.
        new: stored new embeddings, or None.
        old_places_N: row of each item in ``old``, or -1; the item's number without ``old``.
        new_places_N: row of each item in ``new``, in the same way.
        labels: class of each item, or None.
        notes: sentences for the user.
    """

    items: datasets.Dataset
    old: Side | None
    new: Side | None
    old_places_N: NDArray[np.int64]
    new_places_N: NDArray[np.int64]
    labels: Sequence[str | None] | None = None
    notes: tuple[str, ...] = ()

    @property
    def stored(self) -> Side | None:
        """The stored side, if any."""
        return self.old if self.old is not None else self.new

    def match(self) -> NDArray[np.int64]:
        """Return the items on both sides."""
        return np.flatnonzero((self.old_places_N >= 0) & (self.new_places_N >= 0))

    def select(self) -> NDArray[np.int64]:
        """Return the items on both sides and, if there are classes, with a class."""
        return np.array([row for row in self.match().tolist() if self.labels is None or self.labels[row] is not None], np.int64)


def read_stored_sides(old: Place, new: Path, texts: TextInput, max_bad_share: float, reading: Reading) -> StoredSides:
    """Read the items, the stored side and the classes, and match them, before a model is loaded.

    Raises:
        XcompatError: both sides are embeddings, or the inputs do not fit together.
    """
    old_side = _stored_side(old, max_bad_share, reading)
    new_side = _stored_side(new, max_bad_share, reading._replace(ids=None)) if texts.embed_with is None else None
    if old_side is not None and new_side is not None:
        option = "--images" if texts.are_images else "--texts"
        raise XcompatError(f"both sides are embeddings, so there is nothing to embed; remove {option}, or pass a model as --new")
    items = load_images(texts.path, max_bad_share) if texts.are_images else load_text_items(texts.path)
    ids: list[str] = items[ID][:]
    if texts.are_images:
        old_side, new_side = _with_ids_of(old_side, ids), _with_ids_of(new_side, ids)
    sides = StoredSides(items, old_side, new_side, _places(old_side, ids, texts.path), _places(new_side, ids, texts.path))
    sides = replace(sides, labels=_labels_of_items(sides, ids, reading.labels, texts.path))
    if sides.labels is not None and reading.labels is not None:
        sides = replace(sides, notes=note_unlabelled(sides.labels, reading.labels))
    if not len(sides.select()):
        raise XcompatError(
            f"no item of {texts.path} has {'a class and ' * (sides.labels is not None)}a stored embedding; use the same ids"
        )
    return sides


def _labels_of_items(sides: StoredSides, ids: list[str], given: Path | None, where: Path) -> Sequence[str | None] | None:
    """Return the class of each item, from ``--labels`` or the stored side. Lines without ids are rows of ``--old``."""
    side = sides.stored
    places_N = sides.old_places_N if sides.old is not None else sides.new_places_N
    if given is not None:
        labels = read_item_labels(given)
        if labels.ids is not None or side is None:
            return labels.of_items(ids, len(ids), where)
        side = side.with_labels(labels)
    if side is None or side.labels is None:
        return None
    return [side.labels[row] if row >= 0 else None for row in places_N.tolist()]


def _load_sources(old: Place, new: Path, texts: TextInput, sides: StoredSides) -> tuple[Source, Source]:
    """Load the models and the service of the sides that are not stored."""
    old_source: Source = sides.old if sides.old is not None else load_embedder(str(old))
    if texts.embed_with is not None:
        return old_source, _provider(new, texts.embed_with, texts)
    return old_source, sides.new if sides.new is not None else load_embedder(str(new))


def _describe_asked(asked: Source, texts: TextInput, taken: datasets.Dataset, cache_dir: Path) -> dict[str, Any] | None:
    """Describe the service of the new side; return None without a service."""
    if not isinstance(asked, Provider) or texts.embed_with is None:
        return None
    process_state()  # join the process group before the main process acts for all
    folder = _cache_folder(asked, _digest(taken), cache_dir)
    return from_main_process(partial(describe_service, asked, texts.embed_with, folder))


def _draw_sample(matched_N: NDArray[np.int64], sample: int | None, seed: int) -> NDArray[np.int64]:
    """Return a random sample of rows in order, with a notice; all rows if they are no more."""
    if sample is None or len(matched_N) <= sample:
        return matched_N
    notice(f"embedding a random sample of {sample:,} of {len(matched_N):,} items (seed {seed}); change the number with --sample")
    return np.sort(np.random.default_rng(seed).permutation(matched_N)[:sample])


def _pair_images(
    sides: Sequence[tuple[Source, NDArray[np.int64]]], taken: datasets.Dataset, path: Path, cache_dir: Path, max_bad_share: float
) -> tuple[Rows, Rows, NDArray[np.int64]]:
    """Return both models' embeddings of the readable images, and the rows of these images."""
    digest = files_digest(str(path))
    old_Nd, new_ND = (_image_embeddings(*side, taken, cache_dir, digest, max_bad_share) for side in sides)
    readable_N = np.flatnonzero(np.isfinite(old_Nd[:][:, 0]) & np.isfinite(new_ND[:][:, 0]))
    return RowSelection(old_Nd, readable_N), RowSelection(new_ND, readable_N), readable_N


def _provider(new: Path, service: str, texts: TextInput) -> Source:
    return Provider(load_function(service), str(new), texts.requests_per_minute, texts.price)


def describe_service(provider: Provider, function: str, cache: Path) -> dict[str, Any]:
    """Describe a service by its embeddings of test texts, and check that the same model started the cache.

    Args:
        provider: the service.
        function: name of its function.
        cache: folder with cached embeddings. If this function has completed it, the service is not called.

    Raises:
        XcompatError: another model started the cache.
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


def _cache_folder(source: Embedder | Provider, digest: str, cache_dir: Path, kind: str = "texts") -> Path:
    return cache_dir / f"{kind}-{source.fingerprint.digest[:16]}-{digest[:16]}"


def _stored_side(path: Place, max_bad_share: float, reading: Reading) -> Side | None:
    """Return the stored embeddings of texts, or of the only kind of items; None for a model."""
    if not holds_embeddings(path):
        return None
    sides = read_sides(path, max_bad_share, reading)
    return sides[TEXTS] if TEXTS in sides else next(iter(sides.values()))


def _places(source: Side | None, ids: list[str], texts: Path) -> NDArray[np.int64]:
    """Return the row of each text in the stored embeddings, or -1; its own number without them."""
    if source is None:
        return np.arange(len(ids))
    if source.ids is None:
        if len(source.embeds_ND) != len(ids):
            raise XcompatError(
                f"{source.path} has {len(source.embeds_ND):,} rows without ids, but {texts} has {len(ids):,} items; "
                "add an id per row, e.g. with --ids"
            )
        return np.where(source.usable_N, np.arange(len(ids)), -1)
    count = Counter(source.ids)  # texts that share an id are ambiguous
    place = {name: row for row, name in enumerate(source.ids) if count[name] == 1 and source.usable_N[row]}
    places_N = np.array([place.get(name, -1) for name in ids], np.int64)
    if (places_N < 0).all():
        if shared := next((name for name in ids if name in count), None):
            raise XcompatError(f"{source.path} contains the id {shared!r} {count[shared]} times; {OWN_ID}")
        raise XcompatError(f"{source.path} and {texts} share no id ({source.ids[0]!r}, {ids[0]!r}); use the same ids in both")
    return places_N


def _notes(source: Side | None, ids: list[str], kept_N: NDArray[np.int64], texts: Path) -> tuple[str, ...]:
    """Report how many texts are used, if some texts or embeddings have no partner."""
    if source is None:
        return ()
    if len(kept_N) == len(ids) == len(source.embeds_ND):
        if source.ids is None:
            return *source.notes, f"{source.path} has no ids: its rows are matched with {texts} in order, from {ids[0]!r}."
        return source.notes
    stored = f"the {len(source.embeds_ND):,} embeddings of {source.path}"
    used = f"{len(kept_N):,} of {len(ids):,} texts in {texts} match one of {stored}."
    count, given = Counter(source.ids), set(ids)
    shared = [name for name, times in count.items() if times > 1 and name in given]
    if not shared:
        return *source.notes, used
    alike = f"Texts not used because several embeddings have their id: {len(shared):,}, e.g. {shared[0]!r}; {OWN_ID}."
    return *source.notes, used, alike


def _embeddings(source: Source, items: datasets.Dataset, places_N: NDArray[np.int64], cache_dir: Path) -> Rows:
    """Return stored embeddings of texts, or compute and cache them by the digests of model and texts."""
    if isinstance(source, Side):
        return select_rows(source.embeds_ND, places_N)
    digest = _digest(items)
    folder = _cache_folder(source, digest, cache_dir)
    if isinstance(source, Provider):
        return source.embed_texts(items[TEXT], folder, digest)
    return embed_texts(source, items[TEXT], folder, digest)


def _image_embeddings(
    source: Source,
    places_N: NDArray[np.int64],
    images: datasets.Dataset,
    cache_dir: Path,
    files: str | None,
    max_bad_share: float,
) -> Rows:
    """Return stored embeddings of images, or compute and cache them; NaN for unreadable images."""
    if isinstance(source, Side):
        return select_rows(source.embeds_ND, places_N)
    assert isinstance(source, Embedder), source
    if not any(source.processor.image_size):
        raise XcompatError(f"{source.name} embeds texts only, but --images contains images; choose a model like CLIP")
    digest = hashlib.sha256("\0".join([files or "", *images[ID]]).encode()).hexdigest()
    folder = _cache_folder(source, digest, cache_dir, "images")
    return embed_images(source, images, folder, digest, max_bad_share=max_bad_share)


def _with_ids_of(source: Side | None, ids: Sequence[str]) -> Side | None:
    """Rename stored ids to the images' paths, by file names, if no stored id is such a path."""
    if source is None or source.ids is None or (renamed := match_file_names(source.ids, ids)) is None:
        return source
    return replace(source, ids=renamed, notes=(*source.notes, f"{source.path}: its ids are matched by file names."))


def _digest(items: datasets.Dataset) -> str:
    """Hash the texts, so a touched or moved file is not re-embedded."""
    digest = hashlib.sha256()
    for start in range(0, len(items), DIGESTED):
        for text in items[start : start + DIGESTED][TEXT]:
            digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()
