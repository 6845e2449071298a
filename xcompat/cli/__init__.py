"""The command line: one module per group of verbs. Nothing is computed here."""

from xcompat.cli.app import ORDER, SELDOM, app, main

__all__ = ["ORDER", "SELDOM", "app", "main"]
