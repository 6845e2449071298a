"""A model as a function from Arrow tables to Arrow tables, which engines send to other processes and machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.data.schema import IMAGE
from xcompat.embeddings.embed import Contents, embed_contents
from xcompat.encoders import EncoderSource
from xcompat.engines.models import NamedModel, anywhere, loaded_by_name, makes
from xcompat.models.base import CompatModel
from xcompat.models.embedder import Embedder
from xcompat.retrieval.items import checked_embeddings
from xcompat.stores.mapping import Mapping
from xcompat.vectors import EMBEDDING_COLUMNS, SCALE, rows_of_batch

if TYPE_CHECKING:
    import pyarrow as pa

Reads = Literal["vectors", "texts", "images"]
"""What a model is given: an old model's vectors, texts, or pictures (bytes, paths, or both as ``datasets`` stores them)."""
Dtype = Literal["float32", "float16"]
EMBEDDING = EMBEDDING_COLUMNS[0]
ROWS: dict[Reads, int] = {"vectors": 8192, "texts": 8192, "images": 512}
"""Rows that a model is given at a time: the same rows in the same blocks give the same bits."""


@dataclass(frozen=True)
class TableModel:
    """A model as a function of Arrow tables; it pickles as the model's name, and loads the model where it is first called.

    Args:
        source: the model; every machine must find the same files, or the same repository of the Hub, under its name.
        reads: what the column holds.
        column: what is read of a table.
        made: what it makes; a machine that finds another model under the name refuses.
        dim: D, of what it makes.
        dtype: of what it makes. It always computes in float32, also from float16.

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
        """Load a model once, on the CPU, to learn what it makes.

        Args:
            model: a run's folder, a checkpoint, or any model by name. For ``vectors`` it maps galleries.
            reads: what the column holds.
            column: its name; ``embedding``, ``text`` or ``image`` unless given.
            dtype: of what is made.

        Returns:
            The function.

        Raises:
            XcompatError: there is no such model, or it does not take what the column holds.
        """
        source = anywhere(EncoderSource(name=model) if isinstance(model, str) else model)
        known = {"vectors": EMBEDDING, "texts": "text", "images": IMAGE}
        loaded = loaded_by_name(source, reads == "vectors")
        _require_towers(loaded, reads)
        return cls(source, reads, column or known[reads], *makes(loaded), dtype)

    @property
    def field(self) -> pa.Field:
        """Return the column that it makes: ``embedding``, lists of D numbers."""
        import pyarrow as pa

        return pa.field(EMBEDDING, pa.list_(pa.float32() if self.dtype == "float32" else pa.float16(), self.dim))

    @property
    def texts_cut(self) -> int:
        """Return how many texts were too long for the model so far, in this process."""
        model = self._model()
        return model.processor.count_truncated if isinstance(model, Embedder) else 0

    def __call__(self, table: pa.Table) -> pa.Table:
        """Map or embed a column.

        Args:
            table: N rows; its other columns may be anything.

        Returns:
            The table with the column ``embedding``, which replaces one of this name: (N, D), L2-normalised. A picture that cannot
            be read has none.

        Raises:
            XcompatError: the column is missing or of another kind, or a row has nothing in it, or a vector that is not finite,
                zero, or of another length than the model takes, or the model makes something that is not finite of it.
            FingerprintMismatchError: another model lies here under the name.
        """
        import pyarrow as pa

        if self.column not in table.column_names:
            raise XcompatError(f"there is no column {self.column!r}; {nearest(self.column, table.column_names)}")
        model = self._model()
        read = [self.column, *([SCALE] if SCALE in table.column_names and self.reads == "vectors" else [])]
        made, before = list[pa.Array](), 0
        for batch in table.select(read).combine_chunks().to_batches(max_chunksize=ROWS[self.reads]):
            unread_N = np.zeros(len(batch), bool)
            if isinstance(model, Mapping):
                embeds_ND = self._mapped(model, batch, before)
            else:
                rows = self._filled(batch.column(0), before).to_pylist()
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

    def _mapped(self, mapping: Mapping, batch: pa.RecordBatch, before: int) -> NDArray[np.float32]:
        where, dim = f"column {self.column!r}", mapping.model.config.old["dim"]
        missing = np.flatnonzero(batch.column(0).is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            raise XcompatError(f"row {before + missing[0] + 1:,} of {where} has no embedding; leave such rows out")
        rows_ND = rows_of_batch(where, before + 1, batch.rename_columns([EMBEDDING, *batch.schema.names[1:]]))
        if rows_ND.shape[1] != dim:
            raise XcompatError(
                f"{where} has vectors of {rows_ND.shape[1]} dimensions, and {self.source.name} maps those of {dim}"
            )
        rows_ND = rows_ND.astype(np.float32, copy=not rows_ND.flags.writeable)
        return mapping(checked_embeddings(rows_ND, "cosine", lambda row: f"{where} row {before + row + 1:,}"))

    def _filled(self, column: pa.Array, before: int) -> pa.Array:
        import pyarrow as pa

        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind_of(kind) not in {"texts": ("text",), "images": ("text", "image")}[self.reads]:
            raise XcompatError(f"column {self.column!r} is {kind}, which holds no {self.reads}; name another")
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise XcompatError(f"column {self.column!r} row {before + row + 1:,} has nothing to embed; leave such rows out")
        return column

    def _as_arrow(self, embeds_ND: NDArray[np.float32], unread_N: NDArray[np.bool_], before: int) -> pa.Array:
        import pyarrow as pa

        wrong = np.flatnonzero(~np.isfinite(embeds_ND).all(axis=1) & ~unread_N)
        if len(wrong):
            raise XcompatError(
                f"column {self.column!r} row {before + int(wrong[0]) + 1:,}: {self.made.name} makes an embedding of it that is "
                "not finite; leave such rows out, or mend the model"
            )
        values = pa.array(np.ascontiguousarray(embeds_ND, self.dtype).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(values, self.dim, mask=pa.array(unread_N) if unread_N.any() else None)


def kind_of(column: pa.DataType) -> Literal["vector", "text", "image", "other"]:
    """Tell what a column holds by its type; text may be paths of pictures."""
    import pyarrow as pa

    types = pa.types
    if types.is_list(column) or types.is_large_list(column) or types.is_fixed_size_list(column):
        return "vector"
    if types.is_string(column) or types.is_large_string(column):
        return "text"
    of_bytes = types.is_struct(column) and column.get_field_index("bytes") >= 0
    return "image" if of_bytes or types.is_binary(column) or types.is_large_binary(column) else "other"


def _require_towers(model: CompatModel | Embedder, reads: Reads) -> None:
    """Refuse a model that does not take what a column holds."""
    if not isinstance(model, Embedder):
        Mapping(model)
    elif reads == "images":
        model.processor.require_images()
    elif not model.processor.max_length:
        raise XcompatError(f"{model.name} embeds pictures only, and these are texts; take a model with a text tower")
