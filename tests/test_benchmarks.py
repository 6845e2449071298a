"""Benchmarks at toy size: both sides agree, rows are complete, and only the measured section of the results is rewritten."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
import yaml
from conftest import recipe_of, refuses, unit, write_photos

from xcompat import Fingerprint
from xcompat.core import progress, provenance
from xcompat.core.metric_names import metric_name
from xcompat.mapping import PairedEmbeddings
from xcompat.models import describe_old
from xcompat.report import load_report
from xcompat.training.compare import compare_recipe
from xcompat.training.evaluate_command import evaluate_embeddings
from xcompat.training.recipe import load_recipe
from xcompat.training.run import run_recipe

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks" / "speed"
OLD = describe_old(Fingerprint.from_string("old"), 4)
TOYS = {
    "ranking": {"items": 120, "classes": 5, "dim": 8, "rounds": 1},
    "recall": {"images": 60, "captions": 2, "dim": 8, "share": 4, "rounds": 1},
    "gallery_upgrade": {"items": 400, "rounds": 1},
    "gallery_speed": {"items": 300, "dim": 8, "queries": 4, "added": 200, "rounds": 1},
    "channels_last": {"images": 2, "rounds": 1},
    "compiled": {"images": 1, "edge": 32, "layers": 1, "rounds": 1},
    "draft_decoding": {"images": 2, "rounds": 1},
    "freed_memory": {"images": 2, "rounds": 1},
    "online_workers": {"steps": 2, "edge": 32, "batch": 4, "rounds": 1},
    "pair_memory": {"most": 128},
    "serve": {"searches": 4, "items": 50, "dim": 8, "rounds": 1},
    "stores": {"items": 200, "migrated": 0, "dim": 8, "queries": 2, "rounds": 1},
    "chroma_milvus_stores": {"items": 60, "dim": 8, "rounds": 1},
    "qdrant_store": {"items": 60, "dim": 8},
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "studies"))
    return importlib.import_module


def test_rows_judge_bounds_and_sides_take_turns(benchmark: Any) -> None:
    measuring = benchmark("measuring")
    assert [measuring.Row("a", "b", ratio, ">= 4").holds for ratio in (4.0, 3.9, None)] == [True, False, None]
    assert [measuring.Row("a", "b", ratio, "<= 0.5").holds for ratio in (0.5, 0.6)] == [True, False]
    assert measuring.Row("a", "b", 2.0, ">= 4").cells() == ["a", "b", "2.00", ">= 4 MISSED", ""]
    assert measuring.timed("a", "b", ">= 2", ours=1, theirs=3).ratio == 3
    assert measuring.timed("a", "b", "<= 2", ours=1, theirs=4).ratio == 0.25
    assert measuring.not_installed("a", "b", ">= 2", "peer").cells()[2:] == ["", ">= 2", "not run: pip install peer"]
    turns: list[str] = []
    took = measuring.medians({name: lambda name=name: turns.append(name) for name in ("ours", "theirs")}, rounds=3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert set(took) == {"ours", "theirs"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in TOYS if name != "ranking"])  # whose peer changes faiss for the whole process
def test_both_sides_agree(name: str, benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script asserts it before it measures."""
    monkeypatch.chdir(tmp_path)
    rows = benchmark(name).measure(**TOYS[name])
    assert rows and all(row.what and row.against and len(row.cells()) == 5 for row in rows)
    assert all(row.ratio is None or row.ratio > 0 for row in rows)


def test_a_planted_rotation_is_found(benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines, draw = benchmark("lines"), np.random.default_rng(0)
    classes_N = np.repeat(np.arange(12), 12)
    old_Nd = draw.normal(size=(12, 8))[classes_N] + draw.normal(size=(144, 8))
    old_Nd = (old_Nd / np.linalg.norm(old_Nd, axis=1, keepdims=True)).astype(np.float32)
    turn_dD = np.linalg.qr(draw.normal(size=(10, 8)))[0].T.astype(np.float32)
    embedded = {name: old_Nd @ turn_dD if "new" in name else old_Nd for name in ("old", "new")}
    for name, value in {"QUERIES": 48, "PHOTO_PAIRS": (80, 48), "PHOTO_UPGRADES": (("old", "new"),)}.items():
        monkeypatch.setattr(lines, name, value)
    monkeypatch.setattr(lines, "load_photos", lambda names: (embedded, classes_N.astype(str)))
    monkeypatch.setattr(sys, "argv", ["lines.py", "--seeds", "2", "--only", "photos"])
    lines.main()
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in printed.splitlines() if row.startswith("| ")]
    rotations = [row for row in rows if row[0] in ("rotation", "rotation, half-way") and "(" in row[1]]
    assert len(rotations) == 4 and all(cell.endswith("+0.0 (0.0 to 0.0)") for row in rotations for cell in row[1:-1])
    assert {row[0] for row in rows} >= {"old/old", "new/new", *lines.SOLVERS, "rank correlation, all rows"}
    assert "2 seeds" in printed and "torch" in printed


def test_expected_first_hits_are_the_mean_over_all_galleries(benchmark: Any) -> None:
    study = benchmark("half_precision")
    items, codes, share = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32), np.array([0, 1, 0, 1, 2, 0, 1]), 0.3
    wanted = np.zeros(7)
    for gallery in itertools.product([False, True], repeat=7):
        for query, code in enumerate(codes):
            others = [item for item in range(7) if gallery[item] and item != query]
            chance = share ** len(others) * (1 - share) ** (6 - len(others)) / 2  # the query itself does not count
            if others:
                first = max(others, key=lambda item, query=query: items[query] @ items[item])
                wanted[query] += chance * (codes[first] == code)
    np.testing.assert_allclose(study.expected_first_hits(items, items, codes, share), wanted, atol=1e-12)
    hits = study.expected_first_hits(items, items, codes, 1.0)
    assert set(hits) <= {0.0, 1.0} and hits[4] == 0, "the first hit of the whole gallery"


def test_solvers_of_the_lines_study(benchmark: Any) -> None:
    lines, old_Nd = benchmark("lines"), unit(20, 4).numpy()
    shift_d = np.array([0.3, -0.1, 0.2, 0.0], np.float32)
    model = lines.solve_drift(PairedEmbeddings(old_Nd + shift_d, old_Nd), OLD)
    np.testing.assert_allclose(model.to_space(torch.from_numpy(old_Nd + shift_d)).numpy(), old_Nd, atol=1e-6)
    draw = np.random.default_rng(0)
    new_ND = draw.normal(size=(300, 6)).astype(np.float32)
    old_Nd = (new_ND[:, :4] + draw.normal(size=(300, 4))).astype(np.float32)
    model = lines.solve_information(PairedEmbeddings(new_ND, old_Nd), OLD)
    both_NM = np.hstack([new_ND, old_Nd]).astype(np.float64)
    joint_MM = both_NM.T @ both_NM / 300
    for rows in (range(6), range(6, 10)):
        joint_MM[rows, rows] += lines.DAMPING * joint_MM[rows, rows].mean()
    np.testing.assert_allclose(model.weight.numpy(), -np.linalg.inv(joint_MM)[:6, 6:], rtol=1e-4, atol=1e-6)


def test_scripts_print_and_keep_their_rows(tmp_path: Path) -> None:
    options = [word for key, value in TOYS["ranking"].items() for word in (f"--{key}", str(value))]
    done = warm.run(SCRIPTS / "ranking.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "runs/bench/ranking.json").read_text())
    assert [row["bound"] for row in kept] == [">= 15", ">= 4", "<= 6"]
    assert "argsort" in done.stdout
    script = ROOT / "benchmarks" / "gpu" / "faiss_index.py"
    sizes = {"items": "20000", "dim": "8", "queries": "4", "index": "IVF64,Flat", "rounds": "1"}
    done = warm.run(script, *(f"--{name}={value}" for name, value in sizes.items()), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "IVF64,Flat of 20,000 x 8" in done.stdout and "CPU" in done.stdout


GPU_SCRIPT = ROOT / "benchmarks" / "gpu" / "throughput.py"
GPU_LINES = (
    "matrix product, 64 x 64",
    "pair stage, 8 pairs in parts of 4",
    "φ from a cache, batches of 16, logits in float32",
    "φ from a cache, batches of 16, logits in TF32",
    "image embedding, from tensors",
    "image embedding, from JPEG files",
    "faiss IVF16,Flat of 1,000 x 512, CPU",
    "ranking 200 x 200",
    "pair stage, 8 pairs in parts of 4, FSDP2 on one GPU",
    "oca_tiny_imagenet, stage independent, 4 at a time",
    "re-ranking 8 hits per query",
    "text embedding, from tokens",
    "text embedding, from strings",
)
"""In the order in which a run that is cut off is to keep them."""


@pytest.fixture
def throughput(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(GPU_SCRIPT.parent))
    monkeypatch.setattr(progress.console, "quiet", progress.console.quiet)  # the script silences it for good
    return benchmark("throughput")


@pytest.mark.nightly
def test_the_script_for_gpus_runs_at_toy_size(tmp_path: Path) -> None:
    """On a GPU it has not been run; its parts are those that would run there."""
    (tmp_path / "gpu.md").write_text("before\n<!-- gpu -->\nold\n<!-- /gpu -->\nafter\n")
    done = warm.run(GPU_SCRIPT, "--tiny", "--page", "gpu.md", folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("before\n<!-- gpu -->\nWritten by `make gpu`") and page.endswith("<!-- /gpu -->\nafter\n")
    assert "old" not in page.split("|")[0] and "under way" not in page and "Toy size" in page
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(GPU_LINES) and all(row[0].startswith(line) for row, line in zip(rows, GPU_LINES, strict=True)), rows
    assert all(row[1] for row in rows), "each has its rate"
    asked = {row[0]: row[5] for row in rows if row[5]}
    assert len(asked) == 3 and all(said.endswith("not judged") for said in asked.values())
    assert "paper 1.55 h" in rows[2][6] and "no GPU, so without FSDP2" in rows[8][6] and "100 epochs of 50,000" in rows[9][6]
    assert all(line in done.stdout for line in GPU_LINES)


def test_a_checkout_that_is_not_installed_describes_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "xcompat":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(provenance, "_versions", provenance._versions.__wrapped__)
    monkeypatch.setattr(provenance, "_git_revision", provenance._git_revision.__wrapped__)
    described = provenance.provenance()
    assert described["versions"]["xcompat"] == "not installed" and described["versions"]["transformers"] == "1.0"
    assert described["git_revision"] is None


def test_wheels_fill_few_folders_of_limited_size_in_tested_versions(throughput: Any, benchmark: Any) -> None:
    wheels = benchmark("wheels")
    assert wheels.fill_folders({"a": 3, "b": 5, "c": 4, "d": 9}, most=8) == [["d"], ["b", "a"], ["c"]]
    wanted = wheels.find_dependencies(wheels.NEEDED) - {"xcompat"}
    assert {"transformers", "torchvision", "faiss-cpu", "typer"} <= wanted and "ruff" not in wanted
    assert wanted >= set(wheels.NEWER)
    pinned = list(wheels.pin_versions(wanted, wheels.CONSTRAINTS.read_text(encoding="utf-8"), "2.11"))
    assert "torchvision==0.26.*" in pinned and all("==" in each for each in pinned)
    with pytest.raises(ValueError, match="nothing is not in constraints"):
        list(wheels.pin_versions(["nothing"], "", "2.11"))


def test_without_a_gpu_the_script_for_gpus_says_so_in_one_line(tmp_path: Path) -> None:
    done = warm.run(GPU_SCRIPT, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "needs a GPU" in done.stderr and "--tiny" in done.stderr
    assert not list(tmp_path.iterdir())


def test_each_gpu_line_is_written_when_measured(throughput: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, figure, part = tmp_path / "gpu.md", throughput.Figure, throughput.Part
    page.write_text("a\n<!-- gpu -->\n<!-- /gpu -->\nb\n")

    def fails(_: Any) -> Any:
        yield figure("second", 1.0, 1.0)
        raise RuntimeError("out of\nmemory")

    def killed(_: Any) -> Any:
        assert "under way or stopped" in page.read_text()
        raise KeyboardInterrupt

    parts = [part("first", 1, lambda _: [figure("first", 2.0, 2.0)]), part("third", 1, fails), part("slow", 1e6, killed)]
    monkeypatch.setattr(throughput.Measuring, "parts", lambda _: parts)
    with pytest.raises(SystemExit) as ended:
        throughput.main(tiny=True, page=page)
    assert ended.value.code == 1, "a part failed"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0] for row in rows] == ["| first", "| second", "| third", "| slow"]
    assert "FAILED: RuntimeError: out of memory" in rows[2] and "not run: 0.0 minutes were over" in rows[3]
    monkeypatch.setattr(throughput.Measuring, "parts", lambda _: [parts[0], part("killed", 1, killed)])
    with pytest.raises(KeyboardInterrupt):
        throughput.main(tiny=True, page=page)
    assert "| first | 2 |" in page.read_text() and "under way or stopped" in page.read_text()


def test_fsdp_is_launched_and_leaves_no_process(throughput: Any, benchmark: Any, tmp_path: Path) -> None:
    parts = benchmark("training_parts")
    command = parts.launch_command(throughput.FULL, torch.device("cuda"), Path("out.json"))
    config = Path(command[command.index("--config_file") + 1])
    assert config == ROOT / "accelerate_configs" / "fsdp2.yaml" and config.exists()
    assert command[command.index("--num_processes") + 1] == "1" and command[-2:] == [parts.__file__, "out.json"]
    assert parts.run_within([sys.executable, "-c", LAUNCHER, str(tmp_path / "pid")], 2) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    done = parts.run_within([sys.executable, "-c", "print('done'); raise SystemExit(3)"], 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")


LAUNCHER = """
import pathlib, signal, subprocess, sys, time
def stop(*_):
    worker.kill()
    sys.exit(worker.wait())
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""


def test_the_table_of_large_numbers_is_what_the_script_prints() -> None:
    printed = subprocess.check_output([sys.executable, "benchmarks/scaling.py"], cwd=ROOT, text=True)
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert page.split("<!-- scaling -->\n")[1].split("<!-- /scaling -->")[0] == printed
    more = ["benchmarks/scaling.py", "--gpu-texts", "2000", "--machines", "4"]
    cells = [row.split(" | ") for row in subprocess.check_output([sys.executable, *more], cwd=ROOT, text=True).splitlines()]
    assert [row[2] for row in cells[2:] if row[1].endswith("on a GPU")] == ["3.5", "34.7", "347.2"]


pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(autouse=True)
def _in_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def protocol(tmp_path: Path, data: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    raw: dict[str, Any] = {"output_dir": str(tmp_path / "bench" / "pairs"), "cache_dir": str(tmp_path / "cache"), "seeds": [3]}
    raw |= {"old": old, "new": new, "data": data, "stages": [{"name": "line", "method": "procrustes"}]}
    return raw | {"evaluation": {"resamples": 100, "ks": [1, 10], "examples": 0, "tsne_pairs": 0}}


@pytest.fixture
def pairs(tmp_path: Path, folder_of: dict[str, str], old_folder: str, pairs_folder: str, texts_file: str) -> dict[str, Any]:
    data = {"texts": [{"path": texts_file}], "test": {"path": pairs_folder}}
    return protocol(tmp_path, data, old_folder, folder_of["clip"])


def test_embeddings_alone_are_a_row(
    pairs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import entry
    import leaderboard

    compare_recipe(recipe_of(pairs))
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(pairs))
    monkeypatch.setattr(entry, "RECIPES", tmp_path)
    monkeypatch.setattr(entry, "FOLDER", tmp_path / "bench")
    monkeypatch.setattr(leaderboard, "TABLES", {"one": ("pairs",)})
    entry.main("pairs")
    entries = tmp_path / "bench" / "pairs" / "entries"
    assert f"xcompat evaluate --old {entries}/old --new MINE --out {entries}/MINE" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pairs: .*old is there; delete it to write it again"):
        entry.main("pairs")
    texts = [json.loads(line) for line in (entries / "old" / "texts.jsonl").read_text().splitlines()]
    assert len(texts) == len(np.load(entries / "old" / "text_embeds.npy")) and all(isinstance(text, str) for text in texts)

    evaluate_embeddings(entries / "old", entries / "old", None, None, entries / "mine")  # old embeddings gain nothing
    found = leaderboard.studies(tmp_path / "bench")
    rows = {line.split(" (")[0][2:]: line for line in leaderboard.table(found)}
    assert rows["mine"].startswith("| mine (embeddings) | 0 of 1 | R@10 +0.0 (0.0 to 0.0) | R@10 +0.0 (0.0 to 0.0) |")
    assert rows["mine"].endswith(" |  |  |"), "nobody knows what they cost"
    assert "0 of 1 |" in rows["line"] or "1 of 1 |" in rows["line"]

    embeds = np.load(entries / "old" / "image_embeds.npy")
    np.save(entries / "old" / "image_embeds.npy", embeds[::-1])
    evaluate_embeddings(entries / "old", entries / "old", None, None, entries / "turned")
    with pytest.raises(SystemExit, match="turned was not judged on the old gallery of this protocol"):
        leaderboard.studies(tmp_path / "bench")


def read_cells(printed: str) -> dict[tuple[str, str, str], str]:
    """Return (row, metric, way) -> cell of the tables of means."""
    cells, metric, heads = {}, "", [""]
    for line in (line for line in printed.splitlines() if line.startswith("| ")):
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if "new/new" in row:  # a header; gains have no old/old
            metric, heads = row[0].rpartition(": ")[2] if "old/old" in row else "", row
        elif metric:
            cells |= {(row[0], metric, head): cell for head, cell in zip(heads, row, strict=True)}
    return cells


def test_the_study_of_trained_models_prints_their_cells(
    pairs: dict[str, Any], tmp_path: Path, image_folder_of: dict[str, str], benchmark: Any, monkeypatch: Any, capsys: Any
) -> None:
    study, half = benchmark("reranking_trained"), {"scenario": "open-class", "fraction": 0.5}
    for number, file in enumerate(sorted(write_photos(tmp_path / "all", 36).iterdir())):
        (folder := tmp_path / "classes" / "abcdef"[number // 6]).mkdir(parents=True, exist_ok=True)
        file.rename(folder / file.name)
    photos = {"path": str(tmp_path / "classes")}
    data = {"images": photos, "subset": half | {"side": "old"}, "queries": photos, "test_subset": half | {"side": "new"}}
    files = []
    for raw in (pairs, protocol(tmp_path, data, image_folder_of["resnet"], image_folder_of["vit"])):
        files.append(tmp_path / f"{len(files)}.yaml")
        raw |= {"output_dir": str(tmp_path / files[-1].stem), "stages": [{"name": "line", "method": "whitened"}]}
        raw["evaluation"] |= {"ks": [1, 5], "slerp": 0.5, "rerank": 20}
        files[-1].write_text(yaml.safe_dump(raw))
    monkeypatch.setattr(sys, "argv", ["reranking_trained.py", *map(str, files), "--seeds", "1"])
    with pytest.raises(SystemExit, match="0.yaml: .*seed-0 is not trained; run `xcompat compare`"):
        study.main()
    for file in files:
        run_recipe(load_recipe(file).of_seed(0))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        study.main()
    assert isinstance(ended.value.code, bool)
    cells = read_cells(capsys.readouterr().out)
    ways = {"old/old": "old/old", "new/old": "map", "slerp/old": "half-way", "new+rerank/old": "map + 20", "new/new": "new/new"}
    compared = 0
    reports = {file.stem: load_report(tmp_path / file.stem / "seed-0") for file in files}
    for name, case in ((name, case) for name, report in reports.items() for case in report.cases):
        row = ", ".join(part for part in (f"`{name}`", case.direction, case.population) if part not in ("image-to-image", "all"))
        for metric in {"cmc@1", "cmc@5", "map", "recall@1"} & case.metrics.keys() if case.label in ways else ():
            assert cells[row, metric_name(metric), ways[case.label]] == f"{100 * case.metrics[metric]:.1f}"
            compared += 1
    assert compared == len(ways) * (1 + 1 + 3 + 3), "captions in both directions; photos, also in the whole gallery"


def test_old_galleries(tmp_path: Path, image_folder_of: dict[str, str], folder_of: dict[str, str], pairs_folder: str) -> None:
    import entry

    photos = {"path": pairs_folder, "label_column": "caption"}
    old, new = image_folder_of["resnet"], image_folder_of["vit"]
    raw = protocol(tmp_path, {"images": photos, "queries": photos}, old, new)
    entry.old_gallery(recipe_of(raw), tmp_path / "images")
    held = {file.name for file in (tmp_path / "images").iterdir()}
    assert held == {"image_embeds.npy", "image_ids.txt", "labels.txt"}
    count = len((tmp_path / "images" / "labels.txt").read_text().splitlines())
    assert np.load(tmp_path / "images" / "image_embeds.npy").shape == (count, 16)
    raw["data"]["gallery"] = {**photos, "limit": 3}
    refuses("its queries are other images than its gallery", entry.old_gallery, recipe_of(raw), tmp_path / "others")
    assert not (tmp_path / "others").exists()

    for name in ("queries", "passages"):
        lines = [json.dumps({"id": f"{name[0]}{number}", "text": f"text {number}"}) for number in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq0\tp0\t1\nq1\tp1\t1\n")
    judged = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("queries", "passages")}
    data = {"texts": [judged["passages"]], "judged_texts": {**judged, "qrels": str(tmp_path / "qrels.tsv")}}
    raw = protocol(tmp_path, data, folder_of["clip"], folder_of["clip"])
    entry.old_gallery(recipe_of(raw), tmp_path / "texts")
    assert np.load(tmp_path / "texts" / "query_embeds.npy").shape == (4, 16)
    assert (tmp_path / "texts" / "text_ids.txt").read_text() == "p0\np1\np2\np3\n"
