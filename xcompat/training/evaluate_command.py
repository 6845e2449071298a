"""``xcompat evaluate``: judge a recipe's result, a checkpoint, or plain embeddings from elsewhere."""

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
from xcompat.evaluation import Contestants, EmbeddedImages, EmbeddedPairs, EmbeddedTexts
from xcompat.evaluation.contestants import C
from xcompat.mapping.sides import read_labels
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, is_checkpoint, load_checkpoint, load_embedder
from xcompat.models.frozen import load_frozen
from xcompat.report import Report, ReportContent, load_report, print_report, report_file, write_report
from xcompat.training.contestants import EvaluationSet, map_contestant
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
from xcompat.training.evaluation_sets import PairTestSet, load_test_set
from xcompat.training.item_embeddings import read_embeddings
from xcompat.training.judging import as_chosen, embed_new, make_report, with_old_queries
from xcompat.training.overrides import apply_override
from xcompat.training.recipe import explain, load_recipe
from xcompat.training.record import find_model
from xcompat.training.run import run_recipe
from xcompat.training.sections import DataSettings, EvaluationSettings
from xcompat.vectors import BAD_SHARE

ABOUT_CLASSES = ("label_column", "classes", "class_column", "camera_column", "gallery")
"""Overrides that ask for images with classes, even for a checkpoint that embeds texts."""

Source = TypeVar("Source", PairSource, LabelledSource)


def settings_of(rerank: int | None, threshold: float | None) -> EvaluationSettings:
    """Return how the command line asks to judge.

    Raises:
        XcompatError: the threshold is no cosine.
    """
    if threshold is not None and not -1 < threshold < 1:
        raise XcompatError(f"--threshold {threshold:g} is no cosine; give a number between -1 and 1")
    return EvaluationSettings(rerank=rerank or 0, threshold=threshold)


def evaluate_recipe(target: Path, overrides: Sequence[str]) -> Report:
    """Judge the last evaluated stage of a recipe, after training the stages that are not done.

    Args:
        target: the recipe's YAML, or a run's folder that holds a report.
        overrides: ``key=value`` each.

    Returns:
        The report.

    Raises:
        XcompatError: the folder holds no report, or the recipe evaluates no stage.
    """
    if target.is_dir():
        if not report_file(target).exists():
            raise XcompatError(f"{target} holds no report; run `xcompat train` with its recipe, which ends with one")
        report = load_report(target)
        print_report(report, console)
        return report
    reports = run_recipe(load_recipe(target, overrides))
    if not reports:
        raise XcompatError(f"{target} evaluates nothing: give a stage an old model, a test set in data, and evaluation")
    return load_report(list(reports.values())[-1])


def evaluate_checkpoint(
    folder: Path,
    data: Path | None,
    overrides: Sequence[str],
    old: str | None,
    output: Path,
    settings: EvaluationSettings | None = None,
) -> Report:
    """Judge a saved checkpoint on images with captions, or on images with classes.

    The images have classes if the model embeds no texts, or if an override is about classes; else they have captions. As in a
    run, there is an independent model only for a map over its embeddings, or for images with captions.

    Args:
        folder: a checkpoint of this library.
        data: the images.
        overrides: how to read the images: ``key=value`` of :class:`~xcompat.data.PairSource`, such as ``caption_column=txt``, or
            of :class:`~xcompat.data.LabelledSource`, such as ``label_column=folder``; ``gallery=PATH`` names other images as the
            gallery, which are read in the same way. Without it the queries are the gallery.
        old: the old model, or a folder of its stored embeddings; the one named in the checkpoint if None.
        output: folder of the report.
        settings: how the result is judged; the defaults if None.

    Returns:
        The report.

    Raises:
        XcompatError: there is no checkpoint or no data, or the checkpoint is not compatible with the old model.
    """
    if not is_checkpoint(str(folder)):
        raise XcompatError(f"{folder} {NO_CHECKPOINT}")
    require_testable(folder, data, output)
    assert data is not None
    silence_libraries()
    model = torch.nn.Module.to(load_checkpoint(str(folder)), device())
    versions = model.compatible_with
    if not versions:
        raise XcompatError(f"{folder} was trained without an old model: there is no old gallery to judge it on")
    if versions[0].is_of_name:
        raise XcompatError(
            f"{folder} maps into the space of {versions[0].name!r}, which is a name and no model that can be loaded: "
            "judge embeddings of both models (--old, --new), or make the map again with the model itself as --old-model"
        )
    old_name = old or versions[0].name
    old_model = load_frozen(old_name, device())
    if old_model.fingerprint not in versions:  # before anything is embedded
        versions[0].require(old_model.fingerprint, f"the gallery of {old_model.name}")
    plain = plain_model(model) if model.embeds_in_memory else None
    test = _test_set(data, overrides, model.embeds_texts)
    if isinstance(test, PairTestSet) and plain is None:
        plain = plain_model(model)
    cache_dir = output / "cache"
    independent = test.embed(plain, cache_dir) if plain is not None else None
    contestants = embed_new(model, test.embed(old_model, cache_dir), independent, test, cache_dir)
    method = model.config.model_type.removeprefix("xcompat-")
    asked = as_chosen(settings or EvaluationSettings(), model)
    return _finish(make_report(contestants, test, asked, method, 0, run=provenance()), output)


def plain_model(model: CompatModel) -> Embedder | None:
    """Load the new model from before any training for compatibility; None if the checkpoint was trained from random weights."""
    described = model.config.encoder
    if described is None:
        raise XcompatError(f"{model.name_or_path} was fitted on embeddings alone: judge embeddings, with --old and --new")
    if described["name"] == FROM_SCRATCH:
        return None
    return load_embedder(EncoderSource.described(described), device())


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
        raise XcompatError(f"{where}: {explain(error, kind)}") from None


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
    """Judge embeddings made elsewhere.

    Each folder holds ``image_embeds.npy`` and ``text_embeds.npy`` and, one id a line, ``image_ids.txt`` and ``text_ids.txt``;
    a text's id is that of the image it describes. With judgements it holds ``query_embeds.npy`` and ``query_ids.txt`` in the
    place of images, and texts are passages with ids of their own; mapped queries need no passages beside them. Where no folder
    has texts, ``labels.txt`` (one class a line, in the old model's folder) says which images belong together. In place of a
    ``.npy`` file and its ids there may be a table with both (see :func:`~xcompat.vectors.read_vectors`).

    Args:
        old: embeddings of the old model.
        new: embeddings of the new model in the old space; with a map, in its own space.
        new_own: embeddings of the new model in its own space, if known.
        independent: embeddings of the new model without training for compatibility, if known.
        output: where the report goes.
        qrels: which passages are relevant to which queries, as :func:`xcompat.data.read_qrels` reads it.
        by_map: folder of a map of queries, such as ``xcompat map`` writes; it is applied to ``new``.
        max_bad_share: the share of a file's rows that may have no usable embedding; no model is judged on these items.
        settings: how the result is judged; the defaults if None.

    Returns:
        The report.

    Raises:
        XcompatError: the embeddings do not fit together, or not the map.
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
        loaded |= _mapped(loaded["new"], loaded["old"], by_map, model)
        settings = as_chosen(settings, model)
    elif (dim := loaded["new_view"].dim) != (searched := loaded["old"].dim):
        raise XcompatError(
            f"{new} has {dim} dimensions and {old} {searched}, but --new takes queries in the old space: add the map that takes "
            f"them there with --map FOLDER, or give mapped queries as --new, and {new} as --new-own"
        )
    return _finish(make_report(Contestants(**loaded), None, settings, "embeddings", 0, run=provenance()), output)


def _mapped(own: C, old: C, by_map: Path, model: CompatModel) -> dict[str, C]:
    """Apply a map of queries to the new model's own embeddings: its queries, and what a backfill would store."""
    if model.maps_galleries or not model.compatible_with:
        raise XcompatError(f"{by_map} maps no queries into an old space; name the folder of a map that `xcompat map` wrote")
    dims = model.config.embedding_dim, model.version_dims()[0][1]
    if (own.dim, old.dim) != dims:
        raise XcompatError(
            f"{by_map} maps {dims[0]} to {dims[1]} dimensions, but {own.name} has {own.dim} and {old.name} {old.dim}: give the "
            "embeddings of the two models that it was made for"
        )
    made = model.fingerprint()
    view = map_contestant(own.queries_alone(), by_map.name, made.derived("view"), model.view, model.device)
    view, alone = with_old_queries(model, view, old)
    backfilled = map_contestant(own, by_map.name, made.derived("backfilled"), model.own_view, model.device)
    return {"new_view": view, "backfilled": backfilled} | ({"alone": alone} if alone is not None else {})


def load_embedding_folder(folder: Path, max_bad_share: float = BAD_SHARE, like: EmbeddedPairs | None = None) -> EmbeddedPairs:
    """Read plain embeddings with ids.

    Args:
        folder: see :func:`evaluate_embeddings`.
        max_bad_share: see :func:`evaluate_embeddings`.
        like: the old model's embeddings, whose order of the items is taken.

    Returns:
        The embeddings; their fingerprint is the folder's name, as nothing else is known.

    Raises:
        XcompatError: a file is missing, is no array of numbers, or the counts differ.
    """
    require_files(folder, ("image", "text"))
    images_ND, image_ids = read_embeddings(folder, "image", max_bad_share, like.image_ids if like is not None else None)
    texts_MD, text_ids = read_embeddings(folder, "text", max_bad_share, like.text_ids if like is not None else None)
    return EmbeddedPairs(folder.name, Fingerprint.from_string(str(folder.resolve())), images_ND, texts_MD, image_ids, text_ids)


def _labelled_images(folders: dict[str, Path | None], max_bad_share: float) -> dict[str, EmbeddedImages]:
    """Read images of every model that is given; their classes are those of the first folder, the old model's."""
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
        raise XcompatError(f"{file} has {len(labels):,} lines for {count:,} images; they must be as many")
    return labels


def _judged_texts(folders: dict[str, Path | None], qrels: Path, max_bad_share: float) -> dict[str, EmbeddedTexts]:
    """Read queries and passages of every model that is given; of mapped queries there may be no passages."""
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
