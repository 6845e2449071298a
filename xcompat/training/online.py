"""Collator with frozen models that embed each batch."""

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


class OnlineCollator(PairCollator):
    """Collator in which frozen models embed the new model's augmented view or caption.

    Unlike cached embeddings of plain images, this costs a pass of each frozen model per epoch. Their results are not
    comparable. Frozen models run in the process that makes batches.

    Args:
        processor: the new model's preprocessing.
        augmentation: random changes, or None.
        views: see :class:`xcompat.data.PairCollator`.
        models: frozen models by column: ``old_text_embeds`` for captions, others for images.
    """

    def __init__(
        self, processor: Processor, augmentation: Augmentation | None, views: Views | None, models: Mapping[str, Embedder]
    ) -> None:
        super().__init__(processor, augmentation, views)
        self.models = models

    @override
    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__(items)
        captions = [item[CAPTION] for item in items] if OLD_TEXT_EMBEDS in self.models else []
        # the same view as the new model's, from the sample's seed
        view = None if self.transform is None else self._augment_images(items, self.transform).float()
        for column, model in self.models.items():
            is_text = column == OLD_TEXT_EMBEDS
            read = model.processor.texts(captions) if is_text else {PIXEL_VALUES: self._pixels(items, view, model.processor)}
            batch[column] = model.embed(read).clone().cpu()  # a tensor made in inference mode cannot be saved for gradients
        return batch

    @staticmethod
    def _pixels(items: Sequence[Mapping[str, Any]], view: Tensor | None, processor: Processor) -> Tensor:
        if view is None:
            return processor.images([item[IMAGE] for item in items])
        resized = F.interpolate(view, size=processor.image_size, mode="bicubic", antialias=True, align_corners=False)
        return processor.to_pixels(resized.round().clamp(0, 255).byte())
