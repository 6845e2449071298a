"""The command line: verbs only, nothing is computed here."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console

from xcompat import __version__
from xcompat.cli.data import caption, classes, recipes
from xcompat.cli.decisions import plan, shadow
from xcompat.cli.export import app as export_app
from xcompat.cli.gallery import app as gallery_app
from xcompat.cli.launch import LAUNCHED, launch
from xcompat.cli.migrate import app as migrate_app
from xcompat.cli.options import (
    BadVectorShare,
    Engine,
    GpusPerWorker,
    IndexIds,
    ItemClasses,
    JudgedOld,
    JudgedTarget,
    MemoryCodec,
    MemoryParts,
    NeedsCompatible,
    OldIds,
    OldThreshold,
    OriginalImages,
    Overrides,
    PricePerMillion,
    RequestsPerMinute,
    RerankedHits,
    RerankingCommand,
    SearchedVectors,
    ServedOriginals,
    SideTexts,
    TestImages,
    VectorIds,
    VectorName,
    WorkerCount,
)
from xcompat.cli.quickstart import app as quickstart_app
from xcompat.cli.quickstart import demo
from xcompat.cli.verbs import CONTEXT, SELDOM, Verbs
from xcompat.core import failures
from xcompat.core.distributed import end_processes
from xcompat.core.errors import InterruptedRunError, XcompatError
from xcompat.core.progress import announce_loading, console, silence_libraries

if TYPE_CHECKING:
    from xcompat.report import Report
    from xcompat.stores.places import Reading

INTERRUPTED = 130  # exit code of shells and Typer after Ctrl-C

app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=CONTEXT)
app.add_typer(gallery_app, name="gallery")
app.add_typer(export_app, name="export")
app.add_typer(migrate_app, name="migrate")
app.add_typer(quickstart_app, name="quickstart")
app.command()(demo)
app.command(rich_help_panel=SELDOM)(caption)
app.command(rich_help_panel=SELDOM)(classes)
app.command()(recipes)
app.command(cls=RerankingCommand)(shadow)
app.command()(plan)
app.command(rich_help_panel=SELDOM, context_settings=LAUNCHED)(launch)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"xcompat {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Check the recipe with tiny random models, and list missing paths. Offline; only caches are written."
    ),
]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, e.g. recipes/fashion/xbt.yaml.")]


@app.callback()
def _everywhere(version: Version = False) -> None:
    """Change the embedding model without re-embedding the gallery."""


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Train and evaluate the stages of a recipe. Finished stages are skipped.

    Exit code 1 if a stage without a method chose a map that may find less than old queries. Set allow_worse to accept it.
    """
    from xcompat.training.preflight import load_checked

    loaded = load_checked(recipe, overrides or [], every_stage=dry_run, check_data=not dry_run)
    if dry_run:
        from xcompat.training.dry_run import dry_run_recipe

        dry_run_recipe(loaded)
    else:
        from xcompat.training.run import run_recipe, stages_below_old

        run_recipe(loaded)
        if stages_below_old(loaded):
            raise typer.Exit(1)


EmbedWith = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION", help="Python function to embed a list of texts as --new, e.g. with an embedding API."
    ),
]
Activation = Annotated[
    Literal["relu", "gelu"] | None,
    typer.Option(help="Activation function of the map in --start-from. Needed with files without a recorded activation."),
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Existing map to compare with the candidates: a checkpoint, or an .npz or .safetensors file of another tool.",
    ),
]
SearchedClasses = Annotated[
    Literal["known", "open", "unknown"],
    typer.Option(
        help="Classes that users will search: known (all are in the training data), open (some are new), or unknown (you "
        "cannot tell)."
    ),
]
RememberItems = Annotated[
    bool,
    typer.Option(
        "--remember-items",
        help="Also try a query memory with an entry per item. The pairs must cover at least half of the gallery.",
    ),
]
MapDirection = Annotated[
    Literal["new_to_old", "old_to_new"],
    typer.Option(help="new_to_old maps new queries. old_to_new maps stored vectors, for `migrate` and `gallery upgrade`."),
]
SampleSize = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Number of --texts or --images to embed, drawn at random. Use 0 for all. Default: 20,000 when --old is an index, "
        "gallery or database.",
    ),
]
AllowWorse = Annotated[
    bool,
    typer.Option("--allow-worse", help="Write the best map, even when new queries may find less than the old model's queries."),
]


OldSide = Annotated[
    str,
    typer.Option(
        help="Old embeddings: faiss index, gallery, database address, file or folder. With --texts or --images: embeddings or "
        "the old model."
    ),
]
NamedOldModel = Annotated[
    str | None,
    typer.Option(help="Old model, or its recorded name in the gallery. Default: the model recorded in --old, or the file name."),
]
TriedMemory = Annotated[
    MemoryParts,
    typer.Option(help="Parts of a query memory to try. Only the value full stores embeddings of training items in the map."),
]


@app.command("map")
def map_(
    old: OldSide,
    new: Annotated[Path, typer.Option(help="New embeddings (file or folder), or the new model with --texts or --images.")],
    ids: OldIds = None,
    images: OriginalImages = None,
    texts: SideTexts = None,
    labels: ItemClasses = None,
    out: Annotated[Path, typer.Option(help="Output folder for the map and its report (report.json).")] = Path("runs/map"),
    old_model: NamedOldModel = None,
    new_model: Annotated[
        str | None, typer.Option(help="New model (folder or name). Needed to search with texts and images.")
    ] = None,
    searched_classes: SearchedClasses = "unknown",
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the validation split and of --sample.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the contents of --out.")] = False,
    memory_codec: MemoryCodec = None,
    remember_items: RememberItems = False,
    start_from: StartFrom = None,
    activation: Activation = None,
    embed_with: EmbedWith = None,
    requests_per_minute: RequestsPerMinute = None,
    price: PricePerMillion = None,
    max_bad_share: BadVectorShare = None,
    allow_worse: AllowWorse = False,
    gallery: SearchedVectors = None,
    id_column: VectorIds = None,
    vector_name: VectorName = None,
    direction: MapDirection = "new_to_old",
    sample: SampleSize = None,
    memory: TriedMemory = "full",
) -> None:
    """Fit a map from new queries to an old gallery, from embeddings alone.

    --old and --new are files with id and embedding (Parquet, Arrow, CSV, JSON, exports of databases and embedding APIs),
    arrays (.npy, .npz), or folders with image_embeds.npy and image_ids.txt (an id per line).
    Optional files: labels.txt (a class per line), text_embeds.npy and text_ids.txt (captions, with the id of their image), or
    query_embeds.npy and query_ids.txt (questions, with the id of their text).

    With --texts or --images, --old and --new may be models.

    Pairs must be a random sample of the gallery. --gallery checks this, and --sample draws one from --texts or --images.

    The best map on held-out items is written. Exit code 1, and no map, if no candidate is surely as good as old queries.
    """
    from xcompat.mapping.request import MapRequest, make_initial_map, make_text_input
    from xcompat.stores.places import Reading, parse_place
    from xcompat.vectors import Columns
    from xcompat.vectors.checks import BAD_SHARE

    given = make_text_input(texts, images, embed_with, requests_per_minute, price), make_initial_map(start_from, activation)
    reading = Reading(ids, Columns(id_column, vector_name), labels)
    choices = (old_model, new_model, searched_classes, seed, overwrite, memory_codec, remember_items, *given)
    bad_share = BAD_SHARE if max_bad_share is None else max_bad_share
    asked = MapRequest(parse_place(old), new, out, *choices, bad_share, allow_worse, gallery, reading, direction, sample, memory)
    asked.require()
    with announce_loading(*asked.models):
        from xcompat.mapping.commands import map_embeddings

    if not map_embeddings(asked):
        raise typer.Exit(1)


@app.command()
def embed(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_SOURCE",
            help="Recipe, images, texts, address of a Parquet, Lance or Iceberg table, or vectors in any format of `map`.",
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="Model: run folder, checkpoint, or name on the Hub.")] = "",
    out: Annotated[str, typer.Option(help="Output folder, or a URI if the source is a table.")] = "",
    column: Annotated[
        str | None, typer.Option(help="Column to embed or map. Default: the only one with a suitable type.")
    ] = None,
    id_column: Annotated[str | None, typer.Option(help="Column with ids. Default: id, doc_id, or a similar name.")] = None,
    dtype: Annotated[Literal["float32", "float16"] | None, typer.Option(help="Dtype of table vectors. Default: float32.")] = None,
    engine: Engine = None,
    workers: WorkerCount = None,
    gpus_per_worker: GpusPerWorker = None,
) -> None:
    """Embed images or texts into arrays, embed or map a table into Parquet, or fill the caches of a recipe.

    Images and texts become image_embeds.npy or text_embeds.npy (float16) and their ids, those of images are relative paths.
    An interrupted run continues. To map vectors into Parquet, use a model with a gallery map.
    """
    from xcompat.engines.workers import Workers

    about_files: dict[str, object] = {"--model": model, "--out": out, "--column": column, "--id-column": id_column}
    about_files |= {"--dtype": dtype, "--engine": engine, "--workers": workers, "--gpus-per-worker": gpus_per_worker}
    given = [name for name, value in about_files.items() if value not in (None, "")]
    if source.endswith((".yaml", ".yml")):
        if given:
            raise XcompatError(f"{given[0]} applies to tables, not to recipes; remove {given[0]}")
        from xcompat.training.preflight import load_checked

        recipe = load_checked(source, overrides or [], every_stage=True)
        from xcompat.training.run import embed_recipe

        embed_recipe(recipe)
        return
    if overrides:
        raise XcompatError(f"{overrides[0]!r} overrides a recipe value, but {source} is not a recipe; remove this override")
    if not (model and out):
        raise XcompatError("set the model with --model, and the output folder with --out")
    where = Workers(engine, workers, gpus_per_worker)
    from xcompat.encoders import require_model

    has_originals = _require_embeddable(source, given, column)
    require_model(model)
    announce_loading(model)
    if has_originals:
        from xcompat.engines.originals import embed_originals

        embed_originals(source, model, Path(out), column, id_column)
        return
    from xcompat.engines.commands import embed as embed_table

    embed_table(source, model, out, where, column, id_column, dtype or "float32")


def _require_embeddable(source: str, given: list[str], column: str | None) -> bool:
    """Return whether a source has images or texts outside tables; raise for options that do not apply, or without a table."""
    from xcompat.engines.source_types import holds_originals, is_image_folder, require_source

    if not holds_originals(source, column):
        require_source(source, column)
        return False
    known = ["--model", "--out", *([] if (is_folder := is_image_folder(source)) else ["--column", "--id-column"])]
    if others := [name for name in given if name not in known]:
        what = "a folder of images" if is_folder else "a file of images or texts"
        raise XcompatError(f"{others[0]} works with tables, but {source} is {what}; remove {others[0]}")
    return True


@app.command(cls=RerankingCommand)
def evaluate(
    context: typer.Context,
    target: JudgedTarget = None,
    overrides: Overrides = None,
    data: TestImages = None,
    old: JudgedOld = None,
    new: Annotated[str | None, typer.Option(help="New embeddings mapped to the old space, in the same formats.")] = None,
    new_own: Annotated[str | None, typer.Option(help="Embeddings by the new model, before any map.")] = None,
    independent: Annotated[str | None, typer.Option(help="Embeddings by the new model before training.")] = None,
    ids: OldIds = None,
    labels: ItemClasses = None,
    id_column: VectorIds = None,
    vector_name: VectorName = None,
    qrels: Annotated[Path | None, typer.Option(help="Relevance judgements for --old and --new, in TREC or BEIR format.")] = None,
    by_map: Annotated[Path | None, typer.Option("--map", help="Map to apply to --new, then embeddings by the new model.")] = None,
    output: Annotated[Path | None, typer.Option("--out", "--output", help="Output folder for the report.")] = None,
    rerank: RerankedHits = None,
    threshold: OldThreshold = None,
    require_compatible: NeedsCompatible = False,
    max_bad_share: BadVectorShare = None,
) -> None:
    """Evaluate a recipe, a checkpoint, or embeddings, and write a report.

    For a checkpoint, KEY=VALUE describes the images of --data. caption_column=NAME: images with captions. label_column=NAME,
    classes=FILE or class_column=NAME: images with classes. gallery=PATH: gallery images, by default the test images.

    Embeddings are judged by --qrels, captions, the ids of queries, or classes. Otherwise the report contains the agreement with
    the new model.
    """
    from xcompat.training.embedding_folders import require_testable, target_kind

    typed = {each.opts[0]: context.params[each.name] for each in context.command.params if each.name in context.params}
    named = {option: value for option, value in typed.items() if option.startswith("--") and option != "--require-compatible"}
    kind = target_kind(target, overrides or [], named)
    if kind == "embeddings":
        from xcompat.stores.places import Reading
        from xcompat.vectors import Columns

        reading, place = Reading(ids, Columns(id_column, vector_name), labels), output or Path("runs/evaluation")
        sides = old, new, new_own, independent
        report = _evaluate_sides(sides, reading, qrels, by_map, place, max_bad_share, rerank, threshold, require_compatible)
    elif target is not None and kind == "checkpoint":
        place = output or target / "evaluation"
        require_testable(target, data, place)
        with announce_loading(target, old):
            from xcompat.training.evaluate_command import evaluate_checkpoint, evaluation_settings

        report = evaluate_checkpoint(target, data, overrides or [], old, place, evaluation_settings(rerank, threshold))
    else:
        assert target is not None
        if kind == "recipe":
            from xcompat.training.preflight import load_checked

            load_checked(target, overrides or [])
        announce_loading(target)
        from xcompat.training.evaluate_command import evaluate_recipe

        report = evaluate_recipe(target, overrides or [])
    if require_compatible and not report.criterion.backward_compatible:
        raise typer.Exit(1)


def _evaluate_sides(
    sides: tuple[str | None, ...],
    reading: Reading,
    qrels: Path | None,
    by_map: Path | None,
    place: Path,
    max_bad_share: float | None,
    rerank: int | None,
    threshold: float | None,
    needs_relevance: bool,
) -> Report:
    """Evaluate embeddings: old, new, new before a map, and new without training."""
    from xcompat.stores.places import parse_place
    from xcompat.training.embedding_folders import judged_folders, require_folders

    old, new, new_own, independent = (parse_place(each) if each is not None else None for each in sides)
    assert old is not None and new is not None, "checked before"
    require_folders(judged_folders(old, new, new_own, independent, by_map), qrels, place, needs_relevance, reading)
    with announce_loading(by_map):
        from xcompat.training.evaluate_command import evaluate_embeddings, evaluation_settings
    from xcompat.vectors.checks import BAD_SHARE

    share, settings = BAD_SHARE if max_bad_share is None else max_bad_share, evaluation_settings(rerank, threshold)
    return evaluate_embeddings(old, new, new_own, independent, place, qrels, by_map, share, settings, reading)


@app.command()
def compare(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file or a folder of YAML files, e.g. recipes/bench.")],
    overrides: Overrides = None,
    stage: Annotated[Path | None, typer.Option(help="YAML file with an extra stage, for example your own method.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Run a recipe with all seeds and compare the methods of the recipe in a table and plots."""
    from xcompat.training.preflight import load_to_compare

    loaded = load_to_compare(recipe, overrides or [], stage, check_data=not dry_run)
    from xcompat.training.compare import compare_recipe, dry_run_comparison

    for each in loaded:
        if dry_run:
            dry_run_comparison(each)
        else:
            compare_recipe(each)


@app.command(rich_help_panel=SELDOM)
def report(run: Annotated[Path, typer.Argument(help="Run folder, or a folder with a report.")]) -> None:
    """Print the report of a finished run, and write the report page and plots again."""
    import xcompat.report as reports

    reports.load_report(run)  # what is missing is said before what draws is imported
    reports.render_report(run)
    reports.print_report(reports.load_report(run), console)


@app.command()
def push(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Finished run or checkpoint.")],
    name: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository on the Hub (or on HF_ENDPOINT).")],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility. Default: public, or private for a gated base model."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another model in the repository.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Merge LoRA adapters into the weights.")] = False,
    adapters_only: Annotated[bool, typer.Option("--adapters-only", help="Upload adapters without the base model.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch of the repository. A missing branch is created.")] = None,
    license: Annotated[str | None, typer.Option(help="License, e.g. apache-2.0.")] = None,  # noqa: A002
    memory: Annotated[
        MemoryParts,
        typer.Option(help="Parts of the query memory to upload. Only the value full includes embeddings of training items."),
    ] = "full",
) -> None:
    """Push a model to the Hub, with results and compatible galleries in the model card."""
    if merged and adapters_only:
        raise XcompatError("--merged and --adapters-only cannot be combined; remove --merged or --adapters-only")
    from xcompat.training.record import find_model

    find_model(target)
    announce_loading(target)
    from xcompat.training.push import Form
    from xcompat.training.push import push as push_model

    silence_libraries()
    form: Form = "merged" if merged else "adapters" if adapters_only else "as it is"
    console.print(push_model(target, name, form, private, overwrite, revision, license, memory), soft_wrap=True)


@app.command()
def find(
    old: Annotated[str | None, typer.Option(help="Gallery model: name, folder, or fingerprint.")] = None,
    new: Annotated[str | None, typer.Option(help="Query model: name, folder, or fingerprint.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print an index page in Markdown. Without --old and --new, it lists all maps.")
    ] = False,
) -> None:
    """Find checkpoints on the Hub to search galleries of --old with queries of --new. Exit code 1 if there are none."""
    if json and markdown:
        raise XcompatError("--json and --markdown cannot be combined; remove --json or --markdown")
    from xcompat.mapping.map_search import find_maps, print_checkpoints, print_index, require_searchable

    if markdown:
        if not print_index(old, new):
            raise typer.Exit(1)
        return
    require_searchable(old, new)
    if not json:
        announce_loading()
    if not print_checkpoints(find_maps(old, new), old, new, json):
        raise typer.Exit(1)


@app.command(rich_help_panel=SELDOM)
def lineage(
    name: Annotated[
        str, typer.Argument(metavar="NAME_OR_FOLDER", help="Checkpoint on the Hub (user/name), or its local folder.")
    ],
) -> None:
    """Show a checkpoint's chain of compatible older models."""
    from xcompat.hub.lineage import draw, require_whole, trace_lineage

    traced = trace_lineage(name)
    Console(width=10_000, highlight=False).print(draw(traced))  # rich would cut long names off at the terminal's edge
    require_whole(traced)


@app.command()
def serve(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Gallery, faiss index, or finished run.")],
    model: Annotated[str | None, typer.Option(help="New model: run folder, checkpoint, or name.")] = None,
    old: Annotated[str | None, typer.Option(help="Old model, to show its results side by side.")] = None,
    images: ServedOriginals = None,
    ids: IndexIds = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Use a password when other machines can reach the address.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. Use 0 for a free port.")] = 7860,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page in a browser.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Let the page upgrade, backfill and roll back the gallery.")
    ] = False,
    password_file: Annotated[
        Path | None, typer.Option(help="Text file with the password in the first line. You can also set XCOMPAT_SERVE_PASSWORD.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Allowed host name, e.g. behind a proxy. Repeatable.")
    ] = None,
) -> None:
    """Open a web page to search with old and new queries side by side."""
    from xcompat.serve import serve_target
    from xcompat.serve.options import Options, read_password
    from xcompat.training.preflight import require_served

    options = Options(host, port, read_password(password_file), not no_browser, tuple(allow_host or ()))
    options.require_password()  # before models are loaded
    require_served(target, model, images or [], ids, allow_changes)
    announce_loading(model, old)
    serve_target(target, options, model, old, images or [], allow_changes, ids)


@app.command(rich_help_panel=SELDOM)
def version() -> None:
    """Show the version."""
    typer.echo(f"xcompat {__version__}")


@app.command("help", rich_help_panel=SELDOM)
def help_(verb: Annotated[list[str] | None, typer.Argument(help="Command, e.g. gallery search.")] = None) -> None:
    """Show the help of a command."""
    typer.main.get_command(app).main([*(verb or []), "--help"], prog_name="xcompat")


def main() -> None:
    """Run the command line. A user error prints a line and exits with code 2, Ctrl-C with 130. A bug prints its facts."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be undecodable
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # Pillow warns below the limit of data.images
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # while an error, such as a full disk, can still be explained
    except SystemExit as stop:
        if stop.code == INTERRUPTED and isinstance(stop.__context__, typer.Exit):  # not the code of launched processes
            _fail(failures.INTERRUPTED, INTERRUPTED)
        if isinstance(stop.__context__, BrokenPipeError):  # Typer and rich exit with 1, the code of a failed check
            _fail(failures.BROKEN_PIPE)
        end_processes()
        raise
    except BaseException as error:
        if (line := failures.explain(error)) is None:
            error.add_note(failures.origin(error))
            raise
        _fail(line, INTERRUPTED if isinstance(error, KeyboardInterrupt | InterruptedRunError) else 2)


def _fail(line: str, code: int = 2) -> NoReturn:
    """Print the lines and exit. Other processes add their number. Stay quiet if the output has no reader."""
    who = "xcompat" if (rank := os.environ.get("RANK", "0")) == "0" else f"xcompat (process {rank})"
    enough = line == failures.BROKEN_PIPE and failures.only_prints(sys.argv[1:])
    if not enough:
        text = "".join(f"{who}: {each}\n" for each in failures.drop_advice(line, sys.argv[1:]).split("\n"))
        print(text, end="", file=sys.stderr)  # noqa: T201 - a single write, as processes share stderr; rich would wrap it
    end_processes()
    try:
        sys.stdout.flush()
    except OSError:  # discard output that cannot be printed: Python would try again at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(failures.PIPE_CLOSED if enough else code)
