"""t-SNE maps of embeddings, as in Figure 5 of XBT."""

from __future__ import annotations

import numpy as np

from xcompat.core.arrays import normalise_rows
from xcompat.evaluation import EmbeddedPairs, EvaluatedModel
from xcompat.evaluation.identities import as_ids
from xcompat.evaluation.scores import as_rows
from xcompat.report.content import Panel, ReportContent, Series

_FEWEST_PAIRS = 5
_ITERATIONS = 500  # enough for clouds of a thousand points


def project(content: ReportContent) -> list[Panel]:
    """Project a sample of pairs to the plane, a panel per space (XBT, Figure 5; t-SNE of van der Maaten and Hinton 2008).

    Old and new embeddings share the old space, so they share a panel. The independent model has its own panel, as distances
    between spaces mean nothing. With fewer than five pairs there are no panels.
    """
    shown = content.contestants
    rows = sampled_rows(shown.old, content.tsne_pairs, content.seed)
    if min(map(len, rows.values())) < _FEWEST_PAIRS:
        return []
    spaces: list[tuple[str, list[tuple[str, EvaluatedModel]]]] = []
    if shown.new_view.dim == shown.old.dim:
        spaces.append(("Old space", [("old", shown.old), ("new, in the old space", shown.new_view)]))
    if shown.independent is not None:
        spaces.append(("Independent model, own space", [("independent", shown.independent)]))
    panels = []
    for title, models in spaces:
        labels, clouds = [], []
        for label, model in models:
            matrices = model.matrices()
            labels += [f"{kind}, {label}" for kind in rows]
            clouds += [as_rows(matrices[kind], label)[rows_P] for kind, rows_P in rows.items()]
        points = np.split(_tsne(np.concatenate(clouds), content.seed), len(clouds))
        panels.append(Panel(title, [Series(label, points_P2) for label, points_P2 in zip(labels, points, strict=True)]))
    return panels


def sampled_rows(model: EvaluatedModel, count: int, seed: int) -> dict[str, np.ndarray]:
    """Draw the rows to show as kind -> rows: pairs of image and text, only gallery images, or only queries."""
    generator = np.random.default_rng(seed)
    if not isinstance(model, EmbeddedPairs):
        matrices = model.matrices()
        kind = "images" if "images" in matrices else "queries"
        return {kind: generator.permutation(len(matrices[kind]))[:count]}
    image_ids = as_ids(model.image_ids, len(model.image_ids), "images")
    text_ids = as_ids(model.text_ids, len(model.text_ids), "texts")
    # texts with distinct ids, and one image for each
    image_of = {image_ids[row]: row for row in generator.permutation(len(image_ids)).tolist()}
    text_of = {text_ids[row]: row for row in generator.permutation(len(text_ids)).tolist() if text_ids[row] in image_of}
    chosen = list(text_of)[:count]
    return {
        "images": np.array([image_of[item] for item in chosen], dtype=np.int64),
        "texts": np.array([text_of[item] for item in chosen], dtype=np.int64),
    }


def _tsne(rows_ND: np.ndarray, seed: int) -> np.ndarray:
    """Return float32 ``(N, 2)``. Rows are normalised, so Euclidean neighbours are cosine neighbours."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # scikit-learn depends on it

    perplexity = min(30.0, (len(rows_ND) - 1) / 3)
    # The start needs two principal components, which one-dimensional embeddings lack.
    start = "pca" if min(rows_ND.shape) >= 2 else "random"
    tsne = TSNE(perplexity=perplexity, init=start, max_iter=_ITERATIONS, random_state=seed)
    # More threads do not speed up such a small map, and make it ten times slower on shared cores.
    with threadpool_limits(1):
        return np.asarray(tsne.fit_transform(normalise_rows(rows_ND)), dtype=np.float32)
