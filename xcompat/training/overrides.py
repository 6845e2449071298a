"""Command-line overrides of a recipe: ``key=value``."""

from __future__ import annotations

from typing import Any

import yaml

from xcompat.core.errors import XcompatError
from xcompat.training.stage_recipe import STAGE_PREFIX
from xcompat.training.yaml_files import RecipeLoader, parse_yaml


def refuse_shadowed(raw: dict[str, object], key: str) -> None:
    """Refuse an override hidden by a stage's own setting.

    Args:
        raw: the parsed YAML.
        key: overridden key, dots for nesting.

    Raises:
        XcompatError: a stage sets the key, or a list or name above it (except ``stage:NAME``).
    """
    stages, parts = raw.get("stages"), key.split(".")
    for number, stage in enumerate(stages if isinstance(stages, list) else []):
        met, place = _follow_key(stage, parts) if isinstance(stage, dict) else ([], None)
        # the stage behind the name follows the override itself
        refers = isinstance(place, str) and place.startswith(STAGE_PREFIX) and met != parts
        if place is not None and not refers:
            name, whole = _name(stage) or number, ".".join(met)
            inner = key if isinstance(place, list) else whole
            raise XcompatError(f"stage {number} ({name}) sets {whole} itself: override stages.{name}.{inner}")


def _follow_key(stage: dict[str, object], parts: list[str]) -> tuple[list[str], object]:
    """Follow a key to the first value that is not a dictionary; return the parts and the value."""
    place: Any = stage
    for depth, part in enumerate(parts):
        if not isinstance(place, dict):
            return parts[:depth], place
        place = place.get(part)
    return parts, place


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set a value in nested dictionaries.

    Args:
        raw: changed in place.
        override: ``key=value``, dots for nesting, YAML value; stages by number or name.

    Raises:
        XcompatError: invalid form, or unknown key.
    """
    # not OmegaConf: it would resolve ${oc.env:...} of an untrusted recipe, and has no limits like LimitedLoader's
    key, separator, value = override.partition("=")
    if not separator:
        raise XcompatError(f"invalid override {override!r}; write key=value, e.g. training.learning_rate=1e-3")
    *parents, last = key.split(".")
    place: Any = raw
    try:
        parsed = parse_yaml(value, RecipeLoader)
    except yaml.YAMLError:
        raise XcompatError(f"{override!r}: the value is not valid YAML; put it in quotes") from None
    for depth, parent in enumerate(parents):
        place = _entry(place, parent, key) if isinstance(place, list) else _section(place, parents[:depth], key, parent)
    _require_keys(place, parents, key)
    place[last] = parsed


def _section(place: Any, where: list[str], key: str, name: str) -> object:  # noqa: ANN401 - what YAML holds
    _require_keys(place, where, key)
    if place.get(name) is None:
        place[name] = {}
    return place[name]


def _require_keys(place: object, where: list[str], key: str) -> None:
    if not isinstance(place, dict):
        whole = ".".join(where)
        raise XcompatError(f"{key}: {whole} is not a mapping; set {whole} as a whole")


def _entry(entries: list[object], which: str, key: str) -> object:
    if which.isdigit() and int(which) < len(entries):
        return entries[int(which)]
    named = {str(name): each for each in reversed(entries) if isinstance(each, dict) and (name := _name(each)) is not None}
    if which in named:
        return named[which]
    called = f", and named {', '.join(reversed(named))}" if named else ""
    raise XcompatError(f"{key}: unknown stage {which}; stages are numbered from 0 to {len(entries) - 1}{called}")


def _name(stage: dict[str, object]) -> Any:  # noqa: ANN401 - what YAML holds
    return stage.get("name", stage.get("method"))
