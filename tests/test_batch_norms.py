"""Batch norms that share statistics between GPUs: which stages get them, what the conversion keeps, and where it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils.data import default_collate

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.methods import FctModel, IndependentModel, SimClrModel
from xcompat.methods.fct import FctConfig
from xcompat.models import CompatModel, describe_old
from xcompat.training import trainer
from xcompat.training.sharding import sync_batch_norms, syncs_batch_norms
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import Data

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("method", "wanted", "processes", "device", "synced"),
    [
        (SimClrModel, None, 8, GPU, True),
        (SimClrModel, False, 8, GPU, False),
        (IndependentModel, None, 8, GPU, False),
        (IndependentModel, True, 8, GPU, True),
        (IndependentModel, True, 1, GPU, False),
        (IndependentModel, True, 1, CPU, False),
        (SimClrModel, None, 2, CPU, False),
    ],
)
def test_gpus_share_statistics_by_default_for_simclr(
    method: type[CompatModel], wanted: bool | None, processes: int, device: torch.device, synced: bool
) -> None:
    assert syncs_batch_norms(method, wanted, processes, device) is synced


def test_processes_without_gpus_cannot_share_statistics() -> None:
    with pytest.raises(XcompatError, match="sync_batch_norm: .* not between 2 processes on cpu; set it to false"):
        syncs_batch_norms(SimClrModel, True, 2, CPU)


def test_converted_norms_keep_weights_names_and_embeddings(image_folder_of: dict[str, str]) -> None:
    model = SimClrModel.from_encoder(image_folder_of["resnet"], dim=8)
    before, pixels = model.state_dict(), torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    embeds = model.embed_images(pixels)
    synced = sync_batch_norms(model)
    assert synced is model and isinstance(model.norm, nn.SyncBatchNorm)
    assert not any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert list(before) == list(model.state_dict())
    assert torch.equal(model.embed_images(pixels), embeds)


def test_activations_of_timm_stay() -> None:
    network = timm.create_model("mobilenetv3_small_050", num_classes=0).eval()
    assert any(isinstance(module, BatchNormAct2d) for module in network.modules())
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    before = network(pixels)
    assert torch.equal(sync_batch_norms(network)(pixels), before)  # type: ignore[arg-type, operator]  # any module


def test_statistics_of_h_are_frozen_after_conversion_too() -> None:
    old = describe_old(Fingerprint.from_string("old"), dim=6)
    model = FctModel(FctConfig(old=old, embedding_dim=7))
    sync_batch_norms(model).train().progress = 0.5
    model.begin_batch({"old_embeds": torch.zeros(2, 6), "new_embeds": torch.zeros(2, 7)})
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert norms and not any(norm.training for norm in norms)


def test_the_trainer_converts_before_it_trains(
    image_folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has the batch of all, so that shared statistics change no weight."""
    rows = [dict(zip(("pixel_values", "second_pixel_values"), torch.randn(2, 3, 32, 32), strict=True)) for _ in range(4)]
    settings = StageRecipe(method="simclr", training={"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no"})
    trained = []
    for synced in (False, True):
        monkeypatch.setattr(trainer, "syncs_batch_norms", lambda *_, synced=synced: synced)
        torch.manual_seed(0)
        model = SimClrModel.from_encoder(image_folder_of["resnet"], dim=8)
        trained.append(trainer.train(model, Data(rows, default_collate), settings, 0, tmp_path / str(synced)))
    plain, shared = trained
    assert isinstance(plain.norm, nn.BatchNorm1d) and isinstance(shared.norm, nn.SyncBatchNorm)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(shared.state_dict()[name], tensor)
