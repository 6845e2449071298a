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
    model: Annotated[str, typer.Option(help="A run's folder or a checkpoint with a linear map: procrustes, ridge, query_map …")],
    out: Annotated[Path, typer.Option(help="The faiss index to write; replaced if this command made it.")],
    overwrite: Overwrite = False,
) -> None:
    """Put a linear map of queries into a faiss index: it then takes the new model's embeddings, whoever searches it."""
    _require_own(model)
    from xcompat.export import commands

    commands.to_faiss(index, model, out, overwrite)


@app.command(name="sentence-transformers")
def to_sentence_transformers(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Write a folder that SentenceTransformer loads, if possible without xcompat: texts and pictures search the old index."""
    _require_own(run)
    from xcompat.export import commands

    commands.to_sentence_transformers(run, out, space, overwrite)


@app.command(name="onnx")
def to_onnx(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Write image and text tower as ONNX, each checked against PyTorch, with preprocessing and a description."""
    _require_own(run)
    from xcompat.export import commands

    commands.to_onnx(run, out, space, overwrite)


@app.command(name="atlas")
def to_atlas(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder, or a stage's.")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write; replaced if this command made it.")],
    items: Annotated[int, typer.Option(min=5, help="Most test items, or pairs of image and text, drawn at random.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw and of t-SNE.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write a run's test items, as both models place them and with what each query gains, for Embedding Atlas."""
    from xcompat.training.record import find_model

    find_model(run)
    from xcompat.training import atlas

    atlas.to_atlas(run, out, items, seed, overwrite)


def _require_own(model: str) -> None:
    from xcompat.encoders import require_own

    require_own(model)
