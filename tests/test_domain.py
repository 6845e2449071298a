"""Pairs from another domain than the gallery draw a warning; samples of the gallery do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from xcompat import Fingerprint, XcompatError
from xcompat.cli import app
from xcompat.mapping import fit_map, load_paired
from xcompat.mapping.domain import FAR, describe_shift, measure_shift, read_gallery_vectors
from xcompat.retrieval import Gallery

EMBEDDINGS = Path(__file__).resolve().parents[2] / "shared" / "data" / "text" / "embeddings"
needs_embeddings = pytest.mark.skipif(not EMBEDDINGS.is_dir(), reason="needs ../shared/data/text/embeddings")


def draw_vectors(seed: int, count: int, offset: float = 0.0, dim: int = 16) -> np.ndarray:
    """Draw unit vectors around a direction."""
    rows = np.random.default_rng(seed).standard_normal((count, dim)) + 0.5
    rows[:, : dim // 2] += offset
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@needs_embeddings
@pytest.mark.parametrize("model", ["wordllama", "paraphrase-minilm-l3", "all-minilm-l6"])
def test_texts_of_another_domain_are_told_from_samples(model: str) -> None:
    gallery, cranfield, generic = (
        np.load(EMBEDDINGS / model / f"{name}.npy").astype(np.float32) for name in ("scifact_docs", "cranfield_docs", "generic")
    )
    cranfield = cranfield[cranfield.any(1)]
    rows = np.random.default_rng(0).permutation(len(gallery))
    assert all(abs(measure_shift(gallery[rows[:count]], gallery)) < 0.01 for count in (50, 500, 2000))
    assert all(measure_shift(pairs, gallery) > 2 * FAR for pairs in (generic, cranfield))


@given(st.integers(0, 1000), st.integers(30, 300))
def test_random_samples_draw_no_warning(seed: int, count: int) -> None:
    gallery = draw_vectors(seed, 1000)
    sample = gallery[np.random.default_rng(seed).permutation(1000)[:count]]
    assert describe_shift(sample, gallery, "g") == ()


def test_shift_is_the_distance_of_the_means_over_the_variance() -> None:
    pairs, gallery = draw_vectors(0, 300, offset=2.0), draw_vectors(1, 200)
    distance = sum((pairs[:, column].mean() - gallery[:, column].mean()) ** 2 for column in range(16))
    variance = sum(gallery[:, column].var() for column in range(16))
    assert measure_shift(pairs, gallery) == pytest.approx(distance / variance - 1 / 300 - 1 / 200, rel=1e-4)


def test_map_warns_of_a_gallery_unlike_the_pairs(tmp_path: Path) -> None:
    old = Fingerprint.from_string("old")
    with Gallery.create(tmp_path / "gallery", old, dim=16) as gallery:
        gallery.add(draw_vectors(5, 400, offset=3.0), [f"g{row}" for row in range(400)])
        gallery.commit()
    vectors, total = read_gallery_vectors(tmp_path / "gallery")
    assert vectors.shape == (400, 16) and total == 400
    np.save(tmp_path / "old.npy", draw_vectors(1, 300))
    np.save(tmp_path / "new.npy", draw_vectors(1, 300))
    command = ["map", "--old", tmp_path / "old.npy", "--new", tmp_path / "new.npy", "--out", tmp_path / "map", "--allow-worse"]
    runs = {
        name: CliRunner().invoke(app, [*map(str, command), "--overwrite", "--gallery", str(tmp_path / name)])
        for name in ("gallery", "old.npy")
    }
    assert [run.exit_code for run in runs.values()] == [0, 0]
    assert "! The pairs are unlike the vectors of" in runs["gallery"].output
    assert "unlike" not in runs["old.npy"].output
    said = json.loads((tmp_path / "map" / "report.json").read_text())["said"]
    assert not any("unlike" in line for line in said), "the last run compared the pairs with themselves"


def test_fit_map_warns_of_a_gallery_unlike_the_pairs(caplog: pytest.LogCaptureFixture) -> None:
    pairs = draw_vectors(1, 300)
    fit_map(pairs, pairs, gallery=pairs[:200])
    assert not caplog.messages
    fit_map(pairs, pairs, gallery=draw_vectors(2, 200, offset=3.0))
    assert any("pairs are unlike the vectors of the gallery" in line for line in caplog.messages)
    with pytest.raises(XcompatError, match="8 dimensions, and the old embeddings have 16"):
        fit_map(pairs, pairs, gallery=draw_vectors(2, 200, dim=8))


def test_a_biased_part_of_the_stored_vectors_is_noticed(tmp_path: Path) -> None:
    vectors = np.concatenate([draw_vectors(1, 300), draw_vectors(2, 900, offset=3.0)])
    for side, count in (("old", 1200), ("new", 300)):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "text_embeds.npy", vectors[:count])
        (tmp_path / side / "text_ids.txt").write_text("".join(f"t{row}\n" for row in range(count)))
    assert any("unlike the vectors of" in note for note in load_paired(tmp_path / "old", tmp_path / "new").notes)
