"""``xcompat export``: verbs only, nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from xcompat.core.progress import announce_loading

app = typer.Typer(help="Export models for other software.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint.")]
Folder = Annotated[Path, typer.Option(help="Output folder. Only this command's own output is replaced.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Space = Annotated[Literal["old", "own"], typer.Option(help="Index to search: the old model's, or the model's own.")]


@app.command(name="faiss")
def to_faiss(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="faiss index with old embeddings, or a gallery.")],
    model: Annotated[str, typer.Option(help="Run or checkpoint with a linear map, e.g. procrustes, ridge, whitened.")],
    out: Annotated[Path, typer.Option(help="Output index. Only this command's own output is replaced.")],
    memory: Annotated[
        Literal["all", "transform", "none"],
        typer.Option(help="Memory parts to keep. A faiss index can contain the learned transform, but no memory entries."),
    ] = "all",
    overwrite: Overwrite = False,
) -> None:
    """Put a linear query map into a faiss index. The index then takes new embeddings."""
    _require_own(model)
    announce_loading(model)
    from xcompat.export import commands

    commands.to_faiss(index, model, out, overwrite, memory)


@app.command(name="sentence-transformers")
def to_sentence_transformers(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Export a model for SentenceTransformer, without xcompat if possible."""
    _require_own(run)
    announce_loading(run)
    from xcompat.export import commands

    commands.to_sentence_transformers(run, out, space, overwrite)


@app.command(name="onnx")
def to_onnx(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Export the image and text tower as ONNX, checked against PyTorch."""
    _require_own(run)
    announce_loading(run)
    from xcompat.export import commands

    commands.to_onnx(run, out, space, overwrite)


@app.command(name="atlas")
def to_atlas(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Finished run or stage folder.")],
    out: Annotated[Path, typer.Option(help="Output Parquet file. Only this command's own output is replaced.")],
    items: Annotated[int, typer.Option(min=5, help="Maximum number of test items, or image-text pairs, drawn at random.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write test items with both embeddings and the gain of each query, for Embedding Atlas."""
    from xcompat.training.record import find_model

    find_model(run)
    announce_loading(run)
    from xcompat.training import atlas

    atlas.to_atlas(run, out, items, seed, overwrite)


def _require_own(model: str) -> None:
    from xcompat.encoders import require_xcompat_model

    require_xcompat_model(model)
