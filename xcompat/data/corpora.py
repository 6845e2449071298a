"""Text corpora from files and data sets, without blanks, duplicates and held-out captions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import datasets
from xcompat.core.progress import advance_bar, console, notice, progress_bar
from xcompat.data.addresses import PIPE, download_address, is_address, list_addresses, redact_address
from xcompat.data.bad_samples import Problems
from xcompat.data.cache import cache_folder, cached_dataset, file_stamps
from xcompat.data.loading import load_pairs, load_raw
from xcompat.data.schema import CAPTION, CAPTION_COLUMNS, TEXT, captions_of, pick_column
from xcompat.data.shards import ShardColumns, read_rows
from xcompat.data.sources import (
    SHARD_SUFFIXES,
    TEXT_SUFFIXES,
    DataSource,
    PairSource,
    expand_folders,
    has_suffix,
    is_saved_dataset,
    local_files,
    refuse_hub_fields,
)
from xcompat.data.text_files import json_lines, text_lines

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_COLUMNS = (TEXT, *CAPTION_COLUMNS)
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
BATCH = 65_536

CorpusFormat = Literal["auto", "text", "jsonl", "parquet", "webdataset", "datasets"]


class CorpusSource(DataSource):
    """Source of texts: :class:`~xcompat.data.sources.DataSource` plus these fields.

    ``path`` can also be addresses (``https:``, ``s3:``, ``gs:``, ``hf:``) or commands (``pipe:``), read once and cached. Changed
    content needs another address.

    Args:
        format: file format. ``auto`` uses each file's suffix and does not work for commands.
        text_column: column with a text or list of texts (webdataset member: ``txt`` or ``json.title``).
    """

    format: CorpusFormat = "auto"
    text_column: str | None = None


AnySource = str | CorpusSource | PairSource


def normalise(text: str) -> str:
    """Reduce a text to case-folded letters and digits, to compare captions.

    Example:
        >>> normalise("A  Dog, running!") == normalise("a dog running")
        True
    """
    return re.sub(r"[\W_]+", "", text.casefold())


def load_texts(
    sources: AnySource | Sequence[AnySource], *, exclude: Iterable[str] = (), limit: int | None = None
) -> datasets.Dataset:
    """Load distinct texts for text-only training, in order of first appearance.

    The result is memory-mapped. Loading takes 8 bytes per distinct text (a 64-bit hash). Two of 67 million texts collide with
    probability 1e-4.

    Args:
        sources: paths or sources, at least 1; a `PairSource` contributes captions.
        exclude: captions to drop, e.g. of the test set; compared after `normalise`.
        limit: maximum number of texts.

    Returns:
        A data set with the column ``text``.

    Raises:
        XcompatError: a file is missing, damaged or lacks the column, or no text remains.
    """
    import pyarrow as pa

    listed = [sources] if isinstance(sources, (str, CorpusSource, PairSource)) else list(sources)
    opened = [_open_source(CorpusSource(path=source) if isinstance(source, str) else source) for source in listed]
    held_out = {key for text in exclude if (key := normalise(text))}
    features = datasets.Features({TEXT: datasets.Value("string")})

    def build(record: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        record |= {"read": 0, "duplicates": 0, "excluded": 0, "kept": 0}
        texts = (text for source in opened for text in source.read())
        with progress_bar() as bar:
            task = bar.add_task("reading texts", total=None, unit="texts")
            for kept in _keep_new_texts(texts, held_out, limit, record):
                advance_bar(bar, task, record["read"] - bar.tasks[0].completed)
                yield pa.record_batch([pa.array(kept, pa.string())], schema=features.arrow_schema)
        if not record["kept"]:
            raise XcompatError(
                f"empty corpus: none of {record['read']} texts is left ({record['excluded']} excluded) of "
                f"{', '.join(source.where for source in opened) or 'no sources'}; add texts or check the paths"
            )

    excluded = hashlib.sha256("".join(f"{text}\0" for text in sorted(held_out)).encode()).hexdigest()
    depends = {"sources": [source.key for source in opened], "exclude": excluded, "limit": limit}
    dataset, record = cached_dataset("texts", depends, features, build)
    left_out = f"{record['duplicates']:,} duplicates and {record['excluded']:,} held-out captions left out"
    console.print(f"  [dim]{record['kept']:,} distinct texts of {record['read']:,} ({left_out})[/]")
    return dataset


class HashSet:
    """Set of 64-bit hashes at 8 bytes each, stored as sorted runs. Runs of similar length merge."""

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def add(self, hashes_N: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add hashes and return which are new.

        Args:
            hashes_N: uint64, may repeat.

        Returns:
            (N,) bool, True at the first appearance of each new hash.
        """
        unique, first = np.unique(hashes_N, return_index=True)
        fresh = np.ones(len(unique), dtype=bool)
        for run in self.runs:
            place = np.searchsorted(run, unique)
            fresh &= run[np.minimum(place, len(run) - 1)] != unique
        mask_N = np.zeros(len(hashes_N), dtype=bool)
        mask_N[first[fresh]] = True
        if fresh.any():
            self.runs.append(unique[fresh])
        while len(self.runs) > 1 and 2 * len(self.runs[-1]) >= len(self.runs[-2]):
            last = self.runs.pop()
            self.runs[-1] = np.sort(np.concatenate([self.runs[-1], last]), kind="stable")  # stable sorting merges sorted runs
        return mask_N


def _keep_new_texts(texts: Iterator[str], held_out: set[str], limit: int | None, record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield batches of new texts, without held-out texts; count them in ``record``."""
    from pandas.util import hash_array

    seen = HashSet()
    while limit is None or record["kept"] < limit:
        batch = list(islice(texts, BATCH))
        if not batch:
            return
        hashes = hash_array(np.array(batch, dtype=object), categorize=False)
        new = [batch[row] for row in np.flatnonzero(seen.add(hashes))]
        kept = [text for text in new if normalise(text) not in held_out] if held_out else new
        record["read"] += len(batch)
        record["duplicates"] += len(batch) - len(new)
        record["excluded"] += len(new) - len(kept)
        kept = kept[: None if limit is None else limit - record["kept"]]
        record["kept"] += len(kept)
        if kept:
            yield kept


def first_texts(source: CorpusSource, count: int) -> list[str]:
    """Read the first texts of a corpus.

    Args:
        source: the corpus.
        count: number of texts.

    Raises:
        XcompatError: a file cannot be read or lacks the column.
    """
    return list(islice(_open_source(source).read(), count))


class _Texts(NamedTuple):
    """A source's texts, with its name for messages and its cache key."""

    where: str
    key: Any
    read: Callable[[], Iterator[str]]


def _open_source(source: CorpusSource | PairSource) -> _Texts:
    if (elsewhere := list_addresses(source.path)) is not None:
        return _open_remote_source(source, elsewhere)
    where = str(source.path)
    if isinstance(source, PairSource):
        pairs = load_pairs(source.model_copy(update={"streaming": False, "captions": True}))
        return _Texts(where, pairs._fingerprint, partial(_column_texts, pairs, CAPTION))
    paths = local_files(source.path)
    if paths is None or source.format == "datasets" or (len(paths) == 1 and is_saved_dataset(paths[0])):
        raw = load_raw(source, paths or [])
        column = pick_column(source.text_column, TEXT_COLUMNS, raw.column_names, "text_column", where)
        return _Texts(where, [raw._fingerprint, source.text_column], partial(_column_texts, raw, column))
    refuse_hub_fields(source.path, split=source.split, name=source.name, revision=source.revision)
    files = [file for path in paths for file in ([path] if path.is_file() else _known_files(path))]
    return _Texts(where, [source.model_dump(), file_stamps(files)], partial(_file_texts, files, source))


def _open_remote_source(source: CorpusSource | PairSource, found: list[str]) -> _Texts:
    where, key = redact_address(found[0]), [source.model_dump(), found]
    if isinstance(source, PairSource):
        pairs = load_pairs(source.model_copy(update={"streaming": True, "captions": True}))
        return _Texts(where, key, partial(_column_texts, pairs, CAPTION))
    require_readable(source, found)
    return _Texts(where, key, partial(_file_texts, found, source))


def require_readable(source: CorpusSource, found: Sequence[str]) -> None:
    """Raise if a remote source has inapplicable settings.

    Args:
        source: remote source.
        found: its addresses.

    Raises:
        XcompatError: a command has no format, or a setting applies only to data sets.
    """
    where = redact_address(found[0])
    refuse_hub_fields(where, split=source.split, name=source.name, revision=source.revision)
    if source.format == "datasets":
        raise XcompatError(f"format: datasets does not work with the address {where}; choose another format")
    command = next((each for each in found if each.startswith(PIPE)), None)
    if source.format == "auto" and command is not None:
        raise XcompatError(
            f"{redact_address(command)} is a command; set format to the format of its output: text, jsonl, parquet or webdataset"
        )


class _StrictProblems(Problems):
    """Problems that raise at the first bad shard, because remote corpora are cached permanently."""

    @override
    def add_bad_shard(self, reason: str) -> None:
        raise XcompatError(f"{reason}; the corpus is not cached: try again later, or remove the shard")


def _known_files(folder: Path) -> list[Path]:
    known = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *SHARD_SUFFIXES, ".parquet")
    files = [file for file in expand_folders([folder]) if has_suffix(file, known)]
    if not files:
        raise XcompatError(f"{folder} contains no text files ({', '.join(known)}); check the path")
    return files


def _column_texts(dataset: datasets.Dataset | datasets.IterableDataset, column: str) -> Iterator[str]:
    for batch in dataset.select_columns([column]).iter(4096):
        yield from (text for value in batch[column] for text in captions_of(value))


def _file_texts(files: Sequence[str | Path], source: CorpusSource) -> Iterator[str]:
    forms = [(file, _format(urlsplit(file).path if isinstance(file, str) else file, source)) for file in files]
    shards = [file for file, form in forms if form == "webdataset"]
    columns = ShardColumns(caption=source.text_column, with_image=False)
    problems = (_StrictProblems if any(map(is_address, shards)) else Problems)(total_shards=len(shards))
    for row in read_rows(shards, columns, problems):
        yield from row[CAPTION]
    for line in problems.lines():
        notice(line)
    readers = {"text": _line_texts, "jsonl": _json_texts, "parquet": _parquet_texts}
    for file, form in forms:
        if form == "webdataset":
            continue
        if isinstance(file, Path):
            yield from readers[form](file, source.text_column)
            continue
        with download_address(file, cache_folder()) as copy:
            try:
                yield from readers[form](copy, source.text_column)
            except XcompatError as error:
                raise XcompatError(str(error).replace(str(copy), redact_address(file))) from error


def _format(file: str | Path, source: CorpusSource) -> str:
    if source.format != "auto":
        return source.format
    for form, suffixes in {"webdataset": SHARD_SUFFIXES, "jsonl": JSON_SUFFIXES, "parquet": (".parquet",)}.items():
        if has_suffix(file, suffixes):
            return form
    return "text"


def _line_texts(file: Path, column: str | None) -> Iterator[str]:
    if column is not None:
        raise XcompatError(f"{file} is plain text and has no column {column!r}; remove text_column")
    return (text for _, text in text_lines(file))


def _json_texts(file: Path, column: str | None) -> Iterator[str]:
    for number, row in json_lines(file):
        name = pick_column(column, TEXT_COLUMNS, list(row), "text_column", f"{file} line {number}")
        yield from captions_of(row[name])


def _parquet_texts(file: Path, column: str | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file, page_checksum_verification=True)
        name = pick_column(column, TEXT_COLUMNS, table.schema_arrow.names, "text_column", str(file))
        for batch in table.iter_batches(batch_size=BATCH, columns=[name]):
            yield from (text for value in batch.column(0).to_pylist() for text in captions_of(value))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise XcompatError(f"{file} cannot be read ({str(error).splitlines()[0]}); fetch or write it again") from error
