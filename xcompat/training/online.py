"""Frozen models that embed each batch in the training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.data import Augmentation, PairCollator
from xcompat.data.schema import CAPTION, IMAGE, OLD_TEXT_EMBEDS, PIXEL_VALUES
from xcompat.encoders.processor import Processor
from xcompat.models.embedder import Embedder
from xcompat.outputs import Views

VIEW, FROZEN = "view", "frozen"
"""Columns of a batch for frozen models: the shared augmented view, and other inputs by the column that they become."""


class OnlineCollator(PairCollator):
    """Collator that adds inputs of frozen models: the new model's augmented view as uint8, or plain images, and captions.

    It needs only their preprocessing, so it can run in workers. :class:`OnlineEmbedder` embeds in the training step.

    Args:
        processor: the new model's preprocessing.
        augmentation: random changes, or None.
        views: see :class:`xcompat.data.PairCollator`.
        processors: preprocessing of frozen models by column: ``old_text_embeds`` for captions, others for images.
    """

    def __init__(
        self, processor: Processor, augmentation: Augmentation | None, views: Views | None, processors: Mapping[str, Processor]
    ) -> None:
        super().__init__(processor, augmentation, views)
        self.processors = processors

    @override
    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        inputs: dict[str, dict[str, Tensor]] = {}
        for column, processor in self.processors.items():
            if column == OLD_TEXT_EMBEDS:
                inputs[column] = processor.texts([item[CAPTION] for item in items])
            elif self.transform is None:
                inputs[column] = {PIXEL_VALUES: processor.images([item[IMAGE] for item in items])}
        return {**super().__call__(items), FROZEN: inputs}

    @override
    def _share_view(self, view_BCHW: Tensor) -> dict[str, Tensor]:
        return {VIEW: view_BCHW}


class OnlineEmbedder:
    """Frozen models that embed batches of an :class:`OnlineCollator`, on their device.

    Unlike cached embeddings of plain images, this costs a pass of each frozen model per epoch. Their results are not
    comparable.

    Args:
        models: frozen models by column.
    """

    def __init__(self, models: Mapping[str, Embedder]) -> None:
        self.models = models

    def embed(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Replace the inputs of frozen models in a batch by their embeddings.

        Args:
            batch: a batch of the collator.

        Returns:
            The other columns, and a column (B, d) float32 per model.
        """
        columns = dict(batch)
        inputs, view = columns.pop(FROZEN), columns.pop(VIEW, None)
        for column, model in self.models.items():
            read = inputs[column] if column in inputs else {PIXEL_VALUES: _resize(view, model.processor)}
            columns[column] = model.embed(read).clone()  # a tensor made in inference mode cannot be saved for gradients
        return columns


def _resize(view_BCHW: Tensor, processor: Processor) -> Tensor:
    """Resize an augmented view to a model's image size, and normalise it."""
    resized = F.interpolate(view_BCHW.float(), size=processor.image_size, mode="bicubic", antialias=True, align_corners=False)
    return processor.to_pixels(resized.round().clamp(0, 255).byte())
