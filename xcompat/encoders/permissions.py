"""Who may read weights: safetensors writes them for their owner alone, whatever the umask says."""

from __future__ import annotations

import shutil
from pathlib import Path


def open_weights(folder: str | Path, config: str = "config.json") -> None:
    """Give the weights of a folder the permissions of the configuration beside them.

    Args:
        folder: where a model was saved just now.
        config: name of its configuration.
    """
    beside = Path(folder) / config
    if beside.exists():  # only the first process of several writes
        for weights in Path(folder).glob("*.safetensors"):
            shutil.copymode(beside, weights)
