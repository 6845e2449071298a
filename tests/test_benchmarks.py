"""Benchmarks at toy size: both sides agree, rows are complete, and only the measured section of the results is rewritten."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image

from xcompat import Fingerprint
from xcompat.core import progress
from xcompat.encoders import load_encoder
from xcompat.encoders.standins import save_stand_in

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "benchmarks" / "speed"
TOYS = {
    "ranking": {"items": 120, "classes": 5, "dim": 8, "rounds": 1},
    "recall": {"images": 60, "captions": 2, "dim": 8, "share": 4, "rounds": 1},
    "gallery_upgrade": {"items": 400, "rounds": 1},
    "gallery_speed": {"items": 300, "dim": 8, "queries": 4, "added": 200, "rounds": 1},
    "channels_last": {"images": 2, "rounds": 1},
    "compiled": {"images": 1, "edge": 32, "layers": 1, "rounds": 1},
    "draft_decoding": {"images": 2, "rounds": 1},
    "freed_memory": {"images": 2, "rounds": 1},
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


def test_a_row_says_whether_its_bound_holds(benchmark: Any) -> None:
    measuring = benchmark("measuring")
    assert [measuring.Row("a", "b", ratio, ">= 4").holds for ratio in (4.0, 3.9, None)] == [True, False, None]
    assert [measuring.Row("a", "b", ratio, "<= 0.5").holds for ratio in (0.5, 0.6)] == [True, False]
    assert measuring.Row("a", "b", 2.0).holds is None
    assert measuring.Row("a", "b", 2.0, ">= 4").cells() == ["a", "b", "2.00", ">= 4 MISSED", ""]
    assert measuring.timed("a", "b", ">= 2", ours=1, theirs=3).ratio == 3
    assert measuring.timed("a", "b", "<= 2", ours=1, theirs=4).ratio == 0.25
    assert measuring.not_installed("a", "b", ">= 2", "peer").cells()[2:] == ["", ">= 2", "not run: pip install peer"]


def test_sides_take_turns(benchmark: Any) -> None:
    turns: list[str] = []
    took = benchmark("measuring").medians({name: lambda name=name: turns.append(name) for name in ("ours", "theirs")}, rounds=3)
    assert turns == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert set(took) == {"ours", "theirs"}


def test_curves_compare_each_size_with_a_tenth_and_are_drawn(benchmark: Any, tmp_path: Path) -> None:
    scaling = benchmark("scaling")
    curve = scaling.Curve("gallery", "embeddings", {10: 0.1, 100: 0.5}, {10: " a query; one", 100: " a query; two"})
    assert [(row.ratio, row.detail) for row in curve.rows()] == [(None, "0.1 s a query; one"), (5.0, "0.5 s a query; two")]
    scaling.draw([curve, curve], tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as drawn:
        assert drawn.size == (960, 384)


def test_peak_memory_counts_what_is_given_back(benchmark: Any) -> None:
    code = (
        "from measuring import peak_memory\n"
        "big = bytearray(b'x') * 2**28; del big\n"  # before: not counted
        "def run():\n    block = bytearray(b'x') * 2**26\n"
        "print(peak_memory(run))"
    )
    taken = int(subprocess.check_output([sys.executable, "-c", code], cwd=SCRIPTS, text=True))
    assert 0.9 * 2**26 < taken < 2**27  # the kernel counts pages in lots


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in TOYS if name != "ranking"])  # whose peer changes faiss for the whole process
def test_both_sides_agree(name: str, benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script asserts it before it measures."""
    monkeypatch.chdir(tmp_path)
    rows = benchmark(name).measure(**TOYS[name])
    assert rows and all(row.what and row.against and len(row.cells()) == 5 for row in rows)
    assert all(row.ratio is None or row.ratio > 0 for row in rows)


def test_vectors_are_planted_where_they_are_said_to_be(benchmark: Any) -> None:
    own, others = np.zeros((40, 2)), {"a": np.ones((40, 2)), "b": np.full((40, 2), 2.0)}
    vectors, parts = benchmark("doctor").planted(own, others, 0.25, seed=0)
    assert [len(part) for part in parts.values()] == [5, 5] and (vectors == 0).all(axis=1).sum() == 30
    assert (vectors[parts["a"]] == 1).all() and (vectors[parts["b"]] == 2).all() and not own.any()


def test_the_study_of_texts_at_toy_size(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts, maps, tasks = benchmark("texts"), benchmark("texts_maps"), benchmark("texts_tasks")
    centres = np.random.default_rng(0).normal(size=(60, 16))
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(24, 16)))[0].T

    def old(given: list[str]) -> Any:  # a text is the number of its group and a seed
        rows = [centres[int(text.split()[0])] + np.random.default_rng(int(text.split()[1])).normal(size=16) for text in given]
        return (np.stack(rows) / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    monkeypatch.setattr(texts, "words", lambda _: old)
    monkeypatch.setattr(maps, "STEPS", 2)
    searched = {f"{group}/{place}": f"{group} {10 * group + place}" for group in range(20) for place in (1, 2)}
    asked = {str(group): f"{group} {10 * group}" for group in range(20)}
    learn = [[f"{group} {10 * group + place}" for place in range(3)] for group in range(20, 60)]
    task = tasks.Task("Captions", searched, asked, {str(g): {f"{g}/1": 1.0, f"{g}/2": 1.0} for g in range(20)}, learn, apart=True)
    contest, new = texts.Contest(task), texts.Kept("new", lambda: lambda given: old(given) @ turn.astype(np.float32))
    cells = {row.split("|")[1].strip(): row.split("|")[2:] for row in texts.all_maps(contest, new, trained=True)}
    assert len(cells) == 2 + 1 + 1 + len(maps.LINES) + len(maps.TRAINED) + 1 + 1
    floor, rotated = cells["old/old"], cells["new/old, Procrustes"]
    assert rotated[0] == floor[0] == cells["new/new"][0] and rotated[1].strip() == "+0.0 (0.0 to 0.0)", "a rotation is found"
    assert float(cells["independent/old, first 16 dimensions"][0]) < float(floor[0])
    monkeypatch.setattr(texts, "COUNTS", (60, 120))
    monkeypatch.setattr(texts, "STORED", (30,))
    tables = {
        "count": lambda: texts.by_count(contest, new),
        "domain": lambda: texts.by_domain([contest], new, [task]),
        "stored": lambda: texts.without_old_model(contest, new),
    }
    for name, table in tables.items():
        texts.kept(name, table)
        printed = capsys.readouterr().out
        assert printed.count("\n|") >= 5
        texts.kept(name, lambda: pytest.fail("it is kept"))
        assert capsys.readouterr().out == printed


def test_lines_study_finds_a_planted_rotation(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_lines_study_ranks_texts_by_their_judgements(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, draw = benchmark("lines"), np.random.default_rng(0)
    folder = tmp_path / "data/text/embeddings"
    documents = draw.normal(size=(90, 8)).astype(np.float16)
    documents[7] = 0  # an empty document
    for name, rows in {"toy_docs": documents, "toy_queries": documents[20:40]}.items():
        for model, noise in (("old", 0.0), ("new", 2.0)):
            (folder / model).mkdir(parents=True, exist_ok=True)
            np.save(folder / model / f"{name}.npy", rows + noise * draw.normal(size=rows.shape) * (rows != 0))
        first = 0 if name == "toy_docs" else 20
        (folder / f"{name}_ids.txt").write_text("\n".join(str(first + row) for row in range(len(rows))))
    task = benchmark("texts_tasks").Task("Toy", {}, {}, {str(row): {str(row): 1.0} for row in range(20, 40)}, [], apart=False)
    monkeypatch.setattr(lines, "SHARED", tmp_path)
    monkeypatch.setattr(lines.texts_tasks, "scifact", lambda: task)
    monkeypatch.setattr(lines.texts_tasks, "cranfield", lambda: task)
    monkeypatch.setattr(lines, "TEXT_UPGRADES", (("old", "new"),))
    monkeypatch.setattr(lines, "FEW_TEXTS", 50)
    lines.run_texts(seeds=1)
    printed = capsys.readouterr().out
    assert printed.count("| old/old | 100.0 | 100.0 | +0.0 |") == 2 and "50 documents to learn from" in printed


def test_mutual_information_is_a_block_of_the_joint_precision(benchmark: Any) -> None:
    from xcompat.mapping import PairedEmbeddings
    from xcompat.models import describe_old

    lines, draw = benchmark("lines"), np.random.default_rng(0)
    new_ND = draw.normal(size=(300, 6)).astype(np.float32)
    old_Nd = (new_ND[:, :4] + draw.normal(size=(300, 4))).astype(np.float32)
    model = lines.solve_information(PairedEmbeddings(new_ND, old_Nd), describe_old(Fingerprint.from_string("old"), 4))
    both_NM = np.hstack([new_ND, old_Nd]).astype(np.float64)
    joint_MM = both_NM.T @ both_NM / 300
    for rows in (range(6), range(6, 10)):
        joint_MM[rows, rows] += lines.DAMPING * joint_MM[rows, rows].mean()
    np.testing.assert_allclose(model.weight.numpy(), -np.linalg.inv(joint_MM)[:6, 6:], rtol=1e-4, atol=1e-6)


def test_transformers_of_the_study_of_texts_are_made_once(benchmark: Any, tmp_path: Path) -> None:
    texts, models = benchmark("texts"), benchmark("texts_models")
    groups = [["a red apple", "an apple that is red"], ["a blue sky", "the sky is blue"], ["green tea", "tea that is green"]]
    given = [text for group in groups for text in group]
    made = {}
    for name, peaks in (("mean", False), ("peaks", True)):
        model = models.Transformer(tmp_path / name, peaks)
        made[name] = model.learn(given, texts.pairs_of([groups]), steps=(2, 1), batch=2)(given)
        again = models.Transformer(tmp_path / name, peaks).learn([], None, steps=(2, 1), batch=2)
        np.testing.assert_array_equal(again(given), made[name])
        np.testing.assert_allclose(np.linalg.norm(made[name], axis=1), 1, atol=1e-5)
    assert [made[name].shape for name in made] == [(6, 256), (6, 512)]
    assert texts.halves(["One sentence of words. Another one of words. Short.", "Alone it stands here."]) == [
        ["One sentence of words", "Another one of words"]
    ]


def test_towers_stay_frozen_while_their_projections_learn(
    benchmark: Any, image_folder_of: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = benchmark("towers")
    image, text = Path(image_folder_of["mobilenet_v1"]), save_stand_in(tmp_path / "text", "sentence-transformers", 12)
    settings = Path(text, "config_sentence_transformers.json")
    settings.write_text(settings.read_text(encoding="utf-8").replace("query: ", ""), encoding="utf-8")
    for name, value in {"IMAGE_MODELS": image.parent, "BATCH": 4, "EMBEDDED": 3, "EPOCHS": 200, "LEARNING_RATE": 0.05}.items():
        monkeypatch.setattr(towers, name, value)
    monkeypatch.setattr(towers, "prepare_model", lambda *_: text)
    captions = [["a red running shoe"], ["two dogs"], ["a shoe"], ["greek small letter alpha"]]
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)) for _ in captions]
    columns = {"image": images, "caption": captions, "id": list("abcd")}
    Dataset.from_dict(columns).cast_column("image", ImageFeature()).save_to_disk(tmp_path / "pairs")
    towers.write_towers(tmp_path / "joined", towers.Towers(image.name, towers.OLD, 32, 8, 0), tmp_path / "pairs")
    encoder, processor = load_encoder(str(tmp_path / "joined"))
    assert not processor.image_processor.do_center_crop
    whole = load_encoder(str(image))[0].model.state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in encoder.model.vision_model.state_dict().items())
    photos_ND = encoder.embed_images(processor.images(images))
    names_ND = encoder.embed_texts(**processor.texts([names[0] for names in captions]))
    assert (photos_ND @ names_ND.T).argmax(dim=1).tolist() == [0, 1, 2, 3], "each photo finds its name"


def test_memory_is_measured_in_a_fresh_process(benchmark: Any) -> None:
    absolute, relative = benchmark("ranking_memory").measure(items=200, classes=5, dim=8)
    assert 0 < absolute.ratio < 1
    assert relative.ratio > 0


def test_a_missing_peer_is_named(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        "pytorch_metric_learning.utils.accuracy_calculator",
        "clip_benchmark.metrics",
        "torchmetrics.functional.retrieval",
    ):
        monkeypatch.setitem(sys.modules, module, None)
    rows = [row for name in ("ranking", "recall") for row in benchmark(name).measure(**TOYS[name])]
    assert [row.detail for row in rows if row.ratio is None] == [
        "not run: pip install pytorch-metric-learning",
        "not run: pip install --no-deps clip_benchmark",
        "not run: pip install torchmetrics",
    ]


def test_a_script_prints_and_keeps_its_rows(tmp_path: Path) -> None:
    options = [word for key, value in TOYS["ranking"].items() for word in (f"--{key}", str(value))]
    done = warm.run(SCRIPTS / "ranking.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "runs/bench/ranking.json").read_text())
    assert [row["bound"] for row in kept] == [">= 15", ">= 4", "<= 6"]
    assert "argsort" in done.stdout


def test_results_are_rewritten_between_the_markers_only(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, row = benchmark("run"), benchmark("measuring").Row
    found = run.scripts()
    assert SCRIPTS / "ranking.py" in found and SCRIPTS / "measuring.py" not in found and SCRIPTS / "run.py" not in found
    assert all(path.read_text().endswith('if __name__ == "__main__":\n    main(measure)\n') for path in found)
    before = run.RESULTS.read_text()
    assert len(run.SECTION.findall(before)) == 1
    (tmp_path / "speed.md").write_text(before)
    rows = {
        "one.py": [row("ours", "theirs", 20.0, ">= 15", "1 s, 20 s")],
        "two.py": [row("two.py", "", None, "", "FAILED: exit code 1")],
    }
    monkeypatch.setattr(run, "RESULTS", tmp_path / "speed.md")
    monkeypatch.setattr(run, "scripts", lambda: [Path(name) for name in rows])
    monkeypatch.setattr(run, "rows_of", lambda script: rows[script.name])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 1, "a script that failed is no success"
    after = (tmp_path / "speed.md").read_text()
    assert run.SECTION.sub("", after) == run.SECTION.sub("", before)
    assert "| ours | theirs | 20 | >= 15 holds | 1 s, 20 s |" in after and "torch" in after
    assert "FAILED" in after


def test_a_failing_script_is_a_row(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (row,) = benchmark("run").rows_of(tmp_path / "broken.py")
    assert row.cells() == ["broken.py", "", "", "", "FAILED: exit code 3"]


def test_the_script_for_faiss_on_gpus_runs_at_toy_size(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "gpu" / "faiss_index.py"
    sizes = {"items": "20000", "dim": "8", "queries": "4", "index": "IVF64,Flat", "rounds": "1"}
    done = warm.run(script, *(f"--{name}={value}" for name, value in sizes.items()), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "IVF64,Flat of 20,000 x 8" in done.stdout and "CPU" in done.stdout


GPU_SCRIPT = ROOT / "benchmarks" / "gpu" / "throughput.py"
GPU_LINES = (
    "matrix product, 64 x 64",
    "φ from a cache, batches of 16, logits in float32",
    "φ from a cache, batches of 16, logits in TF32",
    "image embedding, from tensors",
    "image embedding, from JPEG files",
    "pair stage, 8 pairs in parts of 4",
    "pair stage, 8 pairs in parts of 4, FSDP2 on one GPU",
    "text embedding, from tokens",
    "text embedding, from strings",
    "ranking 200 x 200",
    "re-ranking 8 hits per query",
)


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
    assert [any(row[0].startswith(line) for row in rows) for line in GPU_LINES] == [True] * len(GPU_LINES), rows
    assert len(rows) == len(GPU_LINES) and all(row[1] for row in rows), "each has its rate"
    asked = {row[0]: row[5] for row in rows if row[5]}
    assert len(asked) == 3 and all(said.endswith("not judged") for said in asked.values())
    assert "paper 1.55 h" in rows[1][6] and "no GPU, so without FSDP2" in rows[6][6]
    assert all(line in done.stdout for line in GPU_LINES)


def test_without_a_gpu_the_script_for_gpus_says_so_in_one_line(tmp_path: Path) -> None:
    done = warm.run(GPU_SCRIPT, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "needs a GPU" in done.stderr and "--tiny" in done.stderr
    assert not list(tmp_path.iterdir())


def test_lines_of_a_gpu_are_judged(throughput: Any) -> None:
    peak = throughput.Figure("product", 10.0, 4e12)
    met, missed = (throughput.Figure("x", 5.0, 2e12, 2**30, "much", verdict, "why") for verdict in (True, False))
    assert throughput.cells(met, peak, True) == ["x", "5", "2.00", "50%", "1.0", "much: met", "why"]
    assert throughput.cells(missed, peak, True)[5] == "much: NOT MET"
    assert throughput.cells(missed, peak, False)[5] == "much: not judged"
    assert throughput.cells(throughput.Figure("x", note="FAILED: y"), peak, True) == ["x", "", "", "", "", "", "FAILED: y"]


def test_each_line_of_a_gpu_is_written_when_it_is_measured(
    throughput: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_on_a_gpu_the_pair_stage_is_launched_with_the_projects_fsdp_config(throughput: Any, benchmark: Any) -> None:
    import torch

    parts = benchmark("training_parts")
    command = parts.launch_command(throughput.FULL, torch.device("cuda"), Path("out.json"))
    config = Path(command[command.index("--config_file") + 1])
    assert config == ROOT / "accelerate_configs" / "fsdp2.yaml" and config.exists()
    assert command[command.index("--num_processes") + 1] == "1" and command[-2:] == [parts.__file__, "out.json"]


def test_wheels_for_a_gpu_are_pinned_and_fit_their_folders(throughput: Any, benchmark: Any) -> None:
    wheels = benchmark("wheels")
    assert wheels.fill_folders({"a": 3, "b": 5, "c": 4, "d": 9}, most=8) == [["d"], ["b", "a"], ["c"]]
    needed = wheels.find_dependencies(wheels.NEEDED)
    assert {"xcompat", "faiss-cpu", "torch", "pyarrow", "scipy"} <= needed, "scipy of scikit-learn among them"
    constraints = wheels.CONSTRAINTS.read_text(encoding="utf-8")
    pinned = list(wheels.pin_versions(("pyarrow", "torchvision"), constraints, "2.11"))
    assert pinned[0].startswith("pyarrow==") and pinned[1] == "torchvision==0.26.*"
    with pytest.raises(ValueError, match="nowhere is not in constraints"):
        list(wheels.pin_versions(["nowhere"], constraints, "2.11"))


def test_the_page_for_gpus_has_its_markers_once(throughput: Any) -> None:
    assert len(throughput.SECTION.findall(throughput.PAGE.read_text(encoding="utf-8"))) == 1


def test_the_table_of_large_numbers_is_what_the_script_prints() -> None:
    printed = subprocess.check_output([sys.executable, "benchmarks/scaling.py"], cwd=ROOT, text=True)
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert page.split("<!-- scaling -->\n")[1].split("<!-- /scaling -->")[0] == printed
    more = ["benchmarks/scaling.py", "--gpu-texts", "2000", "--machines", "4"]
    cells = [row.split(" | ") for row in subprocess.check_output([sys.executable, *more], cwd=ROOT, text=True).splitlines()]
    assert [row[2] for row in cells[2:] if row[1].endswith("on a GPU")] == ["3.5", "34.7", "347.2"]
