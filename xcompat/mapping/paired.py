"""Embeddings of the same items by the old and the new model, from folders or bare arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from xcompat.core.arrays import RowSelection, copy_rows, number_strings
from xcompat.core.errors import XcompatError
from xcompat.core.threads import unlocked_property
from xcompat.mapping.domain import describe_shift, sample_side
from xcompat.mapping.folds import Direction
from xcompat.mapping.item_labels import read_item_labels
from xcompat.mapping.sides import BARE, ITEM, LABELS, Side, read_sides
from xcompat.models.closed_form import Moments, readable_pairs
from xcompat.models.old_knowledge import Rows
from xcompat.stores.places import Place, Reading
from xcompat.vectors.checks import BAD_SHARE
from xcompat.vectors.formats import KINDS

Pick: TypeAlias = Callable[[Rows, NDArray[np.int64]], Rows]
"""Maps embeddings and row numbers to these rows."""


@dataclass(frozen=True)
class PairedEmbeddings:
    """Embeddings of the same items by both models.

    Args:
        new_ND: the new model's float embeddings, L2-normalised.
        old_Nd: the old model's float embeddings, row by row.
        labels_N: int64 classes, or None.
        notes: sentences for the user about the join.
        n_stored: number of usable embeddings on the old side, pairs or not; None if both models embedded the items.
        known_share: share of the gallery's vectors that are among the pairs, if they were compared.
    """

    new_ND: Rows
    old_Nd: Rows
    labels_N: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()
    n_stored: int | None = None
    known_share: float = 1.0
    direction: ClassVar[Direction] = "new_to_old"

    def __len__(self) -> int:
        return len(self.new_ND)

    def swapped(self) -> SwappedEmbeddings:
        """Return the same items for a map of galleries."""
        return SwappedEmbeddings(self.old_Nd, self.new_ND, self.labels_N, self.notes, self.n_stored)

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions D and d of new and old embeddings."""
        return self.new_ND.shape[1], self.old_Nd.shape[1]

    @property
    def coverage(self) -> float:
        """Share of the stored items that are in the pairs; 1 if both models embedded the items."""
        return min(self.known_share, len(self) / self.n_stored) if self.n_stored is not None else self.known_share

    def together(self) -> PairedEmbeddings:
        """Return all items as a single set."""
        return self

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of new and old embeddings."""
        return readable_pairs(self.new_ND, self.old_Nd)

    @unlocked_property
    def moments(self) -> Moments:
        """Moments for solving linear maps, computed once."""
        return Moments.compute(self.batches())

    @property
    def n_classes(self) -> int:
        """Number of classes C; 0 without labels."""
        return int(self.labels_N.max()) + 1 if self.labels_N is not None else 0

    def take(self, rows_R: NDArray[np.int64]) -> Self:
        """Copy some of the items; return all items in order without a copy."""
        return self._pick_rows(rows_R, copy_rows)

    def narrowed(self, rows_R: NDArray[np.int64]) -> Self:
        """Return some of the items without copying their embeddings."""
        return self._pick_rows(rows_R, RowSelection)

    def _pick_rows(self, rows_R: NDArray[np.int64], pick: Pick) -> Self:
        if np.array_equal(rows_R, np.arange(len(self))):
            return replace(self, notes=())
        labels_R = self.labels_N[rows_R] if self.labels_N is not None else None
        return replace(self, new_ND=pick(self.new_ND, rows_R), old_Nd=pick(self.old_Nd, rows_R), labels_N=labels_R, notes=())

    def of_old(self) -> Self:
        """Return the same items with the old model in place of the new model."""
        return replace(self, new_ND=self.old_Nd)

    def inputs(self, rows_R: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the map's inputs for some of the items: new embeddings."""
        return (copy_rows(self.new_ND, rows_R),)


@dataclass(frozen=True)
class SwappedEmbeddings(PairedEmbeddings):
    """Pairs for a map of galleries: ``new_ND`` are the old model's embeddings, and ``old_Nd`` the new model's.

    Args:
        side_NS: stored side-information of the old embeddings, for a map that uses it.
    """

    side_NS: Rows | None = None
    direction: ClassVar[Direction] = "old_to_new"

    @override
    def _pick_rows(self, rows_R: NDArray[np.int64], pick: Pick) -> Self:
        return replace(super()._pick_rows(rows_R, pick), side_NS=pick(self.side_NS, rows_R) if self.side_NS is not None else None)

    @override
    def inputs(self, rows_R: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
        """Return the map's inputs for some of the items: old embeddings, and side-information if available."""
        return (*super().inputs(rows_R), *([self.side_NS[rows_R]] if self.side_NS is not None else []))


@dataclass(frozen=True)
class CaptionedEmbeddings:
    """Embeddings of images and captions, or passages and questions, by both models.

    Args:
        images: images or passages, labelled by group.
        texts: captions or questions, labelled by group. Each group has images and texts.
        notes: as in :class:`PairedEmbeddings`.
        are_questions: whether these are passages and questions.
    """

    images: PairedEmbeddings
    texts: PairedEmbeddings
    notes: tuple[str, ...] = ()
    are_questions: bool = False

    @classmethod
    def join_complete(
        cls, images: PairedEmbeddings, texts: PairedEmbeddings, notes: tuple[str, ...] = (), are_questions: bool = False
    ) -> Self:
        """Join images and captions; drop incomplete groups and groups with negative numbers.

        Args:
            images: images, labelled by group.
            texts: captions, labelled by group.
            notes: as in the class.
            are_questions: as in the class.

        Raises:
            XcompatError: no group is complete.
        """
        assert images.labels_N is not None and texts.labels_N is not None
        both_K = np.intersect1d(images.labels_N, texts.labels_N)
        both_K = both_K[both_K >= 0]
        if not len(both_K):
            raise XcompatError("no image has a caption, so there is nothing to remember; give captions the ids of their images")
        return cls(images, texts, notes, are_questions)._select_groups(both_K, PairedEmbeddings.narrowed)

    @property
    def direction(self) -> Direction:
        """Direction of the map for which the sides are ordered."""
        return self.images.direction

    def swapped(self) -> CaptionedEmbeddings:
        """Return the same items for a map of galleries."""
        return replace(self, images=self.images.swapped(), texts=self.texts.swapped())

    def of_old(self) -> CaptionedEmbeddings:
        """Return the same items with the old model in place of the new model."""
        return replace(self, images=self.images.of_old(), texts=self.texts.of_old())

    def __len__(self) -> int:
        return len(self.images) + len(self.texts)

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions D and d of new and old embeddings."""
        return self.images.dims

    def together(self) -> PairedEmbeddings:
        """Return all items as a single set: images, then captions."""
        sides = self.images, self.texts
        new_ND, old_Nd = (np.concatenate([getattr(side, name)[:] for side in sides]) for name in ("new_ND", "old_Nd"))
        return PairedEmbeddings(new_ND, old_Nd, np.concatenate(self.groups))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of new and old embeddings of images, then of captions."""
        return chain(self.images.batches(), self.texts.batches())

    @unlocked_property
    def moments(self) -> Moments:
        """Moments for solving linear maps, computed once."""
        return Moments.compute(self.batches())

    @property
    def groups(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Group of each image and caption."""
        assert self.images.labels_N is not None and self.texts.labels_N is not None
        return self.images.labels_N, self.texts.labels_N

    def take(self, groups_K: NDArray[np.int64]) -> Self:
        """Copy the items of some groups, and renumber these groups."""
        return self._select_groups(groups_K, PairedEmbeddings.take)

    def _select_groups(
        self, groups_K: NDArray[np.int64], picked: Callable[[PairedEmbeddings, NDArray[np.int64]], PairedEmbeddings]
    ) -> Self:
        sides = []
        for side, groups in zip((self.images, self.texts), self.groups, strict=True):
            rows = np.flatnonzero(np.isin(groups, groups_K))
            sides.append(replace(picked(side, rows), labels_N=np.searchsorted(np.sort(groups_K), groups[rows])))
        return replace(self, images=sides[0], texts=sides[1])


def number_groups(image_ids: Sequence[str], text_ids: Sequence[str], texts: Sequence[str]) -> tuple[NDArray[np.int64], ...]:
    """Return group numbers of images and captions: an image with its captions, and all images with the same caption.

    Args:
        image_ids: N ids.
        text_ids: M ids of the captioned images, which can be unknown.
        texts: M captions.

    Returns:
        Groups of the images (N,) and captions (M,), from 0; -1 for groups without images or captions.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ids, codes = number_strings([*image_ids, *text_ids])
    said, said_M = number_strings(texts)
    images_N, texts_M = codes[: len(image_ids)], codes[len(image_ids) :]
    size = len(ids) + len(said)
    edges = coo_array((np.ones(len(texts_M), bool), (texts_M, len(ids) + said_M)), shape=(size, size))
    _, group = connected_components(edges, directed=False)
    both = np.intersect1d(group[images_N], group[texts_M])
    number = np.full(int(group.max()) + 1 if size else 0, -1, np.int64)
    number[both] = np.arange(len(both))
    return number[group[images_N]], number[group[texts_M]]


def load_paired(
    old: Place, new: Place, max_bad_share: float = BAD_SHARE, reading: Reading | None = None
) -> PairedEmbeddings | CaptionedEmbeddings:
    """Read both models' embeddings, and bring them into the same order.

    A side is any of:

    - a folder with ``image_embeds.npy`` and ``image_ids.txt`` (an id per line), or the same with ``text_``, and optionally
      ``labels.txt`` (a class per line);
    - a folder with both, in which texts have the ids of their images;
    - texts with ``query_embeds.npy`` and ``query_ids.txt``, in which queries have the ids of their answers;
    - a database's address, a faiss index, a gallery, or a file of :func:`~xcompat.vectors.read_vectors`; without ids, with equal
      rows.

    Args:
        old: old side.
        new: new side. Either side can have the classes.
        max_bad_share: largest share of unusable rows per side.
        reading: column names to use on both sides, the file with the old side's ids, and classes.

    Returns:
        Common items in the old side's order: images with captions, or passages with questions, if both sides have both.

    Raises:
        XcompatError: a file is missing or unusable, the sides share no item, or their classes differ.
    """
    reading = reading or Reading()
    old_sides = read_sides(old, max_bad_share, reading)
    new_sides = read_sides(new, max_bad_share, reading._replace(ids=None))
    if (BARE in old_sides) != (BARE in new_sides):
        bare = old if BARE in old_sides else new
        raise XcompatError(
            f"{bare} has rows without ids, but the other side has ids; add --ids for an index, or give two .npy files or folders"
        )
    old_sides, new_sides = _of_one_kind(old_sides, new_sides), _of_one_kind(new_sides, old_sides)
    kinds = _common_kinds(old, new, old_sides, new_sides)
    if reading.labels is not None and len(kinds) > 1:
        raise XcompatError(f"--labels does not work with {kinds[1]} embeddings in {old} and {new}; remove one of them")
    if reading.labels is not None:
        old_sides[kinds[0]] = old_sides[kinds[0]].with_labels(read_item_labels(reading.labels))
    paired = {kind: _pair_items(old_sides[kind], new_sides[kind]) for kind in kinds}
    notes = [
        f"{side}: only the {kinds[0]}s are used, because the other side has no other items."
        for side, found in ((old, old_sides), (new, new_sides))
        if len(found) > len(kinds)
    ]
    if len(kinds) == 1:
        pairs, _ = paired[kinds[0]]
        return replace(pairs, notes=(*notes, *pairs.notes))
    (images, image_ids), (texts, text_ids) = (paired[kind] for kind in kinds)
    are_questions = kinds[0] == KINDS[1]
    if are_questions and set(image_ids).isdisjoint(text_ids):  # in folders of `xcompat evaluate`, queries have other ids
        unused = f"The queries are not used, because none has the id of a text, e.g. {image_ids[0]!r}."
        return replace(images, notes=(*notes, *images.notes, unused))
    if images.labels_N is not None:
        raise XcompatError(f"{old} and {new} have classes ({LABELS}) and captions; remove {LABELS}, or the {kinds[1]} files")
    image_groups_N, text_groups_M = number_groups(image_ids, text_ids, list(map(str, range(len(text_ids)))))
    images, texts = replace(images, labels_N=image_groups_N), replace(texts, labels_N=text_groups_M)
    return CaptionedEmbeddings.join_complete(images, texts, (*images.notes, *texts.notes), are_questions)


def _common_kinds(old: Place, new: Place, old_sides: dict[str, Side], new_sides: dict[str, Side]) -> list[str]:
    """Return the kinds of items on both sides, or raise if there is none."""
    kinds = [kind for kind in old_sides if kind in new_sides]
    if not kinds:
        found = f"{old} contains {' and '.join(old_sides)} embeddings, but {new} {' and '.join(new_sides)} embeddings"
        raise XcompatError(f"{found}; give embeddings of the same items by both models")
    if len(kinds) > 2:
        raise XcompatError(f"{old} and {new} contain images, texts and queries; keep the files of only two of these")
    return kinds


def _pair_items(old: Side, new: Side) -> tuple[PairedEmbeddings, list[str]]:
    """Return the items of a kind in the same order on both sides, with their ids."""
    old_rows_N, new_rows_N, notes = _same_items(old, new)
    usable_N = old.are_pairable()[old_rows_N] & new.are_pairable()[new_rows_N]
    if not usable_N.any():
        raise XcompatError(f"{old.path} and {new.path} share no item with usable embeddings on both sides; embed the items again")
    old_rows_N, new_rows_N, notes = old_rows_N[usable_N], new_rows_N[usable_N], (*old.notes, *new.notes, *notes)
    labels = _same_classes(old, new, old_rows_N, new_rows_N)
    labels_N = number_strings(labels)[1] if labels is not None else None
    new_ND, old_Nd = select_rows(new.embeds_ND, new_rows_N), select_rows(old.embeds_ND, old_rows_N)
    n_stored = int(old.usable_N.sum())
    if len(old_Nd) < n_stored:
        notes = (*notes, *describe_shift(old_Nd, sample_side(old), str(old.path)))
    ids = [old.ids[row] for row in old_rows_N.tolist()] if old.ids is not None else []
    return PairedEmbeddings(new_ND, old_Nd, labels_N, notes, n_stored), ids


def _of_one_kind(sides: dict[str, Side], others: dict[str, Side]) -> dict[str, Side]:
    """Read a table as the single kind of items on the other side."""
    return dict(zip(others, sides.values(), strict=True)) if ITEM in sides and len(others) == 1 else sides


def _same_items(old: Side, new: Side) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
    """Return the rows of common items in each side, in the old side's order, and notes."""
    if old.ids is None or new.ids is None:
        if len(old.embeds_ND) != len(new.embeds_ND):
            raise XcompatError(
                f"{old.path} has {len(old.embeds_ND):,} rows, but {new.path} {len(new.embeds_ND):,}; rows without ids must be "
                "the same items in the same order"
            )
        rows_N = np.arange(len(old.embeds_ND))
        return rows_N, rows_N, ()
    if old.ids == new.ids:
        return (rows_N := np.arange(len(old.ids))), rows_N, ()
    each, other = Counter(old.ids), Counter(new.ids)  # an id with several captions needs the same number on both sides
    places, keys = {key: row for row, key in enumerate(new.keys) if each[key[0]] == other[key[0]]}, old.keys
    old_rows_N = np.array([row for row, key in enumerate(keys) if key in places], np.int64)
    if not len(old_rows_N):
        raise XcompatError(
            f"{old.path} and {new.path} share no id ({old.ids[0]!r}, {new.ids[0]!r}); use the same ids on both sides"
        )
    new_rows_N = np.array([places[keys[row]] for row in old_rows_N.tolist()], np.int64)
    if len(old_rows_N) == len(old.ids) == len(new.ids):
        return old_rows_N, new_rows_N, ()
    alone = next(name for name in (*old.ids, *new.ids) if each[name] != other[name])
    given = f"{len(old.ids):,} old and {len(new.ids):,} new ones were given"
    note = f"Both sides have {len(old_rows_N):,} items; {given}, and {alone!r} is the first that they do not share."
    return old_rows_N, new_rows_N, (note,)


def _same_classes(old: Side, new: Side, old_rows_N: NDArray[np.int64], new_rows_N: NDArray[np.int64]) -> list[str] | None:
    """Return the class of each item; raise if both sides have classes and they differ."""
    sides = ((old.labels, old_rows_N), (new.labels, new_rows_N))
    found = [[str(labels[row]) for row in rows_N.tolist()] for labels, rows_N in sides if labels is not None]
    if len(found) == 2 and found[0] != found[1]:
        row, first, second = next((row, *both) for row, both in enumerate(zip(*found, strict=True)) if both[0] != both[1])
        name = old.ids[int(old_rows_N[row])] if old.ids is not None else f"row {row}"
        raise XcompatError(
            f"{name} has the class {first!r} in {LABELS} of {old.path}, but {second!r} in {new.path}; correct one of the files"
        )
    return found[0] if found else None


def select_rows(embeds_ND: NDArray[Any], rows_N: NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows; all rows in order stay on disk."""
    return embeds_ND if np.array_equal(rows_N, np.arange(len(embeds_ND))) else copy_rows(embeds_ND, rows_N)
