"""Warnings about test data in training data."""

from __future__ import annotations

from collections.abc import Iterable

from xcompat.core.distributed import is_main_process
from xcompat.core.progress import notice
from xcompat.data.corpora import normalise
from xcompat.data.overlap import shared_images
from xcompat.training.evaluation_sets import judged_images
from xcompat.training.stage import Stage


def warn_of_shared_images(stage: Stage) -> None:
    """Warn if labelled test images are also training images."""
    if not stage.settings.is_judged or not is_main_process():
        return
    for key, searched in judged_images(stage.settings.data).items():
        if shared := shared_images(searched.dataset, stage.images.dataset):
            notice(
                f"{shared} of {len(searched)} images of data.{key} are also in data.images, so the result will be too optimistic"
            )


def warn_of_shared_texts(stage: Stage, texts: Iterable[str], key: str) -> None:
    """Warn if test texts are also training texts.

    Args:
        stage: the stage.
        texts: training captions, queries or passages.
        key: recipe key of the texts.
    """
    test = {normalise(text) for text in stage.test_texts()}
    shared = test & {normalise(text) for text in texts} if test else set()
    if shared:
        of = "queries of data.judged_texts" if stage.settings.data.judged_texts is not None else "captions of data.test"
        notice(f"{len(shared)} of {len(test)} {of} are also in {key}, so the result will be too optimistic")
