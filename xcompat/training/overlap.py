"""What is learned from and judged on at once: said, as which data these are is the user's own choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xcompat.data import flatten_captions
from xcompat.data.corpora import normalise
from xcompat.data.overlap import shared_images
from xcompat.distributed import is_main_process
from xcompat.progress import notice
from xcompat.training.evaluation_sets import judged_images
from xcompat.training.stage import StageData

if TYPE_CHECKING:
    import datasets


def warn_of_shared_images(data: StageData) -> None:
    """Say when labelled images that are judged on are learned from.

    Args:
        data: with labelled images.
    """
    if not data.settings.is_judged or not is_main_process():
        return
    for key, searched in judged_images(data.settings.data).items():
        if shared := shared_images(searched.dataset, data.images.dataset):
            notice(f"{shared} of {len(searched)} images of data.{key} are in data.images too: the result will flatter the model")


def warn_of_shared_captions(data: StageData, pairs: datasets.Dataset, key: str) -> None:
    """Say when captions of the test set are learned from; texts leave them out.

    Args:
        data: of the stage.
        pairs: what it learns from.
        key: where the recipe names them.
    """
    test = {normalise(text) for text in data.test_captions()}
    shared = test & {normalise(text) for text in flatten_captions(pairs)[0]} if test else set()
    if shared:
        notice(f"{len(shared)} of {len(test)} captions of data.test are in {key} too: the result will flatter the model")
