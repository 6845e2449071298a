"""The command line: verbs only, nothing is computed here."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from xcompat import __version__, failures
from xcompat.data_cli import caption, classes, recipes
from xcompat.decision_cli import plan, shadow
from xcompat.distributed import end_processes
from xcompat.errors import XcompatError
from xcompat.export_cli import app as export_app
from xcompat.gallery_cli import app as gallery_app
from xcompat.migrate_cli import app as migrate_app
from xcompat.options import BadVectorShare, Engine, GpusPerWorker, Overrides, WorkerCount
from xcompat.quickstart_cli import app as quickstart_app

INTERRUPTED = 130  # Typer's exit code after Ctrl-C

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(gallery_app, name="gallery")
app.add_typer(export_app, name="export")
app.add_typer(migrate_app, name="migrate")
app.add_typer(quickstart_app, name="quickstart")
app.command()(caption)
app.command()(classes)
app.command()(recipes)
app.command()(shadow)
app.command()(plan)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xcompat {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which version this is.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the recipe on tiny stand-ins, list missing paths; download and write nothing.")
]
RerankedHits = Annotated[
    int | None,
    typer.Option(
        "--rerank",
        min=1,
        metavar="K",
        help="Also measure searches whose first K hits the new model re-ranks. 20 is a good start.",
    ),
]
OldThreshold = Annotated[
    float | None,
    typer.Option(
        "--threshold", metavar="COSINE", help="Score at which you cut off hits today. The report says which score replaces it."
    ),
]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, such as recipes/fashion/xbt.yaml.")]


@app.callback()
def _everywhere(version: Version = False) -> None:
    """Change the embedding model without re-embedding the gallery."""


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Train every stage of a recipe that is not done, evaluate it and write its report.

    The exit code is 1 if a chosen map is not surely at or above old queries, unless the recipe sets allow_worse.
    """
    from xcompat.training.beforehand import load_checked

    loaded = load_checked(recipe, overrides or [], every_stage=dry_run, check_data=not dry_run)
    if dry_run:
        from xcompat.training.dry_run import dry_run_recipe

        dry_run_recipe(loaded)
    else:
        from xcompat.training.run import run_recipe, stages_below_old

        run_recipe(loaded)
        if stages_below_old(loaded):
            raise typer.Exit(1)


SideTexts = Annotated[Path | None, typer.Option(help="Texts with ids, for a side that is a model to embed.")]
EmbedWith = Annotated[
    str | None,
    typer.Option(metavar="MODULE:FUNCTION", help="Your function that embeds a list of texts as --new, such as by a service."),
]
Activation = Annotated[
    Literal["relu", "gelu"] | None,
    typer.Option(help="Activation of the network in --start-from, if the file does not record it."),
]
StartFrom = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A map to try too: a checkpoint, or another tool's .npz or .safetensors."),
]
SearchedVectors = Annotated[
    Path | None,
    typer.Option(help="The gallery that queries will search, or its vectors. Warns if the pairs are unlike it."),
]
MemoryCodec = Annotated[
    str | None,
    typer.Option(help="How a memory keeps its entries: float32, SQ8, SQ4, SQfp16, PQ64; by their number unless given."),
]


@app.command("map")
def map_(
    old: Annotated[
        Path, typer.Option(help="Old embeddings (.npy, Parquet, JSON lines or a folder). With --texts: or the old model.")
    ],
    new: Annotated[Path, typer.Option(help="New embeddings of the same items. With --texts: or the new model.")],
    out: Annotated[Path, typer.Option(help="Folder that gets the model and report.json.")] = Path("runs/map"),
    old_model: Annotated[
        str | None, typer.Option(help="The old model, or the name it has in the gallery; that of --old unless given.")
    ] = None,
    new_model: Annotated[str | None, typer.Option(help="The new model, so that texts and pictures can be asked.")] = None,
    searched_classes: Annotated[
        Literal["known", "open", "unknown"], typer.Option(help="Whether all classes that will be searched are given.")
    ] = "unknown",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the validation split.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace whatever is in --out, such as another map.")] = False,
    memory_codec: MemoryCodec = None,
    remember_items: Annotated[
        bool, typer.Option("--remember-items", help="Lean queries towards stored items they resemble; give most of the gallery.")
    ] = False,
    start_from: StartFrom = None,
    activation: Activation = None,
    texts: SideTexts = None,
    embed_with: EmbedWith = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Most calls of --embed-with in a minute.")] = None,
    price_per_million_tokens: Annotated[float | None, typer.Option(help="Of --embed-with, for an estimate first.")] = None,
    max_bad_share: BadVectorShare = None,
    allow_worse: Annotated[
        bool, typer.Option("--allow-worse", help="Write the best map even if it is not surely at or above old queries.")
    ] = False,
    gallery: SearchedVectors = None,
) -> None:
    """Map queries of a new model into an old gallery, from embeddings alone: no recipe, nothing trained, seconds.

    A folder holds image_embeds.npy, image_ids.txt (an id a line) and perhaps labels.txt (a class a line), or text_embeds.npy and
    text_ids.txt (the id of the image that each describes), or both, or texts and query_embeds.npy with query_ids.txt (the id of
    the text that answers each); a table holds id and embedding. The results on held-out items decide. With --texts, --old, --new
    or both may be models: they embed the texts, once.

    The items must be a random sample of the gallery: --gallery compares them with it.

    Exits with code 1, and writes nothing, if no map is surely at or above old queries.
    """
    from xcompat.mapping.asked import Asked, start_of, texts_of
    from xcompat.vectors import BAD_SHARE

    given = texts_of(texts, embed_with, requests_per_minute, price_per_million_tokens), start_of(start_from, activation)
    choices = (old_model, new_model, searched_classes, seed, overwrite, memory_codec, remember_items, *given)
    asked = Asked(old, new, out, *choices, BAD_SHARE if max_bad_share is None else max_bad_share, allow_worse, gallery)
    asked.require()
    from xcompat.mapping.commands import map_embeddings

    if not map_embeddings(asked):
        raise typer.Exit(1)


@app.command()
def embed(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_SOURCE", help="A recipe; or Parquet, a Lance table, Iceberg's metadata: a path or a URI."
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="A run's folder, a checkpoint, or any model by name.")] = "",
    out: Annotated[str, typer.Option(help="Folder of the Parquet files that are made, or its URI.")] = "",
    column: Annotated[str | None, typer.Option(help="Column to embed or map. By default it is found by its name.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column with the id; `id` unless given.")] = None,
    dtype: Annotated[
        Literal["float32", "float16"] | None, typer.Option(help="How the vectors are written; float32 unless given.")
    ] = None,
    engine: Engine = None,
    workers: WorkerCount = None,
    gpus_per_worker: GpusPerWorker = None,
) -> None:
    """Embed texts or pictures, or map stored vectors, of tables into Parquet; or fill the caches that a recipe will read.

    Started again, it continues. A column of vectors needs a model that maps galleries.
    """
    from xcompat.engines.workers import Workers

    about_files: dict[str, object] = {"--model": model, "--out": out, "--column": column, "--id-column": id_column}
    about_files |= {"--dtype": dtype, "--engine": engine, "--workers": workers, "--gpus-per-worker": gpus_per_worker}
    given = [name for name, value in about_files.items() if value not in (None, "")]
    if source.endswith((".yaml", ".yml")):
        if given:
            raise XcompatError(f"{given[0]} is of tables; a recipe says what it embeds: leave it out")
        from xcompat.training.beforehand import load_checked

        recipe = load_checked(source, overrides or [], every_stage=True)
        from xcompat.training.run import embed_recipe

        embed_recipe(recipe)
        return
    if overrides:
        raise XcompatError(f"{overrides[0]!r} overrides a value of a recipe, and {source} is none; leave it out")
    if not (model and out):
        raise XcompatError("name the model with --model, and the folder of what is made with --out")
    where = Workers(engine, workers, gpus_per_worker)
    from xcompat.encoders import require_model
    from xcompat.engines.kinds import require_source

    require_source(source)
    require_model(model)
    from xcompat.engines.commands import embed as embed_table

    embed_table(source, model, out, where, column, id_column, dtype or "float32")


@app.command()
def evaluate(
    context: typer.Context,
    target: Annotated[Path | None, typer.Argument(help="A recipe, a run's folder, or a checkpoint's folder.")] = None,
    overrides: Overrides = None,
    data: Annotated[Path | None, typer.Option(help="Images to test a checkpoint on.")] = None,
    old: Annotated[str | None, typer.Option(help="The old model, or a folder with its embeddings as .npy.")] = None,
    new: Annotated[Path | None, typer.Option(help="Folder with the new model's embeddings in the old space.")] = None,
    new_own: Annotated[Path | None, typer.Option(help="Folder with the new model's embeddings in its own space.")] = None,
    independent: Annotated[Path | None, typer.Option(help="Folder with embeddings of the independent new model.")] = None,
    qrels: Annotated[Path | None, typer.Option(help="With --old and --new: relevant texts of queries, as TREC or BEIR.")] = None,
    by_map: Annotated[Path | None, typer.Option("--map", help="A map for --new, which are then its own embeddings.")] = None,
    output: Annotated[Path | None, typer.Option(help="Where the report goes.")] = None,
    rerank: RerankedHits = None,
    threshold: OldThreshold = None,
    require_compatible: Annotated[bool, typer.Option(help="Exit with code 1 when the criterion fails.")] = False,
    max_bad_share: BadVectorShare = None,
) -> None:
    """Judge a recipe's result, a checkpoint, or plain .npy embeddings with ids, and write a report.

    For a checkpoint, KEY=VALUE says how to read the images of --data. They have captions (caption_column=NAME); they have classes
    if the model embeds no texts, or if label_column=NAME, classes=FILE, class_column=NAME or gallery=PATH is given.
    gallery=PATH names the images that are searched, else the queries search each other.
    """
    from xcompat.training.embedding_folders import judged_folders, judged_kind, require_folders, require_testable

    typed = {each.opts[0]: context.params[each.name] for each in context.command.params if each.name in context.params}
    named = {option: value for option, value in typed.items() if option.startswith("--") and option != "--require-compatible"}
    kind = judged_kind(target, overrides or [], named)
    if new is not None and old is not None:
        place = output or Path("runs/evaluation")
        require_folders(judged_folders(Path(old), new, new_own, independent, by_map), qrels, place)
        from xcompat.training.evaluate_command import evaluate_embeddings, settings_of
        from xcompat.vectors import BAD_SHARE

        share, settings = BAD_SHARE if max_bad_share is None else max_bad_share, settings_of(rerank, threshold)
        report = evaluate_embeddings(Path(old), new, new_own, independent, place, qrels, by_map, share, settings)
    elif target is not None and kind == "checkpoint":
        place = output or target / "evaluation"
        require_testable(target, data, place)
        from xcompat.training.evaluate_command import evaluate_checkpoint, settings_of

        report = evaluate_checkpoint(target, data, overrides or [], old, place, settings_of(rerank, threshold))
    else:
        assert target is not None
        if kind == "recipe":
            from xcompat.training.beforehand import load_checked

            load_checked(target, overrides or [])
        from xcompat.training.evaluate_command import evaluate_recipe

        report = evaluate_recipe(target, overrides or [])
    if require_compatible and not report.criterion.backward_compatible:
        raise typer.Exit(1)


@app.command()
def compare(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, or a folder of them, such as recipes/bench.")],
    overrides: Overrides = None,
    stage: Annotated[Path | None, typer.Option(help="YAML file with one more stage, such as a method of your own.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe with each of its seeds and put all its methods into one table, with plots; or each recipe of a folder."""
    from xcompat.training.beforehand import load_to_compare

    loaded = load_to_compare(recipe, overrides or [], stage, check_data=not dry_run)
    from xcompat.training.compare import compare_recipe, dry_run_comparison

    for each in loaded:
        if dry_run:
            dry_run_comparison(each)
        else:
            compare_recipe(each)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder, or one with a report.")]) -> None:
    """Render report.html and the plots of a finished run again, and print its table."""
    import xcompat.report as reports
    from xcompat.progress import console

    reports.load_report(run)  # what is missing is said before what draws is imported
    reports.render_report(run)
    reports.print_report(reports.load_report(run), console)


@app.command()
def push(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A finished run's folder, or a checkpoint's.")],
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="Where it goes on the Hub (or on HF_ENDPOINT).")],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility; a new repository of a gated base model is private."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another model that is there.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Fold LoRA into the weights.")] = False,
    adapters_only: Annotated[bool, typer.Option("--adapters-only", help="Leave out the weights of the base.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch to push to; created if missing.")] = None,
    license: Annotated[str | None, typer.Option(help="License of the model, such as apache-2.0.")] = None,  # noqa: A002
    memory: Annotated[
        Literal["all", "metric", "none"],
        typer.Option(help="Parts of the memory to upload; it holds embeddings of training data."),
    ] = "all",
) -> None:
    """Share a model on the Hub with a card that says what it is compatible with and how well it does."""
    if merged and adapters_only:
        raise XcompatError("--merged and --adapters-only exclude each other: merged weights are no longer the base's")
    from xcompat.progress import console, silence_libraries
    from xcompat.training.record import find_model

    find_model(target)
    from xcompat.training.push import Form
    from xcompat.training.push import push as push_model

    silence_libraries()
    form: Form = "merged" if merged else "adapters" if adapters_only else "as it is"
    console.print(push_model(target, name, form, private, overwrite, revision, license, memory), soft_wrap=True)


@app.command()
def find(
    old: Annotated[str | None, typer.Option(help="The gallery's model: its name, folder, or fingerprint.")] = None,
    new: Annotated[str | None, typer.Option(help="The queries' model, likewise.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints on the Hub that were made for two models; exit with code 1 if there are none."""
    from xcompat.mapping.finding import find_maps, print_found

    if not print_found(find_maps(old, new), old, new, json):
        raise typer.Exit(1)


@app.command()
def lineage(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_FOLDER", help="A checkpoint on the Hub, or its folder.")],
) -> None:
    """Show what a checkpoint is compatible with, followed from model to older model."""
    from rich.console import Console

    from xcompat.hub.lineage import draw, require_whole, trace_lineage

    traced = trace_lineage(name)
    Console(width=10_000, highlight=False).print(draw(traced))  # rich would cut long names off at the terminal's edge
    require_whole(traced)


@app.command()
def serve(
    target: Annotated[str, typer.Argument(metavar="GALLERY_OR_RUN", help="Folder of a gallery, or of a finished run.")],
    model: Annotated[str | None, typer.Option(help="The new model: a run's folder, a checkpoint, or any model by name.")] = None,
    old: Annotated[str | None, typer.Option(help="Old model. Its results are shown side by side.")] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option("--images", "--texts", help="The pictures or texts that the gallery was built from; repeat it for more."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at. Any but this machine's own needs a password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0 takes any free port.")] = 7860,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page in a browser.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Let the page upgrade, backfill and roll back the gallery.")
    ] = False,
    password_file: Annotated[
        Path | None, typer.Option(help="File with the password of the page. Or set XCOMPAT_SERVE_PASSWORD.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Host name of the page, e.g. behind a proxy. Repeat it for more.")
    ] = None,
    auth: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Open a page to search with old and new queries side by side, on the same gallery; /healthz says when it is ready."""
    from xcompat.serve import serve_target
    from xcompat.serve.options import Options, read_password, refuse_auth
    from xcompat.training.beforehand import require_served

    refuse_auth(auth)
    options = Options(host, port, read_password(password_file), not no_browser, tuple(allow_host or ()))
    options.require_password()  # before models are loaded
    require_served(target, model, images or [])
    serve_target(target, options, model, old, images or [], allow_changes)


def main() -> None:
    """Run the command line; an error that a user can mend prints one line and exits with 2, a bug prints facts for its report."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be undecodable
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # Pillow warns below the limit of data.images
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # while an error, such as a full disk, can still be explained
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _fail(failures.INTERRUPTED)
        if isinstance(stop.__context__, BrokenPipeError):  # Typer and rich exit with 1, the code of a failed check
            _fail(failures.NOBODY_READS)
        end_processes()
        raise
    except BaseException as error:
        if (line := failures.explain(error)) is None:
            error.add_note(failures.origin(error))
            raise
        _fail(line)


def _fail(line: str) -> NoReturn:
    """Print one line, with the process's number on all but the first, and exit with code 2; be quiet if nobody lost anything."""
    who = "xcompat" if (rank := os.environ.get("RANK", "0")) == "0" else f"xcompat (process {rank})"
    enough = line == failures.NOBODY_READS and failures.only_prints(sys.argv[1:])
    if not enough:
        print(f"{who}: {line}", file=sys.stderr)  # noqa: T201 - rich would wrap and colour it
    end_processes()
    try:
        sys.stdout.flush()
    except OSError:  # discard output that cannot be printed: Python would try again at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(failures.PIPE_CLOSED if enough else 2)
