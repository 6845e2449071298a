"""A model whose files are not what was saved embeds nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModel

from xcompat import XbtModel, XcompatError
from xcompat.core.checksums import CHECKSUMS
from xcompat.core.files import read_json, write_json
from xcompat.encoders.model_files import record_model, require_whole
from xcompat.encoders.standins import save_stand_in
from xcompat.methods import IndependentModel
from xcompat.models import CompatConfig
from xcompat.models.embedder import load_embedder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    old = load_embedder(save_stand_in(folder / "old", "clip", 8, seed=2)).describe_old()
    encoder = save_stand_in(folder / "new", "clip", 16, seed=1)
    XbtModel.from_encoder(encoder, old=old).save_pretrained(folder / "xbt")
    (folder / "independent").mkdir()
    IndependentModel.from_encoder(encoder).export(folder / "independent")
    return folder


@pytest.fixture
def models(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "models"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 4  # in the last value of the weights
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["xbt", "independent"])
def test_every_file_that_a_model_is_read_from_is_recorded(kind: str, models: Path) -> None:
    files = sorted(file.name for file in (models / kind).iterdir() if file.name != CHECKSUMS)
    assert sorted(read_json(models / kind / CHECKSUMS)) == files
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"} <= {*files}


@pytest.mark.parametrize("load", [load_embedder, AutoModel.from_pretrained])
@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json", "tokenizer.json", "config.json"])
def test_a_file_that_changed_is_named(name: str, load: Callable[[str], object], models: Path) -> None:
    load(str(models / "xbt"))
    file = models / "xbt" / name
    content = file.read_bytes()
    if name == "model.safetensors":
        flip(file)
    else:
        file.write_bytes(content.replace(b"0", b"1"))
    assert file.read_bytes() != content
    with pytest.raises(XcompatError, match=rf"{name} has changed since it was written; restore it") as caught:
        load(str(models / "xbt"))
    assert "\n" not in str(caught.value)
    file.write_bytes(content)
    load(str(models / "xbt"))


def test_a_plain_encoder_that_was_trained_here_is_checked_too(models: Path) -> None:
    load_embedder(str(models / "independent"))
    flip(models / "independent" / "model.safetensors")
    with pytest.raises(XcompatError, match=r"model\.safetensors has changed since it was written"):
        load_embedder(str(models / "independent"))


def test_a_file_that_is_gone_is_named_unless_only_some_were_fetched(models: Path) -> None:
    (models / "xbt" / "tokenizer.json").unlink()
    require_whole(models / "xbt", in_part=True)
    with pytest.raises(XcompatError, match=r"tokenizer\.json is missing; restore it"):
        AutoModel.from_pretrained(models / "xbt")


def test_who_changes_a_file_on_purpose_deletes_the_record(models: Path) -> None:
    config = models / "xbt" / "config.json"
    write_json(config, read_json(config) | {"logit_scale": 2.0})
    with pytest.raises(XcompatError, match=r"delete .*checksums\.json if you changed it yourself"):
        AutoModel.from_pretrained(models / "xbt")
    (models / "xbt" / CHECKSUMS).unlink()
    model = AutoModel.from_pretrained(models / "xbt")
    assert model.config.logit_scale == 2.0
    model.save_pretrained(models / "again")
    assert AutoModel.from_pretrained(models / "again").config.logit_scale == 2.0
    record_model(models / "xbt")
    flip(models / "xbt" / "model.safetensors")
    with pytest.raises(XcompatError, match="has changed"):
        AutoModel.from_pretrained(models / "xbt")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"config.json": 3}'])
def test_a_damaged_record_is_said_in_one_line(content: str, models: Path) -> None:
    (models / "xbt" / CHECKSUMS).write_text(content)
    with pytest.raises(XcompatError, match="checksums") as caught:
        AutoModel.from_pretrained(models / "xbt")
    assert "\n" not in str(caught.value)


def test_checksums_that_others_keep_are_theirs(models: Path) -> None:
    write_json(models / "old" / "checksums.json", {"model.safetensors": "sha256:0"})
    load_embedder(str(models / "old"))


def test_saving_again_records_what_is_there_now(models: Path) -> None:
    """Other files of the user's beside the model are none of its business."""
    model = AutoModel.from_pretrained(models / "xbt")
    (models / "xbt" / "former.model").mkdir()
    for name in ("report.json", "notes.txt"):
        (models / "xbt" / name).write_text("mine")
    next(model.parameters()).data.add_(1)
    model.save_pretrained(models / "xbt")
    for name in ("report.json", "notes.txt"):
        (models / "xbt" / name).write_text("changed")
    again = AutoModel.from_pretrained(models / "xbt")
    assert again.fingerprint() == model.fingerprint()
    assert not {"notes.txt", "report.json"} & {*read_json(models / "xbt" / CHECKSUMS)}


@pytest.mark.parametrize("old", [{"name": "a"}, {"name": "a", "fingerprint": "b", "dim": 3, "compatible_with": [{"dim": 3}]}])
def test_an_old_model_that_is_described_in_part_is_refused(old: dict[str, object]) -> None:
    with pytest.raises(XcompatError, match="each version needs dim, fingerprint, name"):
        CompatConfig(old=old)
