"""Test sets of multi-image templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from xcompat.core.errors import XcompatError
from xcompat.core.lazy import datasets
from xcompat.data import PairSource, load_pairs
from xcompat.data.schema import ID
from xcompat.data.templates import Members, TemplateLists, read_members, read_template_lists, require_images
from xcompat.evaluation import EmbeddedTemplates, TemplateProtocol
from xcompat.models.frozen import FrozenModel
from xcompat.report import Example
from xcompat.training.caches import cached_images
from xcompat.training.evaluation_models import EvaluationSet, display_name, require_cosine
from xcompat.training.sections import JudgedTemplates
from xcompat.training.test_items import GalleryItems, QuerySet

_NO_ITEMS = "the run was evaluated on templates of several images, which cannot be shown singly; choose a run on single images"


@dataclass
class TemplateTestSet(EvaluationSet):
    """Images in templates.

    Args:
        images: every image, once.
        names: N image names, a name per membership.
        protocol: templates, pairs and subjects.
        max_bad_share: maximum share of unreadable images.
    """

    images: datasets.Dataset
    names: list[str]
    protocol: TemplateProtocol
    max_bad_share: float = 0.01

    @override
    def embed(self, embedder: FrozenModel, cache_dir: Path) -> EmbeddedTemplates:
        require_cosine(embedder)
        embeds_ID = cached_images(embedder, self.images, cache_dir, self.max_bad_share)[:]
        row_of = {name: row for row, name in enumerate(self.images[ID])}
        rows_N = np.array([row_of[name] for name in self.names])
        embeds_ND = embeds_ID if np.array_equal(rows_N, np.arange(len(embeds_ID))) else embeds_ID[rows_N]
        return EmbeddedTemplates(display_name(embedder.name), embedder.fingerprint, embeds_ND, self.names, self.protocol)

    @override
    def examples(self, old: Any, new_view: Any, searched: Any, count: int, seed: int) -> list[Example]:
        """Return none, as a template is several images."""
        return []

    @override
    def galleries(self) -> list[GalleryItems]:
        raise XcompatError(_NO_ITEMS)

    @override
    def questions(self) -> dict[str, QuerySet]:
        raise XcompatError(_NO_ITEMS)


def load_judged_templates(settings: JudgedTemplates) -> TemplateTestSet:
    """Load images and template lists.

    Args:
        settings: their paths.

    Raises:
        XcompatError: a file is missing or invalid, or an image is missing.
    """
    lists = read_template_lists(settings.members, settings.pairs, settings.gallery, settings.probes)
    images = _images(settings, lists.members)
    return TemplateTestSet(images, lists.members.names, _number_templates(lists), settings.images.max_bad_share)


def require_images_of_templates(settings: JudgedTemplates) -> None:
    """Raise if template images are missing.

    Args:
        settings: paths of images and lists.

    Raises:
        XcompatError: with the first missing image.
    """
    _images(settings, read_members(settings.members))


def _images(settings: JudgedTemplates, members: Members) -> datasets.Dataset:
    images = load_pairs(PairSource(**settings.images.model_dump(), captions=False))
    assert isinstance(images, datasets.Dataset)
    require_images(images[ID][:], members, str(settings.images.path), settings.members)
    return images


def _number_templates(lists: TemplateLists) -> TemplateProtocol:
    ids_T, templates_N = np.unique(lists.members.templates_N, return_inverse=True)
    read: dict[str, Any] = {}
    if lists.pairs is not None:
        both_P2 = np.stack([lists.pairs.first_P, lists.pairs.second_P], axis=1)
        read |= {"pairs_P2": np.searchsorted(ids_T, both_P2), "same_P": lists.pairs.same_P}
    if lists.gallery is not None and lists.probes is not None:
        read |= {"gallery_G": np.searchsorted(ids_T, lists.gallery.templates_T), "gallery_subjects_G": lists.gallery.subjects_T}
        read |= {"probes_Q": np.searchsorted(ids_T, lists.probes.templates_T), "probe_subjects_Q": lists.probes.subjects_T}
        read["is_open"] = not bool(np.isin(lists.probes.subjects_T, lists.gallery.subjects_T).all())
    return TemplateProtocol(templates_N, lists.members.media_N, **read, names_T=ids_T)
