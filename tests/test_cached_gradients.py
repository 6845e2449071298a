"""A batch embedded in mini-batches gives the loss and the gradient of the whole batch, whatever else is switched on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from conftest import unit
from schedule import METHOD_OF_EACH_KIND, mostly_nightly
from torch import Tensor
from torch.nn import functional as F

from xcompat import Fingerprint, XcompatError
from xcompat.core.files import read_json
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.models.base import CompatModel
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.outputs import CompatOutput
from xcompat.training.cached_gradients import backward_in_mini_batches, check_mini_batches
from xcompat.training.recipe import parse_recipe
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import train
from xcompat.training.training_sets import Data

OLD = describe_old(Fingerprint.from_string("old"), dim=8)
TEXTS = [f"{number} {thing}" for number in ("one", "two") for thing in ("red shoes", "dogs", "cats in the snow", "alpha")]
LABELS_B = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
LORA: dict[str, Any] = {"lora": {"rank": 2, "dropout": 0.0}, "prompts": 2}
IN_PARTS = [name for name, method in METHODS.items() if method.loss_of_embeddings and name != "rbt"]  # it has batch norms


def build(method: str, encoder: str, **options: Any) -> CompatModel:
    """Return a method in training mode, away from where its gradient is zero."""
    if method in ("xbt", "direct"):
        options = {"adapters": LORA, **options}
    if method == "projection":
        options = {"noise_std": 0.0, **options}
    if method == "geometry_residual":
        options = {"margin": 2.0, **options}  # which nothing holds
    torch.manual_seed(0)
    model = METHODS[method].from_encoder(encoder, old=OLD if METHODS[method].compares_with_old else None, **options)
    model.prepare(OldKnowledge(3, LABELS_B.numpy(), unit(8, 8, seed=1).numpy()), unit(8, 16, seed=2).numpy())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model.train()


def batch_for(model: CompatModel) -> dict[str, Tensor]:
    made = {"old_embeds": unit(8, 8, seed=1), "old_text_embeds": unit(8, 8, seed=4), "new_embeds": unit(8, 16, seed=2)}
    made |= {"labels": LABELS_B, "index": torch.arange(8)}
    wanted = {*model.columns, *model.columns_if_known}
    if "pixel_values" in model.columns:
        wanted.discard("new_embeds")  # it replaces photos
    if "input_ids" in wanted:
        height, width = model.processor.image_size
        made["pixel_values"] = torch.randn(8, 3, height, width, generator=torch.Generator().manual_seed(5))
        made |= model.processor.texts(TEXTS)
        wanted.add("attention_mask")
    return {name: column for name, column in made.items() if name in wanted}


def gradients(model: CompatModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and wanted
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert scale > 1e-4
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, name=name: f"{name}: {m}")


def in_one_graph(model: CompatModel, batch: dict[str, Tensor], size: int) -> Tensor:
    """Backpropagate what is to be computed: mini-batches that are all in memory, with their draws in the same order."""
    parts = [{name: column[start : start + size] for name, column in batch.items()} for start in range(0, 8, size)]
    outputs = [model(**part, return_loss=False) for part in parts]
    whole = CompatOutput(**{name: torch.cat([output[name] for output in outputs]) for name in outputs[0]})
    loss = model.loss(whole, batch)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("size", [1, 3, 4])  # of 8: the last one of size 3 is smaller
@pytest.mark.parametrize("method", mostly_nightly(IN_PARTS, METHOD_OF_EACH_KIND.__contains__))
def test_loss_and_gradient_are_those_of_the_plain_step(method: str, size: int, folder_of: dict[str, str]) -> None:
    model = build(method, folder_of["clip"])
    batch = batch_for(model)
    plain = model(**batch).loss
    plain.backward()
    wanted = gradients(model)
    loss = backward_in_mini_batches(Accelerator(cpu=True), model, batch, size)
    torch.testing.assert_close(loss, plain.detach())
    assert_equal_gradients(gradients(model), wanted)


def test_a_learned_scale_and_bias_get_their_gradient(folder_of: dict[str, str]) -> None:
    model = build("independent", folder_of["siglip"])
    batch = batch_for(model)
    model(**batch).loss.backward()
    wanted = gradients(model)
    backward_in_mini_batches(Accelerator(cpu=True), model, batch, 2)
    found = gradients(model)
    assert {"encoder.model.logit_scale", "encoder.model.logit_bias"} <= found.keys()
    assert_equal_gradients(found, wanted)


@pytest.mark.parametrize(
    ("method", "options"),
    [("xbt", {"adapters": {"lora": {"rank": 2, "dropout": 0.5}, "prompts": 2}}), ("projection", {"noise_std": 0.3})],
)
def test_dropout_and_noise_are_drawn_once(method: str, options: dict[str, Any], folder_of: dict[str, str]) -> None:
    model = build(method, folder_of["clip"], **options)
    batch, results = batch_for(model), []
    for seed, step in (
        (7, lambda: in_one_graph(model, batch, 2)),
        (7, lambda: backward_in_mini_batches(Accelerator(cpu=True), model, batch, 2)),
        (8, lambda: backward_in_mini_batches(Accelerator(cpu=True), model, batch, 2)),
    ):
        torch.manual_seed(seed)
        results.append((step(), gradients(model), torch.rand(3)))
    (wanted_loss, wanted, wanted_next), (loss, found, drawn_next), (other_loss, _, _) = results
    torch.testing.assert_close(loss, wanted_loss)
    assert_equal_gradients(found, wanted)
    assert torch.equal(drawn_next, wanted_next), "what is drawn after the step does not repeat what was drawn in it"
    assert float((other_loss - loss).abs()) > 1e-4, "the seed matters"


def test_no_graph_is_larger_than_a_mini_batch(folder_of: dict[str, str]) -> None:
    model = build("xbt", folder_of["clip"])
    seen = []
    model.projection.register_forward_hook(lambda _, given, __: seen.append((torch.is_grad_enabled(), len(given[0]))))
    backward_in_mini_batches(Accelerator(cpu=True), model, batch_for(model), 2)
    assert seen == [(False, 2)] * 8 + [(True, 2)] * 8  # images and texts of four mini-batches, twice


def trained(folder: Path, encoder: str, mini_batch_size: int | None, **training: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Train XBT on two batches, and return what its weights moved by, and the losses."""
    model = build("xbt", encoder)
    columns = batch_for(model)
    rows = [{name: column[row] for name, column in columns.items()} for row in range(8)] * 4
    training = {"per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, **training}
    part = StageRecipe(name="it", method="xbt", mini_batch_size=mini_batch_size, training=training)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    model = train(model, Data(rows, torch.utils.data.default_collate), part, 0, folder)  # type: ignore[arg-type]  # a list has rows
    after = dict(model.named_parameters())
    history = read_json(folder / "checkpoint-2" / "trainer_state.json")["log_history"]
    return {name: after[name].detach() - value for name, value in before.items()}, [e["loss"] for e in history if "loss" in e]


@pytest.mark.parametrize(
    "training",
    [{}, {"gradient_accumulation_steps": 2}, {"activation_checkpointing": True}],
    ids=["plain", "accumulated", "checkpointed"],
)
def test_training_gives_the_weights_of_whole_batches(training: dict[str, Any], folder_of: dict[str, str], tmp_path: Path) -> None:
    wanted, wanted_losses = trained(tmp_path / "whole", folder_of["clip"], None, **training)
    found, losses = trained(tmp_path / "parts", folder_of["clip"], 2, **training)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    for name, moved in wanted.items():
        torch.testing.assert_close(found[name], moved, atol=1e-4, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
    assert max(float(moved.abs().max()) for moved in wanted.values()) > 1e-2


def test_training_with_autocast_moves_the_weights_the_same_way(folder_of: dict[str, str], tmp_path: Path) -> None:
    wanted, _ = trained(tmp_path / "whole", folder_of["clip"], None, bf16=True)
    found, _ = trained(tmp_path / "parts", folder_of["clip"], 2, bf16=True)
    assert all(float(moved.abs().max()) > 0 for moved in found.values()), "the cast weights of a forward without graph have none"
    whole, parts = (torch.cat([moved[name].flatten() for name in wanted]) for moved in (wanted, found))
    assert float(F.cosine_similarity(whole, parts, dim=0)) > 0.99  # bfloat16 rounds the gradient of each mini-batch


def recipe(**changed: Any) -> Any:
    stage = {"method": "xbt", "mini_batch_size": 16, "training": {"per_device_train_batch_size": 64}}
    return parse_recipe({**stage, **changed}, "it", "r.yaml").stages[0]


def test_a_recipe_is_refused_where_mini_batches_cannot_be() -> None:
    assert recipe().mini_batch_size == 16
    with pytest.raises(XcompatError, match=r"mini_batch_size 24 does not divide .*per_device_train_batch_size 64"):
        recipe(mini_batch_size=24)
    for method in ("bct", "ridge", "fct", "simclr"):
        with pytest.raises(XcompatError, match=f"the loss of method {method} reads more than embeddings"):
            recipe(method=method)
    images = {"images": {"path": "photos"}}
    with pytest.raises(XcompatError, match="method independent on classes reads more than embeddings"):
        recipe(method="independent", data=images)
    assert recipe(method="query_map", data=images).mini_batch_size == 16
    with pytest.raises(XcompatError, match="mini_batch_size"):
        recipe(mini_batch_size=0)


def test_what_learns_something_else_in_parts_is_refused(folder_of: dict[str, str]) -> None:
    plain = SimpleNamespace(distributed_type=DistributedType.NO)
    model = build("rbt", folder_of["clip"])
    with pytest.raises(XcompatError, match=r"mini_batch_size: blocks\.\S+ normalises over the batch"):
        check_mini_batches(model, plain)  # type: ignore[arg-type]
    check_mini_batches(model.eval(), plain)  # type: ignore[arg-type]  # statistics that stay are constants
    model = build("xbt", folder_of["clip"])
    check_mini_batches(model, plain)  # type: ignore[arg-type]
    with pytest.raises(XcompatError, match="does not work with DeepSpeed"):
        check_mini_batches(model, SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))  # type: ignore[arg-type]
