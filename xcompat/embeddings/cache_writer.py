"""Writer of embedding caches: all ranks write shards, and a killed run continues at its next shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xcompat.core.distributed import barrier, gather_objects, is_main_process, rank, world_size
from xcompat.core.errors import XcompatError
from xcompat.core.files import clear_leftovers, list_entries, read_json, write_json
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

Batches: TypeAlias = Iterator[tuple[NDArray[np.int64], Tensor]]
"""Row numbers with their embeddings."""


def fill_cache(
    info: CacheInfo, path: Path, embed_shards: Callable[[Sequence[slice], Waiting], Iterator[Batches]], bad: BadSamples
) -> EmbeddingCache:
    """Write the missing or damaged shards of a cache, each as soon as it is embedded.

    Args:
        info: the cache.
        path: its folder.
        embed_shards: yields, for each given shard, the batches of its rows, numbered from 0.
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


def _embed_shards(
    path: Path,
    info: CacheInfo,
    shards: list[int],
    embed_shards: Callable[[Sequence[slice], Waiting], Iterator[Batches]],
) -> None:
    slices = [slice(shard * info.shard_rows, min((shard + 1) * info.shard_rows, info.rows)) for shard in shards]
    total = sum(part.stop - part.start for part in slices)
    with progress_bar() as bar, ThreadPoolExecutor(1) as writer:
        task = bar.add_task(f"embedding {info.kind} with {info.name}", total=total, unit=info.kind)
        waiting = Waiting()
        writing: Future[None] | None = None
        for shard, part, batches in zip(shards, slices, embed_shards(slices, waiting), strict=True):
            places, parts = [], []
            for places_B, embeds_BD in batches:
                places.append(places_B)
                parts.append(embeds_BD)  # stays on its device: a GPU copies once per shard
                advance_bar(bar, task, len(places_B), waiting)
            if writing is not None:
                writing.result()  # at most one shard is being written while the model goes on
            writing = writer.submit(_write_shard, path, shard, info, part.stop - part.start, places, parts)
        if writing is not None:
            writing.result()


def _is_finished(path: Path, info: CacheInfo) -> bool:
    try:
        return replace(read_info(path), name=info.name) == info
    except XcompatError:
        return False


def _write_shard(
    path: Path, shard: int, info: CacheInfo, rows: int, places: list[NDArray[np.int64]], parts: list[Tensor]
) -> None:
    embeds_ND = np.full((rows, info.dim), np.nan, dtype=np.float32)
    if parts:
        embeds_ND[np.concatenate(places)] = torch.cat(parts).numpy(force=True)
    if (np.abs(embeds_ND) > np.finfo(info.dtype).max).any():
        raise XcompatError(
            f"{info.name} returns values beyond the range of {info.dtype}, the type of caches; give embeddings of length 1 "
            "(options.input: embedding)"
        )
    write_shard(path, shard, info, embeds_ND)


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
