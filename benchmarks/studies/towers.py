"""Dual encoders of pretrained towers: MobileNet for photos, WordLlama or MiniLM for names, joined by projections trained here.

The towers stay frozen (locked-image tuning, Zhai et al., CVPR 2022, with the text tower locked too). So each photo and name is
embedded once, and training two matrices takes seconds. benchmarks/studies/bench_data.py calls this. To print the tables of
docs/results/towers.md after the comparison:

    python benchmarks/studies/towers.py runs/bench/fashion_towers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, get_cosine_schedule_with_warmup

from xcompat.core.files import read_json
from xcompat.data.pairs import iterate_images
from xcompat.encoders import EncoderSource, load_encoder
from xcompat.encoders.architectures.sentence_tower import join_towers
from xcompat.encoders.base import Encoder
from xcompat.encoders.processor import Processor
from xcompat.evaluation import paired_bootstrap
from xcompat.losses import clip_contrastive_loss
from xcompat.quickstart.text_models import NEW, OLD, PretrainedModel, prepare_model
from xcompat.report import Report, load_report, report_file
from xcompat.report.comparison import comparison_file
from xcompat.report.wording import gain_with_interval

IMAGE_MODELS = Path("../shared/models")
TEXT_MODELS = Path.home() / ".cache" / "xcompat" / "text-models"
BATCH, EMBEDDED, EPOCHS, LEARNING_RATE, LARGEST_SCALE = 256, 128, 20, 1e-3, 100.0
HITS = 10
"""R@10 is what the tables show."""
console = Console(soft_wrap=True, markup=False, highlight=False, stderr=True)


@dataclass(frozen=True)
class Towers:
    """Dual encoder to build.

    Args:
        image: folder of the image model in :data:`IMAGE_MODELS`.
        text: text model.
        image_size: image side in pixels.
        dim: dimension of the shared space.
        seed: of the projections.
    """

    image: str
    text: PretrainedModel
    image_size: int
    dim: int
    seed: int


OLD_TOWERS = Towers("mobilenet_v1_0.25_128", OLD, 128, 128, seed=1)
NEW_TOWERS = Towers("mobilenet_v2_1.0_224", NEW, 96, 256, seed=2)
"""At 96 pixels V2 takes a fifth of the time; the photos have 60x80."""


def write_towers(folder: Path, towers: Towers, pairs: Path) -> None:
    """Join two pretrained towers, and train their projections on captioned photos."""
    image = EncoderSource(name=str(IMAGE_MODELS / towers.image), image_size=towers.image_size)
    torch.manual_seed(towers.seed)
    join_towers(image, f"sentence-transformers:{prepare_model(towers.text, TEXT_MODELS)}", towers.dim, folder)
    whole = {"height": towers.image_size, "width": towers.image_size}  # photos are portraits: a centre crop would cut shoes off
    AutoImageProcessor.from_pretrained(folder, size=whole, do_center_crop=False).save_pretrained(folder)
    encoder, processor = load_encoder(str(folder))
    dataset = load_from_disk(str(pairs))
    assert isinstance(dataset, Dataset)
    train_projections(encoder, *read_features(encoder, processor, dataset), towers.seed)
    encoder.save_pretrained(folder)


@torch.inference_mode()
def read_features(encoder: Encoder, processor: Processor, pairs: Dataset) -> tuple[Tensor, Tensor]:
    """Return what the towers make of photos and names, (N, W) each, before the projections."""
    model = encoder.model
    batches = iterate_images(pairs, EMBEDDED, prepare=processor.images, ahead=False)
    images = [model.vision_model(pixels).pooler_output for _, pixels in batches]
    names = [captions[0] for captions in pairs["caption"]]
    tokens = (processor.texts(names[start : start + EMBEDDED]) for start in range(0, len(names), EMBEDDED))
    texts = [model.text_model(**each).pooler_output for each in tokens]
    return torch.cat(images), torch.cat(texts)


def train_projections(encoder: Encoder, images_NV: Tensor, texts_NW: Tensor, seed: int) -> None:
    """Train the projections and the scale of a dual encoder by CLIP's loss; the towers do not change."""
    model = encoder.model
    trained = [model.visual_projection.weight, model.text_projection.weight, model.logit_scale]
    rows, generator = len(images_NV), np.random.default_rng(seed)
    steps = EPOCHS * (rows // BATCH)
    optimiser = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimiser, steps // 20, steps)
    for step in range(steps):
        if step % (rows // BATCH) == 0:
            order = torch.from_numpy(generator.permutation(rows))
        batch = order[step % (rows // BATCH) * BATCH :][:BATCH]
        sides = model.visual_projection(images_NV[batch]), model.text_projection(texts_NW[batch])
        scale = model.logit_scale.exp().clamp(max=LARGEST_SCALE)
        loss = clip_contrastive_loss(*(F.normalize(side, dim=1) for side in sides), scale)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    console.print(f"{steps} batches of {BATCH}: loss {loss.item():.3f}, scale {scale.item():.1f}")


def table(folder: Path, direction: str) -> Iterator[str]:
    """Yield a comparison's table of R@10 in one direction, means over seeds; gains are paired with old/old query by query."""
    study = read_json(comparison_file(folder))
    yield "| method | new/old | gain | half-way | gain | new/new | over old/old |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name in (row["name"] for row in study["rows"] if row["method"]):
        runs = [folder / f"seed-{seed}" for seed in study["seeds"]]
        # the report of the last stage is the run's
        reports = [load_report(run / name if report_file(run / name).is_file() else run) for run in runs]
        cells = [_cell(reports, case, direction) for case in (("new", "old"), ("slerp", "old"), ("new", "new"))]
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(reports: list[Report], case: tuple[str, str], direction: str) -> str:
    """Return R@10 of a case and its gain over old/old; empty without such a case."""
    if (*case, direction) not in reports[0].ranks:
        return " | "
    found_Q, old_Q = (_found(reports, each, direction) for each in (case, ("old", "old")))
    gain = paired_bootstrap(found_Q, old_Q)
    return f"{100 * found_Q.mean():.1f} | {gain_with_interval(gain.mean, gain.low, gain.high)}"


def _found(reports: list[Report], case: tuple[str, str], direction: str) -> NDArray[np.float64]:
    """Return for each query the share of seeds with a match among the first ten, (Q,)."""
    ranks = [report.ranks[*case, direction] for report in reports]
    return np.mean([(ranks_Q >= 0) & (ranks_Q < HITS) for ranks_Q in ranks], axis=0)


if __name__ == "__main__":
    for place in map(Path, sys.argv[1:]):
        for side in ("text-to-image", "image-to-text"):
            Console(soft_wrap=True).print("\n".join([side, "", *table(place, side), ""]), markup=False, highlight=False)
