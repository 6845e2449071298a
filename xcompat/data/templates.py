"""Lists of templates, template pairs and subjects of IJB-C's protocols, in InsightFace's text formats."""

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
    """Images of templates.

    Args:
        names: N image names; an image can be in several templates.
        templates_N: int64 ``(N,)`` template ids.
        media_N: int64 ``(N,)`` media ids; frames of a video share theirs.
    """

    names: list[str]
    templates_N: NDArray[np.int64]
    media_N: NDArray[np.int64]


class TemplatePairs(NamedTuple):
    """Pairs of templates.

    Args:
        first_P: int64 ``(P,)`` ids of enrolled templates.
        second_P: int64 ``(P,)`` ids of the templates compared with them.
        same_P: bool ``(P,)``, whether both show the same subject.
    """

    first_P: NDArray[np.int64]
    second_P: NDArray[np.int64]
    same_P: NDArray[np.bool_]


class TemplateSubjects(NamedTuple):
    """Subjects of templates.

    Args:
        templates_T: int64 ``(T,)`` template ids.
        subjects_T: int64 ``(T,)`` subject ids.
    """

    templates_T: NDArray[np.int64]
    subjects_T: NDArray[np.int64]


def read_members(file: str | Path) -> Members:
    """Read the images of templates: lines of image, template and medium (``ijbc_face_tid_mid.txt``).

    Raises:
        XcompatError: the file is missing or has another format.
    """
    table = _read(file, r"\s+", None, ("image", "template", "medium"))
    return Members(table[0].astype(str).tolist(), *(_ids(table[column], file) for column in (1, 2)))


def read_template_pairs(file: str | Path) -> TemplatePairs:
    """Read pairs to verify: lines of two templates and 1 or 0 (``ijbc_template_pair_label.txt``).

    Raises:
        XcompatError: the file is missing or has another format, or all labels are equal.
    """
    table = _read(file, r"\s+", None, ("template", "template", "1 or 0"))
    first_P, second_P, same_P = (_ids(table[column], file) for column in range(3))
    if not np.isin(same_P, (0, 1)).all():
        raise XcompatError(f"{file}: the third number of a pair must be 1 (one subject) or 0 (two), not {int(same_P.max())}")
    if len(np.unique(same_P)) < 2:
        raise XcompatError(f"{file} has only pairs of {'one subject' if same_P[0] else 'two subjects'}; verification needs both")
    return TemplatePairs(first_P, second_P, same_P.astype(bool))


def read_template_subjects(files: list[str]) -> TemplateSubjects:
    """Read subjects of templates from tables with a header (``ijbc_1N_gallery_G1.csv``): template, subject etc.

    Args:
        files: tables to concatenate.

    Raises:
        XcompatError: a file is missing or has another format.
    """
    tables = [_read(file, ",", 0, ("template", "subject")) for file in files]
    columns = ([_ids(table[column], file) for table, file in zip(tables, files, strict=True)] for column in (0, 1))
    return TemplateSubjects(*map(np.concatenate, columns))


class TemplateLists(NamedTuple):
    """Consistent lists of a protocol.

    Args:
        members: images of all templates.
        pairs: pairs to verify; None for no verification.
        gallery: gallery templates for identification; None for no identification.
        probes: query templates.
    """

    members: Members
    pairs: TemplatePairs | None
    gallery: TemplateSubjects | None
    probes: TemplateSubjects | None


def read_template_lists(members: str, pairs: str | None, gallery: list[str], probes: str | None) -> TemplateLists:
    """Read the lists of a protocol.

    Args:
        members: file for :func:`read_members`.
        pairs: file for :func:`read_template_pairs`.
        gallery: files for :func:`read_template_subjects`.
        probes: another such file.

    Raises:
        XcompatError: a file is missing or has another format, or names a template without image.
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
    distinct_T = np.unique(wanted_T)
    if len(missing_T := np.setdiff1d(distinct_T, members.templates_N)):
        raise XcompatError(
            f"{wanted_by} names template {missing_T[0]}{_more(len(missing_T))} (of {len(distinct_T):,}) without image in "
            f"{members_file}; choose files of one release of the protocol"
        )


def require_images(ids: list[str], members: Members, path: str, members_file: str) -> None:
    """Raise if images of templates are missing.

    Args:
        ids: available images.
        members: images of all templates.
        path: location of the images, for the message.
        members_file: file of ``members``, for the message.

    Raises:
        XcompatError: an image is missing; names the first missing image.
    """
    there = set(ids)
    if missing := [name for name in dict.fromkeys(members.names) if name not in there]:
        raise XcompatError(
            f"{members_file} names image {missing[0]!r}{_more(len(missing))}, which {path} lacks (it has {len(there):,} images, "
            f"e.g. {ids[0]!r}); names are relative to this folder"
        )


def _more(count: int) -> str:
    return f" and {count - 1:,} more" if count > 1 else ""


def _read(file: str | Path, separator: str, header: int | None, columns: tuple[str, ...]) -> pd.DataFrame:
    import pandas as pd

    if not Path(file).is_file():
        raise MissingPathError(f"{file} does not exist; {nearest_path(str(file))}")
    what = f"lines of {', '.join(columns)}"
    try:
        # image names stay strings, even if they look like numbers
        kinds = {0: str} if columns[0] == "image" else None
        table = pd.read_csv(file, sep=separator, header=None, skiprows=1 if header == 0 else 0, dtype=kinds, comment=None)
    except (ValueError, *UNREADABLE) as error:
        raise XcompatError(f"{file} cannot be read as {what} ({str(error).splitlines()[0][:200]})") from error
    if table.shape[1] < len(columns):
        raise XcompatError(f"{file} has {table.shape[1]} columns but needs {what}")
    return table


def _ids(column: pd.Series, file: str | Path) -> NDArray[np.int64]:
    values = column.to_numpy()
    if values.dtype.kind not in "iu":
        bad = next((value for value in values.tolist() if not str(value).lstrip("-").isdecimal()), values[0])
        raise XcompatError(f"{file}: invalid id {str(bad)[:80]!r}; ids of templates, media and subjects must be whole numbers")
    return values.astype(np.int64)
