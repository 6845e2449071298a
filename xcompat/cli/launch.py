"""``xcompat launch``: accelerate's launcher, with messages and exit codes of xcompat."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from typing import Annotated, NoReturn

import typer

from xcompat.core.errors import XcompatError

LAUNCHED = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Settings of the command: all words are passed on."""


def launch(
    arguments: Annotated[
        list[str], typer.Argument(metavar="[OPTIONS] COMMAND", help="Options of accelerate launch, then a command of xcompat.")
    ],
) -> None:
    """Run a command in several processes, as ``accelerate launch -m xcompat`` does, but without its tracebacks.

    Options: see [bold]accelerate launch --help[/bold].
    """
    sys.exit(launch_processes(arguments))


def launch_processes(arguments: list[str]) -> int:
    """Start the processes and wait for them. Ctrl-C reaches them, and they end as without a launcher.

    Args:
        arguments: options of ``accelerate launch``, then the words after ``xcompat``.

    Returns:
        The exit code of the first process that failed, else 0.

    Raises:
        XcompatError: accelerate refuses its options.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    parser.error = _refuse  # argparse prints a hundred lines of usage
    asked = parser.parse_args(["--module", *arguments])
    asked.training_script_args = [asked.training_script, *asked.training_script_args]
    asked.training_script = "xcompat"
    logging.disable(logging.ERROR)  # each process prints its own line
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # wait for the processes; they would ignore an ignored signal too
    try:
        launch_command(asked)
    except subprocess.CalledProcessError as error:
        return _shell_code(error.returncode)
    except ChildFailedError as error:
        return _shell_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return _shell_code(-error.sigval)
    except (ValueError, ImportError, OSError) as error:
        _refuse(str(error), error)
    finally:
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGINT, handler)
    return 0


def _refuse(message: str, cause: Exception | None = None) -> NoReturn:
    raise XcompatError(f"accelerate launch: {message}; for its options, run `accelerate launch --help`") from cause


def _shell_code(code: int) -> int:
    """Return a process's exit code as shells do: 128 + the number of the signal that ended it."""
    return code if code >= 0 else 128 - code
