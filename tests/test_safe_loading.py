"""Loading runs no code, whatever a file says: pickles, code beside a model, YAML tags, shell commands in the place of shards."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_loading import png
from test_models import build
from transformers import AutoModel, Trainer, TrainingArguments

from xcompat import XcompatError
from xcompat.data import PairSource, load_pairs
from xcompat.data.bad_samples import Problems
from xcompat.data.shards import ShardColumns, read_rows
from xcompat.encoders import load_encoder
from xcompat.models.embedder import load_embedder
from xcompat.models.stored import StoredModel
from xcompat.training.evaluate_command import evaluate_embeddings
from xcompat.training.recipe import load_recipe

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
    with pytest.raises(XcompatError, match="safetensors"):
        load_encoder(str(folder))
    build("ridge", folder_of).export(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    torch.save({"weight": Trap(sprung)}, tmp_path / "checkpoint" / "pytorch_model.bin")
    with pytest.raises(XcompatError, match="safetensors"):
        AutoModel.from_pretrained(tmp_path / "checkpoint")


def test_pickled_arrays(tmp_path: Path, sprung: Path) -> None:
    folder = tmp_path / "stored"
    folder.mkdir()
    rows = np.array([Trap(sprung)] * 3, dtype=object)
    for name in ("embeds", "image_embeds", "text_embeds"):
        np.save(folder / f"{name}.npy", rows, allow_pickle=True)
        (folder / f"{name.replace('embeds', 'ids')}.txt").write_text("a\nb\nc\n")
    with pytest.raises(XcompatError):
        StoredModel(folder)
    with pytest.raises(XcompatError):
        evaluate_embeddings(folder, folder, None, None, tmp_path / "report")


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


def test_code_and_weights_that_configurations_name(
    folder_of: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path, sprung: Path
) -> None:
    """Its configuration gives the tokenizer's arguments, and trust is none of them."""
    folder = Path(shutil.copytree(folder_of["open_clip"], tmp_path / "model"))
    code_beside(folder, sprung)
    edit(folder / "tokenizer_config.json", tokenizer_class="Strange", auto_map={"AutoTokenizer": ["code.Tokenizer"] * 2})
    config = json.loads((folder / "open_clip_config.json").read_text())
    config["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "x", "tokenizer_kwargs": {"trust_remote_code": True}}
    edit(folder / "open_clip_config.json", **config)
    with pytest.raises(XcompatError):
        load_encoder(str(folder))
    folder = Path(shutil.copytree(image_folder_of["timm_wrapper"], tmp_path / "timm"))
    torch.save({"weight": Trap(sprung)}, tmp_path / "weights.pth")
    arguments = json.loads((folder / "config.json").read_text()).get("model_args") or {}
    edit(folder / "config.json", model_args=arguments | {"checkpoint_path": str(tmp_path / "weights.pth")})
    with pytest.raises(XcompatError, match="sets checkpoint_path"):
        load_encoder(str(folder))


@pytest.mark.parametrize("tag", ["python/object/apply:os.system ['touch {}']", "python/object/new:os.system ['touch {}']"])
def test_tags_in_a_recipe(tag: str, tmp_path: Path, sprung: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"name: !!{tag.format(sprung)}\nmethod: xbt\n")
    with pytest.raises(XcompatError):
        load_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "plain.yaml").write_text("name: plain\nmethod: xbt\n")
    with pytest.raises(XcompatError):
        load_recipe(tmp_path / "plain.yaml", [f"name=!!{tag.format(sprung)}"])


def write_shard(file: Path, *members: tuple[str, bytes], special: dict[str, bytes] | None = None) -> None:
    with tarfile.open(file, "w") as tar:
        for name, kind in (special or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("scheme", ["pipe:", "http://127.0.0.1:9/", "file:", "s3://bucket/", "hf://datasets/me/x/"])
def test_shards_are_files(scheme: str, tmp_path: Path, sprung: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What webdataset would take for a command or an address is the name of a file here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(XcompatError, match="does not exist|is remote"):
        load_pairs(f"{scheme}touch {sprung}; cat x.tar" if scheme == "pipe:" else f"{scheme}x.tar")
    if "/" not in scheme:
        write_shard(tmp_path / f"{scheme}touch sprung #.tar", ("a.png", png()), ("a.txt", b"red"))
        assert len(load_pairs(PairSource(path=f"{scheme}touch sprung #.tar", max_bad_share=0))) == 1


def test_members_of_a_shard_escape_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    names = ("../escaped", f"{tmp_path}/escaped", "a/../../escaped", "good")
    members = [(f"{name}.{kind}", content) for name in names for kind, content in (("png", png()), ("txt", b"red"))]
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
    special = {f"x{number}.png": kind for number, kind in enumerate(kinds)}
    write_shard(inside / "shard.tar", *members, special=special)
    rows = list(read_rows([inside / "shard.tar"], ShardColumns(), Problems(max_bad_share=1.0, total_shards=1)))
    assert len(rows) == len(names) and all(row["image"]["bytes"] == png() for row in rows), "links and devices hold nothing"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["inside", "shard.tar"]
