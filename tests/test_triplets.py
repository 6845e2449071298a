"""Batches for triplets: P classes with K images each, on one process and on two, after a stop as without one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm
from PIL import Image
from torch.utils.data import BatchSampler

from xcompat.core.errors import XcompatError
from xcompat.data import ClassBalancedSampler, load_labelled
from xcompat.methods import METHODS
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.recipe import parse_recipe
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import train
from xcompat.training.training_sets import labelled_data

CLASSES, EACH, BATCH = 4, 6, 4  # in an epoch 6 batches of 2 classes with 2 images each, on one process or dealt to two


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 255, (CLASSES * EACH, 32, 32, 3), dtype=np.uint8)
    for row, image in enumerate(pixels):
        (folder / f"class-{row % CLASSES}").mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"class-{row % CLASSES}" / f"{row}.png")
    return str(folder)


def learn(photos: str, encoder: str, folder: Path, **training: Any) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Train two epochs; return the rows of each batch that this process made, and the weights."""
    images = load_labelled(photos)
    options = {"head": "triplet", "dim": 8}
    training = {"num_train_epochs": 2, "per_device_train_batch_size": BATCH, "save_strategy": "steps", **training}
    part = StageRecipe(
        method="independent", new=encoder, options=options, data={"samples_per_class": 2}, training=training, evaluation=None
    )
    torch.manual_seed(0)
    model = METHODS["independent"].from_encoder(encoder, classes=images.classes, **options)
    data = labelled_data(part, images, model.processor, 0, {})
    seen: list[list[int]] = []

    def collate(items: Sequence[Mapping[str, Any]]) -> Any:
        seen.append([item["index"] for item in items])
        return data.collator(items)

    trained = train(model, data._replace(collator=collate), part, 0, folder)
    return seen, {name: value.clone() for name, value in trained.state_dict().items()}


def drawn(photos: str) -> list[list[int]]:
    """Return the batches of two epochs, as the sampler alone draws them."""
    sampler = ClassBalancedSampler(load_labelled(photos).labels(), 2, 2)
    batches: list[list[int]] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches += list(BatchSampler(sampler, BATCH, drop_last=True))
    return batches


def test_balanced_batches_continue_after_a_stop(photos: str, image_folder_of: dict[str, str], tmp_path: Path) -> None:
    seen, weights = learn(photos, image_folder_of["resnet"], tmp_path, save_steps=8)
    assert seen == drawn(photos) and len(seen) == 12
    labels_N = load_labelled(photos).labels()
    assert all(sorted(Counter(labels_N[batch].tolist()).values()) == [2, 2] for batch in seen)
    assert seen[:6] != seen[6:], "each epoch has its own"
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()  # as a kill leaves it
    again, same = learn(photos, image_folder_of["resnet"], tmp_path, save_steps=8)
    assert again == seen[8:], "from the third batch of the second epoch"
    for name, value in weights.items():
        assert torch.equal(same[name], value), name


def learn_on_a_rank(rank: int, photos: str, encoder: str, folder: str) -> None:
    torch.set_num_threads(1)
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    # accelerate asks for an address, and then uses the group that there is
    os.environ |= places | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    runs = Path(folder) / "runs"
    whole, _ = learn(photos, encoder, runs, save_steps=4)
    dist.barrier()
    if rank == 0:
        (runs / "checkpoint-6" / "trainer_state.json").unlink()
    dist.barrier()
    rest, _ = learn(photos, encoder, runs, save_steps=4)
    (Path(folder) / f"{rank}.json").write_text(json.dumps([whole, rest]))
    dist.destroy_process_group()


def test_two_processes_share_the_batches_of_one(photos: str, image_folder_of: dict[str, str], tmp_path: Path) -> None:
    warm.spawn(learn_on_a_rank, (photos, image_folder_of["resnet"], str(tmp_path)))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    wholes, rests = zip(*ranks, strict=True)
    assert [batch for step in zip(*wholes, strict=True) for batch in step] == drawn(photos)
    assert [batch for step in zip(*rests, strict=True) for batch in step] == drawn(photos)[8:], "in the middle of the epoch"


def recipe_of(photos: str, batch: int, **data: Any) -> dict[str, Any]:
    return {
        "method": "independent",
        "new": {"model": {"model_type": "resnet", "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}, "image_size": 16},
        "options": {"head": "triplet"},
        "data": {"images": {"path": photos}, **data},
        "training": {"per_device_train_batch_size": batch},
    }


@pytest.mark.parametrize(("batch", "each"), [(30, 4), (4, 4), (8, 6)])
def test_a_batch_that_classes_do_not_fill_is_refused(batch: int, each: int, photos: str) -> None:
    message = f"{each} images .data.samples_per_class. of two .*batch_size is {batch}; set it to a multiple of {each}, at least"
    with pytest.raises(XcompatError, match=message):
        parse_recipe(recipe_of(photos, batch, samples_per_class=each), "demo", "demo.yaml")


def test_other_heads_take_any_batch(photos: str) -> None:
    raw = recipe_of(photos, 30) | {"options": {"head": "softmax"}}
    assert parse_recipe(raw, "demo", "demo.yaml").stages[0].batch_size == 30


def test_more_classes_in_a_batch_than_there_are(photos: str, image_folder_of: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="classes_per_batch=8 exceeds the 4 classes"):
        learn(photos, image_folder_of["resnet"], tmp_path, per_device_train_batch_size=16)


def test_a_dry_run_of_triplets(photos: str) -> None:  # on images of three classes
    dry_run_recipe(parse_recipe(recipe_of(photos, 64, samples_per_class=16), "demo", "demo.yaml"))
