"""Encoders without a text tower behind the same interface: what their libraries compute, stems, adapters, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from conftest import IMAGE_ARCHITECTURES, SHARED, TEXTS
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file
from schedule import mostly_nightly
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
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
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.methods import METHODS
from xcompat.models.base import CompatConfig, CompatModel

BASIC = {"layer_type": "basic", "embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16]}
RESNET18 = {"architecture": "resnet18", "model_args": {"channels": [8, 8, 8, 16], "layers": [1, 1, 1, 1]}}
SMALL_STEMS = {"resnet-small": {"model_type": "resnet", **BASIC}, "timm-small": {"model_type": "timm_wrapper", **RESNET18}}
EVERY = (*IMAGE_ARCHITECTURES, *SMALL_STEMS)
OFTEN = ("resnet", "resnet-small", "timm_wrapper", "vit")
"""Of each library and kind one, which is tested on every change."""
TOKENS = ("clip_vision_model", "vit")
MOBILENETS = ("mobilenet_v1_0.25_128", "mobilenet_v2_1.0_224")


class Backbone(CompatModel):
    """The least that a method is: an encoder."""

    compares_with_old = False

    def __init__(self, config: CompatConfig, encoder: Encoder | None = None) -> None:
        super().__init__(config, encoder)
        self.post_init()


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
@torch.no_grad()
def test_save_and_load_keep_embeddings_and_fingerprint(
    name: str, folders: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    encoder, processor = load(folders[name])
    again, its_processor = load(save(encoder, processor, tmp_path))
    pixels = processor.images(images)
    assert torch.equal(pixels, its_processor.images(images))
    assert torch.equal(encoder.embed_images(pixels), again.embed_images(pixels))
    assert encoder.fingerprint(processor) == again.fingerprint(its_processor)


@pytest.mark.parametrize("name", mostly_nightly(EVERY, OFTEN.__contains__))
@torch.no_grad()
def test_a_checkpoint_rebuilds_the_encoder_from_its_description(
    name: str, folders: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    adapters = {"lora": {"rank": 2}, "prompts": 2} if name in TOKENS else None
    model = Backbone.from_encoder(folders[name], adapters=adapters)
    model.export(tmp_path)
    again = Backbone.from_pretrained(tmp_path)
    pixels = model.processor.images(images)
    assert torch.equal(pixels, again.processor.images(images))
    assert_same(model.embed_images(pixels), again.embed_images(pixels))
    assert model.fingerprint() == again.fingerprint()


@pytest.mark.parametrize("name", mostly_nightly(EVERY, OFTEN.__contains__))
def test_training_pixels_are_evaluation_pixels(name: str, folders: dict[str, str]) -> None:
    _, processor = load(folders[name])
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    from_file = processor.images([Image.fromarray(image.permute(1, 2, 0).numpy())])
    torch.testing.assert_close(processor.to_pixels(image[None]), from_file, atol=1e-5, rtol=0)


def test_a_grey_image_has_three_channels(folders: dict[str, str], images: list[Image.Image]) -> None:
    for name in EVERY:
        _, processor = load(folders[name])
        assert processor.images([images[0].convert("L")]).shape == (1, 3, 32, 32)


@pytest.mark.parametrize("name", mostly_nightly(EVERY, OFTEN.__contains__))
def test_texts_are_refused_in_one_line(name: str, folders: dict[str, str]) -> None:
    encoder, processor = load(folders[name])
    assert not encoder.has_text and list(encoder.towers) == ["image"] and processor.max_length == 0
    with pytest.raises(XcompatError, match=r"has no text tower; to embed texts, choose an image-text model") as refusal:
        encoder.embed_texts(torch.zeros(1, 4, dtype=torch.int64))
    assert "\n" not in str(refusal.value)
    with pytest.raises(XcompatError, match="an image encoder has no tokenizer"):
        processor.texts(TEXTS)


def test_fingerprints_tell_weights_stems_and_pixels_apart(folders: dict[str, str]) -> None:
    found = set()
    for name in EVERY:
        encoder, processor = load(folders[name])
        found.add(encoder.fingerprint(processor).digest)
        next(encoder.model.parameters()).data.view(-1)[0].add_(1e-3)
        found.add(encoder.fingerprint(processor).digest)
    sized = ScratchSource(model=SMALL_STEMS["resnet-small"], stem="small", image_size=48)
    found.add(Encoder.fingerprint(*encoder_from_scratch(sized, seed=1)).digest)
    assert len(found) == 2 * len(EVERY) + 1


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


@pytest.mark.parametrize("name", SMALL_STEMS)
def test_a_library_without_the_small_stem_refuses_its_weights(name: str, folders: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        AutoModel.from_pretrained(folders[name])


def test_models_of_timm_start_from_the_weights_timm_gives_them() -> None:
    source = ScratchSource(model={"model_type": "timm_wrapper", "architecture": "resnet10t"}, image_size=32)
    encoder, _ = encoder_from_scratch(source, seed=3)
    torch.manual_seed(3)
    expected = timm.create_model("resnet10t", num_classes=0).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in encoder.model.timm_model.state_dict().items())


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


@pytest.mark.parametrize("name", mostly_nightly(MOBILENETS, MOBILENETS[0].__eq__))
@torch.no_grad()
def test_real_mobilenets_give_their_pooler_output(name: str, images: list[Image.Image]) -> None:
    folder = SHARED / "models" / name
    if not folder.exists():
        pytest.skip(f"{folder} is not there: the real MobileNets lie outside the repository")
    encoder, processor = load(str(folder))
    pixels = processor.images(images[:2])
    assert torch.equal(encoder.image_features(pixels), AutoModel.from_pretrained(folder).eval()(pixels).pooler_output)
    assert encoder.description["config"].keys().isdisjoint({"id2label", "label2id"})


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


@pytest.mark.parametrize("name", TOKENS)
@torch.no_grad()
def test_adapters_off_is_the_original_bit_for_bit(name: str, folders: dict[str, str], images: list[Image.Image]) -> None:
    encoder, processor = load(folders[name])
    pixels = processor.images(images)
    before = encoder.embed_images(pixels)
    encoder.add_adapters(AdapterConfig(lora={"rank": 2}, prompts=3))
    disturb(encoder)
    on = encoder.eval().embed_images(pixels)
    with encoder.adapters_disabled():
        assert torch.equal(encoder.embed_images(pixels), before)
    assert (on - before).abs().max() > 1e-3
    encoder.merge_adapters()
    torch.testing.assert_close(encoder.embed_images(pixels), on, atol=1e-5, rtol=0)


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


@torch.no_grad()
def test_a_grid_of_tokens_takes_no_prompts_but_lora() -> None:
    model = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}
    encoder, processor = encoder_from_scratch(ScratchSource(model=model, image_size=32))
    assert encoder.embedding_dim == 16
    with pytest.raises(XcompatError, match="cannot take visual prompts"):
        encoder.add_adapters(AdapterConfig(prompts=2))
    pixels = torch.randn(2, 3, *processor.image_size)
    before = encoder.embed_images(pixels)
    encoder.add_adapters(AdapterConfig(lora={"rank": 2, "targets": ["query", "q_proj"]}))
    disturb(encoder)
    assert not torch.equal(encoder.eval().embed_images(pixels), before)
    with encoder.adapters_disabled():
        assert torch.equal(encoder.embed_images(pixels), before)
