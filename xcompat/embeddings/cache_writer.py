"""Writer of embedding caches: all ranks write shards, and a killed run continues in the shard that it left unfinished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.distributed import barrier, gather_objects, is_main_process, rank, world_size
from xcompat.core.errors import XcompatError
from xcompat.core.files import atomic_path, clear_leftovers, list_entries, read_json, write_json
from xcompat.core.progress import Waiting, advance_bar, notice, progress_bar
from xcompat.data import BadSamples
from xcompat.embeddings.cache import (
    FULL,
    CacheInfo,
    DamagedShardError,
    EmbeddingCache,
    MissingShardError,
    open_shard,
    read_info,
    write_shard,
)

T = TypeVar("T")
Batches: TypeAlias = Iterator[tuple[NDArray[np.int64], Tensor]]
"""Row numbers with their embeddings."""
SAVE_SECONDS = 30.0
"""Interval between two writes of an unfinished shard, which a slow model fills in minutes."""


def fill_cache(
    info: CacheInfo, path: Path, embed_shards: Callable[[Sequence[Sequence[int]], Waiting], Iterator[Batches]], bad: BadSamples
) -> EmbeddingCache:
    """Write the missing or damaged shards of a cache, each as soon as it is embedded.

    Args:
        info: the cache.
        path: its folder.
        embed_shards: takes the ascending rows of each shard, and yields their batches, with places in these rows.
        bad: counts unreadable items.

    Returns:
        The cache.
    """
    if not info.rows:
        raise XcompatError(f"there are no {info.kind} to embed; check the data section")
    _check_plan(path, info)
    if is_main_process():
        clear_leftovers(path)
    mine = _list_missing_shards(path, info)
    if mine:
        _embed_shards(path, info, mine, embed_shards)
    bad.merge_processes()  # waits until all ranks have written
    if is_main_process() and not _is_finished(path, info):
        write_json(path / "cache.json", info.to_json())
    barrier()
    return EmbeddingCache(path)


def _list_missing_shards(path: Path, info: CacheInfo) -> list[int]:
    """List this process's missing or damaged shards, and report damaged shards of all processes."""
    begun = not (path / "cache.json").exists()  # an unfinished cache may miss shards
    missing, damaged = [], []
    for shard in range(rank(), info.shards, world_size()):
        try:
            open_shard(path, shard, info)
        except DamagedShardError as error:
            missing.append(shard)
            if not (begun and isinstance(error, MissingShardError)):
                damaged.append(str(error))
    for reasons in gather_objects(damaged, shared=True):
        for reason in reasons:
            notice(f"{reason}; re-embedding this shard")
    return missing


def select_rows(texts: Sequence[T], rows: Sequence[int]) -> list[T]:
    """Read the rows of a shard in one slice.

    Example:
        >>> select_rows("abcdef", range(2, 4)), select_rows("abcdef", [1, 4])
        (['c', 'd'], ['b', 'e'])
    """
    block = list(texts[rows[0] : rows[-1] + 1])
    return [block[row - rows[0]] for row in rows]


def _embed_shards(
    path: Path,
    info: CacheInfo,
    shards: list[int],
    embed_shards: Callable[[Sequence[Sequence[int]], Waiting], Iterator[Batches]],
) -> None:
    known = [_read_unfinished(path, shard, info) for shard in shards]
    rows = [_remaining_rows(info.rows_of(shard), places_N) for shard, (places_N, _) in zip(shards, known, strict=True)]
    total = sum(len(info.rows_of(shard)) for shard in range(rank(), info.shards, world_size()))
    with progress_bar() as bar, ThreadPoolExecutor(1) as writer:
        title, done = f"embedding {info.kind} with {info.name}", total - sum(map(len, rows))
        task = bar.add_task(title, total=total, completed=done, unit=info.kind)
        waiting, saved = Waiting(), time.monotonic()
        writing: list[Future[None]] = []

        def write(function: Callable[..., None], *arguments: object) -> None:
            if writing:
                writing.pop().result()  # at most one shard is being written while the model goes on
            writing.append(writer.submit(function, path, *arguments))

        for shard, left, (places_N, embeds_ND), batches in zip(shards, rows, known, embed_shards(rows, waiting), strict=True):
            left_N, places, parts = np.asarray(left) - info.rows_of(shard).start, [places_N], [embeds_ND]
            for places_B, embeds_BD in batches:
                places.append(left_N[places_B])
                parts.append(embeds_BD)  # stays on its device: a GPU copies once per shard
                advance_bar(bar, task, len(places_B), waiting)
                if time.monotonic() - saved >= SAVE_SECONDS and sum(map(len, places)) < len(info.rows_of(shard)):
                    write(_write_unfinished, shard, info, list(places), list(parts))
                    saved = time.monotonic()
            write(_write_shard, shard, info, places, parts)
            saved = time.monotonic()
        if writing:
            writing.pop().result()


def _remaining_rows(rows: range, places_N: NDArray[np.int64]) -> Sequence[int]:
    return np.delete(rows, places_N).tolist() if len(places_N) else rows


def _is_finished(path: Path, info: CacheInfo) -> bool:
    try:
        return replace(read_info(path), name=info.name) == info
    except XcompatError:
        return False


def _join(shard: int, info: CacheInfo, places: list[NDArray[np.int64]], parts: list[Tensor]) -> NDArray[np.float32]:
    """Return the embeddings of a shard, NaN for unreadable images and for rows that are not embedded yet."""
    embeds_ND = np.full((len(info.rows_of(shard)), info.dim), np.nan, dtype=np.float32)
    embeds_ND[np.concatenate(places)] = torch.cat([part.to(parts[-1].device) for part in parts]).numpy(force=True)
    return embeds_ND


def _write_shard(path: Path, shard: int, info: CacheInfo, places: list[NDArray[np.int64]], parts: list[Tensor]) -> None:
    embeds_ND = _join(shard, info, places, parts)
    if (np.abs(embeds_ND) > np.finfo(info.dtype).max).any():
        raise XcompatError(
            f"{info.name} returns values beyond the range of {info.dtype}, the type of caches; give embeddings of length 1 "
            "(options.input: embedding)"
        )
    write_shard(path, shard, info, embeds_ND)
    _unfinished_path(path, shard).unlink(missing_ok=True)


def _unfinished_path(folder: Path, shard: int) -> Path:
    return folder / f"unfinished-{shard:05d}.npz"


def _write_unfinished(path: Path, shard: int, info: CacheInfo, places: list[NDArray[np.int64]], parts: list[Tensor]) -> None:
    with atomic_path(_unfinished_path(path, shard)) as temporary:
        np.savez(temporary, embeds=_join(shard, info, places, parts).astype(info.dtype))


def _read_unfinished(path: Path, shard: int, info: CacheInfo) -> tuple[NDArray[np.int64], Tensor]:
    """Return the places and embeddings that a killed run left of a shard: none, if the file is missing or damaged."""
    try:
        with np.load(_unfinished_path(path, shard), allow_pickle=False) as stored:
            embeds_ND = stored["embeds"]  # fails if the checksum in the file differs
        if embeds_ND.shape == (len(info.rows_of(shard)), info.dim) and embeds_ND.dtype == info.dtype:
            places_N = np.flatnonzero(np.isfinite(embeds_ND).all(axis=1))
            return places_N, torch.from_numpy(embeds_ND[places_N].astype(np.float32))
    except Exception:  # NumPy raises many kinds of errors on a damaged file
        pass
    return np.empty(0, np.int64), torch.empty(0, info.dim)


def _check_plan(path: Path, info: CacheInfo) -> None:
    written = [file for file in (path / "plan.json", path / "cache.json") if file.exists()]
    if written:
        begun: Any = read_json(written[0])
        wanted = asdict(info)
        if not isinstance(begun, dict):
            raise XcompatError(f"{written[0]} does not describe a cache; delete {path} and re-embed")
        begun = {"precision": FULL} | begun
        different = [key for key in wanted if key != "name" and begun.get(key) != wanted[key]]
        if different:
            key = different[0]
            raise XcompatError(
                f"{path} contains embeddings of another {key} ({begun.get(key)!r}, now {wanted[key]!r}); "
                "choose another folder or delete it"
            )
    elif list_entries(path, "shard-*.npy"):
        raise XcompatError(f"{path} contains shards but no plan.json; delete it or choose another folder")
    elif is_main_process():
        write_json(path / "plan.json", info.to_json())
    barrier()
