"""The house rules that no linter holds: short files, short functions, every layer named by the contract that guards it."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


@cache
def parsed() -> dict[Path, list[ast.AST]]:
    """Return the nodes of every module."""
    modules = sorted((ROOT / "xcompat").rglob("*.py"))
    return {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in modules}


def test_files_and_functions_are_short() -> None:
    long = []
    for path, nodes in parsed().items():
        name = path.relative_to(ROOT).as_posix()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 600:
            long.append(f"{name}: {lines} lines")
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 60:
                    long.append(f"{name}, {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_no_imports_go_in_a_circle() -> None:
    """Neither when a function is called nor for a type: what is below does not know what is above."""
    graph = grimp.build_graph("xcompat", cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_what_only_one_layer_may_know_stays_there() -> None:
    frameworks = dict.fromkeys(("langchain_core", "llama_index", "haystack"), "integrations")
    homes = {"Trainer": "training", "peft": "encoders", "open_clip": "encoders", **frameworks}
    for path, nodes in parsed().items():
        layer = path.relative_to(ROOT / "xcompat").parts[0]
        for node in nodes:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            for known in (part.split(".")[0] for part in [*modules, *names]):
                assert homes.get(known, layer) == layer, f"{path} knows {known}, which only {homes[known]} may"


def test_every_table_folds_what_rich_would_cut() -> None:
    for path, nodes in parsed().items():
        names = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
        assert ("rich.table", "Table") not in names, f"{path}: the Table of xcompat.core.progress cuts nothing"


def test_every_dependency_is_imported_and_every_import_is_a_dependency() -> None:
    """The names differ for a few. The extra gpu brings one faiss: each overwrites the other's files."""
    called = (
        {"PIL": "pillow", "pillow_heif": "pillow-heif", "yaml": "pyyaml", "sklearn": "scikit-learn", "faiss": "faiss-cpu"}
        | {"open_clip": "open_clip_torch", "fontTools": "fonttools", "sentence_transformers": "sentence-transformers"}
        | {"langchain_core": "langchain-core", "llama_index": "llama-index-core", "haystack": "haystack-ai"}
        | {"qdrant_client": "qdrant-client", "sqlite_vec": "sqlite-vec"}
    )
    imported = set()
    for node in itertools.chain.from_iterable(parsed().values()):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    third_party = {called.get(name, name) for name in imported - set(sys.stdlib_module_names) - {"xcompat"}}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    optional = [requirement for extra in extras.keys() - {"dev", "gpu"} for requirement in extras[extra]]
    both = project["dependencies"], optional
    known, extra = ({re.split("[>[]", requirement)[0] for requirement in listed} for listed in both)
    assert known <= third_party and third_party - known <= extra and set(optional) <= set(extras["dev"])
    asked = project["dependencies"], extras["cpu"], extras["gpu"]
    faiss = [[name for name in names if name.startswith("faiss")] for names in asked]
    assert faiss == [[], ["faiss-cpu>=1.15"], ["faiss-gpu>=1.15"]]
