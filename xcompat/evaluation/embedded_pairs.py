"""A model's embeddings of captioned images, for retrieval in both directions and zero-shot classification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation.cases import IMAGE_TO_TEXT, TEXT_TO_IMAGE, is_zero_shot, zero_shot_metric
from xcompat.evaluation.evaluated_models import Direction, EvaluationOptions, SearchResults, require_cut_offs, select_cut_offs
from xcompat.evaluation.identities import Ids, as_ids, id_codes
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.metrics import rank_first_hits, zero_shot_ranks
from xcompat.evaluation.ranking import rank
from xcompat.evaluation.reranked import rerank
from xcompat.evaluation.scores import Embeddings, as_rows
from xcompat.evaluation.thresholds import MatchedPairs

_KS = (1, 5, 10, 50)
_SIDES = {IMAGE_TO_TEXT: ("images", "texts"), TEXT_TO_IMAGE: ("texts", "images")}
"""Direction -> (kind of the queries, kind of the gallery)."""


@dataclass(frozen=True)
class ZeroShot:
    """A model's embeddings for zero-shot classification.

    Args:
        image_embeds_ND: ``(N, D)`` embeddings of labelled images.
        class_embeds_CD: ``(C, D)`` from :func:`xcompat.evaluation.class_embeddings`.
        labels_N: N integers in [0, C).
    """

    image_embeds_ND: Embeddings
    class_embeds_CD: Embeddings
    labels_N: Ids


@dataclass(frozen=True)
class EmbeddedPairs:
    """A model's embeddings of captioned images.

    Args:
        name: display name.
        fingerprint: model identity.
        image_embeds_ND: ``(N, D)`` image embeddings.
        text_embeds_MD: ``(M, D)`` caption embeddings.
        image_ids: N hashables; images can share an id.
        text_ids: M hashables: each caption's image id, which several images can share.
        zero_shot: embeddings for zero-shot classification, or several by name; None if the test set has none.
    """

    name: str
    fingerprint: Fingerprint
    image_embeds_ND: Embeddings
    text_embeds_MD: Embeddings
    image_ids: Ids
    text_ids: Ids
    zero_shot: ZeroShot | Mapping[str, ZeroShot] | None = None

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return int(self.image_embeds_ND.shape[1])

    @property
    def zero_shot_by_name(self) -> dict[str, ZeroShot]:
        """Zero-shot classifications by name; a single classification has an empty name."""
        if isinstance(self.zero_shot, ZeroShot):
            return {"": self.zero_shot}
        return dict(self.zero_shot or {})

    def require_same_items(self, other: EmbeddedPairs, name: str) -> None:
        """Raise unless ``other`` embedded the same items in the same order."""
        sides: list[tuple[str, Ids, Ids]] = [
            ("image", self.image_ids, other.image_ids),
            ("text", self.text_ids, other.text_ids),
        ]
        for name_of_set, shot in self.zero_shot_by_name.items():
            if (theirs := other.zero_shot_by_name.get(name_of_set)) is not None:
                sides.append((f"zero-shot label{_name_suffix(name_of_set)}", shot.labels_N, theirs.labels_N))
        for kind, expected_ids, found_ids in sides:
            expected, found = as_ids(expected_ids, len(expected_ids), "old"), as_ids(found_ids, len(found_ids), name)
            if len(expected) != len(found):
                raise XcompatError(
                    f"{name} has {len(found)} {kind}s but old has {len(expected)}; embed the same items with both models"
                )
            for position, (want, have) in enumerate(zip(expected, found, strict=True)):
                if want != have:
                    raise XcompatError(
                        f"{kind} {position} is {have!r} in {name} but {want!r} in old; embed the same items in the same order"
                    )

    def matrices(self) -> dict[str, Embeddings]:
        """Return embeddings by kind: ``images``, ``texts`` and, if present, ``zero-shot images`` and ``classes``."""
        found = {"images": self.image_embeds_ND, "texts": self.text_embeds_MD}
        for name, shot in self.zero_shot_by_name.items():
            found |= {
                f"zero-shot images{_name_suffix(name)}": shot.image_embeds_ND,
                f"classes{_name_suffix(name)}": shot.class_embeds_CD,
            }
        return found

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> EmbeddedPairs:
        """Return the same items with other embeddings."""
        zero_shot = {
            name: ZeroShot(
                matrices[f"zero-shot images{_name_suffix(name)}"], matrices[f"classes{_name_suffix(name)}"], shot.labels_N
            )
            for name, shot in self.zero_shot_by_name.items()
        }
        return replace(self, image_embeds_ND=matrices["images"], text_embeds_MD=matrices["texts"], zero_shot=zero_shot)

    def without_gallery(self) -> EmbeddedPairs:
        """Return all embeddings, as both sides are queries."""
        return self

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return masks of the images and texts with an embedding."""
        sides = ((self.image_embeds_ND, "images"), (self.text_embeds_MD, "texts"))
        return tuple(np.isfinite(as_rows(embeds, kind)[:, 0]) for embeds, kind in sides)

    def keep(self, masks: tuple[np.ndarray, ...]) -> EmbeddedPairs:
        """Keep the images and texts selected by the masks; drop captions without an image."""
        kept_N, kept_M = masks
        if kept_N.all() and kept_M.all():
            return self
        image_ids = [self.image_ids[row] for row in np.flatnonzero(kept_N).tolist()]
        left = set(image_ids) if not kept_N.all() else None
        kept_M = kept_M & np.array([left is None or text_id in left for text_id in self.text_ids])
        text_ids = [self.text_ids[row] for row in np.flatnonzero(kept_M).tolist()]
        images_ND, texts_MD = as_rows(self.image_embeds_ND, "images")[kept_N], as_rows(self.text_embeds_MD, "texts")[kept_M]
        return replace(self, image_embeds_ND=images_ND, text_embeds_MD=texts_MD, image_ids=image_ids, text_ids=text_ids)

    def directions(self, ks: Sequence[int] | None) -> list[Direction]:
        """Return image-to-text, text-to-image and a direction per zero-shot classification."""
        found = [self._direction(name, ks or _KS) for name in _SIDES]
        for name, shot in self.zero_shot_by_name.items():
            found.append(Direction(IMAGE_TO_TEXT, zero_shot_metric(name), (1,), len(shot.class_embeds_CD)))
        return found

    def _direction(self, name: str, ks: Sequence[int]) -> Direction:
        """Return a direction whose clusters are queries with the same id."""
        (_, query_ids), (_, gallery_ids) = (self._side(side) for side in _SIDES[name])
        n_gallery = len(gallery_ids)
        kept, notes = select_cut_offs(name, "recall", ks, n_gallery)
        require_cut_offs(name, kept, ks, n_gallery)
        codes_Q, codes_G = id_codes(as_ids(query_ids, len(query_ids), "old"), as_ids(gallery_ids, n_gallery, "old"))
        if not np.isin(codes_Q, codes_G).any():
            raise XcompatError(f"{name}: no query id occurs in the gallery; image_ids and text_ids must name the same items")
        return Direction(name, "recall", kept, n_gallery, codes_Q, f"{name} queries have no match in the gallery", notes)

    def find(
        self, gallery: EmbeddedPairs, direction: Direction, options: EvaluationOptions, own: EmbeddedPairs | None = None
    ) -> SearchResults | None:
        """Rank captions for images, images for captions, or classes for images."""
        if is_zero_shot(direction.metric):
            if own is not None:
                return None
            name = direction.metric.partition(":")[2]
            if name not in self.zero_shot_by_name or name not in gallery.zero_shot_by_name:
                return None
            images, classes_CD = self.zero_shot_by_name[name], gallery.zero_shot_by_name[name].class_embeds_CD
            return SearchResults(zero_shot_ranks(images.image_embeds_ND, classes_CD, images.labels_N, options.chunk_size), {})
        pairs = self.compare(gallery, direction, options, own).pairs
        if own is not None:
            return SearchResults(rank(pairs, options.shared).first_hit_ranks_Q, {})
        return SearchResults(rank_first_hits(pairs, options.shared), {})

    def compare(
        self, gallery: EmbeddedPairs, direction: Direction, options: EvaluationOptions, own: EmbeddedPairs | None = None
    ) -> MatchedPairs:
        """Return the pairs of images and captions; equal ids match."""
        asks, searched = _SIDES[direction.name]
        (queries_QD, query_ids), (gallery_GD, gallery_ids) = self._side(asks), gallery._side(searched)
        queries, items = Items(queries_QD, query_ids), Items(gallery_GD, gallery_ids)
        pairs = LabelledPairs(queries, items, options.chunk_size, ("queries", "gallery"), device=options.device)
        if own is not None:
            pairs = rerank(pairs, own._side(asks)[0], own._side(searched)[0], options.rerank, options.rerank_weight)
        return MatchedPairs(pairs, pairs.are_matches)

    def _side(self, name: str) -> tuple[Embeddings, Ids]:
        return (self.image_embeds_ND, self.image_ids) if name == "images" else (self.text_embeds_MD, self.text_ids)


def _name_suffix(name: str) -> str:
    return f" of {name}" if name else ""
