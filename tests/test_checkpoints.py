"""Checkpoints under way: what is continued from is, to the byte, what was saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from xcompat.core.checksums import CHECKSUMS
from xcompat.training.checkpoints import STATE, CheckpointCallback, last_complete_checkpoint

FILES = {
    "model.safetensors": b"weights",
    "optimizer.pt": b"moments",
    "inner/rng_state.pth": b"state",
    STATE: b'{"global_step": 2}',
}


def save(folder: Path, step: int, recorded: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    for name, content in FILES.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(content)
    if recorded:
        CheckpointCallback().on_save(SimpleNamespace(output_dir=folder), SimpleNamespace(global_step=step), None)  # type: ignore[arg-type]
    return checkpoint


@pytest.mark.parametrize("name", [*FILES, CHECKSUMS])
@pytest.mark.parametrize("harm", ["flipped", "cut short", "emptied", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    name: str, harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, newest = save(tmp_path, 9), save(tmp_path, 10)
    assert last_complete_checkpoint(tmp_path) == newest
    file = newest / name
    content = file.read_bytes()
    if harm == "gone":
        file.unlink()
    else:
        changed = {"flipped": content[:-2] + bytes([content[-2] ^ 1]) + content[-1:], "cut short": content[:-1], "emptied": b""}
        file.write_bytes(changed[harm])
    same = name == CHECKSUMS and harm in ("gone", "cut short")  # its last byte is a line's end
    assert last_complete_checkpoint(tmp_path) == (newest if same else before)
    assert same or f"skipping{newest}:" in "".join(capsys.readouterr().out.split())  # lines end anywhere


def test_one_that_was_saved_before_there_were_checksums_is_continued_from(tmp_path: Path) -> None:
    assert last_complete_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-mine").mkdir()
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path) != save(tmp_path, 3, recorded=False) == last_complete_checkpoint(tmp_path)


def test_what_a_process_left_in_a_checkpoint_is_removed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    left = checkpoint / f".{CHECKSUMS}.bhly0w8w.xcompat-partial"
    left.mkdir(parents=True)
    (left / CHECKSUMS).write_text("{")
    (checkpoint / STATE).write_text("{}")
    assert last_complete_checkpoint(tmp_path) == checkpoint
    assert [file.name for file in checkpoint.iterdir()] == [STATE]


def test_what_safetensors_left_goes_and_what_others_left_stays(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    for name in (".tmpmg4Zbu", ".tmp", "mine.tmp"):
        (checkpoint / name).write_text("half a model")
    assert last_complete_checkpoint(tmp_path) == checkpoint
    assert [name for name in (".tmpmg4Zbu", ".tmp", "mine.tmp") if (checkpoint / name).exists()] == [".tmp", "mine.tmp"]
