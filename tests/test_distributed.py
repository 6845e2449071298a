"""Two processes train on what one would, to the same losses; a compiled training step is a single graph with the plain loss."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm
import yaml
from conftest import raw_recipe, recipe_of, write_photos
from data_layouts.images import write_classes
from PIL import Image
from safetensors.torch import load_file
from schedule import mostly_nightly, mostly_nightly_rows
from test_loading import png, write_shard
from test_models import CLASSIFIED, TRAINED, TRIPLETS, batch_for, build
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from xcompat import Fingerprint
from xcompat.data import load_labelled
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.old_knowledge import OldKnowledge
from xcompat.training import trainer
from xcompat.training.checkpoints import last_complete_checkpoint
from xcompat.training.run import run_recipe
from xcompat.training.stage_recipe import StageRecipe
from xcompat.training.training_sets import labelled_data

PAIRS = 28  # fills three batches of 8 and a half
LORA = {"adapters": {"lora": {"rank": 2, "dropout": 0}, "prompts": 2}}
LATER = ("phi_images", "shards", "direct", "texts_parts", "scale", "scale_parts")
"""Stages like others, which a second run trains at night."""
SAME = [("runs", name) for name in ("phi", "pair", "texts", "parts")]
SAME += [("later_runs", name) for name in ("phi_images", "shards", "direct", "scale_parts")]
PARTS = [("runs", "pair", "parts"), ("later_runs", "texts", "texts_parts"), ("later_runs", "scale", "scale_parts")]
STREAMS = {"stream": [8, 8, 8, 8], "stream_uneven": [5, 9, 6], "stream_one_shard": [32]}

# What the command line runs, without drawings, with small shards of the caches, and with a record of every batch of a model.
WRAPPER = """
import hashlib, json, os
from pathlib import Path
import torch
import xcompat.embeddings.cache_writer as cache_writer
import xcompat.embeddings.embed as embedding
import xcompat.report.report as report
from xcompat.data import PairCollator
from xcompat.cli import main
from xcompat.core.distributed import is_distributed

report.draw_plots, report.project = lambda *_: {}, lambda _: []
embedding.embed_texts.__kwdefaults__["shard_rows"] = 16
embedding.embed_images.__kwdefaults__["shard_rows"] = 8
collate, barrier = PairCollator.__call__, cache_writer.barrier
rank, ranks, folder = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), Path(os.environ["SEEN"])

def collate_and_record(self, items):
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps([item["caption"] for item in items]) + "\\n")
    with (folder / f"random-{rank}").open("a") as file:
        file.write(hashlib.sha256(torch.get_rng_state().numpy()).hexdigest() + "\\n")
    return collate(self, items)

def barrier_that_waits():
    assert is_distributed() == (ranks > 1)
    barrier()

cache_writer.barrier = barrier_that_waits
PairCollator.__call__ = collate_and_record
main()
"""


def write_shards(folder: Path, lengths: list[int]) -> str:
    folder.mkdir()
    numbers = itertools.count()
    for shard, length in enumerate(lengths):
        samples = {}
        for number in itertools.islice(numbers, length):
            samples[f"{number:04d}"] = {"png": png(number, size=(40, 40)), "txt": f"cat {number}".encode()}
        write_shard(folder / f"{shard:02d}.tar", samples)
    return str(folder)


def write_labelled(folder: Path) -> str:
    write_classes(folder, {"train": 8})
    return str(folder / "train")


def recipe(folder: Path, old: str, new: str) -> dict[str, Any]:
    (folder / "texts.txt").write_text("\n".join(f"dog {number}" for number in range(60)) + "\n")
    pair: dict[str, Any] = {"method": "xbt", "projection": "stage:phi", "options": LORA, "evaluation": None}
    # several queries have the same passage, and mined negatives are passages of others
    rows = [{"query": f"is it {n}", "passage": f"{n % 9} it is", "negatives": [f"{(n + 1) % 9} it is"]} for n in range(PAIRS)]
    (folder / "text_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(folder / "text_pairs.jsonl"), "negative_column": "negatives"}
    texts: dict[str, Any] = {"options": {"adapters": {"lora": LORA["adapters"]["lora"]}}}
    texts["data"] = {"pairs": None, "text_pairs": source}
    phi: dict[str, Any] = {"method": "projection", "options": {"noise_std": 0}}
    classes = {"images": {"path": write_labelled(folder / "classes")}, "pairs": None, "texts": [], "test": None}
    upgraded: dict[str, Any] = {"method": "ridge", "options": {"direction": "old_to_new"}, "searched_classes": "known"}
    stages: list[dict[str, Any]] = [
        {**phi, "name": "phi"},
        {**phi, "name": "phi_images", "data": {"embeddings_of": "images"}, "evaluation": None},
        {**pair, "name": "pair"},
        {**pair, "name": "shards", "data": {"pairs": {"path": write_shards(folder / "shards", [8, 8, 8, 4])}}},
        {"name": "direct", "method": "direct", "options": LORA, "evaluation": None},
        {**pair, "name": "parts", "mini_batch_size": 2},
        {**pair, **texts, "name": "texts"},
        {**pair, **texts, "name": "texts_parts", "mini_batch_size": 2},
        {"name": "chosen", "allow_worse": True, "data": {"texts": []}, "evaluation": None, "training": {"max_steps": 3}},
        {**phi, "name": "remembering", "memory": "pairs", "evaluation": None},
        {**upgraded, "name": "upgraded", "memory": "classes", "data": classes, "evaluation": None},
        {"name": "scale", "method": "independent", "evaluation": None},
        {"name": "scale_parts", "method": "independent", "evaluation": None, "mini_batch_size": 2},
    ]
    for name, lengths in STREAMS.items():
        source = {"path": write_shards(folder / name, lengths), "streaming": True}
        stages.append({**pair, "name": name, "data": {"pairs": source, "shuffle_buffer": 4}, "training": {"max_steps": 4}})
    photos = write_photos(folder / "pairs", PAIRS)
    (photos / "captions.csv").write_text("\n".join(["image,caption", *(f"{n:02}.png,cat {n}" for n in range(PAIRS))]) + "\n")
    pairs = {"path": str(photos)}
    data = {"pairs": pairs, "texts": [{"path": str(folder / "texts.txt")}], "test": pairs, "augmentation": {"min_scale": 0.7}}
    training = {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1}
    raw = {"old": old, "new": new, "data": data, "training": training | {"dataloader_num_workers": 0}, "stages": stages}
    return raw | {"evaluation": {"resamples": 100, "ks": [1, 5], "examples": 0}}


def train(folder: Path, ranks: int, batch: int) -> Path:
    out = folder / f"on {ranks}"
    (out / "seen").mkdir(parents=True)
    command = [folder / "wrapper.py", "train", folder / "r.yaml", f"training.per_device_train_batch_size={batch}"]
    command += [f"output_dir={out / 'run'}", f"cache_dir={out / 'cache'}"]
    environment = {"SEEN": str(out / "seen"), "HF_DATASETS_CACHE": str(out / "datasets")}
    done = warm.run(*command, folder=folder, ranks=ranks, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def train_both(folder: Path, raw: dict[str, Any], is_wanted: Callable[[str], bool]) -> tuple[Path, Path]:
    """Run some stages of a recipe with one process of batch 8, and with two of batch 4."""
    stages = [stage for stage in raw["stages"] if is_wanted(stage["name"])]
    (folder / "wrapper.py").write_text(WRAPPER)
    (folder / "r.yaml").write_text(yaml.safe_dump(raw | {"stages": stages}))
    return train(folder, 1, 8), train(folder, 2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, folder_of: dict[str, str], old_folder: str) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distributed")
    return train_both(folder, recipe(folder, old_folder, folder_of["clip"]), lambda name: name not in LATER)


@pytest.fixture(scope="module")
def later_runs(tmp_path_factory: pytest.TempPathFactory, folder_of: dict[str, str], old_folder: str) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distributed")
    return train_both(folder, recipe(folder, old_folder, folder_of["clip"]), {"phi", "texts", *LATER}.__contains__)


def losses(run: Path, name: str) -> list[float]:
    checkpoint = max((run / "run" / name / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def weights(run: Path, name: str) -> dict[str, Any]:
    return load_file(run / "run" / name / "model" / "model.safetensors")


def assert_equal_weights(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if not key.endswith("k_proj.bias"):  # shifts a query's logits alike: its gradient is rounding, which Adam scales up
            np.testing.assert_allclose(found[key], value, atol=2e-5, err_msg=key)


@pytest.mark.parametrize(("fixture", "name"), mostly_nightly_rows(SAME, lambda fixture, _: fixture == "runs"))
def test_losses_and_weights_are_those_of_one_process(fixture: str, name: str, request: pytest.FixtureRequest) -> None:
    runs = request.getfixturevalue(fixture)
    one, two = (losses(run, name) for run in runs)
    assert len(one) == 6 and len(set(one)) > 1
    np.testing.assert_allclose(two, one, atol=1e-5)
    assert_equal_weights(weights(runs[1], name), weights(runs[0], name))


@pytest.mark.parametrize(("fixture", "whole", "parts"), mostly_nightly_rows(PARTS, lambda fixture, *_: fixture == "runs"))
@pytest.mark.parametrize("ranks", [1, 2])
def test_mini_batches_equal_whole_ones(fixture: str, whole: str, parts: str, ranks: int, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(fixture)[ranks - 1]
    np.testing.assert_allclose(losses(run, parts), losses(run, whole), atol=1e-5)
    assert_equal_weights(weights(run, parts), weights(run, whole))


def seen(run: Path, first: int, count: int, rank: int) -> list[list[int]]:
    rows = (run / "seen" / f"rank-{rank}.jsonl").read_text().splitlines()[first : first + count]
    return [[int(caption.removeprefix("cat ")) for caption in json.loads(row)] for row in rows]


def test_two_batches_of_four_are_one_batch_of_eight(runs: tuple[Path, Path]) -> None:
    one, two = runs
    whole = seen(one, 0, 3, 0)
    halves = [a + b for a, b in zip(seen(two, 0, 3, 0), seen(two, 0, 3, 1), strict=True)]
    assert halves == whole and Counter(itertools.chain(*whole)).most_common(1)[0][1] == 1, "each sample at most once in an epoch"
    first, second = ((two / "seen" / f"random-{rank}").read_text().splitlines() for rank in range(2))
    assert not set(first) & set(second), "noise and dropout differ between ranks"


def stream_batches(run: Path, name: str, ranks: int) -> list[list[list[int]]]:
    # an epoch of a map-style stage is 3 batches and one prefetched is not made; every stream makes one batch more than it uses
    names = list(STREAMS)
    per_stream = 5
    rows = [len((run / "seen" / f"rank-{rank}.jsonl").read_text().splitlines()) for rank in range(ranks)]
    first = [total - per_stream * (len(names) - names.index(name)) for total in rows]
    return [seen(run, first[rank], 4, rank) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_streams_lose_and_repeat_nothing(ranks: int, runs: tuple[Path, Path]) -> None:
    for name in ("stream", "stream_one_shard"):
        batches = stream_batches(runs[ranks - 1], name, ranks)
        order = [number for rank in batches for batch in rank for number in batch]
        assert sorted(order) == list(range(32)) != order, name
    batches = stream_batches(runs[ranks - 1], "stream_uneven", ranks)
    assert {len(batch) for rank in batches for batch in rank} == {8 // ranks}
    times = Counter(number for rank in batches for batch in rank for number in batch)
    assert set(times) <= set(range(20)) and max(times.values()) <= 3
    if ranks == 2:  # 14 samples on the first rank, 6 on the second, 16 drawn on each
        assert set(times) == set(range(20))


def test_caches_and_reports_are_those_of_one_process(runs: tuple[Path, Path]) -> None:
    one, two = (run / "cache" for run in runs)
    shards = sorted(path.relative_to(one) for path in one.rglob("*.npy"))
    assert shards == sorted(path.relative_to(two) for path in two.rglob("*.npy"))
    assert {path.name for path in shards} >= {"shard-00000.npy", "shard-00001.npy"}, "each rank wrote some"
    for shard in shards:
        np.testing.assert_array_equal(np.load(two / shard), np.load(one / shard), err_msg=str(shard))
    assert not list(two.rglob(".shard*")), "no temporary file is left"
    one, two = (json.loads((run / "run" / "phi" / "report" / "report.json").read_text()) for run in runs)
    assert two["cases"] == one["cases"] and two["criterion"] == one["criterion"]


@pytest.mark.parametrize("name", ["chosen", "remembering", "upgraded"])
def test_what_is_chosen_is_what_one_process_chooses(name: str, runs: tuple[Path, Path]) -> None:
    one, two = (json.loads((run / "run" / name / "choice.json").read_text()) for run in runs)
    assert two["chosen"] == one["chosen"] and [trial["name"] for trial in two["trials"]] == [t["name"] for t in one["trials"]]
    np.testing.assert_allclose([trial["mean"] for trial in two["trials"]], [trial["mean"] for trial in one["trials"]])
    assert_equal_weights(weights(runs[1], name), weights(runs[0], name))


def join_group(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    # accelerate asks for an address, and then uses the group that there is
    os.environ |= places | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


def learn_with_constants(rank: int, photos: str, encoder: str, method: str, folder: str) -> None:
    """Train on a rank, once as ever and once with DDP sending all buffers; write which ones it sends, and what is left."""
    join_group(rank, folder)
    images, synchronise = load_labelled(photos), DistributedDataParallel._sync_buffers
    training = {"max_steps": 3, "per_device_train_batch_size": 6, "learning_rate": 0.01}
    stage = StageRecipe(method=method, new=encoder, data={"images": {"path": photos}}, training=training, evaluation=None)
    for name in ("once", "always"):
        torch.manual_seed(0)
        old = describe_old(Fingerprint.from_string("old"), dim=8)
        model = METHODS[method].from_encoder(encoder, old=old, classes=images.classes, batch_norm=True)
        old_Nd = torch.nn.functional.normalize(torch.randn(len(images.dataset), 8), dim=-1).numpy()
        model.prepare(OldKnowledge(len(images.classes), images.labels(), old_Nd))
        for buffer in model.buffers(recurse=False):
            buffer.mul_(1 - rank)  # as if the other process had drawn or computed something else
        extra = {"old_embeds": old_Nd} if "old_embeds" in model.columns else {}
        sent: list[set[str]] = []

        def record(self: DistributedDataParallel, sent: list[set[str]] = sent) -> None:
            synchronise(self)
            sent.append(set(self.named_module_buffers))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DistributedDataParallel, "_sync_buffers", record)
            if name == "always":
                patched.setattr(trainer, "send_constants_once", lambda *_: None)
            data = labelled_data(stage, images, model.processor, 0, extra)
            trained = trainer.train(model, data, stage, 0, Path(folder) / f"{name}-{rank}")
        torch.save((sent, dict(trained.named_buffers(recurse=False)), trained.state_dict()), f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("method", mostly_nightly(["nccl", "unibct"], "unibct".__eq__))
def test_ddp_sends_once_what_never_changes(method: str, image_folder_of: dict[str, str], tmp_path: Path) -> None:
    photos = write_labelled(tmp_path / "photos")
    warm.spawn(learn_with_constants, (photos, image_folder_of["resnet"], method, str(tmp_path)))
    (sent, own, one), (_, same, two), (all_sent, _, plain) = (
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("once-0", "once-1", "always-0")
    )
    assert own and all(value.any() for value in own.values()) and own.keys() <= all_sent[0]
    assert len(sent) >= 3 and all(names == all_sent[0] - own.keys() for names in sent)
    assert any("running_mean" in name for name in sent[0]), "these follow the batches"
    for name, value in own.items():
        assert torch.equal(same[name], value), "the first process's"
    for name, value in one.items():
        assert torch.equal(plain[name], value), name
        assert torch.equal(two[name], value) or "running" in name, name


class CountedRows:
    def __init__(self, rows: np.ndarray) -> None:
        self.rows, self.shape, self.read = rows, rows.shape, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Any) -> np.ndarray:
        found = self.rows[which]
        self.read += len(found)
        return found


def old_and_new(n_classes: int) -> tuple[OldKnowledge, CountedRows]:
    generator = np.random.default_rng(n_classes)
    old_Nd, new_ND = (generator.normal(size=(97, dim)).astype(np.float32) for dim in (8, 16))
    old_Nd[5], new_ND[9] = np.nan, np.nan
    labels_N = generator.integers(max(n_classes - 1, 1), size=97)  # the last class has no image
    return OldKnowledge(n_classes, labels_N, CountedRows(old_Nd)), CountedRows(new_ND)


def prepare_methods(folders: dict[str, str], n_classes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return what each method computes from all embeddings, with the number of old rows that were read."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for method in ("advbct", "bct", "fastfill", "lce", "nccl", "rbt", "unibct"):
        old, new = old_and_new(n_classes)
        torch.manual_seed(0)
        known = {"classes": [f"{number}" for number in range(n_classes)]} if METHODS[method].learns_classes else {}
        described = describe_old(Fingerprint.from_string("old"), dim=8)
        options = {"max_entropy": 1.0} if method == "nccl" else {}
        model = METHODS[method].from_encoder(folders["clip"], old=described, **known, **options)
        model.prepare(old, new)
        if method == "unibct":
            model.refresh(new.rows)
        known_rows = model.state_dict(), dict(model.named_buffers())
        found[method] = {name: value for each in known_rows for name, value in each.items() if not name.startswith("encoder")}
        found[method]["read"] = torch.tensor(old.embeddings_Nd.read)
    return found


def prepare_on_a_rank(rank: int, folders: dict[str, str], n_classes: int, folder: str) -> None:
    join_group(rank, folder)
    torch.save(prepare_methods(folders, n_classes), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("n_classes", [1, 7])
def test_processes_share_classes_and_compute_the_bits_of_one(n_classes: int, folder_of: dict[str, str], tmp_path: Path) -> None:
    wanted = prepare_methods(folder_of, n_classes)
    warm.spawn(prepare_on_a_rank, (dict(folder_of), n_classes, str(tmp_path)))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for method, values in wanted.items():
        read = [int(found[method].pop("read")) for found in ranks]
        alone = int(values.pop("read"))
        assert method == "nccl" or sum(read) <= alone, f"{method}: each row is read by one process; nccl's bank by every one"
        for found in ranks:
            assert found[method].keys() == values.keys()
            for name, value in values.items():
                assert torch.equal(found[method][name].nan_to_num(nan=7), value.nan_to_num(nan=7)), (method, name)


def adversarial_gradients(folder: str, rows: slice, readable: int) -> dict[str, torch.Tensor]:
    """Return AdvBCT's gradients for part of a batch of 8, of whose old embeddings only the first ones can be read."""
    torch.manual_seed(0)
    old = describe_old(Fingerprint.from_string("old"), dim=8)
    model = METHODS["advbct"].from_encoder(folder, old=old, classes=["a", "b"]).train()
    old_Bd = torch.nn.functional.normalize(torch.randn(8, 8), dim=-1)
    labels_B = torch.arange(8) % 2
    model.prepare(OldKnowledge(2, labels_B.numpy(), old_Bd.numpy()))
    model.progress = 0.5
    old_Bd[readable:] = torch.nan
    batch = {"pixel_values": torch.randn(8, 3, 32, 32), "labels": labels_B, "old_embeds": old_Bd}
    model(**{name: column[rows] for name, column in batch.items()}).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def learn_adversarially(rank: int, encoder: str, folder: str) -> None:
    join_group(rank, folder)
    for readable in (0, 3, 8):
        gradients = adversarial_gradients(encoder, slice(4 * rank, 4 * rank + 4), readable)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= 2  # as DDP does
        torch.save(gradients, f"{folder}/{readable}-{rank}.pt")
    dist.destroy_process_group()


def test_the_discriminator_sees_the_batch_of_all_processes(folder_of: dict[str, str], tmp_path: Path) -> None:
    warm.spawn(learn_adversarially, (folder_of["clip"], str(tmp_path)))
    for readable in (0, 3, 8):
        wanted = adversarial_gradients(folder_of["clip"], slice(8), readable)
        found = torch.load(tmp_path / f"{readable}-1.pt", weights_only=True)
        assert bool(wanted["discriminator.hidden.weight"].any()) is (readable > 0)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_batch_norms_end_alike_and_a_trained_stage_trains_no_further(tmp_path: Path) -> None:
    model = {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
    raw: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"),
        "new": {"model": model, "image_size": 16},
        "data": {"images": {"path": "glyphs:train", "limit": 64}},
        "training": {"max_steps": 3, "per_device_train_batch_size": 4, "save_steps": 3, "logging_steps": 1},
        "evaluation": None,
        "stages": [
            {"name": "old", "method": "independent"},
            {"name": "bct", "method": "bct", "old": "stage:old", "seed_offset": 1},
        ],
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(raw))
    first = warm.run("-m", "xcompat", "train", "r.yaml", folder=tmp_path, ranks=2)
    assert first.returncode == 0 and "calibrated on its own items" not in first.stdout + first.stderr, first.stderr
    place = tmp_path / "run" / "bct"
    weights = load_file(place / "model" / "model.safetensors")
    assert any("running_mean" in name for name in weights)
    shutil.rmtree(place / "model")
    (place / "done.json").unlink()
    again = warm.run("-m", "xcompat", "train", "r.yaml", folder=tmp_path, ranks=2)
    assert again.returncode == 0 and "3 of 3 steps" in again.stdout, again.stdout + again.stderr
    found = load_file(place / "model" / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_ctrl_c_and_errors_stop_both_ranks(runs: tuple[Path, Path], tmp_path: Path) -> None:
    raw = yaml.safe_load((runs[0].parent / "r.yaml").read_text())
    raw |= {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), "evaluation": None}
    raw["stages"] = raw["stages"][:1]
    del raw["data"]["augmentation"]  # of the second stage
    raw["training"] |= {"max_steps": 100_000, "save_steps": 20, "per_device_train_batch_size": 4}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(raw))
    running = warm.start("-m", "xcompat", "train", tmp_path / "r.yaml", folder=tmp_path, ranks=2)
    checkpoints, ranks = tmp_path / "run" / "checkpoints", running.processes
    begun = "checkpoint-*/trainer_state.json"
    warm.wait_until(lambda: any(checkpoints.glob(begun)) or not all(rank.is_alive() for rank in ranks))
    for process in ranks:  # a terminal sends it to every process
        assert process.is_alive() and process.pid, running.said()
        os.kill(process.pid, signal.SIGINT)
    done = running.wait(120)
    assert done.returncode != 0
    kept = last_complete_checkpoint(checkpoints)
    assert kept is not None and {f"rng_state_{rank}.pth" for rank in range(2)} <= {path.name for path in kept.iterdir()}
    assert f"interrupted at step {kept.name.split('-')[1]}; a checkpoint is kept" in done.stderr
    done = warm.run("-m", "xcompat", "train", "nowhere.yaml", folder=tmp_path, ranks=2)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("xcompat: ")]
    assert len(lines) == 1 and "the recipe nowhere.yaml does not exist" in lines[0]


FAST = {"bct", "fct", "query_map", "advbct"}


def assert_same_loss(model: CompatModel, batch: dict[str, torch.Tensor]) -> None:
    torch._dynamo.reset()
    losses = []
    for step in (model, torch.compile(model, fullgraph=True, backend="eager")):
        torch.manual_seed(0)
        losses.append(step(**batch).loss)
    torch.testing.assert_close(losses[1], losses[0])


STEPS = mostly_nightly_rows(
    [*((name, {}) for name in TRAINED), *((name, each) for name in CLASSIFIED for each in TRIPLETS)],
    lambda name, triplets: name in (["bct"] if triplets else FAST),
)


@pytest.mark.parametrize(("method", "options"), STEPS)
def test_steps_are_one_graph(method: str, options: dict[str, Any], folder_of: dict[str, str], images: list[Image.Image]) -> None:
    more = {"logit_weight": 0.0} if method == "nccl" and options else {}
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
    new = folder_of["clip"] if method == "xbt" else image_folder_of["resnet"]
    raw = raw_recipe(tmp_path, old_folder, new, pairs_folder)
    raw |= {"data": on_captions if method == "xbt" else on_classes, "evaluation": None, "stages": BY_RECIPE[method]}
    training = {"max_steps": 3, "per_device_train_batch_size": 4, "torch_compile": True, "torch_compile_backend": "eager"}
    recipe = recipe_of(raw, training=training)
    assert all(stage.training["torch_compile"] for stage in recipe.stages)
    run_recipe(recipe)
    assert not counters["graph_break"] and counters["frames"]["ok"] == counters["frames"]["total"]
    assert counters["stats"]["unique_graphs"] == {"bct": 1, "fct": 3, "xbt": 2}[method], "progress compiles fct twice more"


def compile_on_a_rank(rank: int, folders: dict[str, str], images: list[Image.Image], store: str) -> None:
    join_group(rank, store)
    for method in ("xbt", "advbct"):
        model = build(method, folders).train()
        assert_same_loss(model, batch_for(model, images))
    dist.destroy_process_group()


@pytest.mark.nightly
def test_gathering_steps_are_a_single_graph(folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    warm.spawn(compile_on_a_rank, (dict(folder_of), images, str(tmp_path)))
