"""Test sets as embedded by a model or map."""

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
from xcompat.evaluation import EvaluatedModel
from xcompat.evaluation.evaluated_models import C
from xcompat.evaluation.scores import Embeddings
from xcompat.models.frozen import FrozenModel
from xcompat.report import Example
from xcompat.training.test_items import GalleryItems, QuerySet

HITS_SHOWN = 5
BLOCK = 8192
"""Rows mapped at a time."""


class EvaluationSet(Protocol):
    """Test items for every model."""

    def embed(self, embedder: FrozenModel, cache_dir: Path) -> EvaluatedModel:
        """Embed the items, or read their cache; unreadable images are rows of NaN."""

    def examples(self, old: Any, new_view: Any, searched: Any, count: int, seed: int) -> list[Example]:  # noqa: ANN401 - its own
        """Search for randomly drawn items with old and new queries.

        Args:
            old: the old model; its queries search its own gallery.
            new_view: new queries.
            searched: gallery of new queries (old or mapped).
            count: number of items.
            seed: random seed for the draw.
        """

    def galleries(self) -> list[GalleryItems]:
        """Return the galleries' items."""

    def questions(self) -> dict[str, QuerySet]:
        """Return queries by direction, e.g. ``text-to-image``."""


def best_rows(gallery_ND: Embeddings, query_D: Embeddings, counts: Callable[[int], bool] | None = None) -> list[int]:
    """Return a query's best hits, best first.

    Args:
        gallery_ND: ``(N, D)`` embeddings; rows of NaN are never found.
        query_D: ``(D,)`` embedding.
        counts: whether a row may be found; None for all.
    """
    scores_N = np.asarray(gallery_ND) @ np.asarray(query_D)
    order_N = np.argsort(-np.where(np.isfinite(scores_N), scores_N, -np.inf), kind="stable")
    found = map(int, order_N[: np.isfinite(scores_N).sum()])
    return list(islice(found if counts is None else filter(counts, found), HITS_SHOWN))


def require_cosine(embedder: FrozenModel) -> None:
    """Refuse a model with L2 distance."""
    if embedder.metric == "l2":
        raise XcompatError(
            f"{embedder.name} uses L2 distance, which only labelled test images (data.queries) support; train it with metric: "
            "cosine"
        )


def display_name(name: str) -> str:
    """Return a model's name in reports: its stage, if it is in a run.

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
    """Map embeddings of a test set, or mix them with others.

    Args:
        model: test set embeddings.
        name: result name.
        fingerprint: its fingerprint.
        through: maps (B, D), and (B, S) of ``beside``, to (B, d).
        device: computes the map.
        beside: other embeddings of the same items.

    Returns:
        The same items with mapped embeddings.
    """
    others = beside.matrices() if beside is not None else {}

    @torch.inference_mode()
    def map_matrix(*sides: Any) -> np.ndarray:  # noqa: ANN401 - array-like
        blocks = (slice(start, start + BLOCK) for start in range(0, max(len(sides[0]), 1), BLOCK))
        # copied block by block, as torch needs writable arrays
        parts = ([torch.from_numpy(np.array(side[block], np.float32)).to(device) for side in sides] for block in blocks)
        return torch.cat([through(*part).cpu() for part in parts]).numpy()

    result = model.with_matrices(
        {kind: map_matrix(embeds, *([others[kind]] if others else [])) for kind, embeds in model.matrices().items()}
    )
    return replace(result, name=name, fingerprint=fingerprint)  # type: ignore[type-var]  # contestants are dataclasses
