"""Layout of help: the order of verbs, panels of options, and examples."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

SELDOM = "Less common"
ORDER = (
    *("demo", "quickstart", "map", "evaluate", "shadow", "plan", "gallery", "serve", "migrate", "export"),
    *("recipes", "train", "compare", "embed", "push", "find"),
)
"""Verbs in the order of use; those of :data:`SELDOM` follow."""
EXAMPLES = {
    "demo": ("demo", "demo --out runs/demo"),
    "quickstart characters": ("quickstart characters", "quickstart characters --out runs/first"),
    "quickstart texts": ("quickstart texts", "quickstart texts --data scifact/"),
    "map": (
        "map --old index.faiss --ids ids.txt --new google/siglip2-base-patch16-224 --images photos/",
        "map --old embeddings/old --new embeddings/new --old-model clip-b32 --out runs/map",
    ),
    "evaluate": ("evaluate runs/xbt", "evaluate --old test/old --new test/new --map runs/map --rerank 20"),
    "shadow": (
        "shadow gallery --queries queries.txt --old runs/old --model runs/map",
        "shadow gallery --queries queries.txt --old runs/old --model runs/map --rerank 20 --images photos/",
    ),
    "plan": (
        "plan runs/xbt --items 10000000 --queries-per-day 50000",
        "plan runs/xbt --items 10000000 --queries-per-day 50000 --embeds-per-second 800 --plot plan.png",
    ),
    "gallery build": (
        "gallery build photos/ --model runs/old --out gallery",
        "gallery build articles.jsonl --model sentence-transformers/all-MiniLM-L6-v2 --out gallery",
    ),
    "gallery adopt": (
        "gallery adopt index.faiss --model runs/old --out gallery",
        "gallery adopt index.faiss --ids ids.txt --model runs/old --out gallery",
    ),
    "gallery search": (
        'gallery search gallery "a red shoe" --model runs/xbt',
        "gallery search index.faiss photos/1.jpg --model runs/map --rerank 20 --images photos/",
    ),
    "gallery add": (
        "gallery add gallery more_photos/ --model runs/xbt",
        "gallery add gallery photos/ --model runs/xbt --replace",
    ),
    "gallery upgrade": (
        "gallery upgrade gallery --model runs/fct",
        "gallery upgrade gallery --model runs/xbt --backfill photos/ --budget 1000",
    ),
    "gallery info": ("gallery info gallery --json", "gallery info sqlite:///shop.db?table=items"),
    "gallery alias": ("gallery alias gallery clip-b32", 'gallery alias "postgresql://db/shop?table=products" clip-b32'),
    "gallery verify": ("gallery verify gallery", "gallery verify gallery --json"),
    "gallery doctor": (
        "gallery doctor gallery --model runs/old --images photos/",
        "gallery doctor gallery --model runs/old --canary",
    ),
    "gallery rollback": ("gallery rollback gallery", "gallery rollback gallery --list"),
    "gallery resync": ("gallery resync gallery", "gallery resync gallery --ids ids.txt"),
    "gallery compact": ("gallery compact gallery",),
    "serve": (
        "serve index.faiss --model runs/map --images photos/",
        "serve gallery --model runs/xbt --old runs/old --images photos/ --no-browser",
    ),
    "migrate plan": (
        'migrate plan "postgresql://db/shop?table=products" --from clip-b32 --model runs/map',
        'migrate plan "qdrant://host:6333/products" --model runs/xbt --embed image --image-folder /data/photos',
    ),
    "migrate start": (
        'migrate start "postgresql://db/shop?table=products" --from clip-b32 --model runs/map',
        'migrate start "sqlite:///srv/shop.db?table=items" --from clip-b32 --model runs/map --batch 5000',
    ),
    "migrate status": (
        'migrate status "postgresql://db/shop?table=products"',
        'migrate status "postgresql://db/shop?table=products" --json',
    ),
    "migrate verify": (
        'migrate verify "postgresql://db/shop?table=products" --model runs/map',
        'migrate verify "postgresql://db/shop?table=products" --model runs/map --json',
    ),
    "migrate switch": (
        'migrate switch "postgresql://db/shop?table=products" --model runs/map',
        'migrate switch "chroma://host:8000?collection=items" --model runs/map',
    ),
    "migrate rollback": (
        'migrate rollback "postgresql://db/shop?table=products"',
        'migrate rollback "postgresql://db/shop?table=products" --yes',
    ),
    "migrate finish": (
        'migrate finish "postgresql://db/shop?table=products"',
        'migrate finish "postgresql://db/shop?table=products" --yes',
    ),
    "export faiss": (
        "export faiss index.faiss --model runs/map --out new.faiss",
        "export faiss gallery --model runs/map --memory none --out new.faiss",
    ),
    "export sentence-transformers": (
        "export sentence-transformers runs/xbt --out exported",
        "export sentence-transformers runs/xbt --space own --out exported",
    ),
    "export onnx": ("export onnx runs/xbt --out onnx", "export onnx runs/xbt --space own --out onnx"),
    "export atlas": ("export atlas runs/xbt --out atlas", "export atlas runs/xbt --items 2000 --out atlas"),
    "recipes": ("recipes", "recipes fashion/xbt"),
    "train": ("train recipes/fashion/xbt.yaml", 'train recipes/fashion/xbt.yaml "training.max_steps=100" --dry-run'),
    "compare": (
        "compare recipes/fashion/methods.yaml",
        'compare recipes/bench "seeds=[0]" --stage mine.yaml',
    ),
    "embed": (
        "embed photos/ --model openai/clip-vit-base-patch32 --out embeddings/old",
        "embed articles.parquet --model runs/map --column embedding --out mapped",
    ),
    "push": ("push runs/xbt user/clip-l14-compatible-with-b32", "push runs/map user/map --private --memory none"),
    "find": (
        "find --old openai/clip-vit-base-patch32 --new google/siglip2-base-patch16-224",
        "find --markdown",
    ),
    "launch": (
        "launch --config_file accelerate_configs/multi_gpu.yaml train recipes/clip/b32_to_l14.yaml",
        "launch --config_file accelerate_configs/cpu_2.yaml gallery build photos/ --model runs/old --out gallery",
    ),
    "caption": (
        "caption photos/ --model Salesforce/blip-image-captioning-base --out captions.jsonl",
        'caption photos/ --model Salesforce/blip-image-captioning-base --prompt "a photo of" --out captions.jsonl',
    ),
    "classes": ("classes imagenet", "classes imagenet --to classes.txt"),
    "report": ("report runs/xbt", "report runs/judged"),
    "lineage": ("lineage runs/xbt", "lineage user/clip-l14-compatible-with-b32"),
    "version": ("version",),
    "help": ("help map", "help gallery"),
}
"""Command -> what to type after ``xcompat``."""

LARGE = 10
"""Fewest options of a command whose options are shown in panels."""
_IN = "--old --new --ids --images --texts --gallery --id-column --vector-name --sample --data --qrels --queries --limit --column"
_IN += " --labels --from-faiss --metadata --no-metadata --max-bad-share --from --where --embed --image-folder"
_MODELS = "--model --old-model --new-model --fallback --fallback-below --dtype --side-info --new-own --independent --map"
_OUT = "--out --output --into --overwrite --json --csv --show --group-by --top-k"
_CHOICE = "--searched-classes --seed --remember-items --start-from --activation --direction --memory --memory-codec --allow-worse"
_WORK = "--engine --workers --gpus-per-worker --batch --rows-per-second --budget"
_SERVER = "--host --port --no-browser --allow-changes --password-file --allow-host"
_SERVICE = "--embed-with --requests-per-minute --price-per-million-tokens"
PANELS = {
    option: panel
    for panel, options in {
        "Data": _IN,
        "Models": _MODELS,
        "Choice of the map": _CHOICE,
        "Embedding service": _SERVICE,
        "Work": _WORK,
        "Web server": _SERVER,
        "Results": _OUT,
    }.items()
    for option in options.split()
}
"""Option -> panel."""


class Verbs(TyperGroup):
    """The verbs, listed in the order of use."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:  # noqa: ANN401 - typer's own context
        """Lay out the help once, before the typed words are read."""
        _lay_out_help(self)
        return super().make_context(*arguments, **settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own context
        """Suggest the groups of a command that is typed without its group. Typer suggests similar names without groups."""
        groups = {name: inner.commands for name, inner in self.commands.items() if isinstance(inner, TyperGroup)}
        verbs = [verb for inner in groups.values() for verb in inner]
        if not get_close_matches(args[0], self.commands) and (close := get_close_matches(args[0], verbs, n=1)):
            suited = (f"`{group} {close[0]}`" for group, inner in groups.items() if close[0] in inner)
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(suited)}?")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer's own context
        """Return the names of all verbs."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def _lay_out_help(command: TyperCommand | TyperGroup, typed: tuple[str, ...] = ()) -> None:
    """Add examples and panels, and show flags as ``--overwrite``, not as ``--overwrite <bool>``."""
    options = [*command.params, command.get_help_option(typer.Context(command, **CONTEXT))]
    for option in options:
        if isinstance(option, TyperOption):
            option.metavar = "" if option.is_flag else option.metavar
            if len(command.params) >= LARGE and option.rich_help_panel is None:
                option.rich_help_panel = PANELS.get(max(option.opts, key=len))
    if examples := EXAMPLES.get(" ".join(typed)):
        command.epilog = "\n\n".join(["Examples:", *(f"  xcompat {example}" for example in examples)])
    for name, inner in command.commands.items() if isinstance(command, TyperGroup) else ():
        if isinstance(inner, TyperCommand | TyperGroup):
            _lay_out_help(inner, (*typed, name))


CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
