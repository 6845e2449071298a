"""Blocks of code in the pages that do not run: each says why, its commands are some, and its Python fits the package."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from markdown_it import MarkdownIt

from xcompat import cli
from xcompat.cli.quickstart import DEFAULT, QuickstartGroup

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = ("methods", "tutorials")
"""Folders whose blocks all run, in tests of their own."""
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
NOT_RUN_IN_FOLDER = re.compile(r"<!-- not run in this folder: (\S.*) -->")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMAND_LINE: Any = typer.main.get_command(cli.app)


class Block(NamedTuple):
    """A block of code of a page that no test runs.

    Args:
        page: path below the repository.
        line: where it begins.
        language: ``sh`` or ``python``.
        code: its text.
        reason: why it is not run; empty if the page does not say.
    """

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


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
BLOCKS = [block for page in PAGES if page.parent.name not in ELSEWHERE for block in blocks_of(page)]


def commands_of(block: str) -> list[list[str]]:
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
    commands = commands_of(block.code)
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
    commands = commands_of("A=1 make test && pip install x  # why\nxcompat a \\\n  b\n")
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
