"""In-place store migrations. Every step can be interrupted, checked and undone."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from itertools import chain, count
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.parallel import Executor, run_locally
from xcompat.core.progress import advance_bar, progress_bar
from xcompat.stores import vector_source
from xcompat.stores.base import BEFORE, Rows, Store, take_rows
from xcompat.stores.pacing import Throttle, prefetch

AnyVectorSource: TypeAlias = vector_source.VectorSource[Any, Any]

RECORD = "migration"
"""Key of the store's record of its migration."""
BATCH = 10_000
"""Rows per transaction."""
QUERIES, NEIGHBOURS = 1_000, 10
"""Queries of a verification, and compared hits per query."""
LONGEST = 60.0
"""Maximum seconds for searches of a verification. Without an index, each search reads all rows."""
ROUNDS, FEW = 3, 1_000
"""After ``ROUNDS`` rounds, up to ``FEW`` rows can wait for the switch."""
MAX_BAD_SHARE, SHOWN = 0.1, 3
"""Maximum share of rows without a usable vector, and the number of examples in messages."""
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
"""Maximum difference between a stored and a recomputed number."""
_START_AGAIN = "run `xcompat migrate start` again, which keeps filled rows"


class Migration(BaseModel):
    """Migration record in the store.

    Args:
        space: searched space.
        into: the new space's name before the switch or after a rollback.
        model: the map's digest.
        state: ``filling``, later ``switched``. Other states mark an interrupted switch or rollback.
        filled: whether the last ``start`` finished.
        verified: result of the last ``verify``, or None. Services' later writes do not change it.
        after: last id in the current round.
        written: rows written in all rounds.
        skipped: rows with an unusable old vector; they get zeros.
        named: first skipped rows, with reasons.
        max_bad_share: maximum share of rows without a usable vector.
        where: condition for the migrated rows, None for all rows.
        sketch: the service model's sketch, None for other models.
    """

    model_config = ConfigDict(extra="forbid")
    space: str
    into: str
    model: str
    state: Literal["filling", "switching", "switched", "switching back"] = "filling"
    filled: bool = False
    verified: bool | None = None
    after: str | None = None
    written: int = 0
    skipped: int = 0
    named: list[str] = []
    max_bad_share: float = MAX_BAD_SHARE
    where: str | None = None
    sketch: list[list[float]] | None = None

    @property
    def before(self) -> str:
        """The old space's name after the switch."""
        return self.space + BEFORE


class Plan(NamedTuple):
    """Migration estimate.

    Args:
        rows: number of rows.
        vectors: rows with a vector.
        dim: dimension of the new vectors.
        nbytes: their size without indexes.
        seconds: time to read and compute, without writes.
        empty: first ids without a vector.
        unusable: sampled rows with an unusable vector, with reasons.
        width: dimension of the old vectors, with padding.
        notes: sentences about changes that services would notice.
    """

    rows: int
    vectors: int
    dim: int
    nbytes: int
    seconds: float
    empty: list[str]
    unusable: dict[str, str]
    width: int | None
    notes: list[str]


class Verification(NamedTuple):
    """Verification result.

    Args:
        rows: rows with an old vector.
        missing: rows without a new vector. After ``start``, ``switch`` fills these writes of services.
        unmade: sampled missing rows that get no vector.
        compared: vectors computed again.
        wrong: vectors that differ.
        searched: queries in both spaces.
        overlap: mean overlap of their top 10 hits, or None.
        skipped: rows with an unusable old vector.
        filled: whether ``start`` finished.
        unindexed: indexes missing from the new space.
    """

    rows: int
    missing: int
    unmade: int
    compared: int
    wrong: int
    searched: int
    overlap: float | None
    skipped: int = 0
    filled: bool = True
    unindexed: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether ``switch`` can use the new space."""
        return self.filled and not self.unmade and not self.unindexed and not self.wrong and self.compared > 0


def plan(
    store: Store,
    mapping: AnyVectorSource,
    dtype: str = "float32",
    max_bad_share: float | None = None,
    old: Fingerprint | None = None,
) -> Plan:
    """Estimate a migration from a few rows. Nothing is written.

    Args:
        store: the store.
        mapping: map or embedding model.
        dtype: the new vectors' dtype.
        max_bad_share: maximum share of rows without a usable vector, default :data:`MAX_BAD_SHARE`.
        old: model of the stored vectors if the store records none.

    Raises:
        FingerprintMismatchError: the map is for another model.
        XcompatError: the old model is unknown, the new vectors cannot be indexed, or too many rows are unusable.
    """
    store.record(RECORD)  # galleries raise here
    mapping.require_fit(store, dtype, old)
    share = MAX_BAD_SHARE if max_bad_share is None else max_bad_share
    _require_vectors(store, mapping, share)
    started, seen, unusable, width = time.perf_counter(), 0, dict[str, str](), store.spaces()[store.space].dim
    for rows in store.rows(mapping.sample_size, content=mapping.content):
        mapping.map_rows(store, rows)
        seen, unusable, width = len(rows.ids), mapping.find_unusable(rows), rows.vectors_ND.shape[1]
        break
    seconds, total, vectors = time.perf_counter() - started, store.count(), store.count(store.space)
    _require_few(store, len(unusable), vectors, share, _describe(unusable))
    empty, dim = store.ids_without_vector(SHOWN) if vectors < total else [], mapping.dim_for(store)
    nbytes, notes = vectors * dim * np.dtype(dtype).itemsize, store.notes(dim, dtype)
    return Plan(total, vectors, dim, nbytes, seconds * vectors / max(seen, 1), empty, unusable, width, notes)


def start(
    store: Store,
    mapping: AnyVectorSource,
    into: str | None = None,
    *,
    batch: int = BATCH,
    rows_per_second: float | None = None,
    dtype: str = "float32",
    max_bad_share: float | None = None,
    budget: int | None = None,
    spread: Executor = run_locally,
) -> Migration:
    """Fill a new space until every row has its vector. Repeat the call to continue.

    Rows that change meanwhile are filled in the next round. Rows with recorded demand come first.

    Args:
        store: the store.
        mapping: map or embedding model.
        into: the new space's name, default ``…_new``.
        batch: rows per transaction.
        rows_per_second: write limit, or None.
        dtype: ``float32`` or ``float16``.
        max_bad_share: maximum share of rows without a usable vector, default :data:`MAX_BAD_SHARE` or the first call's value.
        budget: maximum number of rows to fill in this call, or None. With 0, only re-ranked searches fill the space.
        spread: executor to use for the model. Only this process reads and writes.

    Returns:
        The migration.

    Raises:
        XcompatError: another migration exists, too many rows are unusable, or the store refuses.
        FingerprintMismatchError: the map is for another model.
    """
    with store.migration_lease():
        migration = _begin_migration(store, mapping, into, dtype, max_bad_share)
        migration.filled = False
        batch = min(batch, mapping.max_batch or batch)
        if migration.after is None or budget is not None:
            _fill_first(store, mapping, migration, batch, budget, spread)
        if budget is not None:
            store.set_record(RECORD, migration.model_dump())
            return migration
        _fill(store, mapping, migration, batch, rows_per_second, spread)
        if migration.skipped:  # killed blocks can count twice
            migration.skipped = store.count_zeros(migration.into)
            store.set_record(RECORD, migration.model_dump())
        store.index_like(migration.into)
        migration.filled = True
        store.set_record(RECORD, migration.model_dump())
    return migration


def _fill_first(
    store: Store, mapping: AnyVectorSource, migration: Migration, batch: int, budget: int | None, spread: Executor
) -> None:
    """Write the vectors of demanded rows. With a budget, fill other rows too until it is spent."""
    wanted = store.demanded_ids() if budget != 0 else []
    parts = (wanted[start : start + batch] for start in range(0, len(wanted), batch))
    found = (store.read_current(part, migration.into, mapping.content)[1] for part in parts)
    others = store.rows(batch, None, migration.into, content=mapping.content) if budget else iter(())
    for read, made in mapping.map_blocks(store, take_rows(chain(found, others), budget), spread):
        _write_block(store, mapping, migration, read, made, store.count(store.space))
        store.set_record(RECORD, migration.model_dump())
        store.renew_lease()


def _write_block(store: Store, mapping: AnyVectorSource, migration: Migration, read: Rows, made: Rows, total: int) -> int:
    """Write a block's vectors, and return their number."""
    if unusable := mapping.find_unusable(read):
        _skip(migration, unusable)
        _require_few(store, migration.skipped, total, migration.max_bad_share, "; ".join(migration.named))
        store.set_record(RECORD, migration.model_dump())  # before the write, which can be killed
    written = store.write(migration.into, made)
    migration.written += written
    return written


def _fill(
    store: Store, mapping: AnyVectorSource, migration: Migration, batch: int, rows_per_second: float | None, spread: Executor
) -> None:
    """Write all missing vectors, round after round."""
    total = store.count(store.space)
    with progress_bar() as bar:
        left = store.count(store.space, migration.into) if migration.written else total  # some stores read all rows to count
        task = bar.add_task(f"filling {migration.into}", total=left, unit="rows")
        throttle = Throttle(rows_per_second)
        for round_ in count():
            from_first, seen, before = migration.after is None, 0, migration.written
            found = store.rows(batch, migration.after, migration.into, content=mapping.content)
            with closing(prefetch(mapping.map_blocks(store, found, spread))) as blocks:
                for read, made in blocks:
                    written = _write_block(store, mapping, migration, read, made, total)
                    migration.after = read.ids[-1]
                    store.set_record(RECORD, migration.model_dump())
                    store.renew_lease()
                    seen += len(read.ids)
                    advance_bar(bar, task, written)
                    throttle.wait(len(read.ids))
            store.delete_orphans(migration.into, migration.space)
            migration.after = None  # the next round starts at the first id, because earlier rows can have changed
            store.set_record(RECORD, migration.model_dump())
            new = migration.written - before
            if from_first and (new == 0 or (round_ >= ROUNDS and seen <= FEW)):  # rows that always change wait for the switch
                return


def _skip(migration: Migration, unusable: dict[str, str]) -> None:
    migration.skipped += len(unusable)
    named = [f"{item!r} {reason}" for item, reason in unusable.items()]
    migration.named = list(dict.fromkeys([*migration.named, *named]))[:SHOWN]


def _require_few(store: Store, bad: int, total: int, share: float, named: str) -> None:
    if bad > share * total:
        raise XcompatError(
            f"{bad:,} of {total:,} rows of {store.uri} have no usable vector, more than the share {share:g}: {named}; "
            "fix or delete them, or increase --max-bad-share"
        )


def _require_vectors(store: Store, mapping: AnyVectorSource, share: float) -> None:
    """Raise if too many rows have no vector to map."""
    if mapping.content is None and (empty := store.count() - store.count(store.space)):
        first = ", ".join(map(repr, store.ids_without_vector(SHOWN)))
        _require_few(store, empty, store.count(), share, f"{first} {'have' if empty > 1 else 'has'} none")


def _describe(unusable: dict[str, str]) -> str:
    return "; ".join(f"{item!r} {reason}" for item, reason in list(unusable.items())[:SHOWN])


def status(store: Store) -> tuple[Migration, int]:
    """Return the migration, and the number of rows without a new vector.

    Raises:
        XcompatError: there is none.
    """
    migration, spaces = migration_of(store), store.spaces()
    if migration.before in spaces:
        return migration, store.count(migration.before, migration.space)
    if migration.into in spaces:
        return migration, store.count(migration.space, migration.into)
    filling = migration.state == "filling"  # killed before the space existed, else during finish
    return migration, store.count(migration.space) if filling else 0


def verify(store: Store, mapping: AnyVectorSource, queries: int = QUERIES) -> Verification:
    """Count rows and indexes, compute a sample again, and search both spaces.

    Args:
        store: the store, before the switch.
        mapping: the migration's map or model.
        queries: sample size. Searches stop after a minute.

    Raises:
        XcompatError: there is no migration, it has another map, or another process uses it.
    """
    with store.migration_lease():
        migration = _require_migration(store, mapping)
        if migration.state != "filling":
            raise XcompatError(f"{store.uri} is already switched; run verify before switch")
        checked = _check(store, mapping, migration, queries)
        migration.verified = checked.passed if checked.compared else None  # all rows changed: switch fills and checks them
        store.renew_lease()
        store.set_record(RECORD, migration.model_dump())
    return checked


def _check(store: Store, mapping: AnyVectorSource, migration: Migration, queries: int) -> Verification:
    old = store.count(store.space)
    if migration.into not in store.spaces():
        return Verification(old, old, 0, 0, 0, 0, None, filled=False)
    missing, lacking = store.count(store.space, migration.into), Rows([], np.empty((0, 0), np.float32), [], [])
    if migration.filled and missing:
        lacking = next(store.rows(queries, None, migration.into, content=mapping.content), lacking)
    unmade = len(lacking.ids) - len(mapping.map_rows(store, lacking).ids) if lacking.ids else 0
    tolerance = max(TOLERANCE[store.spaces()[migration.into].dtype], mapping.tolerance)
    rows, stored_ND = store.sample(queries, migration.into, mapping.content)
    mapped_ND = stored_ND
    if rows.ids:
        made, place = mapping.map_rows(store, rows), {item: row for row, item in enumerate(rows.ids)}
        kept = [place[item] for item in made.ids]
        mapped_ND, stored_ND = made.vectors_ND, stored_ND[kept]
        rows = rows.pick(kept)
    wrong = int((np.abs(stored_ND - mapped_ND).max(1) > tolerance).sum()) if rows.ids else 0
    shares, started = [], time.monotonic()
    usable_N = mapped_ND.any(1)  # zeros have no neighbours
    for old_D, new_D in zip(rows.vectors_ND[usable_N], mapped_ND[usable_N], strict=True):
        found = store.search(old_D, NEIGHBOURS)[0], store.search(new_D, NEIGHBOURS, space=migration.into)[0]
        both = Counter(hit.id for hit in found[0]) & Counter(hit.id for hit in found[1])  # ids can repeat
        shares.append(both.total() / len(found[0]))
        if time.monotonic() - started > LONGEST:
            break
    overlap = float(np.mean(shares)) if shares else None
    skipped = store.count_zeros(migration.into) if migration.skipped else 0
    unindexed = tuple(store.missing_indexes(migration.into, migration.space))
    return Verification(old, missing, unmade, len(rows.ids), wrong, len(shares), overlap, skipped, migration.filled, unindexed)


def switch(store: Store, mapping: AnyVectorSource) -> Migration:
    """Fill the last changed rows, and give the new space the old name, atomically.

    Args:
        store: the store.
        mapping: the migration's map or model.

    Raises:
        XcompatError: ``start`` is unfinished, ``verify`` fails, rows cannot be written, or the map is another.
    """
    with store.migration_lease():
        migration = _require_migration(store, mapping)
        store.finish_switch()  # after a killed rollback
        if migration.state == "filling":
            _require_filled(store, migration)
            _fill(store, mapping, migration, BATCH, None, run_locally)
            _require_verified(store, mapping, migration)
            with store.exclusive():
                left = _catch_up(store, mapping, migration, migration.space, migration.into)
                if store.supports_locking:
                    left = store.count(migration.space, migration.into)
                if left:
                    raise XcompatError(f"{left:,} rows of {store.uri} have no new vector; fix or delete them")
                _note(store, migration, "switching")
                store.switch(migration.into)
        elif migration.state == "switching":
            store.switch(migration.into)
        else:
            state = "already switched" if migration.state == "switched" else "being rolled back; run rollback"
            raise XcompatError(f"{store.uri} is {state}")
        _catch_up(store, mapping, migration, migration.before, migration.space)  # writes during the switch
        store.finish_switch()
        _note(store, migration, "switched")
    return migration


def _require_filled(store: Store, migration: Migration) -> None:
    if not migration.filled:
        raise XcompatError(f"start of {store.uri} is not finished; {_START_AGAIN}, then `verify`")
    if missing := store.missing_indexes(migration.into, migration.space):
        raise XcompatError(f"{migration.into} in {store.uri} has no {_list_indexes(missing)}; {_START_AGAIN}")


def _require_verified(store: Store, mapping: AnyVectorSource, migration: Migration) -> None:
    """Raise if the verification failed. Run a missing one."""
    if migration.verified is None:
        migration.verified = _check(store, mapping, migration, QUERIES).passed
        store.renew_lease()
        store.set_record(RECORD, migration.model_dump())
    if not migration.verified:
        raise XcompatError(f"{migration.into} in {store.uri} failed verification; run `xcompat migrate verify` for details")


def _list_indexes(indexes: list[str]) -> str:
    return f"index {', '.join(indexes)}"


def _catch_up(store: Store, mapping: AnyVectorSource, migration: Migration, old: str, new: str) -> int:
    """Write missing rows in one round, and return the number of rows without a vector."""
    left = 0
    for rows in store.rows(BATCH, None, new, old, mapping.content):
        made = mapping.map_rows(store, rows)
        _skip(migration, mapping.find_unusable(rows))
        migration.written += store.write(new, made)
        left += len(rows.ids) - len(made.ids)
    store.delete_orphans(new, old)
    return left


def _note(store: Store, migration: Migration, state: Literal["filling", "switching", "switched", "switching back"]) -> None:
    migration.state = state
    store.set_record(RECORD, migration.model_dump())


def rollback(store: Store, can_delete: bool = True) -> tuple[Migration, int]:
    """Undo the switch. Without a switch to undo, end the migration and delete the new space.

    Args:
        store: the store.
        can_delete: whether to delete the new space.

    Returns:
        The migration, and the number of rows changed after the switch without an old vector.

    Raises:
        XcompatError: there is no switch to undo, and ``can_delete`` is False.
    """
    with store.migration_lease():
        migration = migration_of(store)
        if migration.state == "filling":
            if not can_delete:
                raise XcompatError(f"{store.uri} has no switch to undo, so this deletes {migration.into}; confirm with --yes")
            _drop(store, migration.into)
            return migration, 0
        if migration.state == "switched" and migration.before not in store.spaces():
            raise XcompatError(f"a killed finish deleted {migration.before} of {store.uri}; run `xcompat migrate finish` again")
        lost = store.count(migration.space, migration.before) if migration.before in store.spaces() else 0
        with store.exclusive():
            _note(store, migration, "switching back")
            store.switch_back(migration.into)
            _note(store, migration, "filling")
        store.finish_switch()
        return migration, lost


def finish(store: Store) -> Migration:
    """Delete the old space after the switch. This cannot be undone.

    Args:
        store: the store.

    Raises:
        XcompatError: the store is not switched, or the new space lacks an index of the old space.
    """
    with store.migration_lease():
        migration = migration_of(store)
        if migration.state != "switched":
            raise XcompatError(f"{store.uri} is not switched; run `xcompat migrate switch` before finish")
        if migration.before in store.spaces() and (missing := store.missing_indexes(migration.space, migration.before)):
            raise XcompatError(
                f"{migration.space} in {store.uri} lacks the {_list_indexes(missing)} of {migration.before}; run `xcompat "
                f"migrate rollback`, `start`, `verify` and `switch`, or drop indexes of {migration.before} you no longer need"
            )
        _drop(store, migration.before)
    return migration


def _drop(store: Store, space: str) -> None:
    """Delete a space and the record. A repeated call skips finished steps."""
    with store.exclusive():
        if space in store.spaces():
            store.drop_space(space)
        store.set_record(RECORD, None)


def migration_of(store: Store) -> Migration:
    """Return a store's migration, and limit the store to its rows.

    Raises:
        XcompatError: there is none, or the store is limited to other rows.
    """
    if not resume(store):
        raise XcompatError(f"{store.uri} has no migration: none was started, or `xcompat migrate finish` ended it")
    return Migration.model_validate(store.record(RECORD))


def resume(store: Store) -> bool:
    """Limit the store to its migration's rows, and return whether there is a migration.

    Raises:
        XcompatError: the store is limited to other rows.
    """
    if (known := store.record(RECORD)) is None:
        return False
    where = Migration.model_validate(known).where
    if store.condition not in (None, where):
        named, fix = ("as a whole", "remove --where") if where is None else (f"where {where}", "use the same --where")
        raise XcompatError(
            f"{store.uri} is already being migrated {named}; {fix}, or run `xcompat migrate finish` or `rollback` first"
        )
    store.restrict(where)
    return True


def _require_migration(store: Store, mapping: AnyVectorSource) -> Migration:
    """Return the migration, and raise if it has another map."""
    migration = migration_of(store)
    if migration.model != mapping.digest:
        raise FingerprintMismatchError(
            f"the migration of {store.uri} was started with another model than {mapping.target[0]}; continue with the first "
            "model, or run `xcompat migrate rollback` first"
        )
    if migration.sketch is not None:
        mapping.require_same_service(migration.sketch)
    return migration


def _begin_migration(
    store: Store, mapping: AnyVectorSource, into: str | None, dtype: str, max_bad_share: float | None = None
) -> Migration:
    """Start or continue a migration."""
    if store.record(RECORD) is not None:
        migration = _require_migration(store, mapping)
        if migration.state != "filling":
            raise XcompatError(f"{store.uri} is already switched; run `xcompat migrate finish` or `rollback`")
        if into not in (None, migration.into):
            raise XcompatError(f"{store.uri} is being migrated into {migration.into}, not {into}; remove --into")
        migration.max_bad_share = migration.max_bad_share if max_bad_share is None else max_bad_share
        if migration.into in store.spaces():
            return migration
        migration.verified = None  # a killed rollback deleted the verified vectors
    else:
        mapping.require_fit(store, dtype)
        share = MAX_BAD_SHARE if max_bad_share is None else max_bad_share
        _require_vectors(store, mapping, share)
        target = into or f"{store.space}_new"
        migration = Migration(
            space=store.space,
            into=target,
            model=mapping.digest,
            max_bad_share=share,
            where=store.condition,
            sketch=mapping.sketch,
        )
        if migration.into in store.spaces():
            raise XcompatError(f"{store.uri} already has a space {migration.into!r}; choose another name with --into")
    made, dim = mapping.target[0], mapping.dim_for(store)
    with store.exclusive():
        store.set_record(RECORD, migration.model_dump())
        store.set_aliases(made, mapping.shares)
        try:
            store.add_space(migration.into, dim, made, dtype)
        except XcompatError:
            if not store.supports_locking:  # else the transaction was undone
                store.set_record(RECORD, None)
            raise
    return migration
