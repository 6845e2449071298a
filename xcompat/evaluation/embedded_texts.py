"""A model's embeddings of queries and passages with relevance judgements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation.cases import TEXT_TO_TEXT
from xcompat.evaluation.evaluated_models import Direction, EvaluationOptions, SearchResults, select_cut_offs
from xcompat.evaluation.graded import Qrels, find_unusable_ids, grade
from xcompat.evaluation.identities import Ids, as_ids
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.reranked import rerank
from xcompat.evaluation.scores import Embeddings, as_rows
from xcompat.evaluation.thresholds import MatchedPairs

_KS = (10,)


@dataclass(frozen=True)
class EmbeddedTexts:
    """A model's embeddings of queries and judged passages.

    Args:
        name: display name.
        fingerprint: model identity.
        query_embeds_QD: ``(Q, D)`` query embeddings.
        text_embeds_GD: ``(G, D)`` passage embeddings; None if they are not searched.
        query_ids: Q distinct hashables.
        text_ids: G distinct hashables.
        qrels: query id -> passage id -> gain.
        direction: name of the search; ``image-to-image`` if queries and passages are images.
    """

    name: str
    fingerprint: Fingerprint
    query_embeds_QD: Embeddings
    text_embeds_GD: Embeddings | None
    query_ids: Ids
    text_ids: Ids
    qrels: Qrels
    direction: str = TEXT_TO_TEXT

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return int(self.query_embeds_QD.shape[1])

    def require_same_items(self, other: EmbeddedTexts, name: str) -> None:
        """Raise unless ``other`` embedded the same texts in the same order."""
        for what in ("query_ids", "text_ids"):
            expected, found = getattr(self, what), getattr(other, what)
            if as_ids(expected, len(expected), "old") != as_ids(found, len(found), name):
                raise XcompatError(
                    f"{what} differ between {name} and old; embed the same texts in the same order with both models"
                )

    def matrices(self) -> dict[str, Embeddings]:
        """Return the embeddings of ``queries`` and, if present, ``texts``."""
        return {"queries": self.query_embeds_QD} | ({"texts": self.text_embeds_GD} if self.text_embeds_GD is not None else {})

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> EmbeddedTexts:
        """Return the same items with other embeddings."""
        return replace(self, query_embeds_QD=matrices["queries"], text_embeds_GD=matrices.get("texts"))

    def without_gallery(self) -> EmbeddedTexts:
        """Return the same items without passage embeddings."""
        return replace(self, text_embeds_GD=None)

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return masks of the queries and passages with an embedding."""
        known_Q = np.isfinite(as_rows(self.query_embeds_QD, "queries")[:, 0])
        if self.text_embeds_GD is None:
            return known_Q, np.ones(len(self.text_ids), bool)
        return known_Q, np.isfinite(as_rows(self.text_embeds_GD, "texts")[:, 0])

    def keep(self, masks: tuple[np.ndarray, ...]) -> EmbeddedTexts:
        """Keep the queries and passages selected by the masks."""
        kept_Q, kept_G = masks
        if kept_Q.all() and kept_G.all():
            return self
        texts_GD = None if self.text_embeds_GD is None else as_rows(self.text_embeds_GD, "texts")[kept_G]
        return replace(
            self,
            query_embeds_QD=as_rows(self.query_embeds_QD, "queries")[kept_Q],
            text_embeds_GD=texts_GD,
            query_ids=[self.query_ids[row] for row in np.flatnonzero(kept_Q).tolist()],
            text_ids=[self.text_ids[row] for row in np.flatnonzero(kept_G).tolist()],
        )

    def directions(self, ks: Sequence[int] | None) -> list[Direction]:
        """Return the search of passages, with notes on unusable judgements."""
        found = find_unusable_ids(self.query_ids, self.text_ids, self.qrels)
        counted = [
            ("Judged queries without relevant passages, counted as 0", found.without_relevant),
            ("Judged queries missing from the queries, excluded", found.unknown_queries),
            ("Relevant passages missing from the gallery, counted as not found", found.unknown_items),
        ]
        notes = tuple(f"{said}: {len(names)}, e.g. {names[0]!r}." for said, names in counted if names)
        notes += select_cut_offs(self.direction, "recall", ks or _KS, len(self.text_ids))[1]
        missing = "queries have no judgement"
        return [Direction(self.direction, "graded", (), len(self.text_ids), without_match=missing, notes=notes)]

    def compare(
        self, gallery: EmbeddedTexts, direction: Direction, options: EvaluationOptions, own: EmbeddedTexts | None = None
    ) -> MatchedPairs:
        """Return the pairs of queries and passages; relevant passages match."""
        asking, searched = Items(self.query_embeds_QD, self.query_ids), Items(gallery.passages(), gallery.text_ids)
        pairs = LabelledPairs(asking, searched, options.chunk_size, ("queries", "gallery"), device=options.device)
        if own is not None:
            pairs = rerank(pairs, own.query_embeds_QD, own.passages(), options.rerank, options.rerank_weight)
        columns = {name: column for column, name in enumerate(self.text_ids)}

        def are_relevant(rows_R: np.ndarray, columns_C: slice) -> torch.Tensor:
            is_match_RC = torch.zeros(len(rows_R), columns_C.stop - columns_C.start, dtype=torch.bool)
            for place, row in enumerate(rows_R.tolist()):
                for name, gain in self.qrels.get(self.query_ids[row], {}).items():
                    column = columns.get(name, -1)
                    if gain > 0 and columns_C.start <= column < columns_C.stop:
                        is_match_RC[place, column - columns_C.start] = True
            return is_match_RC

        return MatchedPairs(pairs, are_relevant)

    def find(
        self, gallery: EmbeddedTexts, direction: Direction, options: EvaluationOptions, own: EmbeddedTexts | None = None
    ) -> SearchResults:
        """Rank the relevant passages of each judged query."""
        pairs, _ = self.compare(gallery, direction, options, own)
        found = grade(pairs, self.query_ids, gallery.text_ids, self.qrels, options.ks or _KS, options.shared)
        kept, _ = select_cut_offs(self.direction, "recall", options.ks or _KS, len(gallery.text_ids))
        told = {f"recall@{k}" for k in kept}  # nDCG and MRR use ranks, so they can tell models apart at any cut-off
        values = {metric: of_J for metric, of_J in found.values.items() if metric in told or not metric.startswith("recall@")}
        ranks_Q = np.full(len(self.query_ids), -1, dtype=np.int64)
        ranks_Q[found.rows_J] = found.first_hit_ranks_J
        return SearchResults(ranks_Q, {metric: _spread(of_J, found.rows_J, len(ranks_Q)) for metric, of_J in values.items()})

    def passages(self) -> Embeddings:
        """Return the passage embeddings, or raise if there are none."""
        if self.text_embeds_GD is None:
            raise XcompatError(f"{self.name} has no passage embeddings, but its passages are searched; pass text_embeds_GD")
        return self.text_embeds_GD


def _spread(values_J: np.ndarray, rows_J: np.ndarray, count: int) -> np.ndarray:
    values_Q = np.full(count, np.nan)
    values_Q[rows_J] = values_J
    return values_Q
