"""Dual encoders of an image model and a sentence-transformers model: the same embeddings, saved, trained with a frozen tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXTS
from PIL import Image
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch.nn import functional as F
from transformers import AutoModel

from xcompat import XcompatError
from xcompat.data.collate import PairCollator
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.architectures.sentence_tower import join_towers
from xcompat.encoders.auto_classes import auto_calls
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.encoders.scratch import train_tokenizer
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import METHODS
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
DIM = 8


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
    """Dual encoders with MobileNet, by kind of text model."""
    base = tmp_path_factory.mktemp("joined")
    for kind, folder in text_folders.items():
        join_towers(image_folder_of["mobilenet_v1"], folder, DIM, base / kind)
    return {kind: str(base / kind) for kind in text_folders}


def embed(encoder: Encoder, processor: Processor, images: list[Image.Image]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([encoder.embed_images(processor.images(images)), encoder.embed_texts(**processor.texts(TEXTS))])


def test_towers_embed_like_their_models(
    kind: str, joined: dict[str, str], text_folders: dict[str, str], image_folder_of: dict[str, str], images: list[Image.Image]
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


def test_saved_again_it_is_the_same_model(kind: str, joined: dict[str, str], images: list[Image.Image], tmp_path: Path) -> None:
    encoder, processor = load_encoder(joined[kind])
    encoder.save_pretrained(tmp_path / "copy")
    processor.save_pretrained(tmp_path / "copy")
    again = load_encoder(str(tmp_path / "copy"))
    assert again[0].fingerprint(again[1]) == encoder.fingerprint(processor)
    assert torch.equal(embed(*again, images), embed(encoder, processor, images))
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "copy").text_projection.weight, encoder.model.text_projection.weight)
    assert auto_calls(encoder) is None, "AutoModel alone does not know the tower"


def test_impossible_towers_are_refused(text_folders: dict[str, str], image_folder_of: dict[str, str], tmp_path: Path) -> None:
    image, text = image_folder_of["mobilenet_v1"], text_folders["static"]
    with pytest.raises(XcompatError, match="needs an image model and a sentence-transformers model, in this order"):
        join_towers(text, image, DIM, tmp_path / "swapped")
    prompted = EncoderSource(name=text, query_prompt="query: ")
    with pytest.raises(XcompatError, match="has prompts or do_lower_case"):
        join_towers(image, prompted, DIM, tmp_path / "prompted")
    with pytest.raises(XcompatError, match=r"has no pooled output of shape \(B, W\)"):
        join_towers(image_folder_of["resnet"], text, DIM, tmp_path / "unpooled")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["xbt", "direct"])
def test_a_frozen_image_tower_embeds_each_photo_once(
    method: str,
    joined: dict[str, str],
    old_folder: str,
    pairs_folder: str,
    texts_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[dict[str, torch.Tensor]] = []
    collate = PairCollator.__call__

    def record(self: PairCollator, items: Any) -> dict[str, torch.Tensor]:
        batches.append(collate(self, items))
        return batches[-1]

    monkeypatch.setattr(PairCollator, "__call__", record)
    lora = {"rank": 2, "dropout": 0.0}
    stage = {"method": method, "options": {"adapters": {"lora": lora | {"towers": ["text"]}}}}
    if method == "xbt":
        stage["projection"] = "stage:phi"
    raw = {
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
        "old": old_folder,
        "new": joined["transformer"],
        "data": {"pairs": {"path": pairs_folder}, "texts": [{"path": texts_file}]},
        "training": {"max_steps": 2, "per_device_train_batch_size": 8},
        "evaluation": None,
        "stages": [{"name": "phi", "method": "projection"}, {"name": "pairs", **stage}],
    }
    run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    _, processor = load_encoder(joined["transformer"])
    assert batches and all("pixel_values" not in batch for batch in batches)
    trained = METHODS[method].from_pretrained(tmp_path / "run" / "pairs" / "model")
    photos = [Image.open(file) for file in sorted(Path(pairs_folder).glob("*.png"))]
    own_ND = trained.embed_images(processor.images(photos))
    nearest_B = (batches[0]["new_embeds"] @ own_ND.T).max(dim=1).values
    assert torch.allclose(nearest_B, torch.ones_like(nearest_B), atol=1e-3), "own embeddings, in half precision"
