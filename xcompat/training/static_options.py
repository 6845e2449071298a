"""Options of the Trainer and methods, without slow imports: from transformers' source, and from ``methods.json``."""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field

from xcompat.core.plugins import entry_point_names

if TYPE_CHECKING:
    from xcompat.models import CompatModel

METHODS_FILE = Path(__file__).resolve().parents[1] / "methods" / "methods.json"
"""Written by ``python docs/options.py``. A method that it lacks is imported instead."""
KNOWN_TYPES: dict[str, object] = {"Any": Any, "Annotated": Annotated, "Field": Field, "Literal": Literal, "__builtins__": {}}
KNOWN_TYPES |= {each.__name__: each for each in (bool, int, float, str, list, dict)}
"""Names in types that can be checked here; other types need their library."""


def trainer_fields() -> dict[str, object]:
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
    """Return the names of all methods, including registered ones and those of installed packages.

    Example:
        >>> "xbt" in method_names()
        True
    """
    own = {file.stem for file in METHODS_FILE.parent.glob("[a-z]*.py")}
    registry = sys.modules.get("xcompat.models.registry")
    return sorted({*own, *entry_point_names("xcompat.methods"), *getattr(registry, "METHODS", ())})


def method_options(method: str) -> dict[str, object]:
    """Return a method's own options with types.

    Args:
        method: from :func:`method_names`, or ``path.py:Class``.

    Example:
        >>> sorted(method_options("xbt"))
        ['train_encoder', 'train_projection']
    """
    if method in _read_methods():
        return {name: _type(hint) for name, hint in _read_methods()[method]["options"].items()}
    import torch

    from xcompat.models import CompatConfig

    configuration = _import_method(method).config_class
    own = {field.name for field in fields(configuration)} - {field.name for field in fields(CompatConfig)}
    hints = get_type_hints(configuration, localns={"torch": torch}, include_extras=True)
    return {name: hints[name] for name in own}


def is_solved(method: str) -> bool:
    """Return whether a method is solved in closed form.

    Args:
        method: from :func:`method_names`, or ``path.py:Class``.

    Example:
        >>> is_solved("procrustes"), is_solved("xbt")
        (True, False)
    """
    return _read_methods()[method]["is_solved"] if method in _read_methods() else _import_method(method).is_solved


def _import_method(method: str) -> type[CompatModel]:
    import xcompat.methods  # noqa: F401 - registers them
    from xcompat.models.registry import load_method

    return load_method(method)


@cache
def _read_methods() -> dict[str, Any]:
    return json.loads(METHODS_FILE.read_text(encoding="utf-8"))


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _parse_file(file).body if isinstance(node, ast.ClassDef)}


@cache
def _parse_file(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _transformers(inside: str) -> Path:
    spec = find_spec("transformers")  # without importing it
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / inside


def _fields(declared: ast.ClassDef) -> dict[str, object]:
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
