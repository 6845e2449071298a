"""What ``xcompat evaluate`` is given, checked by the names of files, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from xcompat.core.errors import XcompatError
from xcompat.core.paths import is_local
from xcompat.data.judgements import require_qrels
from xcompat.data.sources import local_files
from xcompat.encoders.model_files import is_own
from xcompat.mapping.sides import LABELS
from xcompat.report import require_report_place
from xcompat.training.record import EVALUATED, find_model
from xcompat.vectors import is_table, stored_at

NO_CHECKPOINT = "holds no xcompat checkpoint; name the folder with its config.json, usually RUN/model"

RUN_FILES = ("recipe.yaml", "report", "report.json")
"""What tells a run's folder; the last one is where an earlier version wrote the report."""

Kind = Literal["embeddings", "recipe", "run", "checkpoint"]
READ: dict[Kind, tuple[str, ...]] = {
    "embeddings": (
        *("--old", "--new", "--new-own", "--independent", "--qrels", "--map", "--output", "--max-bad-share"),
        *("--rerank", "--threshold"),
    ),
    "recipe": (),
    "run": (),
    "checkpoint": ("--data", "--old", "--output", "--rerank", "--threshold"),
}
"""What is judged -> the options that are read for it."""
UNREAD: dict[Kind, str] = {
    "embeddings": "is not read beside --old and --new, which name all embeddings; leave it out",
    "recipe": "is not read with a recipe, which says itself what is judged and where its report goes; leave it out",
    "run": "is not read with a run's folder, whose report is only shown; leave it out, or name the run's recipe or checkpoint",
    "checkpoint": "is of embeddings, and not read with a checkpoint; leave it out, or name embeddings with --old and --new",
}


def judged_kind(target: Path | None, overrides: Sequence[str], options: Mapping[str, object]) -> Kind:
    """Return what is judged.

    Args:
        target: a recipe, a run's folder or a checkpoint's.
        overrides: ``key=value`` each.
        options: what each option was given, by its name; None for nothing.

    Raises:
        XcompatError: nothing is named, or what is given would not be read for it.
    """
    given = [option for option, value in options.items() if value is not None]
    if "--new" in given:
        if "--old" not in given:
            raise XcompatError("--new names embeddings, so --old must name the folder with the old model's")
        if "--rerank" in given and not {"--map", "--new-own"} & {*given}:
            raise XcompatError("--rerank scores hits by the new model's own embeddings: add their folder with --new-own")
        kind: Kind = "embeddings"
    elif "--qrels" in given or "--map" in given:
        raise XcompatError("--qrels and --map are of embeddings: name their folders with --old and --new")
    elif target is None:
        raise XcompatError("name a recipe, a run or a checkpoint, or give embeddings with --old and --new")
    elif target.suffix in {".yaml", ".yml"}:
        kind = "recipe"
    else:
        kind = "run" if any((target / name).exists() for name in RUN_FILES) else "checkpoint"
    unread = [option for option in given if option not in READ[kind]]
    if kind == "embeddings" and target is not None:
        unread.append(str(target))
    if kind in ("embeddings", "run"):
        unread.extend(overrides)
    if unread:
        raise XcompatError(f"{unread[0]} {UNREAD[kind]}")
    return kind


def judged_folders(
    old: Path, new: Path, new_own: Path | None, independent: Path | None, by_map: Path | None
) -> dict[str, Path | None]:
    """Return the folders by role; what a map is applied to are the new model's own embeddings, which nothing trained.

    Raises:
        XcompatError: the map is none, or own embeddings are given beside it.
    """
    if by_map is None:
        return {"old": old, "new_view": new, "new": new_own, "independent": independent}
    if new_own is not None:
        raise XcompatError("--map is applied to --new, the new model's own embeddings; leave --new-own out")
    find_model(by_map)
    return {"old": old, "new": new, "independent": independent or new}


def require_folders(folders: Mapping[str, Path | None], qrels: Path | None, output: Path) -> None:
    """Refuse folders that lack a file of embeddings or ids.

    Args:
        folders: by role, as :func:`~xcompat.training.evaluate_command.evaluate_embeddings` knows them.
        qrels: the judgements, if there are any.
        output: where the report goes.

    Raises:
        XcompatError: naming the file.
    """
    require_output(output)
    if qrels is not None:
        require_qrels(str(qrels))
    given = {role: folder for role, folder in folders.items() if folder is not None}
    for role, folder in given.items():
        if qrels is not None:
            require_files(folder, kinds_judged(role, folder))
        else:
            require_files(folder, ("image", "text") if any(map(has_texts, given.values())) else ("image",))
    if qrels is None and not any(map(has_texts, given.values())):
        require_labels(given["old"])


def kinds_judged(role: str, folder: Path) -> tuple[str, ...]:
    """Return what a folder holds beside judgements: of mapped queries there may be no passages."""
    has_passages = role != "new_view" or stored_at(folder / "text_embeds") is not None
    return ("query", "text") if has_passages else ("query",)


def has_texts(folder: Path) -> bool:
    """Return whether a folder has texts, or is none."""
    return stored_at(folder / "text_embeds") is not None or (folder / "text_ids.txt").exists() or not folder.is_dir()


def require_files(folder: Path, kinds: Sequence[str]) -> None:
    """Refuse a folder without the embeddings and ids of these kinds."""
    names = [f"{kind}_embeds.npy" for kind in kinds] + [f"{kind}_ids.txt" for kind in kinds]
    for name in names:
        place = stored_at(folder / f"{name.split('_')[0]}_embeds")
        if not (folder / name).is_file() and (place is None or not is_table(place)):
            raise XcompatError(f"{folder} lacks {name}; it must hold {', '.join(names)}")


def require_labels(folder: Path) -> Path:
    """Return the file that says which images belong together.

    Raises:
        XcompatError: there is none.
    """
    file = folder / LABELS
    if not file.is_file():
        raise XcompatError(
            f"{folder} holds images alone, and nothing says which of them belong together: add {LABELS} (one class a line, in "
            "the order of the rows), or texts in every folder (text_embeds.npy, text_ids.txt: the id of the image each describes)"
        )
    return file


def require_testable(folder: Path, data: Path | None, output: Path) -> None:
    """Refuse a folder without a checkpoint, data that are not there, and a place where something else is.

    Raises:
        XcompatError: naming what is missing.
    """
    if is_local(str(folder)) and not (folder.is_dir() and is_own(folder)):
        raise XcompatError(f"{folder} {NO_CHECKPOINT}")
    require_output(output)
    if data is None:
        raise XcompatError(f"name the images, with captions or classes, that {folder} is to be tested on with --data")
    local_files(str(data))


def require_output(output: Path) -> None:
    """Refuse to write a report where something else is, such as the report of a run.

    Raises:
        XcompatError: naming it.
    """
    require_report_place(output)
    if (output / EVALUATED).is_file():
        raise XcompatError(f"{output} holds the report of its own recipe, which this one would replace; choose another --output")
