"""The recipe: validated YAML of models, data and evaluation."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, model_validator

from xcompat.core.errors import XcompatError, nearest
from xcompat.encoders.scratch import QUICK, is_quick
from xcompat.evaluation.cases import OLD_WITH_MEMORY, RESERVED_NAMES, WITHOUT_MEMORY
from xcompat.report.storage import FOLDER_NAME as REPORT
from xcompat.training.headers import expected_layout
from xcompat.training.overrides import apply_override, refuse_shadowed
from xcompat.training.sections import Section
from xcompat.training.shipped import suggestion
from xcompat.training.stage_recipe import STAGE_PREFIX, StageRecipe, method_class
from xcompat.training.unused_settings import refuse_unused
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
        layout: data layout in the header, for errors; not a recipe key.
    """

    name: str
    output_dir: Path
    cache_dir: Path
    seed: Seed = 0
    seeds: list[Seed] = Field(default_factory=list)
    stages: list[StageRecipe]
    layout: str = ""

    @model_validator(mode="after")
    def _stages_exist(self, info: ValidationInfo) -> Recipe:
        seen: dict[str, StageRecipe] = {}
        for stage in self.stages:
            compared = stage.evaluation.compare_with if stage.evaluation else []
            for name in [*stage.source_stages(), *compared]:
                if name not in seen:
                    raise ValueError(
                        f"stage {stage.name!r} refers to {name!r}, which is not an earlier stage "
                        f"(earlier: {', '.join(seen) or 'none'})"
                    )
            if stage.name == REPORT and len(self.stages) > 1:
                raise ValueError(f"the stage name {REPORT!r} is reserved for the run's report; choose another name")
            if stage.name in seen:
                raise ValueError(f"two stages are called {stage.name!r}; give each its own name")
            _require_comparable(stage, [seen[name] for name in compared], is_quick(info))
            seen[stage.name] = stage
        return self

    @model_validator(mode="after")
    def _seeds_with_offsets_fit(self) -> Recipe:
        largest = max([self.seed, *self.seeds])
        for stage in self.stages:
            if largest + stage.seed_offset >= SEED_LIMIT:
                raise ValueError(
                    f"stage {stage.name!r}: seed {largest} and seed_offset {stage.seed_offset} add up to {SEED_LIMIT} or more; "
                    "choose smaller ones"
                )
        return self

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


def _require_comparable(stage: StageRecipe, others: Sequence[StageRecipe], quick: bool) -> None:
    """Refuse ``evaluation.compare_with`` that no report can show."""
    for other in others:
        where = f"stage {stage.name!r}: evaluation.compare_with names {other.name}"
        if other.name in RESERVED_NAMES | {OLD_WITH_MEMORY, WITHOUT_MEMORY}:
            raise ValueError(f"{where}, a name reserved in reports; rename the stage, or remove it here")
        if not quick and method_class(other.method).maps_galleries_with(other.options):
            raise ValueError(f"{where}, which maps galleries, so its queries do not search the old one; remove it")


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
        XcompatError: the file is missing or not YAML, a key is unknown, or a value does not fit.
    """
    path = Path(path)
    raw = _read(path)
    if more is not None:
        if not isinstance(raw.get("stages"), list):
            raise XcompatError(f"cannot add a stage: {path} has no list of stages; move its keys under stages")
        raw["stages"] = [*raw["stages"], {"name": more.stem, **_read(more)}]
    for override in overrides:
        apply_override(raw, override)
        refuse_shadowed(raw, override.partition("=")[0])
    return parse_recipe(raw, path.stem, str(path), is_quick).model_copy(update={"layout": expected_layout(path)})


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise XcompatError(f"the recipe {path} does not exist; {suggestion(path)}")
    raw = read_yaml(path, RecipeLoader)
    if not isinstance(raw, dict):
        raise XcompatError(f"{path} must contain keys and values, e.g. 'method: xbt'")
    return raw


def parse_recipe(raw: dict[str, Any], default_name: str, where: str, is_quick: bool = False) -> Recipe:
    """Validate a parsed recipe.

    Args:
        raw: nested dictionaries.
        default_name: run name if unset.
        where: name of the recipe in messages.
        is_quick: as in :func:`load_recipe`.

    Raises:
        XcompatError: a key is unknown, a value does not fit, or a setting has no effect.
    """
    top: dict[str, Any] = {key: raw[key] for key in ("name", "output_dir", "cache_dir", "seed", "seeds") if key in raw}
    shared = {key: value for key, value in raw.items() if key not in {*top, "stages"}}
    name = str(top.get("name", default_name))
    defaults = {"name": name, "output_dir": f"runs/{name}", "cache_dir": "runs/cache"}
    listed = raw.get("stages", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(stage, dict) for stage in listed):
        raise XcompatError(f"{where}: stages must be a list of keys and values, e.g. '- method: xbt'")
    stages = [_merge(shared, stage) for stage in listed]
    given: dict[str, Any] = {**defaults, **top, "stages": stages}
    try:
        recipe = Recipe.model_validate(given, context=QUICK if is_quick else None)
        if not is_quick:
            refuse_unused(recipe.stages)
    except ValidationError as error:
        raise XcompatError(f"{where}: {explain(error, Recipe)}") from None
    except ValueError as error:
        raise XcompatError(f"{where}: {error}") from None
    return recipe


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first error in one line, with the nearest known key.

    Args:
        error: pydantic's error.
        model: outermost model.
    """
    # a union reports an unknown key once per member: use the most specific report
    first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
    place = ".".join(str(part) for part in first["loc"] if not re.fullmatch(r"[A-Z]\w+|function-.*", str(part)))
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}; {nearest(str(first['loc'][-1]), _keys_at(model, first['loc'][:-1]))}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def _keys_at(model: Any, location: tuple[int | str, ...]) -> list[str]:  # noqa: ANN401 - a type annotation
    from typing import get_args

    def models_in(annotation: Any) -> list[type[BaseModel]]:  # noqa: ANN401
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [found for argument in get_args(annotation) for found in models_in(argument)]

    candidates: list[type[BaseModel]] = [model]
    for part in location:
        named = [candidate for candidate in candidates if candidate.__name__ == part]
        inner = [
            found
            for candidate in candidates
            if part in candidate.model_fields
            for found in models_in(candidate.model_fields[part].annotation)
        ]
        candidates = named or inner or candidates
    return list(dict.fromkeys(key for candidate in candidates for key in candidate.model_fields))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Override nested dictionaries key by key; null removes."""
    merged = copy.deepcopy(base)
    for key, value in over.items():
        merged[key] = _merge(merged[key], value) if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    return merged
