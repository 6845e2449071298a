"""``xcompat evaluate``: evaluation of a recipe, a checkpoint, or embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from xcompat.core.distributed import device
from xcompat.core.errors import XcompatError
from xcompat.core.progress import console, literal, silence_libraries
from xcompat.core.provenance import provenance
from xcompat.data import LabelledSource, PairSource
from xcompat.encoders import EncoderSource
from xcompat.encoders.scratch import FROM_SCRATCH
from xcompat.evaluation import EvaluatedModels
from xcompat.evaluation.evaluated_models import C
from xcompat.evaluation.scores import as_rows
from xcompat.mapping.training_items import LEAST_SHARE, measure_known_items
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, is_checkpoint, load_checkpoint, load_embedder
from xcompat.report import Report, ReportContent, load_report, print_report, report_file, write_report
from xcompat.report.wording import EVIDENCE
from xcompat.stores.places import READ_AS_IT_IS, Place, Reading
from xcompat.training.embedding_folders import (
    NO_CHECKPOINT,
    choose_evidence,
    judged_folders,
    require_output,
    require_testable,
)
from xcompat.training.evaluation_models import EvaluationSet, map_contestant
from xcompat.training.evaluation_sets import PairTestSet, load_test_set
from xcompat.training.folder_test_sets import load_folders
from xcompat.training.model_evaluation import embed_new, make_report, map_queries, use_chosen_reranking
from xcompat.training.overrides import apply_override
from xcompat.training.recipe import explain, load_recipe
from xcompat.training.record import find_model
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
    from xcompat.training.run import run_recipe  # and with it all of training

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
    test = _test_set(data, overrides, model.embeds_texts)
    old_name = old or versions[0].name
    old_model = load_frozen(old_name, device())
    if old_model.fingerprint not in versions:  # raises before the slow embedding
        versions[0].require(old_model.fingerprint, f"the gallery of {old_model.name}")
    plain = plain_model(model) if model.embeds_in_memory else None
    if isinstance(test, PairTestSet) and plain is None:
        plain = plain_model(model)
    cache_dir = output / "cache"
    independent = test.embed(plain, cache_dir) if plain is not None else None
    contestants = embed_new(model, test.embed(old_model, cache_dir), independent, test, cache_dir)
    method = model.config.model_type.removeprefix("xcompat-")
    asked = use_chosen_reranking(settings or EvaluationSettings(), model)
    return _finish(make_report(contestants, test, asked, method, 0, new=model, run=provenance()), output)


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
    old: Place,
    new: Place,
    new_own: Place | None,
    independent: Place | None,
    output: Path,
    qrels: Path | None = None,
    by_map: Path | None = None,
    max_bad_share: float = BAD_SHARE,
    settings: EvaluationSettings | None = None,
    reading: Reading = READ_AS_IT_IS,
) -> Report:
    """Evaluate embeddings made elsewhere.

    Each place is a file, index, gallery or database (:func:`~xcompat.stores.places.read_place`), or a folder. A folder contains
    ``image_embeds.npy`` and ``text_embeds.npy``, and an id per line in ``image_ids.txt`` and ``text_ids.txt``:

    - Captions have the id of their image.
    - With ``qrels``, queries replace images, and texts are passages. Mapped queries need no passages.
    - Without ``qrels``, a query's id is the id of the text that answers it.
    - With a single kind of items, ``labels.txt`` has a class per line. Without it, agreement with the new model is measured.
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
        reading: column names, a file with the old ids, and a source of classes.

    Returns:
        The report.

    Raises:
        XcompatError: embeddings and map do not fit together.
    """
    require_output(output)
    folders = judged_folders(old, new, new_own, independent, by_map)
    evidence = choose_evidence(folders, qrels, reading.labels)
    loaded = load_folders(folders, evidence, qrels, max_bad_share, reading)
    settings, notes = settings or EvaluationSettings(), [evidence.described]
    if by_map is not None:
        silence_libraries()
        model = torch.nn.Module.to(load_checkpoint(str(find_model(by_map))), device())
        notes += _warn_of_training_items(model, loaded["old"])
        loaded |= _map_queries(loaded["new"], loaded["old"], by_map, model)
        settings = use_chosen_reranking(settings, model)
    elif (dim := loaded["new_view"].dim) != (searched := loaded["old"].dim):
        raise XcompatError(
            f"{new} has {dim} dimensions and {old} {searched}, so its queries are not in the old space; add --map FOLDER, "
            f"or give mapped queries to --new and {new} to --new-own"
        )
    about = provenance() | {EVIDENCE: evidence.kind}
    content = make_report(EvaluatedModels(**loaded), None, settings, "embeddings", 0, run=about)
    return _finish(content, output, notes)


def _map_queries(own: C, old: C, by_map: Path, model: CompatModel) -> dict[str, Any]:
    """Return mapped queries, also without the map's memory, and the vectors of a backfill."""
    if model.maps_galleries or not model.compatible_with:
        raise XcompatError(f"{by_map} does not map queries into an old space; choose a folder of `xcompat map`")
    dims = model.config.embedding_dim, model.config.versions[0].dim
    if (own.dim, old.dim) != dims:
        raise XcompatError(
            f"{by_map} maps {dims[0]} to {dims[1]} dimensions, but {own.name} has {own.dim} and {old.name} {old.dim}: use "
            "embeddings of the two models of the map"
        )
    view, alone, extra = map_queries(model, own.without_gallery(), old, by_map.name)
    stored = model.fingerprint().derive("backfilled")
    backfilled = map_contestant(own, by_map.name, stored, model.to_space_without_memory, model.device)
    return {"new_view": view, "backfilled": backfilled, "alone": alone, "extra": extra}


def _warn_of_training_items(model: CompatModel, old: C) -> list[str]:
    """Return a warning if the map was fitted on a share of the queries."""
    queries = old.without_gallery().matrices()
    shares = [measure_known_items(model.config.training_items or "", as_rows(rows, "queries")) for rows in queries.values()]
    if (share := max(shares)) < LEAST_SHARE:
        return []
    return [
        f"! These items trained the map (about {100 * share:.0f} % of the queries), so the result is too optimistic. Evaluate "
        "other items."
    ]


def _finish(content: ReportContent, output: Path, notes: Sequence[str] = ()) -> Report:
    evaluation = replace(content.evaluation, notes=[*notes, *content.evaluation.notes])
    page = write_report(output, replace(content, evaluation=evaluation))
    report = load_report(output)
    print_report(report, console)
    console.print(f"report: {literal(page)}", soft_wrap=True)
    return report
