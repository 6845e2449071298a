"""Labelled queries and gallery items: pairs, positives and exact scores, tile by tile."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from xcompat.core.distributed import my_share
from xcompat.core.errors import XcompatError
from xcompat.evaluation.identities import Ids, as_ids, id_codes
from xcompat.evaluation.scores import (
    UNIT,
    Embeddings,
    ExactRows,
    as_rows,
    blocks,
    copy_score,
    pair_scores,
    tie_margin,
    true_places,
    usual_distance,
)

EXCLUDED_SCORE = -(2.0**53)
"""Score of excluded pairs, below every real score (integers up to about 2^52)."""

MATED_ROWS = 128
"""Queries scored together against the items of their classes: few, so that they share most of these items."""

_Codes = tuple[np.ndarray, np.ndarray]  # numbers of queries and gallery items; equal numbers mean equal values
_BLOCK_POSITIVES = 2**21  # limits blocks of queries with many positives to a few hundred MB
_WIDER = 16  # gallery items per query of a block; counting costs time per row, so tiles are wide
_TILE = 2**21  # scores per tile (16 MB): the allocator returns larger tiles to the system and fetches them again


class Items(NamedTuple):
    """Embedded queries or gallery.

    Args:
        embeds_ND: ``(N, D)`` embeddings, compared by cosine.
        labels_N: N hashable classes.
        ids_N: N hashable sample ids; None if no query is in the gallery.
        cameras_N: N hashable cameras; None to keep pairs of the same class and camera.
    """

    embeds_ND: Embeddings
    labels_N: Ids
    ids_N: Ids | None = None
    cameras_N: Ids | None = None


class _Ranges(NamedTuple):
    """For each query, the gallery items with the same value: a range of ``order_G``."""

    order_G: np.ndarray
    first_Q: np.ndarray
    last_Q: np.ndarray

    @property
    def n_pairs(self) -> int:
        return int((self.last_Q - self.first_Q).sum())

    def pairs_of(self, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of these queries as positions in ``rows_B`` and gallery rows."""
        first_B = self.first_Q[rows_B]
        n_B = self.last_Q[rows_B] - first_B
        inside_N = np.arange(n_B.sum()) - np.repeat(np.cumsum(n_B) - n_B, n_B)
        return np.repeat(np.arange(len(rows_B)), n_B), self.order_G[np.repeat(first_B, n_B) + inside_N]


class LabelledPairs:
    """All pairs of a query and a gallery item, except pairs of the same sample, or of the same class and camera.

    Pairs with equal labels are positive.

    Args:
        queries: Q items.
        gallery: G items, with ids and cameras if and only if the queries have them.
        chunk_size: queries per block; affects memory only.
        label_names: names of both sides' labels in messages.
        are_lifted: whether the rows come from :func:`~xcompat.evaluation.scores.lift_rows`.
        device: CUDA device to score on; None for the queries' device. Other devices score on the CPU.

    Raises:
        XcompatError: invalid input.
    """

    def __init__(
        self,
        queries: Items,
        gallery: Items,
        chunk_size: int = 1024,
        label_names: tuple[str, str] = ("query labels", "gallery labels"),
        are_lifted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        if chunk_size < 1:
            raise XcompatError(f"chunk_size must be at least 1, not {chunk_size}")
        self.device = torch.device("cpu")
        if isinstance(queries.embeds_ND, torch.Tensor) and queries.embeds_ND.is_cuda:
            self.device = queries.embeds_ND.device
        elif device is not None and device.type == "cuda":
            self.device = device
        self.gallery = ExactRows(gallery.embeds_ND, "gallery", self.device)
        self.queries = self._exact_queries(queries.embeds_ND)
        self.n_queries, self.n_gallery, self.dim = len(self.queries), len(self.gallery), self.queries.dim
        self.chunk_size, self.copy_score = chunk_size, copy_score(self.queries.dim, are_lifted)
        usual = usual_distance(as_rows(gallery.embeds_ND, "gallery")) if are_lifted else 1.0
        self.tie_margin = tie_margin(self.dim, usual)
        self.query_codes, self.gallery_codes = self._codes(queries.labels_N, gallery.labels_N, label_names)
        # In class order, the positives of a block of queries form one gallery range; only that is scored.
        self._of_class = _ranges(self.query_codes, self.gallery_codes)
        self._by_class_G = self._of_class.order_G
        self._sorted_codes_G = self.gallery_codes[self._by_class_G]
        self._place_G = np.argsort(self._by_class_G)
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._read_left_out(queries, gallery)

    def _exact_queries(self, embeds_QD: Embeddings) -> ExactRows:
        queries = ExactRows(embeds_QD, "queries", self.device)
        if queries.dim != self.gallery.dim:
            raise XcompatError(
                f"queries have {queries.dim} dimensions but the gallery has {self.gallery.dim}; "
                "map the queries to the gallery's space first"
            )
        return queries

    def with_queries(self, embeds_QD: Embeddings) -> LabelledPairs:
        """Return the same pairs with other embeddings of the queries, without preparing the gallery again.

        Args:
            embeds_QD: (Q, D) embeddings on the same device.

        Raises:
            XcompatError: as for the class.
        """
        pairs = copy.copy(self)
        pairs.queries = self._exact_queries(embeds_QD)
        return pairs

    def _codes(self, of_queries: Ids, of_gallery: Ids, called: tuple[str, str]) -> _Codes:
        return id_codes(as_ids(of_queries, self.n_queries, called[0]), as_ids(of_gallery, self.n_gallery, called[1]))

    def _read_left_out(self, queries: Items, gallery: Items) -> None:
        ids = self._codes_of_both("id", queries.ids_N, gallery.ids_N)
        cameras = self._codes_of_both("camera", queries.cameras_N, gallery.cameras_N)
        of_class = _combine_codes((self.query_codes, self.gallery_codes), cameras) if cameras is not None else None
        given = [codes for codes in (ids, of_class) if codes is not None]
        self._left_out_by = [_ranges(*codes) for codes in given]
        twice = _ranges(*_combine_codes(*given)).n_pairs if len(given) > 1 else 0  # excluded for both reasons
        self._n_left_out = sum(each.n_pairs for each in self._left_out_by) - twice

    def _codes_of_both(self, what: str, of_queries: Ids | None, of_gallery: Ids | None) -> _Codes | None:
        if of_queries is None and of_gallery is None:
            return None
        if of_queries is None or of_gallery is None:
            of = "sample ids" if what == "id" else "cameras"
            raise XcompatError(f"only one side has {of}; pass query_{what}s and gallery_{what}s, or neither")
        return self._codes(of_queries, of_gallery, (f"query {what}s", f"gallery {what}s"))

    @property
    def n_pairs(self) -> int:
        """Number of pairs that are not excluded."""
        return self.n_queries * self.n_gallery - self._n_left_out

    @property
    def is_reranked(self) -> bool:
        """Whether :meth:`with_first` made these pairs."""
        return self._first is not None

    def with_first(self, columns_Qk: torch.Tensor, scores_Qk: torch.Tensor) -> LabelledPairs:
        """Return the same pairs with some items ranked first for each query.

        Args:
            columns_Qk: int64 (Q, k) gallery rows.
            scores_Qk: float64 (Q, k) cosines to rank these items; -inf for excluded pairs.
        """
        pairs = copy.copy(self)
        # a quarter of the score range each: other items around 0, first items around 3/4
        pairs._first = columns_Qk, torch.where(scores_Qk.isinf(), EXCLUDED_SCORE, (UNIT / 4 * (3 + scores_Qk)).floor())
        pairs.tie_margin = self.tie_margin / 4
        return pairs

    def _rescore(self, scores_RC: torch.Tensor, rows_R: np.ndarray, start: int, places_G: np.ndarray | None = None) -> None:
        """Apply the order of :meth:`with_first` in place; ``start`` is the first column's position."""
        if self._first is None:
            return
        scores_RC.copy_(torch.where(scores_RC > EXCLUDED_SCORE, (scores_RC / 4).floor(), EXCLUDED_SCORE))
        columns_Rk, first_Rk = (each[torch.from_numpy(rows_R)] for each in self._first)
        if places_G is not None:
            columns_Rk = torch.from_numpy(places_G).to(columns_Rk.device)[columns_Rk]
        here_N = true_places((columns_Rk >= start) & (columns_Rk < start + scores_RC.shape[1]) & (first_Rk > EXCLUDED_SCORE))
        rows_N = here_N // columns_Rk.shape[1]
        scores_RC[rows_N, columns_Rk.flatten()[here_N] - start] = first_Rk.flatten()[here_N]

    def cosines(self, scores_RC: torch.Tensor) -> torch.Tensor:
        """Return cosines of scores: -inf for excluded pairs and for items after those of :meth:`with_first`."""
        if self._first is None:
            return torch.where(scores_RC > EXCLUDED_SCORE, scores_RC / UNIT, -torch.inf)
        return torch.where(scores_RC > UNIT / 2 - UNIT / 8, scores_RC / (UNIT / 4) - 3, -torch.inf)

    def are_matches(self, rows_R: np.ndarray, columns: slice) -> torch.Tensor:
        """Return bool (R, C), True for pairs of the same class, except excluded pairs."""
        of_class_RC = self.query_codes[rows_R][:, None] == self.gallery_codes[columns]
        left_R, left_G = self._excluded_pairs(rows_R)
        here_N = (left_G >= columns.start) & (left_G < columns.stop)
        of_class_RC[left_R[here_N], left_G[here_N] - columns.start] = False
        return torch.from_numpy(of_class_RC)

    def scores(self, rows_B: np.ndarray, owners_N: np.ndarray, columns_N: np.ndarray) -> torch.Tensor:
        """Return exact scores of single pairs, float64 (N,).

        Args:
            rows_B: query rows.
            owners_N: query of each pair, as a position in ``rows_B``.
            columns_N: gallery row of each pair.
        """
        known, places_N = np.unique(columns_N, return_inverse=True)
        owners, places = (torch.from_numpy(each).to(self.device) for each in (owners_N, places_N))
        scores_N = pair_scores(self.queries.block(rows_B), self.gallery.block(known), owners, places)
        if self._first is None:
            return scores_N
        columns_Nk, first_Nk = (each[torch.from_numpy(rows_B[owners_N])] for each in self._first)
        is_first_Nk = (columns_Nk == torch.from_numpy(columns_N).to(self.device)[:, None]) & (first_Nk > EXCLUDED_SCORE)
        return torch.where(is_first_Nk.any(dim=1), first_Nk.where(is_first_Nk, 0).sum(dim=1), (scores_N / 4).floor())

    def mated_rows(self, shared: bool = False) -> np.ndarray:
        """Return the rows of queries with a class in the gallery, sorted by class; only this process's share if ``shared``."""
        order_Q = np.argsort(self.query_codes, kind="stable")
        return my_share(order_Q[np.isin(self.query_codes[order_Q], self.gallery_codes)], shared)

    def mated_blocks(self, shared: bool = False) -> Iterator[np.ndarray]:
        """Yield :meth:`mated_rows` in blocks of at most ``chunk_size``, smaller for large classes."""
        rows_N = self.mated_rows(shared)
        first_N, last_N = (np.searchsorted(self._sorted_codes_G, self.query_codes[rows_N], side) for side in ("left", "right"))
        before_N, start = np.cumsum(last_N - first_N), 0
        while start < len(rows_N):
            limit = before_N[start] + _BLOCK_POSITIVES
            stop = min(start + self.chunk_size, int(np.searchsorted(before_N, limit, side="right")))
            yield rows_N[start:stop]
            start = stop

    def blocks_of(self, rows_N: np.ndarray) -> Iterator[np.ndarray]:
        """Yield rows in blocks of at most ``chunk_size``."""
        for part in blocks(len(rows_N), self.chunk_size):
            yield rows_N[part]

    def tiles(self, rows_B: np.ndarray) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield the scores of some queries against the whole gallery, tile by tile.

        Args:
            rows_B: query rows.

        Yields:
            A slice of ``rows_B``, a slice of the gallery, and float64 ``(R, C)`` exact scores, :data:`EXCLUDED_SCORE` for
            excluded pairs.
        """
        block_BD = self.queries.block(rows_B)
        left_B, left_G = self._excluded_pairs(rows_B)
        n_blocks = -(-self.n_gallery // (_WIDER * self.chunk_size))
        for columns in blocks(self.n_gallery, -(-self.n_gallery // n_blocks)):
            items_CD = self.gallery.block(columns)
            for part in blocks(len(rows_B), max(1, _TILE // len(items_CD))):
                scores_RC = block_BD[part] @ items_CD.T
                _mark_excluded(scores_RC, left_B - part.start, left_G - columns.start)
                self._rescore(scores_RC, rows_B[part], columns.start)
                yield part, columns, scores_RC

    def whole_tile(self, rows_B: np.ndarray) -> torch.Tensor | None:
        """Return some queries' scores against the whole gallery as in :meth:`tiles`, or None if they fill several tiles."""
        if self.n_gallery > _WIDER * self.chunk_size or len(rows_B) * self.n_gallery > _TILE:
            return None
        ((_, _, scores_BG),) = self.tiles(rows_B)
        return scores_BG

    def class_tiles(self, rows_B: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the scores of some queries against the gallery items in their classes.

        Args:
            rows_B: a few query rows (:data:`MATED_ROWS`), sorted by class as in :meth:`mated_blocks`.

        Yields:
            float64 ``(B, C)`` exact scores, and bool ``(B, C)``, True for positives.
        """
        codes_B = self.query_codes[rows_B]
        first, last = np.searchsorted(self._sorted_codes_G, [codes_B[0], codes_B[-1] + 1])
        codes_B1 = torch.from_numpy(codes_B).to(self.device)[:, None]
        block_BD = self.queries.block(rows_B)
        left_B, left_G = self._excluded_pairs(rows_B)
        for columns in blocks(last - first, _WIDER * self.chunk_size):
            items = self._by_class_G[first:last][columns]
            scores_BC = block_BD @ self.gallery.block(items).T
            _mark_excluded(scores_BC, left_B, self._place_G[left_G] - first - columns.start)
            self._rescore(scores_BC, rows_B, first + columns.start, self._place_G)
            of_class_BC = torch.from_numpy(self.gallery_codes[items]).to(self.device) == codes_B1
            yield scores_BC, of_class_BC & (scores_BC > EXCLUDED_SCORE)

    def positives(self, rows_B: np.ndarray, scores_BG: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of some queries' positives.

        Args:
            rows_B: query rows as in :meth:`class_tiles`.
            scores_BG: their :meth:`whole_tile`, if computed.

        Returns:
            float64 ``(N,)`` exact scores in no order, and the query of each: int64 ``(N,)`` positions in ``rows_B``.
        """
        if scores_BG is not None:
            owner_N, column_N = (torch.from_numpy(each).to(self.device) for each in self._of_class.pairs_of(rows_B))
            scores_N = scores_BG[owner_N, column_N]
            kept_N = scores_N > EXCLUDED_SCORE
            return scores_N[kept_N], owner_N[kept_N]
        scores, owners = [], []
        for scores_BC, positive_BC in self.class_tiles(rows_B):
            owner_N, column_N = positive_BC.nonzero(as_tuple=True)
            scores.append(scores_BC[owner_N, column_N])
            owners.append(owner_N)
        return torch.cat(scores), torch.cat(owners)

    def _excluded_pairs(self, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return excluded pairs as positions in ``rows_B`` and gallery rows, maybe with duplicates."""
        found = [each.pairs_of(rows_B) for each in self._left_out_by]
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(rows for rows, _ in found)]), np.concatenate([none, *(items for _, items in found)])


def _combine_codes(one: _Codes, other: _Codes) -> _Codes:
    """Return codes that are equal only where both inputs are equal."""
    width = 1 + max(int(codes.max(initial=0)) for codes in other)
    return one[0] * width + other[0], one[1] * width + other[1]


def _ranges(query_codes: np.ndarray, gallery_codes: np.ndarray) -> _Ranges:
    order_G = np.argsort(gallery_codes, kind="stable")
    first_Q, last_Q = (np.searchsorted(gallery_codes[order_G], query_codes, side) for side in ("left", "right"))
    return _Ranges(order_G, first_Q, last_Q)


def _mark_excluded(scores_RC: torch.Tensor, rows_N: np.ndarray, columns_N: np.ndarray) -> None:
    """Mark excluded pairs in a tile; ignore positions outside it."""
    n_rows, n_columns = scores_RC.shape
    here_N = (rows_N >= 0) & (rows_N < n_rows) & (columns_N >= 0) & (columns_N < n_columns)
    rows, columns = (torch.from_numpy(positions_N[here_N]).to(scores_RC.device) for positions_N in (rows_N, columns_N))
    scores_RC[rows, columns] = EXCLUDED_SCORE
