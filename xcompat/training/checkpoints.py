"""Checkpoints: flushed to disk, and verified before a resume."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from xcompat.core.checksums import changes, write_checksums
from xcompat.core.distributed import barrier, is_main_process
from xcompat.core.errors import XcompatError
from xcompat.core.files import clear_leftovers, files_below, list_entries, read_json, sync_folder, sync_tree
from xcompat.core.progress import console

STATE = "trainer_state.json"
_UNFINISHED = ".tmp??????"  # unfinished files of safetensors


class CheckpointCallback(TrainerCallback):
    """Flush checkpoints to disk and record checksums."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Wait for all processes, then record checksums."""
        barrier()
        if is_main_process():
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            sync_tree(folder)
            sync_folder(folder.parent)
            write_checksums(folder, (file for file in files_below(folder) if file.is_file()))
        barrier()


def last_complete_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest undamaged checkpoint, or None.

    A checkpoint without ``trainer_state.json``, written last, is incomplete.

    Args:
        folder: the Trainer's output folder.
    """
    numbered = (path for path in list_entries(folder, f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdecimal())
    for checkpoint in sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        if is_main_process():
            clear_leftovers(checkpoint)  # of a killed process
            for file in list_entries(checkpoint, _UNFINISHED):
                file.unlink()
        wrong = _damage(checkpoint)
        if wrong is None:
            return checkpoint
        if is_main_process():
            console.print(f"  [yellow]![/] skipping {checkpoint}: {wrong}", soft_wrap=True)
    return None


def _damage(checkpoint: Path) -> str | None:
    try:
        read_json(checkpoint / STATE)
        return next(iter(changes(checkpoint)), None)
    except XcompatError as error:
        return f"it is incomplete ({error})"
