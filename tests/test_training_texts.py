"""Texts to learn from: corpora of every format without held-out texts, and pairs with what is no negative."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from conftest import raw_recipe, recipe_of, refuses, unit
from hypothesis import given
from hypothesis import strategies as st
from test_training import assert_equal_gradients, gradients, naive_clip_loss
from torch import Tensor

from xcompat import CompatModel, Fingerprint, XcompatError
from xcompat.data import CorpusSource, PairSource, TextPairCollator, TextPairDataset, TextPairSource, load_text_pairs, load_texts
from xcompat.data.corpora import HashSet
from xcompat.data.text_pairs import hash_texts
from xcompat.losses import clip_contrastive_loss
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.models.embedder import load_checkpoint
from xcompat.report import load_report
from xcompat.training.cached_gradients import backward_in_mini_batches
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.run import embed_recipe, run_recipe

LORA: dict[str, Any] = {"adapters": {"lora": {"rank": 2, "dropout": 0.0}}}
OLD = describe_old(Fingerprint.from_string("old"), dim=8)
ANIMALS = ("dog", "cat", "bird", "fish")
ROWS: list[dict[str, Any]] = [
    {"query": f"{row} who", "passage": f"{row % 9} {ANIMALS[row % 4]}", "wrong": [f"{row} fox", f"{row} hen"], "about": row % 9}
    for row in range(24)
]


@pytest.fixture
def pairs_file(tmp_path: Path) -> str:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def test_pairs_are_read_with_their_negatives(pairs_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(pairs_file).open("a") as file:
        for row in ({"query": " ", "passage": "x", "wrong": ["y"]}, {"query": "x", "passage": "same", "wrong": ["same"]}):
            file.write(json.dumps(row | {"about": 0}) + "\n")
    pairs = load_text_pairs(TextPairSource(path=pairs_file, negative_column="wrong", id_column="about"))
    assert len(pairs) == 24 and pairs[3] == {"query": "3 who", "passage": "3 fish", "negatives": ["3 fox", "3 hen"], "id": "3"}
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 26 rows lack a text and are skipped, e.g." in said and "line 25" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query_column": "qury"}, "line 1 has no column 'qury'.*query"),
        ({"negative_column": "wrnog"}, "line 1 has no column 'wrnog'.*wrong"),
        ({"passage_column": "about"}, "line 1: about is '0', not text"),
        ({"id_column": "about"}, "line 25 has no about; fill the column, or remove the row"),
    ],
)
def test_what_is_no_pair_is_refused(pairs_file: str, columns: dict[str, str], message: str) -> None:
    with Path(pairs_file).open("a") as file:
        file.write(json.dumps(ROWS[0] | {"about": None}) + "\n")
    refuses(message, load_text_pairs, TextPairSource(path=pairs_file, **columns))


def test_draws_depend_on_seed_epoch_and_index_alone(pairs_file: str) -> None:
    pairs = load_text_pairs(TextPairSource(path=pairs_file, negative_column="wrong", id_column="about"))
    one, other = (TextPairDataset(pairs, one_per_id=True, seed=3) for _ in range(2))
    assert len(one) == 9 and one.__getitems__([4, 1]) == [other[4], other[1]]
    epochs = []
    for epoch in range(60):
        one.set_epoch(epoch)
        epochs.append(one[4])
    assert {item["query"] for item in epochs} == {"4 who", "13 who", "22 who"}, "each row of an id is drawn at times"
    negatives = {text for item in epochs for text in item["negatives"]}
    assert negatives == {f"{row} {name}" for row in (4, 13, 22) for name in ("fox", "hen")}


def test_false_negatives_are_masked_and_mined_ones_counted(folder_of: dict[str, str], pairs_file: str) -> None:
    queries, passages, mined = unit(6, 4), unit(6, 4, seed=1), unit(6, 4, seed=2)
    items, mined_items = [1, 2, 1, 3, 4, 2], [9, 1, 8, 4, 7, 2]
    found = clip_contrastive_loss(queries, passages, 5.0, torch.tensor(items), mined, torch.tensor(mined_items))
    assert float(found) == pytest.approx(naive_clip_loss(queries, passages, 5.0, items, mined, mined_items), abs=1e-6)
    plain = clip_contrastive_loss(queries, passages, 5.0)
    torch.testing.assert_close(clip_contrastive_loss(queries, passages, 5.0, torch.arange(6)), plain)
    model = build("independent", folder_of["siglip"])
    refuses("SigLIP's loss needs images with texts", model, **batch_for(model, pairs_file), return_loss=True)


def build(method: str, folder: str) -> CompatModel:
    torch.manual_seed(0)
    options = LORA if method != "independent" else {}
    model = METHODS[method].from_encoder(folder, old=OLD if METHODS[method].compares_with_old else None, **options)
    model.encoder.freeze_images()
    return model.train()


def batch_for(model: CompatModel, pairs_file: str) -> dict[str, Tensor]:
    dataset = TextPairDataset(load_text_pairs(TextPairSource(path=pairs_file, negative_column="wrong")))
    items: Any = dataset.__getitems__([0, 1, 9, 3, 4, 5, 6, 12])  # 0 and 9, 3 and 12 have passages that differ, as do all
    items[2]["passage"], items[5]["negatives"] = items[0]["passage"], [items[1]["passage"]]
    batch = TextPairCollator(model.processor)(items)
    if "old_embeds" in model.columns:
        batch = {name: column for name, column in batch.items() if not name.startswith("negative")}
        batch |= {"old_embeds": unit(8, 8, seed=3), "old_text_embeds": unit(8, 8, seed=4)}
    return batch


METHODS_OF_TEXTS = ["xbt", "direct", "independent"]


@pytest.mark.parametrize("method", METHODS_OF_TEXTS)
def test_text_towers_learn_alone(method: str, folder_of: dict[str, str], pairs_file: str) -> None:
    model = build(method, folder_of["clip"])
    batch = batch_for(model, pairs_file)
    passages = ["0 dog", "1 cat", "0 dog", "3 fish", "4 dog", "5 cat", "6 bird", "3 dog"]
    assert torch.equal(batch["passage_ids"], torch.from_numpy(hash_texts(passages)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser, losses = torch.optim.AdamW(trained, lr=5e-3), []
    for _ in range(6):
        output = model(**batch, return_loss=True)
        losses.append(float(output.loss.detach()))
        optimiser.zero_grad()
        output.loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    assert all(parameter.grad is not None for parameter in trained), "data-parallel training waits for every gradient"
    assert not any("vision" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    assert output.image_embeds is None and output.passage_embeds.shape == output.text_embeds.shape


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", METHODS_OF_TEXTS)
def test_mini_batches_give_the_gradient_of_the_whole(method: str, size: int, folder_of: dict[str, str], pairs_file: str) -> None:
    model = build(method, folder_of["clip"])
    batch = batch_for(model, pairs_file)
    loss = model(**batch, return_loss=True).loss
    loss.backward()
    wanted = gradients(model)
    torch.testing.assert_close(backward_in_mini_batches(Accelerator(cpu=True), model, batch, size), loss.detach())
    assert_equal_gradients(gradients(model), wanted)


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, texts_file: str, pairs_file: str, tmp_path: Path) -> dict[str, Any]:
    for name, rows in (("queries", range(50, 58)), ("passages", range(60, 80))):
        lines = (json.dumps({"id": str(row), "text": f"{row} {ANIMALS[row % 4]}"}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "qrels.txt").write_text("".join(f"{row} 0 {row + 10} 1\n" for row in range(50, 58)))
    judged = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("queries", "passages")}
    direct = {"name": "direct", "method": "direct", "options": LORA, "evaluation": {"compare_with": ["phi", "pair"]}}
    return raw_recipe(tmp_path, old_folder, folder_of["clip"], "") | {
        "data": {
            "text_pairs": {"path": pairs_file, "negative_column": "wrong"},
            "texts": [{"path": texts_file}],
            "judged_texts": {**judged, "qrels": str(tmp_path / "qrels.txt")},
        },
        "training": {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-3},
        "stages": [
            {"name": "phi", "method": "projection"},
            {"name": "pair", "method": "xbt", "projection": "stage:phi", "options": LORA, "mini_batch_size": 4},
            direct | {"data": {"text_pairs": {"negative_column": None, "id_column": "about"}, "one_per_id": True}},
        ],
    }


def test_the_whole_course(raw: dict[str, Any], tmp_path: Path, undrawn: None) -> None:
    dry_run_recipe(recipe_of(raw, old="some/old", new="some/new"))
    embed_recipe(recipe_of(raw))
    run_recipe(recipe_of(raw))
    report = load_report(tmp_path / "run")
    assert {"old/old", "phi/old", "pair/old", "new/old", "new/new"} <= {case.label for case in report.cases}
    model = load_checkpoint(str(tmp_path / "run" / "pair" / "model"))
    changed = [name for name, weight in model.named_parameters() if "lora_B" in name and weight.abs().max() > 0]
    assert changed and all("text" in name for name in changed)


def test_queries_that_are_judged_on_are_named(raw: dict[str, Any], pairs_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(pairs_file).open("a") as file:
        file.write(json.dumps({"query": "50 BIRD", "passage": "any", "wrong": "other", "about": 99}) + "\n")
    run_recipe(recipe_of(raw, stages=raw["stages"][:2], evaluation=None))
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 8 queries of data.judged_texts are also in data.text_pairs, so the result will be too optimistic" in said


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"method": "direct"}, "needs old embeddings of the pairs, which negatives do not have"),
        ({"method": "bct"}, "method bct does not learn from text pairs"),
        ({"method": "xbt", "options": {"adapters": {"prompts": 2}}}, "prompts need images"),
        ({"method": "xbt", "data": {"one_per_id": True}}, "text_pairs has no id_column"),
        ({"method": "xbt", "data": {"pairs": {"path": "some/pairs"}}}, "a single training set; remove text_pairs or pairs"),
    ],
)
def test_what_does_not_fit_is_refused(raw: dict[str, Any], stage: dict[str, Any], message: str) -> None:
    with pytest.raises(XcompatError, match=message):
        recipe_of(raw, stages=[{"name": "one", **stage}])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def write_texts(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_are_stripped_and_blanks_and_duplicates_dropped(tmp_path: Path, name: str) -> None:
    path = write_texts(tmp_path / name, "\ufeffa dog\r\n\n  a cat \n \t\nA dog\na dog\nein Hündchen\x85x")
    assert load_texts(path)["text"][:] == ["a dog", "a cat", "A dog", "ein Hündchen\x85x"]


def test_sources_of_all_formats(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", "one\ntwo\n")
    write_texts(tmp_path / "b.jsonl", '{"text": "two"}\n\n{"text": ["three", ""]}\n')
    pd.DataFrame({"caption": [["four", "one"], ["five"]], "other": [1, 2]}).to_parquet(tmp_path / "c.parquet")
    with tarfile.open(tmp_path / "d.tar", "w") as tar:
        for name, text in (("k1.txt", b"six"), ("k2.txt", b"one")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    datasets.Dataset.from_dict({"sentence": ["seven", " six "]}).save_to_disk(tmp_path / "e")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.png").write_bytes(b"not opened")
    write_texts(tmp_path / "f" / "captions.csv", "image,caption\nx.png,eight\nx.png,seven\n")
    sources = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.parquet", "d.tar")]
    sources += [CorpusSource(path=str(tmp_path / "e"), text_column="sentence"), PairSource(path=str(tmp_path / "f"))]
    texts = load_texts(sources)["text"][:]
    assert texts == ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def test_held_out_captions_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "a.txt", "A dog, running.\na  dog running\na dog\n!!!\nSTRASSE\n")
    dataset = load_texts(path, exclude=["a dog running", "???", "Straße"])
    assert dataset["text"][:] == ["a dog", "!!!"]
    assert "2 distinct texts of 5 (0 duplicates and 3 held-out captions left out)" in " ".join(capsys.readouterr().out.split())
    assert len(load_texts(path)) == 5  # another cache, not the one without the captions
    monkeypatch.setattr("xcompat.data.corpora.BATCH", 4)
    path = write_texts(tmp_path / "b.txt", "".join(f"text {n // 2}\n" for n in range(100)))
    assert load_texts(path, limit=6, exclude=["text 0"])["text"][:] == [f"text {n}" for n in range(1, 7)], (
        "a limit counts the rest"
    )
    assert len(load_texts(path)) == 50


def test_the_cache_is_reused_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_texts(tmp_path / "a.txt", "one\n")
    first = load_texts(path)
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.data.corpora._keep_new_texts", lambda *_: pytest.fail("read again"))
        assert load_texts(path)._fingerprint == first._fingerprint
    write_texts(tmp_path / "a.txt", "one\ntwo\n")
    assert load_texts(path)["text"][:] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n\n", "empty corpus: none of 0 texts"),
        ("a.txt", b"good\n\xff\xfe\n", "a.txt is not UTF-8 text near line"),
        ("a.txt.gz", gzip.compress(b"good line\n" * 1000, mtime=0)[:-9], "a.txt.gz cannot be read after line"),
        ("a.txt.gz", b"no gzip", "a.txt.gz cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not valid JSON"),
        ("a.jsonl", b'["a"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"txet": "a"}\n', "line 1 has no column named text"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read"),
        ("a.tar", b"no tar", "1 of 1 shards cannot be read"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    refuses(message, load_texts, str(tmp_path / name))
    assert not list((tmp_path / "hf_cache").rglob("*.arrow"))


def test_missing_files_columns_and_folders(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", '{"title": "a"}\n')
    (tmp_path / "empty").mkdir()
    cases = {
        "does not exist": str(tmp_path / "gone.txt"),
        "contains no text files": str(tmp_path / "empty"),
        "did you mean 'title'": CorpusSource(path=str(tmp_path / "a.jsonl"), text_column="titel"),
    }
    for message, source in cases.items():
        refuses(message, load_texts, source)
    refuses("empty corpus.*no sources", load_texts, [])
    refuses(r"none of 1 texts is left \(1 excluded\)", load_texts, str(tmp_path / "a.jsonl"), exclude=["A"])


@given(st.lists(st.lists(st.integers(0, 30), max_size=20), max_size=12))
def test_seen_agrees_with_a_python_set(batches: list[list[int]]) -> None:
    seen, known = HashSet(), set()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.add(np.array(batch, dtype=np.uint64)).tolist() == expected
    assert sorted(value for run in seen.runs for value in run.tolist()) == sorted(known)
