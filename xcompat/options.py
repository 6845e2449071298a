"""Options of the command line that several verbs have."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Engine = Annotated[
    Literal["ray", "daft"] | None, typer.Option("--engine", help="What spreads the work over processes and machines.")
]
WorkerCount = Annotated[int | None, typer.Option("--workers", min=1, help="Processes of the engine; one a GPU, or else a core.")]
GpusPerWorker = Annotated[float | None, typer.Option("--gpus-per-worker", min=0, help="Of each process, such as 0.5.")]
