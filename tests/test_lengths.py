"""Very long and very short vectors: only their direction counts, in galleries, maps, memories, metrics and reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from xcompat import Fingerprint, ProcrustesConfig, ProcrustesModel, XcompatError
from xcompat.core.arrays import normalise_rows, row_lengths
from xcompat.models import describe_old
from xcompat.models.memory_contents import ClassStatistics
from xcompat.report.tsne import _tsne
from xcompat.retrieval import Gallery

LENGTHS = [1e-22, 1e-30, 1e22, 1e30]
OLD = Fingerprint.from_string("old")


def draw_unit(count: int, dim: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def scale_half(rows: np.ndarray, length: float) -> np.ndarray:
    scaled = rows.astype(np.float32)
    scaled[::2] *= np.float32(length)
    return scaled


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_any_length_keep_their_direction(length: float) -> None:
    unit = draw_unit(50, 16, 0)
    np.testing.assert_allclose(normalise_rows(scale_half(unit, length)), unit, atol=1e-6)
    np.testing.assert_allclose(row_lengths(unit * length), length)


@pytest.mark.parametrize("length", LENGTHS)
def test_galleries_score_cosines_whatever_the_length(length: float, tmp_path: Path) -> None:
    stored, queries = draw_unit(200, 16, 0), draw_unit(300, 16, 1)
    with Gallery.create(tmp_path / "gallery", OLD, 16) as gallery:
        gallery.add(scale_half(stored, length), [str(row) for row in range(200)])
        gallery.commit()
        hits = gallery.search(scale_half(queries, length), OLD, top_k=1)
    cosines = queries @ stored.T
    assert [int(found[0].id) for found in hits] == cosines.argmax(1).tolist()
    np.testing.assert_allclose([found[0].score for found in hits], cosines.max(1), atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_maps_take_queries_of_any_length(length: float, tmp_path: Path) -> None:
    new, old = draw_unit(300, 24, 0), draw_unit(300, 16, 1) + 0.3  # a mean that the map's bias carries
    old /= np.linalg.norm(old, axis=1, keepdims=True)
    config = ProcrustesConfig(old=describe_old(OLD, dim=16), embedding_dim=24)
    pairs = torch.from_numpy(new).float(), torch.from_numpy(old).float()
    model = ProcrustesModel(config).fit([pairs])
    with Gallery.create(tmp_path / "gallery", OLD, 16) as gallery:
        gallery.add(old, [str(row) for row in range(300)])
        gallery.commit()
        expected, found = (gallery.search(rows, model, top_k=3) for rows in (new, scale_half(new, length)))
        with pytest.raises(XcompatError, match="query 1 is not finite"):
            gallery.search(np.stack([new[0], 0 * new[0]]), model)
    assert [[hit.id for hit in each] for each in found] == [[hit.id for hit in each] for each in expected]


def test_too_long_vectors_are_named_where_length_counts(tmp_path: Path) -> None:
    said = r"'b' is too long \(length 2e\+30\) to be compared by ip"
    with Gallery.create(tmp_path / "gallery", OLD, 4, metric="ip") as gallery, pytest.raises(XcompatError, match=said):
        gallery.add(np.array([[1, 0, 0, 0], [1e30] * 4], np.float32), ["a", "b"])


@pytest.mark.parametrize("length", LENGTHS)
def test_memories_learn_directions(length: float) -> None:
    rows, labels = draw_unit(60, 8, 0), np.arange(60) % 3
    one, other = (ClassStatistics.compute(each, labels, 3) for each in (rows, scale_half(rows, length)))
    torch.testing.assert_close(one.means_Cd, other.means_Cd, atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_report_draws_rows_of_any_length(length: float) -> None:
    assert np.isfinite(_tsne(scale_half(draw_unit(20, 8, 0), length), 0)).all()
