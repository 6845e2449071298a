"""What the documents say is so: the tree is the disk, links lead somewhere, tables are complete, and marked examples run."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import xcompat
from xcompat import Fingerprint, XbtModel
from xcompat.models import METHODS, describe_old
from xcompat.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
IGNORED = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line] + [".git"]
EXAMPLES = re.findall(r"<!-- runnable -->\n```(\w+)\n(.*?)```", README, re.DOTALL)


def tree_of(page: str) -> dict[str, str]:
    """Return path -> caption of every line of a page's tree; folders end in a slash."""
    block = re.search(r"```\n\.\n(.*?)```", page, re.DOTALL)
    assert block is not None, "the page has no tree"
    captions: dict[str, str] = {}
    parents: list[str] = []
    for line in block[1].splitlines():
        found = re.fullmatch(r"(?P<indent>(?:│   |    )*)[├└]── (?P<name>\S+)\s+(?P<caption>\S.*)", line)
        assert found is not None, f"no name and caption in {line!r}"
        depth = len(found["indent"]) // 4
        parents[depth:] = [found["name"]]
        path = "".join(parents)
        assert path not in captions, f"{path} stands there twice"
        captions[path] = found["caption"]
    return captions


def on_disk(folder: Path) -> set[str]:
    """Return the entries of a folder that belong to the project, as the tree writes them."""
    kept = (path for path in folder.iterdir() if not any(fnmatch.fnmatch(path.name, pattern) for pattern in IGNORED))
    prefix = "" if folder == ROOT else f"{folder.relative_to(ROOT).as_posix()}/"
    return {f"{prefix}{path.name}{'/' if path.is_dir() else ''}" for path in kept}


def test_the_tree_is_the_disk() -> None:
    told = set(tree_of(STRUCTURE))
    folders = [ROOT, *(path for path in sorted((ROOT / "xcompat").rglob("*")) if path.is_dir() and path.name != "__pycache__")]
    there = set().union(*(on_disk(folder) for folder in [*folders, ROOT / "xcompat"]))
    assert told - there == set(), "in docs/structure.md, but not on the disk"
    assert there - told == set(), "on the disk, but without a caption in docs/structure.md"


def test_the_readme_shows_the_tree_down_to_the_packages() -> None:
    upper = {path: caption for path, caption in tree_of(STRUCTURE).items() if re.fullmatch(r"[^/]+/?|xcompat/[^/]+/", path)}
    assert tree_of(README) == upper


def test_the_tree_is_read_as_it_is_written() -> None:
    drawn = "```\n.\n├── a/   first\n│   └── b.py   inside\n└── c   last\n```"
    assert tree_of(drawn) == {"a/": "first", "a/b.py": "inside", "c": "last"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    recipes = re.findall(r"\b(?:recipes|accelerate_configs|benchmarks|tests)/[\w/.-]+\.(?:yaml|py|md)", text)
    missing = [path for path in links + recipes if not (ROOT / path).exists()]
    assert not missing


def table_column(heading: str) -> set[str]:
    """Return the code spans in the first column of the table whose header starts so."""
    table = README[README.index(heading) :].split("\n\n", 1)[0].splitlines()[2:]
    return {name for row in table for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}


def test_every_method_is_described() -> None:
    assert table_column("| `method:` in a recipe") == set(METHODS)


def test_every_way_to_launch_is_described() -> None:
    assert table_column("| name | for |") == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_every_test_file_is_described() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = re.findall(r"`(tests/test_\w+\.py)`", contributing[contributing.index("| file | holds |") :].split("\n\n", 1)[0])
    assert sorted(told) == sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("test_*.py"))


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == xcompat.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == xcompat.__version__
    assert citation["license"] == project["license"]


def test_the_papers_can_be_cited() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    titles = [reference["title"] for reference in citation["references"]]
    assert len(set(titles)) == 5
    for reference in citation["references"]:
        assert reference["type"] in {"article", "conference-paper"}
        assert all(author["family-names"] and author["given-names"] for author in reference["authors"])
        assert reference["title"] and isinstance(reference["year"], int)


def test_the_recipes_in_the_readme_are_some(tmp_path: Path) -> None:
    recipes = re.findall(r"```yaml\n# (\S+)\n(.*?)```", README, re.DOTALL)
    for name, text in recipes:
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert [stage.method for stage in load_recipe(tmp_path / "photos.yaml").stages] == ["map"]
    stages = load_recipe(tmp_path / "upgrade.yaml").stages
    assert [stage.method for stage in stages] == ["projection", "xbt"]
    assert all(stage.data.test is not None and stage.training["learning_rate"] == 1e-4 for stage in stages)


def unit(rows_ND: np.ndarray) -> np.ndarray:
    return (rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def workplace(tmp_path: Path, folder_of: dict[str, str], old_folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that holds, in miniature, every file that the README's examples read; it is the current one."""
    old = describe_old(Fingerprint.from_string("clip-b32"), dim=8)
    model = XbtModel.from_encoder(folder_of["clip"], old=old, adapters={"lora": {"rank": 2}, "prompts": 2})
    model.export(tmp_path / "runs/clip_b32_to_l14/xbt/model")
    shutil.copytree(old_folder, tmp_path / "openai/clip-vit-base-patch32")
    generator = np.random.default_rng(0)
    to_old, to_new = generator.standard_normal((12, 8)), generator.standard_normal((12, 16))
    corpus = generator.standard_normal((300, 12))
    things = generator.standard_normal((60, 12))
    (tmp_path / "corpus").mkdir()
    for name, matrix in (("old", to_old), ("new", to_new)):
        np.save(tmp_path / "corpus" / f"{name}.npy", unit(corpus @ matrix))
        folder = tmp_path / "embeddings" / name
        folder.mkdir(parents=True)
        for kind in ("image", "text"):
            noisy = things + 0.3 * generator.standard_normal(things.shape)
            np.save(folder / f"{kind}_embeds.npy", unit(noisy @ matrix))
            (folder / f"{kind}_ids.txt").write_text("".join(f"thing-{row}\n" for row in range(60)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_shell(code: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_marked_examples_run(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {language for language, _ in EXAMPLES} == {"python", "sh"}
    names: dict[str, Any] = {}
    for language, code in EXAMPLES:
        if language == "sh":
            run_shell(code)
        else:
            exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own README
    assert names["queries"].shape == (2, 8)
    np.testing.assert_allclose(names["queries"].norm(dim=-1), 1, rtol=1e-5)
    assert (workplace / "runs/judged/report/report.html").exists()
    printed = capsys.readouterr().out
    assert "clip-b32@" in printed, "the versions whose indexes may be searched"
    assert "(2, 8)" in printed, "rows of the cache"
