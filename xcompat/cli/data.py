"""Verbs for input files: captions, class files, recipes. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xcompat.core.errors import XcompatError
from xcompat.core.progress import announce_loading


def caption(
    images: Annotated[
        str, typer.Argument(metavar="IMAGES", help="Images: a folder, WebDataset shards, Parquet, or a data set on the Hub.")
    ],
    model: Annotated[str, typer.Option(help="Image-to-text model, e.g. BLIP or GIT.")],
    out: Annotated[Path, typer.Option(help="Output file (JSON lines with id and caption).")],
    prompt: Annotated[
        str | None,
        typer.Option(help="Question for a chat model, or the start of a caption for BLIP or GIT.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per caption.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 16,
    max_bad_share: Annotated[float, typer.Option(min=0, max=1, help="Maximum share of unreadable images.")] = 0.01,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing file.")] = False,
) -> None:
    """Generate captions for images. To continue an interrupted run, run the same command again."""
    if out.exists() and not overwrite:
        raise XcompatError(f"{out} exists; choose another file, or replace it with --overwrite")
    announce_loading(model)
    from xcompat.captioning import caption as caption_images

    captioner = {"name": model, "max_tokens": max_tokens, "prompt": prompt}
    caption_images(images, captioner, out, batch_size, max_bad_share, overwrite)


def classes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Data set, e.g. imagenet-r. Default: list the known data sets.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file, a class name per line. Existing files are not replaced.")
    ] = None,
) -> None:
    """Write the class names of a public data set for zero-shot classification (data.zero_shot.classes)."""
    from xcompat.training.class_files import print_classes

    print_classes(name, to)


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Recipe, e.g. clip/b32_to_l14, or a folder of recipes, e.g. clip.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to copy recipes to. Existing files are not replaced.")] = None,
) -> None:
    """List, show, or copy the recipes of xcompat."""
    from xcompat.training.shipped import print_recipes

    print_recipes(name, to)
