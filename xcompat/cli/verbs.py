"""Order of the verbs in help, and how help shows their options."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

SELDOM = "Less common"
ORDER = (
    *("demo", "quickstart", "map", "evaluate", "shadow", "plan", "gallery", "serve", "migrate", "export"),
    *("recipes", "train", "compare", "embed", "push", "find"),
)
"""Verbs in the order of use; those of :data:`SELDOM` follow."""


class Verbs(TyperGroup):
    """The verbs, listed in the order of use."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]  # typer's own context
        """Return the options before the verb; called before any help is shown."""
        _hide_flag_types(self)
        return super().get_params(ctx)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer's own context
        """Return the names of all verbs."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def _hide_flag_types(command: TyperCommand | TyperGroup) -> None:
    """Show flags as ``--overwrite``, not as ``--overwrite <bool>``."""
    options = [*command.params, command.get_help_option(typer.Context(command, **CONTEXT))]
    for option in options:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""
    for inner in command.commands.values() if isinstance(command, TyperGroup) else ():
        if isinstance(inner, TyperCommand | TyperGroup):
            _hide_flag_types(inner)


CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
