"""The doctor: which model made what a gallery holds, with foreign vectors planted, other preparations, and quantised indexes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from conftest import store
from PIL import Image
from rich.console import Console
from schedule import mostly_nightly, mostly_nightly_rows
from scipy.stats import binomtest

from xcompat import Fingerprint, XcompatError
from xcompat.encoders.standins import save_stand_in
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.retrieval import Gallery, commands, doctor
from xcompat.retrieval.canary import check_canary
from xcompat.retrieval.doctor import Finding, examine, wilson
from xcompat.retrieval.items import check_items
from xcompat.retrieval.originals import load_images, load_originals
from xcompat.retrieval.preprocessing import FACTORS, Preparation, own_preparation
from xcompat.retrieval.versions import stored_version
from xcompat.serve.site_loading import load_site

COUNT = 100
Run = Callable[..., tuple[int, str, str]]


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


@pytest.fixture(scope="module")
def model(old_folder: str) -> Embedder:
    return load_embedder(old_folder)


def embedded(photos: Path, model: Embedder, prepare: Preparation | None = None) -> tuple[list[str], np.ndarray]:
    dataset = load_images(photos)
    names = list(dataset["id"])
    images = [Image.open(photos / name) for name in names]
    return names, model.embed({"pixel_values": (prepare or model.processor.images)(images)}).numpy()


def filled(folder: Path, model: Embedder, names: list[str], vectors: np.ndarray) -> Gallery:
    return store(Gallery.create(folder, model), vectors, names)


def foreign(photos: Path, tmp_path: Path) -> np.ndarray:
    return embedded(photos, load_embedder(save_stand_in(tmp_path / "foreign", "clip", 8, seed=5)))[1]


@pytest.mark.parametrize("planted", mostly_nightly([0, 1, 10, 50], (0, 10).__contains__))
def test_planted_vectors_of_another_model_are_found_and_no_others(
    planted: int, photos: Path, model: Embedder, tmp_path: Path
) -> None:
    names, vectors = embedded(photos, model)
    rows = np.random.default_rng(planted).choice(COUNT, planted, replace=False)
    vectors[rows] = foreign(photos, tmp_path)[rows]
    (finding,) = examine(filled(tmp_path / "g", model, names, vectors), load_originals(photos), model)
    assert set(finding.foreign) == {names[row] for row in rows}
    assert finding.claimed and finding.made == {"": COUNT - planted} and finding.cosine > 0.9999
    assert finding.interval[0] <= planted / COUNT <= finding.interval[1]


def test_a_gallery_of_another_model_altogether_is_all_foreign(photos: Path, model: Embedder, tmp_path: Path) -> None:
    names, _ = embedded(photos, model)
    (finding,) = examine(filled(tmp_path / "g", model, names, foreign(photos, tmp_path)), load_originals(photos), model)
    assert finding.share == 1 and finding.made == {} and np.isnan(finding.cosine)


def test_zero_vectors_are_counted_and_are_nobodys(photos: Path, model: Embedder, tmp_path: Path) -> None:
    names, vectors = embedded(photos, model)
    vectors[:3] = 0
    gallery = store(Gallery.create(tmp_path / "g", model, metric="ip"), vectors, names)
    (finding,) = examine(gallery, load_originals(photos), model)
    assert finding.note == "zero vectors: 3" and set(finding.foreign) == set(names[:3])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"filter": "nearest"}, "nearest, not b"),
        ({"shape": "cropped"}, "cropped, not squashed"),
        ({"normalised": 3}, "pixels from 0 to 1, not"),
    ],
)
def test_another_preparation_of_the_images_is_named(
    changed: dict[str, object], said: str, photos: Path, model: Embedder, tmp_path: Path
) -> None:
    images = [Image.open(photos / f"{number}.png") for number in range(9)]
    own = own_preparation(model.processor, images)
    np.testing.assert_allclose(own(images).numpy(), model.processor.images(images).numpy(), atol=0.05)
    way = FACTORS[0](own)[changed["normalised"]] if "normalised" in changed else replace(own, **changed)  # type: ignore[call-overload]
    names, vectors = embedded(photos, model, way)
    vectors[:10] = foreign(photos, tmp_path)[:10]
    (finding,) = examine(filled(tmp_path / "g", model, names, vectors), load_originals(photos), model)
    assert set(finding.foreign) == set(names[:10])
    assert any(said in how for how in finding.made), finding.made


@pytest.mark.parametrize(
    ("factory", "length"),
    mostly_nightly_rows(
        [("SQ8", 1.0), ("SQfp16", 30.0), ("IVF4,SQ8", 30.0), ("HNSW8,SQ8", 1.0), ("IVF4,PQ4x4", 30.0)],
        lambda factory, _: factory in ("SQ8", "IVF4,SQ8"),
    ),
)
def test_what_an_index_keeps_roughly_is_no_false_alarm(
    factory: str, length: float, photos: Path, model: Embedder, tmp_path: Path
) -> None:
    names, vectors = embedded(photos, model)
    vectors[:5] = foreign(photos, tmp_path)[:5]
    index = faiss.index_factory(8, factory, faiss.METRIC_L2)
    index.train(length * vectors)
    index.add(length * vectors)
    faiss.write_index(index, str(tmp_path / "own.faiss"))
    gallery = Gallery.from_faiss(tmp_path / "g", tmp_path / "own.faiss", names, model)
    (finding,) = examine(gallery, load_originals(photos), model)
    alarms = set(finding.foreign) - set(names[:5])
    assert not alarms and (len(finding.foreign) == 5 or "PQ" in factory)
    assert finding.length == pytest.approx(length, rel=0.2 if "PQ" in factory else 0.01)


def test_vectors_under_a_bare_name_are_recognised(photos: Path, model: Embedder, tmp_path: Path) -> None:
    names, vectors = embedded(photos, model)
    gallery = store(Gallery.create(tmp_path / "g", Fingerprint.from_string("our model"), dim=8), vectors, names)
    (finding,) = examine(gallery, load_originals(photos), model)
    assert not finding.claimed and not finding.foreign and finding.note.endswith("under another name")
    other = load_embedder(save_stand_in(tmp_path / "other", "clip", 8, seed=9))
    (finding,) = examine(gallery, load_originals(photos), other)
    assert not finding.foreign and finding.note.startswith("not made by")


def test_each_version_is_looked_at_by_itself(photos: Path, model: Embedder, tmp_path: Path, folder_of: dict[str, str]) -> None:
    names, vectors = embedded(photos, model)
    gallery = store(Gallery.create(tmp_path / "g", model), vectors[:60], names[:60])
    for name, dim, ids in (("wide", 16, ["a", "b"]), ("elsewhere", 8, ["c", "d"])):  # unchecked, as galleries once were
        items = check_items(np.eye(dim, dtype=np.float32)[:2], ids, None, None, "cosine")
        gallery.staging().add(stored_version(Fingerprint.from_string(name), dim), items, replace=False)
    gallery.commit()
    gallery.remove(names[:10])
    gallery.commit()
    first, wide, elsewhere = examine(gallery, load_originals(photos), model, sample=30)
    assert (first.items, first.looked_at, first.foreign) == (50, 30, ())
    assert "16 dimensions, but" in wide.note and "none of the images" in elsewhere.note
    assert wide.interval == (0.0, 1.0) and wide.share == 0


def test_the_command_says_what_it_found(
    photos: Path, model: Embedder, old_folder: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(run, "doctor")
    monkeypatch.setattr(commands, "console", Console(width=80))
    names, vectors = embedded(photos, model)
    filled(tmp_path / "good", model, names, vectors)
    vectors[:20] = foreign(photos, tmp_path)[:20]
    filled(tmp_path / "bad", model, names, vectors)
    code, out, _ = run(tmp_path / "good", "--model", old_folder, "--images", photos)
    assert code == 0 and "0.0%" in out and "0.0% to 3.7%" in out
    code, out, _ = run(tmp_path / "bad", "--model", old_folder, "--images", photos)
    assert code == 1 and "20.0%" in out and "of another origin: 0.png" in out and "and 10 more" in out
    code, _, err = run(tmp_path / "bad", "--model", old_folder)
    assert code == 2 and "--images" in err and err.count("\n") == 1
    (tmp_path / "others").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "others" / "x.png")
    code, _, err = run(tmp_path / "bad", "--model", old_folder, "--images", tmp_path / "others")
    assert code == 2 and "none of the 1 images is in" in err and err.count("\n") == 1


def test_the_interval_is_wilsons() -> None:
    for count, total in ((0, 10), (1, 400), (37, 100), (50, 50)):
        expected = binomtest(count, total).proportion_ci(method="wilson")
        assert wilson(count, total) == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert Finding(Fingerprint.from_string("m"), 3).interval == (0.0, 1.0)


def test_a_canary_shows_that_a_model_has_changed(
    photos: Path,
    model: Embedder,
    old_folder: str,
    tmp_path: Path,
    run_xcompat: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names, vectors = embedded(photos, model)
    place = tmp_path / "g"
    filled(place, model, names, vectors)
    assert check_canary(Gallery.open(place), model) is None, "nothing is stored unless it is asked for"
    checking = ("gallery", "doctor", place, "--model", old_folder, "--canary", "--json")
    code, out, err = run_xcompat(*checking)
    assert code == 0 and json.loads(out)["stored"], err
    code, out, err = run_xcompat(*checking)
    assert code == 0 and not json.loads(out)["stored"] and json.loads(out)["cosine"] > 0.9999, err
    half = check_canary(Gallery.open(place), replace(model, autocast=torch.bfloat16))
    assert half is not None and half.cosine > 0.9999, "a canary is computed in full precision, also where a GPU embeds in half"
    assert run_xcompat("gallery", "verify", place)[0] == 0, "a canary is no damage"
    serving = (str(place), old_folder, None, [], False)
    load_site(*serving)
    assert "no longer makes" not in caplog.text
    other = load_embedder(save_stand_in(tmp_path / "other", "resnet", 8, seed=9))
    with pytest.raises(XcompatError, match="has no embeddings by .*; choose a model of this gallery"):
        check_canary(Gallery.open(place), other, store=True)
    embed = Embedder.embed
    monkeypatch.setattr(Embedder, "embed", lambda self, batch, space=None: embed(self, batch, space).flip(1))
    code, out, err = run_xcompat(*checking)
    assert code == 1, err
    found = json.loads(out.splitlines()[-1])
    assert code == 1 and not found["passed"] and found["cosine"] < 0.9 and "no longer makes" in err
    load_site(*serving)
    assert "no longer makes the test embeddings" in caplog.text
    code, _, err = run_xcompat(*checking, "--images", photos)
    assert code == 2 and "--canary needs only a gallery's folder and --model" in err


def test_results_are_json(photos: Path, model: Embedder, old_folder: str, tmp_path: Path, run_xcompat: Run) -> None:
    names, vectors = embedded(photos, model)
    vectors[:20] = foreign(photos, tmp_path)[:20]
    filled(tmp_path / "g", model, names, vectors)
    code, out, err = run_xcompat("gallery", "doctor", tmp_path / "g", "--model", old_folder, "--images", photos, "--json")
    (version,) = json.loads(out)["versions"]
    assert code == 1 and len(version["foreign"]) == 20 and version["looked_at"] == len(names), err
    code, out, err = run_xcompat("gallery", "info", tmp_path / "g", "--json")
    found = json.loads(out)
    assert code == 0 and found["items"] == len(names) and found["versions"][0]["fingerprint"] == model.fingerprint.digest, err
    assert [state["items"] for state in found["states"]][-1] == len(names) and found["bytes"] > 0
    code, out, err = run_xcompat("gallery", "verify", tmp_path / "g", "--json")
    assert code == 0 and json.loads(out) == {"passed": True, "items": len(names), "segments": 1, "damaged": []}, err
    next((tmp_path / "g").rglob("*.faiss")).write_bytes(b"damaged")
    code, out, _ = run_xcompat("gallery", "verify", tmp_path / "g", "--json")
    assert code == 1 and not json.loads(out)["passed"] and len(json.loads(out)["damaged"]) == 1
