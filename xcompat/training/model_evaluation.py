"""Evaluation of models: embeddings, metrics, report content."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xcompat.core.distributed import device, gather_objects, is_main_process
from xcompat.core.errors import XcompatError
from xcompat.core.fingerprint import Fingerprint
from xcompat.data.schema import SIDE_INFO
from xcompat.encoders import EncoderSource
from xcompat.evaluation import EmbeddedTexts, EvaluatedModel, EvaluatedModels, Evaluation, EvaluationOptions, evaluate, linear_cka
from xcompat.evaluation.cases import WITHOUT_MEMORY, backfill_losses
from xcompat.evaluation.evaluated_models import C
from xcompat.heads import slerp
from xcompat.mapping.query_cost import describe_rerank_cost
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder, penultimate_embedder
from xcompat.models.query_memory import QueryMemory
from xcompat.report import ReportContent
from xcompat.report.planning import RERANKED_HITS
from xcompat.report.wording import backfill_warning, threshold_lines
from xcompat.score_scale import CANDIDATES, OLD_WEIGHT
from xcompat.training.evaluation_models import EvaluationSet, display_name, map_contestant
from xcompat.training.fallback_eval import FALLBACK, confidence_of, describe_confidence, fallback_queries
from xcompat.training.sections import EvaluationSettings
from xcompat.training.stored_models import load_frozen


def embed_new(
    model: CompatModel,
    old: EvaluatedModel,
    independent: EvaluatedModel | None,
    test: EvaluationSet,
    cache_dir: Path,
    old_on_new: bool = False,
) -> EvaluatedModels:
    """Embed a test set with a compatible model.

    Args:
        model: the model; maps read ``independent``, or penultimate features.
        old: old embeddings.
        independent: the new model's embeddings without training for compatibility.
        test: the test set.
        cache_dir: cache folder.
        old_on_new: whether old queries also search the new view of the gallery.

    Returns:
        Old embeddings, new queries and own embeddings; for gallery maps also the mapped gallery and side-information.

    Raises:
        FingerprintMismatchError: the model belongs to another gallery or encoder.
    """
    model.require_version(old.fingerprint)
    fingerprint, name = model.fingerprint(), display_name(model.name_or_path or type(model).__name__)
    if model.embeds_in_memory:
        if independent is None:
            raise XcompatError(f"{name} is a map over embeddings of the new model; set new to this model")
        encoder = model.config.encoder
        Fingerprint(encoder["fingerprint"], encoder["name"]).require(independent.fingerprint, f"what {name} is applied to")
        # the new model's embeddings: self_view of cached features would round differently
        own = replace(independent, name=name, fingerprint=fingerprint)  # type: ignore[type-var]  # contestants are dataclasses
        raw = _map_input(model, independent, test, cache_dir)
    else:
        raw = test.embed(Embedder.from_model(model, "own"), cache_dir)
        own = map_contestant(raw, name, fingerprint, model.self_view, model.device)
    if model.maps_galleries:
        side_info, derived = side_info_of(model, test, cache_dir), fingerprint.derive("upgrade")
        upgraded = map_contestant(old, f"{old.name}, mapped", derived, model.upgrade, model.device, side_info)
        forgetful = None
        if model.memory is not None:
            named = f"{old.name}, mapped without memory", model.lineage.embeds.fingerprint.derive("upgrade")
            forgetful = map_contestant(old, *named, model.own_upgrade, model.device, side_info)
        return EvaluatedModels(old, own, own, independent, upgraded=upgraded, forgetful=forgetful, side_info=side_info)
    version, backfilled = old.fingerprint, None
    asking = raw if old_on_new else raw.without_gallery()
    if model.memory is not None or model.embeds_in_memory or model.lineage.stores.dim != model.config.embedding_dim:
        stored = fingerprint.derive("backfilled")  # otherwise new/new measures this
        backfilled = map_contestant(raw, name, stored, partial(model.to_space_without_memory, version=version), model.device)
    view, alone, extra = map_queries(model, asking, old, name, version)
    sure = _confidence(model, asking) if model.is_confident and version == model.compatible_with[0] else None
    return EvaluatedModels(old, view, own, independent, extra, confidence=sure, backfilled=backfilled, alone=alone)


def map_queries(
    model: CompatModel, asking: C, old: C, name: str, version: Fingerprint | None = None
) -> tuple[C, C | None, dict[str, C]]:
    """Map queries into the old space.

    Args:
        model: the map.
        asking: the new model's queries.
        old: old embeddings of the same items.
        name: display name of the results.
        version: the old space; None for the map's latest.

    Returns:
        The queries; the map's own ones if old queries are mixed in; and, for a map with a memory, the queries without it.
    """
    extra = {}
    if model.memory is not None:
        plain = model.lineage.embeds.fingerprint.derive("view")
        without_memory = partial(model.to_space_without_memory, version=version)
        extra[WITHOUT_MEMORY] = map_contestant(asking, name, plain, without_memory, model.device)
    view = map_contestant(
        asking, name, model.fingerprint().derive("view"), partial(model.to_space, version=version), model.device
    )
    return *mix_in_old_queries(model, view, old), extra


def use_chosen_reranking(settings: EvaluationSettings, model: CompatModel) -> EvaluationSettings:
    """Return settings with the model's re-ranking weight and number of hits, unless set."""
    config, chosen = model.config, dict[str, object]()
    if settings.rerank_weight is None:
        chosen["rerank_weight"] = config.rerank_old_weight
    if settings.rerank is True:
        chosen["rerank"] = config.rerank_candidates or CANDIDATES
    return settings.model_copy(update=chosen)


def _count_reranked(settings: EvaluationSettings) -> int:
    return CANDIDATES if settings.rerank is True else int(settings.rerank)


def mix_in_old_queries(model: CompatModel, view: C, old: C) -> tuple[C, C | None]:
    """Mix old queries into a map's queries, if it was chosen with a share of them.

    Args:
        model: any model.
        view: its queries in the old space.
        old: old embeddings of the same items.

    Returns:
        Mixed queries, and the map's own ones if different.
    """
    share = model.config.old_share
    return (view, None) if share is None else (mixed_queries(view, old, share), view)


def _confidence(model: CompatModel, asking: C) -> C:
    def confidence_of(embeds: Tensor) -> Tensor:
        confidence = model.confidence(embeds)
        assert confidence is not None
        return confidence[:, None]

    return map_contestant(asking, "confidence", model.fingerprint().derive("confidence"), confidence_of, model.device)


def apply_memory(model: C, memory: QueryMemory) -> C:
    """Apply a memory to a model's queries, to show its gain without a new model.

    Args:
        model: the old or new model's embeddings.
        memory: memory with keys of the same model.

    Returns:
        The same items.
    """
    named = f"{model.name} that remembers", model.fingerprint.derive("memory")
    return map_contestant(model, *named, lambda embeds: memory(embeds, embeds), torch.device("cpu"))


def _map_input(model: CompatModel, independent: EvaluatedModel, test: EvaluationSet, cache_dir: Path) -> EvaluatedModel:
    if not model.maps_features(vars(model.config)):
        return independent
    described = model.config.encoder
    new = load_embedder(EncoderSource.from_description(described), model.device)
    independent.fingerprint.require(new.fingerprint, f"the model at {described['name']}")
    return test.embed(penultimate_embedder(new), cache_dir)


def side_info_of(model: CompatModel, test: EvaluationSet, cache_dir: Path) -> EvaluatedModel | None:
    """Embed the test set with a map's side-information model, or return None."""
    described = getattr(model.config, SIDE_INFO, None)
    if described is None:
        return None
    name = described["name"]
    frozen = load_frozen(name, model.device)
    Fingerprint(described["fingerprint"], name).require(frozen.fingerprint, f"the model at {name}")
    return test.embed(frozen, cache_dir)


def evaluate_cases(
    contestants: EvaluatedModels, settings: EvaluationSettings, seed: int, shared: bool = False
) -> tuple[Evaluation, EvaluatedModels]:
    """Evaluate every case.

    Args:
        contestants: the models' embeddings.
        settings: cut-offs and resampling.
        seed: random seed for the bootstrap.
        shared: whether all processes call this and share the queries.

    Returns:
        The evaluation, and embeddings without unreadable images.
    """
    kept = contestants.without_unreadable()
    instead, notes = kept.old, []
    if settings.slerp is not None:
        instead = mixed_queries(kept.new_view, kept.old, settings.slerp)
        kept = replace(kept, extra={**kept.extra, "slerp": instead})
        notes.append(
            f"slerp/old searches with new queries mixed with old ones of weight {settings.slerp:g}, "
            "so both models embed every query."
        )
    if settings.fallback is not None and kept.confidence is not None:
        falling_back = fallback_queries(kept.new_view, instead, kept.confidence, settings.fallback)
        kept = replace(kept, extra={**kept.extra, FALLBACK: falling_back})
    options = EvaluationOptions(
        settings.ks,
        settings.old_on_new,
        settings.chunk_size,
        settings.resamples,
        seed=seed,
        shared=shared,
        fars=settings.fars,
        fpirs=settings.fpirs,
        rerank=_count_reranked(settings),
        rerank_weight=OLD_WEIGHT if settings.rerank_weight is None else settings.rerank_weight,
        threshold=settings.threshold,
        device=device(),
    )
    evaluation = evaluate(kept, options)
    if kept.confidence is not None:
        evaluation = replace(evaluation, confidence=confidence_of(kept.confidence, evaluation))
        notes += describe_confidence(evaluation, settings.fallback)
    notes += threshold_lines(evaluation.thresholds)
    if losses := backfill_losses(evaluation.cases):
        notes.append(backfill_warning(losses))
    if kept.side_info is not None:
        mine = _complementarity(kept.old, kept.side_info) if is_main_process() or not shared else ""
        notes.append(gather_objects(mine, shared)[0])
    return replace(evaluation, notes=[*evaluation.notes, *notes]), kept


def mixed_queries(new_view: C, old: C, share: float) -> C:
    """Mix new and old queries for the same items.

    Args:
        new_view: new queries in the old space.
        old: the old model.
        share: weight of old queries, 0 to 1.

    Returns:
        The same items; NaN if unreadable for either model.
    """
    if "l2" in (getattr(model, "metric", "cosine") for model in (new_view, old)):
        raise XcompatError("evaluation.slerp does not work with L2 distance; set it to null")
    fingerprint = new_view.fingerprint.derive(f"slerp {share} {old.fingerprint.digest}")
    return map_contestant(new_view, "slerp", fingerprint, partial(slerp, share=share), torch.device("cpu"), old)


def _complementarity(old: EvaluatedModel, side_info: EvaluatedModel) -> str:
    """Compare old embeddings and side-information (FCT §5.3)."""
    which = f"Linear CKA between old embeddings of the gallery and side-information of {side_info.name}"
    kind = "texts" if isinstance(old, EmbeddedTexts) else "images"
    try:
        alike = linear_cka(old.matrices()[kind], side_info.matrices()[kind], device())
    except XcompatError as error:  # a collapsed model, which the report shows anyway
        return f"{which} could not be computed: {error}."
    return f"{which}: {alike:.2f} (1: side-information adds nothing linear)."


def make_report(
    contestants: EvaluatedModels,
    test: EvaluationSet | None,
    settings: EvaluationSettings,
    method: str,
    seed: int,
    shared: bool = False,
    new: CompatModel | None = None,
    **about: Any,  # noqa: ANN401
) -> ReportContent:
    """Evaluate, and return the report's content.

    Args:
        contestants: the models' embeddings.
        test: the test set for example searches, or None.
        settings: evaluation settings.
        method: method name.
        seed: random seed for bootstrap, examples and t-SNE.
        shared: whether all processes call this and share the queries.
        new: the new model, to measure the cost of re-ranking.
        about: ``seconds``, ``run`` and ``training`` of :class:`ReportContent`.
    """
    evaluation, kept = evaluate_cases(contestants, settings, seed, shared)
    if settings.rerank and new is not None and is_main_process():
        cost = describe_rerank_cost(Embedder.from_model(new, "own"), _count_reranked(settings))
        evaluation = replace(evaluation, notes=[*evaluation.notes, cost])
    examples = []
    if test and settings.examples and is_main_process():  # of all rows, as ``kept`` numbers them otherwise
        searched = contestants.old if contestants.upgraded is None else contestants.upgraded
        examples = test.examples(contestants.old, contestants.new_view, searched, settings.examples, seed)
    if settings.rerank:
        about["run"] = about.get("run", {}) | {RERANKED_HITS: _count_reranked(settings)}
    shown: dict[str, Any] = {"examples": examples, "tsne_pairs": settings.tsne_pairs, "seed": seed}
    return ReportContent(evaluation, kept, method, **shown, **about)
