"""The records in a stage's folder: its recipe, the end of its training, and the inputs of its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, read_json
from xcompat.report.content import LossPoint
from xcompat.report.storage import load_report, report_file
from xcompat.training.recipe import explain
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.yaml_files import parse_yaml

RECIPE, ENVIRONMENT, DONE, EVALUATED = "recipe.yaml", "environment.json", "done.json", "evaluated.json"
LOG = "log_history.json"
CHOICE, OLD_MEMORY = "choice.json", "old_memory.safetensors"
JUDGED_ON = (
    "data.test",
    "data.zero_shot",
    "data.queries",
    "data.gallery",
    "data.test_subset",
    "data.judged_texts",
    "data.templates",
)
"""Settings of the test data, on which only the report depends."""

_LOG = TypeAdapter(list[dict[str, Any]])
_POINTS = TypeAdapter(list[LossPoint])
_MOST_POINTS = 1000  # a plot shows no more

R = TypeVar("R", bound=BaseModel)


class Done(BaseModel):
    """The record of a finished training.

    Args:
        seconds: its duration; of one that was stopped, with the training before the checkpoint that it continued from.
        model: digest of the weights.
        inputs: digests of the earlier stages' models that it was made from, by stage.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: float
    model: str
    inputs: dict[str, str]


class Evaluated(BaseModel):
    """The record of a report's inputs.

    Args:
        settings: settings of the evaluation.
        models: digests of the judged models.
        data: settings of the test data; empty in records of older versions, which used the test data of their recipe.
        files: digests of the test files; empty in records of older versions, which stay valid.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    settings: dict[str, Any]
    models: dict[str, str]
    data: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)

    def holds(self, wanted: Evaluated) -> bool:
        """Return whether the report is still valid for the wanted inputs.

        Files without a recorded digest count as unchanged, and settings that are new since the record as not given.
        """
        files = {key: self.files.get(key, digest) for key, digest in wanted.files.items()}
        data = {key: self.data.get(key) for key in wanted.data}
        return self.model_copy(update={"files": files, "data": data}) == wanted


def read_record(file: Path, kind: type[R]) -> R:
    """Read a record of a stage's folder.

    Args:
        file: the record's file.
        kind: the record's type.

    Raises:
        XcompatError: the file is missing or damaged.
    """
    try:
        return kind.model_validate(read_json(file))
    except ValidationError as error:
        raise XcompatError(
            f"{file} is not as it was written ({explain(error, kind)}); bring it back, or delete {file.parent} to make it again"
        ) from None


@contextmanager
def damage_told(file: Path, without: str) -> Iterator[None]:
    """Say in one line that a file which a run can go without is not as it was written."""
    try:
        yield
    except ValidationError as error:
        raise XcompatError(
            f"{file} is not as it was written ({error.errors()[0]['msg']}); delete it to go without {without}"
        ) from None


def logged_losses(folder: Path) -> list[LossPoint]:
    """Return the losses that were logged while a stage was trained, in steps that ascend.

    Args:
        folder: the stage's.

    Returns:
        At most 1,000 of them, evenly, and the last; none if it was solved, or trained by a version that kept none.

    Raises:
        XcompatError: the file was damaged.
    """
    file = folder / LOG
    if not file.exists():
        return []
    with damage_told(file, "a curve"):
        entries = [entry for entry in _LOG.validate_python(read_json(file)) if "loss" in entry]
        known = [{key: entry[key] for key in LossPoint._fields if key in entry} for entry in entries]
        points = _POINTS.validate_python(known)
    every = -(-len(points) // _MOST_POINTS)
    return points if every <= 1 else points[-1::-every][::-1]


def settings_of(settings: StageRecipe, seed: int) -> dict[str, Any]:
    """Return all settings of a stage as JSON, with the recipe's seed, as :func:`write_recipe` writes them."""
    return settings.resolved() | {"seed": seed}


def write_recipe(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a stage into its folder."""
    with atomic_path(folder / RECIPE) as temporary:
        temporary.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def begun_with(folder: Path) -> dict[str, Any]:
    """Read the settings that a stage was begun with; settings that are new since then have their defaults.

    Args:
        folder: the stage's.

    Returns:
        The settings as :func:`settings_of` returns them.

    Raises:
        XcompatError: the written recipe is damaged.
    """
    file = folder / RECIPE
    try:
        written = parse_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise XcompatError(f"{file} is not valid YAML: {' '.join(str(error).split())}; delete {folder} to begin again") from None
    if not isinstance(written, dict):
        raise XcompatError(f"{file} must hold keys and values; delete {folder} to begin again")
    seed = written.pop("seed", None)
    with suppress(ValidationError):  # a recipe of an older version with other fields, which therefore differs
        written = StageRecipe.model_validate(written).resolved()
    return {**written, "seed": seed}


def differences(settings: dict[str, Any], begun: dict[str, Any], learns_from_texts: bool) -> list[str]:
    """Return the keys, sorted, of changed settings with which training would give another model.

    Args:
        settings: of the recipe now.
        begun: of the recipe that the folder was begun with.
        learns_from_texts: whether the stage learns from texts, from which the test set's are excluded.

    Returns:
        Such as ``training.learning_rate``: as deep as both have keys.
    """
    now, then = _flat(settings), _flat(begun)
    judged = set(JUDGED_ON) - ({"data.test", "data.judged_texts"} if learns_from_texts else set())
    kept = sorted({*now, *then} - {"evaluation", "allow_worse", *judged})
    return sorted(deep for key in kept for deep in _changed(now.get(key), then.get(key), key))


def _changed(now: Any, then: Any, key: str) -> Iterator[str]:  # noqa: ANN401 - what YAML holds
    """Yield the keys under which two values differ, as deep as both are dictionaries."""
    if isinstance(now, dict) and isinstance(then, dict):
        for inner in {*now, *then}:
            yield from _changed(now.get(inner), then.get(inner), f"{key}.{inner}")
    elif now != then:
        yield key


def judged_on(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a stage's test data."""
    flat = _flat(settings)
    return {key: flat.get(key) for key in JUDGED_ON}


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's settings with ``data`` and ``options`` flattened to dotted keys."""
    parts = {name: settings.get(name) or {} for name in ("data", "options")}
    inner = {f"{name}.{key}": value for name, part in parts.items() if isinstance(part, dict) for key, value in part.items()}
    return {key: value for key, value in settings.items() if key not in parts} | inner


def find_model(target: Path) -> Path:
    """Find the model of a run, or the checkpoint itself.

    Args:
        target: a run's folder, a stage's, or a checkpoint's.

    Returns:
        The folder with the model's files.

    Raises:
        XcompatError: there is none, or there are several and none is known to be the last stage's.
    """
    from xcompat.hub.endpoint import CONFIGS

    def is_model(folder: Path) -> bool:
        return any((folder / name).exists() for name in CONFIGS)

    for folder in (target, target / "model"):
        if is_model(folder):
            return folder
    stages = sorted(path.parent for path in target.glob("*/model") if is_model(path))
    if not stages:
        raise XcompatError(f"{target} holds no model; name the folder of a finished run, or of a checkpoint")
    if len(stages) > 1 and (report := report_file(target)).exists():
        last = list(load_report(report).seconds)[-1:]
        stages = [stage for stage in stages if stage.name in last] or stages
    if len(stages) > 1:
        names = ", ".join(stage.name for stage in stages)
        raise XcompatError(f"{target} holds several models ({names}); name one of them, such as {stages[0]}")
    return stages[0] / "model"


def require_ended(run: Path) -> bool:
    """Return whether a folder is that of a run that ended with a report, and not of one of its stages.

    Raises:
        XcompatError: it is neither.
    """
    if (run / EVALUATED).is_file():
        return True
    if not (run / RECIPE).is_file():
        raise XcompatError(f"{run} is neither a gallery nor a run that ended with a report")
    return False
