"""``xcompat migrate``: verbs only, nothing is computed here."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from xcompat.cli.options import Engine, GpusPerWorker, Json, PricePerMillion, RequestsPerMinute, WorkerCount, print_json
from xcompat.core.distributed import device, is_main_process
from xcompat.core.errors import XcompatError
from xcompat.core.progress import announce_loading, console, results_on_stdout, silence_libraries

if TYPE_CHECKING:
    from xcompat.stores import Store
    from xcompat.stores.doctor import SourceField
    from xcompat.stores.migration import AnyVectorSource

app = typer.Typer(help="Migrate the vectors of a database to a new model, in place.", no_args_is_help=True)

Uri = Annotated[
    str,
    typer.Argument(
        metavar="URI", help="Address of the vector store, e.g. postgresql://user@host/db?table=items&column=embedding."
    ),
]
Model = Annotated[str, typer.Option(help="Run or checkpoint with a map of galleries. With --embed: any model.")]
Embed = Annotated[
    str | None, typer.Option("--embed", help="Re-embed every row from this field. The field contains texts or image paths.")
]
ImageFolder = Annotated[str | None, typer.Option("--image-folder", help="Base folder for image paths.")]
Into = Annotated[
    str | None,
    typer.Option(help="Name of the new vectors (column, named vector or collection). Default: the old name followed by _new."),
]
Dtype = Annotated[Literal["float32", "float16"], typer.Option("--dtype", help="Number format for new vectors.")]
From = Annotated[str | None, typer.Option("--from", help="Model of the stored vectors. Default: the recorded model.")]
Texts = Annotated[
    str | None,
    typer.Option(
        "--texts", help="Field with the text of each vector. xcompat re-embeds a sample, to check that --from made the vectors."
    ),
]
Images = Annotated[
    str | None,
    typer.Option(
        "--images",
        help="Field with the images of the vectors, or paths below --image-folder. xcompat re-embeds a sample of images to "
        "check --from.",
    ),
]
EmbedWith = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Python function to embed a list of texts, e.g. with an embedding API. Use --model to name the function's model.",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(help='SQL condition for the rows to migrate, e.g. "collection_id = 7". PostgreSQL only. Default: all rows.'),
]

MaxBadShare = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Maximum share of rows without a usable vector (missing, zero, not finite). Default: 0.1."),
]


@app.command()
def plan(
    uri: Uri,
    model: Model = "",
    from_: From = None,
    dtype: Dtype = "float32",
    embed: Embed = None,
    image_folder: ImageFolder = None,
    texts: Texts = None,
    images: Images = None,
    max_bad_share: MaxBadShare = None,
    where: Where = None,
    embed_with: EmbedWith = None,
    requests_per_minute: RequestsPerMinute = None,
    price: PricePerMillion = None,
    json: Json = False,
) -> None:
    """Show the cost and the expected result of a migration. Nothing is written."""
    from xcompat.report import print_quality
    from xcompat.stores import commands

    held = _source_field(from_, texts, images, embed, image_folder)
    service = _Service(embed_with, requests_per_minute, price)
    _require(uri, model, embed, image_folder if embed else None, service)
    with _messages_on_stderr(json):
        store, source = _open(uri, where), _vector_source(model, embed, image_folder if embed else None, service)
        old = commands.check_model(store, from_, held)
        found = commands.plan(store, source, dtype, max_bad_share, old)
        print_quality(model, console, mapped=embed is None)
    print_json(found, json)


@app.command()
def start(
    uri: Uri,
    model: Model = "",
    into: Into = None,
    from_: From = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per transaction.")] = 10_000,
    rows_per_second: Annotated[float | None, typer.Option(min=0.1, help="Maximum number of rows written per second.")] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Maximum number of rows to fill in this run. With 0, re-ranked searches fill the rows."
        ),
    ] = None,
    dtype: Dtype = "float32",
    embed: Embed = None,
    image_folder: ImageFolder = None,
    texts: Texts = None,
    images: Images = None,
    max_bad_share: MaxBadShare = None,
    where: Where = None,
    embed_with: EmbedWith = None,
    requests_per_minute: RequestsPerMinute = None,
    price: PricePerMillion = None,
    engine: Engine = None,
    workers: WorkerCount = None,
    gpus_per_worker: GpusPerWorker = None,
) -> None:
    """Fill the new vectors while services read and write. To continue an interrupted run, run the same command again."""
    from xcompat.core.parallel import Executor, run_across_ranks
    from xcompat.engines.workers import Workers
    from xcompat.stores import commands

    def lead(spread: Executor) -> None:
        store = _open(uri, where)
        commands.name_model(store, from_, held, lambda old: source.require_fit(store, dtype, old))
        rate = {"batch": batch, "rows_per_second": rows_per_second}
        given = {"dtype": dtype, "max_bad_share": max_bad_share, "budget": budget}
        commands.start(store, source, into, **rate, **given, spread=spread)

    held = _source_field(from_, texts, images, embed, image_folder)
    engines = Workers(engine, workers, gpus_per_worker)
    service = _Service(embed_with, requests_per_minute, price)
    _require(uri, model, embed, image_folder if embed else None, service, engine)
    if is_main_process():
        _open(uri, where).close()  # raises before the model is loaded
    source = _vector_source(model, embed, image_folder if embed else None, service)
    with engines.pool(model, source.model) as spread:
        if spread is None:
            run_across_ranks(lead, source.model)  # the first process alone opens the store
        else:
            lead(spread)


@app.command()
def status(uri: Uri, json: Json = False) -> None:
    """Show the progress of a migration."""
    store = _open(uri)
    from xcompat.stores import commands

    with _messages_on_stderr(json):
        found = commands.status(store)
    print_json(found, json)


@app.command()
def verify(
    uri: Uri,
    model: Model = "",
    embed: Embed = None,
    image_folder: ImageFolder = None,
    embed_with: EmbedWith = None,
    requests_per_minute: RequestsPerMinute = None,
    json: Json = False,
) -> None:
    """Check the row counts, a sample of new vectors, and searches. Exit code 1 if a check fails."""
    service = _Service(embed_with, requests_per_minute)
    with _messages_on_stderr(json):
        store, source = _open_migration(uri, model, embed, image_folder, service)
        from xcompat.stores import commands

        found = commands.verify(store, source)
    print_json(found, json)
    if not found["passed"]:
        raise typer.Exit(1)


@app.command()
def switch(
    uri: Uri,
    model: Model = "",
    embed: Embed = None,
    image_folder: ImageFolder = None,
    embed_with: EmbedWith = None,
    requests_per_minute: RequestsPerMinute = None,
) -> None:
    """Rename the new vectors to the old name for all clients at once. The old vectors stay until `xcompat migrate finish`.

    With in_place=true, Qdrant keeps both names, and your services must use the new name.
    """
    store, source = _open_migration(uri, model, embed, image_folder, _Service(embed_with, requests_per_minute))
    from xcompat.stores import commands

    commands.switch(store, source)


@app.command()
def rollback(
    uri: Uri,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Delete new vectors without a confirmation prompt. Needed to delete them outside a terminal."),
    ] = False,
) -> None:
    """Undo the switch. Without a switch to undo, delete the new vectors."""
    store = _open(uri)
    from xcompat.stores import commands, migration

    found = migration.migration_of(store)
    if found.state == "filling" and not yes and sys.stdin.isatty():
        typer.confirm(f"There is no switch to undo. Delete the new vectors, {found.into} in {store.uri}?", abort=True)
        yes = True
    commands.rollback(store, can_delete=yes)


@app.command()
def finish(
    uri: Uri,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without a confirmation prompt. Needed outside a terminal.")] = False,
) -> None:
    """Delete the old vectors. This cannot be undone."""
    store = _open(uri)
    from xcompat.stores import commands, migration

    found = migration.migration_of(store)
    is_asked = not yes and found.state == "switched"  # otherwise it is refused anyway
    if is_asked and not sys.stdin.isatty():
        raise XcompatError(f"finish deletes the old vectors of {found.space} in {store.uri} for good; confirm with --yes")
    if is_asked:
        typer.confirm(f"Delete the old vectors of {store.uri}? This cannot be undone.", abort=True)
    commands.finish(store)


def _messages_on_stderr(is_json: bool) -> AbstractContextManager[None]:
    return results_on_stdout() if is_json else nullcontext()


def _open(uri: str, where: str | None = None) -> Store:
    import xcompat.stores

    store = xcompat.stores.open(uri, where)
    if where is not None:
        from xcompat.stores import commands

        commands.require_rows(store)
    return store


def _source_field(
    from_: str | None, texts: str | None, images: str | None, embed: str | None, image_folder: str | None
) -> SourceField | None:
    """Return the field with the source texts or images of the stored vectors, if given."""
    if from_ is None and (texts or images):
        raise XcompatError("--texts and --images check a sample of the stored vectors; set their model with --from")
    if texts and images:
        raise XcompatError("--texts and --images cannot be combined; remove --texts or --images")
    if images and image_folder is None:
        raise XcompatError("--images names a field with image paths; set their base folder with --image-folder")
    if image_folder is not None and not (images or embed):
        raise XcompatError("--image-folder is the base folder of image paths; choose their field with --embed or --images")
    if field := texts or images or embed:
        from xcompat.stores.doctor import SourceField

        return SourceField(field, None if texts or image_folder is None else Path(image_folder))
    return None


class _Service(NamedTuple):
    """Options of a service that embeds rows."""

    function: str | None
    requests_per_minute: float | None = None
    price: float | None = None

    def refuse(self, model: str, embed: str | None, image_folder: str | None, engine: str | None) -> None:
        """Raise if the service options do not fit the others."""
        if self.function is None:
            if self.requests_per_minute is not None or self.price is not None:
                raise XcompatError(
                    "--requests-per-minute and --price-per-million-tokens need --embed-with; add it or remove them"
                )
        elif embed is None:
            raise XcompatError("--embed-with embeds texts of the rows; choose their field with --embed")
        elif image_folder is not None:
            raise XcompatError("--embed-with embeds texts; remove --image-folder")
        elif engine is not None:
            raise XcompatError("--embed-with calls the service from a single process; remove --engine")
        elif Path(model).exists():
            raise XcompatError(f"{model} is a file or folder; with --embed-with, --model is the name of the service's model")


def _require(
    uri: str, model: str, embed: str | None, image_folder: str | None, service: _Service, engine: str | None = None
) -> None:
    """Reject missing options and inputs before importing model code."""
    from xcompat.encoders import require_model, require_xcompat_model
    from xcompat.stores import require_kind

    if not model:
        raise XcompatError("name the model with --model: a run's folder or a checkpoint that maps galleries")
    if image_folder is not None and embed is None:
        raise XcompatError("--image-folder is the base folder of image paths; choose their field with --embed")
    service.refuse(model, embed, image_folder, engine)
    require_kind(uri)
    if service.function is not None:
        return
    if embed is None:
        require_xcompat_model(model, instead=", or name the field to re-embed with --embed, as in `migrate start`")
    else:
        require_model(model)


def _open_migration(
    uri: str, model: str, embed: str | None, image_folder: str | None, service: _Service
) -> tuple[Store, AnyVectorSource]:
    """Check the arguments, open the store, and load the source of the new vectors."""
    _require(uri, model, embed, image_folder, service)
    return _open(uri), _vector_source(model, embed, image_folder, service)


def _vector_source(model: str, embed: str | None, image_folder: str | None, service: _Service) -> AnyVectorSource:
    if embed is not None and service.function is not None:
        from xcompat.embeddings.provider import Provider, load_function
        from xcompat.stores.service import ServiceEmbedding

        return ServiceEmbedding(Provider(load_function(service.function), model, *service[1:]), embed)
    announce_loading(model)
    import torch

    from xcompat.models.embedder import load_checkpoint, load_embedder
    from xcompat.stores.embedding import Embedding
    from xcompat.stores.mapping import Mapping

    silence_libraries()
    if embed is not None:
        return Embedding(load_embedder(model, device()), embed, None if image_folder is None else Path(image_folder))
    return Mapping(torch.nn.Module.to(load_checkpoint(model), device()))
