"""The recipe: validated YAML of models, data and evaluation."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from xcompat.core.errors import XcompatError, collect_problems, nearest, require_no_problems
from xcompat.core.plugins import is_file_class
from xcompat.encoders.scratch import QUICK, is_quick
from xcompat.evaluation.cases import OLD_WITH_MEMORY, RESERVED_NAMES, WITHOUT_MEMORY
from xcompat.report.storage import FOLDER_NAME as REPORT
from xcompat.training.headers import expected_layout
from xcompat.training.overrides import apply_override, refuse_shadowed
from xcompat.training.sections import Section
from xcompat.training.shipped import suggestion
from xcompat.training.stage_recipe import AUTO_MAP, STAGE_PREFIX, StageRecipe, method_class
from xcompat.training.unused_settings import refuse_unused
from xcompat.training.values import keys_at
from xcompat.training.yaml_files import RecipeLoader, read_yaml

SEED_LIMIT = 2**32
"""NumPy's limit of seeds."""
Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]


class Recipe(Section):
    """A named sequence of stages.

    Args:
        name: run name.
        output_dir: run folder.
        cache_dir: folder of shared embedding caches.
        seed: random seed for weights, data, noise and bootstrap.
        seeds: seeds of ``compare``, a run each; ``train`` uses ``seed``.
        stages: stages in order.
        plain_map: whether ``compare`` adds a closed-form map, unless a compared stage has its method.
        layout: data layout in the header, for errors; not a recipe key.
    """

    name: str
    output_dir: Path
    cache_dir: Path
    seed: Seed = 0
    seeds: list[Seed] = Field(default_factory=list)
    stages: list[StageRecipe]
    plain_map: bool = True
    layout: str = ""

    @model_validator(mode="after")
    def _stages_fit(self, info: ValidationInfo) -> Recipe:
        require_no_problems([*self._stage_problems(is_quick(info)), *self._seed_problems()])
        return self

    def _stage_problems(self, quick: bool) -> Iterator[str]:
        seen: dict[str, StageRecipe] = {}
        for stage in self.stages:
            compared = stage.evaluation.compare_with if stage.evaluation else []
            for name in dict.fromkeys([*stage.source_stages(), *compared]):
                if name not in seen:
                    yield (
                        f"stage {stage.name!r} refers to {name!r}, which is not an earlier stage "
                        f"(earlier: {', '.join(seen) or 'none'})"
                    )
            if stage.name == REPORT and len(self.stages) > 1:
                yield f"the stage name {REPORT!r} is reserved for the run's report; choose another name"
            if stage.name in seen:
                yield f"two stages are called {stage.name!r}; give each its own name"
            yield from _comparison_problems(stage, [seen[name] for name in compared if name in seen], quick)
            seen[stage.name] = stage

    def _seed_problems(self) -> Iterator[str]:
        largest = max([self.seed, *self.seeds])
        for stage in self.stages:
            if largest + stage.seed_offset >= SEED_LIMIT:
                yield (
                    f"stage {stage.name!r}: seed {largest} and seed_offset {stage.seed_offset} add up to {SEED_LIMIT} or more; "
                    "choose smaller ones"
                )

    def of_seed(self, seed: int) -> Recipe:
        """Return the recipe for a ``compare`` run."""
        return self.model_copy(update={"seed": seed, "output_dir": self.output_dir / f"seed-{seed}"})

    def seed_of(self, settings: StageRecipe) -> int:
        """Return a stage's training seed."""
        return self.seed + settings.seed_offset

    def stage_dir(self, name: str) -> Path:
        """Return a stage's folder; a single stage has the run's."""
        return self.output_dir if len(self.stages) == 1 else self.output_dir / name

    def resolve(self, name: str) -> str:
        """Return the folder of ``stage:NAME``; other names stay."""
        return str(self.stage_dir(name.removeprefix(STAGE_PREFIX)) / "model") if name.startswith(STAGE_PREFIX) else name


def _comparison_problems(stage: StageRecipe, others: Sequence[StageRecipe], quick: bool) -> Iterator[str]:
    """Yield a line for each ``evaluation.compare_with`` that no report can show."""
    for other in others:
        where = f"stage {stage.name!r}: evaluation.compare_with names {other.name}"
        if other.name in RESERVED_NAMES | {OLD_WITH_MEMORY, WITHOUT_MEMORY}:
            yield f"{where}, a name reserved in reports; rename the stage, or remove it here"
        elif not quick and method_class(other.method).maps_galleries_with(other.options):
            yield f"{where}, which maps galleries, so its queries do not search the old one; remove it"


def load_recipe(path: str | Path, overrides: Sequence[str] = (), is_quick: bool = False, more: Path | None = None) -> Recipe:
    """Load and validate a recipe.

    A recipe is a single stage, or has ``stages:``, which inherit and override other top-level keys.

    Args:
        path: YAML file.
        overrides: ``key=value``, dots for nesting, YAML values, e.g. ``training.learning_rate=1e-3``,
            ``stages.1.training.max_steps=10`` or ``stages.xbt.…`` by name.
        is_quick: whether to skip checks that import torch and transformers.
        more: YAML file with an extra last stage.

    Raises:
        XcompatError: the file is missing or not YAML, or a line for each unknown key and each value that does not fit.
    """
    recipe, problems = examine_recipe(path, overrides, is_quick, more)
    require_no_problems(problems)
    assert recipe is not None
    return recipe


def examine_recipe(
    path: str | Path, overrides: Sequence[str] = (), is_quick: bool = False, more: Path | None = None
) -> tuple[Recipe | None, list[str]]:
    """Load a recipe and find all its problems.

    Args:
        path: as the other arguments in :func:`load_recipe`.
        overrides: the same.
        is_quick: the same.
        more: the same.

    Returns:
        The recipe without its invalid values, or None if the rest is not a recipe; and a line for each problem.

    Raises:
        XcompatError: the file is missing or not YAML, or an override is invalid.
    """
    path = Path(path)
    raw = _read(path)
    if more is not None:
        if not isinstance(raw.get("stages"), list):
            raise XcompatError(
                f"cannot add a stage: {path} has no list of stages; write its method (and options) as a stage, "
                f"e.g. stages: [{{method: {raw.get('method', AUTO_MAP)}}}]"
            )
        raw["stages"] = [*raw["stages"], {"name": more.stem, **_with_class_paths(_read(more), more.parent)}]
    for override in overrides:
        apply_override(raw, override)
        refuse_shadowed(raw, override.partition("=")[0])
    recipe, problems = _examine(raw, path.stem, str(path), is_quick)
    if more is not None:
        inherited, own = f"{path}: stages.{len(raw['stages']) - 1}.", f"{more}: "
        problems = [own + each.removeprefix(inherited) if each.startswith(inherited) else each for each in problems]
    return recipe and recipe.model_copy(update={"layout": expected_layout(path)}), problems


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise XcompatError(f"the recipe {path} does not exist; {suggestion(path)}")
    raw = read_yaml(path, RecipeLoader)
    if not isinstance(raw, dict):
        raise XcompatError(f"{path} must contain keys and values, e.g. 'method: xbt'")
    return raw


def _with_class_paths(value: Any, folder: Path) -> Any:  # noqa: ANN401 - what YAML holds
    """Return the values with each ``path.py:Class`` relative to the folder, except for files only in the current folder."""
    if isinstance(value, dict):
        return {key: _with_class_paths(each, folder) for key, each in value.items()}
    if not isinstance(value, str) or not is_file_class(value):
        return value
    file = Path(value.rpartition(":")[0])
    is_elsewhere = file.is_file() and not (folder / file).is_file()
    return value if is_elsewhere else str(folder / value)


def parse_recipe(raw: dict[str, object], default_name: str, where: str, is_quick: bool = False) -> Recipe:
    """Validate a parsed recipe.

    Args:
        raw: nested dictionaries.
        default_name: run name if unset.
        where: name of the recipe in messages.
        is_quick: as in :func:`load_recipe`.

    Raises:
        XcompatError: a line for each unknown key, each value that does not fit, and each setting without effect.
    """
    recipe, problems = _examine(raw, default_name, where, is_quick)
    require_no_problems(problems)
    assert recipe is not None
    return recipe


def _examine(raw: dict[str, object], default_name: str, where: str, is_quick: bool) -> tuple[Recipe | None, list[str]]:
    top: dict[str, object] = {
        key: raw[key] for key in ("name", "output_dir", "cache_dir", "seed", "seeds", "plain_map") if key in raw
    }
    shared = {key: value for key, value in raw.items() if key not in {*top, "stages"}}
    name = str(top.get("name", default_name))
    defaults = {"name": name, "output_dir": f"runs/{name}", "cache_dir": "runs/cache"}
    listed = raw.get("stages", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(stage, dict) for stage in listed):
        raise XcompatError(f"{where}: stages must be a list of keys and values, e.g. '- method: xbt'")
    given: dict[str, Any] = {**defaults, **top, "stages": [_merge(shared, stage) for stage in listed]}
    problems: list[str] = []
    recipe = _validate(given, QUICK if is_quick else None, problems)
    if not is_quick and (known := recipe or _validate(given, QUICK, [])) is not None:
        with collect_problems(problems):
            refuse_unused(known.stages, tuple(problems))
        problems += _unused_references(shared, given["stages"])
    own = listed if "stages" in raw else [{}]
    return recipe, [f"{where}: {_as_written(problem, own, shared)}" for problem in problems]


def _as_written(problem: str, stages: Sequence[dict[str, object]], shared: dict[str, object]) -> str:
    """Name keys where the recipe sets them: at the top level if stages only inherit them."""

    def place(found: re.Match[str]) -> str:
        stage, parts = stages[int(found[1])], found[2].split(".")
        return found[2] if not stage or (_has_key(shared, parts) and not _has_key(stage, parts)) else found[0]

    return re.sub(r"\bstages\.(\d+)\.(\w+(?:\.\w+)*)", place, problem)


def _has_key(place: object, parts: Sequence[str]) -> bool:
    for part in parts:
        if not isinstance(place, dict) or part not in place:
            return isinstance(place, list)
        place = place[part]
    return True


def _unused_references(shared: dict[str, object], stages: Sequence[dict[str, object]]) -> Iterator[str]:
    """Yield a line for each shared ``stage:NAME`` that each stage replaces, so that nothing checks its name."""
    for key, value in shared.items():
        name = _model_name(value)
        if name.startswith(STAGE_PREFIX) and all(_model_name(stage[key]) != name for stage in stages):
            yield f"{key}: no stage uses {name!r}, as each sets its own {key}; remove it"


def _model_name(value: object) -> str:
    return str(value.get("name") if isinstance(value, dict) else value)


def _validate(given: dict[str, object], context: Mapping[str, object] | None, problems: list[str]) -> Recipe | None:
    """Return the recipe without its invalid values, if the rest is a recipe, and append the problems."""
    try:
        return Recipe.model_validate(given, context=context)
    except ValidationError as error:
        problems += explain(error, Recipe)
        kept = _prune(given, [each["loc"] for each in error.errors()])
    try:
        return Recipe.model_validate(kept, context=QUICK)
    except ValidationError:
        return None


def _prune(given: dict[str, object], places: Iterable[tuple[int | str, ...]]) -> dict[str, object]:
    """Remove the value at each place of pydantic, which also contains names of types."""
    kept = copy.deepcopy(given)
    for place in places:
        inner: object = kept
        last: tuple[dict[str, Any], str] | None = None
        for part in place:
            if isinstance(inner, dict) and part in inner:
                last, inner = (inner, str(part)), inner[part]
            elif isinstance(inner, list) and isinstance(part, int) and part < len(inner):
                inner = inner[part]
        if last is not None:
            last[0].pop(last[1])
    return kept


_TYPE = re.compile(r"[A-Z]\w+|function-.*|(?:str|int|float|bool|none|list|dict|tuple|literal|constrained)(?:[\[-].*)?")
"""Names of types in pydantic's places."""


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return a line for each mistake, with the nearest known key.

    Args:
        error: pydantic's error.
        model: outermost model.
    """
    lines: dict[str, str] = {}
    for each in _of_nearest_types(error.errors()):
        place = ".".join(str(part) for part in each["loc"] if not _is_type(part))
        cause = each.get("ctx", {}).get("error")
        if each["type"] == "extra_forbidden":
            messages = [f"unknown key {place!r}; {nearest(str(each['loc'][-1]), keys_at(model, each['loc'][:-1]))}"]
        else:
            said = cause.args if isinstance(cause, ValueError) else [each["msg"]]
            messages = [f"{place}: {message}" if place else str(message) for message in said]
        for message in messages:  # a key that stages inherit is one mistake
            lines.setdefault(re.sub(r"\bstages\.\d+\b", "stages", message), message)
    return list(lines.values())


def _of_nearest_types(errors: list[Any]) -> Iterator[Any]:
    """Yield the errors of one type for each value of several types: of the type in which a mistake is deepest."""
    chosen: dict[tuple[int | str, ...], tuple[int, int | str]] = {}
    parts = [next((number for number, part in enumerate(each["loc"]) if _is_type(part)), None) for each in errors]
    for each, number in zip(errors, parts, strict=True):
        if number is not None:
            place, depth = each["loc"][:number], len(each["loc"])
            if place not in chosen or depth > chosen[place][0]:
                chosen[place] = depth, each["loc"][number]
    for each, number in zip(errors, parts, strict=True):
        if number is None or chosen[each["loc"][:number]][1] == each["loc"][number]:
            yield each


def _is_type(part: int | str) -> bool:
    return isinstance(part, str) and _TYPE.fullmatch(part) is not None


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Override nested dictionaries key by key; null removes."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged
