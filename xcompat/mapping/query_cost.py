"""Time that half-way queries and re-ranking add to a search."""

from __future__ import annotations

import time

from PIL import Image

from xcompat.models.embedder import Embedder

MEASURED = 5
"""Queries to measure, after one without measurement."""
_TEXT, _PIXELS = "opening hours and prices", 224


def measure_query_ms(model: Embedder) -> float:
    """Return the milliseconds to embed a short text, or an image if the model embeds no texts."""
    asking = model.for_queries()
    return _measure_ms(asking, 1, of_images=not asking.processor.max_length)


def _measure_ms(model: Embedder, count: int, of_images: bool) -> float:
    """Return the milliseconds to embed a batch of equal texts or images: the least, as others can include waits."""
    processor, seconds = model.processor, []
    for _ in range(1 + MEASURED):
        started = time.perf_counter()
        if of_images:
            model.embed({"pixel_values": processor.images([Image.new("RGB", (_PIXELS, _PIXELS))] * count)})
        else:
            model.embed(processor.texts([_TEXT] * count))
        seconds.append(time.perf_counter() - started)
    return 1000 * min(seconds[1:])


def describe_old_query_ms(model: Embedder, milliseconds: float) -> str:
    """Return a sentence on the cost of half-way queries."""
    return (
        f"Searches load both models: {model.name} adds {milliseconds:.1f} ms to each query here ({model.device.type}, one query "
        "at a time)."
    )


def describe_rerank_cost(model: Embedder, count: int) -> str:
    """Return a sentence on the cost of re-ranking, measured on images if the model embeds any, else on short texts.

    Args:
        model: the new model.
        count: re-ranked hits per query.
    """
    of_images = any(model.processor.image_size)
    milliseconds = _measure_ms(model, count, of_images)
    return (
        f"Re-ranking embeds at most {count} {'images' if of_images else 'texts'} per query ({milliseconds:,.1f} ms here, "
        f"{model.device.type}), {1000 * count:,} per 1,000 queries. Cached embeddings cost nothing. `xcompat plan` adds a price."
    )
