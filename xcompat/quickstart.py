"""The embedded end-to-end run: renders characters, trains two models, and searches the old gallery with the new one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xcompat.files import atomic_path
from xcompat.progress import console, stage
from xcompat.report import load_report
from xcompat.training.recipe import load_recipe
from xcompat.training.run import run_recipe

RECIPE = Path(__file__).with_name("quickstart.yaml")
OLD_CHARACTERS = 2000
PAIR_CHARACTERS = 1200


def run_quickstart(output: Path, overrides: Sequence[str] = ()) -> Path:
    """Do the main job on the data that the fonts of matplotlib hold.

    Args:
        output: where data, models, caches and the report go.
        overrides: ``key=value`` each, on the packaged recipe.

    Returns:
        The report's folder.
    """
    data = output / "data"
    with stage("render the characters of matplotlib's fonts"):
        render_data(data)
    paths = [
        f"output_dir={output}",
        f"cache_dir={output / 'cache'}",
        f"data.pairs.path={data / 'new_train'}",
        f"data.test.path={data / 'test'}",
        f"stages.0.data.pairs.path={data / 'old_train'}",
        f"data.texts.0.path={data / 'captions.txt'}",
    ]
    recipe = load_recipe(RECIPE, [*paths, *overrides])
    folder = list(run_recipe(recipe).values())[-1]
    verdict = load_report(folder).criterion
    console.print(f"\nbackward compatible: [bold]{'yes' if verdict.backward_compatible else 'no'}[/]   report: {folder / 'report.html'}")
    return folder


def render_data(folder: Path) -> None:
    """Render the characters and write train, test and text-only data, unless they are there.

    The test characters are in no training image and no corpus. The gallery holds the upright regular faces. The pair stage
    learns from characters that the new model has not been trained on, as no one holds the data an off-the-shelf model was
    trained on.

    Args:
        folder: where ``old_train``, ``new_train``, ``pairs``, ``test``, ``captions.txt`` and ``names.txt`` go.
    """
    import numpy as np

    from xcompat.data.glyphs import REGULAR_FACES, render_glyphs, split_characters, to_dataset, unicode_corpus

    if folder.exists():
        console.print(f"  [dim]reused from {folder}[/]")
        return
    glyphs = render_glyphs()
    train, test = split_characters(glyphs)
    shuffled = np.random.default_rng(0).permutation(train)
    parts = {
        "old_train": glyphs.select(shuffled[:OLD_CHARACTERS], REGULAR_FACES),
        "new_train": glyphs.select(shuffled[:-PAIR_CHARACTERS]),
        "pairs": glyphs.select(shuffled[-PAIR_CHARACTERS:]),
        "test": glyphs.select(test, REGULAR_FACES),
    }
    names = unicode_corpus(exclude=[glyphs.names[code] for code in test.tolist()])
    with atomic_path(folder) as temporary:
        for name, part in parts.items():
            to_dataset(part).save_to_disk(temporary / name)
        captions = sorted(glyphs.names[code] for code in train.tolist())
        (temporary / "captions.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
        (temporary / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    console.print(f"  {len(glyphs.images_NHW):,} renderings of {len(glyphs.names):,} characters, {len(names):,} names in the corpus")
