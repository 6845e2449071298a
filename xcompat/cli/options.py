"""Command-line options for several verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Engine = Annotated[Literal["ray", "daft"] | None, typer.Option("--engine", help="Engine for several processes or machines.")]
WorkerCount = Annotated[
    int | None, typer.Option("--workers", min=1, help="Engine processes. Default: 1 per GPU, else 1 per core.")
]
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
    Path | None, typer.Option(help="Text file with the ids of a faiss index. Default: a file beside it, or the ids in it.")
]
EmbedWith = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Python function that embeds texts, e.g. by an API."),
]
RequestsPerMinute = Annotated[float | None, typer.Option(help="Maximum --embed-with calls per minute.")]
PricePerMillion = Annotated[
    float | None,
    typer.Option("--price-per-million-tokens", help="Price of --embed-with. Prints an estimate first."),
]
