"""What the Trainer and the methods take, read from their source: importing them takes seconds, and a misspelt key should not."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field

PACKAGE = Path(__file__).resolve().parents[1]
KNOWN_TYPES: dict[str, Any] = {"Any": Any, "Annotated": Annotated, "Field": Field, "Literal": Literal, "__builtins__": {}}
KNOWN_TYPES |= {each.__name__: each for each in (bool, int, float, str, list, dict)}
"""What a type may be made of to be checked here; one with another name passes, and is checked when its library is imported."""
PREFIX = "xcompat-"
BASE = "CompatConfig"


def trainer_fields() -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` with their types, as far as these are Python's own; else ``Any``.

    Returns:
        Nothing if another version of transformers declares them in several classes.

    Example:
        >>> trainer_fields()["max_steps"], trainer_fields()["optim"]
        (<class 'int'>, typing.Any)
    """
    declared = _classes(_transformers("training_args.py")).get("TrainingArguments")
    return _fields(declared) if declared is not None and not declared.bases else {}


def trackers() -> list[str]:
    """Return the names that ``report_to`` may hold.

    Example:
        >>> {"tensorboard", "trackio", "wandb"} <= set(trackers())
        True
    """
    for node in _parsed(_transformers("integrations/integration_utils.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATION_TO_CALLBACK":
            return list(map(ast.literal_eval, node.value.keys))  # type: ignore[attr-defined]  # a dictionary
    return []


def method_names() -> list[str]:
    """Return the names of all methods.

    Example:
        >>> "xbt" in method_names()
        True
    """
    return sorted(
        found[1] for text in _texts().values() if (found := re.search(rf'^    model_type = "{PREFIX}(.+)"', text, re.M))
    )


def method_options(method: str) -> dict[str, Any]:
    """Return what a method's configuration adds to that of all models, with the types, as :func:`trainer_fields` does.

    Args:
        method: one of :func:`method_names`.

    Example:
        >>> sorted(method_options("xbt"))
        ['train_encoder', 'train_projection']
    """
    found: dict[str, Any] = {}
    name = _declared(f'model_type = "{PREFIX}{method}"')
    while name != BASE:
        found = _fields(_class(name)) | found
        name = ast.unparse(_class(name).bases[0])
    return found


def is_solved(method: str) -> bool:
    """Return whether a method is solved in closed form, so that the training section is not for it.

    Args:
        method: one of :func:`method_names`.

    Example:
        >>> is_solved("procrustes"), is_solved("xbt")
        (True, False)
    """
    configuration = _declared(f'model_type = "{PREFIX}{method}"')
    name = _declared(f"config_class = {configuration}")
    while name in _texts():
        if "is_solved = True" in map(ast.unparse, _class(name).body):
            return True
        name = ast.unparse(_class(name).bases[0])
    return False


@cache
def _texts() -> dict[str, str]:
    """Return the source of each class of methods and of what they share; parsing all of them takes ten times as long."""
    files = [*(PACKAGE / "methods").glob("*.py"), *(PACKAGE / "models").glob("*.py")]
    parts = (part for file in files for part in re.split(r"^(?=\S)", file.read_text(encoding="utf-8"), flags=re.M))
    return {found[1]: part for part in parts if (found := re.match(r"class (\w+)", part))}


@cache
def _declared(line: str) -> str:
    """Return the name of the class that has a line of its own body."""
    return next(name for name, text in _texts().items() if re.search(rf"^    {re.escape(line)}$", text, re.M))


@cache
def _class(name: str) -> ast.ClassDef:
    (declared,) = ast.parse(_texts()[name]).body
    assert isinstance(declared, ast.ClassDef)
    return declared


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _parsed(file).body if isinstance(node, ast.ClassDef)}


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _transformers(inside: str) -> Path:
    spec = find_spec("transformers")  # looks for it, and imports nothing
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / inside


def _fields(declared: ast.ClassDef) -> dict[str, Any]:
    """Return the annotated names of a class with their types; ``Any`` for a type that is none of :data:`KNOWN_TYPES`."""
    return {
        node.target.id: _type(ast.unparse(node.annotation))
        for node in declared.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }


@cache
def _type(annotation: str) -> Any:  # noqa: ANN401 - a type annotation
    holder = type("Holder", (), {"__annotations__": {"it": annotation}})
    try:
        return get_type_hints(holder, KNOWN_TYPES, include_extras=True)["it"]
    except NameError:
        return Any
