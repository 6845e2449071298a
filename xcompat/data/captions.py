"""Rows of image files, from captions tables (CSV, TSV, JSON lines), image lists or image folders."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xcompat.core.errors import XcompatError
from xcompat.core.json_values import JsonColumns
from xcompat.data import coco
from xcompat.data.bad_samples import Problems
from xcompat.data.delimited import csv_options
from xcompat.data.image_files import image_files
from xcompat.data.image_lists import read_image_list
from xcompat.data.schema import (
    CAMERA,
    CAPTION,
    CAPTION_COLUMNS,
    ID,
    IMAGE,
    IMAGE_COLUMNS,
    LABEL,
    LABEL_COLUMNS,
    METADATA,
    captions_of,
    is_blank,
    pick_column,
)
from xcompat.data.sources import PairSource, has_suffix
from xcompat.data.text_files import UNREADABLE, json_lines, require_table

if TYPE_CHECKING:
    import pandas as pd

_MARKET = re.compile(r"(-1|\d+)_c(\d+)")


def read_captions(
    file: Path, source: PairSource, metadata: bool | list[str] = False, problems: Problems | None = None
) -> Iterator[dict[str, object]]:
    """Read a captions file into a row per image.

    Args:
        file: ``.csv``, ``.tsv`` or ``.jsonl``, optionally gzip, or captions in Flickr8k or COCO format. Image paths are relative
            to its folder or, if the first image is not there, to a folder next to it.
        source: columns to read.
        metadata: further columns to store as JSON in ``metadata``, from each image's first line; True for all.
        problems: receives a note for each such column with values that JSON does not support.

    Yields:
        Rows in order of first appearance, with absolute image paths.

    Raises:
        XcompatError: the file is unreadable or empty, lacks a column or an id, or names missing images.
    """
    table = _read_table(file)
    where, columns = str(file), [str(column) for column in table.columns]
    image = pick_column(source.image_column, IMAGE_COLUMNS, columns, "image_column", where)
    caption = pick_column(source.caption_column, CAPTION_COLUMNS, columns, "caption_column", where) if source.captions else None
    label = pick_column(source.label_column, LABEL_COLUMNS, columns, "label_column", where) if source.with_labels else None
    sample_id = pick_column(source.id_column, (), columns, "id_column", where) if source.id_column else None
    camera = pick_column(source.camera_column, (), columns, "camera_column", where) if source.camera_column else None
    lists = [value for value in table[image] if not isinstance(value, str | int)]
    if lists:
        raise XcompatError(f"{file}: {str(lists[0])[:200]!r} is not an image path; fix the row of this path")
    table[image] = table[image].map(str)  # JSON may give a path as a number
    grouped = {name: table.groupby(image, sort=False)[name].agg(list) for name in (caption, label, sample_id, camera) if name}
    first = table.drop_duplicates(image)
    names = [str(name) for name in first[image]]
    ids = _own_ids(file, sample_id, names, grouped[sample_id]) if sample_id else names
    folder = _folder_of(file, names)
    others = _metadata_columns(metadata, [name for name in columns if name not in (image, *grouped)], where)
    known = first[others].to_dict("records") if others else [{}] * len(names)
    converted = JsonColumns()
    for name, own_id, about in zip(names, ids, known, strict=True):
        row: dict[str, Any] = {IMAGE: {"bytes": None, "path": str((folder / name).resolve())}, ID: own_id}
        if caption:
            row[CAPTION] = [text for value in grouped[caption][name] for text in captions_of(value)]
            if not row[CAPTION]:
                raise XcompatError(f"{file}: {name} has no caption; add one, delete the row, or set captions: false")
        if label:
            row[LABEL] = _one_value(grouped[label][name], f"{file}: {name}", "label", "class")
        if camera:
            row[CAMERA] = _one_value(grouped[camera][name], f"{file}: {name}", "camera", "camera")
        if told := converted.convert({str(column): value for column, value in about.items() if not is_blank(value)}):
            row[METADATA] = json.dumps(told, ensure_ascii=False)
        yield row
    if problems is not None:
        problems.notes += converted.lines()


def _metadata_columns(metadata: bool | list[str], others: list[str], where: str) -> list[str]:
    if isinstance(metadata, bool):
        return others if metadata else []
    return [pick_column(name, (), others, "--metadata", where) for name in metadata]


def read_list_rows(file: Path, source: PairSource) -> Iterator[dict[str, object]]:
    """Read a row per line of an image list.

    Args:
        file: the list. Image paths are relative as in :func:`read_captions`.
        source: columns to read.

    Yields:
        Rows in file order, with absolute image paths.

    Raises:
        XcompatError: an image, or a required class, is missing.
    """
    listed = list(read_image_list(file))
    folder = _folder_of(file, [name for name, _ in listed])
    for name, label in listed:
        if source.with_labels and label is None:
            raise XcompatError(f"{file}: {name} has no class; write the class after the path")
        row: dict[str, Any] = {IMAGE: {"bytes": None, "path": str((folder / name).resolve())}, ID: name}
        yield row | ({LABEL: label} if source.with_labels else {})


def read_images(listed: Iterable[tuple[Path, str]], folders: list[Path], source: PairSource) -> Iterator[dict[str, object]]:
    """Read a row per image file, with its folder name as label.

    Args:
        listed: files and their ids.
        folders: folders given by the user.
        source: columns to read.

    Yields:
        Rows in file order, with absolute image paths.

    Raises:
        XcompatError: ``label_column`` is not ``folder``, ``camera_column`` is set, or a file is not in a class folder.
    """
    if source.label_column not in (None, "folder"):
        raise XcompatError(
            f"images in folders have no column {source.label_column!r}; set label_column to 'folder', or list images and "
            "labels in a table"
        )
    if source.camera_column is not None:
        raise XcompatError(
            f"images in folders have no column {source.camera_column!r}; list images and cameras in labels.csv, or set "
            "format: market1501 if file names contain the camera"
        )
    for file, name in listed:
        if source.with_labels:
            require_class_folder(file, folders)
        label = {LABEL: file.parent.name} if source.with_labels else {}
        yield {IMAGE: {"bytes": None, "path": str(file.resolve())}, ID: name, **label}


def require_class_folder(file: Path, folders: list[Path]) -> None:
    """Raise if an image is not in a class folder.

    Args:
        file: the image.
        folders: folders given by the user.

    Raises:
        XcompatError: the image lies directly in the only given folder.
    """
    if folders == [file.parent]:
        raise XcompatError(f"{file} has no label; move it into a folder named after its class")


def read_market1501(listed: Iterable[tuple[Path, str]], source: PairSource) -> Iterator[dict[str, object]]:
    """Read a row per image named as in Market-1501: ``0002_c1s1_000451_03.jpg`` is person 0002 from camera 1.

    Images of person -1 (junk) are skipped. Each image of person 0000 (distractors) gets its own class, and no query finds it.
    DukeMTMC-reID and VeRi-776 use the same names.

    Args:
        listed: files and their ids.
        source: columns to read.

    Yields:
        Rows in file order, with absolute image paths.

    Raises:
        XcompatError: a column is set, or a file name contains no person or camera.
    """
    for column in ("label_column", "camera_column"):
        if (given := getattr(source, column)) is not None:
            raise XcompatError(f"format market1501 reads file names, not the column {given!r}; remove {column}")
    for file, name in listed:
        person, camera = _person_and_camera(file)
        if person == "-1":
            continue
        label = {LABEL: person if int(person) else name} if source.with_labels else {}
        yield {IMAGE: {"bytes": None, "path": str(file.resolve())}, ID: name, CAMERA: camera, **label}


def require_market1501_names(paths: list[Path]) -> None:
    """Raise if an image is not named as in Market-1501, before any is read.

    Args:
        paths: folders given by the user.

    Raises:
        XcompatError: names the first such file.
    """
    for file, _ in image_files(paths):
        _person_and_camera(file)


def _person_and_camera(file: Path) -> tuple[str, str]:
    found = _MARKET.match(file.name)
    if found is None:
        raise XcompatError(
            f"{file} is not named as in Market-1501, person and camera first, e.g. 0002_c1s1_000451_03.jpg; "
            "rename it, move it away, or set another format"
        )
    return found[1], found[2]


def _own_ids(file: Path, column: str, names: list[str], values: pd.Series[Any]) -> list[str]:
    found = [next((str(value) for value in values[name] if not is_blank(value)), None) for name in names]
    if lacking := [name for name, own in zip(names, found, strict=True) if own is None]:
        raise XcompatError(
            f"{file}: {lacking[0]} has no {column} ({len(lacking):,} of {len(names):,} images have none); fill the column, or "
            "set id_column to another column"
        )
    return [own for own in found if own is not None]


def _one_value(values: list[object], where: str, what: str, means: str) -> str:
    found = {str(value).strip() for value in values if value is not None and value == value} - {""}  # NaN differs from itself
    if not found:
        raise XcompatError(f"{where} has no {what}; add it or delete the row")
    if len(found) > 1:
        raise XcompatError(f"{where} has the {what}s {' and '.join(map(repr, sorted(found)))}; give each image a single {means}")
    return found.pop()


def _read_table(file: Path) -> pd.DataFrame:
    """Read a table as strings, which keeps leading zeros of ids. JSON numbers stay as written."""
    import pandas as pd

    if has_suffix(file, (coco.SUFFIX,)):
        table = coco.read_coco_captions(file)
        if table.empty:
            raise XcompatError(f"{file} contains no captions; fetch it again")
        return table
    require_table(file)
    try:
        if has_suffix(file, (".jsonl", ".jsonl.gz")):
            table = pd.DataFrame([row for _, row in json_lines(file)], dtype=object)
        else:
            table = pd.read_csv(file, **csv_options(file))
    except XcompatError:
        raise
    except (ValueError, *UNREADABLE) as error:  # pandas' parser errors are ValueErrors
        raise XcompatError(
            f"{file} cannot be read ({str(error).splitlines()[0][:200]}); fix the row named in this error, or save the file again"
        ) from error
    if not isinstance(table.index, pd.RangeIndex):  # pandas turns surplus fields into an index
        raise XcompatError(f"{file} has rows with more fields than its header; quote captions that contain the separator")
    if table.empty:
        raise XcompatError(f"{file} contains no rows; it needs a header and a row per caption")
    return table


def _folder_of(file: Path, names: list[str]) -> Path:
    """Return the base folder for image paths: the file's folder, or a folder next to it with the first image."""
    folder = file.parent
    if not _exists(folder / names[0]):
        # Flickr8k: captions.txt and Images/; COCO: annotations/captions_val2014.json and val2014/
        around = [folder, *([folder.parent] if folder.name == coco.FOLDER else [])]
        inner = (each for place in around for each in sorted(place.iterdir()) if each.is_dir() and _exists(each / names[0]))
        folder = next(inner, folder)
    missing = [name for name in names if not _exists(folder / name)]
    if missing:
        raise XcompatError(
            f"{file} lists {len(names)} images, and {len(missing)} of them do not exist, first {missing[0][:200]!r}; paths are "
            f"relative to {folder}"
        )
    return folder


def _exists(file: Path) -> bool:
    return os.path.isfile(file)  # noqa: PTH113 - Path raises for overlong names
