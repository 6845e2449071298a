"""Random rows of a bank on disk, as one operator of a compiled training step."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from xcompat.core.distributed import pin_for
from xcompat.models.old_knowledge import Rows

_BANKS: WeakValueDictionary[int, DrawnBank] = WeakValueDictionary()
_HANDLES = itertools.count()


class DrawnBank:
    """Embeddings that may not fit in memory, of which each step draws some.

    Args:
        rows_Nd: the whole bank.
        size: K, number of rows per draw, at most N.
    """

    def __init__(self, rows_Nd: Rows, size: int) -> None:
        self.rows_Nd = rows_Nd
        self.size = size
        self.dim = rows_Nd.shape[1]
        self.handle = next(_HANDLES)
        _BANKS[self.handle] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> DrawnBank:
        return self  # shared, because nobody writes to it

    def draw(self, place: torch.device) -> tuple[Tensor, Tensor]:
        """Return K float32 rows (K, d) on a device, drawn with torch's random numbers, and their numbers (K,)."""
        bank_Kd, rows_K = _draw(self.handle, self.size, self.dim, place)
        return bank_Kd, rows_K

    def read_sample(self, place: torch.device) -> tuple[Tensor, Tensor]:
        """Draw without the operator around it."""
        drawn_K = torch.randperm(len(self.rows_Nd))[: self.size]
        bank_Kd = torch.from_numpy(np.array(self.rows_Nd[drawn_K.numpy()], dtype=np.float32))
        bank_Kd, drawn_K = (pin_for(side, place).to(place, non_blocking=True) for side in (bank_Kd, drawn_K))
        return bank_Kd, drawn_K


@torch.library.custom_op(
    "xcompat::draw_bank",
    mutates_args=(),
    schema="(int handle, int size, int dim, Device place) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),  # not computed twice, nor recorded
)
def _draw(handle: int, size: int, dim: int, place: torch.device) -> tuple[Tensor, Tensor]:
    return _BANKS[handle].read_sample(place)


@_draw.register_fake
def _(handle: int, size: int, dim: int, place: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(size, dim, device=place), torch.empty(size, dtype=torch.int64, device=place)
