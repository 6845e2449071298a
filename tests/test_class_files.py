"""Class files for zero-shot classification: public names, written once; labels that do not fit are refused before training."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from xcompat.cli import app
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.data import load_classes
from xcompat.encoders.class_names import SETS, class_names, prompt_templates
from xcompat.training.class_files import class_indices
from xcompat.training.push import run_facts
from xcompat.training.recipe import parse_recipe
from xcompat.training.sections import DataSettings, ZeroShotSettings


@pytest.mark.parametrize("name", SETS)
def test_names_are_in_the_order_of_the_folders(name: str) -> None:
    """By what timm knows of the same classes: WordNet's numbers in order, nearly each with a word of the name."""
    of_timm = importlib.resources.files("timm.data").joinpath("_info")
    folders = of_timm.joinpath("imagenet_synsets.txt").read_text().split()
    if (listed := SETS[name]) is not None:
        folders = [folders[int(row)] for row in of_timm.joinpath(listed).read_text().split()]
    assert folders == sorted(folders) and len(class_names(name)) == len(folders)
    lemmas = dict(line.split("\t") for line in of_timm.joinpath("imagenet_synset_to_lemma.txt").read_text().splitlines())
    pairs = zip(class_names(name), folders, strict=True)
    known = [any(part in lemmas[folder].lower() for part in re.findall(r"\w+", own.lower())) for own, folder in pairs]
    assert np.mean(known) > 0.9


def test_a_class_file_is_written_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "lists" / "r.txt"
    run = CliRunner().invoke
    assert run(app, ["classes", "imagenet-r", "--to", str(file)]).exit_code == 0
    assert load_classes(file) == class_names("imagenet-r") and len(load_classes(file)) == 200
    assert run(app, ["classes", "imagenet-r"]).stdout == file.read_text()
    assert "imagenet-sketch  1000 classes" in run(app, ["classes"]).stdout
    for arguments, message in (
        (["imagenet", "--to", str(file)], "already exists; choose another file with --to"),
        (["imagenet-x"], "did you mean 'imagenet-a'|no class names for 'imagenet-x'"),
        (["--to", str(tmp_path / "all.txt")], "needs the name of a data set: xcompat classes NAME --to FILE"),
    ):
        with pytest.raises(XcompatError, match=message):
            run(app, ["classes", *arguments], catch_exceptions=False)


def test_labels_are_names_indices_or_folders_of_wordnet() -> None:
    classes = ["tench", "goldfish", "shark"]
    assert class_indices(["shark", "tench", "goldfish"], classes).tolist() == [2, 0, 1]
    assert class_indices([2, 0, 1], classes).tolist() == class_indices(["2", "0", "1"], classes).tolist() == [2, 0, 1]
    folders = ["n01484850", "n01440764", "n01443537", "n01440764"]
    assert class_indices(folders, classes).tolist() == [2, 0, 1, 0]
    assert class_indices([0, 1], classes, is_limited=True).tolist() == [0, 1]
    assert class_indices(["shark", "tench"], classes, is_limited=True).tolist() == [2, 0]
    assert class_indices(["crane", "tench"], ["crane", "tench", "crane"]).tolist() == [0, 1], "two classes of one name"
    for labels, message in (
        (folders[:2], "3 classes, but the images are in 2 folders"),
        ([0, 1], "'shark' of 3 classes has no image; use a class file with a line per label"),
        ([0, 2], "'goldfish' of 3 classes has no image"),
        (["goldfish"], "'tench' and 1 more of 3 classes have no image"),
        ([0, 5], "label 5 is not among the 3 classes"),
        (["shark", "gold fish"], "label 'gold fish' is not among the 3 classes; did you mean 'goldfish'"),
    ):
        with pytest.raises(XcompatError, match=message):
            class_indices(labels, classes)


def test_zero_shot_is_one_set_or_several_by_name() -> None:
    one = {"images": {"path": "x"}, "classes": "c.txt"}

    def parsed(given: object) -> DataSettings:
        data = {"texts": [{"path": "t"}], "test": {"path": "y"}, "zero_shot": given}
        raw = {"method": "ridge", "old": "a", "new": "b", "data": data}
        return parse_recipe(raw, "demo", "demo.yaml", is_quick=True).stages[0].data

    assert parsed(one).zero_shot_sets() == {"": ZeroShotSettings(**one)} and parsed(None).zero_shot_sets() == {}
    several = parsed({"imagenet": one, "imagenet_r": one | {"templates": "simple"}})
    assert [len(shot.prompts()) for shot in several.zero_shot_sets().values()] == [1, 7]
    assert parsed(several.model_dump(mode="json")["zero_shot"]) == several, "as the copy in the run's folder has it"
    for wrong, message in (
        ({"images": {"path": "x"}}, r"data\.zero_shot\.classes: Field required"),
        ({"imagenet": {"images": {"path": "x"}}}, r"data\.zero_shot\.imagenet\.classes: Field required"),
        ({"imagenet": one | {"clases": 1}}, r"unknown key .*zero_shot\.imagenet\.clases'; did you mean 'classes'"),
        (one | {"imagenet": one}, r"unknown key .*zero_shot\.imagenet'; did you mean 'images'"),
        ({"image net": one}, r"zero_shot\.image net.*should match pattern"),
    ):
        with pytest.raises(XcompatError, match=message):
            parsed(wrong)


def test_a_card_names_the_images_of_every_set(tmp_path: Path) -> None:
    shots = {name: {"images": {"path": f"data/{name}/val"}, "classes": "c.txt"} for name in ("imagenet", "sketch")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"data": {"zero_shot": shots}}))
    assert run_facts(tmp_path / "model", Fingerprint.from_string("any")).data == {
        "zero_shot": ["data/imagenet/val", "data/sketch/val"]
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"data": {"zero_shot": shots["sketch"]}}))
    assert run_facts(tmp_path / "model", Fingerprint.from_string("any")).data == {"zero_shot": ["data/sketch/val"]}


def test_prompts_may_be_a_librarys_list() -> None:
    settings = {"images": {"path": "x"}, "classes": "c.txt"}
    assert ZeroShotSettings(**settings).prompts() == ["a photo of a {}"]
    openai = ZeroShotSettings(**settings, templates="openai").prompts()
    assert len(set(openai)) == 80 and all(prompt.count("{}") == 1 for prompt in openai)
    assert set(prompt_templates("simple")) <= set(openai)
    with pytest.raises(ValueError, match="openai"):
        ZeroShotSettings(**settings, templates="opnai")
