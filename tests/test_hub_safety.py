"""A push that is stopped anywhere, a token that is nowhere, and files that are as open as the umask says."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hub_server import Hub
from test_models import build, shake
from transformers import AutoModel

from xcompat import XcompatError
from xcompat.core.files import atomic_path
from xcompat.embeddings.embed import embed_texts
from xcompat.hub.lineage import trace_lineage
from xcompat.models.embedder import load_embedder
from xcompat.retrieval import Gallery
from xcompat.training.push import push

REPO = "me/model"


@pytest.fixture(scope="module")
def versions(folder_of: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two states of one model: of one lineage, with other weights."""
    folders = [tmp_path_factory.mktemp("versions") / name / "model" for name in ("first", "second")]
    model = build("bct", folder_of)
    for folder in folders:
        shake(model)
        model.export(folder)
    return folders


@pytest.mark.parametrize("status", [0, 500, 403])
def test_a_push_that_the_hub_stops_is_done_or_not(status: int, hub: Hub, versions: list[Path]) -> None:
    push(versions[0], REPO)
    held, steps = dict(hub.files(REPO)), 7
    for at in range(steps):
        count = 0

        def stop(asked: str, at: int = at) -> int | None:
            nonlocal count
            count += 1
            return status if count > at else None

        hub.fault = stop  # type: ignore[method-assign]
        with pytest.raises(XcompatError) as refused:
            push(versions[1], REPO)
        assert "\n" not in str(refused.value) and hub.files(REPO) == held
        del hub.fault
    push(versions[1], REPO)
    assert AutoModel.from_pretrained(REPO).fingerprint() == AutoModel.from_pretrained(versions[1]).fingerprint()


@pytest.mark.parametrize("answer", [b"<html>busy</html>", b"[1, 2]", b"5", b"", b"\xff\xfe"])
def test_an_answer_that_is_no_configuration(answer: bytes, hub: Hub, versions: list[Path], tmp_path: Path) -> None:
    hub.add(REPO, versions[0])
    hub.repos[REPO].commit(hub.files(REPO) | {"config.json": answer})
    for command in (trace_lineage, partial(push, versions[0])):
        with pytest.raises(XcompatError) as refused:
            command(REPO)
        assert "\n" not in str(refused.value)
    assert hub.files(REPO)["config.json"] == answer


def test_the_token_is_nowhere(
    hub: Hub, versions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a Hub that asks for it, so that it is surely used."""
    caplog.set_level(logging.DEBUG, logger="xcompat")
    hub.token = "hf_secret"
    assert os.environ["HF_TOKEN"] == hub.token
    said = [push(versions[0], REPO)]
    load_embedder(REPO)
    trace_lineage(REPO)
    for hub.token, status in (("hf_of_somebody_else", None), ("hf_secret", 500), ("hf_secret", 0)):
        hub.faults = {"": status} if status is not None else {}
        for command in (partial(push, versions[1]), trace_lineage, load_embedder):
            with pytest.raises(XcompatError) as refused:
                command("me/other")
            said.append(str(refused.value))
    printed = capsys.readouterr()
    said += [caplog.text, printed.out, printed.err, *(str(content) for content in hub.files(REPO).values())]
    assert not [text for text in said if "hf_secret" in text]
    files = [file for folder in (tmp_path, versions[0].parent) for file in folder.rglob("*") if file.is_file()]
    assert files and not [file for file in files if b"hf_secret" in file.read_bytes()]


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=["022", "027", "077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_what_is_written_is_as_open_as_the_umask_says(umask: int, folder_of: dict[str, str], tmp_path: Path) -> None:
    root = tmp_path / "made"
    with atomic_path(root / "folder") as temporary:
        temporary.mkdir()
        (temporary / "file").write_text("")
    build("bct", folder_of).export(root / "model")
    model = load_embedder(folder_of["clip"])
    embed_texts(model, ["a dog", "two cats"], root / "cache", "digest")
    gallery = Gallery.create(root / "gallery", model)
    gallery.add(model.embed(model.processor.texts(["a dog"])), ["a dog"], [{"kind": "dog"}])
    gallery.commit()
    made = [path for path in root.rglob("*") if not path.is_symlink()]
    wrong = {
        str(path.relative_to(root)): oct(mode)
        for path in made
        if (mode := stat.S_IMODE(path.stat().st_mode)) != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert not wrong and len(made) > 10
