"""Models of sentence-transformers as text encoders: equal to ``SentenceTransformer.encode`` in both roles, saved, mapped."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import TEXTS, refuses, store
from hub_server import Hub
from PIL import Image
from safetensors.torch import load_file, save_file
from schedule import mostly_nightly
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import BoW, LayerNorm, Pooling, StaticEmbedding
from torch import nn
from transformers import AutoModel, LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model, pipeline

from xcompat import FingerprintMismatchError, RidgeConfig, RidgeModel, XbtModel, XcompatError
from xcompat.data.collate import PairCollator
from xcompat.data.transforms import Augmentation
from xcompat.embeddings.embed import embed_texts, images_per_batch
from xcompat.encoders import AdapterConfig, EncoderSource, build_encoder, load_encoder
from xcompat.encoders.scratch import train_tokenizer
from xcompat.encoders.standins import save_stand_in
from xcompat.export.sentence_module import CompatModule
from xcompat.export.sentence_transformers import to_sentence_transformers
from xcompat.models.embedder import Embedder, load_embedder, penultimate_embedder
from xcompat.retrieval import Gallery
from xcompat.retrieval.queries import query_embeddings
from xcompat.training.push import push

PROMPTS = {"query": "query: ", "document": "the passage: "}
LONG = "two dogs on a red shoe and " * 12
PASSAGES = [*TEXTS, LONG, "", "A Red SHOE!"]
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.3}
DECODER = SIZE | {"num_key_value_heads": 1, "vocab_size": 310, "max_position_embeddings": 64}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Made = Callable[..., str]


def bert(folder: Path) -> Transformer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(TEXTS).split(), "query", "passage", "the", ":", "!", ","]
    vocabulary = dict.fromkeys([*words, *LETTERS, *(f"##{letter}" for letter in LETTERS)])
    tokenizer = transformers.BertTokenizer(vocab={token: row for row, token in enumerate(vocabulary)})
    transformers.BertModel(
        transformers.BertConfig(**SIZE, vocab_size=len(vocabulary), max_position_embeddings=40)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Transformer(str(folder), max_seq_length=24)


def decoder(folder: Path, kind: str) -> Transformer:
    tokenizer = train_tokenizer([*TEXTS, "query passage"], 300, 48)
    tokenizer.padding_side = "left" if kind == "qwen2" else "right"
    model = Qwen2Model(Qwen2Config(**DECODER)) if kind == "qwen2" else LlamaModel(LlamaConfig(**DECODER))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Transformer(str(folder))


def t5(folder: Path) -> Transformer:
    tokenizer = train_tokenizer(TEXTS, 300, 48)
    transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=300, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Transformer(str(folder))


def modules_of(kind: str, folder: Path) -> list[nn.Module]:
    if kind == "static":
        tokenizer = train_tokenizer(TEXTS, 300, 16).backend_tokenizer
        tokenizer.enable_truncation(20)
        return [StaticEmbedding(tokenizer, embedding_dim=32)]
    if kind in ("qwen2", "llama"):
        return [decoder(folder, kind), Pooling(32, "lasttoken"), Normalize()]
    if kind == "t5":
        return [t5(folder), Pooling(32, "mean"), Dense(32, 24, bias=False, activation_function=nn.Identity()), Normalize()]
    rest: dict[str, list[nn.Module]] = {
        "mean": [Pooling(32, "mean")],
        "cls": [Pooling(32, "cls"), Normalize()],
        "max": [Pooling(32, ("max", "mean"))],
        "weightedmean": [Pooling(32, "weightedmean"), LayerNorm(32)],
        "dense": [Pooling(32, "mean"), Dense(32, 48), Dense(48, 24, activation_function=nn.GELU()), Normalize()],
    }
    return [bert(folder), *rest[kind]]


KINDS = ("mean", "cls", "max", "weightedmean", "dense", "qwen2", "llama", "t5", "static")
OFTEN = ("mean", "dense", "qwen2", "static")
"""An encoder, one with a layer after it, a decoder and vectors of words: these are tested on every change."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root, folders = tmp_path_factory.mktemp("texts"), dict[str, str]()

    def make(kind: str) -> str:
        if kind not in folders:
            torch.manual_seed(len(kind))
            folder = root / kind
            modules = modules_of(kind, root / f"{kind}-parts")
            SentenceTransformer(modules=modules, prompts=dict(PROMPTS), device="cpu").save(str(folder), create_model_card=False)
            folders[kind] = str(folder)
        return folders[kind]

    return make


def of_library(folder: str, texts: list[str], prompt: str, dim: int | None = None) -> np.ndarray:
    """Embed one text at a time, so that no padding plays a part."""
    model = SentenceTransformer(folder, device="cpu")
    return np.concatenate([model.encode([text], prompt=prompt, normalize_embeddings=True, truncate_dim=dim) for text in texts])


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, OFTEN.__contains__))
def test_both_roles_embed_as_sentence_transformers_does(kind: str, made: Made) -> None:
    encoder, processor = load_encoder(made(kind))
    texts = [text for text in PASSAGES if text]
    for prompt, role in (("the passage: ", processor), ("query: ", processor.for_queries())):
        with torch.no_grad():
            embeds = encoder.embed_texts(**role.texts(texts))
        np.testing.assert_allclose(embeds, of_library(made(kind), texts, prompt), atol=1e-5)
        assert embeds.shape[1] == encoder.embedding_dim
    _, bare = load_encoder(EncoderSource(name=made(kind), query_prompt="", passage_prompt=""))
    with torch.no_grad():
        assert all(encoder.embed_texts(**bare.texts(empty)).isfinite().all() for empty in ([""], ["", "a shoe"]))


def test_caches_count_what_is_cut_off_and_refuse_queries(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, limit in (("mean", 24), ("static", 20)):
        embedder = load_embedder(made(kind))
        assert embedder.processor.max_length == limit and embedder.processor.count_truncated == 0
        embed_texts(embedder, [LONG, "a shoe"], tmp_path / kind, "texts")
        assert f"1 of 2 texts were truncated to the {limit} tokens" in " ".join(capsys.readouterr().out.split())
    embedder = load_embedder(f"sentence-transformers:{made('mean')}")
    cache = embed_texts(embedder, TEXTS, tmp_path / "cache", "texts", shard_rows=2)
    np.testing.assert_allclose(cache[:], of_library(made("mean"), TEXTS, "the passage: "), atol=1e-3)  # float16 on disk
    refuses("another fingerprint", embed_texts, embedder.for_queries(), TEXTS, tmp_path / "cache", "texts", shard_rows=2)


def test_truncated_dimensions_are_the_first_and_normalised(made: Made) -> None:
    encoder, processor = load_encoder(EncoderSource(name=made("dense"), truncate_dim=8))
    with torch.no_grad():
        embeds = encoder.embed_texts(**processor.texts(TEXTS))
    assert encoder.embedding_dim == 8 and embeds.shape == (4, 8)
    np.testing.assert_allclose(embeds, of_library(made("dense"), TEXTS, "the passage: ", 8), atol=1e-5)
    with pytest.raises(XcompatError, match=r"^[^\n]*has only 24 dimensions, fewer than truncate_dim \(25\)[^\n]*$"):
        load_encoder(EncoderSource(name=made("dense"), truncate_dim=25))


@pytest.mark.parametrize(
    ("about", "query", "passage"),
    [
        ({"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt_name": None}, "q: ", "p: "),
        ({"prompts": {"query": "q: ", "corpus": "c: "}}, "q: ", "c: "),
        ({"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}, "q: ", ""),
        ({"prompts": {"s2p": "s: "}, "default_prompt_name": "s2p"}, "s: ", "s: "),
        ({"prompts": {"s2p": "s: "}}, "", ""),
        ({}, "", ""),
    ],
)
def test_prompts_are_the_models_own(about: dict[str, Any], query: str, passage: str, made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("mean"), tmp_path / "model")
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    _, processor = load_encoder(str(folder))
    queries = processor.for_queries()
    assert (queries.describe()["query_prompt"], processor.describe()["passage_prompt"]) == (query, passage)
    assert (queries is processor) == (query == passage) and queries.for_queries() is queries
    _, processor = load_encoder(EncoderSource(name=str(folder), query_prompt="mine: "))
    assert processor.for_queries().describe()["query_prompt"] == "mine: "


def test_fingerprints_tell_whatever_changes_an_embedding(made: Made, tmp_path: Path) -> None:
    def of(source: EncoderSource | str | Path) -> str:
        encoder, processor = load_encoder(source if isinstance(source, EncoderSource) else str(source))
        assert encoder.fingerprint(processor) == encoder.fingerprint(processor.for_queries())
        return encoder.fingerprint(processor).digest

    plain = of(made("dense"))
    moved = shutil.copytree(made("dense"), tmp_path / "moved")
    assert of(moved) == plain == of(f"sentence-transformers:{moved}")
    sources = [EncoderSource(name=made("dense"), **{key: value}) for key, value in _OTHERWISE.items()]
    pooled, shortened, weighed = (shutil.copytree(made("dense"), tmp_path / name) for name in ("pooled", "shortened", "weighed"))
    edit(pooled / "1_Pooling" / "config.json", pooling_mode="cls")
    edit(shortened / "tokenizer_config.json", model_max_length=10)
    weights = load_file(weighed / "2_Dense" / "model.safetensors")
    save_file({key: value * 1.01 for key, value in weights.items()}, weighed / "2_Dense" / "model.safetensors")
    digests = [plain, *map(of, sources), *map(of, (pooled, shortened, weighed))]
    assert len(set(digests)) == len(digests)


_OTHERWISE = {"query_prompt": "q: ", "passage_prompt": "", "truncate_dim": 12}


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, OFTEN.__contains__))
def test_a_saved_encoder_is_the_same_to_both_libraries(kind: str, made: Made, tmp_path: Path) -> None:
    encoder, processor = load_encoder(made(kind))
    encoder.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again, its_processor = load_encoder(str(tmp_path))
    assert again.fingerprint(its_processor) == encoder.fingerprint(processor)
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    assert (theirs.prompts["query"], theirs.prompts["document"]) == ("query: ", "the passage: ")
    expected = SentenceTransformer(made(kind), device="cpu")
    np.testing.assert_allclose(theirs.encode_query(TEXTS), expected.encode_query(TEXTS), atol=1e-6)
    np.testing.assert_allclose(theirs.encode_document(TEXTS), expected.encode_document(TEXTS), atol=1e-6)


@pytest.mark.parametrize("kind", mostly_nightly(KINDS, OFTEN.__contains__))
def test_a_described_encoder_is_built_and_found_again(kind: str, made: Made) -> None:
    source = EncoderSource(name=made(kind), query_prompt="q: ", passage_prompt="p: ", truncate_dim=16)
    encoder, processor = load_encoder(source)
    described = json.loads(json.dumps(encoder.description))
    built = build_encoder(described)
    built.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        batch = processor.texts(TEXTS)
        assert torch.equal(built.eval().embed_texts(**batch), encoder.embed_texts(**batch))
    assert built.fingerprint(processor) == encoder.fingerprint(processor)
    found, its_processor = load_encoder(EncoderSource.from_description(described))
    assert found.fingerprint(its_processor) == encoder.fingerprint(processor)


def refused(source: EncoderSource | str, words: str) -> None:
    refuses(words, load_encoder, source)


def test_images_are_refused_in_a_line(made: Made) -> None:
    embedder = load_embedder(made("mean"))
    image = Image.new("RGB", (40, 40))
    asked: list[Callable[[], object]] = [
        lambda: embedder.processor.images(image),
        lambda: embedder.processor(images=[image], text="a shoe"),
        lambda: embedder.embed({"pixel_values": torch.zeros(1, 3, 8, 8)}),
        lambda: images_per_batch(embedder.processor, torch.device("cpu")),
        lambda: PairCollator(embedder.processor, Augmentation()),
        lambda: penultimate_embedder(embedder),
        lambda: embedder.model.add_adapters(AdapterConfig(prompts=2)),
    ]
    for ask in asked:
        refuses("image|penultimate", ask)
    refused(EncoderSource(name=made("mean"), image_size=32), "does not read images; remove image_size")


def test_sources_that_do_not_fit_are_refused(made: Made, tmp_path: Path, folder_of: dict[str, str]) -> None:
    refused(f"sentence-transformers:{tmp_path / 'nothing'}", "the model folder .*nothing does not exist")
    refused("sentence-transformers:nobody/nothing", "cannot load sentence-transformers:nobody/nothing")
    (tmp_path / "empty").mkdir()
    refused(f"sentence-transformers:{tmp_path / 'empty'}", "contains no model")
    refused(EncoderSource(name=made("mean"), model_type="clip"), "is a sentence-transformers model, not clip")
    for key, value in _OTHERWISE.items():
        refused(EncoderSource(name=folder_of["clip"], **{key: value}), f"{key} needs a sentence-transformers model")
        with pytest.raises(XcompatError, match=f"{key} needs a sentence-transformers model"):
            load_embedder(EncoderSource(name=folder_of["clip"], **{key: value}))


def test_pickled_weights_are_neither_fetched_nor_opened(made: Made, tmp_path: Path, hub: Hub) -> None:
    for number, (kind, module) in enumerate((("mean", "."), ("dense", "2_Dense"), ("static", "."))):
        folder = shutil.copytree(made(kind), tmp_path / str(number))
        weights = folder / module / "model.safetensors"
        torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
        weights.unlink()
        refused(str(folder), "only safetensors are loaded; convert the weights first")
        weights.with_name("pytorch_model.bin").unlink()  # as when it was not fetched
        refused(str(folder), "only safetensors are loaded; convert the weights first")
    folder = shutil.copytree(made("dense"), tmp_path / "model")
    weights = folder / "2_Dense" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    hub.add("me/pickled", folder)
    refused("sentence-transformers:me/pickled", "only safetensors are loaded")
    assert not [asked for asked in hub.asked if asked.endswith("pytorch_model.bin")]


def test_code_of_a_model_does_not_run_unless_it_is_allowed(made: Made, tmp_path: Path) -> None:
    code = "from pathlib import Path\nfrom sentence_transformers.base.modules import Normalize\n"
    ran = tmp_path / "ran"
    for name, change in (("root", "own.Mine"), ("elsewhere", "os.path"), ("activation", "")):
        folder = shutil.copytree(made("dense"), tmp_path / name)
        (folder / "own.py").write_text(f"{code}Path({str(ran)!r}).touch()\nclass Mine(Normalize): pass\n")
        if change:
            modules = json.loads((folder / "modules.json").read_text())
            modules[-1]["type"] = change
            (folder / "modules.json").write_text(json.dumps(modules))
        else:
            edit(folder / "2_Dense" / "config.json", activation_function="own.Mine")
        refused(str(folder), "runs its own code .*; read that code, and if you trust it, set trust_remote_code: true")
    folder = shutil.copytree(made("mean"), tmp_path / "a transformer")
    edit(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "own.C", "AutoModel": "own.M"})
    (folder / "own.py").write_text(f"{code}Path({str(ran)!r}).touch()\n")
    refused(str(folder), "runs its own code .*trust_remote_code: true")
    assert not ran.exists()
    encoder, _ = load_encoder(EncoderSource(name=str(tmp_path / "root"), trust_remote_code=True))
    assert ran.exists()
    refuses("contains modules unknown to sentence-transformers", build_encoder, encoder.description)


def test_unreadable_modules_and_settings_are_refused(made: Made, folder_of: dict[str, str], tmp_path: Path) -> None:
    def saved(name: str, *modules: nn.Module) -> str:
        SentenceTransformer(modules=list(modules), device="cpu").save(str(tmp_path / name), create_model_card=False)
        return f"sentence-transformers:{tmp_path / name}"

    sides = {role: [Transformer(made("mean")), Pooling(32, "mean")] for role in ("query", "document")}
    refused(
        saved("router", Router.for_query_document(sides["query"], sides["document"])), r"Router\); save the modules of each role"
    )
    refused(saved("bow", BoW(["a", "shoe"])), "starts with BoW, not supported by xcompat; choose a model")
    refused(
        saved("clip", Transformer(folder_of["clip"])),
        "reads image in addition to texts .*; name the image-text model that it contains",
    )
    folder = shutil.copytree(made("mean"), tmp_path / "model")
    edit(folder / "1_Pooling" / "config.json", include_prompt=False)
    refused(str(folder), "include_prompt: false.*set query_prompt and passage_prompt to ''")
    encoder, processor = load_encoder(EncoderSource(name=str(folder), query_prompt="", passage_prompt=""))
    with torch.no_grad():
        np.testing.assert_allclose(encoder.embed_texts(**processor.texts(TEXTS)), of_library(str(folder), TEXTS, ""), atol=1e-5)
    folder = shutil.copytree(made("mean"), tmp_path / "other")
    edit(folder / "sentence_bert_config.json", processing_kwargs={"text": {"max_length": 5}})
    refused(str(folder), "reads more of a text than its token ids")
    for damage in ("[]", "{}", "[1]", '[{"idx": 0}]', "not json"):
        (folder / "modules.json").write_text(damage)
        refused(str(folder), "modules.json")


def test_lower_casing_is_kept(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("qwen2"), tmp_path / "model")
    state = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(state | {"normalizer": None}))
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    encoder, processor = load_encoder(str(folder))
    assert processor.tokenize(["A RED Shoe"]) == processor.tokenize(["a red shoe"])
    encoder.save_pretrained(tmp_path / "again")
    processor.save_pretrained(tmp_path / "again")
    again, its_processor = load_encoder(str(tmp_path / "again"))
    assert again.fingerprint(its_processor) == encoder.fingerprint(processor)


def test_a_model_without_some_weights_is_refused(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("mean"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if "layer.1.output.dense" not in key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    refused(str(folder), r"lacks 2 weights, e.g. encoder\.layer\.1\.output\.dense\.bias")
    kept = {key: value for key, value in weights.items() if not key.startswith("pooler")}  # which nothing reads
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    encoder, processor = load_encoder(str(folder))
    plain, its_processor = load_encoder(made("mean"))
    assert encoder.fingerprint(processor) == plain.fingerprint(its_processor)


THINGS = ("dogs", "shoe", "letter", "alpha")
QUESTIONS = [f"{which} {thing}?" for which in ("red", "two", "greek", "no", "the") for thing in THINGS]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return load_embedder(save_stand_in(tmp_path_factory.mktemp("old") / "model", "sentence-transformers", 8, seed=1))


def query_map(new: Embedder, old: Embedder, **options: Any) -> RidgeModel:
    """Solve a map from pairs of embeddings of the same texts, both in the roles that the models are given in."""
    config = RidgeConfig(encoder=new.describe_encoder(), old=old.describe_old(), embedding_dim=new.dim, **options)
    pairs = tuple(model.embed(model.processor.texts(QUESTIONS)) for model in (new, old))
    return RidgeModel(config).fit([pairs])


@pytest.mark.parametrize("kind", mostly_nightly(["dense", "qwen2", "t5"], "qwen2".__eq__))
def test_lora_is_switched_off_merged_and_reloaded(kind: str, made: Made, old: Embedder, tmp_path: Path) -> None:
    model = XbtModel.from_encoder(made(kind), old=old.describe_old(), adapters={"lora": {"rank": 2}})
    batch = model.processor.texts(TEXTS)
    encoder, _ = load_encoder(made(kind))
    assert encoder.towers.keys() == {"text"} and encoder.layer_classes
    for parameter in model.encoder.adapter_parameters():
        parameter.data.add_(torch.randn_like(parameter))
    with torch.no_grad():
        on = model.embed_texts(**batch)
        with model.adapters_disabled():
            assert torch.equal(model.embed_texts(**batch), encoder.embed_texts(**batch))
        assert not torch.allclose(on, encoder.embed_texts(**batch), atol=1e-3)
        model.save_pretrained(tmp_path / "whole")
        whole = AutoModel.from_pretrained(tmp_path / "whole")
        assert whole.fingerprint() == model.fingerprint() and torch.equal(whole.embed_texts(**batch), on)
        assert whole.processor.for_queries().describe() == model.processor.describe()
        assert whole.processor.for_queries().tokenize(["a"]) == model.processor.for_queries().tokenize(["a"])
        model.leave_out_base().save_pretrained(tmp_path / "adapters")
        apart = AutoModel.from_pretrained(tmp_path / "adapters")
        assert apart.fingerprint() == whole.fingerprint() and torch.equal(apart.embed_texts(**batch), on)
        torch.testing.assert_close(whole.merge_adapters().embed_texts(**batch), on, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["mean", "static"])
def test_a_map_asks_with_the_prompt_of_queries(kind: str, made: Made, old: Embedder, tmp_path: Path) -> None:
    new = load_embedder(EncoderSource(name=f"sentence-transformers:{made(kind)}", truncate_dim=16, passage_prompt="kept: "))
    gallery = store(Gallery.create(tmp_path / "gallery", old), old.embed(old.processor.texts(TEXTS)), TEXTS)
    asked = new.for_queries()
    model = query_map(asked, old.for_queries())
    model.save_pretrained(tmp_path / "map")
    expected = model.to_space(asked.embed(asked.processor.texts(QUESTIONS)))
    again = AutoModel.from_pretrained(tmp_path / "map")
    assert again.processor.passage_prompt == "kept: " and again.embeds_texts and not again.embeds_images
    assert torch.equal(again.to_space(again.embed_texts(**again.processor.for_queries().texts(QUESTIONS))), expected)
    assert again.config.encoder["fingerprint"] == new.fingerprint.digest and again.config.encoder["role"] == "queries"
    find = pipeline("compatible-retrieval", model=str(tmp_path / "map"), gallery=str(gallery.path))
    hits, rows = find(QUESTIONS, top_k=4), gallery.search(asked.embed(asked.processor.texts(QUESTIONS)), again, top_k=4)
    for found, wanted in zip(hits, rows, strict=True):
        assert [(hit.id, pytest.approx(hit.score, abs=1e-5)) for hit in found] == [(hit.id, hit.score) for hit in wanted]
    own_hits = gallery.search(old.for_queries().embed(old.for_queries().processor.texts(TEXTS)), old.for_queries(), top_k=4)
    assert {hit.id for hit in own_hits[0]} == set(TEXTS), "a model with the prompt of queries asks for its passages"
    embedder = load_embedder(str(tmp_path / "map"))
    (own,) = query_embeddings(embedder, QUESTIONS[0])
    torch.testing.assert_close(own, asked.embed(asked.processor.texts(QUESTIONS[:1]))[0], atol=1e-6, rtol=0)
    again.config.encoder = {**again.config.encoder, "query_prompt": "other: "}
    other = RidgeModel(again.config)
    with pytest.raises(FingerprintMismatchError):
        other.embed_texts(**new.processor.texts(["a"]))


def test_a_map_of_the_wrong_role_says_so(made: Made, old: Embedder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = load_embedder(made("mean"))
    alike = load_embedder(EncoderSource(name=made("mean"), query_prompt="", passage_prompt=""))
    assert alike.for_queries() is alike and "role" not in alike.describe_encoder()
    assert new.for_queries().for_queries().describe_encoder() == {**new.describe_encoder(), "role": "queries"}
    told = {
        "right": (query_map(new.for_queries(), old.for_queries()), ""),
        "alike": (query_map(alike, old), ""),
        "gallery": (query_map(new, old, direction="old_to_new"), ""),
        "wrong": (query_map(new, old), "with the prompt 'query: ', but was fitted on embeddings with 'the passage: '"),
        "wrong gallery": (query_map(new.for_queries(), old, direction="old_to_new"), "with the prompt 'the passage: '"),
    }
    for name, (model, words) in told.items():
        model.save_pretrained(tmp_path / name)
        capsys.readouterr()
        AutoModel.from_pretrained(tmp_path / name)
        said = capsys.readouterr().out
        assert words in said and bool(said.strip()) == bool(words) and said.count("\n") <= 1, name


@pytest.mark.parametrize("space", ["old", "own"])
def test_an_export_needs_no_xcompat_and_knows_the_prompts(space: Any, made: Made, old: Embedder, tmp_path: Path) -> None:
    new = load_embedder(EncoderSource(name=made("dense"), truncate_dim=16)).for_queries()
    model = query_map(new, old.for_queries())
    assert to_sentence_transformers(model, tmp_path / "export", space)
    theirs = SentenceTransformer(str(tmp_path / "export"), device="cpu")
    embeds = new.embed(new.processor.texts(QUESTIONS))
    wanted = model.to_space(embeds) if space == "old" else embeds
    np.testing.assert_allclose(theirs.encode_query(QUESTIONS), wanted, atol=1e-5)
    stored = theirs.encode(QUESTIONS)
    passages = load_embedder(EncoderSource(name=made("dense"), truncate_dim=16))
    kept = wanted if space == "old" else passages.embed(passages.processor.texts(QUESTIONS))
    np.testing.assert_allclose(stored, kept, atol=1e-5)
    module = SentenceTransformer(modules=[CompatModule(model, space)], device="cpu")
    np.testing.assert_allclose(module.encode_query(QUESTIONS), wanted, atol=1e-5)
    np.testing.assert_allclose(module.encode(QUESTIONS), kept, atol=1e-5)


def test_auto_classes_of_a_model_of_texts(made: Made, old: Embedder, tmp_path: Path) -> None:
    query_map(load_embedder(made("mean")).for_queries(), old.for_queries()).save_pretrained(tmp_path)
    assert transformers.AutoProcessor.from_pretrained(tmp_path).tokenize(["a shoe"]) == load_encoder(made("mean"))[1].tokenize(
        ["a shoe"]
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(["a shoe"])["input_ids"]
    refuses("no image tower", transformers.AutoImageProcessor.from_pretrained, tmp_path)


@pytest.mark.parametrize("kind", ["dense", "static"])
def test_a_plain_model_is_pushed_and_pulled(kind: str, made: Made, hub: Hub, tmp_path: Path) -> None:
    push(shutil.copytree(made(kind), tmp_path / "model"), "me/texts")
    push(tmp_path / "model", "me/texts")
    card = hub.files("me/texts")["README.md"].decode()
    assert "embed_texts" in card and "embed_images" not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own card
    encoder, processor = load_encoder(made(kind))
    assert names["embeds"].shape == (1, encoder.embedding_dim)
    assert names["encoder"].fingerprint(names["processor"]) == encoder.fingerprint(processor)
    described = names["encoder"].description | {"name": "me/texts"}  # as a model that was pushed from here is known
    found, its_processor = load_encoder(EncoderSource.from_description(described))
    assert found.fingerprint(its_processor) == encoder.fingerprint(processor)
