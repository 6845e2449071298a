"""Find settings of a recipe that nothing would read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xcompat.core.errors import XcompatError
from xcompat.data import PairSource
from xcompat.data.schema import NEW_EMBEDS, OLD_EMBEDS
from xcompat.encoders.scratch import ScratchSource
from xcompat.training.sections import EvaluationSettings
from xcompat.training.stage_recipe import CHOSEN, StageRecipe, method_class
from xcompat.training.values import dependent_fields, is_usual

Setting = tuple[str, bool, str]
"""The name of a setting, whether something in a stage reads it, and if not, why."""


def refuse_unread(stages: Sequence[StageRecipe]) -> None:
    """Refuse an option that its stage does not read, and a setting that no stage reads.

    Settings that several stages share must matter in one of them. What a run was made from is not looked at here, so that runs of
    earlier versions still open.

    Args:
        stages: of one recipe.

    Raises:
        ValueError: naming the first of them, its stage, and why it changes nothing.
    """
    for stage in stages:
        try:
            method_class(stage.method).refuse_unread(stage.options, on_captions=_learns_from_captions(stage))
        except XcompatError as error:
            raise ValueError(f"stage {stage.name!r}: {error}") from None
    for stage, setting, why in _unread(stages, _settings):
        raise ValueError(f"stage {stage.name!r}: {setting} would change nothing: {why}; leave it out")


def unread_sections(stages: Sequence[StageRecipe]) -> list[str]:
    """Return a line for each whole section that no stage reads.

    That is no mistake: other methods, tried in the same recipe by ``method=…``, read them. Whoever runs it is told.
    """
    return [f"{stage.name}: {section} changes nothing: {why}" for stage, section, why in _unread(stages, _sections)]


def unread(stage: StageRecipe) -> dict[str, str]:
    """Return the settings of a stage that are not at their defaults and change nothing there, each with the reason."""
    return {setting: why for _, setting, why in _unread([stage], _settings)}


def _unread(
    stages: Sequence[StageRecipe], kinds: Callable[[StageRecipe], Iterable[Setting]]
) -> Iterator[tuple[StageRecipe, str, str]]:
    """Yield what is given and read by no stage, with the first stage that has it."""
    read = {setting for stage in stages for setting, is_read, _ in kinds(stage) if is_read and _is_given(stage, setting)}
    seen = set(read)
    for stage in stages:
        for setting, _, why in kinds(stage):
            if setting not in seen and _is_given(stage, setting):
                seen.add(setting)
                yield stage, setting, why


def _is_given(stage: StageRecipe, setting: str) -> bool:
    """Return whether a setting, such as ``data.…`` or one of the stage itself, is not at its default."""
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
        return name in section and not is_usual(name, section[name])
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))


def _learns_from_captions(stage: StageRecipe) -> bool:
    """Return whether there are captions or passages and no labelled images."""
    return stage.data.images is None and (stage.data.pairs is not None or stage.data.text_pairs is not None)


def _reads_pairs(stage: StageRecipe) -> bool:
    """Return whether images with captions are learned from or remembered, or give a new tokenizer its words."""
    if stage.learns_from_pairs and stage.data.remembered is None:
        return True
    if method_class(stage.method).embeds_in_memory:
        return stage.method != CHOSEN and stage.data.images is None and stage.data.embeddings_of == "images"
    return stage.trains_on_captions or stage.learns_from_texts


def _sections(stage: StageRecipe) -> Iterator[Setting]:
    """Yield whole sections, and the old model."""
    method, what, data = method_class(stage.method), f"method {stage.method}", stage.data
    yield "old", method.compares_with_old, f"{what} is trained without one"
    yield "training", stage.is_trained, f"{what} is solved and not trained"
    yield "data.texts", stage.learns_from_texts, f"{what} does not learn from texts"
    yield "data.pairs", _reads_pairs(stage), f"{what} does not learn from images with captions"
    yield "data.text_pairs", stage.trains_on_captions, f"{what} does not learn from texts that search texts"
    unjudged = "data names no test set" if stage.evaluation is not None else "evaluation is null"
    if data.tests() and stage.evaluation is not None:
        unjudged = f"{what} has no old model to be compared with, and no report"
    learned = stage.trains_on_labelled and NEW_EMBEDS in method.columns
    yield "independent", stage.is_judged or learned, unjudged
    for name in ("test", "judged_texts"):
        yield f"data.{name}", stage.is_judged or stage.learns_from_texts, unjudged
    for name in ("queries", "templates"):
        yield f"data.{name}", stage.is_judged, unjudged
    if stage.evaluation is not None and data.tests():
        yield "evaluation", stage.is_judged, unjudged


def _settings(stage: StageRecipe) -> Iterator[Setting]:
    """Yield what is refused where nothing reads it."""
    yield from _of_stage(stage)
    yield from _of_data(stage)
    yield from _of_sources(stage)
    if stage.evaluation is not None:
        yield from _of_evaluation(stage)
    if stage.is_trained:
        for name, is_read, why in dependent_fields(stage.training):
            yield f"training.{name}", is_read, why


def _of_stage(stage: StageRecipe) -> Iterator[Setting]:
    method, chosen = method_class(stage.method), stage.method == CHOSEN
    what, maps = f"method {stage.method}", method.embeds_in_memory
    yield "seed_offset", not method.is_solved or stage.memory is not None, f"{what} is solved, and reads no seed"
    yield "prompt_lr_factor", bool((stage.options.get("adapters") or {}).get("prompts")), "options.adapters has no prompts"
    frozen = f"{what} trains a map, and no encoder" if maps else "the encoder's own weights are frozen"
    yield "encoder_lr_factor", method.trains_encoder(stage.options), frozen
    yield "weight_decay_on", stage.is_trained and bool(stage.training.get("weight_decay")), "training.weight_decay is 0"
    yield "searched_classes", stage.memory is not None or chosen, "nothing is remembered"
    yield "allow_worse", chosen, "only the choice of a map asks for it"
    yield "projection", method.starts_from_projection, f"{what} does not start from one"
    learned = stage.trains_on_labelled and NEW_EMBEDS in method.columns
    yield "independent", method.compares_with_old or learned, f"{what} does not learn from it, and no report compares with it"
    for role in ("side_info", "new_side_info"):
        yield role, role in {*method.columns, *method.columns_if_known}, f"{what} does not read it"


def _of_data(stage: StageRecipe) -> Iterator[Setting]:
    method, data = method_class(stage.method), stage.data
    what, maps = f"method {stage.method}", method.embeds_in_memory
    drawn = data.text_pairs is not None or (data.pairs is not None and not data.pairs.streaming)  # by row, not as a stream

    views = stage.embeds_images and data.views > 0
    unseen = "embeddings of plain images without data.views" if stage.embeds_images else "embeddings" if maps else "texts"
    yield "data.augmentation", (not maps and data.text_pairs is None) or views, f"{what} learns from {unseen}"
    augmented = data.augmentation is not None and not data.augmentation.is_none
    why = f"{what} learns no map of images" if not stage.embeds_images else "data.augmentation changes nothing"
    yield "data.views", stage.embeds_images and augmented, why
    reads_old = (stage.trains_on_labelled and OLD_EMBEDS in method.columns) or stage.compares_pairs_with_old
    yield "data.old_embeddings", reads_old, f"{what} reads no old embeddings of labelled images, or of pairs"
    reads_new = stage.trains_on_labelled and NEW_EMBEDS in method.columns
    yield "data.new_embeddings", reads_new, f"{what} reads no embeddings of an independent model"
    yield "data.samples_per_class", stage.is_balanced, f"{what} has no loss of triplets with these options"
    yield "data.one_per_id", drawn and stage.trains_on_captions, "no pairs are drawn by row"
    streams = data.pairs is not None and data.pairs.streaming and stage.trains_on_captions
    yield "data.shuffle_buffer", streams, "no pairs are streamed"
    plain = maps and data.images is None and stage.method != CHOSEN
    yield "data.embeddings_of", plain, f"{what} does not learn from embeddings of pairs or texts"
    yield "data.texts_limit", bool(data.texts) and maps and stage.learns_from_texts, "no texts are learned from"
    if data.images is not None:  # else other methods would read them, and whoever runs the recipe is told
        for name, is_read in (("pairs", _reads_pairs(stage)), ("text_pairs", False), ("remembered", stage.learns_from_pairs)):
            yield f"data.{name}", is_read, f"{what} learns from data.images"
    yield "data.subset", data.images is not None, "data.images names none"
    yield "data.test", data.queries is None, "a stage is judged on one test set, which data.queries is"
    yield "data.test_subset", data.queries is not None, "data.queries names none"
    yield "data.gallery", data.queries is not None, "data.queries names none to search it with"
    yield "data.zero_shot", data.test is not None and data.queries is None, "data.test names no test set beside it"
    yield "data.old_reads", data.images is not None or data.queries is not None, "there are no labelled images"


def _of_sources(stage: StageRecipe) -> Iterator[Setting]:
    """Yield columns and files of sources, and the vocabulary of a new encoder."""
    yield "data.images.camera_column", False, "training images are not searched, and nothing else reads cameras"
    for source in ("images", "queries", "gallery"):
        for name in ("caption_column", "caption_file"):
            yield f"data.{source}.{name}", stage.data.old_reads == "captions", "data.old_reads is images"
    for source in ("pairs", "remembered", "test"):
        for name in ("labels", "label_column", "camera_column"):
            yield f"data.{source}.{name}", False, "of images with captions neither classes nor cameras are read"
    for number, texts in enumerate(stage.data.texts):
        for name in ("labels", "label_column", "camera_column", "captions") if isinstance(texts, PairSource) else ():
            yield f"data.texts.{number}.{name}", False, "captions are read, and nothing else of their images"
    for name in stage.data.zero_shot_sets():
        place = ".".join(filter(None, ("data.zero_shot", name, "images.camera_column")))
        yield place, False, "no image is searched with another"
    for name in ("label_column", "camera_column"):
        yield f"data.templates.images.{name}", False, "the lists of templates say who is who"
    if isinstance(stage.new, ScratchSource):
        yield "new.vocab_size", not stage.new.image_only, "an image model reads no tokens"


def _of_evaluation(stage: StageRecipe) -> Iterator[Setting]:
    templates, classes = stage.data.templates, stage.data.queries is not None
    verified = classes or (templates is not None and templates.pairs is not None)
    identified = classes or (templates is not None and bool(templates.gallery))
    special = {
        "fars": (verified, "neither data.queries nor data.templates names what is verified"),
        "fpirs": (identified, "neither data.queries nor data.templates names what is identified"),
    }
    if templates is not None:
        special["rerank_weight"] = False, "no hits of templates are re-ranked"
        special["rerank"] = False, "templates are compared pair by pair, and no first hits are embedded again"
        special["threshold"] = False, "thresholds of templates are those of TAR@FAR"
        special["examples"] = (
            stage.evaluation is not None and not stage.evaluation.examples,
            "templates of several images are not shown one by one",
        )
        special["ks"] = identified, "data.templates has no gallery to search"
    for name in EvaluationSettings.model_fields:
        yield f"evaluation.{name}", *special.get(name, (stage.data.tests(), "data names no test set"))
