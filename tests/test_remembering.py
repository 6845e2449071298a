"""A stage's queries remember what it learned from: chosen by what is held out, saved, judged beside old queries."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from schedule import mostly_nightly
from transformers import AutoModel

from xcompat.core.arrays import number_strings
from xcompat.core.errors import XcompatError
from xcompat.data import BadSamples, PairSource, flatten_captions, load_pairs
from xcompat.data.pairs import rows_of_ids
from xcompat.embeddings.cache import CacheInfo, EmbeddingCache
from xcompat.embeddings.cache_writer import fill_cache
from xcompat.mapping import CaptionedEmbeddings, PairedEmbeddings
from xcompat.mapping.candidates import LINES, Candidate, CandidateParts
from xcompat.mapping.paired import load_paired, number_groups
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.report import load_report
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.memory import captioned_pairs, labelled_pairs
from xcompat.training.recipe import Recipe, parse_recipe
from xcompat.training.record import CHOICE, OLD_MEMORY
from xcompat.training.run import embed_recipe, run_recipe


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
        "old": old_folder,
        "new": folder_of["clip"],
        "method": "projection",
        "memory": "pairs",
        "data": {"pairs": {"path": pairs_folder}, "texts": [{"path": texts_file}], "test": {"path": pairs_folder}},
        "training": {"max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no"},
        "evaluation": {"resamples": 100, "ks": [1, 5], "examples": 1, "tsne_pairs": 0},
    }


def recipe_of(raw: dict[str, Any], **changes: Any) -> Recipe:
    return parse_recipe({**raw, **changes}, "demo", "demo.yaml")


def cases_of(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    return {(f"{case.query}/{case.gallery}", case.direction): case.metrics for case in load_report(folder).cases}


def test_pairs_are_remembered_across_modalities(raw: dict[str, Any], tmp_path: Path) -> None:
    run_recipe(recipe_of(raw))
    dry_run_recipe(recipe_of(raw))
    run = tmp_path / "run"
    said = json.loads((run / CHOICE).read_text())
    assert set(said["floor"]) == {"text-to-image", "image-to-text"}
    assert {trial["line"] for trial in said["trials"]} == {"projection"}
    model = AutoModel.from_pretrained(run / "model")
    assert (model.memory is None) == (said["memory"] is None)
    labels = {label for label, _ in cases_of(run)}
    assert {"old+memory/old", "without memory/old"} <= labels if said["memory"] is not None else "new/old" in labels


def test_nothing_falls_back_where_nobody_says_how_sure_he_is(raw: dict[str, Any], tmp_path: Path) -> None:
    evaluation = {**raw["evaluation"], "fallback": 0.5}
    with pytest.raises(
        XcompatError,
        match="evaluation.fallback needs the confidence of new queries, .*; set memory, or evaluation.fallback to null",
    ):
        run_recipe(recipe_of(raw, memory=None, evaluation=evaluation))
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
        images = side.embed({"pixel_values": side.processor.images([_image(value) for value in pairs["image"]])})
        sides.append((images.numpy(), side.embed(side.processor.texts(texts)).numpy()))
    rows = np.arange(len(pairs))
    captioned = CaptionedEmbeddings(*(PairedEmbeddings(sides[0][kind], sides[1][kind], rows) for kind in (0, 1)))
    memory = CandidateParts(captioned).memory(Candidate("rotation", sharpness=1e7, share=1e6))
    assert memory is not None
    (new_images, new_texts), (old_images, old_texts) = sides
    for asked, found in ((new_texts, old_images), (new_images, old_texts)):
        leant = memory(torch.from_numpy(asked), torch.zeros(len(rows), old_images.shape[1]))
        expected = torch.nn.functional.normalize(torch.from_numpy(found - found.mean(0)), dim=1)
        torch.testing.assert_close(leant, expected, atol=1e-4, rtol=0)
    assert torch.equal(memory.familiarity(memory.key_cosines(torch.from_numpy(new_texts))), torch.ones(len(rows)))


def _image(value: Any) -> Image.Image:
    return Image.open(value["path"]).convert("RGB")


def test_what_belongs_together_is_one_group() -> None:
    images, texts = number_groups(
        ["a", "b", "c", "d", "e"], ["a", "a", "b", "c", "x"], ["red", "round", "round", "blue", "green"]
    )
    assert images[0] == images[1] and images[2] not in (images[0], -1), "images of captions that read alike belong together"
    assert images[3] == images[4] == -1 and texts[4] == -1, "an image without captions, a caption without an image"
    assert list(texts[:4]) == [images[0]] * 3 + [images[2]] and sorted({*images} - {-1}) == [0, 1]


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=3)))
def test_strings_are_numbered_as_numpy_does(names: list[str]) -> None:
    distinct, places = number_strings(iter(names))
    expected, inverse = np.unique(np.array(names, "U3"), return_inverse=True)
    assert distinct == expected.tolist() and places.tolist() == inverse.tolist() and places.dtype == np.int64


def test_one_long_caption_does_not_lengthen_the_others(tmp_path: Path) -> None:
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
    assert set(said["floor"]) == {"text-to-image", "image-to-text"}
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
    run_recipe(recipe)


def test_lines_are_compared_by_the_new_models_hits(raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    del raw["method"], raw["memory"], raw["data"]["pairs"]
    run_recipe(recipe_of(raw))
    said = json.loads((tmp_path / "run" / CHOICE).read_text())
    line = said["chosen"].removesuffix(" + old query, weight 0.5")
    assert line in LINES and said["memory"] is None and said["of_agreement"], "the old model can embed queries too"
    assert {trial["name"] for trial in said["trials"]} == {*LINES, said["chosen"]}
    assert "new alone/old" in {label for label, _ in cases_of(tmp_path / "run")}
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "that the new model finds nearest" in said
        and "image queries may find less than the old model's; if you have images with captions" in said
    )


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
