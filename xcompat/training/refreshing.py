"""Training progress and fresh embeddings for methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from xcompat.core.distributed import pin_for, rank, world_size
from xcompat.data import PairCollator, PairDataset, iterate_images
from xcompat.embeddings.embed import decoding_options, images_per_batch
from xcompat.encoders.processor import Processor
from xcompat.losses.gathering import gather_with_grad
from xcompat.models import CompatModel


class RefreshCallback(TrainerCallback):
    """Set a model's ``progress``, and call ``refresh`` at the steps in ``refresh_at``.

    Both depend only on the step, so a resume changes nothing.

    Args:
        model: not wrapped.
        dataset: training set.
        collator: its collator.
    """

    def __init__(self, model: CompatModel, dataset: object, collator: object) -> None:
        self.model = model
        self.dataset = dataset
        self.collator = collator

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Set the progress, and refresh if due."""
        self.model.progress = state.global_step / state.max_steps
        if state.global_step in {round(share * state.max_steps) for share in self.model.refresh_at}:
            assert isinstance(self.dataset, PairDataset) and isinstance(self.collator, PairCollator), "of images"
            self.model.refresh(embed_training_set(self.model, self.dataset, self.collator.processor))


@torch.no_grad()
def embed_training_set(model: CompatModel, dataset: PairDataset, processor: Processor) -> NDArray[np.float32]:
    """Embed training images without augmentation, each process a share.

    Args:
        model: in training; its forward lets FSDP gather weights.
        dataset: training set.
        processor: image preprocessing.

    Returns:
        (N, D) float32, equal on all processes; NaN for unreadable images.
    """
    total, was_training = len(dataset.dataset), model.training
    each = -(-total // world_size())
    # every process has the same number of rows: with sharded weights, all must call forward equally often
    mine = np.arange(rank() * each, (rank() + 1) * each) % total
    embeds_ED = torch.full((each, model.config.embedding_dim), torch.nan, device=model.device)
    model.eval()
    reading: dict[str, Any] = {
        "rows": mine.tolist(),
        "bad": dataset.bad,
        "prepare": lambda images: pin_for(processor.images(images), model.device),
        **decoding_options(model.device),
    }
    for kept, pixels in iterate_images(dataset.dataset, images_per_batch(processor, model.device), **reading):
        places = torch.from_numpy((kept - mine[0]) % total).to(model.device)
        embeds_ED[places] = model(pixel_values=pixels.to(model.device, non_blocking=True), return_loss=False).image_embeds.float()
    model.train(was_training)
    return gather_with_grad(embeds_ED)[:total].numpy(force=True)
