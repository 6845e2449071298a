"""Implementation of ``xcompat migrate`` with its console output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

import xcompat.stores
from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import Table, console, describe_duration, literal, silence_libraries
from xcompat.retrieval.hit_output import QueryResult, short
from xcompat.retrieval.manifest import VersionRecord
from xcompat.retrieval.versions import fits
from xcompat.stores import migration
from xcompat.stores.base import Space, Store
from xcompat.stores.padding import is_padded

if TYPE_CHECKING:
    from xcompat.models.embedder import Embedder
    from xcompat.retrieval.fallback import Fallback
    from xcompat.retrieval.queries import Queries, Source
    from xcompat.retrieval.reranking import Reranker
    from xcompat.stores.doctor import SourceField
    from xcompat.stores.migration import AnyVectorSource


def search(
    store: Store,
    queries: Queries,
    embedder: Source,
    top_k: int,
    where: str | None,
    show: Callable[[QueryResult], None],
    old: Fallback | None = None,
    rerank: Reranker | None = None,
    fields: Sequence[str] = (),
) -> None:
    """Show each query's nearest items with fields of their rows. Nothing is written."""
    for found in answers(store, queries, embedder, top_k, where, old, rerank):
        known = store.read_fields([hit.id for hit in found.hits], fields) if fields and found.hits else {}
        show(found._replace(hits=[hit._replace(metadata=known.get(hit.id, hit.metadata)) for hit in found.hits]))
    if rerank is not None:
        console.print(f"candidates: {rerank.counts}")


def answers(
    store: Store,
    queries: Queries,
    embedder: Source,
    top_k: int,
    where: str | None,
    old: Fallback | None = None,
    rerank: Reranker | None = None,
) -> Iterator[QueryResult]:
    """Yield each query with its nearest items. Use the arguments of :func:`search`."""
    from xcompat.embeddings.provider import query_model
    from xcompat.retrieval.fallback import OldQueries
    from xcompat.retrieval.queries import embed_with_progress

    for asked in embed_with_progress(queries, embedder):
        old_queries = None
        if old is not None:
            old_queries = OldQueries(old.model, queries.re_embed(old.model, range(len(asked.ids))), old.share)
        new_QD = None if rerank is None else rerank.re_embed_queries(queries, asked, embedder)
        hits = store.find(asked.embeds_QD, query_model(embedder), top_k, where, old_queries, rerank, new_QD)
        for query, text, each in zip(asked.ids, asked.texts, hits, strict=True):
            yield QueryResult(query, text, each)


def alias(store: Store, name: str) -> None:
    """Record another name for the stored vectors' model."""
    from xcompat.retrieval.commands import find_alias

    model = find_alias(name)
    made = store.add_alias(model)
    console.print(
        f"[green]✓[/] maps for {literal(model)} now work with vectors of {literal(made)} in {literal(store.uri)}", soft_wrap=True
    )


def info(store: Store, embedder: Embedder | None = None) -> dict[str, Any]:
    """Print a store's vectors with their models and whether a model's queries fit, and return them."""
    spaces, count = store.spaces(), store.count()
    fitting = {} if embedder is None else {name: _fits(store, name, space, embedder) for name, space in spaces.items()}
    table = Table("vectors", "dim", "dtype", "model", *([f"queries of {literal(embedder.name)}"] if embedder is not None else []))
    console.print(f"[italic]{literal(store.uri)}: {count:,} items[/]", soft_wrap=True)
    for name, space in spaces.items():
        made_by = short(space.fingerprint) if space.fingerprint is not None else "unknown"
        shown = f"{name} (searched)" if name == store.space else name
        fit = [{True: "fit", False: "do not fit", None: "unknown"}[fitting[name]]] if fitting else []
        table.add_row(literal(shown), str(space.dim or "-"), space.dtype, literal(made_by), *fit)
    console.print(table)
    console.print(f"metric {store.metric}")
    listed = [
        {
            "name": name,
            "dim": space.dim,
            "dtype": space.dtype,
            "model": short(space.fingerprint) if space.fingerprint is not None else None,
            "model_name": space.fingerprint.name if space.fingerprint is not None else None,
            "fingerprint": space.fingerprint.digest if space.fingerprint is not None else None,
            "searched": name == store.space,
            **({"fits": fitting[name]} if fitting else {}),
        }
        for name, space in spaces.items()
    ]
    return {"uri": str(store.uri), "items": count, "metric": store.metric, "vectors": listed}


def _fits(store: Store, name: str, space: Space, embedder: Embedder) -> bool | None:
    """Return whether a model's queries fit a space; None if the space's model is unknown."""
    from xcompat.embeddings.provider import query_model

    if space.fingerprint is None:
        return None
    made = VersionRecord(digest=space.fingerprint.digest, name=space.fingerprint.name, dim=space.dim or 1)
    aliases = store.aliases() if name == store.space else ()
    return fits(query_model(embedder), made.model_copy(update={"shares": aliases}))


def doctor(uri: str, embedder: Embedder, held: SourceField, sample: int, where: str | None = None) -> dict[str, object]:
    """Print which stored vectors a model made, of all rows or a condition's; return this, and whether it made all."""
    from xcompat.retrieval.commands import print_findings
    from xcompat.stores.doctor import examine_store

    return print_findings([examine_store(xcompat.stores.open(uri, where), embedder, held, sample)])


def name_model(
    store: Store,
    name: str | None,
    held: SourceField | None = None,
    require_fit: Callable[[Fingerprint], None] | None = None,
) -> None:
    """Check a sample, then record the model. Record it by name if it cannot be loaded.

    Args:
        store: the store.
        name: model name, or None to do nothing.
        held: the vectors' source data.
        require_fit: check of a model before it is recorded, or None.

    Raises:
        XcompatError: another model is recorded, or the sample does not match.
    """
    model = check_model(store, name, held)
    if model is not None and store.spaces()[store.space].fingerprint is None:
        if require_fit is not None:
            require_fit(model)
        store.name_model(store.space, model)


def record_model(uri: str, name: str, held: SourceField | None, where: str | None = None) -> dict[str, Any]:
    """Check a sample, record the model of all rows or a condition's, and return it."""
    store = xcompat.stores.open(uri, where)
    model = check_model(store, name, held, can_replace=True)
    if model is not None and store.spaces()[store.space].fingerprint != model:
        store.name_model(store.space, model)
    found = store.spaces()[store.space].fingerprint
    said = f"recorded that {store.space} in {store.uri} has vectors of {found}"
    console.print(f"[green]✓[/] {literal(said)}", soft_wrap=True)
    return {"uri": str(store.uri), "space": store.space, "model": str(found), "passed": True}


def require_rows(store: Store) -> None:
    """Raise if no row with a vector meets the store's condition."""
    if next(store.rows(1), None) is None:
        raise XcompatError(f"{store.uri} has no vectors where {store.condition}; check --where")


def check_model(store: Store, name: str | None, held: SourceField | None = None, can_replace: bool = False) -> Fingerprint | None:
    """Check a sample, and return the model. Nothing is written.

    Args:
        store: the store.
        name: model name, or None to do nothing.
        held: the vectors' source data.
        can_replace: accept another model than the recorded one, if it made most of a sample and there is no migration.

    Raises:
        XcompatError: another model is recorded, or the sample does not match.
    """
    if name is None:
        return None
    from xcompat.models.embedder import load_embedder, named_fingerprint

    silence_libraries()
    can_replace &= not migration.resume(store) and held is not None  # a migration's rows have their own model
    known, embedder = store.spaces()[store.space].fingerprint, None
    try:
        embedder = load_embedder(name, device())
    except XcompatError:
        unchecked = ", so the vectors are not checked" if held is not None else ""
        console.print(
            f"[yellow]![/] {literal(name)} cannot embed here{unchecked}: only maps for exactly this model work with the store",
            soft_wrap=True,
        )
    model = embedder.fingerprint if embedder is not None else named_fingerprint(name)
    can_replace &= embedder is not None
    if known not in (None, model) and not can_replace:
        raise XcompatError(
            f"{store.space} in {store.uri} has vectors of {known}, not {name}; use the recorded model. If the record is wrong, "
            "replace it with `xcompat gallery doctor URI --model MODEL --texts FIELD --record`"
        )
    is_compared = False
    if embedder is not None and (known is None or held is not None):
        is_compared = _look(store, embedder, held, accepts_mapped=known == model and not can_replace)
    if known not in (None, model) and not is_compared:
        raise XcompatError(
            f"{store.space} in {store.uri} keeps its record of {known}; choose a field with the source of the vectors"
        )
    return model


def _look(store: Store, embedder: Embedder, held: SourceField | None, accepts_mapped: bool) -> bool:
    """Compare a sample with a model's embeddings, raise if most differ, and return whether there is one.

    Args:
        store: the store.
        embedder: the model.
        held: the vectors' source data.
        accepts_mapped: accept vectors in the model's space that it did not make, e.g. of an earlier migration.
    """
    from xcompat.retrieval.doctor import SAME
    from xcompat.stores.doctor import examine_store

    own, found = store.spaces()[store.space], examine_store(store, embedder, held)
    if own.dim not in (None, embedder.dim) and not is_padded(store, embedder.dim):
        raise XcompatError(f"{embedder.name} did not make {own.name} in {store.uri}: {found.note}; choose another model")
    if not found.looked_at:
        if held is not None and found.items and own.fingerprint is not None:
            raise XcompatError(
                f"cannot verify that {embedder.name} made the vectors in {own.name} of {store.uri}: {found.note}; "
                "choose another field"
            )
        why = f"{found.note}; choose it with --texts or --images" if held is None else found.note
        _warn(f"cannot verify that {embedder.name} made the vectors in {own.name}: {why}")
        return False
    same = sum(found.made.values())
    said = f"{same:,} of {found.looked_at:,} sampled vectors of {own.name}"
    if found.fits and accepts_mapped:
        _warn(f"the vectors in {own.name} are {found.note}")
        return True
    if same <= found.looked_at / 2:
        why = f" ({found.note})" if found.fits else ""
        raise XcompatError(
            f"{embedder.name} made {said}, so it is not the model of {store.uri}{why}; check others with `xcompat gallery doctor`"
        )
    sure = same == found.looked_at and found.cosine >= SAME
    mark, rest = ("[green]✓[/]", "") if sure else ("[yellow]![/]", "; see `xcompat gallery doctor`")
    console.print(f"{mark} {literal(embedder.name)} made {literal(said)} (cosine {found.cosine:.4f}){rest}", soft_wrap=True)
    return True


def plan(
    store: Store, mapping: AnyVectorSource, dtype: str, max_bad_share: float | None = None, old: Fingerprint | None = None
) -> dict[str, object]:
    """Print a migration's size and duration, and return them. Use the arguments of :func:`xcompat.stores.migration.plan`."""
    found = migration.plan(store, mapping, dtype, max_bad_share, old)
    own = store.spaces()[store.space]
    table = Table("", "rows", "vectors", "dimensions", "numbers", "bytes", show_header=True)
    table.add_row(literal(own.name), f"{found.rows:,}", f"{found.vectors:,}", str(own.dim or found.width or "-"), own.dtype, "")
    table.add_row("new", "", f"{found.vectors:,}", str(found.dim), dtype, decimal(found.nbytes))
    console.print(table)
    console.print(f"{describe_duration(found.seconds)} to read and compute the vectors, plus time to load the model and to write")
    cost = _print_cost(store, mapping)
    _print_empty(found.rows - found.vectors, found.empty)
    if found.unusable:
        first = "; ".join(f"{item!r} {reason}" for item, reason in list(found.unusable.items())[: migration.SHOWN])
        _warn(f"{len(found.unusable):,} of the first rows have no usable vector: {first}; their new vectors will be zeros")
    own_dim, new = mapping.old_dim, mapping.target[1]
    if found.width is not None and own_dim is not None and found.width > own_dim:
        then = f"padded to {found.dim} too" if found.dim > new else f"not padded: your services must write {new} numbers"
        _warn(
            f"the last {found.width - own_dim} of {found.width} numbers are padding: the map reads the first {own_dim}, "
            f"and the new vectors are {then}"
        )
    for note in found.notes:
        _warn(note)
    return {"uri": str(store.uri), "space": own.name, **found._asdict(), "dtype": dtype, "where": store.condition, "cost": cost}


def _warn(line: str) -> None:
    console.print(f"[yellow]![/] {literal(line)}", soft_wrap=True)


def _print_cost(store: Store, mapping: AnyVectorSource, budget: int | None = None) -> str:
    """Print and return the estimated price of the missing vectors within a budget of rows; "" without a service."""
    if not mapping.is_service or budget == 0:
        return ""
    migration.resume(store)
    known = store.record(migration.RECORD)
    into = known["into"] if known is not None and known["into"] in store.spaces() else None
    found = next(store.rows(mapping.sample_size, content=mapping.content), None)
    if found is None:
        return ""
    missing = store.count(store.space, into)
    cost = mapping.describe_cost(found, missing if budget is None else min(missing, budget))
    console.print(literal(cost), soft_wrap=True)
    return cost


def _print_empty(count: int, first: list[str]) -> None:
    if count:
        named = f" ({', '.join(map(repr, first))}{', …' if count > len(first) else ''})" if first else ""
        _warn(f"{count:,} rows have no vector and get none{named}")


def _print_skipped(count: int, named: list[str]) -> None:
    if count:
        more = "; …" if count > len(named) else ""
        _warn(f"{count:,} rows have no usable vector and get zeros in the new space: {'; '.join(named)}{more}")


def start(store: Store, mapping: AnyVectorSource, into: str | None, **options: Any) -> None:  # noqa: ANN401
    """Fill the new space, with the options of :func:`xcompat.stores.migration.start`."""
    _print_cost(store, mapping, options.get("budget"))
    done = migration.start(store, mapping, into, **options)
    if options.get("budget") is not None:
        console.print(
            f"[green]✓[/] started {literal(done.into)} in {literal(store.uri)}: {done.written:,} rows written; re-ranked "
            "searches add more; run `xcompat migrate start` without --budget for the others",
            soft_wrap=True,
        )
        return
    console.print(
        f"[green]✓[/] filled {literal(done.into)} in {literal(store.uri)}: {done.written:,} rows written; "
        "run `xcompat migrate verify` with the same options, then `switch`",
        soft_wrap=True,
    )
    _print_skipped(done.skipped, done.named)
    _print_empty(store.count() - store.count(store.space), store.ids_without_vector(migration.SHOWN))


def status(store: Store) -> dict[str, Any]:
    """Print a migration's progress, and return it."""
    found, lacking = migration.status(store)
    done = f"{found.written:,} rows written, {lacking:,} lack a new vector"
    where = f" where {found.where}" if found.where is not None else ""
    state = found.state if lacking or found.state != "filling" else "filled"
    console.print(f"{literal(found.space)} → {literal(found.into)}{literal(where)}: {state}, {done}", soft_wrap=True)
    _print_skipped(found.skipped, found.named)
    return {"uri": str(store.uri), **found.model_dump(exclude={"sketch", "after"}), "missing": lacking}


def verify(store: Store, mapping: AnyVectorSource) -> dict[str, object]:
    """Check a filled space, and return the result. ``passed`` says whether it is ready for the switch."""
    found = migration.verify(store, mapping)
    console.print(f"{found.rows:,} rows, {found.missing:,} without a new vector")
    if found.skipped:
        console.print(f"{found.skipped:,} rows have no usable old vector and get zeros in the new space")
    if found.filled and found.missing > found.unmade:
        console.print("services wrote these rows after `xcompat migrate start`; `xcompat migrate switch` fills them")
    console.print(f"{found.compared:,} vectors computed again, {found.wrong:,} differ from the stored ones")
    if found.overlap is not None:
        console.print(
            f"{found.overlap:.1%} of the top {migration.NEIGHBOURS} hits in the old space are also hits in the new one "
            f"({found.searched:,} queries)"
        )
    if found.wrong:
        console.print("[red]✗[/] stored vectors do not match their rows; run rollback, then start again")
    elif found.passed:
        console.print("[green]✓[/] ready; run `xcompat migrate switch`")
    elif found.unmade:
        console.print(f"[red]✗[/] cannot compute a vector for {found.unmade:,} rows; fix or delete them, then run verify again")
    else:
        lacking = f" has no index {literal(', '.join(found.unindexed))}" if found.unindexed else " is not complete"
        console.print(f"[red]✗[/] the new space{lacking}; run start again", soft_wrap=True)
    return {"uri": str(store.uri), **found._asdict(), "passed": found.passed}


def switch(store: Store, mapping: AnyVectorSource) -> None:
    """Switch to the new space."""
    done = migration.switch(store, mapping)
    new, old = (done.space, done.before) if store.renames else (done.into, done.space)
    console.print(
        f"[green]✓[/] {literal(new)} in {literal(store.uri)} has the new vectors, {literal(old)} the old ones; "
        "search it with the --model of this migration now",
        soft_wrap=True,
    )
    if not store.renames:
        _warn(f"your services must use the name {new} now: {old} is not renamed")


def rollback(store: Store, can_delete: bool) -> None:
    """Undo the switch, or end the migration. Use the arguments of :func:`xcompat.stores.migration.rollback`."""
    done, lost = migration.rollback(store, can_delete)
    after = migration.RECORD if store.record(migration.RECORD) is not None else None
    what = f"{done.space} has the old vectors again" if after else f"deleted {done.into}; {done.space} is unchanged"
    console.print(f"[green]✓[/] {literal(what)}", soft_wrap=True)
    if lost:
        console.print(
            f"[yellow]![/] {lost:,} rows changed after the switch: they have no vector of the old model, and searches miss them"
        )


def finish(store: Store) -> None:
    """Delete the old space."""
    done = migration.finish(store)
    old = done.before if store.renames else done.space
    named = "" if store.renames else f"; name {literal(done.into)} in its address from now on"
    console.print(f"[green]✓[/] deleted {literal(old)} from {literal(store.uri)}{named}", soft_wrap=True)
