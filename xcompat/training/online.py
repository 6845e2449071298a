"""Old embeddings of augmented images: the frozen old model embeds the view that the new model is trained on."""

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
    """Make batches whose ``old_embeds`` are computed from the same augmented view as the new model's input.

    Cached embeddings are of plain images and cost one pass over the data; these cost one pass of the old model in every epoch.
    The results of the two cannot be compared. The old model runs in the process that makes the batches.

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
            view = self._augmented(items).float()  # the same view again, from the sample's seed
            size = self.old.processor.image_size
            resized = F.interpolate(view, size=size, mode="bicubic", antialias=True, align_corners=False)
            pixels = self.old.processor.to_pixels(resized.round().clamp(0, 255).byte())
        batch[OLD_EMBEDS] = self.old.embed({PIXEL_VALUES: pixels}).cpu()
        return batch
