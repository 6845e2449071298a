"""Content type of an item source: images or texts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import datasets
from xcompat.data.image_files import IMAGE_SUFFIXES
from xcompat.data.loading import EXTRA_IMAGE_COLUMNS, load_raw
from xcompat.data.sources import (
    CAPTION_TEXT_SUFFIXES,
    PairSource,
    captions_files,
    expand_folders,
    files_with,
    has_suffix,
    local_files,
    locate,
)
from xcompat.data.table_rows import ROW_SUFFIXES, read_rows

FILE_COLUMNS = ("file_name", "filename", "path")
"""Columns with image files in image tables, but with any file in text tables."""


def contains_images(path: str) -> bool:
    """Return whether a source contains images, not texts.

    Sources of images are folders of images or shards, and tables and data sets with an image or an image path in the first row.

    Args:
        path: as in :class:`~xcompat.data.sources.DataSource`.

    Raises:
        XcompatError: the source contains neither images nor texts, or cannot be read.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "questions.txt"
        >>> _ = file.write_text("what is green?")
        >>> contains_images(str(file))
        False
    """
    source = PairSource(path=path)
    try:
        form, paths = locate(source)
    except XcompatError:
        if any(has_suffix(file, ROW_SUFFIXES) for file in expand_folders(local_files(path) or [])):
            return False
        raise
    if form == "datasets":
        return _data_set_has_images(source, paths)
    tables = {"captions": captions_files, "parquet": lambda given: files_with(given, (".parquet",))}
    if form not in tables:
        return True
    file = tables[form](paths)[0]
    return has_suffix(file, CAPTION_TEXT_SUFFIXES) or any(_has_image(row) for _, row in islice(read_rows(file), 1))


def _data_set_has_images(source: PairSource, paths: list[Path]) -> bool:
    found: Any = load_raw(source, paths)
    if any(isinstance(feature, datasets.Image) for feature in found.features.values()):
        return True
    return any(_has_image(row) for row in islice(found, 1))


def _has_image(row: dict[str, Any]) -> bool:
    for name in EXTRA_IMAGE_COLUMNS:
        value = row.get(name)
        if value and isinstance(value, str) and name in FILE_COLUMNS:
            value = has_suffix(value, IMAGE_SUFFIXES) or not Path(value).suffix
        if value:
            return True
    return False
