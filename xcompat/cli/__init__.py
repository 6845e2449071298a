"""Command line: a module per verb group, without any computation."""

from xcompat.cli.app import app as app
from xcompat.cli.app import main as main
