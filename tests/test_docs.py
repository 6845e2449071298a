"""Documents match the code: links lead somewhere, tables are complete, marked examples run, and others are valid."""

from __future__ import annotations

import ast
import gzip
import importlib
import importlib.metadata
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import typer
import warm
import yaml
from accelerate.commands.launch import launch_command_parser
from markdown_it import MarkdownIt
from PIL import Image
from transformers import AutoModel
from typing_in import commands_of, type_in

import xcompat
from xcompat import Fingerprint, XbtModel, cli
from xcompat.cli.quickstart import DEFAULT, QuickstartGroup
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import METHODS
from xcompat.models import describe_old
from xcompat.training.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
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
RECIPES = [
    (name, recipe, text)
    for name, page in PAGES.items()
    for recipe, text in re.findall(r"```yaml\n# (\S+)\n(.*?)```", page, re.DOTALL)
]


def test_the_readme_is_read_in_five_minutes() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= README_LINES
    assert [line for line in lines if len(line) > README_WIDTH] == []


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


def test_every_way_to_launch_is_described() -> None:
    page = PAGES["docs/several_gpus.md"]
    rows = page[page.index("| name | for |") :].split("\n\n", 1)[0].splitlines()[2:]
    described = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert described == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_the_version_and_the_command_line_are_declared_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == xcompat.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == xcompat.__version__
    assert citation["license"] == project["license"]
    (installed,) = importlib.metadata.entry_points(group="console_scripts", name="xcompat")
    assert installed.load() is cli.main


def test_the_recipes_in_the_pages_are_some(tmp_path: Path) -> None:
    told = {"photos.yaml": (["map"], None), "upgrade.yaml": (["projection", "xbt"], 1e-4), "texts.yaml": (["ridge"], None)}
    assert {name for _, name, _ in RECIPES} == set(told)
    for page, name, text in RECIPES:
        (tmp_path / name).write_text(text, encoding="utf-8")
        stages = load_recipe(tmp_path / name).stages
        methods, rate = told[name]
        assert [stage.method for stage in stages] == methods, page
        assert all(stage.data.tests() and stage.training.get("learning_rate") == rate for stage in stages), page


def unit(rows_ND: np.ndarray) -> np.ndarray:
    return (rows_ND / np.linalg.norm(rows_ND, axis=1, keepdims=True)).astype(np.float32)


def take_photos(folder: Path) -> None:
    """Make a folder of images with captions, and one with a folder for each class."""
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
    tmp_path: Path,
    folder_of: dict[str, str],
    image_folder_of: dict[str, str],
    old_folder: str,
    texts_file: str,
    monkeypatch: pytest.MonkeyPatch,
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
    shutil.copy(texts_file, tmp_path / "texts.txt")
    take_photos(tmp_path / "photos")
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
    np.save(tmp_path / "old_vectors.npy", unit(generator.standard_normal((120, 8))))
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
    assert names["README.md"]["own"].shape == (60, 16)
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
    """Write a distribution with the example in an entry point group."""
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


DOCS = ROOT / "docs"
ELSEWHERE = ("methods", "tutorials")
"""Folders whose blocks all run, in tests of their own."""
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
NOT_RUN_IN_FOLDER = re.compile(r"<!-- not run in this folder: (\S.*) -->")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMAND_LINE: Any = typer.main.get_command(cli.app)


class Block(NamedTuple):
    """A block of code of a page that no test runs, and the reason that the page gives."""

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
def test_a_block_that_does_not_run_says_why(block: Block) -> None:
    assert block.reason, f"write <!-- runnable --> before {block}, or <!-- not run: why -->"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_its_commands_are_some(block: Block) -> None:
    commands = all_commands_of(block.code)
    assert commands
    for words in commands:
        check(words)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_its_python_imports_what_there_is(block: Block) -> None:
    tree = ast.parse(block.code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "xcompat":
            module = importlib.import_module(node.module)
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "xcompat":
                    importlib.import_module(name.name)


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
