"""Documents match the code: links, tables, examples and commands, pages of methods, and the site of `make docs`."""

from __future__ import annotations

import ast
import gzip
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import typer
import warm
import yaml
from accelerate.commands.launch import launch_command_parser
from conftest import write_embeds
from data_layouts.images import draw
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mkdocstrings import Inventory
from PIL import Image
from schedule import mostly_nightly
from store_places import unit_vectors
from transformers import AutoModel
from typing_in import commands_of, type_in

import xcompat
from xcompat import Fingerprint, XbtModel, cli
from xcompat.cli.quickstart import DEFAULT, QuickstartGroup
from xcompat.core.arrays import normalise_rows
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.models.classified import ClassifiedModel
from xcompat.training.recipe import load_recipe
from xcompat.training.stage_recipe import usual_options

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
LISTED = [f"docs/{name}" for name in re.findall(r"^\| \[(\w+\.md)\]\(\1\) \|", INDEX, re.MULTILINE)]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ["README.md", "docs/README.md", *LISTED]}
RESULTS, METHOD_PAGES, TUTORIALS = (
    [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).glob("*.md"))]
    for folder in ("docs/results", "docs/methods", "docs/tutorials")
)
LINKING = [*PAGES, *METHOD_PAGES, *TUTORIALS, *RESULTS, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
README_LINES, README_WIDTH = 120, 150
EXAMPLES = [
    (name, language, code)
    for name, page in PAGES.items()
    for language, code in re.findall(r"<!-- runnable -->\n```(\w+)\n(.*?)```", page, re.DOTALL)
]
PROVIDER = """
import numpy as np


def embed(texts, model):
    rows = np.stack([np.random.default_rng(len(text) + sum(map(ord, text))).standard_normal(16) for text in texts])
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).tolist()
"""
"""Stands for the package of a service."""
RECIPES = [found for page in PAGES.values() for found in re.findall(r"```yaml\n# (\S+)\n(.*?)```", page, re.DOTALL)]


def test_the_readme_launchers_and_version_are_current() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= README_LINES
    assert [line for line in lines if len(line) > README_WIDTH] == []
    page = PAGES["docs/several_gpus.md"]
    rows = page[page.index("| name | for |") :].split("\n\n", 1)[0].splitlines()[2:]
    described = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert described == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == xcompat.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == xcompat.__version__
    assert citation["license"] == project["license"]
    (installed,) = importlib.metadata.entry_points(group="console_scripts", name="xcompat")
    assert installed.load() is cli.main


@pytest.mark.parametrize("folder", ["docs", "docs/results"])
def test_an_index_lists_every_page_once(folder: str) -> None:
    listed = re.findall(r"^\| \[(\w+\.md)\]\(\1\) \|", (ROOT / folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(["README.md", *listed]) == sorted(path.name for path in (ROOT / folder).glob("*.md"))


def anchors_of(page: str) -> set[str]:
    """Return what a link may name after its #: every heading, in small letters, with hyphens and without punctuation."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", LINKING)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{name} links to {target}"
            assert not anchor or anchor in anchors_of(linked.read_text(encoding="utf-8")), f"{target} has no heading {anchor}"
    paths = re.findall(r"\b(?:recipes|accelerate_configs|benchmarks|tests)/[\w/.-]+\.(?:yaml|py|md)", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_recipes_in_the_pages_are_some(tmp_path: Path) -> None:
    told = {"photos.yaml": (["map"], None), "upgrade.yaml": (["projection", "xbt"], 1e-4), "texts.yaml": (["ridge"], None)}
    assert {name for name, _ in RECIPES} == set(told)
    for name, text in RECIPES:
        (tmp_path / name).write_text(text, encoding="utf-8")
        stages = load_recipe(tmp_path / name).stages
        methods, rate = told[name]
        assert [stage.method for stage in stages] == methods, name
        assert all(stage.data.tests() and stage.training.get("learning_rate") == rate for stage in stages), name


def take_photos(folder: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)
    captions = ["file_name,caption"]
    for row, image in enumerate(pixels):
        for place in (folder / "captioned", folder / "train" / ("cat" if row % 2 else "dog")):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{row}.png")
        captions.append(f"{row}.png,thing number {row}")
    (folder / "captioned" / "metadata.csv").write_text("\n".join(captions) + "\n", encoding="utf-8")


@pytest.fixture
def workplace(
    tmp_path: Path, folder_of: dict[str, str], image_folder_of: dict[str, str], old_folder: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a folder that holds, in miniature, every file that the pages' examples read; it is the current one."""
    old = describe_old(Fingerprint.from_string("clip-b32"), dim=8)
    model = XbtModel.from_encoder(folder_of["clip"], old=old, adapters={"lora": {"rank": 2}, "prompts": 2})
    model.export(tmp_path / "runs/clip_b32_to_l14/xbt/model")
    shutil.copytree(old_folder, tmp_path / "openai/clip-vit-base-patch32")
    shutil.copytree(folder_of["clip"], tmp_path / "openai/clip-vit-large-patch14")
    shutil.copytree(image_folder_of["resnet"], tmp_path / "microsoft/resnet-50")
    for name in ("sentence-transformers/all-MiniLM-L6-v2", "intfloat/e5-base-v2"):
        save_stand_in(tmp_path / name, "sentence-transformers", 8)
    (tmp_path / "texts.txt").write_text("".join(f"{row} sentences about a dog\n" for row in range(40)))
    take_photos(tmp_path / "photos")
    generator = np.random.default_rng(0)
    to_old, to_new = generator.standard_normal((12, 8)), generator.standard_normal((12, 16))
    corpus = generator.standard_normal((300, 12))
    things = generator.standard_normal((60, 12))
    (tmp_path / "corpus").mkdir()
    for name, matrix in (("old", to_old), ("new", to_new)):
        np.save(tmp_path / "corpus" / f"{name}.npy", normalise_rows((corpus @ matrix).astype(np.float32)))
        noisy = ((things + 0.3 * generator.standard_normal(things.shape)) @ matrix for _ in range(2))
        image, text = (normalise_rows(rows.astype(np.float32)) for rows in noisy)
        write_embeds(tmp_path / "embeddings" / name, [f"thing-{row}" for row in range(60)], image=image, text=text)
    np.save(tmp_path / "old_vectors.npy", unit_vectors(120, 8))
    with gzip.open(tmp_path / "passages.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"id": f"passage-{row}", "text": f"{row} things"}) + "\n" for row in range(120))
    (tmp_path / "my_provider.py").write_text(PROVIDER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("undrawn")
def test_marked_examples_run(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Page after page: the files that an example writes are there for the next page, its names are not."""
    monkeypatch.setitem(METHODS, "line", METHODS["ridge"])  # so that it is deleted after the test, too
    monkeypatch.delitem(METHODS, "line")
    monkeypatch.syspath_prepend(workplace)
    assert {language for _, language, _ in EXAMPLES} == {"python", "sh"}
    names: dict[str, dict[str, Any]] = {}
    for page, language, code in EXAMPLES:
        if language == "sh":
            for words in commands_of(code):  # what is here in miniature is too little to show anything
                type_in([*words, *["--allow-worse"] * (words[1] == "map")])
        elif written := re.match(r"# (\w+\.py)\n", code):  # a file of the reader's
            Path(written[1]).write_text(code, encoding="utf-8")
        else:
            exec(compile(code, page, "exec", dont_inherit=True), names.setdefault(page, {}))  # noqa: S102 - our own pages
    for page in ("docs/README.md", "docs/recipes.md"):
        assert names[page]["queries"].shape == (2, 8)
        np.testing.assert_allclose(names[page]["queries"].norm(dim=-1), 1, rtol=1e-5)
    for method in ("xbt", "bct"):
        assert type(AutoModel.from_pretrained(workplace / "runs" / method)) is METHODS[method]
    assert (workplace / "runs/judged/report/report.html").exists()
    printed = capsys.readouterr().out
    assert "clip-b32@" in printed, "the versions whose indexes may be searched"
    assert "(2, 8)" in printed, "rows of the cache"


LINE = next(code for page, _, code in EXAMPLES if page == "docs/add_a_method.md" and "class LineModel" in code)


def install_as_package(folder: Path) -> str:
    (folder / "my_line.py").write_text(LINE, encoding="utf-8")
    (folder / "my_line-1.dist-info").mkdir()
    (folder / "my_line-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my_line\nVersion: 1\n")
    (folder / "my_line-1.dist-info" / "entry_points.txt").write_text("[xcompat.methods]\nline = my_line\n")
    return "line"


def copy_into_xcompat(folder: Path) -> str:
    shutil.copytree(ROOT / "xcompat", folder / "xcompat", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "xcompat" / "methods" / "line.py").write_text(f'"""A line."""\n\n{LINE}', encoding="utf-8")
    return "line"


def write_file(folder: Path) -> str:
    (folder / "line.py").write_text(LINE, encoding="utf-8")
    return f"{folder / 'line.py'}:LineModel"


LOAD = """
import xcompat
from transformers import AutoModel
model = AutoModel.from_pretrained("runs/line/model", trust_remote_code=True)
print(type(model).__name__, model.config.bias)
"""


COMMAND = """
from xcompat.cli.opening import load_model
load_model("runs/line").model.save_pretrained("copy")
"""


def require_named_code(folder: Path, file: Path) -> None:
    """Check that a command asks nothing, runs only the code that XCOMPAT_CODE names, and keeps it with the model."""
    saved = folder / "runs/line/model/line.py"
    code = saved.read_text(encoding="utf-8")
    saved.write_text("open('ran', 'w')\n", encoding="utf-8")
    done = warm.run("-c", COMMAND, folder=folder)
    assert "Do you wish" not in done.stdout and not (folder / "ran").exists()
    assert "read it, and if you trust it, set the environment variable XCOMPAT_CODE=runs/line/model/line.py" in done.stderr
    done = warm.run("-c", COMMAND, folder=folder, XCOMPAT_CODE=str(file))
    assert done.returncode == 0 and not (folder / "ran").exists(), done.stderr
    assert (folder / "copy/line.py").read_text(encoding="utf-8") == code
    done = warm.run("-c", COMMAND, folder=folder, XCOMPAT_CODE="lines.py")
    assert "XCOMPAT_CODE: lines.py does not exist" in done.stderr


@pytest.mark.parametrize("place", [write_file, install_as_package, copy_into_xcompat])
def test_the_example_method_trains_from_a_recipe(
    place: Callable[[Path], str], tmp_path: Path, folder_of: dict[str, str], old_folder: str, pairs_folder: str
) -> None:
    """A method is one file and no other line: a dry run, a training, and a program that loads the model."""
    packages = tmp_path / "packages"
    packages.mkdir()
    recipe = tmp_path / "line.yaml"
    data = {"embeddings_of": "images", "pairs": {"path": pairs_folder}, "test": {"path": pairs_folder}}
    training = {"max_steps": 2, "per_device_train_batch_size": 8}
    raw = {"method": place(packages), "old": old_folder, "new": folder_of["clip"], "options": {"bias": False}, "data": data}
    recipe.write_text(yaml.safe_dump(raw | {"training": training}), encoding="utf-8")
    path = f"import sys; sys.path.insert(0, {str(packages)!r})\n"
    more = ["--dry-run"] if place is install_as_package else []
    done = warm.run("-c", f"{path}from xcompat import cli; cli.main()", "train", recipe, *more, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    if more:
        return
    saved = json.loads((tmp_path / "runs/line/model/config.json").read_text(encoding="utf-8"))
    assert (saved["model_type"], saved["bias"]) == ("xcompat-line", False)
    if place is write_file:
        done = warm.run("-c", LOAD, folder=tmp_path)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "LineModel False", done.stderr
        require_named_code(tmp_path, packages / "line.py")


ELSEWHERE = ("methods", "tutorials")
"""Folders whose blocks all run, in tests of their own."""
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
NOT_RUN_IN_FOLDER = re.compile(r"<!-- not run in this folder: (\S.*) -->")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMAND_LINE: Any = typer.main.get_command(cli.app)


class Block(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are not run. What is indented without a fence is commands."""
    readme = page.parent / "README.md"
    folder = NOT_RUN_IN_FOLDER.search(readme.read_text(encoding="utf-8")) if readme.exists() else None
    found = []
    tokens = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    for before, token in zip([None, *tokens], tokens, strict=False):
        language = {"fence": token.info, "code_block": "sh"}.get(token.type)
        comment = before.content if before is not None and before.type == "html_block" else ""
        if language in ("sh", "python") and "<!-- runnable -->" not in comment:
            own = NOT_RUN.search(comment) or folder
            place = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
            found.append(Block(place, token.map[0] + 1 if token.map else 0, language, token.content, own[1] if own else ""))
    return found


ALL_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
BLOCKS = [block for page in ALL_PAGES if page.parent.name not in ELSEWHERE for block in blocks_of(page)]


def all_commands_of(block: str) -> list[list[str]]:
    """Return the words of each command, without comments, assignments and files of output.

    A backslash continues a line; ``&&`` and ``|`` end a command.
    """
    commands: list[list[str]] = []
    for line in block.replace("\\\n", " ").splitlines():
        words = re.sub(r"\0>\0[^\0]+", "", "\0".join(shlex.split(line, comments=True))).split("\0")
        words = [word for word in words if word]
        while words and re.fullmatch(r"[A-Za-z_]+=.*", words[0]):
            words.pop(0)
        for word in words and ["&&", *words]:
            commands.append([]) if word in ("&&", "|") else commands[-1].append(word)
    return commands


def check(words: list[str]) -> None:
    """Refuse a command whose program, verb, option or file does not exist."""
    program, *arguments = words
    if program == "xcompat":
        check_xcompat(arguments)
    elif (program, *arguments[:1]) == ("accelerate", "launch"):
        launched = launch_command_parser().parse_args(arguments[1:])
        assert (ROOT / launched.config_file).exists()
        check_python(["-m", launched.training_script, *launched.training_script_args])
    elif program == "python":
        check_python(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(arguments) <= set(targets), f"no target of the Makefile: {words}"
    else:
        assert program in ("pip", "uv", "echo", "jq", "tail", "embedding-atlas"), f"{program} is not known here"
    asked = [extra for word in words for extra in re.findall(r"^xcompat\[([\w,]+)\]$", word)]
    assert {name for extras in asked for name in extras.split(",")} <= set(EXTRAS), f"no such extra: {words}"


def check_python(arguments: list[str]) -> None:
    """Refuse a program of Python that is not there, or an option that its source does not name."""
    program, *given = arguments
    if program == "-m":
        assert given[0] == "xcompat"
        check_xcompat(given[1:])
        return
    source = (ROOT / program).read_text(encoding="utf-8")
    for option in (word.partition("=")[0] for word in given if word.startswith("--")):
        assert option in source or re.search(rf"\b{option[2:].replace('-', '_')}:", source), f"{program} has no option {option}"


def check_xcompat(arguments: list[str]) -> None:
    """Parse arguments as the command line does, without calling a verb, and look for the recipes that they name."""
    command, given = COMMAND_LINE, list(arguments)
    while hasattr(command, "commands"):
        if isinstance(command, QuickstartGroup) and given[:1] not in [[name] for name in command.commands]:
            given.insert(0, DEFAULT)
        assert given[0] in command.commands, f"no verb {given[0]}"
        command = command.commands[given.pop(0)]
    try:
        with mock.patch("xcompat.data.sources.local_files"):  # originals of examples do not exist
            command.make_context("xcompat", given)
    except Exception as error:
        raise AssertionError(f"xcompat {shlex.join(arguments)}: {error}") from error
    recipes = [word for word in arguments if word.startswith(("recipes/", "benchmarks/")) and word.endswith(".yaml")]
    assert [name for name in recipes if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_that_do_not_run_say_why_and_are_valid(block: Block) -> None:
    assert block.reason, f"write <!-- runnable --> before {block}, or <!-- not run: why -->"
    if block.language == "sh":
        commands = all_commands_of(block.code)
        assert commands
        for words in commands:
            check(words)
        return
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "xcompat":
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        elif isinstance(node, ast.Import):
            for name in (name.name for name in node.names if name.name.partition(".")[0] == "xcompat"):
                importlib.import_module(name)


def test_what_is_not_a_command_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nls\n```\n\n    xcompat nothing\n\n<!-- not run: no GPU -->\n```python\n1\n```\n\n```yaml\na:\n```\n")
    found = [(block.language, block.reason, block.line) for block in blocks_of(page)]
    assert found == [("sh", "", 1), ("sh", "", 5), ("python", "no GPU", 8)]
    commands = all_commands_of("A=1 make test && pip install x  # why\nxcompat a \\\n  b\n")
    assert commands == [["make", "test"], ["pip", "install", "x"], ["xcompat", "a", "b"]]
    for wrong in (
        "ls",
        "xcompat map --old a --new b --nothing c",
        "xcompat train recipes/nothing.yaml",
        "make nothing",
        "pip install xcompat[nothing]",
        "python benchmarks/scaling.py --nothing 3",
        "accelerate launch --config_file accelerate_configs/cpu.yaml -m xcompat trane RECIPE",
    ):
        with pytest.raises((AssertionError, FileNotFoundError, SystemExit)):
            check(shlex.split(wrong))


FOLDER = DOCS / "methods"
sys.path.insert(0, str(DOCS))

import options  # noqa: E402
from pictures import PICTURES, as_svg  # noqa: E402

METHOD_TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
OVERVIEW = (DOCS / "methods.md").read_text(encoding="utf-8")
OPTIONS_OF_MANY = OVERVIEW[OVERVIEW.index("## Options") :].split("## Shared options")
SECTIONS = ["Loss", "When to use it", "Run it", "Options", "Differences from the paper", "Results", "Paper"]
COLUMNS = {name for method in METHODS.values() for name in (*method.columns, *method.columns_if_known)} | {"labels"}


def section(page: str, name: str) -> str:
    return re.split(r"^## .*\n", page, flags=re.MULTILINE)[1 + SECTIONS.index(name)]


def test_every_method_has_a_page_a_picture_and_current_options() -> None:
    assert set(METHOD_TEXTS) == set(PICTURES) == {path.stem for path in FOLDER.glob("*.svg")} == set(METHODS)
    assert sorted(re.findall(r"^\| \[`(\w+)`\]\(methods/\1\.md\) \|", OVERVIEW, re.MULTILINE)) == sorted(METHODS)
    assert [file.name for file, text in options.files().items() if file.read_text(encoding="utf-8") != text] == []
    assert {model.__module__.rpartition(".")[2]: name for name, model in METHODS.items()} == {name: name for name in METHODS}
    told = options.meanings_of(METHODS["oca"].config_class)
    assert told["compat_weight"] == "the paper's λ1." and told["old_scale"].startswith("factor on cosines")
    assert "| `classified` | `new_part` | the new classifier's input" in options.table_of("bt2")
    assert options.shared_table().count("`triplet`") == 1, "choices that the docstring does not name"


@pytest.mark.parametrize("method", METHODS)
def test_pages_pictures_and_options_are_current(method: str) -> None:
    page = METHOD_TEXTS[method]
    assert re.findall(r"^## (.*)", page, re.MULTILINE) == SECTIONS
    assert all(section(page, name).strip() for name in SECTIONS)
    ((described, file),) = re.findall(r"!\[(.+)\]\((.+)\)", page)
    assert file == f"{method}.svg" and len(described) > 60, "the picture in words, for whoever does not see it"
    equations = re.findall(r"```math\n(.*?)```", page, re.DOTALL)
    assert equations and not [each for each in equations if "\\" in convert(each)], "a command that latex2mathml does not know"
    assert "$" not in page, "inline equations are words"
    picture, model = PICTURES[method], METHODS[method]
    assert (FOLDER / f"{method}.svg").read_bytes() == as_svg(picture)
    assert (len(picture.gallery) > 1) == model.maps_galleries_with({}), "mapped once, or left as it is"
    states = {part.state for line in picture.lanes for part in line.parts}
    assert ("solved" in states) == model.is_solved and bool(states & {"trained", "adapted"}) != model.is_solved
    assert options.with_table(page, options.table_of(method)) == page
    listed = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.+) \|$", section(page, "Options"), re.MULTILINE)
    linked = re.findall(r"^\[Shared options\].*", section(page, "Options"), re.MULTILINE)
    shared = re.findall(r"`(\w+)`", "".join(linked))
    of_all, for_some = (re.findall(r"^\| `(\w+)` \| `.*?` \| .+ \|$", part, re.MULTILINE) for part in OPTIONS_OF_MANY)
    assert set(shared) <= set(for_some)
    assert sorted([*(name for name, _, _ in listed), *shared, *of_all]) == sorted(usual_options(method))
    (told,) = re.findall(r"^\| Data \|(.*)\|$", section(page, "When to use it"), re.MULTILINE)
    needed = {*model.columns, *model.columns_if_known} | ({"labels"} if issubclass(model, ClassifiedModel) else set())
    assert set(re.findall(r"`(\w+)`", told)) & COLUMNS == needed


@pytest.mark.parametrize("method", mostly_nightly(METHODS, ("bct", "whitened").__contains__))
@pytest.mark.usefixtures("undrawn")
def test_recipes_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos/captioned", "photos/train/cat", "photos/test/cat"):
        draw(tmp_path / name / "a.png")
    (tmp_path / "photos/captioned/metadata.csv").write_text("file_name,caption\na.png,a dog\n", encoding="utf-8")
    (tmp_path / "texts.txt").write_text("a dog\n", encoding="utf-8")
    shown = section(METHOD_TEXTS[method], "Run it")
    ((file, recipe),) = re.findall(r"```yaml\n# (\S+)\n(.*?)```", shown, re.DOTALL)
    (block,) = re.findall(r"```sh\n(.*?)```", shown, re.DOTALL)
    (command,) = commands_of(block)
    (tmp_path / file).write_text(recipe, encoding="utf-8")
    assert f"method: {method}" in recipe
    type_in(command)
    assert f"✓ {method} runs from end to end on stand-ins" in capsys.readouterr().out


PACKAGES = ["xcompat", *(each.name for each in pkgutil.walk_packages(xcompat.__path__, "xcompat.") if each.ispkg)]
SHOWN = ["li", "table", "tr", "pre", "blockquote", "h1", "h2", "h3", "h4", "img"]
"""Elements of which GitHub and the site must show as many."""


def theme(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "theme" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Elements(HTMLParser):
    """Start tags of a page, those inside of its article apart; what a page loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.article: Counter[str] = Counter()
        self.loaded: list[str] = []
        self._inside = 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag != "a" and not (tag == "link" and told.get("rel") in ("canonical", "next", "prev")):
            self.loaded += [value for name in ("src", "href", "data", "srcset") if (value := told.get(name))]
        self._inside += tag == "article"
        if self._inside:
            self.article[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "article"


def test_public_names_and_what_pages_import_have_an_api_page(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        inventory = Inventory.parse_sphinx(file)
    public = [f"{package}.{name}" for package in PACKAGES for name in getattr(importlib.import_module(package), "__all__", ())]
    assert "xcompat.methods.XbtModel" in public
    imports = re.compile(r"^from (xcompat[\w.]*) import ([\w, ]+)", re.MULTILINE)
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    told = [block for page in pages for block in imports.findall(page.read_text(encoding="utf-8"))]
    imported = {(module, name) for module, names in told for name in names.split(", ")}
    assert ("xcompat.retrieval", "Gallery") in imported
    lazy = {name: f"xcompat.methods.{name}" for name in importlib.import_module("xcompat.methods").__all__}
    public += [lazy.get(name, f"xcompat.{name}") if module == "xcompat" else f"{module}.{name}" for module, name in imported]
    assert sorted(name for name in public if name not in inventory and not name.endswith("__")) == []
    assert {item.uri.split("/")[0] for item in inventory.values()} == {"api"}


def test_the_site_loads_nothing_and_equals_github(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        elsewhere = [address for address in Elements(page).loaded if re.match(r"(?:[a-z]+:)?//", address)]
        assert elsewhere == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", style.read_text(encoding="utf-8")) == [], style
    pages = [*DOCS.rglob("*.md"), *(ROOT / name for name in theme("hooks").OUTSIDE)]
    for page in pages:
        path = page.relative_to(DOCS) if page.is_relative_to(DOCS) else Path(page.name)
        if path.parts[0] == "api" and path.name != "README.md":
            continue
        shown = site / (path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))
        there, here = Elements(shown).article, as_github_shows(page)
        assert {tag: there[tag] for tag in SHOWN} == {tag: here[tag] for tag in SHOWN}, path


def as_github_shows(page: Path) -> Counter[str]:
    """Return how many elements of each kind CommonMark with GitHub's tables makes of a page."""
    count: Counter[str] = Counter()
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    for token in [each for block in tokens for each in (block, *(block.children or ()))]:
        equation = token.type == "fence" and token.info == "math"
        count["pre"] += token.type in ("fence", "code_block") and not equation
        count[token.tag] += token.nesting == 1 or token.type == "image"
    return count
