"""Loading runs no code that is not allowed, and nothing embeds from changed files; encoders come from any module."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
import yaml
from conftest import Run, refuses, refusing
from PIL import Image
from test_docs import EXAMPLES
from test_loading import png, write_shard
from test_models import build
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, RandomRotation, Resize, ToTensor, v2
from transformers import AutoModel, Trainer, TrainingArguments

from xcompat import CompatConfig, IndependentModel, XbtModel, XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.core.files import read_json, write_json
from xcompat.data import PairSource, load_pairs
from xcompat.data.bad_samples import Problems
from xcompat.data.shards import ShardColumns, read_rows
from xcompat.embeddings.cache import StackedCaches
from xcompat.embeddings.embed import EmbeddingCache, embed_texts
from xcompat.encoders import load_encoder
from xcompat.encoders.model_files import record_model, require_whole
from xcompat.encoders.own_modules import image_processor_of, register_encoder, save_module
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.models.stored import StoredModel
from xcompat.training import record
from xcompat.training.caches import cached_captions
from xcompat.training.evaluate_command import evaluate_embeddings
from xcompat.training.recipe import load_recipe
from xcompat.training.stage_recipe import StageRecipe

TRAP = "fell into the trap"


class Trap:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.file, TRAP)


@pytest.fixture
def sprung(tmp_path: Path) -> Iterator[Path]:
    """Return the file that a trap writes; it is looked for when the test is over."""
    file = tmp_path / "sprung"
    yield file
    assert not file.exists(), TRAP


def code_beside(folder: Path, sprung: Path) -> None:
    classes = "".join(f"class {name}:\n    pass\n" for name in ("Config", "Model", "Tokenizer", "Processor"))
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(sprung)!r}).write_text({TRAP!r})\n{classes}")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes) if file.exists() else json.dumps(changes))


def test_the_trap_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))  # noqa: S301 - that is the point
    assert (tmp_path / "sprung").read_text() == TRAP


@pytest.mark.parametrize(
    ("architecture", "weights"),
    [("clip", "pytorch_model.bin"), ("vit", "pytorch_model.bin"), ("open_clip", "open_clip_pytorch_model.bin")],
)
def test_pickled_weights_of_an_encoder_and_a_checkpoint(
    architecture: str, weights: str, folder_of: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path, sprung: Path
) -> None:
    folder = Path(shutil.copytree((folder_of | image_folder_of)[architecture], tmp_path / "model"))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": Trap(sprung)}, folder / weights)
    refuses("safetensors", load_encoder, str(folder))
    build("ridge", folder_of).export(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    torch.save({"weight": Trap(sprung)}, tmp_path / "checkpoint" / "pytorch_model.bin")
    refuses("safetensors", AutoModel.from_pretrained, tmp_path / "checkpoint")


def test_pickled_arrays(tmp_path: Path, sprung: Path) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    rows = np.array([Trap(sprung)] * 3, dtype=object)
    for name in ("embeds", "image_embeds", "text_embeds"):
        np.save(folder / f"{name}.npy", rows, allow_pickle=True)
        (folder / f"{name.replace('embeds', 'ids')}.txt").write_text("a\nb\nc\n")
    refuses("", StoredModel, folder)
    refuses("", evaluate_embeddings, folder, folder, None, None, tmp_path / "report")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_pickled_states_of_a_training(name: str, tmp_path: Path, sprung: Path) -> None:
    """A stopped training is continued by transformers' Trainer, which reads what it saved by torch.load, weights only."""

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x).mean()}

    settings: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "report_to": [], "disable_tqdm": True, "use_cpu": True}
    rows = [{"x": torch.ones(2)}] * 4
    arguments = TrainingArguments(max_steps=1, save_steps=1, per_device_train_batch_size=1, **settings)
    Trainer(Model(2, 1), arguments, train_dataset=rows).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    assert (checkpoint / name).exists()
    torch.save({"state": Trap(sprung)}, checkpoint / name)
    arguments.max_steps = 2
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        Trainer(Model(2, 1), arguments, train_dataset=rows).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}),
        ("config.json", {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}}),
        ("tokenizer_config.json", {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}),
        ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "code.Processor"}}),
        ("preprocessor_config.json", {"image_processor_type": "X", "auto_map": {"AutoImageProcessor": "code.Processor"}}),
    ],
)
def test_code_beside_weights(file: str, changes: dict[str, Any], folder_of: dict[str, str], tmp_path: Path, sprung: Path) -> None:
    build("bct", folder_of).export(tmp_path / "checkpoint")
    for folder in (Path(shutil.copytree(folder_of["clip"], tmp_path / "encoder")), tmp_path / "checkpoint"):
        code_beside(folder, sprung)
        edit(folder / file, **changes)
        with contextlib.suppress(XcompatError):  # it may refuse what it cannot read without that code
            load_embedder(str(folder))


def test_code_in_configurations(folder_of: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path, sprung: Path) -> None:
    """Its configuration gives the tokenizer's arguments, and trust is none of them."""
    folder = Path(shutil.copytree(folder_of["open_clip"], tmp_path / "model"))
    code_beside(folder, sprung)
    edit(folder / "tokenizer_config.json", tokenizer_class="Strange", auto_map={"AutoTokenizer": ["code.Tokenizer"] * 2})
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    edit(folder / "open_clip_config.json", **config)
    refuses("", load_encoder, str(folder))
    folder = Path(shutil.copytree(image_folder_of["timm_wrapper"], tmp_path / "timm"))
    torch.save({"weight": Trap(sprung)}, tmp_path / "weights.pth")
    arguments = json.loads((folder / "config.json").read_text()).get("model_args") or {}
    edit(folder / "config.json", model_args=arguments | {"checkpoint_path": str(tmp_path / "weights.pth")})
    refuses("sets checkpoint_path", load_encoder, str(folder))


@pytest.mark.parametrize("tag", ["python/object/apply:os.system ['touch {}']", "python/object/new:os.system ['touch {}']"])
def test_tags_in_a_recipe(tag: str, tmp_path: Path, sprung: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"name: !!{tag.format(sprung)}\nmethod: xbt\n")
    refuses("", load_recipe, tmp_path / "recipe.yaml")
    (tmp_path / "plain.yaml").write_text("name: plain\nmethod: xbt\n")
    refuses("", load_recipe, tmp_path / "plain.yaml", [f"name=!!{tag.format(sprung)}"])


@pytest.mark.parametrize("scheme", ["pipe:", "http://127.0.0.1:9/", "file:", "s3://bucket/", "hf://datasets/me/x/"])
def test_shards_are_files(scheme: str, tmp_path: Path, sprung: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What webdataset would take for a command or an address is the name of a file here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(XcompatError, match="does not exist|is remote"):
        load_pairs(f"{scheme}touch {sprung}; cat x.tar" if scheme == "pipe:" else f"{scheme}x.tar")
    if "/" not in scheme:
        write_shard(tmp_path / f"{scheme}touch sprung #.tar", {"a": {"png": png(), "txt": b"red"}})
        assert len(load_pairs(PairSource(path=f"{scheme}touch sprung #.tar", max_bad_share=0))) == 1


def test_members_of_a_shard_escape_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    names = ("../escaped", f"{tmp_path}/escaped", "a/../../escaped", "good")
    write_shard(inside / "shard.tar", {name: {"png": png(), "txt": b"red"} for name in names})
    with tarfile.open(inside / "shard.tar", "a") as tar:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            link = tarfile.TarInfo(f"x{number}.png")
            link.type, link.linkname = kind, "/etc/passwd"
            tar.addfile(link)
    rows = list(read_rows([inside / "shard.tar"], ShardColumns(), Problems(max_bad_share=1.0, total_shards=1)))
    assert len(rows) == len(names) and all(row["image"]["bytes"] == png() for row in rows), "links and devices hold nothing"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "shard.tar"]


@pytest.fixture
def models(folder_of: dict[str, str], old_folder: str, old: Embedder, tmp_path: Path) -> Path:
    shutil.copytree(old_folder, tmp_path / "old")
    XbtModel.from_encoder(folder_of["clip"], old=old.describe_old()).save_pretrained(tmp_path / "xbt")
    (tmp_path / "independent").mkdir()
    IndependentModel.from_encoder(folder_of["clip"]).export(tmp_path / "independent")
    return tmp_path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 4  # in the last value
    file.write_bytes(content)


@pytest.mark.parametrize("load", [load_embedder, AutoModel.from_pretrained])
@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json", "tokenizer.json", "config.json"])
def test_a_file_that_changed_is_named(name: str, load: Callable[[str], object], models: Path) -> None:
    load(str(models / "xbt"))
    file = models / "xbt" / name
    content = file.read_bytes()
    if name == "model.safetensors":
        flip(file)
    else:
        file.write_bytes(content.replace(b"0", b"1"))
    assert file.read_bytes() != content
    refuses(rf"{name} has changed since it was written; restore it", load, str(models / "xbt"))
    file.write_bytes(content)
    load(str(models / "xbt"))


def test_files_of_every_model_are_recorded_and_missed(models: Path) -> None:
    for kind in ("xbt", "independent"):
        files = sorted(file.name for file in (models / kind).iterdir() if file.name != CHECKSUMS)
        assert sorted(read_json(models / kind / CHECKSUMS)) == files
        assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"} <= {*files}
    flip(models / "independent" / "model.safetensors")
    refuses(r"model\.safetensors has changed since it was written", load_embedder, str(models / "independent"))
    (models / "xbt" / "tokenizer.json").unlink()
    require_whole(models / "xbt", in_part=True)
    refuses(r"tokenizer\.json is missing; restore it", AutoModel.from_pretrained, models / "xbt")


def test_records_may_be_deleted_but_not_damaged(models: Path) -> None:
    config = models / "xbt" / "config.json"
    write_json(config, read_json(config) | {"logit_scale": 2.0})
    refuses(r"delete .*checksums\.json if you changed it yourself", AutoModel.from_pretrained, models / "xbt")
    (models / "xbt" / CHECKSUMS).unlink()
    model = AutoModel.from_pretrained(models / "xbt")
    assert model.config.logit_scale == 2.0
    model.save_pretrained(models / "again")
    assert AutoModel.from_pretrained(models / "again").config.logit_scale == 2.0
    record_model(models / "xbt")
    flip(models / "xbt" / "model.safetensors")
    refuses("has changed", AutoModel.from_pretrained, models / "xbt")
    for damaged in ("", "[]", "{", '{"config.json": 3}'):
        (models / "xbt" / CHECKSUMS).write_text(damaged)
        refuses("checksums", AutoModel.from_pretrained, models / "xbt")


def test_saving_again_records_what_is_there_now(models: Path) -> None:
    """Other files of the user's beside the model are none of its business, nor are checksums that others keep."""
    write_json(models / "old" / "checksums.json", {"model.safetensors": "sha256:0"})
    load_embedder(str(models / "old"))
    model = AutoModel.from_pretrained(models / "xbt")
    (models / "xbt" / "former.model").mkdir()
    for name in ("report.json", "notes.txt"):
        (models / "xbt" / name).write_text("mine")
    next(model.parameters()).data.add_(1)
    model.save_pretrained(models / "xbt")
    for name in ("report.json", "notes.txt"):
        (models / "xbt" / name).write_text("changed")
    again = AutoModel.from_pretrained(models / "xbt")
    assert again.fingerprint() == model.fingerprint()
    assert not {"notes.txt", "report.json"} & {*read_json(models / "xbt" / CHECKSUMS)}


@pytest.mark.parametrize("old", [{"name": "a"}, {"name": "a", "fingerprint": "b", "dim": 3, "compatible_with": [{"dim": 3}]}])
def test_an_old_model_that_is_described_in_part_is_refused(old: dict[str, object]) -> None:
    refuses("each version needs dim, fingerprint, name", CompatConfig, old=old)


TEXTS = [f"{'word ' * (n % 9)}number {n}" for n in range(23)]


@pytest.fixture
def cache(old: Embedder, tmp_path: Path) -> Path:
    embed_texts(old, TEXTS, tmp_path / "c", "digest", shard_rows=5)
    return tmp_path / "c"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def swap(file: Path) -> None:
    other, aside = file.with_name("shard-00001.npy"), file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "has changed since it was written"),
    "cut": (cut, "bytes, expected"),
    "emptied": (lambda file: file.write_bytes(b""), "has 0 bytes"),
    "missing": (Path.unlink, "is missing"),
    "swapped": (swap, "has changed since it was written"),
    "record": (lambda file: file.with_suffix(".json").write_text("{}"), "the checksum of a shard, is damaged"),
    "no array": (lambda file: file.write_text("x" * file.stat().st_size), "has changed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_named_and_embedded_again(
    name: str, old: Embedder, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, reason = DAMAGE[name]
    whole = EmbeddingCache(cache)[:]
    damage(cache / "shard-00002.npy")
    opened = EmbeddingCache(cache)
    assert np.array_equal(opened[np.array([0, 22])], whole[[0, 22]]), "other shards are read"
    with refusing(f"shard-0000[12].*{reason}.*run the command that wrote the cache again"):
        opened[:]
    asked, tokenize = [], type(old.processor).tokenize
    monkeypatch.setattr(type(old.processor), "tokenize", lambda self, texts: asked.append(texts[0]) or tokenize(self, texts))
    capsys.readouterr()
    assert np.array_equal(embed_texts(old, TEXTS, cache, "digest", shard_rows=5)[:], whole)
    assert asked == ([TEXTS[5], TEXTS[10]] if name == "swapped" else [TEXTS[10]])
    said = [line for line in capsys.readouterr().out.splitlines() if "shard-" in line]
    assert len(said) == len(asked) and all(line.endswith("; re-embedding this shard") for line in said)
    assert np.array_equal(EmbeddingCache(cache)[:], whole)


def test_a_cache_that_was_read_pickles_without_its_rows(cache: Path) -> None:
    opened = EmbeddingCache(cache)
    closed, whole = len(pickle.dumps(opened)), opened[:]
    assert len(pickle.dumps(opened)) == closed
    stacked = StackedCaches([opened, opened])
    for each, rows in ((opened, whole), (stacked, np.concatenate([whole, whole]))):
        assert np.array_equal(pickle.loads(pickle.dumps(each))[:], rows)  # noqa: S301 - it is ours
    assert len(pickle.dumps(stacked)) < 3 * closed


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([-1], "numbers from 0 to 22, not -1"),
        ([0, 23], "numbers from 0 to 22, not 23"),
        ([True, False] + [False] * 21, "not values of bool; convert a mask with np.flatnonzero"),
        ([0.0], "not values of float64"),
    ],
)
def test_what_is_no_row_of_a_cache_is_one_line(cache: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(XcompatError, match=said):
        EmbeddingCache(cache)[np.array(rows)]
    assert EmbeddingCache(cache)[np.array([])].shape[0] == 0


def test_caches_of_before_there_were_checksums(old: Embedder, cache: Path) -> None:
    whole = EmbeddingCache(cache)[:]
    for checksum in cache.glob("shard-*.json"):
        checksum.unlink()
    assert np.array_equal(EmbeddingCache(cache)[:], whole)
    cut(cache / "shard-00002.npy")
    with pytest.raises(XcompatError, match="shard-00002.npy is truncated or not an array"):
        EmbeddingCache(cache)[:]
    np.save(cache / "shard-00003.npy", np.zeros((5, 3), np.float16))
    with pytest.raises(XcompatError, match=r"shard-00003.npy contains \(5, 3\) float16, not \(5, 8\) float16"):
        EmbeddingCache(cache)[np.array([15])]
    assert np.array_equal(embed_texts(old, TEXTS, cache, "digest", shard_rows=5)[:], whole)
    assert sorted(path.name for path in cache.glob("shard-*.json")) == ["shard-00002.json", "shard-00003.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cache.json", "{", "not valid JSON"),
        ("cache.json", "[]", "cache format None"),
        ("cache.json", {"rows": 0}, "rows: Input should be greater than or equal to 1"),
        ("cache.json", {"fingerprint": "other"}, "cache.json and plan.json differ"),
        ("plan.json", {"fingerprint": "other"}, "cache.json and plan.json differ"),
    ],
)
def test_damaged_descriptions(name: str, content: str | dict[str, object], message: str, old: Embedder, cache: Path) -> None:
    file = cache / name
    text = content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content)
    file.write_text(text)
    refuses(message, EmbeddingCache, cache)
    if name == "cache.json":
        assert len(embed_texts(old, TEXTS, cache, "digest", shard_rows=5)) == 23, "it is written anew"
    else:
        refuses("embeddings of another fingerprint", embed_texts, old, TEXTS, cache, "digest", shard_rows=5)


def test_caches_of_two_precisions_stay_apart(old: Embedder, tmp_path: Path) -> None:
    half = replace(old, autocast=torch.bfloat16)
    exact, rounded = (cached_captions(model, TEXTS, tmp_path) for model in (old, half))
    assert exact.path != rounded.path and not np.array_equal(exact[:], rounded[:])
    assert (exact.info.precision, rounded.info.precision) == ("float32", "bfloat16")
    for model, cache in ((old, exact), (half, rounded)):
        assert np.array_equal(cached_captions(model, TEXTS, tmp_path)[:], cache[:])
        other = half if model is old else old
        with pytest.raises(XcompatError, match=r"embeddings of another precision \('.*', now '.*'\); choose another folder"):
            embed_texts(other, TEXTS, cache.path, cache.info.data)
    assert "precision" not in json.loads((exact.path / "cache.json").read_text()), "as caches of before"


def test_shards_of_nobody_knows_what_are_not_taken_over(old: Embedder, cache: Path) -> None:
    (cache / "plan.json").unlink()
    refuses("embeddings of another data", embed_texts, old, TEXTS, cache, "other", shard_rows=5)
    shutil.copy(cache / "cache.json", cache / "kept")
    (cache / "cache.json").unlink()
    refuses("contains shards but no plan.json", embed_texts, old, TEXTS, cache, "digest", shard_rows=5)
    (cache / "kept").rename(cache / "cache.json")
    assert len(embed_texts(old, TEXTS, cache, "digest", shard_rows=5)) == 23


NORMALISE = Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
NET = next(code for page, _, code in EXAMPLES if page == "docs/own_encoder.md" and code.startswith("# net.py"))


@register_encoder
class Striped(nn.Module):
    def __init__(self, width: int = 4, sizes: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, width, sizes[0], stride=sizes[0])

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layer(pixel_values).mean(dim=(2, 3))


@pytest.mark.parametrize(
    "transform",
    [
        Compose([Resize((20, 24), InterpolationMode.BICUBIC), ToTensor(), NORMALISE]),
        Compose([Resize(24), CenterCrop(20), ToTensor(), NORMALISE]),
        v2.Compose([v2.Resize(24), v2.CenterCrop(20), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), NORMALISE]),
    ],
    ids=["sides", "crop", "v2"],
)
def test_a_saved_module_embeds_as_before(transform: Compose, tmp_path: Path, images: list[Image.Image]) -> None:
    torch.manual_seed(0)
    module = Striped(width=6).eval()
    save_module(module, transform, tmp_path, width=6)
    encoder, processor = load_encoder(str(tmp_path))
    assert encoder.embedding_dim == 6 and encoder.description["config"]["sizes"] == [3]
    pixels = torch.stack([transform(image.convert("RGB")) for image in images])
    torch.testing.assert_close(processor.images(images), pixels, atol=0.03, rtol=0)  # a rounding of 8 bits
    with torch.no_grad():
        expected = nn.functional.normalize(module(pixels), dim=-1)
        torch.testing.assert_close(encoder.embed_images(pixels), expected)


def test_random_weights_are_the_modules_own() -> None:
    encoder, processor = encoder_from_scratch(ScratchSource(model={"model_type": "striped", "width": 3}, image_size=12), seed=5)
    torch.manual_seed(5)
    torch.testing.assert_close(encoder.model.module.layer.weight, Striped(width=3).layer.weight, rtol=0, atol=0)
    assert encoder.embedding_dim == 3 and processor.image_size == (12, 12)


def test_other_transforms_and_modules_are_refused() -> None:
    turned = Compose([Resize(8), RandomRotation(5), ToTensor()])
    for transform, said in ((turned, "RandomRotation; use only Resize"), (Compose([ToTensor()]), "has no Resize; add Resize")):
        refuses(said, image_processor_of, transform)

    class Wide(nn.Module):
        def __init__(self, width: int) -> None: ...

    class ResNet(nn.Module): ...

    refuses("Wide has no default for 'width'; add a default", register_encoder, Wide)
    refuses("ResNet: transformers.* also has a 'resnet'; rename the class", register_encoder, ResNet)


@pytest.mark.parametrize("form", ["encoder", "method"])
def test_a_module_without_its_class_names_the_ways_to_register_it(form: str, tmp_path: Path) -> None:
    own = {"model_type": "unregistered", "width": 4}
    encoder = {"library": "transformers", "config": own}
    config = own if form == "encoder" else {"model_type": "xcompat-independent", "encoder": encoder, "embedding_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    refuses(
        r"no class has model_type 'unregistered'; .* set XCOMPAT_CODE=FILE.py or .* \(entry point xcompat.encoders\)",
        load_encoder,
        str(tmp_path),
    )


def test_a_changed_file_is_a_changed_recipe(tmp_path: Path) -> None:
    file = tmp_path / "grey.py"
    file.write_text("from torch import nn\nclass Grey(nn.Module):\n    ...\n", encoding="utf-8")
    new = {"model": {"model_type": f"{file}:Grey"}, "image_size": 16}
    settings = StageRecipe.model_validate({"method": "independent", "new": new})
    record.write_recipe(tmp_path, begun := record.dump_settings(settings, seed=3))
    assert record.read_started_settings(tmp_path) == begun
    file.write_text("from torch import nn\nclass Grey(nn.Module):\n    gamma = 2\n", encoding="utf-8")
    assert record.differences(record.dump_settings(settings, seed=3), begun, False) == [f"code.{file}:Grey"]


def test_a_recipe_trains_a_module_from_a_file(
    tmp_path: Path,
    images: list[Image.Image],
    run_xcompat: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An encoder is one file and no other line, and a later stage continues from it."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    for number in range(8):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        images[number % len(images)].save(folder / f"{number}.png")
    new = {"model": {"model_type": "net.py:TinyNet", "width": 4}, "image_size": 16}
    training = {"max_steps": 2, "per_device_train_batch_size": 4}
    stages = [{"name": "first", "new": new}, {"name": "second", "new": "stage:first"}]
    raw = {"method": "independent", "data": {"images": {"path": "photos"}}, "training": training, "stages": stages}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    done = warm.run("-m", "xcompat", "train", "own.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/own/second/model/model.safetensors").is_file()
    load = "from xcompat.models.embedder import load_checkpoint; print(load_checkpoint('runs/own/second').config.embedding_dim)"
    done = warm.run("-c", load, folder=tmp_path, XCOMPAT_CODE="net.py")
    assert done.stdout.strip() == "4", done.stderr
    raw["stages"][0]["new"]["model"]["model_type"] = "nets.py:TinyNet"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert "nets.py does not exist" in run_xcompat.refusal("train", "own.yaml")
