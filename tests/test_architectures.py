"""Encoders: impossible numbers are refused before anything large is built; AlexNet; image models with sentence towers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import TEXTS, raw_recipe, recipe_of, refuses
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from test_models import build
from torch import nn
from torch.nn import functional as F
from torchvision.models import alexnet
from transformers import AutoConfig, AutoModel

from xcompat import XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.data.collate import PairCollator
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.architectures.alexnet import AlexNetConfig, AlexNetModel
from xcompat.encoders.architectures.sentence_tower import join_towers
from xcompat.encoders.auto_classes import auto_calls
from xcompat.encoders.base import Encoder
from xcompat.encoders.build_limits import TensorCounts, check_config, limit_model_size, weights_of
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch, train_tokenizer
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import METHODS, XbtModel
from xcompat.models.embedder import load_checkpoint
from xcompat.training.run import run_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
Path_ = tuple[str | int, ...]
HUGE = 20_000_000
DIM = 8


def integers(value: Any, place: Path_ = ()) -> Iterator[Path_]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from integers(inner, (*place, key))
    elif type(value) is int:
        yield place


def put(file: Path, place: Path_, number: int) -> None:
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
def test_impossible_configs_refused(load: Callable[..., Any], keys: Path_, message: str, copied: Callable[[str], Path]) -> None:
    folder = copied("xbt")
    if keys[0] == "memory":
        put(folder / "config.json", ("memory",), {"sharpness": 8.0, "share": 0.5})  # type: ignore[arg-type]
    put(folder / "config.json", keys, HUGE)
    refuses(message, load, str(folder))


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
        assert len(refuses("", load, str(folder))) < 400


def test_limits_of_numbers_and_weights(copied: Callable[[str], Path], folder_of: dict[str, str], tmp_path: Path) -> None:
    folder = copied("clip")
    put(folder / "preprocessor_config.json", ("size",), {"height": HUGE, "width": 32})  # type: ignore[arg-type]
    refuses(r"images would be resized to 20,000,000 pixels", load_encoder, str(folder))
    with pytest.raises(ValueError, match=r"depths\.1 is 20,000,000"):
        ScratchSource(model={"model_type": "resnet", "depths": [1, HUGE]}, image_size=32)
    sizes = {"vocab_size": 256_000, "max_position_embeddings": 10_485_760, "block_size": 131_072}
    check_config({"rope_theta": 500_000_000, **sizes}, "x")
    check_config({"model_max_length": 10**30, "num_hidden_layers": 96, "num_labels": 21_843, "eos_token_id": [2, 128_009]}, "x")
    (tmp_path / "bare").mkdir()
    found = weights_of(folder_of["clip"])
    weights = list(load_encoder(folder_of["clip"])[0].state_dict().values())
    assert found == TensorCounts(len(weights), sum(weight.numel() for weight in weights))
    too_large = pytest.raises(XcompatError, match="far larger than its weights")
    with too_large, limit_model_size(folder_of["clip"]), torch.device("meta"):
        nn.Linear(2**20, 2**20)
    with limit_model_size(folder_of["clip"]), limit_model_size(str(tmp_path / "bare")), torch.device("meta"):
        nn.Linear(2**13, 2**14)  # of a model without weights that fits into the memory
    with torch.device("meta"):
        nn.Linear(2**20, 2**20)


def scratch_alexnet(image_size: int) -> ScratchSource:
    return ScratchSource(model={"model_type": "alexnet"}, image_size=image_size)


@torch.no_grad()
def test_alexnet_has_the_features_and_the_size_of_torchvisions() -> None:
    torch.manual_seed(3)
    model = AlexNetModel(AlexNetConfig(image_size=64)).eval()
    torch.manual_seed(3)
    whole = alexnet().eval()
    pixels = torch.rand(2, 3, 64, 64)
    features = model(pixels).pooler_output
    torch.testing.assert_close(whole.classifier[-1](features), whole(pixels), rtol=0, atol=0)
    torch.testing.assert_close(model.layers.features[0].weight, whole.features[0].weight, rtol=0, atol=0)
    assert sum(weights.numel() for weights in model.parameters()) + 4096 * 1000 + 1000 == 61_100_840, "as published"


def test_alexnet_is_found_again_and_refuses_small_images(tmp_path: Path, images: list[Image.Image]) -> None:
    encoder, processor = encoder_from_scratch(scratch_alexnet(64))
    encoder.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    assert AutoConfig.for_model("alexnet").image_size == 224
    assert isinstance(AutoModel.from_pretrained(tmp_path), AlexNetModel)
    again, _ = load_encoder(str(tmp_path))
    pixels = processor.images(images)
    with torch.no_grad():
        torch.testing.assert_close(again.embed_images(pixels), encoder.eval().embed_images(pixels), rtol=0, atol=0)
    model: Any = METHODS["independent"].from_encoder(str(tmp_path), classes=["a", "b"], dim=5)
    assert (model.neck.in_features, model.neck.out_features) == (4096, 5)
    assert encoder_from_scratch(scratch_alexnet(63))[0].embedding_dim == 4096
    refuses("image_size is 62, .*use 63 or more", encoder_from_scratch, scratch_alexnet(62))  # of which poolings leave nothing


@pytest.fixture(scope="module")
def text_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models with a transformer and with token embeddings; neither has a prompt."""
    base = tmp_path_factory.mktemp("texts")
    tokenizer = train_tokenizer(TEXTS, 300, 16)
    transformer = save_stand_in(base / "transformer", "sentence-transformers", 12)
    settings = Path(transformer, "config_sentence_transformers.json")
    settings.write_text(settings.read_text(encoding="utf-8").replace("query: ", ""), encoding="utf-8")
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=12)], device="cpu")
    static.save(str(base / "static"), create_model_card=False)
    return {"transformer": transformer, "static": str(base / "static")}


@pytest.fixture(scope="module", params=["transformer", "static"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def joined(
    tmp_path_factory: pytest.TempPathFactory, text_folders: dict[str, str], image_folder_of: dict[str, str]
) -> dict[str, str]:
    base = tmp_path_factory.mktemp("joined")
    for kind, folder in text_folders.items():
        join_towers(image_folder_of["mobilenet_v1"], folder, DIM, base / kind)
    return {kind: str(base / kind) for kind in text_folders}


def embed(encoder: Encoder, processor: Processor, images: list[Image.Image]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([encoder.embed_images(processor.images(images)), encoder.embed_texts(**processor.texts(TEXTS))])


def test_towers_embed_and_save_like_their_models(
    kind: str, joined: dict[str, str], text_folders: dict[str, str], image_folder_of: Any, images: Any, tmp_path: Path
) -> None:
    (encoder, processor), (texts, tokens) = load_encoder(joined[kind]), load_encoder(text_folders[kind])
    photos, pixels = load_encoder(image_folder_of["mobilenet_v1"])
    asked = [*TEXTS, "A Red SHOE!"]
    with torch.inference_mode():
        pooled = encoder.model.text_model(**processor.texts(asked)).pooler_output
        assert torch.equal(F.normalize(pooled, dim=-1), texts.embed_texts(**tokens.texts(asked)))
        features = encoder.model.vision_model(processor.images(images)).pooler_output
        assert torch.equal(features, photos.image_features(pixels.images(images)))
        assert encoder.embed_images(processor.images(images)).shape == (len(images), DIM)
    encoder.save_pretrained(tmp_path / "copy")
    processor.save_pretrained(tmp_path / "copy")
    again = load_encoder(str(tmp_path / "copy"))
    assert again[0].fingerprint(again[1]) == encoder.fingerprint(processor)
    assert torch.equal(embed(*again, images), embed(encoder, processor, images))
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "copy").text_projection.weight, encoder.model.text_projection.weight)
    assert auto_calls(encoder) is None, "AutoModel alone does not know the tower"


def test_impossible_towers_are_refused(text_folders: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path) -> None:
    image, text = image_folder_of["mobilenet_v1"], text_folders["static"]
    refuses("needs an image model and a sentence-transformers model, in", join_towers, text, image, DIM, tmp_path / "swapped")
    prompted = EncoderSource(name=text, query_prompt="query: ")
    refuses("uses prompts, which a model", join_towers, image, prompted, DIM, tmp_path / "prompted")
    refuses(r"has no pooled output of shape \(B, W\)", join_towers, image_folder_of["resnet"], text, DIM, tmp_path / "unpooled")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["xbt", "direct"])
def test_frozen_towers_embed_once(
    method: str, joined: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path: Path
) -> None:
    batches: list[dict[str, torch.Tensor]] = []
    collate = PairCollator.__call__
    stage = {"method": method, "options": {"adapters": {"lora": {"rank": 2, "dropout": 0.0, "towers": ["text"]}}}}
    if method == "xbt":
        stage["projection"] = "stage:phi"
    raw = raw_recipe(tmp_path, old_folder, joined["transformer"], pairs_folder, texts=[{"path": texts_file}])
    raw |= {"training": {"max_steps": 2, "per_device_train_batch_size": 8}, "evaluation": None}
    with mock.patch.object(PairCollator, "__call__", lambda *given: batches.append(collate(*given)) or batches[-1]):
        run_recipe(recipe_of(raw, stages=[{"name": "phi", "method": "projection"}, {"name": "pairs", **stage}]))
    _, processor = load_encoder(joined["transformer"])
    assert batches and all("pixel_values" not in batch for batch in batches)
    trained = METHODS[method].from_pretrained(tmp_path / "run" / "pairs" / "model")
    photos = [Image.open(file) for file in sorted(Path(pairs_folder).glob("*.png"))]
    own_ND = trained.embed_images(processor.images(photos))
    nearest_B = (batches[0]["new_embeds"] @ own_ND.T).max(dim=1).values
    assert torch.allclose(nearest_B, torch.ones_like(nearest_B), atol=1e-3), "own embeddings, in half precision"
