"""Every library that writes files for this one, on disks with any number of free pages: an error, or the whole file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from xcompat.core import failures
from xcompat.core.files import atomic_path, write_array, write_json
from xcompat.retrieval.faiss_building import make_index
from xcompat.retrieval.faiss_index import write_faiss
from xcompat.retrieval.items import Items
from xcompat.retrieval.segment import write_rows

PAGE = 4096
PAGES = 20  # of the largest of the files, and some more


def faiss_index(path: Path) -> None:
    index = make_index("Flat", 8, "ip")
    index.add(np.ones((1500, 8), np.float32))  # no multiple of a page, so that the last bytes are written when it is closed
    write_faiss(index, path)


def rows(path: Path) -> None:
    path.mkdir()
    write_rows(path, Items(ids=[f"item {number}" for number in range(600)], metadata=[None] * 600))


def array(path: Path) -> None:
    write_array(path, np.ones(7000, np.float32))


def weights(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(7000)}, path)


def json(path: Path) -> None:
    write_json(path, {"text": "x" * 30_000})


def onnx(path: Path) -> None:
    exported().save(path)


@cache
def exported() -> torch.onnx.ONNXProgram:
    program = torch.onnx.export(torch.nn.Linear(80, 80), (torch.ones(1, 80),), dynamo=True, verbose=False)
    assert program is not None
    return program


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


@pytest.mark.parametrize("write", [faiss_index, rows, array, weights, json, onnx])
def test_a_file_is_whole_or_its_writer_says_that_it_is_not(
    write: Callable[[Path], None], tiny_disk: Path, tmp_path: Path
) -> None:
    write(tmp_path / "whole")
    whole, refused = size_of(tmp_path / "whole"), 0
    for pages in range(PAGES):
        filler = tiny_disk / "filler"
        filler.write_bytes(bytes((os.statvfs(tiny_disk).f_bavail - pages) * PAGE))
        said = None
        try:
            with atomic_path(tiny_disk / "file") as temporary:
                write(temporary)
        except Exception as error:
            said = error
        if said is None:
            assert size_of(tiny_disk / "file") == whole
        else:
            assert "no space left" in str(failures.explain(said)), said
            assert not (tiny_disk / "file").exists()
            refused += 1
        assert {path.name for path in tiny_disk.iterdir()} <= {"filler", "file"}, "nothing half-written"
        subprocess.run(["rm", "-r", *tiny_disk.iterdir()], check=True)
    assert 0 < refused < PAGES, "some disks were too small, some were not"


@pytest.mark.parametrize("numbers", [1, 10**6])
def test_what_pytorch_says_of_a_full_disk_is_understood(numbers: int) -> None:
    with pytest.raises(RuntimeError) as said:
        torch.save({"state": torch.zeros(numbers)}, "/dev/full")
    assert "no space left" in str(failures.explain(said.value))
