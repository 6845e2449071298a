"""Wheels for `make gpu` on a machine without network that has torch and transformers.

    python benchmarks/gpu/wheels.py wheels --torch 2.11 --python 3.12 [--have NAME ...]

It downloads what xcompat and faiss need, in the versions of constraints.txt, into folders of at most 60 MB for limited copies.
It leaves out packages that torch and transformers install, unless xcompat needs newer versions, and those of --have. On that
machine, run in the repository:

    pip install --no-index --no-deps wheels/*/*.whl
    PYTHONPATH=. python benchmarks/gpu/throughput.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
NEEDED, THERE = ("xcompat", "faiss-cpu"), ("torch", "transformers")
RECENT = ("pydantic",)
"""Dependencies that only recent versions of torch install."""
NEWER = ("filelock", "transformers")
"""Packages of which xcompat needs newer versions than torch 2.11 and transformers 5.17 come with."""
MOST_BYTES = 60_000_000
PLATFORMS = [f"--platform=manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014")]

console = Console(soft_wrap=True, highlight=False)


def find_dependencies(names: Iterable[str]) -> set[str]:
    """Return packages with all their dependencies, as they are installed here, without extras."""
    found, waiting = set[str](), [canonicalize_name(name) for name in names]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        parsed = map(Requirement, lines)
        waiting += [canonicalize_name(each.name) for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def pin_versions(names: Iterable[str], constraints: str, torch: str) -> Iterator[str]:
    """Yield a requirement per package: the tested version, and the torchvision that belongs to a torch.

    Args:
        names: packages.
        constraints: content of constraints.txt.
        torch: version of torch, e.g. ``2.11``.

    Raises:
        ValueError: a package has no tested version.
    """
    parsed = (Requirement(line) for line in constraints.splitlines() if re.match(r"\w", line))
    tested = {
        canonicalize_name(each.name): str(each.specifier) for each in parsed if each.marker is None or each.marker.evaluate()
    }
    tested["torchvision"] = f"==0.{int(torch.split('.')[1]) + 15}.*"
    for name in sorted(names):
        if name not in tested:
            raise ValueError(f"{name} is not in constraints.txt; run `make constraints`")
        yield name + tested[name]


def fill_folders(sizes: dict[str, int], most: int = MOST_BYTES) -> list[list[str]]:
    """Distribute files to few folders of limited size, the largest first.

    Args:
        sizes: file name -> bytes.
        most: bytes of a folder. A larger file gets a folder of its own.

    Example:
        >>> fill_folders({"a": 3, "b": 5, "c": 4, "d": 9}, most=8)
        [['d'], ['b', 'a'], ['c']]
    """
    folders: list[list[str]] = []
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        room = (folder for folder in folders if sum(sizes[each] for each in folder) + sizes[name] <= most)
        if (folder := next(room, None)) is None:
            folders.append(folder := [])
        folder.append(name)
    return folders


def main(
    out: Path, torch: str = "2.11", python: str = "3.12", have: Annotated[list[str] | None, typer.Option("--have")] = None
) -> None:
    """Download the wheels into numbered folders."""
    recent = {name for name in find_dependencies(RECENT) if not name.startswith("typing-extensions")}
    present = find_dependencies(THERE) - recent | {canonicalize_name(name) for name in have or ()}
    wanted = (find_dependencies(NEEDED) - present - {"xcompat"}) | set(NEWER)
    pinned = list(pin_versions(wanted, CONSTRAINTS.read_text(encoding="utf-8"), torch))
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *PLATFORMS]
    with TemporaryDirectory(dir=out.parent) as name:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", f"--dest={name}", *target, *pinned], check=True)
        files = {file.name: file for file in Path(name).glob("*.whl")}
        for number, folder in enumerate(fill_folders({each: file.stat().st_size for each, file in files.items()}), start=1):
            place = out / str(number)
            place.mkdir(parents=True)
            for each in folder:
                files[each].rename(place / each)
            size = sum(file.stat().st_size for file in place.iterdir())
            console.print(f"{place}: {len(folder)} wheels, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
