"""Image quickstart: renders characters, trains two models, and searches the old gallery with the new model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path
from xcompat.core.progress import console, literal, silence_libraries, stage
from xcompat.data.glyphs import glyph_parts, render_glyphs, to_dataset, unicode_corpus
from xcompat.report import report_file
from xcompat.training.recipe import load_recipe

RECIPE = Path(__file__).with_name("characters.yaml")
SPLIT_SEED = 1
"""Not 0, because the recipe was tuned on the test characters of split 0."""


def run_quickstart(output: Path, overrides: Sequence[str] = ()) -> Path:
    """Run the quickstart on characters rendered with matplotlib's fonts.

    Args:
        output: folder for data, recipe, models, caches and the report.
        overrides: ``key=value`` overrides of the packaged recipe.

    Returns:
        The report's folder.
    """
    silence_libraries()
    data = output / "data"
    with stage("render the characters of matplotlib's fonts"):
        render_data(data)
    placed = Template(RECIPE.read_text(encoding="utf-8")).substitute(OUTPUT=output, DATA=data)
    recipe = output / "recipe.yaml"
    if not recipe.exists():
        with atomic_path(recipe) as temporary:
            temporary.write_text(placed, encoding="utf-8")
    elif recipe.read_text(encoding="utf-8") != placed:
        raise XcompatError(f"{recipe} differs from the quickstart's recipe; choose another folder with --out, or delete it")
    from xcompat.training.run import run_recipe

    reports = run_recipe(load_recipe(recipe, overrides))
    folder = list(reports.values())[-1]
    console.print(f"\nreport: {literal(report_file(folder).with_name('report.html'))}", soft_wrap=True)
    console.print(f"search with both models: xcompat serve {literal(output)}", soft_wrap=True)
    return folder


def render_data(folder: Path) -> None:
    """Render the characters, and write train, test and text-only data into a folder unless it exists.

    The folder gets ``old_train``, ``new_train``, ``test`` and ``names.txt``. Test characters appear in no training image or text.
    The gallery contains the upright regular faces.
    """
    if folder.exists():
        console.print(f"  [dim]reused from {literal(folder)}[/]", soft_wrap=True)
        return
    glyphs = render_glyphs()
    parts = glyph_parts(glyphs, SPLIT_SEED)
    names = unicode_corpus(exclude=parts["test"].names.values())
    with atomic_path(folder) as temporary:
        for name, part in parts.items():
            to_dataset(part).save_to_disk(temporary / name)
        (temporary / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    counts = f"{len(glyphs.images_NHW):,} renderings of {len(glyphs.names):,} characters in {len(glyphs.faces)} faces"
    console.print(f"  {counts}; {len(names):,} names in the text corpus")
