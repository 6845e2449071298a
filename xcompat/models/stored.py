"""Old models known only by stored embeddings or prototypes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from xcompat.core.arrays import RowSelection, normalise_rows, read_lines
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.models.config import Metric, describe_old
from xcompat.models.old_knowledge import ONLY_PROTOTYPES, ROWS, Rows, rows_by_class
from xcompat.vectors import Vectors, check_rows, read_vectors
from xcompat.vectors.formats import CLASSES, EMBEDS, IDS, PROTOTYPES, require_names, stored_at


class StoredModel:
    """Old model with stored embeddings by image id, or a prototype per class (a :class:`FrozenModel`).

    Args:
        folder: folder with ``image_embeds.npy`` (N, d) and ``image_ids.txt``, with ``prototypes.npy`` (C, d) and
            ``classes.txt`` (one id or class name per line), or with a table of both, e.g. ``image_embeds.parquet`` (see
            :func:`~xcompat.vectors.read_vectors`).
        vectors: embeddings with ids that were read from ``folder``, e.g. from an index; None to read its files.
        version: model that made them; None to identify it by the embeddings.

    Raises:
        XcompatError: a file is missing or not a matrix of numbers, or ids or names do not match its rows.
    """

    metric: Metric = "cosine"
    precision = "float32"
    digest: str
    """Hash of ids and embeddings."""

    def __init__(self, folder: str | Path, vectors: Vectors | None = None, version: Fingerprint | None = None) -> None:
        folder = self._place = Path(folder)
        self.embeds_Nd = self.prototypes_Cd = None
        self.ids: list[str] = []
        self.classes: list[str] = []
        if vectors is not None:
            self.embeds_Nd, self.ids = _check(vectors.rows_ND, vectors.ids or [], folder, "its ids")
        elif (embeds := stored_at(folder / EMBEDS)) is not None:
            self.embeds_Nd, self.ids = _read(embeds, folder / IDS)
        elif (prototypes := stored_at(folder / PROTOTYPES)) is not None:
            self.prototypes_Cd, self.classes = _read(prototypes, folder / CLASSES)
        else:
            raise XcompatError(f"{folder} contains neither {EMBEDS}.npy nor {PROTOTYPES}.npy; add the old model's embeddings")
        known = self.embeds_Nd if self.embeds_Nd is not None else self.prototypes_Cd
        assert known is not None
        self.dim = int(known.shape[1])
        digest = hashlib.sha256("\n".join(self.ids or self.classes).encode())
        for start in range(0, len(known), ROWS):
            digest.update(np.ascontiguousarray(known[start : start + ROWS]).tobytes())
        self.digest = digest.hexdigest()
        self.fingerprint = version or Fingerprint(self.digest, str(folder))
        self.reads: Literal["images", "captions"] = "images"

    @property
    def name(self) -> str:
        """Return the folder."""
        return self.fingerprint.name

    def describe_old(self) -> dict[str, Any]:
        """Return this model's description for ``CompatConfig.old``."""
        return describe_old(self.fingerprint, self.dim)

    def require_embeddings(self, method: str) -> None:
        """Raise for a method that needs embeddings if there are only prototypes."""
        if self.embeds_Nd is None:
            raise XcompatError(f"{self.name}: {ONLY_PROTOTYPES.format(method)}")

    def require_model(self, error_message: str) -> NoReturn:
        """Raise, because there is no model."""
        raise XcompatError(f"{self.name} {error_message}")

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Return the images' stored embeddings.

        Args:
            ids: image ids.

        Returns:
            (len(ids), d) float32, L2-normalised, NaN for rows without a usable embedding; read on demand.

        Raises:
            XcompatError: there are only prototypes, or an image (named in the error) has no embedding.
        """
        if self.embeds_Nd is None:
            raise XcompatError(
                f"{self.name} contains only class prototypes, but evaluation needs old embeddings; add them, or set "
                "evaluation to null"
            )
        ids = ids[:]  # reads a data set's column once instead of per row
        place = {name: row for row, name in enumerate(self.ids)}
        missing = [name for name in ids if name not in place]
        if missing:
            raise XcompatError(
                f"{self._place} has no embedding of {len(missing)} of {len(ids)} images, e.g. {missing[0]!r}; its ids, e.g. "
                f"{self.ids[0]!r}, must be those of the data"
            )
        return _Directions(self.embeds_Nd, np.fromiter((place[name] for name in ids), np.int64, len(ids)))

    def prototypes_of(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return stored prototypes for ``classes`` (C, d), NaN for missing prototypes; None if there are embeddings."""
        if self.prototypes_Cd is None:
            return None
        rows_Cd = np.array(self.prototypes_Cd, dtype=np.float32)
        rows_Cd[~np.isfinite(rows_Cd).all(axis=1) | ~rows_Cd.any(axis=1)] = np.nan
        return rows_by_class(torch.from_numpy(rows_Cd), self.classes, classes)

    def classifier_of(self, classes: Sequence[str]) -> None:
        """Return None, because the classifier is not stored."""


class _Directions(RowSelection):
    """L2-normalised stored embeddings, NaN for unusable rows."""

    @override
    def __getitem__(self, rows: NDArray[np.int64] | slice, /) -> NDArray[np.float32]:
        rows_Rd = normalise_rows(super().__getitem__(rows))
        return np.where(rows_Rd.any(axis=1, keepdims=True), rows_Rd, np.float32("nan"))


def _read(file: Path, lines: Path) -> tuple[NDArray[Any], list[str]]:
    require_names(file, lines)
    vectors = read_vectors(file)
    names = vectors.ids if vectors.ids is not None else read_lines(lines)
    return _check(vectors.rows_ND, names, file, lines)


def _check(array: NDArray[np.number], names: list[str], file: Path, lines: Path | str) -> tuple[NDArray[np.number], list[str]]:
    if array.ndim != 2 or len(array) != len(names):
        where = lines.name if isinstance(lines, Path) else lines
        raise XcompatError(f"{file} has shape {array.shape}, but {where} has {len(names)} lines; they must be N x d and N")
    rows_Nd = array if array.dtype.kind == "f" else np.asarray(array, np.float32)
    for line in check_rows(rows_Nd, file, names, keep_lengths=True, option="").notes:
        notice(line)
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise XcompatError(f"{lines}: {twice!r} is on two lines and has two rows; remove one line and its row")
    return array, names
