"""Public names of classes and prompts for zero-shot classification, as libraries that are installed hold them."""

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
"""Name of a data set -> timm's list of which of ImageNet's 1000 classes it has; None for all."""
TEMPLATES = {"openai": "OPENAI_IMAGENET_TEMPLATES", "simple": "SIMPLE_IMAGENET_TEMPLATES"}
"""Name of a list of prompts -> open_clip's name of it: CLIP's 80, and the 7 that do as well."""


def class_names(name: str) -> list[str]:
    """Return the names of a data set's classes, in the order of its folders, which WordNet's numbers sort.

    They are open_clip's, as CLIP was judged on: 'great white shark', not 'great white shark, white shark, man-eater'.

    Args:
        name: one of :data:`SETS`.

    Raises:
        XcompatError: it is none of them.

    Example:
        >>> len(class_names("imagenet")), class_names("imagenet-r")[:2]
        (1000, ['goldfish', 'great white shark'])
    """
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

    if name not in SETS:
        raise XcompatError(f"no class names of {name!r} are known; {nearest(name, SETS)}")
    if (listed := SETS[name]) is None:
        return list(IMAGENET_CLASSNAMES)
    chosen = files("timm.data").joinpath("_info", listed).read_text(encoding="utf-8").split()
    return [IMAGENET_CLASSNAMES[int(index)] for index in chosen]


def prompt_templates(name: str) -> list[str]:
    """Return prompts of one of :data:`TEMPLATES`, ``{}`` standing for the class.

    Example:
        >>> prompt_templates("simple")[0], len(prompt_templates("openai"))
        ('itap of a {}.', 80)
    """
    from open_clip import zero_shot_metadata

    return [template("{}") for template in getattr(zero_shot_metadata, TEMPLATES[name])]
