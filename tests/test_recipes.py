"""The recipes and the accelerate configurations that come with the project: each is valid, and each recipe runs on stand-ins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from xcompat.data.sources import PairSource
from xcompat.errors import XcompatError
from xcompat.training.dry_run import dry_run_recipe
from xcompat.training.recipe import Recipe, load_recipe, parse_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(
    file for file in (ROOT / "recipes").rglob("*.yaml") if file.parent.name != "mixbct"
)  # these: tests/test_faces.py
SMALLER = {  # a ResNet-50 from scratch is no stand-in: all of it computes
    "vision/oca_tiny_imagenet.yaml": [
        "new.model.depths=[1, 1, 1, 1]",
        "new.model.hidden_sizes=[16, 32, 64, 128]",
        "new.image_size=32",
    ]
}
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def named(file: Path) -> str:
    return file.relative_to(ROOT / "recipes").as_posix()


@pytest.fixture
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths in recipes are meant from the repository's root."""
    monkeypatch.chdir(ROOT)


def load_or_skip(file: Path) -> Recipe:
    if "../shared" in file.read_text(encoding="utf-8") and not (ROOT.parent / "shared" / "data").exists():
        pytest.skip(f"{named(file)} reads ../shared/data, which is not here")
    return load_recipe(file, SMALLER.get(named(file), ()))


def test_what_was_asked_for_is_there() -> None:
    models = {
        "clip/b32_to_l14",
        "clip/l14_to_h14",
        "clip/b32_to_h14",
        "blip/base_to_large",
        "siglip/clip_b32_to_siglip2",
        "continual/b32_l14_h14",
    }
    baselines = {"full_tune", "lora_only", "base", "phi_alone", "phi_image_only", "phi_no_noise", "ridge", "procrustes"}
    assert {f"{name}.yaml" for name in models} | {f"baselines/{name}.yaml" for name in baselines} <= set(map(named, RECIPES))


@pytest.mark.parametrize("file", RECIPES, ids=named)
def test_every_recipe_says_what_it_needs_and_whether_it_was_run(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert text.startswith("# ") and "needs" in header.lower(), "the first lines say what the recipe is and needs"
    assert "not run:" in header.lower() or "took" in header.lower(), "and how long it took, or why it was not run"


@pytest.mark.parametrize("file", RECIPES, ids=named)
def test_every_recipe_runs_on_stand_ins(file: Path, at_the_root: None, undrawn: None) -> None:
    # drawing is more than half of a dry run and the same for all of them; the subprocess below draws
    before = set(ROOT.iterdir())
    dry_run_recipe(load_or_skip(file))
    assert set(ROOT.iterdir()) == before, "a dry run leaves nothing behind"


def test_a_dry_run_from_the_command_line(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "baselines" / "lora_only.yaml"
    done = warm.run("-m", "xcompat", "train", recipe, "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "baseline_lora_only runs from end to end on stand-ins" in done.stdout
    assert "pixparse/cc3m-wds" in done.stdout
    assert not done.stderr.strip(), "no library's bars or warnings"
    assert not list(tmp_path.iterdir()), "nothing is written"


TESTED = {"texts": [{"path": "some/texts"}], "test": {"path": "some/pairs"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"texts": [{"path": "texts.txt"}]}}, "texts.txt does not exist"),
        (
            {"data": TESTED | {"zero_shot": {"images": {"path": "x.tar"}, "classes": __file__}}},
            "x.tar does not exist",
        ),
        (
            {"data": TESTED | {"zero_shot": {"images": {"path": "some/images"}, "classes": "c.txt"}}},
            "c.txt does not exist",
        ),
        ({"old": "./no/such/model"}, "model folder ./no/such/model does not exist"),
        ({"new": {"name": "some/model", "model_type": "flava"}}, "no stand-in for 'flava'"),
        ({"method": "xbt", "projection": None, "data": {"pairs": {"path": "some/pairs"}}}, "starts from a pretrained φ"),
        (
            {
                "method": "direct",
                "options": {"adapters": {"lora": {"targets": ["c_fc"]}}},
                "data": {"pairs": {"path": "some/pairs"}},
            },
            "match no linear layer of the image tower",
        ),
    ],
)
def test_a_dry_run_finds_what_would_stop_the_real_one(changes: dict[str, object], message: str) -> None:
    raw = {"method": "projection", "old": "some/old", "new": "some/new", "data": {"texts": [{"path": "some/texts"}]}}
    with pytest.raises(XcompatError, match=message):
        dry_run_recipe(parse_recipe({**raw, **changes}, "demo", "demo.yaml"))


def test_a_projection_from_elsewhere_is_a_stand_in_too(undrawn: None) -> None:
    raw = {
        "method": "xbt",
        "old": "some/old",
        "new": "some/new",
        "projection": "some/phi",
        "data": {"pairs": {"path": "some/pairs"}},
    }
    dry_run_recipe(parse_recipe(raw, "demo", "demo.yaml"))


def test_a_stand_in_has_the_last_layer_that_is_read(undrawn: None) -> None:
    raw = {
        "old": "some/old",
        "new": "some/new",
        "data": {"images": {"path": "some/images"}, "queries": {"path": "some/queries"}},
        "method": "query_map",
        "stages": [{"name": name, "options": {"input": name}} for name in ("embedding", "penultimate")],
    }
    dry_run_recipe(parse_recipe(raw, "demo", "demo.yaml"))


def test_the_augmentation_of_the_paper() -> None:
    recipe = load_recipe(ROOT / "recipes" / "clip" / "b32_to_l14.yaml")
    phi, xbt = recipe.stages
    assert xbt.data.augmentation is not None and xbt.data.augmentation.min_scale == 0.5
    assert isinstance(xbt.data.pairs, PairSource) and xbt.data.pairs.streaming
    assert 8 * phi.training["per_device_train_batch_size"] == 8192 and 8 * xbt.training["per_device_train_batch_size"] == 1024
    assert xbt.prompt_lr_factor == 100 and xbt.options["adapters"]["prompts"] == 10


# ------------------------------------------------------------------------------------------------------ accelerate


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_reads_every_configuration_without_a_key_left_over(file: Path) -> None:
    config = load_config_from_file(str(file))  # raises for unknown keys
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key, value in written.items():
        assert getattr(config, key) == value, key


def test_configurations_say_what_accelerate_needs_to_be_told() -> None:
    assert {file.stem for file in CONFIGS} == {
        "single_gpu",
        "multi_gpu",
        "multi_node",
        "fsdp2",
        "deepspeed_zero2",
        "tpu",
        "cpu",
        "cpu_2",
    }
    config = {file.stem: load_config_from_file(str(file)) for file in CONFIGS}
    cpu_2 = config["cpu_2"]
    assert (cpu_2.distributed_type, cpu_2.use_cpu, cpu_2.num_processes) == ("MULTI_GPU", True, 2), "MULTI_CPU starts one process"
    assert config["tpu"].distributed_type == "XLA"
    assert config["multi_node"].num_machines == 2 and config["multi_node"].main_process_ip
    fsdp = config["fsdp2"].fsdp_config
    assert fsdp["fsdp_version"] == 2 and fsdp["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert {"fsdp_reshard_after_forward", "fsdp_auto_wrap_policy"} <= set(fsdp)
    assert config["deepspeed_zero2"].deepspeed_config["zero_stage"] == 2


def test_cpu_2_starts_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(
        "from pathlib import Path\n"
        "import torch, torch.distributed as dist\n"
        "from xcompat.distributed import end_processes, process_state\n"
        "state = process_state()\n"
        "ranks = torch.tensor([state.process_index])\n"
        "dist.all_reduce(ranks)\n"
        "text = f'{state.num_processes} {dist.get_backend()} {ranks.item()} {state.device.type}'\n"
        f"Path({str(tmp_path)!r}, f'rank-{{state.process_index}}').write_text(text)\n"
        "end_processes()\n"
    )
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / "cpu_2.yaml"),
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2 gloo 1 cpu"] * 2


def test_dimensions_that_are_tied_are_those_of_the_stand_ins(undrawn: None) -> None:
    raw = {
        "method": "bt2",
        "old": "some/old",
        "independent": "some/independent",
        "new": {"name": "some/new"},
        "options": {"dim": 128},
        "data": {"images": {"path": "some/images"}, "queries": {"path": "some/queries"}},
    }
    dry_run_recipe(parse_recipe(raw, "demo", "demo.yaml"))
