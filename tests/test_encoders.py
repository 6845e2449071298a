"""Every encoder behind one interface: what its library computes, round trips, adapters, stems, refusals; and iResNet."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import transformers
from conftest import ARCHITECTURES, IMAGE_ARCHITECTURES, TEXTS, refuses
from peft import PeftModel
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from schedule import mostly_nightly
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from xcompat.encoders import AdapterConfig, EncoderSource, build_encoder, load_encoder
from xcompat.encoders.adapter_settings import LoraSettings
from xcompat.encoders.adapters import inject_lora, save_lora
from xcompat.encoders.architectures.iresnet import IResNetConfig, IResNetModel
from xcompat.encoders.auto_classes import auto_calls
from xcompat.encoders.base import Encoder
from xcompat.encoders.open_clip_encoder import build_open_clip_encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.encoders.standins import stand_in
from xcompat.methods import METHODS

BASIC = {"layer_type": "basic", "embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16]}
RESNET18 = {"architecture": "resnet18", "model_args": {"channels": [8, 8, 8, 16], "layers": [1, 1, 1, 1]}}
SMALL_STEMS = {"resnet-small": {"model_type": "resnet", **BASIC}, "timm-small": {"model_type": "timm_wrapper", **RESNET18}}
EVERY = (*IMAGE_ARCHITECTURES, *SMALL_STEMS)
DAILY = ("clip", "open_clip", "siglip2", "resnet", "resnet-small", "timm_wrapper", "vit")
"""Of each library and kind one, which is tested on every change."""
CONVOLUTIONS = [name for name in EVERY if not name.startswith(("clip", "vit"))]


def load(folder: str) -> tuple[Encoder, Processor]:
    encoder, processor = load_encoder(folder)
    return encoder.requires_grad_(False), processor


def embed(encoder: Encoder, processor: Processor, images: list[Image.Image]) -> list[torch.Tensor]:
    with torch.no_grad():
        texts = [encoder.embed_texts(**processor.texts(TEXTS))] if encoder.has_text else []
        return [encoder.embed_images(processor.images(images)), *texts]


def save(encoder: Encoder, processor: Processor, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(
    folder_of: dict[str, str], image_folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    base = tmp_path_factory.mktemp("small")
    small = {}
    for name, model in SMALL_STEMS.items():
        scratch = ScratchSource(model=model, stem="small", image_size=32)
        small[name] = save(*encoder_from_scratch(scratch, seed=1), base / name)
    return folder_of | image_folder_of | small


@pytest.mark.parametrize("architecture", mostly_nightly(ARCHITECTURES, DAILY.__contains__))
def test_a_text_has_one_embedding_whatever_its_batch(architecture: str, folder_of: dict[str, str]) -> None:
    encoder, processor = load(folder_of[architecture])
    with torch.no_grad():
        together = encoder.embed_texts(**processor.texts(TEXTS))
        alone = torch.cat([encoder.embed_texts(**processor.texts([text])) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    fixed = processor.texts(["a"])["input_ids"].shape[1] == processor.max_length
    assert fixed == architecture.startswith("siglip"), "only SigLIP reads its padding"


@pytest.mark.parametrize("architecture", mostly_nightly((*ARCHITECTURES, *IMAGE_ARCHITECTURES), DAILY.__contains__))
def test_saving_keeps_encoders(architecture: str, folders: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    encoder, processor = load(folders[architecture])
    again, its_processor = load(save(encoder, processor, tmp_path))
    assert torch.equal(processor.images(images), its_processor.images(images))
    for first, second in zip(embed(encoder, processor, images), embed(again, its_processor, images), strict=True):
        assert torch.equal(first, second) and first.shape == (4, encoder.embedding_dim) and first.dtype == torch.float32
        torch.testing.assert_close(first.norm(dim=-1), torch.ones(4))
    assert encoder.fingerprint(processor) == again.fingerprint(its_processor)


@pytest.mark.parametrize(
    "architecture", mostly_nightly((*ARCHITECTURES, "clip_vision_model", "vit"), {*DAILY, "clip_vision_model"}.__contains__)
)
def test_adapters_turn_off_and_merge(architecture: str, folders: dict[str, str], images: list[Image.Image]) -> None:
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


def test_lora_takes_timm_towers_and_no_wrong_settings(folder_of: dict[str, str]) -> None:
    encoder, _ = load(folder_of["clip"])
    refuses("match no linear layer.*q_proj", encoder.add_adapters, AdapterConfig(lora={"targets": ["qproj"]}))
    refuses("no tower 'audio'", encoder.add_adapters, AdapterConfig(lora={"towers": ["audio"]}))
    description, vision = copy.deepcopy(stand_in("open_clip")[0].description), {"timm_model_name": "vit_tiny_patch16_224"}
    description["config"]["model_cfg"]["vision_cfg"] = vision | {"image_size": 224, "timm_pool": "token"}
    encoder = build_open_clip_encoder(description).eval().requires_grad_(False)
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
    both = embed(encoder.eval(), processor, images), embed(theirs, processor, images)
    for own, read, unadapted in zip(*both, plain, strict=True):
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


def test_fingerprint_sees_what_changes_embeddings(folder_of: dict[str, str]) -> None:
    encoder, processor = load(folder_of["clip"])
    seen = [encoder.fingerprint(processor)]
    encoder.model.visual_projection.weight.data[0, 0].add_(1e-3)
    seen.append(encoder.fingerprint(processor))
    processor.image_processor.image_mean = [0.4, 0.5, 0.5]
    seen.append(encoder.fingerprint(processor))
    processor.tokenizer.add_tokens(["shoe"])
    assert len({*seen, encoder.fingerprint(processor)}) == 4


def assert_same(first: Tensor, second: Tensor) -> None:
    """Equal weights that lie differently aligned in memory make a convolution round differently, in the last bit."""
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def of_timm(folder: str, pixels: Tensor, small: bool) -> Tensor:
    model = timm.create_model("resnet18", num_classes=0, channels=[8, 8, 8, 16], layers=[1, 1, 1, 1])
    if small:
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    weights = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict({name.removeprefix("timm_model."): tensor for name, tensor in weights.items()})
    return model.eval()(pixels)


def of_resnet(folder: str, pixels: Tensor) -> Tensor:
    encoder, _ = load(folder)
    model = transformers.ResNetModel(encoder.model.config)
    model.embedder.embedder.convolution, model.embedder.pooler = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Identity()
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()(pixels).pooler_output[:, :, 0, 0]


def library_features(name: str, folder: str, pixels: Tensor) -> Tensor:
    if name.startswith("timm"):
        return of_timm(folder, pixels, small=name == "timm-small")
    if name == "resnet-small":
        return of_resnet(folder, pixels)
    if name == "open_clip":
        model = open_clip.CLIP(**json.loads((Path(folder) / "open_clip_config.json").read_text())["model_cfg"])
        model.load_state_dict(load_file(Path(folder) / "open_clip_model.safetensors"))
        return model.eval().encode_image(pixels)
    if name == "clip_vision_model":
        return transformers.CLIPVisionModelWithProjection.from_pretrained(folder).eval()(pixels).image_embeds
    output = AutoModel.from_pretrained(folder).eval()(pixels)
    return output.last_hidden_state[:, 0] if name == "vit" else output.pooler_output.flatten(1)


@pytest.mark.parametrize("name", mostly_nightly(("open_clip", *EVERY), DAILY.__contains__))
@torch.no_grad()
def test_embeddings_are_the_librarys_normalised(name: str, folders: dict[str, str], images: list[Image.Image]) -> None:
    encoder, processor = load(folders[name])
    pixels = processor.images(images)
    embeds = encoder.embed_images(pixels)
    assert embeds.shape == (4, encoder.embedding_dim) == (4, 16) and embeds.dtype == torch.float32
    torch.testing.assert_close(embeds.norm(dim=-1), torch.ones(4))
    assert_same(embeds, F.normalize(library_features(name, folders[name], pixels), dim=-1))
    assert (embeds[0] - embeds[1]).abs().max() > 1e-3, "different images differ"
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    from_file = processor.images([Image.fromarray(image.permute(1, 2, 0).numpy())])
    torch.testing.assert_close(processor.to_pixels(image[None]), from_file, atol=1e-5, rtol=0)  # as in training


@pytest.mark.parametrize("name", mostly_nightly(EVERY, DAILY.__contains__))
def test_texts_are_refused_in_one_line(name: str, folders: dict[str, str]) -> None:
    encoder, processor = load(folders[name])
    assert not encoder.has_text and list(encoder.towers) == ["image"] and processor.max_length == 0
    refuses("has no text tower; to embed texts, choose", encoder.embed_texts, torch.zeros(1, 4, dtype=torch.int64))
    refuses("an image encoder has no tokenizer", processor.texts, TEXTS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model": {"model_type": "vit"}, "stem": "small"}, "stem: small needs a ResNet.*not vit"),
        ({"model": {"model_type": "timm_wrapper", "architecture": "resnet10t"}, "stem": "small"}, "not timm's resnet10t"),
        ({"model": {"model_type": "timm_wrapper", "architecture": "resnet5"}}, "cannot build timm_wrapper.*'resnet5'"),
        ({"model": {"model_type": "resnet", "depths": "3, 4"}}, "cannot build resnet from scratch.*depths"),
        ({"model": {"model_type": "bert"}}, "bert models do not embed images"),
        *(
            ({"model": {"model_type": "iresnet", **stages}}, f"cannot build iresnet from scratch.*{message}")
            for stages, message in (
                ({"depths": [1, 2], "hidden_sizes": [4]}, "depths has 2 stages and hidden_sizes 1; use the same number"),
                ({"depths": [], "hidden_sizes": []}, "depths has 0 stages"),
                ({"depths": [0], "hidden_sizes": [4]}, "must be at least 1"),
                ({"depths": 3}, "depths"),
            )
        ),
        (
            {"model": {"model_type": "timm_wrapper", "architecture": "vit_tiny_patch16_224"}, "image_size": 32},
            "cannot embed RGB images of 32x32 pixels.*224",
        ),
    ],
)
def test_an_architecture_that_cannot_be_built_is_named(source: dict[str, object], message: str) -> None:
    refuses(message, encoder_from_scratch, ScratchSource(**source))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model": {"model_type": "resnet", "depth": [1]}}, "no option 'depth'; did you mean 'depths'"),
        ({"model": {"model_type": "renet"}}, "unknown model_type 'renet'"),
        ({"model": {"depths": [1]}}, "unknown model_type 'None'"),
        ({"model": {"model_type": "clip"}, "stem": "small"}, "stem needs an image model"),
        ({"model": {"model_type": "clip"}, "image_size": 32}, "image_size needs an image model"),
    ],
)
def test_a_wrong_recipe_is_found_before_anything_is_built(source: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScratchSource(**source)


@pytest.mark.parametrize("name", ["mobilenet_v1", "mobilenet_v2"])
def test_one_training_step_does_not_overwrite_the_statistics(name: str, folders: dict[str, str]) -> None:
    def momenta(encoder: Encoder) -> set[float]:
        return {round(module.momentum, 6) for module in encoder.modules() if isinstance(module, nn.BatchNorm2d)}

    loaded, _ = load(folders[name])
    assert momenta(loaded) == momenta(build_encoder(loaded.description)) == {0.003}
    scratch, _ = encoder_from_scratch(ScratchSource(model={"model_type": name, "depth_multiplier": 0.25}, image_size=32))
    assert momenta(scratch) == {0.1}


@pytest.mark.parametrize("trained", [True, False])
@torch.no_grad()
def test_a_pooler_counts_only_if_its_weights_are_there(trained: bool, folders: dict[str, str], tmp_path: Path) -> None:
    encoder, processor = load(folders["vit"])
    model = transformers.ViTModel(encoder.model.config, add_pooling_layer=trained).eval()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    found, _ = load(str(tmp_path))
    pixels = torch.randn(2, 3, 32, 32)
    output = model(pixels)
    assert torch.equal(found.image_features(pixels), output.pooler_output if trained else output.last_hidden_state[:, 0])
    assert any("pooler" in parameter for parameter, _ in found.named_parameters()) is trained


@torch.no_grad()
def test_a_folder_in_the_format_of_timm(tmp_path: Path, images: list[Image.Image]) -> None:
    args = {"channels": [8, 8, 8, 16], "layers": [1, 1, 1, 1]}
    model = timm.create_model("resnet18", num_classes=5, **args).eval()
    save_for_hf(model, str(tmp_path), model_args=args, safe_serialization=True)
    encoder, processor = load_encoder(EncoderSource(name=str(tmp_path), model_type="timm_wrapper"))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = torch.stack([transform(image) for image in images])
    assert torch.equal(processor.images(images), pixels) and processor.image_size == (224, 224)
    model.reset_classifier(0)
    assert torch.equal(encoder.image_features(pixels), model(pixels))


def test_models_that_do_not_fit_are_refused(folders: dict[str, str], tmp_path: Path) -> None:
    encoder, processor = load(folders["resnet"])
    folder = Path(save(encoder, processor, tmp_path / "resnet"))
    kept = {name: tensor for name, tensor in encoder.model.state_dict().items() if "stages.1" not in name}
    encoder.model.save_pretrained(folder, state_dict=kept)
    refuses(r"lacks \d+ weights, e.g. encoder.stages.1", load_encoder, str(folder))
    shutil.copytree(folders["clip"], tmp_path / "clip")
    weights = tmp_path / "clip" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if name != "text_projection.weight"}
    save_file(kept, weights, metadata={"format": "pt"})
    refuses("lacks 1 weights, e.g. text_projection.weight; download or save it again", load_encoder, str(tmp_path / "clip"))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    refuses("bert models do not embed images", load_encoder, str(tmp_path / "bert"))
    refuses("does not exist", load_encoder, "./nowhere/at/all")
    refuses("is a clip model, not siglip", load_encoder, EncoderSource(name=folders["clip"], model_type="siglip"))
    METHODS["independent"].from_encoder(folders["open_clip"], classes=["ant", "bee"]).save_pretrained(tmp_path / "ours")
    refuses(rf"use its encoder \({folders['open_clip']}\)", load_encoder, str(tmp_path / "ours"))
    refuses("cannot embed RGB images of 48x48", load_encoder, EncoderSource(name=folders["vit"], image_size=48))
    refuses("pixels, not 48; remove image_size", load_encoder, EncoderSource(name=folders["timm_wrapper"], image_size=48))
    load(folders["vit"])[0].save_pretrained(tmp_path)
    for size, factor, message in ((64, 1 / 255, "cannot embed RGB images of 64x64"), (32, 1 / 127, "does more than resize")):
        transformers.ViTImageProcessor(size={"height": size, "width": size}, rescale_factor=factor).save_pretrained(tmp_path)
        refuses(message, load_encoder, str(tmp_path))


@pytest.mark.parametrize("name", mostly_nightly(["resnet", "mobilenet_v2"], "resnet".__eq__))
@torch.no_grad()
def test_another_size_is_the_librarys(name: str, folders: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    source = EncoderSource(name=folders[name], image_size=48)
    encoder, processor = load_encoder(source)
    pixels = processor.images(images)
    assert processor.image_size == (48, 48) and pixels.shape[2:] == (48, 48)
    features = AutoModel.from_pretrained(folders[name]).eval()(pixels).pooler_output.flatten(1)
    assert_same(encoder.image_features(pixels), features)
    again, same = load_encoder(EncoderSource.from_description(encoder.description))
    saved = load_encoder(save(encoder, processor, tmp_path / "saved"))
    assert encoder.fingerprint(processor) == again.fingerprint(same) == saved[0].fingerprint(saved[1])
    made_for, pixels_of = load(folders[name])
    assert encoder.fingerprint(processor) != made_for.fingerprint(pixels_of)


def test_batch_statistics_do_not_move_beside_lora() -> None:
    """A hybrid: with linear layers for LoRA and batch norms that training would change for good."""
    model: dict[str, Any] = {"model_type": "levit", "drop_path_rate": 0}
    model |= {"hidden_sizes": [16] * 3, "num_attention_heads": [2] * 3, "depths": [1] * 3, "key_dim": [8] * 3}
    encoder, processor = encoder_from_scratch(ScratchSource(model=model, image_size=64))
    pixels = torch.randn(4, 3, *processor.image_size)
    before = encoder.embed_images(pixels)
    encoder.add_adapters(AdapterConfig(lora={"rank": 2}))
    for parameter in encoder.adapter_parameters():
        parameter.data.add_(torch.randn_like(parameter))
    encoder.train()
    encoder.embed_images(pixels).sum().backward()
    encoder.eval()
    with encoder.adapters_disabled():
        assert torch.equal(encoder.embed_images(pixels), before)
    encoder.merge_adapters()
    encoder.train()
    assert all(module.training for module in encoder.modules()), "what has no adapters trains as a whole"


@pytest.mark.parametrize("name", mostly_nightly(CONVOLUTIONS, DAILY.__contains__))
def test_convolutions_take_neither_prompts_nor_lora(name: str, folders: dict[str, str]) -> None:
    encoder, _ = load(folders[name])
    refuses("cannot take visual prompts", encoder.add_adapters, AdapterConfig(prompts=2))
    refuses("no linear layers in its blocks, only convolutions", encoder.add_adapters, AdapterConfig(lora={"rank": 2}))


SMALL = {"depths": [2, 1], "hidden_sizes": [4, 8], "image_size": 9}
FACES = 512
"""Dimensions of the models whose sizes are published."""


def naive(weights: dict[str, Tensor], depths: list[int], x: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        kept = (weights[f"{name}.{key}"].view(1, -1, 1, 1) for key in ("running_mean", "running_var", "weight", "bias"))
        mean, variance, slope, offset = kept
        return (x - mean) / (variance + 1e-5).sqrt() * slope + offset

    def prelu(x: Tensor, name: str) -> Tensor:
        return torch.where(x > 0, x, x * weights[f"{name}.weight"].view(1, -1, 1, 1))

    x = prelu(norm(F.conv2d(x, weights["stem.0.weight"], padding=1), "stem.1"), "stem.2")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            at, stride = f"stages.{stage}.{block}", 2 if block == 0 else 1
            y = F.conv2d(norm(x, f"{at}.residual.0"), weights[f"{at}.residual.1.weight"], padding=1)
            y = prelu(norm(y, f"{at}.residual.2"), f"{at}.residual.3")
            y = norm(F.conv2d(y, weights[f"{at}.residual.4.weight"], stride=stride, padding=1), f"{at}.residual.5")
            if block == 0:
                x = norm(F.conv2d(x, weights[f"{at}.shortcut.0.weight"], stride=2), f"{at}.shortcut.1")
            x = x + y
    return norm(x, "norm").flatten(1)


@torch.no_grad()
def test_features_are_those_of_a_naive_forward_pass() -> None:
    torch.manual_seed(0)
    model = IResNetModel(IResNetConfig(**SMALL))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)  # statistics, slopes and offsets that all matter
    model.eval()
    pixels = torch.randn(3, 3, 9, 9)
    output = model(pixels)
    assert output.last_hidden_state.shape == (3, 8, 3, 3) and output.pooler_output.shape == (3, 72)
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(output.pooler_output.double(), naive(weights, SMALL["depths"], pixels.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("depths", "millions"),
    [([2, 2, 2, 2], "24.03"), ([3, 4, 14, 3], "43.59"), ([3, 13, 30, 3], "65.16")],
    ids=["iresnet18", "iresnet50", "iresnet100"],
)
def test_models_of_faces_have_the_published_sizes(depths: list[int], millions: str) -> None:
    with torch.device("meta"):
        encoder = IResNetModel(IResNetConfig(depths=depths))
    features = encoder.config.hidden_sizes[-1] * 7 * 7
    head = features * FACES + FACES + 2 * FACES  # the linear layer and a batch norm whose slopes are not trained
    assert f"{(sum(weights.numel() for weights in encoder.parameters()) + head) / 1e6:.2f}" == millions


def test_iresnet_is_drawn_and_known_to_transformers(tmp_path: Path) -> None:
    assert AutoConfig.for_model("iresnet", **SMALL).image_size == 9
    encoder, processor = encoder_from_scratch(ScratchSource(model={"model_type": "iresnet", **SMALL}, image_size=9))
    encoder.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path), IResNetModel)
    assert auto_calls(load_encoder(str(tmp_path))[0]) is None
    encoder, _ = encoder_from_scratch(ScratchSource(model={"model_type": "iresnet", "depths": [1], "hidden_sizes": [64]}))
    drawn = encoder.model.stages[0][0].residual[1].weight
    assert drawn.std().item() == pytest.approx(0.1, rel=0.02) and abs(drawn.mean().item()) < 0.002
    assert (encoder.model.stem[2].weight == 0.25).all() and (encoder.model.norm.weight == 1).all()
