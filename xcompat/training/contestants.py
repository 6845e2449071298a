"""Every test set makes contestants of models: its items, as one model embeds them, or as a map leaves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation import Contestant
from xcompat.evaluation.contestants import C
from xcompat.evaluation.scores import Embeddings
from xcompat.models.frozen import FrozenModel
from xcompat.report import Example
from xcompat.training.test_items import GalleryItems, Questions

HITS_SHOWN = 5
BLOCK = 8192
"""Rows that are mapped at a time."""


class EvaluationSet(Protocol):
    """The items that every model of an evaluation embeds."""

    def embed(self, embedder: FrozenModel, cache_dir: Path) -> Contestant:
        """Embed the items with a frozen model, or read its cached embeddings; unreadable images are rows of NaN."""

    def examples(self, old: Any, new_view: Any, searched: Any, count: int, seed: int) -> list[Example]:  # noqa: ANN401 - its own
        """Search for a few randomly drawn items, with old queries and with new ones.

        Args:
            old: the old model, whose queries search its own gallery.
            new_view: the new model's queries.
            searched: the gallery of the new queries: the old one, or the mapped one.
            count: number of items.
            seed: of the draw.
        """

    def galleries(self) -> list[GalleryItems]:
        """Return what its galleries hold."""

    def questions(self) -> dict[str, Questions]:
        """Return its queries by direction, such as ``text-to-image``."""


def best_rows(gallery_ND: Embeddings, query_D: Embeddings, counts: Callable[[int], bool] | None = None) -> list[int]:
    """Return the rows that one query finds first, the best one first, for an example search.

    Args:
        gallery_ND: ``(N, D)`` embeddings; an unreadable picture, a row of NaN, is never found.
        query_D: ``(D,)`` embedding.
        counts: whether a row may be found; None: each may.
    """
    scores_N = np.asarray(gallery_ND) @ np.asarray(query_D)
    order_N = np.argsort(-np.where(np.isfinite(scores_N), scores_N, -np.inf), kind="stable")
    found = map(int, order_N[: np.isfinite(scores_N).sum()])
    return list(islice(found if counts is None else filter(counts, found), HITS_SHOWN))


def require_cosine(embedder: FrozenModel) -> None:
    """Refuse a model whose embeddings are compared by L2 distance, which only labelled images are."""
    if embedder.metric == "l2":
        raise XcompatError(
            f"{embedder.name} compares by L2 distance, and only labelled images (data.queries) are judged so; train it with "
            "metric: cosine"
        )


def display_name(name: str) -> str:
    """Return the name of a model in a report: the stage's name for the folder of a run's model, else the name itself.

    Example:
        >>> display_name("runs/quickstart/old/model"), display_name("openai/clip-vit-base-patch32")
        ('old', 'openai/clip-vit-base-patch32')
    """
    return Path(name).parent.name if Path(name).name == "model" else name


def map_contestant(
    model: C,
    name: str,
    fingerprint: Fingerprint,
    through: Callable[..., Tensor],
    device: torch.device,
    beside: C | None = None,
) -> C:
    """Map embeddings with a model's ``view``, ``self_view`` or ``upgrade``, or mix them with others.

    Args:
        model: embeddings of the test set.
        name: name of the result.
        fingerprint: the identity of the result.
        through: maps (B, D), and (B, S) of ``beside`` if that is given, to (B, d).
        device: where it computes.
        beside: other embeddings of the same items, such as side-information.

    Returns:
        The same items with mapped embeddings.
    """
    others = beside.matrices() if beside is not None else {}

    @torch.inference_mode()
    def mapped(*sides: Any) -> np.ndarray:  # noqa: ANN401 - array-like
        blocks = (slice(start, start + BLOCK) for start in range(0, max(len(sides[0]), 1), BLOCK))
        # copied block by block, since torch wants arrays that may be written to, and those of files may not
        parts = ([torch.from_numpy(np.array(side[block], np.float32)).to(device) for side in sides] for block in blocks)
        return torch.cat([through(*part).cpu() for part in parts]).numpy()

    result = model.with_matrices(
        {kind: mapped(embeds, *([others[kind]] if others else [])) for kind, embeds in model.matrices().items()}
    )
    return replace(result, name=name, fingerprint=fingerprint)  # type: ignore[type-var]  # contestants are dataclasses
