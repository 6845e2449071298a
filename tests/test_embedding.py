"""Embedding caches: equal to embedding one by one, resumed shard by shard, refused when they are of something else."""

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
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from xcompat.core.errors import XcompatError
from xcompat.data import Augmentation, View, load_pairs, open_image
from xcompat.embeddings import cache_writer
from xcompat.embeddings import embed as embedding
from xcompat.embeddings.cache import StackedCaches
from xcompat.embeddings.embed import EmbeddingCache, embed_images, embed_in_memory, embed_rows, embed_texts, images_per_batch
from xcompat.encoders.onednn import packed_linears
from xcompat.encoders.prefixes import length_sorted_batches
from xcompat.models.embedder import Embedder, load_embedder, penultimate_embedder
from xcompat.training.caches import cached_images

TEXTS = [f"{'word ' * (n % 9)}number {n}" for n in range(23)]


@pytest.fixture(scope="module", params=["clip", "siglip", "open_clip"])
def embedder(request: pytest.FixtureRequest, folder_of: dict[str, str]) -> Embedder:
    return load_embedder(folder_of[request.param])


def test_packed_linears_compute_the_same_and_leave_no_trace(embedder: Embedder) -> None:
    batch = embedder.processor.texts(TEXTS)
    plain = embedder.embed(batch)
    with packed_linears(embedder.model):
        assert any("forward" in vars(module) for module in embedder.model.modules())
        torch.testing.assert_close(embedder.embed(batch), plain, atol=1e-5, rtol=0)
    assert not any("forward" in vars(module) for module in embedder.model.modules())
    assert torch.equal(embedder.embed(batch), plain)


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise"])
def test_without_the_operators_the_plain_path_embeds(embedder: Embedder, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = embedder.processor.texts(TEXTS)
    plain = embedder.embed(batch)
    names = {"_reorder_linear_weight", "_linear_pointwise"} - {missing}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**{name: getattr(torch.ops.mkldnn, name) for name in names}))
    with packed_linears(embedder.model):
        assert torch.equal(embedder.embed(batch), plain)


def test_half_precision_embeds_nearly_the_same(embedder: Embedder, tmp_path: Path) -> None:
    half = replace(embedder, autocast=torch.bfloat16)
    cache = embed_texts(half, TEXTS, tmp_path / "c", "digest")[:]
    plain = embedder.embed(embedder.processor.texts(TEXTS)).numpy()
    cosines = (cache * plain).sum(1) / np.linalg.norm(cache, axis=1) / np.linalg.norm(plain, axis=1)
    assert cosines.min() > 0.999
    assert np.abs(cache - plain).max() > 5e-4, "further from it than float16, as which caches are stored, can be"


@pytest.mark.parametrize(("edge", "on_cpu"), [(32, 64), (64, 64), (160, 31), (224, 16), (336, 7), (1024, 1)])
def test_a_cpu_embeds_few_large_images_at_a_time(embedder: Embedder, edge: int, on_cpu: int) -> None:
    processor = replace(embedder.processor, image_size=(edge, edge))
    assert images_per_batch(processor, torch.device("cpu")) == on_cpu
    assert images_per_batch(processor, torch.device("cuda")) == 64


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 100))
def test_every_text_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(length_sorted_batches(lengths, budget))
    assert sorted(row for rows in batches for row in rows.tolist()) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


def test_texts_equal_one_by_one(embedder: Embedder, tmp_path: Path) -> None:
    cache = embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5, tokens_per_batch=40)
    alone = torch.cat([embedder.embed(embedder.processor.texts([text])) for text in TEXTS])
    assert cache.shape == (23, 16) and cache.fingerprint == embedder.fingerprint
    np.testing.assert_allclose(cache[:], alone.numpy(), atol=5e-4)  # stored as float16
    rows = np.array([22, 0, 7, 7])
    assert np.array_equal(cache[rows], cache[:][rows])


def test_texts_in_memory_equal_one_by_one(embedder: Embedder) -> None:
    alone = torch.cat([embedder.embed(embedder.processor.texts([text])) for text in TEXTS])
    np.testing.assert_allclose(embed_in_memory(embedder, TEXTS), alone, atol=1e-5)
    assert embed_in_memory(embedder, []).shape == (0, embedder.dim)


def test_images_equal_one_by_one(embedder: Embedder, pairs_folder: str, tmp_path: Path) -> None:
    dataset = load_pairs(pairs_folder)
    cache = embed_images(embedder, dataset, tmp_path / "c", "digest", shard_rows=10)
    images = [Image.open(Path(pairs_folder, name)).convert("RGB") for name in dataset["id"]]
    alone = torch.cat([embedder.embed({"pixel_values": embedder.processor.images([image])}) for image in images])
    np.testing.assert_allclose(cache[:], alone.numpy(), atol=5e-4)


@pytest.mark.parametrize("lost", [range(3), range(3, 6), range(6, 8), range(8)])
def test_a_shard_of_which_no_image_can_be_read_is_nan(
    lost: range, folder_of: dict[str, str], pairs_folder: str, tmp_path: Path
) -> None:
    pairs = load_pairs(pairs_folder).select(range(8))
    stored = [{"bytes": b"nothing", "path": None} if row in lost else record["image"] for row, record in enumerate(pairs)]
    features = datasets.Features({"image": datasets.Image(decode=False), "id": datasets.Value("string")})
    damaged = datasets.Dataset.from_dict({"image": stored, "id": pairs["id"][:]}, features=features)
    embedder = load_embedder(folder_of["clip"])
    embeds = embed_images(embedder, damaged, tmp_path / "damaged", "digest", shard_rows=3, max_bad_share=1.0)[:]
    assert np.flatnonzero(~np.isfinite(embeds).all(axis=1)).tolist() == list(lost)
    kept = [row for row in range(8) if row not in lost]
    np.testing.assert_allclose(embeds[kept], embed_images(embedder, pairs, tmp_path / "whole", "digest")[:][kept], atol=1e-3)


def test_a_killed_embedding_continues_with_the_shards_that_are_missing(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(XcompatError, match="not a finished embedding cache"):
        EmbeddingCache(tmp_path / "c")
    assert np.array_equal(embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)[:], whole)
    assert calls == [TEXTS[0], TEXTS[5], TEXTS[10], TEXTS[10], TEXTS[15], TEXTS[20]], "finished shards are not embedded again"
    embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)
    assert len(calls) == 6, "a finished cache is opened"


def test_the_next_shard_is_embedded_while_one_is_written(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_another_model_or_other_data_are_refused(folder_of: dict[str, str], old_folder: str, tmp_path: Path) -> None:
    embed_texts(load_embedder(folder_of["clip"]), TEXTS, tmp_path / "c", "digest")
    with pytest.raises(XcompatError, match="embeddings of another fingerprint"):
        embed_texts(load_embedder(old_folder), TEXTS, tmp_path / "c", "digest")
    with pytest.raises(XcompatError, match="embeddings of another data"):
        embed_texts(load_embedder(folder_of["clip"]), TEXTS, tmp_path / "c", "other")
    with pytest.raises(XcompatError, match="no texts to embed"):
        embed_texts(load_embedder(folder_of["clip"]), [], tmp_path / "e", "digest")


def test_what_overflows_the_stored_type_is_refused(folder_of: dict[str, str], pairs_folder: str, tmp_path: Path) -> None:
    embedder = penultimate_embedder(load_embedder(folder_of["clip"]))
    with torch.no_grad():
        embedder.model.model.model.vision_model.post_layernorm.weight.mul_(1e6)
    with pytest.raises(XcompatError, match="returns values beyond the range of float16, the type of caches"):
        embed_images(embedder, load_pairs(pairs_folder), tmp_path / "c", "digest")


def test_truncated_texts_are_counted(folder_of: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embed_texts(load_embedder(folder_of["clip"]), ["short", "long " * 40], tmp_path / "c", "digest")
    assert "1 of 2 texts were truncated to the 16 tokens" in " ".join(capsys.readouterr().out.split())
    embed_in_memory(load_embedder(folder_of["clip"]), ["word " * 99, "a word"])
    assert "1 of 2 texts were truncated to the 16 tokens" in " ".join(capsys.readouterr().out.split())


def test_views_are_embedded_each_into_a_cache_of_its_own(
    embedder: Embedder, pairs_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_on_a_cpu_all_cores_decode_and_none_while_the_model_computes(
    embedder: Embedder, pairs_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int] = []
    images = type(embedder.processor).images

    def counted(processor: Any, opened: list[Any]) -> torch.Tensor:
        prepared.append(len(opened))
        return images(processor, opened)

    monkeypatch.setattr(type(embedder.processor), "images", counted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    batches = embed_rows(embedder, load_pairs(pairs_folder), range(24), batch_size=2)
    for asked in range(1, 8):
        next(batches)
        assert len(prepared) == -(-asked // 3) * 3


def test_a_compatible_model_embeds_as_its_gallery_does(folder_of: dict[str, str], old_folder: str, tmp_path: Path) -> None:
    from xcompat import ProjectionModel

    old = load_embedder(old_folder)
    model = ProjectionModel.from_encoder(folder_of["clip"], old=old.describe_old())
    model.save_pretrained(tmp_path)
    chained = load_embedder(str(tmp_path))
    assert chained.dim == old.dim and chained.compatible_with == [old.fingerprint]
    assert chained.describe_old()["compatible_with"] == [
        {"name": old.name, "fingerprint": old.fingerprint.digest, "dim": old.dim}
    ]
    batch = chained.processor.texts(["a red shoe"])
    with torch.no_grad():
        assert torch.equal(chained.embed(batch), model.to_space(model.embed_texts(**batch)))
