"""Weights laid out for oneDNN against `torch.compile`, on a CPU: CLIP B/32's image tower with random weights embedding one batch.

    python benchmarks/speed/compiled.py [--images 16] [--edge 224] [--layers 12] [--rounds 5]

Compiling needs a C++ compiler and takes half a minute where nothing is cached; laying weights out takes a fraction of a second.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import torch
from measuring import ROUNDS, Row, interleaved, main, timed

from xcompat.encoders.onednn import packed_linears
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch

COMPILERS = ("g++", "clang++")


@torch.no_grad()
def measure(images: int = 16, edge: int = 224, layers: int = 12, rounds: int = ROUNDS) -> list[Row]:
    """Measure one batch."""
    what = f"CLIP B/32's image tower embeds {images} images of {edge} pixels"
    if not any(shutil.which(compiler) for compiler in COMPILERS):
        return [Row(what, "torch.compile", None, "", f"not run: it needs {' or '.join(COMPILERS)}")]
    described = {"model_type": "clip_vision_model", "image_size": edge, "num_hidden_layers": layers}
    encoder = encoder_from_scratch(ScratchSource(model=described))[0].eval()
    compiled = torch.compile(encoder.image_features)
    pixels_BCHW = torch.randn(images, 3, edge, edge, generator=torch.Generator().manual_seed(0))
    started = time.perf_counter()
    theirs_BD = compiled(pixels_BCHW)
    compiling = time.perf_counter() - started

    def seconds(features: Callable[[torch.Tensor], torch.Tensor]) -> float:
        started = time.perf_counter()
        torch.testing.assert_close(features(pixels_BCHW), theirs_BD, rtol=0, atol=1e-4)
        return time.perf_counter() - started

    def ours() -> float:
        with packed_linears(encoder):  # once in a whole data set, as theirs compiles once
            return seconds(encoder.image_features)

    sides = {"ours": ours, "compiled": lambda: seconds(compiled), "eager": lambda: seconds(encoder.image_features)}
    took = interleaved(sides, rounds)
    note = f"the first call of theirs {compiling:.0f} s"
    return [
        timed(what, "torch.compile", "", took["ours"], took["compiled"], note),
        timed(what, "as it comes", "", took["ours"], took["eager"]),
    ]


if __name__ == "__main__":
    main(measure)
