"""Images shared by two data sets, compared by content."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from xcompat.data.schema import IMAGE

if TYPE_CHECKING:
    import datasets


def shared_images(test: datasets.Dataset, train: datasets.Dataset) -> int:
    """Count test rows with images from the training set, compared byte by byte.

    Sizes are compared first, so few images are read.

    Args:
        test: column ``image`` (undecoded), from `xcompat.data.load_pairs`.
        train: the same.
    """
    sizes = {size for _, size in _sizes(train)}
    asked = [(row, size) for row, size in _sizes(test) if size in sizes]
    wanted = {size for _, size in asked}
    trained = {_digest(train[row][IMAGE]) for row, size in _sizes(train) if size in wanted}
    return sum(_digest(test[row][IMAGE]) in trained for row, _ in asked)


def same_images(one: datasets.Dataset, rows: Sequence[int], other: datasets.Dataset, other_rows: Sequence[int]) -> Iterator[bool]:
    """Compare images of two data sets row by row, byte by byte. A missing image equals any other.

    Reads only different files of equal size.

    Args:
        one: column ``image`` (undecoded).
        rows: N rows.
        other: column ``image`` (undecoded).
        other_rows: N rows.

    Yields:
        Whether the images are equal.

    Example:
        >>> import datasets
        >>> images = datasets.Dataset.from_dict({"image": [{"bytes": each, "path": None} for each in (b"a", b"b", b"a")]})
        >>> list(same_images(images, [0, 0, 0], images, [0, 1, 2]))
        [True, False, True]
    """
    mine, others = (of.select_columns([IMAGE]).select(some) for of, some in ((one, rows), (other, other_rows)))
    sizes, other_sizes = dict(_sizes(mine)), dict(_sizes(others))
    for row in range(len(rows)):
        if row not in sizes or row not in other_sizes:
            yield True
        elif sizes[row] != other_sizes[row]:
            yield False
        else:
            image, likewise = mine[row][IMAGE], others[row][IMAGE]
            yield image == likewise or _digest(image) == _digest(likewise)


def _sizes(dataset: datasets.Dataset) -> Iterator[tuple[int, int]]:
    """Yield row and size in bytes of every existing image."""
    row = 0
    for batch in dataset.select_columns([IMAGE]).with_format("arrow").iter(4096):
        images = batch[IMAGE].combine_chunks() if isinstance(batch[IMAGE], pa.ChunkedArray) else batch[IMAGE]
        stored = pc.binary_length(pc.struct_field(images, "bytes")).to_pylist()
        for size, path in zip(stored, pc.struct_field(images, "path").to_pylist(), strict=True):
            if size is None and path is not None and os.path.isfile(path):  # noqa: PTH113 - fast, for every image
                size = os.stat(path).st_size  # noqa: PTH116
            if size:
                yield row, size
            row += 1


def _digest(image: dict[str, Any]) -> bytes:
    if image["bytes"] is not None:
        return xxhash.xxh3_128_digest(image["bytes"])
    with open(image["path"], "rb") as file:  # noqa: PTH123
        return xxhash.xxh3_128_digest(file.read())
