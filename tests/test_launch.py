"""``xcompat launch``: accelerate's launcher ends as the processes do, without lines of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml
from conftest import Run, refused

from xcompat.cli import main
from xcompat.cli.launch import launch_processes

CONFIGS = Path(__file__).parent.parent / "accelerate_configs"


RECIPE = {
    "new": {"model": {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [4], "depths": [1]}, "image_size": 16},
    "data": {"images": {"path": "glyphs:train", "limit": 64}},
    "training": {"max_steps": 100_000, "per_device_train_batch_size": 8, "save_steps": 5},
    "evaluation": None,
    "stages": [{"name": "one", "method": "independent"}],
}


def test_ctrl_c_ends_launched_processes_with_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    command = [sys.executable, "-m", "xcompat", "launch", "--config_file", CONFIGS / "cpu_2.yaml", "train", "r.yaml"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    warm.wait_until(lambda: any(tmp_path.glob("**/trainer_state.json")) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    lines = sorted(line.split(":")[0] for line in error.splitlines() if "interrupted at step" in line)
    assert lines == ["xcompat", "xcompat (process 1)"] and "Traceback" not in error


def test_a_process_writes_its_lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unbuffered(io.StringIO):
        def write(self, text: str) -> int:
            written.extend([text] if text else [])
            return len(text)

    written: list[str] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.stderr", Unbuffered())  # as torchrun's, where lines of two processes would meet in one
    monkeypatch.setattr("sys.argv", ["xcompat", "train", "nosuch.yaml"])
    with pytest.raises(SystemExit):
        main()
    assert [text.count("xcompat (process 1): ") for text in written] == [1] and written[0].endswith("\n")


@pytest.mark.parametrize(("ended", "code"), [(3, 3), (130, 130), (-9, 137)])
def test_launch_ends_with_the_exit_code_of_its_process(ended: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: object) -> None:
        raise subprocess.CalledProcessError(ended, "xcompat")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", end)
    assert launch_processes(["train", "r.yaml"]) == code


def test_launch_refuses_wrong_options_in_a_line(run_xcompat: Run, tmp_path: Path) -> None:
    line = refused(run_xcompat("launch", "--nosuch", "train", "r.yaml"))
    assert "--nosuch" in line and "accelerate launch --help" in line
    assert "nowhere.yaml" in refused(run_xcompat("launch", "--config_file", tmp_path / "nowhere.yaml", "train", "r.yaml"))
