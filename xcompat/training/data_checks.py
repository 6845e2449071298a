"""Fast checks for a recipe's columns in local data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.data import (
    CorpusSource,
    LabelledSource,
    PairSource,
    TextPairSource,
    load_labelled,
    load_pairs,
    load_text_pairs,
    select_subset,
)
from xcompat.data.addresses import list_addresses
from xcompat.data.corpora import first_texts
from xcompat.data.sources import BUILTIN_PREFIX, files_with, local_files, locate
from xcompat.training.evaluation_sets import check_zero_shot
from xcompat.training.input_checks import error_prefix
from xcompat.training.judged_templates import require_images_of_templates
from xcompat.training.judged_texts import load_judged_texts
from xcompat.training.sections import DataSettings
from xcompat.training.stage_recipe import StageRecipe

if TYPE_CHECKING:
    import datasets

ROWS = 16
"""Rows read of shards and tables."""


def check_data(settings: StageRecipe) -> None:
    """Raise if local data lack a column, class or list named in the stage.

    Images are not decoded; shards and tables are checked by their first rows. Missing and remote data are skipped.

    Args:
        settings: the stage.

    Raises:
        XcompatError: with recipe key and cause.
    """
    data, prefix = settings.data, f"{settings.name}: data."
    for number, source in enumerate(data.texts):
        with _prefix_errors(f"{prefix}texts.{number}"):
            _check_texts(source)
    for key in ("pairs", "remembered", "test"):
        if (pairs := getattr(data, key)) is not None:
            with _prefix_errors(f"{prefix}{key}"):
                _check_pairs(pairs)
    for key in ("images", "queries", "gallery"):
        if (labelled := getattr(data, key)) is not None:
            with _prefix_errors(f"{prefix}{key}"):
                _check_labelled(labelled, data, key)
    if data.text_pairs is not None:
        with _prefix_errors(f"{prefix}text_pairs"):
            _check_text_pairs(data.text_pairs)
    _check_test_lists(data, prefix)


def _check_test_lists(data: DataSettings, prefix: str) -> None:
    judged, templates = data.judged_texts, data.templates
    with _prefix_errors(f"{prefix}judged_texts"):
        if judged is not None and _are_local(judged.queries.path, judged.passages.path):
            load_judged_texts(judged).require_judgements()
    with _prefix_errors(f"{prefix}templates"):
        if templates is not None and _are_local(templates.images.path):
            require_images_of_templates(templates)
    for name, shot in data.zero_shot_sets().items():
        with _prefix_errors(f"{prefix}zero_shot"):
            if _check_pairs(shot.images) and Path(shot.classes).is_file():
                check_zero_shot(shot, name)


@contextmanager
def _prefix_errors(key: str) -> Iterator[None]:
    """Prefix errors with the recipe key; ignore missing data, which are listed elsewhere."""
    try:
        with error_prefix(key):
            yield
    except MissingPathError:
        return


def _are_local(*paths: str | list[str]) -> bool:
    """Return whether all data are the user's files, not samples from the package."""
    embedded = any(str(path).startswith(BUILTIN_PREFIX) for path in paths)
    return not embedded and all(list_addresses(path) is None and local_files(path) is not None for path in paths)


def _check_texts(source: CorpusSource | PairSource) -> None:
    if not _are_local(source.path):
        return
    if isinstance(source, PairSource):
        _check_pairs(source.model_copy(update={"captions": True}))
    elif not first_texts(source, 1):
        raise XcompatError(f"{source.path} contains no text; check the path and text_column")


def _check_text_pairs(source: TextPairSource) -> None:
    if _are_local(source.path):
        load_text_pairs(source.model_copy(update={"limit": min(source.limit or ROWS, ROWS)}))


def _check_labelled(source: LabelledSource, data: DataSettings, key: str) -> None:
    captions = data.old_reads == "captions"
    described = source.model_dump(exclude={"classes", "class_column", "caption_file"})
    if _check_pairs(PairSource(**described, captions=captions and source.caption_file is None, labels=True)):
        labelled = load_labelled(source, captions=captions)
        subset = data.subset if key == "images" else data.test_subset
        if subset is not None:
            select_subset(labelled, subset)


def _check_pairs(source: PairSource) -> bool:
    """Check columns; return whether all rows were read."""
    if not _are_local(source.path):
        return False
    form, paths = locate(source)
    if form == "parquet":
        load_pairs(source.model_copy(update={"limit": None}), _first_rows(files_with(paths, (".parquet",))[0]))
    elif form == "webdataset":
        streamed = load_pairs(source.model_copy(update={"streaming": True, "limit": ROWS}))
        if not list(islice(streamed, 1)):
            raise XcompatError(
                f"{source.path} contains no sample with the recipe's columns; correct the names of columns in the recipe"
            )
    else:
        load_pairs(source.model_copy(update={"streaming": False}))
    return form not in ("parquet", "webdataset")


def _first_rows(file: Path) -> datasets.Dataset:
    try:
        table = pq.ParquetFile(file)
        batches = list(islice(table.iter_batches(batch_size=ROWS), 1))
        return datasets.Dataset(pa.Table.from_batches(batches, schema=table.schema_arrow))
    except (pa.ArrowException, OSError) as error:
        raise XcompatError(
            f"{file} cannot be read: {str(error).splitlines()[0]}; recreate it with the command that wrote it"
        ) from error
