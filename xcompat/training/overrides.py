"""Command-line overrides of a recipe: ``key=value``."""

from __future__ import annotations

from typing import Any

import yaml

from xcompat.core.errors import XcompatError
from xcompat.training.stage_recipe import STAGE_PREFIX
from xcompat.training.yaml_files import RecipeLoader, parse_yaml


def refuse_shadowed(raw: dict[str, Any], key: str) -> None:
    """Refuse an override of an inherited value if a stage sets its own, which would win silently.

    Args:
        raw: a recipe as its YAML has it.
        key: the overridden key, dots for nesting.

    Raises:
        XcompatError: a stage sets the key itself, or a list or a name above it; a name of another stage is not meant.
    """
    stages, parts = raw.get("stages"), key.split(".")
    for number, stage in enumerate(stages if isinstance(stages, list) else []):
        met, place = _followed(stage, parts) if isinstance(stage, dict) else ([], None)
        # the settings of the stage that a name refers to follow the override themselves
        refers = isinstance(place, str) and place.startswith(STAGE_PREFIX) and met != parts
        if place is not None and not refers:
            name, whole = _name(stage) or number, ".".join(met)
            inner = key if isinstance(place, list) else whole
            raise XcompatError(f"{whole} is set by stage {number} ({name}) itself: override stages.{name}.{inner}")


def _followed(stage: dict[str, Any], parts: list[str]) -> tuple[list[str], Any]:
    """Follow a key into a stage: the parts that lead to what has no keys of its own, or to the end, and what is there."""
    place: Any = stage
    for depth, part in enumerate(parts):
        if not isinstance(place, dict):
            return parts[:depth], place
        place = place.get(part)
    return parts, place


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one value in nested dictionaries.

    Args:
        raw: changed in place.
        override: ``key=value``, dots for nesting, the value read as YAML; a stage is called by its number or its name.

    Raises:
        XcompatError: it has another form, or the key leads nowhere.
    """
    # Not OmegaConf: it resolves ${oc.env:...} of a stranger's recipe, and reads YAML without the limits of LimitedLoader
    key, separator, value = override.partition("=")
    if not separator:
        raise XcompatError(f"{override!r} is no override; write key=value, such as training.learning_rate=1e-3")
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


def _section(place: Any, where: list[str], key: str, name: str) -> Any:  # noqa: ANN401 - what YAML holds
    """Return what a key holds; one that holds nothing gets keys of its own."""
    _require_keys(place, where, key)
    if place.get(name) is None:
        place[name] = {}
    return place[name]


def _require_keys(place: Any, where: list[str], key: str) -> None:  # noqa: ANN401 - what YAML holds
    if not isinstance(place, dict):
        whole = ".".join(where)
        raise XcompatError(f"{key}: {whole} has no keys of its own; override {whole} as a whole")


def _entry(entries: list[Any], which: str, key: str) -> Any:  # noqa: ANN401 - what YAML holds
    """Return a stage, or an entry of another list, by its number or its name."""
    if which.isdigit() and int(which) < len(entries):
        return entries[int(which)]
    named = {str(name): each for each in reversed(entries) if isinstance(each, dict) and (name := _name(each)) is not None}
    if which in named:
        return named[which]
    called = f", and are called {', '.join(reversed(named))}" if named else ""
    raise XcompatError(f"{key}: there is no stage {which}; stages count from 0 to {len(entries) - 1}{called}")


def _name(stage: dict[str, Any]) -> Any:  # noqa: ANN401 - what YAML holds
    """Return the name of a stage, which is that of its method unless given; None if neither is."""
    return stage.get("name", stage.get("method"))
