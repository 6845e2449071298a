"""Search with embeddings computed in bfloat16 beside float32: photos of Tiny ImageNet and captions of Flickr30k.

    python benchmarks/studies/half_precision.py [--photos 60000] [--captions 10000]

Needs ../shared/data and ../shared/models, and the text models that the quickstart of texts downloads. Prints the table of
docs/half_precision.md: results in float32, and their changes for the same queries with 95 % intervals. Photos find photos of
their class, captions find the other four of their photo. Each item is a query.

Near ties decide single first hits, so a change of CMC@1 in one gallery is mostly noise. For photos, CMC@1 is the mean over all
galleries of about 6,000 photos drawn from all photos, computed from the 300 best hits. Intervals draw classes of photos, and
photos of captions. It took 11 minutes of one core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import texts_tasks
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console

from xcompat.core.arrays import normalise_rows
from xcompat.data import LabelledSource, load_labelled
from xcompat.embeddings.embed import embed_in_memory, embed_rows, images_per_batch
from xcompat.evaluation.ranking import ranking_per_query
from xcompat.models.embedder import Embedder, load_embedder

SHARED, TEXT_MODELS = Path("../shared"), Path.home() / ".cache" / "xcompat" / "text-models"
PHOTO_MODEL, TEXT_MODEL = "mobilenet_v1_0.25_128", "all-minilm-l6"
GALLERY, DEPTH, BLOCK = 6000, 300, 500  # photos per random gallery, hits and queries at once
Floats = NDArray[np.float32]
console = Console(soft_wrap=True, markup=False, highlight=False)


class Case(NamedTuple):
    """Items that search each other.

    Args:
        name: model and data.
        embed: embeds the items.
        model: the model in float32.
        labels_N: class of each item.
        gallery: mean number of items in the galleries of CMC@1.
    """

    name: str
    embed: Callable[[Embedder], Floats]
    model: Embedder
    labels_N: NDArray[np.str_]
    gallery: int


def load_photos(count: int) -> Case:
    """Return photos with their classes."""
    shards = [f"{SHARED}/data/tiny-imagenet/{name}" for name in ("val-0000.tar.gz", "train-*.tar.gz")]
    parts = [load_labelled(LabelledSource(path=path, limit=count)) for path in shards]

    def embed(model: Embedder) -> Floats:
        size = images_per_batch(model.processor, model.device)
        blocks = [block for part in parts for _, block in embed_rows(model, part.dataset, range(len(part)), size)]
        return normalise_rows(torch.cat(blocks)[:count].numpy(force=True))

    model = load_embedder(str(SHARED / "models" / PHOTO_MODEL))
    labels_N = np.array([name for part in parts for name in part.class_names()])[:count]
    return Case(f"{PHOTO_MODEL}, {len(labels_N):,} photos", embed, model, labels_N, min(GALLERY, len(labels_N)))


def load_captions(count: int) -> Case:
    """Return captions with their photos."""
    task = texts_tasks.captions()
    asked = dict(islice(task.queries.items(), count // 5))
    searched = {name: text for name, text in task.texts.items() if name.rpartition("/")[0] in asked}
    texts = [*asked.values(), *searched.values()]
    owners = np.array([*asked, *(name.rpartition("/")[0] for name in searched)])
    model = load_embedder(str(TEXT_MODELS / TEXT_MODEL))
    return Case(f"{TEXT_MODEL}, {len(texts):,} captions", lambda each: embed_in_memory(each, texts), model, owners, len(texts))


class Found(NamedTuple):
    """Results of queries in percent; an item does not find itself.

    Args:
        first_Q: share of galleries where the first hit counts.
        precision_Q: average precision.
        clusters_Q: number of each query's class.
    """

    first_Q: NDArray[np.float64]
    precision_Q: NDArray[np.float64]
    clusters_Q: NDArray[np.int64]

    def __str__(self) -> str:
        """Return CMC@1 and mAP."""
        return f"{self.first_Q.mean():.2f} / {self.precision_Q.mean():.2f}"

    def describe_change(self, before: Found) -> str:
        """Return the differences for the same queries, with 95 % intervals."""
        return " / ".join(
            f"{round(change_Q.mean(), 2) + 0.0:+.2f} ± {self._half_interval(change_Q):.2f}"
            for change_Q in (self.first_Q - before.first_Q, self.precision_Q - before.precision_Q)
        )

    def _half_interval(self, change_Q: NDArray[np.float64]) -> float:
        sums_C = np.bincount(self.clusters_Q, weights=change_Q - change_Q.mean())
        return 1.96 * float(np.sqrt(np.square(sums_C).sum())) / len(change_Q)


def search(queries_ND: Floats, gallery_ND: Floats, case: Case) -> Found:
    """Search with each item that has another one of its class."""
    rows, codes_N = range(len(case.labels_N)), np.unique(case.labels_N, return_inverse=True)[1]
    ranked = ranking_per_query(queries_ND, gallery_ND, case.labels_N, case.labels_N, rows, rows)
    has_match_Q = ranked.first_hit_ranks_Q >= 0
    first_N = expected_first_hits(queries_ND, gallery_ND, codes_N, case.gallery / len(rows))
    return Found(100 * first_N[has_match_Q], 100 * ranked.average_precision_Q[has_match_Q], codes_N[has_match_Q])


def expected_first_hits(queries_ND: Floats, gallery_ND: Floats, codes_N: NDArray[np.int64], share: float) -> NDArray[np.float64]:
    """Return the probability of a first hit of the query's class (N,), if each other item is in the gallery with a probability.

    The hit of rank k comes first where it is in the gallery and the k - 1 hits before it are not.
    """
    kept = min(DEPTH, len(codes_N) - 1)
    comes_first_K = torch.from_numpy(share * (1 - share) ** np.arange(kept))
    queries, gallery, codes = (torch.from_numpy(array) for array in (queries_ND, gallery_ND, codes_N))
    found = []
    for rows in torch.arange(len(codes)).split(BLOCK):
        scores = queries[rows] @ gallery.T
        scores[torch.arange(len(rows)), rows] = -torch.inf
        hits = scores.topk(kept).indices
        found.append((codes[hits] == codes[rows, None]).double() @ comes_first_K)
    return torch.cat(found).numpy()


def main(photos: int = 60_000, captions: int = 10_000) -> None:
    """Embed, search and print the table."""
    console.print("| model | cosine, mean / min | float32 | bfloat16 | bfloat16 queries, float32 gallery |")
    console.print("|---|---|---|---|---|")
    for case in (load_photos(photos), load_captions(captions)):
        exact_ND, half_ND = case.embed(case.model), case.embed(replace(case.model, autocast=torch.bfloat16))
        cosines_N = (exact_ND * half_ND).sum(axis=1)
        exact = search(exact_ND, exact_ND, case)
        changes = (search(half_ND, gallery_ND, case).describe_change(exact) for gallery_ND in (half_ND, exact_ND))
        console.print(f"| {case.name} | {cosines_N.mean():.4f} / {cosines_N.min():.4f} | {exact} | {' | '.join(changes)} |")


if __name__ == "__main__":
    typer.run(main)
