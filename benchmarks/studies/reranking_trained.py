"""Re-ranked searches with trained models: photos of known, half-known and new classes, and captions in both directions.

    xcompat compare recipes/bench/trained_open.yaml "seeds=[0,1,2,3,4]"
    python benchmarks/studies/reranking_trained.py recipes/bench/trained_open.yaml --seeds 5

Reads finished runs of recipes with a whitened map, and embeds their test sets with the old and the new model of each seed. New
classes are also searched in the whole gallery, with training images. Prints the tables of reranking.py: CMC@1, CMC@5 and mAP for
photos, R@1 and R@10 for captions. Exits with code 1 if 20 candidates of half-way or old queries end surely below old queries.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from lines import HALF, NEW, OLD, Column, Values, console
from numpy.typing import NDArray
from reranking import HALF_WAY, MAP, WAYS, print_conditions, show

from xcompat.core.errors import XcompatError
from xcompat.core.metric_names import metric_name
from xcompat.core.precision import default_autocast
from xcompat.core.progress import silence_libraries
from xcompat.evaluation import EvaluatedModels, EvaluationOptions
from xcompat.evaluation.cases import ALL, IMAGE_TO_IMAGE, is_zero_shot
from xcompat.evaluation.evaluated_models import Direction
from xcompat.training.evaluation_sets import load_test_set
from xcompat.training.learned_items import add_learned_items
from xcompat.training.model_evaluation import embed_new, mixed_queries
from xcompat.training.recipe import Recipe, load_recipe
from xcompat.training.run import StageRun

METHOD = "whitened"
CUT_OFFS = (1, 5, 10)
TABLES = {"cmc": ("Photos, trained", ("CMC@1", "CMC@5", "mAP")), "recall": ("Captions, trained", ("R@1", "R@10"))}
"""Kind of match -> title and metrics of the tables."""


def embed_models(recipe: Recipe) -> EvaluatedModels:
    """Embed the test set of a finished run with its old model, its new model and its whitened map.

    Raises:
        XcompatError: the recipe has no such map, or the run has other settings or is not finished.
    """
    settings = next((stage for stage in recipe.stages if stage.method == METHOD), None)
    if settings is None:
        raise XcompatError(f"{recipe.name}: no stage has the method {METHOD}; add one")
    run = StageRun(recipe, settings)
    if not run.is_done:
        raise XcompatError(f"{run.folder} is not trained; run `xcompat compare` with this recipe and its seeds")
    run.require_own_folder()
    test = load_test_set(settings.data)
    assert test is not None
    with default_autocast(run.autocast):
        plain = run.independent()
        assert plain is not None
        old, new = (test.embed(each, recipe.cache_dir) for each in (run.frozen("old"), plain))
        old, new = add_learned_items(old, new, run)
        return embed_new(run.load_trained(settings.name), old, new, test, recipe.cache_dir).without_unreadable()


def measure_ways(models: EvaluatedModels, direction: Direction) -> tuple[dict[str, Values], NDArray[np.int64]]:
    """Measure each way to search, and return the cluster of each query. Queries without a match are dropped."""
    old, new = models.old, models.new
    queries = {OLD: old, MAP: models.new_view, HALF_WAY: mixed_queries(models.new_view, old, HALF), NEW: new}
    rows, matched_Q = {}, np.zeros(0, dtype=np.bool_)
    for way in WAYS:
        searched, again = new if way.candidates == NEW else old, new if way.depth else None
        options = EvaluationOptions(rerank=way.depth, rerank_weight=way.old_weight)
        found = queries[way.candidates].find(searched, direction, options, again)
        assert found is not None
        matched_Q = found.ranks_Q >= 0
        values = {f"{direction.metric}@{k}": found.ranks_Q < k for k in direction.ks} | {**found.average_precision}
        rows[str(way)] = {metric_name(name): values_Q[matched_Q].astype(float) for name, values_Q in values.items()}
    clusters_Q = np.arange(len(matched_Q)) if direction.clusters_Q is None else direction.clusters_Q
    return rows, clusters_Q[matched_Q]


def run_protocol(file: Path, seeds: int, columns: dict[str, dict[str, Column]]) -> None:
    """Measure every seed of a recipe; add a column per direction and population to those of its kind of match."""
    recipe = load_recipe(file)
    for seed in range(seeds):
        models = embed_models(recipe.of_seed(seed))
        for direction in models.old.directions(CUT_OFFS):
            if is_zero_shot(direction.metric):
                continue
            parts = (f"`{file.stem}`", direction.name, direction.population)
            name = ", ".join(part for part in parts if part not in (IMAGE_TO_IMAGE, ALL))
            columns[direction.metric].setdefault(name, Column(name)).add(*measure_ways(models, direction))
        console.print(f"measured: {file.stem}, seed {seed}")


def main() -> None:
    """Measure every protocol, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="+", help="Recipes of finished comparisons.")
    parser.add_argument("--seeds", type=int, default=5, help="Number of seeds.")
    options, started = parser.parse_args(), time.monotonic()
    silence_libraries()
    columns: dict[str, dict[str, Column]] = {metric: {} for metric in TABLES}
    for file in options.recipes:
        try:
            run_protocol(file, options.seeds, columns)
        except XcompatError as error:
            raise SystemExit(f"{file}: {error}") from None
    shown = [show(title, [*columns[metric].values()], names) for metric, (title, names) in TABLES.items() if columns[metric]]
    print_conditions(options.seeds, started)
    sys.exit(not all(shown))


if __name__ == "__main__":
    main()
