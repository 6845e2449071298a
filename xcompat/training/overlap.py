"""What is wrong with test data, said before training: images that are trained on too, rates that nothing can be measured at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from xcompat.data import LabelledImages
from xcompat.data.corpora import normalise
from xcompat.data.ids import ids_beside
from xcompat.data.overlap import shared_images
from xcompat.data.schema import ID
from xcompat.distributed import is_main_process
from xcompat.errors import XcompatError
from xcompat.progress import notice
from xcompat.training.evaluation_sets import judged_images
from xcompat.training.stage import StageData


def warn_of_shared_images(data: StageData) -> None:
    """Warn if labelled test images are also training images, which the user chose; refuse ``fpirs`` without an impostor.

    Raises:
        XcompatError: ``evaluation.fpirs`` is set, and every query has another image of its class in the gallery.
    """
    if not data.settings.is_judged or not is_main_process():
        return
    judged, evaluation = judged_images(data.settings.data), data.settings.evaluation
    if judged and evaluation is not None and evaluation.fpirs:
        _require_impostors(judged["queries"], judged.get("gallery", judged["queries"]), data.settings.name)
    for key, searched in judged.items():
        if shared := shared_images(searched.dataset, data.images.dataset):
            notice(f"{shared} of {len(searched)} images of data.{key} are in data.images too: the result will flatter the model")


def _require_impostors(queries: LabelledImages, gallery: LabelledImages, stage: str) -> None:
    found = gallery.class_names()
    others, itself = Counter(found), dict(zip(ids_beside(gallery.dataset, queries.dataset), found, strict=True))
    asked = zip(queries.dataset[ID], queries.class_names(), strict=True)
    if not any(others[name] == (itself.get(item) == name) for item, name in asked):
        raise XcompatError(
            f"{stage}: evaluation.fpirs: every query's class is in the gallery, so there is no impostor to refuse; "
            "add queries of other classes, or leave fpirs out"
        )


def warn_of_shared_texts(data: StageData, texts: Iterable[str], key: str) -> None:
    """Warn if texts of the test set are also learned from; text corpora leave them out.

    Args:
        data: the stage's data.
        texts: its training captions, or queries and passages.
        key: their key in the recipe.
    """
    test = {normalise(text) for text in data.test_texts()}
    shared = test & {normalise(text) for text in texts} if test else set()
    if shared:
        of = "queries of data.judged_texts" if data.settings.data.judged_texts is not None else "captions of data.test"
        notice(f"{len(shared)} of {len(test)} {of} are in {key} too: the result will flatter the model")
