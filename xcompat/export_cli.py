"""``xcompat export``: verbs only, nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(help="Write a trained model as what other software reads.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or a checkpoint.")]
Folder = Annotated[Path, typer.Option(help="The folder to write; replaced if this command made it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace whatever is there.")]
Space = Annotated[Literal["old", "own"], typer.Option(help="Whose index is searched: the old model's, or one of its own.")]


@app.command(name="faiss")
def to_faiss(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="faiss index of the old model's embeddings, or a gallery.")],
    model: Annotated[str, typer.Option(help="A run's folder or a checkpoint: procrustes, ridge, or a linear query_map.")],
    out: Annotated[Path, typer.Option(help="The faiss index to write; replaced if this command made it.")],
    overwrite: Overwrite = False,
) -> None:
    """Put a linear map of queries into a faiss index: it then takes the new model's embeddings, whoever searches it."""
    from xcompat.export import commands

    commands.to_faiss(index, model, out, overwrite)


@app.command(name="sentence-transformers")
def to_sentence_transformers(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Write a folder that SentenceTransformer loads, if possible without xcompat: texts and pictures search the old index."""
    from xcompat.export import commands

    commands.to_sentence_transformers(run, out, space, overwrite)


@app.command(name="onnx")
def to_onnx(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Write image and text tower as ONNX, each checked against PyTorch, with preprocessing and a description."""
    from xcompat.export import commands

    commands.to_onnx(run, out, space, overwrite)
