"""Image encoders from any module: a recipe names its file, and its torchvision transform is saved with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm
import yaml
from PIL import Image
from test_docs import EXAMPLES
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, RandomRotation, Resize, ToTensor, v2

from xcompat.core.errors import XcompatError
from xcompat.encoders import load_encoder
from xcompat.encoders.own_modules import image_processor_of, register_encoder, save_module
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.training import record
from xcompat.training.stage_recipe import StageRecipe

NORMALISE = Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
NET = next(code for page, _, code in EXAMPLES if page == "docs/own_encoder.md" and code.startswith("# net.py"))


@register_encoder
class Striped(nn.Module):
    def __init__(self, width: int = 4, sizes: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, width, sizes[0], stride=sizes[0])

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layer(pixel_values).mean(dim=(2, 3))


@pytest.mark.parametrize(
    "transform",
    [
        Compose([Resize((20, 24), InterpolationMode.BICUBIC), ToTensor(), NORMALISE]),
        Compose([Resize(24), CenterCrop(20), ToTensor(), NORMALISE]),
        v2.Compose([v2.Resize(24), v2.CenterCrop(20), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), NORMALISE]),
    ],
    ids=["sides", "crop", "v2"],
)
def test_a_saved_module_embeds_as_before(transform: Compose, tmp_path: Path, images: list[Image.Image]) -> None:
    torch.manual_seed(0)
    module = Striped(width=6).eval()
    save_module(module, transform, tmp_path, width=6)
    encoder, processor = load_encoder(str(tmp_path))
    assert encoder.embedding_dim == 6 and encoder.description["config"]["sizes"] == [3]
    pixels = torch.stack([transform(image.convert("RGB")) for image in images])
    torch.testing.assert_close(processor.images(images), pixels, atol=0.03, rtol=0)  # a rounding of 8 bits
    with torch.no_grad():
        expected = nn.functional.normalize(module(pixels), dim=-1)
        torch.testing.assert_close(encoder.embed_images(pixels), expected)


def test_random_weights_are_the_modules_own() -> None:
    encoder, processor = encoder_from_scratch(ScratchSource(model={"model_type": "striped", "width": 3}, image_size=12), seed=5)
    torch.manual_seed(5)
    torch.testing.assert_close(encoder.model.module.layer.weight, Striped(width=3).layer.weight, rtol=0, atol=0)
    assert encoder.embedding_dim == 3 and processor.image_size == (12, 12)


@pytest.mark.parametrize(
    ("transform", "refused"),
    [
        (Compose([Resize(8), RandomRotation(5), ToTensor()]), "has a RandomRotation; use only Resize"),
        (Compose([ToTensor()]), "has no Resize; add Resize with the size"),
    ],
)
def test_other_transforms_are_refused(transform: Compose, refused: str) -> None:
    with pytest.raises(XcompatError, match=refused):
        image_processor_of(transform)


def test_modules_that_cannot_be_stored_are_refused() -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None: ...

    class ResNet(nn.Module): ...

    with pytest.raises(XcompatError, match="Wide has no default for 'width'; add a default"):
        register_encoder(Wide)
    with pytest.raises(XcompatError, match="ResNet: transformers.* also has a 'resnet'; rename the class"):
        register_encoder(ResNet)


def test_a_changed_file_is_a_changed_recipe(tmp_path: Path) -> None:
    file = tmp_path / "grey.py"
    file.write_text("from torch import nn\nclass Grey(nn.Module):\n    ...\n", encoding="utf-8")
    new = {"model": {"model_type": f"{file}:Grey"}, "image_size": 16}
    settings = StageRecipe.model_validate({"method": "independent", "new": new})
    record.write_recipe(tmp_path, begun := record.dump_settings(settings, seed=3))
    assert record.read_started_settings(tmp_path) == begun
    file.write_text("from torch import nn\nclass Grey(nn.Module):\n    gamma = 2\n", encoding="utf-8")
    assert record.differences(record.dump_settings(settings, seed=3), begun, False) == [f"code.{file}:Grey"]


def test_a_recipe_trains_a_module_from_a_file(
    tmp_path: Path,
    images: list[Image.Image],
    run_xcompat: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An encoder is one file and no other line, and a later stage continues from it."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    for number in range(8):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        images[number % len(images)].save(folder / f"{number}.png")
    new = {"model": {"model_type": "net.py:TinyNet", "width": 4}, "image_size": 16}
    training = {"max_steps": 2, "per_device_train_batch_size": 4}
    stages = [{"name": "first", "new": new}, {"name": "second", "new": "stage:first"}]
    raw = {"method": "independent", "data": {"images": {"path": "photos"}}, "training": training, "stages": stages}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    done = warm.run("-m", "xcompat", "train", "own.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/own/second/model/model.safetensors").is_file()
    raw["stages"][0]["new"]["model"]["model_type"] = "nets.py:TinyNet"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, _, said = run_xcompat("train", "own.yaml")
    assert code == 2 and "nets.py does not exist" in said and said.count("\n") == 1, said
