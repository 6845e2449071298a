"""Rows of image files, from a captions file (CSV, TSV or JSON lines) or from folders of images."""

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
from xcompat.data.delimited import csv_options
from xcompat.data.lists import read_image_list
from xcompat.data.picture_files import image_files
from xcompat.data.problems import Problems
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
) -> Iterator[dict[str, Any]]:
    """Read a captions file into one row for each image; an image with several captions has several lines in the file.

    Args:
        file: ``.csv``, ``.tsv`` or ``.jsonl``, possibly gzip, or captions as Flickr8k or COCO has them; image paths are relative
            to its folder or, where none of them is there, to a folder beside it.
        source: the columns to read.
        metadata: which other columns are read too, as JSON in the column ``metadata``: what the image's first line holds. True
            for all, False for none.
        problems: gets a line for each of these columns whose values JSON does not have.

    Yields:
        Rows in order of first appearance, each with the path of its image.

    Raises:
        XcompatError: the file cannot be read, is empty, lacks a column or an id, or names images that do not exist.
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
        raise XcompatError(f"{file}: {str(lists[0])[:200]!r} is no image's path; mend that row")
    table[image] = table[image].map(str)  # JSON may call an image 123
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
    """Return the further columns that are read, or raise if one is not there."""
    if isinstance(metadata, bool):
        return others if metadata else []
    return [pick_column(name, (), others, "--metadata", where) for name in metadata]


def read_listed(file: Path, source: PairSource) -> Iterator[dict[str, Any]]:
    """Make one row for each line of a list of images.

    Args:
        file: the list; image paths are relative to its folder or, where the first of them is not there, to a folder beside it.
        source: the columns to read.

    Yields:
        Rows in the order of the list, each with the path of its image.

    Raises:
        XcompatError: the list names images that do not exist, or one without a class where labels are needed.
    """
    listed = list(read_image_list(file))
    folder = _folder_of(file, [name for name, _ in listed])
    for name, label in listed:
        if source.with_labels and label is None:
            raise XcompatError(f"{file}: {name} has no class; write it behind the path")
        row: dict[str, Any] = {IMAGE: {"bytes": None, "path": str((folder / name).resolve())}, ID: name}
        yield row | ({LABEL: label} if source.with_labels else {})


def read_images(listed: Iterable[tuple[Path, str]], folders: list[Path], source: PairSource) -> Iterator[dict[str, Any]]:
    """Make one row for each image file; its label is the name of its folder.

    Args:
        listed: files and their ids.
        folders: the folders that the user named.
        source: the columns to read.

    Yields:
        Rows in the order of the files, each with the path of its image.

    Raises:
        XcompatError: ``label_column`` is not ``folder``, or a file is not in a class's folder.
    """
    if source.label_column not in (None, "folder"):
        raise XcompatError(f"images in folders have no column {source.label_column!r}; the only label_column is 'folder'")
    if source.camera_column is not None:
        raise XcompatError(
            f"images in folders have no column {source.camera_column!r}; list them with their cameras in labels.csv, or set "
            "format: market1501 if their names say it"
        )
    for file, name in listed:
        if source.with_labels:
            require_class_folder(file, folders)
        label = {LABEL: file.parent.name} if source.with_labels else {}
        yield {IMAGE: {"bytes": None, "path": str(file.resolve())}, ID: name, **label}


def require_class_folder(file: Path, folders: list[Path]) -> None:
    """Refuse an image that lies in no class's folder, as the folder's name is its label.

    Args:
        file: the image.
        folders: the folders that the user named.

    Raises:
        XcompatError: naming it.
    """
    if folders == [file.parent]:
        raise XcompatError(f"{file} has no label; move it into a folder called after its class")


def read_market1501(listed: Iterable[tuple[Path, str]], source: PairSource) -> Iterator[dict[str, Any]]:
    """Make one row for each image that is named as in Market-1501: ``0002_c1s1_000451_03.jpg``, person 0002 by camera 1.

    Images of person -1 are junk and left out. Person 0000 stands for all that are nobody: each such image is a class of its own,
    so that no query finds it. DukeMTMC-reID and VeRi-776 name their images in the same way.

    Args:
        listed: files and their ids.
        source: the columns to read; the names of files give them.

    Yields:
        Rows in the order of the files, each with the path of its image.

    Raises:
        XcompatError: a column is named, or the name of a file gives no person or no camera.
    """
    for column in ("label_column", "camera_column"):
        if (given := getattr(source, column)) is not None:
            raise XcompatError(f"format market1501 reads names of files and no column {given!r}; leave {column} out")
    for file, name in listed:
        person, camera = _person_and_camera(file)
        if person == "-1":
            continue
        label = {LABEL: person if int(person) else name} if source.with_labels else {}
        yield {IMAGE: {"bytes": None, "path": str(file.resolve())}, ID: name, CAMERA: camera, **label}


def require_market1501_names(paths: list[Path]) -> None:
    """Refuse images that are not named as in Market-1501, before anything is read of them.

    Args:
        paths: the folders of the user.

    Raises:
        XcompatError: naming the first such file.
    """
    for file, _ in image_files(paths):
        _person_and_camera(file)


def _person_and_camera(file: Path) -> tuple[str, str]:
    found = _MARKET.match(file.name)
    if found is None:
        raise XcompatError(
            f"{file} is not named as in Market-1501, person and camera first, such as 0002_c1s1_000451_03.jpg; "
            "rename it, move it away, or set another format"
        )
    return found[1], found[2]


def _own_ids(file: Path, column: str, names: list[str], values: pd.Series[Any]) -> list[str]:
    """Return the first id in the rows of each image, or raise if there are images without."""
    found = [next((str(value) for value in values[name] if not is_blank(value)), None) for name in names]
    if lacking := [name for name, own in zip(names, found, strict=True) if own is None]:
        raise XcompatError(
            f"{file}: {lacking[0]} has no {column}, as {len(lacking):,} of {len(names):,} images have none; fill the column, or "
            "name another under id_column"
        )
    return [own for own in found if own is not None]


def _one_value(values: list[Any], where: str, what: str, means: str) -> str:
    """Return the label or camera of an image as it is written, or raise if its rows have none or several."""
    found = {str(value).strip() for value in values if value is not None and value == value} - {""}  # NaN is not itself
    if not found:
        raise XcompatError(f"{where} has no {what}; add one or delete the row")
    if len(found) > 1:
        raise XcompatError(f"{where} has the {what}s {' and '.join(map(repr, sorted(found)))}; an image has one {means}")
    return found.pop()


def _read_table(file: Path) -> pd.DataFrame:
    """Read a table of strings, so that ids keep their leading zeros; numbers of JSON stay as they are written."""
    import pandas as pd

    if has_suffix(file, (coco.SUFFIX,)):
        table = coco.read_coco_captions(file)
        if table.empty:
            raise XcompatError(f"{file} holds no captions; fetch it again")
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
        raise XcompatError(f"{file} cannot be read ({str(error).splitlines()[0][:200]}); mend that row") from error
    if not isinstance(table.index, pd.RangeIndex):  # pandas makes an index of surplus fields
        raise XcompatError(f"{file} has rows with more fields than its header; quote captions that hold the separator")
    if table.empty:
        raise XcompatError(f"{file} holds no rows; it needs a header and one row per caption")
    return table


def _folder_of(file: Path, names: list[str]) -> Path:
    """Return the folder that the paths of images are relative to: the file's or, if it has none of them, one beside the file."""
    folder = file.parent
    if not _exists(folder / names[0]):
        # Flickr8k: captions.txt and Images/; COCO: annotations/captions_val2014.json and val2014/
        around = [folder, *([folder.parent] if folder.name == coco.FOLDER else [])]
        inner = (each for place in around for each in sorted(place.iterdir()) if each.is_dir() and _exists(each / names[0]))
        folder = next(inner, folder)
    missing = [name for name in names if not _exists(folder / name)]
    if missing:
        raise XcompatError(
            f"{file} names {len(missing)} of {len(names)} images that do not exist, first {missing[0][:200]!r}; "
            f"paths are relative to {folder}"
        )
    return folder


def _exists(file: Path) -> bool:
    return os.path.isfile(file)  # noqa: PTH113 - Path raises for overlong names
