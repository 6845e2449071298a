"""Class names and prompts for zero-shot classification, from open_clip and timm."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xcompat.core.errors import XcompatError, nearest

SETS = {
    "imagenet": None,
    "imagenet-sketch": None,
    "imagenet-v2": None,
    "imagenet-a": "imagenet_a_indices.txt",
    "imagenet-r": "imagenet_r_indices.txt",
    "mini-imagenet": "mini_imagenet_indices.txt",
}
"""Data set -> timm's file with its ImageNet class numbers; None for all 1000 classes."""
TEMPLATES = {"openai": "OPENAI_IMAGENET_TEMPLATES", "simple": "SIMPLE_IMAGENET_TEMPLATES"}
"""Prompt list -> its name in open_clip: CLIP's 80 prompts, and 7 equally good ones."""


def class_names(name: str) -> list[str]:
    """Return a data set's class names in the order of its WordNet folders.

    They are open_clip's: 'great white shark', not 'great white shark, white shark, man-eater'.

    Args:
        name: a name in :data:`SETS`.

    Example:
        >>> len(class_names("imagenet")), class_names("imagenet-r")[:2]
        (1000, ['goldfish', 'great white shark'])
    """
    if name not in SETS:
        raise XcompatError(f"no class names for {name!r}; {nearest(name, SETS)}")
    names = _read_metadata()["IMAGENET_CLASSNAMES"]
    if (listed := SETS[name]) is None:
        return list(names)
    chosen = (_package_folder("timm") / "data" / "_info" / listed).read_text(encoding="utf-8").split()
    return [names[int(index)] for index in chosen]


def prompt_templates(name: str) -> list[str]:
    """Return a prompt list in :data:`TEMPLATES`; ``{}`` is the class.

    Example:
        >>> prompt_templates("simple")[0], len(prompt_templates("openai"))
        ('itap of a {}.', 80)
    """
    return [template("{}") for template in _read_metadata()[TEMPLATES[name]]]


def _read_metadata() -> dict[str, Any]:
    """Run open_clip's file of names and prompts alone; importing the package takes seconds."""
    return runpy.run_path(str(_package_folder("open_clip") / "zero_shot_metadata.py"))


def _package_folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return Path(spec.submodule_search_locations[0])
