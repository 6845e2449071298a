"""Test sets of images and texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.data import (
    LabelledImages,
    LabelledSource,
    PairSource,
    flatten_captions,
    load_classes,
    load_labelled,
    load_pairs,
    open_image,
    select_subset,
)
from xcompat.data.ids import disambiguate_ids
from xcompat.data.schema import CAPTION, ID, IMAGE, LABEL, TEXT, captions_of
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, ZeroShot, class_embeddings
from xcompat.evaluation.cases import IMAGE_TO_IMAGE, IMAGE_TO_TEXT, TEXT_TO_IMAGE
from xcompat.models.embedder import Embedder
from xcompat.models.frozen import FrozenModel
from xcompat.report import Example, ExampleRow, Hit
from xcompat.training.caches import NO_CAPTIONS, cached_captions, cached_images
from xcompat.training.class_files import class_indices
from xcompat.training.evaluation_models import EvaluationSet, best_rows, display_name, require_cosine
from xcompat.training.judged_templates import load_judged_templates
from xcompat.training.judged_texts import load_judged_texts
from xcompat.training.sections import DataSettings, ZeroShotSettings
from xcompat.training.test_items import CAPTIONS, IMAGES, GalleryItems, QuerySet, make_distinct

if TYPE_CHECKING:
    import datasets

CLASS, GROUP = "class", "of"
"""Metadata keys: class of an image, and shared id of an image and its captions."""


def load_test_set(data: DataSettings) -> EvaluationSet | None:
    """Load a stage's test set, or None."""
    if images := judged_images(data):
        return LabelledTestSet(images["queries"], images.get("gallery", images["queries"]))
    if data.judged_texts is not None:
        return load_judged_texts(data.judged_texts)
    if data.templates is not None:
        return load_judged_templates(data.templates)
    return load_pair_test_set(data.test, data.zero_shot_sets()) if data.test is not None else None


def judged_images(data: DataSettings) -> dict[str, LabelledImages]:
    """Load a stage's labelled ``queries`` and separate ``gallery``, if any."""
    if data.queries is None:
        return {}
    named = {"queries": data.queries, "gallery": data.gallery}
    return {key: load_test_images(source, data) for key, source in named.items() if source is not None}


def load_test_images(source: LabelledSource, data: DataSettings) -> LabelledImages:
    """Load labelled test images in ``test_subset``."""
    labelled = load_labelled(source, captions=data.old_reads == "captions")
    return select_subset(labelled, data.test_subset) if data.test_subset is not None else labelled


@dataclass
class PairTestSet(EvaluationSet):
    """Images with captions, and sets for zero-shot classification.

    Args:
        pairs: images and captions.
        texts: distinct captions of every id.
        text_ids: image id of each caption.
        zero_shot: name -> settings and labelled images.
        max_bad_share: maximum share of unreadable images.
    """

    pairs: datasets.Dataset
    texts: list[str]
    text_ids: list[str]
    zero_shot: dict[str, tuple[ZeroShotSettings, datasets.Dataset]] = field(default_factory=dict)
    max_bad_share: float = 0.01

    @override
    def embed(self, embedder: FrozenModel, cache_dir: Path) -> EmbeddedPairs:
        require_cosine(embedder)
        model = embedder.require_model(NO_CAPTIONS)
        images = cached_images(model, self.pairs, cache_dir, self.max_bad_share)
        texts = cached_captions(model, self.texts, cache_dir)
        zero_shot = {key: _embed_zero_shot(model, *shot, cache_dir) for key, shot in self.zero_shot.items()}
        name = display_name(model.name)
        return EmbeddedPairs(name, model.fingerprint, images[:], texts[:], self.pairs[ID], self.text_ids, zero_shot)

    @override
    def examples(
        self, old: EmbeddedPairs, new_view: EmbeddedPairs, searched: EmbeddedPairs, count: int, seed: int
    ) -> list[Example]:
        """Search for captions."""
        chosen = np.random.default_rng(seed).choice(len(self.texts), size=min(count, len(self.texts)), replace=False)
        image_ids = self.pairs[ID]
        examples = []
        for text in chosen.tolist():
            rows = []
            for label, queries, gallery in (("old query", old, old), ("new query", new_view, searched)):
                hits = []
                for image in best_rows(gallery.image_embeds_ND, np.asarray(queries.text_embeds_MD)[text]):
                    record = self.pairs[image]
                    caption = next(iter(captions_of(record[CAPTION])), "")
                    hits.append(Hit(open_image(record[IMAGE]), caption, image_ids[image] == self.text_ids[text]))
                rows.append(ExampleRow(label, hits))
            examples.append(Example(self.texts[text], rows))
        return examples

    @override
    def galleries(self) -> list[GalleryItems]:
        ids = self.pairs[ID][:]
        found = [next(iter(captions_of(caption)), "") for caption in self.pairs[CAPTION][:]]
        about = [{CAPTION: caption, GROUP: str(name)} for caption, name in zip(found, ids, strict=True)]
        texts = [{TEXT: text, GROUP: str(name)} for text, name in zip(self.texts, self.text_ids, strict=True)]
        return [
            GalleryItems(IMAGES, "images", make_distinct(ids), about, lambda row: open_image(self.pairs[row][IMAGE])),
            GalleryItems(CAPTIONS, "texts", make_distinct(self.text_ids), texts),
        ]

    @override
    def questions(self) -> dict[str, QuerySet]:
        ids = list(map(str, self.pairs[ID][:]))

        def text_matches(row: int, _: str, about: dict[str, object]) -> bool:
            return about.get(GROUP) == str(self.text_ids[row])

        def image_matches(row: int, _: str, about: dict[str, object]) -> bool:
            return about.get(GROUP) == ids[row]

        def image(row: int) -> Image:
            return open_image(self.pairs[row][IMAGE])

        def caption(row: int) -> str:
            return next(iter(captions_of(self.pairs[row][CAPTION])), ids[row])

        return {
            TEXT_TO_IMAGE: QuerySet(IMAGES, "texts", self.texts.__getitem__, self.texts.__getitem__, text_matches),
            IMAGE_TO_TEXT: QuerySet(CAPTIONS, "images", image, caption, image_matches),
        }


@dataclass
class LabelledTestSet(EvaluationSet):
    """Labelled queries and gallery, which may be the same images.

    Args:
        queries: images to search with.
        gallery: images to search; a query never finds itself.
    """

    queries: LabelledImages
    gallery: LabelledImages

    @cached_property
    def gallery_ids(self) -> list[str]:
        """Gallery ids, distinct from query ids unless the images are the same."""
        return disambiguate_ids(self.gallery.dataset, self.queries.dataset)

    @override
    def embed(self, embedder: FrozenModel, cache_dir: Path) -> EmbeddedImages:
        queries_QD, gallery_GD = (
            cached_images(embedder, side.dataset, cache_dir, side.max_bad_share)[:] for side in (self.queries, self.gallery)
        )
        return EmbeddedImages(
            display_name(embedder.name),
            embedder.fingerprint,
            queries_QD,
            gallery_GD,
            list(self.queries.dataset[ID]),
            self.gallery_ids,
            self.queries.class_names(),
            self.gallery.class_names(),
            self.queries.cameras(),
            self.gallery.cameras(),
            embedder.metric,
            class_order=self.queries.classes,
        )

    @override
    def examples(
        self, old: EmbeddedImages, new_view: EmbeddedImages, searched: EmbeddedImages, count: int, seed: int
    ) -> list[Example]:
        """Search with images."""
        readable_N = np.flatnonzero(np.isfinite(np.asarray(old.query_embeds_QD)[:, 0]))
        chosen = np.random.default_rng(seed).choice(readable_N, size=min(count, len(readable_N)), replace=False)
        asked, found = self.queries.class_names(), self.gallery.class_names()
        query_ids, gallery_ids = self.queries.dataset[ID], self.gallery_ids
        taken_by, cameras = self.queries.cameras(), self.gallery.cameras()

        def counts(image: int, query: int) -> bool:
            same_camera = taken_by is not None and cameras is not None and taken_by[query] == cameras[image]
            return gallery_ids[image] != query_ids[query] and not (same_camera and found[image] == asked[query])

        sides = {"old query": _dot_product_sides(old, old), "new query": _dot_product_sides(new_view, searched)}
        examples = []
        for query in chosen.tolist():
            rows = []
            for label, (queries_QD, gallery_GD) in sides.items():
                hits = [
                    Hit(open_image(self.gallery.dataset[image][IMAGE]), found[image], found[image] == asked[query])
                    for image in best_rows(gallery_GD, queries_QD[query], partial(counts, query=query))
                ]
                rows.append(ExampleRow(label, hits))
            examples.append(Example(asked[query], rows))
        return examples

    @override
    def galleries(self) -> list[GalleryItems]:
        dataset = self.gallery.dataset
        about = [{CLASS: name} for name in self.gallery.class_names()]
        return [GalleryItems(IMAGES, "images", self.gallery_ids, about, lambda row: open_image(dataset[row][IMAGE]))]

    @override
    def questions(self) -> dict[str, QuerySet]:
        dataset, classes = self.queries.dataset, self.queries.class_names()
        ids, searched = dataset[ID][:], set(self.gallery_ids)

        def matches(row: int, _: str, about: dict[str, object]) -> bool:
            return about.get(CLASS) == classes[row]

        def own_id(row: int) -> str | None:
            return ids[row] if ids[row] in searched else None

        def image(row: int) -> Image:
            return open_image(dataset[row][IMAGE])

        return {IMAGE_TO_IMAGE: QuerySet(IMAGES, "queries", image, classes.__getitem__, matches, own_id)}


def _dot_product_sides(asking: EmbeddedImages, searched: EmbeddedImages) -> tuple[NDArray[np.number], NDArray[np.number]]:
    """Return queries and gallery whose dot products rank the gallery."""
    queries_QD, gallery_GD = np.asarray(asking.query_embeds_QD), np.asarray(searched.gallery_embeds_GD)
    if asking.metric == "cosine":
        return queries_QD, gallery_GD
    halves_G1 = np.square(gallery_GD).sum(axis=1, keepdims=True) / 2  # ‖x - y‖² = ‖x‖² - 2·(x·y - ‖y‖²/2)
    return np.pad(queries_QD, ((0, 0), (0, 1)), constant_values=1), np.concatenate([gallery_GD, -halves_G1], axis=1)


def _embed_zero_shot(embedder: Embedder, settings: ZeroShotSettings, labelled: datasets.Dataset, cache_dir: Path) -> ZeroShot:
    classes, templates = load_classes(settings.classes), settings.prompts()
    prompts = [template.format(name) for name in classes for template in templates]
    embeds_PD = cached_captions(embedder, prompts, cache_dir)[:]
    class_embeds_CD = class_embeddings(embeds_PD.reshape(len(classes), len(templates), -1))
    image_embeds_ND = cached_images(embedder, labelled, cache_dir, settings.images.max_bad_share)[:]
    kept_N = np.isfinite(image_embeds_ND[:, 0])  # unreadable for every model
    labels_N = _zero_shot_labels(settings, labelled)
    return ZeroShot(image_embeds_ND[kept_N], class_embeds_CD, labels_N[kept_N])


def load_pair_test_set(source: PairSource, zero_shot: Mapping[str, ZeroShotSettings] | None = None) -> PairTestSet:
    """Load images with captions, and zero-shot sets by name."""
    if source.streaming:
        raise XcompatError("data.test is read more than once and cannot be a stream; set its streaming to false")
    pairs = load_pairs(source)
    # a caption shared by several images of one id is one query and one gallery item
    distinct = dict.fromkeys(zip(*flatten_captions(pairs), strict=True))
    texts, text_ids = [text for text, _ in distinct], [text_id for _, text_id in distinct]
    labelled = {name: (shot, load_pairs(shot.images)) for name, shot in (zero_shot or {}).items()}
    return PairTestSet(pairs, texts, text_ids, labelled, source.max_bad_share)


def check_zero_shot(settings: ZeroShotSettings, name: str = "") -> None:
    """Raise if class file and labels do not match.

    Args:
        settings: the classification.
        name: its name, if any.

    Raises:
        XcompatError: with images and class file.
    """
    labelled = load_pairs(settings.images)
    try:
        _zero_shot_labels(settings, labelled)
    except XcompatError as error:
        where = f"data.zero_shot.{name}" if name else "data.zero_shot"
        raise XcompatError(f"{where}: {settings.images.path} and {settings.classes} do not fit: {error}") from None


def _zero_shot_labels(settings: ZeroShotSettings, labelled: datasets.Dataset) -> NDArray[np.int64]:
    limited = settings.images.limit is not None
    return class_indices(labelled[LABEL][:], load_classes(settings.classes), limited)
