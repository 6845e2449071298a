"""Command-line options for several verbs."""

from __future__ import annotations

import sys
from json import dumps as dump_json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

MemoryParts = Literal["none", "transform", "full"]
"""Parts of a query memory, as in ``xcompat.vectors.codecs``, which takes longer to import."""
Engine = Annotated[
    Literal["ray", "daft"] | None, typer.Option("--engine", help="Engine for several processes or machines. Use ray or daft.")
]
WorkerCount = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Worker processes for --engine. Default: 1 per GPU, else 1 per core."),
]
BadVectorShare = Annotated[
    float | None,
    typer.Option("--max-bad-share", min=0, max=1, help="Maximum share of rows without a usable embedding. Default: 0.1."),
]
GpusPerWorker = Annotated[float | None, typer.Option("--gpus-per-worker", min=0, help="GPUs per worker, e.g. 0.5.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Recipe values to override, e.g. training.learning_rate=1e-3."),
]
IndexIds = Annotated[
    Path | None,
    typer.Option(
        help="Text file with the ids of a faiss index, one per line. Default: a file beside the index, or the ids in the index."
    ),
]
OldIds = Annotated[
    Path | None,
    typer.Option(
        help="Text file with an id per line, for the rows of --old. Needed when --old has no ids. With --images, ids are file "
        "names."
    ),
]
ItemClasses = Annotated[
    Path | None,
    typer.Option(
        help="Classes of the items: a text file with a class per line in the order of --old, a table with ids and classes, or "
        "labelled images (a folder per class, or shards)."
    ),
]
VectorName = Annotated[
    str | None, typer.Option(help="Column or named vector with embeddings. Default: a column with a usual name, e.g. embedding.")
]
VectorIds = Annotated[str | None, typer.Option("--id-column", help="Column with ids. Default: a usual name, e.g. id or doc_id.")]
EmbedWith = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Python function to embed a list of texts, e.g. with an embedding API."),
]
RequestsPerMinute = Annotated[float | None, typer.Option(help="Maximum --embed-with calls per minute.")]
PricePerMillion = Annotated[
    float | None,
    typer.Option(
        "--price-per-million-tokens", help="Price of the --embed-with service. Prints an estimate before the first call."
    ),
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


def parse_path(text: str) -> Path:
    """Return a path that still differs from a name on the Hub: pathlib drops ``./`` and the last slash.

    Example:
        >>> parse_path("photos/2024"), parse_path("./photos").is_absolute()
        (PosixPath('photos/2024'), True)
    """
    return Path(text).absolute() if text.startswith("./") or text.endswith("/") else Path(text)


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
TextColumns = Annotated[
    list[str] | None,
    typer.Option("--text-column", help="Column to embed. Repeat the option to join several columns.", rich_help_panel="Texts"),
]
IdColumn = Annotated[
    str | None, typer.Option(help="Column with ids. Default: a column with a usual name, e.g. id.", rich_help_panel="Texts")
]
Words = Annotated[
    int | None,
    typer.Option(min=1, help="Split texts into passages of N words, with ids ID#0, ID#1 and so on.", rich_help_panel="Texts"),
]
Overlap = Annotated[int | None, typer.Option(min=0, help="Words shared by consecutive passages.", rich_help_panel="Texts")]
MaxBadShare = Annotated[float | None, typer.Option(min=0, max=1, help="Maximum share of unreadable images. Default: 0.1.")]
SideInfo = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Model for side-information, stored for maps with side-information (FCT).")
]
MetadataColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata",
        metavar="COLUMN",
        help="Table column to keep as metadata. Repeatable. Default: all columns.",
    ),
]
NoMetadata = Annotated[bool, typer.Option("--no-metadata", help="Keep no metadata.")]
KeepText = Annotated[
    bool | None,
    typer.Option(
        "--keep-text/--no-keep-text",
        help="Keep texts in the metadata. Default: yes.",
        rich_help_panel="Texts",
    ),
]
RERANKING = "Re-ranking"
Candidates = Annotated[
    int | None,
    typer.Option(
        parser=parse_hit_count,
        metavar="[K]",
        help="Re-rank the first K hits with the new model. Without K: the number chosen with the model, or 20.",
        rich_help_panel=RERANKING,
    ),
]
ServedOriginals = Annotated[
    list[Path] | None,
    typer.Option("--images", "--texts", parser=parse_path, metavar="<path>", help="Gallery images or texts. Repeatable."),
]
OriginalsOf = Annotated[
    list[Path] | None,
    typer.Option(
        "--images",
        "--texts",
        parser=parse_path,
        metavar="<path>",
        help="Gallery images or texts, for --rerank. Repeatable. Default: texts in the metadata.",
        rich_help_panel=RERANKING,
    ),
]
AddressColumn = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Metadata key with the web address of each image, to download for --rerank instead of --images.",
        rich_help_panel=RERANKING,
    ),
]
RerankModel = Annotated[
    str,
    typer.Option(
        metavar="MODEL", help="New model for --rerank. Needed when --model is the old model.", rich_help_panel=RERANKING
    ),
]
RerankBudget = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Maximum number of new embeddings for --rerank.", rich_help_panel=RERANKING),
]
RecordDemand = Annotated[
    bool,
    typer.Option(
        "--record-demand",
        help="Record how often items are --rerank candidates. A backfill re-embeds frequent items first. Queries are not saved.",
        rich_help_panel=RERANKING,
    ),
]
CacheMegabytes = Annotated[
    float | None,
    typer.Option(
        "--cache-mb",
        min=0,
        metavar="MB",
        help="Maximum size of the gallery's cache of new embeddings. The oldest are deleted. Default: no limit.",
        rich_help_panel=RERANKING,
    ),
]
CacheDays = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="DAYS",
        help="Maximum age of cached new embeddings; older ones are deleted. Default: no limit.",
        rich_help_panel=RERANKING,
    ),
]
SearchedPlace = Annotated[
    str,
    typer.Argument(metavar="GALLERY", help="Gallery folder, faiss index, or address of a vector store."),
]
GroupKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Show the best hit per value of a metadata key, e.g. per document."),
]
FallbackBelow = Annotated[float | None, typer.Option(help="Use --fallback for queries below this confidence. Default: 0.5.")]
ShownFields = Annotated[
    list[str] | None,
    typer.Option("--show", metavar="COLUMN", help="Column or metadata key to show for each hit. Repeat it for several."),
]
Conditions = Annotated[
    list[str] | None,
    typer.Option(help="Filter by metadata, KEY=VALUE. Repeatable. For a store: a condition in its query language."),
]
ManyQueries = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE",
        help="Many queries: texts (a text per line or row), images, or embeddings (.npy, Parquet, JSON lines).",
    ),
]
JudgedTarget = Annotated[
    Path | None, typer.Argument(parser=parse_path, metavar="TARGET", help="Recipe, run folder, or checkpoint.")
]
TestImages = Annotated[Path | None, typer.Option(parser=parse_path, metavar="<path>", help="Test images for a checkpoint.")]
JudgedOld = Annotated[
    str | None,
    typer.Option(
        help="Old embeddings: faiss index, gallery, database address, file or folder. For a checkpoint, also the old model."
    ),
]
NeedsCompatible = Annotated[
    bool, typer.Option("--require-compatible", help="Exit with code 1 unless the new model is compatible.")
]
RerankedHits = Annotated[
    int | None,
    typer.Option(
        "--rerank",
        parser=parse_hit_count,
        metavar="[K]",
        help="Also measure re-ranking of the first K hits with the new model. Without K: the number chosen with the map, or 20.",
    ),
]
OldThreshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="COSINE",
        help="Current score threshold (cosine). The report contains the equivalent threshold for the new model.",
    ),
]
SideTexts = Annotated[
    str | None,
    typer.Option(help="Original texts with ids (JSON lines, CSV, TSV or Parquet), to embed with the model in --new or --old."),
]
OriginalImages = Annotated[
    str | None,
    typer.Option(help="Original images (a folder or shards), to embed with the model in --new or --old."),
]
SearchedVectors = Annotated[
    Path | None,
    typer.Option(help="Gallery, faiss index or file with the gallery's vectors. Use it to check for a biased sample of pairs."),
]
MemoryCodec = Annotated[
    str | None,
    typer.Option(
        help="Storage format for query memory entries: float32, SQfp16, SQ8, SQ4 or PQ64. The default depends on the number of "
        "entries."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and messages to stderr.")]


def print_json(values: dict[str, object], is_json: bool) -> None:
    """Print a line of JSON, if it was requested."""
    if is_json:
        sys.stdout.write(dump_json(values) + "\n")
