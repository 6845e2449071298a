"""Convolutions laid out with channels last against contiguous ones: MobileNets embedding images, and a small ResNet training.

    python benchmarks/speed/channels_last.py [--images 64] [--rounds 5]

Random weights and random pixels: speed depends on neither. Whether embeddings and losses agree is asserted first.
"""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import torch
from measuring import ROUNDS, Row, main, medians, timed
from torch import Tensor

from xcompat import IndependentModel
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder

MOBILENETS = {
    "MobileNet V1 x0.5": ({"model_type": "mobilenet_v1", "depth_multiplier": 0.5}, 160),
    "MobileNet V2 x1.0": ({"model_type": "mobilenet_v2", "depth_multiplier": 1.0}, 224),
}
RESNET = {  # the backbone of recipes/vision/study_glyphs.yaml
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "downsample_in_first_stage": True,
}
CLASSES, BATCH, EDGE, STEPS = 1000, 128, 32, 5
AGAINST = "contiguous tensors"


def embedding(name: str, images: int, rounds: int) -> Row:
    """Measure how fast a MobileNet embeds one batch."""
    model, edge = MOBILENETS[name]
    encoder, processor = encoder_from_scratch(ScratchSource(model=model, image_size=edge))
    contiguous = copy.deepcopy(encoder)
    sides = {
        key: Embedder(each.requires_grad_(False).eval(), processor, encoder.fingerprint(processor), encoder.embedding_dim)
        for key, each in (("ours", encoder), ("contiguous", contiguous))
    }
    torch.nn.Module.to(contiguous, memory_format=torch.contiguous_format)  # which an embedder changes by itself
    pixels = {"pixel_values": torch.randn(images, 3, edge, edge, generator=torch.Generator().manual_seed(0))}
    found = [embedder.embed(pixels) for embedder in sides.values()]
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)
    took = medians({key: partial(embedder.embed, pixels) for key, embedder in sides.items()}, rounds)
    return timed(f"{name} embeds {images} images of {edge} pixels", AGAINST, "", took["ours"], took["contiguous"])


def step(model: CompatModel, optimiser: torch.optim.Optimizer, pixels_BCHW: Tensor, labels_B: Tensor) -> float:
    """Train one step; return the loss."""
    optimiser.zero_grad()
    loss = model(pixel_values=pixels_BCHW, labels=labels_B).loss
    loss.backward()
    optimiser.step()
    return loss.item()


def training(rounds: int) -> Row:
    """Measure a few steps of a small ResNet."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(BATCH, 3, EDGE, EDGE, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)
    steps = {}
    for name, layout in (("ours", torch.channels_last), ("contiguous", torch.contiguous_format)):
        encoder = encoder_from_scratch(ScratchSource(model=RESNET, stem="small", image_size=EDGE))
        torch.manual_seed(0)
        model = IndependentModel.from_encoder(encoder, classes=[str(label) for label in range(CLASSES)], dim=64)
        model.set_trainable()
        torch.nn.Module.to(model.train(), memory_format=layout)
        optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
        steps[name] = partial(step, model, optimiser, *batch)
    np.testing.assert_allclose(*([run() for _ in range(STEPS)] for run in steps.values()), rtol=1e-3)
    took = medians({name: lambda run=run: [run() for _ in range(STEPS)] for name, run in steps.items()}, rounds)
    what = f"{STEPS} training steps of a small ResNet, {BATCH} images of {EDGE} pixels"
    return timed(what, AGAINST, "", took["ours"], took["contiguous"])


def measure(images: int = 64, rounds: int = ROUNDS) -> list[Row]:
    """Measure the layout of convolutions on a CPU."""
    return [*(embedding(name, images, rounds) for name in MOBILENETS), training(rounds)]


if __name__ == "__main__":
    main(measure)
