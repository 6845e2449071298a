"""torch.compile: a method's training step is a single graph, with the loss of the plain step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm
from PIL import Image
from schedule import mostly_nightly
from test_distributed import join_group
from test_models import CLASSIFIED, TRAINED, TRIPLETS, batch_for, build
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters

from xcompat.models import CompatModel
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

FAST = {"bct", "fct", "query_map", "advbct"}

GATHERED = ["xbt", "advbct"]


def assert_same_loss(model: CompatModel, batch: dict[str, torch.Tensor]) -> None:
    torch._dynamo.reset()
    losses = []
    for step in (model, torch.compile(model, fullgraph=True, backend="eager")):
        torch.manual_seed(0)
        losses.append(step(**batch).loss)
    torch.testing.assert_close(losses[1], losses[0])


@pytest.mark.parametrize("method", mostly_nightly(TRAINED, FAST.__contains__))
def test_a_training_step_is_a_single_graph(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, folder_of).train()
    assert_same_loss(model, batch_for(model, images))


@pytest.mark.parametrize("options", TRIPLETS)
@pytest.mark.parametrize("method", mostly_nightly(CLASSIFIED, "bct".__eq__))
def test_a_step_with_triplets_is_a_single_graph(
    method: str, options: dict[str, Any], folder_of: dict[str, str], images: list[Image.Image]
) -> None:
    more = {"logit_weight": 0.0} if method == "nccl" else {}
    model = build(method, folder_of, **options, **more).train()
    assert_same_loss(model, batch_for(model, images))


@pytest.mark.parametrize("method", ["advbct", "fct"])
def test_progress_compiles_a_step_at_most_twice_more(method: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    model, counter = build(method, folder_of).train(), CompileCounter()
    batch, step = batch_for(model, images), torch.compile(model, fullgraph=True, backend=counter)
    torch._dynamo.reset()
    for number in range(12):
        model.train()
        model.progress = number / 12
        wanted = model(**batch).loss
        torch.testing.assert_close(step(**batch).loss, wanted)
    assert counter.frame_count <= 3


def test_a_drawn_bank_is_an_operator_of_one_graph(folder_of: dict[str, str], images: list[Image.Image]) -> None:
    torch._dynamo.reset()
    model = build("query_map", folder_of, bank_size=3).train()
    batch, counter = batch_for(model, images), CompileCounterWithBackend("aot_eager_decomp_partition")
    trajectories = []
    for step in (model, torch.compile(model, fullgraph=True, backend=counter)):
        torch.manual_seed(0)
        losses = []
        for _ in range(3):
            model.zero_grad()
            losses.append(step(**batch).loss)
            losses[-1].backward()
        trajectories.append((losses, [parameter.grad for parameter in model.parameters()], torch.rand(1)))
        assert len(set(losses)) == 3, "each step draws its own rows"
    torch.testing.assert_close(trajectories[1], trajectories[0])
    assert counter.frame_count == 1
    assert copy.deepcopy(model).drawn_bank is model.drawn_bank


PHI = {"name": "phi", "method": "projection"}
BY_RECIPE = {"bct": [{"method": "bct"}], "fct": [{"method": "fct"}], "xbt": [PHI, {"method": "xbt", "projection": "stage:phi"}]}


@pytest.mark.parametrize("method", mostly_nightly(list(BY_RECIPE), "bct".__eq__))
def test_a_recipe_compiles_its_training_steps_without_breaks(
    method: str,
    folder_of: dict[str, str],
    old_folder: str,
    image_folder_of: dict[str, str],
    pairs_folder: str,
    texts_file: str,
    tmp_path: Path,
) -> None:
    torch._dynamo.reset()
    counters.clear()
    on_captions = {"pairs": {"path": pairs_folder}, "texts": [{"path": texts_file}]}
    on_classes = {"images": {"path": pairs_folder, "label_column": "caption"}}
    raw = {
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
        "old": old_folder,
        "new": folder_of["clip"] if method == "xbt" else image_folder_of["resnet"],
        "data": on_captions if method == "xbt" else on_classes,
        "training": {"max_steps": 3, "per_device_train_batch_size": 4, "torch_compile": True, "torch_compile_backend": "eager"},
        "evaluation": None,
    }
    recipe = parse_recipe({**raw, "stages": BY_RECIPE[method]}, "demo", "demo.yaml")
    assert all(stage.training["torch_compile"] for stage in recipe.stages)
    run_recipe(recipe)
    assert not counters["graph_break"] and counters["frames"]["ok"] == counters["frames"]["total"]
    assert counters["stats"]["unique_graphs"] == {"bct": 1, "fct": 3, "xbt": 2}[method], "progress compiles fct twice more"


def compile_on_a_rank(rank: int, folders: dict[str, str], images: list[Image.Image], store: str) -> None:
    join_group(rank, store)
    for method in GATHERED:
        model = build(method, folders).train()
        assert_same_loss(model, batch_for(model, images))
    dist.destroy_process_group()


@pytest.mark.nightly
def test_a_step_that_gathers_batches_is_a_single_graph(
    folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    warm.spawn(compile_on_a_rank, (dict(folder_of), images, str(tmp_path)))
