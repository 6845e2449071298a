"""Permissions and checksums for saved model files."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

from xcompat.core.checksums import CHECKSUMS, changes, write_checksums
from xcompat.core.errors import XcompatError
from xcompat.core.files import list_entries, read_json

LORA = "lora"
"""Folder with the LoRA in PEFT's format, in checkpoints without base weights."""
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
"""Name patterns of model and preprocessing files."""


def is_xcompat_model(folder: Path) -> bool:
    """Return whether a folder contains an xcompat model.

    Raises:
        XcompatError: its ``config.json`` is not a JSON object.
    """
    config = folder / "config.json"
    about = read_json(config) if config.exists() else {}
    if not isinstance(about, dict):
        raise XcompatError(f"{config} is not a model configuration; download or train the model again")
    return str(about.get("model_type", "")).startswith("xcompat")


def copy_permissions(folder: str | Path, config: str = "config.json") -> None:
    """Give weights their configuration's permissions, because safetensors makes them readable by the owner only.

    Args:
        folder: a saved model's folder.
        config: its configuration file's name.
    """
    beside = Path(folder) / config
    if beside.exists():  # only the first process of several writes
        for weights in list_entries(Path(folder), "*.safetensors"):
            shutil.copymode(beside, weights)


def record_model(folder: str | Path) -> None:
    """Write a saved model's checksums."""
    write_checksums(Path(folder), (file for file in Path(folder).iterdir() if file.is_file() and _is_read(file.name)))


def require_whole(folder: str | Path, in_part: bool = False) -> None:
    """Raise if a model file has changed since saving. Models without checksums pass.

    Args:
        folder: the model folder.
        in_part: whether files can be missing, e.g. after a partial download.
    """
    folder = Path(folder)
    try:
        wrong = next(changes(folder, lambda name: _is_read(name) and (not in_part or (folder / name).exists())), None)
    except XcompatError as error:
        wrong = str(error)
    if wrong is not None:
        raise XcompatError(
            f"{wrong}; restore it from the model's source, or delete {folder / CHECKSUMS} if you changed it yourself"
        )


def _is_read(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in PATTERNS)
