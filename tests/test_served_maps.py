"""A map of a service's embeddings and the function that asks the service: they search, and embed documents, together."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from haystack import Document
from PIL import Image
from test_map_texts import TEXTS, Service, rotated
from transformers import pipeline
from typer.testing import CliRunner

from xcompat import Fingerprint, RidgeConfig, RidgeModel, XcompatError
from xcompat.cli import app
from xcompat.embeddings.provider import ATTEMPTS, Provider, ServedMap
from xcompat.integrations.haystack import CompatDocumentEmbedder, CompatTextEmbedder
from xcompat.integrations.langchain import CompatEmbeddings
from xcompat.integrations.llamaindex import CompatEmbedding
from xcompat.models.config import describe_old
from xcompat.retrieval import Gallery

OLD = Fingerprint.from_string("the old model")
QUERY = "a red hat"
NAMED = "letters_of_texts:embed"
NEW_DIM, OLD_DIM = 8, 6


def new(texts: list[str]) -> np.ndarray:
    return np.array(Service(NEW_DIM)(texts), np.float32)


@pytest.fixture(scope="module")
def map_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a map that was fitted on a service's embeddings and on old ones."""
    pairs = torch.from_numpy(new(TEXTS)), torch.from_numpy(rotated(new(TEXTS), OLD_DIM)).float()
    model = RidgeModel(RidgeConfig(old=describe_old(OLD, OLD_DIM), embedding_dim=NEW_DIM)).fit([pairs])
    model.save_pretrained(folder := tmp_path_factory.mktemp("map"))
    return str(folder)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    made = Gallery.create(tmp_path / "gallery", OLD, dim=OLD_DIM)
    made.add(rotated(new(TEXTS), OLD_DIM), TEXTS)
    made.commit()
    return made


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the function into a module of the current folder."""
    monkeypatch.chdir(tmp_path)
    here = str(Path(__file__).parent)
    (tmp_path / "letters_of_texts.py").write_text(
        f"import sys; sys.path.insert(0, {here!r})\nfrom test_map_texts import Service\nembed = Service({NEW_DIM})\n"
    )
    return NAMED


def viewed(map_folder: str, text: str) -> np.ndarray:
    """Return a query as it was made before: by the service, and then by the map."""
    return ServedMap.load(map_folder, Service()).model.to_space(torch.from_numpy(new([text])))[0].numpy()


def searched(gallery: Gallery, query: str, *more: str) -> str:
    done = CliRunner().invoke(app, ["gallery", "search", str(gallery.path), query, "--top-k", "3", *more])
    if isinstance(done.exception, XcompatError):
        raise done.exception
    assert not done.exit_code, done.output
    return done.output


def test_the_command_line_asks_the_service(gallery: Gallery, map_folder: str, named: str) -> None:
    hits = gallery.search(viewed(map_folder, QUERY), OLD, top_k=3)[0]
    output = searched(gallery, QUERY, "--model", map_folder, "--embed-with", named)
    places = [output.index(hit.id) for hit in hits]
    assert hits[0].id == QUERY and places == sorted(places)
    with pytest.raises(XcompatError, match="fitted on embeddings only: .*--embed-with"):
        searched(gallery, QUERY, "--model", map_folder)


def test_the_price_of_re_ranking_is_printed_before_the_first_call(map_folder: str, named: str, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "texts", OLD, dim=OLD_DIM)
    gallery.add(rotated(new(TEXTS), OLD_DIM), TEXTS, [{"text": text} for text in TEXTS])
    gallery.commit()
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
    with pytest.raises(XcompatError, match="embeds only texts"):
        find(Image.new("RGB", (8, 8)))


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
    with pytest.raises(XcompatError, match="saved pipeline cannot contain a function"):
        query.to_dict()
    with pytest.raises(XcompatError, match="device does not apply to a service"):
        CompatEmbeddings(map_folder, device="cpu", embed_with=service)


def test_a_gallery_takes_texts_that_the_service_embedded(gallery: Gallery, map_folder: str) -> None:
    served = ServedMap.load(map_folder, Service(NEW_DIM))
    gallery.add(served.embed(["a tall ship"]), ["ship"], version=served.model)
    gallery.commit()
    hits = gallery.search(served.embed(["a tall ship"]), served.model, top_k=len(gallery))[0]
    assert {hit.id: hit.score for hit in hits}["ship"] == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(served.embed(["a tall ship"], "stored")[0], viewed(map_folder, "a tall ship"), atol=1e-6)


def test_misfits_refused(map_folder: str, old_folder: str, gallery: Gallery, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        XcompatError, match="Service returned 5 dimensions, but the map takes 8; use the function that the map was fitted with"
    ):
        ServedMap.load(map_folder, Service(5)).embed([QUERY])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    service = Service()
    service.fails = lambda call: True
    with pytest.raises(XcompatError, match=rf"Service failed {ATTEMPTS} times .ConnectionError: no answer.; try again later"):
        ServedMap.load(map_folder, service).embed([QUERY])
    with pytest.raises(XcompatError, match="is not an xcompat model"):
        searched(gallery, QUERY, "--model", old_folder, "--embed-with", named)
    known = ServedMap.load(map_folder, service).model
    known.config.encoder = {"name": "an encoder"}
    with pytest.raises(XcompatError, match="has its own encoder: remove the embedding function"):
        ServedMap.load(known, service)
    Image.new("RGB", (8, 8)).save("photo.png")
    with pytest.raises(XcompatError, match="letters_of_texts:embed embeds only texts"):
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
"""


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Write a module with a service, another one and one that has drifted; return the options of a map of the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_services.py").write_text(SERVICES.format(here=str(Path(__file__).parent), dim=NEW_DIM))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"id": text, "text": text}) + "\n" for text in TEXTS))
    (tmp_path / "old").mkdir()
    np.save(tmp_path / "old" / "text_embeds.npy", rotated(new(TEXTS), OLD_DIM).astype(np.float32))
    (tmp_path / "old" / "text_ids.txt").write_text("\n".join(TEXTS))
    named = ["map", "--old", "old", "--new", "letters", "--texts", "texts.jsonl", "--out", "made"]
    yield [*named, "--old-model", OLD.name, "--allow-worse"]
    sys.modules.pop("of_services", None)


def fit(options: list[str], function: str, *more: str) -> None:
    done = CliRunner().invoke(app, [*options, "--embed-with", f"of_services:{function}", *more])
    if isinstance(done.exception, XcompatError):
        raise done.exception
    assert not done.exit_code, done.output


def test_another_service_is_refused(services: list[str], gallery: Gallery, caplog: pytest.LogCaptureFixture) -> None:
    fit(services, "embed")
    asked = ("--model", "made/model", "--embed-with")
    assert QUERY in searched(gallery, QUERY, *asked, "of_services:embed")
    said = r"another does not embed like letters did .* mean cosine .*; use .*--embed-with of_services:embed, model letters"
    with pytest.raises(XcompatError, match=said):
        searched(gallery, QUERY, *asked, "of_services:another")
    with pytest.raises(XcompatError, match=said):
        CompatEmbeddings("made/model", embed_with="of_services:another").embed_query(QUERY)
    caplog.clear()
    searched(gallery, QUERY, *asked, "of_services:drifted")
    assert "drifted does not embed like letters did" in caplog.text


def test_a_cache_is_not_continued_by_another_service(services: list[str]) -> None:
    fit(services, "embed")
    with pytest.raises(XcompatError, match="another does not embed as of_services:embed did when .* was begun"):
        fit(services, "another", "--overwrite")
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
