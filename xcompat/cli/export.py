"""``xcompat export``: verbs only, nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from xcompat.cli.options import MemoryParts
from xcompat.core.progress import announce_loading

app = typer.Typer(help="Export models for other software.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a training run, or a checkpoint.")]
Folder = Annotated[
    Path, typer.Option(help="Output folder. Earlier output by this command is replaced, anything else only with --overwrite.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Space = Annotated[
    Literal["old", "own"],
    typer.Option(
        help="Index to search with the export. Use old for the old model's index, or own for an index by the exported model."
    ),
]


@app.command(name="faiss")
def to_faiss(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="faiss index with old embeddings, or a gallery.")],
    model: Annotated[
        str, typer.Option(help="Run or checkpoint with a linear map (method procrustes, ridge or whitened, for example).")
    ],
    out: Annotated[
        Path,
        typer.Option(help="Output index. Earlier output by this command is replaced, anything else only with --overwrite."),
    ],
    memory: Annotated[
        MemoryParts,
        typer.Option(help="Parts of the query memory to keep. A faiss index can contain the learned transform, but no entries."),
    ] = "transform",
    overwrite: Overwrite = False,
) -> None:
    """Put a linear query map into a faiss index. The new index takes queries by the new model."""
    _require_own(model)
    announce_loading(model)
    from xcompat.export import commands

    commands.to_faiss(index, model, out, overwrite, memory)


@app.command(name="sentence-transformers")
def to_sentence_transformers(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Export a model for sentence-transformers, to load without xcompat when possible."""
    _require_own(run)
    announce_loading(run)
    from xcompat.export import commands

    commands.to_sentence_transformers(run, out, space, overwrite)


@app.command(name="onnx")
def to_onnx(run: Run, out: Folder, space: Space = "old", overwrite: Overwrite = False) -> None:
    """Export the image and text tower as ONNX, and check the outputs against PyTorch."""
    _require_own(run)
    announce_loading(run)
    from xcompat.export import commands

    commands.to_onnx(run, out, space, overwrite)


@app.command(name="atlas")
def to_atlas(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Finished run or stage folder.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Output Parquet file. Earlier output by this command is replaced, anything else only with --overwrite."
        ),
    ],
    items: Annotated[
        int, typer.Option(min=5, help="Maximum number of test items (or image-text pairs) to write, drawn at random.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write the test items of a run for Embedding Atlas, with old and new embeddings and the gain per query."""
    from xcompat.training.record import find_model

    find_model(run)
    announce_loading(run)
    from xcompat.training import atlas

    atlas.to_atlas(run, out, items, seed, overwrite)


def _require_own(model: str) -> None:
    from xcompat.encoders import require_xcompat_model

    require_xcompat_model(model)
