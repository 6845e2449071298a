"""Limits on what a model's configuration may ask for: damage is refused before anything large is built."""

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

from xcompat.core.errors import XcompatError
from xcompat.core.files import read_json
from xcompat.core.paths import is_local

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIGURATIONS = ("config.json", "open_clip_config.json", "*/config.json")
MOST_LAYERS = 10_000
"""Layers, blocks or stages of a model: each is built by itself."""
MOST_LABELS = 1_000_000
"""Labels of a classifier: transformers writes a table of them."""
MOST_PIXELS = 4096
"""Height and width of a model's input images: one is embedded to measure the model."""
MOST_TOKENS = 1_000_000
"""Tokens that every text is padded to."""
LARGEST = 2**63 - 1
"""Largest integer of a tensor."""
SPARE_TENSORS, SPARE_NUMBERS = 10_000, 2**26
"""How many more tensors and numbers than its file a small model may have, e.g. buffers and adapters."""
_REPEATED = re.compile("layer|depth|block|stage|repeat|group")
_NOT_REPEATED = re.compile("size|dim|channels|length|_id|norm")
_LABELS = re.compile("num_labels|num_classes")
_state = threading.local()


class Contents(NamedTuple):
    """Number of tensors in a file of weights, and of all their values."""

    tensors: int
    numbers: int


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Refuse a configuration with a number that no model has.

    Args:
        config: the keys and values of a JSON file, nested or not.
        name: of the model or the file, for the error.

    Raises:
        XcompatError: naming the key, its value and the limit.

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


def _integers(value: Any, key: str) -> Iterator[tuple[str, int]]:  # noqa: ANN401 - any JSON value
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _integers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for row, inner in enumerate(value):
            yield from _integers(inner, f"{key}.{row}")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def check_config_files(folder: Path) -> None:
    """Refuse a folder of a model, or of the modules of one, if a configuration in it has a number that no model has.

    Args:
        folder: nothing is checked if it does not exist.

    Raises:
        XcompatError: as :func:`check_config` raises it, or a configuration is no JSON.
    """
    for pattern in CONFIGURATIONS:
        for file in sorted(folder.glob(pattern)):
            if isinstance(config := read_json(file), dict):
                check_config(config, str(file))


def check_image_size(sizes: Mapping[str, Any]) -> None:
    """Refuse sizes of images that no model takes.

    Args:
        sizes: by name; each is a pair, or as image processors of transformers have it.

    Raises:
        XcompatError: one is above :data:`MOST_PIXELS`.
    """
    for name, size in sizes.items():
        for side in size if isinstance(size, tuple | list) else dict(size).values():
            if side is not None and side > MOST_PIXELS:
                raise XcompatError(
                    f"images would be resized to {side:,} pixels ({name}), over {MOST_PIXELS:,}; download the model again"
                )


@contextmanager
def limit_model_size(name: str) -> Iterator[None]:
    """Stop the building of a model in the block, in this thread, once it is far larger than its weights.

    Without weights to compare with, a model must fit into the memory of this machine. Modules register every parameter and
    buffer when they are built, on the meta device too, and before their values are drawn.

    Args:
        name: folder or Hub name of the model.

    Raises:
        XcompatError: the model has more tensors or numbers than it can have.
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
    """The tensors of a model that is being built.

    Args:
        name: folder or Hub name of the model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors = self.numbers = 0
        self._most: Contents | None = None

    def count(self, key: str, tensor: Tensor) -> None:
        """Count a tensor, and refuse it if it is one too many."""
        if self._most is None:
            self._most = _largest_model(self.name)
        self.tensors += 1
        self.numbers += tensor.numel()
        if self.tensors > self._most.tensors or self.numbers > self._most.numbers:
            raise XcompatError(
                f"{self.name}: its configuration asks for a model far larger than its weights or this machine's memory "
                f"(over {self.numbers:,} numbers in {self.tensors:,} tensors, at {key}); download the model again"
            )


def _largest_model(name: str) -> Contents:
    """Return the most tensors and numbers that a model may register while it is built and loaded."""
    found = weights_of(name)
    if found is None:
        return Contents(100_000, _memory() // 4)
    # registered when the model is built, when its weights arrive, and when adapters wrap its layers; some are split or tied
    return Contents(8 * found.tensors + SPARE_TENSORS, 16 * found.numbers + SPARE_NUMBERS)


def weights_of(name: str) -> Contents | None:
    """Count the weights of a model, and of the base of a checkpoint of adapters, by the headers of its files.

    Args:
        name: folder, or Hub name of a model that has been fetched.

    Returns:
        None if some are missing or cannot be read.
    """
    folders = _folders(name)
    bases = [base for folder in folders if (base := _base_of(folder)) is not None]
    counted = [_count_weights(each) for each in (folders, *(map(_folders, bases[:1])))]
    known = [each for each in counted if each is not None]
    if len(known) < len(counted):
        return None
    return Contents(sum(each.tensors for each in known), sum(each.numbers for each in known))


def _count_weights(folders: list[Path]) -> Contents | None:
    from safetensors import SafetensorError, safe_open

    files = [file for folder in folders for pattern in ("*.safetensors", "*/*.safetensors") for file in folder.glob(pattern)]
    tensors = numbers = 0
    try:
        for file in files:
            with safe_open(file, "pt") as weights:
                for key in weights.keys():  # noqa: SIM118 - it is no dictionary
                    tensors, numbers = tensors + 1, numbers + math.prod(weights.get_slice(key).get_shape())
    except (OSError, SafetensorError):  # whoever loads them says what is wrong
        return None
    return Contents(tensors, numbers) if files else None


def _folders(name: str) -> list[Path]:
    """Return the folder of a model, or of each of its revisions in the Hub's cache."""
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
    """Return the name of the base that a checkpoint of adapters leaves out."""
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("weights") == "adapters":
            return str(config["encoder"]["name"])
    return None


def _memory() -> int:
    """Return the bytes of this machine's memory; 256 GB where the system does not say."""
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 2**38
