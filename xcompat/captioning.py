"""Captions for images without them, written by any captioner of transformers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL.Image import Image

from xcompat.data import PairSource, load_pairs
from xcompat.data.cache import file_stamps
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import CAPTION, ID, IMAGE
from xcompat.data.text_files import json_lines
from xcompat.distributed import barrier, device, is_main_process, process_state, rank, world_size
from xcompat.errors import XcompatError, what_failed
from xcompat.files import atomic_path, listed, make_folder, read_json, write_json
from xcompat.progress import console, literal, notice, progress_bar, rate_of, silence_libraries
from xcompat.threads import MOST_THREADS, map_in_threads

if TYPE_CHECKING:
    import datasets

ROWS = 1024
"""Images of one part: what a killed run loses at most, and what processes share out."""
PLAN = "plan.json"


class Captioner:
    """A model of transformers that describes a picture: a vision encoder with a text decoder, BLIP, GIT and their like.

    Args:
        name: folder or Hub name.
        revision: of the Hub; what is newest unless given.
        max_tokens: most tokens of a caption; greedy decoding, so that a caption is the same every time.

    Raises:
        XcompatError: it is no captioner, or it answers only in a chat.
    """

    def __init__(self, name: str, revision: str | None = None, max_tokens: int = 30) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        where = {"revision": revision or "main"}
        try:
            config = AutoConfig.from_pretrained(name, **where)
            if type(config) not in AutoModelForImageTextToText._model_mapping:
                raise XcompatError(f"{name} is a {config.model_type}, which writes no captions; name a captioner")
            self.model = AutoModelForImageTextToText.from_pretrained(name, use_safetensors=True, **where).eval().to(device())
            self.images = AutoImageProcessor.from_pretrained(name, **where)
            self.tokenizer = AutoTokenizer.from_pretrained(name, **where)
        except (OSError, ValueError) as error:
            raise XcompatError(f"{name} cannot be loaded as a captioner: {what_failed(error)}") from error
        if getattr(self.tokenizer, "chat_template", None):
            raise XcompatError(f"{name} answers in a chat, and captions are asked without a prompt; name a captioner")
        self.name, self.max_tokens = name, max_tokens
        self.digest = getattr(config, "_commit_hash", None) or _digest_of(Path(name))

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image]) -> list[str]:
        """Describe pictures.

        Args:
            images: B pictures in RGB.

        Returns:
            B captions, on one line each.
        """
        pixels = self.images(list(images), return_tensors="pt")["pixel_values"].to(self.model.device)
        tokens = self.model.generate(pixel_values=pixels, max_new_tokens=self.max_tokens, do_sample=False, num_beams=1)
        return [" ".join(text.split()) for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def _digest_of(folder: Path) -> str:
    """Tell the files of a local captioner from those of another one in its place."""
    return hashlib.sha256(repr(file_stamps(listed(folder))).encode()).hexdigest()


def write_captions(source: PairSource, captioner: Captioner, out: Path, batch_size: int = 16, overwrite: bool = False) -> int:
    """Write a caption for every image, ``{"id": ..., "caption": ...}`` a line, in the order of the images.

    Parts are kept in a folder beside the file until all are there: started again, it continues. Processes of ``accelerate
    launch`` share the parts, and the file is the same as of one process.

    Args:
        source: the images.
        captioner: writes them.
        out: the file of JSON lines.
        batch_size: images at once.
        overwrite: whether a file that is there is replaced.

    Returns:
        The number of captions; images that cannot be read have null in their place, and are told.

    Raises:
        XcompatError: the file is there, its parts are of other images or of another captioner, or too many images are unreadable.
    """
    if out.exists() and not overwrite:
        raise XcompatError(f"{out} exists; name another file, or replace it with --overwrite")
    images = load_pairs(source)
    folder = out.with_name(f"{out.name}.parts")
    _require_plan(folder, _plan(source, images, captioner))
    parts = {start: folder / f"{start:012}.jsonl" for start in range(0, len(images), ROWS)}
    mine = list(parts)[rank() :: world_size()]

    def rows_of(start: int) -> int:
        return min(ROWS, len(images) - start)

    with progress_bar() as bar:
        task = bar.add_task(f"captions by {captioner.name}", total=sum(map(rows_of, mine)), rate="")
        for start in mine:
            if not parts[start].exists():
                with atomic_path(parts[start]) as temporary:
                    temporary.write_text("".join(_lines(images, start, captioner, batch_size)), encoding="utf-8")
            rate_of(bar, task, rows_of(start), "images")
    barrier()
    if is_main_process():
        _join(parts.values(), out, source.max_bad_share)
        shutil.rmtree(folder)
    barrier()
    return sum(row[CAPTION] is not None for _, row in json_lines(out))


def _plan(source: PairSource, images: datasets.Dataset, captioner: Captioner) -> dict[str, Any]:
    ids = hashlib.sha256("\n".join(images[ID][:]).encode()).hexdigest()
    return {"images": source.path, "ids": ids, "captioner": captioner.digest, "max_tokens": captioner.max_tokens}


def _require_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Write down what the parts in a folder are of, or refuse a folder whose parts are of something else."""
    barrier()
    if (folder / PLAN).exists():
        written = read_json(folder / PLAN)
        if different := [key for key in plan if written.get(key) != plan[key]]:
            raise XcompatError(
                f"{folder} holds parts with other {' and '.join(different)}; name another file, or delete the folder"
            )
    elif folder.exists():
        raise XcompatError(f"{folder} is in the way, and was not made by this command; name another file")
    barrier()
    if is_main_process() and not (folder / PLAN).exists():
        make_folder(folder)
        write_json(folder / PLAN, plan)
    barrier()


def _lines(images: datasets.Dataset, start: int, captioner: Captioner, batch_size: int) -> Iterator[str]:
    """Yield a line for each image of a part; ``null`` is the caption of one that cannot be read."""
    rows = range(start, min(start + ROWS, len(images)))
    opened = map_in_threads(lambda row: _opened(images[row]), rows, min(MOST_THREADS, os.cpu_count() or 1))
    while batch := list(islice(opened, batch_size)):
        readable = [image for _, image in batch if image is not None]
        captions = iter(captioner(readable) if readable else [])
        for name, image in batch:
            yield _line({ID: name, CAPTION: next(captions) if image is not None else None})


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _opened(row: dict[str, Any]) -> tuple[str, Image | None]:
    try:
        return row[ID], open_image(row[IMAGE])
    except UnusableSampleError as error:
        notice(f"{row[ID]}: {error}; it gets no caption")
        return row[ID], None


def _join(parts: Iterable[Path], out: Path, max_bad_share: float) -> None:
    """Write the lines of all parts into one file."""
    rows = [row for part in parts for _, row in json_lines(part)]
    if (bad := sum(row[CAPTION] is None for row in rows)) > max_bad_share * len(rows):
        raise XcompatError(f"{bad} of {len(rows)} images cannot be read; mend them, or raise --max-bad-share")
    with atomic_path(out) as temporary:
        temporary.write_text("".join(map(_line, rows)), encoding="utf-8")


def caption(images: str, model: str, out: Path, max_tokens: int, batch_size: int, max_bad_share: float, overwrite: bool) -> None:
    """Do what ``xcompat caption IMAGES`` does, and say how it went."""
    process_state()
    silence_libraries()
    source = PairSource(path=images, captions=False, max_bad_share=max_bad_share)
    started = time.perf_counter()
    count = write_captions(source, Captioner(model, max_tokens=max_tokens), out, batch_size, overwrite)
    seconds = time.perf_counter() - started
    console.print(f"{count:,} captions in {literal(out)} ({seconds:,.1f} s, {count / max(seconds, 1e-9):,.1f} a second)")
    share = f", max_bad_share: {max_bad_share:g}" if max_bad_share > PairSource(path=images).max_bad_share else ""
    console.print(f"Read them with data.images: {{path: {literal(images)}, caption_file: {literal(out)}{share}}}")
