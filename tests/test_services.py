"""Pipelines of transformers on compatible models, and services that embed: their maps search and migrate by them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import invoke, refuses, store, write_embeds
from haystack import Document
from hub_server import Hub
from PIL import Image
from store_places import LancePlace, solve_map, unit_vectors
from test_map_texts import TEXTS, Service, rotated, serve_letters
from transformers import pipeline
from typer.testing import CliRunner

import xcompat
from xcompat import Fingerprint, FingerprintMismatchError, XcompatError
from xcompat.cli import app
from xcompat.data.images import open_image
from xcompat.embeddings.provider import ATTEMPTS, Provider, ServedMap
from xcompat.integrations.haystack import CompatDocumentEmbedder, CompatTextEmbedder
from xcompat.integrations.langchain import CompatEmbeddings
from xcompat.integrations.llamaindex import CompatEmbedding
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.pipeline import as_image
from xcompat.stores import migration
from xcompat.stores.service import ServiceEmbedding

pytestmark = pytest.mark.usefixtures("few_searches")
OLD = Fingerprint.from_string("the old model")
QUERY = "a red hat"
NAMED = "letters_service:embed"
NEW_DIM, OLD_DIM = 8, 6


def new(texts: list[str]) -> np.ndarray:
    return np.array(Service(NEW_DIM)(texts), np.float32)


@pytest.fixture(scope="module")
def map_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    stored = rotated(new(TEXTS), OLD_DIM).astype(np.float32)
    solve_map(stored, new(TEXTS), OLD, "new_to_old").save_pretrained(folder := tmp_path_factory.mktemp("map"))
    return str(folder)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return store(Gallery.create(tmp_path / "gallery", OLD, dim=OLD_DIM), rotated(new(TEXTS), OLD_DIM), TEXTS)


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    serve_letters(tmp_path, monkeypatch, NEW_DIM)
    return NAMED


def viewed(map_folder: str, text: str) -> np.ndarray:
    """Return a query as it was made before: by the service, and then by the map."""
    return ServedMap.load(map_folder, Service()).model.to_space(torch.from_numpy(new([text])))[0].numpy()


def searched(gallery: Gallery, query: str, *more: str) -> str:
    return invoke("gallery", "search", gallery.path, query, "--top-k", 3, *more)


def test_the_command_line_and_python_ask_the_service(gallery: Gallery, map_folder: str, named: str) -> None:
    hits = gallery.search(viewed(map_folder, QUERY), OLD, top_k=3)[0]
    output = searched(gallery, QUERY, "--model", map_folder, "--embed-with", named)
    places = [output.index(hit.id) for hit in hits]
    assert hits[0].id == QUERY and places == sorted(places)
    refuses("fitted on embeddings only: .*--embed-with", searched, gallery, QUERY, "--model", map_folder)
    served = ServedMap.load(map_folder, Service(NEW_DIM))
    store(gallery, served.embed(["a tall ship"]), ["ship"], version=served.model)
    found = gallery.search(served.embed(["a tall ship"]), served.model, top_k=len(gallery))[0]
    assert {hit.id: hit.score for hit in found}["ship"] == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(served.embed(["a tall ship"], "stored")[0], viewed(map_folder, "a tall ship"), atol=1e-6)


def test_the_price_of_re_ranking_is_printed_before_the_first_call(map_folder: str, named: str, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "texts", OLD, dim=OLD_DIM)
    store(gallery, rotated(new(TEXTS), OLD_DIM), TEXTS, [{"text": text} for text in TEXTS])
    asked = ("--model", map_folder, "--embed-with", named, "--rerank", "8")
    priced = (*asked, "--rerank-budget", "5", "--price-per-million-tokens", "2")
    output = " ".join(searched(gallery, QUERY, *priced).split())
    cost = r"embeds 5.0 texts per query, about (\d+) tokens, about (\S+) at 2 per million; at most 5 texts"
    found = re.search(cost, output)
    assert found and float(found[2]) == pytest.approx(2e-6 * int(found[1]), rel=0.1) and "5 embedded, 3 missing" in output
    output = " ".join(searched(gallery, QUERY, *asked).split())
    assert "embeds 3.0 texts per query" in output and "3 embedded, 5 from the cache" in output
    assert "re-ranking:" not in searched(gallery, QUERY, *asked), "the cache has all"
    with pytest.raises(XcompatError, match="--requests-per-minute needs a service"):
        searched(gallery, QUERY, "--model", map_folder, "--requests-per-minute", "5")


WAYS = {"name": NAMED, "function": Service(NEW_DIM), "provider": Provider(Service(NEW_DIM), "letters", batch=1)}


@pytest.mark.parametrize("way", WAYS)
def test_the_pipeline_asks_the_service(way: str, gallery: Gallery, map_folder: str, named: str) -> None:
    find = pipeline("compatible-retrieval", model=map_folder, gallery=gallery, embed_with=WAYS[way])
    hits = gallery.search(np.stack([viewed(map_folder, text) for text in TEXTS[:3]]), OLD, top_k=3)
    wanted = [[hit.id for hit in each] for each in hits]
    assert [[hit.id for hit in each] for each in find(TEXTS[:3], top_k=3, batch_size=2)] == wanted
    assert [hit.id for hit in find(TEXTS[0], top_k=3)] == wanted[0]
    refuses("embeds only texts", find, Image.new("RGB", (8, 8)))


def test_frameworks_ask_the_service_for_queries_and_documents(map_folder: str) -> None:
    service, stored_Nd = Service(NEW_DIM), torch.tensor([viewed(map_folder, text).tolist() for text in TEXTS])
    langchain, llamaindex = (each(map_folder, embed_with=service) for each in (CompatEmbeddings, CompatEmbedding))
    query, documents = (each(map_folder, embed_with=service) for each in (CompatTextEmbedder, CompatDocumentEmbedder))
    made = documents.run([Document(content=text) for text in TEXTS])["documents"]
    for queries, rows in (
        (langchain.embed_query(QUERY), langchain.embed_documents(TEXTS)),
        (llamaindex.get_query_embedding(QUERY), llamaindex.get_text_embedding_batch(TEXTS)),
        (query.run(QUERY)["embedding"], [each.embedding for each in made]),
    ):
        np.testing.assert_allclose(queries, viewed(map_folder, QUERY), atol=1e-6)
        np.testing.assert_allclose(rows, stored_Nd, atol=1e-6)
    assert langchain.embed_documents([]) == []
    refuses("saved pipeline cannot contain a function", query.to_dict)
    refuses("device does not apply to a service", CompatEmbeddings, map_folder, device="cpu", embed_with=service)


def test_misfits_refused(map_folder: str, old_folder: str, gallery: Gallery, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(XcompatError, match="Service returned 5 dimensions, but the map takes 8; use the function"):
        ServedMap.load(map_folder, Service(5)).embed([QUERY])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    service = Service()
    service.fails = lambda call: True
    with pytest.raises(XcompatError, match=rf"Service failed {ATTEMPTS} times .ConnectionError: no answer.; try again later"):
        ServedMap.load(map_folder, service).embed([QUERY])
    refuses("is not an xcompat model", searched, gallery, QUERY, "--model", old_folder, "--embed-with", named)
    known = ServedMap.load(map_folder, service).model
    known.config.encoder = {"name": "an encoder"}
    refuses("has its own encoder: remove the embedding function", ServedMap.load, known, service)
    Image.new("RGB", (8, 8)).save("photo.png")
    with pytest.raises(XcompatError, match="letters_service:embed embeds only texts"):
        searched(gallery, "photo.png", "--model", map_folder, "--embed-with", named)


SERVICES = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from test_map_texts import Service

embed = Service({dim})
turned = np.linalg.qr(np.random.default_rng(1).standard_normal(({dim}, {dim})))[0]
asked = []


def another(texts):
    asked.extend(texts)
    return np.array(embed(texts)) @ turned


def drifted(texts):
    rows = np.array(embed(texts)) + 0.1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def rounded(texts):
    return np.round(embed(texts), int(np.random.default_rng().integers(4, 7)))
"""


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Write a module with a service, another one and one that has drifted; return the options of a map of the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_services.py").write_text(SERVICES.format(here=str(Path(__file__).parent), dim=NEW_DIM))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"id": text, "text": text}) + "\n" for text in TEXTS))
    write_embeds(tmp_path / "old", TEXTS, text=rotated(new(TEXTS), OLD_DIM).astype(np.float32))
    named = ["map", "--old", "old", "--new", "letters", "--texts", "texts.jsonl", "--out", "made"]
    yield [*named, "--old-model", OLD.name, "--allow-worse"]
    sys.modules.pop("of_services", None)


def fit(options: list[str], function: str, *more: str) -> None:
    invoke(*options, "--embed-with", f"of_services:{function}", *more)


def test_maps_and_caches_refuse_another_service(services: list[str], gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    fit(services, "embed")
    asked = ("--model", "made/model", "--embed-with")
    assert QUERY in searched(gallery, QUERY, *asked, "of_services:embed")
    said = r"another does not embed like letters did .* mean cosine .*; use .*--embed-with of_services:embed, model letters"
    refuses(said, searched, gallery, QUERY, *asked, "of_services:another")
    refuses(said, CompatEmbeddings("made/model", embed_with="of_services:another").embed_query, QUERY)
    caplog.clear()
    searched(gallery, QUERY, *asked, "of_services:drifted")
    assert "drifted does not embed like letters did" in caplog.text
    refuses("another does not embed as of_services:embed did when .* was begun", fit, services, "another", "--overwrite")
    module = sys.modules["of_services"]
    module.embed.calls.clear()
    fit(services, "embed", "--overwrite")
    assert not module.embed.calls, "a finished cache asks nothing, not even test texts"


def test_test_texts_go_with_the_first_queries_once(services: list[str]) -> None:
    fit(services, "embed")
    calls: list[list[str]] = []

    def count(texts: list[str]) -> np.ndarray:
        calls.append(texts)
        return new(texts)

    served = ServedMap.load("made/model", count)
    for query in (QUERY, "a blue hat"):
        np.testing.assert_allclose(served.embed([query]).numpy(), new([query]), atol=1e-6)
    assert [len(texts) for texts in calls] == [4, 1]


N = 40


@pytest.fixture
def place(tmp_path: Path) -> LancePlace:
    pytest.importorskip("lancedb")
    found = LancePlace(tmp_path / "database")
    found.fill(unit_vectors(N, OLD_DIM))
    for row in range(N):
        found.note(str(row), f"a thing called {row}")
    return found


def test_a_killed_start_continues_and_pays_for_few_texts_again(place: LancePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServiceEmbedding, "max_batch", 10)
    first, then = Service(NEW_DIM), Service(NEW_DIM)

    def stop(call: int) -> bool:
        if call > 4:
            raise KeyboardInterrupt
        return False

    first.fails = stop
    with pytest.raises(KeyboardInterrupt):
        migration.start(place.open(), ServiceEmbedding(Provider(first, "big-3", batch=5), "about"))
    written = len(place.vectors("embedding_new"))
    assert written == 10
    provider = Provider(then, "big-3", batch=5)
    migration.start(place.open(), ServiceEmbedding(provider, "about"))
    assert len([text for call in then.calls for text in call if text.startswith("a thing")]) == N - written
    assert migration.verify(place.open(), ServiceEmbedding(provider, "about")).passed


def test_another_model_under_the_same_name_is_refused(place: LancePlace) -> None:
    migration.start(place.open(), ServiceEmbedding(Provider(Service(NEW_DIM), "big-3"), "about"))
    other = ServiceEmbedding(Provider(Service(NEW_DIM, seed=1), "big-3"), "about")
    for verb in (migration.start, migration.verify, migration.switch):
        refuses("big-3 does not embed as it did when this migration was started .* use the same", verb, place.open(), other)


def test_the_command_line_re_embeds_by_a_service(place: LancePlace, services: list[str]) -> None:
    """Verify accepts answers that are not the same bits. With --json, stdout contains nothing else."""
    named = ["--model", "big-3", "--embed", "about", "--embed-with", "of_services:rounded"]

    def run(verb: str, *options: str) -> Any:
        result = CliRunner().invoke(app, ["migrate", verb, place.uri(), *options])
        assert result.exit_code == 0, (verb, result.output, result.exception)
        return result

    assert "40 rows: about 168 tokens, about 0.17" in run("plan", *named, "--price-per-million-tokens", "1000").stdout
    planned = run("plan", *named, "--json")
    assert "less than a second to read and compute the vectors, plus time to load the model" in planned.stderr
    found = json.loads(planned.stdout)
    assert (found["rows"], found["dim"], found["where"]) == (N, NEW_DIM, None) and "168 tokens" in found["cost"]
    assert "embeds the texts" not in run("start", *named, "--budget", "0").stdout
    assert "big-3 embeds the texts of 4 rows: about 17 tokens" in run("start", *named, "--budget", "4").stdout
    assert "run `xcompat migrate verify`" in run("start", *named, "--batch", "16", "--requests-per-minute", "1e6").stdout
    found = json.loads(run("status", "--json").stdout)
    assert (found["state"], found["written"], found["missing"]) == ("filling", N, 0)
    found = json.loads(run("verify", *named, "--json").stdout)
    assert found["passed"] and found["compared"] == N and found["wrong"] == 0
    run("switch", *named)
    assert "_before from" in run("finish", "--yes").stdout
    assert place.dim() == NEW_DIM and place.open().spaces()["embedding"].fingerprint.name == "big-3"  # type: ignore[union-attr]


@pytest.mark.parametrize(("verb", "deleted"), [("finish", "embedding_before"), ("rollback", "embedding_new")])
@pytest.mark.parametrize(
    ("answer", "options", "is_deleted"), [("n", [], False), ("y", [], True), (None, [], False), (None, ["--yes"], True)]
)
def test_verbs_ask_before_they_delete(
    place: LancePlace, verb: str, deleted: str, answer: str | None, options: list[str], is_deleted: bool, monkeypatch: Any
) -> None:
    """In a terminal they ask, elsewhere (None) they need an option. The first rollback only undoes the switch."""
    service = ServiceEmbedding(Provider(Service(NEW_DIM), "big-3"), "about")
    migration.start(place.open(), service)
    early = CliRunner().invoke(app, ["migrate", "finish", place.uri()])
    assert "is not switched" in str(early.exception) and not early.output, "it is refused without a question"
    migration.switch(place.open(), service)
    monkeypatch.setattr("xcompat.cli.migrate.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: answer is not None)))
    if verb == "rollback":
        undone = CliRunner().invoke(app, ["migrate", verb, place.uri()])
        assert undone.exit_code == 0 and "has the old vectors again" in undone.output and deleted in place.names()
    result = CliRunner().invoke(app, ["migrate", verb, place.uri(), *options], input=answer)
    assert (result.exit_code == 0) == is_deleted == (deleted not in place.names())
    asked = {"finish": "This cannot be undone.", "rollback": "There is no switch to undo. Delete the new vectors, embedding_new"}
    assert (asked[verb] in result.output) == (answer is not None)
    assert ("confirm with --yes" in str(result.exception)) == (answer is None and not is_deleted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--embed-with", "math:sqrt"], "--embed-with embeds texts of the rows; choose their field with --embed"),
        (["--requests-per-minute", "9"], "--requests-per-minute and --price-per-million-tokens need --embed-with"),
        (["--embed", "a", "--image-folder", ".", "--embed-with", "math:sqrt"], "embeds texts; remove --image-folder"),
        (["--embed", "a", "--embed-with", "math:sqrt", "--engine", "ray"], "from a single process; remove --engine"),
        (["--embed", "a", "--embed-with", "math:squirt"], "math has no function 'squirt'"),
    ],
)
def test_options_that_do_not_fit_are_refused(place: LancePlace, options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["migrate", "start", place.uri(), "--model", "big-3", *options])
    assert isinstance(result.exception, XcompatError) and said in str(result.exception)


ANIMALS = ["a dog", "two cats", "a red shoe", "a blue shoe"]


@pytest.fixture(scope="module")
def animals(old_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    old = load_embedder(old_folder)
    empty = Gallery.create(tmp_path_factory.mktemp("pipeline") / "gallery", old)
    return store(empty, old.embed(old.processor.texts(ANIMALS)), ANIMALS, [{"shoe": "shoe" in text} for text in ANIMALS])


@pytest.fixture(scope="module")
def find(compatible_folder: str, animals: Gallery) -> Any:
    return pipeline("compatible-retrieval", model=compatible_folder, gallery=str(animals.path))


def test_a_query_finds_what_its_view_finds(find: Any, animals: Gallery, tmp_path: Path) -> None:
    model = find.model
    with torch.inference_mode():
        texts = model.processor.texts(["a dog"])
        expected = animals.search(model.embed_texts(**texts), model, top_k=3)[0]
    hits = find("a dog", top_k=3)
    assert [hit["id"] for hit in hits] == [hit.id for hit in expected]
    assert hits[0].keys() == {"id", "score", "version", "metadata", "confidence", "group", "standing"}
    assert hits[0].id == hits[0]["id"] and hits[0]["confidence"] is hits[0].confidence is None, "nothing is remembered"
    assert hits[0]["metadata"] == expected[0].metadata and hits[0]["version"] == str(animals.versions[0])
    image = Image.new("RGB", (40, 40), "red")
    image.save(tmp_path / "shoe.png")
    with torch.inference_mode():
        best = animals.search(model.embed_images(model.processor.images([image])), model, top_k=2)[0]
    for query in (image, np.array(image), str(tmp_path / "shoe.png"), tmp_path / "shoe.png"):
        assert [hit["id"] for hit in find(query, top_k=2)] == [hit.id for hit in best]


def test_hits_are_ordered_by_new_embeddings_of_their_texts(animals: Gallery, compatible_folder: str, tmp_path: Path) -> None:
    lines = "".join(f'{{"id": "{text}", "text": "{text}"}}\n' for text in ANIMALS)
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    named = {"model": compatible_folder, "gallery": str(animals.path)}
    find = pipeline("compatible-retrieval", **named, rerank=4, originals=tmp_path / "texts.jsonl")
    model = find.model
    with torch.inference_mode():
        query, texts = (model.self_view(model.embed_texts(**model.processor.texts(each))) for each in (["a dog"], ANIMALS))
        new = torch.nn.functional.cosine_similarity(query, texts)
    old = {hit["id"]: hit["score"] for hit in pipeline("compatible-retrieval", **named)("a dog")}
    expected = {text: (2 * score + old[text]) / 3 for text, score in zip(ANIMALS, new.tolist(), strict=True)}
    hits = find(["a dog", "a red shoe"], top_k=3)[0]
    assert [hit["id"] for hit in hits] == sorted(expected, key=lambda text: -expected[text])[:3]
    np.testing.assert_allclose([hit["score"] for hit in hits], [expected[hit["id"]] for hit in hits], atol=1e-5)
    find.model.config.rerank_candidates = 3
    chosen = pipeline("compatible-retrieval", **named | {"model": find.model}, rerank=True, originals=tmp_path / "texts.jsonl")
    assert chosen.rerank.candidates == 3
    refuses("add rerank=20", pipeline, "compatible-retrieval", **named, originals=tmp_path / "texts.jsonl")


def test_an_image_is_read_as_galleries_read_theirs(hub: Hub, tmp_path: Path) -> None:
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


def test_filters_defaults_and_encoders_without_a_map(
    find: Any, compatible_folder: str, animals: Gallery, old_folder: str, folder_of: dict[str, str]
) -> None:
    assert {hit["id"] for hit in find("a dog", where={"shoe": True})} == {"a red shoe", "a blue shoe"}
    one = pipeline("compatible-retrieval", model=compatible_folder, gallery=animals, top_k=1)
    assert len(one("a dog")) == 1 and len(one("a dog", top_k=2)) == 2 and len(one(["a dog", "b"])[1]) == 1
    assert pipeline("compatible-retrieval", model=old_folder, gallery=animals)("two cats", top_k=1)[0]["id"] == "two cats"
    other = pipeline("compatible-retrieval", model=folder_of["clip"], gallery=animals)
    with pytest.raises(FingerprintMismatchError, match="cannot be compared"):
        other("two cats")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_maps_halve_encoders(dtype: str, folder_of: dict[str, str], old_folder: str, animals: Gallery, tmp_path: Path) -> None:
    """The encoder beside the map is loaded when it first embeds, and its own fingerprint is checked before it is rounded."""
    old, new = load_embedder(old_folder), load_embedder(folder_of["clip"])
    ridge = xcompat.RidgeModel.from_encoder(folder_of["clip"], old=old.describe_old())
    texts = [f"{colour} {thing}" for colour in ("a red", "two blue", "no") for thing in ("shoe", "dog", "cats", "alpha")]
    ridge.fit([(new.embed(new.processor.texts(texts)), old.embed(old.processor.texts(texts)))]).save_pretrained(tmp_path)
    whole = pipeline("compatible-retrieval", model=str(tmp_path), gallery=animals)
    half = pipeline("compatible-retrieval", model=str(tmp_path), gallery=animals, dtype=dtype)
    for hits, expected in zip(half(ANIMALS, top_k=2), whole(ANIMALS, top_k=2), strict=True):
        assert [hit["id"] for hit in hits] == [hit["id"] for hit in expected]
        assert [hit["score"] for hit in hits] == pytest.approx([hit["score"] for hit in expected], abs=2e-2)
    assert half.model._get_encoder().dtype == half.model.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in new.model.parameters()} == {torch.float32}


def test_what_a_pipeline_refuses(find: Any, compatible_folder: str, tmp_path: Path) -> None:
    refuses("set its folder with gallery", pipeline, "compatible-retrieval", model=compatible_folder)
    refuses("is not a gallery", pipeline, "compatible-retrieval", model=compatible_folder, gallery=str(tmp_path))
    refuses("not topk", find, "a dog", topk=3)
    refuses("not int", find, 3)
    (tmp_path / "bad.png").write_bytes(b"no image")
    Image.new("RGB", (40, 40), "red").save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:80])
    with Image.open(tmp_path / "cut.png") as cut:
        addresses = ["http://127.0.0.1:9/shoe.png", "http://[", f"http://{'a' * 64}.com/shoe.png", "http://127.0.0.1:9/\ud800"]
        for query in (str(tmp_path / "bad.png"), tmp_path / "nowhere.png", cut, *addresses):
            refuses("cannot read the image", find, query)
    for array in (np.zeros((20, 20, 3)), np.zeros((3, 20, 20), np.uint8), np.zeros((2, 20, 20, 3), np.uint8)):
        refuses(r"an image array must be \(H, W, 3\) uint8, not \(", find, array)


@pytest.mark.parametrize("architecture", ["clip", "open_clip"])
def test_zero_shot_in_the_models_own_space(architecture: str, folder_of: dict[str, str], old_folder: str, tmp_path: Path) -> None:
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


# In this process, xcompat was imported first.
TRANSFORMERS_FIRST = """
from transformers import AutoConfig, pipeline
import xcompat
from transformers.pipelines import PIPELINE_REGISTRY as known

print("compatible-retrieval" in known.get_supported_tasks(), type(AutoConfig.for_model("xcompat-xbt")).__module__)
"""


def test_models_and_task_are_known_where_transformers_is_imported_first() -> None:
    done = subprocess.run([sys.executable, "-c", TRANSFORMERS_FIRST], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "xcompat.methods.xbt"], done.stderr
