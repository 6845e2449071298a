"""Commands of ``xcompat gallery``, with their console output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.filesize import decimal

from xcompat.core.arrays import read_lines
from xcompat.core.distributed import barrier, is_main_process
from xcompat.core.errors import GenerationGoneError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.parallel import Executor, run_across_ranks
from xcompat.core.progress import Table, announce_loading, console, describe_duration, literal, notice, silence_libraries
from xcompat.retrieval.adoption import adopt_faiss, require_index
from xcompat.retrieval.faiss_building import EXACT, require_factory
from xcompat.retrieval.gallery import Gallery
from xcompat.retrieval.hit_output import QueryResult, describe_version, short, wanted_metadata
from xcompat.retrieval.leftovers import require_empty
from xcompat.retrieval.manifest import CURRENT, VersionRecord, previous_generation, read_manifest
from xcompat.retrieval.upgrading import plan_upgrade
from xcompat.retrieval.versions import fits, identity, require_joinable, require_views
from xcompat.vectors import check_rows
from xcompat.vectors.checks import BAD_SHARE

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.doctor import Finding
    from xcompat.retrieval.fallback import Fallback
    from xcompat.retrieval.originals import Originals
    from xcompat.retrieval.queries import Queries, Source
    from xcompat.retrieval.reranking import Reranker
    from xcompat.retrieval.versions import Model
    from xcompat.vectors import Vectors


SHOWN = 10
BLOCK = 65_536
"""Vectors to copy at a time."""


def adopt(folder: Path, index: Path, ids: Path | None, model: str) -> None:
    """Adopt a faiss index. If the model cannot be loaded, its name identifies it."""
    names = read_ids(ids) if ids is not None else None
    require_index(index)
    version = _load_maker(model)
    manifest, look = adopt_faiss(folder, index, names, version, None)
    least, median, most = look.lengths
    console.print(
        f"{look.kind} of {look.dim} dimensions, compared by {look.metric}; lengths {least:.3g} to {most:.3g}, median {median:.3g}"
    )
    if not look.unit:
        console.print(
            f"[yellow]![/] vectors are not of length 1: queries and new items of a loaded model are scaled to length "
            f"{look.length:.3g}, but not those under a name only"
        )
    if look.zeros:
        console.print(f"[yellow]![/] {look.zeros:,} vectors are zero; re-embed these items")
    console.print(
        f"[green]✓[/] {manifest.rows:,} vectors of {literal(manifest.versions[0].fingerprint)}, left in place", soft_wrap=True
    )


def _load_maker(model: str) -> Model:
    """Load the model that made vectors. If it cannot be loaded, its name identifies it."""
    from xcompat.encoders import is_loadable

    announce_loading(model)
    from xcompat.models.embedder import load_embedder, named_fingerprint

    silence_libraries()
    if is_loadable(model):
        with suppress(XcompatError):
            return load_embedder(model)
    version = named_fingerprint(model)
    console.print(
        f"[yellow]![/] {literal(model)} cannot embed here: the gallery accepts only queries of {literal(version)}", soft_wrap=True
    )
    return version


def build_from_vectors(
    folder: Path,
    read: Callable[[], Vectors],
    where: object,
    model: str,
    index: str | None,
    max_bad_share: float | None,
    metadata: Iterator[dict[str, object]] | None = None,
) -> None:
    """Copy stored vectors with ids into a new gallery, or into one that was built from a part of them.

    Args:
        folder: the gallery's folder.
        read: reads the vectors and their ids.
        where: their source, for messages.
        model: the model that made them, or its name.
        index: faiss factory string, or None.
        max_bad_share: largest share of rows without a usable embedding, which are skipped; None for the default.
        metadata: metadata of each row, in their order.

    Raises:
        XcompatError: they are unusable, have another dimension than the model, or an id is in the gallery with another model.
    """
    require_place(folder, index)
    vectors = read()
    found = check_rows(vectors.rows_ND, where, vectors.ids, BAD_SHARE if max_bad_share is None else max_bad_share)
    for line in found.notes:
        notice(line)
    rows_N = np.flatnonzero(found.usable_N)
    ids, version = [(vectors.ids or [])[row] for row in rows_N.tolist()], _load_maker(model)
    about = None if metadata is None else compress(metadata, found.usable_N)
    from xcompat.retrieval.embedded_queries import require_dim

    dim = found.rows_ND.shape[1]
    require_dim(version, dim, where)
    if not (folder / CURRENT).exists():
        Gallery.create(folder, version, dim if isinstance(version, Fingerprint) else None, index=index or EXACT)
    with Gallery.open(folder) as gallery:
        known_N = np.array([each == identity(version) for each in gallery.find(ids)], bool)
        for start in range(0, len(ids), BLOCK):
            new_n = start + np.flatnonzero(~known_N[start : start + BLOCK])
            block_ND = np.asarray(found.rows_ND[rows_N[new_n]], np.float32)
            described = None if about is None else list(islice(about, min(BLOCK, len(ids) - start)))
            new_metadata = None if described is None else [described[row - start] for row in new_n.tolist()]
            gallery.add(block_ND, [ids[row] for row in new_n.tolist()], new_metadata, version)
        gallery.commit("build")
    there = f", {int(known_N.sum()):,} were there already" if known_N.any() else ""
    made = f"{int((~known_N).sum()):,} vectors of {literal(identity(version))}"
    console.print(f"[green]✓[/] {made} added to {literal(folder)}{there}", soft_wrap=True)


def read_ids(file: Path) -> list[str]:
    """Read one id per line of a UTF-8 file; ignore empty lines at the end."""
    try:
        names = read_lines(file)
    except OSError as error:
        raise XcompatError(f"--ids {file} cannot be read ({error}); choose a text file with an id per line") from None
    while names and not names[-1]:
        names.pop()
    return names


def resync(gallery: Gallery, ids: Path | None) -> None:
    """Accept vectors added to an adopted index."""
    before, items = gallery.generation, len(gallery)
    now = gallery.resync(read_ids(ids) if ids is not None else None)
    done = "unchanged" if now == before else f"synchronized: {len(gallery) - items:,} more items, generation {now}"
    console.print(f"[green]✓[/] the index of {literal(gallery.path)} is {done}; {len(gallery):,} items", soft_wrap=True)


def build(
    folder: Path,
    originals: Originals,
    embedder: Embedder,
    index: str | None,
    side_info: Embedder | None = None,
) -> None:
    """Embed images or texts into a new gallery, or continue an unfinished one."""
    from xcompat.retrieval.originals import origins_of

    originals.require(embedder)
    if (folder / CURRENT).exists():
        there = Gallery.open(folder)
        if len(there):  # 0 if the build was stopped before its first commit
            origins_of(there, originals, "; use the originals that it was built from, or add these (xcompat gallery add)")
    elif is_main_process():
        Gallery.create(folder, embedder, index=index or EXACT)
    barrier()
    add(Gallery.open(folder), originals, embedder, replace=False, side_info=side_info)


def require_place(folder: Path, index: str | None) -> None:
    """Raise unless a gallery can be built in a folder: it is new, or has a gallery with this index.

    Raises:
        XcompatError: with the file in the way, or the index.
    """
    if index is not None:
        require_factory(index)
    if not (folder / CURRENT).exists():
        require_empty(folder)
        return
    there = read_manifest(folder).index
    if index is not None and index != there:
        raise XcompatError(
            f"the existing gallery was made with index {there}, not {index}; remove --index, or choose another folder with --out"
        )


def add(gallery: Gallery, originals: Originals, embedder: Embedder, replace: bool, side_info: Embedder | None = None) -> None:
    """Embed images or texts into a gallery; refuse an incompatible model."""
    from xcompat.embeddings.embed import notice_truncated
    from xcompat.embeddings.provider import query_model
    from xcompat.retrieval.ingestion import ingest

    require_joinable(query_model(embedder), gallery.manifest, gallery.path)
    added = ingest(gallery, originals, embedder, replace, side_info=side_info)
    more = [f"{added.present:,} were there already"] if added.present else []
    more += [f"{added.unreadable:,} cannot be read"] if added.unreadable else []
    said = f"{added.added:,} {originals.kind} added to {literal(gallery.path)}{''.join(f', {text}' for text in more)}"
    console.print(f"[green]✓[/] {said}", soft_wrap=True)
    notice_truncated(embedder, added.truncated, added.added, "; --words cuts texts into passages")


def search(
    gallery: Gallery,
    queries: Queries,
    embedder: Source,
    top_k: int,
    where: list[str],
    show: Callable[[QueryResult], None],
    fallback: Fallback | None = None,
    group_by: str | None = None,
    rerank: Reranker | None = None,
) -> None:
    """Show each query's nearest items, with the confidence if available."""
    for found in search_in_blocks(gallery, queries, embedder, top_k, where, fallback, group_by, rerank):
        show(found)
    if rerank is not None:
        console.print(f"candidates: {rerank.counts}")


def search_in_blocks(
    gallery: Gallery,
    queries: Queries,
    embedder: Source,
    top_k: int,
    where: list[str],
    fallback: Fallback | None = None,
    group_by: str | None = None,
    rerank: Reranker | None = None,
) -> Iterator[QueryResult]:
    """Yield each query with its nearest items; arguments as in :func:`search`."""
    from xcompat.embeddings.provider import query_model
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.queries import embed_with_progress

    wanted, model = wanted_metadata(where) or None, query_model(embedder)
    require_views(model, gallery.manifest, gallery.path)  # fail before embedding
    if fallback is not None:
        fallback.require(model, gallery.manifest)
    for number, asked in enumerate(embed_with_progress(queries, embedder)):
        old_queries = None
        if fallback is not None:
            again = partial(queries.re_embed, fallback.model)
            old_Qd = fallback.old_queries(model, gallery.manifest, asked.embeds_QD, again)
            old_queries = OldQueries(fallback.model, old_Qd, fallback.share)
        new_QD = None if rerank is None else rerank.re_embed_queries(queries, asked, embedder)
        hits = gallery.search(
            asked.embeds_QD,
            model,
            top_k,
            wanted,
            old_queries=old_queries,
            group_by=group_by,
            rerank=rerank,
            rerank_queries=new_QD,
        )
        if number == 0 and rerank is not None and hits:
            rerank.notice_other_originals(embedder, gallery, hits[0])
        if number == 0 and wanted is not None and not any(hits):  # the filter is the same for every query
            gallery.require_keys(wanted)
        for query, text, each in zip(asked.ids, asked.texts, hits, strict=True):
            found = QueryResult(query, text, each)
            if fallback is not None and fallback.below and found.confidence is not None and found.confidence < fallback.below:
                found = found._replace(fallback=fallback.model.name)
            yield found


def upgrade(gallery: Gallery, model: CompatModel, dry_run: bool, spread: Executor | None = None) -> None:
    """Map stored embeddings to a newer model's space; all processes map, the main process reads and writes.

    Args:
        gallery: the gallery.
        model: the newer model.
        dry_run: whether to print only the plan.
        spread: engine workers that map instead.
    """
    if spread is not None:
        _map_stored(gallery, model, dry_run, spread)
    else:
        run_across_ranks(lambda spread: _map_stored(gallery, model, dry_run, spread), model)


def _map_stored(gallery: Gallery, model: CompatModel, dry_run: bool, spread: Executor) -> None:
    plan = plan_upgrade(gallery, model)
    size = f"{decimal(plan.nbytes)} in addition to the existing {decimal(_size(gallery))}"
    cost = f"{describe_duration(plan.seconds)} plus time to load the model, {size}"
    console.print(f"{plan.items:,} embeddings to map: {cost}")
    if not dry_run:
        done = gallery.upgrade(model, spread=spread)
        console.print(
            f"[green]✓[/] {done:,} embeddings mapped; generation {gallery.generation}, undo with `xcompat gallery rollback`"
        )


def backfill(
    gallery: Gallery,
    originals: Originals,
    embedder: Embedder,
    budget: int | None,
    dry_run: bool,
    spread: Executor | None = None,
) -> None:
    """Re-embed items within a budget: frequent hits first, then a fixed random order."""
    from xcompat.embeddings.embed import notice_truncated
    from xcompat.embeddings.provider import query_model
    from xcompat.retrieval.backfilling import Backfill

    require_joinable(query_model(embedder), gallery.manifest, gallery.path)
    plan = Backfill(gallery, originals, embedder, budget)
    remaining = len(plan.remaining)
    time = f"{describe_duration(plan.seconds())} plus time to load the model"
    console.print(f"{plan.items:,} of {remaining:,} {originals.kind} to embed: {time}")
    if len(plan.cached):
        console.print(f"{len(plan.cached):,} more were embedded by re-ranked searches")
    if not dry_run:
        added = plan.run(spread)
        following = "; run the same `xcompat gallery upgrade` again to continue" if plan.items < len(plan.to_embed) else ""
        console.print(
            f"[green]✓[/] {added.added:,} re-embedded, {remaining - added.added - added.cached:,} to go{following}",
            soft_wrap=True,
        )
        notice_truncated(embedder, added.truncated, added.added, "; --words cuts texts into passages")


def info(gallery: Gallery, embedder: Embedder | None) -> dict[str, Any]:
    """Print a gallery's versions, matching queries and history, and return them."""
    versions = list[dict[str, object]]()
    table = Table("version", "items", "dim")
    table.add_column("queries that fit", max_width=25)  # the version's name and fingerprint fit beside it
    console.print(f"[italic]{literal(gallery.path)}: {len(gallery):,} items[/]", soft_wrap=True)
    for version, count in gallery.counts().items():
        record = gallery.manifest.version(version.digest)
        fitting = ", ".join(["its own", "those of models made compatible with it", *_describe_shared_models(gallery, record)])
        versions.append({**describe_version(version), "items": count, "dim": record.dim})
        if embedder is not None:
            from xcompat.embeddings.provider import query_model

            is_fitting = fits(query_model(embedder), record)
            fitting = f"{'yes' if is_fitting else 'no'}, {embedder.name}"
            versions[-1]["fits"] = is_fitting
        table.add_row(literal(short(version)), f"{count:,}", str(record.dim), literal(fitting))
    console.print(table)
    indexes = ", ".join(sorted({segment.record.index for segment in gallery.segments})) or gallery.manifest.index
    console.print(f"metric {gallery.metric}; {_segments(gallery)}; index {literal(indexes)}; {decimal(_size(gallery))}")
    list_states(gallery)
    return {
        "items": len(gallery),
        "versions": versions,
        "metric": gallery.metric,
        "segments": len(gallery.segments),
        "index": indexes,
        "bytes": _size(gallery),
        "generation": gallery.generation,
        "states": [
            {"generation": kept.generation, "made": kept.made, "by": kept.by, "items": kept.rows}
            for kept in gallery.generations()
        ],
    }


def _describe_shared_models(gallery: Gallery, record: VersionRecord) -> list[str]:
    """Name models if their queries fit a version's shared spaces."""
    named = {version.digest: short(version.fingerprint) for version in gallery.manifest.versions}
    return [f"those of {named.get(digest, f'the model with the fingerprint {digest[:12]}')}" for digest in record.shares]


def alias(gallery: Gallery, name: str) -> None:
    """Record another fingerprint for the model that made the embeddings."""
    model = find_alias(name)
    version = gallery.add_alias(model)
    console.print(
        f"[green]✓[/] maps for {literal(model)} fit the {literal(version)} embeddings of {literal(gallery.path)}", soft_wrap=True
    )


def find_alias(name: str) -> Fingerprint:
    """Return the fingerprint of a loadable model or of a name."""
    from xcompat.encoders import is_loadable

    if not is_loadable(name):
        return Fingerprint.from_string(name)
    from xcompat.models.embedder import load_embedder

    silence_libraries()
    return load_embedder(name).fingerprint


def verify(gallery: Gallery) -> dict[str, object]:
    """Print damaged files; return them, and whether there are none."""
    try:
        wrong = gallery.damage()
    except GenerationGoneError:  # a newer state has replaced this one
        return verify(Gallery.open(gallery.path))
    for line in wrong:
        console.print(f"[red]✗[/] {literal(line)}", soft_wrap=True)
    if not wrong:
        console.print(
            f"[green]✓[/] {literal(gallery.path)} is whole: {len(gallery):,} items in {_segments(gallery)}", soft_wrap=True
        )
    return {"passed": not wrong, "items": len(gallery), "segments": len(gallery.segments), "damaged": list(wrong)}


def doctor(gallery: Gallery, embedder: Embedder, originals: Originals, sample: int) -> dict[str, object]:
    """Print which embeddings a model made; return this, and whether it made its whole version."""
    from xcompat.retrieval.doctor import examine

    return print_findings(examine(gallery, originals, embedder, sample))


def check_canary(gallery: Gallery, embedder: Embedder) -> dict[str, Any]:
    """Store a model's canary, or print whether the model still makes the stored one; return the result."""
    from xcompat.retrieval.canary import FIX
    from xcompat.retrieval.canary import check_canary as check

    found = check(gallery, embedder, store=True)
    assert found is not None
    name = literal(found.model.name)
    if found.is_new:
        console.print(f"[green]✓[/] stored ten test embeddings of {name}; run this again to see whether it still makes them")
    else:
        said = "still makes" if found.passed else "no longer makes"
        mark = "[green]✓[/]" if found.passed else "[red]✗[/]"
        fix = "" if found.passed else f": {FIX}"
        console.print(f"{mark} {name} {said} the ten test embeddings (smallest cosine {found.cosine:.4f}){fix}", soft_wrap=True)
    return {"passed": found.passed, "cosine": found.cosine, "stored": found.is_new, "model": found.model.digest}


def print_findings(findings: list[Finding]) -> dict[str, object]:
    """Print the doctor's findings; return them as JSON, and whether the model made embeddings and all are as recorded."""
    table = Table("", *(literal(short(finding.version)) for finding in findings))  # a column per version fits 80 characters
    rows = [_lines(finding) for finding in findings]
    for name in rows[0] if rows else ():
        table.add_row(name, *(row[name] for row in rows))
    console.print(table)
    foreign = [name for finding in findings for name in finding.foreign]
    if foreign:
        more = f" and {len(foreign) - SHOWN:,} more" if len(foreign) > SHOWN else ""
        console.print(f"[red]✗[/] of another origin: {literal(', '.join(foreign[:SHOWN]))}{more}", soft_wrap=True)
    has_made_some = any(finding.made for finding in findings)
    if not foreign and not has_made_some:
        console.print("[red]✗[/] found no embeddings of this model")
    return {"passed": not foreign and has_made_some, "versions": [_finding_as_json(finding) for finding in findings]}


def _finding_as_json(finding: Finding) -> dict[str, object]:
    numbers = {key: value if math.isfinite(value) else None for key in ("cosine", "length") for value in [getattr(finding, key)]}
    return {
        **describe_version(finding.version),
        "items": finding.items,
        "looked_at": finding.looked_at,
        "made": finding.made,
        **numbers,
        "foreign": list(finding.foreign),
        "foreign_ci95": list(finding.interval),
        "note": finding.note,
    }


def _lines(finding: Finding) -> dict[str, str]:
    made = ", ".join(f"{count:,}{f' ({way})' if way else ''}" for way, count in finding.made.items())
    low, high = finding.interval
    seen = {
        "made by this model": made or "none",
        "cosine": f"{finding.cosine:.4f}",
        "length": f"{finding.length:.4f}",
        "of another origin": f"{finding.share:.1%}",
        "95 % interval": f"{low:.1%} to {high:.1%}",
    }
    told = {"items": f"{finding.items:,}", "looked at": f"{finding.looked_at:,}"}
    return told | (seen if finding.looked_at else dict.fromkeys(seen, "")) | {"": literal(finding.note)}


def rollback(gallery: Gallery, generation: int | None) -> None:
    """Return to an earlier state, by default the previous one."""
    before = read_manifest(gallery.path).generation
    now = gallery.rollback(generation)
    restored = gallery.manifest.restored_generation
    console.print(f"[green]✓[/] restored generation {restored} as generation {now}: {len(gallery):,} items", soft_wrap=True)
    console.print(f"to undo this: `xcompat gallery rollback {literal(gallery.path)} --to {before}`", soft_wrap=True)


def list_states(gallery: Gallery) -> None:
    """Print the states that a rollback can restore, newest first."""
    kept = gallery.generations()
    previous = previous_generation(kept)
    table = Table("generation")
    table.add_column("made", no_wrap=True)
    for name in ("by", "items", ""):
        table.add_column(name)
    console.print(f"[italic]states of {literal(gallery.path)}[/]", soft_wrap=True)
    for manifest in reversed(kept):
        note = "current" if manifest is kept[-1] else "next rollback" if manifest.generation == previous else ""
        table.add_row(str(manifest.generation), literal(manifest.made), literal(manifest.by), f"{manifest.rows:,}", note)
    console.print(table)


def compact(gallery: Gallery) -> None:
    """Compact a gallery."""
    freed = gallery.compact()
    console.print(f"[green]✓[/] {_segments(gallery)}; {decimal(max(freed, 0))} freed")


def _size(gallery: Gallery) -> int:
    return sum(file.size for segment in gallery.segments for file in segment.record.files.values())


def _segments(gallery: Gallery) -> str:
    return f"{len(gallery.segments)} segment{'' if len(gallery.segments) == 1 else 's'}"
