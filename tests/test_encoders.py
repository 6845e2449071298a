"""Every encoder behind one interface: shapes, padding, round trips, adapters on, off and merged."""

from __future__ import annotations

import copy
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ARCHITECTURES, IMAGE_ARCHITECTURES, TEXTS
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from schedule import mostly_nightly

from xcompat.core.errors import XcompatError
from xcompat.encoders import AdapterConfig, EncoderSource, load_encoder
from xcompat.encoders.adapter_settings import LoraSettings
from xcompat.encoders.adapters import inject_lora, save_lora
from xcompat.encoders.base import Encoder
from xcompat.encoders.open_clip_encoder import build_open_clip_encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.standins import stand_in

DAILY = ("clip", "open_clip", "siglip2", "resnet", "timm_wrapper", "vit")
"""Of each library and kind one, which is tested on every change."""


def load(folder: str) -> tuple[Encoder, Processor]:
    encoder, processor = load_encoder(folder)
    return encoder.requires_grad_(False), processor


def embed(encoder: Encoder, processor: Processor, images: list[Image.Image]) -> list[torch.Tensor]:
    """Embed images, and texts where the encoder reads them."""
    with torch.no_grad():
        texts = [encoder.embed_texts(**processor.texts(TEXTS))] if encoder.has_text else []
        return [encoder.embed_images(processor.images(images)), *texts]


@pytest.fixture(scope="module")
def folders(folder_of: dict[str, str], image_folder_of: dict[str, str]) -> dict[str, str]:
    return folder_of | image_folder_of


@pytest.mark.parametrize("architecture", mostly_nightly(ARCHITECTURES, ("clip", "open_clip", "siglip2").__contains__))
def test_a_text_has_one_embedding_whatever_its_batch(architecture: str, folder_of: dict[str, str]) -> None:
    encoder, processor = load(folder_of[architecture])
    with torch.no_grad():
        together = encoder.embed_texts(**processor.texts(TEXTS))
        alone = torch.cat([encoder.embed_texts(**processor.texts([text])) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    fixed = processor.texts(["a"])["input_ids"].shape[1] == processor.max_length
    assert fixed == architecture.startswith("siglip"), "only SigLIP reads its padding"


@pytest.mark.parametrize("architecture", mostly_nightly((*ARCHITECTURES, *IMAGE_ARCHITECTURES), DAILY.__contains__))
def test_save_and_load_keep_embeddings_and_fingerprint(
    architecture: str, folders: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    encoder, processor = load(folders[architecture])
    encoder.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again, its_processor = load(str(tmp_path))
    assert torch.equal(processor.images(images), its_processor.images(images))
    for first, second in zip(embed(encoder, processor, images), embed(again, its_processor, images), strict=True):
        assert torch.equal(first, second) and first.shape == (4, encoder.embedding_dim) and first.dtype == torch.float32
        torch.testing.assert_close(first.norm(dim=-1), torch.ones(4))
    assert encoder.fingerprint(processor) == again.fingerprint(its_processor)


@pytest.mark.parametrize(
    "architecture", mostly_nightly((*ARCHITECTURES, "clip_vision_model", "vit"), {*DAILY, "clip_vision_model"}.__contains__)
)
def test_adapters_off_is_the_original_and_merged_the_adapted(
    architecture: str, folders: dict[str, str], images: list[Image.Image]
) -> None:
    encoder, processor = load(folders[architecture])
    before = embed(encoder, processor, images)
    encoder.add_adapters(AdapterConfig(lora={"rank": 2}, prompts=3))
    for parameter in encoder.adapter_parameters():
        parameter.data.add_(torch.randn_like(parameter))
    encoder.eval()
    on = embed(encoder, processor, images)
    with encoder.adapters_disabled():
        off = embed(encoder, processor, images)
    for original, without, with_adapters in zip(before, off, on, strict=True):
        assert torch.equal(original, without)
        assert (original - with_adapters).abs().max() > 1e-3
    assert torch.equal(embed(encoder, processor, images)[0], on[0]), "adapters are back after the block"
    encoder.merge_adapters()
    assert not [name for name, _ in encoder.named_parameters() if "lora" in name]
    for adapted, merged in zip(on, embed(encoder, processor, images), strict=True):
        torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora": {"targets": ["qproj"]}}, "match no linear layer.*q_proj"),
        ({"lora": {"towers": ["audio"]}}, "no tower 'audio'"),
    ],
)
def test_wrong_lora_settings_are_named(config: dict[str, object], message: str, folder_of: dict[str, str]) -> None:
    encoder, _ = load(folder_of["clip"])
    with pytest.raises(XcompatError, match=message):
        encoder.add_adapters(AdapterConfig(**config))


def open_clip_with(vision: dict[str, object]) -> Encoder:
    """Return an encoder of open_clip with another image tower."""
    description = copy.deepcopy(stand_in("open_clip")[0].description)
    description["config"]["model_cfg"]["vision_cfg"] = vision
    return build_open_clip_encoder(description).eval().requires_grad_(False)


def test_a_tower_of_timm_in_open_clip_takes_prompts_and_lora() -> None:
    encoder = open_clip_with({"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "token"})
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    before = encoder.embed_images(pixels)
    encoder.add_adapters(AdapterConfig(lora={"rank": 2, "targets": ["qkv"], "towers": ["image"]}, prompts=2))
    assert not torch.allclose(encoder.embed_images(pixels), before, atol=1e-4), "prompts have an effect"
    with encoder.adapters_disabled():
        assert torch.equal(encoder.embed_images(pixels), before)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_lora_of_attention_reads_its_input_through_dropout(bias: bool, batch_first: bool) -> None:
    plain = torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first)
    tower = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([copy.deepcopy(plain)])})
    inject_lora({"image": tower}, LoraSettings(rank=2, alpha=4, dropout=0.5))
    layer: Any = tower.get_submodule("blocks.0")
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    up.data.normal_()
    given = torch.randn((3, 5, 8) if batch_first else (5, 3, 8))
    mask = torch.triu(torch.full((5, 5), -torch.inf), diagonal=1)
    torch.manual_seed(2)
    found, _ = layer.train()(given, given, given, need_weights=False, attn_mask=mask)
    torch.manual_seed(2)
    thinned = torch.nn.functional.dropout(given, 0.5)
    projected = given @ plain.in_proj_weight.T + (plain.in_proj_bias if bias else 0) + 2 * thinned @ down.T @ up.T  # alpha / rank
    projected = projected if batch_first else projected.transpose(0, 1)
    query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in projected.chunk(3, dim=-1))
    shares = (query @ key.mT / 2 + mask).softmax(-1)
    expected = plain.out_proj((shares @ value).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(found if batch_first else found.transpose(0, 1), expected)
    found.square().sum().backward()
    assert down.grad.any() and up.grad.any()
    first, again = (layer.eval()(given, given, given)[0] for _ in range(2))
    assert torch.equal(first, again), "queries and galleries are embedded without dropout"


def test_peft_reads_the_lora_of_attention(folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    encoder, processor = load(folder_of["open_clip"])
    settings = LoraSettings(rank=2)
    encoder.add_adapters(AdapterConfig(lora=settings))
    for parameter in encoder.adapter_parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    save_lora(encoder.model, settings, "base", None, tmp_path)
    theirs = load(folder_of["open_clip"])[0]
    plain = embed(theirs, processor, images)
    with warnings.catch_warnings(action="ignore"):  # of out_proj, which PEFT adapts too and which stays as it was
        adapted = PeftModel.from_pretrained(theirs.model, tmp_path)
    theirs.eval()
    for own, read, unadapted in zip(
        embed(encoder.eval(), processor, images), embed(theirs, processor, images), plain, strict=True
    ):
        torch.testing.assert_close(own, read, atol=1e-5, rtol=0)
        assert not torch.allclose(read, unadapted, atol=1e-3)
    assert adapted.base_model.model is theirs.model


def test_every_token_of_open_clip_counts(folder_of: dict[str, str]) -> None:
    encoder, processor = load(folder_of["open_clip"])
    texts = ["sale!% off", "!", "!!!"]  # id 0 is a token of CLIP's vocabulary and what fills up a batch
    padded = processor.tokenizer(texts)
    with torch.no_grad():
        whole = encoder.embed_texts(padded)
        trimmed = encoder.embed_texts(**processor.texts(texts))
    torch.testing.assert_close(whole, trimmed, atol=1e-5, rtol=0)
    assert [ids[-1] for ids in processor.tokenize(texts)] == [49407] * 3


@pytest.mark.parametrize("settings", [{}, {"do_normalize": False}, {"rescale_factor": 1 / 127.5}, {"do_rescale": False}], ids=str)
@pytest.mark.parametrize("name", ["clip", "siglip", "siglip2", "blip", "vit", "mobilenet_v2"])
def test_pixels_are_those_of_the_library(name: str, settings: dict[str, object], images: list[Image.Image]) -> None:
    _, processor = stand_in(name)
    for key, value in settings.items():
        setattr(processor.image_processor, key, value)
    if "do_normalize" in settings:
        processor = replace(processor, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # as it is read from such a configuration
    theirs = processor.image_processor([image.convert("RGB") for image in images], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(processor.images(images), theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("change", ["weights", "pixels", "tokens"])
def test_fingerprint_sees_what_changes_embeddings(change: str, folder_of: dict[str, str]) -> None:
    encoder, processor = load(folder_of["clip"])
    before = encoder.fingerprint(processor)
    if change == "weights":
        encoder.model.visual_projection.weight.data[0, 0].add_(1e-3)
    elif change == "pixels":
        processor.image_processor.image_mean = [0.4, 0.5, 0.5]
    else:
        processor.tokenizer.add_tokens(["shoe"])
    assert encoder.fingerprint(processor) != before


def test_missing_weights_are_named(folder_of: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(folder_of["clip"], tmp_path / "clip")
    weights = load_file(tmp_path / "clip" / "model.safetensors")
    del weights["text_projection.weight"]
    save_file(weights, tmp_path / "clip" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(XcompatError, match="lacks 1 weights, e.g. text_projection.weight; download or save it again"):
        load_encoder(str(tmp_path / "clip"))


@pytest.mark.parametrize(("architecture", "prefix"), [("clip", ""), ("open_clip", "open_clip_")])
def test_loading_refuses_what_is_not_safetensors(
    architecture: str, prefix: str, folder_of: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(folder_of[architecture], tmp_path / "model")
    (tmp_path / "model" / f"{prefix}model.safetensors").rename(tmp_path / "model" / f"{prefix}pytorch_model.bin")
    with pytest.raises(XcompatError, match="safetensors"):
        load_encoder(str(tmp_path / "model"))


def test_a_missing_folder_and_a_wrong_architecture_are_named(folder_of: dict[str, str]) -> None:
    with pytest.raises(XcompatError, match="does not exist"):
        load_encoder("./nowhere/at/all")
    with pytest.raises(XcompatError, match="is a clip model, not siglip"):
        load_encoder(EncoderSource(name=folder_of["clip"], model_type="siglip"))
