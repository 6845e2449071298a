"""Training on several processes: weights that FSDP has cut into shards, and batches of P classes with K images each."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from conftest import TEXTS, recipe_of, refuses
from schedule import mostly_nightly
from test_distributed import join_group
from test_labelled_run import write_classes
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, default_collate

from xcompat import CompatModel, DirectModel, Fingerprint, IndependentModel, XcompatError
from xcompat.data import ClassBalancedSampler, load_labelled
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.models.embedder import load_checkpoint
from xcompat.training.cached_gradients import backward_in_mini_batches
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.sharding import gather_weights, shardable
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import StageTrainer, train, training_arguments
from xcompat.training.training_sets import Data, labelled_data


def _batch(model: CompatModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    height, width = model.processor.image_size
    return {"pixel_values": torch.randn(4, 3, height, width, generator=generator), **model.processor.texts(TEXTS)}


def _fully_shard(model: CompatModel) -> None:
    """Cut a model into shards as accelerate does with ``fsdp2``."""
    from torch.distributed.fsdp import fully_shard

    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert layers, "FSDP finds the layers by the names that the model gives"
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _shard_and_save(rank: int, encoder: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = shardable(IndependentModel.from_encoder(encoder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _fully_shard(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**_batch(model)).loss
    loss.backward()
    optimiser.step()
    whole = gather_weights(model)
    assert type(whole) is IndependentModel and gather_weights(whole) is whole
    assert any(not torch.equal(before[name].reshape_as(tensor), tensor) for name, tensor in whole.state_dict().items())
    if rank == 0:
        whole.export(out)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", mostly_nightly(["clip", "open_clip"], "clip".__eq__))
def test_a_sharded_step_equals_a_plain_one(kind: str, folder_of: dict[str, str], tmp_path: Path) -> None:
    warm.spawn(_shard_and_save, (folder_of[kind], str(tmp_path / "store"), str(tmp_path / "out")))
    model = IndependentModel.from_encoder(folder_of[kind])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = _batch(model)
    model(**{name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}).loss.backward()  # both ranks saw it
    optimiser.step()
    saved = IndependentModel.from_encoder(str(tmp_path / "out")).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-6, rtol=1e-5)


class _Fsdp:
    """What cached gradients ask of accelerate, as it does it for FSDP2."""

    unwrap_model = staticmethod(lambda model: model)
    backward = staticmethod(torch.Tensor.backward)

    @staticmethod
    @contextmanager
    def no_sync(model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def _direct(encoder: str) -> DirectModel:
    torch.manual_seed(0)
    old = describe_old(Fingerprint.from_string("old"), dim=8)
    return DirectModel.from_encoder(encoder, old=old, train_encoder="all").train()


def _old() -> dict[str, torch.Tensor]:
    return {name: torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) for name in ("old_embeds", "old_text_embeds")}


def _sharded_parts(rank: int, encoder: str, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = shardable(_direct(encoder))
    mine = {name: column[2 * rank : 2 * rank + 2] for name, column in (_batch(model) | _old()).items()}
    _fully_shard(model)
    loss = backward_in_mini_batches(_Fsdp(), model, mine, 1)  # type: ignore[arg-type]
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    scale = shardable(IndependentModel.from_encoder(encoder)).train()
    _fully_shard(scale)
    with pytest.raises(XcompatError, match=r"the loss of \w*IndependentModel reads its own weights; launch without FSDP"):
        backward_in_mini_batches(_Fsdp(), scale, _batch(scale), 2)  # type: ignore[arg-type]
    if rank == 0:
        torch.save((loss, whole), out)
    dist.barrier()  # the refused part leaves gathered weights behind, which the other process may still send
    dist.destroy_process_group()


def test_mini_batches_of_a_sharded_model_give_the_gradient_of_the_whole_batch(folder_of: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    warm.spawn(_sharded_parts, (folder_of["clip"], str(tmp_path / "store"), str(out)))
    model = _direct(folder_of["clip"])
    wanted = model(**_batch(model), **_old()).loss
    wanted.backward()
    loss, found = torch.load(out, weights_only=True)
    torch.testing.assert_close(loss, wanted.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == gradients.keys()
    longest = max(
        gradient.norm() for gradient in gradients.values()
    )  # some are nothing but rounding, such as those of keys' biases
    for name, gradient in gradients.items():
        apart = (found[name].reshape_as(gradient) - gradient).norm()
        assert apart <= 1e-5 * gradient.norm() + 1e-6 * longest, name


def _train_as_accelerate_shards(rank: int, encoder: str, store: str, out: str) -> None:
    """Train by the Trainer under accelerate's own FSDP2, which accelerate chooses on GPUs alone."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
    build = AcceleratorState.__init__

    def built(self: Any, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        build(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin, self._mixed_precision = DistributedType.FSDP, fsdp_plugin, "bf16"
            fsdp_plugin.set_mixed_precision("bf16")

    AcceleratorState.__init__ = built
    model = DirectModel.from_encoder(encoder, old=describe_old(Fingerprint.from_string("old"), 16))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = _batch(model) | dict.fromkeys(("old_embeds", "old_text_embeds"), torch.eye(4, 16))
    rows = [{name: column[row] for name, column in batch.items()} for row in range(4)]
    training = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.1, "save_strategy": "no"}
    part = StageRecipe(method="direct", training=training)
    trainer = StageTrainer(model, training_arguments(part, 0, Path(out) / "checkpoints"), Data(rows, default_collate), part)
    computed, embed = [], model.embed_batch

    def embedded(batch: Any) -> Any:
        computed.append(torch.is_autocast_enabled("cpu"))
        return embed(batch)

    model.embed_batch = embedded  # type: ignore[method-assign]
    trainer.train()
    assert computed and all(computed), "in half precision, as without shards"
    sharded = trainer.accelerator.unwrap_model(trainer.model)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    whole = gather_weights(sharded)
    assert any(not torch.equal(before[name].reshape_as(tensor), tensor) for name, tensor in whole.state_dict().items())
    whole.export(Path(out) / "model")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", mostly_nightly(["clip", "open_clip"], "clip".__eq__))
def test_the_trainer_shards_as_accelerate_does(kind: str, folder_of: dict[str, str], tmp_path: Path) -> None:
    """Weights in the layout of convolutions are refused, and so is a model that says nothing of its input's embeddings."""
    warm.spawn(_train_as_accelerate_shards, (folder_of[kind], str(tmp_path / "store"), str(tmp_path / "out")), processes=1)
    assert isinstance(load_checkpoint(str(tmp_path / "out" / "model")), DirectModel)


BATCH = (
    4  # of four classes with six images; in an epoch 6 batches of 2 classes with 2 images each, on one process or dealt to two
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_classes(tmp_path_factory.mktemp("photos"), 6, seed=0)


def learn(photos: str, encoder: str, folder: Path, **training: Any) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
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
    join_group(rank, folder)
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


def triplets_of(photos: str, batch: int, **data: Any) -> dict[str, Any]:
    return {
        "method": "independent",
        "new": {"model": {"model_type": "resnet", "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}, "image_size": 16},
        "options": {"head": "triplet"},
        "data": {"images": {"path": photos}, **data},
        "training": {"per_device_train_batch_size": batch},
    }


def test_batches_that_classes_do_not_fill_are_refused(photos: str, image_folder_of: dict[str, str], tmp_path: Path) -> None:
    for batch, each in ((30, 4), (4, 4), (8, 6)):
        said = f"{each} images .data.samples_per_class. of two .*batch_size is {batch}; set it to a multiple of {each}, at least"
        refuses(said, recipe_of, triplets_of(photos, batch, samples_per_class=each))
    with pytest.raises(XcompatError, match="classes_per_batch=8 exceeds the 4 classes"):
        learn(photos, image_folder_of["resnet"], tmp_path, per_device_train_batch_size=16)
    other_head = triplets_of(photos, 30) | {"options": {"head": "softmax"}}
    assert recipe_of(other_head).stages[0].batch_size == 30
    dry_run_recipe(recipe_of(triplets_of(photos, 64, samples_per_class=16)))  # on images of three classes
