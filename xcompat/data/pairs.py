"""Images with captions for training and embedding. Unusable samples are replaced or skipped, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch.utils.data import Dataset, get_worker_info

from xcompat.core.arrays import number_strings
from xcompat.core.distributed import rank
from xcompat.core.errors import XcompatError
from xcompat.core.threads import map_in_rounds, map_in_threads, on_one_core
from xcompat.data.bad_samples import BadSamples
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import CAPTION, CAPTION_NUMBER, ID, IMAGE, INDEX, LABEL, SEED, captions_of

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")


class RowArray(Protocol):
    """Rows indexed by an array of row numbers: a NumPy array, a memory map or a sharded array."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any]:
        """Return rows by number, in the given order."""


class DrawnDataset(Dataset[dict[str, Any]]):
    """Data set with new draws in every epoch, reproducible in resumed runs, workers and processes.

    Draws depend only on seed, epoch and index. ``accelerate`` and the Trainer call :meth:`set_epoch`.

    Args:
        dataset: the rows.
        one_per_id: whether an index is an id, and a row is drawn for it.
        seed: random seed.
    """

    def __init__(self, dataset: datasets.Dataset, one_per_id: bool, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # shared with worker processes that outlive an epoch
        self._rows_of_id = rows_of_ids(dataset) if one_per_id else None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next draws."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Return the number of rows or ids."""
        return len(self.dataset if self._rows_of_id is None else self._rows_of_id)

    def draw_rows(self, indices: Sequence[int]) -> tuple[list[int], list[np.random.Generator]]:
        """Return the row of each index in this epoch, and the generator of its further draws."""
        draws = [np.random.default_rng((self.seed, int(self._epoch), index)) for index in indices]
        if self._rows_of_id is None:
            return list(indices), draws
        return [int(draw.choice(self._rows_of_id[index])) for draw, index in zip(draws, indices, strict=True)], draws


class PairDataset(DrawnDataset):
    """Images with a single caption each.

    Captions and augmentation seeds are drawn as in :class:`DrawnDataset`.

    Args:
        dataset: from `xcompat.data.load_pairs`.
        image_extra: further columns, a row per ``dataset`` row, e.g. memory-mapped old embeddings.
        caption_extra: further columns, a row per caption in `flatten_captions` order.
        embedded: (N,) bool, rows with an embedding in ``image_extra``; None for all. Other rows are unusable.
        one_per_id: draw a single row per id in each pass. Two rows with the same id (e.g. faces of a character) in a
            contrastive batch would be false negatives.
        reads_images: whether to decode images; False if ``image_extra`` has their embeddings.
        seed: random seed.
        bad: counts unusable samples, which are replaced by the next usable sample.

    Raises:
        XcompatError: a column is missing, or a further column has the wrong number of rows.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        image_extra: Mapping[str, RowArray] | None = None,
        caption_extra: Mapping[str, RowArray] | None = None,
        embedded: NDArray[np.bool_] | None = None,
        one_per_id: bool = False,
        reads_images: bool = True,
        seed: int = 0,
        bad: BadSamples | None = None,
    ) -> None:
        pairs = _only_pairs(dataset)
        super().__init__(pairs if reads_images else pairs.remove_columns(IMAGE), one_per_id, seed)
        self.image_extra, self.caption_extra = dict(image_extra or {}), dict(caption_extra or {})
        self.bad = bad or BadSamples(total=len(dataset))
        self.embedded_N = embedded
        self._first_caption = _caption_offsets(self.dataset) if self.caption_extra else None
        n_captions = int(self._first_caption[-1]) if self._first_caption is not None else 0
        for extra, rows in ((self.image_extra, len(dataset)), (self.caption_extra, n_captions)):
            for name, array in extra.items():
                if len(array) != rows:
                    raise XcompatError(f"{name} has {len(array)} rows, the data set {rows}; embed this data set again")

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``{image: PIL RGB, caption: str, index: its row, ...}``."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, object]]:
        """Return the items of a batch with a single read, for data loaders."""
        rows, draws = self.draw_rows(indices)
        columns = self.dataset[rows]
        items = [
            self._load_usable({name: values[place] for name, values in columns.items()}, row, draw)
            for place, (row, draw) in enumerate(zip(rows, draws, strict=True))
        ]
        kept = np.array([item[INDEX] for item in items], dtype=np.int64)
        for name, array in self.image_extra.items():
            for item, values in zip(items, array[kept], strict=True):
                item[name] = values
        for name, array in self.caption_extra.items():
            assert self._first_caption is not None
            numbers = np.array([item[CAPTION_NUMBER] for item in items])
            for item, values in zip(items, array[self._first_caption[kept] + numbers], strict=True):
                item[name] = values
        return items

    def _load_usable(self, record: dict[str, Any], row: int, draw: np.random.Generator) -> dict[str, object]:
        """Return the sample of a row, or of the next usable row."""
        for step in range(len(self.dataset)):
            other = (row + step) % len(self.dataset)
            record = record if step == 0 else self.dataset[other]
            try:
                if self.embedded_N is not None and not self.embedded_N[other]:
                    raise UnusableSampleError("it could not be read when it was embedded")
                return _item(record, other, draw)
            except UnusableSampleError as error:
                self.bad.add(record.get(ID, str(other)), str(error))
        raise XcompatError(f"none of {len(self.dataset)} samples can be used; check the data set")


def rows_of_ids(dataset: datasets.Dataset) -> list[NDArray[np.int64]]:
    """Return the rows of each id, sorted by id."""
    if ID not in dataset.column_names:
        raise XcompatError(f"one_per_id needs the column {ID!r}; set id_column")
    _, codes_N = number_strings(dataset[ID][:])
    return np.split(np.argsort(codes_N, kind="stable"), np.cumsum(np.bincount(codes_N))[:-1])


def _caption_offsets(dataset: datasets.Dataset) -> NDArray[np.int64]:
    """Return the number of captions before each row, (N + 1,)."""
    if CAPTION not in dataset.column_names:
        raise XcompatError(f"columns by caption need the column {CAPTION!r}; load with captions: true")
    batches = dataset.select_columns([CAPTION]).iter(4096)
    return np.cumsum([0, *(len(captions_of(value)) for batch in batches for value in batch[CAPTION])])


def _only_pairs(dataset: datasets.Dataset) -> datasets.Dataset:
    """Keep the columns of a pair. Undecoded images cannot fail a batch."""
    import datasets as hf

    if IMAGE not in dataset.column_names:
        has = ", ".join(dataset.column_names)
        raise XcompatError(f"the data set has no column {IMAGE!r} (it has {has}); load it with load_pairs")
    dataset = dataset.with_format(None).select_columns([c for c in (IMAGE, CAPTION, ID, LABEL) if c in dataset.column_names])
    return dataset if dataset.features[IMAGE] == hf.Image(decode=False) else dataset.cast_column(IMAGE, hf.Image(decode=False))


def _item(record: dict[str, Any], row: int, draw: np.random.Generator) -> dict[str, object]:
    item: dict[str, Any] = {IMAGE: open_image(record[IMAGE])} if IMAGE in record else {}
    item |= {INDEX: row, SEED: int(draw.integers(2**62))}
    if CAPTION in record:
        captions = captions_of(record[CAPTION])
        if not captions:
            raise UnusableSampleError("it has no caption")
        item[CAPTION_NUMBER] = int(draw.integers(len(captions)))
        item[CAPTION] = captions[item[CAPTION_NUMBER]]
    if LABEL in record:
        item[LABEL] = record[LABEL]
    return item


def iterate_images(
    dataset: datasets.Dataset,
    batch_size: int = 256,
    *,
    rows: Sequence[int] | None = None,
    bad: BadSamples | None = None,
    draw: Callable[[Image, str], Any] | None = None,
    prepare: Callable[[list[Any]], T] = list,  # type: ignore[assignment]  # the images unchanged
    threads: int = 1,
    ahead: bool = True,
) -> Iterator[tuple[NDArray[np.int64], T]]:
    """Read images in order, skipping unreadable ones.

    Reading, decoding and resizing release the GIL, so threads can keep up with a model.

    Args:
        dataset: from `xcompat.data.load_pairs`.
        batch_size: rows per read. Unreadable images shorten a batch.
        rows: row numbers, in this order; None to use all.
        bad: counts skipped images.
        draw: applied in threads to each RGB image and its id, e.g. to draw a view.
        prepare: applied in threads to a batch of RGB or drawn images, e.g. a processor's ``images``.
        threads: number of batches decoded in parallel.
        ahead: decode the next batches while the caller works; not useful for a model on CPU.

    Yields:
        ``(rows, images)``: row numbers and prepared images, never empty.

    Raises:
        XcompatError: too many images are unreadable.
    """
    bad = bad or BadSamples(total=len(dataset))
    dataset = _only_pairs(dataset)
    dataset = dataset.select_columns([c for c in (IMAGE, ID) if c in dataset.column_names])
    wanted = np.arange(len(dataset)) if rows is None else np.asarray(rows, dtype=np.int64)
    batches = (wanted[start : start + batch_size] for start in range(0, len(wanted), batch_size))

    def decode(read: tuple[NDArray[np.int64], dict[str, list[Any]]]) -> tuple[NDArray[np.int64], T | None, dict[str, str]]:
        batch, columns = read
        kept, images, reasons = [], [], {}
        for place, row in enumerate(batch.tolist()):
            name = columns[ID][place] if ID in columns else str(row)
            try:
                image = open_image(columns[IMAGE][place])
            except UnusableSampleError as error:
                reasons[name] = str(error)
                continue
            images.append(image if draw is None else draw(image, name))
            kept.append(row)
        return np.array(kept, dtype=np.int64), prepare(images) if images else None, reasons

    spread = map_in_threads if ahead else map_in_rounds
    decode_batch = on_one_core(decode) if threads > 1 else decode
    for kept, images, reasons in spread(decode_batch, ((batch, dataset[batch]) for batch in batches), threads):
        for sample_id, reason in reasons.items():
            bad.add(sample_id, reason)
        if images is not None:
            yield kept, images


def flatten_captions(dataset: datasets.Dataset) -> tuple[list[str], list[str]]:
    """Return all images' captions, for evaluation.

    Args:
        dataset: from `xcompat.data.load_pairs`.

    Returns:
        ``(texts, ids)``: captions in order, and the image id of each.
    """
    texts: list[str] = []
    ids: list[str] = []
    for batch in dataset.select_columns([CAPTION, ID]).with_format(None).iter(4096):
        for value, sample_id in zip(batch[CAPTION], batch[ID], strict=True):
            captions = captions_of(value)
            texts.extend(captions)
            ids.extend([sample_id] * len(captions))
    return texts, ids


def stream_pairs(
    dataset: datasets.IterableDataset,
    *,
    shuffle_buffer: int = 0,
    passes: int | None = 1,
    seed: int = 0,
    bad: BadSamples | None = None,
) -> datasets.IterableDataset:
    """Convert a stream of undecoded pairs to training items, skipping unreadable images.

    Draws depend on seed, process, worker and stream position. A resumed run replays the stream, so its draws are the same.

    Args:
        dataset: streaming data set from `xcompat.data.load_pairs`.
        shuffle_buffer: size of the shuffle buffer; 0 keeps the order.
        passes: number of passes, in the same order with new draws; None for no limit.
        seed: random seed. Shuffling also depends on the epoch (``set_epoch``).
        bad: counts skipped images.

    Returns:
        A stream of ``{image: PIL RGB, caption: str, ...}``, split over workers and processes by ``datasets``.
    """
    if shuffle_buffer:
        dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
    # Repeat after shuffling: a buffer across passes could put an image into a batch twice, a false negative.
    # Decode after repeating: stream positions continue over the passes.
    decode = partial(_decode_batch, bad or BadSamples(), (seed, rank()))
    return dataset.repeat(passes).map(decode, with_indices=True, batched=True, batch_size=16)


def _decode_batch(
    bad: BadSamples, seeds: tuple[int, int], columns: dict[str, list[Any]], places: Sequence[int]
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {name: [] for name in (*columns, SEED)}
    loader = get_worker_info()
    worker = 0 if loader is None else loader.id
    for row, place in enumerate(places):
        record = {name: values[row] for name, values in columns.items()}
        draw = np.random.default_rng((*seeds, worker, place))
        bad.seen += 1
        try:
            item = _item(record, row, draw)
        except UnusableSampleError as error:
            bad.add(record.get(ID, f"sample {bad.seen}"), str(error))
            continue
        for name, values in out.items():
            values.append(item[name] if name in item else record[name])
    return out
