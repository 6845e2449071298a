"""Verbs that write what others read: captions, class files, recipes. Nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xcompat.errors import XcompatError


def caption(
    images: Annotated[str, typer.Argument(metavar="IMAGES", help="A folder, shards, Parquet, or a data set on the Hub.")],
    model: Annotated[
        str, typer.Option(help="An image-to-text model of transformers, such as nlpconnect/vit-gpt2-image-captioning.")
    ],
    out: Annotated[Path, typer.Option(help="File of JSON lines that gets the captions.")],
    prompt: Annotated[
        str | None,
        typer.Option(help="The question to a model that chats, or the text that BLIP or GIT goes on with.", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a caption.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at once.")] = 16,
    max_bad_share: Annotated[float, typer.Option(min=0, max=1, help="Share of images that may be unreadable.")] = 0.01,
    overwrite: Annotated[bool, typer.Option(help="Replace the file.")] = False,
) -> None:
    """Write captions for images without any, so that an old text encoder can read them; started again, it continues."""
    if out.exists() and not overwrite:
        raise XcompatError(f"{out} exists; name another file, or replace it with --overwrite")
    from xcompat.captioning import caption as caption_images

    captioner = {"name": model, "max_tokens": max_tokens, "prompt": prompt}
    caption_images(images, captioner, out, batch_size, max_bad_share, overwrite)


def classes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Such as imagenet-r; all that are known unless given.")
    ] = None,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it, a name a line; nothing is overwritten.")] = None,
) -> None:
    """Write the class names of a public data set for zero-shot classification (data.zero_shot.classes)."""
    from xcompat.training.class_files import print_classes

    print_classes(name, to)


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Such as clip/b32_to_l14, or clip for all of a folder.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to copy them into; nothing in it is overwritten.")] = None,
) -> None:
    """List the recipes that come with xcompat, show one, or copy them to where they can be changed."""
    from xcompat.training.shipped import print_recipes

    print_recipes(name, to)
