"""Sources of data as the user describes them: their local files, and the format of these."""

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
from xcompat.core.paths import is_local, is_misspelt, nearest_path
from xcompat.data import cifar, coco
from xcompat.data.addresses import is_address, shown
from xcompat.data.delimited import is_captions_text
from xcompat.data.glyphs import glyph_classes
from xcompat.data.lists import is_image_list
from xcompat.data.picture_files import IMAGE_SUFFIXES, images_below

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
CAPTION_SUFFIXES = (".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz")
CAPTION_STEMS = ("captions", "metadata", "labels")
TEXT_SUFFIXES = (".txt", ".txt.gz")
CAPTION_TEXT_SUFFIXES = (*TEXT_SUFFIXES, ".token")
"""Text files that hold captions if their first line says so."""

EMBEDDED = "glyphs:"
"""Prefix of the data that every installation has: ``glyphs:train`` and so on."""

PairFormat = Literal["auto", "webdataset", "datasets", "captions", "parquet", "images", "list", "cifar", "market1501"]


class DataSource(BaseModel):
    """A source of data.

    Args:
        path: a folder, a file, a glob (``shards/*.tar``), a brace range (``train-{0000..0003}.tar.gz``), a list of these, or the
            name of a data set on the Hub, with its owner (without, one that is spelt almost as a file of here is taken for it).
        split: the split of a Hub data set or of a saved ``DatasetDict``.
        name: the configuration of a Hub data set.
        revision: the revision of a Hub data set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | list[str]
    split: str | None = None
    name: str | None = None
    revision: str | None = None


class ImageSource(DataSource):
    """A source of images, with the fields of :class:`DataSource` and these; ``path`` may also be ``glyphs:train`` and the like.

    Args:
        format: the format of the files; ``auto`` finds out, except for ``market1501``: images that are named as in Market-1501
            (``0002_c1s1_000451_03.jpg`` is person 0002 by camera 1).
        image_column: the column (webdataset: the member) with the image; unless given, found by name or type.
        id_column: the column with the sample's id, which no row may lack; the file name, ``__key__``, a column ``id`` or the row
            number unless given.
        label_column: the column with the class, kept as ``label`` (webdataset: usually ``cls``; an image folder: ``folder``).
        camera_column: the column with what took the image. A query then does not find items of its own class and camera, as in
            re-identification.
        limit: number of samples to use, the first ones.
        max_bad_share: the share of shards, or of samples, that may be unusable.
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
    """A source of images with captions, with the fields of :class:`ImageSource` and these.

    Args:
        caption_column: the column with one caption or a list of them; ``json.name`` reads a key of a webdataset's JSON member
            or of a nested column.
        captions: whether captions are needed.
        labels: whether labels are needed; unless ``label_column`` is given, their column is found by name or type.
        streaming: read on the fly, without random access and without a cache; ``path`` may then be addresses of shards
            (``https:``, ``s3:``, ``gs:``, ``hf:``) or commands that print them (``pipe:``).

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
    """A source of queries with their passages, with the fields of :class:`DataSource` and these.

    Files are JSON lines, CSV, TSV or Parquet. Columns that are not named are found by their usual names.

    Args:
        query_column: the column with the query.
        passage_column: the column with the passage that answers it.
        negative_column: the column with mined negatives, one text or a list; each query gets one of its own in every epoch.
        id_column: the column with the id of what a pair is about, for ``one_per_id``.
        limit: number of pairs to use, the first ones.
    """

    query_column: str | None = None
    passage_column: str | None = None
    negative_column: str | None = None
    id_column: str | None = None
    limit: int | None = Field(default=None, ge=1)


def refuse_hub_fields(path: str | list[str], **fields: str | None) -> None:
    """Refuse fields that only a data set on the Hub has, for local data.

    Args:
        path: of the data.
        fields: field -> value, None if not given.

    Raises:
        XcompatError: one of the fields is given.
    """
    for name, value in fields.items():
        if value is not None:
            raise XcompatError(
                f"{path} is read as it is and has no {name}; leave {name} out, or set it to null where a recipe has it"
            )


def has_suffix(path: str | Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file name ends in one of the suffixes, in any case."""
    return Path(path).name.lower().endswith(suffixes)


def local_files(path: str | list[str]) -> list[Path] | None:
    """Resolve paths, globs and brace ranges to existing files and folders.

    Args:
        path: as in `PairSource`.

    Returns:
        Existing paths (globs sorted), or None when ``path`` can only be the name of a data set on the Hub.

    Raises:
        XcompatError: a local path does not exist.
    """
    if isinstance(path, str) and _looks_like_hub(path):
        return None
    found: list[Path] = []
    for pattern in [path] if isinstance(path, str) else path:
        if is_address(pattern):
            raise XcompatError(
                f"{shown(pattern)} is elsewhere: only data.texts and pairs with streaming: true are read from there; copy it here"
            )
        for text in _expand(pattern):
            if text.startswith(EMBEDDED):
                found.append(glyph_classes(text.removeprefix(EMBEDDED)))
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
    """Identify local files by their names and sizes, and text files by their content too, so that a copy has the same digest.

    Pictures outside of ``path`` that a captions file names are not part of the digest.

    Args:
        path: as in `PairSource`.

    Returns:
        64 hexadecimal digits; None for a data set on the Hub.

    Raises:
        XcompatError: a local path does not exist.
    """
    places = local_files(path)
    if places is None:
        return None
    digest = hashlib.sha256()
    for place in places:
        for file in [each for each in files_below(place) if each.is_file()] if place.is_dir() else [place]:
            if not file.name.startswith("."):  # hidden files, such as those of file managers
                name = file.relative_to(place if place.is_dir() else place.parent).as_posix()
                held = file_record(file).xxh3 if has_suffix(file, (*CAPTION_SUFFIXES, *CAPTION_TEXT_SUFFIXES, ".json")) else ""
                digest.update(json.dumps([name, file.stat().st_size, held]).encode())
    return digest.hexdigest()


def _expand(pattern: str) -> list[str]:
    expanded = str(Path(pattern).expanduser())
    if "{" not in expanded or Path(expanded).exists():
        return [expanded]
    import braceexpand  # a dependency of webdataset, whose users write shards this way

    return list(braceexpand.braceexpand(expanded))


def _looks_like_hub(path: str) -> bool:
    """Return whether no part of a path exists here, also not misspelt, and it has the form of a Hub data set's name."""
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
        and not is_misspelt(path)
        and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path) is not None
    )


def locate(source: ImageSource) -> tuple[PairFormat, list[Path]]:
    """Find the files of a source, and their format.

    Returns:
        The format, never ``auto``, and existing files and folders; none of these for a data set on the Hub.

    Raises:
        XcompatError: there are no files of a known format, or local files have fields of a data set on the Hub.
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
    """Replace each folder by the files directly in it, sorted; hidden files are left out."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
        files.extend(inside)
    return files


def files_with(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """List the files of paths and folders that end in one of the suffixes.

    Raises:
        XcompatError: there is none.
    """
    files = [file for file in expand_folders(paths) if has_suffix(file, suffixes)]
    if not files:
        raise XcompatError(f"{paths[0]}: no file ending in {', '.join(suffixes)} there; check the path or the format")
    return files


def captions_files(paths: list[Path]) -> list[Path]:
    """List the captions files: given ones by suffix and first line, in folders ``captions.*``, ``metadata.*`` or ``labels.*``.

    Of a folder's files with one stem, the first stands for all; :func:`require_one_captions_file` refuses others.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files.extend(next((found for stem in CAPTION_STEMS if (found := _called(path, stem))), [])[:1])
        elif _holds_captions(path):
            files.append(path)
    return files


def require_one_captions_file(paths: list[Path]) -> None:
    """Refuse a folder whose captions could be read from several files: nothing says which of them is right.

    Raises:
        XcompatError: naming them.
    """
    for folder in paths:
        found = next((each for stem in CAPTION_STEMS if folder.is_dir() and (each := _called(folder, stem))), [])
        if len(found) > 1:
            names = " and ".join(file.name for file in found)
            raise XcompatError(
                f"{folder} holds {names}; give the path of the one to read, such as {found[0]}, or move the other away"
            )


def _called(folder: Path, stem: str) -> list[Path]:
    """Return the captions files with a stem in a folder."""
    names = [f"{stem}{suffix}" for suffix in (*CAPTION_SUFFIXES, *CAPTION_TEXT_SUFFIXES)]
    return [file for name in names if (file := folder / name).is_file() and _holds_captions(file)]


def _holds_captions(file: Path) -> bool:
    if has_suffix(file, (*CAPTION_SUFFIXES, coco.SUFFIX)):
        return True
    return has_suffix(file, CAPTION_TEXT_SUFFIXES) and is_captions_text(file)
