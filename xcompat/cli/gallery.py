"""``xcompat gallery``: verbs only, nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from xcompat.cli.opening import (
    Dtype,
    display_address,
    is_address,
    is_index,
    is_vectors,
    load_map,
    load_model,
    load_old_model,
    load_rerank_originals,
    load_reranker,
    load_service,
    open_gallery,
    open_index,
    open_searched,
    open_store,
    read_columns,
    read_stored,
    require_ids_of_index,
    require_index_ids,
    restrict,
)
from xcompat.cli.options import (
    AddressColumn,
    BadVectorShare,
    CacheDays,
    CacheMegabytes,
    Candidates,
    Conditions,
    EmbedWith,
    Engine,
    FallbackBelow,
    GpusPerWorker,
    GroupKey,
    IdColumn,
    IndexIds,
    Json,
    KeepText,
    ManyQueries,
    MaxBadShare,
    MetadataColumns,
    NoMetadata,
    OriginalsOf,
    Overlap,
    PricePerMillion,
    RecordDemand,
    RequestsPerMinute,
    RerankBudget,
    RerankingCommand,
    RerankModel,
    SearchedPlace,
    ShownFields,
    SideInfo,
    TextColumns,
    VectorName,
    Words,
    WorkerCount,
    print_json,
)
from xcompat.core.errors import XcompatError
from xcompat.core.progress import announce_loading, notice, results_on_stdout

if TYPE_CHECKING:
    from xcompat.core.fingerprint import Fingerprint
    from xcompat.retrieval import Gallery
    from xcompat.retrieval.fallback import Fallback
    from xcompat.retrieval.hit_output import QueryResult
    from xcompat.retrieval.queries import Queries
    from xcompat.retrieval.queries import Source as QuerySource
    from xcompat.retrieval.reranking import Reranker
    from xcompat.stores import Store

T = TypeVar("T", str, str | None)

app = typer.Typer(help="Build, search and upgrade a folder of embeddings.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="GALLERY", help="Gallery folder.")]
ModelName = Annotated[str, typer.Option(help="Model: run folder, checkpoint, or name on the Hub.")]
EmbedIn = Annotated[Dtype, typer.Option("--dtype", help="Precision of the model. Default: bfloat16 on CUDA, else float32.")]
GalleryOut = Annotated[Path, typer.Option(help="Gallery folder.")]
ADOPTS_ONLY = (
    "--from-faiss adopts an index as it is: remove images, texts, --index, --dtype and the options of images and "
    "texts; add images or texts later"
)
VectorIdFile = Annotated[
    Path | None, typer.Option(help="Text file with an id per vector, in their order. Default: ids stored with the vectors.")
]


def _existing(source: T) -> T:
    """Return the place of originals. Raise if they do not exist, before slow imports."""
    if source is not None:
        from xcompat.data.sources import local_files

        local_files(source)
    return source


Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Image folder, shards, table, or text file.", callback=_existing)]


@app.command()
def build(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="Image folder, shards, table, text file, or vectors: an index, a database, or any file of `map`.",
        ),
    ] = None,
    model: ModelName = "",
    out: GalleryOut = Path("gallery"),
    index: Annotated[str | None, typer.Option(help="faiss factory string, e.g. HNSW32 or IVF1024,PQ64. Default: Flat.")] = None,
    from_faiss: Annotated[Path | None, typer.Option(help="faiss index to adopt without copying vectors.")] = None,
    ids: VectorIdFile = None,
    vector_name: VectorName = None,
    dtype: EmbedIn = None,
    text_column: TextColumns = None,
    id_column: IdColumn = None,
    words: Words = None,
    overlap: Overlap = None,
    keep_text: KeepText = None,
    metadata: MetadataColumns = None,
    no_metadata: NoMetadata = False,
    max_bad_share: MaxBadShare = None,
    side_info: SideInfo = None,
) -> None:
    """Build a gallery from images, texts, or vectors. To continue an interrupted build, run the same command again.

    --model embeds images and texts. For vectors, it is the model that made them, and its name is enough. If a table has texts and
    vectors, --vector-name chooses the vectors. The other columns become metadata.
    """
    from xcompat.retrieval import argument_checks, commands

    argument_checks.require_named(model)
    texts = _set_options(text_column=text_column, id_column=id_column, words=words, overlap=overlap, keep_text=keep_text)
    kept = _kept_columns(metadata, no_metadata)
    if from_faiss is not None:
        of_vectors = index is not None or dtype is not None or vector_name is not None
        if source is not None or of_vectors or texts or kept is not True or max_bad_share is not None or side_info is not None:
            raise XcompatError(ADOPTS_ONLY)
        commands.adopt(out, from_faiss, ids, model)
    elif source is not None and (vector_name is not None or is_vectors(source)):
        if dtype is not None or side_info is not None or set(texts) - {"id_column"}:
            raise XcompatError(f"{display_address(source)} holds vectors: remove --dtype, --side-info and image and text options")
        read = partial(read_stored, source, ids, id_column, vector_name)
        columns = read_columns(source, id_column, vector_name, kept)
        commands.build_from_vectors(out, read, display_address(source), model, index, max_bad_share, columns)
    elif ids is not None:
        raise XcompatError("--ids works only with vectors; remove it, or choose a column of texts with --id-column")
    elif source is not None:
        _existing(source)
        argument_checks.require_models(model)
        announce_loading(model, side_info)
        commands.require_place(out, index)
        from xcompat.retrieval.originals import load_originals

        originals = load_originals(source, max_bad_share, kept, **texts)
        embedder, side = load_model(model, dtype, side_info), load_model(side_info, dtype) if side_info is not None else None
        commands.build(out, originals, embedder, index, side)
    else:
        raise XcompatError("name the images or texts to embed, stored vectors, or an index to adopt with --from-faiss")


@app.command()
def adopt(
    index: Annotated[
        Path, typer.Argument(metavar="INDEX", help="faiss index to use in place. xcompat neither copies nor changes this file.")
    ],
    model: ModelName = "",
    out: Annotated[Path, typer.Option(help="Gallery folder.")] = Path("gallery"),
    ids: Annotated[
        Path | None, typer.Option(help="Text file with ids, one per line, in index order. Default: the ids in the index.")
    ] = None,
) -> None:
    """Make a gallery from a faiss index without copying vectors. --model is the model used for the vectors."""
    from xcompat.retrieval import argument_checks, commands

    argument_checks.require_named(model)
    commands.adopt(out, index, ids, model)


def _printing_results(is_printing: bool) -> AbstractContextManager[object]:
    return results_on_stdout() if is_printing else nullcontext()


def _versions_of(opened: Gallery | Store) -> Sequence[Fingerprint | None]:
    """Return the models with embeddings in a gallery or a store."""
    from xcompat.retrieval import Gallery

    return opened.versions if isinstance(opened, Gallery) else [space.fingerprint for space in opened.spaces().values()]


@app.command(cls=RerankingCommand)
def search(
    gallery: SearchedPlace,
    query: Annotated[str | None, typer.Argument(metavar="[QUERY]", help="Query: a text, or the path of an image.")] = None,
    model: ModelName = "",
    top_k: Annotated[int, typer.Option(min=1, help="Number of hits.")] = 10,
    where: Conditions = None,
    group_by: GroupKey = None,
    fallback: Annotated[str, typer.Option(help="Old model, which answers queries of low confidence.")] = "",
    fallback_below: FallbackBelow = None,
    embed_with: EmbedWith = None,
    requests_per_minute: RequestsPerMinute = None,
    price_per_million_tokens: PricePerMillion = None,
    rerank: Candidates = None,
    originals: OriginalsOf = None,
    address_column: AddressColumn = None,
    rerank_with: RerankModel = "",
    rerank_budget: RerankBudget = None,
    record_demand: RecordDemand = False,
    cache_mb: CacheMegabytes = None,
    cache_days: CacheDays = None,
    queries: ManyQueries = None,
    max_bad_share: BadVectorShare = None,
    ids: IndexIds = None,
    fields: ShownFields = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object per query, one per line.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header and a row per hit.")] = False,
) -> None:
    """Search with a text, an image, or many queries.

    --model is the model that made the stored vectors, also of a faiss index, or a newer model with a map for them.
    """
    from xcompat.retrieval import argument_checks

    reranking = argument_checks.RerankOptions(
        rerank, originals, rerank_with, rerank_budget, record_demand, cache_mb, cache_days, address_column
    )
    reranking.require(is_address(gallery), is_index(gallery))
    argument_checks.require_one_search(query, queries, json and csv, fallback_below is not None and not fallback)
    if is_address(gallery):
        argument_checks.require_of_stores(bool(fallback) or group_by is not None, where or [])
    require_ids_of_index(gallery, ids)
    with _printing_results(json or csv):
        opened = None if is_index(gallery) else open_searched(gallery)
        argument_checks.require_named(model)
        announce_loading(model, fallback, rerank_with)
        read = load_rerank_originals(originals)
        require_index_ids(gallery, ids, read)
        from xcompat.retrieval.hit_output import make_printer
        from xcompat.retrieval.query_sources import load_queries_and_model

        restrict(opened, where or [])
        versions = _versions_of(opened) if opened is not None else ()
        service = load_service(embed_with, requests_per_minute, price_per_million_tokens)
        typed, source = load_queries_and_model(query, queries, model, versions, fallback, service, max_bad_share)
        opened = open_index(gallery, source, ids, read) if opened is None else opened
        old = load_old_model(typed, source, fallback, fallback_below)
        reranker = load_reranker(source, reranking, read)
        show = make_printer("json" if json else "csv" if csv else "table", group_by, queries is not None, fields or [])
        _show_hits(opened, (typed, source), top_k, where or [], show, old, group_by, reranker, fields or [])


def _show_hits(
    opened: Gallery | Store,
    asking: tuple[Queries, QuerySource],
    top_k: int,
    where: list[str],
    show: Callable[[QueryResult], None],
    old: Fallback | None,
    group_by: str | None,
    reranker: Reranker | None,
    fields: list[str],
) -> None:
    from xcompat.retrieval import Gallery

    if isinstance(opened, Gallery):
        from xcompat.retrieval.commands import search as search_gallery

        search_gallery(opened, *asking, top_k, where, show, old, group_by, reranker)
    else:
        from xcompat.stores.commands import search as search_store

        search_store(opened, *asking, top_k, where[0] if where else None, show, old, reranker, fields)


@app.command()
def add(
    gallery: Folder,
    source: Source,
    model: ModelName = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Re-embed items with changed content, and items embedded by another model.")
    ] = False,
    dtype: EmbedIn = None,
    text_column: TextColumns = None,
    id_column: IdColumn = None,
    words: Words = None,
    overlap: Overlap = None,
    keep_text: KeepText = None,
    metadata: MetadataColumns = None,
    no_metadata: NoMetadata = False,
    max_bad_share: MaxBadShare = None,
    side_info: SideInfo = None,
) -> None:
    """Add images or texts, embedded by the gallery's model or a newer model."""
    from xcompat.retrieval import argument_checks, commands

    texts = _set_options(text_column=text_column, id_column=id_column, words=words, overlap=overlap, keep_text=keep_text)
    kept = _kept_columns(metadata, no_metadata)
    opened = open_gallery(gallery)
    argument_checks.require_models(model)
    announce_loading(model, side_info)
    from xcompat.retrieval.originals import load_originals

    originals = load_originals(source, max_bad_share, kept, **texts)
    _warn_of_backfill(opened, model)
    embedder, side = load_model(model, dtype, side_info), load_model(side_info, dtype) if side_info is not None else None
    commands.add(opened, originals, embedder, replace, side)


@app.command()
def upgrade(
    gallery: Folder,
    model: ModelName = "",
    backfill: Annotated[
        str | None,
        typer.Option(
            help="Images or texts to re-embed. Items with recorded demand come first, the others in random order.",
            callback=_existing,
        ),
    ] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Maximum number of items to re-embed now.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cost, and change nothing.")] = False,
    dtype: EmbedIn = None,
    text_column: TextColumns = None,
    id_column: IdColumn = None,
    words: Words = None,
    overlap: Overlap = None,
    keep_text: KeepText = None,
    metadata: MetadataColumns = None,
    no_metadata: NoMetadata = False,
    engine: Engine = None,
    workers: WorkerCount = None,
    gpus_per_worker: GpusPerWorker = None,
    max_bad_share: MaxBadShare = None,
) -> None:
    """Map stored embeddings to a newer model, or re-embed images or texts."""
    from xcompat.engines.workers import Workers
    from xcompat.retrieval import argument_checks, commands

    texts = _set_options(text_column=text_column, id_column=id_column, words=words, overlap=overlap, keep_text=keep_text)
    kept = _kept_columns(metadata, no_metadata)
    if backfill is None and (budget is not None or dtype is not None or texts or max_bad_share is not None or kept is not True):
        columns = {"no_metadata": True} if kept is False else {"metadata": metadata}
        others = min(_set_options(max_bad_share=max_bad_share, **columns, **texts), default="").replace("_", "-")
        given = "--budget" if budget is not None else "--dtype" if dtype is not None else f"--{others}"
        of = "texts" if texts else "images"
        raise XcompatError(f"{given} applies to re-embedded {of}: add --backfill, or remove {given} to map all items")
    where, opened = Workers(engine, workers, gpus_per_worker), open_gallery(gallery)
    if backfill is None:
        newer = load_map(model)
        with where.pool(model, newer) as spread:
            commands.upgrade(opened, newer, dry_run, spread)
    else:
        argument_checks.require_models(model)
        announce_loading(model)
        from xcompat.retrieval.originals import load_originals

        originals = load_originals(backfill, max_bad_share, kept, **texts)
        _warn_of_backfill(opened, model)
        embedder = load_model(model, dtype)
        with where.pool(model, embedder) as spread:
            commands.backfill(opened, originals, embedder, budget, dry_run, spread)


def _warn_of_backfill(gallery: Gallery, model: str) -> None:
    """Warn before anything is embedded if the model's report shows a loss after re-embedding."""
    from xcompat.report import recorded_backfill_losses
    from xcompat.report.wording import backfill_warning

    if len(gallery) and (losses := recorded_backfill_losses(model)):
        notice(backfill_warning(losses))


@app.command()
def info(
    gallery: Annotated[str, typer.Argument(metavar="GALLERY", help="Gallery folder, or store address.")],
    model: ModelName = "",
    json: Json = False,
) -> None:
    """Show the items, models and earlier states of a gallery, or the vectors and models of a store."""
    if is_address(gallery):
        from xcompat.stores.commands import info as store_info

        with _printing_results(json), closing(open_store(gallery)) as store:
            print_json(store_info(store, load_model(model) if model else None), json)
        return
    from xcompat.retrieval import commands

    with _printing_results(json):
        opened = open_gallery(Path(gallery))
        found = commands.info(opened, load_model(model) if model else None)
    print_json(found, json)


@app.command()
def alias(
    gallery: Annotated[str, typer.Argument(metavar="GALLERY", help="Gallery folder, or store address.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Another name of the gallery's model.")],
) -> None:
    """Record another name for the model of a gallery. Maps fitted with --old-model NAME then fit this gallery."""
    if "://" in gallery:
        from xcompat.stores.commands import alias as alias_store

        alias_store(open_store(gallery), name)
        return
    from xcompat.retrieval import commands

    commands.alias(open_gallery(Path(gallery)), name)


@app.command()
def verify(gallery: Folder, json: Json = False) -> None:
    """Check every file of a gallery against the recorded checksum. Exit code 1 if a file has changed."""
    from xcompat.retrieval import commands

    with _printing_results(json):
        found = commands.verify(open_gallery(gallery))
    print_json(found, json)
    if not found["passed"]:
        raise typer.Exit(1)


@app.command()
def doctor(
    gallery: Annotated[str, typer.Argument(metavar="GALLERY", help="Gallery folder, or store address.")],
    model: ModelName = "",
    images: Annotated[
        str | None,
        typer.Option(
            "--images",
            "--texts",
            help="Gallery images or texts: file or folder. For a store: name of the field with the images or texts.",
        ),
    ] = None,
    image_folder: Annotated[str | None, typer.Option(help="Base folder for image paths in a store.")] = None,
    where: Annotated[str | None, typer.Option(help="SQL condition, to check only these rows of a PostgreSQL table.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Number of items to re-embed per model version.")] = 400,
    text_column: TextColumns = None,
    id_column: IdColumn = None,
    words: Words = None,
    overlap: Overlap = None,
    canary: Annotated[
        bool, typer.Option("--canary", help="Store ten test embeddings of the model, or compare the model with the stored ones.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Record the model in the store, unless it made at most half of a sample.")
    ] = False,
    json: Json = False,
) -> None:
    """Re-embed a sample to find items embedded by another model.

    Exit code 1 if such items are found, or the canary differs (see --canary).
    """
    texts = _set_options(text_column=text_column, id_column=id_column, words=words, overlap=overlap)
    if record and not is_address(gallery):
        raise XcompatError("--record applies to stores; a gallery records its models itself, so remove it")
    if where is not None and not is_address(gallery):
        raise XcompatError("--where works only with PostgreSQL tables; remove it to check the whole gallery")
    if canary:
        if images is not None or image_folder is not None or texts or is_address(gallery):
            raise XcompatError("--canary needs only a gallery's folder and --model; remove the other options")
        examine = _check_canary
    elif images is None and not record:
        raise XcompatError("name the images or texts of the gallery with --images or --texts: a sample is re-embedded")
    elif is_address(gallery):
        if texts:
            raise XcompatError(
                f"--{min(texts).replace('_', '-')} applies to texts in files, but --texts names a field of a store; remove "
                "this option"
            )
        examine = partial(_examine_store, field=images, image_folder=image_folder, where=where, sample=sample, is_recorded=record)
    elif image_folder is not None:
        raise XcompatError("--image-folder applies to image paths in a store; for a gallery, use --images instead")
    else:
        examine = partial(_examine_gallery, images=images or "", texts=texts, sample=sample)
    with _printing_results(json):
        found = examine(gallery, model)
    print_json(found, json)
    if not found["passed"]:
        raise typer.Exit(1)


def _check_canary(gallery: str, model: str) -> dict[str, object]:
    from xcompat.retrieval import commands

    return commands.check_canary(open_gallery(Path(gallery)), load_model(model))


def _examine_store(
    gallery: str, model: str, field: str | None, image_folder: str | None, where: str | None, sample: int, is_recorded: bool
) -> dict[str, object]:
    from xcompat.retrieval import argument_checks
    from xcompat.stores import require_kind

    require_kind(gallery)
    argument_checks.require_named(model)
    from xcompat.stores import commands
    from xcompat.stores.doctor import SourceField

    held = SourceField(field, None if image_folder is None else Path(image_folder)) if field is not None else None
    if is_recorded:
        return commands.record_model(gallery, model, held, where)
    assert held is not None, "checked above"
    argument_checks.require_models(model)
    return commands.doctor(gallery, load_model(model), held, sample, where)


def _examine_gallery(gallery: str, model: str, images: str, texts: dict[str, object], sample: int) -> dict[str, object]:
    from xcompat.retrieval import argument_checks, commands

    opened, source = open_gallery(Path(gallery)), _existing(images)
    argument_checks.require_models(model)
    from xcompat.retrieval.originals import load_originals

    originals = load_originals(source, None, True, **texts)
    return commands.doctor(opened, load_model(model), originals, sample)


@app.command()
def rollback(
    gallery: Folder,
    generation: Annotated[int | None, typer.Argument(help="Generation to return to, as with --to.", show_default=False)] = None,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", min=0, help="Generation to return to. By default, undo the last change.")
    ] = None,
    list_states: Annotated[bool, typer.Option("--list", help="List earlier states (generations) and change nothing.")] = False,
) -> None:
    """Return to an earlier state of a gallery. Each call goes one state further back."""
    from xcompat.retrieval import commands

    wanted = to if to is not None else generation
    if to is not None and generation is not None:
        raise XcompatError(f"the generations {generation} and --to {to} cannot be combined; remove --to or the other generation")
    if list_states:
        if wanted is not None:
            raise XcompatError("--list only shows the generations; to return to a generation, remove --list")
        commands.list_states(open_gallery(gallery))
    else:
        commands.rollback(open_gallery(gallery), wanted)


@app.command()
def resync(
    gallery: Folder,
    ids: Annotated[
        Path | None, typer.Option(help="Text file with an id per line for all vectors in the index, in index order.")
    ] = None,
) -> None:
    """Add the vectors appended to an adopted faiss index. Vectors adopted earlier must be unchanged."""
    from xcompat.retrieval import commands

    commands.resync(open_gallery(gallery), ids)


@app.command()
def compact(gallery: Folder) -> None:
    """Merge the gallery's segments and delete earlier states. You cannot return to deleted states."""
    from xcompat.retrieval import commands

    commands.compact(open_gallery(gallery))


def _set_options(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value not in (None, [])}


def _kept_columns(metadata: list[str] | None, no_metadata: bool) -> bool | list[str]:
    """Return the columns to keep beside items; True for all, False for none."""
    if metadata and no_metadata:
        raise XcompatError("--metadata and --no-metadata cannot be combined; remove --metadata or --no-metadata")
    return metadata or not no_metadata
