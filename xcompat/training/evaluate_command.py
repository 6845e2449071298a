"""``xcompat evaluate``: evaluation of a recipe, a checkpoint, or embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.core.progress import console, literal, silence_libraries
from xcompat.core.provenance import provenance
from xcompat.data import LabelledSource, PairSource, read_qrels
from xcompat.encoders import EncoderSource
from xcompat.encoders.scratch import FROM_SCRATCH
from xcompat.evaluation import EmbeddedImages, EmbeddedPairs, EmbeddedTexts, EvaluatedModels
from xcompat.evaluation.evaluated_models import C
from xcompat.mapping.sides import read_labels
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, is_checkpoint, load_checkpoint, load_embedder
from xcompat.report import Report, ReportContent, load_report, print_report, report_file, write_report
from xcompat.training.embedding_folders import (
    NO_CHECKPOINT,
    has_texts,
    judged_folders,
    kinds_judged,
    require_files,
    require_labels,
    require_output,
    require_testable,
)
from xcompat.training.evaluation_models import EvaluationSet, map_contestant
from xcompat.training.evaluation_sets import PairTestSet, load_test_set
from xcompat.training.item_embeddings import read_embeddings
from xcompat.training.model_evaluation import embed_new, make_report, map_queries, use_chosen_reranking
from xcompat.training.overrides import apply_override
from xcompat.training.recipe import explain, load_recipe
from xcompat.training.record import find_model
from xcompat.training.run import run_recipe
from xcompat.training.sections import DataSettings, EvaluationSettings
from xcompat.training.stored_models import load_frozen
from xcompat.vectors.checks import BAD_SHARE

ABOUT_CLASSES = ("label_column", "classes", "class_column", "camera_column", "gallery")
"""Overrides that imply images with classes."""

Source = TypeVar("Source", PairSource, LabelledSource)


def evaluation_settings(rerank: int | bool | None, threshold: float | None) -> EvaluationSettings:
    """Return evaluation settings of the command line.

    Raises:
        XcompatError: the threshold is not a cosine.
    """
    if threshold is not None and not -1 < threshold < 1:
        raise XcompatError(f"invalid --threshold {threshold:g}: a cosine is a number between -1 and 1")
    return EvaluationSettings(rerank=rerank or 0, threshold=threshold)


def evaluate_recipe(target: Path, overrides: Sequence[str]) -> Report:
    """Train unfinished stages, and evaluate the last evaluated stage.

    Args:
        target: a recipe, or a run with a report.
        overrides: ``key=value`` each.

    Returns:
        The report.

    Raises:
        XcompatError: there is no report, or no stage to evaluate.
    """
    if target.is_dir():
        if not report_file(target).exists():
            raise XcompatError(f"{target} contains no report; run `xcompat train` with its recipe")
        report = load_report(target)
        print_report(report, console)
        return report
    reports = run_recipe(load_recipe(target, overrides))
    if not reports:
        raise XcompatError(f"{target} evaluates nothing: a stage needs an old model, a test set in data, and evaluation")
    return load_report(list(reports.values())[-1])


def evaluate_checkpoint(
    folder: Path,
    data: Path | None,
    overrides: Sequence[str],
    old: str | None,
    output: Path,
    settings: EvaluationSettings | None = None,
) -> Report:
    """Evaluate a checkpoint on images with captions or classes.

    Images have classes if the model embeds no texts or an override is about classes. Only maps and captions use an independent
    model.

    Args:
        folder: an xcompat checkpoint.
        data: the images.
        overrides: ``key=value`` of :class:`~xcompat.data.PairSource` or :class:`~xcompat.data.LabelledSource`, e.g.
            ``caption_column=txt``. ``gallery=PATH`` sets a separate gallery.
        old: the old model or its stored embeddings; default: the checkpoint's.
        output: report folder.
        settings: evaluation settings, or None.

    Returns:
        The report.

    Raises:
        XcompatError: checkpoint or data are missing, or the old model is incompatible.
    """
    if not is_checkpoint(str(folder)):
        raise XcompatError(f"{folder} {NO_CHECKPOINT}")
    require_testable(folder, data, output)
    assert data is not None
    silence_libraries()
    model = torch.nn.Module.to(load_checkpoint(str(folder)), device())
    versions = model.compatible_with
    if not versions:
        raise XcompatError(f"{folder} was trained without an old model, so there is no old gallery to evaluate it on")
    if versions[0].is_name_only:
        raise XcompatError(
            f"{folder} maps into the space of {versions[0].name!r}, which is only a name: evaluate embeddings of both models "
            "(--old, --new), or fit the map again with the model itself as --old-model"
        )
    old_name = old or versions[0].name
    old_model = load_frozen(old_name, device())
    if old_model.fingerprint not in versions:  # raises before the slow embedding
        versions[0].require(old_model.fingerprint, f"the gallery of {old_model.name}")
    plain = plain_model(model) if model.embeds_in_memory else None
    test = _test_set(data, overrides, model.embeds_texts)
    if isinstance(test, PairTestSet) and plain is None:
        plain = plain_model(model)
    cache_dir = output / "cache"
    independent = test.embed(plain, cache_dir) if plain is not None else None
    contestants = embed_new(model, test.embed(old_model, cache_dir), independent, test, cache_dir)
    method = model.config.model_type.removeprefix("xcompat-")
    asked = use_chosen_reranking(settings or EvaluationSettings(), model)
    return _finish(make_report(contestants, test, asked, method, 0, run=provenance()), output)


def plain_model(model: CompatModel) -> Embedder | None:
    """Load the new model without training for compatibility; None if trained from scratch."""
    described = model.config.encoder
    if described is None:
        raise XcompatError(f"{model.name_or_path} was fitted on embeddings only: evaluate embeddings with --old and --new")
    if described["name"] == FROM_SCRATCH:
        return None
    return load_embedder(EncoderSource.from_description(described), device())


def _test_set(data: Path, overrides: Sequence[str], embeds_texts: bool) -> EvaluationSet:
    given: dict[str, Any] = {"path": str(data)}
    for override in overrides:
        apply_override(given, override)
    if embeds_texts and not given.keys() & set(ABOUT_CLASSES):
        settings = DataSettings(test=_source(PairSource, given, "--data"))
    else:
        searched = given.pop("gallery", None)
        gallery = _source(LabelledSource, given | {"path": searched}, "gallery") if searched is not None else None
        settings = DataSettings(queries=_source(LabelledSource, given, "--data"), gallery=gallery)
    test = load_test_set(settings)
    assert test is not None
    return test


def _source(kind: type[Source], given: dict[str, Any], where: str) -> Source:
    try:
        return kind(**given)
    except ValidationError as error:
        raise XcompatError(*(f"{where}: {problem}" for problem in explain(error, kind))) from None


def evaluate_embeddings(
    old: Path,
    new: Path,
    new_own: Path | None,
    independent: Path | None,
    output: Path,
    qrels: Path | None = None,
    by_map: Path | None = None,
    max_bad_share: float = BAD_SHARE,
    settings: EvaluationSettings | None = None,
) -> Report:
    """Evaluate embeddings made elsewhere.

    Each folder contains ``image_embeds.npy`` and ``text_embeds.npy``, and an id per line in ``image_ids.txt`` and
    ``text_ids.txt``:

    - Captions have the id of their image.
    - With ``qrels``, queries replace images, and texts are passages. Mapped queries need no passages.
    - Without texts, ``labels.txt`` in the old folder has a class per line.
    - A table can replace a ``.npy`` file and its ids (:func:`~xcompat.vectors.read_vectors`).

    Args:
        old: the old model's embeddings.
        new: new embeddings in the old space; with ``by_map``, in the new space.
        new_own: new embeddings in the new space, if known.
        independent: the new model's embeddings without training for compatibility, if known.
        output: report folder.
        qrels: relevance judgements (:func:`xcompat.data.read_qrels`).
        by_map: folder of a query map for ``new``.
        max_bad_share: maximum share of rows without a usable embedding.
        settings: evaluation settings, or None.

    Returns:
        The report.

    Raises:
        XcompatError: embeddings and map do not fit together.
    """
    require_output(output)
    folders = judged_folders(old, new, new_own, independent, by_map)
    if qrels is not None:
        loaded: dict[str, Any] = _judged_texts(folders, qrels, max_bad_share)
    elif not any(has_texts(folder) for folder in folders.values() if folder is not None):
        loaded = _labelled_images(folders, max_bad_share)
    else:
        loaded = {}
        for role, folder in folders.items():
            if folder is not None:
                loaded[role] = load_embedding_folder(folder, max_bad_share, loaded.get("old"))
    settings = settings or EvaluationSettings()
    if by_map is not None:
        model = torch.nn.Module.to(load_checkpoint(str(find_model(by_map))), device())
        loaded |= _map_queries(loaded["new"], loaded["old"], by_map, model)
        settings = use_chosen_reranking(settings, model)
    elif (dim := loaded["new_view"].dim) != (searched := loaded["old"].dim):
        raise XcompatError(
            f"{new} has {dim} dimensions and {old} {searched}, but --new takes queries in the old space: add their map with "
            f"--map FOLDER, or pass mapped queries as --new, and {new} as --new-own"
        )
    return _finish(make_report(EvaluatedModels(**loaded), None, settings, "embeddings", 0, run=provenance()), output)


def _map_queries(own: C, old: C, by_map: Path, model: CompatModel) -> dict[str, Any]:
    """Return mapped queries, also without the map's memory, and the vectors of a backfill."""
    if model.maps_galleries or not model.compatible_with:
        raise XcompatError(f"{by_map} does not map queries into an old space; choose a folder of `xcompat map`")
    dims = model.config.embedding_dim, model.version_dims()[0][1]
    if (own.dim, old.dim) != dims:
        raise XcompatError(
            f"{by_map} maps {dims[0]} to {dims[1]} dimensions, but {own.name} has {own.dim} and {old.name} {old.dim}: use "
            "embeddings of the two models of the map"
        )
    view, alone, extra = map_queries(model, own.without_gallery(), old, by_map.name)
    stored = model.fingerprint().derive("backfilled")
    backfilled = map_contestant(own, by_map.name, stored, model.to_space_without_memory, model.device)
    return {"new_view": view, "backfilled": backfilled, "alone": alone, "extra": extra}


def load_embedding_folder(folder: Path, max_bad_share: float = BAD_SHARE, like: EmbeddedPairs | None = None) -> EmbeddedPairs:
    """Read embeddings with ids.

    Args:
        folder: see :func:`evaluate_embeddings`.
        max_bad_share: see :func:`evaluate_embeddings`.
        like: old embeddings, for the item order.

    Returns:
        The embeddings, with the folder as fingerprint.

    Raises:
        XcompatError: a file is missing or invalid, or counts differ.
    """
    require_files(folder, ("image", "text"))
    images_ND, image_ids = read_embeddings(folder, "image", max_bad_share, like.image_ids if like is not None else None)
    texts_MD, text_ids = read_embeddings(folder, "text", max_bad_share, like.text_ids if like is not None else None)
    return EmbeddedPairs(folder.name, Fingerprint.from_string(str(folder.resolve())), images_ND, texts_MD, image_ids, text_ids)


def _labelled_images(folders: dict[str, Path | None], max_bad_share: float) -> dict[str, EmbeddedImages]:
    old, loaded = folders["old"], dict[str, EmbeddedImages]()
    assert old is not None
    for role, folder in folders.items():
        if folder is None:
            continue
        require_files(folder, ("image",))
        images_ND, ids = read_embeddings(folder, "image", max_bad_share, loaded["old"].query_ids if loaded else None)
        labels = _labels(old, len(ids)) if role == "old" else loaded["old"].query_labels
        fingerprint = Fingerprint.from_string(str(folder.resolve()))
        loaded[role] = EmbeddedImages(folder.name, fingerprint, images_ND, images_ND, ids, ids, labels, labels)
    return loaded


def _labels(folder: Path, count: int) -> list[str]:
    file = require_labels(folder)
    if len(labels := read_labels(file)) != count:
        raise XcompatError(f"{file} has {len(labels):,} lines for {count:,} images; the counts must be equal")
    return labels


def _judged_texts(folders: dict[str, Path | None], qrels: Path, max_bad_share: float) -> dict[str, EmbeddedTexts]:
    judgements, loaded = read_qrels(qrels), dict[str, EmbeddedTexts]()
    for role, folder in folders.items():
        if folder is None:
            continue
        kinds = kinds_judged(role, folder)
        require_files(folder, kinds)
        like_queries, like_texts = (loaded["old"].query_ids, loaded["old"].text_ids) if loaded else (None, None)
        queries_QD, query_ids = read_embeddings(folder, "query", max_bad_share, like_queries)
        texts_GD, text_ids = (
            read_embeddings(folder, "text", max_bad_share, like_texts) if "text" in kinds else (None, loaded["old"].text_ids)
        )
        fingerprint = Fingerprint.from_string(str(folder.resolve()))
        loaded[role] = EmbeddedTexts(folder.name, fingerprint, queries_QD, texts_GD, query_ids, text_ids, judgements)
    return loaded


def _finish(content: ReportContent, output: Path) -> Report:
    page = write_report(output, content)
    report = load_report(output)
    print_report(report, console)
    console.print(f"report: {literal(page)}")
    return report
