"""Lists of templates, of pairs of them, and of subjects, as IJB-C's protocols have them (InsightFace's text files)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xcompat.core.errors import MissingPathError, XcompatError
from xcompat.core.paths import nearest_path
from xcompat.data.text_files import UNREADABLE

if TYPE_CHECKING:
    import pandas as pd


class Members(NamedTuple):
    """The images of templates.

    Args:
        names: N names of images; an image may be in several templates.
        templates_N: int64 ``(N,)`` ids of templates.
        media_N: int64 ``(N,)`` ids of media: frames of one video share theirs.
    """

    names: list[str]
    templates_N: NDArray[np.int64]
    media_N: NDArray[np.int64]


class TemplatePairs(NamedTuple):
    """Pairs of templates.

    Args:
        first_P: int64 ``(P,)`` ids of templates that are enrolled.
        second_P: int64 ``(P,)`` ids of templates that are compared with these.
        same_P: bool ``(P,)``, whether both are of one subject.
    """

    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]
    same_P: NDArray[np.bool_]


class TemplateSubjects(NamedTuple):
    """Whose templates are.

    Args:
        templates_T: int64 ``(T,)`` ids of templates.
        subjects_T: int64 ``(T,)`` ids of subjects.
    """

    templates_T: NDArray[np.int64]
    subjects_T: NDArray[np.int64]


def read_members(file: str | Path) -> Members:
    """Read which images make which templates: lines of image, template and medium, such as ``ijbc_face_tid_mid.txt``.

    Raises:
        XcompatError: the file is missing or no such list.
    """
    table = _read(file, r"\s+", None, ("image", "template", "medium"))
    return Members(table[0].astype(str).tolist(), *(_ids(table[column], file) for column in (1, 2)))


def read_template_pairs(file: str | Path) -> TemplatePairs:
    """Read pairs to verify: lines of two templates and 1 or 0, such as ``ijbc_template_pair_label.txt``.

    Raises:
        XcompatError: the file is missing or no such list, or all pairs are of one subject, or all of two.
    """
    table = _read(file, r"\s+", None, ("template", "template", "1 or 0"))
    first_P, second_P, same_P = (_ids(table[column], file) for column in range(3))
    if not np.isin(same_P, (0, 1)).all():
        raise XcompatError(f"{file}: the third number of a pair is 1 (one subject) or 0 (two), not {int(same_P.max())}")
    if len(np.unique(same_P)) < 2:
        raise XcompatError(f"{file} has pairs of {'one subject' if same_P[0] else 'two subjects'} alone; verification needs both")
    return TemplatePairs(first_P, second_P, same_P.astype(bool))


def read_template_subjects(files: list[str]) -> TemplateSubjects:
    """Read whose templates are, from tables with a header, such as ``ijbc_1N_gallery_G1.csv``: template, subject, and more.

    Args:
        files: tables that are put together.

    Raises:
        XcompatError: a file is missing or no such table.
    """
    tables = [_read(file, ",", 0, ("template", "subject")) for file in files]
    columns = ([_ids(table[column], file) for table, file in zip(tables, files, strict=True)] for column in (0, 1))
    return TemplateSubjects(*map(np.concatenate, columns))


class TemplateLists(NamedTuple):
    """The lists of a protocol, which fit each other.

    Args:
        members: the images of all templates.
        pairs: what is verified; None for nothing.
        gallery: what is searched for identification; None for nothing.
        probes: what is searched for.
    """

    members: Members
    pairs: TemplatePairs | None
    gallery: TemplateSubjects | None
    probes: TemplateSubjects | None


def read_template_lists(members: str, pairs: str | None, gallery: list[str], probes: str | None) -> TemplateLists:
    """Read the lists of a protocol.

    Args:
        members: file of :func:`read_members`.
        pairs: file of :func:`read_template_pairs`.
        gallery: files of :func:`read_template_subjects`.
        probes: such a file.

    Raises:
        XcompatError: a file is missing or no such list, or names a template that has no image.
    """
    made_of = read_members(members)
    verified = read_template_pairs(pairs) if pairs is not None else None
    searched = read_template_subjects(gallery) if gallery else None
    asked = read_template_subjects([probes]) if probes is not None else None
    if verified is not None and pairs is not None:
        _require_members(np.concatenate([verified.first_P, verified.second_P]), made_of, pairs, members)
    if searched is not None:
        _require_members(searched.templates_T, made_of, " and ".join(gallery), members)
    if asked is not None and probes is not None:
        _require_members(asked.templates_T, made_of, probes, members)
    return TemplateLists(made_of, verified, searched, asked)


def _require_members(wanted_T: NDArray[np.int64], members: Members, wanted_by: str, members_file: str) -> None:
    """Refuse a list that names templates without an image."""
    distinct_T = np.unique(wanted_T)
    if len(missing_T := np.setdiff1d(distinct_T, members.templates_N)):
        raise XcompatError(
            f"{wanted_by} names template {missing_T[0]}{_more(len(missing_T))}, of {len(distinct_T):,}, which has no image in "
            f"{members_file}; take both from one release of the protocol"
        )


def require_images(ids: list[str], members: Members, path: str, members_file: str) -> None:
    """Refuse templates of images that are not there.

    Args:
        ids: the images that there are.
        members: the images of all templates.
        path: where the images are, for the message.
        members_file: the file of ``members``, for the message.

    Raises:
        XcompatError: naming the first such image.
    """
    there = set(ids)
    if missing := [name for name in dict.fromkeys(members.names) if name not in there]:
        raise XcompatError(
            f"{members_file} names image {missing[0]!r}{_more(len(missing))}, which {path} lacks (it has {len(there):,} images, "
            f"such as {ids[0]!r}); names are relative to that folder"
        )


def _more(count: int) -> str:
    return f" and {count - 1:,} more" if count > 1 else ""


def _read(file: str | Path, separator: str, header: int | None, columns: tuple[str, ...]) -> pd.DataFrame:
    """Read the first columns of a table, which are called by their numbers."""
    import pandas as pd

    if not Path(file).is_file():
        raise MissingPathError(f"{file} does not exist; {nearest_path(str(file))}")
    what = f"lines of {', '.join(columns)}"
    try:
        # a template of many frames has few names: a column of ids is read as such, names as they are
        kinds = {0: str} if columns[0] == "image" else None
        table = pd.read_csv(file, sep=separator, header=None, skiprows=1 if header == 0 else 0, dtype=kinds, comment=None)
    except (ValueError, *UNREADABLE) as error:
        raise XcompatError(f"{file} cannot be read as {what} ({str(error).splitlines()[0][:200]})") from error
    if table.shape[1] < len(columns):
        raise XcompatError(f"{file} has {table.shape[1]} columns and should hold {what}")
    return table


def _ids(column: pd.Series, file: str | Path) -> NDArray[np.int64]:
    values = column.to_numpy()
    if values.dtype.kind not in "iu":
        bad = next((value for value in values.tolist() if not str(value).lstrip("-").isdecimal()), values[0])
        raise XcompatError(f"{file}: {str(bad)[:80]!r} is no id of a template, a medium or a subject, which are whole numbers")
    return values.astype(np.int64)
