"""LangChain, LlamaIndex and Haystack ask new queries of a store of old vectors, and find what a gallery of these finds."""

from __future__ import annotations

import asyncio
import copy
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refuses, store
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore
from langchain_core.documents import Document as LangchainDocument
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from schedule import mostly_nightly, mostly_nightly_rows

from xcompat import Fingerprint, XcompatError
from xcompat.integrations.haystack import CompatDocumentEmbedder, CompatRanker, CompatTextEmbedder
from xcompat.integrations.langchain import CompatEmbeddings, CompatReranker
from xcompat.integrations.llamaindex import CompatEmbedding, CompatRerank
from xcompat.methods import METHODS
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_checkpoint, load_embedder
from xcompat.models.query_memory import QueryMemory
from xcompat.retrieval import Gallery
from xcompat.retrieval.text_embedder import Source, TextEmbedder
from xcompat.retrieval.versions import stored_embeddings

WORDS = ["red", "running", "shoe", "two", "dogs", "green", "grass", "greek", "small", "letter", "alpha", "tonos"]
DRAWN = np.random.default_rng(0)
TEXTS = [" ".join(DRAWN.permutation(WORDS)[: 2 + number % 7]) for number in range(20)]
IDS = [f"text-{number}" for number in range(len(TEXTS))]
QUERIES = ["two dogs", "a red shoe", "alpha with tonos", "small green letter on grass"]
MODELS = ("closed form", "phi", "remembering", "the old model", "maps galleries")
Search = Callable[[Source, np.ndarray, str], list[str]]
"""From a model, the stored vectors and a query to the ids of all texts, the nearest first."""


@pytest.fixture(scope="module")
def source_of(
    old: Embedder, old_folder: str, folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return the folder of each model: those of queries for the old store, and one that maps galleries."""
    new, folder = load_embedder(folder_of["clip"]), tmp_path_factory.mktemp("models")
    known: dict[str, Any] = {"encoder": new.describe_encoder(), "old": old.describe_old(), "embedding_dim": new.dim}

    def ridge(**options: Any) -> CompatModel:
        model = METHODS["ridge"](METHODS["ridge"].config_class(**known, **options))
        return model.fit([(embedded(new, TEXTS), embedded(old, TEXTS))])

    memory = QueryMemory(new.dim, old.dim, entries=6)
    for buffer in memory.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)))
    models = {
        "closed form": ridge(),
        "phi": METHODS["projection"].from_encoder(folder_of["clip"], old=old.describe_old()),
        "remembering": ridge().remember(memory),
        "maps galleries": ridge(direction="old_to_new"),
    }
    for name, model in models.items():
        model.export(folder / name)
    return {name: str(folder / name) for name in models} | {"the old model": old_folder}


def embedded(embedder: Embedder, texts: list[str]) -> torch.Tensor:
    return embedder.embed(embedder.processor.texts(texts))


def in_langchain(model: Source, stored_Nd: np.ndarray, query: str) -> list[str]:
    memory = InMemoryVectorStore(CompatEmbeddings(model))
    for id_, text, vector in zip(IDS, TEXTS, stored_Nd.tolist(), strict=True):
        memory.store[id_] = {"id": id_, "vector": vector, "text": text, "metadata": {}}
    return [str(found.id) for found in memory.similarity_search(query, k=len(IDS))]


def in_llamaindex(model: Source, stored_Nd: np.ndarray, query: str) -> list[str]:
    nodes = [TextNode(id_=id_, text=text, embedding=row.tolist()) for id_, text, row in zip(IDS, TEXTS, stored_Nd, strict=True)]
    storage = StorageContext.from_defaults(vector_store=SimpleVectorStore())
    index = VectorStoreIndex(nodes, storage_context=storage, embed_model=CompatEmbedding(model))
    return [found.node_id for found in index.as_retriever(similarity_top_k=len(IDS)).retrieve(query)]


def in_haystack(model: Source, stored_Nd: np.ndarray, query: str) -> list[str]:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    columns = zip(IDS, TEXTS, stored_Nd.tolist(), strict=True)
    store.write_documents([Document(id=id_, content=text, embedding=row) for id_, text, row in columns])
    pipeline = Pipeline()
    pipeline.add_component("embedder", CompatTextEmbedder(model))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=len(IDS)))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    return [found.id for found in pipeline.run({"embedder": {"text": query}})["retriever"]["documents"]]


@pytest.mark.parametrize(
    ("name", "search"),
    mostly_nightly_rows(
        itertools.product(MODELS, [in_langchain, in_llamaindex, in_haystack]),
        lambda name, search: name == "remembering" or search is in_langchain,
    ),
)
def test_hits_are_those_of_a_gallery(name: str, search: Search, old: Embedder, source_of: dict[str, str], tmp_path: Path) -> None:
    model = load_embedder(source_of[name]) if name == "the old model" else load_checkpoint(source_of[name])
    old_Nd = embedded(old, TEXTS)
    gallery = store(Gallery.create(tmp_path / "gallery", old), old_Nd, IDS)
    if isinstance(model, CompatModel) and model.maps_galleries:
        gallery.upgrade(model)
        old_Nd = model.upgrade(old_Nd)
    for query in QUERIES[:2]:
        hits = gallery.search(model.embed(model.processor.texts([query]), "own"), model, top_k=len(IDS))[0]  # type: ignore[union-attr]
        assert search(source_of[name], old_Nd.detach().numpy(), query) == [hit.id for hit in hits]


def ways_of(model: Source, **options: Any) -> dict[str, tuple[list[float], list[list[float]]]]:
    langchain, llamaindex = CompatEmbeddings(model, **options), CompatEmbedding(model, **options)
    text, documents = CompatTextEmbedder(model, **options), CompatDocumentEmbedder(model, **options)
    found = documents.run([Document(content=each) for each in TEXTS])["documents"]
    query, run = QUERIES[0], asyncio.run
    one_by_one = [run(llamaindex.aget_text_embedding(TEXTS[0])), *map(llamaindex.get_text_embedding, TEXTS[1:])]
    later = run(llamaindex.aget_query_embedding(query)), run(llamaindex.aget_text_embedding_batch(TEXTS))
    return {
        "langchain": (langchain.embed_query(query), langchain.embed_documents(TEXTS)),
        "langchain, later": (run(langchain.aembed_query(query)), run(langchain.aembed_documents(TEXTS))),
        "llamaindex": (llamaindex.get_query_embedding(query), llamaindex.get_text_embedding_batch(TEXTS)),
        "llamaindex, later": later,
        "llamaindex, one by one": (llamaindex.get_query_embedding(query), one_by_one),
        "haystack": (text.run(query)["embedding"], [each.embedding or [] for each in found]),
    }


@pytest.mark.parametrize("name", mostly_nightly(MODELS, ("maps galleries", "remembering").__contains__))
def test_documents_are_what_a_gallery_stores(name: str, source_of: dict[str, str]) -> None:
    """In any order of lengths, by any way of asking; a memory is of queries alone."""
    if name == "the old model":
        stored_Nd = embedded(load_embedder(source_of[name]), TEXTS).numpy()
    else:
        model = load_checkpoint(source_of[name])
        own_ND = model.embed(model.processor.texts(TEXTS), "own")
        _, stored_Nd = stored_embeddings(model, own_ND, ())
    ways = ways_of(source_of[name])
    for query, documents in ways.values():
        np.testing.assert_allclose(documents, stored_Nd, atol=1e-6)
        assert query == ways["langchain"][0]


def test_queries_fit_the_version_that_is_named(source_of: dict[str, str], old: Embedder) -> None:
    """By any of its names. What the model stores lies in the old space, so the metric and the memory serve both."""
    model = load_checkpoint(source_of["remembering"])
    own_1D = model.embed_texts(**model.processor.texts(["two dogs"]))
    with torch.inference_mode():
        query = model.to_space(own_1D)[0].tolist()
    for version in (old.fingerprint, model.lineage.stores.fingerprint):
        for named in (version, version.name, version.digest, version.digest[:12], str(version)):
            assert CompatEmbeddings(model, named).embed_query("two dogs") == pytest.approx(query, abs=1e-6)
    assert TextEmbedder(model).version == old.fingerprint
    loaded = CompatEmbeddings(Embedder.from_model(model, "own"))
    assert loaded.embed_documents(["two dogs"]) == CompatEmbeddings(model).embed_documents(["two dogs"])


def test_versions_need_a_fingerprint_and_a_dimension(source_of: dict[str, str], old: Embedder, folder_of: dict[str, str]) -> None:
    model = load_checkpoint(source_of["phi"])
    known = f"choose one of these: {old.fingerprint}, {model.lineage.stores.fingerprint}"
    for unknown in ("clip-l14", Fingerprint.from_string("clip-l14")):
        for make in (CompatEmbeddings, CompatEmbedding, CompatTextEmbedder, CompatDocumentEmbedder):
            with pytest.raises(XcompatError) as caught:
                getattr(make(model, unknown), "warm_up", lambda: None)()
            assert str(caught.value) == f"queries of this model do not fit {unknown}; {known}"
    refuses(f"do not fit clip-l14; choose one of these: {old.fingerprint}$", CompatEmbeddings, old, "clip-l14")
    with pytest.raises(XcompatError, match="maps galleries, not queries: upgrade the stored embeddings with model.upgrade"):
        CompatEmbeddings(source_of["maps galleries"], old.fingerprint)
    earlier = {"name": old.name, "fingerprint": Fingerprint.from_string("earlier").digest, "dim": 4}
    model = METHODS["projection"].from_encoder(folder_of["clip"], old=old.describe_old() | {"compatible_with": [earlier]})
    refuses(f"2 versions are called {old.name}; choose one of these: {old.fingerprint}, ", CompatEmbeddings, model, old.name)
    assert TextEmbedder(model, earlier["fingerprint"]).version == Fingerprint(earlier["fingerprint"])
    with pytest.raises(XcompatError, match=r"stores 8 dimensions, but a store of .* has 4: keep new documents"):
        CompatEmbeddings(model, earlier["fingerprint"]).embed_documents(["two dogs"])


def test_a_query_has_the_prompt_of_queries(old_folder: str) -> None:
    old = load_embedder(old_folder)
    plain, prompted = old.processor, copy.copy(old.processor)
    prompted.tokenize = lambda texts: plain.tokenize([f"query {text}" for text in texts])  # type: ignore[method-assign]
    plain.for_queries = lambda: prompted  # type: ignore[method-assign]
    embeddings = CompatEmbeddings(old)
    np.testing.assert_allclose(embeddings.embed_query("two dogs"), embedded(old, ["query two dogs"])[0], atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_documents(["two dogs"]), embedded(old, ["two dogs"]), atol=1e-6)
    assert TextEmbedder(old).version == old.fingerprint, "a version is that of the passages"


def test_bad_input_is_refused(source_of: dict[str, str], image_folder_of: dict[str, str], old: Embedder, tmp_path: Path) -> None:
    given: list[tuple[Any, dict[str, Any], str]] = [
        (image_folder_of["resnet"], {}, "resnet embeds no texts; choose a model with a text encoder"),
        (tmp_path / "nothing", {}, "the model folder .* does not exist"),
        (old, {"device": "cuda"}, "already loaded: load it on cuda, or pass its name"),
        (torch.nn.Linear(1, 1), {}, "not Linear"),
    ]
    for model, options, said in given:
        refuses(said, CompatEmbeddings, model, **options)
    alone = METHODS["ridge"](METHODS["ridge"].config_class(old=old.describe_old(), embedding_dim=16))
    refuses("this map has no encoder and cannot embed texts", CompatEmbeddings(alone).embed_query, "a dog")
    embeddings = CompatEmbeddings(source_of["phi"])
    for wrong in ("a text", ["a", None], [("a", "pair")]):
        refuses("documents as a list of strings, not (str|NoneType|tuple)", embeddings.embed_documents, wrong)
    assert embeddings.embed_documents([]) == []


@pytest.mark.parametrize("name", mostly_nightly(["closed form", "phi", "the old model"], "phi".__eq__))
def test_documents_are_ordered_by_the_new_model(name: str, source_of: dict[str, str], old: Embedder) -> None:
    """As a naive sum of cosines orders them; LangChain gives no scores, and gets the order of the new model alone."""
    query, source = QUERIES[0], source_of[name]
    embedder = load_embedder(source)
    own = Embedder.from_model(embedder.model, "own") if isinstance(embedder.model, CompatModel) else embedder
    unit = torch.nn.functional.normalize
    new = (unit(embedded(own, [query]), dim=1) @ unit(embedded(own, TEXTS), dim=1).T)[0].detach().numpy()
    before = (embedded(old, [query]) @ embedded(old, TEXTS).T)[0].detach().numpy()
    for with_scores, score in ((True, 2 / 3 * new + before / 3), (False, new)):
        ids, scores = zip(*sorted(zip(IDS, score.tolist(), strict=True), key=lambda each: -each[1])[:3], strict=True)
        given = before.tolist() if with_scores else [None] * len(TEXTS)
        documents = [Document(id=n, content=text, score=s) for n, text, s in zip(IDS, TEXTS, given, strict=True)]
        found = CompatRanker(source, top_k=3).run(query, documents)["documents"]
        assert [each.id for each in found] == list(ids) and [each.score for each in found] == pytest.approx(scores, abs=1e-5)
        nodes = [NodeWithScore(node=TextNode(id_=n, text=text), score=s) for n, text, s in zip(IDS, TEXTS, given, strict=True)]
        again = CompatRerank(source, top_n=3).postprocess_nodes(nodes, query_str=query)
        assert [each.node_id for each in again] == list(ids) and [each.score for each in again] == pytest.approx(scores, abs=1e-5)
    pages = [LangchainDocument(id=n, page_content=text) for n, text in zip(IDS, TEXTS, strict=True)]
    kept = CompatReranker(source, top_k=3).compress_documents(pages, query)
    assert [each.id for each in kept] == list(ids)
    assert CompatReranker(source).compress_documents([], query) == []


def test_a_llamaindex_model_says_which_weights_embed(source_of: dict[str, str]) -> None:
    """An ingestion cache knows models by their fields, and workers get them pickled."""
    phi, ridge = CompatEmbedding(source_of["phi"]), CompatEmbedding(source_of["closed form"])
    assert phi.to_dict() != ridge.to_dict() and phi.to_dict() == CompatEmbedding(load_checkpoint(source_of["phi"])).to_dict()
    assert CompatEmbedding(source_of["phi"], phi.model_name).to_dict()["version"] == phi.model_name
    for twin in (pickle.loads(pickle.dumps(phi)), copy.deepcopy(phi)):  # noqa: S301 - what was pickled here
        assert twin.get_query_embedding("two dogs") == phi.get_query_embedding("two dogs")


def test_a_haystack_pipeline_is_saved_and_loaded(source_of: dict[str, str], old: Embedder) -> None:
    about: dict[str, Any] = {"meta_fields_to_embed": ["title"], "embedding_separator": ": "}
    pipeline = Pipeline()
    pipeline.add_component("documents", CompatDocumentEmbedder(source_of["phi"], old.fingerprint, **about))
    pipeline.add_component("text", CompatTextEmbedder(Path(source_of["phi"]), old.name))
    pipeline.add_component("ranker", CompatRanker(source_of["closed form"], top_k=2))
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=["xcompat.integrations.haystack"])
    assert again.to_dict() == pipeline.to_dict()
    titled = Document(content="two dogs", meta={"title": "grass", "page": 3})
    asked: dict[str, Any] = {"documents": {"documents": [titled]}, "text": {"text": "two dogs"}}
    documents = [Document(id=n, content=text) for n, text in zip(IDS, TEXTS, strict=True)]
    asked["ranker"] = {"query": QUERIES[0], "documents": documents}
    found = again.run(asked)
    assert found == pipeline.run(asked) and len(found["ranker"]["documents"]) == 2
    plain = CompatEmbeddings(source_of["phi"])
    assert found["documents"]["documents"][0].embedding == plain.embed_documents(["grass: two dogs"])[0]
    assert titled.embedding is None and found["text"]["embedding"] == plain.embed_query("two dogs")
    refuses("saved pipeline needs the model's name", CompatTextEmbedder(old).to_dict)


def test_missing_frameworks_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, library, package in (
        ("langchain", "langchain_core.embeddings", "langchain-core"),
        ("llamaindex", "llama_index.core.base.embeddings.base", "llama-index-core"),
        ("haystack", "haystack", "haystack-ai"),
    ):
        monkeypatch.delitem(sys.modules, f"xcompat.integrations.{name}")
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(XcompatError) as caught:
            importlib.import_module(f"xcompat.integrations.{name}")
        assert str(caught.value) == f'this needs {package}; install it with `pip install -e ".[{name}]"` in a clone of xcompat'
