"""Test sets from folders of embeddings: the models' embeddings of the same items, with the evidence for hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xcompat.core.arrays import copy_rows, normalise_rows
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import notice
from xcompat.data import read_qrels
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts
from xcompat.evaluation.cases import IMAGE_TO_IMAGE, TEXT_TO_TEXT
from xcompat.evaluation.graded import Qrels
from xcompat.mapping.folds import HELD_OUT, NEIGHBOURS, QUERIES
from xcompat.mapping.item_labels import read_item_labels, read_labels
from xcompat.mapping.sides import LABELS
from xcompat.stores.places import READ_AS_IT_IS, Place, Reading
from xcompat.training.embedding_folders import Evidence, read_ids, require_files
from xcompat.training.item_embeddings import are_row_numbers, read_embeddings
from xcompat.vectors.checks import BAD_SHARE
from xcompat.vectors.formats import stored_at

BLOCK = 128
FEWEST = 40
"""Fewest items to search each other by agreement."""


def load_folders(
    folders: Mapping[str, Place | None],
    evidence: Evidence,
    qrels: Path | None,
    max_bad_share: float,
    reading: Reading = READ_AS_IT_IS,
) -> dict[str, Any]:
    """Read the embeddings of all models.

    Args:
        folders: by role, as in :func:`~xcompat.training.embedding_folders.judged_folders`.
        evidence: result of :func:`~xcompat.training.embedding_folders.choose_evidence`.
        qrels: judgements, if any.
        max_bad_share: maximum share of rows without a usable embedding.
        reading: column names, a file with the old ids, and a source of classes.

    Returns:
        Role -> embeddings.

    Raises:
        XcompatError: a file is damaged, or counts differ.
    """
    given = {role: place for role, place in folders.items() if place is not None}
    if len(evidence.items) == 1:
        return _load_one_kind(given, evidence, max_bad_share, reading)
    paths = {role: place for role, place in given.items() if isinstance(place, Path)}  # others hold a single kind
    if reading.ids is not None:
        raise XcompatError(f"{given['old']} has ids of its own; remove --ids")
    if evidence.kind == "captions":
        loaded: dict[str, Any] = {}
        for role, folder in paths.items():
            loaded[role] = load_embedding_folder(folder, max_bad_share, loaded.get("old"))
        return loaded
    return dict(_load_queries(paths, read_qrels(qrels) if qrels is not None else None, max_bad_share))


def _load_one_kind(
    given: Mapping[str, Place], evidence: Evidence, max_bad_share: float, reading: Reading
) -> dict[str, EmbeddedImages | EmbeddedTexts]:
    """Read items that search each other, of a class or by agreement."""
    (item,) = evidence.items
    rows, ids = _load_items(given, item, max_bad_share, reading)
    is_text = item in ("text", "query")
    if evidence.kind != "classes":
        return dict(_split_items(given, rows, ids, None, TEXT_TO_TEXT if is_text else IMAGE_TO_IMAGE))
    labels = _read_classes(given, ids, item, reading.labels)
    known_N = np.array([label is not None for label in labels])
    if not known_N.all():
        notice(f"{known_N.sum():,} of {len(ids):,} items have a class in {reading.labels}; only these are used")
        rows = {role: copy_rows(rows_ND, np.flatnonzero(known_N)) for role, rows_ND in rows.items()}
        ids = [name for name, label in zip(ids, labels, strict=True) if label is not None]
    classes = [label for label in labels if label is not None]
    if is_text:
        return dict(_split_items(given, rows, ids, classes, TEXT_TO_TEXT))
    return {
        role: EmbeddedImages(*_identify(place), rows[role], rows[role], ids, ids, classes, classes)
        for role, place in given.items()
    }


def load_embedding_folder(folder: Path, max_bad_share: float = BAD_SHARE, like: EmbeddedPairs | None = None) -> EmbeddedPairs:
    """Read embeddings with ids.

    Args:
        folder: see :func:`~xcompat.training.evaluate_command.evaluate_embeddings`.
        max_bad_share: see :func:`~xcompat.training.evaluate_command.evaluate_embeddings`.
        like: old embeddings, for the item order.

    Returns:
        The embeddings, with the folder as fingerprint.

    Raises:
        XcompatError: a file is missing or invalid, or counts differ.
    """
    require_files(folder, ("image", "text"))
    images_ND, image_ids = read_embeddings(folder, "image", max_bad_share, like.image_ids if like is not None else None)
    texts_MD, text_ids = read_embeddings(folder, "text", max_bad_share, like.text_ids if like is not None else None)
    return EmbeddedPairs(*_identify(folder), images_ND, texts_MD, image_ids, text_ids)


def _identify(place: Place) -> tuple[str, Fingerprint]:
    if not isinstance(place, Path):
        return place.stem, Fingerprint.from_string(str(place))
    return place.name, Fingerprint.from_string(str(place.resolve()))


def _load_queries(given: Mapping[str, Path], judgements: Qrels | None, max_bad_share: float) -> dict[str, EmbeddedTexts]:
    """Read queries and texts. Without judgements, the id of a query names its answer."""
    loaded: dict[str, EmbeddedTexts] = {}
    answers: list[str] = []
    for role, folder in given.items():
        has_texts = role != "new_view" or stored_at(folder / "text_embeds") is not None
        like_queries, like_texts = (answers or loaded["old"].query_ids, loaded["old"].text_ids) if loaded else (None, None)
        queries_QD, query_ids = read_embeddings(folder, "query", max_bad_share, like_queries)
        texts_GD, text_ids = (
            read_embeddings(folder, "text", max_bad_share, like_texts) if has_texts else (None, loaded["old"].text_ids)
        )
        if judgements is None:
            answers, query_ids = query_ids, _distinct(query_ids)
            qrels: Qrels = {name: {answer: 1.0} for name, answer in zip(query_ids, answers, strict=True)}
        loaded[role] = EmbeddedTexts(
            *_identify(folder), queries_QD, texts_GD, query_ids, text_ids, qrels if judgements is None else judgements
        )
    return loaded


def _distinct(names: Sequence[str]) -> list[Any]:
    """Return ids with their number among equal ones."""
    seen = Counter[str]()
    numbered = []
    for name in names:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


def _load_items(
    given: Mapping[str, Place], item: str, max_bad_share: float, reading: Reading
) -> tuple[dict[str, Any], list[str]]:
    """Return each model's rows of a single kind of items, and their ids, in the order of the old model."""
    rows: dict[str, Any] = {}
    ids: list[str] | None = None
    for role, place in given.items():
        read = reading if role == "old" else reading._replace(ids=None)
        rows[role], ids = read_embeddings(place, item, max_bad_share, ids, read)
    assert ids is not None
    return rows, ids


def _read_classes(given: Mapping[str, Place], ids: list[str], item: str, source: Path | None) -> Sequence[str | None]:
    """Return the class of each item, from the source or the first folder with classes; None if unknown."""
    if source is not None:
        return read_item_labels(source).of_items(None if are_row_numbers(ids) else ids, len(ids), given["old"])
    folders = {role: place for role, place in given.items() if isinstance(place, Path)}
    role, folder = next((role, folder) for role, folder in folders.items() if (folder / LABELS).is_file())
    labels, names = read_labels(folder / LABELS), ids if role == "old" else read_ids(folder, item)
    if len(labels) != len(names):
        raise XcompatError(f"{folder / LABELS} has {len(labels):,} lines for {len(names):,} {item}s; the counts must be equal")
    class_of = dict(zip(names, labels, strict=True))
    if missing := [name for name in ids if name not in class_of]:
        raise XcompatError(f"{folder / LABELS} has no class for {missing[0]!r}, an item of {given['old']}; add it")
    return [class_of[name] for name in ids]


def _split_items(
    given: Mapping[str, Place], rows: Mapping[str, Any], ids: list[str], labels: list[str] | None, direction: str
) -> dict[str, EmbeddedTexts]:
    """Search for a random part of the items in the others. Relevant are items of a class, or the new model's neighbours."""
    if len(ids) < FEWEST:
        raise XcompatError(
            f"{given['old']} has {len(ids)} items, and at least {FEWEST} are needed to search each other; add items"
        )
    order_N = np.random.default_rng(0).permutation(len(ids))
    n_queries = min(QUERIES, round(HELD_OUT * len(ids)))
    queries_Q, gallery_G = np.sort(order_N[:n_queries]), np.sort(order_N[n_queries:])
    query_ids, gallery_ids = ([ids[row] for row in part.tolist()] for part in (queries_Q, gallery_G))
    if labels is not None:
        of_class: dict[str, dict[str, float]] = {}
        for name, row in zip(gallery_ids, gallery_G.tolist(), strict=True):
            of_class.setdefault(labels[row], {})[name] = 1.0
        qrels: Qrels = {ids[row]: of_class[labels[row]] for row in queries_Q.tolist() if labels[row] in of_class}
    else:
        own_ND = rows["new"]
        near_QK = find_nearest(own_ND[queries_Q], own_ND[gallery_G], NEIGHBOURS)
        qrels = {
            name: {gallery_ids[place]: 1.0 for place in near_K}
            for name, near_K, row in zip(query_ids, near_QK.tolist(), queries_Q.tolist(), strict=True)
            if np.isfinite(own_ND[row]).all()
        }
    return {
        role: EmbeddedTexts(
            *_identify(folder), rows[role][queries_Q], rows[role][gallery_G], query_ids, gallery_ids, qrels, direction
        )
        for role, folder in given.items()
    }


def find_nearest(queries_QD: NDArray[Any], gallery_GD: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the gallery rows with the highest cosines (Q, K) to each query. Rows of NaN are never found.

    Example:
        >>> find_nearest(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0], [1.0, 0.1], [np.nan, np.nan]]), 1).tolist()
        [[1]]
    """
    gallery_GD = normalise_rows(np.asarray(gallery_GD, np.float32))
    parts = []
    for start in range(0, len(queries_QD), BLOCK):
        scores_BG = normalise_rows(np.asarray(queries_QD[start : start + BLOCK], np.float32)) @ gallery_GD.T
        parts.append(np.argpartition(-np.nan_to_num(scores_BG, nan=-np.inf), count - 1, axis=1)[:, :count])
    return np.concatenate(parts)
