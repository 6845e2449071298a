"""Galleries of several versions: which queries fit, in which view, how their scores are merged, and how galleries move on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import store

from xcompat import Fingerprint, FingerprintMismatchError, XcompatError
from xcompat.methods import FctConfig, FctModel, OcaModel, ProcrustesConfig, ProcrustesModel, RidgeConfig, RidgeModel
from xcompat.models import CompatModel
from xcompat.models.config import describe_old
from xcompat.retrieval import Gallery
from xcompat.retrieval.items import check_items
from xcompat.retrieval.searching import Candidates, merge_candidates
from xcompat.retrieval.upgrading import plan_upgrade
from xcompat.retrieval.versions import stored_version

OLD = Fingerprint.from_string("old")
D, d, N = 12, 8, 200


def unit(count: int, dim: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def numbered(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def old_gallery(folder: Path, count: int = N, **options: Any) -> Gallery:
    about = [{"n": number} for number in range(count)]
    return store(Gallery.create(folder, OLD, dim=d, **options), unit(count, d, 0), numbered(count), about)


def query_map() -> ProcrustesModel:
    """Return a map of new queries into the old space."""
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, d), embedding_dim=D))
    return model.fit([(torch.from_numpy(unit(300, D, 1)), torch.from_numpy(unit(300, d, 2)))]).eval()


def gallery_map(**options: Any) -> FctModel:
    """Return a map of old galleries into the new space."""
    torch.manual_seed(0)
    return FctModel(FctConfig(old=describe_old(OLD, d), embedding_dim=D, **options)).eval()


def ids(hits: list[list[Any]]) -> list[list[str]]:
    return [[hit.id for hit in found] for found in hits]


def test_new_items_of_a_map_are_stored_in_the_space_of_the_old_ones(tmp_path: Path) -> None:
    gallery, model = old_gallery(tmp_path / "g"), query_map()
    store(gallery, unit(50, D, 4), numbered(50, "new "), version=model)
    assert gallery.counts() == {OLD: N, model.stored_fingerprint(): 50}
    hits = gallery.search(unit(50, D, 4)[[7]], model, top_k=N + 50, merge="raw")[0]
    assert hits[0].id == "new 7" and hits[0].version == model.stored_fingerprint() and len(hits) == N + 50
    assert {hit.version for hit in hits} == {OLD, model.stored_fingerprint()}
    view = model.to_space(torch.from_numpy(unit(50, D, 4)[[7]])).detach().numpy()
    assert ids(gallery.search(view, OLD, top_k=9, merge="raw")) == [[hit.id for hit in hits[:9]]], "old clients find them too"


def test_an_expanded_model_is_compared_by_its_first_dimensions(folder_of: dict[str, str], tmp_path: Path) -> None:
    gallery = old_gallery(tmp_path / "g")
    model = OcaModel.from_encoder(folder_of["clip"], old=describe_old(OLD, d), classes=["a", "b"], extra_dim=4).for_inference()
    assert model.stored_dim == d + 4
    own = unit(30, d + 4, 5)
    store(gallery, own, numbered(30, "new "), version=model)
    queries = unit(3, d + 4, 6)
    hits = gallery.search(queries, model, top_k=N + 30, merge="raw")
    cut = queries[:, :d] / np.linalg.norm(queries[:, :d], axis=1, keepdims=True)
    for query, found in enumerate(hits):
        scores = {hit.id: hit.score for hit in found}
        np.testing.assert_allclose([scores[str(row)] for row in range(N)], unit(N, d, 0) @ cut[query], atol=1e-5)
        np.testing.assert_allclose([scores[f"new {row}"] for row in range(30)], own @ queries[query], atol=1e-5)
    with pytest.raises(FingerprintMismatchError, match="cannot be compared with the"):
        gallery.search(unit(1, d, 1), OLD)


OTHER = Fingerprint.from_string("other")
REFUSED = "no single model could search embeddings of other@.* and the old@"


@pytest.mark.parametrize("count", [1, N - 1])
def test_replacing_a_part_by_a_foreign_model_is_refused(count: int, tmp_path: Path) -> None:
    gallery, names = old_gallery(tmp_path / "g"), numbered(N)
    gallery.add(unit(count, D, 4), names[:count], version=OTHER, replace=True)
    with pytest.raises(FingerprintMismatchError, match=REFUSED):
        gallery.commit()
    assert Gallery.open(gallery.path).counts() == {OLD: N}
    gallery.add(unit(N - count, D, 5), names[count:], version=OTHER, replace=True)
    assert gallery.commit() == 2 and gallery.counts() == {OTHER: N} and gallery.damage() == []
    hits = gallery.search(unit(count, D, 4)[:1], OTHER, top_k=1)
    assert ids(hits) == [["0"]]
    gallery.rollback()
    assert gallery.counts() == {OLD: N}


def solved_gallery_map() -> RidgeModel:
    """Return a solved map of old galleries into the new space."""
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, d), embedding_dim=D, direction="old_to_new"))
    return model.fit([(torch.from_numpy(unit(300, D, 1)), torch.from_numpy(unit(300, d, 2)))]).eval()


@pytest.mark.parametrize("made", [gallery_map, solved_gallery_map])
def test_an_upgrade_maps_every_embedding_and_can_be_undone(made: Callable[[], CompatModel], tmp_path: Path) -> None:
    gallery, model = old_gallery(tmp_path / "g"), made()
    gallery.remove(["5"])
    gallery.commit()
    queries = unit(4, D, 3)
    with pytest.raises(FingerprintMismatchError, match="this model maps galleries of old@.*run `xcompat gallery upgrade`"):
        gallery.search(queries, model)
    assert gallery.upgrade(model, batch_size=64) == N - 1 == len(gallery)
    mapped = model.upgrade(torch.from_numpy(unit(N, d, 0))).detach().numpy()
    kept = [row for row in range(N) if row != 5]
    best = [str(kept[row]) for row in np.argmax(queries @ mapped[kept].T, axis=1)]
    hits = gallery.search(queries, model, top_k=1)
    assert [found[0].id for found in hits] == best and hits[0][0].metadata == {"n": int(best[0])}
    assert gallery.versions == [model.fingerprint().derive("upgrade")] and gallery.damage() == []
    with pytest.raises(FingerprintMismatchError):
        gallery.search(unit(1, d, 0), OLD)
    gallery.rollback(1)
    assert gallery.versions == [OLD] and ids(gallery.search(unit(N, d, 0)[[5]], OLD, top_k=1)) == [["5"]]


def test_adopted_embeddings_that_were_never_normalised_are_mapped_as_the_old_model_makes_them(tmp_path: Path) -> None:
    import faiss

    index = faiss.IndexFlatL2(d)
    index.add(unit(N, d, 0) * np.random.default_rng(1).uniform(5, 9, (N, 1)).astype(np.float32))
    faiss.write_index(index, str(tmp_path / "own.faiss"))
    gallery, model = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", numbered(N), OLD), gallery_map()
    gallery.upgrade(model)
    expected = model.upgrade(torch.from_numpy(unit(N, d, 0))).detach().numpy()
    np.testing.assert_allclose(gallery.segments[0].vectors(np.arange(N)), expected, atol=1e-5)


def test_an_upgrade_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery, model = old_gallery(tmp_path / "g"), gallery_map()
    store(gallery, unit(N, d, 1), [f"b{number}" for number in range(N)])
    mapped: list[int] = []
    original = FctModel.upgrade

    def counting(self: FctModel, embeds: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        if len(mapped) == 5:
            raise KeyboardInterrupt
        mapped.append(len(embeds))
        return original(self, embeds, side)

    monkeypatch.setattr("xcompat.retrieval.staging.FLUSH_BYTES", 50 * D * 4)
    monkeypatch.setattr(FctModel, "upgrade", counting)
    with pytest.raises(KeyboardInterrupt):
        gallery.upgrade(model, batch_size=50)
    assert mapped == [50] * 5 and Gallery.open(gallery.path).versions == [OLD]
    mapped.clear()
    with Gallery.open(gallery.path) as idle:
        idle.staging()  # a writer who changes nothing tidies up, and leaves it
    monkeypatch.setattr(
        FctModel, "upgrade", lambda self, embeds, side=None: mapped.append(len(embeds)) or original(self, embeds, side)
    )
    again = Gallery.open(gallery.path)
    assert again.upgrade(model, batch_size=50) == 2 * N
    assert mapped == [50] * 3 and len(again) == 2 * N and again.damage() == []
    expected = original(model, torch.from_numpy(np.concatenate([unit(N, d, 0), unit(N, d, 1)]))).detach().numpy()
    stored = np.concatenate([segment.vectors(np.arange(0, len(segment))) for segment in again.segments])
    np.testing.assert_allclose(stored, expected, atol=1e-6)
    assert not list(again.path.glob("upgrade-*.json"))


def test_a_resumed_upgrade_does_not_revive_what_was_removed_meanwhile(
    tmp_path: Path, interrupt_upgrade: Callable[[Gallery, CompatModel, int], None]
) -> None:
    gallery, model = old_gallery(tmp_path / "g"), gallery_map()
    interrupt_upgrade(gallery, model, 2)
    again = Gallery.open(gallery.path)
    again.remove(["5"])  # its block was mapped before the kill
    again.commit()
    again.upgrade(model, batch_size=50)
    assert len(again) == N - 1 and "5" not in {row for segment in again.segments for row in segment.ids(segment.present())}


def test_what_newer_models_stored_in_the_old_space_is_mapped_with_it(tmp_path: Path) -> None:
    gallery, queries, newer = old_gallery(tmp_path / "g"), query_map(), gallery_map()
    store(gallery, unit(50, D, 4), numbered(50, "new "), version=queries)
    assert plan_upgrade(gallery, newer).items == gallery.upgrade(newer) == N + 50 == len(gallery)
    assert gallery.versions == [newer.fingerprint().derive("upgrade")]
    stored = queries.to_space(torch.from_numpy(unit(50, D, 4)))
    with torch.inference_mode():
        own = newer.upgrade(stored).numpy()
    assert ids(gallery.search(own[[7]], newer, top_k=1)) == [["new 7"]]


def test_a_mapped_gallery_is_one_of_the_new_encoder_which_a_later_map_maps_again(tmp_path: Path) -> None:
    encoder, side, new_side = (Fingerprint.from_string(name) for name in ("encoder", "side", "new side"))
    sides = {"side_info": describe_old(side, 3), "new_side_info": describe_old(new_side, 5)}
    first = gallery_map(encoder=describe_old(encoder, D), **sides)
    second = FctModel(FctConfig(old=describe_old(encoder, D), embedding_dim=6, side_info=describe_old(new_side, 5))).eval()
    gallery = store(
        Gallery.create(tmp_path / "g", OLD, dim=d),
        unit(20, d, 0),
        numbered(20),
        side_info_NS=unit(20, 3, 1),
        side_info_by=side,
    )
    with pytest.raises(FingerprintMismatchError, match="maps embeddings of encoder@.*; this gallery holds old@"):
        gallery.upgrade(second)
    gallery.upgrade(first)
    queries = unit(4, D, 7)
    assert ids(gallery.search(queries, encoder, top_k=5)) == ids(gallery.search(queries, first, top_k=5))
    store(gallery, unit(5, D, 8), list("abcde"), version=encoder, side_info_NS=unit(5, 5, 9), side_info_by=new_side)
    assert gallery.upgrade(second) == 25
    old, psi = torch.from_numpy(unit(20, d, 0)), torch.from_numpy(unit(20, 3, 1))
    with torch.inference_mode():
        hop = torch.nn.functional.normalize(first.upgrade(old, psi), dim=-1)
        twice = second.upgrade(hop, first.upgrade_side(old, psi)).numpy()
        own = second.upgrade(torch.from_numpy(unit(5, D, 8)), torch.from_numpy(unit(5, 5, 9))).numpy()
    for mapped, expected in ((twice, numbered(20)), (own, list("abcde"))):
        assert [found[0] for found in ids(gallery.search(mapped, second, top_k=1))] == expected


def test_an_upgrade_that_no_one_model_could_search_after_is_refused(tmp_path: Path) -> None:
    gallery = old_gallery(tmp_path / "g")
    record = stored_version(Fingerprint.from_string("stranger"), D)
    gallery.staging().add(record, check_items(unit(5, D, 4), list("abcde"), None, None, "cosine"), replace=False)  # unchecked
    gallery.commit()
    for refused in (plan_upgrade, Gallery.upgrade):
        with pytest.raises(FingerprintMismatchError, match="can neither map nor search the stranger@.* only those of old@"):
            refused(gallery, gallery_map())
    assert gallery.generation == 2 and gallery.damage() == []


def test_what_cannot_be_upgraded_is_refused(tmp_path: Path) -> None:
    gallery = old_gallery(tmp_path / "g")
    with pytest.raises(XcompatError, match="maps queries, not galleries: its queries search this gallery as it is"):
        gallery.upgrade(query_map())
    other = store(
        Gallery.create(tmp_path / "other", Fingerprint.from_string("someone else"), dim=d), unit(3, d, 0), ["a", "b", "c"]
    )
    with pytest.raises(FingerprintMismatchError, match="maps embeddings of old@.*this gallery holds someone else@"):
        other.upgrade(gallery_map())
    plan = plan_upgrade(gallery, gallery_map())
    assert plan.items == N and plan.nbytes == N * D * 4 and gallery.versions == [OLD]


@pytest.mark.parametrize(("factory", "wrapped"), [("Flat", True), ("IVF4,Flat", False), ("HNSW8", False)])
def test_a_faiss_index_is_adopted_where_it_is(factory: str, wrapped: bool, tmp_path: Path) -> None:
    import faiss

    index = faiss.index_factory(d, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(unit(N, d, 0))
    if wrapped:
        index = faiss.IndexIDMap(index)
        index.add_with_ids(unit(N, d, 0), np.arange(1000, 1000 + N))
    else:
        index.add(unit(N, d, 0))
    faiss.write_index(index, str(tmp_path / "own.faiss"))
    before = (tmp_path / "own.faiss").read_bytes()
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", [f"i{number}" for number in range(N)], OLD)
    assert gallery.metric == "cosine" and len(gallery) == N
    assert sum(path.stat().st_size for path in (tmp_path / "g").rglob("*") if path.is_file()) < len(before) + 20_000
    assert ids(gallery.search(unit(N, d, 0)[[9]], OLD, top_k=1)) == [["i9"]]
    gallery.add(unit(3, d, 7), ["x", "y", "z"])
    gallery.remove(["i9"])
    gallery.commit()
    assert gallery.find(["i9", "x"]) == [None, OLD]
    assert gallery.upgrade(gallery_map()) == N + 2 and (tmp_path / "own.faiss").read_bytes() == before
    gallery.rollback(1)
    (tmp_path / "own.faiss").write_bytes(before[:-5])
    assert any("own.faiss" in line for line in Gallery.open(tmp_path / "g").damage())


def test_an_index_that_does_not_fit_is_not_adopted(tmp_path: Path) -> None:
    import faiss

    index = faiss.IndexFlatL2(d)
    index.add(unit(5, d, 0))
    faiss.write_index(index, str(tmp_path / "own.faiss"))
    five = numbered(5)
    with pytest.raises(XcompatError, match="holds 5 vectors, but there are 4 ids"):
        Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", five[:4], OLD)
    with pytest.raises(XcompatError, match="is given twice"):
        Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", [*five[:4], "0"], OLD)
    (tmp_path / "text.faiss").write_text("no index")
    with pytest.raises(XcompatError, match="is not a readable faiss index"):
        Gallery.from_faiss(tmp_path / "g", tmp_path / "text.faiss", five, OLD)
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", five, OLD)
    assert gallery.metric == "l2" and ids(gallery.search(unit(5, d, 0)[[2]], OLD, top_k=1)) == [["2"]]


@pytest.mark.parametrize("count", [1, 2, 20, 64])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_first_items_of_a_new_model_are_found(count: int, metric: str, tmp_path: Path) -> None:
    gallery, dim = Gallery.create(tmp_path / "g", OLD, dim=32, metric=metric), 64
    gallery.add(unit(2000, 32, 0), numbered(2000))
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, 32), embedding_dim=dim))
    model.fit([(torch.from_numpy(unit(300, dim, 1)), torch.from_numpy(unit(300, 32, 2)))]).eval()
    store(gallery, unit(count, dim, 4), numbered(count, "new "), version=model)
    found = gallery.search(unit(count, dim, 4), model, top_k=1)
    assert ids(found) == [[f"new {number}"] for number in range(count)]


def test_few_scores_lean_towards_those_of_all_versions_and_64_towards_none() -> None:
    generator = np.random.default_rng(0)
    many, rows = generator.normal(0.3, 0.1, (3, 500)).astype(np.float32), np.tile(np.arange(5), (3, 1))
    for count in (1, 16, 63, 64, 100):
        few = generator.normal(0.0, 0.5, (3, count)).astype(np.float32)
        found = [Candidates(few[:, :1], rows[:, :1], rows[:, :1], few), Candidates(many[:, :5], rows + 1, rows, many)]
        ranked, both, own = merge_candidates(found, 6, "standardised"), np.concatenate([few, many], 1), min(count / 64, 1)
        mean, deviation = own * few.mean(1) + (1 - own) * both.mean(1), own * few.std(1) + (1 - own) * both.std(1)
        np.testing.assert_allclose(ranked.keys_Qk[ranked.segments_Qk == 0], (few[:, 0] - mean) / deviation, rtol=1e-5)
        z = (many[:, :5] - many.mean(1, keepdims=True)) / many.std(1, keepdims=True)
        np.testing.assert_allclose(ranked.keys_Qk[ranked.segments_Qk > 0].reshape(3, 5), np.sort(z, axis=1)[:, ::-1], rtol=1e-5)


def test_removed_items_have_no_part_in_the_standing(tmp_path: Path) -> None:
    gallery, model, query = old_gallery(tmp_path / "g"), query_map(), unit(1, D, 3)
    store(gallery, unit(70, D, 4), numbered(70, "new "), version=model)
    gallery.remove([hit.id for hit in gallery.search(query, model, top_k=100, merge="raw")[0] if hit.version == OLD])
    gallery.commit()
    hits = [hit for hit in gallery.search(query, model, top_k=300)[0] if hit.version == OLD]
    scores = np.array([hit.score for hit in hits])
    assert len(hits) > 64
    np.testing.assert_allclose([hit.standing for hit in hits], (scores - scores.mean()) / scores.std(), atol=1e-4)


@pytest.mark.parametrize("merge", ["raw", "standardised", "calibrated"])
def test_one_version_is_ranked_as_it_is(merge: Any, tmp_path: Path) -> None:
    gallery = old_gallery(tmp_path / "g")
    queries = unit(4, d, 3)
    assert ids(gallery.search(queries, OLD, top_k=9, merge=merge)) == ids(gallery.search(queries, OLD, top_k=9, merge="raw"))
