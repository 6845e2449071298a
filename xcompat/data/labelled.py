"""Labelled images and their class order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import datasets
from xcompat.data.bad_samples import BadSamples
from xcompat.data.classes import load_classes, nearest_class
from xcompat.data.loading import load_pairs
from xcompat.data.schema import CAMERA, CAPTION, ID, LABEL
from xcompat.data.sources import ImageSource, PairSource, local_files
from xcompat.data.text_files import json_lines

CLASS_FILES = ("classes.tsv", "classes.csv", "classes.txt")
MAX_INDEX = 1_000_000  # larger labels are not class indices


class LabelledSource(ImageSource):
    """Source of labelled images: :class:`ImageSource` plus these fields. ``label_column`` is detected by default.

    Args:
        caption_column: column with captions, for an old text model; detected by default.
        caption_file: JSON lines with ``id`` and ``caption`` (from ``xcompat caption``) instead. Images with caption null are
            skipped.
        classes: class order: names, or a file for `xcompat.data.load_classes`.
        class_column: column with the names in this file, or in the ``classes.tsv`` next to the data.

    Example:
        >>> LabelledSource(path="photos/train", classes=["cat", "dog"]).classes
        ['cat', 'dog']
    """

    model_config = ConfigDict(coerce_numbers_to_str=True)  # YAML reads class 7 as a number

    caption_column: str | None = None
    caption_file: str | None = None
    classes: list[str] | str | None = None
    class_column: str | None = None


@dataclass(frozen=True)
class LabelledImages:
    """Images with class labels.

    Args:
        dataset: columns ``image`` (undecoded), ``id`` (unique string), ``label`` (int64 index into ``classes``), optionally
            ``camera`` (string).
        classes: all class names in label order. Store them with trained models.
        max_bad_share: largest tolerated share of unreadable images.
    """

    dataset: datasets.Dataset
    classes: list[str]
    max_bad_share: float = 0.01

    def __len__(self) -> int:
        return len(self.dataset)

    def labels(self) -> NDArray[np.int64]:
        """Return the class index of each image."""
        return np.array(self.dataset[LABEL][:], dtype=np.int64)

    def class_names(self) -> list[str]:
        """Return the class name of each image, comparable across class orders."""
        return [self.classes[label] for label in self.labels().tolist()]

    def cameras(self) -> list[str] | None:
        """Return the camera of each image, or None if unknown."""
        return list(self.dataset[CAMERA]) if CAMERA in self.dataset.column_names else None

    def present_classes(self) -> list[str]:
        """Return the names of classes with images, in class order."""
        return [self.classes[index] for index in np.unique(self.labels()).tolist()]

    def reindex_labels(self) -> LabelledImages:
        """Return the same images with labels renumbered over the classes with images."""
        _, labels_N = np.unique(self.labels(), return_inverse=True)
        return replace(self, dataset=_with_labels(self.dataset, labels_N), classes=self.present_classes())


def load_labelled(
    source: LabelledSource | str,
    classes: Sequence[str] | None = None,
    captions: bool = False,
    dataset: datasets.Dataset | None = None,
) -> LabelledImages:
    """Load labelled images from any format of `xcompat.data.load_pairs`.

    A label is a class name or an index: an integer, a webdataset ``.cls`` value, or digits that match no class name. The first
    available source sets the class order:

    1. ``classes``
    2. the source's ``classes``
    3. a ``ClassLabel`` feature
    4. ``classes.tsv``, ``.csv`` or ``.txt`` next to the data, if it contains any label
    5. 0 to the largest index
    6. sorted names, by value if all are numbers (as in CIFAR-100 folders ``0`` to ``99``)

    Args:
        source: the source, or its ``path``.
        classes: class names in order; overrides the source.
        captions: require and keep captions.
        dataset: an open data set for `xcompat.data.load_pairs`, without class file.

    Returns:
        The images. With a given class order (argument or field) and no ``limit``, no class is empty.

    Raises:
        XcompatError: a label is missing, unknown or out of range, a given class has no image, or two images share an id.
    """
    source = LabelledSource(path=source) if isinstance(source, str) else source
    described = source.model_dump(exclude={"classes", "class_column", "caption_file"})
    in_column = captions and source.caption_file is None
    loaded = load_pairs(PairSource(**described, captions=in_column, labels=True), dataset)
    assert isinstance(loaded, datasets.Dataset)
    _require_distinct_ids(loaded, source)
    if captions and source.caption_file is not None:
        loaded = _add_captions(loaded, Path(source.caption_file), source.max_bad_share)
    _require_cameras(loaded, source)
    given = list(classes) if classes is not None else _given_classes(source)
    values = _require_labels(loaded, source)
    beside = _read_class_file(source) if given is None and dataset is None else None
    order = _require_distinct_classes(given, source) if given is not None else _infer_class_order(loaded, values, source, beside)
    labels_N = _class_indices(loaded, values, order, source)
    missing = np.setdiff1d(np.arange(len(order)), labels_N)
    if given is not None and missing.size and not source.limit:
        more = f" and {missing.size - 1} more of {len(order)}" if missing.size > 1 else ""
        raise XcompatError(f"{source.path}: class {order[missing[0]]!r}{more} has no image; remove it from the class list")
    return LabelledImages(_with_labels(loaded, labels_N), order, source.max_bad_share)


def _require_distinct_ids(dataset: datasets.Dataset, source: LabelledSource) -> None:
    ids = dataset[ID][:]
    if len(set(ids)) < len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise XcompatError(f"{source.path}: two images have the id {twice!r}; set id_column to a column with unique ids")


def _add_captions(dataset: datasets.Dataset, file: Path, max_bad_share: float) -> datasets.Dataset:
    """Add captions from a file; drop images that were unreadable when it was written."""
    known: dict[str, str | None] = {}
    for number, row in json_lines(file):
        if not (isinstance(row.get(ID), str) and isinstance(row.get(CAPTION, 0), str | None)):
            raise XcompatError(f'{file} line {number}: write it as {{"id": ..., "caption": ...}} with string values')
        known[row[ID]] = row[CAPTION]
    ids = dataset[ID][:]
    lacking = [name for name in ids if name not in known]
    if lacking:
        raise XcompatError(f"{file} has no caption for {len(lacking)} of {len(ids)} images, e.g. {lacking[0]!r}; add captions")
    bad = BadSamples(max_bad_share, len(ids))
    kept = [row for row, name in enumerate(ids) if known[name] is not None]
    for name in ids:
        if known[name] is None:
            bad.add(name, f"it could not be read when {file} was written")
    if not kept:
        raise XcompatError(f"{file} has no captions: none of {len(ids)} images could be read; fix the images")
    captioned = dataset.add_column(CAPTION, [known[name] for name in ids])
    return captioned if len(kept) == len(ids) else captioned.select(kept)


def _require_labels(dataset: datasets.Dataset, source: LabelledSource) -> list[int] | list[str]:
    """Return the labels, or raise if a label is missing. -1 marks unlabelled test sets."""
    values = dataset[LABEL][:]
    bad = [row for row, value in enumerate(values) if value is None or value == "" or value == -1]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise XcompatError(f"{source.path}: image {dataset[bad[0]][ID]!r}{more} has no label; add a label or remove the image")
    if not isinstance(values[0], int | str):
        raise XcompatError(
            f"{source.path}: labels are {type(values[0]).__name__}s, e.g. {values[0]!r}; set label_column to a column "
            "with a class index or name per image"
        )
    return values


def _require_cameras(dataset: datasets.Dataset, source: LabelledSource) -> None:
    values = dataset[CAMERA][:] if source.with_cameras else []
    bad = next((row for row, value in enumerate(values) if not value), None)
    if bad is not None:
        raise XcompatError(f"{source.path}: image {dataset[bad][ID]!r} has no camera; add a camera, or remove camera_column")


def _given_classes(source: LabelledSource) -> list[str] | None:
    return load_classes(source.classes, source.class_column) if isinstance(source.classes, str) else source.classes


def _infer_class_order(
    dataset: datasets.Dataset, values: list[int] | list[str], source: LabelledSource, beside: list[str] | None
) -> list[str]:
    """Return the class order stated by the data, or the sorted names."""
    feature = dataset.features[LABEL]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    names = {str(value) for value in values}
    if beside is not None and (_are_numbers(names) or names & set(beside)):
        return _require_distinct_classes(beside, source)
    if isinstance(values[0], int):
        largest = max(map(int, values))
        if largest >= MAX_INDEX:
            raise XcompatError(
                f"{source.path}: label {largest} is too large for a class index; if labels are ids, store them as text"
            )
        return [str(index) for index in range(largest + 1)]
    return sorted(names, key=(lambda name: (int(name), name)) if _are_numbers(names) else None)


def _read_class_file(source: LabelledSource) -> list[str] | None:
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in local_files(source.path) or [])
    found: Iterator[Path] = (folder / name for folder in folders for name in CLASS_FILES if (folder / name).is_file())
    file = next(found, None)
    return load_classes(file, source.class_column) if file is not None else None


def _are_numbers(names: Iterable[str]) -> bool:
    return all(name.isdecimal() for name in names)


def _require_distinct_classes(classes: list[str], source: LabelledSource) -> list[str]:
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise XcompatError(f"{source.path}: class {twice[0]!r} is listed twice; set class_column to a column with unique names")
    return classes


def _class_indices(
    dataset: datasets.Dataset, values: list[int] | list[str], order: list[str], source: LabelledSource
) -> NDArray[np.int64]:
    feature, place = dataset.features[LABEL], {name: index for index, name in enumerate(order)}
    distinct: dict[Any, Any] = dict.fromkeys(values)
    if isinstance(feature, datasets.ClassLabel):
        wanted = {value: feature.names[value] for value in distinct}
    elif isinstance(values[0], int) or (_are_numbers(distinct) and place.keys().isdisjoint(distinct)):
        wanted = {value: int(value) for value in distinct}
    else:
        wanted = {value: value for value in distinct}
    for value, label in wanted.items():
        index = place.get(label, -1) if isinstance(label, str) else label
        if not 0 <= index < len(order):
            image = f"{source.path}: image {dataset[values.index(value)][ID]!r}"
            if isinstance(label, str):
                raise XcompatError(f"{image} has class {label!r}, which is not in the class list; {nearest_class(label, order)}")
            raise XcompatError(f"{image} has label index {label}, but the {len(order)} classes go from 0 to {len(order) - 1}")
        distinct[value] = index
    return np.fromiter((distinct[value] for value in values), np.int64, len(values))


def _with_labels(dataset: datasets.Dataset, labels_N: NDArray[np.int64]) -> datasets.Dataset:
    """Replace labels without copying images, as ``add_column`` does on selected rows."""
    rows = None if dataset._indices is None else dataset._indices.column(0).to_numpy()
    whole = datasets.Dataset(dataset.data, info=dataset.info, split=dataset.split, fingerprint=dataset._fingerprint)
    column = np.full(len(whole), -1, dtype=np.int64)
    column[slice(None) if rows is None else rows] = labels_N
    whole = whole.remove_columns(LABEL).add_column(LABEL, column)
    return whole if rows is None else whole.select(rows)
