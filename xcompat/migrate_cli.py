"""``xcompat migrate``: verbs only, nothing is computed here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from xcompat.errors import XcompatError
from xcompat.options import Engine, GpusPerWorker, WorkerCount

if TYPE_CHECKING:
    from xcompat.stores import Store
    from xcompat.stores.doctor import Held
    from xcompat.stores.migration import Filling

app = typer.Typer(help="Bring the vectors of a database to a new model, where they are.", no_args_is_help=True)

Uri = Annotated[str, typer.Argument(metavar="URI", help="Such as postgresql://user@host/db?table=items&column=embedding.")]
Model = Annotated[str, typer.Option(help="A run's folder or a checkpoint that maps galleries; with --embed, any model.")]
Embed = Annotated[
    str | None, typer.Option("--embed", help="Embed rows anew: the field that holds their text, or names their picture.")
]
Pictures = Annotated[str | None, typer.Option("--pictures", help="The folder where the paths of pictures begin.")]
Into = Annotated[str | None, typer.Option(help="Name of the new space; that of the old one with _new unless given.")]
Dtype = Annotated[Literal["float32", "float16"], typer.Option("--dtype", help="How the new space keeps its numbers.")]
From = Annotated[str | None, typer.Option("--from", help="The model that made the stored vectors, where the store does not say.")]
Texts = Annotated[
    str | None, typer.Option("--texts", help="With --from: the field with the texts of the stored vectors, to look at a sample.")
]
Images = Annotated[
    str | None, typer.Option("--images", help="Likewise, the field with their pictures, or the paths of these below --pictures.")
]

MaxBadShare = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Largest share of rows without a usable vector (none, zeros, not finite). Default: 0.1."),
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
    """Say what is there, what a migration takes, and what each way gives; the vectors stay as they are."""
    from xcompat.progress import console, literal
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
    batch: Annotated[int, typer.Option(min=1, help="Rows in a transaction.")] = 10_000,
    rows_per_second: Annotated[float | None, typer.Option(min=0.1, help="Most rows written in a second.")] = None,
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
    """Fill a new space beside the old one while others read and write; started again, it continues."""
    from xcompat.engines.workers import Workers
    from xcompat.spreading import Spread, led
    from xcompat.stores import commands

    def lead(spread: Spread) -> None:
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
            led(lead, filling.model)  # the first process alone opens the store
        else:
            lead(spread)


@app.command()
def status(uri: Uri) -> None:
    """Say how far a migration is."""
    store = _open(uri)
    from xcompat.stores import commands

    commands.status(store)


@app.command()
def verify(uri: Uri, model: Model = "", embed: Embed = None, pictures: Pictures = None) -> None:
    """Count rows, make a sample anew and compare, and search both spaces; exit with code 1 if something is wrong."""
    _require(uri, model, embed, pictures)
    from xcompat.stores import commands

    if not commands.verify(_open(uri), _filling(model, embed, pictures)):
        raise typer.Exit(1)


@app.command()
def switch(uri: Uri, model: Model = "", embed: Embed = None, pictures: Pictures = None) -> None:
    """Give the new space the old one's name, at once for all clients; the old one stays until finish."""
    _require(uri, model, embed, pictures)
    from xcompat.stores import commands

    commands.switch(_open(uri), _filling(model, embed, pictures))


@app.command()
def rollback(uri: Uri) -> None:
    """Undo the switch; before it, end the migration and delete the new space."""
    store = _open(uri)
    from xcompat.stores import commands

    commands.rollback(store)


@app.command()
def finish(uri: Uri) -> None:
    """Delete the old space after the switch; then nothing can be undone."""
    store = _open(uri)
    from xcompat.stores import commands

    commands.finish(store)


def _open(uri: str) -> Store:
    import xcompat.stores

    return xcompat.stores.open(uri)


def _held(from_: str | None, texts: str | None, images: str | None, embed: str | None, pictures: str | None) -> Held | None:
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
        from xcompat.stores.doctor import Held

        return Held(field, None if texts or pictures is None else Path(pictures))
    return None


def _require(uri: str, model: str, embed: str | None, pictures: str | None) -> None:
    """Refuse what is missing or is not there, before anything that embeds or maps is imported."""
    from xcompat.encoders import require_model, require_own
    from xcompat.stores import require_kind

    if not model:
        raise XcompatError("name the model with --model: a run's folder or a checkpoint that maps galleries")
    if pictures is not None and embed is None:
        raise XcompatError("--pictures says where pictures are: name the field that holds their paths with --embed")
    require_kind(uri)
    if embed is None:
        require_own(model)
    else:
        require_model(model)


def _filling(model: str, embed: str | None, pictures: str | None) -> Filling:
    import torch

    from xcompat.distributed import device
    from xcompat.models.embedder import load_checkpoint, load_embedder
    from xcompat.progress import silence_libraries
    from xcompat.stores.embedding import Embedding
    from xcompat.stores.mapping import Mapping

    silence_libraries()
    if embed is not None:
        return Embedding(load_embedder(model, device()), embed, None if pictures is None else Path(pictures))
    return Mapping(torch.nn.Module.to(load_checkpoint(model), device()))
