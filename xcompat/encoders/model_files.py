"""The files of a saved model: their permissions, and their checksums, so that a damaged model is refused."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

from xcompat.core.errors import XcompatError
from xcompat.core.files import listed, read_json
from xcompat.core.folder_checksums import CHECKSUMS, changes, write_checksums

LORA = "lora"
"""Folder in a checkpoint without its base that PEFT reads."""
PATTERNS = (
    "*config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
)
"""Name patterns of the files of a model and its preprocessing."""


def is_own(folder: Path) -> bool:
    """Return whether a folder holds a model of this library, by its configuration.

    Raises:
        XcompatError: the configuration is none.
    """
    config = folder / "config.json"
    about = read_json(config) if config.exists() else {}
    if not isinstance(about, dict):
        raise XcompatError(f"{config} holds no configuration of a model; fetch or train the model again")
    return str(about.get("model_type", "")).startswith("xcompat")


def open_weights(folder: str | Path, config: str = "config.json") -> None:
    """Give weights the permissions of their configuration; safetensors makes them readable for their owner alone.

    Args:
        folder: of a model that was just saved.
        config: name of its configuration file.
    """
    beside = Path(folder) / config
    if beside.exists():  # only the first process of several writes
        for weights in listed(Path(folder), "*.safetensors"):
            shutil.copymode(beside, weights)


def record_model(folder: str | Path) -> None:
    """Write the checksums of a model that was just saved.

    Args:
        folder: the model's.
    """
    write_checksums(Path(folder), (file for file in Path(folder).iterdir() if file.is_file() and _is_read(file.name)))


def require_whole(folder: str | Path, in_part: bool = False) -> None:
    """Refuse a model whose files changed since it was saved; a model without checksums passes.

    Args:
        folder: the model's.
        in_part: whether files may be missing, because only some were fetched.

    Raises:
        XcompatError: a file has changed; the error names the first.
    """
    folder = Path(folder)
    try:
        wrong = next(changes(folder, lambda name: _is_read(name) and (not in_part or (folder / name).exists())), None)
    except XcompatError as error:
        wrong = str(error)
    if wrong is not None:
        raise XcompatError(
            f"{wrong}; bring it back from where the model came from, or delete {folder / CHECKSUMS} if you changed it yourself"
        )


def _is_read(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in PATTERNS)
