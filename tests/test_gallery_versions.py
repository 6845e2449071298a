"""Galleries of several versions: which queries fit, how scores merge, how galleries move on, and which model made them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from conftest import Run, invoke, refuses, store
from PIL import Image
from rich.console import Console
from schedule import mostly_nightly, mostly_nightly_rows
from scipy.stats import binomtest
from store_places import unit_vectors as unit
from test_index_gallery import write_index

from xcompat import Fingerprint, FingerprintMismatchError
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import METHODS, FctConfig, FctModel, OcaModel
from xcompat.models import CompatModel
from xcompat.models.config import describe_old
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.retrieval import Gallery, commands, doctor
from xcompat.retrieval.canary import check_canary
from xcompat.retrieval.doctor import Finding, examine, wilson
from xcompat.retrieval.items import check_items
from xcompat.retrieval.originals import load_images, load_originals
from xcompat.retrieval.preprocessing import FACTORS, Preparation, own_preparation
from xcompat.retrieval.searching import Candidates, merge_candidates
from xcompat.retrieval.upgrading import plan_upgrade
from xcompat.retrieval.versions import stored_version
from xcompat.serve.site_loading import load_site

OLD = Fingerprint.from_string("old")
D, d, N = 12, 8, 200


def numbered(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def old_gallery(folder: Path, count: int = N, **options: Any) -> Gallery:
    about = [{"n": number} for number in range(count)]
    return store(Gallery.create(folder, OLD, dim=d, **options), unit(count, d, 0), numbered(count), about)


def solved(method: str = "procrustes", old_dim: int = d, dim: int = D, **options: Any) -> Any:
    """Return a map that is solved, of queries into the old space unless told otherwise."""
    model = METHODS[method](METHODS[method].config_class(old=describe_old(OLD, old_dim), embedding_dim=dim, **options))
    return model.fit([(torch.from_numpy(unit(300, dim, 1)), torch.from_numpy(unit(300, old_dim, 2)))]).eval()


def gallery_map(**options: Any) -> FctModel:
    """Return a map of old galleries into the new space."""
    torch.manual_seed(0)
    return FctModel(FctConfig(old=describe_old(OLD, d), embedding_dim=D, **options)).eval()


def ids(hits: list[list[Any]]) -> list[list[str]]:
    return [[hit.id for hit in found] for found in hits]


def test_new_items_of_a_map_are_stored_in_the_space_of_the_old_ones(tmp_path: Path) -> None:
    gallery, model = old_gallery(tmp_path / "g"), solved()
    store(gallery, unit(50, D, 4), numbered(50, "new "), version=model)
    assert gallery.counts() == {OLD: N, model.lineage.stores.fingerprint: 50}
    hits = gallery.search(unit(50, D, 4)[[7]], model, top_k=N + 50, merge="raw")[0]
    assert hits[0].id == "new 7" and hits[0].version == model.lineage.stores.fingerprint and len(hits) == N + 50
    assert {hit.version for hit in hits} == {OLD, model.lineage.stores.fingerprint}
    view = model.to_space(torch.from_numpy(unit(50, D, 4)[[7]])).detach().numpy()
    assert ids(gallery.search(view, OLD, top_k=9, merge="raw")) == [[hit.id for hit in hits[:9]]], "old clients find them too"


def test_an_expanded_model_is_compared_by_its_first_dimensions(folder_of: dict[str, str], tmp_path: Path) -> None:
    gallery = old_gallery(tmp_path / "g")
    model = OcaModel.from_encoder(folder_of["clip"], old=describe_old(OLD, d), classes=["a", "b"], extra_dim=4).for_inference()
    assert model.lineage.stores.dim == d + 4
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


@pytest.mark.parametrize("made", [gallery_map, partial(solved, "ridge", direction="old_to_new")])
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
    long = unit(N, d, 0) * np.random.default_rng(1).uniform(5, 9, (N, 1)).astype(np.float32)
    write_index(tmp_path / "own.faiss", long, metric=faiss.METRIC_L2)
    gallery, model = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", numbered(N), OLD), gallery_map()
    gallery.upgrade(model)
    expected = model.upgrade(torch.from_numpy(unit(N, d, 0))).detach().numpy()
    np.testing.assert_allclose(gallery.segments[0].vectors(np.arange(N)), expected, atol=1e-5)


def test_an_upgrade_that_was_cut_off_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt_upgrade: Callable[[Gallery, CompatModel, int], None]
) -> None:
    gallery, model = old_gallery(tmp_path / "g"), gallery_map()
    store(gallery, unit(N, d, 1), numbered(N, "b"))
    interrupt_upgrade(gallery, model, 5)
    assert Gallery.open(gallery.path).versions == [OLD]
    with Gallery.open(gallery.path) as idle:
        idle.staging()  # a writer who changes nothing tidies up, and leaves it
    mapped: list[int] = []
    original = FctModel.own_upgrade
    monkeypatch.setattr(FctModel, "own_upgrade", lambda self, *rows: mapped.append(len(rows[0])) or original(self, *rows))
    again = Gallery.open(gallery.path)
    assert again.upgrade(model, batch_size=50) == 2 * N
    assert mapped == [50] * 3 and len(again) == 2 * N and again.damage() == []
    expected = model.upgrade(torch.from_numpy(np.concatenate([unit(N, d, 0), unit(N, d, 1)]))).detach().numpy()
    stored = np.concatenate([segment.vectors(np.arange(0, len(segment))) for segment in again.segments])
    np.testing.assert_allclose(stored, expected, atol=1e-6)
    assert not list(again.path.glob("upgrade-*.json"))


def test_resumed_upgrades_revive_nothing(tmp_path: Path, interrupt_upgrade: Callable[[Gallery, CompatModel, int], None]) -> None:
    gallery, model = old_gallery(tmp_path / "g"), gallery_map()
    interrupt_upgrade(gallery, model, 2)
    again = Gallery.open(gallery.path)
    again.remove(["5"])  # its block was mapped before the kill
    again.commit()
    again.upgrade(model, batch_size=50)
    assert len(again) == N - 1 and "5" not in {row for segment in again.segments for row in segment.ids(segment.present())}


def test_what_newer_models_stored_in_the_old_space_is_mapped_with_it(tmp_path: Path) -> None:
    gallery, queries, newer = old_gallery(tmp_path / "g"), solved(), gallery_map()
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
    gallery = Gallery.create(tmp_path / "g", OLD, dim=d)
    store(gallery, unit(20, d, 0), numbered(20), side_info_NS=unit(20, 3, 1), side_info_by=side)
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


def test_what_cannot_be_upgraded_is_refused(tmp_path: Path) -> None:
    gallery = old_gallery(tmp_path / "g")
    refuses("maps queries, not galleries: its queries search this gallery as it is", gallery.upgrade, solved())
    other = Gallery.create(tmp_path / "other", Fingerprint.from_string("someone else"), dim=d)
    store(other, unit(3, d, 0), ["a", "b", "c"])
    with pytest.raises(FingerprintMismatchError, match="maps embeddings of old@.*this gallery holds someone else@"):
        other.upgrade(gallery_map())
    plan = plan_upgrade(gallery, gallery_map())
    assert plan.items == N and plan.nbytes == N * D * 4 and gallery.versions == [OLD]
    record = stored_version(Fingerprint.from_string("stranger"), D)
    gallery.staging().add(record, check_items(unit(5, D, 4), list("abcde"), None, None, "cosine"), replace=False)  # unchecked
    gallery.commit()
    for refused in (plan_upgrade, Gallery.upgrade):
        with pytest.raises(FingerprintMismatchError, match="can neither map nor search the stranger@.* only those of old@"):
            refused(gallery, gallery_map())
    assert gallery.generation == 2 and gallery.damage() == []


@pytest.mark.parametrize("count", [1, 2, 20, 64])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_first_items_of_a_new_model_are_found(count: int, metric: str, tmp_path: Path) -> None:
    gallery, dim = Gallery.create(tmp_path / "g", OLD, dim=32, metric=metric), 64
    gallery.add(unit(2000, 32, 0), numbered(2000))
    model = solved(old_dim=32, dim=dim)
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
    gallery, model, query = old_gallery(tmp_path / "g"), solved(), unit(1, D, 3)
    store(gallery, unit(70, D, 4), numbered(70, "new "), version=model)
    gallery.remove([hit.id for hit in gallery.search(query, model, top_k=100, merge="raw")[0] if hit.version == OLD])
    gallery.commit()
    hits = [hit for hit in gallery.search(query, model, top_k=300)[0] if hit.version == OLD]
    scores = np.array([hit.score for hit in hits])
    assert len(hits) > 64
    np.testing.assert_allclose([hit.standing for hit in hits], (scores - scores.mean()) / scores.std(), atol=1e-4)


ITEMS, NEW_DIM = 90, 12
NEW = unit(ITEMS, NEW_DIM, 0)


def make_old_rows(dim: int) -> np.ndarray:
    rows = NEW @ unit(NEW_DIM, dim, 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make_gallery(here: Path, model: Any, dim: int) -> str:
    return str(store(Gallery.create(here / "my gallery", model, dim=dim), make_old_rows(dim), numbered(ITEMS)).path)


def make_map(here: Path, old_model: str, dim: int) -> str:
    for name, rows in (("old", make_old_rows(dim)), ("new", NEW), ("q", NEW[:4])):
        np.save(here / f"{name}.npy", rows)
    files = ("--old", here / "old.npy", "--new", here / "new.npy", "--out", here / "map")
    invoke("map", *files, "--old-model", old_model, "--allow-worse")
    return str(here / "map")


def search(gallery: str, here: Path, model: str) -> list[str]:
    lines = invoke("gallery", "search", gallery, "--queries", str(here / "q.npy"), "--model", model, "--top-k", "1", "--json")
    return [json.loads(line)["hits"][0]["id"] for line in lines.splitlines()]


@pytest.mark.parametrize("gallery_knows", ["model", "name"])
def test_the_advised_command_makes_a_map_fit(gallery_knows: str, tmp_path: Path, old_folder: str) -> None:
    old = load_embedder(old_folder)
    names = (old_folder, "clip b32")
    known, mapped = names if gallery_knows == "model" else names[::-1]
    gallery = make_gallery(tmp_path, old if gallery_knows == "model" else Fingerprint.from_string(known), old.dim)
    model = make_map(tmp_path, mapped, old.dim)
    line = refuses("gallery alias", search, gallery, tmp_path, model)
    program, *arguments = shlex.split(line.split("`")[1])  # the command between backticks
    assert program == "xcompat"
    invoke(*arguments)
    view = load_checkpoint(f"{model}/model").to_space(torch.from_numpy(NEW[:4].astype(np.float32)))
    expected = [str(row) for row in (view.numpy() @ make_old_rows(old.dim).T).argmax(1)]
    assert search(gallery, tmp_path, model) == expected
    assert search(f"file://{gallery.replace(' ', '%20')}", tmp_path, model) == expected
    assert "alias" in invoke("gallery", "info", gallery)


def test_other_names_are_advised_only_where_they_fit(
    tmp_path: Path, old_folder: str, caplog: pytest.LogCaptureFixture, image_folder_of: dict[str, str]
) -> None:
    old = load_embedder(old_folder)
    for name, digest in (("b32", Fingerprint.from_string("b32").digest), (old_folder, old.fingerprint.digest)):
        caplog.clear()
        (tmp_path / name[-3:]).mkdir()
        folder = make_map(tmp_path / name[-3:], name, old.dim)
        assert json.loads((Path(folder) / "report.json").read_text())["old"]["fingerprint"] == digest
        assert ("xcompat gallery alias GALLERY b32" in caplog.text) == (name == "b32")
    gallery = make_gallery(tmp_path, load_embedder(old_folder), load_embedder(old_folder).dim)
    model = make_map(tmp_path, "b32", 5)
    assert "alias" not in refuses("cannot be compared", search, gallery, tmp_path, model)
    refuses("another model than", invoke, "gallery", "alias", gallery, image_folder_of["resnet"])


COUNT = 100


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write smooth images, wider than high, that a model tells apart."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        rough = np.random.default_rng(number).integers(0, 255, (6, 9, 3), dtype=np.uint8)
        Image.fromarray(rough).resize((72, 48)).save(folder / f"{number}.png")
    return folder


@pytest.fixture(autouse=True)
def _few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SAMPLED", 6)


def embedded(photos: Path, model: Embedder, prepare: Preparation | None = None) -> tuple[list[str], np.ndarray]:
    names = list(load_images(photos)["id"])
    images = [Image.open(photos / name) for name in names]
    return names, model.embed({"pixel_values": (prepare or model.processor.images)(images)}).numpy()


def gallery_of(folder: Path, model: Embedder, names: list[str], vectors: np.ndarray) -> Gallery:
    return store(Gallery.create(folder, model), vectors, names)


def foreign(photos: Path, tmp_path: Path) -> np.ndarray:
    return embedded(photos, load_embedder(save_stand_in(tmp_path / "foreign", "clip", 8, seed=5)))[1]


@pytest.mark.parametrize("planted", mostly_nightly([0, 1, 10, 50], (0, 10).__contains__))
def test_planted_vectors_of_another_model_are_found(planted: int, photos: Path, old: Embedder, tmp_path: Path) -> None:
    names, vectors = embedded(photos, old)
    rows = np.random.default_rng(planted).choice(COUNT, planted, replace=False)
    vectors[rows] = foreign(photos, tmp_path)[rows]
    (finding,) = examine(gallery_of(tmp_path / "g", old, names, vectors), load_originals(photos), old)
    assert set(finding.foreign) == {names[row] for row in rows}
    assert finding.claimed and finding.made == {"": COUNT - planted} and finding.cosine > 0.9999
    assert finding.interval[0] <= planted / COUNT <= finding.interval[1]


def test_zeros_other_models_and_bare_names_are_told_apart(photos: Path, old: Embedder, tmp_path: Path) -> None:
    names, vectors = embedded(photos, old)
    vectors[:3] = 0
    gallery = store(Gallery.create(tmp_path / "g", old, metric="ip"), vectors, names)
    (finding,) = examine(gallery, load_originals(photos), old)
    assert finding.note == "zero vectors: 3" and set(finding.foreign) == set(names[:3])
    (finding,) = examine(gallery_of(tmp_path / "other", old, names, foreign(photos, tmp_path)), load_originals(photos), old)
    assert finding.share == 1 and finding.made == {} and finding.cosine < 0.9
    gallery = store(Gallery.create(tmp_path / "bare", Fingerprint.from_string("our model"), dim=8), *embedded(photos, old)[::-1])
    other = load_embedder(save_stand_in(tmp_path / "other", "clip", 8, seed=9))
    for asked, said, share in ((old, "under another name", 0), (other, "not made by", 1)):
        (finding,) = examine(gallery, load_originals(photos), asked)
        assert not finding.claimed and finding.share == share and said in finding.note


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"filter": "nearest"}, "nearest, not b"),
        ({"shape": "cropped"}, "cropped, not squashed"),
        ({"normalised": 3}, "pixels from 0 to 1, not"),
    ],
)
def test_other_preparation_is_named(changed: dict[str, object], said: str, photos: Path, old: Embedder, tmp_path: Path) -> None:
    images = [Image.open(photos / f"{number}.png") for number in range(9)]
    own = own_preparation(old.processor, images)
    np.testing.assert_allclose(own(images).numpy(), old.processor.images(images).numpy(), atol=0.05)
    way = FACTORS[0](own)[changed["normalised"]] if "normalised" in changed else replace(own, **changed)  # type: ignore[call-overload]
    names, vectors = embedded(photos, old, way)
    vectors[:10] = foreign(photos, tmp_path)[:10]
    (finding,) = examine(gallery_of(tmp_path / "g", old, names, vectors), load_originals(photos), old)
    assert set(finding.foreign) == set(names[:10])
    assert any(said in how for how in finding.made), finding.made


@pytest.mark.parametrize(
    ("factory", "length"),
    mostly_nightly_rows(
        [("SQ8", 1.0), ("SQfp16", 30.0), ("IVF4,SQ8", 30.0), ("HNSW8,SQ8", 1.0), ("IVF4,PQ4x4", 30.0)],
        lambda factory, _: factory in ("SQ8", "IVF4,SQ8"),
    ),
)
def test_quantised_indexes_raise_no_alarm(factory: str, length: float, photos: Path, old: Embedder, tmp_path: Path) -> None:
    names, vectors = embedded(photos, old)
    vectors[:5] = foreign(photos, tmp_path)[:5]
    write_index(tmp_path / "own.faiss", length * vectors, factory, faiss.METRIC_L2)
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", names, old)
    (finding,) = examine(gallery, load_originals(photos), old)
    alarms = set(finding.foreign) - set(names[:5])
    assert not alarms and (len(finding.foreign) == 5 or "PQ" in factory)
    assert finding.length == pytest.approx(length, rel=0.2 if "PQ" in factory else 0.01)


def test_each_version_is_looked_at_by_itself(photos: Path, old: Embedder, tmp_path: Path, folder_of: dict[str, str]) -> None:
    names, vectors = embedded(photos, old)
    gallery = store(Gallery.create(tmp_path / "g", old), vectors[:60], names[:60])
    for name, dim, ids in (("wide", 16, ["a", "b"]), ("elsewhere", 8, ["c", "d"])):  # unchecked, as galleries once were
        items = check_items(np.eye(dim, dtype=np.float32)[:2], ids, None, None, "cosine")
        gallery.staging().add(stored_version(Fingerprint.from_string(name), dim), items, replace=False)
    gallery.commit()
    gallery.remove(names[:10])
    gallery.commit()
    first, wide, elsewhere = examine(gallery, load_originals(photos), old, sample=30)
    assert (first.items, first.looked_at, first.foreign) == (50, 30, ())
    assert "16 dimensions, but" in wide.note and "none of the images" in elsewhere.note
    assert wide.interval == (0.0, 1.0) and wide.share == 0


@pytest.mark.parametrize(
    ("cosine", "chance", "made"),
    [(0.7, 0, 0), (0.85, 0, 0), (0.93, 0, COUNT), (0.93, 0.5, 0), (0.98, 0.5, COUNT), (0.998, 0.97, COUNT), (1.0, 0, COUNT)],
)
def test_mapped_vectors_are_told_from_inexact_ones(cosine: float, chance: float, made: int) -> None:
    own, rows = np.sqrt(chance) * np.eye(64)[0] + np.sqrt(1 - chance) * unit(COUNT, 64, 0), np.arange(COUNT)
    stored = cosine * own + np.sqrt(1 - cosine**2) * unit(COUNT, 64, 1)
    originals: Any = SimpleNamespace(kind="texts", embed=lambda *_: [(rows, own)])
    embedder: Any = SimpleNamespace(name="m")
    plain, sample = Finding(OLD, COUNT, claimed=True), doctor.StoredSample(numbered(COUNT), rows, stored.astype(np.float32))
    finding = doctor.judge_embeddings(plain, sample, originals, embedder)
    assert (sum(finding.made.values()), len(finding.foreign), finding.fits) == (made, COUNT - made, not made)
    assert ("in the space of m, but not made by it" in finding.note) == (not made)
    finding = doctor.judge_embeddings(replace(plain, claimed=False, elsewhere=True), sample, originals, embedder)
    assert not finding.foreign and ("as recorded" in finding.note) == (not made), "another version is what it is recorded as"


def test_a_check_that_finds_nothing_of_the_model_fails(photos: Path, old: Embedder, tmp_path: Path, run: Run) -> None:
    gallery_of(tmp_path / "g", old, *embedded(photos, old))
    for name, dim, looked_at in (("alike", old.dim, COUNT), ("wide", 16, 0)):
        model = save_stand_in(tmp_path / name, "clip", dim, seed=5)
        code, out, _ = run("doctor", tmp_path / "g", "--model", model, "--images", photos)
        assert code == 1 and "nan" not in out and "0.0%" not in out.replace("100.0%", ""), out
        code, out, _ = run("doctor", tmp_path / "g", "--model", model, "--images", photos, "--json")
        found, (version,) = json.loads(out), json.loads(out)["versions"]
        assert (code, found["passed"], version["made"], version["looked_at"]) == (1, False, {}, looked_at)


def test_doctor_says_what_it_found(
    photos: Path, old: Embedder, old_folder: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, vectors = embedded(photos, old)
    gallery_of(tmp_path / "good", old, names, vectors)
    vectors[:20] = foreign(photos, tmp_path)[:20]
    gallery_of(tmp_path / "bad", old, names, vectors)
    asked = ("doctor", tmp_path / "bad", "--model", old_folder)
    code, out, err = run(*asked, "--images", photos, "--json")
    (version,) = json.loads(out)["versions"]
    assert code == 1 and len(version["foreign"]) == 20 and version["looked_at"] == len(names), err
    monkeypatch.setattr(commands, "console", Console(width=80))
    out = run.output("doctor", tmp_path / "good", "--model", old_folder, "--images", photos)
    assert "0.0%" in out and "0.0% to 3.7%" in out
    code, out, _ = run(*asked, "--images", photos)
    assert code == 1 and "20.0%" in out and "of another origin: 0.png" in out and "and 10 more" in out
    assert "--images" in run.refusal(*asked)
    (tmp_path / "others").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "others" / "x.png")
    assert "none of the 1 images is in" in run.refusal(*asked, "--images", tmp_path / "others")


def test_the_interval_is_wilsons() -> None:
    for count, total in ((0, 10), (1, 400), (37, 100), (50, 50)):
        expected = binomtest(count, total).proportion_ci(method="wilson")
        assert wilson(count, total) == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert Finding(Fingerprint.from_string("m"), 3).interval == (0.0, 1.0)


def test_a_canary_shows_that_a_model_has_changed(
    photos: Path,
    old: Embedder,
    old_folder: str,
    tmp_path: Path,
    run_xcompat: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path / "g"
    gallery_of(place, old, *embedded(photos, old))
    assert check_canary(Gallery.open(place), old) is None, "nothing is stored unless it is asked for"
    checking = ("gallery", "doctor", place, "--model", old_folder, "--canary", "--json")
    assert json.loads(run_xcompat.output(*checking))["stored"]
    found = json.loads(run_xcompat.output(*checking))
    assert not found["stored"] and found["cosine"] > 0.9999
    half = check_canary(Gallery.open(place), replace(old, autocast=torch.bfloat16))
    assert half is not None and half.cosine > 0.9999, "a canary is computed in full precision, also where a GPU embeds in half"
    assert run_xcompat("gallery", "verify", place)[0] == 0, "a canary is no damage"
    serving = (str(place), old_folder, None, [], False)
    load_site(*serving)
    assert "no longer makes" not in caplog.text
    other = load_embedder(save_stand_in(tmp_path / "other", "resnet", 8, seed=9))
    refuses("has no embeddings by .*; choose a model of this gallery", check_canary, Gallery.open(place), other, store=True)
    embed = Embedder.embed
    monkeypatch.setattr(Embedder, "embed", lambda self, batch, space=None: embed(self, batch, space).flip(1))
    code, out, err = run_xcompat(*checking)
    found = json.loads(out.splitlines()[-1])
    assert (
        code == 1
        and not found["passed"]
        and found["cosine"] < 0.9
        and "no longer makes" in err
        and "or re-embed the gallery" in err
    )
    load_site(*serving)
    assert "no longer makes the test embeddings" in caplog.text and "or re-embed the gallery" in caplog.text
    assert "needs only a gallery's folder and --model" in run_xcompat.refusal(*checking, "--images", photos)


def test_results_are_json(tmp_path: Path, run: Run) -> None:
    old_gallery(tmp_path / "g")
    found = json.loads(run.output("info", tmp_path / "g", "--json"))
    assert found["items"] == N and found["versions"][0]["fingerprint"] == OLD.digest
    assert [state["items"] for state in found["states"]][-1] == N and found["bytes"] > 0
    verify = ("verify", tmp_path / "g", "--json")
    assert json.loads(run.output(*verify)) == {"passed": True, "items": N, "segments": 1, "damaged": []}
    next((tmp_path / "g").rglob("*.faiss")).write_bytes(b"damaged")
    code, out, _ = run(*verify)
    assert code == 1 and not json.loads(out)["passed"] and len(json.loads(out)["damaged"]) == 1
