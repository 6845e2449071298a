"""Search with embeddings computed in bfloat16 beside float32: photos of Tiny ImageNet and captions of Flickr30k.

    python benchmarks/studies/half_precision.py [--items 2000]

Needs ../shared/data and ../shared/models, and the text models that the quickstart of texts downloads. Prints the table of
docs/half_precision.md: results in float32, and their changes for the same queries with 95 % intervals. Photos find photos of
their class, captions find the other four of their photo. Autocast runs on a CPU, which can take ten minutes.
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
Floats = NDArray[np.float32]
Case = tuple[str, Callable[[Embedder], Floats], Embedder, NDArray[np.str_]]
"""Name of the data, function that embeds them, model, and the class of each item."""
console = Console(soft_wrap=True, markup=False, highlight=False)


def photos(count: int) -> Case:
    """Return the photos with their classes."""
    images = load_labelled(LabelledSource(path=str(SHARED / "data/tiny-imagenet/val-0000.tar.gz"), limit=count))

    def embed(model: Embedder) -> Floats:
        size = images_per_batch(model.processor, model.device)
        parts = [each for _, each in embed_rows(model, images.dataset, range(len(images)), size)]
        return normalise_rows(torch.cat(parts).numpy(force=True))

    model = load_embedder(str(SHARED / "models" / PHOTO_MODEL))
    return f"{PHOTO_MODEL}, {len(images):,} photos", embed, model, np.array(images.class_names())


def captions(count: int) -> Case:
    """Return captions with their photos."""
    task = texts_tasks.captions()
    asked = dict(islice(task.queries.items(), count // 5))
    searched = {name: text for name, text in task.texts.items() if name.rpartition("/")[0] in asked}
    texts = [*asked.values(), *searched.values()]
    owners = np.array([*asked, *(name.rpartition("/")[0] for name in searched)])
    model = load_embedder(str(TEXT_MODELS / TEXT_MODEL))
    return f"{TEXT_MODEL}, {len(texts):,} captions", lambda each: embed_in_memory(each, texts), model, owners


class Found(NamedTuple):
    """Results of queries in percent; an item does not find itself.

    Args:
        first_Q: 100 where the first hit counts, else 0.
        precision_Q: average precision.
    """

    first_Q: NDArray[np.float64]
    precision_Q: NDArray[np.float64]

    def __str__(self) -> str:
        """Return CMC@1 and mAP."""
        return f"{self.first_Q.mean():.2f} / {self.precision_Q.mean():.2f}"

    def describe_change(self, before: Found) -> str:
        """Return the differences for the same queries, with 95 % intervals."""
        changes = self.first_Q - before.first_Q, self.precision_Q - before.precision_Q
        return " / ".join(f"{each.mean():+.2f} ± {1.96 * each.std() / len(each) ** 0.5:.2f}" for each in changes)


def search(queries_QD: Floats, gallery_ND: Floats, labels_N: NDArray[np.str_]) -> Found:
    """Search with each item that has another one of its class."""
    rows = range(len(labels_N))
    ranked = ranking_per_query(queries_QD, gallery_ND, labels_N, labels_N, rows, rows)
    has_match_Q = ranked.first_hit_ranks_Q >= 0
    return Found(100.0 * (ranked.first_hit_ranks_Q[has_match_Q] == 0), 100 * ranked.average_precision_Q[has_match_Q])


def main(items: int = 2000) -> None:
    """Embed, search and print the table."""
    console.print("| model | cosine, mean / min | float32 | bfloat16 | bfloat16 queries, float32 gallery |")
    console.print("|---|---|---|---|---|")
    for name, embed, model, labels_N in (load(items) for load in (photos, captions)):
        exact_ND, half_ND = embed(model), embed(replace(model, autocast=torch.bfloat16))
        cosines_N = (exact_ND * half_ND).sum(axis=1)
        exact = search(exact_ND, exact_ND, labels_N)
        changes = (search(half_ND, gallery_ND, labels_N).describe_change(exact) for gallery_ND in (half_ND, exact_ND))
        console.print(f"| {name} | {cosines_N.mean():.4f} / {cosines_N.min():.4f} | {exact} | {' | '.join(changes)} |")


if __name__ == "__main__":
    typer.run(main)
