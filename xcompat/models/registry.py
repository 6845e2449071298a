"""Registry of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from transformers import AutoConfig, AutoModel

from xcompat.core.errors import XcompatError
from xcompat.core.plugins import FILE_MODULES, is_file_class, load_class

if TYPE_CHECKING:
    from xcompat.models.base import CompatModel

M = TypeVar("M", bound="type[CompatModel]")
PREFIX = "xcompat-"
METHODS: dict[str, type[CompatModel]] = {}
"""Recipe name -> model class of each method."""


def register(model: M) -> M:
    """Make a method known to recipes and transformers' auto classes, as decorator of its model class.

    The name in recipes is ``config_class.model_type`` without the prefix ``xcompat-``. A model from a file is saved with the
    file, so ``AutoModel`` can load it elsewhere with ``trust_remote_code=True``.

    Args:
        model: a :class:`~xcompat.models.CompatModel` with its own ``config_class``.

    Returns:
        The model class.

    Raises:
        XcompatError: the type has no prefix, or another method has the same name.

    Example:
        >>> from xcompat.methods import RidgeModel
        >>> METHODS["ridge"] is register(RidgeModel)
        True
    """
    model_type = model.config_class.model_type
    name = model_type.removeprefix(PREFIX)
    if not name or name == model_type:
        raise XcompatError(f"{model.__name__}: model_type is {model_type!r}; set {PREFIX}NAME in its configuration")
    known = METHODS.get(name, model)
    if (known.__module__, known.__qualname__) != (model.__module__, model.__qualname__):
        raise XcompatError(
            f"{model.__name__}: {known.__module__}.{known.__qualname__} is also called {name!r}; choose another name"
        )
    METHODS[name] = model
    AutoConfig.register(model_type, model.config_class, exist_ok=True)
    AutoModel.register(model.config_class, model, exist_ok=True)
    if model.__module__.startswith(FILE_MODULES):
        model.register_for_auto_class()
        model.config_class.register_for_auto_class()
    return model


def load_method(name: str) -> type[CompatModel]:
    """Return the model class of a method, or of ``path.py:Class``.

    Args:
        name: name in a recipe.

    Raises:
        KeyError: the method is unknown.
        XcompatError: the file fails, or has no such model.
    """
    from xcompat.models.base import CompatModel

    if not is_file_class(name):
        return METHODS[name]
    model: type[CompatModel] = load_class(name, CompatModel)
    return register(model)
