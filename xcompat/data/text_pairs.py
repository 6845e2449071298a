"""Text pairs for training: queries, matching passages, and optional mined negatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import datasets
from xcompat.core.progress import notice
from xcompat.data.cache import cached_dataset, file_stamps, rows_to_batches
from xcompat.data.pairs import DrawnDataset, RowArray
from xcompat.data.schema import ID, NEGATIVES, PASSAGE, QUERY, captions_of, is_blank, pick_column
from xcompat.data.sources import TextPairSource
from xcompat.data.texts import iterate_rows, open_rows

if TYPE_CHECKING:
    from xcompat.encoders.processor import Processor

QUERY_COLUMNS = (QUERY, "question", "anchor", "claim", "sentence1")
PASSAGE_COLUMNS = (PASSAGE, "positive", "answer", "document", "context", "text", "sentence2")


def load_text_pairs(source: TextPairSource) -> datasets.Dataset:
    """Load queries with their passages.

    Rows with missing text are skipped, with a notice.

    Args:
        source: the source.

    Returns:
        A memory-mapped data set with columns ``query``, ``passage``, ``negatives`` (a list, empty without ``negative_column``)
        and, with ``id_column``, ``id``.

    Raises:
        XcompatError: data or a column is missing, or data is empty or damaged.
    """
    raw, files = open_rows(source)
    text = datasets.Value("string")
    features = datasets.Features({QUERY: text, PASSAGE: text, NEGATIVES: datasets.List(text)})
    if source.id_column is not None:
        features[ID] = text

    def build(record: dict[str, Any]) -> Iterator[Any]:
        record |= {"read": 0, "kept": 0, "lacking": []}
        yield from rows_to_batches(_pairs(iterate_rows(raw, files), source, record), features.arrow_schema)
        if not record["kept"]:
            raise XcompatError(f"{source.path} contains no text pairs; it needs a query and a passage in each row")

    key = {"source": source.model_dump(), "data": raw._fingerprint if raw is not None else file_stamps(files)}
    dataset, record = cached_dataset("text_pairs", key, features, build)
    if lacking := record["lacking"]:
        notice(f"{len(lacking):,} of {record['read']:,} rows lack a text and are skipped, e.g. {lacking[0]}")
    return dataset


def _pairs(
    rows: Iterator[tuple[str, dict[str, Any]]], source: TextPairSource, record: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for where, row in rows:
        if record["read"] == source.limit:
            return
        record["read"] += 1
        columns = list(row)
        query = pick_column(source.query_column, QUERY_COLUMNS, columns, "query_column", where)
        passage = pick_column(source.passage_column, PASSAGE_COLUMNS, columns, "passage_column", where)
        pair: dict[str, Any] = {
            QUERY: _text(row[query], query, where),
            PASSAGE: _text(row[passage], passage, where),
            NEGATIVES: [],
        }
        if source.negative_column is not None:
            pick_column(source.negative_column, (), columns, "negative_column", where)
            pair[NEGATIVES] = [text for text in captions_of(row[source.negative_column]) if text != pair[PASSAGE]]
        if not (pair[QUERY] and pair[PASSAGE] and (pair[NEGATIVES] or source.negative_column is None)):
            record["lacking"].append(where)
            continue
        if source.id_column is not None:
            if is_blank(value := row[pick_column(source.id_column, (), columns, "id_column", where)]):
                raise XcompatError(f"{where} has no {source.id_column}; fill the column, or remove the row")
            pair[ID] = str(value)
        record["kept"] += 1
        yield pair


def _text(value: object, column: str, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise XcompatError(f"{where}: {column} is {str(value)[:80]!r}, not text; choose another column")
    return (value or "").strip()


class TextPairDataset(DrawnDataset):
    """Queries with a passage and an optional mined negative, drawn as in :class:`DrawnDataset`.

    Args:
        dataset: from :func:`load_text_pairs`.
        extra: further columns, a row per ``dataset`` row, e.g. old embeddings.
        one_per_id: whether an index is an id, and a row is drawn for it.
        seed: random seed.
    """

    def __init__(
        self, dataset: datasets.Dataset, *, extra: Mapping[str, RowArray] | None = None, one_per_id: bool = False, seed: int = 0
    ) -> None:
        super().__init__(dataset, one_per_id, seed)
        self.extra = dict(extra or {})

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return ``{query: str, passage: str, negatives: list of zero or one, ...}``."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, object]]:
        """Return the items of a batch with a single read, for data loaders."""
        rows, draws = self.draw_rows(indices)
        columns = self.dataset[rows]
        items = []
        for place, draw in enumerate(draws):
            negatives = columns[NEGATIVES][place]
            drawn = [negatives[int(draw.integers(len(negatives)))]] if negatives else []
            items.append({QUERY: columns[QUERY][place], PASSAGE: columns[PASSAGE][place], NEGATIVES: drawn})
        for name, array in self.extra.items():
            for item, values in zip(items, array[np.array(rows, dtype=np.int64)], strict=True):
                item[name] = values
        return items


class TextPairCollator:
    """Collator that tokenises and stacks samples of a :class:`TextPairDataset`.

    Args:
        processor: the model's preprocessing. Its query prompt applies only to queries.
    """

    def __init__(self, processor: Processor) -> None:
        self.asking, self.answering = processor.for_queries(), processor

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Make a batch.

        Args:
            items: B samples.

        Returns:
            ``input_ids`` (B, L) of queries, ``passage_input_ids`` and optional ``negative_input_ids``, each with a mask if the
            model takes masks; ``passage_ids`` and ``negative_ids`` (B,) int64, equal for equal texts; extra columns stacked as
            float32.
        """
        batch = dict(self.asking.texts([item[QUERY] for item in items]))
        sides = {"passage": [item[PASSAGE] for item in items], "negative": [text for item in items for text in item[NEGATIVES]]}
        for side, texts in sides.items():
            if texts:
                batch |= {f"{side}_{name}": tensor for name, tensor in self.answering.texts(texts).items()}
                batch[f"{side}_ids"] = torch.from_numpy(hash_texts(texts))
        for name in items[0].keys() - {QUERY, PASSAGE, NEGATIVES}:
            batch[name] = torch.from_numpy(np.stack([item[name] for item in items])).float()
        return batch


def hash_texts(texts: Sequence[str]) -> NDArray[np.int64]:
    """Return an int64 per text, equal for equal texts and in every process."""
    from pandas.util import hash_array

    return hash_array(np.array(texts, dtype=object), categorize=False).view(np.int64)
