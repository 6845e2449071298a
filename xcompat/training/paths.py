"""The paths that a stage names: check that they exist before training, and identify the files that a report was made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from xcompat.checksums import file_record
from xcompat.data import CorpusSource, LabelledSource, TextSource
from xcompat.data.addresses import addresses, shown
from xcompat.data.captions import require_class_folder, require_market1501_names
from xcompat.data.corpora import require_readable
from xcompat.data.judgements import require_qrels
from xcompat.data.picture_files import image_files, images_below
from xcompat.data.sources import ImageSource, PairSource, files_digest, local_files, locate
from xcompat.data.templates import read_template_lists, require_images
from xcompat.encoders import EncoderSource
from xcompat.errors import XcompatError
from xcompat.paths import nearest_path
from xcompat.training.sections import DataSettings, JudgedTemplates, ZeroShotSettings
from xcompat.training.stage_recipe import ROLES, STAGE_PREFIX, StageRecipe
from xcompat.vectors import check_stored

Source = CorpusSource | ImageSource | TextSource
CLASSES, CAPTIONS = "one class name a line", "captions, as `xcompat caption` writes it"


def check_paths(settings: StageRecipe, is_trained: bool = False) -> list[str]:
    """Refuse local files and folders of models that are not there.

    Args:
        settings: the stage.
        is_trained: whether the stage is trained, so that only its test data are read.

    Returns:
        One line for each source of data: its path and its number of local files.

    Raises:
        XcompatError: a path does not exist, holds no images, or a file is not named as its format asks; the message names the key
            of the recipe and the nearest path.
    """
    if not is_trained:
        for role in (*ROLES, "projection"):
            named = getattr(settings, role)
            model = EncoderSource(name=named) if isinstance(named, str) else named
            if isinstance(model, EncoderSource) and not model.name.startswith(STAGE_PREFIX):
                with said_of(f"{settings.name}: {role}"):
                    if not check_stored(Path(model.name)):
                        model.check_folder()
    data = _judged(settings.data) if is_trained else settings.data
    described = []
    for key, source in _sources(data):
        with said_of(f"{settings.name}: data.{key}.path"):
            streamed = isinstance(source, CorpusSource) or (isinstance(source, PairSource) and source.streaming)
            elsewhere = addresses(source.path) if streamed else None
            if elsewhere is not None:
                if isinstance(source, CorpusSource):
                    require_readable(source, elsewhere)
                described.append(f"{shown(elsewhere[0])} ({len(elsewhere)} elsewhere)")
                continue
            files = local_files(source.path)
            if isinstance(source, ImageSource):
                _check_images(source, files)
        described.append(f"{source.path} ({'on the Hub' if files is None else f'{len(files)} local'})")
    _check_lists(settings.name, data)
    return list(dict.fromkeys(described))


def _check_images(source: ImageSource, files: list[Path] | None) -> None:
    """Refuse files of no known format, names without a person, and pictures of which the first lies in no class's folder."""
    if source.format == "market1501":
        require_market1501_names(files or [])
    if files is None:
        return
    form, paths = locate(source)
    if form == "images" and (isinstance(source, LabelledSource) or (isinstance(source, PairSource) and source.with_labels)):
        require_class_folder(next(picture for path in paths for picture in images_below(path)), paths)


def _check_lists(stage: str, data: DataSettings) -> None:
    """Refuse files beside the data that are not there, or name what is not there."""
    if data.judged_texts is not None:
        with said_of(f"{stage}: data.judged_texts.qrels"):
            require_qrels(data.judged_texts.qrels)
    if data.templates is not None:
        with said_of(f"{stage}: data.templates"):
            _check_templates(data.templates)
    for key, file in _other_files(data):
        if not Path(file).is_file():
            holds = CAPTIONS if key.endswith(".caption_file") else CLASSES
            raise XcompatError(f"{stage}: data.{key}: {file} does not exist; name a file with {holds} ({nearest_path(file)})")


def _check_templates(named: JudgedTemplates) -> None:
    """Refuse lists that do not fit each other, or images in folders of which some are missing; no picture is read."""
    members = read_template_lists(named.members, named.pairs, named.gallery, named.probes).members
    form, paths = locate(named.images)
    if form == "images" and named.images.limit is None:
        require_images([name for _, name in image_files(paths)], members, str(named.images.path), named.members)


def judged_files(settings: StageRecipe) -> dict[str, str]:
    """Identify the files of a stage's test data.

    Args:
        settings: the stage.

    Returns:
        Key of the recipe -> digest; without data on the Hub and missing files.
    """
    data = _judged(settings.data)
    named = {f"{key}.path": source.path for key, source in _sources(data)} | dict(_other_files(data))
    found = {}
    for key, path in named.items():
        with suppress(XcompatError):
            found[key] = files_digest(path)
    known = {key: digest for key, digest in found.items() if digest is not None}
    if data.judged_texts is not None and (qrels := Path(data.judged_texts.qrels)).is_file():
        known["judged_texts.qrels"] = file_record(qrels).xxh3  # a gain that changes need not change the size
    if data.templates is not None:
        lists = {f"templates.{key}": Path(file) for key, file in data.templates.files().items()}
        known |= {key: file_record(file).xxh3 for key, file in lists.items() if file.is_file()}
    return known


def _judged(data: DataSettings) -> DataSettings:
    """Return the data section without training data."""
    learned_from = ("pairs", "text_pairs", "remembered", "images", "subset")
    return data.model_copy(update={**dict.fromkeys(learned_from), "texts": []})


@contextmanager
def said_of(key: str) -> Iterator[None]:
    """Say in an error of which key of a recipe it is."""
    try:
        yield
    except XcompatError as error:
        raise XcompatError(f"{key}: {error}") from None


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
