"""t-SNE maps of who lies where, as in Figure 5 of XBT."""

from __future__ import annotations

import numpy as np

from xcompat.evaluation import EmbeddedPairs
from xcompat.evaluation.scores import as_ids, as_rows
from xcompat.report.content import Panel, ReportContent, Series

_FEWEST_PAIRS = 5
_ITERATIONS = 500  # the clouds of a thousand points no longer move after that


def project(content: ReportContent) -> list[Panel]:
    """Map a sample of pairs to the plane, one panel per space (XBT, Figure 5; t-SNE of van der Maaten and Hinton 2008).

    Old and new-in-old-space embeddings are compared with each other by every search, so they share a panel; the independent
    model has a space of its own, and points of different spaces have no distance.

    Args:
        content: the models, how many pairs, and the seed.

    Returns:
        A panel per space; none if there are fewer than five pairs.
    """
    images_P, texts_P = _sample_pairs(content.old, content.tsne_pairs, content.seed)
    if len(images_P) < _FEWEST_PAIRS:
        return []
    spaces: list[tuple[str, list[tuple[str, EmbeddedPairs]]]] = [
        ("Old space", [("old", content.old), ("new, seen from the old space", content.new_view)])
    ]
    if content.independent is not None:
        spaces.append(("Independent model, own space", [("independent", content.independent)]))
    panels = []
    for title, models in spaces:
        labels, clouds = [], []
        for label, model in models:
            labels += [f"images, {label}", f"texts, {label}"]
            clouds += [as_rows(model.image_embeds_ND, label)[images_P], as_rows(model.text_embeds_MD, label)[texts_P]]
        points = np.split(_tsne(np.concatenate(clouds), content.seed), len(clouds))
        panels.append(Panel(title, [Series(label, points_P2) for label, points_P2 in zip(labels, points, strict=True)]))
    return panels


def _sample_pairs(pairs: EmbeddedPairs, n_pairs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw texts with distinct ids, and for each one image that it describes; returns their rows."""
    generator = np.random.default_rng(seed)
    image_ids = as_ids(pairs.image_ids, len(pairs.image_ids), "images")
    text_ids = as_ids(pairs.text_ids, len(pairs.text_ids), "texts")
    image_of = {image_ids[row]: row for row in generator.permutation(len(image_ids)).tolist()}
    text_of = {text_ids[row]: row for row in generator.permutation(len(text_ids)).tolist() if text_ids[row] in image_of}
    chosen = list(text_of)[:n_pairs]
    return (
        np.array([image_of[item] for item in chosen], dtype=np.int64),
        np.array([text_of[item] for item in chosen], dtype=np.int64),
    )


def _tsne(rows_ND: np.ndarray, seed: int) -> np.ndarray:
    """Return float32 ``(N, 2)``, seeded; rows are normalised, so Euclidean neighbours are cosine neighbours."""
    from sklearn.manifold import TSNE
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits  # scikit-learn depends on it

    perplexity = min(30.0, (len(rows_ND) - 1) / 3)
    # t-SNE starts from the two main components; one-dimensional embeddings have none to start from.
    start = "pca" if min(rows_ND.shape) >= 2 else "random"
    unit_ND = normalize(np.asarray(rows_ND, dtype=np.float32))
    tsne = TSNE(perplexity=perplexity, init=start, max_iter=_ITERATIONS, random_state=seed)
    # A map this small gains nothing from more threads, and loses tenfold to their waiting where cores are shared.
    with threadpool_limits(1):
        return np.asarray(tsne.fit_transform(unit_ND), dtype=np.float32)
