"""``xcompat map``: from two embedding folders to a model, a table of trials, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from xcompat.core.errors import NoValidationDataError, XcompatError
from xcompat.core.files import write_json
from xcompat.core.ownership import owned_path
from xcompat.core.progress import console, literal, notice, silence_libraries, stage
from xcompat.core.provenance import provenance
from xcompat.mapping.agreement import choose_by_labels_or_agreement
from xcompat.mapping.candidates import GUESS, LINES, Candidate, CandidateParts, Paired, Solver, fit
from xcompat.mapping.choice_report import EVIDENCE, as_json, describe_choice, describe_missing, print_choice
from xcompat.mapping.cleaning import drop_wrong_pairs
from xcompat.mapping.confidence import Calibration
from xcompat.mapping.domain import describe_shift, measure_known_share, read_gallery_vectors
from xcompat.mapping.folds import Searched
from xcompat.mapping.from_texts import TextPairs, pairs_of_texts, read_stored_sides
from xcompat.mapping.imported_maps import IMPORTED, ImportedMap, read_imported
from xcompat.mapping.old_models import describe_old_side, load_old_model, name_old_model, require_dim
from xcompat.mapping.paired import PairedEmbeddings, load_paired
from xcompat.mapping.query_cost import describe_old_query_ms, measure_query_ms
from xcompat.mapping.request import MADE_BY, MapRequest
from xcompat.mapping.selection import MUCH_MORE, Choice
from xcompat.mapping.sentences import Texts
from xcompat.mapping.sides import holds_embeddings
from xcompat.models import CompatModel
from xcompat.models.embedder import Embedder, load_embedder
from xcompat.stores.places import Place
from xcompat.vectors.codecs import require_codec

_IMAGES_ONLY = "! All pairs are images: text queries are not tested, and can find less than the old model's."
_NEEDS_STRONG_EVIDENCE = (
    "without {evidence}, a map needs strong evidence: its queries must find "
    f"{MUCH_MORE:g} times as many of the new model's neighbours as old queries do"
)
_WORSE = "no candidate is surely at or above old queries"
_NO_EVIDENCE = "without classes, captions or questions, the evidence for new queries is too weak"


class _Decision(NamedTuple):
    """Chosen candidate, and the reasons.

    Args:
        candidate: the chosen candidate.
        said: sentences for the user.
        choice: all trials on the validation split; None without a split.
    """

    candidate: Candidate
    said: list[str]
    choice: Choice | None = None

    @property
    def confidence(self) -> Calibration | None:
        """Calibration of the candidate's memory."""
        return self.choice.confidence if self.choice is not None else None

    @property
    def is_safe(self) -> bool:
        """Whether new queries are surely at or above old ones (:attr:`~xcompat.mapping.selection.Choice.is_safe`)."""
        return self.choice is not None and self.choice.is_safe


class MemorySettings(NamedTuple):
    """Memory settings beyond the choice on classes or captions.

    Args:
        codec: codec for the memory's entries, as in :meth:`ClassMemoryContents.build_memory`.
        items: whether to try a memory of all given items.
    """

    codec: str | None = None
    items: bool = False

    def require(self, has_labels: bool) -> None:
        """Raise if the settings do not fit items with or without classes or captions."""
        require_codec(self.codec)
        if self.items and has_labels:
            raise XcompatError("--remember-items does not work with classes or captions; remove it")
        if self.codec is not None and not has_labels and not self.items:
            raise XcompatError("--memory-codec needs a memory; add classes or captions, or remove --memory-codec")


def map_embeddings(asked: MapRequest) -> bool:
    """Choose a map of queries or galleries on a validation split, solve it on all items, and save it as a model.

    Args:
        asked: inputs and settings, checked by :meth:`~xcompat.mapping.request.MapRequest.require`.

    Returns:
        Whether a model was written. It must be surely at or above old queries, unless a worse map is allowed.

    Raises:
        XcompatError: the embeddings are unusable, or something at ``out`` must not be replaced.
    """
    silence_libraries()
    out, texts, remembering = asked.out, asked.texts, MemorySettings(asked.memory_codec, asked.remember_items)
    old_name = name_old_model(asked)
    seconds: dict[str, float] = {}
    with stage("read" if texts is None else "embed", seconds):
        paired, old = _read_pairs(asked, remembering)
        found, dropped = _drop_wrong_pairs(_compare_with_gallery(paired, asked.gallery, asked.remember_items), asked.seed)
    pairs, new = found.pairs, _new_model(asked.new_model, found)
    described = old.describe_old() if old is not None else describe_old_side(old_name, asked.old, pairs.dims[1])
    encoder = new.describe_encoder() if new is not None else None
    theirs = read_imported(asked.start, pairs, described, encoder) if asked.start is not None else None
    if asked.direction == "old_to_new":
        pairs = pairs.swapped()
        found = replace(found, pairs=pairs)
    lines = LINES | ({IMPORTED: theirs.solve} if theirs is not None else {})
    with stage("evaluate candidates on the validation split", seconds):
        both = old is not None and new is not None
        decided = _decide(found, lines, theirs, asked, both)
    is_written = decided.is_safe or asked.allow_worse
    _say(decided, is_written)
    old_query_ms = _measure_old_query(decided.candidate, old)
    if not is_written:
        _print_refusal(asked, decided, both)
        return False
    replacing = owned_path(out, MADE_BY, asked.overwrite, asked.existing_inputs, asked.inputs)
    with stage("fit the chosen map on all pairs", seconds), replacing as temporary:
        temporary.mkdir()
        model = fit(decided.candidate, CandidateParts(pairs, described, lines, remembering.codec), decided.confidence)
        model.config.encoder, model.config.service = encoder, found.service
        if decided.choice is not None and decided.choice.reranked is not None:
            decided.choice.reranked.store_in(model)
        model.save_pretrained(temporary / "model")
        asking = encoder or (texts.service_named(asked.new) if texts is not None else None)
        document = _document(decided, pairs, model, theirs) | {"old": described, "new": asking}
        document |= {
            "dropped_pairs": dropped,
            "old_query_ms": old_query_ms,
            "searched_classes": asked.searched,
            "direction": asked.direction,
            "seed": asked.seed,
            "seconds": seconds,
            "run": provenance(),
        }
        write_json(temporary / "report.json", document)
    _print_result(asked, decided)
    return True


def _measure_old_query(candidate: Candidate, old: Embedder | None) -> float | None:
    """Measure and print the time that the old model adds to half-way queries; return None for other maps."""
    if old is None or not candidate.old_share:
        return None
    milliseconds = measure_query_ms(old)
    console.print(literal(describe_old_query_ms(old, milliseconds)))
    return milliseconds


def _print_result(asked: MapRequest, decided: _Decision) -> None:
    out = asked.out
    console.print(f"[green]✓[/] {literal(out / 'model')}: {literal(decided.candidate)}", soft_wrap=True)
    console.print(f"report: {literal(out / 'report.json')}", soft_wrap=True)
    if asked.texts is not None:
        kept = (
            f"The embeddings stay in {literal(_cache_folder(asked))} for further maps with this --out; delete it after the last"
        )
        console.print(kept, soft_wrap=True)
    if asked.direction == "old_to_new":
        following = f"`xcompat migrate plan URI --from OLD_MODEL --model {literal(out)}`, or `xcompat gallery upgrade`"
        console.print(f"Next: {following}", soft_wrap=True)


def _print_refusal(asked: MapRequest, decided: _Decision, both: bool) -> None:
    if decided.choice is not None and decided.choice.of_agreement:
        said, missing = _NO_EVIDENCE, describe_missing(decided.choice)
    else:
        is_of_galleries = asked.direction == "old_to_new"
        wanted = "items, classes, captions" if decided.choice is None else "items"
        said, missing = _WORSE, wanted if both or is_of_galleries else f"{wanted} or the old model (--old-model)"
    kept = f" The embeddings stay in {literal(_cache_folder(asked))} for the next run." if asked.texts is not None else ""
    fix = f"Add {missing}, or write the best candidate with --allow-worse."
    console.print(f"No map was written: {said}. {fix}{kept}", soft_wrap=True)


def _compare_with_gallery(found: TextPairs, gallery: Path | None, remembers: bool) -> TextPairs:
    """Add the gallery's size to the pairs, and a warning to their notes if they are unlike the gallery.

    For a memory of all items, also look for the gallery's vectors among the pairs.
    """
    if gallery is None:
        return found
    pairs = found.pairs
    items = pairs if isinstance(pairs, PairedEmbeddings) else pairs.images
    vectors, n_stored = read_gallery_vectors(gallery)
    notes = (*pairs.notes, *describe_shift(items.old_Nd, vectors, str(gallery)))
    if isinstance(pairs, PairedEmbeddings):
        known_share = measure_known_share(items.old_Nd, vectors) if remembers else pairs.known_share
        return replace(found, pairs=replace(pairs, notes=notes, n_stored=n_stored, known_share=known_share))
    return replace(found, pairs=replace(pairs, notes=notes))


def _require_classes(searched: Searched, has_classes: bool) -> None:
    if searched != "unknown" and not has_classes:
        raise XcompatError(f"--searched-classes {searched} needs classes; add them with --labels, or remove --searched-classes")


def _say(decided: _Decision, is_written: bool) -> None:
    if decided.choice is not None:
        print_choice(decided.choice, is_written=is_written)
    for line in decided.said:
        console.print(literal(line))


def _decide(
    found: TextPairs,
    lines: Mapping[str, Solver],
    theirs: ImportedMap | None,
    asked: MapRequest,
    with_old_model: bool,
) -> _Decision:
    """Choose on a validation split, or guess if there are too few items."""
    pairs, texts = found.pairs, None
    if found.new is not None and found.texts is not None:
        texts = Texts(found.texts, found.new)
    about = [*pairs.notes, *(theirs.notes if theirs is not None else ())]
    if asked.texts is not None and asked.texts.are_images and found.new is not None and found.new.processor.max_length:
        about.append(_IMAGES_ONLY)
    try:
        choice = choose_by_labels_or_agreement(
            pairs, asked.searched, asked.seed, lines, with_old_model, texts, asked.remember_items, asked.memory
        )
    except NoValidationDataError as error:
        uncompared = " The imported map was not compared and is not used." if theirs is not None else ""
        unremembered = " It has no memory, because that was not validated." if asked.remember_items else ""
        return _Decision(GUESS, [*about, f"{error}. The map is a guess, not validated.{unremembered}{uncompared}"])
    judged = [theirs.describe_result(choice)] if theirs is not None else []
    return _Decision(choice.candidate, [*about, *describe_choice(choice), *judged], choice)


def _read_pairs(asked: MapRequest, remembering: MemorySettings) -> tuple[TextPairs, Embedder | None]:
    """Read both sides, or embed texts with models, and load the old model. Options are checked before anything is embedded."""
    if asked.texts is None:
        pairs = load_paired(asked.old, asked.new, asked.max_bad_share, asked.reading)
        has_classes = isinstance(pairs, PairedEmbeddings) and pairs.labels_N is not None
        remembering.require(has_classes or not isinstance(pairs, PairedEmbeddings))
        _require_classes(asked.searched, has_classes)
        return TextPairs(pairs, None, None), load_old_model(asked.old_model, _place_of_old_model(asked), *reversed(pairs.dims))
    sides = read_stored_sides(asked.old, asked.new, asked.texts, asked.max_bad_share, asked.reading)
    has_classes = sides.labels is not None
    remembering.require(has_classes)
    _require_classes(asked.searched, has_classes)
    place = _place_of_old_model(asked)
    old = load_old_model(asked.old_model, place, sides.old.embeds_ND.shape[1]) if sides.old is not None else None
    if not (has_classes or old is not None or sides.old is None or asked.allow_worse):
        mixture = " or --old-model" if asked.direction == "new_to_old" else ""
        notice(_NEEDS_STRONG_EVIDENCE.format(evidence=f"{EVIDENCE}{mixture}"))
    read = asked.max_bad_share, asked.reading, asked.direction, asked.n_sampled, asked.seed
    found = pairs_of_texts(asked.old, asked.new, asked.texts, _cache_folder(asked), *read, sides)
    return found, found.old or old


def _place_of_old_model(asked: MapRequest) -> Place | None:
    """Return the old side if a model of queries could be mixed with the model that it records."""
    embeds_new = asked.texts is not None and asked.texts.embed_with is None and not holds_embeddings(asked.new)
    has_new = asked.new_model is not None or embeds_new
    return asked.old if has_new and asked.direction == "new_to_old" else None


def _cache_folder(asked: MapRequest) -> Path:
    """Return the folder for computed embeddings: beside ``out``, because ``out`` is replaced as a whole."""
    return asked.out.with_name(f"{asked.out.name}.cache")


def _drop_wrong_pairs(found: TextPairs, seed: int) -> tuple[TextPairs, int]:
    right = drop_wrong_pairs(found.pairs, seed)
    texts = found.texts
    if texts is not None and right.rows_R is not None:
        texts = [texts[row] for row in right.rows_R.tolist()]
    return replace(found, pairs=right.pairs, texts=texts), right.dropped


def _new_model(name: str | None, found: TextPairs) -> Embedder | None:
    """Return the model of the queries; None if queries are embeddings."""
    new = load_embedder(name) if name is not None else found.new
    if new is not None:
        require_dim(new, found.pairs.dims[0], "--new-model", found.pairs.dims[1])
    return new


def _document(decided: _Decision, pairs: Paired, model: CompatModel, theirs: ImportedMap | None) -> dict[str, Any]:
    candidate = decided.candidate
    document: dict[str, Any] = {
        "items": len(pairs),
        "classes": (pairs.n_classes or None) if isinstance(pairs, PairedEmbeddings) else None,
        "model": {"name": str(candidate), **asdict(candidate)},
        "fingerprint": model.fingerprint().digest,
        "verdict": decided.is_safe,
        "said": decided.said,
    }
    if theirs is not None:
        document["start_from"] = theirs.source | {"taken": candidate.line == IMPORTED}
    return document | (as_json(decided.choice) if decided.choice is not None else {})
