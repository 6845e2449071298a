"""What whoever knows transformers does without reading on: it works for every method, or says in one line why not."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from conftest import TEXTS
from PIL import Image
from schedule import METHOD_OF_EACH_KIND, mostly_nightly, mostly_nightly_rows
from test_models import build, shake, unit
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer, pipeline

import xcompat
from xcompat import XcompatError
from xcompat.methods import METHODS
from xcompat.models import CompatModel


class Run(NamedTuple):
    """The folder of a run that has ended, with the checkpoint in ``model``, and what was saved there."""

    folder: Path
    model: CompatModel


@pytest.fixture(scope="module")
def run_of(folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    @cache
    def make(method: str) -> Run:
        model = build(method, folder_of)
        shake(model)
        folder = tmp_path_factory.mktemp("runs") / method
        model.save_pretrained(folder / "model")
        (folder / "recipe.yaml").write_text("name: run\n")
        return Run(folder, model.eval())

    return make


@pytest.fixture(params=mostly_nightly(METHODS, (*METHOD_OF_EACH_KIND, "independent").__contains__))
def run(request: pytest.FixtureRequest, run_of: Callable[[str], Run]) -> Run:
    return run_of(request.param)


def test_a_runs_folder_is_its_model(run: Run) -> None:
    config = AutoConfig.from_pretrained(run.folder)
    assert type(config) is type(run.model.config)
    assert type(config).from_pretrained(str(run.folder)).to_json_string() == config.to_json_string()
    for loader in (AutoModel, type(run.model)):
        loaded = loader.from_pretrained(run.folder)
        assert loaded.fingerprint() == run.model.fingerprint() and loaded.name_or_path == str(run.folder / "model")
    beside = AutoModel.from_pretrained(run.folder, subfolder="model")
    assert beside.fingerprint() == run.model.fingerprint()


def test_a_run_that_ended_with_a_plain_encoder_is_one(
    run_of: Callable[[str], Run], images: list[Image.Image], tmp_path: Path
) -> None:
    model = run_of("independent").model
    model.export(tmp_path / "model")
    plain = AutoModel.from_pretrained(tmp_path)
    assert type(plain) is transformers.CLIPModel and type(AutoProcessor.from_pretrained(tmp_path)) is transformers.CLIPProcessor
    pixels = model.processor.images(images)
    with torch.no_grad():
        embeds = torch.nn.functional.normalize(plain.get_image_features(pixels).pooler_output, dim=-1)
        torch.testing.assert_close(embeds, model.embed_images(pixels))


@pytest.mark.parametrize("folder", ["", "model"])
def test_preprocessing_is_found(folder: str, run: Run, images: list[Image.Image]) -> None:
    """A map's checkpoint holds none: it is found where its encoder is."""
    place, own = run.folder / folder, run.model.processor
    pixels = own.images(images)
    assert torch.equal(AutoImageProcessor.from_pretrained(place)(images, return_tensors="pt")["pixel_values"], pixels)
    tokens = AutoTokenizer.from_pretrained(place)(TEXTS)["input_ids"]
    assert tokens == own.tokenize(TEXTS)
    processor = AutoProcessor.from_pretrained(place)
    assert processor.describe() == own.describe()
    assert torch.equal(processor(images=images, text=TEXTS, return_tensors="pt")["pixel_values"], pixels)


@pytest.mark.parametrize(
    ("architecture", "method"),
    mostly_nightly_rows(
        itertools.product(["resnet", "timm_wrapper", "open_clip"], ["bct", "ridge"]),
        lambda architecture, method: (architecture == "open_clip") is (method == "ridge"),
    ),
)
def test_what_an_encoder_has_no_files_for_is_made_or_missed(
    method: str,
    architecture: str,
    folder_of: dict[str, str],
    image_folder_of: dict[str, str],
    images: list[Image.Image],
    tmp_path: Path,
) -> None:
    model = build(method, {"clip": (folder_of | image_folder_of)[architecture]})
    model.export(tmp_path)
    pixels = model.processor.images(images)
    for auto_class in (AutoImageProcessor, AutoProcessor):
        made = auto_class.from_pretrained(tmp_path)(images, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(made, pixels)
    with pytest.raises(ValueError, match="tokenizer"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_a_map_of_a_compatible_model_takes_its_preprocessing(run_of: Callable[[str], Run], tmp_path: Path) -> None:
    inner = run_of("xbt")
    described = {"library": "xcompat", "name": str(inner.folder / "model"), "config": {}}
    described |= {"fingerprint": inner.model.stored_fingerprint().digest, "dim": 8}
    old = run_of("ridge").model.config.old
    model = xcompat.RidgeModel(xcompat.RidgeConfig(encoder=described, old=old, embedding_dim=8))
    model.export(tmp_path / "map")
    assert AutoProcessor.from_pretrained(tmp_path / "map").describe() == inner.model.processor.describe()
    xcompat.RidgeModel(xcompat.RidgeConfig(old=old, embedding_dim=8)).save_pretrained(tmp_path / "alone")
    with pytest.raises(XcompatError, match="alone was fitted on embeddings without an encoder: their preprocessing is unknown"):
        AutoProcessor.from_pretrained(tmp_path / "alone")


def test_other_models_are_left_alone(
    folder_of: dict[str, str], image_folder_of: dict[str, str], images: list[Image.Image], tmp_path: Path
) -> None:
    assert type(AutoProcessor.from_pretrained(folder_of["clip"])) is transformers.CLIPProcessor
    assert type(AutoImageProcessor.from_pretrained(folder_of["clip"])) is transformers.CLIPImageProcessor
    shutil.copytree(folder_of["clip"], tmp_path / "clip" / "model")
    shutil.copy(Path(folder_of["clip"]) / "config.json", tmp_path / "clip")
    with pytest.raises(OSError, match="preprocessor_config.json"):
        AutoImageProcessor.from_pretrained(tmp_path / "clip")
    extract = pipeline("image-feature-extraction", model=image_folder_of["vit"])
    with torch.no_grad():
        expected = extract.model(**extract.image_processor(images[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(torch.tensor(extract(images[0])), expected)


def test_a_processor_is_called_as_those_of_transformers(run: Run, images: list[Image.Image]) -> None:
    model, processor = run.model, run.model.processor
    both = processor(images=images, text=TEXTS, return_tensors="pt")
    assert torch.equal(both["pixel_values"], processor.images(images))
    for name, column in processor.texts(TEXTS).items():
        assert torch.equal(both[name], column)
    one = processor(images=images[0], text=TEXTS[0])
    assert torch.equal(one["pixel_values"], both["pixel_values"][:1]) and torch.equal(
        processor.images(images[0]), one["pixel_values"]
    )
    assert len(one["input_ids"]) == 1 and torch.equal(processor.texts(TEXTS[0])["input_ids"], one["input_ids"])
    for given, message in (({}, "nothing to preprocess"), ({"text": "a", "return_tensors": "np"}, "return_tensors is 'np'")):
        with pytest.raises(XcompatError, match=message):
            processor(**given)
    with torch.no_grad():
        output = model(**processor(images=images)) if not model.embeds_texts else model(**both)
    assert len(output.image_embeds) == len(images)
    if model.embeds_in_memory:
        with torch.no_grad():
            assert torch.equal(output.image_embeds, model.embed_images(both["pixel_values"])), "there is nothing else to map"


@torch.no_grad()
def test_features_are_the_models_own_embeddings(run: Run, images: list[Image.Image]) -> None:
    model, processor = run.model, run.model.processor
    of_clip = transformers.CLIPModel.from_pretrained(model.config.encoder["name"]).get_image_features(**processor(images=images))
    features = model.get_image_features(**processor(images=images, return_tensors="pt"))
    assert type(features) is type(of_clip)
    assert torch.equal(features.pooler_output, model.embed_images(processor.images(images)))
    one = model.get_image_features(**processor(images=images[0], return_tensors="pt"))
    torch.testing.assert_close(one.pooler_output, features.pooler_output[:1])
    texts = processor(text=TEXTS)
    if model.embeds_texts:
        assert torch.equal(model.get_text_features(**texts).pooler_output, model.embed_texts(**processor.texts(TEXTS)))
    else:
        with pytest.raises(XcompatError, match="trained on images only and cannot embed texts"):
            model.get_text_features(**texts)


def test_the_pipeline_of_features_gives_the_models_own_embedding(run: Run, images: list[Image.Image], tmp_path: Path) -> None:
    images[0].save(tmp_path / "picture.png")
    extract = pipeline("image-feature-extraction", model=str(run.folder))
    with torch.no_grad():
        own = run.model.embed_images(run.model.processor.images(images))
    torch.testing.assert_close(torch.tensor(extract(str(tmp_path / "picture.png"))), own[:1])
    made = extract(images, batch_size=2, return_tensors=True, pool=True)
    torch.testing.assert_close(torch.cat(list(made)), own)


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        (unit(2, 16).numpy(), r"takes embeddings as a torch tensor \(B, {dim}\), not ndarray; use torch.from_numpy"),
        (unit(2, 16).tolist(), r"not list; use torch.tensor"),
        (unit(2, 15), r"takes its own embeddings \(B, {dim}\), not \(2, 15\)"),
        (unit(2, 16)[0], r"takes its own embeddings \(B, {dim}\), not \(16,\)"),
    ],
)
def test_what_is_no_embedding_is_refused_in_one_line(embeds: Any, message: str, run: Run) -> None:
    model = run.model
    if not model.compatible_with:
        message = "cannot search an old gallery"
    elif model.maps_galleries:
        message = "maps galleries: upgrade the stored embeddings instead"
    with pytest.raises(XcompatError, match=message.format(dim=model.config.embedding_dim)) as refusal:
        model.to_space(embeds)
    assert "\n" not in str(refusal.value)
    if model.compatible_with and model.maps_galleries:
        with pytest.raises(XcompatError, match=r"takes embeddings (as a torch tensor|of the old model) \(B, \d+\), not"):
            model.upgrade(embeds if not isinstance(embeds, torch.Tensor) or embeds.ndim == 1 else embeds[:, :3])
