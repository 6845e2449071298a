"""Captions for images, from any image-to-text model of transformers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from PIL.Image import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.processing_utils import ProcessorMixin

from xcompat.core.distributed import barrier, device, is_main_process, process_state, rank, world_size
from xcompat.core.errors import XcompatError, describe_error
from xcompat.core.files import atomic_path, list_entries, make_folder, read_json, write_json
from xcompat.core.paths import split_revision
from xcompat.core.progress import advance_bar, console, literal, notice, progress_bar, silence_libraries
from xcompat.core.threads import MOST_THREADS, map_in_threads
from xcompat.data import PairSource, load_pairs
from xcompat.data.cache import file_stamps
from xcompat.data.images import UnusableSampleError, open_image
from xcompat.data.schema import CAPTION, ID, IMAGE
from xcompat.data.text_files import json_lines

if TYPE_CHECKING:
    import datasets

ROWS = 1024
"""Images per part, the unit of resuming and of distribution over processes."""
PLAN = "plan.json"
PROMPT = "Describe this image in one sentence."
"""Default prompt of chat models."""


class Captioner:
    """Captioning model of transformers: BLIP, GIT, a vision encoder with a text decoder, or a chat model.

    Args:
        name: folder or Hub name, also ``NAME@REVISION``.
        revision: revision on the Hub. None to use the newest.
        max_tokens: maximum tokens of a caption. Decoding is greedy, so captions are reproducible.
        prompt: question to a chat model (default :data:`PROMPT`). Other models continue it, and the caption
            does not contain it (default none).

    Raises:
        XcompatError: the model is not a captioner, or takes no prompt.
    """

    def __init__(self, name: str, revision: str | None = None, max_tokens: int = 30, prompt: str | None = None) -> None:
        name, named = split_revision(name)
        where: dict[str, Any] = {"revision": revision or named or "main", "trust_remote_code": False}
        try:
            self.config = AutoConfig.from_pretrained(name, **where)
            if type(self.config) not in AutoModelForImageTextToText._model_mapping:
                raise XcompatError(f"{name} is a {self.config.model_type} and writes no captions; choose a captioner")
            self.model = AutoModelForImageTextToText.from_pretrained(name, use_safetensors=True, **where).eval().to(device())
            processor: Any = AutoProcessor.from_pretrained(name, **where)
            is_whole = isinstance(processor, ProcessorMixin)
            # an encoder with a decoder of another family has no joint processor, and AutoProcessor returns a part
            self.images = processor if is_whole else AutoImageProcessor.from_pretrained(name, **where)
            self.tokenizer: Any = processor.tokenizer if is_whole else AutoTokenizer.from_pretrained(name, **where)
        except (OSError, ValueError, ImportError) as error:
            raise XcompatError(f"{name} cannot be loaded as a captioner: {describe_error(error)}") from error
        template = getattr(processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        self.chat_template = template if is_whole else None
        if prompt is not None and not is_whole:
            raise XcompatError(f"{name} starts captions by itself and takes no prompt; remove --prompt")
        self.name, self.max_tokens = name, max_tokens
        self.prompt = PROMPT if prompt is None and self.chat_template else prompt
        self.tokenizer.padding_side = "left"  # a decoder continues at the end of the prompt
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.digest = getattr(self.config, "_commit_hash", None) or _digest_of(Path(name))

    @torch.inference_mode()
    def __call__(self, images: Sequence[Image]) -> list[str]:
        """Describe images.

        Args:
            images: B images in RGB.

        Returns:
            B single-line captions.

        Raises:
            XcompatError: the model rejects the input, e.g. because it needs a prompt.
        """
        try:
            asked = self._model_inputs(list(images))
            tokens_BT = self.model.generate(**asked, max_new_tokens=self.max_tokens, do_sample=False, num_beams=1)
        except (ValueError, TypeError, TemplateError) as error:
            fix = "set a --prompt" if self.prompt is None else "use another --prompt"
            raise XcompatError(f"{self.name} cannot write captions: {describe_error(error)}; {fix}") from error
        texts = self.tokenizer.batch_decode(tokens_BT[:, self._count_prompt_tokens(tokens_BT, asked) :], skip_special_tokens=True)
        return [" ".join(text.split()) for text in texts]

    def _model_inputs(self, images: list[Image]) -> dict[str, object]:
        if self.chat_template:
            text = {"type": "text", "text": self.prompt}
            chats = [[{"role": "user", "content": [{"type": "image", "image": image}, text]}] for image in images]
            asking: dict[str, Any] = {"chat_template": self.chat_template, "add_generation_prompt": True, "tokenize": True}
            form: dict[str, Any] = {"return_dict": True, "return_tensors": "pt", "processor_kwargs": {"padding": True}}
            found = self.images.apply_chat_template(chats, **asking, **form)
        elif self.prompt is None:
            found = self.images(images=images, return_tensors="pt")
        else:
            texts = [self.prompt] * len(images)
            found = self._without_end(self.images(images=images, text=texts, padding=True, return_tensors="pt"))
        where, dtype = self.model.device, self.model.dtype
        tensors = {key: each.to(where) for key, each in found.items() if isinstance(each, torch.Tensor)}
        return {**found, **{key: each.to(dtype) if each.is_floating_point() else each for key, each in tensors.items()}}

    def _prefix(self, asked: Mapping[str, object]) -> str | None:
        names = ["decoder_input_ids", *(() if self.config.is_encoder_decoder else ("input_ids",))]
        return next((name for name in names if name in asked), None)

    def _without_end(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Remove the end token of a prompt, which would end the caption."""
        name, ends = self._prefix(found), {self.tokenizer.sep_token_id, self.tokenizer.eos_token_id}
        if name is None or self.config.model_type == "blip" or not set(found[name][:, -1].tolist()) <= ends:
            return dict(found)
        cut = (name, name.replace("input_ids", "attention_mask"))
        return {key: each[:, :-1] if key in cut else each for key, each in found.items()}

    def _count_prompt_tokens(self, tokens_BT: torch.Tensor, asked: Mapping[str, Any]) -> int:
        """Return the number of prompt tokens at the output's start."""
        if (name := self._prefix(asked)) is None:
            return 0
        given_BP = asked[name]
        for start in (0, 1):  # some models add a start token
            for count in (given_BP.shape[1], given_BP.shape[1] - 1):  # BLIP removes the last token of a prompt
                if count and torch.equal(tokens_BT[:, start : start + count], given_BP[:, :count]):
                    return start + count
        return 0


def _digest_of(folder: Path) -> str:
    return hashlib.sha256(repr(file_stamps(list_entries(folder))).encode()).hexdigest()


def write_captions(source: PairSource, captioner: Captioner, out: Path, batch_size: int = 16, overwrite: bool = False) -> int:
    """Write a caption for every image as JSON lines ``{"id": ..., "caption": ...}``, in image order.

    Finished parts are kept in a folder beside the file, so another run continues. Processes of ``accelerate launch`` share
    the parts and write the same file as a single process.

    Args:
        source: the images.
        captioner: the captioner.
        out: the file of JSON lines.
        batch_size: images per batch.
        overwrite: whether to replace an existing file.

    Returns:
        The number of captions. Unreadable images get null and a notice.

    Raises:
        XcompatError: the file exists, its parts are of other images or another captioner, or too many images are unreadable.
    """
    _require_free(out, overwrite)
    images = load_pairs(source)
    folder = out.with_name(f"{out.name}.parts")
    _require_plan(folder, _plan(source, images, captioner))
    parts = {start: folder / f"{start:012}.jsonl" for start in range(0, len(images), ROWS)}
    mine = list(parts)[rank() :: world_size()]

    def rows_of(start: int) -> int:
        return min(ROWS, len(images) - start)

    with progress_bar() as bar:
        task = bar.add_task(f"captions by {captioner.name}", total=sum(map(rows_of, mine)), unit="images")
        for start in mine:
            if not parts[start].exists():
                with atomic_path(parts[start]) as temporary:
                    temporary.write_text("".join(_lines(images, start, captioner, batch_size)), encoding="utf-8")
            advance_bar(bar, task, rows_of(start))
    barrier()
    if is_main_process():
        _require_free(out, overwrite)  # captions may have taken hours
        _join(parts.values(), out, source.max_bad_share)
        shutil.rmtree(folder)
    barrier()
    return sum(row[CAPTION] is not None for _, row in json_lines(out))


def _require_free(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise XcompatError(f"{out} is a folder; choose a file for the captions")
    if out.exists() and not overwrite:
        raise XcompatError(f"{out} exists; choose another file, or replace it with --overwrite")


def _plan(source: PairSource, images: datasets.Dataset, captioner: Captioner) -> dict[str, object]:
    ids = hashlib.sha256("\n".join(images[ID][:]).encode()).hexdigest()
    asked = {"captioner": captioner.digest, "max_tokens": captioner.max_tokens, "prompt": captioner.prompt}
    return {"images": source.path, "ids": ids, **asked}


def _require_plan(folder: Path, plan: dict[str, Any]) -> None:
    barrier()
    if (folder / PLAN).exists():
        written = read_json(folder / PLAN)
        if different := [key for key in plan if written.get(key) != plan[key]]:
            raise XcompatError(
                f"{folder} contains parts with other {' and '.join(different)}; choose another file, or delete the folder"
            )
    elif folder.exists():
        raise XcompatError(f"{folder} exists and was not made by this command; choose another file")
    barrier()
    if is_main_process() and not (folder / PLAN).exists():
        make_folder(folder)
        write_json(folder / PLAN, plan)
    barrier()


def _lines(images: datasets.Dataset, start: int, captioner: Captioner, batch_size: int) -> Iterator[str]:
    rows = range(start, min(start + ROWS, len(images)))
    opened = map_in_threads(lambda row: _open_row(images[row]), rows, min(MOST_THREADS, os.cpu_count() or 1))
    while batch := list(islice(opened, batch_size)):
        readable = [image for _, image in batch if image is not None]
        captions = iter(captioner(readable) if readable else [])
        for name, image in batch:
            yield _line({ID: name, CAPTION: next(captions) if image is not None else None})


def _line(row: dict[str, object]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _open_row(row: dict[str, Any]) -> tuple[str, Image | None]:
    try:
        return row[ID], open_image(row[IMAGE])
    except UnusableSampleError as error:
        notice(f"{row[ID]}: {error}; this image gets no caption")
        return row[ID], None


def _join(parts: Iterable[Path], out: Path, max_bad_share: float) -> None:
    rows = [row for part in parts for _, row in json_lines(part)]
    if (bad := sum(row[CAPTION] is None for row in rows)) > max_bad_share * len(rows):
        raise XcompatError(f"{bad} of {len(rows)} images cannot be read; fix them, or increase --max-bad-share")
    with atomic_path(out) as temporary:
        temporary.write_text("".join(map(_line, rows)), encoding="utf-8")


def caption(images: str, captioner: Mapping[str, Any], out: Path, batch_size: int, max_bad_share: float, overwrite: bool) -> None:
    """Run ``xcompat caption IMAGES`` with the arguments of :class:`Captioner`, and print a summary."""
    process_state()
    silence_libraries()
    source = PairSource(path=images, captions=False, max_bad_share=max_bad_share)
    started = time.perf_counter()
    count = write_captions(source, Captioner(**captioner), out, batch_size, overwrite)
    seconds = time.perf_counter() - started
    console.print(
        f"{count:,} captions in {literal(out)} ({seconds:,.1f} s, {count / max(seconds, 1e-9):,.1f} a second)", soft_wrap=True
    )
    share = f", max_bad_share: {max_bad_share:g}" if max_bad_share > PairSource(path=images).max_bad_share else ""
    console.print(f"Read them with data.images: {{path: {literal(images)}, caption_file: {literal(out)}{share}}}", soft_wrap=True)
