"""Models as functions of Arrow tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.data.schema import IMAGE
from xcompat.embeddings.embed import Contents, embed_contents
from xcompat.encoders import EncoderSource
from xcompat.engines.models import NamedModel, describe_output, loaded_by_name, with_absolute_path
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.retrieval.items import checked_embeddings
from xcompat.stores.mapping import Mapping
from xcompat.vectors.formats import EMBEDDING_COLUMNS, SCALE
from xcompat.vectors.tables import rows_of_batch

if TYPE_CHECKING:
    import pyarrow as pa

Reads = Literal["vectors", "texts", "images"]
"""Kind of input: old vectors, texts, or images (bytes, paths, or both as in ``datasets``)."""
Dtype = Literal["float32", "float16"]
EMBEDDING = EMBEDDING_COLUMNS[0]
ROWS: dict[Reads, int] = {"vectors": 8192, "texts": 8192, "images": 512}
"""Rows per block. Equal blocks give equal bits."""


@dataclass(frozen=True)
class TableModel:
    """Function over Arrow tables that maps or embeds a column. It pickles as the model's name and loads it on first use.

    Args:
        source: the model, with the same files or Hub repository on every machine.
        reads: kind of input.
        column: input column.
        made: expected fingerprint.
        dim: D, output dimension.
        dtype: output dtype. It computes in float32.

    Example:
        ``ray.data.read_parquet(uri).map_batches(TableModel.open("runs/fct", "vectors"), batch_format="pyarrow")``
    """

    source: EncoderSource
    reads: Reads
    column: str
    made: Fingerprint
    dim: int
    dtype: Dtype = "float32"

    @classmethod
    def open(cls, model: str | EncoderSource, reads: Reads, column: str | None = None, dtype: Dtype = "float32") -> Self:
        """Load a model once on the CPU to read its fingerprint and dimension.

        Args:
            model: run folder, checkpoint or model name. For ``vectors`` it must map galleries.
            reads: kind of input.
            column: input column, default ``embedding``, ``text`` or ``image``.
            dtype: output dtype.

        Returns:
            The function.

        Raises:
            XcompatError: the model does not exist or does not fit the input.
        """
        source = with_absolute_path(EncoderSource(name=model) if isinstance(model, str) else model)
        known = {"vectors": EMBEDDING, "texts": "text", "images": IMAGE}
        loaded = loaded_by_name(source, reads == "vectors")
        _require_towers(loaded, reads)
        return cls(source, reads, column or known[reads], *describe_output(loaded), dtype)

    @property
    def field(self) -> pa.Field:
        """Return the output field: ``embedding``, lists of D numbers."""
        return pa.field(EMBEDDING, pa.list_(pa.float32() if self.dtype == "float32" else pa.float16(), self.dim))

    @property
    def texts_cut(self) -> int:
        """Return the number of texts truncated so far in this process."""
        model = self._model()
        return model.processor.count_truncated if isinstance(model, Embedder) else 0

    def __call__(self, table: pa.Table) -> pa.Table:
        """Map or embed a column.

        Args:
            table: N rows. Other columns stay.

        Returns:
            The table with a new ``embedding`` column: (N, D), L2-normalised, null for unreadable images.

        Raises:
            XcompatError: the column is missing or unsuitable, a row is empty, or a vector or embedding is not usable.
            FingerprintMismatchError: this machine has another model under the name.
        """
        if self.column not in table.column_names:
            raise XcompatError(f"there is no column {self.column!r}; {nearest(self.column, table.column_names)}")
        model = self._model()
        read = [self.column, *([SCALE] if SCALE in table.column_names and self.reads == "vectors" else [])]
        made, before = list[pa.Array](), 0
        for batch in table.select(read).combine_chunks().to_batches(max_chunksize=ROWS[self.reads]):
            unread_N = np.zeros(len(batch), bool)
            if isinstance(model, Mapping):
                embeds_ND = self._map_batch(model, batch, before)
            else:
                rows = self._fill_nulls(batch.column(0), before).to_pylist()
                names = [f"row {before + row + 1:,} of column {self.column!r}" for row in range(len(rows))]
                embedded = embed_contents(model, Contents(rows, names if self.reads == "images" else None))
                embeds_ND = embedded.embeds_ND
                unread_N = np.array([name in embedded.unread for name in names], bool)
                for name, reason in embedded.unread.items():
                    notice(f"skipped {name}: {reason}")
            made.append(self._as_arrow(embeds_ND, unread_N, before))
            before += len(batch)
        column, place = pa.chunked_array(made, self.field.type), table.schema.get_field_index(EMBEDDING)
        return table.append_column(self.field, column) if place < 0 else table.set_column(place, self.field, column)

    def _model(self) -> Mapping | Embedder:
        model = NamedModel(self.source, self.made, maps=self.reads == "vectors").load()
        return model if isinstance(model, Embedder) else Mapping(model)

    def _map_batch(self, mapping: Mapping, batch: pa.RecordBatch, before: int) -> NDArray[np.float32]:
        where, dim = f"column {self.column!r}", mapping.model.config.old["dim"]
        missing = np.flatnonzero(batch.column(0).is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            raise XcompatError(f"row {before + missing[0] + 1:,} of {where} has no embedding; remove such rows")
        rows_ND = rows_of_batch(where, before + 1, batch.rename_columns([EMBEDDING, *batch.schema.names[1:]]))
        if rows_ND.shape[1] != dim:
            raise XcompatError(f"{where} has {rows_ND.shape[1]} dimensions, but {self.source.name} maps vectors with {dim}")
        rows_ND = rows_ND.astype(np.float32, copy=not rows_ND.flags.writeable)
        return mapping(checked_embeddings(rows_ND, "cosine", lambda row: f"{where} row {before + row + 1:,}"))

    def _fill_nulls(self, column: pa.Array, before: int) -> pa.Array:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind_of(kind) not in {"texts": ("text",), "images": ("text", "image")}[self.reads]:
            raise XcompatError(f"column {self.column!r} has type {kind}, not {self.reads}; choose another column")
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise XcompatError(f"column {self.column!r} row {before + row + 1:,} has nothing to embed; remove such rows")
        return column

    def _as_arrow(self, embeds_ND: NDArray[np.float32], unread_N: NDArray[np.bool_], before: int) -> pa.Array:
        wrong = np.flatnonzero(~np.isfinite(embeds_ND).all(axis=1) & ~unread_N)
        if len(wrong):
            raise XcompatError(
                f"column {self.column!r} row {before + int(wrong[0]) + 1:,}: the embedding by {self.made.name} is "
                "not finite; remove such rows or fix the model"
            )
        values = pa.array(np.ascontiguousarray(embeds_ND, self.dtype).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(values, self.dim, mask=pa.array(unread_N) if unread_N.any() else None)


def kind_of(column: pa.DataType) -> Literal["vector", "text", "image", "other"]:
    """Return the kind of content of a column type. Text can be image paths."""
    types = pa.types
    if types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        return "vector"
    if types.is_string(column) or types.is_large_string(column):
        return "text"
    of_bytes = types.is_struct(column) and column.get_field_index("bytes") >= 0
    return "image" if of_bytes or types.is_binary(column) or types.is_large_binary(column) else "other"


def _require_towers(model: CompatModel | Embedder, reads: Reads) -> None:
    """Raise if a model does not support the input."""
    if not isinstance(model, Embedder):
        Mapping(model)
    elif reads == "images":
        model.processor.require_images()
    elif not model.processor.max_length:
        raise XcompatError(f"{model.name} embeds only images, but the input is texts; choose a model with a text tower")
