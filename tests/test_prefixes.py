"""Shared prefixes: trees that spell every text, and the embeddings of the ordinary tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CLIPConfig

from xcompat import IndependentModel
from xcompat.embeddings.embed import embed_texts
from xcompat.encoders.adapter_settings import AdapterConfig, LoraSettings
from xcompat.encoders.base import Encoder
from xcompat.encoders.prefixes import TREE, prefix_batches, prefix_trees, shared_prefixes
from xcompat.encoders.standins import stand_in
from xcompat.encoders.transformers_encoder import TransformersEncoder, build_transformers_encoder
from xcompat.models.embedder import load_embedder

END = 99
TEXTS = [f"a {('red', 'blue')[n % 2]} {'shoe ' * (n % 5)}{n // 3}" for n in range(40)]
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


def test_adapters_are_computed_with() -> None:
    encoder = clip()
    plain = encoder.text_features(captions([5, 6]), None)
    encoder.add_adapters(AdapterConfig(lora=LoraSettings(rank=2)))
    for parameter in encoder.adapter_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert (encoder.eval().text_features(captions([5, 6]), None) - plain).abs().max() > 1e-2
    assert_same(encoder, captions([5, 9, 3, 2, 7, 9]))


def test_what_is_shared_or_behind_the_end_is_not_computed() -> None:
    encoder = clip()
    counted: list[int] = []
    encoder.model.text_model.embeddings.token_embedding.register_forward_hook(lambda _, ids, out: counted.append(ids[0].numel()))
    with torch.inference_mode(), shared_prefixes(encoder):
        encoder.text_features(torch.tensor([[98, 1, 2, END, END, END], [98, 1, 3, 4, 5, END], [98, 1, 2, END, 7, 7]]), None)
    assert counted == [4 + 4]


def test_nothing_changes_with_gradients_or_a_mask() -> None:
    encoder, token_ids = clip(), captions([5, 9, 3])
    mask = torch.ones_like(token_ids)
    mask[:, 1] = 0  # a hole before the end
    plain, holed = encoder.text_features(token_ids, None), encoder.text_features(token_ids, mask)
    with shared_prefixes(encoder):
        assert torch.equal(encoder.text_features(token_ids, None), plain)
        with torch.inference_mode():
            assert torch.equal(encoder.text_features(token_ids, mask), holed)
    assert plain.requires_grad and not torch.allclose(plain, holed, atol=1e-3)


def test_only_a_frozen_clip_that_takes_masks_shares_prefixes() -> None:
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
    shared = embed_texts(embedder, TEXTS, tmp_path / "shared", "digest", **where)
    with_sharing = sum(sizes)
    monkeypatch.setattr(TransformersEncoder, "shares_prefixes", False)
    plain = embed_texts(embedder, TEXTS, tmp_path / "plain", "digest", **where)
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
    alone = torch.cat([embedder.embed(embedder.processor.texts([text])) for text in TEXTS])
    sizes = _sizes(embedder.model.encoder)
    np.testing.assert_allclose(embed_texts(embedder, TEXTS, tmp_path / "c", "digest")[:], alone.numpy(), atol=5e-4)
    assert sum(sizes) < 0.6 * sum(map(len, embedder.processor.tokenize(TEXTS)))
