"""What a GPU would run, without one: models on tensors that only know their device, and a GPU's branches on a CPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import ARCHITECTURES, refuses
from PIL import Image
from schedule import METHOD_OF_EACH_KIND, mostly_nightly_rows
from test_models import TRAINED, TRIPLETS, batch_for, build
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer, TrainerControl, TrainerState, training_args
from transformers.utils import import_utils

from xcompat import Fingerprint, evaluation
from xcompat.core.precision import default_autocast, resolve_autocast
from xcompat.data import load_pairs
from xcompat.embeddings.embed import decoding_options, embed_images, embed_texts
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts, EvaluatedModels, EvaluationOptions, evaluate
from xcompat.evaluation.scores import ExactRows
from xcompat.methods import nccl
from xcompat.models import kmeans
from xcompat.models.drawn_bank import DrawnBank
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.retrieval import Gallery, originals
from xcompat.retrieval.fallback import Fallback, OldQueries
from xcompat.retrieval.ingestion import ingest
from xcompat.retrieval.originals import load_originals
from xcompat.retrieval.queries import query_embeddings
from xcompat.stores.base import Space, Store
from xcompat.training import callbacks, trainer
from xcompat.training.callbacks import InterruptCallback
from xcompat.training.online import FROZEN, VIEW, OnlineEmbedder
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.trainer import training_arguments
from xcompat.training.training_sets import Data

GPU = torch.device("cuda", 0)
PROPERTIES: dict[Any, Any] = {Tensor.device.__get__: GPU, Tensor.is_cuda.__get__: True}
TAKE_BOTH = {Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_, Tensor.to}  # indices may be on the CPU


class OnGpu(Tensor):
    """A tensor on the GPU. Results of operations with it are such tensors too."""


class PretendedGpu(TorchFunctionMode):
    """Context in which ``device=GPU`` and ``to(GPU)`` make tensors that refuse NumPy and tensors on the CPU.

    ``copied`` has the shapes of the tensors that left the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[torch.Size] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, is_there = dict(kwargs or {}), bool(args) and isinstance(args[0], OnGpu)
        if is_there and func in PROPERTIES:
            return PROPERTIES[func]
        comes = GPU in [each for each in (*args, named.get("device")) if isinstance(each, torch.device)]
        args = tuple("cpu" if isinstance(each, torch.device) else each for each in args)
        named |= {"device": "cpu"} if named.get("device") is not None else {}
        if is_there and not comes and (func in (Tensor.cpu, Tensor.numpy) or (func is Tensor.to and "cpu" in args[1:])):
            if func is Tensor.numpy and not named.pop("force", False):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            self.copied.append(args[0].shape)
            return func(args[0].as_subclass(Tensor), *args[1:], **named)
        if not comes and func not in TAKE_BOTH:
            tensors = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor) and each.ndim]
            if len({isinstance(each, OnGpu) for each in tensors}) > 1:
                raise RuntimeError(f"{func} expects all tensors on the same device, but found cuda:0 and cpu")
        found = func(*args, **named)
        return found.as_subclass(OnGpu) if comes and isinstance(found, Tensor) else found


TEXTS = [f"{'word ' * (n % 9)}number {n}" for n in range(23)]


def on_gpu(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)


def move(module: nn.Module) -> None:
    """Put what a module's ``to`` would move on a GPU that is not there."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(on_gpu(parameter), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_gpu(buffer)


@pytest.mark.parametrize(
    ("method", "options"),
    mostly_nightly_rows(
        [*((name, {}) for name in TRAINED), *(("bct", each) for each in TRIPLETS), ("query_map", {"bank_size": 3})],
        lambda name, options: bool(options) or name in (*METHOD_OF_EACH_KIND, "rbt"),
    ),
)
def test_losses_stay_on_gpus(method: str, options: dict[str, Any], folder_of: dict[str, str], images: list[Image.Image]) -> None:
    """Such tensors have no numbers, so a step that waits for the GPU to read one fails."""
    model = build(method, folder_of, **options).train()
    batch = batch_for(model, images)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(model)
        loss = model(**{name: on_gpu(column) for name, column in batch.items()}).loss
    assert loss.device == GPU and loss.dtype == torch.float32


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "siglip2"])  # it reads sizes out of a tensor
def test_embeddings_are_computed_where_the_model_is(kind: str, folder_of: dict[str, str], images: list[Image.Image]) -> None:
    embedder = load_embedder(folder_of[kind])
    processor = embedder.processor
    batches = {"pixel_values": processor.images(images)}, processor.texts(TEXTS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(embedder.model)
        for batch in batches:
            embeds = embedder.embed({name: on_gpu(column) for name, column in batch.items()})
            assert embeds.device == GPU and embeds.dtype == torch.float32


def test_views_and_siglip2_run_where_the_model_is(folder_of: dict[str, str]) -> None:
    old = load_embedder(folder_of["clip"])
    view = torch.zeros(2, 3, 40, 40, dtype=torch.uint8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(old.model)
        columns = OnlineEmbedder({"old_embeds": old}).embed({VIEW: on_gpu(view), FROZEN: {}})
        assert columns.keys() == {"old_embeds"} and columns["old_embeds"].device == GPU
    encoder = load_embedder(folder_of["siglip2"]).model
    asked: dict[str, Tensor] = {}

    def get_image_features(**given: Tensor) -> SimpleNamespace:
        asked.update(given)
        return SimpleNamespace(pooler_output=given["pixel_values"].sum(dim=1))

    encoder.model.get_image_features = get_image_features
    with FakeTensorMode(allow_non_fake_inputs=True):
        encoder.image_features(torch.ones(2, 3, 32, 32, device=GPU))
    assert asked["pixel_values"].device == asked["pixel_attention_mask"].device == GPU
    assert asked["spatial_shapes"].device.type == "cpu"


def test_frozen_models_compute_in_bfloat16_on_cards_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        on_cpu, there, half = torch.ones(1), torch.ones(1, device=GPU), torch.ones(1, device=GPU, dtype=torch.float16)
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, able=supported: able)
        assert resolve_autocast("auto", there) == (torch.bfloat16 if supported else None)
        assert resolve_autocast("auto", on_cpu) is resolve_autocast("auto", half) is resolve_autocast(None, there) is None
        assert resolve_autocast(torch.float16, on_cpu) == torch.float16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    with default_autocast(None):
        assert resolve_autocast("auto", there) is None
    with default_autocast(torch.float16):
        assert resolve_autocast("auto", there) == torch.float16


def products() -> dict[str, Any]:
    """Return the precisions of float32 products and convolutions, also by torch's older flags, which its compiler reads."""
    backends: Any = torch.backends
    return {
        "CUDA": (backends.cuda.matmul.fp32_precision, backends.cuda.matmul.allow_tf32),
        "convolutions": (backends.cudnn.conv.fp32_precision, backends.cudnn.allow_tf32),
        "CPU": backends.mkldnn.matmul.fp32_precision,
        "all": (backends.fp32_precision, torch.get_float32_matmul_precision()),
    }


IN_TF32 = {"CUDA": ("tf32", True), "convolutions": ("tf32", True), "all": ("none", "high")}
IN_FLOAT32 = {"CUDA": ("ieee", False), "convolutions": ("ieee", False), "all": ("none", "highest")}


@pytest.mark.parametrize(("tf32", "expected"), [(None, IN_TF32), (True, IN_TF32), (False, IN_FLOAT32)])
def test_training_uses_tf32_on_cuda_alone(tf32: bool | None, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "train", lambda _: products())
    training = object.__new__(trainer.StageTrainer)
    training.args = SimpleNamespace(seed=0, tf32=tf32)
    before = products()
    assert training.train() == before | expected and products() == before


@pytest.mark.parametrize("training", [{"tf32": True}, {"tf32": False}, {"torch_compile": True}], ids=str)
def test_settings_of_training_leave_the_precision_of_other_steps(
    training: dict[str, Any], folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers and accelerate set it for the whole process, and frozen models embed after training."""

    def build_like_accelerate(self: Trainer, **_: object) -> None:
        built.append(products())
        torch.backends.cuda.matmul.allow_tf32 = True

    built: list[dict[str, Any]] = []
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args, "enable_tf32", import_utils.enable_tf32.__wrapped__)  # without its memory
    monkeypatch.setattr(Trainer, "__init__", build_like_accelerate)
    monkeypatch.setattr(trainer, "autocast_inside", lambda *_: None)
    monkeypatch.setattr(trainer, "send_constants_once", lambda *_: None)
    monkeypatch.setattr(trainer.StageTrainer, "accelerator", None, raising=False)
    before, stage = products(), StageRecipe(method="xbt", training={**training, "per_device_train_batch_size": 1})
    arguments = training_arguments(stage, 0, tmp_path)
    trainer.StageTrainer(build("xbt", folder_of), arguments, Data([{}], list), stage)  # type: ignore[arg-type]
    assert built == [before] and products() == before


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(("autocast", "exact"), [(None, True), (torch.bfloat16, False)])
def test_float32_embeddings_have_no_products_in_tf32(
    autocast: torch.dtype | None, exact: bool, folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = replace(load_embedder(folder_of["clip"]), autocast=autocast)
    monkeypatch.setattr(embedder.model, "embed", lambda *_: seen.append(products()) or torch.ones(1))
    seen: list[dict[str, Any]] = []
    before = products()
    embedder.embed({})
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(embedder.model)
        embedder.embed({})
    assert seen == [before, before | IN_FLOAT32 if exact else before] and products() == before


class Elsewhere(Embedder):
    """Says that it is on a GPU, computes on the CPU, and takes batches from pinned memory alone."""

    pinned: ClassVar[set[int]] = set()

    @property
    def device(self) -> torch.device:
        return GPU

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        assert {id(tensor) for tensor in batch.values()} <= self.pinned
        return plain(self).embed(batch)


def plain(embedder: Embedder) -> Embedder:
    return Embedder(**{field.name: getattr(embedder, field.name) for field in fields(Embedder)})


@pytest.fixture
def elsewhere(folder_of: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    kept: list[Tensor] = []  # so that no other tensor gets the same id

    def pin(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        Elsewhere.pinned.add(id(tensor))
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Elsewhere, "pinned", set())
    return Elsewhere(**vars(load_embedder(folder_of["clip"])))


def test_caches_of_a_gpu_hold_what_a_cpu_s_hold(elsewhere: Elsewhere, pairs_folder: str, tmp_path: Path) -> None:
    here, pairs = plain(elsewhere), load_pairs(pairs_folder)
    for rows in (5, 64):
        found = embed_texts(elsewhere, TEXTS, tmp_path / f"texts-{rows}", "digest", shard_rows=rows)[:]
        np.testing.assert_allclose(found, embed_texts(here, TEXTS, tmp_path / f"plain-{rows}", "digest")[:], atol=1e-3)
        found = embed_images(elsewhere, pairs, tmp_path / f"images-{rows}", "digest", shard_rows=rows)[:]
        np.testing.assert_allclose(found, embed_images(here, pairs, tmp_path / f"seen-{rows}", "digest")[:], atol=1e-3)


@pytest.mark.parametrize("batches", [1, 2, 16])
def test_galleries_of_a_gpu_hold_what_a_cpu_s_hold(
    batches: int, elsewhere: Elsewhere, pairs_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "images_per_batch", lambda *_: 3)
    monkeypatch.setattr(originals, "IMAGES_OF_A_GPU", 3 * batches)
    images = load_originals(pairs_folder)
    made = []
    for number, embedder in enumerate((elsewhere, plain(elsewhere))):
        gallery = Gallery.create(tmp_path / str(number), embedder)
        assert ingest(gallery, images, embedder).added == len(images.ids) > 9
        made.append([(items.ids, items.metadata, items.embeds[0]) for _, items in gallery.segments[0].blocks(999)])
    for (ids, metadata, embeds), (same_ids, same_metadata, same) in zip(*made, strict=True):
        assert (ids, metadata) == (same_ids, same_metadata)
        np.testing.assert_allclose(embeds, same, atol=1e-6)


@pytest.mark.parametrize("kind", ["a text", "an image"])
def test_queries_run_where_the_model_is(kind: str, folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    images[0].save(tmp_path / "a.png")
    model = build("xbt", folder_of)
    embedder = Embedder(model, model.processor, *model.lineage.stores)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(model)
        assert query_embeddings(embedder, str(tmp_path / "a.png") if kind == "an image" else "a dog").device == GPU


def test_embeddings_on_a_gpu_are_taken_wherever_arrays_are(old: Embedder, tmp_path: Path) -> None:
    clip, near = Fingerprint.from_string("clip"), torch.eye(4)[:3]
    own = Space("vector", None, "float32", clip)
    store = SimpleNamespace(uri="", metric="cosine", _padded_queries=lambda queries_QD, _: queries_QD)
    with PretendedGpu():
        far, gallery = near.to(GPU), Gallery.create(tmp_path / "gallery", clip, dim=4)
        gallery.add(far, ["a", "b", "c"], side_info_NS=far)
        gallery.commit()
        hits = gallery.search(far, clip, 2, old_queries=OldQueries(clip, far))
        fallen = Fallback(old).old_queries(clip, gallery.manifest, far, lambda _: pytest.fail("nothing is unsure"))
        viewed = Store.queries(store, Store._to_query_space(store, far, clip, own), own)
        assert np.array_equal(viewed, near) and np.array_equal(Store.queries(store, far[0], own), near[:1])
    assert hits == gallery.search(near, clip, 2) and np.array_equal(gallery.segments[0].side_info(np.arange(3)), near)
    assert fallen.shape == (3, old.dim) and np.isnan(fallen).all()


def test_items_that_nobody_read_are_left_out_on_a_gpu_too() -> None:
    clip, ids = Fingerprint.from_string("clip"), ["a", "b", "c"]
    with PretendedGpu():
        far = torch.tensor([[1.0, 0.0], [np.nan, np.nan], [0.0, 1.0]]).to(GPU)
        pairs = EmbeddedPairs("clip", clip, far, far[[0, 2]], ids, ["a", "b"])
        images = EmbeddedImages("clip", clip, far, far, ids, ids, ids, ids)
        for model, left in ((pairs, {"images": 2, "texts": 1}), (images, {"queries": 2, "images": 2})):
            kept = EvaluatedModels(model, model).without_unreadable().old.matrices()
            assert {kind: len(each) for kind, each in kept.items()} == left
            assert all(torch.as_tensor(each).isfinite().all() for each in kept.values())


def test_a_shard_is_tokenised_while_a_gpu_computes_another(elsewhere: Elsewhere, tmp_path: Path) -> None:
    embed, processor, ahead = elsewhere.embed, elsewhere.processor, threading.Event()
    tokenize = processor.tokenize

    def tokenize_and_tell(texts: list[str]) -> list[list[int]]:
        if texts[0] == TEXTS[5]:
            ahead.set()
        return tokenize(texts)

    def embed_late(batch: dict[str, Tensor]) -> Tensor:
        assert ahead.wait(60), "the second shard waits for the first to be embedded"
        return embed(batch)

    elsewhere.embed, processor.tokenize = embed_late, tokenize_and_tell  # type: ignore[method-assign]
    assert len(embed_texts(elsewhere, TEXTS, tmp_path / "c", "digest", shard_rows=5)) == len(TEXTS)


def test_a_pretended_gpu_refuses_what_a_gpu_refuses() -> None:
    with PretendedGpu() as gpu:
        there = torch.ones(2, device=GPU)
        assert (there.device, (2 * there).sum().device, there[torch.tensor([0])].is_cuda) == (GPU, GPU, True)
        for refused in (lambda: there + torch.ones(2), lambda: torch.cat([torch.ones(2), there]), there.numpy):
            with pytest.raises((RuntimeError, TypeError), match="cuda:0"):
                refused()
        assert not gpu.copied and there.cpu().device.type == "cpu" and gpu.copied == [(2,)]


def random_rows(rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng((rows, dim)).normal(size=(rows, dim)).astype(np.float32)


def embedded_images(dim: int, metric: Any = "cosine") -> EmbeddedImages:
    labels = [*(number % 9 for number in range(28)), "alone", "also"], [number % 9 for number in range(20, 90)]
    made = "images", Fingerprint.from_string(f"{dim}"), random_rows(30, dim), random_rows(70, dim)
    return EmbeddedImages(*made, list(range(30)), list(range(20, 90)), *labels, metric=metric)


def embedded_pairs(dim: int) -> EmbeddedPairs:
    made = "pairs", Fingerprint.from_string(f"{dim}"), random_rows(20, dim), random_rows(40, dim)
    return EmbeddedPairs(*made, list(range(20)), [number % 20 for number in range(40)])


def embedded_texts(dim: int) -> EmbeddedTexts:
    made = "texts", Fingerprint.from_string(f"{dim}"), random_rows(12, dim), random_rows(30, dim)
    qrels = {f"q{row}": {f"t{row}": 1.0, f"t{row + 5}": 2.0, f"t{row + 9}": 1.0} for row in range(12)}
    return EmbeddedTexts(*made, list(qrels), [f"t{row}" for row in range(30)], qrels)


CASES: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
    "images": (embedded_images, {"fars": (0.1, 0.01), "fpirs": (0.5,), "threshold": 0.1, "rerank": 5}),
    "images by L2": (partial(embedded_images, metric="l2"), {"fars": (0.1,), "fpirs": (0.5,)}),
    "pairs": (embedded_pairs, {"threshold": 0.1, "rerank": 5}),
    "texts": (embedded_texts, {"threshold": 0.1, "rerank": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_evaluations_on_a_gpu_are_those_of_a_cpu(case: str) -> None:
    embed, given = CASES[case]
    models = EvaluatedModels(embed(16), embed(16), embed(24) if "rerank" in given else None)
    options = EvaluationOptions(ks=(1, 2), n_resamples=5, chunk_size=8, **given)
    wanted = evaluate(models, options)
    with PretendedGpu() as gpu:
        assert repr(evaluate(models, replace(options, device=GPU))) == repr(wanted)
    assert gpu.copied and not {16, 20, 24} & {shape[-1] for shape in gpu.copied if len(shape) > 1}, "no embeddings leave it"


def test_ranks_and_cka_on_a_gpu() -> None:
    images = embedded_images(16)
    rows, labels = (images.query_embeds_QD, images.gallery_embeds_GD), (images.query_labels, images.gallery_labels)
    measures: list[Callable[..., object]] = [evaluation.recall_at_k, evaluation.cmc, evaluation.mean_average_precision]
    wanted = [measure(*rows, *labels) for measure in measures]
    with PretendedGpu() as gpu:
        there = [torch.from_numpy(part).to(GPU) for part in rows]
        assert [measure(*there, *labels) for measure in measures] == wanted
    assert gpu.copied and all(len(shape) == 1 for shape in gpu.copied), "only ranks and scores leave it"
    x_ND, y_Ne = random_rows(9000, 16), random_rows(9000, 24)
    y_Ne[:, :8] += x_ND[:, :8]
    linear_cka = evaluation.linear_cka
    wanted = linear_cka(x_ND, y_Ne)
    with PretendedGpu() as gpu:
        there = torch.from_numpy(x_ND).to(GPU)
        for found in (
            linear_cka(x_ND, y_Ne, GPU),
            linear_cka(there, y_Ne),
            linear_cka(there, there.clone()),
        ):
            assert found == pytest.approx(1 if found > 0.99 else wanted, abs=1e-12)
        assert gpu.copied and all(shape in {(16, 16), (24, 24), (24, 16)} for shape in gpu.copied), "only products leave it"
        for wrong in (there[0], there[:0], there / 0):
            refuses("", linear_cka, wrong, y_Ne)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_on_a_gpu_have_the_bits_of_a_cpu(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (np.random.default_rng(0).normal(size=(50, 33)) * np.logspace(-3, 3, 50)[:, None]).astype(dtype)
    rows[7] = 0
    here = ExactRows(rows, "rows", torch.device("cpu"))
    with PretendedGpu():
        there = ExactRows(rows, "rows", GPU)
        for part in (slice(3, 40), np.array([7, 49, 0])):
            block = there.block(part)
            assert block.device == GPU and torch.equal(block.cpu(), here.block(part))
        monkeypatch.setattr(evaluation.scores, "_MOST_BYTES", 0)  # then blocks are made on the CPU
        assert torch.equal(ExactRows(rows, "rows", GPU).block(slice(3, 40)).cpu(), here.block(slice(3, 40)))
        monkeypatch.undo()
        rows[3, 0] = np.nan
        refuses("NaN or infinite numbers in rows", ExactRows, rows, "rows", GPU)


def test_entropies_and_draws_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    old = OldKnowledge(5, np.arange(50) % 5, random_rows(50, 8))
    wanted = nccl.class_entropies(old)
    monkeypatch.setattr(nccl, "device", lambda: GPU)
    with PretendedGpu() as gpu:
        found = nccl.class_entropies(old)
    assert np.array_equal(found[0], wanted[0]) and gpu.copied == [(50,), (50,)]
    bank, pinned = DrawnBank(random_rows(4, 8), 3), list[torch.Size]()

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.shape)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    with PretendedGpu():
        bank_Kd, rows_K = bank.read_sample(GPU)
        assert bank_Kd.device == rows_K.device == GPU and pinned == [bank_Kd.shape, rows_K.shape] == [(3, 8), (3,)]


@pytest.mark.parametrize("case", ["started", "drawn", "a centroid without rows"])
def test_centroids_found_on_a_gpu_are_those_of_a_cpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_ND = random_rows(300, 8).astype(np.float64) + 3 * np.repeat(random_rows(6, 8), 50, axis=0)
    start_CD = None if case == "drawn" else rows_ND[::30].copy()
    if start_CD is not None and case != "started":
        start_CD[3] = 1e3
    wanted = kmeans.find_centroids(rows_ND, 10, 5, start_CD)
    monkeypatch.setattr(kmeans, "device", lambda: GPU)
    with PretendedGpu() as gpu:
        found = kmeans.find_centroids(rows_ND, 10, 5, start_CD)
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    assert set(gpu.copied) == {(10, 8)}, "only centroids leave it"


def test_a_gpu_is_fed_by_its_share_of_cores_without_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_cpu = training_arguments(StageRecipe(method="xbt"), 0, tmp_path)
    assert on_cpu.use_cpu and not on_cpu.accelerator_config.non_blocking
    monkeypatch.setattr(trainer, "process_state", lambda: SimpleNamespace(device=GPU))
    there = training_arguments(StageRecipe(method="xbt", training={"use_cpu": True}), 0, tmp_path)
    assert there.accelerator_config.non_blocking and not there.accelerator_config.dispatch_batches
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert decoding_options(GPU) == {"threads": 3, "ahead": True}


def test_processes_ask_each_other_whether_to_stop_where_the_loss_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0.0, 1.0])
    monkeypatch.setattr(callbacks, "is_distributed", lambda: True)
    monkeypatch.setattr(callbacks, "mean_over_ranks", lambda mine: torch.tensor(next(answers)))
    callback, args = InterruptCallback(), SimpleNamespace(device="cpu")
    stopped = []
    for step in range(1, 7):
        control = TrainerControl(should_log=step % 3 == 0)
        callback.on_step_end(args, TrainerState(global_step=step), control)
        stopped.append(control.should_training_stop)
    assert stopped == [False] * 5 + [True], "asked after the third step and the sixth, and told so after the sixth"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_questions_is_not_lost(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    def ask(mine: Tensor) -> Tensor:
        if not sent:
            sent.append(number)
            signal.raise_signal(number)
        return mine

    sent: list[signal.Signals] = []
    monkeypatch.setattr(callbacks, "is_distributed", lambda: True)
    monkeypatch.setattr(callbacks, "mean_over_ranks", ask)
    callback, args, control = InterruptCallback(), SimpleNamespace(device="cpu"), TrainerControl(should_log=True)
    before = signal.getsignal(number)
    callback.on_train_begin(args, TrainerState(), control)
    try:
        callback.on_step_end(args, TrainerState(global_step=1), control)
        assert not control.should_training_stop, "the others were told that nobody had asked"
        callback.on_step_end(args, TrainerState(global_step=2), control)
        assert control.should_training_stop and callback.interrupted
    finally:
        callback.on_train_end(args, TrainerState(), control)
    assert signal.getsignal(number) is before
