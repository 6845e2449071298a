"""Options of the Trainer and methods, parsed from source to avoid slow imports."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field

if TYPE_CHECKING:
    from xcompat.models import CompatModel

PACKAGE = Path(__file__).resolve().parents[1]
KNOWN_TYPES: dict[str, Any] = {"Any": Any, "Annotated": Annotated, "Field": Field, "Literal": Literal, "__builtins__": {}}
KNOWN_TYPES |= {each.__name__: each for each in (bool, int, float, str, list, dict)}
"""Names in types that can be checked here; other types need their library."""
PREFIX = "xcompat-"
BASE = "CompatConfig"


def trainer_fields() -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` with types; ``Any`` for types other than built-in types.

    Returns:
        Field name -> type; empty if transformers declares them in several classes.

    Example:
        >>> trainer_fields()["max_steps"], trainer_fields()["optim"]
        (<class 'int'>, typing.Any)
    """
    declared = _classes(_transformers("training_args.py")).get("TrainingArguments")
    return _fields(declared) if declared is not None and not declared.bases else {}


def trackers() -> list[str]:
    """Return valid names for ``report_to``.

    Example:
        >>> {"tensorboard", "trackio", "wandb"} <= set(trackers())
        True
    """
    for node in _parse_file(_transformers("integrations/integration_utils.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INTEGRATION_TO_CALLBACK":
            return list(map(ast.literal_eval, node.value.keys))  # type: ignore[attr-defined]  # a dictionary
    return []


def method_names() -> list[str]:
    """Return the names of all methods, including registered ones.

    Example:
        >>> "xbt" in method_names()
        True
    """
    declared = (re.search(_assignment("model_type", rf"{PREFIX}([\w-]+)"), text, re.M) for text in _texts().values())
    imported = getattr(sys.modules.get("xcompat.methods"), "METHODS", ())
    return sorted({*(found[1] for found in declared if found), *imported})


def method_options(method: str) -> dict[str, Any]:
    """Return a method's own options with types.

    Args:
        method: from :func:`method_names`.

    Example:
        >>> sorted(method_options("xbt"))
        ['train_encoder', 'train_projection']
    """
    found: dict[str, Any] = {}
    configuration = _find_class("model_type", f"{PREFIX}{method}")
    if (ancestry := _read_ancestry(configuration)) is None:
        return _import_options(method)
    for declared in ancestry:
        found = _fields(declared) | found
    return found


def is_solved(method: str) -> bool:
    """Return whether a method is solved in closed form.

    Args:
        method: from :func:`method_names`.

    Example:
        >>> is_solved("procrustes"), is_solved("xbt")
        (True, False)
    """
    name = _find_class("config_class", _find_class("model_type", f"{PREFIX}{method}"))
    if name not in _texts():
        return _import_method(method).is_solved
    while name in _texts():
        if re.search(r"^    is_solved\b.*= True\b", _texts()[name], re.M):
            return True
        name = _base_of(_class(name))
    return False


def _read_ancestry(name: str) -> list[ast.ClassDef] | None:
    """Return a configuration and its parents; None if a source is missing."""
    ancestry = []
    while name != BASE:
        if name not in _texts():
            return None
        ancestry.append(_class(name))
        name = _base_of(ancestry[-1])
    return ancestry


def _base_of(declared: ast.ClassDef) -> str:
    return ast.unparse(declared.bases[0]) if declared.bases else ""


def _import_method(method: str) -> type[CompatModel]:
    from xcompat.methods import METHODS

    return METHODS[method]


def _import_options(method: str) -> dict[str, Any]:
    import torch

    from xcompat.models import CompatConfig

    configuration = _import_method(method).config_class
    own = {field.name for field in fields(configuration)} - {field.name for field in fields(CompatConfig)}
    hints = get_type_hints(configuration, localns={"torch": torch}, include_extras=True)
    return {name: hints[name] for name in own}


@cache
def _texts() -> dict[str, str]:
    """Return each class's source; parsing all of them is ten times slower."""
    files = [*(PACKAGE / "methods").glob("*.py"), *(PACKAGE / "models").glob("*.py")]
    parts = (part for file in files for part in re.split(r"^(?=\S)", file.read_text(encoding="utf-8"), flags=re.M))
    return {found[1]: part for part in parts if (found := re.match(r"class (\w+)", part))}


def _assignment(name: str, value: str) -> str:
    """Return a pattern for an assignment in a class."""
    return rf"""^    {name}(?:: [^=]+)? = ["']?{value}["']?(?:\s*#.*)?$"""


@cache
def _find_class(name: str, value: str) -> str:
    """Return the class that assigns this value; empty if not found."""
    pattern = _assignment(name, re.escape(value))
    return next((found for found, text in _texts().items() if re.search(pattern, text, re.M)), "")


@cache
def _class(name: str) -> ast.ClassDef:
    (declared,) = ast.parse(_texts()[name]).body
    assert isinstance(declared, ast.ClassDef)
    return declared


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _parse_file(file).body if isinstance(node, ast.ClassDef)}


@cache
def _parse_file(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _transformers(inside: str) -> Path:
    spec = find_spec("transformers")  # without importing it
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / inside


def _fields(declared: ast.ClassDef) -> dict[str, Any]:
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
