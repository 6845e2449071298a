"""Data sets as they lie on disk when they were fetched and unpacked, made of a few small images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_layouts import faces, images, labelled

MAKERS: dict[str, Callable[[Path], object]] = {
    "cifar-10-batches-bin": labelled.make_cifar10,
    "cifar-100-binary": labelled.make_cifar100,
    "coco": images.make_coco,
    "flickr30k": images.make_flickr30k,
    "imagenet": labelled.make_imagenet,
    "imagenet-r": labelled.make_imagenet_r,
    "imagenet-sketch": labelled.make_imagenet_sketch,
    "ijbc": faces.make_ijbc,
    "market1501": faces.make_market1501,
    "ms1m": faces.make_ms1m,
    "nocaps": images.make_nocaps,
    "places365": labelled.make_places365,
    "vggface2": labelled.make_vggface2,
}
"""Folder below ``data/`` -> what makes it."""


def make_all(folder: Path) -> None:
    for name, make in MAKERS.items():
        make(folder / name)
