"""iResNet against a naive forward pass, the sizes that are published, and what surrounds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel

from xcompat.core.errors import XcompatError
from xcompat.encoders import load_encoder
from xcompat.encoders.architectures.iresnet import IResNetConfig, IResNetModel
from xcompat.encoders.auto_classes import auto_calls
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.methods import METHODS

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


def test_a_trained_model_ends_as_a_model_of_faces(tmp_path: Path, images: list[Image.Image]) -> None:
    source = ScratchSource(model={"model_type": "iresnet", **SMALL}, image_size=9)
    encoder, processor = encoder_from_scratch(source)
    encoder.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    model: Any = METHODS["independent"].from_encoder(str(tmp_path), classes=["a", "b"], dim=5, batch_norm=True)
    assert (model.neck.in_features, model.neck.out_features, model.norm.num_features) == (72, 5, 5)
    with torch.no_grad():
        assert model.embed_images(model.processor.images(images)).shape == (len(images), 5)


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
