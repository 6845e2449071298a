"""Training on pairs of texts: what is read, what is no negative, and the methods that learn from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from xcompat import Fingerprint
from xcompat.core.errors import XcompatError
from xcompat.data import TextPairCollator, TextPairDataset, TextPairSource, load_text_pairs
from xcompat.data.text_pairs import hash_texts
from xcompat.losses import clip_contrastive_loss
from xcompat.methods import METHODS
from xcompat.models import CompatModel, describe_old
from xcompat.models.embedder import load_checkpoint
from xcompat.report import load_report
from xcompat.training.cached_gradients import backward_in_mini_batches
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.recipe import Recipe, parse_recipe
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


def unit(rows: int, dim: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_pairs_are_read_with_their_negatives(pairs_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(pairs_file).open("a") as file:
        for row in ({"query": " ", "passage": "x", "wrong": ["y"]}, {"query": "x", "passage": "same", "wrong": ["same"]}):
            file.write(json.dumps(row | {"about": 0}) + "\n")
    pairs = load_text_pairs(TextPairSource(path=pairs_file, negative_column="wrong", id_column="about"))
    assert len(pairs) == 24 and pairs[3] == {"query": "3 who", "passage": "3 fish", "negatives": ["3 fox", "3 hen"], "id": "3"}
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 26 rows lack a text and are skipped, e.g." in said and "line 25" in said.replace("\n", "")


def test_a_pair_without_an_id_is_refused(pairs_file: str) -> None:
    with Path(pairs_file).open("a") as file:
        file.write(json.dumps(ROWS[0] | {"about": None}) + "\n")
    with pytest.raises(XcompatError, match=r"line 25 has no about; fill the column, or remove the row"):
        load_text_pairs(TextPairSource(path=pairs_file, id_column="about"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"query_column": "qury"}, "line 1 has no column 'qury'.*query"),
        ({"negative_column": "wrnog"}, "line 1 has no column 'wrnog'.*wrong"),
        ({"passage_column": "about"}, "line 1: about is '0', not text"),
    ],
)
def test_what_is_no_pair_is_refused(pairs_file: str, columns: dict[str, str], message: str) -> None:
    with pytest.raises(XcompatError, match=message):
        load_text_pairs(TextPairSource(path=pairs_file, **columns))


def test_draws_depend_on_seed_epoch_and_index_alone(pairs_file: str) -> None:
    pairs = load_text_pairs(TextPairSource(path=pairs_file, negative_column="wrong", id_column="about"))
    one, other = (TextPairDataset(pairs, one_per_id=True, seed=3) for _ in range(2))
    assert len(one) == 9 and one.__getitems__([4, 1]) == [other[4], other[1]]
    epochs = []
    for epoch in range(60):
        one.set_epoch(epoch)
        epochs.append(one[4])
    assert {item["query"] for item in epochs} == {"4 who", "13 who", "22 who"}, "each row of an id is drawn at times"
    assert {text for item in epochs for text in item["negatives"]} == {
        f"{row} {name}" for row in (4, 13, 22) for name in ("fox", "hen")
    }


def naive(queries: Tensor, passages: Tensor, scale: float, items: list[int], mined: Tensor, mined_items: list[int]) -> float:
    """Sum over every query and every passage, one by one, what is no negative left out."""
    total = 0.0
    for row in range(len(queries)):
        rivals = [row, *(other for other in range(len(queries)) if items[other] != items[row])]
        there = [float(scale * queries[row] @ passages[other]) for other in rivals]
        there += [float(scale * queries[row] @ mined[other]) for other in range(len(mined)) if mined_items[other] != items[row]]
        back = [float(scale * passages[row] @ queries[other]) for other in rivals]
        total -= sum(float(torch.tensor(logits).log_softmax(0)[0]) for logits in (there, back)) / 2
    return total / len(queries)


def test_false_negatives_are_masked_and_mined_ones_searched() -> None:
    queries, passages, mined = unit(6, 4, seed=0), unit(6, 4, seed=1), unit(6, 4, seed=2)
    items, mined_items = [1, 2, 1, 3, 4, 2], [9, 1, 8, 4, 7, 2]
    found = clip_contrastive_loss(queries, passages, 5.0, torch.tensor(items), mined, torch.tensor(mined_items))
    assert float(found) == pytest.approx(naive(queries, passages, 5.0, items, mined, mined_items), abs=1e-6)
    plain = clip_contrastive_loss(queries, passages, 5.0)
    torch.testing.assert_close(clip_contrastive_loss(queries, passages, 5.0, torch.arange(6)), plain)


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
    assert torch.equal(
        batch["passage_ids"],
        torch.from_numpy(hash_texts(["0 dog", "1 cat", "0 dog", "3 fish", "4 dog", "5 cat", "6 bird", "3 dog"])),
    )
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
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    torch.testing.assert_close(backward_in_mini_batches(Accelerator(cpu=True), model, batch, size), loss.detach())
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-5 * scale)


def test_a_sigmoid_loss_knows_no_passages(folder_of: dict[str, str], pairs_file: str) -> None:
    model = build("independent", folder_of["siglip"])
    with pytest.raises(XcompatError, match="SigLIP's loss needs images with texts"):
        model(**batch_for(model, pairs_file), return_loss=True)


@pytest.fixture
def raw(folder_of: dict[str, str], old_folder: str, texts_file: str, pairs_file: str, tmp_path: Path) -> dict[str, Any]:
    for name, rows in (("queries", range(50, 58)), ("passages", range(60, 80))):
        lines = (json.dumps({"id": str(row), "text": f"{row} {ANIMALS[row % 4]}"}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "qrels.txt").write_text("".join(f"{row} 0 {row + 10} 1\n" for row in range(50, 58)))
    judged = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("queries", "passages")}
    return {
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "cache"),
        "old": old_folder,
        "new": folder_of["clip"],
        "data": {
            "text_pairs": {"path": pairs_file, "negative_column": "wrong"},
            "texts": [{"path": texts_file}],
            "judged_texts": {**judged, "qrels": str(tmp_path / "qrels.txt")},
        },
        "training": {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-3},
        "evaluation": {"resamples": 100, "examples": 0, "tsne_pairs": 0},
        "stages": [
            {"name": "phi", "method": "projection"},
            {"name": "pair", "method": "xbt", "projection": "stage:phi", "options": LORA, "mini_batch_size": 4},
            {
                "name": "direct",
                "method": "direct",
                "options": LORA,
                "data": {"text_pairs": {"negative_column": None, "id_column": "about"}, "one_per_id": True},
                "evaluation": {"compare_with": ["phi", "pair"]},
            },
        ],
    }


def recipe_of(raw: dict[str, Any], **changes: Any) -> Recipe:
    return parse_recipe({**raw, **changes}, "demo", "demo.yaml")


def test_the_whole_course(raw: dict[str, Any], tmp_path: Path, undrawn: None) -> None:
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


def test_a_dry_run(raw: dict[str, Any], undrawn: None) -> None:
    dry_run_recipe(recipe_of(raw, old="some/old", new="some/new"))


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
