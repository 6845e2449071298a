"""``xcompat find``: published maps between two models."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import constants
from rich.box import SIMPLE_HEAD

from xcompat.core.errors import XcompatError
from xcompat.core.files import list_entries
from xcompat.core.markdown import as_text, one_line
from xcompat.core.metric_names import metric_name
from xcompat.core.paths import model_folder
from xcompat.core.progress import Table, console, literal, silence_libraries
from xcompat.encoders import require_model
from xcompat.hub.endpoint import CONFIGS
from xcompat.hub.metadata import EMBEDS, SEARCHES
from xcompat.hub.search import MOST, HubCheckpoint, SearchResult, search
from xcompat.report.wording import gain_with_interval

_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_INDEX = """# Maps between embedding models

Written by `xcompat find --markdown` from the cards on the Hub. Gains are the lowest of each card, over old queries, in points
with 95 % intervals. Test a map on your own sample before you use it.

| old model | new model | gain | finds more | map |
|---|---|---|---|---|"""


def find_maps(old: str | None, new: str | None) -> SearchResult:
    """List Hub checkpoints that search a model's galleries with another model's queries.

    Args:
        old: the gallery's model: name, folder, or beginning of its fingerprint; None for any.
        new: the queries' model, in the same forms.

    Returns:
        The checkpoints, unless their cards name other models.

    Raises:
        XcompatError: neither model is given, a name is not a model, or the Hub is unreachable.
    """
    require_searchable(old, new)
    return _list_maps(old, new)


def _list_maps(old: str | None, new: str | None) -> SearchResult:
    given = {SEARCHES: old, EMBEDS: new}
    silence_libraries()
    wanted = {role: _digest_of(name) for role, name in given.items() if name is not None}
    maps = search(wanted)
    return maps._replace(found=[each for each in maps.found if not each.is_other])


def require_searchable(old: str | None, new: str | None) -> None:
    """Raise if no model is given, or a name is not a model; arguments as in :func:`find_maps`."""
    if old is None and new is None:
        raise XcompatError("choose the old model with --old, the new model with --new, or both")
    for name in filter(None, (old, new)):
        _require_model(name)


def _require_model(name: str) -> None:
    """Raise if a path contains stored embeddings, or no model."""
    path = Path(name)
    if path.suffix == ".npy" or (path.is_dir() and list_entries(path, "*.npy") and not _is_model(path)):
        raise XcompatError(f"{name} contains stored embeddings, not a model; use the name or folder of their model")
    if not _is_digest(name):
        require_model(name)


def _is_digest(name: str) -> bool:
    return not Path(name).exists() and _DIGEST.fullmatch(name) is not None


def _digest_of(name: str) -> str:
    """Return a model's fingerprint, or the given beginning."""
    if _is_digest(name):
        return name
    from xcompat.models.embedder import load_embedder

    return load_embedder(name).fingerprint.digest


def _is_model(folder: Path) -> bool:
    return any((Path(model_folder(folder)) / name).exists() for name in CONFIGS)


def print_checkpoints(maps: SearchResult, old: str | None, new: str | None, json_only: bool) -> bool:
    """Print the checkpoints, or a line on the next step if there are none.

    Args:
        maps: result of :func:`find_maps`.
        old: the gallery's model, as given.
        new: the queries' model, as given.
        json_only: whether to print JSON.

    Returns:
        Whether there are any checkpoints.
    """
    found = maps.found
    if json_only:
        console.out(json.dumps(as_json(found), indent=1), highlight=False)  # escapes control characters
    elif found:
        console.print(found_table(found))
        if maps.is_cut:
            fewer = "" if old is not None and new is not None else "; name both models to see fewer"
            console.print(f"[dim]Only the {MOST} most downloaded were looked at{fewer}.[/]")
        console.print("[dim]To judge one on your own sample: xcompat map … --start-from NAME[/]", soft_wrap=True)
    else:
        asked = (("queries of", new), ("galleries of", old))
        pair = " on ".join(f"{what} {name}" for what, name in asked if name is not None)
        line = f"no checkpoint on {constants.ENDPOINT} is for {pair}; make a map: xcompat map --old FOLDER --new FOLDER"
        console.print(literal(line), soft_wrap=True)
    return bool(found)


def found_table(found: list[HubCheckpoint]) -> Table:
    """Return the checkpoints as a table for the terminal; texts from the Hub are printed literally."""
    title = "lowest gains over old queries in points, with 95 % intervals"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 1, 0))
    for name in ("checkpoint\nmethod, revision, changed", "from → to"):
        table.add_column(name, overflow="fold")
    table.add_column("finds more", overflow="fold", min_width=22)
    table.add_column("downloads\nlikes", justify="right", no_wrap=True)
    for each in found:
        about = ", ".join(_escape(text) for text in (each.method, each.revision[:12], each.modified) if text)
        pair = _escape(f"{each.new or '?'} → {', '.join(each.searches)}") if each.searches else ""
        used = "\n".join("" if count is None else f"{count:,}" for count in (each.downloads, each.likes))
        table.add_row(f"{_escape(each.name)}\n[dim]{about}[/]", pair, _verdict(each), used)
    return table


def print_index(old: str | None, new: str | None) -> bool:
    """Print an index page with the checkpoints for galleries of old models; arguments and return value as above.

    Without models, the page lists all checkpoints on the Hub that search galleries.
    """
    if old is not None or new is not None:
        require_searchable(old, new)
    found = [each for each in _list_maps(old, new).found if each.searches]
    console.out(index_page(found), highlight=False)
    return bool(found)


def index_page(found: list[HubCheckpoint]) -> str:
    """Return a Markdown page with the checkpoints in the order of their models; texts from the Hub are shown literally.

    Example:
        >>> print(index_page([HubCheckpoint("me/map", "", new="user/new", searches=["old"])]).splitlines()[-1].partition("(")[0])
        | old | user/new | no results in its card |  | [me/map]
    """
    rows = []
    for each in sorted(found, key=lambda one: (one.searches, one.new, one.name)):
        gain, more, least = "no results in its card", "", each.least
        if least is not None:
            gain = f"{gain_with_interval(least.mean, *least.ci95)}, {metric_name(least.metric)}, {least.where}"
            more = "yes" if each.finds_more else "no"
        cells = [as_text(one_line(text)) for text in (", ".join(each.searches), each.new or "?", gain, more)]
        name = f"[{each.name}]({constants.ENDPOINT}/{each.name})" if _REPOSITORY.fullmatch(each.name) else as_text(each.name)
        rows.append(f"| {' | '.join([*cells, name])} |")
    return "\n".join([_INDEX, *rows])


def _verdict(found: HubCheckpoint) -> str:
    least = found.least
    if least is None:
        return "[yellow]no results in its card[/]"
    told = f"{gain_with_interval(least.mean, *least.ci95)}\n{_escape(metric_name(least.metric))}, {_escape(least.where)}"
    return f"[bold {'green]yes' if found.finds_more else 'red]no'}[/]\n{told}"


def _escape(text: str) -> str:
    return literal(one_line(text))


def as_json(found: list[HubCheckpoint]) -> list[dict[str, object]]:
    """Return the checkpoints as JSON."""
    return [
        {key: value for key, value in asdict(each).items() if key != "is_other"} | {"finds_more": each.finds_more}
        for each in found
    ]
