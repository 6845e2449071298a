"""Command-line options for several verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

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


class RerankingCommand(TyperCommand):
    """Command with a ``--rerank`` that also works without a number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer's own context
        """Write ``--rerank`` without a number as ``--rerank=auto``."""
        end = args.index("--") if "--" in args else len(args)
        is_alone = [
            arg == RERANK and place < end and not "".join(args[place + 1 : place + 2]).lstrip("+-").isdigit()
            for place, arg in enumerate(args)
        ]
        return super().parse_args(ctx, [f"{RERANK}=auto" if alone else arg for arg, alone in zip(args, is_alone, strict=True)])


def parse_hit_count(text: str) -> int:
    """Return a number of hits, or True for ``auto``."""
    if text == "auto":
        return True
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise typer.BadParameter(f"{text!r} is not a number of hits, 1 or more")
    return count


RERANK = "--rerank"
