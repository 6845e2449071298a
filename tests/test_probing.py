"""A faiss index of the user's is looked at in a process that may break down, before this one reads it."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import faiss
import numpy as np
import pytest

from xcompat import Fingerprint, XcompatError
from xcompat.export import to_faiss
from xcompat.methods import ProcrustesConfig, ProcrustesModel
from xcompat.models import describe_old
from xcompat.retrieval import Gallery, faiss_probe, probing

ROWS, DIM = 300, 8
OLD = Fingerprint.from_string("old")
FACTORIES = ["Flat", "HNSW8", "IVF4,Flat", "IVF4,PQ4x4", "SQ8", "IDMap,Flat", "IDMap2,HNSW8", "OPQ4_8,IVF4,PQ4x4", "NSG8"]
CRASHING = ["IVF4,PQ4x4fs", "OPQ4,IVF4,PQ4x4fs"]  # where faiss reconstructs them


def write(path: Path, factory: str = "HNSW8") -> Path:
    vectors_ND = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    index = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors_ND)
    if factory.startswith("IDMap"):
        index.add_with_ids(vectors_ND, np.arange(ROWS) * 3)
    else:
        index.add(vectors_ND)
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize("factory", [*FACTORIES, *CRASHING])
def test_a_whole_index_is_left_alone(factory: str, tmp_path: Path) -> None:
    path = str(write(tmp_path / "index", factory))
    assert faiss_probe.check_index(path, vectors=False) == faiss_probe.check_index(path, vectors=True) == ""


@pytest.mark.parametrize("factory", ["HNSW8", "IVF4,PQ4x4"])
def test_a_link_or_a_length_that_leads_nowhere_is_found(factory: str, tmp_path: Path) -> None:
    whole = write(tmp_path / "index", factory).read_bytes()
    places = range(40, len(whole) - 8, len(whole) // 60)
    assert any(_is_refused(tmp_path / "index", whole[:at] + b"\xff\xff\xff\x7f" + whole[at + 4 :]) for at in places)


def _is_refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(1 if faiss_probe.check_index(str(path), vectors=True) else 0)
    return os.waitpid(pid, 0)[1] != 0


def test_another_process_reads_it_and_what_it_finds_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "index")
    probing.require_readable(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(XcompatError, match=f"{path} is not a readable faiss index: .*; write it again") as refused:
        probing.require_readable(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"import os, signal; os.kill(os.getpid(), {signal.SIGSEGV.value})", r"faiss crashed on it \(-11\)"),
        ("import sys; sys.stderr.write('no\\nreason\\n'); sys.exit(3)", "reason"),
        ("while True: pass", "faiss did not finish within 1 s"),
    ],
)
def test_broken_processes_are_refusals(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(probing, "_SCRIPT", tmp_path / "script.py")
    monkeypatch.setattr(probing, "SECONDS", 1.0)
    path = write(tmp_path / "index")
    with pytest.raises(XcompatError, match=message):
        probing.require_readable(path)
    with pytest.raises(XcompatError, match=message):
        Gallery.from_faiss(tmp_path / "gallery", path, [f"item {row}" for row in range(ROWS)], OLD)
    assert not (tmp_path / "gallery").exists()
    model = ProcrustesModel(ProcrustesConfig(old=describe_old(OLD, DIM), embedding_dim=DIM))
    with pytest.raises(XcompatError, match=message):
        to_faiss(model, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
