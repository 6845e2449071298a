"""A training under way: batches in parts and over processes, shared batch norms, checkpoints, and what a bar says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
import warm
from accelerate import Accelerator
from accelerate.utils import DistributedType
from conftest import recipe_of, refuses, unit
from rich.console import Console
from schedule import METHOD_OF_EACH_KIND, mostly_nightly
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from xcompat import CompatModel, FctModel, Fingerprint, IndependentModel, SimClrModel, XcompatError
from xcompat.core import progress
from xcompat.core.checksums import CHECKSUMS
from xcompat.core.files import read_json
from xcompat.core.progress import Waiting, advance_bar, progress_bar, results_on_stdout
from xcompat.losses import clip_contrastive_loss, nt_xent_loss, siglip_loss
from xcompat.methods import METHODS
from xcompat.methods.fct import FctConfig
from xcompat.models import describe_old
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.outputs import CompatOutput
from xcompat.training import trainer
from xcompat.training.cached_gradients import backward_in_mini_batches, check_mini_batches
from xcompat.training.callbacks import ProgressCallback
from xcompat.training.checkpoints import STATE, CheckpointCallback, last_complete_checkpoint
from xcompat.training.sharding import sync_batch_norms, syncs_batch_norms
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


def test_mini_batches_have_small_graphs_and_learn_scales(folder_of: dict[str, str]) -> None:
    model = build("independent", folder_of["siglip"])
    batch = batch_for(model)
    model(**batch).loss.backward()
    wanted = gradients(model)
    backward_in_mini_batches(Accelerator(cpu=True), model, batch, 2)
    found = gradients(model)
    assert {"encoder.model.logit_scale", "encoder.model.logit_bias"} <= found.keys()
    assert_equal_gradients(found, wanted)
    model = build("xbt", folder_of["clip"])
    seen = []
    model.projection.register_forward_hook(lambda _, given, __: seen.append((torch.is_grad_enabled(), len(given[0]))))
    backward_in_mini_batches(Accelerator(cpu=True), model, batch_for(model), 2)
    assert seen == [(False, 2)] * 8 + [(True, 2)] * 8  # images and texts of four mini-batches, twice


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


def trained(folder: Path, encoder: str, mini_batch_size: int | None, **training: Any) -> tuple[dict[str, Tensor], list[float]]:
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
    return recipe_of(stage, **changed).stages[0]


def test_mini_batches_are_refused_where_losses_read_more(folder_of: dict[str, str]) -> None:
    assert recipe().mini_batch_size == 16
    refuses(r"mini_batch_size 24 does not divide .*per_device_train_batch_size 64", recipe, mini_batch_size=24)
    for method in ("bct", "ridge", "fct", "simclr"):
        refuses(f"the loss of method {method} reads more than embeddings", recipe, method=method)
    images = {"images": {"path": "photos"}}
    refuses("method independent on classes reads more than embeddings", recipe, method="independent", data=images)
    assert recipe(method="query_map", data=images).mini_batch_size == 16
    refuses("mini_batch_size", recipe, mini_batch_size=0)
    plain = SimpleNamespace(distributed_type=DistributedType.NO)
    model = build("rbt", folder_of["clip"])
    refuses(r"mini_batch_size: blocks\.\S+ normalises over the batch", check_mini_batches, model, plain)
    check_mini_batches(model.eval(), plain)  # type: ignore[arg-type]  # statistics that stay are constants
    model = build("xbt", folder_of["clip"])
    check_mini_batches(model, plain)  # type: ignore[arg-type]
    with pytest.raises(XcompatError, match="does not work with DeepSpeed"):
        check_mini_batches(model, SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))  # type: ignore[arg-type]


def naive_clip_loss(
    queries: Tensor, passages: Tensor, scale: float, items: Sequence[int], mined: Sequence[Tensor] = (), mined_items: Any = ()
) -> float:
    """Sum over every query and every passage, one by one, what is no negative left out."""
    total = 0.0
    for row in range(len(queries)):
        rivals = [row, *(other for other in range(len(queries)) if items[other] != items[row])]
        there = [float(scale * queries[row] @ passages[other]) for other in rivals]
        there += [float(scale * queries[row] @ mined[other]) for other in range(len(mined)) if mined_items[other] != items[row]]
        back = [float(scale * passages[row] @ queries[other]) for other in rivals]
        total -= sum(float(torch.tensor(logits, dtype=torch.float64).log_softmax(0)[0]) for logits in (there, back)) / 2
    return total / len(queries)


def naive_siglip_loss(a: torch.Tensor, b: torch.Tensor, scale: float, bias: float) -> float:
    total = 0.0
    for i in range(len(a)):
        for j in range(len(b)):
            sign = 1 if i == j else -1
            total += math.log1p(math.exp(-sign * (scale * float(a[i] @ b[j]) + bias)))
    return total / len(a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("scale", [1.0, 1 / 0.07, 100.0])
def test_losses_equal_the_double_loop(dtype: torch.dtype, batch: int, scale: float) -> None:
    a = F.normalize(torch.randn(batch, 5, dtype=torch.float64), dim=-1)
    b = F.normalize(a + torch.randn(batch, 5, dtype=torch.float64), dim=-1)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    assert float(clip_contrastive_loss(a.to(dtype), b.to(dtype), scale)) == pytest.approx(
        naive_clip_loss(a, b, scale, range(batch)), rel=tolerance, abs=tolerance
    )
    assert float(siglip_loss(a.to(dtype), b.to(dtype), scale, -10.0)) == pytest.approx(
        naive_siglip_loss(a, b, scale, -10.0), rel=tolerance, abs=tolerance
    )


def test_loss_is_not_rounded_and_needs_equal_batches() -> None:
    a, b = (F.normalize(torch.randn(9, 4), dim=-1) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        inside = clip_contrastive_loss(a, b, 14.0)
    torch.testing.assert_close(inside, clip_contrastive_loss(a, b, 14.0), atol=0, rtol=0)
    with pytest.raises(ValueError, match="must have the same shape"):
        clip_contrastive_loss(a, b[:4], 1.0)


def train_on_four(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for name, loss_of in LOSSES.items():
        a, b, weight = pairs_of_eight()
        rows = slice(4 * rank, 4 * rank + 4)
        loss = loss_of(F.normalize(a[rows] @ weight, dim=-1), F.normalize(b[rows] @ weight, dim=-1))
        loss.backward()
        gradient = weight.grad / 2  # what data-parallel training averages
        dist.all_reduce(gradient)
        results[name] = (loss.detach(), gradient)
    torch.save(results, f"{out}.{rank}")
    dist.destroy_process_group()


def pairs_of_eight() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b, weight = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return a, b, weight[:6, :5].clone().requires_grad_()


LOSSES = {
    "clip": lambda a, b: clip_contrastive_loss(a, b, 14.0),
    "siglip": lambda a, b: siglip_loss(a, b, 10.0, -5.0),
    "nt_xent": lambda a, b: nt_xent_loss(a, b, 0.3),
    "crops": lambda a, b: nt_xent_loss(a, b, 0.3, [F.normalize(a + 2 * b, dim=-1), F.normalize(a - b, dim=-1)]),
}


def test_two_ranks_of_four_equal_one_of_eight(tmp_path: Path) -> None:
    warm.spawn(train_on_four, (str(tmp_path / "store"), str(tmp_path / "out")))
    for name, loss_of in LOSSES.items():
        a, b, weight = pairs_of_eight()
        loss = loss_of(F.normalize(a @ weight, dim=-1), F.normalize(b @ weight, dim=-1))
        loss.backward()
        for rank in range(2):
            its_loss, its_gradient = torch.load(tmp_path / f"out.{rank}", weights_only=True)[name]
            torch.testing.assert_close(its_loss, loss.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(its_gradient, weight.grad, rtol=1e-10, atol=1e-12)


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
    refuses("sync_batch_norm: .* not between 2 processes on cpu; set it to false", syncs_batch_norms, SimClrModel, True, 2, CPU)


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
    network = timm.create_model("mobilenetv3_small_050", num_classes=0).eval()
    assert any(isinstance(module, BatchNormAct2d) for module in network.modules())
    before = network(pixels)
    assert torch.equal(sync_batch_norms(network)(pixels), before)  # type: ignore[arg-type, operator]  # any module
    old = describe_old(Fingerprint.from_string("old"), dim=6)
    model = FctModel(FctConfig(old=old, embedding_dim=7))
    sync_batch_norms(model).train().progress = 0.5
    model.begin_batch({"old_embeds": torch.zeros(2, 6), "new_embeds": torch.zeros(2, 7)})
    norms = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert norms and not any(norm.training for norm in norms)


def test_trainer_shares_batch_norms(image_folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


FILES = {"model.safetensors": b"weights", "optimizer.pt": b"moments", "inner/rng_state.pth": b"state", STATE: b'{"step": 2}'}


def save_checkpoint(folder: Path, step: int, recorded: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in FILES.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    if recorded:
        CheckpointCallback().on_save(SimpleNamespace(output_dir=folder), SimpleNamespace(global_step=step), None)  # type: ignore[arg-type]
    return checkpoint


@pytest.mark.parametrize("name", [*FILES, CHECKSUMS])
@pytest.mark.parametrize("harm", ["flipped", "cut short", "emptied", "gone"])
def test_damaged_checkpoints_are_skipped(name: str, harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, newest = save_checkpoint(tmp_path, 9), save_checkpoint(tmp_path, 10)
    assert last_complete_checkpoint(tmp_path) == newest
    file = newest / name
    content = file.read_bytes()
    if harm == "gone":
        file.unlink()
    else:
        changed = {"flipped": content[:-2] + bytes([content[-2] ^ 1]) + content[-1:], "cut short": content[:-1], "emptied": b""}
        file.write_bytes(changed[harm])
    same = name == CHECKSUMS and harm in ("gone", "cut short")  # its last byte is a line's end
    assert last_complete_checkpoint(tmp_path) == (newest if same else before)
    assert same or f"skipping{newest}:" in "".join(capsys.readouterr().out.split())  # lines end anywhere


def test_other_files_do_not_damage_a_checkpoint(tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-mine").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    assert save_checkpoint(tmp_path, 3, recorded=False) == last_complete_checkpoint(tmp_path)
    checkpoint = save_checkpoint(tmp_path, 4)
    left = checkpoint / f".{CHECKSUMS}.bhly0w8w.xcompat-partial"
    left.mkdir()
    (left / CHECKSUMS).write_text("{")
    for name in (".tmpmg4Zbu", ".tmp", "mine.tmp"):
        (checkpoint / name).write_text("half a model")
    assert last_complete_checkpoint(tmp_path) == checkpoint
    assert [name for name in (".tmpmg4Zbu", ".tmp", "mine.tmp") if (checkpoint / name).exists()] == [".tmp", "mine.tmp"]
    assert not left.exists()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: made.now)
    return made


def test_training_says_how_it_waited_and_learned(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(train_batch_size=8, world_size=2, gradient_accumulation_steps=1)
    state = SimpleNamespace(global_step=0, max_steps=2, log_history=[{"loss": 0.5}])
    callback, control = ProgressCallback("xbt"), SimpleNamespace()

    def tell(event: str, seconds: float) -> None:
        clock.now += seconds
        getattr(callback, event)(args, state, control)

    def shown() -> Any:
        return callback._bar.tasks[0].fields["rate"]

    tell("on_train_begin", 0)
    callback._bar.get_time = lambda: clock.now
    callback._bar.tasks[0]._get_time = lambda: clock.now
    callback._bar.tasks[0].start_time = clock.now
    tell("on_step_begin", 1)
    state.global_step = 1
    tell("on_step_end", 3)
    assert shown() == "loss 0.500, 4 samples/s, 25% waiting"
    tell("on_save", 5)
    tell("on_step_begin", 1)
    state.global_step = 2
    tell("on_step_end", 6)
    assert shown() == "loss 0.500, 2 samples/s, 12% waiting", "writing a checkpoint is no waiting for data"
    state.log_history = [{"loss": 4.6}, {"grad_norm": 1.0}, {"loss": 0.5}]
    callback.on_train_end(args, state, control)
    assert capsys.readouterr().out.endswith("  xbt: 2 of 2 steps, loss 4.600 at the start, 0.500 at the end\n")


def test_progress_lines_without_tty(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def slow() -> Iterator[int]:
        for row in range(10):
            clock.now += 1
            yield row

    bar, waiting = progress_bar(), Waiting()
    bar.get_time = lambda: clock.now
    with bar:
        task = bar.add_task("embedding images with /models/a [long] name of a folder/run-7", total=100, unit="images")
        bar.tasks[0]._get_time = lambda: clock.now
        bar.tasks[0].start_time = clock.now
        for _ in waiting.track(slow()):
            clock.now += 3
            advance_bar(bar, task, 10, waiting)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].split(",")[0] for line in said] == [" 30 of 100 (30 %)", " 60 of 100 (60 %)", " 90 of 100 (90 %)"]
    assert all(line.startswith("  embedding images wi … e of a folder/run-7: ") for line in said)
    assert said[0].endswith(", 2.5 images/s, 25% waiting, 0:28 left")


def test_a_bar_fits_80_columns_and_invents_no_rate(clock: SimpleNamespace) -> None:
    def drawn() -> str:
        with (narrow := Console(width=80)).capture() as drawing:
            narrow.print(bar.make_tasks_table(bar.tasks))
        [line] = drawing.get().splitlines()
        return line

    bar = progress_bar()
    task = bar.add_task("embedding images with /models/a long name of a folder/run-7", total=1_000_000, unit="images")
    bar.tasks[0]._get_time = lambda: clock.now
    bar.tasks[0].start_time = clock.now
    clock.now += 100
    assert "/s" not in drawn() and "left" not in drawn()
    advance_bar(bar, task, 20, Waiting())
    assert "20/1000000 0.2 images/s, 0% waiting 1388:51:40 left" in drawn() and drawn().rstrip().endswith("1388:51:40 left")
    continued = bar.add_task("embedding images", total=1_000_000, completed=999_000, unit="images")
    bar.tasks[1]._get_time = bar.tasks[0]._get_time
    bar.tasks[1].start_time = clock.now
    clock.now += 100
    advance_bar(bar, continued, 500, Waiting())
    assert bar.tasks[1].fields["rate"].startswith("5 images/s"), "earlier runs do not count"


def test_results_alone_are_on_stdout_and_not_wrapped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(progress.console, "_width", None)
    with results_on_stdout():
        progress.console.print("for people")
        progress.notice("of what was left out")
        print("results")  # noqa: T201
    progress.console.print(long := "for people again" * 100)
    assert capsys.readouterr() == (f"results\n{long}\n", "for people\n! of what was left out\n")
