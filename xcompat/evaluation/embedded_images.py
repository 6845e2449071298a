"""A model's embeddings of labelled images: queries and their gallery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation.cases import ALL, IMAGE_TO_IMAGE, KNOWN, NEW, NEW_IN_WHOLE
from xcompat.evaluation.evaluated_models import Direction, EvaluationOptions, SearchResults, require_cut_offs, select_cut_offs
from xcompat.evaluation.identities import Ids, as_ids, id_codes
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.ranking import rank
from xcompat.evaluation.reranked import rerank
from xcompat.evaluation.scores import Embeddings, as_rows, lift_rows
from xcompat.evaluation.thresholds import MatchedPairs
from xcompat.evaluation.verification import accepted_per_query, identify_queries, metric_at_rate, share_per_query

_KS = (1, 5)


@dataclass(frozen=True)
class LearnedItems:
    """Training images of the new model or its map.

    Args:
        classes: their classes.
        embeds_LD: ``(L, D)`` embeddings of some of them by the gallery's model; None to search without them.
        labels_L: class of each embedding.
    """

    classes: frozenset[Hashable]
    embeds_LD: Embeddings | None = None
    labels_L: Ids = ()


@dataclass(frozen=True)
class EmbeddedImages:
    """A model's embeddings of labelled queries and a labelled gallery.

    Args:
        name: display name.
        fingerprint: model identity.
        query_embeds_QD: ``(Q, D)`` query embeddings.
        gallery_embeds_GD: ``(G, D)`` gallery embeddings. The gallery can contain the queries; a query does not find itself.
        query_ids: Q hashables, one per image.
        gallery_ids: G hashables.
        query_labels: Q classes.
        gallery_labels: G classes.
        query_cameras: Q hashables. A query does not find items of its class and camera, as in re-identification. None to ignore
            cameras.
        gallery_cameras: G hashables, or None like ``query_cameras``.
        metric: ``cosine``, or ``l2`` for L2 distances.
        learned: training images; None if unknown. Then no query counts as a new class.
        class_order: classes in label order, for results by class; classes not in it follow.
    """

    name: str
    fingerprint: Fingerprint
    query_embeds_QD: Embeddings
    gallery_embeds_GD: Embeddings
    query_ids: Ids
    gallery_ids: Ids
    query_labels: Ids
    gallery_labels: Ids
    query_cameras: Ids | None = None
    gallery_cameras: Ids | None = None
    metric: Literal["cosine", "l2"] = "cosine"
    learned: LearnedItems | None = None
    class_order: Sequence[str] = ()

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return int(self.gallery_embeds_GD.shape[1])

    def require_same_items(self, other: EmbeddedImages, name: str) -> None:
        """Raise unless ``other`` embedded the same items in the same order."""
        for what in ("query_ids", "gallery_ids", "query_labels", "gallery_labels", "query_cameras", "gallery_cameras"):
            expected, found = (ids if (ids := getattr(side, what)) is not None else () for side in (self, other))
            if as_ids(expected, len(expected), "old") != as_ids(found, len(found), name):
                raise XcompatError(
                    f"{what} differ between {name} and old; embed the same images in the same order with both models"
                )

    def matrices(self) -> dict[str, Embeddings]:
        """Return the embeddings of ``queries`` and gallery ``images``."""
        return {"queries": self.query_embeds_QD, "images": self.gallery_embeds_GD}

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> EmbeddedImages:
        """Return the same items with other embeddings, without learned items."""
        return replace(self, query_embeds_QD=matrices["queries"], gallery_embeds_GD=matrices["images"], learned=None)

    def without_gallery(self) -> EmbeddedImages:
        """Return all embeddings, as the gallery often is the queries."""
        return self

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return masks of the readable queries and gallery items."""
        return tuple(np.isfinite(as_rows(embeds, kind)[:, 0]) for kind, embeds in self.matrices().items())

    def keep(self, masks: tuple[np.ndarray, ...]) -> EmbeddedImages:
        """Keep the queries and gallery items selected by the masks."""
        kept_Q, kept_G = masks
        if kept_Q.all() and kept_G.all():
            return self
        rows_Q, rows_G = np.flatnonzero(kept_Q).tolist(), np.flatnonzero(kept_G).tolist()
        return replace(
            self,
            query_embeds_QD=as_rows(self.query_embeds_QD, "queries")[rows_Q],
            gallery_embeds_GD=as_rows(self.gallery_embeds_GD, "images")[rows_G],
            query_ids=[self.query_ids[row] for row in rows_Q],
            gallery_ids=[self.gallery_ids[row] for row in rows_G],
            query_labels=[self.query_labels[row] for row in rows_Q],
            gallery_labels=[self.gallery_labels[row] for row in rows_G],
            query_cameras=None if self.query_cameras is None else [self.query_cameras[row] for row in rows_Q],
            gallery_cameras=None if self.gallery_cameras is None else [self.gallery_cameras[row] for row in rows_G],
        )

    def directions(self, ks: Sequence[int] | None) -> list[Direction]:
        """Return image-to-image search, a second time with the learned items if they are known."""
        without_match = "queries have no image of their class in the gallery"
        ks, n_gallery, n_searched = ks or _KS, len(self.gallery_embeds_GD), self._most_searched()
        kept, notes = select_cut_offs(IMAGE_TO_IMAGE, "cmc", ks, n_gallery, n_searched)
        require_cut_offs(IMAGE_TO_IMAGE, kept, ks, n_searched)
        plain = Direction(IMAGE_TO_IMAGE, "cmc", kept, n_gallery, self._clusters(), without_match, notes)
        if self.learned is None or not (new_Q := self._of_new_classes()).any():
            return [plain]
        both = {KNOWN: ~new_Q, NEW: new_Q} if not new_Q.all() else {}
        directions = [replace(plain, parts=both)]
        if self.learned.embeds_LD is not None:
            n_gallery += len(self.learned.embeds_LD)
            directions.append(replace(plain, n_gallery=n_gallery, notes=(), population=NEW_IN_WHOLE))
        return directions

    def _clusters(self) -> np.ndarray | None:
        """Bootstrap clusters: the number of each query's class; None for a single class."""
        _, codes_Q = id_codes(self.class_order, as_ids(self.query_labels, len(self.query_embeds_QD), "query labels"))
        return codes_Q if len(np.unique(codes_Q)) > 1 else None

    def _of_new_classes(self) -> np.ndarray:
        assert self.learned is not None
        labels = as_ids(self.query_labels, len(self.query_embeds_QD), "query labels")
        return np.array([label not in self.learned.classes for label in labels], bool)

    def _with_learned(self) -> EmbeddedImages:
        learned, gallery_GD = self.learned, as_rows(self.gallery_embeds_GD, "images")
        assert learned is not None and learned.embeds_LD is not None
        ids = [("learned", row) for row in range(len(learned.embeds_LD))]
        return replace(
            self,
            gallery_embeds_GD=np.concatenate([gallery_GD, as_rows(learned.embeds_LD, "learned items").astype(gallery_GD.dtype)]),
            gallery_ids=[*as_ids(self.gallery_ids, len(gallery_GD), "gallery ids"), *ids],
            gallery_labels=[*as_ids(self.gallery_labels, len(gallery_GD), "gallery labels"), *learned.labels_L],
            gallery_cameras=None if self.gallery_cameras is None else [*self.gallery_cameras, *ids],
            learned=None,
        )

    def _most_searched(self) -> int:
        """Return the largest number of relevant gallery items for a query with a match."""

        def rows(side: str, n_rows: int, what: Sequence[str]) -> list[tuple[Any, ...]]:
            named = (f"{side}_{each}" for each in what)
            return list(zip(*(as_ids(getattr(self, name), n_rows, name) for name in named), strict=True))

        def alike(*what: str) -> np.ndarray:
            """Return how many gallery items equal each query in all fields."""
            counts = Counter(rows("gallery", len(self.gallery_embeds_GD), what))
            return np.array([counts[row] for row in rows("query", len(self.query_embeds_QD), what)])

        n_Q, matches_Q = len(self.gallery_embeds_GD) - alike("ids"), alike("labels") - alike("labels", "ids")
        if self.query_cameras is not None:
            of_camera_Q = alike("labels", "cameras") - alike("labels", "cameras", "ids")
            n_Q, matches_Q = n_Q - of_camera_Q, matches_Q - of_camera_Q
        return int(n_Q[matches_Q > 0].max(initial=0)) or len(self.gallery_embeds_GD)  # without any match, ranking raises

    def comparable_rows(self, gallery: EmbeddedImages) -> tuple[Embeddings, Embeddings]:
        """Return queries and another model's gallery as rows to compare by cosine (:func:`lift_rows` for L2)."""
        rows = self.query_embeds_QD, gallery.gallery_embeds_GD
        if self.metric != gallery.metric:
            raise XcompatError(
                f"{self.name} uses {self.metric} but {gallery.name} uses {gallery.metric}; train both with the same metric"
            )
        return lift_rows(*rows) if self.metric == "l2" and rows[0].shape[1] == rows[1].shape[1] else rows

    def compare(
        self, gallery: EmbeddedImages, direction: Direction, options: EvaluationOptions, own: EmbeddedImages | None = None
    ) -> MatchedPairs:
        """Return the pairs of queries and gallery images; equal classes match."""
        queries_QD, gallery_GD = self.comparable_rows(gallery)
        queries = Items(queries_QD, self.query_labels, self.query_ids, self.query_cameras)
        searched = Items(gallery_GD, gallery.gallery_labels, gallery.gallery_ids, gallery.gallery_cameras)
        pairs = LabelledPairs(queries, searched, options.chunk_size, are_lifted=self.metric == "l2", device=options.device)
        if self.metric == "l2" and options.threshold is not None:
            raise XcompatError("threshold needs cosines, but these embeddings are compared by L2 distance; remove threshold")
        if own is not None:
            if "l2" in (self.metric, own.metric):
                raise XcompatError("re-ranking needs cosines, but these embeddings are compared by L2 distance; set rerank to 0")
            pairs = rerank(pairs, own.query_embeds_QD, own.gallery_embeds_GD, options.rerank, options.rerank_weight)
        return MatchedPairs(pairs, pairs.are_matches)

    def find(
        self, gallery: EmbeddedImages, direction: Direction, options: EvaluationOptions, own: EmbeddedImages | None = None
    ) -> SearchResults | None:
        """Rank the gallery images of each query's class, and verify and identify at the requested rates."""
        if direction.population == NEW_IN_WHOLE:
            sides = [side for side in (gallery, own) if side is not None]
            if any(side.learned is None or side.learned.embeds_LD is None for side in sides):
                return None
            whole, but = replace(direction, population=ALL), replace(options, fars=(), fpirs=())
            found = self.find(gallery._with_learned(), whole, but, own and own._with_learned())
            return found.select_queries(gallery._of_new_classes()) if found is not None else None
        pairs, _ = self.compare(gallery, direction, options, own)
        if own is not None:
            options = replace(options, fars=(), fpirs=())
        ranked = rank(pairs, options.shared)
        values, shares = {"map": ranked.average_precision_Q, "map@R": ranked.average_precision_at_r_Q}, {}
        if options.fars:
            verified = accepted_per_query(pairs, options.fars)
            for far, accepted_Q in verified.accepted.items():
                name = metric_at_rate("tar@far", far)
                values[name], shares[name] = share_per_query(accepted_Q, verified.positives_Q)
        if options.fpirs:
            for fpir, found_Q in identify_queries(pairs, ranked, options.fpirs).items():
                values[metric_at_rate("tpir@fpir", fpir)] = np.where(ranked.positives_Q > 0, found_Q, np.nan)
        return SearchResults(ranked.first_hit_ranks_Q, values, shares)
