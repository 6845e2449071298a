"""Gallery manifest: a small file per generation, with the checksums of all other files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from xcompat.core.checksums import FileRecord, json_checksum
from xcompat.core.errors import GenerationGoneError, MissingPathError, XcompatError
from xcompat.core.files import atomic_path, list_entries, sync_folder
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.paths import nearest_path

SCHEMA = 1
CURRENT = "gallery.json"
GENERATIONS = "generations"
SEGMENTS = "segments"
REMOVED = "removed"
Metric = Literal["cosine", "ip", "l2"]
_GENERATION = re.compile(r"\d{8}\.json")
_RESTORED = re.compile(r"rollback to (\d{1,8})")
_NAME = r"^[0-9a-f]{16}$"  # names become paths: a manipulated manifest must not point outside the gallery


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class VersionRecord(_Record):
    """A model with embeddings in the gallery.

    Args:
        digest: its fingerprint's digest.
        name: its readable name.
        dim: its embedding dimension.
        shares: digests of other models with queries for it: a compatible model's older models, or a map's encoder.
        length: median length, the target length for queries and new embeddings; 1 except for adopted unnormalised vectors.
        side_info: digest of the model for their side-information; None for none or unknown.
        scaled_to: digest of the version that scores are scaled to; None for unscaled.
        score_scale: slope and offset for other models' queries (:class:`~xcompat.score_scale.ScoreScale`); None if unknown.
    """

    digest: str
    name: str
    dim: int = Field(ge=1)
    shares: tuple[str, ...] = ()
    length: float = Field(1.0, gt=0)
    side_info: str | None = None
    scaled_to: str | None = None
    score_scale: tuple[FiniteFloat, FiniteFloat] | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """The version's fingerprint."""
        return Fingerprint(self.digest, self.name)


class AdoptedRecord(_Record):
    """Facts to recognise an adopted index quickly.

    Args:
        mtime_ns: last write time.
        sample: XXH3-128 of sampled bytes.
        rows: number of its vectors; a segment may use only the first vectors.
    """

    mtime_ns: int
    sample: str
    rows: int


class SegmentRecord(_Record):
    """A version's embeddings added together, in immutable files.

    Args:
        name: folder name.
        version: the model's digest.
        rows: number of embeddings, including removed ones.
        index: its faiss factory string.
        files: file name -> size and checksum.
        adopted: path of a faiss index outside the gallery.
        adopted_file: the index's size and checksum at adoption.
        adopted_seen: facts to recognise it.
        extends: XXH3-128 of the index's earlier states, whose rows come first.
        removed: name of the file to mark removed rows.
        removed_file: the removal file's size and checksum.
        n_removed: number of removed rows.
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
    """A committed gallery state.

    Args:
        generation: number of commits; 0 for the empty gallery.
        metric: ``cosine``, ``ip`` or ``l2``.
        index: faiss factory string for new segments.
        versions: in order of appearance.
        segments: in order of appearance.
        made: commit time in UTC.
        by: the operation, e.g. ``add``.
        schema_version: version of this format.
        checksum: of all other fields; empty before the first write.
    """

    generation: int = 0
    metric: Metric
    index: str = "Flat"
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
        """Return the versions with embeddings."""
        digests = {segment.version for segment in self.segments}  # segments without remaining rows are dropped
        return [version for version in self.versions if version.digest in digests]

    @property
    def rows(self) -> int:
        """Number of embeddings, without removed ones."""
        return sum(segment.rows - segment.n_removed for segment in self.segments)

    @property
    def restored_generation(self) -> int | None:
        """Generation that a rollback restored here; None for other operations."""
        match = _RESTORED.fullmatch(self.by)
        return int(match[1]) if match else None


def read_manifest(folder: Path, generation: int | None = None) -> Manifest:
    """Read a gallery's current state, or an earlier state.

    Args:
        folder: the gallery folder.
        generation: state number; None to use the current state.

    Raises:
        XcompatError: the gallery or generation does not exist, or the file is damaged or has another format.
    """
    path = folder / CURRENT if generation is None else _generation_path(folder, generation)
    if generation is not None and generation > read_manifest(folder).generation:  # its commit was interrupted
        raise _missing(folder, generation)
    try:
        return _read(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _missing(folder, generation) from None


def _read(path: Path) -> Manifest:
    try:
        text = path.read_bytes()
        found = json.loads(text.decode("utf-8"))
        schema, milvus = found.get("schema_version"), found.get("milvus")
        manifest = Manifest(**{name: value for name, value in found.items() if name != "milvus"}) if schema == SCHEMA else None
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise _damage_error(path, " ".join(str(error).split())[:200]) from None
    if manifest is None:
        raise XcompatError(f"{path} has format {schema}, but this version of xcompat reads {SCHEMA}")
    if milvus is not None:
        raise XcompatError(f"{path} keeps its vectors in Milvus, but galleries keep them in faiss; build the gallery again")
    if manifest.checksum != json_checksum(found):
        raise _damage_error(path, "it has changed since it was committed")
    if path.name not in (CURRENT, _generation_path(path.parent, manifest.generation).name):
        raise _damage_error(path, f"it is generation {manifest.generation}")
    return manifest


def _damage_error(path: Path, reason: str) -> XcompatError:
    return XcompatError(f"{path} is damaged ({reason}); copy the newest good file of {GENERATIONS} over it")


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Commit a state; return it with time and checksum."""
    stamped = manifest.model_copy(update={"made": datetime.now(UTC).isoformat(timespec="seconds")})
    stamped = stamped.model_copy(update={"checksum": json_checksum(stamped.model_dump(mode="json"))})
    text = stamped.model_dump_json(indent=1) + "\n"
    for path in (_generation_path(folder, manifest.generation), folder / CURRENT):
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return stamped


def is_current_whole(folder: Path) -> bool:
    """Return whether the current manifest equals its copy."""
    while True:
        current = read_manifest(folder)
        kept = _generation_path(folder, current.generation)
        if kept.is_file() and _same(kept, folder / CURRENT):
            return True
        if read_manifest(folder) == current:  # else a commit replaced it in between: check again
            return False


def known_generations(folder: Path) -> list[int]:
    """Return the generations to restore, oldest first, without interrupted commits."""
    current = read_manifest(folder).generation
    found = sorted(int(path.stem) for path in list_entries(folder / GENERATIONS, "*.json") if _GENERATION.fullmatch(path.name))
    return [number for number in found if number <= current]


def kept_manifests(folder: Path) -> list[Manifest]:
    """Return the states to restore, oldest first, even while another process writes."""
    while True:
        current = read_manifest(folder).generation
        found = []
        for number in known_generations(folder):
            with suppress(FileNotFoundError):  # a compaction deleted it after it was listed
                found.append(_read(_generation_path(folder, number)))
        if current == read_manifest(folder).generation or current in [manifest.generation for manifest in found]:
            return found


def previous_generation(kept: Sequence[Manifest]) -> int | None:
    """Return the next rollback's target: the state before the current state was made.

    After a rollback, this is the state before the restored state.

    Args:
        kept: available states, oldest first.

    Returns:
        The generation number; None if unavailable.

    Example:
        >>> made_by = ["create", "add", "add", "rollback to 1"]
        >>> kept = [Manifest(generation=number, metric="cosine", by=by) for number, by in enumerate(made_by)]
        >>> previous_generation(kept[:3]), previous_generation(kept)
        (1, 0)
    """
    states = {manifest.generation: manifest for manifest in kept}

    def find_origin(number: int) -> int:
        restored = states[number].restored_generation
        return find_origin(restored) if restored in states and restored < number else number

    before = find_origin(max(states)) - 1
    return find_origin(before) if before in states else None


def require_generation(folder: Path, generation: int) -> None:
    """Raise :class:`GenerationGoneError` if a compaction has deleted a generation."""
    if not _generation_path(folder, generation).is_file() and read_manifest(folder).generation != generation:
        raise GenerationGoneError(
            f"generation {generation} of {folder} was compacted away since it was opened; open the gallery again"
        )


def forget_earlier(folder: Path, generation: int) -> None:
    """Delete earlier manifests and sync to disk, before their files are deleted."""
    for number in known_generations(folder):
        if number < generation:
            _generation_path(folder, number).unlink()
    sync_folder(folder / GENERATIONS)


def _missing(folder: Path, generation: int | None) -> XcompatError:
    if not folder.exists():
        return MissingPathError(f"the gallery {folder} does not exist; {nearest_path(folder)}")
    if folder.is_file():
        return XcompatError(f"{folder} is a file, not a gallery; make a gallery of a faiss index with `xcompat gallery adopt`")
    if generation is None:
        return XcompatError(f"{folder} is not a gallery: it has no {CURRENT}; make one with `xcompat gallery build`")
    return GenerationGoneError(f"{folder} has no generation {generation}; it keeps {known_generations(folder)}")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except FileNotFoundError:
        return False


def _generation_path(folder: Path, generation: int) -> Path:
    return folder / GENERATIONS / f"{generation:08d}.json"
