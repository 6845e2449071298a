"""Time that the old model adds to half-way queries."""

from __future__ import annotations

import statistics
import time

from PIL import Image

from xcompat.models.embedder import Embedder

MEASURED = 5
"""Queries to measure, after one without measurement."""
_TEXT, _PIXELS = "opening hours and prices", 224


def measure_query_ms(model: Embedder) -> float:
    """Return the median milliseconds to embed a short text, or an image if the model embeds no texts."""
    asking, seconds = model.for_queries(), []
    processor = asking.processor
    for _ in range(1 + MEASURED):
        started = time.perf_counter()
        if processor.max_length:
            asking.embed(processor.texts([_TEXT]))
        else:
            asking.embed({"pixel_values": processor.images([Image.new("RGB", (_PIXELS, _PIXELS))])})
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds[1:])


def describe_old_query_ms(model: Embedder, milliseconds: float) -> str:
    """Return a sentence on the cost of half-way queries."""
    return (
        f"Searches load both models: {model.name} adds {milliseconds:.1f} ms to each query here ({model.device.type}, one query "
        "at a time)."
    )
