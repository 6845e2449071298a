"""Content of a source, vectors or texts and images, judged by names of files and columns."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from xcompat.core.errors import XcompatError
from xcompat.data.schema import IMAGE_COLUMNS
from xcompat.data.texts import TEXT_COLUMNS
from xcompat.vectors.dumps import vector_names
from xcompat.vectors.formats import (
    ARRAYS,
    DOCUMENTS,
    EMBEDDING_COLUMNS,
    JSON_LINES,
    KINDS,
    clip_retrieval_folder,
    is_table,
    stored_at,
)
from xcompat.vectors.tables import choosable_names, column_names

Content = Literal["embeddings", "both", "other"]
_BATCH = {"custom_id", "response"}
"""Fields of an answer of OpenAI's batches."""


def find_content(source: str | Path) -> Content:
    """Return whether a source holds embeddings, also texts or images, or something else."""
    path = Path(source)
    if path.name.endswith(ARRAYS) or any(stored_at(path / f"{kind}_embeds") is not None for kind in KINDS):
        return "embeddings"
    if clip_retrieval_folder(path) is not None:
        return "embeddings"
    if not path.exists() or not is_table(path):
        return "other"
    try:
        has_originals = not path.name.endswith(DOCUMENTS) and bool({*TEXT_COLUMNS, *IMAGE_COLUMNS} & {*column_names(path)})
        has_vectors = _has_vectors(path, has_originals)
    except XcompatError:  # JSON lines without objects may be texts; their reader reports errors
        return "other"
    if not has_vectors:
        return "other"
    return "both" if has_originals else "embeddings"


def _has_vectors(path: Path, has_originals: bool) -> bool:
    """Return whether a table has a usual name of vectors, or JSON without texts a list of numbers under another name."""
    names = set(choosable_names(path))
    if names & set(EMBEDDING_COLUMNS) or names >= _BATCH:
        return True
    return not has_originals and path.name.endswith((*DOCUMENTS, *JSON_LINES)) and bool(vector_names(path))
