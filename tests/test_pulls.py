"""Pulls from a Hub that fails, and from a cache that is damaged: one line, nothing wrong is used, and the same again works."""

from __future__ import annotations

import errno
import itertools
import re
from pathlib import Path

import pytest
from hub_server import Hub
from schedule import mostly_nightly_rows
from test_models import build, shake

from xcompat import Fingerprint, XcompatError
from xcompat.core import failures
from xcompat.models.embedder import load_embedder

DAILY = {"short": 3, "moved": 1, "503": 1, "cut": 3, "dangling": 1}
"""To how many of the files a fault happens on every change."""
FILES = (r"\.safetensors$", r"^config\.json$", r"^tokenizer\.json$", r"^tokenizer_config\.json$", "^preprocessor")


@pytest.fixture
def pulled(hub: Hub, folder_of: dict[str, str]) -> tuple[str, Fingerprint]:
    hub.add("base/clip", folder_of["clip"])
    return "base/clip", load_embedder(folder_of["clip"]).fingerprint


def found(name: str) -> Fingerprint | str:
    """Return which model a pull gives, or the line in which it is refused."""
    try:
        return load_embedder(name).fingerprint
    except (XcompatError, OSError) as error:
        line = failures.explain(error)
        assert line is not None and len(line.splitlines()) == 1
        return line


@pytest.mark.parametrize(
    ("kind", "file"),
    mostly_nightly_rows(itertools.product(["short", "moved", "503"], FILES), lambda kind, file: file in FILES[: DAILY[kind]]),
)
def test_a_hub_that_fails_on_a_file(kind: str, file: str, pulled: tuple[str, Fingerprint], hub: Hub) -> None:
    name, wanted = pulled
    if kind in ("short", "moved"):
        hub.spoilt = {file: kind}
    else:
        hub.faults = {file.replace("^", "/"): int(kind)}
    line = found(name)
    assert isinstance(line, str) and name in line
    hub.spoilt, hub.faults = {}, {}
    assert found(name) == wanted


@pytest.mark.parametrize(
    ("kind", "file"),
    mostly_nightly_rows(itertools.product(["cut", "dangling"], FILES), lambda kind, file: file in FILES[: DAILY[kind]]),
)
def test_a_damaged_copy_in_the_cache(kind: str, file: str, pulled: tuple[str, Fingerprint], tmp_path: Path) -> None:
    name, wanted = pulled
    assert found(name) == wanted
    copies = [link for link in (tmp_path / "cache").glob("models--*/snapshots/*/*") if re.search(file, link.name)]
    for blob in {copy.resolve() for copy in copies}:
        held = blob.read_bytes()
        blob.unlink()
        if kind != "dangling":
            blob.write_bytes(held[: len(held) // 2] if kind == "cut" else held[::-1])
    line = found(name)
    if kind == "dangling":
        assert line == wanted, "fetched anew"
    else:
        assert isinstance(line, str) and f"damaged downloads ({copies[0].name}) have been deleted" in line
    assert found(name) == wanted


def test_a_checkpoint_that_was_cut_short(hub: Hub, folder_of: dict[str, str], tmp_path: Path) -> None:
    model = build("xbt", folder_of)
    shake(model)
    model.export(tmp_path / "model")
    hub.add("me/model", tmp_path / "model")
    hub.spoilt = {"safetensors": "moved"}
    line = found("me/model")
    assert isinstance(line, str) and "have been deleted; run the command again to download them" in line
    hub.spoilt = {}
    assert found("me/model") == load_embedder(str(tmp_path / "model")).fingerprint


def test_an_empty_reference_in_the_cache(pulled: tuple[str, Fingerprint], tmp_path: Path) -> None:
    name, wanted = pulled
    assert found(name) == wanted
    for reference in (tmp_path / "cache").glob("models--*/refs/*"):
        reference.write_text("")
    assert found(name) == wanted


@pytest.mark.parametrize("missing", ["tokenizer", r"\.safetensors", "preprocessor", "^config"])
def test_a_repository_in_which_a_file_is_missing(missing: str, pulled: tuple[str, Fingerprint], hub: Hub) -> None:
    name, wanted = pulled
    whole = hub.files(name)
    hub.repos[name].commit({file: held for file, held in whole.items() if not re.search(missing, file)})
    line = found(name)
    assert isinstance(line, str) and name in line
    hub.repos[name].commit(whole | {"README.md": b"mended"})
    assert found(name) == wanted


def test_a_full_disk(pulled: tuple[str, Fingerprint], monkeypatch: pytest.MonkeyPatch) -> None:
    name, wanted = pulled

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.file_download.http_get", full)
        assert isinstance(line := found(name), str) and "space left" in line
    assert found(name) == wanted
