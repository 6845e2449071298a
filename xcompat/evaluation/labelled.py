"""Labelled queries and gallery items: which pairs count, which are positives, and their exact scores, tile by tile."""

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

LEFT_OUT = -(2.0**53)
"""Score of a pair that does not count: below every real score, as these are integers of at most about 2^52."""

MATED_ROWS = 128
"""Queries scored together against the items of their classes: few, so that few of these items are of another query's class."""

_Codes = tuple[np.ndarray, np.ndarray]  # numbers of queries and of gallery items, equal where these are equal in some respect
_BLOCK_POSITIVES = 2**21  # bounds a block of queries with tens of thousands of positives each to some hundred MB
_WIDER = 16  # gallery items per query of a block: counting costs time per row of a tile, so tiles are wide
_TILE = 2**21  # scores per tile, 16 MB: the allocator would give a larger tile back to the system and fetch it again


class Items(NamedTuple):
    """Embedded queries, or an embedded gallery.

    Args:
        embeds_ND: ``(N, D)`` embeddings; normalised inside, so scores are cosines.
        labels_N: N hashables, the classes.
        ids_N: N hashables, the samples; None if no query is in the gallery.
        cameras_N: N hashables, what took each image; None if one class's items of one camera are to be found too.
    """

    embeds_ND: Embeddings
    labels_N: Ids
    ids_N: Ids | None = None
    cameras_N: Ids | None = None


class _Ranges(NamedTuple):
    """The gallery items that equal each query in some respect: a range of the gallery in an order of its own."""

    order_G: np.ndarray
    first_Q: np.ndarray
    last_Q: np.ndarray

    @property
    def n_pairs(self) -> int:
        return int((self.last_Q - self.first_Q).sum())

    def of(self, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs of some queries, as positions in ``rows_B`` and numbers of gallery items."""
        first_B = self.first_Q[rows_B]
        n_B = self.last_Q[rows_B] - first_B
        inside_N = np.arange(n_B.sum()) - np.repeat(np.cumsum(n_B) - n_B, n_B)
        return np.repeat(np.arange(len(rows_B)), n_B), self.order_G[np.repeat(first_B, n_B) + inside_N]


class LabelledPairs:
    """All pairs of a query and a gallery item, except those of one sample, or of one class and one camera.

    Equal labels make a positive.

    Args:
        queries: Q items.
        gallery: G items; they have ids exactly if the queries do, and cameras likewise.
        chunk_size: queries per block; memory grows with it, scores do not change.
        called: names of the two sides' labels in messages.
        are_lifted: whether the rows are those of :func:`~xcompat.evaluation.scores.lifted`, whose copies score otherwise.

    Raises:
        XcompatError: if shapes, labels, ids or numbers are unusable.
    """

    def __init__(
        self,
        queries: Items,
        gallery: Items,
        chunk_size: int = 1024,
        called: tuple[str, str] = ("query labels", "gallery labels"),
        are_lifted: bool = False,
    ) -> None:
        if chunk_size < 1:
            raise XcompatError(f"chunk_size must be at least 1, not {chunk_size}")
        self.device = torch.device("cpu")
        if isinstance(queries.embeds_ND, torch.Tensor) and queries.embeds_ND.is_cuda:
            self.device = queries.embeds_ND.device
        self.queries = ExactRows(queries.embeds_ND, "queries", self.device)
        self.gallery = ExactRows(gallery.embeds_ND, "gallery", self.device)
        if self.queries.dim != self.gallery.dim:
            raise XcompatError(
                f"queries have {self.queries.dim} dimensions but the gallery has {self.gallery.dim}; "
                "bring the queries into the gallery's space first (the model's view)"
            )
        self.n_queries, self.n_gallery, self.dim = len(self.queries), len(self.gallery), self.queries.dim
        self.chunk_size, self.copy_score = chunk_size, copy_score(self.queries.dim, are_lifted)
        usual = usual_distance(as_rows(gallery.embeds_ND, "gallery")) if are_lifted else 1.0
        self.tie_margin = tie_margin(self.dim, usual)
        self.query_codes, self.gallery_codes = self._codes(queries.labels_N, gallery.labels_N, called)
        # Sorted by class, the positives of a block of queries are one range of the gallery, and only that range is scored.
        self._by_class_G = np.argsort(self.gallery_codes, kind="stable")
        self._sorted_codes_G = self.gallery_codes[self._by_class_G]
        self._place_G = np.argsort(self._by_class_G)
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._read_left_out(queries, gallery)

    def _codes(self, of_queries: Ids, of_gallery: Ids, called: tuple[str, str]) -> _Codes:
        return id_codes(as_ids(of_queries, self.n_queries, called[0]), as_ids(of_gallery, self.n_gallery, called[1]))

    def _read_left_out(self, queries: Items, gallery: Items) -> None:
        """Find the pairs that do not count: those of one id, and those of one class and one camera."""
        ids = self._codes_of_both("id", queries.ids_N, gallery.ids_N)
        cameras = self._codes_of_both("camera", queries.cameras_N, gallery.cameras_N)
        of_class = _together((self.query_codes, self.gallery_codes), cameras) if cameras is not None else None
        given = [codes for codes in (ids, of_class) if codes is not None]
        self._left_out_by = [_ranges(*codes) for codes in given]
        twice = _ranges(*_together(*given)).n_pairs if len(given) > 1 else 0  # left out for both reasons
        self._n_left_out = sum(each.n_pairs for each in self._left_out_by) - twice

    def _codes_of_both(self, what: str, of_queries: Ids | None, of_gallery: Ids | None) -> _Codes | None:
        if of_queries is None and of_gallery is None:
            return None
        if of_queries is None or of_gallery is None:
            of = "sample ids" if what == "id" else "cameras"
            raise XcompatError(f"{of} of one side only; give query_{what}s and gallery_{what}s, or neither")
        return self._codes(of_queries, of_gallery, (f"query {what}s", f"gallery {what}s"))

    @property
    def n_pairs(self) -> int:
        """Number of pairs that count."""
        return self.n_queries * self.n_gallery - self._n_left_out

    def with_first(self, columns_Qk: torch.Tensor, scores_Qk: torch.Tensor) -> LabelledPairs:
        """Return the same pairs, in which some items come first for each query.

        Args:
            columns_Qk: int64 (Q, k), gallery items.
            scores_Qk: float64 (Q, k) cosines by which these are ranked, before all others; -inf for those that do not count.
        """
        pairs = copy.copy(self)
        # a quarter of the range of scores each: the others around 0, those that come first around 3/4
        pairs._first = columns_Qk, torch.where(scores_Qk.isinf(), LEFT_OUT, (UNIT / 4 * (3 + scores_Qk)).floor())
        pairs.tie_margin = self.tie_margin / 4
        return pairs

    def _rescore(self, scores_RC: torch.Tensor, rows_R: np.ndarray, start: int, places_G: np.ndarray | None = None) -> None:
        """Overwrite scores as :meth:`with_first` asks for.

        Args:
            scores_RC: plain scores.
            rows_R: queries.
            start: place of the first column in the gallery.
            places_G: places of the items; None if they are in their own order.
        """
        if self._first is None:
            return
        scores_RC.copy_(torch.where(scores_RC > LEFT_OUT, (scores_RC / 4).floor(), LEFT_OUT))
        columns_Rk, first_Rk = (each[torch.from_numpy(rows_R)] for each in self._first)
        if places_G is not None:
            columns_Rk = torch.from_numpy(places_G).to(columns_Rk.device)[columns_Rk]
        here_N = true_places((columns_Rk >= start) & (columns_Rk < start + scores_RC.shape[1]) & (first_Rk > LEFT_OUT))
        rows_N = here_N // columns_Rk.shape[1]
        scores_RC[rows_N, columns_Rk.flatten()[here_N] - start] = first_Rk.flatten()[here_N]

    def cosines(self, scores_RC: torch.Tensor) -> torch.Tensor:
        """Return the cosines behind scores; -inf for pairs that do not count, and for those after :meth:`with_first`'s items."""
        if self._first is None:
            return torch.where(scores_RC > LEFT_OUT, scores_RC / UNIT, -torch.inf)
        return torch.where(scores_RC > UNIT / 2 - UNIT / 8, scores_RC / (UNIT / 4) - 3, -torch.inf)

    def are_matches(self, rows_R: np.ndarray, columns: slice) -> torch.Tensor:
        """Return bool (R, C), whether queries and items of a range of the gallery are of one class, and count."""
        of_class_RC = self.query_codes[rows_R][:, None] == self.gallery_codes[columns]
        left_R, left_G = self._left_out(rows_R)
        here_N = (left_G >= columns.start) & (left_G < columns.stop)
        of_class_RC[left_R[here_N], left_G[here_N] - columns.start] = False
        return torch.from_numpy(of_class_RC)

    def scores(self, rows_B: np.ndarray, owners_N: np.ndarray, columns_N: np.ndarray) -> torch.Tensor:
        """Return the exact scores of some pairs, float64 (N,).

        Args:
            rows_B: row numbers of queries.
            owners_N: the query of each pair, as a position in ``rows_B``.
            columns_N: the gallery item of each pair.
        """
        known, places_N = np.unique(columns_N, return_inverse=True)
        owners, places = (torch.from_numpy(each).to(self.device) for each in (owners_N, places_N))
        scores_N = pair_scores(self.queries.block(rows_B), self.gallery.block(known), owners, places)
        if self._first is None:
            return scores_N
        columns_Nk, first_Nk = (each[torch.from_numpy(rows_B[owners_N])] for each in self._first)
        is_first_Nk = (columns_Nk == torch.from_numpy(columns_N).to(self.device)[:, None]) & (first_Nk > LEFT_OUT)
        return torch.where(is_first_Nk.any(dim=1), first_Nk.where(is_first_Nk, 0).sum(dim=1), (scores_N / 4).floor())

    def mated_rows(self, shared: bool = False) -> np.ndarray:
        """Return the rows of the queries whose class occurs in the gallery, sorted by class; a process's share if ``shared``."""
        order_Q = np.argsort(self.query_codes, kind="stable")
        return my_share(order_Q[np.isin(self.query_codes[order_Q], self.gallery_codes)], shared)

    def mated_blocks(self, shared: bool = False) -> Iterator[np.ndarray]:
        """Yield the rows of :meth:`mated_rows` in blocks of at most ``chunk_size``, and fewer if classes are large."""
        rows_N = self.mated_rows(shared)
        first_N, last_N = (np.searchsorted(self._sorted_codes_G, self.query_codes[rows_N], side) for side in ("left", "right"))
        before_N, start = np.cumsum(last_N - first_N), 0
        while start < len(rows_N):
            limit = before_N[start] + _BLOCK_POSITIVES
            stop = min(start + self.chunk_size, int(np.searchsorted(before_N, limit, side="right")))
            yield rows_N[start:stop]
            start = stop

    def blocks_of(self, rows_N: np.ndarray) -> Iterator[np.ndarray]:
        """Yield row numbers in blocks of at most ``chunk_size``."""
        for part in blocks(len(rows_N), self.chunk_size):
            yield rows_N[part]

    def tiles(self, rows_B: np.ndarray) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield the scores of some queries against the whole gallery.

        Args:
            rows_B: row numbers of queries.

        Yields:
            A range of ``rows_B``, a range of the gallery, and their exact scores, float64 ``(R, C)``, with :data:`LEFT_OUT` for
            pairs that do not count.
        """
        block_BD = self.queries.block(rows_B)
        left_B, left_G = self._left_out(rows_B)
        n_blocks = -(-self.n_gallery // (_WIDER * self.chunk_size))
        for columns in blocks(self.n_gallery, -(-self.n_gallery // n_blocks)):
            items_CD = self.gallery.block(columns)
            for part in blocks(len(rows_B), max(1, _TILE // len(items_CD))):
                scores_RC = block_BD[part] @ items_CD.T
                _leave_out(scores_RC, left_B - part.start, left_G - columns.start)
                self._rescore(scores_RC, rows_B[part], columns.start)
                yield part, columns, scores_RC

    def class_tiles(self, rows_B: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the scores of some queries against the gallery items of their classes.

        Args:
            rows_B: row numbers of a few queries (:data:`MATED_ROWS`), sorted by class as in :meth:`mated_blocks`.

        Yields:
            float64 ``(B, C)`` exact scores, and bool ``(B, C)``, True for positives.
        """
        codes_B = self.query_codes[rows_B]
        first, last = np.searchsorted(self._sorted_codes_G, [codes_B[0], codes_B[-1] + 1])
        codes_B1 = torch.from_numpy(codes_B).to(self.device)[:, None]
        block_BD = self.queries.block(rows_B)
        left_B, left_G = self._left_out(rows_B)
        for columns in blocks(last - first, _WIDER * self.chunk_size):
            items = self._by_class_G[first:last][columns]
            scores_BC = block_BD @ self.gallery.block(items).T
            _leave_out(scores_BC, left_B, self._place_G[left_G] - first - columns.start)
            self._rescore(scores_BC, rows_B, first + columns.start, self._place_G)
            of_class_BC = torch.from_numpy(self.gallery_codes[items]).to(self.device) == codes_B1
            yield scores_BC, of_class_BC & (scores_BC > LEFT_OUT)

    def positives(self, rows_B: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of some queries' positives.

        Args:
            rows_B: row numbers as in :meth:`class_tiles`.

        Returns:
            float64 ``(N,)`` exact scores in no order, and int64 ``(N,)`` the query of each, as a position in ``rows_B``.
        """
        scores, owners = [], []
        for scores_BC, positive_BC in self.class_tiles(rows_B):
            owner_N, column_N = positive_BC.nonzero(as_tuple=True)
            scores.append(scores_BC[owner_N, column_N])
            owners.append(owner_N)
        return torch.cat(scores), torch.cat(owners)

    def _left_out(self, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs that do not count, as positions in ``rows_B`` and numbers of gallery items; some of them twice."""
        found = [each.of(rows_B) for each in self._left_out_by]
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(rows for rows, _ in found)]), np.concatenate([none, *(items for _, items in found)])


def _together(one: _Codes, other: _Codes) -> _Codes:
    """Return numbers that are equal where both are equal."""
    width = 1 + max(int(codes.max(initial=0)) for codes in other)
    return one[0] * width + other[0], one[1] * width + other[1]


def _ranges(query_codes: np.ndarray, gallery_codes: np.ndarray) -> _Ranges:
    order_G = np.argsort(gallery_codes, kind="stable")
    first_Q, last_Q = (np.searchsorted(gallery_codes[order_G], query_codes, side) for side in ("left", "right"))
    return _Ranges(order_G, first_Q, last_Q)


def _leave_out(scores_RC: torch.Tensor, rows_N: np.ndarray, columns_N: np.ndarray) -> None:
    """Overwrite the scores of pairs that do not count; positions outside of this tile are ignored."""
    n_rows, n_columns = scores_RC.shape
    here_N = (rows_N >= 0) & (rows_N < n_rows) & (columns_N >= 0) & (columns_N < n_columns)
    rows, columns = (torch.from_numpy(positions_N[here_N]).to(scores_RC.device) for positions_N in (rows_N, columns_N))
    scores_RC[rows, columns] = LEFT_OUT
