"""Steps per second of φ's pretraining: this project's, from caches on disk, against a bare loop over tensors in memory.

    python benchmarks/speed/projection_steps.py [--rounds 5]

200,000 pairs of random unit vectors of the quickstart's dimensions, 128 and 64, in batches of 1024; the caches hold them as
float16, in two shards each. Both sides add noise, clip gradients and use the same AdamW. The time is taken from one forward to
the next, the first steps left out, in interleaved rounds; medians are compared.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import ROUNDS, Row, interleaved, main
from torch import nn
from torch.nn import functional as F

from xcompat import Fingerprint, ProjectionConfig, ProjectionModel
from xcompat.core.files import write_json
from xcompat.core.progress import console as progress
from xcompat.core.progress import silence_libraries
from xcompat.embeddings.cache import CacheInfo, EmbeddingCache
from xcompat.models import describe_old
from xcompat.training.optimiser import OptimiserFactory
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import train
from xcompat.training.training_sets import embedding_data

ROWS, SHARD_ROWS, NEW_DIM, OLD_DIM = 200_000, 100_000, 128, 64
BATCH, STEPS, WARM = 1024, 120, 20
RATE = 1e-4
ALLOWED_SHARE = 0.8


def write_cache(folder: Path, dim: int) -> EmbeddingCache:
    """Write random embeddings as ``xcompat embed`` does."""
    folder.mkdir()
    embeds_ND = F.normalize(torch.randn(ROWS, dim), dim=-1).numpy().astype(np.float16)
    for shard, start in enumerate(range(0, ROWS, SHARD_ROWS)):
        np.save(folder / f"shard-{shard:05d}.npy", embeds_ND[start : start + SHARD_ROWS])
    made = Fingerprint.from_string(folder.name)
    write_json(folder / "cache.json", asdict(CacheInfo(made.digest, made.name, "random", "texts", ROWS, dim, SHARD_ROWS)))
    return EmbeddingCache(folder)


def by_hand(model: ProjectionModel, new: EmbeddingCache, old: EmbeddingCache) -> None:
    """Train with a plain hand-written loop, on tensors in memory."""
    new_ND, old_Nd = (torch.from_numpy(cache[:]) for cache in (new, old))
    model.train()
    optimiser = OptimiserFactory()(
        model,
        optimiser=torch.optim.AdamW,
        decayed="matrices",
        lr=RATE,
        prompt_lr_factor=100.0,
        encoder_lr_factor=1.0,
        weight_decay=0.0,
    )
    order_N = torch.randperm(ROWS)
    for step in range(STEPS):
        rows_B = order_N[step * BATCH : (step + 1) * BATCH]
        loss = model(new_embeds=new_ND[rows_B], old_embeds=old_Nd[rows_B]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()


def by_recipe(model: ProjectionModel, new: EmbeddingCache, old: EmbeddingCache) -> None:
    """Train as a recipe does, from the caches on disk."""
    settings = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": RATE}
    part = StageRecipe(method="projection", training=settings | {"lr_scheduler_type": "constant"})
    with tempfile.TemporaryDirectory() as folder:
        train(model, embedding_data(new, old, {}), part, 0, Path(folder))


def rate(side: Callable[..., None], *caches: EmbeddingCache) -> float:
    """Return mean steps per second, from one forward to the next."""
    torch.manual_seed(0)
    old = describe_old(Fingerprint.from_string("old"), dim=OLD_DIM)
    model = ProjectionModel(ProjectionConfig(old=old, embedding_dim=NEW_DIM))
    begun: list[float] = []

    def note(module: nn.Module, given: Any) -> None:  # noqa: ANN401 - a hook's
        begun.append(time.perf_counter())

    model.projection.register_forward_pre_hook(note)
    side(model, *caches)
    return (len(begun) - 1 - WARM) / (begun[-1] - begun[WARM])


def measure(rounds: int = ROUNDS) -> list[Row]:
    """Measure both sides in turn."""
    progress.quiet = True
    silence_libraries()
    with tempfile.TemporaryDirectory() as folder:
        caches = [write_cache(Path(folder) / name, dim) for name, dim in (("new", NEW_DIM), ("old", OLD_DIM))]
        sides = {"ours": by_recipe, "theirs": by_hand}
        rates = interleaved({name: partial(rate, side, *caches) for name, side in sides.items()}, rounds)
    detail = f"{rates['ours']:.1f} steps/s, {rates['theirs']:.1f}; batches of {BATCH:,}"
    what, against = "φ's pretraining from caches on disk", "a bare loop over tensors in memory"
    return [Row(what, against, rates["ours"] / rates["theirs"], f">= {ALLOWED_SHARE}", detail)]


if __name__ == "__main__":
    main(measure)
