"""What a stage's folder remembers: the recipe it was begun with, how its training ended, and what its report was made of."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xcompat.errors import XcompatError
from xcompat.files import atomic_path, read_json
from xcompat.training.recipe import explain
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.yaml_files import parse_yaml

RECIPE, ENVIRONMENT, DONE, EVALUATED = "recipe.yaml", "environment.json", "done.json", "evaluated.json"
CHOICE, OLD_MEMORY = "choice.json", "old_memory.safetensors"
JUDGED_ON = ("data.test", "data.zero_shot", "data.queries", "data.gallery", "data.test_subset")
"""Settings that only the report depends on."""

R = TypeVar("R", bound=BaseModel)


class Done(BaseModel):
    """How a training ended.

    Args:
        seconds: it took.
        model: digest of its weights.
        inputs: digests of the earlier stages' models that it was made from.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: float
    model: str
    inputs: dict[str, str]


class Evaluated(BaseModel):
    """What a report was made of.

    Args:
        settings: how it was judged.
        models: digests of the models that were.
        data: what they were judged on; a report of a version that did not record it was made of what its recipe names.
        files: digests of the files of that data; a report of a version that did not record them holds.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    settings: dict[str, Any]
    models: dict[str, str]
    data: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)

    def holds(self, wanted: Evaluated) -> bool:
        """Return whether a report of this is one of what is wanted now; files that are gone are as they were."""
        known = {key: self.files.get(key, digest) for key, digest in wanted.files.items()}
        return self.model_copy(update={"files": known}) == wanted


def read_record(file: Path, kind: type[R]) -> R:
    """Read what a stage's folder remembers.

    Args:
        file: in the folder.
        kind: what it holds.

    Returns:
        The record.

    Raises:
        XcompatError: it is missing, or is not what was written.
    """
    try:
        return kind.model_validate(read_json(file))
    except ValidationError as error:
        raise XcompatError(
            f"{file} is not as it was written ({explain(error, kind)}); bring it back, or delete {file.parent} to make it again"
        ) from None


def settings_of(settings: StageRecipe, seed: int) -> dict[str, Any]:
    """Return what a stage is trained by, as :func:`write_recipe` writes it.

    Args:
        settings: the stage's.
        seed: of the recipe.

    Returns:
        Any JSON.
    """
    return settings.resolved() | {"seed": seed}


def write_recipe(folder: Path, settings: dict[str, Any]) -> None:
    """Write what a stage is trained by and judged on into its folder."""
    with atomic_path(folder / RECIPE) as temporary:
        temporary.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def begun_with(folder: Path) -> dict[str, Any]:
    """Return what a stage was begun with; settings and options that there were not at the time have their defaults.

    Args:
        folder: the stage's.

    Returns:
        As :func:`settings_of` gives it.

    Raises:
        XcompatError: what is written there is no recipe.
    """
    file = folder / RECIPE
    try:
        written = parse_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise XcompatError(f"{file} is not valid YAML: {' '.join(str(error).split())}; delete {folder} to begin again") from None
    if not isinstance(written, dict):
        raise XcompatError(f"{file} must hold keys and values; delete {folder} to begin again")
    seed = written.pop("seed", None)
    with suppress(ValidationError):  # of a version whose fields had other names or values: they differ
        written = StageRecipe.model_validate(written).resolved()
    return {**written, "seed": seed}


def differences(settings: dict[str, Any], begun: dict[str, Any], learns_from_texts: bool) -> list[str]:
    """Name the settings by which a trained model would be another one.

    Args:
        settings: of the recipe now.
        begun: of the recipe that the folder was begun with.
        learns_from_texts: whether the captions of the test set are left out of what is learned.

    Returns:
        The keys, sorted.
    """
    now, then = _flat(settings), _flat(begun)
    judged = set(JUDGED_ON) - ({"data.test"} if learns_from_texts else set())
    return sorted(key for key in {*now, *then} - {"evaluation", *judged} if now.get(key) != then.get(key))


def judged_on(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that say what a stage is judged on."""
    flat = _flat(settings)
    return {key: flat.get(key) for key in JUDGED_ON}


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's settings with each of its data, and each option of its method, on its own."""
    parts = {name: settings.get(name) or {} for name in ("data", "options")}
    inner = {f"{name}.{key}": value for name, part in parts.items() if isinstance(part, dict) for key, value in part.items()}
    return {key: value for key, value in settings.items() if key not in parts} | inner
