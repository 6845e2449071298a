"""The only code that knows transformers, timm, open_clip and sentence-transformers: load an encoder, build one, preprocess."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from safetensors import SafetensorError

from xcompat.core.errors import MissingPathError, XcompatError, nearest, what_failed
from xcompat.core.paths import is_local, model_folder, nearest_path, split_revision
from xcompat.encoders.adapter_settings import AdapterConfig, LoraSettings
from xcompat.encoders.build_limits import check_config, check_config_files, limit_model_size
from xcompat.encoders.model_files import is_own, require_whole
from xcompat.encoders.text_files import PREFIX, TEXTS, is_of_texts

if TYPE_CHECKING:
    from xcompat.encoders.base import Encoder
    from xcompat.encoders.processor import Processor

__all__ = ["AdapterConfig", "EncoderSource", "LoraSettings", "build_encoder", "load_encoder", "load_processor", "reading_model"]

MODEL_FILES = ("config.json", "open_clip_config.json", "modules.json", "model/config.json")
"""Every folder of a model, or of a run that ended with one, has one of these files."""
NOT_OWN = "holds no model of xcompat; name a run's folder or a checkpoint"


class EncoderSource(BaseModel):
    """Where an encoder comes from.

    Args:
        name: folder, Hub name (``timm/...`` among them), ``hf-hub:`` and a Hub name for open_clip's format, or
            ``sentence-transformers:`` and a folder or Hub name for a model of texts; a folder with ``modules.json`` is one.
            ``NAME@REVISION`` on the Hub sets the revision too.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether code from the repository may run; off by default.
        model_type: the expected architecture (transformers' name, which is ``timm_wrapper`` for timm, or ``open_clip``, or
            ``sentence-transformers``); loading checks it, and a dry run builds a stand-in of it.
        image_size: side of its square input images, in pixels; None for the model's own. Convolutional image encoders of
            transformers take any.
        query_prompt: what a model of texts puts before queries; None for its own, empty for nothing.
        passage_prompt: what a model of texts puts before passages; None for its own, empty for nothing.
        truncate_dim: number of first dimensions that are kept of a model of texts; None for the model's own.
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

    @model_validator(mode="after")
    def _split_revision(self) -> Self:
        name, revision = split_revision(self.name)
        if revision is not None:
            if self.revision not in (None, revision):
                raise ValueError(f"{self.name} names a revision, and revision is {self.revision!r}; remove one of them")
            self.name, self.revision = name, revision
        return self

    @field_validator("name")
    @classmethod
    def _at_home(cls, value: str) -> str:
        prefix, place = (PREFIX, value.removeprefix(PREFIX)) if value.startswith(PREFIX) else ("", value)
        return prefix + str(Path(place).expanduser()) if place.startswith("~") else value

    @classmethod
    def described(cls, description: dict[str, Any]) -> EncoderSource:
        """Return the source of a described encoder, with its image size, prompts and dimension.

        Args:
            description: ``Encoder.description``, as stored in a checkpoint's configuration.

        Returns:
            The source.
        """
        height, width = description.get("image_size") or (None, None)
        size = height if height == width else None
        name, of_texts = description["name"], {}
        if description.get("library") == TEXTS:
            name = name if is_of_texts(name) else PREFIX + name
            of_texts = {key: description[key] for key in ("query_prompt", "passage_prompt")}
            of_texts["truncate_dim"] = description["config"]["truncate_dim"]
        return cls(name=name, revision=description.get("revision"), image_size=size, **of_texts)

    @property
    def library(self) -> str:
        """Return the library that reads the model, by its own prefix or folder layout: transformers if it has none."""
        if is_of_texts(self.name):
            return TEXTS
        folder = Path(self.name)
        own = (folder / "open_clip_config.json").exists() and not (folder / "config.json").exists()
        return "open_clip" if self.name.startswith("hf-hub:") or own else "transformers"

    @property
    def place(self) -> str:
        """Return the folder or the Hub name, without the prefix of sentence-transformers."""
        return self.name.removeprefix(PREFIX)

    def check_folder(self) -> None:
        """Refuse a folder that does not exist or holds no model; a name in the form of a Hub name passes.

        Raises:
            XcompatError: the folder is missing, with the nearest name, or holds no model.
        """
        if is_local(self.place) and not Path(self.place).exists():
            raise MissingPathError(f"the model folder {self.place} does not exist; {nearest_path(self.place)}")
        if Path(self.place).exists() and not any((Path(self.place) / file).is_file() for file in MODEL_FILES):
            raise XcompatError(
                f"{self.place} holds no model: there is no config.json in it; name the folder of a model, or of a run"
            )

    def require_reads_texts(self) -> None:
        """Refuse prompts and ``truncate_dim`` of a model that has none of either."""
        given = [key for key in ("query_prompt", "passage_prompt", "truncate_dim") if getattr(self, key) is not None]
        if given and self.library != TEXTS:
            raise XcompatError(f"{self.name} is no model of sentence-transformers, and {given[0]} is for these; leave it out")


def require_model(source: EncoderSource | str) -> EncoderSource:
    """Return where a model lies that is named or that a run ended with, before any library that reads it is imported.

    Args:
        source: name, folder (of a model, or of a run that ended with one), or source with revision.

    Raises:
        XcompatError: it is a folder without a model; a name on the Hub passes.
    """
    source = EncoderSource(name=source) if isinstance(source, str) else source
    source = source.model_copy(update={"name": model_folder(source.name)})
    source.check_folder()
    return source


def is_loadable(name: str) -> bool:
    """Return whether a name means a model that can be loaded, and not only what a gallery calls one.

    A path and ``owner/name`` do, and the name of a model without an owner that is in the local cache of the Hub.

    Example:
        >>> is_loadable("openai/clip-vit-base-patch32"), is_loadable("clip-b32")
        (True, False)
    """
    if "/" in name or Path(name).exists():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def require_own(source: EncoderSource | str) -> EncoderSource:
    """Return the same of a model of this library; a name on the Hub passes.

    Raises:
        XcompatError: it is a folder without one.
    """
    source = require_model(source)
    if Path(source.name).is_dir() and not is_own(Path(source.name)):
        raise XcompatError(f"{source.name} {NOT_OWN}")
    return source


def build_encoder(description: dict[str, Any]) -> Encoder:
    """Build an encoder's architecture without loading weights.

    Args:
        description: ``Encoder.description``, as stored in a checkpoint's configuration.

    Returns:
        The encoder, its weights freshly initialised.

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
    if library == TEXTS:
        with _text_library():
            from xcompat.encoders.text_encoder import build_text_encoder

        return build_text_encoder(description)
    known = ["transformers", "transformers-image", "open_clip", TEXTS]
    raise XcompatError(f"unknown encoder library {library!r}; {nearest(library, known)}")


def load_encoder(source: EncoderSource | str) -> tuple[Encoder, Processor]:
    """Load an encoder of images and texts, or of either alone, and its preprocessing.

    Args:
        source: a name or folder, or an :class:`EncoderSource` with revision.

    Returns:
        The encoder (float32, evaluation mode) and its processor.

    Raises:
        XcompatError: the model does not exist, is not safetensors, or embeds nothing.

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
    source.require_reads_texts()
    from xcompat.encoders.alignment import own_memory

    with reading_model(source.name, source.revision):
        if Path(source.place).is_dir():
            require_whole(source.place)
            check_config_files(Path(source.place))
        encoder = _load(source)
        found = encoder.description["config"].get("model_type", encoder.library)
        if source.model_type not in (None, found):
            raise XcompatError(f"{source.name} is a {found} model, not {source.model_type}; correct model_type or the name")
        own_memory(encoder)
        processor = load_processor(encoder.description, source)
        if source.image_size is not None and not encoder.has_images:
            raise XcompatError(f"{source.name} reads no images; leave out its image_size")
        if source.image_size is not None and set(processor.image_size) != {source.image_size}:
            raise XcompatError(
                f"{source.name} reads images of {'x'.join(map(str, processor.image_size))} pixels, and only image encoders of "
                f"transformers can be given another image_size ({source.image_size})"
            )
        return encoder, processor


@contextmanager
def reading_model(name: str, revision: str | None = None) -> Iterator[None]:
    """Turn every error of a library that reads a model in the block into one line.

    Args:
        name: of the model.
        revision: branch, tag or commit; None for the default branch.

    Raises:
        XcompatError: a file or revision is missing, weights are damaged, or the configuration is invalid or does not fit them.
    """
    try:
        with _fetching(name), _without_load_report(), limit_model_size(name):
            yield
    except (XcompatError, ImportError, MemoryError):
        raise
    except OSError as error:  # transformers and the Hub report a missing model, file or revision as OSError
        if error.errno is not None:
            raise
        raise XcompatError(f"cannot load {name}: {' '.join(str(error).split())}{_hint(revision)}") from error
    except SafetensorError as error:
        raise XcompatError(f"cannot load {name}: its weights are damaged ({error}); fetch or train it again") from error
    except Exception as error:  # libraries raise errors of many types for an invalid configuration
        raise XcompatError(f"cannot load {name}: {what_failed(error)}; fetch or train it again") from error


def _hint(revision: str | None) -> str:
    """Explain a revision that looks like the digits of a fingerprint, as messages print them behind a name."""
    if revision is None or re.fullmatch(r"[0-9a-f]{12}", revision) is None:
        return ""
    return f" ({revision} may be a fingerprint that xcompat printed; name a branch, tag or commit)"


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Silence transformers' tables of missing keys, which are an error here; a more verbose setting of the user's stays."""
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
    """Delete a model's damaged files from the Hub's cache if loading fails, so that the next attempt fetches them anew."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        from xcompat.encoders.hub_cache import drop_damaged

        if damaged := drop_damaged(name):
            raise XcompatError(
                f"cannot load {name}: what was fetched of it is damaged ({', '.join(damaged)}) and has been deleted; "
                "do it again, which fetches it anew"
            ) from error
        raise


@contextmanager
def _text_library() -> Iterator[None]:
    """Say how to install sentence-transformers where an import in the block does not find it."""
    try:
        yield
    except ImportError:
        raise XcompatError("models of texts need sentence-transformers; install it with `pip install xcompat[text]`") from None


def _load(source: EncoderSource) -> Encoder:
    if source.library == TEXTS:
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
        if not Path(source.name).is_dir():  # a folder has been checked
            check_config(PreTrainedConfig.get_config_dict(source.name, revision=where["revision"])[0], source.name)
        config = AutoConfig.from_pretrained(source.name, **where)
    except ValueError as error:  # no model_type, or one that transformers does not know
        raise XcompatError(f"cannot load {source.name}: {' '.join(str(error).split())}") from error
    if hasattr(config, "text_config"):
        from xcompat.encoders.transformers_encoder import load_transformers_encoder

        return load_transformers_encoder(source.name, source.revision, source.trust_remote_code)
    from xcompat.encoders.image_encoder import load_image_encoder

    return load_image_encoder(source.name, source.revision, source.trust_remote_code, source.image_size)


def load_processor(description: dict[str, Any], source: EncoderSource | str) -> Processor:
    """Load the preprocessing of an encoder.

    Args:
        description: the encoder's description.
        source: where the processor's files lie: beside the encoder, or a checkpoint's folder.

    Returns:
        The processor.

    Raises:
        XcompatError: its files are missing or damaged.
    """
    source = EncoderSource(name=source) if isinstance(source, str) else source
    try:
        with _fetching(source.name):
            return _load_processor(description, source)
    except Exception as error:  # transformers and tokenizers raise errors of many types for missing or damaged files
        if isinstance(error, XcompatError | ImportError | MemoryError) or getattr(error, "errno", None) is not None:
            raise
        reason = what_failed(error)
        raise XcompatError(
            f"{source.name} holds no preprocessing that can be read ({reason}); bring back its files (preprocessor_config.json, "
            "tokenizer.json, tokenizer_config.json) from where the model came from"
        ) from error


def _load_processor(description: dict[str, Any], source: EncoderSource) -> Processor:
    if description["library"] == "open_clip":
        from xcompat.encoders.open_clip_encoder import load_open_clip_processor, open_clip_folder

        return load_open_clip_processor(open_clip_folder(source.name, source.revision), description)
    if description["library"] == "transformers-image":
        from xcompat.encoders.image_encoder import load_image_processor

        return load_image_processor(source.name, source.revision, source.trust_remote_code, description, source.image_size)
    if description["library"] == TEXTS:
        from xcompat.encoders.text_processor import load_text_processor

        return load_text_processor(source.place, source.revision, source.trust_remote_code, description)
    from xcompat.encoders.transformers_encoder import load_transformers_processor

    return load_transformers_processor(source.name, source.revision, source.trust_remote_code, description)
