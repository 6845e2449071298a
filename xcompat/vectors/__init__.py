"""Stored embeddings: readers of file formats, and checks."""

from xcompat.vectors.checks import CheckedRows, check_rows
from xcompat.vectors.formats import Columns
from xcompat.vectors.reading import Vectors, read_vectors

__all__ = ["CheckedRows", "Columns", "Vectors", "check_rows", "read_vectors"]
