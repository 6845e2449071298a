"""Processes that have imported the libraries already: importing them takes ten seconds of a core, more than most tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

# One process imports these, and every other is a fork of it. Nothing of xcompat: each process imports that anew.
LIBRARIES = ("torch._dynamo", "torch.distributed.fsdp", "transformers.trainer", "transformers.models.clip.modeling_clip", "peft")
multiprocessing.set_forkserver_preload(list(LIBRARIES))


def spawn(function: Callable[..., object], arguments: tuple[Any, ...], processes: int = 2) -> None:
    """Run a function in several processes at once, and wait for them.

    Args:
        function: takes the process's number and the arguments.
        arguments: the same for each.
        processes: how many.
    """
    torch.multiprocessing.start_processes(function, arguments, processes, start_method="forkserver")
