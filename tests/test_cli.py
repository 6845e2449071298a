"""The command line as people meet it: what they get wrong is one line and exit code 2, and nothing is left half-written."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import faiss
import numpy as np
import pytest
import torch
import typer
import warm
import yaml
from conftest import Run, raw_recipe, refused, without_drawings, write_embeds
from hub_server import Hub, Repository
from pydantic import ValidationError
from schedule import mostly_nightly, mostly_nightly_rows
from transformers import AutoModel
from typer.core import TyperGroup

from xcompat import Fingerprint, __version__, cli
from xcompat.cli.verbs import CONTEXT, EXAMPLES, ORDER, PANELS, SELDOM
from xcompat.core.arrays import normalise_rows
from xcompat.models.embedder import load_checkpoint
from xcompat.models.memory_contents import PairMemoryContents
from xcompat.models.query_memory import LearnedTransform
from xcompat.report import load_report
from xcompat.report.wording import verdicts
from xcompat.training.checkpoints import last_complete_checkpoint
from xcompat.training.recipe import parse_recipe
from xcompat.training.run import run_recipe

pytestmark = pytest.mark.usefixtures("undrawn")
VERBS = {name.partition(" ")[0] for name in EXAMPLES}
TRAINING = {"max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_steps": 2, "logging_steps": 1}
ADAPTERS = {"lora": {"rank": 2, "dropout": 0.1}, "prompts": 2}
CREATE, COMMIT = "POST /api/repos/create", "POST /api/models/me/pair/commit"

Make = Callable[..., Path]


@pytest.fixture
def run(run_xcompat: Run) -> Run:
    def run_here(*arguments: object) -> tuple[int, str, str]:
        code, out, error = run_xcompat(*arguments)
        return code, " ".join(out.split()), error

    return Run(run_here)


@pytest.fixture
def recipe(tmp_path: Path, folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str) -> Make:
    raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], pairs_folder, texts=[{"path": texts_file}])
    raw |= {"method": "projection", "training": TRAINING}

    def write(**changes: Any) -> Path:
        changed = raw | changes
        changed["data"] = raw["data"] | changes.get("data", {})
        changed["training"] = raw["training"] | changes.get("training", {})
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(changed))
        return file

    return write


@pytest.mark.parametrize(
    ("verb", "changes", "message"),
    [
        ("train", {"old": "some/model-that-is-nowhere"}, "cannot load some/model-that-is-nowhere"),
        ("train", {"method": "xbt"}, "set projection to its folder or stage:NAME"),
        ("train", {"training": {"bf16": True, "fp16": True}}, "training section does not fit"),
        ("train", {"training": {"push_to_hub": True}}, "requires a login; log in with `hf auth login`"),
        ("train", {"training": {"lr_scheduler_type": "linaer"}}, "the training section does not fit: linaer is not a valid"),
        ("embed", {"data": {"texts": []}}, "set data.embeddings_of to images"),
    ],
)
def test_mistakes_are_told_before_anything_is_embedded(
    verb: str, changes: dict[str, Any], message: str, run: Run, recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    assert message in refused(run(verb, recipe(**changes)))
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "cache").exists()


def nothing_finished(run_folder: Path) -> None:
    assert not [name for name in ("model", "done.json", "report/report.json") if (run_folder / name).exists()]
    assert not [path for path in run_folder.parent.rglob(".*") if path.is_dir()], "temporary folders are taken away"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_few_unreadable_images_are_skipped(workers: int, run: Run, recipe: Make, pairs_folder: str, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(pairs_folder, tmp_path / "broken"))
    (broken / "5.png").write_bytes(b"no image")
    data: dict[str, Any] = {"pairs": {"path": str(broken), "max_bad_share": 0.01}}
    if workers:  # they read the images of each batch
        training = {"dataloader_num_workers": workers, "max_steps": 6}
        file = recipe(method="independent", old=None, evaluation=None, data=data, training=training)
    else:
        file = recipe(data=data | {"embeddings_of": "images"}, evaluation=None)
    line = refused(run("train", file))
    assert "1 of 24 samples cannot be used" in line and "5.png" in line
    nothing_finished(tmp_path / "run")
    if not workers:
        assert "skipped 5.png" in run.output("train", file, "data.pairs.max_bad_share=0.1", f"output_dir={tmp_path / 'again'}")
        assert (tmp_path / "again" / "model" / "model.safetensors").stat().st_size > 1000


def test_a_tracker_writes_what_is_trained(run: Run, recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    printed = run.output("train", recipe(evaluation=None), "training.report_to=[tensorboard]")
    assert f" in {tmp_path / 'run'} (" in printed.splitlines()[-1], "the folder of the result"
    events = list((tmp_path / "run" / "checkpoints" / "runs").rglob("events.out.tfevents.*"))
    assert len(events) == 1 and b"train/loss" in events[0].read_bytes()


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str
) -> Path:
    folder = tmp_path_factory.mktemp("done")
    phi = {"name": "phi", "method": "projection", "evaluation": None}
    pair = {"name": "pair", "method": "xbt", "projection": "stage:phi", "options": {"adapters": ADAPTERS}}
    raw = raw_recipe(folder, old_folder, folder_of["clip"], pairs_folder, texts=[{"path": texts_file}])
    raw |= {"training": {"max_steps": 2, "per_device_train_batch_size": 8}, "stages": [phi, pair]}
    (folder / "demo.yaml").write_text(yaml.safe_dump(raw))
    with without_drawings():
        run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
    return folder


def test_evaluate_takes_a_recipe_a_run_and_a_checkpoint(run: Run, done: Path, pairs_folder: str, tmp_path: Path) -> None:
    report = json.loads((done / "run" / "report" / "report.json").read_text())
    compatible = report["criterion"]["backward_compatible"]
    checkpoint = done / "run" / "pair" / "model"
    for target in ([done / "demo.yaml"], [done / "run"], [checkpoint, "--data", pairs_folder, "--output", tmp_path / "report"]):
        code, out, error = run("evaluate", *target, "--require-compatible")
        assert code == (0 if compatible else 1), error
        assert "old" in out
    again = json.loads((tmp_path / "report" / "report" / "report.json").read_text())
    for side in ("new", "old"):
        assert again[side]["fingerprint"] == report[side]["fingerprint"]
    recalls = [[case["metrics"]["recall@5"] for case in each["cases"]] for each in (again, report)]
    assert recalls[0] == recalls[1]


def test_report_renders_again(run: Run, done: Path, drawn: None) -> None:
    page = done / "run" / "report" / "report.html"
    page.unlink()
    code, out, _ = run("report", done / "run")
    assert code == 0 and page.exists() and "R@1" in out


def test_push_shares_a_run_with_what_its_report_says(run: Run, done: Path, hub: Hub) -> None:
    hub.faults, hub.strikes = {"PUT /large/": 0}, {"PUT /large/": 1}
    assert hub.url in run.output("push", done / "run", "me/pair", "--private", "--license", "mit")
    assert len([asked for asked in hub.asked if asked.startswith("PUT")]) == 2, "a connection that drops once is tried again"
    card = hub.files("me/pair")["README.md"].decode()
    report = json.loads((done / "run" / "report" / "report.json").read_text())
    for case in report["cases"]:
        wanted = ("**%s**" if case["query"] + case["gallery"] == "newold" else "%s") % f"{case['query']}/{case['gallery']}"
        assert f"| {wanted} | {case['metrics']['recall@1'] * 100:.1f} (" in card
    assert ("Backward compatible: yes." in card) == report["criterion"]["backward_compatible"]
    assert "max_steps: 2" in card and str(done) not in card and hub.repos["me/pair"].private


def test_lineage_shows_the_chain_and_what_is_missing_of_it(run: Run, done: Path, old_folder: str, tmp_path: Path) -> None:
    out = run.output("lineage", done / "run" / "pair")
    assert "(xbt, 16 dimensions)" in out and f"{old_folder}@" in out and "(encoder, 8 dimensions)" in out
    orphan = tmp_path / "model"
    shutil.copytree(done / "run" / "pair" / "model", orphan)
    config = json.loads((orphan / "config.json").read_text())
    config["old"]["name"] = "/gone/model"
    (orphan / "config.json").write_text(json.dumps(config))
    assert f"the lineage of {orphan} is broken: /gone/model is neither a folder here" in refused(run("lineage", orphan))


@pytest.mark.parametrize(
    ("asked", "status", "strikes", "message"),
    mostly_nightly_rows(
        [
            (CREATE, 401, None, "refuses access to me/pair (401: the server says 401); log in with `hf auth login`"),
            (CREATE, 403, None, "refuses access to me/pair (403"),
            (COMMIT, 409, None, "me/pair was changed on"),
            (COMMIT, 500, None, "failed on me/pair (500: the server says 500); run the command again to continue"),
            (COMMIT, 0, 1, "cannot be reached for me/pair"),
            ("POST /me/pair.git/info/lfs", 507, None, "failed on me/pair (507"),
            ("PUT /large/", 0, None, "cannot be reached for me/pair"),
            ("PUT /large/", 503, None, "failed on me/pair (503"),
            ("GET /api/models/me/pair", 0, None, "cannot be reached for me/pair"),
        ],
        lambda asked, status, *_: status in (401, 409) or asked == "PUT /large/",
    ),
)
def test_pushes_are_resumed(asked: str, status: int, strikes: int | None, message: str, run: Run, done: Path, hub: Hub) -> None:
    hub.faults[asked] = status
    if strikes is not None:
        hub.strikes[asked] = strikes
    line = refused(run("push", done / "run", "me/pair"))
    assert message in line, line
    assert "README.md" not in hub.repos.get("me/pair", Repository()).files(), "nothing is half there"
    sent = set(hub.large)
    hub.faults.clear()
    hub.asked.clear()
    assert run("push", done / "run", "me/pair")[0] == 0
    assert {name.removeprefix("PUT /large/") for name in hub.asked if name.startswith("PUT")} == set(hub.large) - sent
    assert AutoModel.from_pretrained("me/pair").compatible_with


def test_a_hub_that_is_not_there_or_not_open(run: Run, done: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_another"
    assert "log in with `hf auth login`" in refused(run("push", done / "run", "me/pair"))
    assert "me/pair is neither a folder here nor on" in refused(run("lineage", "me/pair"))
    hub.token = None
    hub.is_full = True
    assert "refuses the commit to me/pair" in (line := refused(run("push", done / "run", "me/pair"))) and "storage limit" in line
    hub.add("me/gated", done / "run" / "pair" / "model")
    hub.repos["me/gated"].gated = "manual"
    assert f"me/gated is gated on {hub.url}: request access" in refused(run("lineage", "me/gated"))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        down = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    with monkeypatch.context() as cut_off:  # undone before the Hub goes: else tests after this one would be online
        cut_off.setattr("huggingface_hub.constants.ENDPOINT", down)
        for verb in (("push", done / "run", "me/pair"), ("lineage", "me/pair")):
            assert f"{down} cannot be reached for me/pair" in refused(run(*verb))
        cut_off.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in refused(run("push", done / "run", "me/pair"))


@pytest.fixture
def embeddings(tmp_path: Path) -> Make:
    """Return a function that writes a folder of plain embeddings: captions near their images, up to noise."""

    def write(name: str, dim: int = 8, noise: float = 1.0, seed: int = 0) -> Path:
        draw, truth = np.random.default_rng(seed + 1), np.random.default_rng(0).normal(size=(40, dim))
        image, text = (normalise_rows(truth + noise * draw.normal(size=truth.shape)).astype(np.float32) for _ in range(2))
        return write_embeds(tmp_path / name, [f"item-{row}" for row in range(40)], image=image, text=text)

    return write


def test_embeddings_from_elsewhere_are_judged(run: Run, embeddings: Make, tmp_path: Path) -> None:
    noisy, clean = embeddings("noisy", noise=1.0), embeddings("clean", noise=0.0)
    out = ("--output", tmp_path / "report")
    assert run("evaluate", "--old", noisy, "--new", clean, "--require-compatible", *out)[0] == 0
    assert json.loads((tmp_path / "report" / "report" / "report.json").read_text())["criterion"]["backward_compatible"] is True
    assert run("evaluate", "--old", clean, "--new", noisy, "--require-compatible", *out)[0] == 1
    assert run("evaluate", "--old", clean, "--new", noisy, *out)[0] == 0, "without the flag a failed criterion is no failure"
    assert (tmp_path / "report" / "report" / "report.html").exists()
    old, new = embeddings("old"), embeddings("new", noise=0.0)

    def missing(*more: object) -> str:
        run.output("evaluate", "--old", old, "--new", new, *more, "--output", tmp_path / "judged")
        return verdicts(load_report(tmp_path / "judged"))[-1].detail

    own, independent = "the new model's own embeddings (--new-own FOLDER", "(--independent FOLDER)."
    assert own in missing() and missing().endswith(independent)
    assert own in missing("--independent", new) and independent not in missing("--independent", new)
    assert own not in missing("--new-own", new) and missing("--new-own", new).endswith(independent)


def test_images_alone_are_judged_by_their_classes(run: Run, embeddings: Make, tmp_path: Path) -> None:
    noisy, clean, out = embeddings("noisy", noise=1.0), embeddings("clean", noise=0.0), ("--output", tmp_path / "report")
    truth = np.load(clean / "image_embeds.npy")[np.arange(40) // 4]  # four images of each of ten things
    for folder, noise in ((noisy, 0.5), (clean, 0.1)):
        (folder / "text_embeds.npy").unlink()
        (folder / "text_ids.txt").unlink()
        rows = normalise_rows(truth + noise * np.random.default_rng(3).normal(size=truth.shape))
        np.save(folder / "image_embeds.npy", rows.astype(np.float32))
    line = refused(run("evaluate", "--old", noisy, "--new", clean, *out))
    assert f"{noisy} contains images without classes or texts" in line and "labels.txt" in line and "text_embeds.npy" in line
    (noisy / "labels.txt").write_text("".join(f"thing {row // 4}\n" for row in range(39)))
    assert "labels.txt has 39 lines for 40 images" in refused(run("evaluate", "--old", noisy, "--new", clean, *out))
    (noisy / "labels.txt").write_text("".join(f"thing {row // 4}\n" if row % 8 else "\n" for row in range(40)))
    assert "5 of 40 lines are blank, first line 1;" in refused(run("evaluate", "--old", noisy, "--new", clean, *out))
    (noisy / "labels.txt").write_text("".join(f"thing {row // 4}\n" for row in range(40)))
    assert "image to image: 40 queries" in run.output("evaluate", "--old", noisy, "--new", clean, "--require-compatible", *out)
    report = json.loads((tmp_path / "report" / "report" / "report.json").read_text())
    assert {(case["direction"], case["n_queries"]) for case in report["cases"]} == {("image-to-image", 40)}
    (clean / "text_ids.txt").write_text("item-0\n")  # texts of one side alone are a mistake
    assert "lacks text_embeds.npy" in refused(run("evaluate", "--old", noisy, "--new", clean, *out))


def damage(folder: Path, what: str) -> None:
    file, ids = folder / "image_embeds.npy", folder / "image_ids.txt"
    embeds, whole = np.load(file), file.read_bytes()
    arrays = {"pickle": np.array([{"a": 1}], dtype=object), "nan": embeds * np.nan, "text": embeds.astype(str)}
    arrays |= {"no rows": embeds[:0], "no columns": embeds[:, :0], "6 columns": embeds[:, :6]}
    lines = {"ids": b"item-0\n", "latin": "é\n".encode("latin-1") * 40, "no rows": b""}
    lines["other ids"] = "".join(f"thing-{row}\n" for row in range(40)).encode()
    if what == "missing":
        (folder / "text_ids.txt").unlink()
    if what == "6 columns":
        np.save(folder / "text_embeds.npy", np.load(folder / "text_embeds.npy")[:, :6])
    if what in arrays:
        np.save(file, arrays[what], allow_pickle=True)
    if what == "cut":
        file.write_bytes(whole[:-64])
    if what in lines:
        ids.write_bytes(lines[what])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pickle", "is not a .npy array of numbers"),
        ("missing", "lacks text_ids.txt"),
        ("ids", "image_ids.txt has 1 lines"),
        ("other ids", "embed the same items with both models"),
        ("nan", "40 of 40 rows of"),
        ("cut", "is not a .npy array of numbers"),
        ("no rows", "image_embeds.npy holds float32 of shape (0, 8)"),
        ("no columns", "image_embeds.npy holds float32 of shape (40, 0)"),
        ("6 columns", "new has 6 dimensions and"),
        ("text", "image_embeds.npy contains no embeddings (shape (40, 8), <U"),
        ("latin", "image_ids.txt is not UTF-8 text; convert it"),
    ],
)
def test_damaged_embeddings(what: str, message: str, run: Run, embeddings: Make, tmp_path: Path) -> None:
    old, new = embeddings("old"), embeddings("new", seed=5)
    damage(new, what)
    line = refused(run("evaluate", "--old", old, "--new", new, "--output", tmp_path / "report"))
    assert message in line and ("--map FOLDER" in line) == (what == "6 columns")
    assert not (tmp_path / "report").exists()


def test_a_map_is_judged_from_the_embeddings_that_it_maps(run: Run, embeddings: Make, tmp_path: Path) -> None:
    old, new = embeddings("old", noise=1.0), embeddings("new", noise=0.0)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))[0]
    for kind in ("image", "text"):  # the new model's own space is another one
        np.save(new / f"{kind}_embeds.npy", (np.load(new / f"{kind}_embeds.npy") @ turn).astype(np.float32))
    assert run("map", "--old", old, "--new", new, "--out", tmp_path / "map")[0] == 0
    out = ("--output", tmp_path / "judged")
    code, shown, _ = run("evaluate", "--old", old, "--new", new, "--map", tmp_path / "map", *out)
    assert "Backward compatible: " in shown and "unharmed" not in shown, "a map does not train the new model"
    cases = {case.label: case for case in load_report(tmp_path / "judged").cases if case.direction == "text-to-image"}
    labels = "old/old new/old new/new independent/old independent/independent new/backfilled"
    assert code == 0 and set(cases) == set(labels.split())
    model = load_checkpoint(str(tmp_path / "map" / "model"))
    with torch.no_grad():
        mapped = model.to_space(torch.from_numpy(np.load(new / "text_embeds.npy"))).numpy()
    first = (mapped @ np.load(old / "image_embeds.npy").T).argmax(1) == np.arange(len(mapped))
    assert cases["new/old"].metrics["recall@1"] == pytest.approx(first.mean())
    assert cases["new/old"].metrics["recall@1"] > cases["independent/old"].metrics["recall@1"]
    assert run("evaluate", "--old", old, "--new", new, "--map", tmp_path / "map", "--rerank", 3, *out)[0] == 0
    report = load_report(tmp_path / "judged")
    reranked = {case.label: case.metrics["recall@1"] for case in report.cases if case.direction == "text-to-image"}
    assert reranked["new+rerank/old"] > reranked["old/old"] and any("3 hits per query re-ranked" in note for note in report.notes)
    assert run("evaluate", "--old", old, "--new", new, "--map", tmp_path / "map", "--rerank", *out)[0] == 0
    count = model.config.rerank_candidates
    assert count and any(f"{count} hits per query re-ranked" in note for note in load_report(tmp_path / "judged").notes)
    asked = ("evaluate", "--old", old, "--new", new, "--map", tmp_path / "map", "--threshold")
    assert "new queries: cut off at" in run.output(*asked, 0.3, *out)
    kept = {(each.query, each.keeps) for each in load_report(tmp_path / "judged").thresholds}
    assert kept == {("old", "matches"), ("new", "matches"), ("new", "hits")}
    assert "invalid --threshold 75: a cosine" in refused(run(*asked, 75, *out))
    assert "add their folder with --new-own" in refused(run("evaluate", "--old", old, "--new", new, "--rerank", 3, *out))
    for target in ("evaluate", "report"):
        assert f"--map {tmp_path / 'map'}" in refused(run(target, tmp_path / "map"))
    assert "contains no model" in refused(run("evaluate", "--old", old, "--new", new, "--map", old, *out))
    assert "remove --new-own" in refused(run("evaluate", "--old", old, "--new", new, "--new-own", new, "--map", old, *out))
    line = refused(run("evaluate", "--old", old, "--new", embeddings("few", dim=6), "--map", tmp_path / "map", *out))
    assert "maps 8 to 8 dimensions, but few has 6" in line


def test_a_map_with_a_memory_is_also_judged_without_it(run: Run, embeddings: Make, tmp_path: Path) -> None:
    old, new = embeddings("old", noise=1.0), embeddings("new", noise=0.0)
    assert run("map", "--old", old, "--new", new, "--memory", "none", "--out", tmp_path / "map")[0] == 0
    asked = ("evaluate", "--old", old, "--new", new, "--map", tmp_path / "map", "--output", tmp_path / "judged")

    def found() -> dict[str, dict[str, float]]:
        assert run(*asked)[0] == 0
        return {case.label: case.metrics for case in load_report(tmp_path / "judged").cases if case.direction == "text-to-image"}

    plain = found()
    model = load_checkpoint(str(tmp_path / "map" / "model"))
    sides = [[np.load(folder / f"{kind}_embeds.npy").astype(np.float32) for kind in ("image", "text")] for folder in (new, old)]
    numbers = np.arange(len(sides[0][0]))
    contents = PairMemoryContents.compute(*map(tuple, sides), (numbers, numbers))
    memory = contents.build_memory(LearnedTransform(8), 20.0, 0.9)
    model.remember(memory)
    model.save_pretrained(tmp_path / "map" / "model")
    both = found()
    assert "without memory/old" not in plain and both["without memory/old"]["recall@1"] == plain["new/old"]["recall@1"]
    assert both["new/old"]["recall@1"] > plain["new/old"]["recall@1"], "it remembers the test set itself"


@pytest.mark.parametrize(
    "target",
    ["xcompat.embeddings.cache.write_array", "torch.save", "xcompat.models.CompatModel.export"],
    ids=["embeddings", "checkpoint", "model"],
)
def test_no_space_left(target: str, run: Run, recipe: Make, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "somewhere"))
    with mock.patch(target, side_effect=full):
        line = refused(run("train", recipe(evaluation=None)))
    assert "no space left on the device while writing" in line and "start again to continue" in line
    nothing_finished(tmp_path / "run")
    assert run("train", recipe(evaluation=None))[0] == 0, "with space, it goes on"
    assert (tmp_path / "run" / "model").exists()


def test_ctrl_c_keeps_a_checkpoint_and_starting_again_finishes(run: Run, recipe: Make, tmp_path: Path) -> None:
    file = recipe(evaluation=None, training={"max_steps": 600, "save_steps": 20, "logging_steps": 500})
    running = warm.start("-m", "xcompat", "train", file, folder=tmp_path)
    (process,) = running.processes
    checkpoints = tmp_path / "run" / "checkpoints"
    warm.wait_until(lambda: any(checkpoints.glob("checkpoint-*/trainer_state.json")) or not process.is_alive())
    assert process.is_alive() and process.pid, running.said()
    os.kill(process.pid, signal.SIGINT)
    done = running.wait(60)
    line = refused((done.returncode, done.stdout, done.stderr), 130)
    assert "interrupted at step" in line and "start again to continue" in line
    kept = last_complete_checkpoint(checkpoints)
    assert kept is not None
    step = int(kept.name.split("-")[1])
    assert str(step) in line, "the checkpoint is of the step that was done last"
    assert step < 600 and not (tmp_path / "run" / "model").exists()
    logged = json.loads((kept / "trainer_state.json").read_text())["log_history"]
    counted = {entry["step"]: entry["samples_seen"] for entry in logged if "samples_seen" in entry}
    assert counted[step] == step * counted[20] / 20, "what it goes on counting from"
    assert f"checkpoint-{step}" in run.output("train", file).replace(" ", ""), "it goes on from there"
    assert (tmp_path / "run" / "model").exists()


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)


def test_help_of_every_verb_comes_without_torch() -> None:
    code = (
        "import sys\n"
        "from xcompat import cli\n"
        f"for verb in {VERBS!r}:\n"
        "    sys.argv = ['xcompat', verb, '--help']\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as stop:\n"
        "        assert not stop.code, verb\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib', 'sklearn', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(VERBS) and "<bool>" not in done.stdout, "a flag takes no value"


def test_commands_on_embeddings_load_no_library_of_training() -> None:
    """Each takes up to a second, and transformers loads enough; collections of garbage wait for the end of the imports."""
    code = (
        "import gc, sys\n"
        "from xcompat.core.lazy import without_collection\n"
        "from xcompat.core.progress import silence_libraries\n"
        "with without_collection():\n"
        "    import xcompat.mapping.commands, xcompat.serve.app, xcompat.serve.site_loading, xcompat.training.evaluate_command\n"
        "    assert not gc.isenabled()\n"
        "silence_libraries()\n"
        "assert gc.isenabled() and gc.get_freeze_count() > 100_000\n"
        "heavy = {'datasets', 'matplotlib', 'pandas', 'peft', 'sklearn', 'transformers.models.clip.modeling_clip'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import datasets\n"
        "assert datasets.are_progress_bars_disabled()\n"
    )
    done = run_python(code)
    assert done.returncode == 0 and not done.stderr, done.stderr


def commands_of(command: Any, typed: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not isinstance(command, TyperGroup):
        yield " ".join(typed), command
    else:
        for name, inner in command.commands.items():
            yield from commands_of(inner, (*typed, name))


def test_help_of_every_verb_fits_80_columns_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in dict(commands_of(typer.main.get_command(cli.app))):
        told = typer.testing.CliRunner().invoke(cli.app, [*name.split(), "--help"]).output
        assert "Usage" in told and max(map(len, told.splitlines())) <= 80 and "…" not in told.replace("xcompat map …", "")


def test_help_has_valid_examples_and_panels(run: Run) -> None:
    commands = dict(commands_of(typer.main.get_command(cli.app)))
    assert commands.keys() == EXAMPLES.keys()
    alone = {"gallery compact", "version"}  # without options
    assert {name for name, examples in EXAMPLES.items() if len(examples) != 2} == alone
    for name, examples in EXAMPLES.items():
        for example in examples:
            assert example.startswith(name)
            with mock.patch("xcompat.data.sources.local_files"):  # originals of examples do not exist
                commands[name].make_context(name, shlex.split(example.removeprefix(name)), **CONTEXT)  # or an option is unknown
    told = run("map", "--help")[1]
    assert [panel for panel in ("Data", "Models", "Choice of the map", "Examples:") if f" {panel}" not in told] == []
    known = {max(option.opts, key=len) for command in commands.values() for option in command.params}
    assert set(PANELS) <= known, "a panel names an option that no command has"
    for line in (("help", "gallery", "search"), ("gallery", "search", "-h"), ("gallery", "search", "--help")):
        assert re.search("xcompat gallery search .*Number of hits.", run.output(*line))
    assert run("version")[1] == f"xcompat {__version__}"
    assert run("--version") == (0, f"xcompat {__version__}", "") and importlib.metadata.version("xcompat") == __version__
    said = run.output("help")
    places = [said.index(f" {name} ") for name in (*ORDER, SELDOM)]
    assert places == sorted(places) and said.index(" caption ") > places[-1]


def test_every_command_says_what_it_loads_before_it_imports_torch(
    folder_of: dict[str, str], old_folder: str, compatible_folder: str, pairs_folder: str, recipe: Make, tmp_path: Path
) -> None:
    """On stderr, in one line, and not beside JSON. Importing torch ends each command."""
    faiss.write_index(faiss.IndexFlatIP(8), str(tmp_path / "index.faiss"))
    new, embedded = folder_of["clip"], tmp_path / "embedded"
    np.save(embedded.with_suffix(".npy"), np.eye(4, dtype=np.float32))
    sides = f"--old {embedded}.npy --new {embedded}.npy"
    lines = {
        f"map {sides} --out map": "Loading PyTorch",
        f"map --old {old_folder} --new {new} --images {pairs_folder} --out map": f"Loading models: {old_folder}, {new}",
        f"train {recipe()}": "Loading PyTorch",
        f"embed {pairs_folder} --model {new} --out embedded": f"Loading models: {new}",
        f"gallery build {pairs_folder} --model {new}": f"Loading models: {new}",
        f"gallery search index.faiss text --model {new} --fallback {old_folder}": f"Loading models: {new}, {old_folder}",
        f"gallery search index.faiss text --model {new} --json": "",
        f"export onnx {compatible_folder} --out onnx": f"Loading models: {compatible_folder}",
        f"push {compatible_folder} me/name": f"Loading models: {compatible_folder}",
        f"caption {pairs_folder} --model {new} --out captions": f"Loading models: {new}",
        "find --old name --json": "",
        "demo": "Loading PyTorch",
        "recipes": "",
    }
    code = (
        "import os, sys\n"
        "from xcompat import cli\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            sys.stderr.flush()\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Stop())\n"
        f"for number, typed in enumerate({list(lines)!r}):\n"
        "    if not os.fork():\n"
        "        os.dup2(os.open(f'{number}.txt', os.O_CREAT | os.O_WRONLY), 2)\n"
        "        sys.argv = ['xcompat', *typed.split()]\n"
        "        cli.main()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = {typed: (tmp_path / f"{number}.txt").read_text().strip() for number, typed in enumerate(lines)}
    assert said == lines


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("xcompat ", VERBS),
        ("xcompat gallery ro", {"rollback"}),
        ("xcompat gallery search --fall", {"--fallback", "--fallback-below"}),
    ],
)
def test_a_shell_completes_what_is_typed(typed: str, completed: set[str]) -> None:
    """As the script of ``--show-completion`` asks, and without torch: it is asked at every key."""
    asked = {"_XCOMPAT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    code = "import sys; sys.argv = ['xcompat']; from xcompat.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == completed and "torch" not in done.stderr


def test_windows_is_told_at_once() -> None:
    code = "import sys; sys.modules['fcntl'] = None; sys.argv = ['xcompat', 'report', '.']; from xcompat.cli import main; main()"
    done = run_python(code)
    assert refused((done.returncode, done.stdout, done.stderr)).endswith("on Windows, run it in WSL 2")


def caused_by(cause: Exception) -> Exception:
    error = RuntimeError("the data set could not be made")
    error.__cause__ = cause
    return error


NO_INTEGER: Any = {"type": "int_parsing", "loc": ("size",), "input": "four"}
WORKER = "Caught OSError in a worker.\nOriginal Traceback:\n  File x\nOSError: [Errno 5] Input/output error: '7.png'"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EIO, "Input/output error", "/data/a"), "cannot read or write /data/a: Input/output error; the disk"),
        (OSError(errno.EACCES, "Permission denied", b"/data/run"), "cannot read or write /data/run: Permission denied; choose"),
        (OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files; raise the limit of open files"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/home/x"), "no space left on the device while writing /home/x"),
        (OSError("the remote end said no"), "the remote end said no; fix this"),
        (OSError(WORKER), "[Errno 5] Input/output error: '7.png'; the disk or its connection fails"),
        (caused_by(OSError(errno.EROFS, "Read-only", "/data/x")), "write /data/x: Read-only; choose"),
        (RuntimeError("Error in fopen: could not open x for writing: Permission denied"), "could not open x for writing"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left on the device"),
        (RuntimeError("Parent directory run/checkpoints/checkpoint-1 does not exist."), "the disk or its connection fails"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "output pipe closed; run the command again"),
        (MemoryError("Unable to allocate 8.00 TiB"), "out of memory (Unable to allocate 8.00 TiB); choose a smaller batch"),
        (MemoryError(), "out of memory; choose a smaller batch"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "out of memory (CUDA out of memory. Tried"),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"), "out of memory ("),
        (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
        (KeyboardInterrupt(), "interrupted; start again to continue"),
        (ModuleNotFoundError("No module named 'wandb.sdk'", name="wandb.sdk"), "wandb is not installed; `pip install wandb`"),
        (ModuleNotFoundError("No module named 'faiss'", name="faiss"), '`pip install -e ".[cpu]"`, or `pip'),
        (ValidationError.from_exception_data("Sized", [NO_INTEGER]), "Sized.size: Input should be a valid integer"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_stops_a_command_is_one_line(error: BaseException, line: str, run: Run) -> None:
    with mock.patch("xcompat.training.preflight.load_checked", side_effect=error):
        assert line in refused(run("train", "any.yaml"), 130 if isinstance(error, KeyboardInterrupt) else 2)


@pytest.mark.parametrize("command", [("demo",), ("gallery", "info", "g"), ("serve", "g")], ids=" ".join)
def test_nothing_to_continue_after_ctrl_c(command: tuple[str, ...], run: Run) -> None:
    with mock.patch("typer.core.TyperCommand.invoke", side_effect=KeyboardInterrupt):
        assert refused(run(*command), 130) == "interrupted"


def test_a_command_without_its_group_is_suggested(run: Run) -> None:
    both = "`gallery rollback` or `migrate rollback`"
    for name, suggested in (("search", "`gallery search`"), ("serach", "`gallery search`"), ("rollback", both)):
        code, _, error = run(name, "x")
        assert code == 2 and f"No such command '{name}'. Did you mean {suggested}?" in error


def test_a_bug_keeps_its_traceback_and_ends_with_what_a_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        fingerprint = Fingerprint.from_string("clip-b32")
        raise KeyError(fingerprint.name)

    monkeypatch.setattr("xcompat.training.preflight.load_checked", stop)
    monkeypatch.setattr(sys, "argv", ["xcompat", "train", "any.yaml"])
    with pytest.raises(KeyError) as bug:
        cli.main()
    last = "".join(traceback.format_exception(bug.value)).splitlines()[-1]
    wanted = [f"xcompat {__version__}", "Python 3.", "torch ", "transformers ", "faiss-cpu ", "clip-b32@"]
    assert all(part in last for part in [*wanted, str(Fingerprint.from_string("clip-b32"))]), last


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is one of Linux")
@pytest.mark.parametrize("reader", mostly_nightly(["full", "gone"], "full".__eq__))
def test_output_that_cannot_be_printed(reader: str, done: Path) -> None:
    command = [sys.executable, "-m", "xcompat", "report", str(done / "run")]
    with Path("/dev/full").open("w") as full:
        out = full if reader == "full" else subprocess.PIPE
        report = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
    if report.stdout is not None:
        report.stdout.close()
    said = report.stderr.read()
    assert report.wait() == 2 and said.startswith("xcompat: ") and len(said.splitlines()) == 1, said
    assert ("no space left" if reader == "full" else "output pipe closed") in said
