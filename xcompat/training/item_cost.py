"""Cost of a gallery item for a new model: operations and bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from xcompat.models import CompatModel
from xcompat.report.comparison import ItemCost

BYTES = 4
"""Bytes per number of a stored vector (float32)."""


def measure_item_cost(model: CompatModel) -> ItemCost:
    """Count what a gallery item costs with a trained model (FCT Figure 3).

    Args:
        model: trained for an old model.
    """
    old, side = model.config.old, getattr(model.config, "side_info", None)
    assert old is not None
    inputs = [torch.zeros(1, each["dim"], device=model.device) for each in (old, side) if each is not None]
    map_macs = count_macs(lambda: model.upgrade(*inputs)) if model.maps_galleries else 0
    stored = BYTES * sum(each.shape[1] for each in inputs)
    if model.encoder is None or not all(model.processor.image_size):
        return ItemCost(map_macs, stored)
    pixels = torch.zeros(1, 3, *model.processor.image_size, device=model.device)
    return ItemCost(map_macs, stored, count_macs(lambda: model.embed_images(pixels)), pixels.numel())


def count_macs(run: Callable[[], object]) -> int:
    """Count the multiply-accumulate operations of matrix products, convolutions and attention.

    Args:
        run: function to count.

    Example:
        >>> count_macs(lambda: torch.zeros(1, 8) @ torch.zeros(8, 4))
        32
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2
