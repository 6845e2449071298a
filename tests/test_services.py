"""Services that embed: maps of their embeddings search with them, and migrations take their vectors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import invoke, write_embeds
from haystack import Document
from PIL import Image
from store_places import LancePlace, unit_vectors
from test_map_texts import TEXTS, Service, rotated, serve_letters
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
    with pytest.raises(XcompatError, match="fitted on embeddings only: .*--embed-with"):
        searched(gallery, QUERY, "--model", map_folder)
    served = ServedMap.load(map_folder, Service(NEW_DIM))
    gallery.add(served.embed(["a tall ship"]), ["ship"], version=served.model)
    gallery.commit()
    found = gallery.search(served.embed(["a tall ship"]), served.model, top_k=len(gallery))[0]
    assert {hit.id: hit.score for hit in found}["ship"] == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(served.embed(["a tall ship"], "stored")[0], viewed(map_folder, "a tall ship"), atol=1e-6)


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


def test_misfits_refused(map_folder: str, old_folder: str, gallery: Gallery, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(XcompatError, match="Service returned 5 dimensions, but the map takes 8; use the function"):
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


N = 40
MODULE = """
import numpy as np

noise = np.random.default_rng()

def embed(texts):
    rows = np.stack([np.random.default_rng(len(text) + sum(map(ord, text))).standard_normal(8) for text in texts])
    rows += noise.normal(0, 1e-4, rows.shape)  # as services round
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
"""


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
        with pytest.raises(XcompatError, match="big-3 does not embed as it did when this migration was started .* use the same"):
            verb(place.open(), other)


def test_the_command_line_re_embeds_by_a_service(place: LancePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify accepts answers that are not the same bits. With --json, stdout contains nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "migration_service.py").write_text(MODULE)
    named = ["--model", "big-3", "--embed", "about", "--embed-with", "migration_service:embed"]

    def run(verb: str, *options: str) -> Any:
        result = CliRunner().invoke(app, ["migrate", verb, place.uri(), *options])
        assert result.exit_code == 0, (verb, result.output, result.exception)
        return result

    assert "40 rows: about 168 tokens, about 0.17" in run("plan", *named, "--price-per-million-tokens", "1000").stdout
    planned = run("plan", *named, "--json")
    assert "less than a second to read and compute the vectors, plus time to load the model" in planned.stderr
    found = json.loads(planned.stdout)
    assert (found["rows"], found["dim"], found["where"]) == (N, NEW_DIM, None) and "168 tokens" in found["cost"]
    assert "run `xcompat migrate verify`" in run("start", *named, "--batch", "16", "--requests-per-minute", "1e6").stdout
    found = json.loads(run("status", "--json").stdout)
    assert (found["state"], found["written"], found["missing"]) == ("filling", N, 0)
    found = json.loads(run("verify", *named, "--json").stdout)
    assert found["passed"] and found["compared"] == N and found["wrong"] == 0
    run("switch", *named)
    assert "_before from" in run("finish", "--yes").stdout
    assert place.dim() == NEW_DIM and place.open().spaces()["embedding"].fingerprint.name == "big-3"  # type: ignore[union-attr]


def switch_and_answer(place: LancePlace, monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    """Switch to new vectors, in a terminal whose user gives an answer, or outside a terminal (None)."""
    service = ServiceEmbedding(Provider(Service(NEW_DIM), "big-3"), "about")
    migration.start(place.open(), service)
    migration.switch(place.open(), service)
    monkeypatch.setattr("xcompat.cli.migrate.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: answer is not None)))


ANSWERS = pytest.mark.parametrize(
    ("answer", "options", "is_deleted"), [("n", [], False), ("y", [], True), (None, [], False), (None, ["--yes"], True)]
)


@ANSWERS
def test_finish_asks_before_it_deletes(
    place: LancePlace, monkeypatch: pytest.MonkeyPatch, answer: str | None, options: list[str], is_deleted: bool
) -> None:
    switch_and_answer(place, monkeypatch, answer)
    result = CliRunner().invoke(app, ["migrate", "finish", place.uri(), *options], input=answer)
    assert (result.exit_code == 0) == is_deleted and ("This cannot be undone." in result.output) == (answer is not None)
    assert ("embedding_before" in place.names()) != is_deleted
    assert ("confirm with --yes" in str(result.exception)) == (answer is None and not is_deleted)


@ANSWERS
def test_a_second_rollback_asks_before_it_deletes(
    place: LancePlace, monkeypatch: pytest.MonkeyPatch, answer: str | None, options: list[str], is_deleted: bool
) -> None:
    """The first rollback only undoes the switch."""
    switch_and_answer(place, monkeypatch, answer)
    undone = CliRunner().invoke(app, ["migrate", "rollback", place.uri()])
    assert undone.exit_code == 0 and "has the old vectors again" in undone.output and "embedding_new" in place.names()
    again = CliRunner().invoke(app, ["migrate", "rollback", place.uri(), *options], input=answer)
    assert ("embedding_new" in place.names()) != is_deleted and (again.exit_code == 0) == is_deleted
    said = again.output if answer is not None or is_deleted else str(again.exception)
    assert ("There is no switch to undo. Delete the new vectors, embedding_new" in said) == (answer is not None)
    assert ("so this deletes embedding_new; confirm with --yes" in said) == (answer is None and not is_deleted)


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
