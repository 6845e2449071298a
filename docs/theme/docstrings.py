"""Docstrings as this project writes them, for griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import re

from griffe import Attribute, Class, Extension, Function, Object, Parameter, ParameterKind, Parameters

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ARGUMENTS = re.compile(r"^Args:$", re.MULTILINE)


class HouseStyle(Extension):
    """Read roles of Sphinx as code, ``Example:`` as examples, and ``Args:`` of a class without ``__init__`` as its fields."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        """Rewrite the docstring of an object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("Examples:", ROLE.sub(r"`\1`", obj.docstring.value))

    def on_class_members(self, *, cls: Class, **_: object) -> None:
        """Give a class of fields (pydantic, a configuration, a named tuple) the signature it is called by."""
        attributes = [
            member for member in cls.members.values() if isinstance(member, Attribute) and member.annotation is not None
        ]
        fields = [field for field in attributes if "instance-attribute" in field.labels]  # no property, no ClassVar
        is_dataclass = any("dataclass" in str(decorator.value) for decorator in cls.decorators)  # griffe knows these
        if cls.docstring is None or "__init__" in cls.members or is_dataclass or not fields:
            return
        if any(str(base) == "ABC" for base in cls.bases):  # nobody calls it: these are its attributes
            cls.docstring.value = ARGUMENTS.sub("Attributes:", cls.docstring.value)
            return
        kind = ParameterKind.keyword_only
        named = [
            Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
            for field in fields
            if not field.name.startswith("_")
        ]
        cls.set_member("__init__", Function("__init__", parameters=Parameters(Parameter("self"), *named)))
