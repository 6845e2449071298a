"""Peak memory of CMC and mAP over the full ranking, beyond the embeddings.

python benchmarks/speed/ranking_memory.py [--items 50000] [--classes 100] [--dim 128]
"""

from __future__ import annotations

from measuring import Row, in_fresh_process, main, peak_memory
from ranking import labelled, ours

GIB = 2**30


def peak(items: int, classes: int, dim: int) -> int:
    """Return the bytes that ranking takes beyond its inputs."""
    embeds_ND, labels_N = labelled(items, classes, dim)
    return peak_memory(lambda: ours(embeds_ND, labels_N))


def measure(items: int = 50_000, classes: int = 100, dim: int = 128) -> list[Row]:
    """Measure the memory of full-ranking CMC and mAP on a CPU."""
    taken = in_fresh_process(peak, items, classes, dim)
    what, matrix = f"peak memory of CMC and mAP, {items:,} x {items:,} x {dim}", 4 * items**2
    return [
        Row(what, "1 GiB", taken / GIB, "<= 1", f"{taken / GIB:.2f} GiB beyond the inputs"),
        Row(what, "the float32 similarities", taken / matrix, "", f"{matrix / GIB:.1f} GiB if they were held at once"),
    ]


if __name__ == "__main__":
    main(measure)
