"""Images with captions from any file format, as a data set with fixed columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from xcompat.core.errors import XcompatError, describe_error, nearest
from xcompat.core.lazy import datasets
from xcompat.core.progress import notice
from xcompat.data.addresses import list_addresses
from xcompat.data.bad_samples import Problems
from xcompat.data.cache import cached_dataset, file_stamps, rows_to_batches
from xcompat.data.captions import read_captions, read_images, read_list_rows, read_market1501
from xcompat.data.cifar import SUFFIX, cifar_version, read_cifar
from xcompat.data.image_files import image_files, notice_unread
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
    pick_column,
)
from xcompat.data.shards import CLASS_MEMBER, ShardColumns, read_rows, stream_rows
from xcompat.data.sources import (
    SHARD_SUFFIXES,
    TEXT_SUFFIXES,
    DataSource,
    PairSource,
    captions_files,
    files_with,
    is_saved_dataset,
    locate,
    refuse_hub_fields,
    require_one_captions_file,
)

if TYPE_CHECKING:
    import pyarrow as pa

AnyDataset: TypeAlias = "datasets.Dataset | datasets.IterableDataset"

EXTRA_IMAGE_COLUMNS = (*IMAGE_COLUMNS, "img", "jpg", "jpeg", "png", "webp")
EXTRA_CAPTION_COLUMNS = (*CAPTION_COLUMNS, "txt")


def load_pairs(source: PairSource | str, dataset: AnyDataset | None = None, metadata: bool | list[str] = False) -> AnyDataset:
    """Load images and captions.

    Args:
        source: the source, or its ``path``.
        dataset: an open data set to use instead; the source gives its columns and name.
        metadata: further columns of a captions file to store as JSON in ``metadata``; True for all.

    Returns:
        A memory-mapped ``datasets.Dataset`` (``IterableDataset`` when streaming) with these columns:

        - ``image``: undecoded, ``{"bytes", "path"}``
        - ``caption``: a string or a list; not with ``captions=False``
        - ``id``: a string; streams of data sets or Parquet have it only if stored
        - ``label``: with ``labels`` or ``label_column``
        - ``camera``: a string, with cameras

    Raises:
        XcompatError: data or a column is missing, or data is empty or damaged beyond ``max_bad_share``.
    """
    source = PairSource(path=source) if isinstance(source, str) else source
    if dataset is not None:
        return _apply_limit(_standardise(dataset, source), source)
    if source.streaming and (elsewhere := list_addresses(source.path)) is not None:
        return _apply_limit(_load_shards(source, elsewhere), source)
    form, paths = locate(source)
    if isinstance(metadata, list) and form != "captions":
        raise XcompatError(f"{source.path} has no captions table, so --metadata does not apply; remove --metadata")
    load: dict[str, Callable[[PairSource, list[Path]], AnyDataset]] = {
        "webdataset": _load_shard_files,
        "captions": partial(_load_captions, metadata=metadata),
        "images": _load_images,
        "market1501": _load_images,
        "list": _load_list,
        "cifar": _load_cifar,
        "parquet": _load_parquet,
        "datasets": _load_datasets,
    }
    return _apply_limit(load[form](source, paths), source)


def _load_shard_files(source: PairSource, paths: list[Path]) -> AnyDataset:
    return _load_shards(source, _named_files(paths, SHARD_SUFFIXES))


def _named_files(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """List the files with a suffix, and print a notice about others in their folders."""
    files = files_with(paths, suffixes)
    for folder in filter(Path.is_dir, paths):
        notice_unread(folder, files)
    return files


def _load_shards(source: PairSource, shards: Sequence[str | Path]) -> AnyDataset:
    label = source.label_column or (CLASS_MEMBER if source.labels else None)
    columns = ShardColumns(
        source.image_column, source.caption_column, source.id_column, label, source.camera_column, with_caption=source.captions
    )
    columns = replace(columns, index_label=_labels_are_indices(shards, columns))
    features = _features(source, "int64" if columns.index_label else "string")
    if source.streaming:
        arguments = {"shards": list(shards), "columns": columns, "total": len(shards), "max_bad_share": source.max_bad_share}
        return datasets.IterableDataset.from_generator(stream_rows, features, gen_kwargs=arguments)
    problems = Problems(source.max_bad_share, len(shards))
    rows = islice(read_rows(shards, columns, problems), source.limit)
    key = {
        "shards": file_stamps(shards),
        "columns": asdict(columns),
        "max_bad_share": source.max_bad_share,
        "limit": source.limit,
    }
    return _load_cached("shards", key, rows, source, features, problems)


def _labels_are_indices(shards: Sequence[str | Path], columns: ShardColumns) -> bool:
    """Return whether ``.cls`` contains indices, judged by the first label."""
    if columns.label != CLASS_MEMBER:
        return False
    only_label = replace(columns, with_image=False, with_caption=False)
    first = next(read_rows(shards, only_label, Problems(max_bad_share=1, total_shards=len(shards))), None)
    return first is None or first[LABEL].removeprefix("-").isdecimal()


def _load_captions(source: PairSource, paths: list[Path], metadata: bool | list[str] = False) -> AnyDataset:
    files = captions_files(paths)
    require_one_captions_file(paths)
    if not files:
        name = "captions" if source.captions else "labels"
        raise XcompatError(f"{paths[0]}: no {name}.csv, {name}.tsv or {name}.jsonl there; check the path or the format")
    problems = Problems()
    rows = (row for file in files for row in read_captions(file, source, metadata, problems))
    return _load_files("captions", files, [], rows, source, metadata, problems)


def _load_images(source: PairSource, paths: list[Path]) -> AnyDataset:
    if source.captions:
        raise XcompatError(f"{paths[0]}: images without captions; add captions.csv (image, caption) or set captions: false")
    listed = image_files(paths)
    named_so = source.format == "market1501"
    rows = read_market1501(listed, source) if named_so else read_images(listed, paths, source)
    return _load_files("images", paths, [name for _, name in listed], rows, source)


def _load_list(source: PairSource, paths: list[Path]) -> AnyDataset:
    if source.captions:
        raise XcompatError(
            f"{paths[0]}: a list of images has no captions; write images and captions into a CSV file, or set captions: false"
        )
    files = files_with(paths, TEXT_SUFFIXES)
    return _load_files("list", files, [], (row for file in files for row in read_list_rows(file, source)), source)


def _load_cifar(source: PairSource, paths: list[Path]) -> AnyDataset:
    if source.captions:
        raise XcompatError(f"{paths[0]}: CIFAR has no captions; set captions: false")
    files = files_with(paths, (SUFFIX,))
    version = cifar_version(files)
    label = version.label(source.label_column)
    names = version.class_names(files[0], label)
    features = _features(source, "int64")
    if source.with_labels and names is not None:
        features[LABEL] = datasets.ClassLabel(names=names)
    rows = read_cifar(files, version, label)
    kept = rows if source.with_labels else ({name: row[name] for name in (IMAGE, ID)} for row in rows)
    key = {"files": file_stamps(files), "label": label, "names": names, "labels": source.with_labels}
    dataset = _load_cached("cifar", key, kept, source, features, Problems())
    return dataset.to_iterable_dataset() if source.streaming else dataset


def _load_files(
    kind: str,
    files: list[Path],
    names: list[str],
    rows: Iterable[dict[str, object]],
    source: PairSource,
    metadata: bool | list[str] = False,
    problems: Problems | None = None,
) -> AnyDataset:
    # changed images need no rebuild, as only their paths are stored
    key = {"files": file_stamps(files), "names": names, "source": source.model_dump(exclude={"streaming", "limit"})}
    if isinstance(metadata, list):
        key["metadata"] = metadata
    dataset = _load_cached(kind, key, rows, source, _features(source, "string", bool(metadata)), problems or Problems())
    return dataset.to_iterable_dataset() if source.streaming else dataset


def _features(source: PairSource, label_type: str, metadata: bool = False) -> datasets.Features:
    columns: dict[str, Any] = {IMAGE: datasets.Image(decode=False), ID: datasets.Value("string")}
    if source.captions:
        columns[CAPTION] = datasets.List(datasets.Value("string"))
    if source.with_labels:
        columns[LABEL] = datasets.Value(label_type)
    if source.with_cameras:
        columns[CAMERA] = datasets.Value("string")
    if metadata:
        columns[METADATA] = datasets.Value("string")
    return datasets.Features(columns)


def _load_cached(
    kind: str,
    key: Mapping[str, object],
    rows: Iterable[dict[str, object]],
    source: PairSource,
    features: datasets.Features,
    problems: Problems,
) -> datasets.Dataset:
    """Read rows into the cache if needed, and print notices about skipped ones."""

    def build(record: dict[str, object]) -> Iterator[pa.RecordBatch]:
        yield from rows_to_batches(_require_distinct_ids(rows, source), features.arrow_schema)
        record["skipped"] = problems.lines()

    dataset, record = cached_dataset(kind, key, features, build)
    for line in record.get("skipped", []):
        notice(line)
    return dataset


def _require_distinct_ids(rows: Iterable[dict[str, Any]], source: PairSource) -> Iterator[dict[str, Any]]:
    """Raise if samples share an id by chance, e.g. 0001.jpg in two folders: each would count as a hit."""
    seen: set[int] = set()  # hashes take less memory than names
    for row in rows:
        if source.id_column is None:
            if hash(row[ID]) in seen:
                raise XcompatError(
                    f"{source.path}: two samples have the id {row[ID]!r}; set id_column to a column with unique ids, "
                    "or load folders and shards with distinct names"
                )
            seen.add(hash(row[ID]))
        yield row


def _load_parquet(source: PairSource, paths: list[Path]) -> AnyDataset:
    files = _named_files(paths, (".parquet",))
    dataset = _read_parquet(files, source.streaming)
    column = source.image_column or next((name for name in EXTRA_IMAGE_COLUMNS if name in (dataset.column_names or [])), "")
    feature = (dataset.features or {}).get(column)
    if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
        features = dataset.features
        folders = [(folder, list(inside)) for folder, inside in groupby(files, lambda file: str(file.parent.resolve()))]
        parts = [dataset] if len(folders) == 1 else [_read_parquet(inside, source.streaming, features) for _, inside in folders]
        dataset = datasets.concatenate_datasets(
            [  # paths in a table are relative to the table
                part.map(_make_paths_absolute, features=features, batched=True, fn_kwargs={"column": column, "folder": folder})
                for part, (folder, _) in zip(parts, folders, strict=True)
            ]
        )
    return _standardise(dataset, source)


def _read_parquet(files: list[Path], streaming: bool, features: datasets.Features | None = None) -> AnyDataset:
    """Read Parquet files in order, with the types of the first by default."""
    try:
        names = [str(file) for file in files]
        return datasets.load_dataset("parquet", data_files=names, split="train", streaming=streaming, features=features)
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise XcompatError(
            f"{files[0]} (of {len(files)} Parquet files) cannot be read: {reason}; recreate it with the command that wrote it"
        ) from error


def _make_paths_absolute(batch: dict[str, list[Any]], column: str, folder: str) -> dict[str, list[object]]:
    return {column: [None if path is None else str(Path(folder, path)) for path in batch[column]]}


def _load_datasets(source: PairSource, paths: list[Path]) -> AnyDataset:
    return _standardise(load_raw(source, paths, source.streaming), source)


def load_raw(source: DataSource, paths: list[Path], streaming: bool = False) -> AnyDataset:
    """Load a saved or Hub data set with its own columns.

    Args:
        source: path, configuration, split and revision.
        paths: the local folder; empty for the Hub.
        streaming: read without random access.

    Returns:
        A single split.

    Raises:
        XcompatError: it does not exist, or has several splits and none is chosen.
    """
    if not paths:
        return _from_hub(source, streaming)
    dataset = _load_saved(source, paths[0])
    return dataset.to_iterable_dataset() if streaming else dataset


def _load_saved(source: DataSource, folder: Path) -> datasets.Dataset:
    refuse_hub_fields(source.path, name=source.name, revision=source.revision)
    if not is_saved_dataset(folder):
        raise XcompatError(f"{folder} was not written by datasets.save_to_disk; check the path or the format")
    try:
        saved = datasets.load_from_disk(str(folder))
        for part in saved.values() if isinstance(saved, datasets.DatasetDict) else (saved,):
            part.data.table.validate(full=True)  # invalid offsets would crash the process, invalid texts an epoch
    except Exception as error:  # JSON, types and Arrow files raise different errors
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise XcompatError(
            f"{folder} cannot be read ({describe_error(error)}); recreate it with the command that wrote it"
        ) from error
    if isinstance(saved, datasets.DatasetDict):
        return _one_split(dict(saved), source)
    refuse_hub_fields(source.path, split=source.split)
    return saved


def _from_hub(source: DataSource, streaming: bool) -> AnyDataset:
    try:
        loaded = datasets.load_dataset(
            str(source.path), source.name, split=source.split, revision=source.revision, streaming=streaming
        )
    except (OSError, ValueError, RuntimeError) as error:  # offline, unknown name, split, configuration or revision
        reason = str(error).splitlines()[0]
        raise XcompatError(f"{source.path} is neither a local path nor a data set that loads from the Hub: {reason}") from error
    return loaded if source.split else _one_split(dict(loaded), source)


def _one_split(splits: dict[str, AnyDataset], source: DataSource) -> AnyDataset:
    if source.split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if source.split not in splits:
        which = nearest(source.split, splits) if source.split else f"set split to one of {', '.join(splits)}"
        raise XcompatError(f"{source.path} has no split {source.split!r}; {which}" if source.split else f"{source.path}: {which}")
    return splits[source.split]


def _standardise(dataset: AnyDataset, source: PairSource) -> AnyDataset:
    from xcompat.data.ids import require_ids

    if isinstance(dataset, datasets.IterableDataset) and dataset.features is None:
        dataset = dataset._resolve_features()  # reads one batch, as casting needs the types
    wanted = (source.image_column, source.caption_column, source.id_column, source.label_column, source.camera_column)
    if nested := [name for name in wanted if name and "." in name and name not in dataset.column_names]:
        if isinstance(dataset, datasets.IterableDataset):
            raise XcompatError(f"{source.path}: nested columns ({nested[0]}) do not work with streaming; set streaming to false")
        dataset = dataset.flatten()  # nested columns become ``outer.inner``
    picked = _map_columns(dataset, source)
    dataset = dataset.select_columns(list(picked.values()))
    dataset = dataset.rename_columns({old: new for new, old in picked.items() if old != new})
    dataset = dataset.cast_column(IMAGE, datasets.Image(decode=False))
    if CAMERA in picked:
        dataset = dataset.cast_column(CAMERA, datasets.Value("string"))
    if ID in picked:
        if isinstance(dataset, datasets.Dataset):
            require_ids(dataset, picked[ID], source)
        return dataset.cast_column(ID, datasets.Value("string"))
    if isinstance(dataset, datasets.Dataset):
        # labelled queries skip the gallery image with their id, so row numbers must differ between splits
        whose = "/".join([str(source.path), *filter(None, (source.name, source.split)), ""]) if source.labels else ""
        return dataset.add_column(ID, [f"{whose}{row}" for row in range(len(dataset))])
    return dataset


def _map_columns(dataset: AnyDataset, source: PairSource) -> dict[str, str]:
    """Return wanted column -> its name in the data set."""
    columns, where = list(dataset.column_names), str(source.path)
    typed = tuple(name for name, feature in (dataset.features or {}).items() if isinstance(feature, datasets.Image))
    picked = {IMAGE: pick_column(source.image_column, (*typed, *EXTRA_IMAGE_COLUMNS), columns, "image_column", where)}
    if source.captions:
        picked[CAPTION] = pick_column(source.caption_column, EXTRA_CAPTION_COLUMNS, columns, "caption_column", where)
    if source.with_labels:
        classes = [name for name, feature in (dataset.features or {}).items() if isinstance(feature, datasets.ClassLabel)]
        known = (*LABEL_COLUMNS, *(classes if len(classes) == 1 else ()))  # several, e.g. coarse and fine, are ambiguous
        picked[LABEL] = pick_column(source.label_column, known, columns, "label_column", where)
    if source.camera_column:
        picked[CAMERA] = pick_column(source.camera_column, (), columns, "camera_column", where)
    if source.id_column or ID in columns:
        picked[ID] = pick_column(source.id_column, (ID,), columns, "id_column", where)
    return picked


def _apply_limit(dataset: AnyDataset, source: PairSource) -> AnyDataset:
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.take(source.limit) if source.limit else dataset
    if not len(dataset):
        raise XcompatError(f"{source.path} contains no samples; check the path and the split")
    return dataset.select(range(min(source.limit, len(dataset)))) if source.limit else dataset
