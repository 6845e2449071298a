"""Origin of a result: versions, machine, source revision and command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from xcompat.core.errors import without_secrets

LIBRARIES = ("xcompat", "transformers", "peft", "accelerate", "datasets", "open_clip_torch", "numpy")


def provenance() -> dict[str, object]:
    """Describe this run for its folder and report.

    Returns:
        ``command``, ``versions``, ``machine``, ``git_revision`` (None outside a checkout), ``processes``.
    """
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{_cpu_name()}, {os.cpu_count()} cores"
    return {
        "command": without_secrets(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        "versions": {"python": platform.python_version(), "torch": torch.__version__} | _versions(),
        "machine": {"platform": platform.platform(), "device": device, "threads": torch.get_num_threads()},
        "git_revision": _git_revision(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


@cache  # the versions that run, even if others are installed or checked out meanwhile
def _versions() -> dict[str, str]:
    return {name: installed_version(name) for name in LIBRARIES}


def installed_version(name: str) -> str:
    """Return the installed version of a distribution without importing it, or ``not installed``."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@cache
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def _git_revision() -> str | None:
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return None
    described = subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or None
