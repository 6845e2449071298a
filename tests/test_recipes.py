"""The recipes and accelerate configurations of the project: valid, run on stand-ins, in the wheel, found by name."""

from __future__ import annotations

import importlib
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import invoke, recipe_of, refuses
from data_layouts import make_all
from data_layouts.bench import make_bench
from schedule import mostly_nightly

from xcompat import Fingerprint, XcompatError
from xcompat.data.sources import PairSource, local_files
from xcompat.encoders.dimensions import scratch_dim
from xcompat.encoders.scratch import ScratchSource, encoder_from_scratch
from xcompat.encoders.standins import small_scratch, stand_in
from xcompat.models import describe_old
from xcompat.training import test_data
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.evaluation_sets import load_pair_test_set
from xcompat.training.headers import read_header
from xcompat.training.input_checks import check_paths
from xcompat.training.preflight import load_checked
from xcompat.training.recipe import Recipe, load_recipe
from xcompat.training.run import StageRun, run_recipe
from xcompat.training.shipped import find_recipes, shipped_recipes
from xcompat.training.stage import SIDES
from xcompat.training.stage_recipe import AUTO_MAP, STAGE_PREFIX, StageRecipe, method_class

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
OF_EACH_KIND = list({file.parent: file for file in RECIPES}.values())
"""The last recipe of each folder, which is built on every change; all of them nightly."""
OTHERWISE_SAME = ("clip", "continual", "fashion", "oca", "vision")
"""Folders whose recipes have the methods, encoders and data of others; they take longest and run nightly."""
PAPERS = {file: header for file in RECIPES if (header := read_header(file)).first_value("paper")}
SCHEDULE = ROOT / "recipes" / "vision" / "oca_tiny_imagenet.yaml"
SCRATCH = ROOT / "recipes" / "vision" / "scratch_tiny_imagenet.yaml"
BENCHMARK = [file for file in RECIPES if file.parent.name == "bench"]
BENCH = "runs/bench_data"
"""What benchmarks/studies/bench_data.py makes."""
SHARED = ROOT.parent / "shared"
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def named(file: Path) -> str:
    return file.relative_to(ROOT / "recipes").as_posix()


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every data set of the papers' recipes, and what those of the benchmark need, a few images each."""
    folder = tmp_path_factory.mktemp("layouts") / "main"
    make_all(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "studies"))
        make_bench(folder / BENCH, importlib.import_module("bench_data"))
    if SHARED.exists():
        (folder.parent / "shared").symlink_to(SHARED)
    return folder


def home(file: Path, layouts: Path) -> Path:
    return layouts if file in PAPERS or BENCH in file.read_text(encoding="utf-8") else ROOT


def readable(file: Path) -> bool:
    return "../shared" not in file.read_text(encoding="utf-8") or (SHARED / "data").exists()


def load_or_skip(file: Path) -> Recipe:
    if not readable(file):
        pytest.skip(f"{named(file)} reads ../shared/data, which is not here")
    return loaded(file)


@cache
def loaded(file: Path) -> Recipe:
    return load_recipe(file)


@cache
def planned() -> dict[Path, set[str]]:
    """Return of each recipe the stages that set what none before them does, with what they are made from; one that is judged."""
    seen = set[tuple[object, ...]]()
    plan = {}
    for file in filter(readable, RECIPES):
        wanted = set()
        for stage in loaded(file).stages:
            kind = (stage.method, stage.memory, *sorted(stage.options), *sorted(stage.data.model_fields_set))
            if kind not in seen:
                seen.add(kind)
                wanted |= with_ancestors(loaded(file), stage.name)
        judged = [with_ancestors(loaded(file), stage.name) for stage in loaded(file).stages if stage.is_judged]
        names = {stage.name for stage in loaded(file).stages if stage.is_judged}
        plan[file] = wanted if wanted & names else wanted | min(judged, key=len)
    return plan


def with_ancestors(recipe: Recipe, name: str) -> set[str]:
    stages = {stage.name: stage for stage in recipe.stages}
    found: set[str] = set()
    waiting = [name]
    while waiting:
        found.add(one := waiting.pop())
        evaluation = stages[one].evaluation
        waiting += [*stages[one].source_stages(), *(evaluation.compare_with if evaluation else [])]
    return found


@pytest.mark.parametrize("file", [*PAPERS, SCHEDULE, *BENCHMARK, SCRATCH], ids=named)
def test_old_and_new_models_begin_with_other_weights(file: Path) -> None:
    """From one seed the same architecture begins alike, and what is independent of an old model would be half compatible."""
    stages = {stage.name: stage for stage in loaded(file).stages}

    def begun(source: Any) -> StageRecipe | None:
        name = getattr(source, "name", "") or ""
        return stages[name.removeprefix(STAGE_PREFIX)] if name.startswith(STAGE_PREFIX) else None

    for stage in stages.values():
        sources = (stage.old, stage.side_info, stage.new_side_info)
        models = [begun(stage.new) or stage, *(model for source in sources if (model := begun(source)) is not None)]
        begins = [(str(model.new), model.seed_offset) for model in models if isinstance(model.new, ScratchSource)]
        assert len(set(begins)) == len(begins), f"{stage.name}: set seed_offset of one of {[model.name for model in models]}"


@pytest.mark.parametrize("file", [file for file in PAPERS if file.parent.name in ("bt2", "oca")], ids=named)
def test_recipes_of_bt2_and_oca_multiply_and_start_as_the_papers_do_or_say_that_they_differ(file: Path) -> None:
    stages = [stage for stage in loaded(file).stages if stage.method in ("bct", "bt2", "oca")]
    assert stages
    scaled = [stage.name for stage in stages if stage.options.get("old_scale", "default") is not None]
    assert not scaled or "cosines times 16" in file.read_text(encoding="utf-8"), scaled
    turned = [stage for stage in stages if stage.method != "bct" and stage.options.get("transform") != "none"]
    assert all(stage.options.get("random_start") for stage in turned)


def test_headers_and_the_overview_say_what_a_recipe_needs() -> None:
    texts = {named(file): file.read_text(encoding="utf-8") for file in RECIPES}
    headers = {name: "".join(line for line in text.lower().splitlines() if line.startswith("#")) for name, text in texts.items()}
    assert [name for name, text in texts.items() if not text.startswith("# ") or "needs" not in headers[name]] == []
    assert [name for name, header in headers.items() if "not run:" not in header and "took" not in header] == []
    assert [name for name, header in headers.items() if re.search(r"xcompat (train|compare) recipes/", header) is None] == []
    written = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert written == runpy.run_path(str(ROOT / "docs" / "recipes_table.py"))["overview"](), "run python docs/recipes_table.py"
    assert all(f"]({name})" in written for name in texts)


@pytest.mark.parametrize(
    "file", mostly_nightly(RECIPES, lambda file: file in OF_EACH_KIND and file.parent.name not in OTHERWISE_SAME), ids=named
)
def test_every_recipe_runs_on_stand_ins(file: Path, layouts: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """Of each recipe at least one judged stage trains two steps, and of all recipes every kind of stage (:func:`planned`)."""
    monkeypatch.chdir(home(file, layouts))
    before = set(Path.cwd().iterdir())
    recipe = load_or_skip(file)
    for stage in recipe.stages:
        check_paths(stage)
    wanted = planned()[file]
    assert any(stage.is_judged for stage in recipe.stages if stage.name in wanted)
    dry_run_recipe(recipe.model_copy(update={"stages": [stage for stage in recipe.stages if stage.name in wanted]}))
    assert set(Path.cwd().iterdir()) == before, "a dry run leaves nothing behind"


@pytest.mark.parametrize("file", mostly_nightly(RECIPES, OF_EACH_KIND.__contains__), ids=named)
def test_every_stage_is_checked_and_built(file: Path, layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a run does before its first stage trains; then each stage's model is built around a tiny encoder of its kind.

    Data of ``../shared`` and the embedded glyphs are large: their stages are built for made-up classes.
    """
    monkeypatch.chdir(home(file, layouts))
    stages = [small_batches(stage) for stage in load_or_skip(file).stages]
    changes = {"stages": stages, "output_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
    recipe = load_or_skip(file).model_copy(update=changes)

    def stop(_: StageRun) -> None:
        raise RuntimeError("training is reached")

    def here(source: PairSource) -> Any:
        return load_pair_test_set(source) if local_files(source.path) is not None else None

    monkeypatch.setattr(test_data, "load_pair_test_set", here)
    monkeypatch.setattr(StageRun, "train_unless_done", stop)
    is_made = not any(large in file.read_text(encoding="utf-8") for large in ("../shared", "glyphs:"))
    if is_made:
        with pytest.raises(RuntimeError, match="training is reached"):
            run_recipe(recipe)
    for stage in recipe.stages:
        run = StageRun(recipe, stage)
        build(run, run.images.classes if is_made and stage.data.images is not None else ["a", "b", "c"])


def small_batches(stage: StageRecipe) -> StageRecipe:
    """Return a stage whose batches are of two samples, or of two classes, as few are made."""
    size = {"per_device_train_batch_size": 2 * stage.data.samples_per_class if stage.is_balanced else 2}
    return stage.model_copy(update={"training": stage.training | size}) if stage.is_trained else stage


def build(run: StageRun, classes: list[str]) -> None:
    settings, method = run.settings, run.method
    if settings.method == AUTO_MAP:
        return
    if isinstance(settings.new, ScratchSource):
        scratch_dim(settings.new)
        encoder = encoder_from_scratch(small_scratch(settings.new, 16), ("a dog", "a cat"), 0)
    else:
        labelled = settings.data.images is not None
        encoder = stand_in(settings.new.model_type or ("resnet" if labelled else "clip"), 16)
    old = describe_old(Fingerprint.from_string("old"), run.old_dim() or 512)
    if (metric := settings.options.get("metric")) is not None:
        old["metric"] = metric  # that of its own stage, which is trained with the same or refused
    if method.embeds_in_memory:
        sides = {role: old for role in SIDES if role in method.columns_if_known and getattr(settings, role) is not None}
        described = encoder[0].description | {"fingerprint": old["fingerprint"], "dim": 16}
        method(method.config_class(encoder=described, old=old, embedding_dim=16, **sides, **settings.options))
    else:
        known = {"classes": classes} if method.learns_classes else {}
        method.from_encoder(encoder, old=old if method.compares_with_old else None, **known, **settings.options)


@pytest.mark.parametrize("file", PAPERS, ids=named)
def test_a_papers_recipe_cites_its_rows(file: Path) -> None:
    header = PAPERS[file]
    assert all(header.first_value(key) for key in ("paper", "table", "data", "needs", "ours"))
    assert list(header.rows()), "a row, and what the paper found"
    trained = [stage for stage in loaded(file).stages if not method_class(stage.method).is_solved]
    assert all(stage.training.get("max_grad_norm") == 0 for stage in trained), "transformers would clip, which no paper states"
    for _, published in header.rows():
        if "AVG" in published:  # as papers of MixBCT print it
            *four, average = map(float, re.findall(r"\d+\.\d\d", published))
            assert average == pytest.approx(sum(four) / 4, abs=0.011), published
    paper = ROOT.parent / "shared" / "papers" / f"{header.first_value('paper')}.txt"
    if not paper.exists():
        pytest.skip(f"{paper} is not here")
    text = paper.read_text(encoding="utf-8")
    mended = re.sub(r"(\d)(\d)\s\2\.", r"\1\2.", text)  # "14 4.44" is what was made of a printed 14.44
    known = set(re.findall(r"\d+\.\d+", f"{text} {mended}"))
    known |= {f"{100 * float(number):.2f}" for number in known}  # some print shares
    for row, published in header.rows():
        assert set(re.findall(r"\d+\.\d+", published)) <= known, f"{row}: a number that is not in the paper"


def test_what_the_benchmark_searches_with_is_searched_with_nowhere_else() -> None:
    asked = {"bench": set[str](), "others": set[str]()}
    for file in RECIPES:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        datas = [raw.get("data", {}), *(stage.get("data") or {} for stage in raw.get("stages", []))]
        sources = [data[key] for data in datas for key in ("queries", "gallery", "test") if data.get(key)]
        paths = {source["path"] for source in sources}
        asked["bench" if file.parent.name == "bench" else "others"] |= {path for path in paths if "tiny-imagenet/train" in path}
        learned = {data["images"]["path"] for data in datas if data.get("images")}
        assert file.parent.name != "bench" or not any("tiny-imagenet" in path and "{0000..0002}" not in path for path in learned)
    assert asked == {"bench": {"../shared/data/tiny-imagenet/train-0003.tar.gz"}, "others": set()}
    for study in (ROOT / "benchmarks").rglob("*.py"):
        assert "train-0003" not in study.read_text(encoding="utf-8"), study


def test_data_that_are_not_there_are_said_with_their_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "recipes" / "bt2" / "table_2_imagenet.yaml"
    expected = r"table_2_imagenet\.yaml expects data/imagenet/train/n01440764/"
    with pytest.raises(XcompatError, match=rf"(?s)old: data\.images\.path: data/imagenet/train does not exist; .*\. {expected}"):
        load_checked(recipe, [], every_stage=True)
    (tmp_path / "data" / "imagenet" / "train" / "n01440764").mkdir(parents=True)
    with pytest.raises(XcompatError, match=rf"(?s)data/imagenet/train: no shards .*, images, .*{expected}"):
        load_checked(recipe, [], every_stage=True)


def test_a_dry_run_from_the_command_line(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "baselines" / "ridge.yaml"
    done = warm.run("-m", "xcompat", "train", recipe, "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "baseline_ridge runs from end to end on stand-ins" in done.stdout
    assert "lmms-lab/NoCaps" in done.stdout
    assert not done.stderr.strip(), "no library's bars or warnings"
    assert not list(tmp_path.iterdir()), "nothing is written"


PAIR_DATA = {"pairs": {"path": "some/pairs"}}
JUDGED_IMAGES = {"images": {"path": "some/images"}, "queries": {"path": "some/queries"}}
UNKNOWN_VGG = {"model_type": "timm_wrapper", "architecture": "vgg13_bm"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new": {"name": "some/model", "model_type": "flava"}}, "no stand-in for 'flava'"),
        ({"method": "xbt", "projection": None, "data": PAIR_DATA}, "starts from a pretrained φ"),
        ({"method": "direct", "options": {"adapters": {"lora": {"targets": ["c_fc"]}}}, "data": PAIR_DATA}, "no linear layer"),
        (
            {"method": "independent", "new": {"model": UNKNOWN_VGG}, "old": None, "data": {"images": {"path": "some/images"}}},
            "cannot build timm_wrapper from scratch",
        ),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_real_one(changes: dict[str, object], message: str) -> None:
    raw = {"method": "projection", "old": "some/old", "new": "some/new", "data": {"texts": [{"path": "some/texts"}]}}
    refuses(message, dry_run_recipe, recipe_of(raw, **changes))


LAYERS = [{"name": name, "options": {"input": name}} for name in ("embedding", "penultimate")]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "xbt", "projection": "some/phi", "data": PAIR_DATA},
        {"method": "query_map", "stages": LAYERS, "data": JUDGED_IMAGES},
        {"method": "bt2", "independent": "some/independent", "options": {"dim": 128}, "data": JUDGED_IMAGES},
    ],
    ids=["a projection from elsewhere", "the last layer that is read", "tied dimensions"],
)
def test_stand_ins_are_what_a_stage_reads(changes: dict[str, Any], undrawn: None) -> None:
    dry_run_recipe(recipe_of({"old": "some/old", "new": "some/new", **changes}))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_every_configuration_without_a_key_left_over(file: Path) -> None:
    config = load_config_from_file(str(file))  # raises for unknown keys
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key, value in written.items():
        assert getattr(config, key) == value, key


def test_workers_decode_images_for_frozen_models_in_the_training_step() -> None:
    online = {(file, stage.name): stage for file in RECIPES for stage in loaded(file).stages if stage.online_roles}
    on_gpus = {place: stage for place, stage in online.items() if "a GPU" in place[0].read_text(encoding="utf-8")}
    assert {file.parent.name for file, _ in on_gpus} == {"bt2", "oca", "vision"}
    assert [place for place, stage in on_gpus.items() if not stage.training.get("dataloader_num_workers")] == []


NAMES = [file.relative_to(ROOT / "recipes").with_suffix("").as_posix() for file in RECIPES]


def test_a_wheel_holds_every_recipe_and_every_file_of_the_package(tmp_path: Path) -> None:
    for name in ("recipes", "xcompat"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        packed = {name.removeprefix("xcompat/recipes/") for name in held.namelist() if name.startswith("xcompat/recipes/")}
        files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "xcompat").rglob("*") if file.is_file()}
        assert {file for file in files if "__pycache__" not in file} <= set(held.namelist())  # templates, styles, py.typed
    assert packed == {f"{name}.yaml" for name in NAMES}


def test_recipes_are_listed_shown_and_copied_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    listed = invoke("recipes")
    assert "in the scenario extended-class\n" in listed, "commands in a header are not listed"
    assert all(name in listed for name in NAMES) and "a map that is solved, not trained" in " ".join(listed.split())
    assert "Copy one: xcompat recipes NAME --to recipes. Run it: xcompat train recipes/NAME.yaml" in listed
    source = (ROOT / "recipes" / "clip" / "b32_to_l14.yaml").read_text(encoding="utf-8")
    assert invoke("recipes", "b32_to_l14") == source
    assert invoke("recipes", "clip/b32_to_l14", "--to", "mine").split() == ["mine/clip/b32_to_l14.yaml"]
    assert Path("mine/clip/b32_to_l14.yaml").read_text(encoding="utf-8") == source
    assert load_recipe("mine/clip/b32_to_l14.yaml").name == "clip_b32_to_l14"
    theirs = Path("theirs/clip/l14_to_h14.yaml")
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine: true\n")
    refuses(f"{theirs} already exists; choose another folder with --to", invoke, "recipes", "clip", "--to", "theirs")
    assert theirs.read_text() == "mine: true\n" and list(theirs.parent.iterdir()) == [theirs]


def test_a_recipe_is_found_by_what_people_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clip/b32_to_l14", "./recipes/clip/b32_to_l14.yaml", "b32_to_l14"):
        assert list(find_recipes(name)) == ["clip/b32_to_l14"]
    assert list(find_recipes("recipes/clip")) == ["clip/b32_to_h14", "clip/b32_to_l14", "clip/l14_to_h14"]
    refuses("xcompat has no recipe 'clip/b32_l14'; did you mean 'clip/b32_to_l14'", find_recipes, "clip/b32_l14")
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.yaml").write_text("# Twice.\n")
    with monkeypatch.context() as patch:
        patch.setattr("xcompat.training.shipped.PLACES", (tmp_path / "nowhere", tmp_path))
        assert list(shipped_recipes()) == ["one/same", "other/same"]
        refuses("several recipes are named same: one/same, other/same", find_recipes, "same")
    monkeypatch.chdir(tmp_path)
    for meant in ("recipes/clip/b32_to_l14.yaml", "b32_to_l14"):
        refuses("copy xcompat's recipe with `xcompat recipes clip/b32_to_l14 --to recipes`", load_recipe, meant)
