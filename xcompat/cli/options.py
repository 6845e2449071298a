"""Options of the command line that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Engine = Annotated[Literal["ray", "daft"] | None, typer.Option("--engine", help="Engine for several processes or machines.")]
WorkerCount = Annotated[int | None, typer.Option("--workers", min=1, help="Processes of the engine; one a GPU, or else a core.")]
BadVectorShare = Annotated[
    float | None,
    typer.Option("--max-bad-share", min=0, max=1, help="Maximum share of rows without a usable embedding. Default: 0.1."),
]
GpusPerWorker = Annotated[float | None, typer.Option("--gpus-per-worker", min=0, help="GPUs per worker, e.g. 0.5.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Recipe values to override."),
]
IndexIds = Annotated[
    Path | None, typer.Option(help="Ids of a faiss index, one per line. Default: a file of ids beside it, or the ids in it.")
]
EmbedWith = Annotated[
    str | None, typer.Option(metavar="MODULE:FUNCTION", help="Function that embeds texts, for maps of an API's embeddings.")
]
