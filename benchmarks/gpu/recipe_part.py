"""Training of a recipe's backbone from random weights, on photos made on the spot."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from setting import DISTINCT, FULL, Figure, Size, make_jpeg, peak_since, write_shard
from training_parts import Clock, train_steps, workers

from xcompat.training.from_labels import labelled_model_and_data
from xcompat.training.recipe import load_recipe
from xcompat.training.stage import Stage

RECIPE, STAGE = Path(__file__).resolve().parents[2] / "recipes" / "vision" / "oca_tiny_imagenet.yaml", "independent"
EDGE, CLASSES, PHOTOS = 64, 200, 50_000
"""Tiny-ImageNet's, of whose training photos the recipe reads half."""
SMALLER = ("per_device_train_batch_size=4", "dataloader_num_workers=0")


def recipe_stage(size: Size, device: torch.device) -> Figure:
    """Train the recipe's independent model for a while, and say how long the recipe's epochs take at this rate."""
    with tempfile.TemporaryDirectory() as name:
        folder, generator = Path(name), np.random.default_rng(0)
        photos = ({"jpg": make_jpeg(generator, (EDGE, EDGE)), "cls": b"%d" % (row % CLASSES)} for row in range(DISTINCT))
        write_shard(folder / "train.tar", photos)
        changes = [f"data.images.path={folder}/train.tar", f"output_dir={folder}/run", f"cache_dir={folder}/cache"]
        if size is not FULL:
            changes += ["new.model.hidden_sizes=[8,8,8,8]", "new.model.embedding_size=8"]
            changes += [f"stages.{STAGE}.training.{change}" for change in SMALLER]
        recipe = load_recipe(RECIPE, changes)
        stage = Stage(recipe, next(each for each in recipe.stages if each.name == STAGE))
        rows = np.arange(PHOTOS if size is FULL else size.photos) % DISTINCT
        stage.images = replace(stage.images, dataset=stage.images.dataset.select(rows))
        settings, batch = stage.settings, stage.settings.batch_size
        processes = workers(batch * 3 * EDGE * EDGE * 4) if size is FULL else 0
        epochs, given = settings.training["num_train_epochs"], {"dataloader_num_workers": processes, "max_steps": 10**6}
        part = settings.model_copy(update={"training": settings.training | given})
        clock = train_steps(*labelled_model_and_data(stage), part, Clock(size.warm, size.seconds, device))
    rate = clock.rate * batch
    note = (
        f"{epochs} epochs of {PHOTOS:,} photos in {epochs * PHOTOS / rate / 3600:,.1f} h at this rate; "
        f"photos of {EDGE} pixels made on the spot, {processes} dataloader workers"
    )
    return Figure(f"{RECIPE.stem}, stage {STAGE}, {batch} at a time", rate, None, peak_since(device), note=note)
