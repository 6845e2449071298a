"""xcompat's own galleries as stores: several versions, conditions as they are typed, and no migration but their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from store_places import OLD
from typer.testing import CliRunner

import xcompat.stores
from xcompat import XcompatError
from xcompat.cli import app
from xcompat.methods import RidgeModel
from xcompat.models import describe_old
from xcompat.retrieval import Gallery
from xcompat.stores import Store

N, DIM = 40, 8


@pytest.fixture
def model() -> RidgeModel:
    """A model whose queries search OLD's embeddings."""
    config = RidgeModel.config_class(old=describe_old(OLD, DIM), embedding_dim=DIM)
    pairs = torch.nn.functional.normalize(torch.randn(2, 50, DIM, generator=torch.Generator().manual_seed(0)), dim=2)
    return RidgeModel(config).fit([(pairs[0], pairs[1])]).eval()


@pytest.fixture
def gallery(tmp_path: Path, model: RidgeModel) -> Gallery:
    """Half of the items are OLD's, half the model's."""
    vectors = np.random.default_rng(0).standard_normal((N, DIM)).astype(np.float32)
    made = Gallery.create(tmp_path / "a gallery", OLD, dim=DIM)
    made.add(vectors[: N // 2], [f"old {row}" for row in range(N // 2)], [{"price": row % 10} for row in range(N // 2)])
    made.add(vectors[N // 2 :], [f"new {row}" for row in range(N // 2)], version=model)
    made.commit()
    return made


@pytest.fixture
def store(gallery: Gallery) -> Store:
    return xcompat.stores.open(f"file://{str(gallery.path).replace(' ', '%20')}")


def test_each_version_is_a_space_and_the_newest_is_searched(store: Store, gallery: Gallery, model: RidgeModel) -> None:
    old, new = gallery.versions
    dims = {str(old): DIM, str(new): store.spaces()[str(new)].dim}
    assert store.describe() == {"rows": N, "dim": dims[str(new)], "metric": "cosine", "spaces": dims, "fingerprint": new.digest}
    assert [store.count(name) for name in dims] == [N // 2, N // 2]
    query = np.random.default_rng(1).standard_normal((3, DIM)).astype(np.float32)
    assert {hit.id for hit in store.search(query, top_k=N, space=str(old))[0]} == {f"old {row}" for row in range(N // 2)}
    assert store.find(query, model, top_k=N) == gallery.search(query, model, top_k=N)
    rows = list(store.rows(15, space=str(old), content="price"))
    assert [row for block in rows for row in block.contents or ()] == [row % 10 for row in range(N // 2)]


def test_a_condition_is_that_of_where(store: Store, gallery: Gallery, model: RidgeModel) -> None:
    query = np.ones((1, DIM), np.float32)
    typed = store.find(query, model, N, "price=3")
    assert typed == store.find(query, model, N, {"price": 3}) and {hit.id for hit in typed[0]} == {"old 3", "old 13"}


@pytest.mark.parametrize("verb", ["plan", "start", "status", "verify", "switch", "rollback", "finish"])
def test_no_verb_of_migrate_is_for_galleries(gallery: Gallery, model: RidgeModel, tmp_path: Path, verb: str) -> None:
    model.config.direction, model.maps_galleries = "old_to_new", True
    model.save_pretrained(tmp_path / "map")
    given = ["--model", str(tmp_path / "map")] if verb in ("plan", "start", "verify", "switch") else []
    result = CliRunner().invoke(app, ["migrate", verb, f"file://{gallery.path}", *given])
    assert isinstance(result.exception, XcompatError) and "\n" not in str(result.exception)
    assert f"xcompat gallery upgrade {gallery.path} --model RUN" in str(result.exception)
    assert Gallery.open(gallery.path).generation == gallery.generation


def test_what_is_no_gallery_is_refused(tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="is not a gallery"):
        xcompat.stores.open(f"file://{tmp_path}")
    with pytest.raises(XcompatError, match="is not an absolute path"):
        xcompat.stores.open("file://here/gallery")
