"""``--dry-run``: a whole recipe on tiny stand-ins, without downloads."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from xcompat.core.distributed import is_main_process, world_size
from xcompat.core.errors import XcompatError, require_no_problems
from xcompat.core.progress import Table, console, literal, silence_libraries
from xcompat.data import CorpusSource
from xcompat.encoders import EncoderSource
from xcompat.encoders.dimensions import read_embedding_dim, scratch_dim
from xcompat.encoders.scratch import ScratchSource
from xcompat.encoders.standins import save_stand_in, small_scratch
from xcompat.training.data_checks import check_data
from xcompat.training.headers import add_layout_to_errors
from xcompat.training.input_checks import find_missing_paths
from xcompat.training.output_checks import require_places
from xcompat.training.recipe import Recipe
from xcompat.training.run import run_recipe
from xcompat.training.sections import DataSettings
from xcompat.training.stage import keep_frozen_models
from xcompat.training.stage_recipe import ROLES, STAGE_PREFIX, StageRecipe, method_class, usual_options
from xcompat.training.stored_models import is_stored, load_stored

BATCH = 4
PAIRS = 16
CLASSES = 4
_PREFIXES = {"hf-hub:": "open_clip", "sentence-transformers:": "sentence-transformers"}
SCRATCH_DIM = 16
"""Width of stand-ins for architectures trained from scratch; wide random weights overflow float16."""
UNKNOWN_DIMS = {"old": 64, "new": 128, "independent": 128, "side_info": 64, "new_side_info": 64}
"""Dimensions of stand-ins for models of unknown dimension; they fit usual options, e.g. `PQ64` or `extra_dim: 32`."""


def dry_run_recipe(recipe: Recipe) -> list[str]:
    """Run a recipe end to end: two steps per stage, on stand-ins for models and data.

    Stand-ins have the real dimensions, if known. Local data must have the recipe's columns. Missing paths are printed and do not
    stop the check.

    Args:
        recipe: the validated recipe.

    Returns:
        A line per path that must exist before training.

    Raises:
        XcompatError: a stage does not fit, data lack a column, or output folders contain the user's files.
    """
    if world_size() > 1:
        raise XcompatError("a dry run needs a single process; start it without accelerate launch")
    require_no_problems(problem for settings in recipe.stages for problem in settings.missing_inputs())
    silence_libraries()
    missing = _print_plan(recipe)
    require_places(recipe)
    with tempfile.TemporaryDirectory() as folder, _cache_in(Path(folder) / "data_sets"):
        with add_layout_to_errors(recipe.layout):
            for settings in recipe.stages:
                check_data(settings)
                settings.require_old_queries()
        stand_in = _stand_in_recipe(recipe, Path(folder))
        console.quiet = True  # results of random weights mean nothing
        try:
            with keep_frozen_models():
                run_recipe(stand_in)
        finally:
            console.quiet = not is_main_process()
    paths = "path" if len(missing) == 1 else f"{len(missing)} paths"
    until = f"; before training, provide the {paths} listed above" if missing else ""
    console.print(f"[green]✓[/] {literal(recipe.name)} runs from end to end on stand-ins{until}", soft_wrap=True)
    return missing


def _print_plan(recipe: Recipe) -> list[str]:
    """Print stages and missing paths; return the latter."""
    table = Table("stage", "method", "old", "new", "data", title=f"{literal(recipe.name)}: planned stages")
    missing: dict[str, list[str]] = {}
    for settings in recipe.stages:
        with add_layout_to_errors(recipe.layout):
            described, absent = find_missing_paths(settings)
        to_provide = [f"{len(absent)} to provide"] if absent else []
        table.add_row(settings.name, settings.method, _name(settings.old), _name(settings.new), "\n".join(described + to_provide))
        for key, message in absent:
            missing.setdefault(f"{key}: {message}", []).append(settings.name)
    console.print(table)
    if missing:
        console.print("[yellow]to provide before training:[/]")
        for line, stages in missing.items():
            others = f" (also in {len(stages) - 1} more stages)" if len(stages) > 1 else ""
            console.print(literal(f"  {stages[0]}: {line}{others}"), soft_wrap=True)
        if recipe.layout:
            console.print(literal(f"  {recipe.layout}"), soft_wrap=True)
    return [f"{stages[0]}: {line}" for line, stages in missing.items()]


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = folder
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


def _stand_in_recipe(recipe: Recipe, folder: Path) -> Recipe:
    mapped = [settings.new for settings in recipe.stages if method_class(settings.method).maps_features(settings.options)]
    projected = {source.name for source in mapped if isinstance(source, EncoderSource)}
    widths = Widths(recipe)
    return Recipe(
        name=recipe.name,
        output_dir=folder / "run",
        cache_dir=folder / "cache",
        seed=recipe.seed,
        stages=[stage for settings in recipe.stages for stage in _stand_in_stages(settings, folder, projected, widths)],
    )


class Widths:
    """Dimensions of stand-ins.

    Args:
        recipe: the validated recipe.

    Raises:
        XcompatError: a model from scratch cannot be built.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._of: dict[str, int | None] = {}
        self._asked: dict[str, int] = {}
        for settings in recipe.stages:
            if isinstance(settings.new, ScratchSource):
                key = settings.new.model_dump_json()
                self._of[key] = self._of[key] if key in self._of else scratch_dim(settings.new)
            for role in ROLES:
                source = getattr(settings, role)
                if isinstance(source, EncoderSource) and source.name not in self._of:
                    self._of[source.name] = _real_dim(source)
                if isinstance(source, EncoderSource) and role == "old" and settings.options.get("dim"):
                    self._asked.setdefault(source.name, int(settings.options["dim"]))

    def dimension_of(self, source: EncoderSource | ScratchSource, role: str) -> int:
        """Return a model's real dimension, or a dimension that fits the options."""
        if isinstance(source, ScratchSource):
            return SCRATCH_DIM
        return self._of[source.name] or self._asked.get(source.name) or max(UNKNOWN_DIMS[role], source.truncate_dim or 0)

    def is_known(self, source: EncoderSource | ScratchSource | None) -> bool:
        """Return whether a model's real dimension is known."""
        return isinstance(source, EncoderSource) and self._of.get(source.name) is not None


def _real_dim(source: EncoderSource) -> int | None:
    """Return a model's dimension; None if it is not on this machine."""
    if source.name.startswith(STAGE_PREFIX):
        return None
    if is_stored(source.name):
        return load_stored(source).dim
    return read_embedding_dim(source)


def _name(source: EncoderSource | ScratchSource | None) -> str:
    if isinstance(source, EncoderSource):
        return source.name + (f"@{source.revision}" if source.revision else "")
    return "-" if source is None else "from scratch"


def _stand_in_stages(settings: StageRecipe, folder: Path, projected: set[str], widths: Widths) -> list[StageRecipe]:
    """Return the stage on stand-ins, after a stage for its φ if needed."""
    stage = _stand_in_stage(settings, folder, projected, widths)
    if settings.projection is None or settings.projection.startswith(STAGE_PREFIX):
        return [stage]
    phi = StageRecipe(
        name=f"{settings.name}-projection",
        method="projection",
        old=stage.old,
        new=stage.new,
        data=DataSettings(texts=[CorpusSource(path=_tiny_texts(folder))]),
        training=stage.training,
        evaluation=None,
    )
    return [phi, stage.model_copy(update={"projection": STAGE_PREFIX + phi.name})]


def _stand_in_stage(settings: StageRecipe, folder: Path, projected: set[str], widths: Widths) -> StageRecipe:
    replaced: dict[str, Any] = settings.model_dump(exclude_unset=True)
    named = set()
    for role in ROLES:
        source = getattr(settings, role)
        if isinstance(source, EncoderSource) and not source.name.startswith(STAGE_PREFIX):
            model_type = source.model_type or _usual_type(settings, role, source.name, projected)
            where = folder / source.name.replace("/", "--")
            # equal names are the same model
            name = str(where) if where.exists() else save_stand_in(where, model_type, widths.dimension_of(source, role))
            replaced[role] = {"name": name}
            named.add(role)
    if isinstance(settings.new, ScratchSource):
        replaced["new"] = small_scratch(settings.new, widths.dimension_of(settings.new, "new"))
    if settings.method == "bt2" and settings.independent is not None and "independent" in named:  # dim depends on both models
        known = widths.is_known(settings.independent) and widths.is_known(settings.old)
        dim = settings.options.get("dim") if known else widths.dimension_of(settings.independent, "independent")
        replaced["options"] = {**settings.options, "dim": dim}
    if changes := _quick_options(settings):
        replaced["options"] = {**settings.options, **changes}
    replaced["data"] = _stand_in_data(replaced.get("data", {}), folder)
    if sets := settings.data.zero_shot_sets():
        tiny = {name: shot.model_dump(exclude_unset=True) | _tiny_classes(folder) for name, shot in sets.items()}
        replaced["data"]["zero_shot"] = tiny.get("", tiny)
    steps = {"max_steps": 2, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "bf16": False, "fp16": False}
    training = {k: v for k, v in settings.training.items() if not k.startswith("dataloader_") and k != "torch_compile"}
    replaced["training"] = training | steps | {"warmup_steps": 0}
    if settings.mini_batch_size is not None:
        replaced["mini_batch_size"] = BATCH // 2
    if settings.evaluation is not None:
        replaced["evaluation"] = settings.evaluation.model_dump() | {"resamples": 100, "ks": [1, 2], "tsne_pairs": 0}
    return StageRecipe(**replaced)


def _quick_options(settings: StageRecipe) -> dict[str, Any]:
    """Return options that accept random models and are solved quickly."""
    if settings.method == "mini_vec2vec":
        options = usual_options(settings.method) | settings.options
        # random spaces do not agree
        return {"least_agreement": -1.0} | {key: min(options[key], 2) for key in ("runs", "rounds")}
    # an invalid strength must still raise
    if settings.method == "lambda_orthogonality" and 0 <= settings.options.get("strength", 1) < math.inf:
        return {"strength": 0.0}  # least squares: the penalty needs 500 steps of L-BFGS on so few samples
    return {}


def _stand_in_data(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    for key in ("pairs", "remembered", "test", "images", "queries", "gallery"):
        if data.get(key):
            data[key] = {"path": _tiny_images(folder, key)}
    for key in ("subset", "test_subset"):
        data.pop(key, None)
    if data.get("templates"):
        data["templates"] = _tiny_templates(folder, data["templates"])
    if data.get("judged_texts"):
        data["judged_texts"] = _tiny_judgements(folder)
    if data.get("text_pairs"):
        data["text_pairs"] = _tiny_text_pairs(folder, data["text_pairs"])
    if data.get("texts"):
        data["texts"] = [{"path": _tiny_texts(folder)}]
    if data.get("texts_limit"):
        data["texts_limit"] = min(data["texts_limit"], PAIRS - BATCH)  # fewer than there are
    return data | {"samples_per_class": BATCH // 2}  # of two classes


def _usual_type(settings: StageRecipe, role: str, name: str, projected: set[str]) -> str:
    """Return the architecture of a stand-in; penultimate features need a final linear layer."""
    if settings.data.images is not None and not (role == "old" and settings.data.old_reads == "captions"):
        return "clip_vision_model" if name in projected else "resnet"
    return next((library for prefix, library in _PREFIXES.items() if name.startswith(prefix)), "clip")


def _tiny_images(folder: Path, name: str) -> str:
    """Write coloured squares of four classes with captions short enough for stand-ins."""
    where = folder / name
    if not where.exists():
        where.mkdir()
        pixels = np.random.default_rng(len(name)).integers(0, 255, (PAIRS, 40, 40, 3), dtype=np.uint8)
        for row, image in enumerate(pixels):
            Image.fromarray(image).save(where / f"{name}-{row}.png")
        lines = ["image,caption,label", *(f"{name}-{row}.png,{name} {row},class {row % CLASSES}" for row in range(PAIRS))]
        if name in ("queries", "gallery"):  # the other side lacks the last image's class, for open-set identification
            lines[-1] = f"{name}-{PAIRS - 1}.png,{name} {PAIRS - 1},class of {name}"
        (where / "captions.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(where)


def _tiny_classes(folder: Path) -> dict[str, object]:
    file = folder / "classes.txt"
    file.write_text("".join(f"class {row}\n" for row in range(CLASSES)), encoding="utf-8")
    return {"images": {"path": _tiny_images(folder, "zero_shot"), "captions": False, "labels": True}, "classes": str(file)}


def _tiny_judgements(folder: Path) -> dict[str, object]:
    named = {"queries": "cat", "passages": "bird"}
    for name, word in named.items():
        rows = (json.dumps({"id": str(row), "text": f"{word} {row}"}) + "\n" for row in range(PAIRS))
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    qrels = folder / "qrels.txt"
    qrels.write_text("".join(f"{row} 0 {row} 1\n" for row in range(PAIRS)), encoding="utf-8")
    return {name: {"path": str(folder / f"{name}.jsonl")} for name in named} | {"qrels": str(qrels)}


def _tiny_templates(folder: Path, named: dict[str, object]) -> dict[str, object]:
    images = Path(_tiny_images(folder, "images"))
    lists = {
        "members": [f"images-{row}.png {row // 2} {row}" for row in range(PAIRS)],
        "pairs": ["0 1 1", "2 3 1", "0 3 0", "2 1 0"],
        "gallery": ["template,subject", "0,0", "2,1"],
        "probes": ["template,subject", "1,0", "3,1"],
    }
    for name, lines in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files: dict[str, Any] = {name: str(folder / f"{name}.txt") for name in lists if named.get(name)}
    if "gallery" in files:
        files["gallery"] = [files["gallery"]]
    return {"images": {"path": str(images)}} | files


def _tiny_text_pairs(folder: Path, named: dict[str, object]) -> dict[str, Any]:
    file = folder / "text_pairs.jsonl"
    rows = [{"query": f"cow {row}", "passage": f"hen {row}", "negatives": f"fox {row}", "id": str(row)} for row in range(PAIRS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = {"negative_column": "negatives", "id_column": "id"}
    return {"path": str(file)} | {key: name for key, name in columns.items() if named.get(key) is not None}


def _tiny_texts(folder: Path) -> str:
    file = folder / "texts.txt"
    if not file.exists():
        file.write_text("\n".join(f"dog {row}" for row in range(PAIRS)) + "\n", encoding="utf-8")
    return str(file)
