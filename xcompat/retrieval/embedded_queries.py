"""Query embeddings from arrays, tables and folders, with their ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import read_lines
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.models.base import CompatModel
from xcompat.retrieval.queries import QueryBlock
from xcompat.vectors import Vectors, check_rows, read_vectors
from xcompat.vectors.checks import BAD_SHARE
from xcompat.vectors.formats import ARRAY, SUFFIXES, find_file, is_table

if TYPE_CHECKING:
    from torch import Tensor

    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.versions import Model

ROWS_AT_ONCE = 1024


class EmbeddedQueries:
    """Query embeddings as output by the model, each with an id.

    Args:
        source: a ``.npy`` file, a table with ids (Parquet, JSON lines, a folder of these), or a folder with ``query_embeds``,
            ``text_embeds`` or ``image_embeds``. The ids of ``q.npy`` are in ``q_ids.txt``, else row numbers.
        max_bad_share: largest share of rows without a usable embedding; these rows are printed and skipped.

    Raises:
        XcompatError: the file is damaged, without embeddings, or too many rows are unusable.
    """

    def __init__(self, source: str | Path, max_bad_share: float = BAD_SHARE) -> None:
        self.file = _find_file(Path(source))
        vectors = read_vectors(self.file)
        if vectors.rows_ND.ndim != 2:
            raise XcompatError(
                f"{self.file} has the shape {vectors.rows_ND.shape}; an array of query embeddings needs two dimensions: "
                "a row per query"
            )
        ids = _read_ids(self.file, vectors)
        rows_QD = vectors.rows_ND if vectors.rows_ND.dtype.kind == "f" else np.asarray(vectors.rows_ND, np.float32)
        found = check_rows(rows_QD, self.file, ids, max_bad_share, keep_lengths=True)
        for line in found.notes:
            notice(line)
        self.embeds_QD: NDArray[Any] = found.rows_ND
        self.rows_Q = np.flatnonzero(found.usable_N)
        self.ids = ids

    def __len__(self) -> int:
        """Count usable embeddings."""
        return len(self.rows_Q)

    def require_fit(self, model: Model) -> None:
        """Raise if the embeddings have another dimension than the model outputs.

        Raises:
            XcompatError: names both dimensions, and a model that outputs the right dimension.
        """
        require_dim(model, self.embeds_QD.shape[1], self.file)

    def embed_in_blocks(self, _: object) -> Iterator[QueryBlock]:
        """Yield the embeddings in blocks; the model is ignored."""
        for start in range(0, len(self), ROWS_AT_ONCE):
            rows_B = self.rows_Q[start : start + ROWS_AT_ONCE]
            names = [str(row) if self.ids is None else self.ids[row] for row in rows_B.tolist()]
            yield QueryBlock(names, [None] * len(rows_B), np.array(self.embeds_QD[rows_B], np.float32))

    def re_embed(self, old: Embedder, places: Sequence[int]) -> Tensor:
        """Raise: embeddings cannot be re-embedded with another model."""
        raise XcompatError(
            f"the fallback embeds queries with the old model, but {self.file} holds embeddings; give texts or images, "
            "or remove --fallback"
        )


def require_dim(model: Model, have: int, where: object) -> None:
    """Raise if embeddings have another dimension than the model outputs.

    Args:
        model: the model that made them; fingerprints are not checked.
        have: their dimension.
        where: their file, for the message.

    Raises:
        XcompatError: names both dimensions, and a model that outputs the right dimension.
    """
    expected = _describe_dim(model)
    if expected is not None and have != expected[0]:
        raise XcompatError(f"{where} has {have} dimensions, and the model takes {expected[0]}: {expected[1](have)}")


def _find_file(source: Path) -> Path:
    file = find_file(source)
    if file == source and not source.name.endswith(SUFFIXES) and not is_table(source):
        raise XcompatError(f"{source} holds no embeddings; use .npy, Parquet, JSON lines, or a folder of them")
    return file


def _read_ids(file: Path, vectors: Vectors) -> list[str] | None:
    if vectors.ids is not None:
        return vectors.ids
    beside = file.with_name(f"{file.name.removesuffix(ARRAY).removesuffix('_embeds')}_ids.txt")
    if not beside.is_file():
        return None
    names = read_lines(beside)
    if len(names) != len(vectors.rows_ND):
        raise XcompatError(f"{beside} has {len(names):,} lines, but {file.name} has {len(vectors.rows_ND):,} rows")
    return names


def _describe_dim(model: Model) -> tuple[int, Any] | None:
    """Return the dimension and a function for advice; None for a fingerprint."""
    if isinstance(model, Fingerprint):
        return None
    if not isinstance(model, CompatModel):
        return model.dim, lambda _: f"embed the queries with {model.name}"
    return model.config.embedding_dim, lambda have: _advise(model, have)


def _advise(model: CompatModel, have: int) -> str:
    if model.config.encoder is not None:
        maker = str(model.config.encoder["name"])
    else:
        maker = "the new model that the map was fitted on" if model.embeds_in_memory else "this model"
    looks = [version for version, dim in model.config.versions if dim == have]
    like = f" ({looks[0].name} has {have}: its queries need no map, search with --model {looks[0].name})" if looks else ""
    return f"embed the queries with {maker}{like}"
