"""Bring a store to a new model where it is: beside the old vectors, in steps that can be killed, checked and undone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from xcompat.core.errors import FingerprintMismatchError, XcompatError
from xcompat.core.parallel import Spread, here
from xcompat.core.progress import progress_bar, rate_of
from xcompat.stores import filling
from xcompat.stores.ahead import ahead
from xcompat.stores.base import BEFORE, Rows, Store

Filling: TypeAlias = filling.Filling[Any, Any]

RECORD = "migration"
"""Key of the record that a store holds of its migration."""
BATCH = 10_000
"""Rows in a transaction."""
ASKED, NEIGHBOURS = 1_000, 10
"""Queries of a verification, and hits that are compared."""
LONGEST = 60.0
"""Seconds after which a verification has searched enough: without an index every search reads all rows."""
ROUNDS, FEW = 3, 1_000
"""Rounds after which so few rows may be left for the moment of the switch, when nobody else writes."""
MAX_BAD_SHARE, SHOWN = 0.1, 3
"""Share of the rows that may have no usable vector, and how many of them are named."""
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}
"""Largest difference of a stored number from what the map gives now."""


class Migration(BaseModel):
    """What a store holds of its migration.

    Args:
        space: the name of the space that is searched.
        into: the name of the new space until the switch, and after a rollback.
        model: the map's digest.
        state: ``filling`` until the switch, then ``switched``; one that was killed between them is in neither.
        filled: whether the last ``start`` ended: every row has its new vector, and the indexes are built.
        verified: whether the last ``verify`` passed, None before the first. Rows that services write afterwards do not matter.
        after: rows up to this id were seen in the current round.
        written: rows written so far, in all rounds.
        skipped: rows met so far whose old vector cannot be used; their new vectors are zeros.
        named: the first of these rows, with the reasons.
        max_bad_share: the share of rows that may have no usable vector.
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

    @property
    def before(self) -> str:
        """The name of the old space after the switch."""
        return self.space + BEFORE


class Plan(NamedTuple):
    """What a migration takes.

    Args:
        rows: of the store.
        vectors: rows that have a vector.
        dim: of the new vectors.
        nbytes: of the new vectors, without an index.
        seconds: estimated from reading and mapping some rows; writing comes on top.
        empty: the first rows without a vector, by id.
        unusable: those of the rows that were read whose vector cannot be used, with the reason.
        width: dimension of the old vectors, with padding.
        notes: what changes for services, in sentences.
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


class Checked(NamedTuple):
    """What a verification found.

    Args:
        rows: rows with an old vector.
        missing: of these, rows without a new one. After ``start``, services wrote these, and ``switch`` fills them.
        unmade: of some of these, how many no vector can be made for.
        compared: new vectors that were made again.
        wrong: of these, how many differ from what is stored.
        searched: with how many of these both spaces were searched.
        overlap: the mean share of the first ten hits of those in both spaces; None if nothing was compared.
        skipped: rows whose old vector cannot be used: zeros in the new space.
        filled: whether ``start`` ended.
        unindexed: indexes of the old space that the new one lacks.
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
        """Whether ``switch`` can complete the new space, and nothing differs in it."""
        return self.filled and not self.unmade and not self.unindexed and not self.wrong and self.compared > 0


def plan(store: Store, mapping: Filling, dtype: str = "float32", max_bad_share: float | None = None) -> Plan:
    """Estimate a migration from some rows; nothing is written.

    Args:
        store: the store.
        mapping: the map, or the model that embeds anew.
        dtype: of the new vectors.
        max_bad_share: share of the rows that may have no usable vector; :data:`MAX_BAD_SHARE` by default.

    Raises:
        FingerprintMismatchError: the map is for another model's vectors.
        XcompatError: nobody has said which model made the vectors, the new ones could not be indexed as they are, or too many
            rows have no usable vector.
    """
    store.record(RECORD)  # refused where nothing can be migrated
    mapping.require_fit(store, dtype)
    share = MAX_BAD_SHARE if max_bad_share is None else max_bad_share
    _require_vectors(store, mapping, share)
    started, seen, unusable, width = time.perf_counter(), 0, dict[str, str](), store.spaces()[store.space].dim
    for rows in store.rows(mapping.tried, content=mapping.content):
        mapping.of(store, rows)
        seen, unusable, width = len(rows.ids), mapping.find_unusable(rows), rows.vectors_ND.shape[1]
        break
    seconds, total, vectors = time.perf_counter() - started, store.count(), store.count(store.space)
    _require_few(store, len(unusable), vectors, share, _describe(unusable))
    empty, dim = store.ids_without_vector(SHOWN) if vectors < total else [], mapping.dim_for(store)
    nbytes, notes = vectors * dim * np.dtype(dtype).itemsize, store.notes(dim, dtype)
    return Plan(total, vectors, dim, nbytes, seconds * vectors / max(seen, 1), empty, unusable, width, notes)


def start(
    store: Store,
    mapping: Filling,
    into: str | None = None,
    *,
    batch: int = BATCH,
    rows_per_second: float | None = None,
    dtype: str = "float32",
    max_bad_share: float | None = None,
    spread: Spread = here,
) -> Migration:
    """Fill a new space beside the old one, until no row lacks its vector; started again, it continues.

    Rows that others insert or change meanwhile lack theirs again, and the next round finds them.

    Args:
        store: the store.
        mapping: the map, or the model that embeds anew.
        into: the name of the new space; that of the old one with ``_new`` unless given.
        batch: rows in a transaction.
        rows_per_second: most rows that are written in a second; None for as many as it takes.
        dtype: how the new space keeps its numbers, ``float32`` or ``float16``.
        max_bad_share: share of the rows that may have no usable vector (none, zeros, not finite, or other than the padding of the
            rest); :data:`MAX_BAD_SHARE` by default, and that of the first call when it continues.
        spread: where the vectors are made; this process alone reads and writes.

    Returns:
        The migration.

    Raises:
        XcompatError: another migration runs or has begun, too many rows have no usable vector, or the store refuses.
        FingerprintMismatchError: the map is for another model's vectors.
    """
    with store.claimed():
        migration = _begun(store, mapping, into, dtype, max_bad_share)
        migration.filled = False
        _fill(store, mapping, migration, batch, rows_per_second, spread)
        if migration.skipped:  # blocks that were killed may be counted twice
            migration.skipped = store.count_zeros(migration.into)
            store.set_record(RECORD, migration.model_dump())
        store.index_like(migration.into)
        migration.filled = True
        store.set_record(RECORD, migration.model_dump())
    return migration


def _fill(
    store: Store, mapping: Filling, migration: Migration, batch: int, rows_per_second: float | None, spread: Spread = here
) -> None:
    """Write the vectors of all rows that lack one, round after round."""
    total = store.count(store.space)
    with progress_bar() as bar:
        left = store.count(store.space, migration.into) if migration.written else total  # some stores read all rows to count
        task = bar.add_task(f"filling {migration.into}", total=left, rate="")
        throttle = _Throttle(rows_per_second)
        for round_ in count():
            from_first, seen, before = migration.after is None, 0, migration.written
            found = store.rows(batch, migration.after, migration.into, content=mapping.content)
            with closing(ahead(mapping.each(store, found, spread))) as blocks:
                for read, made in blocks:
                    if unusable := mapping.find_unusable(read):
                        _skip(migration, unusable)
                        _require_few(store, migration.skipped, total, migration.max_bad_share, "; ".join(migration.named))
                        store.set_record(RECORD, migration.model_dump())  # first: a killed write would leave them uncounted
                    written = store.write(migration.into, made)
                    migration.after, migration.written = read.ids[-1], migration.written + written
                    store.set_record(RECORD, migration.model_dump())
                    store.renew_claim()
                    seen += len(read.ids)
                    rate_of(bar, task, written, "rows")
                    throttle.wait(len(read.ids))
            store.tidy(migration.into, migration.space)
            migration.after = None  # the next round begins at the first id: others may have changed rows before this one
            store.set_record(RECORD, migration.model_dump())
            new = migration.written - before
            if from_first and (new == 0 or (round_ >= ROUNDS and seen <= FEW)):  # rows that always change wait for the switch
                return


def _skip(migration: Migration, unusable: dict[str, str]) -> None:
    """Count rows whose vectors cannot be used, and keep the names of the first."""
    migration.skipped += len(unusable)
    named = dict.fromkeys([*migration.named, *(f"{item!r} {reason}" for item, reason in unusable.items())])
    migration.named = list(named)[:SHOWN]


def _require_few(store: Store, bad: int, total: int, share: float, named: str) -> None:
    """Raise if too many rows have no usable vector."""
    if bad > share * total:
        raise XcompatError(
            f"{bad:,} of {total:,} rows of {store.uri} have no usable vector, more than the share {share:g}: {named}; "
            "fix or delete them, or raise --max-bad-share"
        )


def _require_vectors(store: Store, mapping: Filling, share: float) -> None:
    """Raise if too many rows have no vector; a model that embeds contents needs none."""
    if mapping.content is None and (empty := store.count() - store.count(store.space)):
        first = ", ".join(map(repr, store.ids_without_vector(SHOWN)))
        _require_few(store, empty, store.count(), share, f"{first} {'have' if empty > 1 else 'has'} none")


def _describe(unusable: dict[str, str]) -> str:
    return "; ".join(f"{item!r} {reason}" for item, reason in list(unusable.items())[:SHOWN])


def status(store: Store) -> tuple[Migration, int]:
    """Return the migration of a store, and how many rows lack a new vector.

    Raises:
        XcompatError: there is none.
    """
    migration, spaces = migration_of(store), store.spaces()
    if migration.before in spaces:
        return migration, store.count(migration.before, migration.space)
    if migration.into in spaces:
        return migration, store.count(migration.space, migration.into)
    filling = migration.state == "filling"  # killed before the space was added; else in finish
    return migration, store.count(migration.space) if filling else 0


def verify(store: Store, mapping: Filling, queries: int = ASKED) -> Checked:
    """Count rows and indexes, map a sample again and compare, and search both spaces with the same items.

    Args:
        store: the store, before the switch.
        mapping: what filled it.
        queries: vectors that are made again; also the most items that search both spaces, for a minute at most.

    Raises:
        XcompatError: there is no migration, or it is another map's, or another process works on it.
    """
    with store.claimed():
        migration = _of(store, mapping)
        if migration.state != "filling":
            raise XcompatError(f"{store.uri} has been switched; verify comes before the switch")
        checked = _check(store, mapping, migration, queries)
        migration.verified = checked.passed
        store.renew_claim()
        store.set_record(RECORD, migration.model_dump())
    return checked


def _check(store: Store, mapping: Filling, migration: Migration, queries: int) -> Checked:
    old = store.count(store.space)
    if migration.into not in store.spaces():
        return Checked(old, old, 0, 0, 0, 0, None, filled=False)
    missing, lacking = store.count(store.space, migration.into), Rows([], np.empty((0, 0), np.float32), [], [])
    if migration.filled and missing:
        lacking = next(store.rows(queries, None, migration.into, content=mapping.content), lacking)
    unmade = len(lacking.ids) - len(mapping.of(store, lacking).ids) if lacking.ids else 0
    tolerance = TOLERANCE[store.spaces()[migration.into].dtype]
    rows, stored_ND = store.sample(queries, migration.into, mapping.content)
    mapped_ND = stored_ND
    if rows.ids:
        made, place = mapping.of(store, rows), {item: row for row, item in enumerate(rows.ids)}
        kept = [place[item] for item in made.ids]
        mapped_ND, stored_ND = made.vectors_ND, stored_ND[kept]
        rows = rows.pick(kept)
    wrong = int((np.abs(stored_ND - mapped_ND).max(1) > tolerance).sum()) if rows.ids else 0
    shares, started = [], time.monotonic()
    usable_N = mapped_ND.any(1)  # zeros have no neighbours
    for old_D, new_D in zip(rows.vectors_ND[usable_N], mapped_ND[usable_N], strict=True):
        found = store.search(old_D, NEIGHBOURS)[0], store.search(new_D, NEIGHBOURS, space=migration.into)[0]
        shares.append(len({hit.id for hit in found[0]} & {hit.id for hit in found[1]}) / len(found[0]))
        if time.monotonic() - started > LONGEST:
            break
    overlap = float(np.mean(shares)) if shares else None
    skipped = store.count_zeros(migration.into) if migration.skipped else 0
    unindexed = tuple(store.missing_indexes(migration.into, migration.space))
    return Checked(old, missing, unmade, len(rows.ids), wrong, len(shares), overlap, skipped, migration.filled, unindexed)


def switch(store: Store, mapping: Filling) -> Migration:
    """Give the new space the name of the old one, at once, after the last changed rows were mapped.

    Args:
        store: the store.
        mapping: what filled it.

    Raises:
        XcompatError: ``start`` has not ended, the new space does not pass ``verify``, rows cannot be written, or the migration
            is another map's.
    """
    with store.claimed():
        migration = _of(store, mapping)
        store.settle()  # of a rollback that was killed
        if migration.state == "filling":
            _require_ready(store, mapping, migration)
            _fill(store, mapping, migration, BATCH, None)
            with store.alone():
                left = _catch_up(store, mapping, migration, migration.space, migration.into)
                if store.locks:
                    left = store.count(migration.space, migration.into)
                if left:
                    raise XcompatError(f"{left:,} rows of {store.uri} have no new vector; mend or delete them first")
                _note(store, migration, "switching")
                store.switch(migration.into)
        elif migration.state == "switching":
            store.switch(migration.into)
        else:
            raise XcompatError(
                f"{store.uri} has been switched{' already' if migration.state == 'switched' else ' back: rollback'}"
            )
        _catch_up(store, mapping, migration, migration.before, migration.space)  # what came in the last moment
        store.settle()
        _note(store, migration, "switched")
    return migration


def _require_ready(store: Store, mapping: Filling, migration: Migration) -> None:
    """Raise if a step before the switch has not ended or not passed; a new space that was never verified is verified now."""
    if not migration.filled:
        raise XcompatError(f"start of {store.uri} has not ended; run `xcompat migrate start` again, then `verify`")
    if missing := store.missing_indexes(migration.into, migration.space):
        raise XcompatError(f"{migration.into} of {store.uri} has no {_listed(missing)}: run `xcompat migrate start` again")
    if migration.verified is None:
        migration.verified = _check(store, mapping, migration, ASKED).passed
        store.renew_claim()
        store.set_record(RECORD, migration.model_dump())
    if not migration.verified:
        raise XcompatError(f"{migration.into} of {store.uri} failed its verification: run `xcompat migrate verify` to see why")


def _listed(indexes: list[str]) -> str:
    return f"index {', '.join(indexes)}"


def _catch_up(store: Store, mapping: Filling, migration: Migration, old: str, new: str) -> int:
    """Write what the new space lacks of the old one, in one round; return how many rows no vector could be made for."""
    left = 0
    for rows in store.rows(BATCH, None, new, old, mapping.content):
        made = mapping.of(store, rows)
        _skip(migration, mapping.find_unusable(rows))
        migration.written += store.write(new, made)
        left += len(rows.ids) - len(made.ids)
    store.tidy(new, old)
    return left


def _note(store: Store, migration: Migration, state: Literal["filling", "switching", "switched", "switching back"]) -> None:
    migration.state = state
    store.set_record(RECORD, migration.model_dump())


def rollback(store: Store) -> tuple[Migration, int]:
    """Undo the switch, or end a migration that was not switched, whose new space goes.

    Args:
        store: the store.

    Returns:
        The migration, and how many rows have no vector in the old space, because they came or changed after the switch.
    """
    with store.claimed():
        migration = migration_of(store)
        if migration.state == "filling":
            _drop(store, migration.into)
            return migration, 0
        lost = store.count(migration.space, migration.before) if migration.before in store.spaces() else 0
        with store.alone():
            _note(store, migration, "switching back")
            store.switch_back(migration.into)
            _note(store, migration, "filling")
        store.settle()
        return migration, lost


def finish(store: Store) -> Migration:
    """Delete the old space after the switch; from then on nothing can be undone.

    Args:
        store: the store.

    Raises:
        XcompatError: it has not been switched, or the new space lacks an index of the old one.
    """
    with store.claimed():
        migration = migration_of(store)
        if migration.state != "switched":
            raise XcompatError(f"{store.uri} has not been switched; `xcompat migrate switch` comes before finish")
        if migration.before in store.spaces() and (missing := store.missing_indexes(migration.space, migration.before)):
            raise XcompatError(
                f"{migration.space} of {store.uri} has no {_listed(missing)}, which {migration.before} has; run `xcompat migrate "
                f"rollback`, `start`, `verify` and `switch`, or drop what {migration.before} no longer needs"
            )
        _drop(store, migration.before)
    return migration


def _drop(store: Store, space: str) -> None:
    """Delete a space, unless that was done before the process was killed, and the record of the migration."""
    with store.alone():
        if space in store.spaces():
            store.drop_space(space)
        store.set_record(RECORD, None)


def migration_of(store: Store) -> Migration:
    """Return the migration that a store holds.

    Raises:
        XcompatError: there is none.
    """
    if (known := store.record(RECORD)) is None:
        raise XcompatError(f"{store.uri} holds no migration; begin one with `xcompat migrate start`")
    return Migration.model_validate(known)


def _of(store: Store, mapping: Filling) -> Migration:
    """Return the store's migration, which must be by this map."""
    migration = migration_of(store)
    if migration.model != mapping.digest:
        raise FingerprintMismatchError(f"the migration of {store.uri} was begun with another model than {mapping.made[0]}")
    return migration


def _begun(store: Store, mapping: Filling, into: str | None, dtype: str, max_bad_share: float | None = None) -> Migration:
    """Begin a migration, or continue the one that is there."""
    if store.record(RECORD) is not None:
        migration = _of(store, mapping)
        if migration.state != "filling":
            raise XcompatError(f"{store.uri} has been switched; `xcompat migrate finish` or `rollback` comes next")
        if into not in (None, migration.into):
            raise XcompatError(f"{store.uri} is being migrated into {migration.into}, not {into}; leave --into out")
        migration.max_bad_share = migration.max_bad_share if max_bad_share is None else max_bad_share
        if migration.into in store.spaces():
            return migration
    else:
        mapping.require_fit(store, dtype)
        share = MAX_BAD_SHARE if max_bad_share is None else max_bad_share
        _require_vectors(store, mapping, share)
        target = into or f"{store.space}_new"
        migration = Migration(space=store.space, into=target, model=mapping.digest, max_bad_share=share)
        if migration.into in store.spaces():
            raise XcompatError(f"{store.uri} has a space {migration.into!r} already; choose another name with --into")
    made, dim = mapping.made[0], mapping.dim_for(store)
    with store.alone():
        store.set_record(RECORD, migration.model_dump())
        try:
            store.add_space(migration.into, dim, made, dtype)
        except XcompatError:
            if not store.locks:  # else nothing of this block was done
                store.set_record(RECORD, None)
            raise
    return migration


class _Throttle:
    """Keeps a mean rate."""

    def __init__(self, per_second: float | None, sleep: Callable[[float], None] = time.sleep) -> None:
        self.per_second, self.sleep, self.started, self.done = per_second, sleep, time.monotonic(), 0

    def wait(self, rows: int) -> None:
        """Wait until so many more rows may have been written."""
        self.done += rows
        if self.per_second is not None:
            self.sleep(max(0.0, self.started + self.done / self.per_second - time.monotonic()))
