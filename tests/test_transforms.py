"""Augmentation: the right size, decided by the seed alone, and every strength does what it says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch.nn import functional as F
from torchvision.transforms import v2

from xcompat.data import Augmentation, View, build_transform


def image(width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def stub_processor(side: int, interpolation: str) -> Any:
    return SimpleNamespace(image_size=(side, side), interpolation=interpolation)


@pytest.mark.parametrize("size", [(32, 32), (16, 24)])
@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation.none(), Augmentation(horizontal_flip=0.5)])
def test_uint8_of_the_models_size(size: tuple[int, int], augmentation: Augmentation) -> None:
    out = build_transform(augmentation, size)(image())
    assert out.dtype == torch.uint8
    assert tuple(out.shape) == (3, *size)


def test_none_only_resizes() -> None:
    transform = build_transform(Augmentation.none(), (30, 40))
    expected = torch.from_numpy(np.array(image())).permute(2, 0, 1)
    torch.manual_seed(0)
    assert torch.equal(transform(image()), expected)


def with_one(**strength: float) -> Augmentation:
    return Augmentation(**{**Augmentation.none().model_dump(), **strength})


STRENGTHS = ["brightness", "contrast", "saturation", "hue", "grayscale", "blur", "solarize"]
STRENGTHS += ["sharpness", "translation", "min_scale", "horizontal_flip"]


@pytest.mark.parametrize("name", STRENGTHS)
def test_each_strength_changes_the_image_alone(name: str) -> None:
    torch.manual_seed(0)
    one = with_one(**{name: 0.5})
    assert not one.is_none
    transform, plain = build_transform(one, (30, 40)), build_transform(Augmentation.none(), (30, 40))(image())
    assert any(not torch.equal(transform(image()), plain) for _ in range(8))


def test_what_is_off_takes_no_draw() -> None:
    steps = [
        v2.RandomResizedCrop([32, 32], scale=(0.5, 1), ratio=(0.75, 1 / 0.75), interpolation=v2.InterpolationMode.BICUBIC),
        v2.RandomAffine(10, translate=(0.05, 0.05), interpolation=v2.InterpolationMode.BILINEAR, fill=255.0),
        v2.ColorJitter(brightness=0.2, contrast=0.2),
        v2.RandomChoice([v2.RandomAdjustSharpness(1.5, p=0.5), v2.RandomAdjustSharpness(0.5, p=0.5)]),
        v2.PILToTensor(),
    ]
    drawn = []
    for transform in (build_transform(Augmentation(), (32, 32)), v2.Compose(steps)):
        torch.manual_seed(3)
        drawn.append((transform(image()), torch.get_rng_state()))
    (ours, after), (plain, expected) = drawn
    assert torch.equal(ours, plain) and torch.equal(after, expected)


def test_colours_change_with_a_probability() -> None:
    never = Augmentation(**{**with_one(hue=0.5).model_dump(), "colour_probability": 0.0})
    assert torch.equal(build_transform(never, (30, 40))(image()), build_transform(Augmentation.none(), (30, 40))(image()))


def test_a_view_is_the_same_for_every_model_in_any_thread() -> None:
    wide, small, view = (
        stub_processor(64, "nearest"),
        stub_processor(16, "bilinear"),
        View(Augmentation(horizontal_flip=0.5), 3, 1),
    )
    rows = np.repeat(np.linspace(0, 255, 512).astype(np.uint8)[None, :], 512, axis=0)  # a ramp shows which part was cropped
    images = {f"images/{number}.png": Image.fromarray(np.stack([rows, rows.T, rows], axis=-1)) for number in range(12)}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(view.build_draw(wide), images.values(), images))
    assert torch.equal(torch.get_rng_state(), before)
    alone = [view.build_draw(wide)(image, name) for name, image in reversed(images.items())]
    assert all(map(torch.equal, threaded, reversed(alone)))
    assert len({one.numpy().tobytes() for one in threaded}) == 12, "each image has its own draws"
    still = View(Augmentation(horizontal_flip=0.5, rotation=0, translation=0), 3, 1)  # which move whole pixels of each size
    for name, image in images.items():
        seen = F.interpolate(still.build_draw(wide)(image, name)[None].float(), size=16, mode="bilinear", antialias=True)[0]
        assert (seen - still.build_draw(small)(image, name)).abs().mean() < 4
    name, image = next(iter(images.items()))
    others = [view, view._replace(seed=4), view._replace(number=2), view._replace(augmentation=Augmentation())]
    assert len({other.build_draw(wide)(image, name).numpy().tobytes() for other in others}) == 4
    assert len({other.digest("images") for other in others} | {view.digest("others")}) == 5


WRONG: list[dict[str, float]] = [{"brightnes": 0.1}, {"min_scale": 0}, {"rotation": 181}, {"horizontal_flip": 1.5}, {"hue": 0.6}]
WRONG += [{"brightness": 0, "contrast": 0, "colour_probability": 0.8}]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Augmentation(**wrong)
