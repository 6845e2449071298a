"""Records in a stage's folder: recipe, finished training, report inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from xcompat.core.checksums import file_record
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, read_json
from xcompat.core.plugins import class_file
from xcompat.report.content import LossPoint
from xcompat.report.storage import load_report, report_file
from xcompat.training.recipe import explain
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.yaml_files import parse_yaml

RECIPE, ENVIRONMENT, DONE, EVALUATED = "recipe.yaml", "environment.json", "done.json", "evaluated.json"
LOG = "log_history.json"
CHOICE, OLD_MEMORY = "choice.json", "old_memory.safetensors"
ADDED = ("seed", "code")
"""Keys of a stage's written recipe that are not settings of the stage."""
JUDGED_ON = (
    "data.test",
    "data.zero_shot",
    "data.queries",
    "data.gallery",
    "data.test_subset",
    "data.judged_texts",
    "data.templates",
)
"""Settings of the test data, which affect only the report."""

_LOG = TypeAdapter(list[dict[str, Any]])
_POINTS = TypeAdapter(list[LossPoint])
_MOST_POINTS = 1000  # a plot shows no more

R = TypeVar("R", bound=BaseModel)


class Done(BaseModel):
    """Record of a finished training.

    Args:
        seconds: duration, with training before a resume.
        model: digest of the weights.
        inputs: stage name -> digest of the model it was made from.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    seconds: float
    model: str
    inputs: dict[str, str]


class EvaluationRecord(BaseModel):
    """Record of a report's inputs.

    Args:
        settings: evaluation settings.
        models: digests of the models.
        data: settings of test data; empty (the recipe's) in older records.
        files: digests of test files; empty in older records.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    settings: dict[str, Any]
    models: dict[str, str]
    data: dict[str, Any] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)

    def is_up_to_date(self, wanted: EvaluationRecord) -> bool:
        """Return whether the report is valid for these inputs.

        Unrecorded files count as unchanged, unrecorded settings as unset.
        """
        files = {key: self.files.get(key, digest) for key, digest in wanted.files.items()}
        data = {key: self.data.get(key) for key in wanted.data}
        return self.model_copy(update={"files": files, "data": data}) == wanted


def read_record(file: Path, kind: type[R]) -> R:
    """Read a record.

    Args:
        file: file of the record.
        kind: type of the record.

    Raises:
        XcompatError: missing or damaged file.
    """
    try:
        return kind.model_validate(read_json(file))
    except ValidationError as error:
        raise XcompatError(
            f"{file} is damaged ({'; '.join(explain(error, kind))}); restore it, or delete {file.parent} to make it again"
        ) from None


@contextmanager
def explain_damage(file: Path, without: str) -> Iterator[None]:
    """Report an optional file's damage in a single line."""
    try:
        yield
    except ValidationError as error:
        raise XcompatError(f"{file} is damaged ({error.errors()[0]['msg']}); delete it to continue without {without}") from None


def logged_losses(folder: Path) -> list[LossPoint]:
    """Return a stage's logged training losses in ascending steps.

    Args:
        folder: stage folder.

    Returns:
        At most 1,000 evenly spaced losses with the last; empty for solved or older stages.

    Raises:
        XcompatError: the file is damaged.
    """
    file = folder / LOG
    if not file.exists():
        return []
    with explain_damage(file, "a curve"):
        entries = [entry for entry in _LOG.validate_python(read_json(file)) if "loss" in entry]
        known = [{key: entry[key] for key in LossPoint._fields if key in entry} for entry in entries]
        points = _POINTS.validate_python(known)
    every = -(-len(points) // _MOST_POINTS)
    return points if every <= 1 else points[-1::-every][::-1]


def trained_length(folder: Path) -> tuple[int, float] | None:
    """Return a stage's training steps and passes over its data, or None if it was solved."""
    file = folder / LOG
    if not file.exists():
        return None
    with explain_damage(file, "a curve"):
        entries = _LOG.validate_python(read_json(file))
    last = max(entries, key=lambda entry: entry.get("step", 0), default={})
    return (int(last["step"]), float(last["epoch"])) if {"step", "epoch"} <= last.keys() else None


def dump_settings(settings: StageRecipe, seed: int) -> dict[str, object]:
    """Return a stage's settings, seed and checksums of own Python files as JSON, for :func:`write_recipe`."""
    own = {name: file_record(class_file(name)).xxh3 for name in settings.own_classes()}
    return settings.resolve_training() | {"seed": seed} | ({"code": own} if own else {})


def write_recipe(folder: Path, settings: dict[str, object]) -> None:
    """Write a stage's settings into its folder."""
    with atomic_path(folder / RECIPE) as temporary:
        temporary.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_started_settings(folder: Path) -> dict[str, object]:
    """Read a stage's settings at its start, with defaults for newer settings.

    Args:
        folder: stage folder.

    Raises:
        XcompatError: the written recipe is damaged.
    """
    file = folder / RECIPE
    try:
        written = parse_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise XcompatError(f"{file} is not valid YAML: {' '.join(str(error).split())}; delete {folder} to start again") from None
    if not isinstance(written, dict):
        raise XcompatError(f"{file} must contain keys and values; delete {folder} to start again")
    kept = {key: written.pop(key) for key in ADDED if key in written}
    with suppress(ValidationError):  # an invalid recipe, e.g. one edited by hand, differs anyway
        written = StageRecipe.model_validate(written).resolve_training()
    return {**written, "seed": None, **kept}


def differences(settings: dict[str, object], begun: dict[str, object], learns_from_texts: bool) -> list[str]:
    """Return the sorted keys of changed settings that affect training.

    Args:
        settings: current settings.
        begun: from :func:`read_started_settings`.
        learns_from_texts: whether training texts exclude test texts.

    Returns:
        Dotted keys, e.g. ``training.learning_rate``.
    """
    now, then = _flat(settings), _flat(begun)
    judged = set(JUDGED_ON) - ({"data.test", "data.judged_texts"} if learns_from_texts else set())
    kept = sorted({*now, *then} - {"evaluation", "allow_worse", *judged})
    return sorted(deep for key in kept for deep in _changed_keys(now.get(key), then.get(key), key))


def _changed_keys(now: object, then: object, key: str) -> Iterator[str]:
    if isinstance(now, dict) and isinstance(then, dict):
        for inner in {*now, *then}:
            yield from _changed_keys(now.get(inner), then.get(inner), f"{key}.{inner}")
    elif now != then:
        yield key


def test_settings(settings: dict[str, object]) -> dict[str, object]:
    """Return a stage's settings of test data."""
    flat = _flat(settings)
    return {key: flat.get(key) for key in JUDGED_ON}


def _flat(settings: dict[str, object]) -> dict[str, object]:
    parts = {name: settings.get(name) or {} for name in ("data", "options")}
    inner = {f"{name}.{key}": value for name, part in parts.items() if isinstance(part, dict) for key, value in part.items()}
    return {key: value for key, value in settings.items() if key not in parts} | inner


def find_model(target: Path) -> Path:
    """Return the folder of a model.

    Args:
        target: folder of a run, stage or checkpoint.

    Raises:
        XcompatError: there is no model, or there are several and the last stage is unknown.
    """
    from xcompat.hub.endpoint import CONFIGS

    def is_model(folder: Path) -> bool:
        return any((folder / name).exists() for name in CONFIGS)

    for folder in (target, target / "model"):
        if is_model(folder):
            return folder
    stages = sorted(path.parent for path in target.glob("*/model") if is_model(path))
    if not stages:
        raise XcompatError(f"{target} contains no model; choose the folder of a finished run or of a checkpoint")
    if len(stages) > 1 and (report := report_file(target)).exists():
        last = list(load_report(report).seconds)[-1:]
        stages = [stage for stage in stages if stage.name in last] or stages
    if len(stages) > 1:
        names = ", ".join(stage.name for stage in stages)
        raise XcompatError(f"{target} contains several models ({names}); choose one, e.g. {stages[0]}")
    return stages[0] / "model"


def require_ended(run: Path) -> bool:
    """Return whether a folder is a run with a report, not a stage.

    Raises:
        XcompatError: it is neither.
    """
    if (run / EVALUATED).is_file():
        return True
    if not (run / RECIPE).is_file():
        raise XcompatError(f"{run} is neither a gallery nor a run with a report")
    return False
