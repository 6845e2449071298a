"""Find pictures that are in two data sets, by their content: a test on training images flatters the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from xcompat.data.schema import IMAGE

if TYPE_CHECKING:
    import datasets


def shared_images(test: datasets.Dataset, train: datasets.Dataset) -> int:
    """Count the rows of a test set whose picture is in a training set too, byte by byte.

    Sizes are compared first, so that few pictures are read if the sets share none.

    Args:
        test: column ``image`` (undecoded), as `xcompat.data.load_pairs` returns it.
        train: likewise.
    """
    sizes = {size for _, size in _sizes(train)}
    asked = [(row, size) for row, size in _sizes(test) if size in sizes]
    wanted = {size for _, size in asked}
    trained = {_digest(train, row) for row, size in _sizes(train) if size in wanted}
    return sum(_digest(test, row) in trained for row, _ in asked)


def same_picture(one: tuple[datasets.Dataset, int], other: tuple[datasets.Dataset, int]) -> bool:
    """Return whether two rows, each of a data set, hold the same picture byte by byte; so do those of which one is missing.

    Example:
        >>> import datasets
        >>> pictures = datasets.Dataset.from_dict({"image": [{"bytes": each, "path": None} for each in (b"a", b"b", b"a")]})
        >>> [same_picture((pictures, 0), (pictures, row)) for row in range(3)]
        [True, False, True]
    """
    sizes = [next(iter(_sizes(dataset.select([row]))), None) for dataset, row in (one, other)]
    return None in sizes or (sizes[0] == sizes[1] and _digest(*one) == _digest(*other))


def _sizes(dataset: datasets.Dataset) -> Iterator[tuple[int, int]]:
    """Yield row and size in bytes of every picture that is there."""
    row = 0
    for batch in dataset.select_columns([IMAGE]).with_format("arrow").iter(4096):
        images = batch[IMAGE].combine_chunks() if isinstance(batch[IMAGE], pa.ChunkedArray) else batch[IMAGE]
        stored = pc.binary_length(pc.struct_field(images, "bytes")).to_pylist()
        for size, path in zip(stored, pc.struct_field(images, "path").to_pylist(), strict=True):
            if size is None and path is not None and os.path.isfile(path):  # noqa: PTH113 - fast, for every picture
                size = os.stat(path).st_size  # noqa: PTH116
            if size:
                yield row, size
            row += 1


def _digest(dataset: datasets.Dataset, row: int) -> bytes:
    image = dataset[row][IMAGE]
    if image["bytes"] is not None:
        return xxhash.xxh3_128_digest(image["bytes"])
    with open(image["path"], "rb") as file:  # noqa: PTH123
        return xxhash.xxh3_128_digest(file.read())
