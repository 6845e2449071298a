"""Where a recipe writes is looked at before it begins, and a report holds for the files that it was made of."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import raw_recipe, recipe_of, refuses
from PIL import Image
from schedule import mostly_nightly

from xcompat.data import PairSource
from xcompat.report import load_report
from xcompat.training import run as run_module
from xcompat.training.compare import compare_recipe
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.input_checks import judged_files
from xcompat.training.output_checks import lock_run, require_places
from xcompat.training.recipe import Recipe
from xcompat.training.run import run_recipe
from xcompat.training.sections import DataSettings, ZeroShotSettings
from xcompat.training.stage_recipe import StageRecipe

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def photos(pairs_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pairs_folder, tmp_path / "photos"))


@pytest.fixture
def recipe(folder_of: dict[str, str], old_folder: str, pairs_folder: str, photos: Path, tmp_path: Path) -> Callable[..., Recipe]:
    def make(**changes: Any) -> Recipe:
        data = {"test": {"path": str(photos)}, "embeddings_of": "images"}
        raw = raw_recipe(tmp_path, old_folder, folder_of["clip"], pairs_folder, **data) | {"method": "ridge"}
        return recipe_of(raw, **changes)

    return make


TWO_STAGES = {"stages": [{"name": "first", "method": "ridge"}, {"name": "second", "method": "procrustes"}]}
OTHER_STAGES = {"stages": [{"name": "third", "method": "ridge"}, {"name": "fourth", "method": "procrustes"}]}


@pytest.mark.parametrize("made_by", mostly_nightly([{}, TWO_STAGES, "no recipe"], lambda made_by: made_by is not TWO_STAGES))
def test_reports_are_kept(made_by: dict[str, Any] | str, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(**OTHER_STAGES)
    run_recipe(recipe(**(made_by if isinstance(made_by, dict) else {})))
    if made_by == "no recipe":  # such as `xcompat evaluate --output`
        for file in ("recipe.yaml", "evaluated.json"):
            (asked.output_dir / file).unlink()
        shutil.rmtree(asked.output_dir / "model")
        report = asked.output_dir / "report" / "report.json"
        report.write_text(json.dumps({**json.loads(report.read_text()), "seconds": {}}))
    before = {path: path.read_bytes() for path in asked.output_dir.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train_stage", lambda *_: pytest.fail("trained"))
        refuses("contains the report of another recipe or command", run_recipe, asked)
    assert before == {path: path.read_bytes() for path in asked.output_dir.rglob("*") if path.is_file()}


def test_a_recipe_may_get_and_lose_stages(recipe: Callable[..., Recipe]) -> None:
    run_recipe(recipe(**TWO_STAGES))
    longer = recipe(stages=[*TWO_STAGES["stages"], {"name": "third", "method": "ridge"}])
    for asked, last in ((longer, "third"), (recipe(**TWO_STAGES), "second"), (longer, "third")):
        run_recipe(asked)
        assert list(load_report(asked.output_dir).seconds)[-1] == last
        assert asked is not longer or (asked.output_dir / "second" / "report" / "report.json").is_file()
    shutil.rmtree(longer.output_dir / "third")
    run_recipe(recipe(**TWO_STAGES))


def test_a_waiting_launch_refuses_the_run_of_another(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "check_inputs", lambda *_: None)
            run_recipe(recipe())

    monkeypatch.setattr(run_module, "check_inputs", other)
    refuses("was made by a recipe with another method, name", run_recipe, recipe(method="procrustes"))


def test_one_launch_writes_and_finished_runs_need_not(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe()
    with lock_run(asked.output_dir), monkeypatch.context() as patch:
        patch.setattr(run_module, "train_stage", lambda *_: pytest.fail("trained"))
        refuses(f"another process is writing to {asked.output_dir}; wait until it is done", run_recipe, asked)
        assert [path.name for path in asked.output_dir.iterdir()] == [".lock"]
    run_recipe(asked)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("xcompat.training.output_checks.lock_writer", refused)
    run_recipe(recipe())
    refuses(r"cannot write to .*run: Read-only file system", run_recipe, recipe(evaluation={"resamples": 200, "ks": [1]}))


@pytest.mark.parametrize("check", [run_recipe, dry_run_recipe, compare_recipe])
@pytest.mark.parametrize(
    "name",
    [
        *("second/model/weights.bin", "second/checkpoints/mine", "second/done.json", "second/environment.json", "second"),
        *("first/report/mine", "report/mine", "evaluated.json", "sequence.csv"),
        *("second/choice.json", "second/old_memory.safetensors"),
    ],
)
def test_what_no_recipe_made_is_refused_before_anything_is_trained(
    name: str, check: Callable[[Recipe], object], recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "train_stage", lambda *_: pytest.fail("trained"))
    asked = recipe(**TWO_STAGES, seeds=[0, 1])
    mine = asked.output_dir / ("seed-1" if check is compare_recipe else "") / name
    mine.parent.mkdir(parents=True)
    mine.write_text("a user's")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    line = refuses("; move it, ", check, asked)
    assert line.startswith(f"{mine if name.count('/') < 2 else mine.parent} ".replace("report/mine", "report"))
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_what_a_recipe_made_is_in_nobodys_way(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    asked = recipe(**TWO_STAGES)
    (tmp_path / "run" / "second" / "model").mkdir(parents=True)  # empty
    (tmp_path / "run" / "notes.txt").write_text("a user's")
    run_recipe(asked)
    (tmp_path / "run" / "sequence.csv").touch()  # as after a sequence of updates
    require_places(asked)
    for stage in ("first", "second"):  # to make them again
        shutil.rmtree(tmp_path / "run" / stage)
    require_places(asked)
    assert (tmp_path / "run" / "notes.txt").read_text() == "a user's"


def test_a_changed_test_set_makes_a_new_report(recipe: Callable[..., Recipe], photos: Path, tmp_path: Path) -> None:
    run, times, pairs = tmp_path / "run", [], recipe().stages[0].data.pairs

    def course(**test: Any) -> list[int]:
        data = {"pairs": {"path": pairs.path}, "test": {"path": str(photos), **test}, "embeddings_of": "images"}
        run_recipe(recipe(data=data))
        times.append((run / "report" / "report.json").stat().st_mtime_ns)
        return times

    course()
    trained = (run / "done.json").read_bytes()
    (photos / "captions.csv").touch()
    assert len(set(course())) == 1, "nothing has changed but a time"
    captions = (photos / "captions.csv").read_text()
    (photos / "captions.csv").write_text(captions.replace("7.png,thing number 7 of many\n", "", 1))
    assert len(set(course())) == 2
    assert {case.n_queries for case in load_report(run).cases if case.direction == "text-to-image"} == {23}, "judged anew"
    evaluated = json.loads((run / "evaluated.json").read_text())
    del evaluated["files"], evaluated["data"]  # as a version wrote it that did not record them
    (run / "evaluated.json").write_text(json.dumps(evaluated))
    (photos / "captions.csv").write_text(captions)
    assert len(set(course())) == 2
    assert len(set(course(limit=10))) == 3
    assert {case.n_queries for case in load_report(run).cases} == {10}, "judged anew"
    assert yaml.safe_load((run / "recipe.yaml").read_text())["data"]["test"]["limit"] == 10
    assert (run / "done.json").read_bytes() == trained


def test_files_are_known_by_what_they_hold_wherever_they_lie(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("cat\n")

    def found(folder: Path) -> list[str]:
        zero_shot = ZeroShotSettings(images=PairSource(path=str(folder)), classes=str(tmp_path / "classes.txt"))
        data = DataSettings(test=PairSource(path=str(folder / "*.csv")), zero_shot=zero_shot)
        files = judged_files(StageRecipe(method="ridge", data=data))
        assert files.keys() <= {"test.path", "zero_shot.images.path", "zero_shot.classes"}
        of_names = judged_files(StageRecipe(method="ridge", data=DataSettings(zero_shot={"a": zero_shot})))
        assert of_names.keys() <= {"zero_shot.a.images.path", "zero_shot.a.classes"} and len(of_names) == len(files) - 1
        return list(files.values())

    first = found(photos)
    assert len(first) == 3
    assert found(Path(shutil.copytree(photos, tmp_path / "copied", copy_function=shutil.copyfile))) == first
    (photos / ".DS_Store").touch()
    assert found(photos) == first
    (tmp_path / "classes.txt").write_text("dog\n")
    assert [one == other for one, other in zip(found(photos), first, strict=True)].count(False) == 1
    Image.new("RGB", (3, 3)).save(photos / "7.png")
    assert [one == other for one, other in zip(found(photos), first, strict=True)].count(False) == 2
    (tmp_path / "classes.txt").unlink()
    assert len(found(photos)) == 2, "what is gone is as it was"
    on_the_hub = DataSettings(test=PairSource(path="somebody/pairs"))
    assert judged_files(StageRecipe(method="ridge", data=on_the_hub)) == {}


def test_files_of_a_run_hold_no_secret_and_are_as_open_as_the_umask_says(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "s3cr3t-of-mine")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:s3cr3t-of-mine@127.0.0.1:9")
    monkeypatch.setattr("sys.argv", ["xcompat", "train", "demo.yaml", "tracker=https://user:s3cr3t-of-mine@host"])
    before = os.umask(0o027)
    try:
        training = {"max_steps": 2, "per_device_train_batch_size": 8, "save_steps": 1}
        run_recipe(recipe(method="projection", training=training))
        line = refuses("", run_recipe, recipe(data={"test": {"path": "https://user:s3cr3t-of-mine@host/pairs.csv"}}))
    finally:
        os.umask(before)
    printed = capsys.readouterr()
    made = [path for folder in ("run", "cache") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert {"report.html", "environment.json", "recipe.yaml", "model.safetensors"} <= {path.name for path in made}
    assert not [path for path in made if b"s3cr3t" in path.read_bytes()]
    assert "s3cr3t" not in printed.out + printed.err + line
    modes = {str(path.relative_to(tmp_path)): oct(stat.S_IMODE(path.stat().st_mode)) for path in made}
    assert {name: mode for name, mode in modes.items() if mode != oct(0o640)} == {}
