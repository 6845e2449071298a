"""Encoder loading and building (transformers, timm, open_clip, sentence-transformers)."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from safetensors import SafetensorError

from xcompat.core.errors import MissingPathError, XcompatError, describe_error, nearest
from xcompat.core.paths import is_local, model_folder, nearest_path, split_revision
from xcompat.core.plugins import CODE
from xcompat.encoders.adapter_settings import AdapterConfig, LoraSettings
from xcompat.encoders.build_limits import check_config, check_config_files, limit_model_size
from xcompat.encoders.model_files import is_xcompat_model, require_whole
from xcompat.encoders.text_files import PREFIX, SENTENCE_TRANSFORMERS, is_text_model, untrusted_code_error

if TYPE_CHECKING:
    from xcompat.encoders.base import Encoder
    from xcompat.encoders.processor import Processor

__all__ = ["AdapterConfig", "EncoderSource", "LoraSettings", "build_encoder", "load_encoder", "load_processor", "reading_model"]

MODEL_FILES = ("config.json", "open_clip_config.json", "modules.json", "model/config.json")
"""Files that identify a model folder or a finished run; one is enough."""
NOT_XCOMPAT = "is not an xcompat model; choose a run folder or a checkpoint"


class EncoderSource(BaseModel):
    """An encoder's location and settings.

    Args:
        name: folder or Hub name. Prefixes: ``hf-hub:`` for open_clip, ``sentence-transformers:`` for text models (optional for
            folders with ``modules.json``). ``NAME@REVISION`` also sets the revision.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether to run code from the repository.
        model_type: expected architecture in transformers (``timm_wrapper`` for timm), ``open_clip`` or
            ``sentence-transformers``; loading checks it, dry runs build its stand-in.
        image_size: side of square input images in pixels; None to use the default. Only transformers' convolutional image
            encoders accept other sizes.
        query_prompt: a text model's prompt before queries; None to use the default, empty for no prompt.
        passage_prompt: a text model's prompt before passages, with the same defaults.
        truncate_dim: number of a text model's dimensions to keep; None to use the default.
        vector_name: column or named vector of stored embeddings, for ``old``; None for the usual names.
        id_column: column of their ids; None for the usual names.
    """

    model_config = ConfigDict(extra="forbid")
    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    model_type: str | None = None
    image_size: int | None = Field(None, ge=1)
    query_prompt: str | None = None
    passage_prompt: str | None = None
    truncate_dim: int | None = Field(None, ge=1)
    vector_name: str | None = None
    id_column: str | None = None

    @model_validator(mode="after")
    def _split_revision(self) -> Self:
        name, revision = split_revision(self.name)
        if revision is not None:
            if self.revision not in (None, revision):
                raise ValueError(f"{self.name} contains a revision, but revision is {self.revision!r}; remove one of them")
            self.name, self.revision = name, revision
        return self

    @field_validator("name")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        prefix, place = (PREFIX, value.removeprefix(PREFIX)) if value.startswith(PREFIX) else ("", value)
        return prefix + str(Path(place).expanduser()) if place.startswith("~") else value

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> EncoderSource:
        """Return an encoder's source from its stored description."""
        height, width = description.get("image_size") or (None, None)
        size = height if height == width else None
        name, of_texts = description["name"], {}
        if description.get("library") == SENTENCE_TRANSFORMERS:
            name = name if is_text_model(name) else PREFIX + name
            of_texts = {key: description[key] for key in ("query_prompt", "passage_prompt")}
            of_texts["truncate_dim"] = description["config"]["truncate_dim"]
        return cls(name=name, revision=description.get("revision"), image_size=size, **of_texts)

    @property
    def library(self) -> str:
        """Return the library for the name's prefix or folder layout; transformers by default."""
        if is_text_model(self.name):
            return SENTENCE_TRANSFORMERS
        folder = Path(self.name)
        own = (folder / "open_clip_config.json").exists() and not (folder / "config.json").exists()
        return "open_clip" if self.name.startswith("hf-hub:") or own else "transformers"

    @property
    def place(self) -> str:
        """Return the folder or Hub name without the sentence-transformers prefix."""
        return self.name.removeprefix(PREFIX)

    def check_folder(self) -> None:
        """Raise if a path does not exist or contains no model. Hub names pass."""
        if is_local(self.place) and not Path(self.place).exists():
            raise MissingPathError(f"the model folder {self.place} does not exist; {nearest_path(self.place)}")
        if Path(self.place).exists() and not any((Path(self.place) / file).is_file() for file in MODEL_FILES):
            raise XcompatError(f"{self.place} contains no model (config.json is missing); choose a model folder or a run folder")

    def require_settings_used(self) -> None:
        """Raise if settings of stored embeddings are set, or settings of texts for another than a sentence-transformers model."""
        if given := [key for key in ("vector_name", "id_column") if getattr(self, key) is not None]:
            raise XcompatError(f"{given[0]} needs stored embeddings, but {self.name} is a model; remove {given[0]}")
        given = [key for key in ("query_prompt", "passage_prompt", "truncate_dim") if getattr(self, key) is not None]
        if given and self.library != SENTENCE_TRANSFORMERS:
            raise XcompatError(f"{given[0]} needs a sentence-transformers model, but {self.name} is not one; remove {given[0]}")


def require_model(source: EncoderSource | str) -> EncoderSource:
    """Return the source of a model or of a run's final model, without importing its library.

    Args:
        source: name, folder of a model or run, or source with revision.

    Raises:
        XcompatError: the folder contains no model. Hub names pass.
    """
    source = EncoderSource(name=source) if isinstance(source, str) else source
    source = source.model_copy(update={"name": model_folder(source.name)})
    source.check_folder()
    return source


def is_loadable(name: str) -> bool:
    """Return whether the name is a path, ``owner/name`` or a model in the Hub cache.

    Example:
        >>> is_loadable("openai/clip-vit-base-patch32"), is_loadable("clip-b32")
        (True, False)
    """
    return "/" in name or is_downloaded(name)


def is_downloaded(name: str) -> bool:
    """Return whether the name is an existing path, or a model in the Hub cache."""
    if Path(name).exists():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def require_xcompat_model(source: EncoderSource | str, instead: str = "") -> EncoderSource:
    """Return an xcompat model's source. Hub names pass.

    Args:
        source: the model, or its name.
        instead: further fix for the message.

    Raises:
        XcompatError: the folder contains no xcompat model.
    """
    source = require_model(source)
    if Path(source.name).is_dir() and not is_xcompat_model(Path(source.name)):
        raise XcompatError(f"{source.name} {NOT_XCOMPAT}{instead}")
    return source


def build_encoder(description: dict[str, Any]) -> Encoder:
    """Build an encoder with random weights.

    Args:
        description: ``Encoder.description``, as stored in a checkpoint's configuration.

    Raises:
        XcompatError: the library is unknown.
    """
    library = description["library"]
    if library == "transformers-image":
        from xcompat.encoders.image_encoder import build_image_encoder

        return build_image_encoder(description)
    if library == "transformers":
        from xcompat.encoders.transformers_encoder import build_transformers_encoder

        return build_transformers_encoder(description)
    if library == "open_clip":
        from xcompat.encoders.open_clip_encoder import build_open_clip_encoder

        return build_open_clip_encoder(description)
    if library == SENTENCE_TRANSFORMERS:
        with _text_library():
            from xcompat.encoders.text_encoder import build_text_encoder

        return build_text_encoder(description)
    known = ["transformers", "transformers-image", "open_clip", SENTENCE_TRANSFORMERS]
    raise XcompatError(f"unknown encoder library {library!r}; {nearest(library, known)}")


def load_encoder(source: EncoderSource | str) -> tuple[Encoder, Processor]:
    """Load an encoder for images, texts or both (float32, evaluation mode), and its processor.

    Args:
        source: name, folder or :class:`EncoderSource`.

    Raises:
        XcompatError: the model does not exist, lacks safetensors weights, or does not match the source's settings.

    Example:
        >>> import tempfile
        >>> from xcompat.encoders.standins import save_stand_in
        >>> folder = save_stand_in(Path(tempfile.mkdtemp()) / "clip", "clip", 16)  # or "openai/clip-vit-base-patch32"
        >>> encoder, processor = load_encoder(folder)
        >>> encoder.embed_texts(**processor.texts(["a red running shoe"])).shape
        torch.Size([1, 16])
    """
    source = EncoderSource(name=source) if isinstance(source, str) else source
    source.check_folder()
    source.require_settings_used()
    from xcompat.encoders.alignment import copy_unaligned

    with reading_model(source.name, source.revision):
        if Path(source.place).is_dir():
            require_whole(source.place)
            check_config_files(Path(source.place))
        encoder = _load(source)
        found = encoder.description["config"].get("model_type", encoder.library)
        if source.model_type not in (None, found):
            raise XcompatError(f"{source.name} is a {found} model, not {source.model_type}; correct model_type or the name")
        copy_unaligned(encoder)
        processor = load_processor(encoder.description, source)
        if source.image_size is not None and not encoder.has_images:
            raise XcompatError(f"{source.name} does not read images; remove image_size")
        if source.image_size is not None and set(processor.image_size) != {source.image_size}:
            raise XcompatError(
                f"{source.name} reads images of {'x'.join(map(str, processor.image_size))} pixels, not {source.image_size}; "
                "remove image_size or choose an image encoder of transformers"
            )
        return encoder, processor


@contextmanager
def reading_model(name: str, revision: str | None = None) -> Iterator[None]:
    """Turn library errors in the block into one-line errors.

    Args:
        name: model name.
        revision: branch, tag or commit; None to use the default branch.

    Raises:
        XcompatError: files, weights or the configuration are missing, damaged or do not match.
    """
    try:
        with _fetching(name), _without_load_report(), limit_model_size(name):
            yield
    except (XcompatError, ImportError, MemoryError):
        raise
    except OSError as error:  # transformers and the Hub report a missing model, file or revision as OSError
        if error.errno is not None:
            raise
        raise XcompatError(f"cannot load {name}: {' '.join(str(error).split())}{_hint(name, revision)}") from error
    except SafetensorError as error:
        raise XcompatError(f"cannot load {name}: its weights are damaged ({error}); fetch or train it again") from error
    except Exception as error:  # libraries raise errors of many types for an invalid configuration
        known = _describe_missing_code(str(error), name)
        raise XcompatError(f"cannot load {name}: {known or f'{describe_error(error)}; fetch or train it again'}") from error


def _describe_missing_code(message: str, name: str) -> str | None:
    """Return the cause and fix of transformers' error for a model without a class; None for other errors."""
    if "custom code" in message:
        files = os.pathsep.join(map(str, sorted(Path(name).glob("*.py")))) or "FILE.py"  # a Hub model's file, downloaded
        return (
            f"its method is a Python file; read it, and if you trust it, set the environment variable {CODE}={shlex.quote(files)}"
        )
    if (found := re.search(r"model type `([^`]+)` but Transformers|Unrecognized model identifier: (\S+)\. ", message)) is None:
        return None
    return (
        f"no class has model_type {found[1] or found[2]!r}; for a module of your own, set {CODE}=FILE.py or install a "
        "package that names it (entry point xcompat.encoders), otherwise update transformers"
    )


def _hint(name: str, revision: str | None) -> str:
    """Return a hint if the name can be a missing folder, or the revision looks like the 12 fingerprint digits in messages."""
    if revision is not None and re.fullmatch(r"[0-9a-f]{12}", revision) is not None:
        return f" ({revision} looks like an xcompat fingerprint; use a branch, tag or commit)"
    if "/" in name or Path(name).is_dir():
        return ""
    close = get_close_matches(name, [entry.name for entry in Path().iterdir() if entry.is_dir()], n=1)
    return f" (there is no folder {name} either{f'; did you mean {close[0]!r}?' if close else ''})"


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence transformers' tables of missing keys, unless the user set a more verbose level."""
    from transformers import logging

    verbosity = logging.get_verbosity()
    if verbosity == WARNING:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _fetching(name: str) -> Iterator[None]:
    """Delete damaged files from the Hub cache if loading fails."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        from xcompat.encoders.hub_cache import drop_damaged

        if damaged := drop_damaged(name):
            raise XcompatError(
                f"cannot load {name}: damaged downloads ({', '.join(damaged)}) have been deleted; "
                "run the command again to download them"
            ) from error
        raise


@contextmanager
def _text_library() -> Iterator[None]:
    """Add the install command to a failed sentence-transformers import."""
    try:
        yield
    except ImportError:
        raise XcompatError(
            'text models need sentence-transformers; install it with `pip install -e ".[text]"` in a clone of xcompat'
        ) from None


def _load(source: EncoderSource) -> Encoder:
    if source.library == SENTENCE_TRANSFORMERS:
        with _text_library():
            from xcompat.encoders.text_encoder import load_text_encoder

        of_texts = (source.query_prompt, source.passage_prompt, source.truncate_dim)
        return load_text_encoder(source.name, source.place, source.revision, source.trust_remote_code, *of_texts)
    if source.library == "open_clip":
        from xcompat.encoders.open_clip_encoder import load_open_clip_encoder

        return load_open_clip_encoder(source.name, source.revision)
    from transformers import AutoConfig, PreTrainedConfig

    where: dict[str, Any] = {"revision": source.revision or "main", "trust_remote_code": source.trust_remote_code}
    try:
        if not Path(source.name).is_dir():  # load_encoder checks folders
            check_config(PreTrainedConfig.get_config_dict(source.name, revision=where["revision"])[0], source.name)
        config = AutoConfig.from_pretrained(source.name, **where)
    except ValueError as error:  # missing or unknown model_type
        if "custom code" in str(error):
            raise untrusted_code_error(source.name, "auto_map in its config.json") from error
        cause = _describe_missing_code(str(error), source.name) or " ".join(str(error).split())
        raise XcompatError(f"cannot load {source.name}: {cause}") from error
    if hasattr(config, "text_config"):
        from xcompat.encoders.transformers_encoder import load_transformers_encoder

        return load_transformers_encoder(source.name, source.revision, source.trust_remote_code)
    from xcompat.encoders.image_encoder import load_image_encoder

    return load_image_encoder(source.name, source.revision, source.trust_remote_code, source.image_size)


def load_processor(description: dict[str, object], source: EncoderSource | str) -> Processor:
    """Load an encoder's preprocessing.

    Args:
        description: the encoder's description.
        source: model or checkpoint with the processor's files.

    Raises:
        XcompatError: the files are missing or damaged.
    """
    source = EncoderSource(name=source) if isinstance(source, str) else source
    try:
        with _fetching(source.name):
            return _load_processor(description, source)
    except Exception as error:  # transformers and tokenizers raise errors of many types for missing or damaged files
        if isinstance(error, XcompatError | ImportError | MemoryError) or getattr(error, "errno", None) is not None:
            raise
        reason = describe_error(error)
        raise XcompatError(
            f"cannot read the preprocessing of {source.name} ({reason}); restore its files (preprocessor_config.json, "
            "tokenizer.json, tokenizer_config.json) from the model's source"
        ) from error


def _load_processor(description: dict[str, object], source: EncoderSource) -> Processor:
    if description["library"] == "open_clip":
        from xcompat.encoders.open_clip_encoder import load_open_clip_processor, open_clip_folder

        return load_open_clip_processor(open_clip_folder(source.name, source.revision), description)
    if description["library"] == "transformers-image":
        from xcompat.encoders.image_encoder import load_image_processor

        return load_image_processor(source.name, source.revision, source.trust_remote_code, description, source.image_size)
    if description["library"] == SENTENCE_TRANSFORMERS:
        from xcompat.encoders.text_processor import load_text_processor

        return load_text_processor(source.place, source.revision, source.trust_remote_code, description)
    from xcompat.encoders.transformers_encoder import load_transformers_processor

    return load_transformers_processor(source.name, source.revision, source.trust_remote_code, description)
