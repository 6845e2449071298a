"""Python API of `xcompat map`: from embeddings in memory to a chosen map."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from xcompat.core.arrays import normalise_rows
from xcompat.core.errors import NoValidationDataError, XcompatError
from xcompat.core.progress import notice
from xcompat.mapping.agreement import choose_by_labels_or_agreement
from xcompat.mapping.candidates import GUESS, LINES, CandidateParts, Paired, fit
from xcompat.mapping.choice_report import MapReport, choice_html, describe_choice
from xcompat.mapping.cleaning import drop_wrong_pairs
from xcompat.mapping.domain import describe_shift, measure_known_share, read_gallery_vectors
from xcompat.mapping.item_labels import read_item_labels
from xcompat.mapping.old_models import describe_old_side, load_old_model, require_dim
from xcompat.mapping.paired import PairedEmbeddings, load_paired
from xcompat.mapping.selection import Choice
from xcompat.mapping.sentences import Texts
from xcompat.mapping.sides import read_sides
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.text_embedder import TextEmbedder
from xcompat.retrieval.versions import as_float32
from xcompat.stores.places import Place, Reading, parse_place, read_vectors_of_index

Embeddings: TypeAlias = ArrayLike | Tensor | str | Path | Gallery | Any
"""Embeddings in memory, a faiss index, a gallery, or their path or address."""


class FittedMap:
    """Chosen map of queries, and its validation results.

    Args:
        model: the map, as `xcompat map` saves it.
        choice: all candidates and their results on held-out items; None if there were too few items.
        dropped: number of dropped wrong pairs.
    """

    def __init__(self, model: CompatModel, choice: Choice | None, dropped: int = 0) -> None:
        self.model, self.choice, self.dropped = model, choice, dropped
        self._embedder: TextEmbedder | None = None

    @property
    def is_safe(self) -> bool:
        """Whether new queries surely find at least as much as old queries on the validation split."""
        return self.choice is not None and self.choice.is_safe

    @property
    def report(self) -> MapReport:
        """All measurements, as in ``report.json`` of `xcompat map`; empty if there were too few items."""
        return MapReport(self.choice)

    def to_space(self, embeds: ArrayLike | Tensor) -> NDArray[np.float32]:
        """Map embeddings of the new model to the old space.

        Args:
            embeds: (B, D) floats of any length above 0.

        Returns:
            (B, d) float32, L2-normalised, without mixing in old queries.
        """
        return self.model.to_space(torch.from_numpy(normalise_rows(as_float32(embeds)))).numpy(force=True)

    def encode_query(self, queries: str | Sequence[str]) -> NDArray[np.float32]:
        """Embed texts as queries of the old gallery, mixed with old queries if the chosen map does so.

        Args:
            queries: a text or several.

        Returns:
            (d,) or (B, d) float32, L2-normalised.

        Raises:
            XcompatError: the map was fitted without ``new_model``.
        """
        if self.model.config.encoder is None:
            raise XcompatError(
                "this map was fitted on embeddings only; pass new_model to fit_map, or map embeddings with to_space"
            )
        texts = [queries] if isinstance(queries, str) else list(queries)
        if self._embedder is None:
            self._embedder = TextEmbedder(self.model)
        found_Bd = np.array([self._embedder.query(text) for text in texts], np.float32)
        return found_Bd[0] if isinstance(queries, str) else found_Bd

    def save(self, folder: str | Path) -> None:
        """Save the map to a folder for all commands and ``AutoModel``. Warn unless the map is safe (:attr:`is_safe`)."""
        if not self.is_safe:
            notice(
                "the saved map is not surely at or above old queries; compare new and old queries on your data before you switch"
            )
        self.model.save_pretrained(folder)

    def __repr__(self) -> str:
        dims = f"{self.model.config.embedding_dim} to {self.model.config.old['dim']} dimensions"
        if self.choice is None:
            return f"FittedMap({GUESS}, {dims}): a guess, without a validation split"
        return f"FittedMap({self.choice.candidate}, {dims}): {describe_choice(self.choice)[-1]}"

    def _repr_html_(self) -> str:
        table = choice_html(self.choice) if self.choice is not None else ""
        return f"{table}<p>{escape(repr(self))}</p>"


def fit_map(
    old: Embeddings,
    new: Embeddings,
    labels: Sequence[Hashable] | str | Path | None = None,
    texts: Sequence[str] | None = None,
    old_model: str | None = None,
    new_model: str | None = None,
    seed: int = 0,
    gallery: ArrayLike | Tensor | str | Path | None = None,
    remember_items: bool = False,
) -> FittedMap:
    """Choose a map of queries on a validation split, and fit the chosen map on all items.

    Args:
        old: (N, d) float embeddings by the old model: an array, a tensor, a faiss index, a gallery, or a path or database's
            address as in `xcompat map --old`.
        new: (N, D) float embeddings of the same items by the new model, as for ``old``. Two paths or galleries are joined by
            their ids. Otherwise rows are in the same order.
        labels: class of each of the N items, for validation, or their path as in `xcompat map --labels`. Two paths use their
            ``labels.txt`` files by default.
        texts: N texts for validation by sentences, which needs ``new_model``.
        old_model: folder or Hub name of the old model, to mix in old queries if no map alone is safe. Or the name recorded for
            the old model in galleries. Default: the model that ``old`` records, if it is on this machine.
        new_model: new model, to embed texts as queries.
        seed: random seed for the validation split.
        gallery: stored embeddings or their path, to print a warning if the pairs are unlike the gallery.
        remember_items: whether to try a memory of all items, for pairs without classes or captions.

    Returns:
        The map. Check ``is_safe`` before you use the map: even the best candidate can find less than old queries.

    Raises:
        XcompatError: the sides are unusable, or a model does not fit them.

    Example:
        ``found = fit_map(old_vectors, new_vectors, labels); found.to_space(query)``
    """
    pairs, texts = _pairs(old, new, labels, texts)
    if gallery is not None:
        pairs = _compare_with_gallery(pairs, gallery, remember_items)
    right = drop_wrong_pairs(pairs, seed)
    if texts is not None and right.rows_R is not None:
        texts = [texts[row] for row in right.rows_R.tolist()]
    pairs = right.pairs
    asking = _load_new_model(new_model, pairs.dims[0])
    place = _path_of(old)
    embedder = load_old_model(old_model, place if asking is not None else None, pairs.dims[1])
    described = embedder.describe_old() if embedder is not None else describe_old_side(old_model, place, pairs.dims[1])
    both = asking is not None and embedder is not None
    said = Texts(texts, asking) if texts is not None and asking is not None else None
    try:
        choice = choose_by_labels_or_agreement(pairs, "unknown", seed, LINES, both, said, remember_items)
    except NoValidationDataError:
        choice = None
    candidate = choice.candidate if choice is not None else GUESS
    model = fit(candidate, CandidateParts(pairs, described), choice.confidence if choice is not None else None)
    model.config.encoder = asking.describe_encoder() if asking is not None else None
    if choice is not None and choice.reranked is not None:
        choice.reranked.store_in(model)
    return FittedMap(model, choice, right.dropped)


def _compare_with_gallery(pairs: Paired, gallery: ArrayLike | Tensor | str | Path, remembers: bool) -> Paired:
    """Add the gallery's size to the pairs; warn if they are unlike the gallery."""
    if isinstance(gallery, str | Path):
        stored_nd, n_stored = read_gallery_vectors(parse_place(str(gallery)))
    else:
        stored_nd = as_float32(gallery)
        n_stored = len(stored_nd)
    items = pairs if isinstance(pairs, PairedEmbeddings) else pairs.images
    for warning in describe_shift(items.old_Nd, stored_nd, "the gallery"):
        notice(warning.removeprefix("! "))
    if not isinstance(pairs, PairedEmbeddings):
        return pairs
    known_share = measure_known_share(items.old_Nd, stored_nd) if remembers else pairs.known_share
    return replace(pairs, n_stored=n_stored, known_share=known_share)


def _path_of(side: object) -> Place | None:
    return side.path if isinstance(side, Gallery) else parse_place(str(side)) if isinstance(side, str | Path) else None


def _read_rows(side: Any) -> NDArray[np.float32]:  # noqa: ANN401 - see fit_map
    """Return a side's vectors in their order; NaN for unusable rows of a file."""
    if isinstance(side, np.ndarray | Tensor | Sequence) and not isinstance(side, str):
        return as_float32(side)
    if (path := _path_of(side)) is not None:
        sides = read_sides(path)
        if len(sides) > 1:
            raise XcompatError(f"{path} contains {' and '.join(sides)} embeddings; pass one of its files, or both sides as paths")
        (read,) = sides.values()
        return np.where(read.usable_N[:, None], read.embeds_ND[:], np.nan).astype(np.float32)
    if hasattr(side, "ntotal"):
        return read_vectors_of_index(side)
    return as_float32(side)


def _load_new_model(name: str | None, dim: int) -> Embedder | None:
    if name is None:
        return None
    model = load_embedder(name)
    require_dim(model, dim, "new_model")
    return model


def _pairs(
    old: object,
    new: object,
    labels: Sequence[Hashable] | str | Path | None,
    texts: Sequence[str] | None,
) -> tuple[Paired, Sequence[str] | None]:
    old_path, new_path = _path_of(old), _path_of(new)
    labels_path = Path(labels) if isinstance(labels, str | Path) else None
    listed: Sequence[Hashable] | None = None if isinstance(labels, str | Path) else labels
    if old_path is not None and new_path is not None:
        if texts is not None or listed is not None:
            raise XcompatError(
                "fit_map: texts and lists of labels work only with arrays; with paths, pass the path of the labels"
            )
        return load_paired(old_path, new_path, reading=Reading(labels=labels_path)), None
    old_Nd, new_ND = _read_rows(old), _read_rows(new)
    if labels_path is not None:
        listed = read_item_labels(labels_path).of_items(None, len(old_Nd), "old")
    given = {"old": old_Nd, "new": new_ND, "labels": listed, "texts": texts}
    counts = {name: len(side) for name, side in given.items() if side is not None}
    if len(set(counts.values())) > 1:
        unequal = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        raise XcompatError(f"fit_map needs the same items row by row, found {unequal}")
    usable_N = np.logical_and(*(np.isfinite(side).all(1) & (side != 0).any(1) for side in (old_Nd, new_ND)))
    if labels_path is not None and listed is not None:
        usable_N &= np.array([label is not None for label in listed], bool)
    if not usable_N.any():
        raise XcompatError("in every row, the old or the new embedding is zero or not finite; embed the items again")
    labels_N = _numbers(listed)[usable_N] if listed is not None else None
    kept = [texts[row] for row in np.flatnonzero(usable_N).tolist()] if texts is not None else None
    return PairedEmbeddings(normalise_rows(new_ND[usable_N]), normalise_rows(old_Nd[usable_N]), labels_N), kept


def _numbers(labels: Sequence[Hashable]) -> NDArray[np.int64]:
    """Return class numbers in the order of their first occurrence."""
    plain = getattr(labels, "tolist", lambda: labels)()  # scalars of a tensor are hashed by address
    numbers = {label: number for number, label in enumerate(dict.fromkeys(plain))}
    return np.array([numbers[label] for label in plain], np.int64)
