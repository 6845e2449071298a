"""Command line: one module per group of verbs, without any computation."""

from xcompat.cli.app import app as app
from xcompat.cli.app import main as main
