"""Collators from samples to batches of tensors, named for a model's ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Dataset

from xcompat.core.errors import XcompatError
from xcompat.data.pairs import RowArray
from xcompat.data.schema import (
    CAPTION,
    CAPTION_NUMBER,
    CROP_PIXEL_VALUES,
    ID,
    IMAGE,
    INDEX,
    LABEL,
    LABELS,
    NEW_EMBEDS,
    OLD_EMBEDS,
    PIXEL_VALUES,
    SECOND_PIXEL_VALUES,
    SEED,
)
from xcompat.data.transforms import Augmentation, augment_with_seed, build_transform
from xcompat.outputs import Views

if TYPE_CHECKING:
    from xcompat.encoders.processor import Processor


class PairCollator:
    """Collator that augments, tokenises and stacks samples of a `xcompat.data.PairDataset`.

    Set ``remove_unused_columns=False`` in the Trainer, or it drops the images first.

    Args:
        processor: the model's preprocessing.
        augmentation: random changes. With None or zero strengths, images are prepared as for evaluation.
        views: further views per image for the method.

    Raises:
        XcompatError: several views are requested without augmentation.
    """

    def __init__(self, processor: Processor, augmentation: Augmentation | None = None, views: Views | None = None) -> None:
        self.processor = processor
        self.views = views or Views()
        self.transform: Callable[[Image], Tensor] | None = None
        self.crop: Callable[[Image], Tensor] | None = None
        if augmentation is not None and not augmentation.is_none:
            processor.require_images()
            self.transform = build_transform(augmentation, processor.image_size, processor.interpolation)
            if self.views.crops:
                size = (self.views.crop_size, self.views.crop_size)
                self.crop = build_transform(augmentation, size, processor.interpolation, self.views.crop_scale)
        elif self.views != Views():
            raise XcompatError("several views of an image need augmentation; set data.augmentation")

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Make a batch.

        Args:
            items: B samples.

        Returns:
            ``pixel_values`` (B, C, H, W) float32, unless samples lack images; optional views ``second_pixel_values`` and
            ``crop_pixel_values`` (B, crops, C, S, S); with captions ``input_ids`` and optional ``attention_mask`` (B, L) int64;
            with labels ``labels`` (B,) int64; extra columns stacked, floats as float32.
        """
        batch = self._images(items) if IMAGE in items[0] else {}
        if CAPTION in items[0]:
            batch.update(self.processor.texts([item[CAPTION] for item in items]))
        if LABEL in items[0]:
            batch[LABELS] = torch.tensor([item[LABEL] for item in items], dtype=torch.int64)
        for name in items[0].keys() - {IMAGE, CAPTION, LABEL, INDEX, ID, SEED, CAPTION_NUMBER}:
            batch[name] = _floats(np.stack([item[name] for item in items]))
        return batch

    def _images(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if self.transform is None:
            return {PIXEL_VALUES: self.processor.images([item[IMAGE] for item in items])}
        view = self._augment_images(items, self.transform)
        batch = {PIXEL_VALUES: self.processor.to_pixels(view), **self._share_view(view)}
        if self.views.second:
            batch[SECOND_PIXEL_VALUES] = self._augment(items, self.transform, view=1)
        if self.crop is not None:
            crops = [self._augment(items, self.crop, view=2 + crop) for crop in range(self.views.crops)]
            batch[CROP_PIXEL_VALUES] = torch.stack(crops, dim=1)
        return batch

    def _share_view(self, view_BCHW: Tensor) -> dict[str, Tensor]:
        """Return columns that keep the augmented uint8 images for other models."""
        return {}

    def _augment(self, items: Sequence[Mapping[str, object]], transform: Callable[[Image], Tensor], view: int = 0) -> Tensor:
        """Augment each image with its own seed, (B, C, H, W) float32. The generator of dropout and noise does not change."""
        return self.processor.to_pixels(self._augment_images(items, transform, view))

    @staticmethod
    def _augment_images(items: Sequence[Mapping[str, Any]], transform: Callable[[Image], Tensor], view: int = 0) -> Tensor:
        """Return the augmented images, (B, 3, H, W) uint8."""
        return torch.stack([augment_with_seed(transform, item[IMAGE], item[SEED] + view) for item in items])


class EmbeddingPairDataset(Dataset[dict[str, Tensor]]):
    """Cached embeddings of the same items by two models, read in batches.

    Args:
        new_ND: new embeddings, a row per sample, usually a float16 memory map.
        old_Nd: old embeddings in the same order.
        rows_N: rows to use; None to use all.
        extra: further columns, a row per sample.

    Raises:
        XcompatError: the numbers of embeddings differ or are zero.

    Example:
        >>> pairs = EmbeddingPairDataset(np.zeros((4, 3), np.float16), np.ones((4, 2), np.float16))
        >>> {name: (tuple(t.shape), t.dtype) for name, t in pairs.__getitems__([0, 2]).items()}
        {'new_embeds': ((2, 3), torch.float32), 'old_embeds': ((2, 2), torch.float32)}
    """

    def __init__(
        self,
        new_ND: RowArray,
        old_Nd: RowArray,
        rows_N: NDArray[np.int64] | None = None,
        extra: Mapping[str, RowArray] | None = None,
    ) -> None:
        if len(new_ND) != len(old_Nd):
            raise XcompatError(f"{len(new_ND)} new embeddings but {len(old_Nd)} old ones; embed the same data with both models")
        self.rows_N = rows_N
        if not len(new_ND if rows_N is None else rows_N):
            raise XcompatError("no embeddings to train on: the corpus is empty")
        self.arrays = {NEW_EMBEDS: new_ND, OLD_EMBEDS: old_Nd, **(extra or {})}

    def __len__(self) -> int:
        return len(self.arrays[NEW_EMBEDS] if self.rows_N is None else self.rows_N)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample without batch dimension."""
        return {name: embeds[0] for name, embeds in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return ``new_embeds`` (B, D) and ``old_embeds`` (B, d) as float32, with a single read each."""
        index = np.asarray(indices, dtype=np.int64)
        index = index if self.rows_N is None else self.rows_N[index]
        return {name: _floats(array[index]) for name, array in self.arrays.items()}


def collate_embeddings(batch: dict[str, Tensor] | list[object]) -> dict[str, Tensor]:
    """Return the batch unchanged, as `EmbeddingPairDataset` reads whole batches."""
    assert isinstance(batch, dict), "EmbeddingPairDataset must be read by __getitems__, as torch's data loader does"
    return batch


def _floats(values: np.ndarray[Any, Any]) -> Tensor:
    """Convert rows to a tensor. Floats become float32."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.float() if tensor.is_floating_point() else tensor
