"""YAML within limits of size and depth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from xcompat.core.errors import XcompatError

MOST_BYTES = 2**20
MOST_VALUES = 100_000
"""Keys and values of a file, with aliases expanded."""
MOST_LEVELS = 64
MOST_BITS = 64
"""Maximum size of an integer."""


class LimitedLoader(yaml.SafeLoader):
    """YAML's safe loader, which refuses deep or large documents before it constructs objects."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._measured: dict[int, tuple[int, int]] = {}  # node id -> values and levels, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401 - as yaml has it
        """Compose a node and measure it."""
        self._level += 1
        if self._level > MOST_LEVELS:
            raise _TooMuch(f"more than {MOST_LEVELS} levels")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._level -= 1
        if node is not None and not is_alias:
            self._measured[id(node)] = self._measure(node)
        return node

    def _measure(self, node: yaml.Node) -> tuple[int, int]:
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for each in inside for part in (each if isinstance(each, tuple) else (each,))]
        if any(id(part) not in self._measured for part in parts):
            raise _TooMuch("a part that contains itself")
        measured = [self._measured[id(part)] for part in parts]
        values, levels = 1 + sum(each[0] for each in measured), 1 + max((each[1] for each in measured), default=0)
        if values > MOST_VALUES or levels > MOST_LEVELS:
            raise _TooMuch(f"more than {MOST_VALUES:,} values or {MOST_LEVELS} levels, with aliases expanded")
        return values, levels

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Parse an integer of limited size."""
        try:
            value: int = super().construct_yaml_int(node)
        except ValueError as error:  # of thousands of digits, or none
            raise _TooMuch(f"an unreadable integer ({node.value[:20]}...)") from error
        if value.bit_length() > MOST_BITS:
            raise _TooMuch(f"an integer of more than {MOST_BITS} bits ({node.value[:20]}...)")
        return value


LimitedLoader.add_constructor("tag:yaml.org,2002:int", LimitedLoader.construct_yaml_int)


class RecipeLoader(LimitedLoader):
    """YAML's safe loader, which reads 1e-4 as a number (YAML 1.1 needs 1.0e-4)."""


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\.inf|\.nan)$", re.IGNORECASE),
    list("-+0123456789."),
)


class _TooMuch(yaml.YAMLError):
    """A document beyond the limits of this module."""


def parse_yaml(text: str, loader: type[LimitedLoader] = LimitedLoader) -> object:
    """Parse YAML.

    Args:
        text: at most `MOST_BYTES` characters.
        loader: its class.

    Raises:
        yaml.YAMLError: invalid YAML, or beyond the limits.

    Example:
        >>> parse_yaml("{a: [1, two]}")
        {'a': [1, 'two']}
    """
    if len(text) > MOST_BYTES:
        raise _TooMuch(f"{len(text):,} characters, more than the limit of {MOST_BYTES:,}")
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506 - a subclass of the safe loader
    except ValueError as error:  # such as the impossible date 2026-13-01
        raise _TooMuch(str(error)) from error


def read_yaml(path: Path, loader: type[LimitedLoader] = LimitedLoader) -> Any:  # noqa: ANN401 - whatever the YAML holds
    """Read a YAML file.

    Args:
        path: existing file.
        loader: its class.

    Raises:
        XcompatError: invalid YAML, or beyond the limits.
    """
    if path.stat().st_size > MOST_BYTES:
        raise XcompatError(
            f"{path} has {path.stat().st_size:,} bytes, more than the limit of {MOST_BYTES:,}; choose another file"
        )
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise XcompatError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from None
