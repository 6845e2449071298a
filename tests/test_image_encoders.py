"""Encoders without a text tower behind the same interface: what their libraries compute, stems, refusals; and iResNet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from conftest import IMAGE_ARCHITECTURES, TEXTS
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file
from schedule import mostly_nightly
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    BertConfig,
    BertModel,
    CLIPVisionModelWithProjection,
    ResNetModel,
    ViTImageProcessor,
    ViTModel,
)

from xcompat.core.errors import XcompatError
from xcompat.encoders import AdapterConfig, EncoderSource, build_encoder, load_encoder
from xcompat.encoders.architectures.iresnet import IResNetConfig, IResNetModel
from xcompat.encoders.auto_classes import auto_calls
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.methods import METHODS

BASIC = {"layer_type": "basic", "embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16]}
RESNET18 = {"architecture": "resnet18", "model_args": {"channels": [8, 8, 8, 16], "layers": [1, 1, 1, 1]}}
SMALL_STEMS = {"resnet-small": {"model_type": "resnet", **BASIC}, "timm-small": {"model_type": "timm_wrapper", **RESNET18}}
EVERY = (*IMAGE_ARCHITECTURES, *SMALL_STEMS)
OFTEN = ("resnet", "resnet-small", "timm_wrapper", "vit")
"""Of each library and kind one, which is tested on every change."""
TOKENS = ("clip_vision_model", "vit")


def save(encoder: Encoder, processor: Processor, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    encoder.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def load(folder: str) -> tuple[Encoder, Processor]:
    encoder, processor = load_encoder(folder)
    return encoder.requires_grad_(False), processor


@pytest.fixture(scope="module")
def folders(image_folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the stand-ins and two ResNets with the small stem."""
    base = tmp_path_factory.mktemp("small")
    small = {}
    for name, model in SMALL_STEMS.items():
        scratch = ScratchSource(model=model, stem="small", image_size=32)
        small[name] = save(*encoder_from_scratch(scratch, seed=1), base / name)
    return image_folder_of | small


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
    model = ResNetModel(encoder.model.config)
    model.embedder.embedder.convolution, model.embedder.pooler = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Identity()
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"))
    return model.eval()(pixels).pooler_output[:, :, 0, 0]


def library_features(name: str, folder: str, pixels: Tensor) -> Tensor:
    """Compute the features with the library alone, as its own documentation does."""
    if name.startswith("timm"):
        return of_timm(folder, pixels, small=name == "timm-small")
    if name == "resnet-small":
        return of_resnet(folder, pixels)
    if name == "clip_vision_model":
        return CLIPVisionModelWithProjection.from_pretrained(folder).eval()(pixels).image_embeds
    output = AutoModel.from_pretrained(folder).eval()(pixels)
    return output.last_hidden_state[:, 0] if name == "vit" else output.pooler_output.flatten(1)


@pytest.mark.parametrize("name", mostly_nightly(EVERY, OFTEN.__contains__))
@torch.no_grad()
def test_embeddings_are_what_the_library_computes_normalised(
    name: str, folders: dict[str, str], images: list[Image.Image]
) -> None:
    encoder, processor = load(folders[name])
    pixels = processor.images(images)
    embeds = encoder.embed_images(pixels)
    assert embeds.shape == (4, encoder.embedding_dim) == (4, 16) and embeds.dtype == torch.float32
    torch.testing.assert_close(embeds.norm(dim=-1), torch.ones(4))
    assert_same(embeds, F.normalize(library_features(name, folders[name], pixels), dim=-1))
    assert (embeds[0] - embeds[1]).abs().max() > 1e-3, "different images differ"


@torch.no_grad()
def test_the_image_tower_of_open_clip_is_what_the_library_computes(folder_of: dict[str, str], images: list[Image.Image]) -> None:
    encoder, processor = load(folder_of["open_clip"])
    assert encoder.has_text
    model_cfg = json.loads((Path(folder_of["open_clip"]) / "open_clip_config.json").read_text())["model_cfg"]
    model = open_clip.CLIP(**model_cfg)
    model.load_state_dict(load_file(Path(folder_of["open_clip"]) / "open_clip_model.safetensors"))
    pixels = processor.images(images)
    assert torch.equal(encoder.embed_images(pixels), model.eval().encode_image(pixels, normalize=True))


@pytest.mark.parametrize("name", mostly_nightly(EVERY, OFTEN.__contains__))
def test_training_pixels_are_evaluation_pixels(name: str, folders: dict[str, str]) -> None:
    _, processor = load(folders[name])
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    from_file = processor.images([Image.fromarray(image.permute(1, 2, 0).numpy())])
    torch.testing.assert_close(processor.to_pixels(image[None]), from_file, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", mostly_nightly(EVERY, OFTEN.__contains__))
def test_texts_are_refused_in_one_line(name: str, folders: dict[str, str]) -> None:
    encoder, processor = load(folders[name])
    assert not encoder.has_text and list(encoder.towers) == ["image"] and processor.max_length == 0
    with pytest.raises(XcompatError, match=r"has no text tower; to embed texts, choose an image-text model") as refusal:
        encoder.embed_texts(torch.zeros(1, 4, dtype=torch.int64))
    assert "\n" not in str(refusal.value)
    with pytest.raises(XcompatError, match="an image encoder has no tokenizer"):
        processor.texts(TEXTS)


@pytest.mark.parametrize("name", SMALL_STEMS)
@torch.no_grad()
def test_the_small_stem_keeps_every_pixel(name: str) -> None:
    sizes = {}
    for stem in (None, "small"):
        encoder, _ = encoder_from_scratch(ScratchSource(model=SMALL_STEMS[name], stem=stem, image_size=32))
        first = encoder.model.encoder.stages[0] if name == "resnet-small" else encoder.model.timm_model.layer1
        first.register_forward_pre_hook(lambda _, inputs, stem=stem: sizes.update({stem: inputs[0].shape[-2:]}))
        encoder.embed_images(torch.zeros(1, 3, 32, 32))
    assert sizes == {None: (8, 8), "small": (32, 32)}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"model": {"model_type": "vit"}, "stem": "small"}, "stem: small needs a ResNet.*not vit"),
        ({"model": {"model_type": "timm_wrapper", "architecture": "resnet10t"}, "stem": "small"}, "not timm's resnet10t"),
        ({"model": {"model_type": "timm_wrapper", "architecture": "resnet5"}}, "cannot build timm_wrapper.*'resnet5'"),
        ({"model": {"model_type": "resnet", "depths": "3, 4"}}, "cannot build resnet from scratch.*depths"),
        ({"model": {"model_type": "bert"}}, "bert models do not embed images"),
        (
            {"model": {"model_type": "timm_wrapper", "architecture": "vit_tiny_patch16_224"}, "image_size": 32},
            "cannot embed RGB images of 32x32 pixels.*224",
        ),
    ],
)
def test_an_architecture_that_cannot_be_built_is_named(source: dict[str, object], message: str) -> None:
    with pytest.raises(XcompatError, match=message):
        encoder_from_scratch(ScratchSource(**source))


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
    model = ViTModel(encoder.model.config, add_pooling_layer=trained).eval()
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


def test_a_compatible_model_around_open_clip_is_no_encoder(folder_of: dict[str, str], tmp_path: Path) -> None:
    METHODS["independent"].from_encoder(folder_of["open_clip"], classes=["ant", "bee"]).save_pretrained(tmp_path)
    with pytest.raises(XcompatError, match=rf"around an encoder of open_clip .*; use its encoder \({folder_of['open_clip']}\)"):
        load_encoder(str(tmp_path))


def test_loading_names_what_is_missing(folders: dict[str, str], tmp_path: Path) -> None:
    encoder, processor = load(folders["resnet"])
    folder = Path(save(encoder, processor, tmp_path / "resnet"))
    weights = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if "stages.1" not in name}
    encoder.model.save_pretrained(folder, state_dict=kept)
    with pytest.raises(XcompatError, match=r"lacks \d+ weights, e.g. encoder.stages.1"):
        load_encoder(str(folder))
    weights.unlink()
    torch.save(encoder.model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(XcompatError, match="safetensors"):
        load_encoder(str(folder))
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    with pytest.raises(XcompatError, match="bert models do not embed images"):
        load_encoder(str(tmp_path / "bert"))


@pytest.mark.parametrize("name", mostly_nightly(["resnet", "mobilenet_v2"], "resnet".__eq__))
@torch.no_grad()
def test_an_encoder_at_another_size_is_the_library_at_that_size(
    name: str, folders: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit", "cannot embed RGB images of 48x48"),
        ("timm_wrapper", "pixels, not 48; remove image_size or choose an image encoder"),
    ],
)
def test_an_encoder_that_reads_one_size_refuses_another(name: str, message: str, folders: dict[str, str]) -> None:
    with pytest.raises(XcompatError, match=message):
        load_encoder(EncoderSource(name=folders[name], image_size=48))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"height": 64, "width": 64}}, "cannot embed RGB images of 64x64 pixels"),
        ({"size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127}, "does more than resize and normalise"),
    ],
)
def test_preprocessing_that_does_not_fit_is_refused(
    settings: dict[str, object], message: str, folders: dict[str, str], tmp_path: Path
) -> None:
    encoder, _ = load(folders["vit"])
    encoder.save_pretrained(tmp_path)
    ViTImageProcessor(**settings).save_pretrained(tmp_path)
    with pytest.raises(XcompatError, match=message):
        load_encoder(str(tmp_path))


def disturb(encoder: Encoder) -> None:
    for parameter in encoder.adapter_parameters():
        parameter.data.add_(torch.randn_like(parameter))


def test_batch_statistics_do_not_move_beside_lora() -> None:
    """A hybrid: with linear layers for LoRA and batch norms that training would change for good."""
    model: dict[str, Any] = {"model_type": "levit", "drop_path_rate": 0}
    model |= {"hidden_sizes": [16] * 3, "num_attention_heads": [2] * 3, "depths": [1] * 3, "key_dim": [8] * 3}
    encoder, processor = encoder_from_scratch(ScratchSource(model=model, image_size=64))
    pixels = torch.randn(4, 3, *processor.image_size)
    before = encoder.embed_images(pixels)
    encoder.add_adapters(AdapterConfig(lora={"rank": 2}))
    disturb(encoder)
    encoder.train()
    encoder.embed_images(pixels).sum().backward()
    encoder.eval()
    with encoder.adapters_disabled():
        assert torch.equal(encoder.embed_images(pixels), before)
    encoder.merge_adapters()
    encoder.train()
    assert all(module.training for module in encoder.modules()), "what has no adapters trains as a whole"


@pytest.mark.parametrize("name", mostly_nightly([name for name in EVERY if name not in TOKENS], OFTEN.__contains__))
def test_convolutions_take_neither_prompts_nor_lora(name: str, folders: dict[str, str]) -> None:
    encoder, _ = load(folders[name])
    with pytest.raises(XcompatError, match="cannot take visual prompts"):
        encoder.add_adapters(AdapterConfig(prompts=2))
    with pytest.raises(XcompatError, match="no linear layers in its blocks, only convolutions"):
        encoder.add_adapters(AdapterConfig(lora={"rank": 2}))


SMALL = {"depths": [2, 1], "hidden_sizes": [4, 8], "image_size": 9}
FACES = 512
"""Dimensions of the models whose sizes are published."""


def naive(weights: dict[str, Tensor], depths: list[int], x: Tensor) -> Tensor:
    """Compute the features from the weights, convolution by convolution."""

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


def test_convolutions_begin_as_insightface_draws_them() -> None:
    encoder, _ = encoder_from_scratch(ScratchSource(model={"model_type": "iresnet", "depths": [1], "hidden_sizes": [64]}))
    drawn = encoder.model.stages[0][0].residual[1].weight
    assert drawn.std().item() == pytest.approx(0.1, rel=0.02) and abs(drawn.mean().item()) < 0.002
    assert (encoder.model.stem[2].weight == 0.25).all() and (encoder.model.norm.weight == 1).all()


def test_auto_classes_know_it_where_xcompat_is_imported_and_exports_do_not_rely_on_that(tmp_path: Path) -> None:
    assert AutoConfig.for_model("iresnet", **SMALL).image_size == 9
    encoder, processor = encoder_from_scratch(ScratchSource(model={"model_type": "iresnet", **SMALL}, image_size=9))
    encoder.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path), IResNetModel)
    assert auto_calls(load_encoder(str(tmp_path))[0]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": [1, 2], "hidden_sizes": [4]}, "depths has 2 stages and hidden_sizes 1; use the same number"),
        ({"depths": [], "hidden_sizes": []}, "depths has 0 stages"),
        ({"depths": [0], "hidden_sizes": [4]}, "must be at least 1"),
        ({"depths": 3}, "depths"),
    ],
)
def test_stages_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(XcompatError, match=f"cannot build iresnet from scratch.*{message}"):
        encoder_from_scratch(ScratchSource(model={"model_type": "iresnet", **options}))
