"""Find settings of a recipe that nothing would read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xcompat.data.schema import LABELS, NEW_EMBEDS, OLD_EMBEDS
from xcompat.encoders.scratch import ScratchSource
from xcompat.training.stage_recipe import CHOSEN, StageRecipe, method_class

Setting = tuple[str, bool, str]
"""The name of a setting, whether something in a stage reads it, and if not, why."""


def refuse_unread(stages: Sequence[StageRecipe]) -> None:
    """Refuse a setting that no stage reads; one that several stages share must matter in one of them.

    Args:
        stages: of one recipe.

    Raises:
        ValueError: naming the first such setting, its stage, and why it changes nothing.
    """
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
    """Return whether a setting, ``data.…`` or one of the stage itself, is not at its default."""
    section: Any = stage
    *outer, name = setting.split(".")
    for part in outer:
        section = getattr(section, part)
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))


def _sections(stage: StageRecipe) -> Iterator[Setting]:
    """Yield whole sections."""
    method, what = method_class(stage.method), f"method {stage.method}"
    yield "training", not method.is_solved, f"{what} is solved and not trained"
    texts = isinstance(stage.new, ScratchSource) or method.embeds_in_memory
    yield "data.texts", texts and stage.data.images is None, f"{what} does not learn from texts"


def _settings(stage: StageRecipe) -> Iterator[Setting]:
    """Yield what is refused where nothing reads it."""
    method, data, chosen = method_class(stage.method), stage.data, stage.method == CHOSEN
    what, maps = f"method {stage.method}", method.embeds_in_memory
    labelled = data.images is not None or LABELS in method.columns
    drawn = data.text_pairs is not None or (data.pairs is not None and not data.pairs.streaming)  # by row, not as a stream
    reads_pictures = not maps and data.text_pairs is None
    known = {*method.columns, *method.columns_if_known}

    yield "seed_offset", not method.is_solved or stage.memory is not None, f"{what} is solved, and reads no seed"
    yield "prompt_lr_factor", bool((stage.options.get("adapters") or {}).get("prompts")), "options.adapters has no prompts"
    yield "encoder_lr_factor", not maps, f"{what} trains a map, and no encoder"
    yield "weight_decay_on", bool(stage.training.get("weight_decay")), "training.weight_decay is 0"
    yield "searched_classes", stage.memory is not None or chosen, "nothing is remembered"
    yield "projection", method.starts_from_projection, f"{what} does not start from one"
    for role in ("side_info", "new_side_info"):
        yield role, role in known, f"{what} does not read it"

    views = stage.embeds_images and data.views > 0
    unseen = "embeddings of plain images without data.views" if stage.embeds_images else "embeddings" if maps else "texts"
    yield "data.augmentation", reads_pictures or views, f"{what} learns from {unseen}"
    augmented = data.augmentation is not None and not data.augmentation.is_none
    why = f"{what} learns no map of images" if not stage.embeds_images else "data.augmentation changes nothing"
    yield "data.views", stage.embeds_images and augmented, why
    trains = labelled and not maps
    reads_old = (trains and OLD_EMBEDS in method.columns) or stage.compares_pairs_with_old
    yield "data.old_embeddings", reads_old, f"{what} reads no old embeddings of labelled images, or of pairs"
    yield "data.new_embeddings", trains and NEW_EMBEDS in method.columns, f"{what} reads no embeddings of an independent model"
    yield "data.samples_per_class", stage.is_balanced, f"{what} has no loss of triplets with these options"
    yield "data.one_per_id", drawn and not maps and not labelled, "no pairs are drawn by row"
    streams = data.pairs is not None and data.pairs.streaming and not maps and not labelled
    yield "data.shuffle_buffer", streams, "no pairs are streamed"
    yield "data.embeddings_of", maps and data.images is None, f"{what} does not learn from embeddings of pairs or texts"
    yield "data.texts_limit", bool(data.texts) and maps, "no texts are learned from"
    yield "data.subset", data.images is not None, "data.images names none"
    yield "data.test_subset", data.queries is not None, "data.queries names none"
    yield "data.gallery", data.queries is not None, "data.queries names none to search it with"
    yield "data.zero_shot", data.test is not None, "data.test names no test set beside it"
    yield "data.old_reads", data.images is not None or data.queries is not None, "there are no labelled images"
    if stage.evaluation is not None:
        judged = data.queries is not None or data.templates is not None
        for name in ("fars", "fpirs"):
            yield f"evaluation.{name}", judged, "neither data.queries nor data.templates names what is verified"
