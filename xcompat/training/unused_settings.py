"""Recipe settings without effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xcompat.core.errors import collect_problems, require_no_problems
from xcompat.data import PairSource
from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS
from xcompat.encoders.scratch import ScratchSource
from xcompat.training.sections import EvaluationSettings
from xcompat.training.stage_recipe import AUTO_MAP, StageRecipe, method_class
from xcompat.training.values import dependent_fields, is_default

Setting = tuple[str, bool, str]
"""Name of a setting, whether a stage reads it, and the reason if not."""


def refuse_unused(stages: Sequence[StageRecipe], known: Iterable[str] = ()) -> None:
    """Raise for settings that no stage reads.

    Opening a run skips this check, so older runs still open.

    Args:
        stages: all stages of a recipe.
        known: problems of the recipe. A setting that they name is not a problem again.

    Raises:
        XcompatError: a line for each setting, with stage and reason.
    """
    found: list[tuple[StageRecipe, str]] = []
    for stage in stages:
        options: list[str] = []
        with collect_problems(options):
            method_class(stage.method).refuse_unread(stage.options, on_captions=_learns_from_captions(stage))
        found += [(stage, problem) for problem in options]
    found += [(stage, f"{setting} has no effect: {why}; remove it") for stage, setting, why in _unread(stages, _settings)]
    named = set(re.findall(r"[\w.]*\w", " ".join(known)))
    new = [(stage, problem) for stage, problem in found if re.split("[: ]", problem)[0] not in named]
    require_no_problems(f"stage {stage.name!r}: {problem}" for stage, problem in new)


def describe_unused_sections(stages: Sequence[StageRecipe]) -> list[str]:
    """Return a warning for each unread section, which other methods can use."""
    return [f"{stage.name}: {section} has no effect: {why}" for stage, section, why in _unread(stages, _sections)]


def find_unused_settings(stage: StageRecipe) -> dict[str, str]:
    """Return a stage's settings without effect, with reasons."""
    return {setting: why for _, setting, why in _unread([stage], _settings)}


def _unread(
    stages: Sequence[StageRecipe], kinds: Callable[[StageRecipe], Iterable[Setting]]
) -> Iterator[tuple[StageRecipe, str, str]]:
    """Yield unread settings with their first stage."""
    read = {setting for stage in stages for setting, is_read, _ in kinds(stage) if is_read and _is_given(stage, setting)}
    seen = set(read)
    for stage in stages:
        for setting, _, why in kinds(stage):
            if setting not in seen and _is_given(stage, setting):
                seen.add(setting)
                yield stage, setting, why


def _is_given(stage: StageRecipe, setting: str) -> bool:
    section: Any = stage
    *outer, name = setting.split(".")
    for part in outer:
        if isinstance(section, list):
            section = section[int(part)]
        else:
            section = section.get(part) if isinstance(section, dict) else getattr(section, part)
        if section is None:
            return False
    if isinstance(section, dict):
        return name in section and not is_default(name, section[name])
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))


def _learns_from_captions(stage: StageRecipe) -> bool:
    return stage.data.images is None and (stage.data.pairs is not None or stage.data.text_pairs is not None)


def _reads_pairs(stage: StageRecipe) -> bool:
    """Return whether captioned images are trained on, remembered, or used for a tokenizer."""
    if stage.learns_from_pairs and stage.data.remembered is None:
        return True
    if method_class(stage.method).embeds_in_memory:
        return stage.method != AUTO_MAP and stage.data.images is None and stage.data.embeddings_of == "images"
    return stage.trains_on_captions or stage.learns_from_texts


def _sections(stage: StageRecipe) -> Iterator[Setting]:
    method, what, data = method_class(stage.method), f"method {stage.method}", stage.data
    yield "old", method.compares_with_old, f"{what} is trained without an old model"
    embeds_only = stage.training.keys() <= {"bf16_full_eval", "fp16_full_eval"}  # read by frozen models
    yield "training", stage.is_trained or embeds_only, f"{what} is solved, not trained"
    yield "data.texts", stage.learns_from_texts, f"{what} does not learn from texts"
    yield "data.pairs", _reads_pairs(stage), f"{what} does not learn from images with captions"
    yield "data.text_pairs", stage.trains_on_captions, f"{what} does not learn from text pairs"
    unjudged = "data has no test set" if stage.evaluation is not None else "evaluation is null"
    if data.tests() and stage.evaluation is not None:
        unjudged = f"{what} has no old model to compare with, and no report"
    learned = stage.trains_on_labelled and NEW_EMBEDS in method.columns
    yield "independent", stage.is_judged or learned, unjudged
    for name in ("test", "judged_texts"):
        yield f"data.{name}", stage.is_judged or stage.learns_from_texts, unjudged
    for name in ("queries", "templates"):
        yield f"data.{name}", stage.is_judged, unjudged
    if stage.evaluation is not None and data.tests():
        yield "evaluation", stage.is_judged, unjudged


def _settings(stage: StageRecipe) -> Iterator[Setting]:
    yield from _stage_settings(stage)
    yield from _data_settings(stage)
    yield from _source_settings(stage)
    if stage.evaluation is not None:
        yield from _evaluation_settings(stage)
    if stage.is_trained:
        for name, is_read, why in dependent_fields(stage.training):
            yield f"training.{name}", is_read, why


def _stage_settings(stage: StageRecipe) -> Iterator[Setting]:
    method, chosen = method_class(stage.method), stage.method == AUTO_MAP
    what, maps = f"method {stage.method}", method.embeds_in_memory
    yield "seed_offset", not method.is_solved or stage.memory is not None, f"{what} is solved without a seed"
    yield "prompt_lr_factor", bool((stage.options.get("adapters") or {}).get("prompts")), "options.adapters has no prompts"
    frozen = f"{what} trains a map, not an encoder" if maps else "the encoder's own weights are frozen"
    yield "encoder_lr_factor", method.trains_encoder(stage.options), frozen
    yield "weight_decay_on", stage.is_trained and bool(stage.training.get("weight_decay")), "training.weight_decay is 0"
    yield "sync_batch_norm", stage.is_trained, f"{what} is solved, not trained"
    yield "searched_classes", stage.memory is not None or chosen, "there is no memory"
    yield "allow_worse", chosen, "only recipes without a method use it"
    yield "projection", method.starts_from_projection, f"{what} does not start from one"
    learned = stage.trains_on_labelled and NEW_EMBEDS in method.columns
    yield "independent", method.compares_with_old or learned, f"{what} does not learn from it, and no report compares with it"
    for role in ("side_info", "new_side_info"):
        yield role, role in {*method.columns, *method.columns_if_known}, f"{what} does not read it"


def _data_settings(stage: StageRecipe) -> Iterator[Setting]:
    method, data = method_class(stage.method), stage.data
    what, maps = f"method {stage.method}", method.embeds_in_memory
    drawn = data.text_pairs is not None or (data.pairs is not None and not data.pairs.streaming)  # drawn by row

    views = stage.embeds_images and data.views > 0
    unseen = "embeddings of plain images without data.views" if stage.embeds_images else "embeddings" if maps else "texts"
    yield "data.augmentation", (not maps and data.text_pairs is None) or views, f"{what} learns from {unseen}"
    augmented = data.augmentation is not None and not data.augmentation.is_none
    why = f"{what} does not learn a map of images" if not stage.embeds_images else "data.augmentation changes nothing"
    yield "data.views", stage.embeds_images and augmented, why
    reads_old = (stage.trains_on_labelled and OLD_EMBEDS in method.columns) or stage.compares_pairs_with_old
    yield "data.old_embeddings", reads_old, f"{what} does not read old embeddings of labelled images or pairs"
    reads_new = stage.trains_on_labelled and NEW_EMBEDS in method.columns
    yield "data.new_embeddings", reads_new, f"{what} does not read embeddings of an independent model"
    yield "data.samples_per_class", stage.is_balanced, f"{what} has no triplet loss with these options"
    yield "data.one_per_id", drawn and stage.trains_on_captions, "no pairs are drawn by row"
    streams = data.pairs is not None and data.pairs.streaming and stage.trains_on_captions
    yield "data.shuffle_buffer", streams, "no pairs are streamed"
    plain = maps and data.images is None and stage.method != AUTO_MAP
    yield "data.embeddings_of", plain, f"{what} does not learn from embeddings of pairs or texts"
    yield "data.texts_limit", bool(data.texts) and maps and stage.learns_from_texts, "the stage does not learn from texts"
    if data.images is not None:  # otherwise a warning, as other methods may read them
        for name, is_read in (("pairs", _reads_pairs(stage)), ("text_pairs", False), ("remembered", stage.learns_from_pairs)):
            yield f"data.{name}", is_read, f"{what} learns from data.images"
    yield "data.subset", data.images is not None, "data.images is not set"
    yield "data.test", data.queries is None, "the stage is evaluated on data.queries"
    yield "data.test_subset", data.queries is not None, "data.queries is not set"
    yield "data.gallery", data.queries is not None, "data.queries is not set"
    yield "data.zero_shot", data.test is not None and data.queries is None, "it needs data.test, without data.queries"
    yield "data.old_reads", data.images is not None or data.queries is not None, "there are no labelled images"


def _source_settings(stage: StageRecipe) -> Iterator[Setting]:
    yield "data.images.camera_column", False, "only test images need cameras"
    for source in ("images", "queries", "gallery"):
        for name in ("caption_column", "caption_file"):
            yield f"data.{source}.{name}", stage.data.old_reads == "captions", "data.old_reads is images"
    for source in ("pairs", "remembered", "test"):
        for name in ("labels", "label_column", "camera_column"):
            yield f"data.{source}.{name}", False, "classes and cameras of images with captions are not read"
    for number, texts in enumerate(stage.data.texts):
        for name in ("labels", "label_column", "camera_column", "captions") if isinstance(texts, PairSource) else ():
            yield f"data.texts.{number}.{name}", False, "only captions are read"
    for name in stage.data.zero_shot_sets():
        place = ".".join(filter(None, ("data.zero_shot", name, "images.camera_column")))
        yield place, False, "zero-shot classification ignores cameras"
    for name in ("label_column", "camera_column"):
        yield f"data.templates.images.{name}", False, "the lists of templates name the subjects"
    if isinstance(stage.new, ScratchSource):
        yield "new.vocab_size", not stage.new.image_only, "an image model reads no tokens"


def _evaluation_settings(stage: StageRecipe) -> Iterator[Setting]:
    templates, classes = stage.data.templates, stage.data.queries is not None
    verified = classes or (templates is not None and templates.pairs is not None)
    identified = classes or (templates is not None and bool(templates.gallery))
    special = {
        "fars": (verified, "neither data.queries nor data.templates has pairs to verify"),
        "fpirs": (identified, "neither data.queries nor data.templates has a gallery to identify in"),
    }
    if templates is not None:
        special["rerank_weight"] = False, "templates are not re-ranked"
        special["rerank"] = False, "templates are not re-ranked"
        special["threshold"] = False, "templates use the thresholds of TAR@FAR"
        special["examples"] = (
            stage.evaluation is not None and not stage.evaluation.examples,
            "templates of several images have no example searches",
        )
        special["ks"] = identified, "data.templates has no gallery to search"
    for name in EvaluationSettings.model_fields:
        yield f"evaluation.{name}", *special.get(name, (stage.data.tests(), "data has no test set"))
