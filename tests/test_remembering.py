"""Queries and gallery upgrades that remember: chosen by what is held out, against loops, saved, judged in a report."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest import raw_recipe, recipe_of, refuses, store
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from schedule import mostly_nightly
from store_places import unit_vectors as unit
from test_map import normalised
from transformers import AutoModel

from xcompat import CompatModel, FctConfig, FctModel, Fingerprint, XcompatError
from xcompat.core.arrays import number_strings
from xcompat.data import BadSamples, PairSource, flatten_captions, load_pairs
from xcompat.data.pairs import rows_of_ids
from xcompat.embeddings.cache import CacheInfo, EmbeddingCache
from xcompat.embeddings.cache_writer import fill_cache
from xcompat.evaluation import ranking_per_query
from xcompat.mapping import CaptionedEmbeddings, choose
from xcompat.mapping.candidates import LINES, Candidate, CandidateParts
from xcompat.mapping.choice_report import as_json, choice_tables, describe_choice
from xcompat.mapping.folds import folds
from xcompat.mapping.paired import PairedEmbeddings, SwappedEmbeddings, load_paired, number_groups
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.models.query_memory import QueryMemory
from xcompat.report import load_report
from xcompat.retrieval import Gallery
from xcompat.retrieval.upgrading import plan_upgrade
from xcompat.retrieval.versions import stored_version, takes_old_queries, upgraded_version
from xcompat.training import auto_map
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.memory import captioned_pairs, labelled_pairs
from xcompat.training.record import CHOICE, OLD_MEMORY
from xcompat.training.run import embed_recipe, run_recipe


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path: Path) -> dict[str, Any]:
    raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], pairs_folder, texts=[{"path": texts_file}])
    training = {"max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no"}
    return raw | {"method": "projection", "memory": "pairs", "training": training}


def cases_of(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    return {(f"{case.query}/{case.gallery}", case.direction): case.metrics for case in load_report(folder).cases}


def test_pairs_are_remembered_across_modalities(raw: dict[str, Any], tmp_path: Path) -> None:
    run_recipe(recipe_of(raw))
    dry_run_recipe(recipe_of(raw))
    run = tmp_path / "run"
    said = json.loads((run / CHOICE).read_text())
    assert set(said["floor"]) == {"text-to-image", "image-to-text"} and not said["is_other_kind"]
    assert {trial["line"] for trial in said["trials"]} == {"projection"}
    model = AutoModel.from_pretrained(run / "model")
    assert (model.memory is None) == (said["memory"] is None)
    labels = {label for label, _ in cases_of(run)}
    assert {"old+memory/old", "without memory/old"} <= labels if said["memory"] is not None else "new/old" in labels


def test_nothing_falls_back_where_nobody_says_how_sure_he_is(raw: dict[str, Any], tmp_path: Path) -> None:
    evaluation = {**raw["evaluation"], "fallback": 0.5}
    said = "evaluation.fallback needs the confidence of new queries, .*; set memory, or evaluation.fallback to null"
    refuses(said, run_recipe, recipe_of(raw, memory=None, evaluation=evaluation))
    assert not (tmp_path / "run").exists(), "nothing is trained for nothing"
    with pytest.raises(XcompatError, match="have no confidence .see choice.json.; set evaluation.fallback to null"):
        run_recipe(recipe_of(raw, evaluation=evaluation))
    assert json.loads((tmp_path / "run" / CHOICE).read_text())["confidence"]["none"]
    run_recipe(recipe_of(raw))  # what was trained is kept
    assert ("fallback/old", "text-to-image") not in cases_of(tmp_path / "run")


@torch.no_grad()
def test_what_a_caption_recalls_is_where_its_image_lies(folder_of: dict[str, str], old_folder: str, pairs_folder: str) -> None:
    pairs = load_pairs(PairSource(path=pairs_folder))
    new, old = load_embedder(folder_of["clip"]), load_embedder(old_folder)
    texts, _ = flatten_captions(pairs)
    sides = []
    for side in (new, old):
        photos = [Image.open(value["path"]).convert("RGB") for value in pairs["image"]]
        images = side.embed({"pixel_values": side.processor.images(photos)})
        sides.append((images.numpy(), side.embed(side.processor.texts(texts)).numpy()))
    rows = np.arange(len(pairs))
    captioned = CaptionedEmbeddings(*(PairedEmbeddings(sides[0][kind], sides[1][kind], rows) for kind in (0, 1)))
    memory = CandidateParts(captioned).memory(Candidate("rotation", sharpness=1e7, share=1e6))
    (new_images, new_texts), (old_images, old_texts) = sides
    for asked, found in ((new_texts, old_images), (new_images, old_texts)):
        leant = memory(torch.from_numpy(asked), torch.zeros(len(rows), old_images.shape[1]))
        expected = torch.nn.functional.normalize(torch.from_numpy(found - found.mean(0)), dim=1)
        torch.testing.assert_close(leant, expected, atol=1e-4, rtol=0)
    assert torch.equal(memory.familiarity(memory.key_cosines(torch.from_numpy(new_texts))), torch.ones(len(rows)))


def test_groups_of_captions_are_numbered_in_little_memory(tmp_path: Path) -> None:
    images, texts = number_groups(
        ["a", "b", "c", "d", "e"], ["a", "a", "b", "c", "x"], ["red", "round", "round", "blue", "green"]
    )
    assert images[0] == images[1] and images[2] not in (images[0], -1), "images of captions that read alike belong together"
    assert images[3] == images[4] == -1 and texts[4] == -1, "an image without captions, a caption without an image"
    assert list(texts[:4]) == [images[0]] * 3 + [images[2]] and sorted({*images} - {-1}) == [0, 1]
    count = 10_000  # an array of NumPy holds 120 MB
    ids, captions = [str(row) for row in range(count)], [f"a dog {row}" for row in range(count - 1)] + ["x" * 3000]
    dataset = datasets.Dataset.from_dict({"id": captions})
    np.save(tmp_path / "image_embeds.npy", np.eye(2, dtype=np.float32)[np.arange(count) % 2])
    for name, lines in (("image_ids.txt", ids), ("labels.txt", captions)):
        (tmp_path / name).write_text("\n".join(lines))
    tracemalloc.start()
    try:
        images, texts = number_groups(ids, ids, captions)
        assert images.tolist() == texts.tolist() and [len(rows) for rows in rows_of_ids(dataset)] == [1] * count
        assert load_paired(tmp_path, tmp_path).n_classes == count
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=3)))
def test_strings_are_numbered_as_numpy_does(names: list[str]) -> None:
    distinct, places = number_strings(iter(names))
    expected, inverse = np.unique(np.array(names, "U3"), return_inverse=True)
    assert distinct == expected.tolist() and places.tolist() == inverse.tolist() and places.dtype == np.int64


def cache_of(folder: Path, embeds_ND: np.ndarray, kind: str) -> EmbeddingCache:
    """Write a cache; a row of NaN is an image that cannot be read."""
    info = CacheInfo("model", "model", "data", kind, *embeds_ND.shape, shard_rows=4)

    def shards(parts: Any, _: Any) -> Any:
        return (iter([(np.arange(part.stop - part.start), torch.from_numpy(embeds_ND[part]))]) for part in parts)

    return fill_cache(info, folder, shards, BadSamples())


def test_where_an_image_cannot_be_read_the_others_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "abcdefghi"
    images = datasets.Dataset.from_dict({"id": list(names), "caption": [[f"{name}1", f"{name}0"] for name in names]})
    draw = np.random.default_rng(0)
    embeds = {
        (model, kind): np.float32(np.float16(draw.standard_normal((len(names) * each, 4))))
        for model in ("new", "old")
        for kind, each in (("images", 1), ("texts", 2))
    }
    embeds["new", "images"][3] = embeds["old", "images"][5] = np.nan
    caches = {(model, kind): cache_of(tmp_path / model / kind, rows, kind) for (model, kind), rows in embeds.items()}
    stage: Any = SimpleNamespace(
        frozen=str,
        embedder=str,
        cache=lambda model: caches[model, "images"],
        images=SimpleNamespace(labels=lambda: np.arange(len(names)) // 3),
        remembered_images=images,
        remembered_caches=lambda model: (caches[model, "images"], caches[model, "texts"]),
        settings=SimpleNamespace(data=SimpleNamespace(remembered=None)),
    )
    with monkeypatch.context() as patched:
        patched.setattr(EmbeddingCache, "__getitem__", None)  # nothing is read
        labelled, captioned = labelled_pairs(stage, "new"), captioned_pairs(stage, "new")
    kept = np.array([0, 1, 2, 4, 6, 7, 8])
    texts = np.repeat(kept, 2) * 2 + np.tile([0, 1], len(kept))
    assert labelled.labels_N.tolist() == [0, 0, 0, 1, 2, 2, 2]
    for pairs, kind, rows in ((labelled, "images", kept), (captioned.images, "images", kept), (captioned.texts, "texts", texts)):
        for side, model in ((pairs.new_ND, "new"), (pairs.old_Nd, "old")):
            np.testing.assert_array_equal(side[:], embeds[model, kind][rows])
            np.testing.assert_array_equal(side[np.array([5, 0, 5])], embeds[model, kind][rows[[5, 0, 5]]])
            assert side.shape == (len(rows), 4) == (len(side), 4) and len(side[:0]) == 0
        np.testing.assert_array_equal(pairs.take(np.array([2, 1])).old_Nd, embeds["old", kind][rows[[2, 1]]])
    assert captioned.groups[1].tolist() == np.repeat(captioned.groups[0], 2).tolist() == np.repeat(range(7), 2).tolist()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no classes": ({"memory": "classes"}, "memory: classes needs labelled images; set data.images"),
    "pairs of a gallery map": ({"method": "fct"}, "method fct maps galleries, which only remember classes; set memory: classes"),
    "pairs of another direction": (
        {"method": "ridge", "options": {"direction": "old_to_new"}},
        "method ridge maps galleries, which only remember classes",
    ),
    "no old model": ({"method": "independent", "old": None}, "method independent does not map queries"),
    "no pairs": ({"data": {"texts": [{"path": "x"}]}}, "set data.remembered or data.pairs"),
    "pairs beside classes": (
        {"memory": "classes", "data": {"images": {"path": "x"}, "remembered": {"path": "x"}}, "method": "query_map"},
        "only memory: pairs remembers images with captions",
    ),
    "a stream": ({"data": {"pairs": {"path": "x", "streaming": True}}}, "without streaming"),
    "a codec of nothing": ({"memory": None, "memory_codec": "SQ8"}, "memory_codec needs a memory"),
    "a codec that is none": ({"memory_codec": "SQ9"}, "unknown memory codec 'SQ9'; use float32, SQ8, SQ4"),
    "a chosen memory": ({"method": None, "memory": "pairs"}, "without a method, the memory is chosen with the map"),
    "chosen texts beside pairs": ({"method": None, "memory": None}, "data.texts: without a method, the map learns from"),
    "a chosen stream": (
        {"method": None, "memory": None, "data": {"pairs": {"path": "x", "streaming": True}}},
        "without a method, pairs are read more than once",
    ),
    "chosen options": ({"method": None, "options": {"shape": "linear"}}, "options shape need a method"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_memory_of_nothing_is_refused(what: str, raw: dict[str, Any]) -> None:
    changes, said = REFUSED[what]
    with pytest.raises(XcompatError, match=said):
        recipe_of({name: value for name, value in (raw | changes).items() if name != "method" or value})


def test_a_map_of_captioned_images_is_chosen(raw: dict[str, Any], tmp_path: Path) -> None:
    del raw["method"], raw["memory"], raw["data"]["texts"]
    run_recipe(recipe_of(raw))
    said = json.loads((tmp_path / "run" / CHOICE).read_text())
    assert set(said["floor"]) == {"text-to-image", "image-to-text"} and not said["is_other_kind"]
    assert {trial["line"] for trial in said["trials"]} == set(LINES)
    assert AutoModel.from_pretrained(tmp_path / "run" / "model").embeds_texts
    dry_run_recipe(recipe_of(raw))


@pytest.mark.parametrize("method", mostly_nightly(["map", "projection"], "map".__eq__))
def test_what_is_embedded_before_is_not_embedded_again(method: str, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "map":
        del raw["method"], raw["memory"], raw["data"]["texts"]
    recipe = recipe_of(raw)
    embed_recipe(recipe)
    monkeypatch.setattr(Embedder, "embed", lambda *_: pytest.fail("a row is embedded again"))
    monkeypatch.setattr(auto_map, "measure_query_ms", lambda _: 1.0)  # embeds a text of its own
    run_recipe(recipe)


def test_lines_are_compared_by_the_new_models_hits(raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    del raw["method"], raw["memory"], raw["data"]["pairs"]
    run_recipe(recipe_of(raw))
    said = json.loads((tmp_path / "run" / CHOICE).read_text())
    line = said["chosen"].removesuffix(" + old query, weight 0.5")
    assert line in LINES and said["memory"] is None and said["of_agreement"], "the old model can embed queries too"
    assert {trial["name"] for trial in said["trials"]} == {*LINES, said["chosen"]}
    assert "new alone/old" in {label for label, _ in cases_of(tmp_path / "run")}
    assert said["is_other_kind"] and not said["verdict"], "texts test no searches of images"
    said = " ".join(capsys.readouterr().out.split())
    assert "that the new model finds nearest" in said and "Set data.remembered to images with captions" in said


def test_too_few_items_to_hold_any_out_are_a_guess(raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    raw["data"]["pairs"]["limit"] = 8
    raw["memory_codec"] = "SQ8"
    run_recipe(recipe_of(raw))
    said = json.loads((tmp_path / "run" / CHOICE).read_text())
    guessed = {"entries": 16, "sharpness": 60.0, "share": 0.5, "codec": "SQ8"}
    assert "trials" not in said and guessed.items() <= said["memory"].items()
    assert "the settings of the memory are not validated" in " ".join(capsys.readouterr().out.split())
    model = load_checkpoint(str(tmp_path / "run"))
    assert model.memory is not None and (tmp_path / "run" / OLD_MEMORY).exists()
    table = cases_of(tmp_path / "run")
    assert {"old+memory/old", "without memory/old", "new/old"} <= {label for label, _ in table}
    beside = next(note for note in load_report(tmp_path / "run").notes if "the same learned transform and memory" in note)
    gain = 100 * (table["new/old", "text-to-image"]["recall@5"] - table["old+memory/old", "text-to-image"]["recall@5"])
    assert f"text-to-image R@5 {gain:+.1f} (" in beside
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    run_recipe(recipe_of(raw))
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}


NEW, OLD, CLASSES, EACH = 12, 8, 10, 14
OLD_MODEL = Fingerprint.from_string("old")
SIDE = describe_old(Fingerprint.from_string("side"), 3)
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "procrustes": ("procrustes", {"direction": "old_to_new"}),
    "lce": ("lce", {"direction": "old_to_new"}),
    "fct": ("fct", {}),
    "fct with side-information": ("fct", {"side_info": SIDE}),
}


def pairs(noise: float = 0.4) -> PairedEmbeddings:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)
    meant, shared = draw.standard_normal((CLASSES, NEW))[labels], 0.3 * draw.standard_normal((CLASSES * EACH, NEW))
    new = meant + shared + noise * draw.standard_normal(meant.shape)
    old = (meant + shared)[:, :OLD] + 3 * noise * draw.standard_normal((len(meant), OLD))
    return PairedEmbeddings(normalised(new), normalised(old), labels)


def turned() -> SwappedEmbeddings:
    plain = pairs()
    return SwappedEmbeddings(plain.old_Nd, plain.new_ND, plain.labels_N)


def memory(codec: str | None = None, **settings: Any) -> QueryMemory:
    return CandidateParts(turned(), codec=codec).memory(Candidate("rotation", **{"sharpness": 20.0, "share": 0.7, **settings}))


def mapping(made: str) -> CompatModel:
    method, options = MADE[made]
    torch.manual_seed(0)
    model = METHODS[method](METHODS[method].config_class(old=describe_old(OLD_MODEL, OLD), embedding_dim=NEW, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_what_is_mapped_leans_as_a_loop_over_classes_says() -> None:
    given, worn = pairs(), memory()
    old, own = unit(4, OLD, 1), unit(4, NEW, 2)
    state = {name: tensor.double().numpy() for name, tensor in worn.state_dict().items()}

    def place(row: np.ndarray) -> np.ndarray:
        moved = (row - state["key_metric.mean_d"]) @ state["key_metric.matrix_dd"]
        return moved / np.linalg.norm(moved)

    np.testing.assert_allclose(state["key_metric.mean_d"], given.old_Nd.mean(0), atol=1e-6)
    classes = [given.labels_N == label for label in range(CLASSES)]
    keys = [place(given.old_Nd[rows].astype(np.float64).mean(0)) for rows in classes]
    values = [normalised(given.new_ND[rows].astype(np.float64).mean(0)) for rows in classes]
    for stored, mapped, found in zip(old, own, worn(torch.from_numpy(old), torch.from_numpy(own)), strict=True):
        cosines = np.array([place(stored) @ key for key in keys])
        weights = np.exp(20.0 * cosines)
        gate = 1 / (1 + np.exp(-(state["gate"][0] * cosines.max() + state["gate"][1])))
        recalled = sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True))
        np.testing.assert_allclose(found.numpy(), normalised(mapped + 0.7 * gate * recalled), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("codec", [None, "SQ8"])
@pytest.mark.parametrize("made", MADE)
def test_an_upgrade_remembers_and_nothing_else_does(made: str, codec: str | None, tmp_path: Path) -> None:
    model, worn, queries = mapping(made), memory(codec), torch.from_numpy(unit(5, NEW, 3))
    given = [torch.from_numpy(unit(5, dim, 1 + dim)) for dim in (OLD, *([3] if "side" in made else []))]
    own, before, to = model.upgrade(*given), model.lineage, upgraded_version(model)
    assert model.remember(worn) is model and torch.equal(model.own_upgrade(*given), own)
    leant = model.upgrade(*given)
    torch.testing.assert_close(leant, worn(given[0], own), rtol=0, atol=0)
    assert not torch.allclose(leant, own, atol=1e-2)
    torch.testing.assert_close(leant.norm(dim=1), torch.ones(5))
    assert torch.equal(model.to_gallery_space(queries), queries) and torch.equal(model.self_view(queries), queries)
    assert model.lineage.stores == before.stores and model.fingerprint() != before.model
    assert before.stores.fingerprint == stored_version(model, None).fingerprint and upgraded_version(model).digest != to.digest
    assert model.confidence(queries) is None and not model.is_confident
    refuses("maps galleries: upgrade the stored embeddings instead", model.to_space, queries)
    model.save_pretrained(tmp_path / "model")
    again = AutoModel.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again.upgrade(*given), leant, rtol=0, atol=0)
    assert again.fingerprint() == model.fingerprint() and again.config.memory == worn.settings
    half = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    torch.testing.assert_close(half.upgrade(*(each.bfloat16() for each in given)).float(), leant, rtol=0, atol=0.1)
    assert half.fingerprint() == model.fingerprint()
    assert torch.equal(model.remember(None).upgrade(*given), own) and model.lineage == before


def old_gallery(folder: Path) -> Gallery:
    names = [f"stored {row}" for row in range(CLASSES * EACH)]
    return store(Gallery.create(folder, OLD_MODEL, dim=OLD), pairs().old_Nd, names)


def test_a_gallery_is_upgraded_with_what_is_remembered(tmp_path: Path) -> None:
    gallery, model, given = old_gallery(tmp_path / "g"), mapping("procrustes").remember(memory()), pairs()
    assert not takes_old_queries(model, gallery.manifest.present()[0]), "no query of it leans on anything"
    assert plan_upgrade(gallery, model).items == len(given)
    assert gallery.upgrade(model, batch_size=50) == len(given)
    assert gallery.versions == [model.fingerprint().derive("upgrade")]
    with torch.no_grad():
        expected = model.upgrade(torch.from_numpy(given.old_Nd)).numpy()
    np.testing.assert_allclose(gallery.segments[0].vectors(np.arange(len(given))), expected, atol=1e-6)
    store(gallery, given.new_ND[:3], [f"new {row}" for row in range(3)], version=model)  # as it is, whatever is remembered
    queries = unit(6, NEW, 4)
    both = np.concatenate([expected, given.new_ND[:3]])
    names = [f"stored {row}" for row in range(len(given))] + [f"new {row}" for row in range(3)]
    hits = gallery.search(queries, model, top_k=1, merge="raw")
    assert [found[0].id for found in hits] == [names[row] for row in np.argmax(queries @ both.T, axis=1)]
    assert gallery.search(given.new_ND[:3], model, top_k=1, merge="raw")[0][0].id == "new 0"


def test_upgrades_do_not_gain_a_memory(tmp_path: Path, interrupt_upgrade: Callable[[Gallery, CompatModel, int], None]) -> None:
    gallery, model, given = old_gallery(tmp_path / "g"), mapping("fct"), pairs()
    interrupt_upgrade(gallery, model, 1)
    assert list(gallery.path.glob("upgrade-*.json"))
    again, model = Gallery.open(gallery.path), model.remember(memory())
    again.upgrade(model, batch_size=50)
    with torch.no_grad():
        expected = model.upgrade(torch.from_numpy(given.old_Nd)).numpy()
    stored = np.concatenate([segment.vectors(np.arange(len(segment))) for segment in again.segments])
    np.testing.assert_allclose(stored, expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("of", ["embeddings", "side-information too"])
def test_gains_are_of_new_queries_on_what_a_candidate_makes_of_the_old_gallery(of: str) -> None:
    given = turned()
    model: CompatModel = mapping("procrustes")
    if of != "embeddings":
        config = FctConfig(old=describe_old(OLD_MODEL, OLD), embedding_dim=NEW, side_info=SIDE)
        torch.manual_seed(1)
        model = FctModel(config).eval()
        given = SwappedEmbeddings(given.new_ND, given.old_Nd, given.labels_N, side_NS=unit(len(given), 3, 5))
    choice = choose(given, "open", lines={"map": lambda *_: model}, beside_line=True)
    assert choice.than is choice.trials[0] and choice.than.candidate == Candidate("map")
    assert all(trial.candidate.power is None for trial in choice.trials), "no transform is tried"
    assert {(trial.candidate.sharpness, trial.candidate.share) for trial in choice.trials if trial.candidate.share} == {
        (beta, share) for beta in (20.0, 30.0, 40.0) for share in (0.3, 0.5, 0.8, 1.2)
    }
    trial = choice.trials[-1]
    assert trial.candidate.share
    found, floor = list[float](), list[float]()
    for fold in folds(given.labels_N, "open"):
        rows = fold.queries["half of them new"]
        labels, old, new = given.labels_N[rows], torch.from_numpy(given.new_ND[rows]), given.old_Nd[rows]
        worn = CandidateParts(given.take(fold.fit_F)).memory(trial.candidate)
        side = [torch.from_numpy(given.side_NS[rows])] if given.side_NS is not None else []
        gallery = worn(old, model.own_upgrade(old, *side)).numpy()
        for values, asked, searched in ((found, new, gallery), (floor, old.numpy(), old.numpy())):
            values += ranking_per_query(asked, searched, labels, labels, rows, rows).average_precision_Q.tolist()
    gain = trial.gains["half of them new"]["map"].mean
    assert gain == pytest.approx(np.mean(found) - np.mean(floor), abs=1e-6)
    assert choice.floor["half of them new"]["map"] == pytest.approx(np.mean(floor))
    assert choice.confidence is None and as_json(choice)["confidence"] == {"none": "the gallery has the memory, not the queries"}


def test_the_memory_alone_is_what_needs_no_new_model() -> None:
    choice = choose(turned(), "known")  # Procrustes and ridge from the old space to the new one
    assert choice.of_galleries and choice.chosen.candidate.share and choice.chosen.worst > 0
    alone = choice.without_new_model
    assert alone is not None and alone.candidate.share == choice.chosen.candidate.share and alone.mean < choice.chosen.mean
    assert choice_tables(choice)[0].row_count == 2 + len(choice.trials_to_show())
    assert "xcompat.slerp" not in " ".join(describe_choice(choice))
