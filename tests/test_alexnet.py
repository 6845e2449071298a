"""AlexNet against torchvision's own forward pass, its published size, and what surrounds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision.models import alexnet
from transformers import AutoConfig, AutoModel

from xcompat.core.errors import XcompatError
from xcompat.encoders import load_encoder
from xcompat.encoders.architectures.alexnet import AlexNetConfig, AlexNetModel
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.methods import METHODS

SOURCE = ScratchSource(model={"model_type": "alexnet"}, image_size=64)


@torch.no_grad()
def test_the_features_are_what_torchvisions_classifier_reads() -> None:
    torch.manual_seed(3)
    model = AlexNetModel(AlexNetConfig(image_size=64)).eval()
    torch.manual_seed(3)
    whole = alexnet().eval()
    pixels = torch.rand(2, 3, 64, 64)
    features = model(pixels).pooler_output
    torch.testing.assert_close(whole.classifier[-1](features), whole(pixels), rtol=0, atol=0)
    torch.testing.assert_close(model.layers.features[0].weight, whole.features[0].weight, rtol=0, atol=0)


def test_it_has_the_published_size() -> None:
    with torch.device("meta"):
        model = AlexNetModel(AlexNetConfig())
    assert sum(weights.numel() for weights in model.parameters()) + 4096 * 1000 + 1000 == 61_100_840


def test_a_trained_model_is_found_again(tmp_path: Path, images: list[Image.Image]) -> None:
    encoder, processor = encoder_from_scratch(SOURCE)
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


def test_images_that_its_poolings_leave_nothing_of_are_refused() -> None:
    assert encoder_from_scratch(ScratchSource(model={"model_type": "alexnet"}, image_size=63))[0].embedding_dim == 4096
    with pytest.raises(XcompatError, match="cannot build alexnet from scratch: image_size is 62, .*use 63 or more"):
        encoder_from_scratch(ScratchSource(model={"model_type": "alexnet"}, image_size=62))
