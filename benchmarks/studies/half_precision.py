"""Search with embeddings computed in bfloat16 beside float32: photos of Tiny ImageNet and captions of Flickr30k.

    python benchmarks/studies/half_precision.py [--items 2000]

Needs ../shared/data and ../shared/models, and the text models that the quickstart of texts downloads. Prints the table of
docs/half_precision.md. Photos find photos of their class, captions find the other four of their photo. Autocast runs on a CPU,
which can take ten minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

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


def measure(queries_QD: Floats, gallery_ND: Floats, labels_N: NDArray[np.str_]) -> tuple[float, float]:
    """Return CMC@1 and mAP in percent; an item does not find itself."""
    rows = range(len(labels_N))
    ranked = ranking_per_query(queries_QD, gallery_ND, labels_N, labels_N, rows, rows)
    has_match_Q = ranked.first_hit_ranks_Q >= 0
    return 100 * float((ranked.first_hit_ranks_Q[has_match_Q] == 0).mean()), 100 * float(np.nanmean(ranked.average_precision_Q))


def main(items: int = 2000) -> None:
    """Embed, search and print the table."""
    console.print("| model | cosine, mean / min | float32 | bfloat16 | bfloat16 queries, float32 gallery |")
    console.print("|---|---|---|---|---|")
    for name, embed, model, labels_N in (load(items) for load in (photos, captions)):
        exact_ND, half_ND = embed(model), embed(replace(model, autocast=torch.bfloat16))
        cosines_N = (exact_ND * half_ND).sum(axis=1)
        pairs = ((exact_ND, exact_ND), (half_ND, half_ND), (half_ND, exact_ND))
        cells = (f"{cmc:.2f} / {mean:.2f}" for cmc, mean in (measure(*pair, labels_N) for pair in pairs))
        console.print(f"| {name} | {cosines_N.mean():.4f} / {cosines_N.min():.4f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    typer.run(main)
