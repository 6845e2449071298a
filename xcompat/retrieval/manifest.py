"""What a gallery says of itself on disk: one small file per generation, which names and checks every other file."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xcompat.checksums import FileRecord
from xcompat.errors import GenerationGoneError, XcompatError
from xcompat.files import atomic_path, listed, sync_folder
from xcompat.fingerprint import Fingerprint

SCHEMA = 1
CURRENT = "gallery.json"
GENERATIONS = "generations"
SEGMENTS = "segments"
REMOVED = "removed"
Metric = Literal["cosine", "ip", "l2"]
_GENERATION = re.compile(r"\d{8}\.json")
_NAME = r"^[0-9a-f]{16}$"  # names become paths: a changed manifest must not lead out of the gallery


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VersionRecord(_Record):
    """A model whose embeddings the gallery holds.

    Args:
        digest: its fingerprint.
        name: what people call it.
        dim: of its stored embeddings.
        shares: digests of older models in whose space these embeddings are, so that their queries can search them.
        length: of its stored embeddings, in the median, to which those of a model are brought, when asked with and when added;
            other than 1 only of an adopted index whose vectors were never normalised.
    """

    digest: str
    name: str
    dim: int = Field(ge=1)
    shares: tuple[str, ...] = ()
    length: float = Field(1.0, gt=0)

    @property
    def fingerprint(self) -> Fingerprint:
        """The version's identity."""
        return Fingerprint(self.digest, self.name)


class AdoptedRecord(_Record):
    """What shows without reading all of an adopted index that it is as it was.

    Args:
        mtime_ns: when it was last written.
        sample: XXH3-128 of some of its bytes.
        rows: how many vectors it holds, of which a segment may know the first alone.
    """

    mtime_ns: int
    sample: str
    rows: int


class SegmentRecord(_Record):
    """Embeddings of one version that were added together; its files never change.

    Args:
        name: of its folder.
        version: digest of the model.
        rows: how many embeddings.
        index: what it is searched by: a faiss factory string.
        files: file name -> what it was when it was written.
        adopted: path of a faiss index that stays where it is; None when the index is one of ``files``.
        adopted_file: what that was when it was adopted.
        adopted_seen: how it is recognised when it is opened; None in galleries of before that.
        extends: XXH3-128 of earlier states of the same index, whose rows are the first of it.
        removed: name of the file that marks rows that are no longer there; None when all are.
        removed_file: what that was when it was written.
        n_removed: how many these are.
    """

    name: str = Field(pattern=_NAME)
    version: str
    rows: int = Field(ge=1)
    index: str
    files: dict[str, FileRecord]
    adopted: str | None = None
    adopted_file: FileRecord | None = None
    adopted_seen: AdoptedRecord | None = None
    extends: tuple[str, ...] = ()
    removed: str | None = Field(None, pattern=r"^[0-9a-f]{16}-\d{8}\.npy$")
    removed_file: FileRecord | None = None
    n_removed: int = 0


class Manifest(_Record):
    """A committed state of the gallery.

    Args:
        generation: counts commits, from 0 for the empty gallery.
        metric: ``cosine``, ``ip`` or ``l2``.
        index: the faiss factory string of segments to come.
        milvus: URI of the Milvus that holds the vectors; None when faiss does.
        versions: in order of appearance.
        segments: in order of appearance.
        made: when, in UTC.
        by: what made this generation, such as ``add``.
        schema_version: of this format.
        checksum: of all that stands here; empty where an older version wrote it, or nothing has yet.
    """

    generation: int = 0
    metric: Metric
    index: str = "Flat"
    milvus: str | None = None
    versions: tuple[VersionRecord, ...] = ()
    segments: tuple[SegmentRecord, ...] = ()
    made: str = ""
    by: str = "create"
    schema_version: int = SCHEMA
    checksum: str = ""

    def version(self, digest: str) -> VersionRecord:
        """Return the version with a digest."""
        return next(version for version in self.versions if version.digest == digest)

    def present(self) -> list[VersionRecord]:
        """Return the versions that embeddings are there of."""
        digests = {segment.version for segment in self.segments}  # one whose rows were all removed is named no more
        return [version for version in self.versions if version.digest in digests]

    @property
    def rows(self) -> int:
        """Number of embeddings that are there."""
        return sum(segment.rows - segment.n_removed for segment in self.segments)


def read_manifest(folder: Path, generation: int | None = None) -> Manifest:
    """Read the current state of a gallery, or an earlier one.

    Args:
        folder: the gallery.
        generation: which; None for the current one.

    Returns:
        The manifest.

    Raises:
        XcompatError: there is no gallery, no such generation, or the file is damaged or of another format.
    """
    path = folder / CURRENT if generation is None else _generation_path(folder, generation)
    if generation is not None and generation > read_manifest(folder).generation:  # of a commit that was cut off
        raise _missing(folder, generation)
    try:
        return _read(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _missing(folder, generation) from None


def _read(path: Path) -> Manifest:
    try:
        text = path.read_bytes()
        found = json.loads(text.decode("utf-8"))
        schema = found.get("schema_version")
        manifest = Manifest(**found) if schema == SCHEMA else None
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200]) from None
    if manifest is None:
        raise XcompatError(f"{path} has format {schema}, this version of xcompat reads {SCHEMA}")
    if manifest.checksum:
        if manifest.checksum != json_checksum(found):
            raise _damaged(path, "it has changed since it was committed")
    elif path.name == CURRENT:  # written before manifests had checksums: its copy says what it was
        copy = _generation_path(path.parent, manifest.generation)
        if not _same(copy, path) and copy.is_file() and path.read_bytes() == text:
            raise _damaged(path, f"it is not what {copy} is, as which it was committed")
    if path.name not in (CURRENT, _generation_path(path.parent, manifest.generation).name):
        raise _damaged(path, f"it is generation {manifest.generation}")
    return manifest


def _damaged(path: Path, reason: str) -> XcompatError:
    return XcompatError(f"{path} is damaged ({reason}); copy the newest good file of {GENERATIONS} over it")


def json_checksum(fields: dict[str, Any]) -> str:
    """Return the checksum of a JSON object but for its key ``checksum``, whatever its layout and the order of its keys."""
    import xxhash

    rest = {key: value for key, value in fields.items() if key != "checksum"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Commit a state: from the moment the current file is replaced, everyone who opens the gallery sees it.

    Args:
        folder: the gallery.
        manifest: what to commit.

    Returns:
        The manifest with the time it was made.
    """
    stamped = manifest.model_copy(update={"made": datetime.now(UTC).isoformat(timespec="seconds")})
    stamped = stamped.model_copy(update={"checksum": json_checksum(stamped.model_dump(mode="json"))})
    text = stamped.model_dump_json(indent=1) + "\n"
    for path in (_generation_path(folder, manifest.generation), folder / CURRENT):
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return stamped


def is_current_whole(folder: Path) -> bool:
    """Return whether the current state is, to the byte, what was written for its generation."""
    while True:
        current = read_manifest(folder)
        kept = _generation_path(folder, current.generation)
        if kept.is_file() and _same(kept, folder / CURRENT):
            return True
        if read_manifest(folder) == current:  # else it was replaced between two looks
            return False


def known_generations(folder: Path) -> list[int]:
    """Return the generations that can be opened or rolled back to, the oldest first.

    Args:
        folder: the gallery.

    Returns:
        Their numbers, none above the current one: a later file is of a commit that was cut off.
    """
    current = read_manifest(folder).generation
    found = sorted(int(path.stem) for path in listed(folder / GENERATIONS, "*.json") if _GENERATION.fullmatch(path.name))
    return [number for number in found if number <= current]


def kept_manifests(folder: Path) -> list[Manifest]:
    """Return the states that can be opened or rolled back to, the oldest first, while others write."""
    while True:
        current = read_manifest(folder).generation
        found = []
        for number in known_generations(folder):
            with suppress(FileNotFoundError):  # compacted away since they were listed
                found.append(_read(_generation_path(folder, number)))
        if current == read_manifest(folder).generation or current in [manifest.generation for manifest in found]:
            return found


def require_generation(folder: Path, generation: int) -> None:
    """Refuse to go on with a state whose files a compaction has deleted.

    Args:
        folder: the gallery.
        generation: the state.

    Raises:
        GenerationGoneError: it is not kept any more.
    """
    if not _generation_path(folder, generation).is_file() and read_manifest(folder).generation != generation:
        raise GenerationGoneError(
            f"generation {generation} of {folder} was compacted away since it was opened; open the gallery again"
        )


def forget_earlier(folder: Path, generation: int) -> None:
    """Delete the states before one, for good, so that none is left when the files they name go."""
    for number in known_generations(folder):
        if number < generation:
            _generation_path(folder, number).unlink()
    sync_folder(folder / GENERATIONS)


def _missing(folder: Path, generation: int | None) -> XcompatError:
    if generation is None:
        return XcompatError(f"{folder} is no gallery: it has no {CURRENT}; make one with `xcompat gallery build`")
    return GenerationGoneError(f"{folder} has no generation {generation}; it keeps {known_generations(folder)}")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except FileNotFoundError:
        return False


def _generation_path(folder: Path, generation: int) -> Path:
    return folder / GENERATIONS / f"{generation:08d}.json"
