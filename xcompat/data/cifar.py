"""Binary version of CIFAR-10 and CIFAR-100: records with 1 or 2 label bytes and 3,072 pixel bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.data.classes import load_classes
from xcompat.data.schema import ID, IMAGE, LABEL, pick_column

SUFFIX = ".bin"
SIDE = 32
PIXELS = 3 * SIDE * SIDE
_AT_ONCE = 1024
"""Records per read."""
_PICKLES = (("meta", "train"), ("batches.meta", "data_batch_1"))
"""Files of the Python version."""


@dataclass(frozen=True)
class CifarVersion:
    """Record layout of a CIFAR version.

    Args:
        name: data set name.
        labels: label bytes in order, with their numbers of classes. The last is the default.
        name_files: file with the class names of each label.
    """

    name: str
    labels: dict[str, int]
    name_files: dict[str, str]

    @property
    def record(self) -> int:
        """Return the number of bytes per record."""
        return len(self.labels) + PIXELS

    def label(self, given: str | None) -> str:
        """Return the given label, or the usual label."""
        return pick_column(given, tuple(reversed(self.labels)), list(self.labels), "label_column", self.name)

    def class_names(self, file: Path, label: str) -> list[str] | None:
        """Return class names in label order from the file next to the data, or None without a file.

        Raises:
            XcompatError: the file has the wrong number of names.
        """
        named = file.parent / self.name_files[label]
        if not named.is_file():
            return None
        names = load_classes(named)
        if len(names) != self.labels[label]:
            raise XcompatError(
                f"{named} names {len(names)} classes, but {label} labels of {self.name} have {self.labels[label]}; fetch it again"
            )
        return names


VERSIONS = (
    CifarVersion("CIFAR-100", {"coarse": 20, "fine": 100}, {"coarse": "coarse_label_names.txt", "fine": "fine_label_names.txt"}),
    CifarVersion("CIFAR-10", {"label": 10}, {"label": "batches.meta.txt"}),
)


def cifar_version(files: Sequence[Path]) -> CifarVersion:
    """Return the CIFAR version with the record size of the files.

    Args:
        files: e.g. ``train.bin`` (CIFAR-100), or all ``data_batch_*.bin`` (CIFAR-10).

    Raises:
        XcompatError: no version fits all files.
    """
    sizes = {file: file.stat().st_size for file in files}
    unlike = [[file for file, size in sizes.items() if not size or size % version.record] for version in VERSIONS]
    fewest = min(unlike, key=len)
    if not fewest:
        return VERSIONS[unlike.index(fewest)]
    known = " or ".join(f"{version.record:,} bytes ({version.name})" for version in VERSIONS)
    raise XcompatError(f"the size of {fewest[0]} is not a multiple of {known}; fetch it again, or set format")


def read_cifar(files: Sequence[Path], version: CifarVersion, label: str) -> Iterator[dict[str, object]]:
    """Read records in file order.

    Args:
        files: files of the same version.
        version: from :func:`cifar_version`.
        label: label to read.

    Yields:
        Rows with a PNG image, the id ``FILE/NUMBER`` and the label index.

    Raises:
        XcompatError: a label is out of range.
    """
    place = list(version.labels).index(label)
    for file in files:
        records_NB = np.memmap(file, np.uint8, mode="r").reshape(-1, version.record)
        for start in range(0, len(records_NB), _AT_ONCE):
            for row, record_B in enumerate(np.array(records_NB[start : start + _AT_ONCE]), start):
                index = int(record_B[place])
                if index >= version.labels[label]:
                    raise XcompatError(
                        f"{file}: record {row} has the {label} label {index}, but {version.name} has {version.labels[label]} "
                        "classes; fetch the file again"
                    )
                pixels_HWC = record_B[len(version.labels) :].reshape(3, SIDE, SIDE).transpose(1, 2, 0)
                yield {IMAGE: {"bytes": _png(pixels_HWC), "path": None}, ID: f"{file.name}/{row}", LABEL: index}


def refuse_other_layouts(paths: Sequence[Path]) -> None:
    """Raise for CIFAR's Python version, and for folders with several parts.

    Args:
        paths: paths given by the user.

    Raises:
        XcompatError: names the path to give instead.
    """
    for path in paths:
        folder = path if path.is_dir() else path.parent
        if path.suffix == "" and any(all((folder / name).is_file() for name in names) for names in _PICKLES):
            raise XcompatError(
                f"{path} is from the Python version of CIFAR: pickles can run code and are not opened; fetch the binary "
                "version (cifar-100-binary.tar.gz, cifar-10-binary.tar.gz)"
            )
        parts = sorted(file.name for file in path.glob(f"*{SUFFIX}")) if path.is_dir() else []
        if len(parts) > 1 and any(part.startswith("test") for part in parts):
            raise XcompatError(f"{path} contains {', '.join(parts)}; give the paths to read, e.g. {path / parts[0]}")


def _png(pixels_HWC: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    from PIL import Image

    buffer = BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels_HWC)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
