"""WebDataset shards: tar files with a sample per member stem. Damage is detected and reported."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

from xcompat.core.errors import XcompatError, nearest
from xcompat.core.progress import notice
from xcompat.data.addresses import describe_failure, is_address, open_address, redact_address
from xcompat.data.bad_samples import Problems
from xcompat.data.schema import CAMERA, CAPTION, ID, IMAGE, LABEL, captions_of, is_blank
from xcompat.data.text_files import parse_json

IMAGE_MEMBERS = ("jpg", "jpeg", "png", "webp", "jfif", "avif", "heic", "heif", "gif", "bmp", "tif", "tiff")
CAPTION_MEMBERS = ("txt", "caption", "json.caption", "json.text")
CLASS_MEMBER = "cls"
LARGEST_SAMPLE = 2**29
"""Maximum bytes of a sample, which is loaded into memory."""
LARGEST_HEADER = 2**16
MOST_PADDING = 64  # maximum MiB of zeros after a shard's end; tar writes 10 kB


class ShardError(XcompatError):
    """A shard that is truncated, damaged or not a tar file."""


class _SampleError(ValueError):
    """A sample without a required member."""


@dataclass(frozen=True)
class ShardColumns:
    """Sample member of each column.

    Args:
        image: member; None for the first of `IMAGE_MEMBERS`.
        caption: member (``txt``) or key of a JSON member (``json.title``); None for the first of `CAPTION_MEMBERS`.
        id: the same; None for ``__key__``.
        label: the same; None for no label.
        camera: the same; None for no camera.
        index_label: whether labels are indices, not names.
        with_image: whether an image is required.
        with_caption: whether a caption is required.
    """

    image: str | None = None
    caption: str | None = None
    id: str | None = None
    label: str | None = None
    camera: str | None = None
    index_label: bool = False
    with_image: bool = True
    with_caption: bool = True

    def row(self, sample: dict[str, object]) -> dict[str, Any]:
        """Convert a sample to a row, or raise `_SampleError` for a missing or unusable member."""
        row: dict[str, Any] = {}
        if self.with_image:
            name = self.image or next((m for m in IMAGE_MEMBERS if m in sample), "image (jpg, jpeg, png, webp, heic, avif)")
            if not sample.get(name):
                raise _SampleError(f"no {name}")
            row[IMAGE] = {"bytes": sample[name], "path": f"{sample['__key__']}.{name}"}
        row[ID] = self._id(sample, self.id) if self.id else sample["__key__"]
        if self.with_caption:
            row[CAPTION] = self._captions(sample)
        if self.label:
            row[LABEL] = self._label(sample, self.label)
        if self.camera:
            row[CAMERA] = self._camera(sample, self.camera)
        return row

    def _id(self, sample: dict[str, object], name: str) -> str:
        value = _member(sample, name)
        if is_blank(value):
            raise _SampleError(f"empty {name}")
        return str(value)

    def _label(self, sample: dict[str, object], name: str) -> int | str:
        value = _member(sample, name)
        if value is None or value == "":
            raise _SampleError(f"empty {name}")
        try:
            return int(value) if self.index_label else str(value)
        except ValueError:
            raise _SampleError(f"{name} is {value!r}, not an index") from None

    def _camera(self, sample: dict[str, object], name: str) -> str:
        value = _member(sample, name)
        if value is None or value == "":
            raise _SampleError(f"empty {name}")
        return str(value)

    def _captions(self, sample: dict[str, object]) -> list[str]:
        name = self.caption or next((m for m in CAPTION_MEMBERS if _has(sample, m)), "caption (txt)")
        captions = captions_of(_member(sample, name))
        if not captions:
            raise _SampleError(f"empty {name}")
        return captions


def read_rows(shards: Sequence[str | Path], columns: ShardColumns, problems: Problems) -> Iterator[dict[str, Any]]:
    """Stream the rows of shards, skipping damaged shards and unusable samples.

    Args:
        shards: tar files, plain or gzip, or addresses.
        columns: member of each column.
        problems: collects skipped shards and samples.

    Yields:
        Rows, also from before a shard's damage.

    Raises:
        XcompatError: too many shards or samples are unusable.
    """
    for shard in shards:
        try:
            for sample in read_shard(shard):
                try:
                    row = columns.row(sample)
                except (_SampleError, RecursionError) as error:
                    problems.add_bad_sample(sample, str(error))
                    problems.check_samples(final=False)
                    continue
                problems.n_good += 1
                yield row
        except ShardError as error:
            problems.add_bad_shard(str(error))
    problems.check_samples(final=True)


def stream_rows(
    shards: Sequence[str | Path], columns: ShardColumns, total: int, max_bad_share: float = 0.01
) -> Iterator[dict[str, object]]:
    """Stream rows as :func:`read_rows` does, and print skipped ones at the end.

    Args:
        shards: a worker's shards, split by ``datasets``.
        columns: member of each column.
        total: number of shards of all workers.
        max_bad_share: largest tolerated share of unusable shards or samples.
    """
    problems = Problems(max_bad_share, total)
    yield from read_rows(shards, columns, problems)
    for line in problems.lines():
        notice(line)


def read_shard(path: str | Path) -> Iterator[dict[str, object]]:
    """Stream the samples of a shard.

    Args:
        path: a tar file, plain or gzip, or its address.

    Yields:
        ``{"__key__": stem, "jpg": bytes, "txt": bytes, ...}``, without truncated samples.

    Raises:
        ShardError: the file is truncated, damaged or not a tar file.
    """
    from webdataset.tariterators import group_by_keys

    address = path if is_address(path) else None
    path = Path(path) if address is None else redact_address(address)
    try:
        with _open(Path(path)) if address is None else _open_remote_shard(address) as stream:
            yield from group_by_keys(_members(stream, str(path)))
            # tarfile treats a damaged header as the archive's end; only a few zeros follow a true end
            for blocks in count():
                if not (block := stream.read(1 << 20)):
                    break
                if block.strip(b"\0") or blocks == MOST_PADDING:
                    raise ShardError(f"{path}: damaged, members follow a broken header")
    except XcompatError:
        raise
    except Exception as error:  # tarfile, gzip, zlib and webdataset raise different types
        if address is not None:
            raise ShardError(f"{path}: {describe_failure(error)}") from None
        reason = str(error.args[0] if error.args else error)
        raise ShardError(f"{path}: {reason} ({type(error).__name__})") from error


def _members(stream: IO[bytes], path: str) -> Iterator[dict[str, object]]:
    """Yield members for `group_by_keys`. Oversized members raise before they are read."""
    from webdataset.tariterators import base_plus_ext

    archive = tarfile.open(fileobj=stream, mode="r|", tarinfo=_LimitedHeader)  # noqa: SIM115 - the caller closes the stream
    held, key = 0, None
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # as in webdataset: the list would grow without limit
        stem, _ = base_plus_ext(member.name)
        held = member.size + (held if stem == key else 0)
        key = stem
        if member.size < 0 or held > LARGEST_SAMPLE:
            raise ShardError(
                f"{path}: {member.name[:200]} declares {member.size:,} bytes, above the limit of {LARGEST_SAMPLE:,} per sample"
            )
        if member.isreg() and not re.match(r"__[^/]*__($|/)", member.name):  # names reserved by webdataset
            file = archive.extractfile(member)
            assert file is not None
            yield {"fname": member.name, "data": file.read(), "__url__": path}
    yield {}  # ends the last sample


class _LimitedHeader(tarfile.TarInfo):
    """Header that limits extended headers (e.g. long names), which tarfile reads at any size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if not self.isreg() and not 0 <= self.size <= LARGEST_HEADER:
            raise tarfile.ReadError(f"a header declares {self.size:,} bytes, above the limit of {LARGEST_HEADER:,}")
        return super()._proc_member(archive)  # type: ignore[misc]  # tarfile's hook for subclasses


def _open(path: Path) -> IO[bytes]:
    """Open a shard, or raise if it is truncated, which tarfile does not detect."""
    with path.open("rb") as stream:
        compressed = stream.read(2) == b"\x1f\x8b"
        if not compressed:
            stream.seek(0, 2)
            stream.seek(-min(512, stream.tell()), 2)
            last = stream.read()
            if len(last) < 512 or last.strip(b"\0"):
                raise ShardError(f"{path}: cut short, the end-of-archive mark is missing")
    # gzip.open checks the length and the checksum at the end, tarfile's own reader does not
    return gzip.open(path, "rb") if compressed else path.open("rb")  # type: ignore[return-value]


@contextmanager
def _open_remote_shard(address: str) -> Iterator[IO[bytes]]:
    """Open a remote shard. Truncation is detected after reading."""
    with open_address(address) as source:
        watched = _TailStream(source)
        stream = io.BufferedReader(watched, 1 << 20)
        compressed = stream.peek(2)[:2] == b"\x1f\x8b"
        yield gzip.GzipFile(fileobj=stream) if compressed else stream  # type: ignore[misc]  # behaves as IO[bytes]
        if not compressed and (len(watched.last) < 512 or watched.last.strip(b"\0")):
            raise ShardError(f"{redact_address(address)}: cut short, the end-of-archive mark is missing")


class _TailStream(io.RawIOBase):
    """Stream that remembers its last 512 bytes."""

    def __init__(self, source: Any) -> None:  # noqa: ANN401 - a file of any library
        self.source, self.last = source, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - a buffer
        read = self.source.read(len(buffer))
        buffer[: len(read)] = read
        self.last = (self.last + read[-512:])[-512:]
        return len(read)


def _has(sample: dict[str, object], column: str) -> bool:
    try:
        return bool(_member(sample, column))
    except _SampleError:
        return False


def _member(sample: dict[str, Any], column: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return a text member, or the value at a dotted path in a JSON member."""
    try:
        if column in sample:
            return sample[column].decode("utf-8").strip()
        name, *keys = column.split(".")
        if name not in sample or not keys:
            raise _SampleError(f"no {column}")
        value = parse_json(sample[name], f"{sample['__key__']}.{name}")
        if value is None:
            raise _SampleError(f"{name} is not valid JSON")
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                known = [f"{name}.{k}" for k in value] if isinstance(value, dict) else []
                raise _SampleError(f"no {column}, {nearest(column, known)}")
            value = value[key]
    except UnicodeDecodeError:
        raise _SampleError(f"{column} is not UTF-8 text") from None
    return value
