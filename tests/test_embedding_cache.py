"""Embedding caches that are damaged: the shard is named, and embedded again where the source is at hand."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xcompat.core.errors import XcompatError
from xcompat.embeddings.cache import StackedCaches
from xcompat.embeddings.embed import EmbeddingCache, embed_texts
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.training.caches import cached_captions

TEXTS = [f"{'word ' * (n % 9)}number {n}" for n in range(23)]


@pytest.fixture(scope="module")
def embedder(folder_of: dict[str, str]) -> Embedder:
    return load_embedder(folder_of["clip"])


@pytest.fixture
def cache(embedder: Embedder, tmp_path: Path) -> Path:
    embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)
    return tmp_path / "c"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 64
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def swap(file: Path) -> None:
    other, aside = file.with_name("shard-00001.npy"), file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "has changed since it was written"),
    "cut": (cut, "bytes, expected"),
    "emptied": (lambda file: file.write_bytes(b""), "has 0 bytes"),
    "missing": (Path.unlink, "is missing"),
    "swapped": (swap, "has changed since it was written"),
    "record": (lambda file: file.with_suffix(".json").write_text("{}"), "the checksum of a shard, is damaged"),
    "no array": (lambda file: file.write_text("x" * file.stat().st_size), "has changed"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_damaged_is_named_and_embedded_again(
    name: str, embedder: Embedder, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, reason = DAMAGE[name]
    whole = EmbeddingCache(cache)[:]
    damage(cache / "shard-00002.npy")
    opened = EmbeddingCache(cache)
    assert np.array_equal(opened[np.array([0, 22])], whole[[0, 22]]), "other shards are read"
    with pytest.raises(XcompatError, match=f"shard-0000[12].*{reason}.*run the command that wrote the cache again") as caught:
        opened[:]
    assert "\n" not in str(caught.value)
    asked, tokenize = [], type(embedder.processor).tokenize
    monkeypatch.setattr(type(embedder.processor), "tokenize", lambda self, texts: asked.append(texts[0]) or tokenize(self, texts))
    capsys.readouterr()
    assert np.array_equal(embed_texts(embedder, TEXTS, cache, "digest", shard_rows=5)[:], whole)
    assert asked == ([TEXTS[5], TEXTS[10]] if name == "swapped" else [TEXTS[10]])
    said = [line for line in capsys.readouterr().out.splitlines() if "shard-" in line]
    assert len(said) == len(asked) and all(line.endswith("; re-embedding this shard") for line in said)
    assert np.array_equal(EmbeddingCache(cache)[:], whole)


def test_a_cache_that_was_read_pickles_without_its_rows(cache: Path) -> None:
    opened = EmbeddingCache(cache)
    closed, whole = len(pickle.dumps(opened)), opened[:]
    assert len(pickle.dumps(opened)) == closed
    stacked = StackedCaches([opened, opened])
    for each, rows in ((opened, whole), (stacked, np.concatenate([whole, whole]))):
        assert np.array_equal(pickle.loads(pickle.dumps(each))[:], rows)  # noqa: S301 - it is ours
    assert len(pickle.dumps(stacked)) < 3 * closed


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([-1], "numbers from 0 to 22, not -1"),
        ([0, 23], "numbers from 0 to 22, not 23"),
        ([True, False] + [False] * 21, "not values of bool; convert a mask with np.flatnonzero"),
        ([0.0], "not values of float64"),
    ],
)
def test_what_is_no_row_of_a_cache_is_one_line(cache: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(XcompatError, match=said):
        EmbeddingCache(cache)[np.array(rows)]
    assert EmbeddingCache(cache)[np.array([])].shape[0] == 0


def test_caches_of_before_there_were_checksums(embedder: Embedder, cache: Path) -> None:
    whole = EmbeddingCache(cache)[:]
    for record in cache.glob("shard-*.json"):
        record.unlink()
    assert np.array_equal(EmbeddingCache(cache)[:], whole)
    cut(cache / "shard-00002.npy")
    with pytest.raises(XcompatError, match="shard-00002.npy is truncated or not an array"):
        EmbeddingCache(cache)[:]
    np.save(cache / "shard-00003.npy", np.zeros((5, 3), np.float16))
    with pytest.raises(XcompatError, match=r"shard-00003.npy contains \(5, 3\) float16, not \(5, 16\) float16"):
        EmbeddingCache(cache)[np.array([15])]
    assert np.array_equal(embed_texts(embedder, TEXTS, cache, "digest", shard_rows=5)[:], whole)
    assert sorted(path.name for path in cache.glob("shard-*.json")) == ["shard-00002.json", "shard-00003.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cache.json", "{", "not valid JSON"),
        ("cache.json", "[]", "cache format None"),
        ("cache.json", {"rows": 0}, "rows: Input should be greater than or equal to 1"),
        ("cache.json", {"fingerprint": "other"}, "cache.json and plan.json differ"),
        ("plan.json", {"fingerprint": "other"}, "cache.json and plan.json differ"),
    ],
)
def test_a_damaged_description_is_one_line(
    name: str, content: str | dict[str, object], message: str, embedder: Embedder, cache: Path
) -> None:
    file = cache / name
    text = content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content)
    file.write_text(text)
    with pytest.raises(XcompatError, match=message) as caught:
        EmbeddingCache(cache)
    assert "\n" not in str(caught.value)
    if name == "cache.json":
        assert len(embed_texts(embedder, TEXTS, cache, "digest", shard_rows=5)) == 23, "it is written anew"
    else:
        with pytest.raises(XcompatError, match="embeddings of another fingerprint"):
            embed_texts(embedder, TEXTS, cache, "digest", shard_rows=5)


def test_caches_of_two_precisions_stay_apart(embedder: Embedder, tmp_path: Path) -> None:
    half = replace(embedder, autocast=torch.bfloat16)
    exact, rounded = (cached_captions(model, TEXTS, tmp_path) for model in (embedder, half))
    assert exact.path != rounded.path and not np.array_equal(exact[:], rounded[:])
    assert (exact.info.precision, rounded.info.precision) == ("float32", "bfloat16")
    for model, cache in ((embedder, exact), (half, rounded)):
        assert np.array_equal(cached_captions(model, TEXTS, tmp_path)[:], cache[:])
        other = half if model is embedder else embedder
        with pytest.raises(XcompatError, match=r"embeddings of another precision \('.*', now '.*'\); choose another folder"):
            embed_texts(other, TEXTS, cache.path, cache.info.data)
    assert "precision" not in json.loads((exact.path / "cache.json").read_text()), "as caches of before"


def test_shards_of_nobody_knows_what_are_not_taken_over(embedder: Embedder, cache: Path) -> None:
    (cache / "plan.json").unlink()
    with pytest.raises(XcompatError, match="embeddings of another data"):
        embed_texts(embedder, TEXTS, cache, "other", shard_rows=5)
    shutil.copy(cache / "cache.json", cache / "kept")
    (cache / "cache.json").unlink()
    with pytest.raises(XcompatError, match="contains shards but no plan.json"):
        embed_texts(embedder, TEXTS, cache, "digest", shard_rows=5)
    (cache / "kept").rename(cache / "cache.json")
    assert len(embed_texts(embedder, TEXTS, cache, "digest", shard_rows=5)) == 23
