"""Class names and prompts for zero-shot classification, from open_clip and timm."""

from __future__ import annotations

from importlib.resources import files

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
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

    if name not in SETS:
        raise XcompatError(f"no class names for {name!r}; {nearest(name, SETS)}")
    if (listed := SETS[name]) is None:
        return list(IMAGENET_CLASSNAMES)
    chosen = files("timm.data").joinpath("_info", listed).read_text(encoding="utf-8").split()
    return [IMAGENET_CLASSNAMES[int(index)] for index in chosen]


def prompt_templates(name: str) -> list[str]:
    """Return a prompt list in :data:`TEMPLATES`; ``{}`` is the class.

    Example:
        >>> prompt_templates("simple")[0], len(prompt_templates("openai"))
        ('itap of a {}.', 80)
    """
    from open_clip import zero_shot_metadata

    return [template("{}") for template in getattr(zero_shot_metadata, TEMPLATES[name])]
