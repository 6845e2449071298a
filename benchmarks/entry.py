"""What an entry of embeddings alone starts from: a protocol's old gallery, as a folder of embeddings with ids.

    python benchmarks/entry.py tiny_open

Writes runs/bench/tiny_open/entries/old. Write a folder `mine` like it, with the same ids in the same order: your embeddings in
the old model's space. Then judge it, and it is one more row:

    xcompat evaluate --old runs/bench/tiny_open/entries/old --new mine --out runs/bench/tiny_open/entries/mine
    python benchmarks/leaderboard.py

Where old models are trained, the old one is that of the first seed, and the protocol has to be run before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import typer
from rich.console import Console

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts
from xcompat.evaluation.scores import Embeddings
from xcompat.training.evaluation_sets import PairTestSet, load_test_set
from xcompat.training.recipe import Recipe, load_recipe
from xcompat.training.stage import Stage

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "bench"
FOLDER = Path("runs/bench")
ENTRIES, OLD = "entries", "old"


def old_gallery(recipe: Recipe, folder: Path) -> None:
    """Write what the old model of a recipe's first seed makes of its test set, with ids and, of images, classes.

    Args:
        recipe: of the protocol.
        folder: that is written; it must not be there.
    """
    if folder.exists():
        raise XcompatError(f"{folder} is there; delete it to write it again")
    run = recipe.of_seed((recipe.seeds or [recipe.seed])[0])
    settings = next(each for each in run.stages if each.is_judged)
    test = load_test_set(settings.data)
    assert test is not None
    made = test.embed(Stage(run, settings).frozen("old"), run.cache_dir)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        for kind, (embeds_ND, ids) in _sides(made).items():
            np.save(temporary / f"{kind}_embeds.npy", np.asarray(embeds_ND, np.float32))
            _write_lines(temporary / f"{kind}_ids.txt", map(str, ids))
        if isinstance(made, EmbeddedImages):
            _write_lines(temporary / "labels.txt", map(str, made.gallery_labels))
        if isinstance(test, PairTestSet):
            _write_lines(temporary / "texts.jsonl", map(json.dumps, test.texts))


def _sides(made: object) -> Mapping[str, tuple[Embeddings | None, Sequence[object]]]:
    """Return embeddings and ids by the names that the folder has for them."""
    if isinstance(made, EmbeddedPairs):
        return {"image": (made.image_embeds_ND, made.image_ids), "text": (made.text_embeds_MD, made.text_ids)}
    if isinstance(made, EmbeddedTexts):
        return {"query": (made.query_embeds_QD, made.query_ids), "text": (made.text_embeds_GD, made.text_ids)}
    assert isinstance(made, EmbeddedImages)
    if list(made.query_ids) != list(made.gallery_ids):
        raise XcompatError("its queries are other images than its gallery, and a folder of embeddings holds one set of images")
    return {"image": (made.gallery_embeds_GD, made.gallery_ids)}


def _write_lines(file: Path, lines: map[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(protocol: str) -> None:
    """Write the old gallery of a protocol of recipes/bench."""
    file, folder = RECIPES / f"{protocol}.yaml", FOLDER / protocol / ENTRIES / OLD
    try:
        recipe = load_recipe(file, [])
        old_gallery(recipe, folder)
    except XcompatError as error:
        raise SystemExit(f"{protocol}: {error}") from None
    judged = recipe.stages[-1].data.judged_texts
    qrels = f" --qrels {judged.qrels}" if judged is not None else ""
    command = f"xcompat evaluate --old {folder} --new MINE{qrels} --out {folder.parent}/MINE"
    Console(soft_wrap=True).print(f"{folder} is written; judge yours with\n  {command}", markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
