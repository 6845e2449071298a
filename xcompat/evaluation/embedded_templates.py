"""A model's embeddings of image templates, for verification and identification of subjects (IJB-C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xcompat.core.arrays import row_lengths
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.evaluation.cases import IDENTIFICATION, VERIFICATION
from xcompat.evaluation.evaluated_models import Direction, EvaluationOptions, SearchResults, require_cut_offs, select_cut_offs
from xcompat.evaluation.identities import Ids, as_ids
from xcompat.evaluation.labelled import Items, LabelledPairs
from xcompat.evaluation.ranking import rank
from xcompat.evaluation.scores import Embeddings, ExactRows, as_rows, blocks, pair_scores
from xcompat.evaluation.thresholds import MatchedPairs
from xcompat.evaluation.verification import identify_queries, metric_at_rate, pair_thresholds, search_thresholds

_KS = (1, 5, 10)
_FARS, _FPIRS = (1e-4,), (1e-2,)
_ROWS = 256
"""Templates per block of scored pairs."""
_NAMED = 5  # most templates named in a message
_IMAGES = 2**16
"""Most images in float64 at once, except for larger templates."""


@dataclass(frozen=True)
class TemplateProtocol:
    """Templates of images, with the pairs to verify and the probes to identify.

    Args:
        templates_N: int64 ``(N,)`` each image's template, from 0 to T - 1.
        media_N: int64 ``(N,)`` each image's medium (a photo or a video); frames of a video have the same medium.
        pairs_P2: int64 ``(P, 2)`` templates to verify, the enrolled template first; None for no verification.
        same_P: bool ``(P,)``, True for pairs of the same subject.
        gallery_G: int64 ``(G,)`` gallery templates; None for no identification.
        gallery_subjects_G: int64 ``(G,)`` subject of each gallery template.
        probes_Q: int64 ``(Q,)`` probe templates.
        probe_subjects_Q: int64 ``(Q,)`` subject of each probe template.
        is_open: whether some probes are impostors, i.e. their subject is not in the gallery. Without impostors, all wrong items
            set the threshold of identification.
        n_lost: number of templates dropped for lack of readable images.
        names_T: int64 ``(T,)`` names of the templates in messages; None for their numbers.
    """

    templates_N: NDArray[np.int64]
    media_N: NDArray[np.int64]
    pairs_P2: NDArray[np.int64] | None = None
    same_P: NDArray[np.bool_] | None = None
    gallery_G: NDArray[np.int64] | None = None
    gallery_subjects_G: NDArray[np.int64] | None = None
    probes_Q: NDArray[np.int64] | None = None
    probe_subjects_Q: NDArray[np.int64] | None = None
    is_open: bool = True
    n_lost: int = 0
    names_T: NDArray[np.int64] | None = None

    @property
    def n_templates(self) -> int:
        """Number of templates, T."""
        return int(self.templates_N.max()) + 1

    def keep(self, mask_N: NDArray[np.bool_]) -> TemplateProtocol:
        """Keep some images; drop templates without images from every list.

        Args:
            mask_N: bool ``(N,)``, True for images to keep.

        Raises:
            XcompatError: a list has nothing left to measure. The error names the lost templates.
        """
        left_N, given_T = self.templates_N[mask_N], np.unique(self.templates_N)
        there_T = np.zeros(self.n_templates, dtype=bool)
        there_T[left_N] = True
        changed: dict[str, Any] = {"templates_N": left_N, "media_N": self.media_N[mask_N]}
        for templates, beside in (("pairs_P2", "same_P"), ("gallery_G", "gallery_subjects_G"), ("probes_Q", "probe_subjects_Q")):
            if (listed := getattr(self, templates)) is not None:
                kept = there_T[listed].reshape(len(listed), -1).all(axis=1)
                changed |= {templates: listed[kept], beside: getattr(self, beside)[kept]}
        kept = replace(self, **changed, n_lost=self.n_lost + len(given_T) - int(there_T.sum()))
        if gone := [what for what, there in self._measurable().items() if there and not kept._measurable()[what]]:
            lost_T = given_T[~there_T[given_T]]
            names = ", ".join(map(str, (lost_T if self.names_T is None else self.names_T[lost_T])[:_NAMED].tolist()))
            more = f" and {len(lost_T) - _NAMED} more" if len(lost_T) > _NAMED else ""
            raise XcompatError(
                f"the templates {names}{more} have no readable image, and without them no {' and no '.join(gone)} is left; "
                "fix their images or add templates"
            )
        return kept

    def _measurable(self) -> dict[str, bool]:
        """Return the necessary contents of the lists by display name, and whether they exist."""
        found = dict[str, bool]()
        if self.same_P is not None:
            found |= {"pair of one subject": bool(self.same_P.any()), "pair of two subjects": not self.same_P.all()}
        if self.gallery_subjects_G is not None and self.probe_subjects_Q is not None:
            known_Q = np.isin(self.probe_subjects_Q, self.gallery_subjects_G)
            found["probe whose subject is in the gallery"] = bool(known_Q.any())
            if self.is_open:
                found["probe whose subject is not in the gallery"] = not known_Q.all()
        return found

    def subjects_of_pairs(self) -> NDArray[np.int64]:
        """Return a cluster number per pair of the same subject; pairs connected by templates share it."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        assert self.pairs_P2 is not None and self.same_P is not None
        first_M, second_M = self.pairs_P2[self.same_P].T
        links = coo_array((np.ones(len(first_M), dtype=np.int8), (first_M, second_M)), shape=(self.n_templates,) * 2)
        return connected_components(links, directed=False)[1][first_M].astype(np.int64)


def pooled_templates(embeds_ND: Embeddings, templates_N: NDArray[np.int64], media_N: NDArray[np.int64]) -> np.ndarray:
    """Pool image embeddings into an embedding per template, as IJB-C does (Whitelam et al. 2017, §5; InsightFace).

    Images are normalised. A medium is the mean of its images in the template, and frames of a video are a single medium. A
    template is the normalised sum of its media, so a long video weighs as much as an image.

    Args:
        embeds_ND: ``(N, D)`` image embeddings, memory-mapped or not.
        templates_N: ``(N,)`` each image's template, from 0 to T - 1.
        media_N: ``(N,)`` each image's medium.

    Returns:
        float64 ``(T, D)``.

    Example:
        >>> images = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
        >>> pooled_templates(images, np.array([0, 0, 0]), np.array([7, 8, 8])).round(3).tolist()
        [[0.707, 0.707]]
    """
    rows_ND = as_rows(embeds_ND, "images")
    order_N = np.lexsort((np.arange(len(templates_N)), media_N, templates_N))
    starts_T = np.flatnonzero(np.diff(templates_N[order_N], prepend=-1))
    pooled_TD = np.zeros((int(templates_N.max()) + 1, rows_ND.shape[1]))
    ends_T, first = np.append(starts_T[1:], len(order_N)), 0
    while first < len(starts_T):
        last = max(first + 1, int(np.searchsorted(ends_T, starts_T[first] + _IMAGES, side="right")))
        rows_B = order_N[starts_T[first] : ends_T[last - 1]]
        unit_BD = _normalise(np.asarray(rows_ND[rows_B], dtype=np.float64))
        of_B = templates_N[rows_B]
        begins_M = np.flatnonzero((np.diff(of_B, prepend=-1) != 0) | (np.diff(media_N[rows_B], prepend=media_N[rows_B][0]) != 0))
        counts_M = np.diff(np.append(begins_M, len(rows_B)))
        media_MD = np.add.reduceat(unit_BD, begins_M, axis=0) / counts_M[:, None]
        templates_M = of_B[begins_M]
        begins_T = np.flatnonzero(np.diff(templates_M, prepend=-1))
        pooled_TD[templates_M[begins_T]] = _normalise(np.add.reduceat(media_MD, begins_T, axis=0))
        first = last
    return pooled_TD


def _normalise(rows_BD: np.ndarray) -> np.ndarray:
    norms_B1 = row_lengths(rows_BD)[:, None]
    return rows_BD / np.where(norms_B1 == 0, 1, norms_B1)


@dataclass(frozen=True)
class EmbeddedTemplates:
    """A model's embeddings of template images.

    Args:
        name: display name.
        fingerprint: model identity.
        image_embeds_ND: ``(N, D)`` image embeddings, a row per image and template.
        image_ids: N hashables.
        protocol: the templates, pairs and probes.
    """

    name: str
    fingerprint: Fingerprint
    image_embeds_ND: Embeddings
    image_ids: Ids
    protocol: TemplateProtocol

    @property
    def dim(self) -> int:
        """Embedding dimension."""
        return int(self.image_embeds_ND.shape[1])

    @cached_property
    def templates(self) -> np.ndarray:
        """Template embeddings, float64 ``(T, D)``."""
        return pooled_templates(self.image_embeds_ND, self.protocol.templates_N, self.protocol.media_N)

    def require_same_items(self, other: EmbeddedTemplates, name: str) -> None:
        """Raise unless ``other`` embedded the same images in the same order."""
        if as_ids(self.image_ids, len(self.image_ids), "old") != as_ids(other.image_ids, len(other.image_ids), name):
            raise XcompatError(
                f"image_ids differ between {name} and old; embed the same images in the same order with both models"
            )

    def matrices(self) -> dict[str, Embeddings]:
        """Return the embeddings of the ``images``."""
        return {"images": self.image_embeds_ND}

    def with_matrices(self, matrices: Mapping[str, Embeddings]) -> EmbeddedTemplates:
        """Return the same items with other embeddings."""
        return replace(self, image_embeds_ND=matrices["images"])

    def without_gallery(self) -> EmbeddedTemplates:
        """Return all embeddings, as an image can be in gallery and probe templates."""
        return self

    def readable(self) -> tuple[np.ndarray, ...]:
        """Return a mask of the readable images."""
        return (np.isfinite(as_rows(self.image_embeds_ND, "images")[:, 0]),)

    def keep(self, masks: tuple[np.ndarray, ...]) -> EmbeddedTemplates:
        """Keep the images selected by the mask, and their templates."""
        (kept_N,) = masks
        if kept_N.all():
            return self
        ids = [self.image_ids[row] for row in np.flatnonzero(kept_N).tolist()]
        embeds_ND = as_rows(self.image_embeds_ND, "images")[kept_N]
        return replace(self, image_embeds_ND=embeds_ND, image_ids=ids, protocol=self.protocol.keep(kept_N))

    def directions(self, ks: Sequence[int] | None) -> list[Direction]:
        """Return verification and identification, if the protocol has them."""
        protocol, found = self.protocol, list[Direction]()
        notes: tuple[str, ...] = ()
        if protocol.n_lost:
            notes = (f"Templates without a readable image, excluded: {protocol.n_lost}.",)
        if protocol.same_P is not None:
            clusters, n_pairs = protocol.subjects_of_pairs(), len(protocol.same_P)
            notes = (
                f"Verification counts the {len(clusters):,} pairs of one subject as queries, and all pairs as items.",
                *notes,
            )
            found.append(Direction(VERIFICATION, "verified", (), n_pairs, clusters, notes=notes, is_ranked=False))
            notes = ()
        if protocol.gallery_G is not None:
            without_match, subjects_Q = "probes have no template of their subject in the gallery", protocol.probe_subjects_Q
            ks, n_gallery = ks or _KS, len(protocol.gallery_G)
            kept, left_out = select_cut_offs(IDENTIFICATION, "cmc", ks, n_gallery)
            require_cut_offs(IDENTIFICATION, kept, ks, n_gallery)
            notes = (*notes, *left_out)
            found.append(Direction(IDENTIFICATION, "cmc", kept, n_gallery, subjects_Q, without_match, notes=notes))
        return found

    def compare(
        self, gallery: EmbeddedTemplates, direction: Direction, options: EvaluationOptions, own: EmbeddedTemplates | None = None
    ) -> MatchedPairs:
        """Raise: TAR@FAR sets the thresholds of templates."""
        raise XcompatError(
            "evaluation.threshold does not apply to templates, whose thresholds come from TAR@FAR; remove evaluation.threshold"
        )

    def find(
        self, gallery: EmbeddedTemplates, direction: Direction, options: EvaluationOptions, own: EmbeddedTemplates | None = None
    ) -> SearchResults | None:
        """Verify pairs or identify probes against the gallery's templates; return None for re-ranking."""
        if own is not None:
            return None
        judge = _verify_pairs if direction.name == VERIFICATION else _identify_probes
        return judge(self.templates, gallery.templates, self.protocol, options)


def _verify_pairs(
    asking_TD: np.ndarray, searched_TD: np.ndarray, protocol: TemplateProtocol, options: EvaluationOptions
) -> SearchResults:
    """Accept pairs at each rate; the listed pairs of two subjects set the thresholds."""
    pairs_P2, same_P = protocol.pairs_P2, protocol.same_P
    assert pairs_P2 is not None and same_P is not None
    asked_TD, stored_TD = (_exact(templates_TD) for templates_TD in (asking_TD, searched_TD))
    enrolled_E, place_P = np.unique(pairs_P2[:, 0], return_inverse=True)
    stored_ED, order_P = stored_TD[torch.from_numpy(enrolled_E)], np.argsort(pairs_P2[:, 1], kind="stable")
    rows_P, scores_P = pairs_P2[order_P, 1], np.empty(len(pairs_P2))
    for part in blocks(len(asked_TD), _ROWS):
        first, last = np.searchsorted(rows_P, [part.start, part.stop])
        these_B, rows_B = order_P[first:last], torch.from_numpy(rows_P[first:last]) - part.start
        if len(these_B):
            places_B = torch.from_numpy(place_P[these_B])
            scores_P[these_B] = pair_scores(asked_TD[part], stored_ED, rows_B, places_B).numpy()
    bars = pair_thresholds(scores_P[~same_P], options.fars or _FARS, asking_TD.shape[1])
    values = {metric_at_rate("tar@far", far): (scores_P[same_P] > lowest).astype(np.float64) for far, lowest in bars.items()}
    return SearchResults(np.zeros(int(same_P.sum()), dtype=np.int64), values)


def _exact(templates_TD: np.ndarray) -> torch.Tensor:
    return ExactRows(templates_TD, "templates", torch.device("cpu")).block(slice(0, len(templates_TD)))


def _identify_probes(
    asking_TD: np.ndarray, searched_TD: np.ndarray, protocol: TemplateProtocol, options: EvaluationOptions
) -> SearchResults:
    """Identify probes. Impostors set the thresholds in an open set, else all negatives do."""
    gallery_G, probes_Q = protocol.gallery_G, protocol.probes_Q
    assert gallery_G is not None and probes_Q is not None
    assert protocol.gallery_subjects_G is not None and protocol.probe_subjects_Q is not None
    queries = Items(asking_TD[probes_Q], protocol.probe_subjects_Q)
    pairs = LabelledPairs(queries, Items(searched_TD[gallery_G], protocol.gallery_subjects_G), options.chunk_size)
    ranked, fpirs = rank(pairs, options.shared), options.fpirs or _FPIRS
    known_Q = ranked.positives_Q > 0
    if not protocol.is_open:
        lowest = search_thresholds(pairs, int(ranked.positives_Q.sum()), fpirs)
        found = {metric_at_rate("tpir@far", fpir): ranked.best_scores_Q > lowest[fpir] for fpir in fpirs}
    else:
        found = {metric_at_rate("tpir@fpir", fpir): hits_Q for fpir, hits_Q in identify_queries(pairs, ranked, fpirs).items()}
    return SearchResults(ranked.first_hit_ranks_Q, {name: np.where(known_Q, hits_Q, np.nan) for name, hits_Q in found.items()})
