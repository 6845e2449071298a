"""Processes that have imported the libraries already: importing them takes ten seconds of a core, more than most tests."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch.multiprocessing

# One process imports these, and every other is a fork of it. Nothing of xcompat: each process imports that anew.
LIBRARIES = ("torch._dynamo", "torch.distributed.fsdp", "transformers.trainer", "transformers.models.clip.modeling_clip", "peft")
LIBRARIES += ("faiss", "matplotlib.figure", "pydantic", "rich.console", "scipy.stats", "sklearn.linear_model", "typer.main")
multiprocessing.set_forkserver_preload(list(LIBRARIES))


def spawn(function: Callable[..., object], arguments: tuple[Any, ...], processes: int = 2) -> None:
    """Run a function of the process's number and arguments in several processes at once, and wait for them."""
    torch.multiprocessing.start_processes(function, arguments, processes, start_method="forkserver")


@dataclass
class Started:
    """A program that runs in one process, or in one for each rank, which write stdout and stderr to two files."""

    processes: list[BaseProcess]
    files: tuple[str, str]

    def wait(self, seconds: float = 1200) -> CompletedProcess[str]:
        """Wait for the end; the exit code is 0 only if that of every process is."""
        for process in self.processes:
            process.join(seconds)
            assert process.exitcode is not None, f"it still runs after {seconds} s; it wrote {self.said()}"
        code = next((process.exitcode for process in self.processes if process.exitcode), 0)
        done = CompletedProcess([], code, *self.said())
        shutil.rmtree(Path(self.files[0]).parent)
        return done

    def said(self) -> list[str]:
        return [Path(file).read_text(encoding="utf-8") for file in self.files]


def start(*arguments: object, folder: Path, ranks: int = 1, **environment: str) -> Started:
    """Start Python in a folder with arguments as they are typed: ``-m MODULE``, ``-c CODE`` or a file, and the program's own.

    Several ranks are started as a launcher does. Libraries that are imported already have read the environment as it was.
    """
    place = Path(tempfile.mkdtemp())
    files = str(place / "out"), str(place / "err")
    for file in files:
        Path(file).touch()
    if ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
        environment |= {"LOCAL_WORLD_SIZE": str(ranks), "ACCELERATE_USE_CPU": "true"}
    processes = []
    for rank in range(ranks):
        own = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
        given = (list(map(str, arguments)), str(folder), own, files)
        processes.append(multiprocessing.get_context("forkserver").Process(target=_python, args=given))
        processes[-1].start()
    return Started(processes, files)


def run(*arguments: object, folder: Path, ranks: int = 1, **environment: str) -> CompletedProcess[str]:
    return start(*arguments, folder=folder, ranks=ranks, **environment).wait()


def wait_until(is_true: Callable[[], object], what: object = "", seconds: float = 120) -> None:
    ends = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < ends, what
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def _python(arguments: list[str], folder: str, environment: dict[str, str], files: tuple[str, str]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.update(environment)
    how, *rest = arguments
    gc.freeze()  # accelerate collects garbage after every training, and would look at each of the libraries' objects
    try:
        if how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a test's own
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(how).parent))
            runpy.run_path(how, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
