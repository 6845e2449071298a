"""Read images and captions for training and embedding; unusable samples are replaced or left out, and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch.utils.data import Dataset, get_worker_info

from xcompat.core.arrays import numbered
from xcompat.core.distributed import rank
from xcompat.core.errors import XcompatError
from xcompat.core.threads import map_in_rounds, map_in_threads, on_one_core
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.problems import BadSamples
from xcompat.data.schema import CAPTION, CAPTION_NUMBER, ID, IMAGE, INDEX, LABEL, SEED, captions_of

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")


class RowArray(Protocol):
    """Rows that can be fetched by an array of row numbers: a NumPy array, a memory map, or several shards of one."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, rows: NDArray[np.int64], /) -> NDArray[Any]:
        """Return rows by number, in the given order."""


class DrawnDataset(Dataset[dict[str, Any]]):
    """Samples of which something is drawn anew in every epoch, the same in a resumed run, in any worker and process.

    A draw depends on seed, epoch and index alone. ``accelerate`` and the Trainer call :meth:`set_epoch`.

    Args:
        dataset: the rows.
        one_per_id: whether an index stands for an id, of whose rows one is drawn.
        seed: of the draws.
    """

    def __init__(self, dataset: datasets.Dataset, one_per_id: bool, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # shared with worker processes that outlive an epoch
        self._rows_of_id = rows_of_ids(dataset) if one_per_id else None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next draws."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Return the number of rows, or of ids."""
        return len(self.dataset if self._rows_of_id is None else self._rows_of_id)

    def drawn(self, indices: Sequence[int]) -> tuple[list[int], list[np.random.Generator]]:
        """Return the row that each index stands for in this epoch, and the generator of its further draws."""
        draws = [np.random.default_rng((self.seed, int(self._epoch), index)) for index in indices]
        if self._rows_of_id is None:
            return list(indices), draws
        return [int(draw.choice(self._rows_of_id[index])) for draw, index in zip(draws, indices, strict=True)], draws


class PairDataset(DrawnDataset):
    """Images with one caption each.

    Caption, augmentation (and, with ``one_per_id``, row) of a sample are drawn as :class:`DrawnDataset` says.

    Args:
        dataset: as `xcompat.data.load_pairs` returns it.
        image_extra: more columns, one row for each row of ``dataset``, such as memory-mapped embeddings of the old model.
        caption_extra: more columns, one row for each caption in the order of `flatten_captions`; an item gets its own.
        embedded: (N,) bool, the rows that have an embedding in ``image_extra``; all if None. Others count as unusable.
        one_per_id: whether an index stands for an id, of whose rows one is drawn. Rows of one id are positives of each other
            (faces of a character, captions of an image), and two of them in one contrastive batch would be false negatives. With
            this option a pass over the data has each id once, on any number of processes.
        seed: of the draws.
        bad: counts unusable samples; each is replaced by the next usable one.

    Raises:
        XcompatError: a column is missing, or an extra column has another number of rows.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        image_extra: Mapping[str, RowArray] | None = None,
        caption_extra: Mapping[str, RowArray] | None = None,
        embedded: NDArray[np.bool_] | None = None,
        one_per_id: bool = False,
        seed: int = 0,
        bad: BadSamples | None = None,
    ) -> None:
        super().__init__(_only_pairs(dataset), one_per_id, seed)
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

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the items of a batch with one read; a data loader calls this."""
        rows, draws = self.drawn(indices)
        columns = self.dataset[rows]
        items = [
            self._usable({name: values[place] for name, values in columns.items()}, row, draw)
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

    def _usable(self, record: dict[str, Any], row: int, draw: np.random.Generator) -> dict[str, Any]:
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
    """List the rows of each id, ids in sorted order."""
    if ID not in dataset.column_names:
        raise XcompatError(f"one_per_id needs the column {ID!r}; set id_column")
    _, codes_N = numbered(dataset[ID][:])
    return np.split(np.argsort(codes_N, kind="stable"), np.cumsum(np.bincount(codes_N))[:-1])


def _caption_offsets(dataset: datasets.Dataset) -> NDArray[np.int64]:
    """Return (N + 1,) the number of captions before each row."""
    if CAPTION not in dataset.column_names:
        raise XcompatError(f"columns by caption need the column {CAPTION!r}; load with captions: true")
    batches = dataset.select_columns([CAPTION]).iter(4096)
    return np.cumsum([0, *(len(captions_of(value)) for batch in batches for value in batch[CAPTION])])


def _only_pairs(dataset: datasets.Dataset) -> datasets.Dataset:
    """Keep the columns of a pair, the image undecoded, so that one damaged image cannot fail a whole batch."""
    import datasets as hf

    if IMAGE not in dataset.column_names:
        has = ", ".join(dataset.column_names)
        raise XcompatError(f"the data set has no column {IMAGE!r} (it has {has}); load it with load_pairs")
    dataset = dataset.with_format(None).select_columns([c for c in (IMAGE, CAPTION, ID, LABEL) if c in dataset.column_names])
    return dataset if dataset.features[IMAGE] == hf.Image(decode=False) else dataset.cast_column(IMAGE, hf.Image(decode=False))


def _item(record: dict[str, Any], row: int, draw: np.random.Generator) -> dict[str, Any]:
    """Decode a record, draw one of its captions and the seed of its augmentation."""
    item: dict[str, Any] = {IMAGE: open_image(record[IMAGE]), INDEX: row, SEED: int(draw.integers(2**62))}
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
    prepare: Callable[[list[Any]], T] = list,  # type: ignore[assignment]  # the pictures unchanged
    threads: int = 1,
    ahead: bool = True,
) -> Iterator[tuple[NDArray[np.int64], T]]:
    """Read images in order, leaving out those that cannot be read.

    Reading, decoding and resizing release Python's lock, so threads are enough to keep up with a model.

    Args:
        dataset: as `xcompat.data.load_pairs` returns it.
        batch_size: rows read at a time; batches without their unreadable images are shorter.
        rows: only these, in this order; all if None.
        bad: counts the images that are left out.
        draw: applied by the threads to each RGB picture with its id, such as what draws a view of it; None for none.
        prepare: applied by the threads to a batch of RGB pictures, or of what is drawn, such as a processor's ``images``.
        threads: number of batches decoded at a time.
        ahead: whether to decode the next batches while the caller works on one; a model on a CPU needs the cores itself.

    Yields:
        ``(rows, images)``: the row numbers that were kept, and their prepared pictures. Never empty.

    Raises:
        XcompatError: more images than allowed cannot be read.
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
                picture = open_image(columns[IMAGE][place])
            except UnusableSampleError as error:
                reasons[name] = str(error)
                continue
            images.append(picture if draw is None else draw(picture, name))
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
    """List every caption of every image, for evaluation.

    Args:
        dataset: as `xcompat.data.load_pairs` returns it.

    Returns:
        ``(texts, ids)``: the captions in order, and for each the id of its image.
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
    """Turn a stream of undecoded pairs into one of training items, leaving out images that cannot be read.

    What is drawn for an item (its caption, its augmentation) depends on seed, process, worker and its place in the stream, so a
    resumed run, which goes through the stream up to where it was, draws the same.

    Args:
        dataset: as `xcompat.data.load_pairs` returns it when streaming.
        shuffle_buffer: samples to shuffle among; 0 keeps the order.
        passes: how often the stream is read, each time in the same order and with other draws; None for without end.
        seed: of the draws, and of the shuffling, which also depends on the epoch (``set_epoch``).
        bad: counts the images that are left out.

    Returns:
        A stream of ``{image: PIL RGB, caption: str, ...}``, split over workers and processes by ``datasets`` itself.
    """
    if shuffle_buffer:
        dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
    # Repeated after shuffling: a buffer across passes would put one image twice into a batch, a false negative. Decoded after
    # repeating: the places go on over the passes.
    decode = partial(_decode_batch, bad or BadSamples(), (seed, rank()))
    return dataset.repeat(passes).map(decode, with_indices=True, batched=True, batch_size=16)


def _decode_batch(
    bad: BadSamples, seeds: tuple[int, int], columns: dict[str, list[Any]], places: Sequence[int]
) -> dict[str, list[Any]]:
    """Decode a batch of a stream, leaving out images that cannot be read."""
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
