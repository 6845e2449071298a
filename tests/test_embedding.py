"""Embedding caches: equal to embedding one by one, with prefixes computed once, resumed inside shards, refused if foreign."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from conftest import refuses
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import CLIPConfig

from xcompat import IndependentModel
from xcompat.core.progress import redirect_bars
from xcompat.data import Augmentation, View, load_pairs, open_image
from xcompat.embeddings import cache_writer
from xcompat.embeddings import embed as embedding
from xcompat.embeddings.cache import StackedCaches
from xcompat.embeddings.embed import EmbeddingCache, embed_images, embed_in_memory, embed_texts
from xcompat.encoders.adapter_settings import AdapterConfig, LoraSettings
from xcompat.encoders.base import Encoder
from xcompat.encoders.onednn import packed_linears
from xcompat.encoders.prefixes import TREE, length_sorted_batches, prefix_batches, prefix_trees, shared_prefixes
from xcompat.encoders.standins import stand_in
from xcompat.encoders.transformers_encoder import TransformersEncoder, build_transformers_encoder
from xcompat.models.embedder import Embedder, load_embedder, penultimate_embedder
from xcompat.training.caches import cached_images

TEXTS = [f"{'word ' * (n % 9)}number {n}" for n in range(23)]


@pytest.fixture(scope="module", params=["clip", "siglip", "open_clip"])
def embedder(request: pytest.FixtureRequest, folder_of: dict[str, str]) -> Embedder:
    return load_embedder(folder_of[request.param])


def test_packed_linears_compute_the_same_and_leave_no_trace(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, mkldnn = embedder.processor.texts(TEXTS), torch.ops.mkldnn
    plain = embedder.embed(batch)
    with packed_linears(embedder.model):
        assert any("forward" in vars(module) for module in embedder.model.modules())
        torch.testing.assert_close(embedder.embed(batch), plain, atol=1e-5, rtol=0)
    assert not any("forward" in vars(module) for module in embedder.model.modules())
    assert torch.equal(embedder.embed(batch), plain)
    for name in ("_reorder_linear_weight", "_linear_pointwise"):  # without the other operator
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**{name: getattr(mkldnn, name)}))
        with packed_linears(embedder.model):
            assert torch.equal(embedder.embed(batch), plain)


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 100))
def test_every_text_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(length_sorted_batches(lengths, budget))
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


def test_caches_equal_one_by_one(embedder: Embedder, tmp_path: Path, pairs_folder: str) -> None:
    cache = embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5, tokens_per_batch=40)
    alone = torch.cat([embedder.embed(embedder.processor.texts([text])) for text in TEXTS])
    assert cache.shape == (23, 16) and cache.fingerprint == embedder.fingerprint
    np.testing.assert_allclose(cache[:], alone.numpy(), atol=5e-4)  # stored as float16
    rows = np.array([22, 0, 7, 7])
    assert np.array_equal(cache[rows], cache[:][rows])
    np.testing.assert_allclose(embed_in_memory(embedder, TEXTS), alone, atol=1e-5)
    assert embed_in_memory(embedder, []).shape == (0, embedder.dim)
    dataset = load_pairs(pairs_folder)
    cache = embed_images(embedder, dataset, tmp_path / "images", "digest", shard_rows=10)
    images = [Image.open(Path(pairs_folder, name)).convert("RGB") for name in dataset["id"]]
    alone = torch.cat([embedder.embed({"pixel_values": embedder.processor.images([image])}) for image in images])
    np.testing.assert_allclose(cache[:], alone.numpy(), atol=5e-4)
    half = replace(embedder, autocast=torch.bfloat16)
    cache = embed_texts(half, TEXTS, tmp_path / "half", "digest")[:]
    plain = embedder.embed(embedder.processor.texts(TEXTS)).numpy()
    cosines = (cache * plain).sum(1) / np.linalg.norm(cache, axis=1) / np.linalg.norm(plain, axis=1)
    assert cosines.min() > 0.999
    assert np.abs(cache - plain).max() > 5e-4, "further from it than float16, as which caches are stored, can be"


@pytest.mark.parametrize("lost", [range(3), range(3, 6), range(6, 8), range(8)])
def test_shards_without_a_readable_image(lost: range, folder_of: dict[str, str], pairs_folder: str, tmp_path: Path) -> None:
    pairs = load_pairs(pairs_folder).select(range(8))
    stored = [{"bytes": b"nothing", "path": None} if row in lost else record["image"] for row, record in enumerate(pairs)]
    features = datasets.Features({"image": datasets.Image(decode=False), "id": datasets.Value("string")})
    damaged = datasets.Dataset.from_dict({"image": stored, "id": pairs["id"][:]}, features=features)
    embedder = load_embedder(folder_of["clip"])
    embeds = embed_images(embedder, damaged, tmp_path / "damaged", "digest", shard_rows=3, max_bad_share=1.0)[:]
    assert np.flatnonzero(~np.isfinite(embeds).all(axis=1)).tolist() == list(lost)
    kept = [row for row in range(8) if row not in lost]
    np.testing.assert_allclose(embeds[kept], embed_images(embedder, pairs, tmp_path / "whole", "digest")[:][kept], atol=1e-3)


def test_a_killed_embedding_embeds_missing_shards(embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = embed_texts(embedder, TEXTS, tmp_path / "whole", "digest", shard_rows=5)[:]
    calls = []
    tokenize = type(embedder.processor).tokenize

    def killed_at_the_third(self: object, texts: list[str]) -> list[list[int]]:
        calls.append(texts[0])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return tokenize(self, texts)

    monkeypatch.setattr(type(embedder.processor), "tokenize", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)
    refuses("not a finished embedding cache", EmbeddingCache, tmp_path / "c")
    assert np.array_equal(embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)[:], whole)
    assert calls == [TEXTS[0], TEXTS[5], TEXTS[10], TEXTS[10], TEXTS[15], TEXTS[20]], "finished shards are not embedded again"
    embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)
    assert len(calls) == 6, "a finished cache is opened"


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_a_killed_embedding_continues_in_its_shard(
    kind: str, embedder: Embedder, pairs_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def embed_into(place: str) -> Any:
        if kind == "texts":
            return embed_texts(embedder, TEXTS, tmp_path / place, "digest", shard_rows=16, tokens_per_batch=20)[:]
        return embed_images(embedder, load_pairs(pairs_folder), tmp_path / place, "digest", shard_rows=16)[:]

    def embed_and_count(self: Embedder, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(counts) == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt
        counts.append(len(next(iter(batch.values()))))
        return embed(self, batch)

    whole, embed, counts, folder = embed_into("whole"), Embedder.embed, list[int](), tmp_path / "c"
    monkeypatch.setattr(cache_writer, "SAVE_SECONDS", 0)
    monkeypatch.setattr(embedding, "IMAGES_PER_BATCH", 3)
    monkeypatch.setattr(Embedder, "embed", embed_and_count)
    with pytest.raises(KeyboardInterrupt):
        embed_into("c")
    [unfinished], before, shown = folder.glob("unfinished-*"), sum(counts), list[tuple[float, float | None]]()
    with redirect_bars(lambda task: shown.append((task.completed, task.total))):
        np.testing.assert_allclose(embed_into("c"), whole, atol=1e-3)
    assert shown[0][0] > before and shown[-1] == (len(whole), len(whole)), "progress counts what was kept"
    assert sum(counts) == len(whole), "nothing is embedded twice"
    assert not unfinished.exists()
    for file in (folder / "cache.json", folder / "shard-00000.npy"):
        file.unlink()
    unfinished.write_bytes(b"damaged")
    np.testing.assert_allclose(embed_into("c"), whole, atol=1e-3)
    assert sum(counts) == len(whole) + 16


def test_next_shard_is_embedded_while_one_is_written(embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = embed_texts(embedder, TEXTS, tmp_path / "whole", "digest", shard_rows=5)[:]
    begun, write, tokenize = threading.Event(), cache_writer._write_shard, type(embedder.processor).tokenize

    def write_late(*args: Any) -> None:
        assert begun.wait(60), "the second shard waits for the first to be written"
        write(*args)

    def tokenize_and_tell(self: object, texts: list[str]) -> list[list[int]]:
        if texts[0] == TEXTS[5]:
            begun.set()
        return tokenize(self, texts)

    monkeypatch.setattr(cache_writer, "_write_shard", write_late)
    monkeypatch.setattr(type(embedder.processor), "tokenize", tokenize_and_tell)
    assert np.array_equal(embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)[:], whole)


def test_texts_that_no_cache_takes_whole_are_refused_or_counted(
    folder_of: dict[str, str], old_folder: str, pairs_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embed_texts(load_embedder(folder_of["clip"]), TEXTS, tmp_path / "c", "digest")
    refuses("embeddings of another fingerprint", embed_texts, load_embedder(old_folder), TEXTS, tmp_path / "c", "digest")
    refuses("embeddings of another data", embed_texts, load_embedder(folder_of["clip"]), TEXTS, tmp_path / "c", "other")
    refuses("no texts to embed", embed_texts, load_embedder(folder_of["clip"]), [], tmp_path / "e", "digest")
    embedder = penultimate_embedder(load_embedder(folder_of["clip"]))
    with torch.no_grad():
        embedder.model.model.model.vision_model.post_layernorm.weight.mul_(1e6)
    refuses("beyond the range of float16", embed_images, embedder, load_pairs(pairs_folder), tmp_path / "large", "digest")
    embed_texts(load_embedder(folder_of["clip"]), ["short", "long " * 40], tmp_path / "s", "digest")
    assert "1 of 2 texts were truncated to the 16 tokens" in " ".join(capsys.readouterr().out.split())
    embed_in_memory(load_embedder(folder_of["clip"]), ["word " * 99, "a word"])
    assert "1 of 2 texts were truncated to the 16 tokens" in " ".join(capsys.readouterr().out.split())


def test_each_view_has_its_cache(embedder: Embedder, pairs_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = load_pairs(pairs_folder)
    views = [View(Augmentation(min_scale=0.3), 1, number) for number in range(3)]
    plain, both = cached_images(embedder, pairs, tmp_path), cached_images(embedder, pairs, tmp_path, views=views[:2])
    assert both.shape == (2 * len(pairs), embedder.dim) and both.readable().all() and len(list(tmp_path.iterdir())) == 3
    naive = []
    for view in views[:2]:
        draw = view.build_draw(embedder.processor)
        pixels = [draw(open_image(row["image"]), row["id"]) for row in pairs]
        naive.append(embedder.embed({"pixel_values": embedder.processor.to_pixels(torch.stack(pixels))}).numpy())
    np.testing.assert_allclose(both[:], np.concatenate(naive), atol=2e-3)
    mixed = np.array([len(pairs), 0, 2 * len(pairs) - 1, 3])
    assert np.array_equal(both[mixed], both[:][mixed])
    assert not np.allclose(both[: len(pairs)], plain[:], atol=1e-2)

    assert isinstance(both, StackedCaches)
    shutil.rmtree(both.parts[1].path)
    counted: list[View | None] = []
    rows = embedding.embed_rows
    monkeypatch.setattr(embedding, "embed_rows", lambda *given, **named: counted.append(named["view"]) or rows(*given, **named))
    more = cached_images(embedder, pairs, tmp_path, views=views)
    assert counted == views[1:], "what was embedded is opened"
    assert np.array_equal(more[: len(both)], both[:]), "what was lost is drawn again"


END = 99
ALIKE = [f"a {('red', 'blue')[n % 2]} {'shoe ' * (n % 5)}{n // 3}" for n in range(40)]
texts_of_tokens = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=1, max_size=30)


def clip(end: int = END, attention: str = "sdpa", **text: Any) -> Encoder:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4} | text
    text_config = size | {"vocab_size": 100, "eos_token_id": end, "max_position_embeddings": 77, "initializer_factor": 3.0}
    vision_config = size | {"image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=16)
    described = {"library": "transformers", "name": "clip", "revision": None, "config": config.to_dict()}
    encoder = build_transformers_encoder(described).eval()
    encoder.model.set_attn_implementation(attention)
    return encoder


def captions(lengths: list[int], words: int = 3, pad: int = END) -> torch.Tensor:
    """Return captions of few words, so that many begin alike, ended and padded."""
    drawn = torch.randint(1, 1 + words, (len(lengths), 77), generator=torch.Generator().manual_seed(1))
    drawn[:, 0] = 98
    for row, length in enumerate(lengths):
        drawn[row, length - 1], drawn[row, length:] = END, pad
    return drawn[:, : max(lengths)]


def padded(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(text) for text in texts])
    return np.array([text + [0] * (lengths.max() - len(text)) for text in texts]), lengths


@torch.inference_mode()
def assert_same(encoder: Encoder, token_ids: torch.Tensor) -> None:
    plain = encoder.text_features(token_ids, None)
    with shared_prefixes(encoder):
        assert "text_features" in vars(encoder)
        shared = encoder.text_features(token_ids, None)
    assert "text_features" not in vars(encoder)
    torch.testing.assert_close(shared, plain, atol=1e-5, rtol=1e-5)


@given(texts_of_tokens, st.integers(1, 40))
def test_every_path_spells_its_text_and_no_prefix_is_there_twice(texts: list[list[int]], limit: int) -> None:
    trees = prefix_trees(*padded(texts), limit)
    size = trees.token_ids_TN.shape[1]
    held: dict[int, set[tuple[int, ...]]] = {}
    for text, end in zip(texts, trees.ends_B, strict=True):
        tree, node = divmod(int(end), size)
        path = np.flatnonzero(trees.sees_TNN[tree, node])
        assert trees.token_ids_TN[tree, path].tolist() == text and trees.depths_TN[tree, path].tolist() == [*range(len(text))]
        held.setdefault(tree, set()).update(tuple(text[: k + 1]) for k in range(len(text)))
    assert sorted(held) == list(range(len(trees.token_ids_TN)))
    assert (trees.token_ids_TN > 0).sum(1).tolist() == [len(held[tree]) for tree in sorted(held)]
    assert all(len(prefixes) <= max(limit, *map(len, prefixes)) for prefixes in held.values())


@given(texts_of_tokens, st.integers(1, 600))
def test_every_text_once_in_batches_within_the_budget(texts: list[list[int]], budget: int) -> None:
    texts = [text * 5 for text in texts]
    batches = list(prefix_batches(texts, budget))
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(texts)))
    for rows in batches:
        chosen = [texts[row] for row in rows]
        assert len({tuple(text) for text in chosen}) == 1 or prefix_trees(*padded(chosen)).token_ids_TN.size <= budget
    assert not list(prefix_batches([], budget))


@pytest.mark.parametrize(
    "encoder",
    [
        {},
        {"attention": "eager"},
        {"end": 2},  # old configurations: pooled at the highest token
        {"num_hidden_layers": 1, "hidden_act": "gelu"},
        {"num_attention_heads": 2, "intermediate_size": 32, "hidden_act": "relu"},
    ],
    ids=str,
)
def test_equal_to_the_ordinary_tower(encoder: dict[str, Any]) -> None:
    tower = clip(**encoder)
    assert_same(tower, captions([5, 9, 3, 2, 7, 9, 12, 4] * 20))
    assert_same(tower, captions([5, 9, 3, 9], pad=0).repeat(2, 1))
    assert_same(tower, captions([6]))
    assert_same(tower, captions([77, 40, 77, 8, 77, 76], words=1))
    assert_same(tower, captions([77, 77, 77], words=60))
    assert_same(tower, torch.full((2, 4), 7))  # without an end token CLIP pools the first


def test_sharing_follows_adapters_gradients_and_masks() -> None:
    encoder = clip()
    plain = encoder.text_features(captions([5, 6]), None)
    encoder.add_adapters(AdapterConfig(lora=LoraSettings(rank=2)))
    for parameter in encoder.adapter_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert (encoder.eval().text_features(captions([5, 6]), None) - plain).abs().max() > 1e-2
    assert_same(encoder, captions([5, 9, 3, 2, 7, 9]))
    encoder, token_ids = clip(), captions([5, 9, 3])
    mask = torch.ones_like(token_ids)
    mask[:, 1] = 0  # a hole before the end
    plain, holed = encoder.text_features(token_ids, None), encoder.text_features(token_ids, mask)
    with shared_prefixes(encoder):
        assert torch.equal(encoder.text_features(token_ids, None), plain)
        with torch.inference_mode():
            assert torch.equal(encoder.text_features(token_ids, mask), holed)
    assert plain.requires_grad and not torch.allclose(plain, holed, atol=1e-3)


def test_only_a_frozen_clip_shares_prefixes() -> None:
    encoder = clip()
    counted: list[int] = []
    encoder.model.text_model.embeddings.token_embedding.register_forward_hook(lambda _, ids, out: counted.append(ids[0].numel()))
    with torch.inference_mode(), shared_prefixes(encoder):
        encoder.text_features(torch.tensor([[98, 1, 2, END, END, END], [98, 1, 3, 4, 5, END], [98, 1, 2, END, 7, 7]]), None)
    assert counted == [4 + 4]
    for name in ("blip", "open_clip", "resnet", "siglip", "siglip2", "vision-text-dual-encoder"):
        encoder, _ = stand_in(name)
        assert not encoder.shares_prefixes
        with shared_prefixes(encoder):
            assert "text_features" not in vars(encoder)
    encoder = clip()
    assert encoder.shares_prefixes and not encoder.train().shares_prefixes
    encoder.eval().model.text_model.config._attn_implementation = "flex_attention"
    assert not encoder.shares_prefixes


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [20, 3 * TREE])
def test_caches_are_the_same_with_and_without(
    folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autocast: torch.dtype | None, budget: int
) -> None:
    embedder = replace(load_embedder(folder_of["clip"]), autocast=autocast)
    where = {"shard_rows": 24, "tokens_per_batch": budget}
    sizes = _sizes(embedder.model)
    shared = embed_texts(embedder, ALIKE, tmp_path / "shared", "digest", **where)
    with_sharing = sum(sizes)
    monkeypatch.setattr(TransformersEncoder, "shares_prefixes", False)
    plain = embed_texts(embedder, ALIKE, tmp_path / "plain", "digest", **where)
    assert with_sharing < sum(sizes) - with_sharing
    assert shared.info == plain.info
    np.testing.assert_allclose(shared[:], plain[:], atol=5e-4 if autocast is None else 0.02)


def _sizes(encoder: Encoder) -> list[int]:
    """Return a list that grows by the tokens of every batch that is embedded."""
    sizes: list[int] = []
    tower = encoder.model.text_model
    tower.embeddings.token_embedding.register_forward_hook(lambda _, ids, out: sizes.append(ids[0].numel()))
    return sizes


def test_a_compatible_model_shares_prefixes_too(folder_of: dict[str, str], tmp_path: Path) -> None:
    IndependentModel.from_encoder(folder_of["clip"]).save_pretrained(tmp_path / "model")
    embedder = load_embedder(str(tmp_path / "model"))
    alone = torch.cat([embedder.embed(embedder.processor.texts([text])) for text in ALIKE])
    sizes = _sizes(embedder.model.encoder)
    np.testing.assert_allclose(embed_texts(embedder, ALIKE, tmp_path / "c", "digest")[:], alone.numpy(), atol=5e-4)
    assert sum(sizes) < 0.6 * sum(map(len, embedder.processor.tokenize(ALIKE)))
