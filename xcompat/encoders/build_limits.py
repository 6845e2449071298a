"""Limits for model configurations, which stop damaged ones before anything large is built."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json
from xcompat.core.paths import is_local

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIGURATIONS = ("config.json", "open_clip_config.json", "*/config.json")
MOST_LAYERS = 10_000
"""Maximum layers, blocks or stages; each is built separately."""
MOST_LABELS = 1_000_000
"""Maximum labels of a classifier; transformers builds a table of them."""
MOST_PIXELS = 4096
"""Maximum height and width of input images; an image is embedded to measure the model."""
MOST_TOKENS = 1_000_000
"""Maximum padded text length in tokens."""
LARGEST = 2**63 - 1
"""Largest integer in a tensor."""
SPARE_TENSORS, SPARE_NUMBERS = 10_000, 2**26
"""Additional tensors and numbers allowed beyond the weight files, e.g. for buffers and adapters."""
_REPEATED = re.compile("layer|depth|block|stage|repeat|group")
_NOT_REPEATED = re.compile("size|dim|channels|length|_id|norm")
_LABELS = re.compile("num_labels|num_classes")
_state = threading.local()


class TensorCounts(NamedTuple):
    """Number of tensors in weight files, and of all their values."""

    tensors: int
    numbers: int


def check_config(config: Mapping[str, object], name: str) -> None:
    """Raise if a configuration contains an unreasonably large number.

    Args:
        config: keys and values, nested or not.
        name: model or file name for errors.

    Example:
        >>> check_config({"vision_config": {"num_hidden_layers": 20_000_000}}, "models/new")
        Traceback (most recent call last):
        xcompat.core.errors.XcompatError: models/new: vision_config.num_hidden_layers is 20,000,000, and no model has ...
    """
    for key, value in _integers(config, ""):
        last = re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2]
        limit = LARGEST if "length" not in last else math.inf
        if _REPEATED.search(last) and not _NOT_REPEATED.search(last):
            limit = MOST_LAYERS
        elif _LABELS.search(last):
            limit = MOST_LABELS
        if abs(value) > limit:
            digits = int(value.bit_length() * math.log10(2)) + 1  # the text of a very long number takes long to make
            shown = f"{value:,}" if digits < 30 else f"a number of about {digits:,} digits"
            raise XcompatError(f"{name}: {key} is {shown}, and no model has more than {limit:,}; download the model again")


def _integers(value: object, key: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _integers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for row, inner in enumerate(value):
            yield from _integers(inner, f"{key}.{row}")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def check_config_files(folder: Path) -> None:
    """Raise if a configuration file in a model folder is not JSON or contains an unreasonably large number."""
    for pattern in CONFIGURATIONS:
        for file in sorted(folder.glob(pattern)):
            if isinstance(config := read_json(file), dict):
                check_config(config, str(file))


def check_image_size(sizes: Mapping[str, Any]) -> None:
    """Raise if an image side exceeds :data:`MOST_PIXELS`.

    Args:
        sizes: sizes by name: pairs, or transformers' dictionaries.
    """
    for name, size in sizes.items():
        for side in size if isinstance(size, tuple | list) else dict(size).values():
            if side is not None and side > MOST_PIXELS:
                raise XcompatError(
                    f"images would be resized to {side:,} pixels ({name}), over {MOST_PIXELS:,}; download the model again"
                )


@contextmanager
def limit_model_size(name: str) -> Iterator[None]:
    """Stop building a model in the block (in this thread) if it becomes far larger than its weights, or memory without weights.

    Modules register parameters and buffers before they draw values, also on the meta device.

    Args:
        name: the model's folder or Hub name.

    Raises:
        XcompatError: the model has too many tensors or numbers.
    """
    from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

    builds: list[_Build] = _state.__dict__.setdefault("builds", [])
    builds.append(build := _Build(name))

    def count(module: nn.Module, key: str, tensor: Tensor | None) -> None:
        if tensor is not None and _state.__dict__.get("builds", [None])[-1:] == [build]:
            build.count(key, tensor)

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        builds.remove(build)
        for hook in hooks:
            hook.remove()


class _Build:
    """Tensor counts for a model under construction."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors = self.numbers = 0
        self._most: TensorCounts | None = None

    def count(self, key: str, tensor: Tensor) -> None:
        if self._most is None:
            self._most = _largest_model(self.name)
        self.tensors += 1
        self.numbers += tensor.numel()
        if self.tensors > self._most.tensors or self.numbers > self._most.numbers:
            raise XcompatError(
                f"{self.name}: its configuration asks for a model far larger than its weights or this machine's memory "
                f"(over {self.numbers:,} numbers in {self.tensors:,} tensors, at {key}); download the model again"
            )


def _largest_model(name: str) -> TensorCounts:
    """Return the maximum tensors and numbers to register when building and loading."""
    found = weights_of(name)
    if found is None:
        return TensorCounts(100_000, _memory() // 4)
    # building, loading and adapters each register all tensors; some tensors are split or tied
    return TensorCounts(8 * found.tensors + SPARE_TENSORS, 16 * found.numbers + SPARE_NUMBERS)


def weights_of(name: str) -> TensorCounts | None:
    """Return a model's tensor counts, including an adapter checkpoint's base; None if files are missing or unreadable."""
    folders = _folders(name)
    bases = [base for folder in folders if (base := _base_of(folder)) is not None]
    counted = [_count_weights(each) for each in (folders, *(map(_folders, bases[:1])))]
    known = [each for each in counted if each is not None]
    if len(known) < len(counted):
        return None
    return TensorCounts(sum(each.tensors for each in known), sum(each.numbers for each in known))


def _count_weights(folders: list[Path]) -> TensorCounts | None:
    files = [file for folder in folders for pattern in ("*.safetensors", "*/*.safetensors") for file in folder.glob(pattern)]
    tensors = numbers = 0
    try:
        for file in files:
            with safe_open(file, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - not a dictionary
                    tensors, numbers = tensors + 1, numbers + math.prod(weights.get_slice(key).get_shape())
    except (OSError, SafetensorError):  # loading the weights reports the error
        return None
    return TensorCounts(tensors, numbers) if files else None


def _folders(name: str) -> list[Path]:
    """Return a model's folder, or its revisions in the Hub cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = name.removeprefix("hf-hub:").removeprefix("sentence-transformers:")
    if Path(name).is_dir():
        return [Path(name)]
    if is_local(name):
        return []
    cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return sorted(cached.glob("*"))


def _base_of(folder: Path) -> str | None:
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("weights") == "adapters":
            return str(config["encoder"]["name"])
    return None


def _memory() -> int:
    """Return the machine's memory in bytes, 256 GB if unknown."""
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**38
