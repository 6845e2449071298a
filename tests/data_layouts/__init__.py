"""Data sets as they lie on disk when they were fetched and unpacked, made of a few small images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_layouts.captioned import make_coco, make_flickr30k, make_nocaps
from data_layouts.faces import make_ijbc, make_market1501, make_ms1m
from data_layouts.labelled import (
    make_cifar10,
    make_cifar100,
    make_imagenet,
    make_imagenet_r,
    make_imagenet_sketch,
    make_places365,
    make_vggface2,
)

MAKERS: dict[str, Callable[[Path], object]] = {
    "cifar-10-batches-bin": make_cifar10,
    "cifar-100-binary": make_cifar100,
    "coco": make_coco,
    "flickr30k": make_flickr30k,
    "imagenet": make_imagenet,
    "imagenet-r": make_imagenet_r,
    "imagenet-sketch": make_imagenet_sketch,
    "ijbc": make_ijbc,
    "market1501": make_market1501,
    "ms1m": make_ms1m,
    "nocaps": make_nocaps,
    "places365": make_places365,
    "vggface2": make_vggface2,
}
"""Folder below ``data/`` -> what makes it."""


def make_all(folder: Path) -> None:
    """Make every data set in a folder of its own below ``folder``."""
    for name, make in MAKERS.items():
        make(folder / name)
