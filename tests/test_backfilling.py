"""Backfills: a random order that stays the same, budgets that go on where the last one stopped, kills that change nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import datasets as hf
import numpy as np
import pytest
from conftest import write_photos
from torch import Tensor

from xcompat import Fingerprint
from xcompat.data.schema import ID
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, ingestion, originals
from xcompat.retrieval.backfilling import Backfill, remaining_rows
from xcompat.retrieval.ingestion import ingest
from xcompat.retrieval.originals import Texts, load_originals

ITEMS = 30
OLD, NEW = Fingerprint.from_string("old"), Fingerprint.from_string("new")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("images") / "photos", ITEMS)


@pytest.fixture
def gallery(tmp_path: Path, photos: Path, old_folder: str) -> Gallery:
    """Return a gallery of the old model."""
    embedder = load_embedder(old_folder)
    made = Gallery.create(tmp_path / "gallery", embedder)
    ingest(made, load_originals(photos), embedder)
    return made


@pytest.fixture(scope="module")
def newer(compatible_folder: str) -> Embedder:
    return load_embedder(compatible_folder)


def embedded_anew(gallery: Gallery, newer: Embedder) -> list[str]:
    """Return what the newer model embedded, in the order in which it was stored."""
    digest = newer.fingerprint.digest
    parts = [items.ids for each in gallery.segments if each.record.version == digest for _, items in each.blocks(1000)]
    return [name for part in parts for name in part]


def test_budgets_go_on_in_one_order(gallery: Gallery, photos: Path, newer: Embedder) -> None:
    order = [f"{row:02}.png" for row in remaining_rows(gallery, load_originals(photos), newer)]
    assert sorted(order) != order and sorted(order) == [f"{row:02}.png" for row in range(ITEMS)]
    for budget, done in ((7, 7), (5, 12), (ITEMS, ITEMS)):
        added = Backfill(gallery, load_originals(photos), newer, budget).run()
        assert embedded_anew(gallery, newer) == order[:done]
        assert added.unreadable == 0 and len(gallery) == ITEMS
    assert Backfill(gallery, load_originals(photos), newer).items == 0


def test_a_backfill_that_was_killed_ends_as_one_run_does(
    gallery: Gallery, photos: Path, newer: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "COMMIT_EVERY", -1.0)
    monkeypatch.setattr(originals, "IMAGES_AT_ONCE", 1)
    monkeypatch.setattr(originals, "images_per_batch", lambda *_: 4)
    plan, embed, calls = Backfill(gallery, load_originals(photos), newer, 20), newer.embed, []

    def dies_after(batch: dict[str, Tensor]) -> Tensor:
        calls.append(batch)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return embed(batch)

    order = [f"{row:02}.png" for row in plan.remaining]
    monkeypatch.setattr(newer, "embed", dies_after)
    with pytest.raises(KeyboardInterrupt):
        plan.run()
    gallery.close()
    monkeypatch.setattr(newer, "embed", embed)
    seen = Gallery.open(gallery.path)
    assert embedded_anew(seen, newer) == order[:12] and len(seen) == ITEMS
    assert Backfill(seen, load_originals(photos), newer, 8).run().added == 8
    assert embedded_anew(seen, newer) == order[:20] and seen.damage() == []


def test_the_order_depends_on_ids_alone_and_is_like_the_whole_at_every_point(tmp_path: Path) -> None:
    ids = [f"class {label}/{number}.png" for label in range(10) for number in range(200)]
    gallery = Gallery.create(tmp_path / "gallery", OLD, dim=2)
    gallery.add(np.random.default_rng(0).normal(size=(len(ids), 2)), ids)
    gallery.commit()
    model = cast("Any", SimpleNamespace(fingerprint=NEW))
    order = [ids[row] for row in remaining_rows(gallery, Texts(hf.Dataset.from_dict({ID: ids})), model)]
    shuffled = np.random.default_rng(1).permutation(ids).tolist()
    assert [shuffled[row] for row in remaining_rows(gallery, Texts(hf.Dataset.from_dict({ID: shuffled})), model)] == order
    some = sorted([*ids[::3], "not there.png"])
    assert [some[row] for row in remaining_rows(gallery, Texts(hf.Dataset.from_dict({ID: some})), model)] == [
        name for name in order if name in set(some)
    ]
    for done in (500, 1000, 1500):  # of each of ten classes a tenth, give or take five standard deviations
        counts = Counter(name.split("/")[0] for name in order[:done])
        deviation = (done * 0.1 * 0.9 * (1 - done / len(ids))) ** 0.5
        assert all(abs(counts[f"class {label}"] - done / 10) < 5 * deviation for label in range(10))
