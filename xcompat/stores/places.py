"""Stored embeddings wherever they are: files, faiss indexes, galleries and databases."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeGuard
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import read_lines
from xcompat.core.errors import MissingPathError, XcompatError, nearest
from xcompat.core.lazy import faiss
from xcompat.core.paths import nearest_path
from xcompat.vectors import Columns, Vectors, read_vectors
from xcompat.vectors.formats import KINDS, SUFFIXES, find_file, stored_at
from xcompat.vectors.reading import choosable_names
from xcompat.vectors.spool import BLOCK, Spool

if TYPE_CHECKING:
    from xcompat.core.fingerprint import Fingerprint
    from xcompat.retrieval.faiss_index import FaissIndex

_MAGIC = b"I"
"""First byte of a faiss index of float vectors: IxFI, IwFl, IHNf and others."""


class Reading(NamedTuple):
    """How stored embeddings are read.

    Args:
        ids: file with a row id per line; None to use the ids in the file.
        columns: column names.
        labels: source of the items' classes (:func:`~xcompat.mapping.item_labels.read_item_labels`), or None.
    """

    ids: Path | None = None
    columns: Columns = Columns()
    labels: Path | None = None


READ_AS_IT_IS = Reading()
"""Ids and columns are found by their names."""


@dataclass(frozen=True)
class StoreAddress:
    """Address of a database with vectors.

    Args:
        uri: as in :func:`xcompat.stores.open`.
    """

    uri: str = field(repr=False)

    def __str__(self) -> str:
        """Return the address for messages, without passwords."""
        from xcompat.stores.uri import without_credentials

        return without_credentials(self.uri)

    @property
    def stem(self) -> str:
        """Name of the table or collection."""
        parts = urlsplit(self.uri)
        options = parse_qs(parts.query)
        named = next((options[key][0] for key in ("table", "collection") if key in options), None)
        return named or Path(unquote(parts.path)).name


Place: TypeAlias = Path | StoreAddress
"""Embeddings in a file, a folder or a database."""


def parse_place(text: str) -> Place:
    """Return the place of a path or a store's address. ``file:///FOLDER`` is a gallery's path."""
    if "://" not in text:
        return Path(text)
    return Path(unquote(urlsplit(text).path)) if text.startswith("file://") else StoreAddress(text)


def is_gallery(path: Place) -> TypeGuard[Path]:
    """Return whether a path is a gallery's folder."""
    from xcompat.retrieval.manifest import CURRENT

    return isinstance(path, Path) and path.is_dir() and (path / CURRENT).is_file()


def is_index(path: Place) -> bool:
    """Return whether a path is a faiss index, by its name and first byte."""
    if not isinstance(path, Path) or path.name.endswith(SUFFIXES) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == _MAGIC


def read_place(place: Place, reading: Reading = READ_AS_IT_IS) -> Vectors:
    """Read stored embeddings from a database, a gallery, a faiss index, or any file of :func:`~xcompat.vectors.read_vectors`.

    Args:
        place: the embeddings.
        reading: column names, and a file with the ids of a place without ids.

    Raises:
        XcompatError: the place is damaged or empty, or it and ``reading`` have ids, or these ids do not match.
    """
    if isinstance(place, Path) and is_index(place):
        return read_index(place, reading.ids)
    if isinstance(place, StoreAddress) or is_gallery(place):
        if reading.ids is not None:
            raise XcompatError(f"{place} has ids of its own; remove --ids")
        return read_store(place) if isinstance(place, StoreAddress) else read_gallery(place)
    place = find_file(place)
    needs_ids = reading.ids is None and reading.columns.needs_ids
    vectors = read_vectors(place, reading.columns._replace(needs_ids=needs_ids))
    if reading.ids is None:
        return vectors
    if vectors.ids is not None and list(vectors.ids) != list(map(str, range(len(vectors.ids)))):  # not only row numbers
        raise XcompatError(f"{place} has ids of its own; remove --ids")
    ids = read_lines(reading.ids)
    if len(ids) != len(vectors.rows_ND):
        raise XcompatError(f"{reading.ids} has {len(ids):,} lines, but {place} has {len(vectors.rows_ND):,} rows")
    return Vectors(vectors.rows_ND, ids)


def read_named(place: Place, reading: Reading = READ_AS_IT_IS) -> Vectors:
    """Read stored embeddings as :func:`read_place` does; ids can also be in a file beside them.

    Raises:
        XcompatError: as in :func:`read_place`, or there are no ids.
    """
    beside = find_ids_beside(place) if reading.ids is None else None
    if beside is not None and isinstance(place, Path) and is_index(place):  # as in a search of the index
        return read_place(place, reading._replace(ids=beside))
    vectors = read_place(place, reading._replace(columns=reading.columns._replace(needs_ids=False)))
    if vectors.ids is None and beside is not None:
        vectors = read_place(place, reading._replace(ids=beside))
    if vectors.ids is None and isinstance(place, Path):
        raise lacks_ids(place)
    return vectors


def find_ids_beside(place: Place) -> Path | None:
    """Return the file with ids beside an index or a file of embeddings, or None."""
    from xcompat.retrieval.index_gallery import find_ids

    if isinstance(place, StoreAddress) or is_gallery(place):
        return None
    file = find_file(place)
    listed = file.with_name(f"{file.stem.removesuffix('_embeds')}_ids.txt")
    return listed if listed.is_file() else find_ids(file)


def lacks_ids(place: Path) -> XcompatError:
    """Return the error for a file without ids."""
    return XcompatError(f"{place} has no ids; write the id of each vector to {place.with_suffix('.ids.txt').name} beside it")


def require_existing(place: Place) -> None:
    """Raise if a path does not exist."""
    if isinstance(place, Path) and not place.exists():
        raise MissingPathError(f"{place} does not exist; {nearest_path(place)}")


def holds_vectors(place: Place) -> bool:
    """Return whether a place holds vectors, and no texts or images to embed, judged by names of files and columns."""
    from xcompat.retrieval.content import find_content
    from xcompat.stores import is_kind

    if isinstance(place, StoreAddress):
        return is_kind(place.uri)
    return is_gallery(place) or is_index(place) or find_content(place) == "embeddings"


def require_reading(places: Sequence[Place], reading: Reading) -> None:
    """Raise if no file or folder has a chosen column, or the file with ids does not exist or does not fit an index.

    Args:
        places: existing places with embeddings, which share the column names. The file with ids is of the first.
        reading: column names, and a file with ids.

    Raises:
        XcompatError: the message suggests a similar name, or has both counts.
    """
    if reading.ids is not None and not reading.ids.is_file():
        raise MissingPathError(f"--ids {reading.ids} does not exist; choose a text file with an id per line")
    if reading.ids is not None and places and isinstance(index := places[0], Path) and is_index(index):
        from xcompat.retrieval.faiss_index import map_faiss
        from xcompat.retrieval.own_ids import require_count
        from xcompat.retrieval.probing import require_readable

        require_readable(index)
        require_count(read_lines(reading.ids), map_faiss(index).ntotal, index)
    for option, name in (("--id-column", reading.columns.id), (reading.columns.vector_option, reading.columns.vector)):
        if name is None:
            continue
        known = [each for place in places if isinstance(place, Path) for each in _choosable_names(place)]
        if name not in known:
            fix = nearest(name, set(known)) if known else f"remove {option}"
            raise XcompatError(f"{option} {name}: no such name in {' or '.join(map(str, places))}; {fix}")


def _choosable_names(place: Path) -> list[str]:
    if is_gallery(place) or is_index(place):
        return []
    files = [file for kind in KINDS if (file := stored_at(place / f"{kind}_embeds")) is not None]
    return [name for file in files or [place] for name in choosable_names(file)]


def read_index(path: Path, ids: Path | None) -> Vectors:
    """Reconstruct a faiss index's vectors.

    Args:
        path: any index from which faiss can reconstruct vectors.
        ids: file with an id per line, in index order; None to use the index's own ids, if any.

    Raises:
        XcompatError: faiss cannot read the index or reconstruct its vectors, or the ids do not match.
    """
    from xcompat.retrieval.adoption import wrap_index
    from xcompat.retrieval.faiss_index import map_faiss
    from xcompat.retrieval.own_ids import match_names, read_own_ids
    from xcompat.retrieval.probing import require_readable

    require_readable(path)
    raw = map_faiss(path)
    own = read_own_ids(raw, path)
    index = wrap_index(raw, own.labels_N, path)
    rows_ND = _spool(index, path)
    if ids is None and own.names_N is None:
        return Vectors(rows_ND)
    names = read_lines(ids) if ids is not None else None
    return Vectors(rows_ND, match_names(names, own, index.rows, path))


def read_vectors_of_index(index: faiss.Index) -> NDArray[np.float32]:
    """Reconstruct a faiss index's vectors in memory, in the order of its ids or rows.

    Raises:
        XcompatError: the index is empty, or faiss cannot reconstruct its vectors.
    """
    from xcompat.retrieval.adoption import wrap_index
    from xcompat.retrieval.own_ids import read_own_ids

    name = Path(type(index).__name__)  # for messages
    return _spool(wrap_index(index, read_own_ids(index, name).labels_N, name), name)


def _spool(index: FaissIndex, path: Path) -> NDArray[np.float32]:
    spool = Spool(np.float32)
    for start in range(0, index.rows, BLOCK):
        try:
            rows_BD = index.vectors(np.arange(start, min(start + BLOCK, index.rows)))
        except RuntimeError as error:  # e.g. a transform without an inverse
            raise XcompatError(f"faiss cannot reconstruct the vectors of {path}; use a file of the vectors, e.g. .npy") from error
        spool.add(rows_BD)
    return spool.map_rows()


def read_gallery(path: Path) -> Vectors:
    """Read the items of a gallery's oldest version.

    Raises:
        XcompatError: the gallery is empty or damaged.
    """
    from xcompat.retrieval import Gallery

    with Gallery.open(path) as gallery, gallery.reading():
        segments = [(segment, rows_n) for segment in gallery.segments if len(rows_n := segment.present())]
        if not segments:
            raise XcompatError(f"{path} is empty: add items first")
        oldest = segments[0][0].record.version
        spool, ids = Spool(np.float32), list[str]()
        for segment, rows_n in segments:
            if segment.record.version != oldest:
                continue
            ids += segment.ids(rows_n)
            for start in range(0, len(rows_n), BLOCK):
                spool.add(segment.vectors(rows_n[start : start + BLOCK]))
    return Vectors(spool.map_rows(), ids)


def read_store(address: StoreAddress) -> Vectors:
    """Read the searched vectors of a database.

    Raises:
        XcompatError: the store cannot be opened, or it has no vectors.
    """
    import xcompat.stores

    with closing(xcompat.stores.open(address.uri)) as store:
        spool, ids = Spool(np.float32), list[str]()
        for names, vectors_ND in store.stream(BLOCK):
            ids += names
            spool.add(vectors_ND)
    if not ids:
        raise XcompatError(f"{address} has no vectors; add items first")
    return Vectors(spool.map_rows(), ids)


def describe_stored_model(place: Place) -> dict[str, object] | None:
    """Describe the model that a gallery's oldest version, or a database, records; None if no model is recorded."""
    from xcompat.models.config import describe_old

    known = find_stored_model(place)
    return describe_old(*known) if known is not None else None


def find_stored_model(place: Place) -> tuple[Fingerprint, int] | None:
    """Return the model that a gallery's oldest version, or a database, records, and its dimension; None if unknown."""
    from xcompat.retrieval import Gallery

    if isinstance(place, StoreAddress):
        import xcompat.stores

        with closing(xcompat.stores.open(place.uri)) as store:
            own = store.spaces()[store.space]
        return (own.fingerprint, own.dim) if own.fingerprint is not None and own.dim is not None else None
    if not is_gallery(place):
        return None
    with Gallery.open(place) as gallery:
        version = gallery.manifest.versions[0]
    return version.fingerprint, version.dim
