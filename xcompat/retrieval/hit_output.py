"""Hit output as a table, JSON lines or CSV."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeAlias

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import Table, console, literal, snippet
from xcompat.data.schema import TEXT
from xcompat.hub.endpoint import public_name
from xcompat.retrieval.searching import Hit

Form: TypeAlias = Literal["table", "json", "csv"]
COLUMNS = ("query", "text", "rank", "id", "score", "standing", "version", "group", "confidence", "fallback", "metadata")
"""Columns of the CSV."""
SEVERAL_VERSIONS = (
    "the hits come from several models with different score scales, so they are ranked by standing: "
    "by how many deviations a score exceeds the mean of the query's scores in its version"
)


class QueryResult(NamedTuple):
    """A query and its hits.

    Args:
        query: its id.
        text: its text; None for an image or an embedding.
        hits: best first.
        fallback: the old model, if used instead.
    """

    query: str
    text: str | None
    hits: list[Hit]
    fallback: str | None = None

    @property
    def confidence(self) -> float | None:
        """Return the probability that the old model's query finds no more."""
        return self.hits[0].confidence if self.hits else None


def make_printer(
    form: Form, group_by: str | None = None, several: bool = False, fields: Sequence[str] = ()
) -> Callable[[QueryResult], None]:
    """Return a function that shows a query; JSON lines and CSV go to stdout.

    Args:
        form: output format.
        group_by: metadata key to use for grouping.
        several: whether to print the query above its table.
        fields: metadata keys to show, default all.
    """
    if fields:
        show = make_printer(form, group_by, several)
        return lambda found: show(found._replace(hits=[_keep_fields(hit, fields) for hit in found.hits]))
    if form == "json":
        return lambda found: _write(json.dumps(_as_json(found), ensure_ascii=True, default=str) + "\n")
    if form == "csv":
        rows = csv.writer(sys.stdout, lineterminator="\n")
        rows.writerow(COLUMNS)
        return lambda found: rows.writerows(_as_rows(found))
    return lambda found: _print(found, group_by, several)


def _keep_fields(hit: Hit, fields: Sequence[str]) -> Hit:
    known = hit.metadata or {}
    return hit._replace(metadata={name: known[name] for name in fields if name in known})


def _write(text: str) -> None:
    sys.stdout.write(text)


def _as_json(found: QueryResult) -> dict[str, object]:
    hits = []
    for hit in found.hits:
        about = {**hit._asdict(), "version": short(hit.version)}
        del about["confidence"]  # belongs to the query
        hits.append(about)
    return {**found._asdict(), "confidence": found.confidence, "hits": hits}


def _as_rows(found: QueryResult) -> list[list[object]]:
    rows = []
    for rank, hit in enumerate(found.hits, 1):
        about = "" if hit.metadata is None else json.dumps(hit.metadata, ensure_ascii=False, default=str)
        group = hit.group if hit.group is None or isinstance(hit.group, str) else json.dumps(hit.group, ensure_ascii=False)
        own = [rank, hit.id, hit.score, hit.standing, short(hit.version), group, found.confidence, found.fallback, about]
        rows.append([found.query, found.text, *own])
    return rows


def _print(found: QueryResult, group_by: str | None, several: bool) -> None:
    if several:
        console.print(f"[bold]▸[/] {literal(snippet(found.text or found.query))}", soft_wrap=True)
    console.print(hit_table(found.hits, group_by) if found.hits else "nothing found")
    if len(versions := {short(hit.version) for hit in found.hits}) == 1:
        console.print(f"[dim]version {literal(*versions)}[/]", soft_wrap=True)
    if found.hits and group_by is not None and all(hit.group is None for hit in found.hits):
        console.print(f"[yellow]![/] no hit has {literal(repr(group_by))} in its metadata: hits are not grouped")
    if any(hit.standing is not None for hit in found.hits):
        console.print(f"[dim]{SEVERAL_VERSIONS}[/]")
    if (confidence := found.confidence) is not None:
        instead = f"; {literal(found.fallback)} was used instead" if found.fallback is not None else ""
        said = f"confidence {confidence:.2f}: probability that the old model's query finds no more{instead}"
        console.print(said)


def hit_table(hits: list[Hit], group_by: str | None) -> Table:
    """Return a hit table, without empty columns and a version that all hits have in common."""
    versions = [short(hit.version) for hit in hits]
    with_text = any(TEXT in (hit.metadata or {}) for hit in hits)
    apart = {group_by, TEXT if with_text else None}
    abouts = [_summary({key: value for key, value in (hit.metadata or {}).items() if key not in apart}) for hit in hits]
    numbers = [
        ("", [str(place) for place in range(1, len(hits) + 1)]),
        ("score", [f"{hit.score:.3f}" for hit in hits]),
        ("standing", ["" if hit.standing is None else f"{hit.standing:.2f}" for hit in hits]),
    ]
    words = [
        ("id", [hit.id for hit in hits]),
        *([(group_by, ["" if hit.group is None else str(hit.group) for hit in hits])] if group_by is not None else []),
        ("version", versions if len(set(versions)) > 1 else []),
        ("metadata", abouts),
        (TEXT, [snippet((hit.metadata or {}).get(TEXT, "")) for hit in hits]),
    ]
    columns = [(name, cells) for name, cells in (*numbers, *words) if any(cells) or name == group_by]
    table = Table(*(literal(name) for name, _ in columns))
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(literal, row))
    return table


def _summary(metadata: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {snippet(value)}" for key, value in metadata.items())


def short(version: Fingerprint) -> str:
    """Shorten a fingerprint to the last part of its name."""
    return str(Fingerprint(version.digest, public_name(version.name)))


def describe_version(version: Fingerprint) -> dict[str, object]:
    """Return a version for JSON: the word that tables show, the model's whole name or folder, and its fingerprint."""
    return {"version": short(version), "name": version.name, "fingerprint": version.digest}


def wanted_metadata(pairs: Iterable[str]) -> dict[str, list[Any]]:
    """Parse ``KEY=VALUE`` filters: any value of a repeated key matches; all keys must match.

    Args:
        pairs: filters; each accepts the text and its JSON value.

    Raises:
        XcompatError: a filter has no ``=`` or no key.

    Example:
        >>> wanted_metadata(["colour=red", "colour=blue", "year=2020"])
        {'colour': ['red', 'blue'], 'year': ['2020', 2020]}
    """
    wanted: dict[str, list[Any]] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise XcompatError(f"the filter {pair!r} is not KEY=VALUE; use e.g. colour=red")
        wanted.setdefault(key, []).append(text)
        with suppress(json.JSONDecodeError):
            wanted[key].append(json.loads(text))
    return wanted
