"""Configurations with impossible numbers are refused in one line before anything large is built."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_models import build
from torch import nn
from transformers import AutoModel

from xcompat.core.checksums import CHECKSUMS
from xcompat.core.errors import XcompatError
from xcompat.encoders import load_encoder
from xcompat.encoders.build_limits import TensorCounts, check_config, limit_model_size, weights_of
from xcompat.encoders.scratch import ScratchSource
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import XbtModel
from xcompat.models.embedder import load_checkpoint

Path_ = tuple[str | int, ...]
HUGE = 20_000_000


def integers(value: Any, place: Path_ = ()) -> Iterator[Path_]:
    """Yield the place of every integer in nested lists and dictionaries."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from integers(inner, (*place, key))
    elif type(value) is int:
        yield place


def put(file: Path, place: Path_, number: int) -> None:
    """Replace one number of a JSON file."""
    whole = inner = json.loads(file.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = number
    file.write_text(json.dumps(whole))


@pytest.fixture
def copied(tmp_path: Path, folder_of: dict[str, str], image_folder_of: dict[str, str]) -> Callable[[str], Path]:
    """Return a function that copies a tiny encoder, or a compatible model around one, without its checksums."""

    def copy(kind: str) -> Path:
        folder = tmp_path / kind
        if kind == "sentence-transformers":
            save_stand_in(folder, kind, 16)
        elif kind == "xbt":
            build("xbt", folder_of).save_pretrained(folder)
            (folder / CHECKSUMS).unlink()
        else:
            shutil.copytree((folder_of | image_folder_of)[kind], folder)
        return folder

    return copy


@pytest.mark.parametrize("kind", ["clip", "open_clip", "sentence-transformers", "timm_wrapper", "vit", "xbt"])
def test_no_number_of_a_config_takes_the_memory(kind: str, copied: Callable[[str], Path]) -> None:
    """Every integer in turn is replaced by 20 million: the model loads as before, or one line says what is wrong."""
    folder, load = copied(kind), AutoModel.from_pretrained if kind == "xbt" else load_encoder
    tried = loaded = 0
    for file in (*folder.glob("*config.json"), *folder.glob("*/config.json")):
        if file.name == "tokenizer_config.json":
            continue
        original = file.read_text()
        for place in integers(json.loads(original)):
            put(file, place, HUGE)
            with suppress(XcompatError):
                load(str(folder))
                loaded += 1
            tried += 1
        file.write_text(original)
    assert tried > loaded


@pytest.mark.parametrize("load", [AutoModel.from_pretrained, XbtModel.from_pretrained, load_checkpoint])
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("encoder", "config", "text_config", "num_hidden_layers"), r"num_hidden_layers is 20,000,000, .* more than 10,000"),
        (("encoder", "config", "vision_config", "hidden_size"), "asks for a model far larger than its weights"),
        (("encoder", "config", "text_config", "vocab_size"), "asks for a model far larger than its weights"),
        (("adapters", "prompts"), "asks for a model far larger than its weights"),
        (("memory", "entries"), "asks for a model far larger than its weights"),
    ],
)
def test_a_compatible_model_is_refused_by_its_config(
    load: Callable[..., Any], keys: Path_, message: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("xbt")
    if keys[0] == "memory":
        put(folder / "config.json", ("memory",), {"sharpness": 8.0, "share": 0.5})  # type: ignore[arg-type]
    put(folder / "config.json", keys, HUGE)
    with pytest.raises(XcompatError, match=message):
        load(str(folder))


@pytest.mark.parametrize("digits", [30, 4000, 5000])
@pytest.mark.parametrize(
    ("kind", "file"), [("clip", "config.json"), ("open_clip", "open_clip_config.json"), ("xbt", "config.json")]
)
def test_numbers_of_thousands_of_digits_are_one_line(kind: str, file: str, digits: int, copied: Callable[[str], Path]) -> None:
    folder = copied(kind)
    path = folder / file
    path.write_text(path.read_text().replace("{", '{"width": ' + "9" * digits + ",", 1))
    loaders = [AutoModel.from_pretrained, XbtModel.from_pretrained] if kind == "xbt" else [load_encoder]
    for load in loaders:
        with pytest.raises(XcompatError) as refused:
            load(str(folder))
        assert len(str(refused.value)) < 400


def test_image_sizes_that_no_model_takes_are_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("clip")
    put(folder / "preprocessor_config.json", ("size",), {"height": HUGE, "width": 32})  # type: ignore[arg-type]
    with pytest.raises(XcompatError, match=r"images would be resized to 20,000,000 pixels"):
        load_encoder(str(folder))


def test_a_recipe_cannot_ask_for_millions_of_layers() -> None:
    with pytest.raises(ValueError, match=r"depths\.1 is 20,000,000"):
        ScratchSource(model={"model_type": "resnet", "depths": [1, HUGE]}, image_size=32)


def test_usual_numbers_of_configs_pass() -> None:
    check_config(
        {"rope_theta": 500_000_000, "vocab_size": 256_000, "max_position_embeddings": 10_485_760, "block_size": 131_072}, "x"
    )
    check_config({"model_max_length": 10**30, "num_hidden_layers": 96, "num_labels": 21_843, "eos_token_id": [2, 128_009]}, "x")


def test_the_limit_follows_the_weights_and_only_in_its_block(folder_of: dict[str, str], tmp_path: Path) -> None:
    found = weights_of(folder_of["clip"])
    weights = list(load_encoder(folder_of["clip"])[0].state_dict().values())
    assert found == TensorCounts(len(weights), sum(weight.numel() for weight in weights))
    with (
        pytest.raises(XcompatError, match="far larger than its weights"),
        limit_model_size(folder_of["clip"]),
        torch.device("meta"),
    ):
        nn.Linear(2**20, 2**20)
    with limit_model_size(folder_of["clip"]), limit_model_size(str(tmp_path)), torch.device("meta"):
        nn.Linear(2**13, 2**14)  # of a model without weights that fits into the memory
    with torch.device("meta"):
        nn.Linear(2**20, 2**20)
