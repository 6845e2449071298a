"""A stage's path checks, and digests of its test files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from xcompat.core.checksums import file_record
from xcompat.core.errors import MissingPathError, XcompatError, require_no_problems
from xcompat.core.paths import nearest_path
from xcompat.data import CorpusSource, LabelledSource, TextSource
from xcompat.data.addresses import list_addresses, redact_address
from xcompat.data.captions import require_class_folder, require_market1501_names
from xcompat.data.corpora import require_readable
from xcompat.data.image_files import image_files, images_below
from xcompat.data.judgements import require_qrels
from xcompat.data.sources import ImageSource, PairSource, files_digest, local_files, locate
from xcompat.data.templates import read_template_lists, require_images
from xcompat.encoders import EncoderSource
from xcompat.training.sections import DataSettings, JudgedTemplates, ZeroShotSettings
from xcompat.training.stage_recipe import ROLES, STAGE_PREFIX, StageRecipe
from xcompat.training.stored_models import require_stored

Source = CorpusSource | ImageSource | TextSource
CLASSES, CAPTIONS = "one class name per line", "captions, as `xcompat caption` writes it"


def check_paths(settings: StageRecipe, is_trained: bool = False) -> list[str]:
    """Raise if a local file or model is missing.

    Args:
        settings: the stage.
        is_trained: whether only test data matter, as the stage is trained.

    Returns:
        A line per data source: path and number of local files.

    Raises:
        XcompatError: a path is missing or invalid; with recipe key and nearest path.
    """
    described, problems = _examine_paths(settings, is_trained)
    require_no_problems(f"{settings.name}: {key}: {error}" for key, error in problems)
    return described


def find_missing_paths(settings: StageRecipe) -> tuple[list[str], list[tuple[str, str]]]:
    """Check all paths of a stage.

    Args:
        settings: the stage.

    Returns:
        Lines as in :func:`check_paths`, and (recipe key, message) per missing path.

    Raises:
        XcompatError: an existing path is invalid.
    """
    described, problems = _examine_paths(settings)
    missing = [(key, str(error)) for key, error in problems if isinstance(error, MissingPathError)]
    require_no_problems(f"{settings.name}: {key}: {error}" for key, error in problems if not isinstance(error, MissingPathError))
    return described, missing


def _examine_paths(settings: StageRecipe, is_trained: bool = False) -> tuple[list[str], list[tuple[str, XcompatError]]]:
    """Return a line per data source, and (recipe key, error) per invalid path."""
    described: list[str | None] = []
    problems: list[tuple[str, XcompatError]] = []
    for key, check in _path_checks(settings, is_trained):
        if any(isinstance(error, MissingPathError) and absent.startswith(f"{key}.") for absent, error in problems):
            continue  # this check needs the missing file
        try:
            described.append(check())
        except XcompatError as error:
            problems.append((key, error))
    return list(dict.fromkeys(line for line in described if line is not None)), problems


def _path_checks(settings: StageRecipe, is_trained: bool = False) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield each recipe key with a path, and its check."""
    for role in () if is_trained else (*ROLES, "projection"):
        named = getattr(settings, role)
        model = EncoderSource(name=named) if isinstance(named, str) else named
        if isinstance(model, EncoderSource) and not model.name.startswith(STAGE_PREFIX):
            yield role, partial(_check_model, model)
    data, prefix = _drop_training_data(settings.data) if is_trained else settings.data, "data."
    for key, source in _sources(data):
        yield f"{prefix}{key}.path", partial(_check_source, source)
    if data.judged_texts is not None:
        yield f"{prefix}judged_texts.qrels", partial(_check_judgements, data.judged_texts.qrels)
    if data.templates is not None:
        for key, file in data.templates.files().items():
            yield f"{prefix}templates.{key}", partial(_check_file, file, "a list in IJB-C's format")
        yield f"{prefix}templates", partial(_check_templates, data.templates)
    for key, file in _other_files(data):
        yield f"{prefix}{key}", partial(_check_file, file, CAPTIONS if key.endswith(".caption_file") else CLASSES)


def _check_model(model: EncoderSource) -> None:
    if not require_stored(model.name):
        model.check_folder()
        model.require_settings_used()


def _check_source(source: Source) -> str:
    """Return a source's path and its number of files."""
    streamed = isinstance(source, CorpusSource) or (isinstance(source, PairSource) and source.streaming)
    elsewhere = list_addresses(source.path) if streamed else None
    if elsewhere is not None:
        if isinstance(source, CorpusSource):
            require_readable(source, elsewhere)
        return f"{redact_address(elsewhere[0])} ({len(elsewhere)} remote)"
    files = local_files(source.path)
    if isinstance(source, ImageSource):
        _check_images(source, files)
    return f"{source.path} ({'on the Hub' if files is None else f'{len(files)} local'})"


def _check_judgements(file: str) -> None:
    require_qrels(file)


def _check_file(file: str, holds: str) -> None:
    if not Path(file).is_file():
        raise MissingPathError(f"{file} does not exist; use a file with {holds} ({nearest_path(file)})")


def _check_images(source: ImageSource, files: list[Path] | None) -> None:
    """Refuse unknown formats, invalid names, and images outside of class folders."""
    if source.format == "market1501":
        require_market1501_names(files or [])
    if files is None:
        return
    form, paths = locate(source)
    if form == "images" and (isinstance(source, LabelledSource) or (isinstance(source, PairSource) and source.with_labels)):
        require_class_folder(next(image for path in paths for image in images_below(path)), paths)


def _check_templates(named: JudgedTemplates) -> None:
    """Refuse inconsistent lists and missing images; decode none."""
    members = read_template_lists(named.members, named.pairs, named.gallery, named.probes).members
    form, paths = locate(named.images)
    if form == "images" and named.images.limit is None:
        require_images([name for _, name in image_files(paths)], members, str(named.images.path), named.members)


def judged_files(settings: StageRecipe) -> dict[str, str]:
    """Return digests of test files.

    Args:
        settings: the stage.

    Returns:
        Recipe key -> digest, without missing or remote data.
    """
    data = _drop_training_data(settings.data)
    named = {f"{key}.path": source.path for key, source in _sources(data)} | dict(_other_files(data))
    found = {}
    for key, path in named.items():
        with suppress(XcompatError):
            found[key] = files_digest(path)
    known = {key: digest for key, digest in found.items() if digest is not None}
    if data.judged_texts is not None and (qrels := Path(data.judged_texts.qrels)).is_file():
        known["judged_texts.qrels"] = file_record(qrels).xxh3  # files_digest compares sizes, which a changed gain may keep
    if data.templates is not None:
        lists = {f"templates.{key}": Path(file) for key, file in data.templates.files().items()}
        known |= {key: file_record(file).xxh3 for key, file in lists.items() if file.is_file()}
    return known


def _drop_training_data(data: DataSettings) -> DataSettings:
    """Return the data section without training data."""
    learned_from = ("pairs", "text_pairs", "remembered", "images", "subset")
    return data.model_copy(update={**dict.fromkeys(learned_from), "texts": []})


@contextmanager
def error_prefix(key: str) -> Iterator[None]:
    """Prefix errors with the recipe key."""
    try:
        yield
    except XcompatError as error:
        raise type(error)(*(f"{key}: {message}" for message in error.args)) from None


def _zero_shot_sets(data: DataSettings) -> Iterator[tuple[str, ZeroShotSettings]]:
    for name, shot in data.zero_shot_sets().items():
        yield f"zero_shot.{name}" if name else "zero_shot", shot


def _sources(data: DataSettings) -> Iterator[tuple[str, Source]]:
    for number, source in enumerate(data.texts):
        yield f"texts.{number}", source
    for key, shot in _zero_shot_sets(data):
        yield f"{key}.images", shot.images
    for key in ("pairs", "text_pairs", "remembered", "images", "test", "queries", "gallery"):
        if (source := getattr(data, key)) is not None:
            yield key, source
    if data.judged_texts is not None:
        yield "judged_texts.queries", data.judged_texts.queries
        yield "judged_texts.passages", data.judged_texts.passages
    if data.templates is not None:
        yield "templates.images", data.templates.images


def _other_files(data: DataSettings) -> Iterator[tuple[str, str]]:
    for key, shot in _zero_shot_sets(data):
        yield f"{key}.classes", shot.classes
    for key in ("images", "queries", "gallery", "subset", "test_subset"):
        for name in ("classes", "caption_file"):
            file = getattr(getattr(data, key), name, None)
            if isinstance(file, str):
                yield f"{key}.{name}", file
