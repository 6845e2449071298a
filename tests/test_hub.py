"""The Hub: what is pushed is pulled, bit for bit, and what goes wrong on the way is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from hub_server import Hub
from PIL import Image
from safetensors.torch import load_file
from test_models import ADAPTERS, build, embeddings, shake
from transformers import AutoModel

from xcompat import FingerprintMismatchError, XcompatError
from xcompat.encoders.standins import save_stand_in
from xcompat.models import METHODS


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Serve a Hub that this process and those it starts take for the only one, with an empty cache."""
    server = Hub()
    constants = huggingface_hub.constants
    environment = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_secret"}
    for name, value in (environment | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _: None)  # between tries
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def on_hub(hub: Hub, folder_of: dict[str, str]) -> dict[str, str]:
    """Return the name of a tiny encoder on the Hub per architecture, as `folder_of` returns folders."""
    hub.add("base/clip", folder_of["clip"])
    return {"clip": "base/clip"}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_pushed_is_pulled(method: str, hub: Hub, on_hub: dict[str, str], images: list[Image.Image]) -> None:
    model = build(method, on_hub)
    shake(model)
    model.push_to_hub("me/model")
    again = AutoModel.from_pretrained("me/model")
    assert type(again) is type(model) and again.fingerprint() == model.fingerprint()
    assert again.compatible_with == model.compatible_with
    for first, second in zip(embeddings(model, images), embeddings(again, images), strict=True):
        assert torch.equal(first, second)
    assert bool([name for name in hub.files("me/model") if name.startswith("preprocessor")]) == (not model.embeds_in_memory)
    large = [asked for asked in hub.asked if asked.startswith("PUT /large/")]
    assert len(large) == 1, "weights go as a large file"


def test_pulled_in_a_fresh_process(hub: Hub, on_hub: dict[str, str], images: list[Image.Image]) -> None:
    model = build("xbt", on_hub)
    shake(model)
    model.push_to_hub("me/model")
    code = (
        "import xcompat\nfrom transformers import AutoModel\n"
        "model = AutoModel.from_pretrained('me/model')\n"
        "print(model.fingerprint().digest, model.embed_texts(**model.processor.texts(['a shoe'])).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    embedded = model.embed_texts(**model.processor.texts(["a shoe"]))
    assert done.stdout.strip() == f"{model.fingerprint().digest} {embedded.tolist()}"


# ------------------------------------------------------------------------------------------------------ adapters alone


@pytest.mark.parametrize("architecture", ["blip", "clip", "siglip", "siglip2", "vision-text-dual-encoder", "open_clip", "vit"])
def test_adapters_alone_are_the_whole_model(
    architecture: str,
    folder_of: dict[str, str],
    image_folder_of: dict[str, str],
    images: list[Image.Image],
    tmp_path: Path,
) -> None:
    method = "bct" if architecture in image_folder_of else "xbt"
    adapters = {"lora": {"rank": 2}} if architecture == "open_clip" else ADAPTERS
    model = build(method, {"clip": (folder_of | image_folder_of)[architecture]}, adapters=adapters)
    shake(model)
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    model.save_pretrained(whole)
    model.leave_out_base().export(alone)
    first, second = AutoModel.from_pretrained(whole), AutoModel.from_pretrained(alone)
    assert first.fingerprint() == second.fingerprint() == model.fingerprint()
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    pixels = model.processor.images(images)
    assert torch.equal(first.embed_images(pixels), second.embed_images(pixels))
    kept = set(load_file(alone / "model.safetensors"))
    left_out = set(load_file(whole / "model.safetensors")) - kept
    assert {name for name in kept if "lora_" in name} and not {name for name in kept if "base_layer" in name}
    assert all(name.startswith("encoder.model.") for name in left_out) and len(left_out) > 20


def test_adapters_alone_hold_what_else_was_trained(folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    model = build("xbt", folder_of, train_encoder="layer_norm")
    shake(model)
    model.leave_out_base().save_pretrained(tmp_path)
    assert {name for name in load_file(tmp_path / "model.safetensors") if name.startswith("encoder.") and "norm" in name}
    again = AutoModel.from_pretrained(tmp_path)
    for first, second in zip(embeddings(model, images), embeddings(again, images), strict=True):
        assert torch.equal(first, second)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in again.named_parameters() if p.requires_grad
    }


def test_merged_adapters_are_saved_whole(folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", folder_of).leave_out_base()
    shake(model)
    model.merge_adapters().export(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.fingerprint() == model.fingerprint() and again.config.weights == "all"


def test_adapters_stay_with_the_commit_of_their_base(hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", on_hub)
    shake(model)
    trained_on = hub.repos["base/clip"].branches["main"]
    model.leave_out_base().push_to_hub("me/adapters")
    hub.add("base/clip", save_stand_in(tmp_path / "other", "clip", 16, seed=9))
    assert json.loads(hub.files("me/adapters")["config.json"])["encoder"]["revision"] == trained_on
    assert AutoModel.from_pretrained("me/adapters").fingerprint() == model.fingerprint(), "main has moved on, the commit has not"


def test_a_base_that_changed_is_refused(folder_of: dict[str, str], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(folder_of["clip"], base)
    model = build("xbt", {"clip": str(base)})
    model.leave_out_base().export(tmp_path / "adapters")
    shutil.copytree(save_stand_in(tmp_path / "other", "clip", 16, seed=9), base, dirs_exist_ok=True)
    refusal = rf"these adapters belong to {base}@\w{{12}}, but the base {base} is {base}@\w{{12}}; "
    with pytest.raises(FingerprintMismatchError, match=refusal) as refused:
        AutoModel.from_pretrained(tmp_path / "adapters")
    assert "\n" not in str(refused.value)
    with pytest.raises(FingerprintMismatchError, match="these adapters belong to"):
        model.save_pretrained(tmp_path / "again")
    shutil.rmtree(base)
    with pytest.raises(XcompatError, match=f"the base {base}, to which these adapters belong, is not to be had"):
        AutoModel.from_pretrained(tmp_path / "adapters")


@pytest.mark.parametrize(("method", "reason"), [("projection", "holds no encoder"), ("bct", "trained without adapters")])
def test_what_has_no_adapters_to_leave_alone(method: str, reason: str, folder_of: dict[str, str]) -> None:
    with pytest.raises(XcompatError, match=reason):
        build(method, folder_of).leave_out_base()


def test_a_revision_brings_its_own_preprocessing(hub: Hub, on_hub: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", on_hub)
    model.export(tmp_path / "model")
    first = hub.add("me/model", tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1] * 3}))
    hub.add("me/model", tmp_path / "model")
    assert AutoModel.from_pretrained("me/model", revision=first).fingerprint() == model.fingerprint()
    assert AutoModel.from_pretrained("me/model").fingerprint() != model.fingerprint()
