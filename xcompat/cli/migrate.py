"""``xcompat migrate``: verbs only, nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from xcompat.cli.options import Engine, GpusPerWorker, WorkerCount
from xcompat.core.errors import XcompatError

if TYPE_CHECKING:
    from xcompat.stores import Store
    from xcompat.stores.doctor import SourceField
    from xcompat.stores.migration import AnyVectorSource

app = typer.Typer(help="Migrate the vectors of a database to a new model, in place.", no_args_is_help=True)

Uri = Annotated[str, typer.Argument(metavar="URI", help="Address, e.g. postgresql://user@host/db?table=items&column=embedding.")]
Model = Annotated[str, typer.Option(help="Run or checkpoint with a gallery map. With --embed: any model.")]
Embed = Annotated[
    str | None, typer.Option("--embed", help="Re-embed rows from this field, which contains texts or paths of pictures.")
]
Pictures = Annotated[str | None, typer.Option("--pictures", help="Base folder for paths of pictures.")]
Into = Annotated[str | None, typer.Option(help="Name of the new vectors. Default: the old name with _new.")]
Dtype = Annotated[Literal["float32", "float16"], typer.Option("--dtype", help="Number format of new vectors.")]
From = Annotated[str | None, typer.Option("--from", help="Model of the stored vectors, if the store does not record it.")]
Texts = Annotated[
    str | None, typer.Option("--texts", help="Field with the texts of the stored vectors. Checks a sample of --from.")
]
Images = Annotated[
    str | None,
    typer.Option("--images", help="Field with their pictures, or with paths below --pictures. Checks a sample of --from."),
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
    pictures: Pictures = None,
    texts: Texts = None,
    images: Images = None,
    max_bad_share: MaxBadShare = None,
) -> None:
    """Show the cost and result of a migration. Writes nothing."""
    from xcompat.core.progress import console, literal
    from xcompat.report import load_report, print_ways, report_file
    from xcompat.stores import commands

    held = _held(from_, texts, images, embed, pictures)
    _require(uri, model, embed, pictures if embed else None)
    filling, store = _filling(model, embed, pictures if embed else None), _open(uri)
    commands.name_model(store, from_, held)
    commands.plan(store, filling, dtype, max_bad_share)
    if report_file(model).is_file():
        print_ways(load_report(model), console, mapped=embed is None)
    else:
        console.print(f"what each way gives is not known: there is no report of {literal(model)}")


@app.command()
def start(
    uri: Uri,
    model: Model = "",
    into: Into = None,
    from_: From = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per transaction.")] = 10_000,
    rows_per_second: Annotated[float | None, typer.Option(min=0.1, help="Maximum number of rows written per second.")] = None,
    dtype: Dtype = "float32",
    embed: Embed = None,
    pictures: Pictures = None,
    texts: Texts = None,
    images: Images = None,
    max_bad_share: MaxBadShare = None,
    engine: Engine = None,
    workers: WorkerCount = None,
    gpus_per_worker: GpusPerWorker = None,
) -> None:
    """Fill new vectors while services read and write. An interrupted run continues."""
    from xcompat.core.parallel import Executor, run_across_ranks
    from xcompat.engines.workers import Workers
    from xcompat.stores import commands

    def lead(spread: Executor) -> None:
        store = _open(uri)
        commands.name_model(store, from_, held)
        rate = {"batch": batch, "rows_per_second": rows_per_second}
        commands.start(store, filling, into, **rate, dtype=dtype, max_bad_share=max_bad_share, spread=spread)

    held = _held(from_, texts, images, embed, pictures)
    where = Workers(engine, workers, gpus_per_worker)
    _require(uri, model, embed, pictures if embed else None)
    filling = _filling(model, embed, pictures if embed else None)
    with where.pool(model, filling.model) as spread:
        if spread is None:
            run_across_ranks(lead, filling.model)  # the first process alone opens the store
        else:
            lead(spread)


@app.command()
def status(uri: Uri) -> None:
    """Show the progress of a migration."""
    store = _open(uri)
    from xcompat.stores import commands

    commands.status(store)


@app.command()
def verify(uri: Uri, model: Model = "", embed: Embed = None, pictures: Pictures = None) -> None:
    """Check counts, a sample of vectors, and searches. Exit code 1 if something is wrong."""
    _require(uri, model, embed, pictures)
    from xcompat.stores import commands

    if not commands.verify(_open(uri), _filling(model, embed, pictures)):
        raise typer.Exit(1)


@app.command()
def switch(uri: Uri, model: Model = "", embed: Embed = None, pictures: Pictures = None) -> None:
    """Rename the new vectors to the old name for all clients at once. The old vectors stay until finish."""
    _require(uri, model, embed, pictures)
    from xcompat.stores import commands

    commands.switch(_open(uri), _filling(model, embed, pictures))


@app.command()
def rollback(uri: Uri) -> None:
    """Undo the switch. Before a switch: delete the new vectors."""
    store = _open(uri)
    from xcompat.stores import commands

    commands.rollback(store)


@app.command()
def finish(uri: Uri) -> None:
    """Delete the old vectors. This cannot be undone."""
    store = _open(uri)
    from xcompat.stores import commands

    commands.finish(store)


def _open(uri: str) -> Store:
    import xcompat.stores

    return xcompat.stores.open(uri)


def _held(
    from_: str | None, texts: str | None, images: str | None, embed: str | None, pictures: str | None
) -> SourceField | None:
    """Return where rows hold what their vectors were made of, if that was said."""
    if from_ is None and (texts or images):
        raise XcompatError("--texts and --images are to look whether a model made the stored vectors: name it with --from")
    if texts and images:
        raise XcompatError("--texts and --images both say what the stored vectors were made of; leave one out")
    if images and pictures is None:
        raise XcompatError("--images names a field of paths or pictures: say where paths begin, with --pictures")
    if pictures is not None and not (images or embed):
        raise XcompatError("--pictures says where pictures are: name the field that holds their paths with --embed or --images")
    if field := texts or images or embed:
        from xcompat.stores.doctor import SourceField

        return SourceField(field, None if texts or pictures is None else Path(pictures))
    return None


def _require(uri: str, model: str, embed: str | None, pictures: str | None) -> None:
    """Refuse what is missing or is not there, before anything that embeds or maps is imported."""
    from xcompat.encoders import require_model, require_xcompat_model
    from xcompat.stores import require_kind

    if not model:
        raise XcompatError("name the model with --model: a run's folder or a checkpoint that maps galleries")
    if pictures is not None and embed is None:
        raise XcompatError("--pictures says where pictures are: name the field that holds their paths with --embed")
    require_kind(uri)
    if embed is None:
        require_xcompat_model(model)
    else:
        require_model(model)


def _filling(model: str, embed: str | None, pictures: str | None) -> AnyVectorSource:
    import torch

    from xcompat.core.distributed import device
    from xcompat.core.progress import silence_libraries
    from xcompat.models.embedder import load_checkpoint, load_embedder
    from xcompat.stores.embedding import Embedding
    from xcompat.stores.mapping import Mapping

    silence_libraries()
    if embed is not None:
        return Embedding(load_embedder(model, device()), embed, None if pictures is None else Path(pictures))
    return Mapping(torch.nn.Module.to(load_checkpoint(model), device()))
