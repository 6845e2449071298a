"""Old embeddings of what the new model sees: the frozen old model runs on the same augmented view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from xcompat.data import Augmentation, PairCollator
from xcompat.data.schema import IMAGE, OLD_EMBEDS, PIXEL_VALUES
from xcompat.encoders.processor import Processor
from xcompat.models.embedder import Embedder


class OnlineOldCollator(PairCollator):
    """Batches whose ``old_embeds`` are made on the spot, of the very view that the new model gets.

    Cached embeddings are of plain images and cost one pass over the data; these cost one pass of the old model in every epoch,
    and results of the two cannot be compared. The old model runs where batches are made: in this process.

    Args:
        processor: the new model's preprocessing.
        augmentation: random changes; None for plain images.
        two_views: see :class:`xcompat.data.PairCollator`.
        old: the frozen old model.
    """

    def __init__(self, processor: Processor, augmentation: Augmentation | None, two_views: bool, old: Embedder) -> None:
        super().__init__(processor, augmentation, two_views)
        self.old = old

    @override
    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__(items)
        if self.transform is None:
            pixels = self.old.processor.images([item[IMAGE] for item in items])
        else:
            view = self._augmented(items).float()  # a sample's seed makes the same view again
            size = self.old.processor.image_size
            resized = F.interpolate(view, size=size, mode="bicubic", antialias=True, align_corners=False)
            pixels = self.old.processor.to_pixels(resized.round().clamp(0, 255).byte())
        batch[OLD_EMBEDS] = self.old.embed({PIXEL_VALUES: pixels}).cpu()
        return batch
