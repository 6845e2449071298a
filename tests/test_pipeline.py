"""transformers' pipelines on compatible models: retrieval, and zero-shot classification."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import store
from hub_server import Hub
from PIL import Image
from transformers import pipeline

import xcompat
from xcompat import FingerprintMismatchError, XcompatError
from xcompat.data.images import open_image
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.pipeline import as_image

TEXTS = ["a dog", "two cats", "a red shoe", "a blue shoe"]


@pytest.fixture(scope="module")
def gallery(old_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    old = load_embedder(old_folder)
    empty = Gallery.create(tmp_path_factory.mktemp("pipeline") / "gallery", old)
    return store(empty, old.embed(old.processor.texts(TEXTS)), TEXTS, [{"shoe": "shoe" in text} for text in TEXTS])


@pytest.fixture(scope="module")
def find(compatible_folder: str, gallery: Gallery) -> Any:
    return pipeline("compatible-retrieval", model=compatible_folder, gallery=str(gallery.path))


def test_a_query_finds_what_its_view_finds(find: Any, gallery: Gallery, compatible_folder: str, tmp_path: Path) -> None:
    model = find.model
    with torch.inference_mode():
        texts = model.processor.texts(["a dog"])
        expected = gallery.search(model.embed_texts(**texts), model, top_k=3)[0]
    hits = find("a dog", top_k=3)
    assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
    assert hits[0].keys() == {"id", "score", "version", "metadata", "confidence", "group", "standing"}
    assert hits[0].id == hits[0]["id"] and hits[0]["confidence"] is hits[0].confidence is None, "nothing is remembered"
    assert hits[0]["metadata"] == expected[0].metadata and hits[0]["version"] == str(gallery.versions[0])
    image = Image.new("RGB", (40, 40), "red")
    image.save(tmp_path / "shoe.png")
    with torch.inference_mode():
        best = gallery.search(model.embed_images(model.processor.images([image])), model, top_k=2)[0]
    for query in (image, np.array(image), str(tmp_path / "shoe.png"), tmp_path / "shoe.png"):
        assert [hit["id"] for hit in find(query, top_k=2)] == [hit.id for hit in best]


def test_hits_are_ordered_by_new_embeddings_of_their_texts(gallery: Gallery, compatible_folder: str, tmp_path: Path) -> None:
    lines = "".join(f'{{"id": "{text}", "text": "{text}"}}\n' for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    named = {"model": compatible_folder, "gallery": str(gallery.path)}
    find = pipeline("compatible-retrieval", **named, rerank=4, originals=tmp_path / "texts.jsonl")
    model = find.model
    with torch.inference_mode():
        query, texts = (model.self_view(model.embed_texts(**model.processor.texts(each))) for each in (["a dog"], TEXTS))
        new = torch.nn.functional.cosine_similarity(query, texts)
    old = {hit["id"]: hit["score"] for hit in pipeline("compatible-retrieval", **named)("a dog")}
    expected = {text: (2 * score + old[text]) / 3 for text, score in zip(TEXTS, new.tolist(), strict=True)}
    hits = find(["a dog", "a red shoe"], top_k=3)[0]
    assert [hit["id"] for hit in hits] == sorted(expected, key=lambda text: -expected[text])[:3]
    np.testing.assert_allclose([hit["score"] for hit in hits], [expected[hit["id"]] for hit in hits], atol=1e-5)
    find.model.config.rerank_candidates = 3
    chosen = pipeline("compatible-retrieval", **named | {"model": find.model}, rerank=True, originals=tmp_path / "texts.jsonl")
    assert chosen.rerank.candidates == 3
    with pytest.raises(XcompatError, match="add rerank=20"):
        pipeline("compatible-retrieval", **named, originals=tmp_path / "texts.jsonl")


def test_a_image_is_read_as_galleries_read_theirs(find: Any, hub: Hub, tmp_path: Path) -> None:
    """Transparent parts are white, and a camera's orientation is left alone, wherever the image comes from."""
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    file = tmp_path / "photos" / "shoe.png"
    file.parent.mkdir()
    Image.fromarray(pixels).save(file, exif=exif)
    hub.add("me/photos", file.parent)
    expected = np.array(open_image(file))
    with Image.open(file) as opened:
        for query in (opened, str(file), file, f"{hub.url}/me/photos/resolve/main/shoe.png"):
            found = as_image(query, allow_private_addresses=True)
            assert found is not None and np.array_equal(np.array(found), expected), query


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_lists_of_texts_and_images_keep_their_order(find: Any, batch_size: int) -> None:
    image = Image.new("RGB", (40, 40), "blue")
    queries = ["a dog", image, "two cats of some length", image, "a red shoe"]
    found = find(queries, top_k=4, batch_size=batch_size)
    for hits, query in zip(found, queries, strict=True):
        alone = find(query, top_k=4)
        assert [hit["id"] for hit in hits] == [hit["id"] for hit in alone]
        assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in alone], abs=1e-5)
    assert find([], top_k=4) == []


def test_filters_and_defaults(find: Any, compatible_folder: str, gallery: Gallery) -> None:
    assert {hit["id"] for hit in find("a dog", where={"shoe": True})} == {"a red shoe", "a blue shoe"}
    one = pipeline("compatible-retrieval", model=compatible_folder, gallery=gallery, top_k=1)
    assert len(one("a dog")) == 1 and len(one("a dog", top_k=2)) == 2 and len(one(["a dog", "b"])[1]) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_maps_halve_encoders(dtype: str, folder_of: dict[str, str], old_folder: str, gallery: Gallery, tmp_path: Path) -> None:
    """The encoder beside the map is loaded when it first embeds, and its own fingerprint is checked before it is rounded."""
    old, new = load_embedder(old_folder), load_embedder(folder_of["clip"])
    ridge = xcompat.RidgeModel.from_encoder(folder_of["clip"], old=old.describe_old())
    texts = [f"{colour} {thing}" for colour in ("a red", "two blue", "no") for thing in ("shoe", "dog", "cats", "alpha")]
    ridge.fit([(new.embed(new.processor.texts(texts)), old.embed(old.processor.texts(texts)))]).save_pretrained(tmp_path)
    whole = pipeline("compatible-retrieval", model=str(tmp_path), gallery=gallery)
    half = pipeline("compatible-retrieval", model=str(tmp_path), gallery=gallery, dtype=dtype)
    for hits, expected in zip(half(TEXTS, top_k=2), whole(TEXTS, top_k=2), strict=True):
        assert [hit["id"] for hit in hits] == [hit["id"] for hit in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in expected], abs=2e-2)
    assert half.model._get_encoder().dtype == half.model.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in new.model.parameters()} == {torch.float32}


def test_an_encoder_as_it_comes_searches_its_own_gallery(gallery: Gallery, old_folder: str, folder_of: dict[str, str]) -> None:
    assert pipeline("compatible-retrieval", model=old_folder, gallery=gallery)("two cats", top_k=1)[0]["id"] == "two cats"
    other = pipeline("compatible-retrieval", model=folder_of["clip"], gallery=gallery)
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        other("two cats")


def test_what_a_pipeline_refuses(find: Any, compatible_folder: str, tmp_path: Path) -> None:
    with pytest.raises(XcompatError, match="set its folder with gallery"):
        pipeline("compatible-retrieval", model=compatible_folder)
    with pytest.raises(XcompatError, match="is not a gallery"):
        pipeline("compatible-retrieval", model=compatible_folder, gallery=str(tmp_path))
    with pytest.raises(XcompatError, match="not topk"):
        find("a dog", topk=3)
    with pytest.raises(XcompatError, match="not int"):
        find(3)
    (tmp_path / "bad.png").write_bytes(b"no image")
    Image.new("RGB", (40, 40), "red").save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:80])
    with Image.open(tmp_path / "cut.png") as cut:
        addresses = ["http://127.0.0.1:9/shoe.png", "http://[", f"http://{'a' * 64}.com/shoe.png", "http://127.0.0.1:9/\ud800"]
        for query in (str(tmp_path / "bad.png"), tmp_path / "nowhere.png", cut, *addresses):
            with pytest.raises(XcompatError, match="cannot read the image"):
                find(query)
    for array in (np.zeros((20, 20, 3)), np.zeros((3, 20, 20), np.uint8), np.zeros((2, 20, 20, 3), np.uint8)):
        with pytest.raises(XcompatError, match=r"an image array must be \(H, W, 3\) uint8, not \("):
            find(array)


@pytest.mark.parametrize("architecture", ["clip", "open_clip"])
def test_zero_shot_classification_compares_in_the_models_own_space(
    architecture: str, folder_of: dict[str, str], old_folder: str, tmp_path: Path
) -> None:
    model = xcompat.XbtModel.from_encoder(folder_of[architecture], old=load_embedder(old_folder).describe_old())
    model.export(tmp_path / "model")
    labels, image = ["a dog", "two cats", "a shoe"], Image.new("RGB", (40, 40), "red")
    classify = pipeline("zero-shot-image-classification", model=str(tmp_path))
    scores = classify(image, candidate_labels=labels, hypothesis_template="{}")
    model = classify.model
    with torch.inference_mode():
        own = model.self_view(model.embed_images(model.processor.images([image])))
        texts = model.self_view(model.embed_texts(**model.processor.texts(labels)))
    expected = (model.config.logit_scale * own @ texts.T).softmax(-1)[0].tolist()
    assert {score["label"]: score["score"] for score in scores} == pytest.approx(
        dict(zip(labels, expected, strict=True)), abs=1e-5
    )
    assert len(classify([image] * 3, candidate_labels=labels)) == 3, "long labels are truncated, as for search"


def test_zero_shot_classification_of_other_models_stays_the_same(folder_of: dict[str, str]) -> None:
    classify = pipeline("zero-shot-image-classification", model=folder_of["clip"])
    scores = classify(Image.new("RGB", (40, 40), "red"), candidate_labels=["a dog", "two cats"], hypothesis_template="{}")
    assert sum(score["score"] for score in scores) == pytest.approx(1)


# Each is imported first in a fork of a process that knows neither of the two, only what transformers takes longest to import.
IMPORTED_FIRST = """
import os, sys
import datasets, scipy.optimize, sklearn.metrics, torch._dynamo, torch.distributed.tensor, torchvision

assert not {"transformers", "xcompat"} & set(sys.modules)
for imports in sys.argv[1:]:
    if not (fork := os.fork()):
        exec(imports)
        from transformers import AutoConfig
        from transformers.pipelines import PIPELINE_REGISTRY as known

        config = AutoConfig.for_model("xcompat-xbt")
        print("compatible-retrieval" in known.get_supported_tasks(), type(config).__module__, imports)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(fork, 0)
"""


def test_models_and_task_are_known_whatever_is_imported_first() -> None:
    first = ("import xcompat; from transformers import pipeline", "from transformers import pipeline; import xcompat")
    done = subprocess.run([sys.executable, "-c", IMPORTED_FIRST, *first], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [f"True xcompat.methods.xbt {imports}" for imports in first], done.stderr
