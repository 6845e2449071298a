"""Recall of captions and images in both directions against what others compute it with, and against the bare similarities.

    python benchmarks/speed/recall.py [--images 5000] [--captions 5] [--dim 512] [--share 40] [--rounds 5]

Peers: `pip install torchmetrics` and `pip install --no-deps clip_benchmark` (what that asks for besides is not needed here). Both
take the same time for every query; they answer every SHARE-th one, and their times are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from measuring import ROUNDS, Row, main, medians, not_installed, timed
from torch import Tensor

from xcompat.evaluation import first_hit_ranks, recall_at_k

KS = (1, 5, 10)
CLIP_BATCH = 64  # the batch size that CLIP_benchmark evaluates with unless told otherwise

Recalls = dict[int, float]
Peer = Callable[[Tensor, Tensor], Recalls]


def pairs(images: int, captions: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw unit vectors of images and of the captions around them: (I, D), (T, D), and their ids."""
    generator = torch.Generator().manual_seed(0)
    images_ID = torch.randn(images, dim, generator=generator)
    ids_T = torch.arange(images * captions) // captions
    texts_TD = images_ID[ids_T] + 7 * torch.randn(len(ids_T), dim, generator=generator)
    unit = torch.nn.functional.normalize
    return unit(images_ID), unit(texts_TD), torch.arange(images), ids_T


def clip_benchmark() -> Peer | None:
    """Return CLIP_benchmark's recall, as its evaluation calls it; None where it is not installed."""
    try:
        from clip_benchmark.metrics import zeroshot_retrieval
    except ImportError:
        return None

    def recall(scores_QG: Tensor, positive_QG: Tensor) -> Recalls:
        def of(k: int) -> float:
            found_Q = zeroshot_retrieval.batchify(zeroshot_retrieval.recall_at_k, scores_QG, positive_QG, CLIP_BATCH, "cpu", k=k)
            return (found_Q > 0).float().mean().item()

        return {k: of(k) for k in KS}

    return recall


def torchmetrics() -> Peer | None:
    """Return torchmetrics' hit rate of retrieval, query by query; None where it is not installed.

    Its recall is the share of a query's positives that are found; of one positive, a caption's image, the two are the same.
    """
    try:
        from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_recall
    except ImportError:
        return None

    def recall(scores_QG: Tensor, positive_QG: Tensor) -> Recalls:
        found = retrieval_recall if int(positive_QG[0].sum()) == 1 else retrieval_hit_rate
        above_QG = scores_QG + 2  # its recall takes nothing for found that scores 0 or less
        return {
            k: float(torch.stack([found(*pair, top_k=k) for pair in zip(above_QG, positive_QG, strict=True)]).mean()) for k in KS
        }

    return recall


def measure(images: int = 5000, captions: int = 5, dim: int = 512, share: int = 40, rounds: int = ROUNDS) -> list[Row]:
    """Measure recall at 1, 5 and 10 in both directions on a CPU."""
    images_ID, texts_TD, ids_I, ids_T = pairs(images, captions, dim)
    directions = [(texts_TD, images_ID, ids_T, ids_I), (images_ID, texts_TD, ids_I, ids_T)]

    def ours() -> list[Recalls]:
        return [recall_at_k(*direction, ks=KS) for direction in directions]

    def by(peer: Peer) -> list[Recalls]:
        found = []
        for queries_QD, gallery_GD, ids_Q, ids_G in directions:
            scores_QG = queries_QD[::share] @ gallery_GD.T
            found.append(peer(scores_QG, ids_Q[::share, None] == ids_G))
        return found

    expected = []
    for queries_QD, gallery_GD, ids_Q, ids_G in directions:
        ranks_Q = first_hit_ranks(queries_QD, gallery_GD, ids_Q, ids_G)
        assert recall_at_k(queries_QD, gallery_GD, ids_Q, ids_G, ks=KS) == {k: float((ranks_Q < k).mean()) for k in KS}
        expected.append([float((ranks_Q[::share] < k).mean()) for k in KS])
    known = {
        "CLIP_benchmark's recall": (clip_benchmark(), "--no-deps clip_benchmark"),
        "torchmetrics' retrieval recall": (torchmetrics(), "torchmetrics"),
    }
    sides: dict[str, Callable[[], object]] = {"ours": ours}
    for name, (peer, _) in known.items():
        if peer is not None:
            # one query may answer otherwise where two float32 scores all but tie
            np.testing.assert_allclose([list(found.values()) for found in by(peer)], expected, atol=1.5 / len(ids_I[::share]))
            sides[name] = lambda peer=peer: by(peer)
    room_TI = torch.empty(len(texts_TD), len(images_ID))
    sides["product"] = lambda: torch.matmul(texts_TD, images_ID.T, out=room_TI)  # one is enough for both directions
    took = medians(sides, rounds)
    what = f"R@1, 5, 10 both ways, {len(images_ID):,} images, {len(texts_TD):,} captions of {dim} dimensions"
    note = f"theirs of every {share}th query, times {share}"
    peers = [
        timed(what, name, ">= 5", took["ours"], share * took[name], note)
        if peer is not None
        else not_installed(what, name, ">= 5", package)
        for name, (peer, package) in known.items()
    ]
    return [*peers, timed(what, "the bare float32 product of the similarities", "", took["ours"], took["product"])]


if __name__ == "__main__":
    main(measure)
