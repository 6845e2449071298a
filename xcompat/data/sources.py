"""Data sources as the user describes them: local files and their formats."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from xcompat.core.checksums import file_record
from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.core.files import files_below
from xcompat.core.paths import is_local, nearest_path
from xcompat.data import cifar, coco
from xcompat.data.addresses import is_address, redact_address
from xcompat.data.delimited import is_captions_text
from xcompat.data.glyphs import glyph_classes
from xcompat.data.image_files import IMAGE_SUFFIXES, images_below
from xcompat.data.image_lists import is_image_list

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
CAPTION_SUFFIXES = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz")
CAPTION_STEMS = ("captions", "metadata", "labels")
TEXT_SUFFIXES = (".txt", ".txt.gz")
CAPTION_TEXT_SUFFIXES = (*TEXT_SUFFIXES, ".token")
"""Suffixes of text files that contain captions if their first line does."""

BUILTIN_PREFIX = "glyphs:"
"""Prefix of built-in data, e.g. ``glyphs:train``."""

PairFormat = Literal["auto", "webdataset", "datasets", "captions", "parquet", "images", "list", "cifar", "market1501"]


class DataSource(BaseModel):
    """Source of data.

    Args:
        path: folder, file, glob (``shards/*.tar``), brace range (``train-{0000..0003}.tar.gz``), a list of these, or Hub data set
            as ``owner/name``, unless there is a local folder ``owner``.
        split: split of a Hub data set or a saved ``DatasetDict``.
        name: configuration of a Hub data set.
        revision: revision of a Hub data set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | list[str]
    split: str | None = None
    name: str | None = None
    revision: str | None = None


class ImageSource(DataSource):
    """Source of images: :class:`DataSource` plus these fields. ``path`` can also be built-in data (``glyphs:train``).

    Args:
        format: file format. ``auto`` detects all but ``market1501``: images named as in Market-1501 (``0002_c1s1_000451_03.jpg``
            is person 0002 from camera 1).
        image_column: column (webdataset member) with the image; by default detected by name or type.
        id_column: column with the id, required in every row. Default: file name, ``__key__``, column ``id`` or row number.
        label_column: column with the class, stored as ``label`` (webdataset: usually ``cls``; image folder: ``folder``).
        camera_column: column with the camera. Queries ignore items with their class and camera, as in re-identification.
        limit: number of samples to use, from the start.
        max_bad_share: largest tolerated share of unusable shards or samples.
    """

    format: PairFormat = "auto"
    image_column: str | None = None
    id_column: str | None = None
    label_column: str | None = None
    camera_column: str | None = None
    limit: int | None = Field(default=None, ge=1)
    max_bad_share: float = Field(default=0.01, ge=0, le=1)

    @property
    def with_cameras(self) -> bool:
        """Whether samples get a ``camera``."""
        return self.camera_column is not None or self.format == "market1501"


class PairSource(ImageSource):
    """Source of images with captions: :class:`ImageSource` plus these fields.

    Args:
        caption_column: column with a caption or a list. ``json.name`` reads a key of a webdataset JSON member or a nested
            column.
        captions: require captions.
        labels: require labels; ``label_column`` is by default detected by name or type.
        streaming: read without random access or cache. ``path`` can then be shard addresses (``https:``, ``s3:``, ``gs:``,
            ``hf:``) or commands that print shards (``pipe:``).

    Example:
        >>> PairSource(path="shards/*.tar", caption_column="json.title").format
        'auto'
    """

    caption_column: str | None = None
    captions: bool = True
    labels: bool = False
    streaming: bool = False

    @property
    def with_labels(self) -> bool:
        """Whether samples get a ``label``."""
        return self.labels or self.label_column is not None


class TextPairSource(DataSource):
    """Source of queries with passages: :class:`DataSource` plus these fields.

    Files are JSON lines, CSV, TSV or Parquet. Columns are detected by their usual names.

    Args:
        query_column: column with the query.
        passage_column: column with the passage that answers it.
        negative_column: column with mined negatives, a text or a list; each epoch draws a text per query.
        id_column: column with the id of a pair's subject, for ``one_per_id``.
        limit: number of pairs to use, from the start.
    """

    query_column: str | None = None
    passage_column: str | None = None
    negative_column: str | None = None
    id_column: str | None = None
    limit: int | None = Field(default=None, ge=1)


def refuse_hub_fields(path: str | list[str], **fields: str | None) -> None:
    """Raise if local data has fields of Hub data sets.

    Args:
        path: path of the data.
        fields: field values, None if not set.

    Raises:
        XcompatError: a field is set.
    """
    for name, value in fields.items():
        if value is not None:
            raise XcompatError(f"{path} is read directly and has no {name}; remove {name}, or set it to null if a recipe sets it")


def has_suffix(path: str | Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file name ends in any given suffix, ignoring case."""
    return Path(path).name.lower().endswith(suffixes)


def local_files(path: str | list[str]) -> list[Path] | None:
    """Resolve paths, globs and brace ranges to existing files and folders.

    Args:
        path: as in `PairSource`.

    Returns:
        Existing paths (globs sorted), or None if ``path`` can only be a Hub data set.

    Raises:
        XcompatError: a local path does not exist.
    """
    if isinstance(path, str) and _looks_like_hub(path):
        return None
    found: list[Path] = []
    for pattern in [path] if isinstance(path, str) else path:
        if is_address(pattern):
            raise XcompatError(
                f"{redact_address(pattern)} is remote: only data.texts and pairs with streaming: true read addresses; download "
                "the data first"
            )
        for text in _expand(pattern):
            if text.startswith(BUILTIN_PREFIX):
                found.append(glyph_classes(text.removeprefix(BUILTIN_PREFIX)))
                continue
            matches = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) and not Path(text).exists() else [text]
            missing = [match for match in matches if not Path(match).exists()]
            if missing or not matches:
                raise MissingPathError(f"{(missing or [text])[0]} does not exist; {nearest_path(text)}")
            found.extend(map(Path, matches))
    if not found:
        raise XcompatError("an empty list of paths was given; name at least one file or folder")
    return found


def files_digest(path: str | list[str]) -> str | None:
    """Return a digest of names, sizes and text content of local files. A copy has the same digest.

    Does not include a captions file's images outside ``path``.

    Args:
        path: as in `PairSource`.

    Returns:
        64 hexadecimal digits; None for a Hub data set.

    Raises:
        XcompatError: a local path does not exist.
    """
    places = local_files(path)
    if places is None:
        return None
    digest = hashlib.sha256()
    for place in places:
        for file in [each for each in files_below(place) if each.is_file()] if place.is_dir() else [place]:
            if not file.name.startswith("."):  # skip hidden files, e.g. of file managers
                name = file.relative_to(place if place.is_dir() else place.parent).as_posix()
                held = file_record(file).xxh3 if has_suffix(file, (*CAPTION_SUFFIXES, *CAPTION_TEXT_SUFFIXES, ".json")) else ""
                digest.update(json.dumps([name, file.stat().st_size, held]).encode())
    return digest.hexdigest()


def _expand(pattern: str) -> list[str]:
    expanded = str(Path(pattern).expanduser())
    if "{" not in expanded or Path(expanded).exists():
        return [expanded]
    import braceexpand  # a dependency of webdataset, which uses this syntax for shards

    return list(braceexpand.braceexpand(expanded))


def _looks_like_hub(path: str) -> bool:
    """Return whether a path is ``owner/name`` and does not look like a local path."""
    known = (
        *SHARD_SUFFIXES,
        *CAPTION_SUFFIXES,
        *CAPTION_TEXT_SUFFIXES,
        *IMAGE_SUFFIXES,
        ".parquet",
        ".json",
        ".gz",
        cifar.SUFFIX,
    )
    return (
        not is_local(path)
        and not has_suffix(path, known)
        and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None
    )


def locate(source: ImageSource) -> tuple[PairFormat, list[Path]]:
    """Find the files of a source and their format.

    Returns:
        The format, never ``auto``, and existing paths (none for a Hub data set).

    Raises:
        XcompatError: no format is known, or local files have Hub fields.
    """
    paths = local_files(source.path)
    form = source.format if source.format != "auto" else "datasets" if paths is None else _detect_format(paths)
    if form != "datasets":
        if paths is None:
            raise MissingPathError(f"{source.path} does not exist (looked in {Path.cwd()}); check the path")
        refuse_hub_fields(source.path, split=source.split, name=source.name, revision=source.revision)
    return form, paths or []


def _detect_format(paths: list[Path]) -> PairFormat:
    files = expand_folders(paths)
    lists = (path for path in paths if path.is_file() and has_suffix(path, TEXT_SUFFIXES))
    tests: dict[PairFormat, Callable[[], bool]] = {
        "datasets": lambda: len(paths) == 1 and is_saved_dataset(paths[0]),
        "webdataset": lambda: any(has_suffix(file, SHARD_SUFFIXES) for file in files),
        "captions": lambda: bool(captions_files(paths)),
        "parquet": lambda: any(has_suffix(file, (".parquet",)) for file in files),
        "list": lambda: any(map(is_image_list, lists)),
        "images": lambda: any(next(images_below(path), None) for path in paths),
        "cifar": lambda: any(has_suffix(file, (cifar.SUFFIX,)) for file in files),
    }
    found = next((form for form, holds in tests.items() if holds()), None)
    if found is None or found == "cifar":
        cifar.refuse_other_layouts(paths)
    if found is not None:
        return found
    where = ", ".join(map(str, paths[:3]))
    raise XcompatError(
        f"{where}: no shards (*.tar, *.tar.gz), captions.csv|tsv|jsonl|txt, *.parquet, images, list of images or saved data set "
        "found; check the path or set format"
    )


def is_saved_dataset(path: Path) -> bool:
    """Return whether a folder was written by ``datasets.save_to_disk``."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def expand_folders(paths: list[Path]) -> list[Path]:
    """Replace each folder by its direct files, sorted, without hidden ones."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
        files.extend(inside)
    return files


def files_with(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """List files in paths and folders by suffix.

    Raises:
        XcompatError: there are none.
    """
    files = [file for file in expand_folders(paths) if has_suffix(file, suffixes)]
    if not files:
        raise XcompatError(f"{paths[0]}: no file ending in {', '.join(suffixes)} there; check the path or the format")
    return files


def captions_files(paths: list[Path]) -> list[Path]:
    """List captions files: given files by suffix and first line; in folders ``captions.*``, ``metadata.*`` or ``labels.*``.

    Lists only the first of several with the same stem; :func:`require_one_captions_file` rejects such folders.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files.extend(next((found for stem in CAPTION_STEMS if (found := _captions_files_with_stem(path, stem))), [])[:1])
        elif _holds_captions(path):
            files.append(path)
    return files


def require_one_captions_file(paths: list[Path]) -> None:
    """Raise if the choice of a folder's captions file is ambiguous.

    Raises:
        XcompatError: names the files.
    """
    for folder in paths:
        found = next(
            (each for stem in CAPTION_STEMS if folder.is_dir() and (each := _captions_files_with_stem(folder, stem))), []
        )
        if len(found) > 1:
            names = " and ".join(file.name for file in found)
            raise XcompatError(f"{folder} contains {names}; give the path of a single file (e.g. {found[0]})")


def _captions_files_with_stem(folder: Path, stem: str) -> list[Path]:
    names = [f"{stem}{suffix}" for suffix in (*CAPTION_SUFFIXES, *CAPTION_TEXT_SUFFIXES)]
    return [file for name in names if (file := folder / name).is_file() and _holds_captions(file)]


def _holds_captions(file: Path) -> bool:
    if has_suffix(file, (*CAPTION_SUFFIXES, coco.SUFFIX)):
        return True
    return has_suffix(file, CAPTION_TEXT_SUFFIXES) and is_captions_text(file)
