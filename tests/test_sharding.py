"""A model that FSDP has cut into shards trains, and is saved whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from xcompat.models import IndependentModel
from xcompat.training.sharding import shardable, unsharded

TEXTS = ["a cat", "two red shoes", "a dog in the snow", "greek small letter alpha"]


def _batch(model: IndependentModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    height, width = model.processor.image_size
    return {"pixel_values": torch.randn(4, 3, height, width, generator=generator), **model.processor.texts(TEXTS)}


def _shard_and_save(rank: int, encoder: str, store: str, out: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = shardable(IndependentModel.from_encoder(encoder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert layers, "FSDP finds the layers by the names that the model gives"
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**_batch(model)).loss
    loss.backward()
    optimiser.step()
    whole = unsharded(model)
    assert type(whole) is IndependentModel and unsharded(whole) is whole
    assert any(not torch.equal(before[name].reshape_as(tensor), tensor) for name, tensor in whole.state_dict().items())
    if rank == 0:
        whole.export(out)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["clip", "open_clip"])
def test_a_sharded_step_equals_a_plain_one(kind: str, folder_of: dict[str, str], tmp_path: Path) -> None:
    mp.spawn(_shard_and_save, args=(folder_of[kind], str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    model = IndependentModel.from_encoder(folder_of[kind])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = _batch(model)
    model(**{name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}).loss.backward()  # both ranks saw it
    optimiser.step()
    saved = IndependentModel.from_encoder(str(tmp_path / "out")).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, atol=1e-6, rtol=1e-5)
