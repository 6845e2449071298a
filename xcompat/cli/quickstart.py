"""``xcompat quickstart``: complete runs with a single command. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from xcompat.cli.options import Overrides
from xcompat.core.progress import announce_loading

DEFAULT = "characters"


class QuickstartGroup(TyperGroup):
    """Run the quickstart with characters if no other is named."""

    def parse_args(self, context: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own context
        """Insert the default command before its options."""
        if not args or args[0] not in (*self.commands, *context.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(context, args)


app = typer.Typer(cls=QuickstartGroup, help="Run a complete example on small data.")


def demo(out: Annotated[Path, typer.Option(help="Output folder. The folder must not exist yet.")] = Path("demo")) -> None:
    """Run the whole job on random vectors. About 15 seconds."""
    announce_loading()
    from xcompat.quickstart.demo import run_demo

    run_demo(out)


@app.command()
def characters(
    output: Annotated[Path, typer.Option("--out", "--output", help="Output folder.")] = Path("runs/quickstart"),
    overrides: Overrides = None,
) -> None:
    """Train two models on images of characters and search the old gallery (the default). 6 to 10 minutes on 2 cores."""
    from xcompat.quickstart.characters import RECIPE, run_quickstart
    from xcompat.training.recipe import load_recipe

    load_recipe(RECIPE, overrides or [], is_quick=True)
    announce_loading()
    run_quickstart(output, overrides or [])


@app.command()
def texts(
    output: Annotated[Path, typer.Option("--out", "--output", help="Output folder.")] = Path("runs/quickstart-texts"),
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with corpus.jsonl, queries.jsonl and qrels/test.tsv. Default: SciFact from the Hub."),
    ] = None,
    old_model: Annotated[
        str | None, typer.Option(help="Old model: folder or name on the Hub. Default: WordLlama.", show_default=False)
    ] = None,
    new_model: Annotated[str | None, typer.Option(help="New model. Default: all-MiniLM-L6-v2.", show_default=False)] = None,
) -> None:
    """Search an index of abstracts with a better text encoder. About 5 minutes on 2 cores."""
    announce_loading(old_model, new_model)
    from xcompat.quickstart.texts import run_text_quickstart

    run_text_quickstart(output, data, old_model, new_model)
