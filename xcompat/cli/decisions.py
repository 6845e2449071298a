"""``xcompat shadow`` and ``xcompat plan``: facts to know before a switch. Nothing is computed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xcompat.cli.opening import load_rerank_originals, load_reranker, open_searched
from xcompat.cli.options import parse_hit_count, parse_path
from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.progress import announce_loading, console, literal, silence_libraries

if TYPE_CHECKING:
    from xcompat.retrieval.argument_checks import RerankOptions
    from xcompat.retrieval.originals import Originals
    from xcompat.stores.shadow import SearchSetup


def shadow(
    searched: Annotated[str, typer.Argument(metavar="GALLERY", help="Gallery folder, or store address.")],
    queries: Annotated[
        str,
        typer.Option(
            metavar="SOURCE", help="Real queries: text file (a query per line), image folder, table, or - for standard input."
        ),
    ],
    old: Annotated[str, typer.Option(help="Current model.")],
    model: Annotated[str, typer.Option(help="Map or compatible model to test. To test only re-ranking, set the old model here.")],
    top_k: Annotated[int, typer.Option(min=1, help="Hits to compare per query.")] = 10,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum number of queries.")] = None,
    limit_ms: Annotated[
        float | None,
        typer.Option(min=0, metavar="MS", help="Latency limit for 95 % of the queries, in milliseconds. Slower means no-go."),
    ] = None,
    rerank: Annotated[
        int | None,
        typer.Option(
            parser=parse_hit_count,
            metavar="[K]",
            help="Re-rank the first K hits with the new model. Without K: the number chosen with the model, or 20.",
        ),
    ] = None,
    originals: Annotated[
        list[Path] | None,
        typer.Option(
            "--images", "--texts", parser=parse_path, metavar="<path>", help="Gallery images or texts, for --rerank. Repeatable."
        ),
    ] = None,
    rerank_with: Annotated[
        str,
        typer.Option(metavar="MODEL", help="New model to re-embed and reorder the hits. Required when --model is the old model."),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file for all queries and their hits.")] = None,
) -> None:
    """Run real queries with the current and the new setup, and report differences in hits and speed.

    The gallery or store does not change. Exit code 1 means no-go.
    """
    from xcompat.retrieval import argument_checks

    reranking = argument_checks.RerankOptions(rerank, originals, rerank_with)
    reranking.require()
    argument_checks.require_models(old, model)
    if out is not None and out.exists():
        raise XcompatError(f"{out} exists; choose another file with --out")
    opened, items = open_searched(searched), load_rerank_originals(originals)
    read = _queries(queries, limit)
    announce_loading(old, model, rerank_with)
    from xcompat.stores.shadow_report import show_shadow

    ways = _way(old), _way(model, reranking, items)
    if not show_shadow(opened, ways, read, top_k, limit_ms, out):
        raise typer.Exit(1)


def plan(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="Run folder, or output folder of `xcompat evaluate`.")],
    items: Annotated[int, typer.Option(min=1, help="Number of items in the index.")],
    queries_per_day: Annotated[int, typer.Option(min=0, metavar="N", help="Queries per day.")],
    embeds_per_second: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            metavar="R",
            help="Embeddings per second of the new model, to estimate hours of re-embedding and the latency of a query.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, metavar="P", help="Price per 1,000 embeddings.")] = None,
    days: Annotated[int, typer.Option(min=1, help="Period for total costs, in days.")] = 30,
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare, e.g. cmc@1. Default: the first metric in the report."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG plot: quality against the number of embeddings.")] = None,
) -> None:
    """Compare ways to upgrade: stay, map new queries, mix them half-way, re-rank, or backfill.

    Prints quality, embeddings, storage, hours and price.

    Quality comes from the report. To include re-ranking, run `xcompat evaluate` with --rerank 20 first.
    """
    if plot is not None and plot.exists():
        raise XcompatError(f"{plot} exists; choose another file with --plot")
    from xcompat.report import load_report
    from xcompat.report.planning import Traffic, draw_plan, plan_ways
    from xcompat.report.terminal import print_plan

    planned = plan_ways(load_report(report), Traffic(items, queries_per_day, embeds_per_second, price, days), metric)
    print_plan(planned, console)
    if plot is not None:
        from xcompat.core.files import atomic_path

        with atomic_path(plot) as file:
            draw_plan(planned).savefig(file, format="png", dpi=150)
        console.print(f"plot: {literal(plot)}", soft_wrap=True)


def _queries(source: str, limit: int | None) -> Sequence[str] | Iterator[str]:
    """Return texts or image paths. Lines from stdin are read as they arrive."""
    from itertools import islice

    if source == "-":
        lines = (line.strip() for line in sys.stdin)
        return islice((line for line in lines if line), limit)
    from xcompat.retrieval.queries import load_queries

    return load_queries(source).one_by_one()[:limit]


def _way(model: str, reranking: RerankOptions | None = None, originals: Originals | None = None) -> SearchSetup:
    from xcompat.models.embedder import load_embedder
    from xcompat.retrieval.fallback import Fallback
    from xcompat.stores.shadow import SearchSetup

    silence_libraries()
    source = load_embedder(model, device())
    reranker = load_reranker(source, reranking, originals) if reranking is not None else None
    return SearchSetup(source, Fallback.for_model(source, device()), reranker)
