"""Fast checks of ``xcompat evaluate`` arguments, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from xcompat.core.arrays import read_lines
from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.core.paths import is_local, nearest_path
from xcompat.data.judgements import require_qrels
from xcompat.data.sources import local_files
from xcompat.encoders.model_files import is_xcompat_model
from xcompat.mapping.folds import NEIGHBOURS
from xcompat.mapping.sides import ITEM, LABELS, holds_one_kind, kinds_in, require_side
from xcompat.report import require_report_place
from xcompat.stores.places import READ_AS_IT_IS, Place, Reading, require_reading
from xcompat.training.record import EVALUATED, find_model
from xcompat.vectors import read_vectors
from xcompat.vectors.formats import KINDS, is_table, stored_at

NO_CHECKPOINT = "is not an xcompat checkpoint; choose the folder with its config.json, usually RUN/model"

RUN_FILES = ("recipe.yaml", "report", "report.json")
"""Files that identify a run; the last one is in the folder of `xcompat map`."""

Kind = Literal["embeddings", "recipe", "run", "checkpoint"]
APPLICABLE_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "embeddings": (
        *("--old", "--new", "--new-own", "--independent", "--qrels", "--labels", "--map", "--out", "--max-bad-share"),
        *("--ids", "--id-column", "--vector-name", "--rerank", "--threshold"),
    ),
    "recipe": (),
    "run": (),
    "checkpoint": ("--data", "--old", "--out", "--rerank", "--threshold"),
}
"""Kind of target -> options that apply to it."""
NOT_APPLICABLE: dict[Kind, str] = {
    "embeddings": "does not apply to embeddings (--old and --new); remove it",
    "recipe": "does not apply to a recipe, which sets its own test data and report folder; remove it",
    "run": "does not apply to a run's folder, whose report is only shown; remove it, or use the run's recipe or checkpoint",
    "checkpoint": "does not apply to a checkpoint, only to embeddings; remove it, or use embeddings with --old and --new",
}


def target_kind(target: Path | None, overrides: Sequence[str], options: Mapping[str, object]) -> Kind:
    """Return the kind of the target.

    Args:
        target: a recipe, run or checkpoint.
        overrides: ``key=value`` each.
        options: option name -> value, or None.

    Raises:
        XcompatError: no target, or an option does not apply.
    """
    given = [option for option, value in options.items() if value is not None]
    if "--new" in given:
        if "--old" not in given:
            raise XcompatError("--new needs --old, the old model's embeddings")
        if "--rerank" in given and not {"--map", "--new-own"} & {*given}:
            raise XcompatError("--rerank needs the new model's own embeddings: add their folder with --new-own")
        kind: Kind = "embeddings"
    elif "--qrels" in given or "--map" in given:
        raise XcompatError("--qrels and --map need embeddings: set --old and --new to their folders")
    elif target is None:
        raise XcompatError("nothing to evaluate: use a recipe, a run or a checkpoint, or embeddings with --old and --new")
    elif target.suffix in {".yaml", ".yml"}:
        kind = "recipe"
    else:
        kind = "run" if any((target / name).exists() for name in RUN_FILES) else "checkpoint"
    unread = [option for option in given if option not in APPLICABLE_OPTIONS[kind]]
    if kind == "embeddings" and target is not None:
        unread.append(str(target))
    if kind in ("embeddings", "run"):
        unread.extend(overrides)
    if unread:
        raise XcompatError(f"{unread[0]} {NOT_APPLICABLE[kind]}")
    return kind


def judged_folders(
    old: Place, new: Place, new_own: Place | None, independent: Place | None, by_map: Path | None
) -> dict[str, Place | None]:
    """Return folders or other places with embeddings by role.

    Raises:
        XcompatError: ``by_map`` has no model, or ``new_own`` is also set.
    """
    if by_map is None:
        return {"old": old, "new_view": new, "new": new_own, "independent": independent}
    if new_own is not None:
        raise XcompatError("with --map, --new contains the new model's own embeddings; remove --new-own")
    find_model(by_map)
    return {"old": old, "new": new, "independent": independent or new}


class Evidence(NamedTuple):
    """Source of the relevant hits, chosen by the rules of `xcompat map`.

    Args:
        kind: ``judgements`` in a file, ``captions`` of images, ``answers`` named by the ids of queries, ``classes``, or
            ``agreement`` with the nearest items of the new model.
        items: kinds of embeddings that are searched, or search.
        described: a sentence for the report.
    """

    kind: Literal["judgements", "captions", "answers", "classes", "agreement"]
    items: tuple[str, ...]
    described: str


def choose_evidence(folders: Mapping[str, Place | None], qrels: Path | None = None, labels: Path | None = None) -> Evidence:
    """Choose the evidence of embeddings, and raise if a folder lacks files.

    Args:
        folders: by role, as in :func:`judged_folders`.
        qrels: judgements, if any.
        labels: source of classes, if any.

    Raises:
        XcompatError: a file is missing, or there is no evidence.
    """
    given = {role: place for role, place in folders.items() if place is not None}
    for place in given.values():
        if isinstance(place, Path) and not place.exists():
            raise MissingPathError(f"{place} does not exist; choose embeddings, e.g. a file or a folder ({nearest_path(place)})")
        if holds_one_kind(place):
            require_side(place)
            if qrels is not None:
                raise XcompatError(f"--qrels needs folders with query_embeds and text_embeds, but {place} is not such a folder")
    found = _choose_evidence(given, qrels, labels)
    for role, folder in given.items():
        if not isinstance(folder, Path) or holds_one_kind(folder):
            continue
        needs_texts = role != "new_view" or stored_at(folder / "text_embeds") is not None  # mapped queries need no passages
        has_queries = found.kind in ("judgements", "answers")
        require_files(folder, found.items if needs_texts or not has_queries else ("query",))
    if found.kind == "agreement" and "new" not in given:
        raise XcompatError(
            f"{given['old']} contains {found.items[0]}s without classes or texts, so relevant hits are unknown: add {LABELS} (a "
            "class per line) or --labels, captions (text_embeds.npy, and text_ids.txt with the id of each one's image) or "
            "--qrels; or add the new model's own embeddings (--new-own, or --map) to measure its agreement"
        )
    return found


def _choose_evidence(given: Mapping[str, Place], qrels: Path | None, labels: Path | None) -> Evidence:
    old = given["old"]
    if qrels is not None:
        return Evidence("judgements", ("query", "text"), f"Evidence: judgements in {qrels}.")
    kinds_of = [kinds_in(place) if isinstance(place, Path) and not holds_one_kind(place) else [] for place in given.values()]
    kinds, unused = kinds_of[0], ""  # the old model comes first
    tells_kinds = labels is None and not any(map(holds_one_kind, given.values()))
    if tells_kinds and "image" in kinds and any("text" in others for others in kinds_of):
        return Evidence(
            "captions", ("image", "text"), "Evidence: captions, each of which should find its image, and images theirs."
        )
    if tells_kinds and isinstance(old, Path) and {"query", "text"} <= set(kinds):
        if not set(read_ids(old, "query")).isdisjoint(read_ids(old, "text")):
            return Evidence("answers", ("query", "text"), "Evidence: ids of queries, each the id of the text that answers it.")
        unused = " The queries are not used, because none has the id of a text: add --qrels to judge them."
    unknown = ITEM if all(map(holds_one_kind, given.values())) else KINDS[0]
    item = next((kind for kinds in kinds_of for kind in KINDS if kind in kinds), unknown)
    beside = next((place / LABELS for place in given.values() if isinstance(place, Path) and (place / LABELS).is_file()), None)
    if labels is not None and beside is not None:
        raise XcompatError(f"{beside} has classes already; remove it, or --labels")
    if (source := labels or beside) is not None:
        return Evidence("classes", (item,), f"Evidence: classes in {source}.{unused}")
    return Evidence(
        "agreement",
        (item,),
        f"Evidence: agreement with the new model. Relevant are the {NEIGHBOURS} items that it finds nearest, so its own vectors "
        f"find them all. This does not show that new queries find as much as old ones: add classes (--labels or {LABELS}), "
        f"captions or --qrels.{unused}",
    )


def read_ids(folder: Path, kind: str) -> list[str]:
    """Return the ids of a kind of embeddings; none if files are missing."""
    place, listed = stored_at(folder / f"{kind}_embeds"), folder / f"{kind}_ids.txt"
    if listed.is_file():
        return read_lines(listed)
    return (read_vectors(place).ids or []) if place is not None and is_table(place) else []


def require_folders(
    folders: Mapping[str, Place | None], qrels: Path | None, output: Path, needs_relevance: bool, reading: Reading = READ_AS_IT_IS
) -> None:
    """Raise if a place lacks embeddings or ids, or relevant hits are needed and unknown.

    Args:
        folders: by role, as in :func:`~xcompat.training.evaluate_command.evaluate_embeddings`.
        qrels: judgements, if any.
        output: report folder.
        needs_relevance: whether ``--require-compatible`` is set.
        reading: column names, a file with the old ids, and a source of classes.

    Raises:
        XcompatError: a file or a name is missing.
    """
    require_output(output)
    if qrels is not None:
        require_qrels(str(qrels))
    if reading.labels is not None:
        local_files(str(reading.labels))
    evidence = choose_evidence(folders, qrels, reading.labels)
    require_reading([place for place in folders.values() if place is not None], reading)
    if evidence.kind == "agreement" and needs_relevance:
        old = folders["old"]
        raise XcompatError(f"--require-compatible needs classes, captions or judgements of {old}; add them, or remove it")


def require_files(folder: Path, kinds: Sequence[str]) -> None:
    """Raise if a folder lacks these embeddings or ids."""
    names = [f"{kind}_embeds.npy" for kind in kinds] + [f"{kind}_ids.txt" for kind in kinds]
    for name in names:
        place = stored_at(folder / f"{name.split('_')[0]}_embeds")
        if not (folder / name).is_file() and (place is None or not is_table(place)):
            raise XcompatError(f"{folder} lacks {name}; it must contain {', '.join(names)}")


def require_testable(folder: Path, data: Path | None, output: Path) -> None:
    """Raise if checkpoint or data are missing, or ``output`` is not free.

    Raises:
        XcompatError: with the path.
    """
    if not folder.exists() and (is_local(str(folder)) or "/" not in str(folder)):
        raise MissingPathError(
            f"{folder} does not exist; use a recipe, a run's folder or a checkpoint ({nearest_path(str(folder))})"
        )
    if is_local(str(folder)) and not (folder.is_dir() and is_xcompat_model(folder)):
        raise XcompatError(f"{folder} {NO_CHECKPOINT}")
    require_output(output)
    if data is None:
        raise XcompatError(f"set --data to test images with captions or classes for {folder}")
    local_files(str(data))


def require_output(output: Path) -> None:
    """Raise if the report would replace other files.

    Raises:
        XcompatError: with the folder.
    """
    require_report_place(output)
    if (output / EVALUATED).is_file():
        raise XcompatError(f"{output} already contains the report of a recipe; choose another --out")
