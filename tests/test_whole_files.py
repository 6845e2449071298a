"""Models and caches whose files are not what was written embed nothing; the shard of a cache is embedded again."""

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
from transformers import AutoModel

from xcompat import XbtModel, XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.core.files import read_json, write_json
from xcompat.embeddings.cache import StackedCaches
from xcompat.embeddings.embed import EmbeddingCache, embed_texts
from xcompat.encoders.model_files import record_model, require_whole
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import IndependentModel
from xcompat.models import CompatConfig
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.training.caches import cached_captions


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    old = load_embedder(save_stand_in(folder / "old", "clip", 8, seed=2)).describe_old()
    encoder = save_stand_in(folder / "new", "clip", 16, seed=1)
    XbtModel.from_encoder(encoder, old=old).save_pretrained(folder / "xbt")
    (folder / "independent").mkdir()
    IndependentModel.from_encoder(encoder).export(folder / "independent")
    return folder


@pytest.fixture
def models(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "models"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 4  # in the last value
    file.write_bytes(content)


@pytest.mark.parametrize("load", [load_embedder, AutoModel.from_pretrained])
@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json", "tokenizer.json", "config.json"])
def test_a_file_that_changed_is_named(name: str, load: Callable[[str], object], models: Path) -> None:
    load(str(models / "xbt"))
    file = models / "xbt" / name
    content = file.read_bytes()
    if name == "model.safetensors":
        flip(file)
    else:
        file.write_bytes(content.replace(b"0", b"1"))
    assert file.read_bytes() != content
    with pytest.raises(XcompatError, match=rf"{name} has changed since it was written; restore it") as caught:
        load(str(models / "xbt"))
    assert "\n" not in str(caught.value)
    file.write_bytes(content)
    load(str(models / "xbt"))


def test_files_of_every_model_are_recorded_and_missed(models: Path) -> None:
    for kind in ("xbt", "independent"):
        files = sorted(file.name for file in (models / kind).iterdir() if file.name != CHECKSUMS)
        assert sorted(read_json(models / kind / CHECKSUMS)) == files
        assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"} <= {*files}
    flip(models / "independent" / "model.safetensors")
    with pytest.raises(XcompatError, match=r"model\.safetensors has changed since it was written"):
        load_embedder(str(models / "independent"))
    (models / "xbt" / "tokenizer.json").unlink()
    require_whole(models / "xbt", in_part=True)
    with pytest.raises(XcompatError, match=r"tokenizer\.json is missing; restore it"):
        AutoModel.from_pretrained(models / "xbt")


def test_who_changes_a_file_on_purpose_deletes_the_record(models: Path) -> None:
    config = models / "xbt" / "config.json"
    write_json(config, read_json(config) | {"logit_scale": 2.0})
    with pytest.raises(XcompatError, match=r"delete .*checksums\.json if you changed it yourself"):
        AutoModel.from_pretrained(models / "xbt")
    (models / "xbt" / CHECKSUMS).unlink()
    model = AutoModel.from_pretrained(models / "xbt")
    assert model.config.logit_scale == 2.0
    model.save_pretrained(models / "again")
    assert AutoModel.from_pretrained(models / "again").config.logit_scale == 2.0
    record_model(models / "xbt")
    flip(models / "xbt" / "model.safetensors")
    with pytest.raises(XcompatError, match="has changed"):
        AutoModel.from_pretrained(models / "xbt")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"config.json": 3}'])
def test_a_damaged_record_is_said_in_one_line(content: str, models: Path) -> None:
    (models / "xbt" / CHECKSUMS).write_text(content)
    with pytest.raises(XcompatError, match="checksums") as caught:
        AutoModel.from_pretrained(models / "xbt")
    assert "\n" not in str(caught.value)


def test_saving_again_records_what_is_there_now(models: Path) -> None:
    """Other files of the user's beside the model are none of its business, nor are checksums that others keep."""
    write_json(models / "old" / "checksums.json", {"model.safetensors": "sha256:0"})
    load_embedder(str(models / "old"))
    model = AutoModel.from_pretrained(models / "xbt")
    (models / "xbt" / "former.model").mkdir()
    for name in ("report.json", "notes.txt"):
        (models / "xbt" / name).write_text("mine")
    next(model.parameters()).data.add_(1)
    model.save_pretrained(models / "xbt")
    for name in ("report.json", "notes.txt"):
        (models / "xbt" / name).write_text("changed")
    again = AutoModel.from_pretrained(models / "xbt")
    assert again.fingerprint() == model.fingerprint()
    assert not {"notes.txt", "report.json"} & {*read_json(models / "xbt" / CHECKSUMS)}


@pytest.mark.parametrize("old", [{"name": "a"}, {"name": "a", "fingerprint": "b", "dim": 3, "compatible_with": [{"dim": 3}]}])
def test_an_old_model_that_is_described_in_part_is_refused(old: dict[str, object]) -> None:
    with pytest.raises(XcompatError, match="each version needs dim, fingerprint, name"):
        CompatConfig(old=old)


TEXTS = [f"{'word ' * (n % 9)}number {n}" for n in range(23)]


@pytest.fixture(scope="module")
def embedder(folder_of: dict[str, str]) -> Embedder:
    return load_embedder(folder_of["clip"])


@pytest.fixture
def cache(embedder: Embedder, tmp_path: Path) -> Path:
    embed_texts(embedder, TEXTS, tmp_path / "c", "digest", shard_rows=5)
    return tmp_path / "c"


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
